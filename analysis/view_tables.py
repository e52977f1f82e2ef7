"""Rows of tables that are told by more than a criterion: models after recovery, and with fewer experts a token."""

from __future__ import annotations

from collections.abc import Sequence

from analysis import methods, names
from analysis.block_tables import KEPT, Block, Cost, block_table
from analysis.comparison import Comparison
from analysis.frames import groups
from analysis.load import Study
from analysis.tables import Table

MEBIBYTE = 2**20
STORED = {**KEPT, "Storage (MiB)": Cost("storage_bytes", "{:,.2f}", scale=1 / MEBIBYTE)}


def recovered_table(
    study: Study, comparisons: Sequence[Comparison], *, name: str, columns: Sequence[str], title: str
) -> Table:
    """MoE-Slimming's Tables 3 to 5: fine-tuned and quantised models beside those that were pruned alone, at the ratios
    that have both."""
    blocks = []
    for comparison in comparisons:
        cells = comparison.cells[comparison.cells["criterion"] != "none"]
        for key, found in groups(cells.sort_values("ratio", kind="stable"), ["ratio"]) if len(cells) else ():
            if set(found["recovery"]) == {"none"}:
                continue
            place = found["method"].map(names.methods_in_order(found["method"]).index).sort_values(kind="stable")
            labels = methods.labels(found)[place.index]
            blocks.append(
                Block(comparison, names.ratio(key["ratio"]), dict(zip(labels.index.astype(int), labels, strict=True)))
            )
    return block_table(
        study,
        blocks,
        columns=columns,
        name=name,
        title=title,
        caption="Mean: of the benchmarks before it. Storage: weights on disk, with the scales of quantised ones.",
        costs=STORED,
    )


def top_k_table(
    study: Study, comparisons: Sequence[Comparison], *, name: str, columns: Sequence[str], title: str
) -> Table:
    """MoE-Slimming's Tables 9 and 19: a model as it was trained and with fewer experts a token, pruned and not."""
    blocks = []
    for family in _families(study, comparisons):
        for comparison, top_k in family:
            cells = comparison.cells[comparison.cells["criterion"] != "none"]
            for key, found in groups(cells.sort_values("ratio", kind="stable"), ["ratio"]) if len(cells) else ():
                words = methods.labels(found)
                labels = {int(str(cell)): f"{word}, top-{top_k}" for cell, word in words.items()}
                blocks.append(Block(comparison, names.ratio(key["ratio"]), labels))
    return block_table(
        study,
        blocks,
        columns=columns,
        name=name,
        title=title,
        caption="top-k: experts a token is given to, while the model is calibrated and while it is evaluated; a model "
        "named without it routes as it was trained. Mean: of the benchmarks before it.",
    )


def _families(study: Study, comparisons: Sequence[Comparison]) -> list[list[tuple[Comparison, int]]]:
    """Models that differ in the number of experts a token alone, each family with that number, the largest first."""
    found: dict[str, list[tuple[Comparison, int]]] = {}
    for comparison in comparisons:
        trained, top_k = names.routed(comparison.model)
        layers = study.models.get(comparison.model, {}).get("layers", {}).values()
        own = max((layer["top_k"] for layer in layers), default=0) if top_k is None else top_k
        found.setdefault(trained, []).append((comparison, own))
    return [sorted(family, key=lambda pair: -pair[1]) for family in found.values() if len(family) > 1]
