"""Convergence steps: scores from growing parts of the calibration set, to be compared with scores from all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_lab import criteria, results
from moe_lab.grid import Cell
from moe_lab.study.step import Job, Part, Step
from moe_lab.study.steps.builder import Builder, scoring
from moe_lab.study.steps.engine import Resident
from moe_lab.study.steps.inputs import STATISTICS, facts, write_table
from moe_lab.study.steps.kind import Kind, Reads
from moe_lab.study.steps.passes import STATISTICS_PASS
from moe_lab.study.steps.scores import score

Sums = dict[int, dict[str, Any]]
PASSES = {"statistics": Resident.statistics, "gradients": Resident.gradients}
"""Kind of pass that saves snapshots -> the method that runs the pass again when there are none."""
SHARES = tuple(at / 40 for at in range(1, 40))
"""Shares of a layer's channels that are kept: every 2.5 %."""


def _convergence_step(builder: Builder, cell: Cell) -> Step:
    """The step that scores experts from growing parts of the calibration set."""
    model, calibration = cell.model, cell.calibration

    def make() -> Step:
        statistics = STATISTICS_PASS.step(builder, cell)
        settings = Part({"gate": cell.gate, "snapshots": calibration.snapshots})
        inputs = {"model": builder.model(model), "statistics": statistics}
        parts = {**statistics.parts, "convergence": settings}
        return Step("convergence", statistics.label, parts, inputs, statistics.runtime)

    return builder.once(("convergence", model, calibration, cell.gate, cell.seed), make)


def convergence(job: Job) -> None:
    """Score experts by every criterion that reads forward statistics only, from growing parts of the calibration set.

    Criteria whose sums the pass did not gather, such as an older pass or one over another kind of router, are left out.
    Reads the snapshots that the statistics pass saved. Where it saved none, runs the pass again to make them.
    """
    gate, parts = job.settings["convergence"]["gate"], _parts(job, "statistics", "tokens")
    experts = {layer: about["n_experts"] for layer, about in facts(job)["layers"].items()}
    gathered = set.intersection(*(set(arrays) for _, sums in parts for arrays in sums.values()))
    rows = [
        (name, tokens, layer, expert, float(value))
        for name in criteria.of_experts_from("statistics")
        if criteria.sums_read(name) <= gathered
        for tokens, sums in parts
        for layer, values in criteria.score(name, sums, experts=experts, gate=gate).items()
        for expert, value in enumerate(values)
    ]
    write_table(job.output("convergence.parquet"), results.CONVERGENCE, rows)


CONVERGENCE = Kind(name="convergence", work=convergence, step=_convergence_step, reads=Reads.MODEL)


def follows_channels(cell: Cell) -> bool:
    """Whether the cell's criterion scores channels by sums that a pass adds up token by token."""
    name = cell.criterion.name
    return criteria.get(name).granularity == "channel" and criteria.summed_over(name) is not None


def _channel_step(builder: Builder, cell: Cell) -> Step:
    """The step that measures how the channels kept by the cell's criterion change as the calibration set grows."""

    def make() -> Step:
        chosen = criteria.get(cell.criterion.name)
        sums = builder.evidence(str(criteria.summed_over(chosen.name)), cell)
        scored, plugged = scoring(cell)
        settings = Part({"gate": None, **scored.settings, "snapshots": cell.calibration.snapshots})
        inputs = {"model": builder.model(cell.model)}
        inputs |= {need: builder.evidence(need, cell) for need in chosen.needs}
        parts, runtime = {**sums.parts, "convergence": settings}, {**sums.runtime, **plugged}
        return Step("channel_convergence", f"{sums.label}-{chosen.name}", parts, inputs, runtime)

    key = ("channel convergence", cell.model, cell.calibration, cell.criterion, cell.gate, cell.seed)
    return builder.once(key, make)


def channel_convergence(job: Job) -> None:
    """Measure, at each snapshot, the share of the channels kept with the whole calibration set that are kept already.

    The channels of highest score in the layer are kept. Snapshots are those of `convergence`.
    """
    rows = []
    by_layer: dict[int, list[tuple[int, NDArray[np.float64]]]] = {}
    for tokens, scored in _channel_scores(job):
        for layer, values in scored.items():
            by_layer.setdefault(layer, []).append((tokens, values))
    name = job.settings["convergence"]["criterion"]
    for layer, parts in by_layer.items():
        places = [(tokens, ranks(values)) for tokens, values in parts]
        for tokens, place in places[:-1]:
            same = shared(place, places[-1][1])
            about = (name, tokens, places[-1][0], layer, place.size)
            rows += [(*about, kept, one) for kept, one in zip(SHARES, same, strict=True)]
    write_table(job.output("convergence.parquet"), results.CHANNEL_CONVERGENCE, rows)


CHANNEL_CONVERGENCE = Kind(
    name="channel_convergence",
    work=channel_convergence,
    step=_channel_step,
    reads=Reads.MODEL,
    backward=lambda step: "gradients" in step.inputs,
)


def ranks(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """Rank of every channel of a layer by its score: (E, I) -> flat (E * I,), 0 for the highest score.

    Of equal scores the one with the lower index ranks worse, because plans remove it first.
    """
    order = np.argsort(scores, axis=None, kind="stable")[::-1]
    places = np.empty(order.size, np.int64)
    places[order] = np.arange(order.size)
    return places


def shared(one: NDArray[np.int64], other: NDArray[np.int64]) -> list[float]:
    """For each of SHARES: the part of the best n = ceil(share x channels) by one ranking that is among the best n by
    the other.

    A channel is among both when n exceeds the worse of its two ranks, so one sorted array serves all shares.
    """
    later = np.sort(np.maximum(one, other))
    counts = [int(np.ceil(share * later.size)) for share in SHARES]
    return [float(np.searchsorted(later, count) / count) for count in counts]


def _channel_scores(job: Job) -> Iterator[tuple[int, dict[int, NDArray[np.float64]]]]:
    """For each snapshot and for the whole pass: number of valid tokens, and the criterion's scores."""
    from moe_lab.statistics.sums import by_layer, read

    settings, layers = job.settings["convergence"], facts(job)["layers"]
    [role] = [role for role in job.inputs if role in PASSES]
    weights = [read(job.input(need, STATISTICS)) for need in job.inputs if need not in (*PASSES, "model")]
    for tokens, sums in _parts(job, role, "channel_square"):
        yield tokens, score(settings, by_layer([sums, *weights]), layers)


def _parts(job: Job, role: str, needed: str) -> list[tuple[int, Sums]]:
    """For each snapshot of the pass `role`, and last for the whole pass: number of valid tokens, and sums.

    Snapshots without the sum `needed` are made again: older versions of moe_lab saved no sums of channels in them.
    """
    from moe_lab.statistics.sums import load_snapshots, read

    count = job.settings["convergence"]["snapshots"]
    snapshots = load_snapshots(Path(job.inputs[role]), count)
    if snapshots is None or any(needed not in named for _, sums in snapshots for named in sums.values()):
        PASSES[role](Resident(job), count)  # only for the snapshots it saves
        snapshots = load_snapshots(Path(job.scratch), count) or []
    whole = json.loads(job.input(role, "calibration.json").read_text())["valid_tokens"]
    return [*snapshots, (sum(whole.values()), read(job.input(role, STATISTICS)))]
