"""Run a command line that must not be trusted: behind namespaces, in one folder, with limits on everything."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from moe_lab.evaluation.confinement import NOBODY
from moe_lab.evaluation.launcher import command as launcher_command
from moe_lab.evaluation.programs import RunnerError

_LOOK_EVERY = 0.1
_STOPPED_BY_CPU_LIMIT = (128 + signal.SIGXCPU, -signal.SIGXCPU)


@dataclass(frozen=True)
class Limits:
    """What a command may use; beyond it, it is killed with everything it started."""

    seconds: float
    """Seconds by the clock on the wall, of all of it."""
    cpu_seconds: float | None = None
    """CPU seconds of each of its processes, rounded up; a busy machine does not change this one."""
    memory: int = 4 << 30
    """Bytes of address space of each process, and of memory in use by all of them together (Linux)."""
    processes: int = 8
    """Processes and threads at a time."""
    output: int = 16 << 20
    """Bytes of standard output and standard error together."""
    files: int = 64 << 20
    """Bytes in its folder."""


@dataclass(frozen=True)
class Finished:
    """How a command went."""

    status: str
    """ok (it ended with code 0), failed (with another), or which limit it broke: timeout, memory, output, files."""
    code: int | None
    """Exit code, 128 and the number of the signal that ended it; None where a limit did."""
    stdout: bytes
    """Standard output, cut off at the limit."""
    stderr: bytes
    """Standard error, cut off at the limit."""
    seconds: float
    """By the clock on the wall."""


def run_confined(
    command: Sequence[str],
    folder: Path,
    limits: Limits,
    *,
    confined: bool,
    stdin: bytes = b"",
    readable: Iterable[str | Path] = (),
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run `command` (its first word an absolute path) with `folder` as its working directory.

    `confined`: in namespaces, where it has no network, sees no process but its own, writes nowhere but to `folder` and
    /dev/shm, and reads nothing besides but the system's libraries, this interpreter with its packages (without
    moe_lab), and `readable`. Otherwise (sandbox=none) there are only the limits and the empty environment, and a
    process that leaves its group outlives the command.
    The environment is `environment` and HOME, TMPDIR (both `folder`), PATH, LANG, OMP_NUM_THREADS=1, nothing else.
    Nothing the command started is left when this returns. Where root calls this, the command is the user `nobody`,
    to whom `folder` is given; what lies in it must be readable by all.

    Raises RunnerError where the kernel refuses the walls or there is no such command.
    """
    folder = folder.resolve()
    if confined and os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    order: dict[str, Any] = {
        "command": [str(word) for word in command],
        "folder": str(folder),
        "readable": [str(Path(path).absolute()) for path in readable],
        "environment": {**_environment(folder), **(environment or {})},
        "memory": limits.memory,
        "processes": limits.processes,
        "files": limits.files,
        "cpu_seconds": None if limits.cpu_seconds is None else math.ceil(limits.cpu_seconds),
    }
    with contextlib.ExitStack() as stack:
        order["root"] = stack.enter_context(_empty_folder()) if confined else None
        given = stack.enter_context(tempfile.TemporaryFile())
        given.write(stdin)
        given.seek(0)
        return _run(order, given, folder, limits)


@contextlib.contextmanager
def _empty_folder() -> Any:
    root = tempfile.mkdtemp(prefix="moe_lab-root-")
    try:
        yield root
    finally:
        os.rmdir(root)


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    fixed = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    return {**kept, **fixed, "HOME": str(folder), "TMPDIR": str(folder)}


def _run(order: dict[str, Any], given: IO[bytes], folder: Path, limits: Limits) -> Finished:
    reading, report = os.pipe()
    begin = time.monotonic()
    process = subprocess.Popen(
        launcher_command({**order, "report": report}),
        stdin=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        cwd="/",
        pass_fds=[report],
        start_new_session=True,
    )
    os.close(report)
    try:
        with open(reading, "rb") as refused:
            reason = refused.read().decode("utf-8", "replace")
        if reason:
            raise RunnerError(reason)
        watch = _Watch(process, folder, limits, begin)
        status = watch.until_end()
    finally:
        _kill(process)
    code = None if status else process.returncode
    if code in _STOPPED_BY_CPU_LIMIT:
        status, code = "timeout", None
    elif code is not None:
        status, code = ("ok" if code == 0 else "failed"), (code if code >= 0 else 128 - code)
    stdout, stderr = (bytes(text[: limits.output]) for text in (watch.stdout, watch.stderr))
    return Finished(status, code, stdout, stderr, time.monotonic() - begin)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The launcher's process group: in namespaces everything dies with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


class _Watch:
    """A running command: what it has written so far, and which limit it breaks."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, limits: Limits, begin: float) -> None:
        self.process, self.folder, self.limits, self.begin = process, folder, limits, begin
        self.stdout, self.stderr = bytearray(), bytearray()

    def until_end(self) -> str:
        """Read what it writes until it has ended: "", or the limit it broke before."""
        with selectors.DefaultSelector() as selector:
            for stream, kept in ((self.process.stdout, self.stdout), (self.process.stderr, self.stderr)):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, kept)
            looked = self.begin
            ended = False
            while not ended:
                ended = self.process.poll() is not None  # asked first: what it wrote last is still to be read
                while self._read(selector) and ended:
                    pass
                if len(self.stdout) + len(self.stderr) > self.limits.output:
                    return "output"
                if time.monotonic() - looked > _LOOK_EVERY:
                    looked = time.monotonic()
                    broken = self._broken()
                    if broken:
                        return broken
        return "files" if _bytes_in(self.folder) > self.limits.files else ""

    def _read(self, selector: selectors.BaseSelector) -> bool:
        """Take what has been written, after a while if need be; whether there was anything."""
        ready = selector.select(_LOOK_EVERY / 10)
        if not selector.get_map():
            time.sleep(_LOOK_EVERY / 10)
        for key, _ in ready:
            chunk = os.read(key.fd, 1 << 16)
            key.data.extend(chunk)
            if not chunk:
                selector.unregister(key.fileobj)
        return bool(ready) and len(self.stdout) + len(self.stderr) <= self.limits.output

    def _broken(self) -> str:
        if time.monotonic() - self.begin > self.limits.seconds:
            return "timeout"
        if _memory_of(self.process.pid) > self.limits.memory:
            return "memory"
        return "files" if _bytes_in(self.folder) > self.limits.files else ""


def _memory_of(process: int) -> int:
    """Bytes in use by a process and all below it; 0 where the system does not say."""
    try:
        own = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (OSError, IndexError):
        return 0  # it has just ended
    return own + sum(_memory_of(int(child)) for child in children)


def _bytes_in(folder: Path) -> int:
    """Bytes of the files below a folder; what vanishes meanwhile or may not be read counts nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


@lru_cache(maxsize=8)
def interpreter_paths(python: str) -> tuple[str, ...]:
    """What another Python interpreter needs to be `readable`: its environment and the installation below that."""
    ask = "import os, sys; print(sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), sep='\\n')"
    said = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True, check=True).stdout.splitlines()
    return tuple(dict.fromkeys([*said, str(Path(python).absolute().parent), str(Path(python).resolve().parent)]))
