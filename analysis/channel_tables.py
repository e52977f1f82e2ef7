"""The tables of HEAPr (1, 2), of MoE-Slimming's budgets (6, 7, 13) and of AIMER (2): which cells stand in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from analysis import methods, names
from analysis.block_tables import Block, block_table
from analysis.chosen import MEAN
from analysis.comparison import Comparison
from analysis.frames import groups
from analysis.load import Study
from analysis.tables import Table

SMOOTHING = {"smoothing", "layer_smoothing"}
"""What labels and settings call the smoothing of layer losses, which MoE-Slimming's Table 7 varies."""
DEFAULT_SMOOTHING = "sqrt"
COMPETING = ["ratio", "calibration", "gate", "seed"]
"""Cells that agree in these are compared with each other where allocations or channel scores vary."""


def method_table(study: Study, comparisons: Sequence[Comparison], *, name: str = "heapr.table1") -> Table:
    """HEAPr's Table 1: every method at every ratio, its seven benchmarks and their mean."""
    blocks = [
        Block(comparison, names.ratio(key["ratio"]), _in_order(methods.labels(cells)))
        for comparison in comparisons
        for key, cells in _groups(plain(comparison), ["ratio"])
    ]
    return block_table(
        study,
        blocks,
        columns=(*names.HEAPR, MEAN),
        name=name,
        title="Channels and whole experts",
        caption="Kept: share of the parameters of routed experts. FLOPs saved: per token, with the routing the pruned "
        "model has.",
    )


def channel_choice_table(study: Study, comparisons: Sequence[Comparison], *, name: str = "heapr.table2") -> Table:
    """HEAPr's Table 2: CAMERA-P, HEAPr-L and HEAPr-G where CAMERA-P was run; differences are to CAMERA-P, to its
    one-shot form where only that was run."""
    blocks = []
    for comparison in comparisons:
        cells = plain(comparison)
        pairs = zip(cells["criterion"], cells["allocation"], strict=True)
        for key, found in _groups(cells[[pair in names.METHODS for pair in pairs]], COMPETING):
            camera = found[found["criterion"] == "camera"]
            sequential = camera[camera["allocation"] == "sequential"]
            base = _only(sequential if len(sequential) else camera)
            if base is not None and len(found) > 1:
                blocks.append(Block(comparison, names.ratio(key["ratio"]), _in_order(methods.labels(found)), base))
    return block_table(
        study,
        blocks,
        columns=(*names.HEAPR, MEAN),
        name=name,
        title="Which channels: CAMERA and HEAPr inside layers, HEAPr over all",
        caption="CAMERA-P scores each layer on what the pruned layers below it give, as its code does; one-shot scores "
        "all layers of the unpruned model. Difference: Mean minus that of CAMERA-P (one-shot where only that was run), "
        "paired.",
    )


def allocator_table(study: Study, comparisons: Sequence[Comparison], *, name: str = "coverage.table6") -> Table:
    """MoE-Slimming's Table 6: one channel score under every allocation; differences are to uniform widths."""
    blocks = []
    for comparison, key, cells in _channel_groups(comparisons, [*COMPETING, "criterion"]):
        chosen = cells[[SMOOTHING.isdisjoint(methods.allocation(word)[1]) for word in cells["allocation"]]]
        if "coverage" in set(chosen["allocation"]) and chosen["allocation"].nunique() > 1:
            base = _only(chosen[chosen["allocation"] == "uniform"])
            blocks.append(
                Block(comparison, names.ratio(key["ratio"]), _words(chosen["allocation"].map(names.allocated)), base)
            )
    return block_table(
        study,
        blocks,
        columns=(*names.ABLATION, MEAN),
        name=name,
        title="Channel budgets: allocations",
        caption="Difference: Mean minus that of uniform widths, paired. Rows name the allocation.",
    )


