"""Tables and figures by name, and what several of them are made from.

`@output(NAME, ...)` above a function of `analysis.outputs` registers what makes NAME. Everything else derives from it:
the help, what an output needs, the chapters of the report and what `all` makes. Names follow the papers (unified.fig2).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from typing import Any, Literal, TypeVar

import pandas as pd

from analysis import names
from analysis.load.study import Study
from analysis.render import style
from analysis.render.style import Figure
from analysis.render.table import Table
from analysis.stats import overlap, winners
from analysis.stats.comparison import Comparison, compare
from analysis.stats.winners import winner_map
from moe_lab.errors import UserError, nearest


class Results:
    """A study and what several outputs need of it, computed once."""

    def __init__(self, study: Study) -> None:
        self.study = study

    @cached_property
    def _models(self) -> list[Comparison]:
        study = self.study
        return compare(study.cells, study.results, study.samples, study.reader)

    @cached_property
    def measured(self) -> list[Comparison]:
        """Models with at least one result."""
        return [comparison for comparison in self._models if comparison.parts]

    @cached_property
    def pruned(self) -> list[Comparison]:
        """Models with at least one pruned cell, evaluated or not: for what is made without scores."""
        return [comparison for comparison in self._models if comparison.panels]

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Models with at least one pruned cell and one result."""
        return [comparison for comparison in self.measured if comparison.panels]

    @cached_property
    def winners(self) -> pd.DataFrame:
        """The winner map of all criteria."""
        return winner_map(self.comparisons)

    @cached_property
    def by_answer_loss(self) -> Results:
        """The same study with the loss on right answers in place of scores; lower is better."""
        return Results(winners.study_of_losses(self.study))

    @cached_property
    def decided_pairs(self) -> pd.DataFrame:
        """Pairs of criteria that are told apart, by scores and by answer losses: see `winners.decided_pairs`."""
        return winners.decided_pairs(self.comparisons, self.by_answer_loss.comparisons)

    @cached_property
    def baseline_winners(self) -> pd.DataFrame:
        """The winner map of the papers' five baselines; empty when none of them was run."""
        baselines = set(self.study.cells["method"]) & set(names.BASELINES)
        return winner_map(self.comparisons, names.BASELINES) if baselines else pd.DataFrame()

    @cached_property
    def overlaps(self) -> pd.DataFrame:
        """Overlap over calibration sets of every S(b, alpha, beta)."""
        return overlap.calibration_overlap(self.study.family)

    @cached_property
    def proxy(self) -> pd.DataFrame:
        """Overlap of proxy and exact damage."""
        return overlap.proxy_overlap(self.study.family, self.study.damage)


Item = Table | Figure
Make = Callable[[Results, str], Item | Iterable[Item | None] | None]
"""Makes the tables and figures of a study, given the name of the output; nothing, or None, where there is no data."""
Builder = TypeVar("Builder", bound=Make)
MakeOfModel = Callable[[Results, Comparison, str], Item | Iterable[Item | None] | None]
"""The same for one model."""
Shown = Callable[[Study, Sequence[Item]], Sequence[Item]]

DEFAULT = "results of pruned models"


def everything(study: Study, items: Sequence[Item]) -> Sequence[Item]:
    """The page shows all tables and figures of the output."""
    return items


def tables(study: Study, items: Sequence[Item]) -> Sequence[Item]:
    """The page shows the tables alone."""
    return [item for item in items if isinstance(item, Table)]


def figures(study: Study, items: Sequence[Item]) -> Sequence[Item]:
    """The page shows the figures alone."""
    return [item for item in items if isinstance(item, Figure)]


@dataclass(frozen=True)
class Output:
    """A named table or figure, or several that belong together."""

    name: str
    make: Make
    needs: str
    """What a run must have had for it to have numbers: said when it has none."""
    chapter: str
    """The chapter of the report that shows it (see `analysis.report`); "" where only its files are written."""
    shown: Shown
    """Which of its tables and figures the chapter shows."""
    filters: str
    """Columns by which the page filters its tables, with | between; the first block alone is shown at first when it
    starts with a star."""
    also: tuple[str, ...]
    """Published tables and figures that have the same numbers here: all models of a study stand in one table."""

    @property
    def title(self) -> str:
        """What it shows: the first line of its function's docstring."""
        return (self.make.__doc__ or "").strip().partition("\n")[0]

    def items(self, results: Results) -> list[Item]:
        """Its tables and figures; a table without a row is left out."""
        with style.look():
            return with_content(_listed(self.make(results, self.name)))


