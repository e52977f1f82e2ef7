"""Everything that can be found wrong before anything heavy is loaded, reported together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from moe_lab import allocation, criteria, tracking
from moe_lab.calibration import settings as calibrations
from moe_lab.config import BenchmarkConfig, Config
from moe_lab.errors import said
from moe_lab.evaluation import suite
from moe_lab.grid import Cell, plain
from moe_lab.models import files


def preflight(config: Config, requests: Iterable[tuple[Sequence[Cell], Sequence[BenchmarkConfig]]]) -> list[str]:
    """One sentence per problem, each once; empty when the study can start."""
    return list(
        dict.fromkeys(sentence for cells, benchmarks in requests for sentence in _check(config, cells, benchmarks))
    )


def _check(config: Config, cells: Sequence[Cell], benchmarks: Sequence[BenchmarkConfig]) -> Iterator[str]:
    if config.retry not in (None, "failed"):
        yield f"retry={config.retry} is unknown: expected failed or null"
    yield from said(partial(tracking.check, config.tracker))
    yield from suite.preflight(benchmarks, suite.policy(config.allow_code_execution, config.sandbox))
    for cell in _each(cells, "model"):
        yield from said(partial(files.check, cell.model))
    for cell in _each(cells, "criterion"):
        yield from said(partial(criteria.check, cell.criterion.name, cell.criterion.parameters))
    for cell in _each(cells, "calibration"):
        if any(criteria.reads_text(c.criterion.name) for c in cells if c.criterion.name in criteria.CRITERIA):
            yield from said(partial(calibrations.check, cell.calibration))
    for cell in _each(cells, "allocation"):
        yield from said(partial(allocation.check, cell.allocation))
    for cell in {(id(cell.model), id(cell.allocation), cell.ratio): cell for cell in cells}.values():
        if cell.allocation.name in allocation.ALLOCATIONS:
            yield from said(partial(_try_allocation, cell))


def _try_allocation(cell: Cell) -> None:
    """UserError when the ratio cannot be had, as far as config.json tells; the plan step knows the groups too."""
    if (counts := files.expert_counts(cell.model)) is not None:
        experts, top_k = counts
        layer = {"n_experts": experts, "top_k": top_k, "n_group": 1, "topk_group": 1}
        allocation.allocate({**plain(cell.allocation), "ratio": cell.ratio}, {0: layer}, {0: [0.0] * experts})


def _each(cells: Sequence[Cell], group: str) -> Iterator[Cell]:
    """One cell for every object of a group."""
    yield from {id(getattr(cell, group)): cell for cell in cells}.values()
