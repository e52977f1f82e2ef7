"""Tables of differences between two studies or plans: kept experts and channels, and scores with significance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtr, ndtri

from analysis import names
from analysis.diff import plans
from analysis.diff.plans import Layers
from analysis.diff.sides import BETTER, CELL, DIFFERENCE, OFFSET, WORSE, Sides
from analysis.load.reader import records
from analysis.load.study import Study
from analysis.outputs.captions import reading, setting
from analysis.render.table import SCORE, Table
from analysis.stats import uncertainty
from analysis.stats.cell_scores import benchmark_targets, group_targets, not_averaged
from analysis.stats.comparison import Comparison, Target
from analysis.stats.winners import LEVEL

PAIRED, UNPAIRED, UNTESTED, SAME = "paired", "unpaired", "none", "same answers"
_NUMBERS = ("A", "B", DIFFERENCE, "p", "p (Holm)")


def plan_table(first: Layers, second: Layers) -> Table:
    """Table of the experts and channels in each layer that both plans, or only one of them, keep."""
    changes = plans.changes(first, second)
    frame = pd.DataFrame(
        {
            "Layer": changes["layer"].astype(str),
            "Experts": changes["experts"],
            "In both": changes["both"],
            "Only in A": changes["out"].map(len),
            "Only in B": changes["in"].map(len),
            "Jaccard": changes["jaccard"],
            "Jaccard, by chance": changes["chance"],
            "Experts only in A": changes["out"].map(_ids),
            "Experts only in B": changes["in"].map(_ids),
        }
    )
    if any(plan.replaced for layers in (first, second) for plan in layers.values()):
        frame["Replaced alike"] = changes["replaced"].map({True: "yes", False: "no"})
    counted = changes["channels_both"].notna().any()
    if counted:
        shown = ("In both, channels", "Only in A, channels", "Only in B, channels")
        frame[list(shown)] = changes[["channels_both", "channels_out", "channels_in"]]
    numbers = dict.fromkeys(("Experts", "In both", "Only in A", "Only in B"), "{:.0f}")
    formats = {**numbers, "Jaccard": SCORE, "Jaccard, by chance": SCORE}
    return Table(
        name="diff.plans",
        title="What two plans keep",
        caption="Experts kept in both plans, and in one of them only. Jaccard: intersection over union; by chance: of "
        "random sets of these sizes.",
        frame=frame,
        formats={**formats, **(dict.fromkeys(shown, "{:,.0f}") if counted else {})},
        optional=("Jaccard", "Jaccard, by chance"),
    )


def kept_table(sides: Sides) -> Table:
    """The same over all cells of two studies: a row per pair of cells and layer whose kept experts or channels differ.

    Pairs of cells with the same plan have no rows."""
    rows = []
    for text, pair in plan_pairs(sides):
        table = plan_table(*pair).frame
        channels = table.filter(like=", channels").filter(like="Only").sum(axis=1)
        otherwise = table["Replaced alike"] == "no" if "Replaced alike" in table else False
        differ = (table["Only in A"] + table["Only in B"] + channels > 0) | otherwise
        rows += [{**text, **row} for row in records(table[differ])]
    numbers = ["In both", "Only in A", "Only in B", "Jaccard", "Jaccard, by chance"]
    channels_of = [column for column in (rows[0] if rows else ()) if column.endswith(", channels")]
    columns = [*CELL, "Layer", *numbers, *channels_of, "Experts only in A", "Experts only in B"]
    formats = {**dict.fromkeys(numbers[:3], "{:.0f}"), **dict.fromkeys(numbers[3:], SCORE)}
    return Table(
        name="diff.kept",
        title="Experts and channels in and out",
        caption=f"Layers in which corresponding plans of {named(sides)} differ. {_readings(sides)}",
        frame=pd.DataFrame(rows, columns=columns),
        formats={**formats, **dict.fromkeys(channels_of, "{:,.0f}")},
        blocks=CELL,
        optional=[*numbers[3:], *channels_of],
    )


def score_table(sides: Sides, *, benchmarks: bool, name: str) -> Table:
    """Table of scores of corresponding cells, their difference and its significance: of benchmarks or of averages."""
    rows = [row for comparison, pairs in _scored(sides) for row in _score_rows(sides, comparison, pairs, benchmarks)]
    frame = pd.DataFrame(rows, columns=[*CELL, "Of", "Test", *_NUMBERS[:4], "low", "high", "lower"])
    frame["p (Holm)"] = uncertainty.holm(frame["p"].to_numpy(float))
    frame["Verdict"] = [_verdict(row) for row in records(frame)]
    return Table(
        name=name,
        title=f"{'Every benchmark' if benchmarks else 'Averages'}, A against B",
        caption=f"{named(sides)}. Paired: on the items both were asked (McNemar for a benchmark of right-or-wrong "
        "items, sign flips otherwise; intervals by resampling items); where a side was asked more, B − A is of the "
        "common items, which Test counts; unpaired: from standard errors, as the items "
        f"differ. Holm: corrected for all rows; beyond noise below {LEVEL}. A: {setting(sides.first)} "
        f"B: {setting(sides.second)}",
        frame=frame[[*CELL, "Of", "Test", "Verdict", *_NUMBERS]],
        formats={**dict.fromkeys(_NUMBERS[:3], SCORE), "p": "{:.4f}", "p (Holm)": "{:.4f}"},
        blocks=CELL,
        low=frame[["low"]].set_axis([DIFFERENCE], axis=1),
        high=frame[["high"]].set_axis([DIFFERENCE], axis=1),
        footnotes=[*unmatched(sides), *([] if benchmarks else not_averaged(sides.comparisons.values()))],
        optional=("p", "p (Holm)"),
    )


def _verdict(row: Mapping[str, Any]) -> str:
    if pd.isna(row[DIFFERENCE]):
        return "gap"
    if pd.isna(row["p"]):
        return "same" if row["Test"].startswith(SAME) else "not tested"
    if row["p (Holm)"] >= LEVEL:
        return "within noise"
    return BETTER if (row[DIFFERENCE] < 0) == row["lower"] else WORSE


def _scored(sides: Sides) -> Iterator[tuple[Comparison, list[tuple[int, int]]]]:
    for comparison in sides.comparisons.values():
        own = set(comparison.cells.index)
        pairs = [pair for pair in sides.pairs if set(pair) <= own]
        if pairs:
            yield comparison, pairs


def _score_rows(
    sides: Sides, comparison: Comparison, pairs: Sequence[tuple[int, int]], benchmarks: bool
) -> Iterator[dict[str, Any]]:
    for first, second in pairs:
        targets = (
            benchmark_targets(comparison, [str(name) for name in comparison.benchmarks])
            if benchmarks
            else group_targets(comparison, [first, second])
        )
        for of, target in targets.items():
            score = comparison.score(target)
            if pd.isna(score[first]) and pd.isna(score[second]):
                continue
            yield {
                **_text(sides, (first, second)),
                "Of": of,
                "A": score[first],
                "B": score[second],
                DIFFERENCE: comparison.difference(target, second, first),
                "lower": any(column in comparison.lower_is_better for column in target),
                **_tested(comparison, target, first, second),
            }


def _tested(comparison: Comparison, target: Target, first: int, second: int) -> dict[str, Any]:
    """Test, interval and p-value of the second cell's score minus the first's."""
    p = float(comparison.p_values(target, second, [first])[0])
    if not np.isnan(p):
        low, high = comparison.lead(target, second, first)
        items = comparison.shared_items(target)
        on = "" if items is None else f", {items:,} common items"
        if low == high == 0:  # without a p-value this row does not count in Holm's correction of the others
            return {"Test": f"{SAME}{on}", "p": np.nan, "low": low, "high": high}
        return {"Test": f"{PAIRED}{on}", "p": p, "low": low, "high": high}
    shares = comparison.weights(target)
    errors = comparison.standard_errors.loc[[first, second]][list(shares)].to_numpy(float)
    error = float(np.sqrt(np.square(errors * np.array(list(shares.values()))).sum()))
    score = comparison.score(target)
    difference = float(score[second] - score[first])
    if not error > 0 or np.isnan(difference):
        return {"Test": UNTESTED, "p": np.nan, "low": np.nan, "high": np.nan}
    half = float(ndtri((1 + uncertainty.CONFIDENCE) / 2)) * error
    p = float(2 * ndtr(-abs(difference) / error))
    return {"Test": UNPAIRED, "p": p, "low": difference - half, "high": difference + half}


def plan_pairs(sides: Sides, *, same: bool = False) -> Iterator[tuple[dict[str, str], tuple[Layers, Layers]]]:
    """Yield corresponding plans that are different steps (with `same`, equal ones too) and their columns CELL."""
    folders = [study.cells["plan_folder"].dropna().astype(str).to_dict() for study in (sides.first, sides.second)]
    for one, other in sides.pairs:
        names_of = folders[0].get(one), folders[1].get(other - OFFSET)
        if names_of[0] is None or names_of[1] is None or (names_of[0] == names_of[1] and not same):
            continue
        plans = _plan(sides.first, names_of[0]), _plan(sides.second, names_of[1])
        if plans[0] is not None and plans[1] is not None:
            yield _text(sides, (one, other)), (plans[0], plans[1])


def _plan(study: Study, name: str) -> Layers | None:
    folder = study.reader.folder(name)
    return plans.read(folder) if folder is not None else None


def _text(sides: Sides, pair: tuple[int, int]) -> dict[str, str]:
    """The columns CELL of a pair of cells; `A → B` when they differ."""
    both = (sides.first.cells.loc[[pair[0]]], sides.second.cells.loc[[pair[1] - OFFSET]])
    words = [_words(records(cells)[0]) for cells in both]
    return {
        column: one if one == other else f"{one} → {other}" for column, one, other in zip(CELL, *words, strict=True)
    }


def _words(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["model"], names.ratio(row["ratio"]), names.calibration(row["calibration"]), names.method(row["method"])


def _ids(experts: Sequence[int]) -> str:
    return " ".join(map(str, experts))


def named(sides: Sides) -> str:
    """Text that names the studies A and B and their stores."""
    return f"A, {sides.first.name} in {sides.first.store}, and B, {sides.second.name} in {sides.second.store}"


def _readings(sides: Sides) -> str:
    return f"A: {reading(sides.first)} B: {reading(sides.second)}"


def unmatched(sides: Sides) -> list[str]:
    """Sentences about cells that are on one side only."""
    sentences = []
    for letter, alone in zip("AB", sides.alone, strict=True):
        if alone:
            more = f", and {len(alone) - 3} more" if len(alone) > 3 else ""
            count = "One cell is" if len(alone) == 1 else f"{len(alone)} cells are"
            sentences.append(f"{count} in {letter} only: {'; '.join(alone[:3])}{more}.")
    return sentences
