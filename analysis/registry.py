"""Registry of tables and figures by name, and the results that several tables and figures share.

`@output(NAME, ...)` above a function in moe_lab.analysis.outputs registers the function that makes
NAME. Names follow the papers (unified.fig2).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, wraps
from typing import Any, TypeVar

import pandas as pd

from moe_lab.analysis.load.study import Study
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import Table
from moe_lab.analysis.stats import overlap
from moe_lab.analysis.stats.comparison import Comparison, compare
from moe_lab.analysis.stats.derived_studies import study_by_answer_loss, study_by_domain
from moe_lab.analysis.stats.ranking import Ranking, rankings, scored_plans
from moe_lab.analysis.stats.winners import winner_map
from moe_lab.errors import UserError, nearest


class Results:
    """A study, and results derived from it that several outputs need."""

    def __init__(self, study: Study) -> None:
        self.study = study

    @cached_property
    def _all_comparisons(self) -> list[Comparison]:
        """One comparison for each model."""
        return compare(self.study)

    @cached_property
    def measured(self) -> list[Comparison]:
        """The comparisons of models with at least one result."""
        return [comparison for comparison in self._all_comparisons if comparison.benchmarks_of]

    @cached_property
    def pruned(self) -> list[Comparison]:
        """The comparisons of models with at least one pruned cell."""
        return [comparison for comparison in self._all_comparisons if comparison.panels]

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """The comparisons of models with at least one pruned cell and one result."""
        return [comparison for comparison in self.measured if comparison.panels]

    @cached_property
    def rankings(self) -> list[Ranking]:
        """Rankings of methods by their scores: one for each model, ratio and gate."""
        return rankings(self.comparisons)

    @cached_property
    def scored_plans(self) -> pd.DataFrame:
        """The scores of all ranked plans, see `stats.ranking.scored_plans`."""
        return scored_plans(self.rankings)

    @cached_property
    def winners(self) -> pd.DataFrame:
        """The best methods, one row per model, ratio, gate, calibration set and displayed column.
        Columns as in `winner_map`."""
        return winner_map(self.comparisons)

    @cached_property
    def by_answer_loss(self) -> Results:
        """The results when each score is replaced by the loss on the right answers."""
        return Results(study_by_answer_loss(self.study))

    @cached_property
    def by_domain(self) -> Results:
        """The results when plans that differ in the calibration set alone are joint cells, see
        `study_by_domain`."""
        study = study_by_domain(self.study)
        return self if study is self.study else Results(study)

    @cached_property
    def overlaps(self) -> pd.DataFrame:
        """How far calibration sets agree on the experts with the lowest scores. Columns as in
        `overlap.calibration_overlap`."""
        return overlap.calibration_overlap(self.study.family)


Item = Table | Figure
Maker = Callable[[Results], Item | Iterable[Item | None] | None]
"""Function that returns the tables and figures of an output; None when there is no data."""
MakerT = TypeVar("MakerT", bound=Maker)
MakerOfModel = Callable[[Results, Comparison], Figure | None]
"""Function (results, comparison of one model) that returns the figure of this model."""


@dataclass(frozen=True)
class Output:
    """A named table or figure, or several that belong together."""

    name: str
    make: Maker
    needs: str = "results of pruned models"
    """What a run must include for this output to have data."""
    chapter: str = ""
    """The chapter of the report that shows the output; "" for an output that is made by name
    only."""
    aliases: tuple[str, ...] = ()
    """Names of other published tables and figures that this output contains."""
    by_domain: bool = False
    """Whether `make` gets `Results.by_domain`."""

    @property
    def title(self) -> str:
        """The first line of the docstring of `make`."""
        return (self.make.__doc__ or "").strip().partition("\n")[0]

    def items(self, results: Results) -> list[Item]:
        """Make the tables and figures of the output, without empty tables. Their names begin with
        that of the output; what `make` calls them follows."""
        items = self.make(results.by_domain if self.by_domain else results)
        if items is None or isinstance(items, Table | Figure):
            items = [items]
        return [
            replace(item, name=self.name + item.name)
            for item in items
            if isinstance(item, Figure) or (item is not None and len(item.frame))
        ]


def per_model(make: MakerOfModel) -> Callable[[Results], list[Figure]]:
    """Decorator that turns a MakerOfModel into a Maker for all models with a pruned cell. It adds
    the model to titles, to rows and, with several models, to names."""

    @wraps(make)
    def make_all(results: Results) -> list[Figure]:
        figures = []
        for comparison in results.pruned:
            figure = make(results, comparison)
            if figure is not None:
                model = comparison.model
                suffix = f".{model}" if len(results.pruned) > 1 else ""
                title = f"{figure.title}: {model}"
                rows = figure.rows.assign(Model=model)
                figures.append(replace(figure, name=suffix, title=title, rows=rows))
        return figures

    return make_all


REGISTERED: dict[str, Output] = {}
"""Outputs of the modules imported so far; `outputs` imports all of them."""


def output(name: str, **fields: Any) -> Callable[[MakerT], MakerT]:
    """Decorator that registers a function as the Maker of an output. fields: of `Output`."""

    def register(make: MakerT) -> MakerT:
        REGISTERED[name] = Output(name, make, **fields)
        return make

    return register


def outputs() -> Mapping[str, Output]:
    """Name -> output, in the order of their modules' names."""
    _import_modules()
    return dict(sorted(REGISTERED.items(), key=lambda item: item[1].make.__module__))


@cache
def _import_modules() -> None:
    """Import all modules of analysis.outputs, which register their outputs."""
    package = importlib.import_module("moe_lab.analysis.outputs")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"moe_lab.analysis.outputs.{module.name}")


def aliases() -> dict[str, str]:
    """Alias (see `Output.aliases`) -> name of the output."""
    return {name: output.name for output in outputs().values() for name in output.aliases}


def find(name: str) -> Output:
    """The output with this name or alias. Raises UserError for an unknown name."""
    output_of_name = outputs()
    name_of_alias = aliases()
    output = output_of_name.get(name_of_alias.get(name, name))
    if output is None:
        # `all` and `report` are no outputs, but the command line accepts them as names
        suggestion = nearest(name, [*output_of_name, *name_of_alias, "all", "report"])
        hint = f": did you mean {suggestion}?" if suggestion else ""
        raise UserError(f"name={name} is unknown{hint} (`moe-lab report help` lists all names)")
    return output
