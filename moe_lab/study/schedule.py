"""Order of execution: every step runs once, after its inputs, on any number of threads, in this
process or in worker processes."""

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
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from moe_lab import progress
from moe_lab.child_process import ChildProcess, ErrorReply, ProcessEnded
from moe_lab.json_files import Document
from moe_lab.start import command
from moe_lab.study.claims import Busy
from moe_lab.study.estimates import StepTime, time_left
from moe_lab.study.packing import Packing
from moe_lab.study.provenance import code_state, error_document
from moe_lab.study.step import Step
from moe_lab.study.steps import perform
from moe_lab.study.steps.files import Files
from moe_lab.study.store import Store, StoreGone

RETAIN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 29)}
"""Environment variables of a worker process: the C library (glibc) keeps freed blocks of up to 32
MiB, 512 MiB in all. Otherwise it returns each freed tensor to the kernel, and takes the next one
from it."""
POLL = 0.5
"""Seconds between two attempts to take a step that another run is computing."""


class StepError(Exception):
    """The error of a failed step. `document`: see `provenance.error_document`. `transient`: whether
    the step may succeed when it is tried again later, such as after a full disk."""

    def __init__(self, document: Document) -> None:
        super().__init__(document["message"])
        self.document = dict(document)
        self.transient = bool(document.get("transient"))


