"""EvoESAP's tables: searched allocations against uniform ones (001 T1), and what the searches did and cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd

from analysis import names, uncertainty
from analysis.chosen import column_targets, differences, scores
from analysis.comparison import Comparison
from analysis.frames import groups
from analysis.load import Study
from analysis.settings import pruned
from analysis.tables import SCORE, Table, reading, setting
from analysis.winners import LEVEL

SEARCHED = "evolutionary"
"""What the allocations of searches are called, possibly with settings behind it."""
TEXT = ["Model", "Pruned", "Calibration", "Criterion", "Allocation"]
GAIN = "Δ {}"
BEYOND = "Beyond noise"
_PAIRED = ["ratio", "criterion", "calibration", "recovery", "gate", "seed"]
"""Cells that agree in these differ in their allocation only."""


def is_searched(allocation: str) -> bool:
    """Whether an allocation of a study's record was searched for."""
    return allocation.startswith(SEARCHED)


def searched_pairs(comparison: Comparison) -> dict[int, int]:
    """Cell of a searched allocation -> the cell that differs from it in being uniform only, in the order of tables."""
    cells = comparison.cells[comparison.cells["criterion"] != "none"]
    order = names.in_order(cells["criterion"], names.CRITERIA)
    cells = cells.assign(place=cells["criterion"].map(order.index)).sort_values(["ratio", "place"], kind="stable")
    found: dict[int, int] = {}
    for _, group in groups(cells, _PAIRED):
        uniform = group.index[group["allocation"] == "uniform"]
        searched = group.index[group["allocation"].map(is_searched)]
        if len(uniform) == 1:
            found |= {int(cell): int(uniform[0]) for cell in searched}
    return found


def general_pairs(comparison: Comparison) -> dict[int, int]:
    """Those of `searched_pairs` that were calibrated on general text, whatever they were searched on."""
    sets = comparison.cells["calibration"].map(names.domain)
    return {cell: uniform for cell, uniform in searched_pairs(comparison).items() if sets[cell] == "general"}


def allocation_table(
    study: Study,
    comparisons: Iterable[Comparison],
    *,
    name: str,
    columns: Sequence[str],
    title: str,
    pairs: Callable[[Comparison], dict[int, int]] = searched_pairs,
) -> Table:
    """001 T1, T2 and T7 to T10: each criterion with uniform and searched allocation: those of `columns` that were run,
    and their paired differences.

    Differences have intervals; Holm's correction covers all differences of one model.
    """
    parts = [_rows(comparison, pairs(comparison), columns) for comparison in comparisons]
    frames, lows, highs = ([part[at] for part in parts if part is not None] for at in range(3))
    frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=[*TEXT, BEYOND])
    numbers = [str(column) for column in frame if column not in (*TEXT, BEYOND)]
    gains = [column for column in numbers if column.startswith(GAIN.format(""))]
    averages = [column for column in numbers if column not in gains]
    return Table(
        name=name,
        title=title,
        caption="Code and Math are means of their two columns, Avg is the mean of the displayed "
        "columns in which more is better. Δ: searched "
        "minus uniform on the same items; beyond noise: the columns whose difference has a paired p-value below "
        f"{LEVEL} after Holm's correction over all differences of a model. {setting(study)}",
        frame=frame[[*TEXT, *averages, *gains, BEYOND]],
        formats={**dict.fromkeys(averages, SCORE), **dict.fromkeys(gains, "{:+.3f}")},
        best=dict.fromkeys(averages, "max"),
        blocks=TEXT[:4],
        low=pd.concat(lows, ignore_index=True) if lows else None,
        high=pd.concat(highs, ignore_index=True) if highs else None,
        optional=gains,
    )


def _rows(
    comparison: Comparison, pairs: dict[int, int], columns: Sequence[str]
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame] | None:
    """Frame, lower and upper ends: for each criterion the uniform cell and under it the searched ones."""
    cells = list(dict.fromkeys(cell for searched, uniform in pairs.items() for cell in (uniform, searched)))
    targets = column_targets(comparison, cells, columns) if cells else {}
    if not targets:
        return None
    about = comparison.cells.loc[cells]
    text = pd.DataFrame(
        {
            "Model": comparison.model,
            "Pruned": pruned(comparison.cells)[cells],
            "Calibration": about["calibration"].map(names.calibration),
            "Criterion": about["criterion"].map(names.criterion),
            "Allocation": about["allocation"].map(names.allocated),
        }
    )
    numbers = scores(comparison, cells, targets)
    gains = {column: differences(comparison, target, pairs) for column, target in targets.items()}
    sure = _beyond_noise(list(gains.values()))
    marks = pd.DataFrame(sure, index=list(gains), columns=list(pairs))
    beyond = {cell: names.listing(marks.index[marks[cell]]) or "none" for cell in marks}
    frame, low, high = (
        pd.concat([part, _gains(gains, end, cells)], axis=1)
        for part, end in ((numbers.frame, "difference"), (numbers.low, "low"), (numbers.high, "high"))
    )
    return pd.concat([text, frame], axis=1).assign(**{BEYOND: [beyond.get(cell, "") for cell in cells]}), low, high


def _gains(gains: dict[str, pd.DataFrame], end: str, cells: Sequence[int]) -> pd.DataFrame:
    return pd.DataFrame({GAIN.format(column): found[end].reindex(list(cells)) for column, found in gains.items()})


def _beyond_noise(found: Sequence[pd.DataFrame]) -> np.ndarray:
    """Booleans (targets, pairs): significant after Holm's correction over all of them."""
    p_values = np.array([frame["p"].to_numpy(float) for frame in found])
    return np.asarray(uncertainty.holm(p_values.ravel()).reshape(p_values.shape) < LEVEL)


def search_table(study: Study, *, name: str = "evoesap.search") -> Table:
    """What each search found and cost."""
    found = study.searches
    cells = study.cells.loc[found["cell"]].reset_index(drop=True)
    numbers = {
        "Uniform": (found["uniform_fitness"], "{:.4f}"),
        "Best": (found["best_fitness"], "{:.4f}"),
        "Gain": (found["best_fitness"] - found["uniform_fitness"], "{:+.4f}"),
        "Evaluated": (found["candidates"], "{:,.0f}"),
        "Full forwards": (found["forwards"] + found["screening"], "{:,.1f}"),
        "Layers run": (found["per_candidate"], "{:.0%}"),
        "Seconds": (found["seconds"], "{:,.1f}"),
    }
    text = {
        "Model": cells["model"],
        "Pruned": pruned(study.cells)[found["cell"]].to_numpy(),
        "Calibration": cells["calibration"].map(names.calibration),
        "Criterion": cells["criterion"].map(names.criterion),
        "Fitness": found["fitness"].astype(object).map(lambda fitness: str(fitness).upper()),
        "Removed per layer": found["best"].map(lambda schedule: " ".join(map(str, schedule))),
    }
    return Table(
        name=name,
        title="What the searches found and cost",
        caption="Fitness of the uniform allocation and of the best one found, higher is better. Evaluated: schedules "
        "whose fitness was measured; full forwards: what they and the screening of proposals cost, counted in passes "
        "over the search set; layers run: share of the layers a schedule needed on average, the others were reused. "
        f"Made with {reading(study)}",
        frame=pd.DataFrame({**text, **{column: values for column, (values, _) in numbers.items()}}),
        formats={column: form for column, (_, form) in numbers.items()},
    )
