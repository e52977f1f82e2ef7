"""Do steps in this process (`Here`) or in a worker process (`Worker`).

A worker is started as `python -m moe_lab.study.worker`. It reads pickled steps, which its parent has made, answers each
with one line of JSON, as it may have run a model's own code, and keeps the model loaded between steps. It ends when its
standard input is closed, even in the middle of a step, so that it writes nothing after its parent was killed.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from moe_lab.start import command
from moe_lab.study.schedule import StepError
from moe_lab.study.step import Step, error_document
from moe_lab.study.steps import perform
from moe_lab.study.steps.files import Files
from moe_lab.study.store import Store


class Worker:
    """A worker process: started at the first step, restarted if it has died, ended with the `with` block."""

    def __init__(self, store: Store, name: str, environment: dict[str, str] | None = None) -> None:
        self.store, self.environment = store, environment or {}
        self.log = store.root / "logs" / f"{name}.log"
        """File with the steps that the worker was given, and what it printed beside them."""
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process and self.process.stdin and self.process.stdout:
            self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("a") as log:
            # Slurm sends its warning that time is up to all processes of a job, of which only the first one handles it.
            return subprocess.Popen(
                ["sh", "-c", 'trap "" USR2; exec "$0" "$@"', *command("moe_lab.study.worker")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self.environment},
            )

    def __call__(self, step: Step, scratch: Path) -> None:
        """Do `step` in the worker. Raises StepError when it fails, naming the signal if the worker died."""
        if self.process is None or self.process.poll() is not None:
            self.process = self._start()
        assert self.process.stdin and self.process.stdout
        line = b""
        with suppress(BrokenPipeError):
            pickle.dump((step, Files.of(step, self.store, scratch)), self.process.stdin)
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            hint = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
            log = self.store.log(step.folder)
            message = f"{step.folder}: the worker died ({cause}{hint}); its log is {log if log.exists() else self.log}"
            raise StepError({"message": message, "transient": code < 0})
        if reply := json.loads(line):
            raise StepError(reply)


class Here(Worker):
    """Does steps in this process, except those with foreign code, which run in a worker."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, f"{os.getpid()}-worker")

    def __call__(self, step: Step, scratch: Path) -> None:
        if step.foreign:
            super().__call__(step, scratch)
            return
        try:
            perform(step, Files.of(step, self.store, scratch))
        except Exception as error:
            raise StepError(error_document(error)) from error


Work = tuple[Step, Files]


def _listen(asked: queue.SimpleQueue[Work], own: IO[str]) -> None:
    """Pass on what is asked. Ends the process with its input, and when a step cannot be read, as without its module."""
    code = 1
    try:
        while True:
            asked.put(pickle.load(sys.stdin.buffer))
    except EOFError:
        code = 0
    except Exception:  # noqa: BLE001 - the parent reports that the worker died, and where this is printed
        traceback.print_exc(file=own)
    finally:
        own.flush()
        os._exit(code)


def serve(replies: IO[str], own: IO[str]) -> None:
    """Do steps until the process ends. Reply {} for success, else the error document. `own`: the worker's log."""
    asked: queue.SimpleQueue[Work] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked, own), daemon=True).start()
    while True:
        step, files = asked.get()
        print(f"{time.strftime('%H:%M:%S')} {step.folder}", file=own, flush=True)
        with suppress(OSError):  # in a store that was deleted, of which the step says what is wrong
            files.log.parent.mkdir(exist_ok=True)  # not its parents: a store that was deleted must not appear again
            with files.log.open("a") as log:  # for what this process and its children print from now on
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
        try:
            perform(step, files)
            reply: dict[str, Any] = {}
        except Exception as error:  # noqa: BLE001 - whatever went wrong belongs to this step alone, and is reported
            reply = error_document(error)
            print(reply["trace"] or reply["message"], file=sys.stderr)
        with suppress(OSError):  # a full disk
            sys.stdout.flush()
            sys.stderr.flush()
            if not files.log.stat().st_size:
                files.log.unlink()
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    channel, own_log = (os.fdopen(os.dup(number), "w") for number in (1, 2))
    os.dup2(2, 1)  # what libraries print goes to the log, not between the replies
    serve(channel, own_log)