def with_content(items: Iterable[Item | None]) -> list[Item]:
    """Figures, and tables that have a row."""
    return [item for item in items if isinstance(item, Figure) or (item is not None and len(item.frame))]


def _listed(items: Item | Iterable[Item | None] | None) -> Iterable[Item | None]:
    return [items] if items is None or isinstance(items, Table | Figure) else items


def per_model(
    models: Literal["comparisons", "pruned"] = "comparisons",
) -> Callable[[MakeOfModel], Callable[[Results, str], list[Item]]]:
    """Make the items of each model, those that `Results` has under `models`.

    The function below is given the model, and the output's name: NAME, or NAME.MODEL where there are several models.
    """

    def of_each(make: MakeOfModel) -> Callable[[Results, str], list[Item]]:
        @wraps(make)
        def make_all(results: Results, name: str) -> list[Item]:
            chosen: list[Comparison] = getattr(results, models)
            items: list[Item | None] = []
            for comparison in chosen:
                own = f"{name}.{comparison.model}" if len(chosen) > 1 else name
                items += _listed(make(results, comparison, own))
            return [item for item in items if item is not None]

        return make_all

    return of_each


REGISTERED: dict[str, Output] = {}
"""What the modules imported so far register; `outputs` imports all of them."""


def output(
    name: str,
    *,
    chapter: str = "",
    shown: Shown = everything,
    filters: str = "",
    needs: str = DEFAULT,
    also: Sequence[str] = (),
) -> Callable[[Builder], Builder]:
    """Register the function below as what makes `name`. The other arguments: see `Output`."""

    def register(make: Builder) -> Builder:
        REGISTERED[name] = Output(name, make, needs, chapter, shown, filters, tuple(also))
        return make

    return register


PARTS: dict[str, list[Callable[[Results], Iterable[Any]]]] = {}
"""What the report shows besides tables and figures, as the modules imported so far register it."""


def part(name: str) -> Callable[[Callable[[Results], Iterable[Any]]], Callable[[Results], Iterable[Any]]]:
    """Register the function below as one that makes a part of the report's page; several stand in module order.

    name: `text.headline` for the findings at its head, each a word on its subject and a sentence; `text.CHAPTER` for a
    chapter's sentences; `views.CHAPTER` for its interactive maps.
    """

    def register(make: Callable[[Results], Iterable[Any]]) -> Callable[[Results], Iterable[Any]]:
        PARTS.setdefault(name, []).append(make)
        return make

    return register


def parts(name: str, results: Results) -> list[Any]:
    """What the modules of `analysis.outputs` make for this part of the report's page."""
    _import_modules()
    makers = sorted(PARTS.get(name, ()), key=lambda make: make.__module__)
    return [item for make in makers for item in make(results)]


def outputs() -> Mapping[str, Output]:
    """Every output by name: those of one module stand together, modules in the order of their names; gaps, which the
    others add to, are last."""
    _import_modules()
    return dict(sorted(REGISTERED.items(), key=_place))


@cache
def _import_modules() -> None:
    """Let every module of analysis.outputs register what it makes; looked for once, as each name asks for it."""
    package = importlib.import_module("analysis.outputs")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"analysis.outputs.{module.name}")


def _place(named: tuple[str, Output]) -> tuple[bool, str]:
    name, output = named
    return name == "gaps", output.make.__module__


def also() -> dict[str, str]:
    """Published table or figure -> the output that has its numbers too."""
    return {name: output.name for output in outputs().values() for name in output.also}


def find(name: str) -> Output:
    """The output that has the numbers of `name`. UserError for an unknown name."""
    known, others = outputs(), also()
    found = known.get(others.get(name, name))
    if found is None:
        close = nearest(name, [*known, *others, "all", "report", "diff"])
        hint = f": did you mean {close}?" if close else ""
        raise UserError(f"name={name} is unknown{hint} (`python -m analysis help` lists all names)")
    return found


def make(wanted: Iterable[str], results: Results) -> dict[str, list[Item]]:
    """The named outputs, each made once. UserError for an unknown name."""
    return {one.name: one.items(results) for one in dict.fromkeys(map(find, wanted))}
