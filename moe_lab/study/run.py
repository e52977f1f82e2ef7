"""Run a study: check its settings, build the graph, run missing steps, write the record and the report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from moe_lab.config import Config
from moe_lab.errors import UserError
from moe_lab.grid import Request
from moe_lab.study import record, report
from moe_lab.study.estimates import Times, disk_problems, forecast, memory_problems
from moe_lab.study.graph import build, unresolved
from moe_lab.study.launch import Launcher, launcher
from moe_lab.study.preflight import lacking, preflight
from moe_lab.study.progress import console, say, say_notices
from moe_lab.study.record import Study
from moe_lab.study.remote import Remote, remote_of
from moe_lab.study.report import finish
from moe_lab.study.runs import begin, last_about
from moe_lab.study.schedule import Schedule, recall_failures
from moe_lab.study.step import Step, unmerged
from moe_lab.study.store import Store


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
    launch = launcher(config.launcher)
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
    with store.errors_as_sentences(), nullcontext() if config.dry_run else store.create().lease(graph.steps()):
        return _run(Study(config, graph, store, add), missing, launch)


def _run(study: Study, missing: list[str], launch: Launcher) -> int:
    """Find the finished steps in the store and `launch` the others. `missing`: what this machine lacks for them."""
    config, graph, store = study.config, study.graph, study.store
    every = graph.steps()
    done = {step.id for step in every if store.done(step)}
    if remote := remote_of(store):
        done |= remote.ids(every) if config.dry_run else _pulled(remote, every, done)
    steps = unmerged(every, done)
    done &= {step.id for step in steps}
    if store.notices and not config.dry_run:
        report.outdate_reports(store)
    say_notices(store)
    say(f"{config.study}: {len(graph.cells)} cells, {len(steps)} steps, {len(done)} of them in {config.store}")
    undone = [step for step in steps if step.id not in done]
    full = disk_problems(store.root, undone)
    if config.launcher.name != "slurm":  # nodes of a cluster have their own memory
        full += memory_problems(undone)
    if config.dry_run:
        _show_forecast(study, steps, done, Times(store))
        if missing or full:
            raise _together("this cannot start yet:", [*missing, *full])
        return 0
    store.clear({step.id for step in every} - {step.id for step in undone})
    if full:
        raise _together("this cannot start:", full)
    schedule = Schedule(steps, done)
    recall_failures(schedule, store, retry=config.retry)
    if remote:
        record.take(remote, config.study)
    study = replace(study, before=record.created(store, config.study))
    say_notices(store)
    if schedule.waiting or last_about(store, config.study) is None:
        begun = begin(store, config.study, steps)
        if schedule.waiting and not launch(schedule, study, begun):
            return 0
    code = max(finish(study, schedule), _pushed(study, schedule))
    return max(code, 1) if remote and remote.failed else code


def _pulled(remote: Remote, every: Sequence[Step], done: set[str]) -> set[str]:
    """Pull the steps of the study that are finished there and not here; their ids. First checks that all can be pushed
    in the end."""
    remote.check_writable()
    there = remote.ids(every) - done
    wanted = [step for step in unmerged(every, done | there) if step.id in there]
    if wanted:
        say(f"pulling {len(wanted)} finished steps from {remote.url}")
        remote.pull(step.folder for step in wanted)
    return {step.id for step in wanted if remote.store.done(step)}


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
