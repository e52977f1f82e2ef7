"""File systems of fsspec that fail: one kills its process, one refuses."""

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

    def _dies(self, operation: str, half: Any = None, target: str = "") -> None:
        name, _, number = os.environ.get(DIE, "").partition(" ")
        if name == operation:
            Deadly.done += 1
            if Deadly.done == int(number):
                if half is not None:
                    self.makedirs(os.path.dirname(target), exist_ok=True)
                    Path(target).write_bytes(half[: len(half) // 2])
                os.kill(os.getpid(), signal.SIGKILL)

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        self._dies("put_file", Path(lpath).read_bytes(), rpath)
        super().put_file(lpath, rpath, **kwargs)

    def get_file(self, rpath: str, lpath: str, **kwargs: Any) -> None:
        self._dies("get_file", Path(rpath).read_bytes(), lpath)
        super().get_file(rpath, lpath, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        self._dies("pipe_file", value, path)
        super().pipe_file(path, value, **kwargs)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        self._dies("mv")
        super().mv(path1, path2, **kwargs)


class Refusing(_Disk):
    """A folder that refuses what `refuses` names: reading or writing."""

    protocol = REFUSING
    refuses: frozenset[str] = frozenset()

    def _asked(self, what: str) -> None:
        if what in self.refuses:
            raise ConnectionError("no network today")

    def ls(self, path: str, **kwargs: Any) -> Any:
        self._asked("reading")
        return super().ls(path, **kwargs)

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        self._asked("writing")
        super().put_file(lpath, rpath, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        self._asked("writing")
        super().pipe_file(path, value, **kwargs)


def register() -> None:
    """Make fsspec know these."""
    fsspec.register_implementation(DEADLY, Deadly, clobber=True)
    fsspec.register_implementation(REFUSING, Refusing, clobber=True)
