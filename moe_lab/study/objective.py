"""The number that a sweeper optimises."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from moe_lab.errors import UserError, check_known
from moe_lab.grid import Request
from moe_lab.json_files import Number, parse
from moe_lab.study.graph import normalized
from moe_lab.study.preflight import AVERAGE
from moe_lab.study.run import RunResult

RESULTS = {"results": [{"benchmark": str, "metric": str, "score": Number, "scale": str}]}
"""Expected form of a result.json."""


def objective_value(result: RunResult, requests: Iterable[Request]) -> float:
    """The number that `objective` names, for the job of a multirun with these requests; without an
    objective, the exit code.

    Avg is the mean over benchmarks with scores, each the mean of its results; any other name is
    that of a result, such as arc_easy or perplexity. UserError unless the job prunes one model and
    has all results."""
    code, study = result
    objective = study.config.objective
    if objective is None or study.config.dry_run:
        return code
    requested = {normalized(cell) for cells, _ in requests for cell in cells}
    pruned = [steps for steps in study.graph.cells if steps.cell in requested]
    if len(pruned) != 1:
        raise UserError(
            f"objective={objective} is a number of one pruned model, but a job of this sweep "
            f"prunes {len(pruned)}: expected one value in each axis"
        )
    scores: dict[str, float] = {}
    averages: list[float] = []
    for benchmark, step in pruned[0].evaluate.items():
        name = study.store.name(step)
        if name is None:
            raise UserError(
                f"objective={objective}: {benchmark} has no result: `python -m moe_lab.study why "
                f"{study.config.study} store={study.config.store}` explains it"
            )
        with study.store.errors_as_sentences():
            results = parse(study.store.content(name, "result.json"), RESULTS, name)["results"]
        scores |= {entry["benchmark"]: entry["score"] for entry in results}
        higher_is_better = [entry["score"] for entry in results if entry["scale"] == "score"]
        if higher_is_better:
            averages.append(fmean(higher_is_better))
    if objective == AVERAGE and averages:
        return fmean(averages)
    check_known("objective", objective, scores)
    return scores[objective]
