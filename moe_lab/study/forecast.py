"""The forecast of a dry run: missing steps, memory, time, and resources of Slurm jobs."""

from __future__ import annotations

from functools import partial

from moe_lab.errors import user_errors
from moe_lab.study.estimates import forecast_table, seconds_estimator
from moe_lab.study.other_stores import finished_in, open_other
from moe_lab.study.preflight import capacity_problems
from moe_lab.study.record import Study
from moe_lab.study.schedule import console, print_notices


def print_forecast(study: Study) -> list[str]:
    """Print a table of the steps of a study. With launcher=slurm, also print a table of the Slurm
    jobs for the missing steps. Returns a sentence for each problem: the disk or the memory is too
    small, or the settings of jobs are wrong."""
    config = study.config
    # a run would copy finished steps of the stores in `also`, so these steps count as finished
    ids_elsewhere = [finished_in(open_other(path), study.graph.steps) for path in config.also]
    steps, done = study.steps_and_finished_ids(set().union(*ids_elsewhere))
    print_notices(study.store)
    seconds = seconds_estimator(study.store)
    console.print(forecast_table(steps, done, config.resources.gpu_memory, seconds))
    missing = [step for step in steps if step.id not in done]
    problems = capacity_problems(study.store.root, missing, config.launcher)
    if config.launcher.name == "slurm" and missing:
        from moe_lab.study.slurm.arrays import array_table, divide_into_arrays, job_resources

        def print_arrays() -> None:
            resources_of = partial(job_resources, settings=config.resources, seconds=seconds)
            arrays = divide_into_arrays(missing, resources_of, config.launcher)
            console.print(array_table(arrays, config.resources.longest, seconds))

        problems += user_errors(print_arrays)
    return problems
