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

SHAPE = {"results": [{"benchmark": str, "metric": str, "score": Number, "scale": str}]}
"""Expected form of a result.json."""


def objective_value(result: RunResult, requests: Iterable[Request]) -> float:
    """The number that a job of a multirun returns to the sweeper: the number that the setting
    `objective` names. In a dry run, or if no objective is set, it is the exit code of the job.

    The objective "Avg" is a mean over benchmarks. The number of a benchmark is the mean over its
    results in which higher is better. Any other objective is the name of a result, such as arc_easy
    or perplexity. Raises UserError unless the job prunes exactly one model and has all results."""
    code, study = result
    objective = study.config.objective
    if objective is None or study.config.dry_run:
        return code
    requested_cells = {normalized(cell) for cells, _ in requests for cell in cells}
    pruned_cells = [steps for steps in study.graph.cells if steps.cell in requested_cells]
    if len(pruned_cells) != 1:
        raise UserError(
            f"objective={objective} is a number of one pruned model, but a job of this sweep "
            f"prunes {len(pruned_cells)}: expected one value in each axis"
        )
    scores: dict[str, float] = {}
    averages: list[float] = []
    for benchmark, step in pruned_cells[0].evaluate.items():
        name = study.store.stored_name(step)
        if name is None:
            raise UserError(
                f"objective={objective}: {benchmark} has no result: `moe-lab why "
                f"{study.config.study} store={study.config.store}` explains it"
            )
        with study.store.errors_as_sentences():
            results = parse(study.store.content(name, "result.json"), SHAPE, name)["results"]
        scores |= {entry["benchmark"]: entry["score"] for entry in results}
        # of the scales, only "score" means that higher is better
        increasing_scores = [entry["score"] for entry in results if entry["scale"] == "score"]
        if increasing_scores:
            averages.append(fmean(increasing_scores))
    if objective == AVERAGE and averages:
        return fmean(averages)
    check_known("objective", objective, scores)
    return scores[objective]
