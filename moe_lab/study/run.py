"""Run a study: build the graph, run missing steps, write the record and the report."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from statistics import fmean
from typing import NamedTuple

from moe_lab.config import Config
from moe_lab.config.base import SettingsError
from moe_lab.errors import Unavailable, UserError, check_known, user_errors
from moe_lab.grid import Request
from moe_lab.json_files import Number, parse
from moe_lab.models import WORKERS, cores, main_memory, visible_gpus
from moe_lab.study.estimates import check_memory, disk_problems, forecast, learned
from moe_lab.study.graph import build, normalized, unresolved
from moe_lab.study.other_stores import copy_steps, finished_in, open_other
from moe_lab.study.preflight import AVERAGE, lacking, remarks, visible_difference
from moe_lab.study.record import Study, finish, outdate_reports
from moe_lab.study.runs import Run, begin
from moe_lab.study.schedule import (
    Here,
    Schedule,
    Worker,
    console,
    recall_failures,
    say,
    say_notices,
    watch,
    work,
)
from moe_lab.study.step import Step, unmerged
from moe_lab.study.store import Store


def inline(schedule: Schedule, study: Study, run: Run) -> bool:
    """Run one step after another in this process."""
    with watch(schedule, study.store, 1), Here(study.store) as execute:
        work(schedule, study.store, execute)
    return True


def local(schedule: Schedule, study: Study, run: Run) -> bool:
    """Run steps in worker processes: launcher.processes of them, or one for each core, if there is
    memory for the largest step in each. With GPUs, steps that need one run first, in a process for
    each GPU; then those that need two, in a process for each pair; and so on."""
    resources = {name: step.resources() for name, step in schedule.waiting.items()}
    known = {name: needed for name, needed in resources.items() if needed.memory is not None}
    needed = {
        name: needed.gpus(study.config.resources.gpu_memory) or 1 for name, needed in known.items()
    }
    on_gpu = any(needed.on_gpu for needed in resources.values())
    if not (cards := visible_gpus() if on_gpu else []):
        largest = max((needed.memory or 0.0 for needed in known.values()), default=1.0)
        count = study.config.launcher.processes or max(
            1, min(cores(), int(main_memory() // largest))
        )
        _serve(schedule, study.store, [{}] * count, None)
        return True
    for each in sorted(set(needed.values())) or [1]:
        among = schedule.apart_from({name for name, count in needed.items() if count > each})
        sets = [cards[at : at + each] for at in range(0, max(1, len(cards) - each + 1), each)]
        asked = study.config.launcher.processes or len(sets)
        # a step that needs several leaves no room on them
        count = asked if each == 1 else min(asked, len(sets))
        workers = [sets[number % len(sets)] for number in range(count)]
        _serve(
            schedule,
            study.store,
            [{"CUDA_VISIBLE_DEVICES": ",".join(of_one)} for of_one in workers],
            among,
        )
    return True


def _serve(
    schedule: Schedule,
    store: Store,
    environments: Sequence[Mapping[str, str]],
    among: Set[str] | None,
) -> None:
    """Do steps, all or some, in a worker process for each of the environments."""
    errors: list[BaseException] = []

    def serve(environment: Mapping[str, str]) -> None:
        try:
            with Worker(store, {**environment, WORKERS: str(len(environments))}) as execute:
                work(schedule, store, execute, among)
        except BaseException as error:  # noqa: BLE001 - a bug in this thread must not look like the end of the work
            errors.append(error)

    threads = [
        threading.Thread(target=serve, args=(of_one,), daemon=True) for of_one in environments
    ]
    with watch(schedule, store, len(environments)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def slurm(schedule: Schedule, study: Study, run: Run) -> bool:
    """Run steps as jobs of a Slurm cluster; returns when they are submitted, or with wait=true when
    they have ended."""
    from moe_lab.study.slurm.pack import follow
    from moe_lab.study.slurm.submit import submit

    submit(schedule, study, run)
    if study.config.wait:
        follow(schedule, study)
    return study.config.wait


Launcher = Callable[[Schedule, Study, Run], bool]
"""Runs the steps of a schedule. True when they have ended, False when they are only submitted."""
LAUNCHERS: Mapping[str, Launcher] = {"inline": inline, "local": local, "slurm": slurm}


class Ended(NamedTuple):
    """How a study ended."""

    code: int
    """0: all done; 1: something failed or is missing; 2: all failures are mistakes of the user."""
    study: Study


def run(config: Config, requests: Sequence[Request], *, add: bool = False) -> Ended:
    """Run a study whose settings are valid. `add`: add its cells to those recorded under its name,
    instead of replacing them. Raises UserError for what is missing here, before anything is run,
    after the forecast of a dry run; and Unavailable, always after the forecast, for models and
    texts that cannot be had here."""
    for remark in remarks(config, requests):
        say(remark)
    graph = build(config, requests)
    study = Study(config, graph, Store(config.store, 60 * config.launcher.stale_minutes), add)
    absent = unresolved(graph.steps)
    missing = lacking(graph.steps, config.launcher)
    with study.store.errors_as_sentences():
        if config.dry_run or absent:
            missing += _forecast(study)
            for sentence in visible_difference(requests):
                say(sentence)
        if absent:
            names = (
                f"missing here: {', '.join(absent)}: no folder or file, not in the cache, and "
                "not given by the hub"
            )
            advice = (
                "check the name, connect to the hub, download it first, or give a folder or a file"
            )
            raise Unavailable(str(SettingsError([f"{names}: {advice}", *missing])))
        if missing:
            raise SettingsError(missing)
        return Ended(0 if config.dry_run else _run(study), study)


def _run(study: Study) -> int:
    """Run the missing steps, or submit them, and finish; the exit code."""
    config = study.config
    store = study.store.create()
    every = study.graph.steps
    with begin(store, config.study, every) as begun:
        for path in config.also:
            _take_over(store, open_other(path), every)
        steps, done = _in_store(study)
        if config.tracker.name != "none" or config.objective:
            done -= _damaged_results(study, done)
        if store.notices:
            outdate_reports(store)
        say_notices(store)
        if len(steps) < len(every):  # shares of what is finished as a whole are not made
            begun.note(steps)
        undone = [step for step in steps if step.id not in done]
        left = {step.id for step in undone}
        store.clear(step.id for step in every if step.id not in left)
        if full := _too_little(study, undone):
            begun.remove()
            raise SettingsError(full)
        schedule = Schedule(steps, done)
        recall_failures(schedule, store, retry=config.retry)
        say_notices(store)
        if schedule.waiting and not LAUNCHERS[config.launcher.name](schedule, study, begun):
            return 0
        return finish(study, schedule, begun)


def _take_over(store: Store, other: Store, steps: Sequence[Step]) -> None:
    """Copy those of the steps into the store that are finished in the other one alone."""
    done = store.done_of(steps)
    available = finished_in(other, steps) - done
    wanted = [step for step in unmerged(steps, done | available) if step.id in available]
    if wanted:
        say(f"taking {len(wanted)} finished steps from also={other.root}")
        copy_steps(store, other, wanted)


def _in_store(study: Study, elsewhere: Set[str] = frozenset()) -> tuple[list[Step], set[str]]:
    """The steps of a study, and the ids of those that are finished. `elsewhere`: ids of those that
    will be taken."""
    store = study.store
    every = study.graph.steps
    done = store.done_of(every) | elsewhere
    steps = unmerged(every, done)
    done &= {step.id for step in steps}
    place = ", ".join([study.config.store, *(study.config.also if elsewhere else [])])
    say(
        f"{study.config.study}: {len(study.graph.cells)} cells, {len(steps)} steps, {len(done)} "
        f"of them in {place}"
    )
    return steps, done


def _damaged_results(study: Study, done: Set[str]) -> set[str]:
    """Ids of those of the finished steps whose results are told at the end and are damaged, found
    by hashing."""
    results = {
        step.id: step for cell in study.graph.cells for step in (*cell.evaluate.values(), cell.cost)
    }
    return {
        name for name, step in results.items() if name in done and not study.store.readable(step)
    }


def _forecast(study: Study) -> list[str]:
    """Print what a run would do: a table of its steps, and with launcher=slurm one of the jobs'
    resources. Returns a sentence for resources that are too small for it."""
    config = study.config
    store = study.store
    every = study.graph.steps
    available = [finished_in(open_other(path), every) for path in config.also]
    steps, done = _in_store(study, set().union(*available))
    say_notices(store)
    seconds = learned(store)
    undone = [step for step in steps if step.id not in done]
    console.print(forecast(steps, done, config.resources.gpu_memory, seconds))
    too_little = _too_little(study, undone)
    if config.launcher.name == "slurm" and undone:
        from moe_lab.study.slurm.arrays import arrange, resources, table

        ask = partial(resources, settings=config.resources, seconds=seconds)
        jobs = partial(arrange, undone, ask, config.launcher)
        too_little += user_errors(
            lambda: console.print(table(jobs(), config.resources.longest, seconds))
        )
    return too_little


def _too_little(study: Study, undone: Sequence[Step]) -> list[str]:
    """A sentence for a disk that is too small for what is not done, and for each model that main
    memory does not hold; nodes of a cluster have memory of their own."""
    loading = undone if study.config.launcher.name != "slurm" else []
    too_large = [sentence for step in loading for sentence in user_errors(check_memory, step)]
    return disk_problems(study.store.root, undone) + list(dict.fromkeys(too_large))


RESULTS = {"results": [{"benchmark": str, "metric": str, "score": Number, "scale": str}]}
"""Expected form of a result.json."""


def told(ended: Ended, requests: Iterable[Request]) -> float:
    """What a sweeper is told of a job that asked for these cells: the number that `objective`
    names, or the exit code.

    Avg is the mean over benchmarks in which more is better, each the mean of its results; any other
    name is that of a result, such as arc_easy or perplexity. UserError when the job prunes no or
    several models, or lacks a result."""
    code, study = ended
    wanted = study.config.objective
    if wanted is None or study.config.dry_run:
        return code
    cells = {normalized(cell) for asked, _ in requests for cell in asked}
    pruned = [steps for steps in study.graph.cells if steps.cell in cells]
    if len(pruned) != 1:
        raise UserError(
            f"objective={wanted} is a number of one pruned model, but a job of this sweep prunes "
            f"{len(pruned)}: "
            "expected one value in each axis"
        )
    scores: dict[str, float] = {}
    averaged: list[float] = []
    for benchmark, step in pruned[0].evaluate.items():
        if (name := study.store.name(step)) is None:
            raise UserError(
                f"objective={wanted}: {benchmark} has no result: `python -m moe_lab.study why "
                f"{study.config.study} "
                f"store={study.config.store}` says why"
            )
        with study.store.errors_as_sentences():
            results = parse(study.store.content(name, "result.json"), RESULTS, name)["results"]
        scores |= {result["benchmark"]: result["score"] for result in results}
        shares = [result["score"] for result in results if result["scale"] == "score"]
        averaged += [fmean(shares)] if shares else []
    if wanted == AVERAGE and averaged:
        return fmean(averaged)
    check_known("objective", wanted, scores)
    return scores[wanted]
