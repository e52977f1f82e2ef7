"""Do steps in this process (`Here`) or in a worker process (`Worker`).

A worker is started as `python -m moe_lab.study.worker`. It reads a job as one line of JSON, answers with one line of
JSON, and keeps the model loaded between jobs. It needs neither Hydra nor the configuration. It ends when its standard
input is closed, even in the middle of a job, so that it writes nothing after its parent was killed.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from moe_lab.start import command
from moe_lab.study.schedule import StepError
from moe_lab.study.step import Job, Step, error_document, log_of
from moe_lab.study.steps import KINDS, perform
from moe_lab.study.store import Store


class Worker:
    """A worker process: started at the first step, restarted if it has died, ended with the `with` block."""

    def __init__(self, store: Store, name: str, environment: dict[str, str] | None = None) -> None:
        self.store, self.name, self.environment = store, name, environment or {}
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process and self.process.stdin and self.process.stdout:
            self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()

    def _start(self) -> subprocess.Popen[str]:
        path = self.store.root / "logs" / f"{self.name}.log"  # which steps it did, and what it printed before
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as log:
            # Slurm sends its warning that time is up to all processes of a job, of which only the first one handles it.
            return subprocess.Popen(
                ["sh", "-c", 'trap "" USR2; exec "$0" "$@"', *command("moe_lab.study.worker")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self.environment},
            )

    def __call__(self, step: Step, scratch: Path) -> None:
        """Do `step` in the worker. Raises StepError when it fails, naming the signal if the worker died."""
        line = self._reply(Job.of(step, self.store, scratch))
        if not line:
            raise StepError(self._death(step))
        if reply := json.loads(line):
            raise StepError(reply)

    def _reply(self, job: Job) -> str:
        """The worker's answer to a job; "" if it died."""
        if self.process is None or self.process.poll() is not None:
            self.process = self._start()
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps(asdict(job)) + "\n")
            self.process.stdin.flush()
            return self.process.stdout.readline()
        except BrokenPipeError:
            return ""

    def _death(self, step: Step) -> dict[str, Any]:
        assert self.process
        code = self.process.wait()
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        hint = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
        message = f"{step.folder}: the worker died ({cause}{hint}); its log is {log_of(self.store, step.folder)}"
        return {"message": message, "transient": code < 0}


class Here:
    """Does steps in this process, except kinds with `own_process`, which run in a worker."""

    def __init__(self, store: Store) -> None:
        self.store, self.worker = store, Worker(store, f"{os.getpid()}-worker")

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *exception: object) -> None:
        self.worker.__exit__(*exception)

    def __call__(self, step: Step, scratch: Path) -> None:
        if KINDS[step.kind].own_process:
            self.worker(step, scratch)
            return
        try:
            perform(Job.of(step, self.store, scratch))
        except Exception as error:
            raise StepError(error_document(error)) from error


def _listen(jobs: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)


def serve(replies: IO[str]) -> None:
    """Do jobs until the process ends. Reply {} for success, else the error document."""
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    while True:
        job = Job(**jobs.get())
        print(f"{time.strftime('%H:%M:%S')} {job.name}", file=sys.stderr, flush=True)
        with _printing_to(Path(job.log)):
            try:
                perform(job)
                reply: dict[str, Any] = {}
            except Exception as error:  # noqa: BLE001 - whatever went wrong belongs to this job alone, and is reported
                reply = error_document(error)
                print(reply["trace"] or reply["message"], file=sys.stderr)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


@contextmanager
def _printing_to(log: Path) -> Iterator[None]:
    """While open, what this process and its children print is added to `log`, which is removed if it stays empty."""
    log.parent.mkdir(parents=True, exist_ok=True)
    usual = os.dup(2)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(usual, 1)
        os.dup2(usual, 2)
        os.close(usual)
        if not log.stat().st_size:
            log.unlink()


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log, not between the replies
    serve(channel)
