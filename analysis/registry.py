"""Registry of tables and figures by name, and the results that several of them share.

`@output(NAME, ...)` above a function in `analysis.outputs` registers it as the maker of NAME. The
help, what an output needs, the chapters of the report and what `all` makes derive from this. Names
follow the papers (unified.fig2).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from typing import Literal, TypeVar

import pandas as pd

from analysis import names
from analysis.load.study import Study
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import Table
from analysis.stats import overlap, winners
from analysis.stats.comparison import Comparison, compare
from analysis.stats.ranking import Ranking, rankings
from analysis.stats.winners import winner_map
from moe_lab.errors import UserError, nearest


class Results:
    """A study, and results derived from it that several outputs need, each computed once."""

    def __init__(self, study: Study) -> None:
        self.study = study

    @cached_property
    def _models(self) -> list[Comparison]:
        study = self.study
        return compare(study.cells, study.results, study.samples, study.reader)

    @cached_property
    def measured(self) -> list[Comparison]:
        """Models with at least one result."""
        return [comparison for comparison in self._models if comparison.benchmarks_of]

    @cached_property
    def pruned(self) -> list[Comparison]:
        """Models with at least one pruned cell, evaluated or not: for outputs that do not need
        scores."""
        return [comparison for comparison in self._models if comparison.panels]

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Models with at least one pruned cell and one result."""
        return [comparison for comparison in self.measured if comparison.panels]

    @cached_property
    def rankings(self) -> list[Ranking]:
        """The rankings of all models, by scores."""
        return rankings(self.comparisons)

    @cached_property
    def winners(self) -> pd.DataFrame:
        """The winner map of all criteria."""
        return winner_map(self.comparisons)

    @cached_property
    def by_answer_loss(self) -> Results:
        """The same study with the loss on right answers in place of scores; lower is better."""
        return Results(winners.study_of_losses(self.study))

    @cached_property
    def baseline_winners(self) -> pd.DataFrame:
        """The winner map of the papers' five baselines; empty when none of them was run."""
        baselines = set(self.study.cells["method"]) & set(names.BASELINES)
        return winner_map(self.comparisons, names.BASELINES) if baselines else pd.DataFrame()

    @cached_property
    def overlaps(self) -> pd.DataFrame:
        """Overlap of every S(b, alpha, beta) across calibration sets."""
        return overlap.calibration_overlap(self.study.family)

    @cached_property
    def proxy(self) -> pd.DataFrame:
        """Overlap of proxy and exact damage."""
        return overlap.proxy_overlap(self.study.family, self.study.damage)


Item = Table | Figure
Make = Callable[[Results, str], Item | Iterable[Item | None] | None]
"""Makes the tables and figures of a study, given the name of the output; nothing, or None, when
there is no data."""
Builder = TypeVar("Builder", bound=Make)
MakeOfModel = Callable[[Results, Comparison, str], Item | Iterable[Item | None] | None]
"""The same for one model."""
Shown = Callable[[Study, Sequence[Item]], Sequence[Item]]

DEFAULT = "results of pruned models"


def everything(study: Study, items: Sequence[Item]) -> Sequence[Item]:
    """The page shows all tables and figures of the output."""
    return items


def figures(study: Study, items: Sequence[Item]) -> Sequence[Item]:
    """The page shows the figures alone."""
    return [item for item in items if isinstance(item, Figure)]


@dataclass(frozen=True)
class Output:
    """A named table or figure, or several that belong together."""

    name: str
    make: Make
    needs: str
    """What a run must include for this output to have data; shown to the user when there is
    none."""
    chapter: str
    """The chapter of the report that shows it (see `analysis.report`); "" when only its files are
    written."""
    shown: Shown
    """Which of its tables and figures the chapter shows."""
    filters: str
    """Columns by which the page filters its tables, separated by |. With a leading star, the page
    shows only the first block at first."""
    also: tuple[str, ...]
    """Names of other published tables and figures that this output contains, as it has all models
    of a study."""

    @property
    def title(self) -> str:
        """Title of the output: the first line of its function's docstring."""
        return (self.make.__doc__ or "").strip().partition("\n")[0]

    def items(self, results: Results) -> list[Item]:
        """Make its tables and figures; a table without rows is left out."""
        with style.look():
            return with_content(_listed(self.make(results, self.name)))


def with_content(items: Iterable[Item | None]) -> list[Item]:
    """Leave out tables without rows, and None."""
    return [
        item for item in items if isinstance(item, Figure) or (item is not None and len(item.frame))
    ]


def _listed(items: Item | Iterable[Item | None] | None) -> Iterable[Item | None]:
    return [items] if items is None or isinstance(items, Table | Figure) else items


def per_model(
    models: Literal["comparisons", "pruned"] = "comparisons",
) -> Callable[[MakeOfModel], Callable[[Results, str], list[Item]]]:
    """Call the decorated function once for each model in `Results.comparisons` or `Results.pruned`.

    It gets the model's comparison and the name of its item: NAME, or NAME.MODEL when there are
    several models.
    """

    def of_each(make: MakeOfModel) -> Callable[[Results, str], list[Item]]:
        @wraps(make)
        def make_all(results: Results, name: str) -> list[Item]:
            comparisons: list[Comparison] = getattr(results, models)
            items: list[Item | None] = []
            for comparison in comparisons:
                name_of_item = f"{name}.{comparison.model}" if len(comparisons) > 1 else name
                items += _listed(make(results, comparison, name_of_item))
            return [item for item in items if item is not None]

        return make_all

    return of_each


REGISTERED: dict[str, Output] = {}
"""Outputs of the modules imported so far; `outputs` imports all of them."""


def output(
    name: str,
    *,
    chapter: str = "",
    shown: Shown = everything,
    filters: str = "",
    needs: str = DEFAULT,
    also: Sequence[str] = (),
) -> Callable[[Builder], Builder]:
    """Register the decorated function as the maker of `name`. The other arguments: see `Output`."""

    def register(make: Builder) -> Builder:
        REGISTERED[name] = Output(name, make, needs, chapter, shown, filters, tuple(also))
        return make

    return register


def outputs() -> Mapping[str, Output]:
    """All outputs by name, ordered by module name. `gaps` is last, because making the others can
    add gaps."""
    _import_modules()
    return dict(sorted(REGISTERED.items(), key=_sort_key))


@cache
def _import_modules() -> None:
    """Import all modules of analysis.outputs, which register their outputs; cached, as every
    look-up calls this."""
    package = importlib.import_module("analysis.outputs")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"analysis.outputs.{module.name}")


def _sort_key(named: tuple[str, Output]) -> tuple[bool, str]:
    name, output = named
    return name == "gaps", output.make.__module__


def also() -> dict[str, str]:
    """Published table or figure -> the output with another name that contains it."""
    return {name: output.name for output in outputs().values() for name in output.also}


def find(name: str) -> Output:
    """The output that contains the table or figure `name`. Raises UserError for an unknown name."""
    known = outputs()
    aliases = also()
    match = known.get(aliases.get(name, name))
    if match is None:
        close = nearest(name, [*known, *aliases, "all", "report"])
        hint = f": did you mean {close}?" if close else ""
        raise UserError(f"name={name} is unknown{hint} (`python -m analysis help` lists all names)")
    return match