@dataclass
class Schedule:
    """The state of each step of a run. A step is waiting, then running, then finished or failed. A
    step is skipped if one of its inputs has failed."""

    steps: Iterable[Step]
    finished: set[str] = field(default_factory=set)
    failed: dict[str, StepError] = field(default_factory=dict)
    skipped: dict[str, Step] = field(default_factory=dict)
    running: dict[str, tuple[Step, float]] = field(default_factory=dict)
    """Id -> the step, and its start by `clock`."""
    ended: list[StepTime] = field(default_factory=list)
    """Times of the steps that this run has computed."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.waiting = {step.id: step for step in self.steps if step.id not in self.finished}
        self.total = Counter(step.kind for step in self.waiting.values())
        """Kind -> number of steps that were waiting at first."""
        self.condition = threading.Condition()
        """Lock of this object, notified when steps have ended."""

    def waiting_without(self, excluded: Set[str]) -> Set[str]:
        """Ids of the waiting steps, except the steps `excluded` and the steps that need them,
        directly or indirectly."""
        excluded = set(excluded)
        for step in self.waiting.values():  # inputs come before the steps that need them
            if any(needed.id in excluded for needed in step.needs):
                excluded.add(step.id)
        return self.waiting.keys() - excluded

    def take(self, subset: Set[str] | None = None) -> Step | None:
        """Return the first waiting step with finished inputs, and move it to `running`. Block until
        there is such a step. Return None if no step of `subset` is waiting. `subset`: ids of the
        steps that may be taken, from `waiting_without`; None for all steps."""
        with self.condition:
            while any(subset is None or step_id in subset for step_id in self.waiting):
                for step in self.waiting.values():
                    if subset is not None and step.id not in subset:
                        continue
                    if all(needed.id in self.finished for needed in step.needs):
                        self.running[step.id] = self.waiting.pop(step.id), self.clock()
                        return step
                # the timeout is needed, since `postpone` changes `waiting` without a notification
                self.condition.wait(timeout=POLL)
            return None

    def _skip_blocked(self) -> None:
        """Skip the waiting steps that need a failed or skipped step. The caller holds
        `condition`."""
        # inputs come before the steps that need them, so one pass suffices
        for step in list(self.waiting.values()):
            if any(needed.id in self.failed or needed.id in self.skipped for needed in step.needs):
                self.skipped[step.id] = self.waiting.pop(step.id)

    def skip(self, steps: Iterable[Step]) -> None:
        """Skip `steps` and all steps that need one of them."""
        with self.condition:
            for step in steps:
                self.waiting.pop(step.id, None)
                self.skipped[step.id] = step
            self._skip_blocked()
            self.condition.notify_all()

    def postpone(self, step: Step) -> None:
        """Move a running step back to `waiting` after POLL seconds."""
        time.sleep(POLL)
        with self.condition:
            self.waiting[step.id], _ = self.running.pop(step.id)

    def finish(self, step: Step, *, computed: bool = True) -> None:
        """Move a step to `finished`. `computed`: whether this run has computed the step."""
        with self.condition:
            self.waiting.pop(step.id, None)
            # a step that this run has not computed may never have been in `running`
            _, start_time = self.running.pop(step.id, (step, 0.0))
            if computed:
                self.ended.append(StepTime(step, self.clock() - start_time, progress=1.0))
            self.finished.add(step.id)
            self.condition.notify_all()

    def fail(self, step: Step, error: StepError) -> None:
        """Move a step to `failed`, and skip the steps that need it."""
        with self.condition:
            self.running.pop(step.id, None)
            self.waiting.pop(step.id, None)
            self.failed[step.id] = error
            self._skip_blocked()
            self.condition.notify_all()


def recall_failures(schedule: Schedule, store: Store, *, retry: str | None) -> None:
    """Mark as failed each waiting step for which an earlier run has stored an error. The stored
    error is removed instead with retry=failed, or if the code has changed."""
    for step in list(schedule.waiting.values()):
        if step.id not in schedule.waiting:  # skipped, as it needs a failed step
            continue
        document = store.error(step.id)
        if document is None:
            continue
        if retry == "failed" or document.get("code") != code_state():
            store.forget(step.id)
        else:
            message = f"{document['message']} (failed before; retry=failed tries again)"
            schedule.fail(step, StepError({**document, "message": message}))


Execute = Callable[[Step, Path], None]
"""Computes a step in its scratch folder. Raises StepError on failure."""


def work(
    schedule: Schedule, store: Store, execute: Execute, subset: Set[str] | None = None
) -> None:
    """Compute steps until no step is waiting. Errors are stored unless they are transient.
    `subset`: see `Schedule.take`."""
    packing = Packing(store)
    while step := schedule.take(subset):
        try:
            with store.claim(step) as scratch:
                if scratch is not None:  # None: another process has finished the step
                    # all inputs are checked, so that every damaged input is set aside
                    damaged_inputs = [
                        needed for needed in step.needs if not store.is_readable(needed)
                    ]
                    if damaged_inputs:
                        raise _input_error(damaged_inputs[0])
                    execute(step, scratch)
            schedule.finish(step, computed=scratch is not None)
        except Busy:  # another process has claimed the step
            schedule.postpone(step)
        except StepError as error:
            if not error.transient:
                # a step may have failed only because an input was removed meanwhile
                if lost_inputs := [
                    needed for needed in step.needs if not store.is_finished(needed)
                ]:
                    error = _input_error(lost_inputs[0])
                else:
                    store.fail(step, error.document)
            schedule.fail(step, error)
        # errors of reading or writing the store, as errors of the step itself are StepErrors
        except (OSError, StoreGone) as error:
            schedule.fail(step, StepError({**error_document(error), "transient": True}))
        packing.pack_regularly()
    packing.pack(last=True)


def _input_error(damaged_input: Step) -> StepError:
    """The error of a step that needs `damaged_input`, a step with a missing or damaged result."""
    message = (
        f"{damaged_input.folder} was removed or damaged after it was finished: start the study "
        "again to compute it"
    )
    return StepError({"message": message, "transient": True, "user": True})


class WorkerProcess(AbstractContextManager["WorkerProcess"]):
    """A process that computes steps. It starts with the first step, starts again if it has died,
    and ends with the `with` block.

    The process keeps loaded models for its next steps. It replies in JSON: it may have run a
    model's own code, and a pickle from it could run such code here.
    """

    def __init__(self, store: Store, **environment: str) -> None:
        """`environment`: environment variables of the worker process, in addition to those of this
        process."""
        self.store = store
        self.environment = environment
        self.log = store.root / "logs" / f"{os.getpid()}-worker.log"
        """The names of the computed steps, and the output of small steps (`Step.small`)."""
        self.child: ChildProcess | None = None
        """None before the first step."""

    def __exit__(self, *_: object) -> None:
        if self.child:
            self.child.close()

    def __call__(self, step: Step, scratch: Path) -> None:
        """Compute `step` in the worker process, which writes the results to the folder `scratch`.
        Raises StepError when the step fails or the process dies."""
        if self.child is None or self.child.process.poll() is not None:
            self.child = self._start()
        self._append_to_log(f"{time.strftime('%H:%M:%S')} {step.folder}\n")
        pickled_step = b64encode(pickle.dumps((step, Files.of(step, self.store, scratch)))).decode()
        step_log = self.store.log(step.folder)
        try:
            # an error document; {} if the step succeeded
            error = self.child.call("perform_pickled", pickled_step=pickled_step)
        # the process cannot unpickle the step, because the module of the step's class is missing
        except ErrorReply as refused:
            raise StepError({"message": f"{step.folder}: {refused}"}) from None
        except ProcessEnded as ended:
            code = self.child.process.returncode
            death = (
                f"{ended}, as the kernel does when memory runs out"
                if code == -signal.SIGKILL
                else ended
            )
            message = f"{step.folder}: the worker died ({death})"
            if step_log.exists():
                message += f"; its log is {step_log}"
            # A negative code means that a signal ended the process. The signal need not come again.
            raise StepError({"message": message, "transient": code < 0}) from None
        if error:
            raise StepError(error)
        if step.small:
            with suppress(OSError):  # there are many small steps, which share one log
                if self._append_to_log(step_log.read_text(errors="replace")):
                    step_log.unlink()

    def _start(self) -> ChildProcess:
        worker = command("moe_lab.child_process", "moe_lab.study.steps")
        # Before the time of a job is up, Slurm sends USR2 to all processes of the job. Only the
        # parent of the worker handles the signal.
        shell_command = ["sh", "-c", 'trap "" USR2; exec "$0" "$@"', *worker]
        environment = {**RETAIN_MEMORY, **os.environ, **self.environment}
        return ChildProcess(shell_command, environment, umask=self.store.umask)

    def end(self, seconds: float) -> None:
        """End the process by SIGTERM, even in the middle of a step, and wait at most `seconds` for
        its end. A step that collects statistics first saves its sums."""
        if self.child:
            self.child.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.child.process.wait(seconds)

    def _append_to_log(self, text: str) -> bool:
        """Append a text to `self.log`. Returns False if the text is empty or cannot be written."""
        # if the disk is full, the step itself reports it
        with suppress(OSError):
            self.store.make_folder(self.log.parent)
            with self.log.open("a") as log:
                return bool(log.write(text))
        return False


class InProcessExecutor(WorkerProcess):
    """Computes steps in this process. A worker process computes steps that run foreign code. If a
    group of users shares the store, a worker process with the umask of the store computes all
    steps."""

    def __call__(self, step: Step, scratch: Path) -> None:
        """Compute `step`. Raises StepError when the step fails."""
        if step.resources().isolated or self.store.shared:
            super().__call__(step, scratch)
            return
        try:
            perform(step, Files.of(step, self.store, scratch))
        except Exception as error:
            raise StepError(error_document(error)) from error


LINE_EVERY = 60.0
"""Seconds between two printed lines of progress where there is no terminal."""
console = Console(stderr=True, highlight=False)


def inform(sentence: str, style: str | None = None) -> None:
    """Print a sentence for the user on standard error, in one line. `style`: a style of rich, such
    as red."""
    console.print(sentence, markup=False, soft_wrap=True, style=style)


def print_notices(store: Store) -> None:
    """Print and remove the notices in `store.notices`."""
    while store.notices:
        inform(f"moe_lab: {store.notices.pop(0)}")


def show_progress(
    schedule: Schedule, store: Store, workers: int = 0
) -> AbstractContextManager[None]:
    """A context in which the progress of `schedule` is shown. `workers`: number of steps that can
    run at the same time, for the estimate of the time left; 0: as many as are running."""
    return show_regularly(lambda: progress_line(schedule, store, workers))


def progress_line(schedule: Schedule, store: Store, workers: int) -> str:
    """A line of text for the user: the progress of each kind of steps that is not complete, and the
    time left. `workers`: see `show_progress`."""
    with schedule.condition:
        # a step that a Slurm job is computing is in both `waiting` and `running`
        waiting = [step for step in schedule.waiting.values() if step.id not in schedule.running]
        running = list(schedule.running.values())
        ended = list(schedule.ended)
    unfinished = Counter(step.kind for step in waiting)
    unfinished.update(step.kind for step, _ in running)
    running_texts = defaultdict[str, str](str)
    step_times: list[StepTime] = []
    for step, start_time in running:
        # part of the step's work that is done, from 0 to 1, and a text such as "3 of 40 batches"
        done, text = progress.read(store.partial(step) / progress.NAME)
        step_times.append(StepTime(step, schedule.clock() - start_time, done))
        if text:
            running_texts[step.kind] += f" ({text})"
    kind_texts = [
        f"{kind} {total - unfinished[kind]}/{total}{running_texts[kind]}"
        for kind, total in schedule.total.items()
        if unfinished[kind]
    ]
    seconds = time_left(ended, step_times, waiting, workers or len(running) or 1)
    if seconds is None:
        time_text = "time left unknown"
    elif seconds < 60:
        time_text = "less than 1 min left"
    else:
        time_text = f"about {seconds / 60:.0f} min left"
    return ", ".join([*kind_texts, time_text])


@contextmanager
def show_regularly(status: Callable[[], str]) -> Iterator[None]:
    """A context in which the user is shown the minutes since the context began, and the result of
    `status`. On a terminal, one line is overwritten every second."""
    start = time.monotonic()
    end_event = threading.Event()

    def show() -> None:
        with console.status("") if console.is_terminal else nullcontext() as line:
            while not end_event.wait(1.0 if line else LINE_EVERY):
                text = f"{(time.monotonic() - start) / 60:.0f} min: {status()}"
                if line:
                    line.update(text)
                else:
                    print(text, file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end_event.set()
        thread.join()
