"""Every table and figure by name, and what each is made from. Names follow the papers: unified.fig2, unified.table1."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import pandas as pd

from analysis import attribution_catalogue, background_outputs, budget_outputs, diagnostics, names, view_outputs
from analysis.items import ALSO
from analysis.load.study import Study
from analysis.made import Output, of_model, unless_empty
from analysis.needs import unknown_name
from analysis.outputs import (
    answer_losses,
    averages,
    captions,
    coverage,
    models,
    overlap,
    pareto,
    provenance,
    ranks,
    scores,
    search,
    search_settings,
    timing,
    winners,
)
from analysis.render import style, table
from analysis.render.style import Figure
from analysis.stats import overlap as overlaps
from analysis.stats.comparison import Comparison, compare
from analysis.stats.winners import winner_map
from moe_lab.errors import DISK_FULL

T = TypeVar("T")
UNWRITABLE = (*DISK_FULL, errno.EROFS, errno.EACCES)
"""Error numbers of a folder that takes no file."""
FAILED = "failed"
"""Folder beside the tables and figures: NAME.log has the traceback of what could not be made."""


class Material:
    """A study and what several outputs need of it, computed once."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.attempted: dict[str, Exception | None] = {}
        """What was attempted -> why it failed, if it did."""

    def attempt(self, name: str, make: Callable[[], T]) -> T | None:
        """What `make` gives. Where it raises: None, and a gap with the name and the reason. A disk that takes nothing
        is no matter of one output, and is raised."""
        self.attempted.setdefault(name, None)
        try:
            return make()
        except Exception as error:  # a bug in one output must not take the others with it
            if isinstance(error, OSError) and error.errno in UNWRITABLE:
                raise
            self.attempted[name] = error
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.study.reader.gap(f"could not be made ({reason}), traceback in {FAILED}/{name}.log", name)
            return None

    @property
    def failed(self) -> list[str]:
        """What could not be made."""
        return [name for name, error in self.attempted.items() if error]

    @cached_property
    def measured(self) -> list[Comparison]:
        """Models with at least one result."""
        return [found for found in compare(self.study) if found.parts]

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Models with at least one pruned cell and one result."""
        return [found for found in self.measured if found.panels]

    @cached_property
    def winners(self) -> pd.DataFrame:
        """The winner map of all criteria."""
        return winner_map(self.comparisons)

    @cached_property
    def by_answer_loss(self) -> Material:
        """The same study with the loss on right answers in place of scores; lower is better."""
        return Material(answer_losses.study_of_losses(self.study))

    @cached_property
    def decided_pairs(self) -> pd.DataFrame:
        """Pairs of criteria that are told apart, by scores and by answer losses: see `answer_losses.decided_pairs`."""
        return answer_losses.decided_pairs(self.comparisons, self.by_answer_loss.comparisons)

    @cached_property
    def baseline_winners(self) -> pd.DataFrame:
        """The winner map of the papers' five baselines; empty when none of them was run."""
        known = set(self.study.cells["method"]) & set(names.BASELINES)
        return winner_map(self.comparisons, names.BASELINES) if known else pd.DataFrame()

    @cached_property
    def overlaps(self) -> pd.DataFrame:
        """Overlap over calibration sets of every S(b, alpha, beta)."""
        return overlaps.calibration_overlap(self.study.family)

    @cached_property
    def proxy(self) -> pd.DataFrame:
        """Overlap of proxy and exact damage."""
        return overlaps.proxy_overlap(self.study.family, self.study.damage)


def _winner_outputs(material: Material, found: pd.DataFrame, name: str, title: str) -> list[Output]:
    if found.empty:
        return []
    return [
        winners.winner_figure(found, name=name, title=title),
        winners.winner_table(material.study, found, name=name),
    ]


def _baseline_map(material: Material) -> list[Output]:
    return _winner_outputs(
        material, material.baseline_winners, "unified.fig2", "Who wins where, among the five baselines"
    )


def _full_map(material: Material) -> list[Output]:
    return _winner_outputs(material, material.winners, "winners", "Who wins where, among all criteria")


