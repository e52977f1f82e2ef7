"""Sentences of the report on the best criteria and plans, and on the effects of the calibration set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis import names
from analysis.load.reader import groups, records
from analysis.load.settings import removed
from analysis.load.study import Study
from analysis.names import capitalised
from analysis.outputs.coverage import coverage_summary
from analysis.outputs.winners import competitor, where_pruned, who_won, winner_views
from analysis.registry import Results, part
from analysis.stats import overlap
from analysis.stats.comparison import Comparison, Panel
from analysis.stats.winners import LEVEL, MEAN


@part("text.headline")
def headline(results: Results) -> list[tuple[str, str]]:
    """Findings on winners, on pairs of criteria that differ, and on the best plan of each model.

    The modules claims and recovery add their own findings."""
    study, found = results.study, results.winners
    pruned = found[found["ratio"] > 0] if len(found) else found
    lines = [("Winners", sentence) for sentence in (who_won(pruned, removed(study.cells)) if len(pruned) else [])]
    lines += [("Verdicts", sentence) for sentence in pair_finding(results.decided_pairs)]
    for comparison in results.comparisons:
        lines += [("Best average", sentence) for sentence in best_plan(comparison)]
    return lines


@part("text.task")
def task_text(results: Results) -> list[str]:
    """Effects of task-specific calibration on each model."""
    return [sentence for one in results.comparisons for sentence in calibration_effect(one)]


@part("text.overlap")
def overlap_text(results: Results) -> list[str]:
    """Dependence of the experts to prune on the calibration set."""
    return overlap_finding(results.overlaps)


@part("text.coverage")
def coverage_text(results: Results) -> list[str]:
    """Experts without a token."""
    return coverage_finding(results.study)


part("views.winners")(winner_views)


def pair_finding(pairs: pd.DataFrame) -> list[str]:
    """A sentence that counts the pairs of criteria whose means differ significantly, by score and by loss."""
    means = pairs[pairs["column"] == MEAN]
    if means.empty or means["loss"].isna().all():
        return []
    row = means.sum(numeric_only=True)
    return [
        f"Of {row['pairs']:.0f} pairs of criteria with one model and calibration set, {row['score']:.0f} are told "
        f"apart by their average score and {row['loss']:.0f} by their mean loss on right answers; {row['both']:.0f} by "
        f"both alike, {row['opposite']:.0f} by both with opposite signs."
    ]


def best_plan(comparison: Comparison) -> list[str]:
    """A sentence per ratio: the plan with the best Avg, and its differences to the unpruned model and the runner-up."""
    groups: dict[tuple[float, str, int], list[Panel]] = {}
    for panel in comparison.panels:
        if panel.ratio > 0:
            groups.setdefault(panel.settings, []).append(panel)
    return [sentence for panels in groups.values() if (sentence := _best_plan(comparison, panels))]


def _best_plan(comparison: Comparison, panels: Sequence[Panel]) -> str | None:
    target = panels[0].averaged(comparison)
    by_cell = {cell: (name, panel) for panel in panels for name, cell in panel.cells.items()}
    scores = comparison.score(target)
    averages = scores[list(by_cell)].dropna().sort_values(ascending=False, kind="stable")
    if averages.empty or len({panel.columns(comparison) for panel in panels}) > 1:
        return None
    cell = int(averages.index[0])
    name, panel = by_cell[cell]
    data = (
        ""
        if comparison.cells["calibration"][cell] == "none"
        else f", calibrated on {names.calibration(panel.calibration).lower()}"
    )
    sentence = (
        f"{where_pruned(panel.pruned, removed(comparison.cells), comparison.model)}, the best average is "
        f"{averages.iloc[0]:.3f}, by {names.method(name)}{data}"
    )
    full = comparison.unpruned
    if full is not None and not np.isnan(scores[full]):
        low, high = comparison.lead(target, cell, full)
        sentence += f": {names.share(averages.iloc[0] / scores[full])} of the unpruned model's {scores[full]:.3f}"
        change = names.signed(comparison.difference(target, cell, full))
        sentence += f" (difference {change}, 95 % interval {names.signed(low)} to {names.signed(high)})"
    return sentence + "." + _runner_up(comparison, by_cell, averages, target)


def _runner_up(
    comparison: Comparison, by_cell: dict[int, tuple[str, Panel]], averages: pd.Series, target: tuple[str, ...]
) -> str:
    first = int(averages.index[0])
    rivals = [int(str(cell)) for cell in averages.index if by_cell[int(str(cell))][0] != by_cell[first][0]]
    if not rivals:
        return ""
    second = rivals[0]
    p = float(comparison.p_values(target, first, [second])[0])
    name, panel = by_cell[second]
    rival = names.method(name)
    if comparison.cells["calibration"][second] != "none":
        rival += f" with {names.calibration(panel.calibration).lower()} calibration"
    lead = comparison.difference(target, first, second)
    other = f"the best other {competitor(key for key, _ in by_cell.values())}, {rival},"
    if np.isnan(p):
        return f" {capitalised(other)} is {lead:.3f} behind."
    return f" Its lead of {lead:.3f} over {other} is {'beyond' if p < LEVEL else 'within'} noise (p = {p:.2g})."


def calibration_effect(comparison: Comparison) -> list[str]:
    """Sentences on how coding and mathematics scores depend on the calibration set's domain, averaged over criteria."""
    sentences = []
    for domain, columns, word in (("code", names.CODE_COLUMNS, "Coding"), ("math", names.MATH_COLUMNS, "Mathematics")):
        if not set(columns) <= set(comparison.parts):
            continue
        scores = comparison.score(tuple(columns))
        by_set = scores.groupby(comparison.cells["calibration"]).mean().drop("none", errors="ignore").dropna()
        matching = [name for name in by_set.index if names.domain(str(name)) == domain]
        others = by_set.drop(matching)
        if matching and len(others):
            rest = names.listing(
                f"{value:.3f} after {names.calibration(str(name)).lower()}" for name, value in others.items()
            )
            sentences.append(
                f"{word} columns of {comparison.model} keep {by_set[matching].mean():.3f} on average over criteria "
                f"and ratios after {domain} calibration, {rest} calibration."
            )
    return sentences


def overlap_finding(overlaps: pd.DataFrame) -> list[str]:
    """Sentences on the component of S(b, alpha, beta) that makes pruned experts depend on the calibration set."""
    sentences: list[str] = []
    if overlaps.empty:
        return sentences
    pooled = overlap.pooled(overlaps)
    for key, frame in groups(pooled, ["ratio"]):
        effect = overlap.component_effects(frame).query("component == 'b'").set_index("level")["overlap"]
        best = frame.sort_values("triple", ascending=False, kind="stable").iloc[0]
        name = overlap.variant_name(int(best["b"]), int(best["alpha"]), int(best["beta"]))
        if len(effect) == 2:
            sentences.append(
                f"At {names.ratio(key['ratio'])}, scores divided by the token count (b=1) agree on "
                f"{names.share(effect[1])} of the experts to remove across calibration sets, sums (b=0) on "
                f"{names.share(effect[0])}; random sets would on "
                f"{names.share(frame['chance_triple'].iloc[0])}. {name} agrees most ({names.share(best['triple'])})."
            )
    return sentences


def coverage_finding(study: Study) -> list[str]:
    """Sentences on experts that no calibration token reached."""
    return [
        f"{names.calibration(row['calibration'])} calibration of {row['model']} left "
        f"{row['unseen'] or 'none'} of {row['experts']} experts without a token."
        for row in records(coverage_summary(study.coverage))
    ]
