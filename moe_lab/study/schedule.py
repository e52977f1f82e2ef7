"""Order of execution: every step runs once, after its inputs, on any number of threads, here or in
worker processes."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from moe_lab import progress
from moe_lab.child_process import Child, Ended, Refused
from moe_lab.start import command
from moe_lab.study.claims import Busy
from moe_lab.study.estimates import Seconds, Spent, learned, time_left
from moe_lab.study.failures import error_document
from moe_lab.study.packing import Packing
from moe_lab.study.provenance import code_state
from moe_lab.study.step import Step
from moe_lab.study.steps import perform
from moe_lab.study.steps.files import Files
from moe_lab.study.steps.models import Models
from moe_lab.study.store import Gone, Store

POLL = 0.5
"""Seconds between two looks at a step that another run is working on."""


class StepError(Exception):
    """A step failed. `document` describes the error. Errors that are `transient`, the machine's
    fault, are not stored."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__(document["message"])
        self.document = dict(document)
        self.transient = bool(document.get("transient"))


@dataclass
class Schedule:
    """The state of a run. Steps go from waiting to running to finished or failed; or to skipped if
    an input failed."""

    steps: Iterable[Step]
    finished: set[str] = field(default_factory=set)
    failed: dict[str, StepError] = field(default_factory=dict)
    skipped: dict[str, Step] = field(default_factory=dict)
    running: dict[str, tuple[Step, float]] = field(default_factory=dict)
    """With the moment at which it was begun, by `clock`."""
    ended: list[Spent] = field(default_factory=list)
    """What was done in this run."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.waiting = {step.id: step for step in self.steps if step.id not in self.finished}
        self.total = Counter(step.kind for step in self.waiting.values())
        self.changed = threading.Condition()

    def apart_from(self, others: Set[str]) -> Set[str]:
        """Ids of the waiting steps without `others`, and without those that need them."""
        without = set(others)
        for step in self.waiting.values():  # inputs come first
            if any(needed.id in without for needed in step.needs):
                without.add(step.id)
        return self.waiting.keys() - without

    def take(self, among: Set[str] | None = None) -> Step | None:
        """Take the next step, of all or of some that `apart_from` gave, whose inputs are finished,
        waiting for one if necessary; None when none of them is waiting."""
        with self.changed:
            while any(among is None or name in among for name in self.waiting):
                for step in self.waiting.values():
                    fits = among is None or step.id in among
                    if fits and all(needed.id in self.finished for needed in step.needs):
                        self.running[step.id] = self.waiting.pop(step.id), self.clock()
                        return step
                self.changed.wait(timeout=POLL)
            return None

    def _skip_hopeless(self) -> None:
        # inputs come first, so one sweep reaches everything
        for step in list(self.waiting.values()):
            if any(needed.id in self.failed or needed.id in self.skipped for needed in step.needs):
                self.skipped[step.id] = self.waiting.pop(step.id)

    def lack(self, steps: Iterable[Step]) -> None:
        """Skip `steps` and everything that needs them."""
        with self.changed:
            for step in steps:
                self.waiting.pop(step.id, None)
                self.skipped[step.id] = step
            self._skip_hopeless()
            self.changed.notify_all()

    def postpone(self, step: Step) -> None:
        """Put back a step that another run is working on, after a moment in which that may have
        ended."""
        time.sleep(POLL)
        with self.changed:
            self.waiting[step.id], _ = self.running.pop(step.id)

    def finish(self, step: Step, *, did: bool = True) -> None:
        """Count a step as finished. `did`: whether it was done in this run."""
        with self.changed:
            self.waiting.pop(step.id, None)
            _, begun = self.running.pop(step.id, (step, 0.0))
            self.ended += [(step, self.clock() - begun, 1.0)] if did else []
            self.finished.add(step.id)
            self.changed.notify_all()

    def fail(self, step: Step, error: StepError) -> None:
        with self.changed:
            self.running.pop(step.id, None)
            self.waiting.pop(step.id, None)
            self.failed[step.id] = error
            self._skip_hopeless()
            self.changed.notify_all()


def recall_failures(schedule: Schedule, store: Store, *, retry: str | None) -> None:
    """Mark steps that failed in an earlier run as failed, unless retry=failed or the code has
    changed since, or what is installed was to blame, which may have."""
    for step in list(schedule.waiting.values()):
        if step.id not in schedule.waiting or (document := store.error(step.id)) is None:
            continue
        if retry == "failed" or document.get("environment") or document.get("code") != code_state():
            store.forget(step.id)
        else:
            again = {
                **document,
                "message": f"{document['message']} (failed before; retry=failed tries again)",
            }
            schedule.fail(step, StepError(again))


Execute = Callable[[Step, Path], None]
"""Does a step in its scratch folder. Raises StepError on failure."""


def work(schedule: Schedule, store: Store, execute: Execute, among: Set[str] | None = None) -> None:
    """Take steps, all or some, until none is left: claim, execute, publish."""
    packing = Packing(store)
    while step := schedule.take(among):
        try:
            with store.claim(step) as scratch:
                if scratch is not None:
                    if damaged := [needed for needed in step.needs if not store.readable(needed)]:
                        raise _not_as_published(damaged[0])
                    execute(step, scratch)
            schedule.finish(step, did=scratch is not None)
        except Busy:
            schedule.postpone(step)
        except StepError as error:
            if (
                removed := []
                if error.transient
                else [each for each in step.needs if not store.done(each)]
            ):
                error = _not_as_published(removed[0])
            if not error.transient:
                store.fail(step, error.document)
            schedule.fail(step, error)
        except (OSError, Gone) as error:
            schedule.fail(step, StepError({**error_document(error), "transient": True}))
        packing.now_and_then()
    packing.pack(last=True)


def _not_as_published(step: Step) -> StepError:
    message = (
        f"{step.folder} was removed or damaged after it was finished: start the study "
        "again, and it is made anew"
    )
    return StepError({"message": message, "transient": True, "user": True})


class Worker(AbstractContextManager["Worker"]):
    """A worker process, for `work`: started at the first step, restarted if it has died, ended with
    the `with` block.

    It keeps the model loaded between steps, and ends with its standard input, even in the middle of
    a step, so that it writes nothing after its parent was killed. Its replies are JSON, as it may
    have run a model's own code.
    """

    def __init__(self, store: Store, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self.store = store
        self.environment = environment
        self.log = store.root / "logs" / f"{os.getpid()}-worker.log"
        """File with the steps that workers of this process were given."""
        self.child: Child | None = None

    def __exit__(self, *_: object) -> None:
        if self.child:
            self.child.close()

    def __call__(self, step: Step, scratch: Path) -> None:
        """Do `step` in the worker. Raises StepError when it fails, naming the signal if the worker
        died."""
        if self.child is None or self.child.process.poll() is not None:
            # Slurm warns all processes of a job that time is up; the first one has the worker end,
            # by `end`.
            worker = command("moe_lab.child_process", "moe_lab.study.steps")
            unwarned = ["sh", "-c", 'trap "" USR2; exec "$0" "$@"', *worker]
            self.child = Child(unwarned, {**os.environ, **self.environment})
        self._note(f"{time.strftime('%H:%M:%S')} {step.folder}\n")
        work = b64encode(pickle.dumps((step, Files.of(step, self.store, scratch)))).decode()
        try:
            error = self.child.call("perform_pickled", work=work)
        except Refused as refused:  # the step cannot be read, as without its module
            raise StepError({"message": f"{step.folder}: {refused}"}) from None
        except Ended as ended:
            code = self.child.process.returncode
            printed = self.store.log(step.folder)
            hint = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
            message = f"{step.folder}: the worker died ({ended}{hint})"
            message += f"; its log is {printed}" if printed.exists() else ""
            raise StepError({"message": message, "transient": code < 0}) from None
        if error:
            raise StepError(error)
        with suppress(OSError):  # small steps are many: they leave no file each
            if step.small and self._note(
                (printed := self.store.log(step.folder)).read_text(errors="replace")
            ):
                printed.unlink()

    def end(self, seconds: float) -> None:
        """End the worker, in the middle of its step; a pass may save for so many seconds, see
        `observe.Saves`."""
        if self.child:
            self.child.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.child.process.wait(seconds)

    def _note(self, text: str) -> bool:
        """Write to the log; whether there was room. On a full disk, or where the store is gone, the
        step says so."""
        with suppress(OSError):
            self.log.parent.mkdir(exist_ok=True)
            with self.log.open("a") as log:
                return bool(log.write(text))
        return False


class Here(Worker):
    """Does steps in this process, except those with foreign code, which run in a worker."""

    def __init__(self, store: Store, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(store, environment)
        self.models = Models()

    def __call__(self, step: Step, scratch: Path) -> None:
        if step.resources().isolated:
            super().__call__(step, scratch)
            return
        try:
            perform(step, Files.of(step, self.store, scratch, self.models))
        except Exception as error:
            raise StepError(error_document(error)) from error


LINE_EVERY = 60.0
"""Seconds between two lines of progress without a terminal."""
console = Console(stderr=True, highlight=False)


def say(sentence: str, style: str | None = None) -> None:
    """Print a sentence for the user on standard error, without markup or wrapping."""
    console.print(sentence, markup=False, soft_wrap=True, style=style)


def say_notices(store: Store) -> None:
    """Print, and then forget, the notices on what was set aside in the store."""
    while store.notices:
        say(f"moe_lab: {store.notices.pop(0)}")


def watch(schedule: Schedule, store: Store, workers: int = 0) -> AbstractContextManager[None]:
    """Show the state of `schedule` until the block ends. `workers`: how many steps run at the same
    time; 0: as many as run now."""
    return shown(partial(overview, schedule, store, cache(learned(store)), workers))


def overview(schedule: Schedule, store: Store, seconds: Seconds, workers: int) -> str:
    """How many steps of each kind have ended, how far the running ones are, and the time left.
    `seconds`: what the store knows of a step."""
    with schedule.changed:
        waiting = [step for step in schedule.waiting.values() if step.id not in schedule.running]
        running = list(schedule.running.values())
        ended = list(schedule.ended)
    left = Counter(step.kind for step in waiting)
    inside = defaultdict[str, str](str)
    spent = list[Spent]()
    for step, begun in running:
        left[step.kind] += 1
        share, words = progress.read(store.partial(step) / progress.NAME)
        spent.append((step, schedule.clock() - begun, share))
        inside[step.kind] += f" ({words})" if words else ""
    totals = {kind: total for kind, total in schedule.total.items() if left[kind]}
    kinds = [f"{kind} {total - left[kind]}/{total}{inside[kind]}" for kind, total in totals.items()]
    takes, unknown = time_left(ended, spent, waiting, seconds, workers or len(running) or 1)
    time_text = f"about {takes / 60:.0f} min left" if takes >= 60 else "less than 1 min left"
    if unknown:
        time_text = (
            f"{time_text} (no {', '.join(unknown)} step has ended)"
            if takes >= 60
            else "time left unknown"
        )
    return ", ".join([*kinds, time_text])


def shown(look: Callable[[], str]) -> AbstractContextManager[None]:
    """Show what `look` says until the block ends: on a terminal in one line that changes, else in a
    line a minute."""
    start = time.monotonic()

    def show(stop: threading.Event) -> None:
        with console.status("") if console.is_terminal else nullcontext() as line:
            while not stop.wait(1.0 if line else LINE_EVERY):
                text = f"{(time.monotonic() - start) / 60:.0f} min: {look()}"
                if line:
                    line.update(text)
                else:
                    print(text, file=sys.stderr, flush=True)

    return beside(show)


@contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do `work` in a thread until the block ends, which sets the event that it is given."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