def _loss_map(material: Material) -> list[Output]:
    title = "Who has the lowest loss on right answers, among all criteria"
    found = _winner_outputs(material.by_answer_loss, material.by_answer_loss.winners, "winners.loss", title)
    return [replace(output, caption=f"{answer_losses.CAPTION} {output.caption}") for output in found]


def _loss_ranks(material: Material) -> list[Output]:
    by_loss = material.by_answer_loss
    return [answer_losses.loss_table(by_loss.study, by_loss.comparisons)] if by_loss.comparisons else []


def _pairs(material: Material) -> list[Output]:
    return unless_empty(answer_losses.pair_table(material.study, material.decided_pairs))


def _of_pass(material: Material, figure: Figure) -> Figure:
    """The figure, whose caption says with which gate, seed and texts the passes behind it were made."""
    return replace(figure, caption=f"{figure.caption} Made with {captions.of_pass(material.study)}")


def _proxy(material: Material) -> list[Output]:
    if material.proxy.empty:
        return []
    name = "unified.fig3"
    return [
        _of_pass(material, overlap.proxy_figure(material.proxy, name=name)),
        overlap.proxy_table(material.study, material.proxy, name=name),
    ]


def _pooled_overlap(material: Material) -> list[Output]:
    if material.overlaps.empty:
        return []
    name = "unified.fig4"
    return [
        _of_pass(material, overlap.pooled_figure(material.overlaps, name=name)),
        overlap.overlap_table(material.study, material.overlaps, name=name),
    ]


def _overlap_per_model(material: Material) -> list[Output]:
    if material.overlaps.empty:
        return []
    return [_of_pass(material, overlap.per_model_figure(material.overlaps, name="unified.fig5"))]


def _ranks(material: Material) -> list[Output]:
    return [ranks.rank_table(material.study, material.comparisons)] if material.comparisons else []


def _published_ranks(material: Material) -> list[Output]:
    if not material.comparisons or not set(material.study.cells["method"]) & set(names.RANKED):
        return []
    name, criteria = "unified.table1", names.RANKED
    return [ranks.rank_table(material.study, material.comparisons, name=name, criteria=criteria)]


def _task_specific(material: Material) -> list[Output]:
    return unless_empty(scores.task_specific_table(material.study, material.comparisons))


def _published_task_specific(material: Material) -> list[Output]:
    name, criteria = "unified.table2", names.TASK_SPECIFIC
    return unless_empty(scores.task_specific_table(material.study, material.comparisons, name=name, criteria=criteria))


def _memory(material: Material) -> list[Output]:
    return unless_empty(models.memory_table(material.study, name="unified.table3"))


def _benchmarks(material: Material) -> list[Output]:
    if not material.measured:
        return []
    return [scores.benchmark_table(material.study, material.measured, name="unified.table5")]


def _pareto(material: Material) -> list[Output]:
    if material.study.costs.empty or not material.comparisons:
        return []
    found = [(each, pareto.against_cost(material.study, each)) for each in material.comparisons]
    drawn = [
        pareto.pareto_figure(cells, model=comparison.model, name=of_model(material.comparisons, "pareto", comparison))
        for comparison, cells in found
        if cells.loc[cells["method"] != "none", "avg"].notna().any()
    ]
    return [*drawn, pareto.pareto_table(material.study, material.comparisons)]


def _densities(material: Material, figure: Callable[..., Figure | None], name: str) -> list[Output]:
    made = [
        figure(
            search.densities(material.study, comparison.model),
            model=comparison.model,
            name=of_model(material.comparisons, name, comparison),
        )
        for comparison in material.comparisons
    ]
    return [drawn for drawn in made if drawn is not None]


def _allocations(material: Material) -> list[Output]:
    return _densities(material, search.allocations_figure, "evoesap.fig1")


def _searched_densities(material: Material) -> list[Output]:
    return _densities(material, search.criteria_figure, "evoesap.fig3")


def _searches(material: Material) -> list[Output]:
    made = [
        search.history_figure(
            material.study, comparison.model, name=of_model(material.comparisons, "evoesap.search", comparison)
        )
        for comparison in material.comparisons
    ]
    return [
        *(drawn for drawn in made if drawn is not None),
        *unless_empty(search.search_table(material.study)),
    ]