def smoothing_table(study: Study, comparisons: Sequence[Comparison], *, name: str = "coverage.table7") -> Table:
    """MoE-Slimming's Table 7: coverage budgets with losses smoothed differently; differences are to the default."""
    blocks = []
    for comparison, key, cells in _channel_groups(comparisons, [*COMPETING, "criterion"]):
        parsed = [methods.allocation(word) for word in cells["allocation"]]
        chosen = cells[[allocation == "coverage" and set(found) <= SMOOTHING for allocation, found in parsed]]
        if chosen["allocation"].nunique() > 1:
            words = chosen["allocation"].map(_smoothing)
            base = _only(chosen[words == DEFAULT_SMOOTHING])
            blocks.append(Block(comparison, names.ratio(key["ratio"]), _words(words), base))
    return block_table(
        study,
        blocks,
        columns=(*names.ABLATION, MEAN),
        name=name,
        title="Channel budgets: smoothing",
        caption="How layer losses are smoothed; the priors of experts keep their own smoothing. Difference: Mean minus "
        f"that of {DEFAULT_SMOOTHING}, the default, paired.",
    )


def channel_score_table(study: Study, comparisons: Sequence[Comparison], *, name: str = "coverage.table13") -> Table:
    """MoE-Slimming's Table 13: channel scores under one coverage allocation; differences are to the default score."""
    blocks = []
    for comparison in comparisons:
        cells = plain(comparison)
        cells = cells[(cells["granularity"] == "channel") & (cells["allocation"] == "coverage")]
        for ratio in sorted(cells["ratio"].unique()):
            chosen = cells[cells["ratio"] == ratio]
            if chosen["criterion"].nunique() > 1:
                base = _only(chosen[chosen["criterion"] == "channel_activation"])
                labels = _in_order(chosen["criterion"].map(names.criterion))
                blocks.append(Block(comparison, names.ratio(ratio), labels, base))
    return block_table(
        study,
        blocks,
        columns=(*names.ABLATION, MEAN),
        name=name,
        title="Channel scores under coverage budgets",
        caption="Activations, weights and gradients are those of the down projection, unless a row names another. "
        "Difference: Mean minus that of Activation, the default, paired.",
    )


def group_table(
    study: Study, comparisons: Sequence[Comparison], *, name: str, columns: Sequence[str], title: str
) -> Table:
    """AIMER's Tables 2, 3 and 5 to 7: criteria at each ratio; differences are to AIMER, where run."""
    blocks = []
    for comparison in comparisons:
        for key, cells in _groups(plain(comparison), ["ratio"]):
            if "aimer" not in set(cells["criterion"]):
                continue
            base = _only(cells[cells["criterion"] == "aimer"])
            blocks.append(Block(comparison, names.ratio(key["ratio"]), _in_order(methods.labels(cells)), base))
    return block_table(
        study,
        blocks,
        columns=columns,
        name=name,
        title=title,
        caption=f"Difference: {columns[-1]} minus that of AIMER, paired.",
    )


def plain(comparison: Comparison) -> pd.DataFrame:
    """Pruned cells as they are, neither quantised nor fine-tuned, in the order of tables."""
    cells = comparison.cells
    found = cells[(cells["criterion"] != "none") & (cells["recovery"] == "none") & (cells["ratio"] > 0)]
    place = found["criterion"].map(names.in_order(found["criterion"], names.CRITERIA).index).astype(int)
    return found.assign(place=place).sort_values(["ratio", "place"], kind="stable").drop(columns="place")


def _groups(cells: pd.DataFrame, columns: Sequence[str]) -> Iterator[tuple[dict[str, float], pd.DataFrame]]:
    return groups(cells, columns) if len(cells) else iter(())


def _channel_groups(
    comparisons: Sequence[Comparison], columns: Sequence[str]
) -> Iterator[tuple[Comparison, dict[str, float], pd.DataFrame]]:
    for comparison in comparisons:
        cells = plain(comparison)
        for key, found in _groups(cells[cells["granularity"] == "channel"], columns):
            yield comparison, key, found


def _smoothing(allocation: str) -> str:
    """How an allocation smooths layer losses."""
    return next(iter(methods.allocation(allocation)[1].values()), DEFAULT_SMOOTHING)


def _only(cells: pd.DataFrame) -> int | None:
    """The cell, when there is exactly one."""
    return int(cells.index[0]) if len(cells) == 1 else None


def _in_order(labels: pd.Series) -> dict[int, str]:
    return {int(str(cell)): str(label) for cell, label in labels.items()}


def _words(values: pd.Series) -> dict[int, str]:
    """Cell -> the word that tells it from the others, capitalised."""
    return {int(str(cell)): str(word)[:1].upper() + str(word)[1:] for cell, word in values.items()}
