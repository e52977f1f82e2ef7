"""`objective`: the number that a sweeper of Hydra is told of each of its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from moe_lab.config import BenchmarkConfig, Config
from moe_lab.errors import UserError, unknown
from moe_lab.grid import Request
from moe_lab.json_files import Number, read_json
from moe_lab.results import is_lower_better
from moe_lab.study.graph import build
from moe_lab.study.store import Store

AVERAGE = "Avg"
RESULTS = {"results": [{"benchmark": str, "metric": str, "score": Number}]}


def check(name: str, benchmarks: Sequence[BenchmarkConfig]) -> None:
    """Raise UserError unless `name` is Avg or a result of one of the benchmarks."""
    results = [result for benchmark in benchmarks for result in benchmark.reports]
    if name not in (*results, AVERAGE):
        raise unknown("objective", name, [*results, AVERAGE])


def objective(config: Config, requests: Sequence[Request]) -> float:
    """The number that `config.objective` names, of the one pruned model that `requests` ask for.

    Avg is the mean over benchmarks in which more is better, each the mean of its results; any other name is that of a
    result, such as arc_easy or perplexity. Raises UserError when the requests are for no or several pruned models, when
    a benchmark has no result, and for a name that no result has.
    """
    pruned = [cell for cell in build(config, requests).cells if cell.plan]
    if len(pruned) != 1:
        raise UserError(
            f"objective={config.objective} is a number of one pruned model, but a job of this sweep prunes "
            f"{len(pruned)}: expected one value in each axis"
        )
    store = Store(config.store)
    found: dict[str, float] = {}
    averaged: list[float] = []
    for benchmark, step in pruned[0].evaluate.items():
        file = store.path(step) / "result.json"
        if not file.is_file():
            raise UserError(
                f"objective={config.objective}: {benchmark} has no result: `python -m moe_lab.study why {config.study} "
                f"store={config.store}` says why"
            )
        results = read_json(file, RESULTS)["results"]
        found |= {result["benchmark"]: result["score"] for result in results}
        shares = [result["score"] for result in results if not is_lower_better(result["metric"])]
        averaged += [fmean(shares)] if shares else []
    if config.objective == AVERAGE and averaged:
        return fmean(averaged)
    if config.objective not in found:
        raise unknown("objective", str(config.objective), [*found, AVERAGE])
    return found[str(config.objective)]
