"""What accuracy costs: every cell's Avg against parameters, FLOPs and bytes, and the cells nothing else beats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis import names, settings
from analysis.chosen import not_averaged
from analysis.comparison import Comparison
from analysis.load import Study
from analysis.tables import SCORE, Table, setting

AXES = {
    "parameters_kept": "Parameters",
    "flops_ratio": "FLOPs per token",
    "storage_share": "Storage",
}
"""What a cell costs, each a share of what the unpruned model costs -> its name."""

FAMILIES = {"expert": "whole experts", "channel": "channels", "none": "nothing removed"}
"""Granularity -> what is removed."""


def against_cost(study: Study, comparison: Comparison) -> pd.DataFrame:
    """One row per cell of the model whose cost was counted, the unpruned model included.

    Columns: cell, method, granularity, calibration, ratio, pruned (in words), bits, avg, low, high (95 %),
    parameters_kept, routed_kept, flops_ratio, storage_bytes, storage_share (of the unpruned model's bytes), and
    `front_<axis>` for each of AXES: no other pruned cell has at least its Avg at a lower cost, or a higher Avg at its
    cost. Avg is over all displayed columns in which more is better; a cell that lacks one has NaN and is on no front.
    """
    target = comparison.averaged(comparison.parts)
    low, high = comparison.interval(target)
    scores = pd.DataFrame({"avg": comparison.score(target), "low": low, "high": high})
    axes = comparison.cells[["criterion", "method", "granularity", "calibration", "ratio"]]
    axes = axes.assign(pruned=settings.pruned(comparison.cells))
    costs = study.costs.set_index("cell")[["bits", "parameters_kept", "routed_kept", "flops_ratio", "storage_bytes"]]
    found = axes.join(scores).join(costs, how="inner").rename_axis("cell").reset_index()
    full = study.costs.set_index("cell")["parameters_unpruned"].reindex(found["cell"]).to_numpy(float) * _BYTES
    found["storage_share"] = found["storage_bytes"] / full
    pruned = found["criterion"] != "none"
    for axis in AXES:
        found[f"front_{axis}"] = False
        found.loc[pruned, f"front_{axis}"] = front(found.loc[pruned, axis], found.loc[pruned, "avg"])
    return found.drop(columns="criterion")


_BYTES = 2
"""Of a parameter in bf16."""


def front(costs: Sequence[float] | pd.Series, scores: Sequence[float] | pd.Series) -> np.ndarray:
    """Booleans: entries that no other beats. One beats another with a lower cost and at least its score, or with a
    higher score at its cost or less. NaN is never on the front."""
    cost, score = np.asarray(costs, float), np.asarray(scores, float)
    cheaper, better = cost[None, :] <= cost[:, None], score[None, :] >= score[:, None]
    strictly = (cost[None, :] < cost[:, None]) | (score[None, :] > score[:, None])
    return np.asarray(~(cheaper & better & strictly).any(axis=1) & ~np.isnan(cost + score))


def pareto_table(study: Study, comparisons: Sequence[Comparison], *, name: str = "pareto") -> Table:
    """All methods in one table: Avg with its interval beside what is kept, FLOPs and bytes, dearest first."""
    frames = [against_cost(study, comparison).assign(model=comparison.model) for comparison in comparisons]
    columns = ["Model", "Criterion", "Calibration", "Pruned", "Removes"]
    numbers = {
        "Avg": ("avg", SCORE),
        "Parameters kept": ("parameters_kept", "{:.1%}"),
        "Routed kept": ("routed_kept", "{:.1%}"),
        "FLOPs": ("flops_ratio", "{:.1%}"),
        "Storage (MiB)": ("storage_bytes", "{:,.2f}"),
    }
    shown = [*columns, *numbers, "Front"]
    frame = pd.DataFrame(columns=shown)
    ends = pd.DataFrame(columns=["low", "high"], dtype=float)
    if frames:
        found = pd.concat(frames, ignore_index=True)
        order = ["model", "parameters_kept", "avg"]
        found = found.sort_values(order, ascending=[True, False, False], kind="stable", ignore_index=True)
        ends = found[["low", "high"]]
        found["storage_bytes"] /= 2**20
        frame = found[[column for column, _ in numbers.values()]].set_axis(list(numbers), axis=1)
        frame = frame.assign(
            Model=found["model"],
            Criterion=found["method"].map(names.method),
            Calibration=found["calibration"].map(names.calibration),
            Pruned=found["pruned"],
            Removes=found["granularity"].map(lambda kind: FAMILIES.get(kind, kind)),
            Front=_fronts(found),
        )[shown]
    return Table(
        name=name,
        title="All methods: accuracy against what is kept",
        caption="Avg is the mean of all displayed columns. Parameters kept: share of all parameters; routed kept: of "
        "those of routed experts; FLOPs: per token, with the routing of the pruned model, of the unpruned model's. "
        f"Front: no pruned model here has at least this Avg at a lower cost of that kind. {setting(study)}",
        frame=frame,
        formats={shown_name: form for shown_name, (_, form) in numbers.items()},
        blocks=("Model",),
        low=ends[["low"]].set_axis(["Avg"], axis=1),
        high=ends[["high"]].set_axis(["Avg"], axis=1),
        footnotes=not_averaged(comparisons),
    )


def _fronts(found: pd.DataFrame) -> list[str]:
    """For each row the costs at which nothing beats it, in words."""
    marks = found[[f"front_{axis}" for axis in AXES]].to_numpy(bool)
    words = [word.split(" ")[0] for word in AXES.values()]
    return ["all" if row.all() else ", ".join(word for word, on in zip(words, row, strict=True) if on) for row in marks]
