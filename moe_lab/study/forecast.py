"""What a study would run, and about what it takes: the answer of dry_run=true."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.table import Table

from moe_lab.config import Config
from moe_lab.study.estimate import hours, memory
from moe_lab.study.identity import Step
from moe_lab.study.progress import console
from moe_lab.study.resources import resources
from moe_lab.study.slurm.arrays import arrange


def show(config: Config, steps: Sequence[Step], done: set[str]) -> None:
    """Print the graph as a table, and what Slurm would be asked for if it were."""
    console.print(forecast(steps, done, config.resources.gpu_memory))
    missing = [step for step in steps if step.id not in done]
    if config.launcher.name == "slurm" and missing:
        console.print(arrays(config, missing))


def forecast(steps: Sequence[Step], done: set[str], gpu_memory: float) -> Table:
    """Distinct steps by kind, cached and missing, and what the missing ones take by estimate. `done`: ids."""
    columns = ("step", "distinct", "cached", "missing", "memory of one", "hours", "GPU-hours")
    table = Table(*columns, title="what would run, and about what it takes", show_footer=True)
    total = [0.0, 0.0]
    for kind in dict.fromkeys(step.kind for step in steps):
        of_kind = [step for step in steps if step.kind == kind]
        missing = [step for step in of_kind if step.id not in done]
        takes = hours(missing, gpu_memory)
        total = [before + more for before, more in zip(total, takes, strict=True)]
        counts = (len(of_kind), len(of_kind) - len(missing), len(missing))
        table.add_row(kind, *map(str, counts), memory(missing), *(f"{value:.2f}" for value in takes))
    for column, value in zip(table.columns[-2:], total, strict=True):
        column.footer = f"{value:.2f}"
    return table


def arrays(config: Config, missing: Sequence[Step]) -> Table:
    """The arrays of jobs that `missing` steps would be submitted as, and what each job asks for."""
    columns = ("array", "jobs", "steps", "GPUs", "CPUs", "GiB", "minutes", "partition")
    table = Table(*columns, title="what Slurm would be asked for, each job")
    for array in arrange(missing, partial(resources, settings=config.resources), config.launcher):
        asks = [array.asks[name] for name in ("gpus", "cpus", "memory", "minutes", "partition")]
        counts = (len(array.packs), sum(map(len, array.packs)))
        table.add_row(array.kind, *map(str, (*counts, *asks[:-1])), asks[-1] or "default")
    return table