def _averages(material: Material) -> list[Output]:
    return [
        averages.averages_figure(comparison, name=of_model(material.comparisons, "averages", comparison))
        for comparison in material.comparisons
    ]


def _radar(material: Material) -> list[Output]:
    made = [
        averages.radar_figure(comparison, name=of_model(material.comparisons, "aimer.fig3", comparison))
        for comparison in material.comparisons
    ]
    return [figure for figure in made if figure is not None]


def _coverage(material: Material) -> list[Output]:
    if material.study.coverage.empty:
        return []
    figure = coverage.coverage_figure(material.study.coverage, name="coverage")
    return [_of_pass(material, figure), coverage.coverage_table(material.study)]


def _artefacts(material: Material) -> list[Output]:
    return [provenance.artefact_table(material.study)]


def _gaps(material: Material) -> list[Output]:
    return unless_empty(provenance.gap_table(material.study))


def _of_study(function: Callable[[Study, list[Comparison]], list[Output]]) -> Callable[[Material], list[Output]]:
    return lambda material: function(material.study, material.comparisons)


CATALOGUE: Mapping[str, Callable[[Material], list[Output]]] = {
    "winners": _full_map,
    "winners.loss": _loss_map,
    "unified.fig2": _baseline_map,
    "averages": _averages,
    "pareto": _pareto,
    "ranks": _ranks,
    "ranks.loss": _loss_ranks,
    "pairs": _pairs,
    "aimer.fig3": _radar,
    "unified.table1": _published_ranks,
    "task_specific": _task_specific,
    "unified.table2": _published_task_specific,
    "unified.table5": _benchmarks,
    "unified.fig3": _proxy,
    "unified.fig4": _pooled_overlap,
    "unified.fig5": _overlap_per_model,
    "evoesap.fig1": _allocations,
    "evoesap.fig3": _searched_densities,
    "evoesap.search": _searches,
    "coverage": _coverage,
    "unified.table3": _memory,
    **{
        name: _of_study(function)
        for outputs in (
            budget_outputs.OUTPUTS,
            diagnostics.OUTPUTS,
            attribution_catalogue.OUTPUTS,
            background_outputs.OUTPUTS,
            view_outputs.OUTPUTS,
            search_settings.OUTPUTS,
            timing.OUTPUTS,
        )
        for name, function in outputs.items()
    },
    "artefacts": _artefacts,
    "gaps": _gaps,
}
"""Name -> what makes its tables and figures; an empty list when the study has no data for them."""


def make(wanted: Iterable[str], material: Material) -> dict[str, list[Output]]:
    """The named outputs, each made once. UserError for an unknown name."""
    made: dict[str, list[Output]] = {}
    for name in dict.fromkeys(ALSO.get(each, each) for each in wanted):
        if name not in CATALOGUE:
            raise unknown_name(name, CATALOGUE)
        made[name] = CATALOGUE[name](material)
    return made


def publish(wanted: Iterable[str], material: Material, out: Path) -> tuple[dict[str, list[Output]], list[Path]]:
    """Make the named outputs and write their files into `out`: name -> those that were written, and all files.

    One that raises while it is made or written is a gap of the study, and the others go on.
    """
    made: dict[str, list[Output]] = {}
    written: list[Path] = []
    for name in dict.fromkeys(ALSO.get(each, each) for each in wanted):
        made[name] = []
        for output in material.attempt(name, partial(CATALOGUE[name], material)) or []:
            files = material.attempt(output.name, partial(write, [output], out)) or []
            made[name] += [output] if files else []
            written += files
    return made, written


def log_failures(material: Material, out: Path) -> None:
    """Write OUT/failed/NAME.log for what could not be made, and remove that of what could be made this time."""
    for name, error in material.attempted.items():
        log = out / FAILED / f"{name}.log"
        if error is None:
            log.unlink(missing_ok=True)
        else:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")


def write(outputs: Iterable[Output], out: Path) -> list[Path]:
    """Write tables into OUT/tables and figures into OUT/figures."""
    written: list[Path] = []
    for output in outputs:
        if isinstance(output, Figure):
            written += style.write(output, out / "figures")
        else:
            written += table.write(output, out / "tables")
    return written
