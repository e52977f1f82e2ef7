"""Run a study: check its settings, build the graph, run missing steps, write the record and the report."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial

from moe_lab.config import Config
from moe_lab.errors import UserError
from moe_lab.grid import Request
from moe_lab.results import DIGITS
from moe_lab.study.estimates import Times, disk_problems, forecast, memory_problems
from moe_lab.study.graph import build, unresolved
from moe_lab.study.launch import LAUNCHERS, Launcher
from moe_lab.study.preflight import lacking, preflight
from moe_lab.study.progress import console, say, say_notices
from moe_lab.study.record import Study, finish, outdate_reports
from moe_lab.study.runs import Run, begin
from moe_lab.study.schedule import Schedule, recall_failures
from moe_lab.study.step import Step, unmerged
from moe_lab.study.store import Store
from moe_lab.study.sync import Remote, pull, pull_records, pushed_regularly


def run(config: Config, requests: Sequence[Request], *, add: bool = False) -> int:
    """Run the study. Returns the exit code.

    `add`: add its cells to those recorded under its name, instead of replacing them.

    0: all done; 1: something failed or is missing; 2: all failures are mistakes of the user. Raises UserError for
    mistakes found before anything is run. When something is missing here, a dry run prints its forecast first.
    """
    problems = preflight(config, requests)
    missing = lacking(config, requests)
    if problems := list(dict.fromkeys(problems + ([] if config.dry_run else missing))):
        raise _together("several things:", problems)
    graph = build(config, requests)
    if config.push is not None:
        from moe_lab.study import push

        push.check_graph(config, graph)
    if unknown := unresolved(graph.steps()):
        sentence = (
            f"{', '.join(unknown)}: not in the cache, and the hub cannot be asked, so what would be read is not known"
        )
        if not config.dry_run:
            raise UserError(f"{sentence}: connect to the hub, download it first, or give a folder or a file")
        say(f"{sentence}: the ids of its steps are not final")
    store = Store(config.store)
    study = Study(config, graph, store, add)
    with store.errors_as_sentences():
        if config.dry_run:
            return _forecast(study, missing)
        store.create()
        if store.url:
            pull_records(store, Remote(store.url), config.study)
        with begin(store, config.study, graph.steps()) as begun:
            return _run(study, begun, LAUNCHERS[config.launcher.name])


def _run(study: Study, begun: Run, launch: Launcher) -> int:
    """Find the finished steps in the store and `launch` the others."""
    config, store = study.config, study.store
    every = study.graph.steps()
    if store.url:
        _pull(store, Remote(store.url), every)
    steps, done = _in_store(study)
    if store.notices:
        outdate_reports(store)
    say_notices(store)
    begun.note(steps)
    undone = [step for step in steps if step.id not in done]
    store.clear({step.id for step in every} - {step.id for step in undone})
    if full := _too_little(study, undone):
        begun.remove()
        raise _together("this cannot start:", full)
    schedule = Schedule(steps, done)
    recall_failures(schedule, store, retry=config.retry)
    say_notices(store)
    with pushed_regularly(store):
        if schedule.waiting and not launch(schedule, study, begun):
            return 0
    return max(finish(study, schedule, begun), _pushed(study, schedule))


def _pull(store: Store, remote: Remote, steps: Sequence[Step]) -> None:
    """Copy those of the steps into the store that are finished only there."""
    done = {step.id for step in steps if store.done(step)}
    there = _finished_there(remote, steps) - done
    wanted = [step for step in unmerged(steps, done | there) if step.id in there]
    if wanted:
        say(f"pulling {len(wanted)} finished steps from {remote.url}")
        pull(store, remote, [step.folder for step in wanted])


def _finished_there(remote: Remote, steps: Sequence[Step]) -> set[str]:
    there = remote.finished()
    return {step.id for step in steps if step.id[:DIGITS] in there}


def _in_store(study: Study, elsewhere: Set[str] = frozenset()) -> tuple[list[Step], set[str]]:
    """The steps of a study, and the ids of those that are finished. `elsewhere`: ids of those that will be pulled."""
    store, every = study.store, study.graph.steps()
    done = {step.id for step in every if store.done(step)} | elsewhere
    steps = unmerged(every, done)
    done &= {step.id for step in steps}
    place = study.config.store
    say(f"{study.config.study}: {len(study.graph.cells)} cells, {len(steps)} steps, {len(done)} of them in {place}")
    return steps, done


def _too_little(study: Study, undone: Sequence[Step]) -> list[str]:
    """Sentences on disk and memory that do not suffice for these steps."""
    full = disk_problems(study.store.root, undone)
    if study.config.launcher.name != "slurm":  # nodes of a cluster have their own memory
        full += memory_problems(undone)
    return full


def _forecast(study: Study, missing: Sequence[str]) -> int:
    """Print what a run would do. `missing`: what this machine lacks for it."""
    store, every = study.store, study.graph.steps()
    steps, done = _in_store(study, _finished_there(Remote(store.url), every) if store.url else frozenset())
    say_notices(store)
    full = _too_little(study, [step for step in steps if step.id not in done])
    _show_forecast(study, steps, done, Times(store))
    if missing or full:
        raise _together("this cannot start yet:", [*missing, *full])
    return 0


def _pushed(study: Study, schedule: Schedule) -> int:
    """Upload the study's export, if the settings say so; the exit code."""
    if study.config.push is None:
        return 0
    from moe_lab.study.push import push

    return push(study, study.config.push, schedule)


def _show_forecast(study: Study, steps: Sequence[Step], done: set[str], times: Times) -> None:
    """Print a table of the graph's steps, with launcher=slurm one of the jobs' resources, and what would be
    uploaded."""
    config = study.config
    console.print(forecast(steps, done, config.resources.gpu_memory, times.seconds))
    missing = [step for step in steps if step.id not in done]
    if config.launcher.name == "slurm" and missing:
        from moe_lab.study.slurm.arrays import arrange, table
        from moe_lab.study.slurm.resources import resources

        ask = partial(resources, settings=config.resources, seconds=times.seconds)
        arrays = arrange(missing, ask, config.launcher)
        console.print(table(arrays, config.resources.longest, times.seconds))
    if config.push is not None:
        from moe_lab.study.push import show

        show(study, config.push, done)


def _together(heading: str, problems: Sequence[str]) -> UserError:
    return UserError(problems[0] if len(problems) == 1 else "\n  - ".join([heading, *problems]))
