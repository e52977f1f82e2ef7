"""File systems of fsspec that fail: one kills its process, one refuses."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

DIE = "FILE_SYSTEM_DIES_AT"
"""Environment variable: OPERATION NUMBER, the operation in whose middle the process is killed."""
DEADLY, REFUSING = "deadly", "refusing"


class _Disk(LocalFileSystem):
    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).partition("://")[2] or str(path)


class Deadly(_Disk):
    """A folder. It leaves half a file, kills the process, and never has the rest, if the environment says so."""

    protocol = DEADLY
    done = 0

    def _does(self, operation: str, first: str, second: Any) -> None:
        name, _, number = os.environ.get(DIE, "").partition(" ")
        Deadly.done += name == operation
        if name != operation or Deadly.done != int(number):
            return
        if operation != "mv":
            target, data = (first, second) if operation == "pipe_file" else (second, Path(first).read_bytes())
            self.makedirs(os.path.dirname(target), exist_ok=True)
            Path(target).write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)


class Refused(ConnectionError):
    """What fsspec leaves out of a listing, unless it is told to raise it."""


class Refusing(_Disk):
    """A folder that refuses what `refuses` names: reading, writing or removing."""

    protocol = REFUSING
    refuses: frozenset[str] = frozenset()
    asked = 0

    def _does(self, operation: str, *_: Any) -> None:
        kind = {"ls": "reading", "put_file": "writing", "pipe_file": "writing"}.get(operation, "removing")
        if kind in self.refuses:
            Refusing.asked += 1
            raise Refused("no network today")


def _announce(kind: Any, *operations: str) -> None:
    """Let `kind` be told of these operations before it does them."""

    def announcing(operation: str) -> Any:
        def method(self: Any, first: Any, second: Any = None, **kwargs: Any) -> Any:
            self._does(operation, first, second)
            return getattr(_Disk, operation)(self, first, *([] if second is None else [second]), **kwargs)

        return method

    for operation in operations:
        setattr(kind, operation, announcing(operation))


_announce(Deadly, "put_file", "get_file", "pipe_file", "mv")
_announce(Refusing, "ls", "put_file", "pipe_file", "rm_file", "rm")


def register() -> None:
    """Make fsspec know these."""
    fsspec.register_implementation(DEADLY, Deadly, clobber=True)
    fsspec.register_implementation(REFUSING, Refusing, clobber=True)
