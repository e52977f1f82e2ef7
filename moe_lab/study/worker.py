"""Do steps in this process (`Here`) or in a worker process (`Worker`).

A worker, `python -m moe_lab.study.worker`, is asked for pickled steps, which its parent has made, and keeps the model
loaded between them. It answers by JSON, as it may have run a model's own code. It ends when its standard input does,
even in the middle of a step, so that it writes nothing after its parent was killed.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moe_lab.child_process import Child, Ended, Refused, serve
from moe_lab.start import command
from moe_lab.study.schedule import StepError
from moe_lab.study.step import Step, error_document
from moe_lab.study.steps import perform
from moe_lab.study.steps.files import Files
from moe_lab.study.store import Store


class Worker:
    """A worker process: started at the first step, restarted if it has died, ended with the `with` block."""

    def __init__(self, store: Store, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self.store, self.environment = store, environment
        self.log = store.root / "logs" / f"{os.getpid()}-worker.log"
        """File with the steps that workers of this process were given."""
        self.child: Child | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child:
            self.child.close()

    def __call__(self, step: Step, scratch: Path) -> None:
        """Do `step` in the worker. Raises StepError when it fails, naming the signal if the worker died."""
        if self.child is None or self.child.process.poll() is not None:
            # Slurm sends its warning that time is up to all processes of a job, of which only the first one handles it.
            unwarned = ["sh", "-c", 'trap "" USR2; exec "$0" "$@"', *command("moe_lab.study.worker")]
            self.child = Child(unwarned, {**os.environ, **self.environment})
        with suppress(OSError):  # a full disk, or a store that was deleted, of which the step says what is wrong
            self.log.parent.mkdir(exist_ok=True)
            with self.log.open("a") as log:
                print(time.strftime("%H:%M:%S"), step.folder, file=log)
        work = b64encode(pickle.dumps((step, Files.of(step, self.store, scratch)))).decode()
        try:
            error = self.child.call("perform", work=work)
        except Refused as refused:  # the step cannot be read, as without its module
            raise StepError({"message": f"{step.folder}: {refused}"}) from None
        except Ended as ended:
            code, printed = self.child.process.returncode, self.store.log(step.folder)
            hint = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
            message = f"{step.folder}: the worker died ({ended}{hint})"
            message += f"; its log is {printed}" if printed.exists() else ""
            raise StepError({"message": message, "transient": code < 0}) from None
        if error:
            raise StepError(error)


class Here(Worker):
    """Does steps in this process, except those with foreign code, which run in a worker."""

    def __call__(self, step: Step, scratch: Path) -> None:
        if step.foreign:
            super().__call__(step, scratch)
            return
        try:
            perform(step, Files.of(step, self.store, scratch))
        except Exception as error:
            raise StepError(error_document(error)) from error


class Performer:
    """What a worker process does."""

    def perform(self, work: str) -> dict[str, Any]:
        """Do a step; {} for success, else the error document. What is printed meanwhile goes to the log of the step."""
        step, files = pickle.loads(b64decode(work))
        with suppress(OSError):
            files.log.parent.mkdir(exist_ok=True)  # not its parents: a store that was deleted must not appear again
            with files.log.open("a") as log:  # for what this process and its children print from now on
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
        error: dict[str, Any] = {}
        try:
            perform(step, files)
        except Exception as raised:  # noqa: BLE001 - whatever went wrong belongs to this step alone, and is reported
            error = error_document(raised)
        with suppress(OSError):  # a full disk
            if error:
                print(error["trace"] or error["message"], file=sys.stderr)
            sys.stderr.flush()
            if not files.log.stat().st_size:
                files.log.unlink()
        return error


if __name__ == "__main__":
    serve(Performer())
