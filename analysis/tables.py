"""A table: numbers with what a reader needs beside them; and the tables that are not about scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from analysis import memory, names, uncertainty
from analysis.coverage import coverage_summary
from analysis.frames import records
from analysis.load import Study
from analysis.overlap import variant_name
from analysis.remarks import mixed_metrics, protocols, versions
from analysis.settings import passes, pruned
from analysis.winners import LEVEL, label

SCORE, RANK, PERCENT = "{:.3f}", "{:.2f}", "{:.0%}"


@dataclass(frozen=True, eq=False)
class Table:
    """Numbers, and how to show them. NaN is a gap."""

    name: str
    """File stem, such as unified.table1."""
    title: str
    caption: str
    frame: pd.DataFrame
    """Text columns first, spelled for people; then numbers."""
    formats: Mapping[str, str]
    """Number column -> format; columns not named here are text."""
    best: Mapping[str, str] = field(default_factory=dict)
    """Number column -> "max" or "min": the best of a block is set in bold."""
    blocks: Sequence[str] = ()
    """Text columns that together name a block of rows which compete."""
    low: pd.DataFrame | None = None
    """Lower ends of 95 % intervals, for the columns that have them."""
    high: pd.DataFrame | None = None
    footnotes: Sequence[str] = ()
    optional: Sequence[str] = ()
    """Number columns in which a dash is no gap: there is nothing to be had in some rows."""


def setting(study: Study) -> str:
    """What captions of scores state: items, metrics, and what `reading` states, with the level of intervals."""
    sizes = study.results["n"]
    if not len(sizes):
        return f"No results; {reading(study)}"
    items = f"{sizes.min():g}" if sizes.nunique() == 1 else f"{sizes.min():g} to {sizes.max():g}"
    metrics = names.listing(sorted(set(study.results["metric"].astype(str))))
    level = f"{names.share(uncertainty.CONFIDENCE)} intervals"
    mixed = "".join(f" {remark}" for remark in mixed_metrics(study.results, study.cells))
    if asked := protocols(study.cells):
        metrics = f"{metrics}, as asked of {asked}"
    return f"n = {items} items a benchmark; metric {metrics}; {level}; {reading(study)}{mixed}"


def reading(study: Study) -> str:
    """What captions of numbers from a pass over a text state: seed, gate, calibration tokens, library versions."""
    cells = study.cells[study.cells["criterion"] != "none"]
    parts = [f"seed {_several(cells['seed'])}", f"gate {_several(cells['gate'])}"]
    return "; ".join([*parts, *_texts(study)]) + "."


def _texts(study: Study) -> list[str]:
    """Calibration tokens and versions of libraries, as far as they are known."""
    tokens = sorted({sum(report.get("valid_tokens", {}).values()) for report in study.calibrations.values()})
    parts = [
        f"{' / '.join(f'{count:,}' for count in tokens)} calibration tokens" if tokens else "",
        ", ".join(f"{name} {'/'.join(found)}" for name, found in versions(study.origins).items()),
    ]
    return [part for part in parts if part]


def of_pass(study: Study) -> str:
    """What captions of numbers from passes state where one gate and seed are shown of several."""
    cells = study.cells[study.cells["criterion"] != "none"]
    one = passes(cells) if cells["statistics_folder"].notna().any() else cells
    parts = [_chosen("seed", one["seed"], cells["seed"]), _chosen("gate", one["gate"], cells["gate"])]
    return "; ".join([*parts, *_texts(study)]) + "."


def _chosen(axis: str, shown: pd.Series, run: pd.Series) -> str:
    """`seed 42`, or `seed 42 (of 42, 43)`."""
    found, every = _several(shown), _several(run)
    return f"{axis} {found}" if found == every else f"{axis} {found} (of {every})"


def _several(values: pd.Series) -> str:
    return ", ".join(str(value) for value in values.drop_duplicates()) or "none"


def winner_table(study: Study, found: pd.DataFrame, *, name: str = "winners") -> Table:
    """A winner map as a table: who is best in each column, by how much, and whether that is beyond noise."""
    text = {
        "Model": found["model"],
        "Pruned": found["pruned"],
        "Calibration": found["calibration"].map(names.calibration),
        "Column": found["column"].map(names.benchmark),
        "Winner": [_winner(w, s) for w, s in zip(found["winners"], found["score"], strict=True)],
        "Runner-up": found["runner_up"].map(names.method),
        "Verdict": [verdict(row) for row in records(found)],
    }
    numbers = {"Score": "score", "Lead": "lead", "p": "p", "p (Holm)": "p_holm"}
    frame = pd.DataFrame({**text, **{shown: found[column] for shown, column in numbers.items()}})
    return Table(
        name=name,
        title="Winners",
        caption="p: paired test of the winner against every other criterion, the largest of them (McNemar for a "
        "benchmark of right-or-wrong items, sign flips for averages and graded stories); Holm: corrected for all "
        f"columns of one model and ratio; beyond noise below {LEVEL}. {setting(study)}",
        frame=frame,
        formats={"Score": SCORE, "Lead": SCORE, "p": "{:.4f}", "p (Holm)": SCORE},
        blocks=("Model", "Pruned", "Calibration"),
        optional=("Lead", "p", "p (Holm)"),
        low=found[["lead_low"]].set_axis(["Lead"], axis=1),
        high=found[["lead_high"]].set_axis(["Lead"], axis=1),
    )


def _winner(winners: Sequence[str], score: float) -> str:
    """The winner, or those who share the place, of many the first three."""
    if len(winners) <= 4 or score == 0:
        return label(winners, score)
    return f"{label(winners[:3], score)} and {len(winners) - 3} others"


def verdict(win: Mapping[str, Any]) -> str:
    """A cell of the winner map in words."""
    winners = win["winners"]
    if not winners:
        return "gap"
    if len(winners) > 1:
        return "tie"
    if pd.isna(win["p"]):
        return "not tested"
    return "beyond noise" if win["beyond_noise"] else "within noise"


def memory_table(study: Study, *, name: str = "memory") -> Table:
    """T3: bytes of the model in bfloat16 before and after pruning, exact from configurations and plans."""
    found = memory.loading_memory(study)
    columns = ["Model", "Pruned", "Before (MiB)", "After (MiB)", "Saved", "Before (bytes)", "After (bytes)"]
    frame = pd.DataFrame(columns=columns)
    if len(found):
        values = [
            found["model"],
            found["ratio"].map(names.ratio),
            found["bytes"] / 2**20,
            found["bytes_after"] / 2**20,
            found["saved"],
            found["bytes"],
            found["bytes_after"],
        ]
        frame = pd.DataFrame(dict(zip(columns, values, strict=True)))
    return Table(
        name=name,
        title="Loading memory",
        caption="Parameters of the whole model in bfloat16, exact from its configuration and the plans.",
        frame=frame,
        formats=dict(zip(columns[2:], ("{:,.2f}", "{:,.2f}", "{:.1%}", "{:,.0f}", "{:,.0f}"), strict=True)),
    )


def coverage_table(study: Study, *, name: str = "coverage") -> Table:
    """How many tokens the calibration sets sent to the experts."""
    found = coverage_summary(study.coverage)
    columns = ["Model", "Calibration", "Experts", "Unseen", "Rare", "Least tokens", "Median tokens", "Most tokens"]
    frame = pd.DataFrame(columns=columns)
    if len(found):
        keys = ["model", "calibration", "experts", "unseen", "rare", "least", "median", "most"]
        frame = found[keys].set_axis(columns, axis=1).assign(Calibration=found["calibration"].map(names.calibration))
    return Table(
        name=name,
        title="Tokens per expert",
        caption="Unseen: experts that no calibration token reached; they are scored 0 and pruned first. "
        f"Rare: fewer than a tenth of the tokens an even load would give. Made with {of_pass(study)}",
        frame=frame,
        formats=dict.fromkeys(columns[2:], "{:,.0f}"),
    )


def overlap_table(study: Study, overlaps: pd.DataFrame, *, name: str = "overlap") -> Table:
    """Overlap over calibration sets of every S(b, alpha, beta), by three readings, with chance levels."""
    columns = ["Model", "Pruned", "Variant", "b", "α", "β", "Triple", "Pairwise", "Jaccard"]
    chance = ["Triple, by chance", "Pairwise, by chance", "Jaccard, by chance"]
    frame = pd.DataFrame(columns=[*columns, *chance])
    if len(overlaps):
        keys = [
            "b",
            "alpha",
            "beta",
            "triple",
            "pairwise",
            "jaccard",
            "chance_triple",
            "chance_pairwise",
            "chance_jaccard",
        ]
        numbers = overlaps[keys].set_axis([*columns[3:], *chance], axis=1)
        variants = [variant_name(row["b"], row["alpha"], row["beta"]) for row in records(overlaps)]
        text = {"Model": overlaps["model"], "Pruned": overlaps["ratio"].map(names.ratio), "Variant": variants}
        frame = pd.concat([pd.DataFrame(text), numbers], axis=1)
    shown = dict.fromkeys(("b", "α", "β"), "{:.0f}") | dict.fromkeys((*columns[6:], *chance), SCORE)
    return Table(
        name=name,
        title="Overlap of the experts to prune across calibration sets",
        caption="Triple: share of the lowest experts that is the same under all calibration sets; pairwise: mean over "
        f"pairs of sets; Jaccard: intersection over union. (1,0,0) is the same for all. Made with {of_pass(study)}",
        frame=frame,
        formats=shown,
        best=dict.fromkeys(("Triple", "Pairwise", "Jaccard"), "max"),
        blocks=("Model", "Pruned"),
    )


def proxy_table(study: Study, found: pd.DataFrame, *, name: str = "proxy") -> Table:
    """Fig. 3 as numbers: how many of the experts with the lowest exact damage the proxy S(0,1,1) finds too."""
    columns = ["Model", "Calibration", "Pruned", "Overlap", "Lowest layer", "By chance"]
    frame = pd.DataFrame(columns=columns)
    if len(found):
        frame = found[["model", "calibration", "ratio", "overlap", "lowest", "chance"]].set_axis(columns, axis=1)
        frame = frame.assign(
            Calibration=found["calibration"].map(names.calibration), Pruned=found["ratio"].map(names.ratio)
        )
    return Table(
        name=name,
        title="Overlap of proxy and exact damage",
        caption="Share of the experts with the lowest exact damage that have the lowest proxy S(0,1,1) too: mean over "
        f"layers, the lowest layer, and what random sets would share. Made with {of_pass(study)}",
        frame=frame,
        formats=dict.fromkeys(columns[3:], SCORE),
    )


def artefact_table(study: Study, *, name: str = "artefacts") -> Table:
    """Which folders of the store a cell's numbers come from."""
    evaluations = study.results.groupby("cell")["folder"].unique()
    text = {
        "Model": study.cells["model"],
        "Pruned": pruned(study.cells),
        "Calibration": study.cells["calibration"].map(names.calibration),
        "Criterion": study.cells["method"].map(names.method),
        "Plan": study.cells["plan_folder"].fillna(""),
        "Scores": study.cells["scores_folder"].fillna(""),
        "Statistics": study.cells["statistics_folder"].fillna(""),
        "Evaluations": [" ".join(evaluations.get(cell, [])) for cell in study.cells.index],
    }
    return Table(
        name=name,
        title="Where the artefacts are",
        caption=f"Folders inside {study.store}. Each holds its identity (step.json), how it came about "
        "(provenance.json) and checksums (manifest.json); evaluations also hold every item (samples.parquet).",
        frame=pd.DataFrame(text),
        formats={},
    )


def gap_table(study: Study, *, name: str = "gaps") -> Table:
    """What is missing: each reason once, with the places where it holds."""
    places: dict[str, list[str]] = {}
    for gap in study.gaps:
        places.setdefault(gap.what, []).append(gap.where)
    rows = [(what, len(where), "; ".join(where)) for what, where in places.items()]
    return Table(
        name=name,
        title="Gaps",
        caption="Missing results stand as – in every table and are left out of averages, ranks and tests.",
        frame=pd.DataFrame(rows, columns=["What", "Times", "Where"]),
        formats={"Times": "{:.0f}"},
    )
