"""The process that runs programs which a model wrote. The process gets programs and inputs, never
the expected outputs.

Requests are lines of JSON from `moe_lab/child_process.py`. A program runs in a child process. It is
either a script that reads its input and prints, or one of its functions is called on each input,
and the values that the function returns are sent back encoded (`encoding.py`). A program can harm
only its own child process (`isolation.py`). The child has limits on memory, threads, time and
output, and is killed before the reply is written. Nothing that the child sends is executed or
unpickled.

Standard library only, so that a child has no secrets in memory and starts within milliseconds.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from moe_lab.evaluation.sandbox.encoding import HUGE, decode, decode_text, encode_result
from moe_lab.evaluation.sandbox.isolation import (
    NONE,
    die_with_parent,
    enter,
    limit_program,
    thread_count,
)

_TICK = 0.01
"""Seconds between two reads of what a program has sent. Waking at each result would double the cost
of short calls."""
_PIPE = 1 << 20
"""Bytes of results that a program can send between two reads, where the system allows so many."""
MOST_THREADS = 64
"""Threads of a program. Each takes memory of the kernel that the limit on memory does not count."""


@dataclass(frozen=True)
class Request:
    """One program to run."""

    program: str
    """Source text."""
    entry_point: str | None
    """Name of the function the program defines. None: the program is a script."""
    inputs: list[Any]
    """An encoded list of arguments for each call. A script has one input, the text of its standard
    input; what it prints is its only value."""
    seconds: list[float]
    """CPU limit of each call in seconds; the first also limits the time of loading the program."""
    total_seconds: float
    """CPU limit of the whole program in seconds."""
    memory: int
    """Limit on the address space of each process of the program, in bytes."""
    output: int = 64 << 20
    """Limit on the encoded results that the program sends, in bytes."""
    parts: int = HUGE
    """Largest number of parts of a value that comes back as a whole, not as a hash."""
    prelude: str = ""
    """Source text that is executed before the program, in the same namespace."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: str
    """ok (every call returned), failed (an exception), timeout, crash (the program died), or output
    (the program sent too much, or something that is no value)."""
    error: str
    """Exception of a failed program, or the reason of another status; may be ""."""
    encoded: list[str]
    """The value that each call returned, encoded as JSON. There are fewer values than inputs unless
    the status is ok."""
    seconds: list[float]
    """CPU seconds of each call."""

    def values(self) -> list[Any]:
        """The values that the calls returned. Raises ValueError if a text in `encoded` cannot be
        decoded."""
        return [decode_text(text) for text in self.encoded]


ENDED = 3
"""Exit code of a process whose standard input has ended instead of a request."""


def main(isolation: str) -> None:
    """Serve requests until standard input ends. The request `start` is answered once this process
    is isolated."""
    enter(isolation)
    # Each request is served by a new process. Else a program could find earlier programs, such as
    # the right solution, and what they returned, in the freed memory of its process.
    while True:
        server = os.fork()
        if server == 0:
            die_with_parent()
            _serve(isolation)
        _, status = os.waitpid(server, 0)
        if os.waitstatus_to_exitcode(status) == ENDED:
            return
        if status:
            raise SystemExit(f"the process that serves a request ended with {status}")


def _serve(isolation: str) -> NoReturn:
    """Serve one request, and end this process."""
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(ENDED)
    method, arguments = json.loads(line)
    outcome = None
    if method == "run":
        outcome = vars(_run(Request(**arguments["request"]), isolation))
    sys.stdout.write(json.dumps({"done": outcome}) + "\n")
    sys.stdout.flush()
    os._exit(0)


# The parent's side: start, watch, kill.


def _run(request: Request, isolation: str) -> Outcome:
    """Run one program."""
    read_end, write_end = os.pipe()
    with suppress(OSError, AttributeError):  # _PIPE exceeds the user's limit, or not Linux
        fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, _PIPE)
    os.set_blocking(read_end, False)
    child = os.fork()
    if child == 0:
        if request.entry_point is None:
            _run_script(request, isolation, write_end)
            raise SystemExit  # as a script ends: with threads, `atexit` and open files
        _run_and_exit(request, isolation, write_end)  # does not return
    os.close(write_end)
    watch = (_Watch if request.entry_point else _ScriptWatch)(child, request)
    poll = select.poll()
    # 0: `poll` does not wake for new results, but only when the last writer has closed the pipe
    poll.register(read_end, 0)
    poll.register(0, select.POLLIN)  # standard input, which the grader closes when it ends
    reply = None
    try:
        while reply is None:
            seconds = watch.seconds_remaining()
            if seconds <= 0:
                return watch.reply("timeout")
            if isolation != NONE and thread_count(child) > MOST_THREADS:
                return watch.reply("crash", f"more than {MOST_THREADS} threads")
            if any(descriptor == 0 for descriptor, _ in poll.poll(1000 * min(_TICK, seconds))):
                raise SystemExit("the grader has ended")
            with suppress(BlockingIOError):  # the program has sent nothing new
                reply = watch.receive(os.read(read_end, _PIPE))
        return reply
    finally:
        os.close(read_end)
        _kill(child)


def _kill(child: int) -> None:
    """Kill the child and its process group."""
    for target in (-child, child):
        with suppress(OSError):  # it has ended
            os.kill(target, signal.SIGKILL)
    os.waitpid(child, 0)


def _cpu_seconds(process: int) -> float:
    """CPU seconds that the process with the id `process` has used. Systems other than Linux do
    not show the CPU time of a process, so the result is a wall-clock time in seconds."""
    if not sys.platform.startswith("linux"):
        return time.monotonic()
    # Linux's number of the CPU clock of a process; Python has no clock_getcpuclockid.
    return time.clock_gettime((~process << 3) | 2)


def _wall_limit(seconds: float) -> float:
    """The wall-clock limit in seconds for a CPU limit of `seconds`. The limit is generous, because
    machines may be busy, but it ends programs that sleep."""
    return 4 * seconds + 1


class _Watch:
    """The results that a running program has sent so far, and the time that it has used."""

    def __init__(self, child: int, request: Request) -> None:
        self.child = child
        self.request = request
        self.limits = [
            request.seconds[0] if request.seconds else request.total_seconds,
            *request.seconds,
        ]
        """CPU limits in seconds: the limit of loading the program, then the limit of each call."""
        self.lines: list[str] = []
        """Complete lines that the program has sent: a line after loading, then a line after each
        call."""
        self.times: list[float] = []
        """For each line in `lines`, the CPU seconds since the line before it. If several lines
        arrive together, the first of them has the seconds of all."""
        self.partial_line = bytearray()
        self.received_bytes = 0
        self.cpu_start = self.call_cpu_start = _cpu_seconds(child)
        self.call_wall_start = time.monotonic()
        self.wall_end = self.call_wall_start + _wall_limit(request.total_seconds)

    def seconds_remaining(self) -> float:
        """Seconds until the first limit of the current call or of the whole program is reached."""
        used_seconds = _cpu_seconds(self.child)
        # each call ends with a line; the limit of the last call applies until the program ends
        limit = self.limits[min(len(self.lines), len(self.limits) - 1)]
        now = time.monotonic()
        return min(
            self.call_cpu_start + limit - used_seconds,
            self.cpu_start + self.request.total_seconds - used_seconds,
            self.call_wall_start + _wall_limit(limit) - now,
            self.wall_end - now,
        )

    def receive(self, chunk: bytes) -> Outcome | None:
        """Record the bytes `chunk`, which the program has sent; b"" means that the program has
        ended. Returns the reply to the request, or None while the program goes on."""
        if not chunk:
            is_complete = len(self.lines) == len(self.limits) and not self.partial_line
            return self.reply("ok" if is_complete else "crash")
        self.received_bytes += len(chunk)
        if self.received_bytes > self.request.output:
            return self.reply("output")
        *complete_lines, partial_line = chunk.split(b"\n")
        # A line may arrive in thousands of chunks. Each chunk is appended to a bytearray, because
        # adding bytes to bytes would copy the line each time.
        if complete_lines:
            complete_lines[0] = bytes(self.partial_line) + complete_lines[0]
            self.partial_line.clear()
        self.partial_line += partial_line
        now = _cpu_seconds(self.child)
        for line in complete_lines:
            if line.startswith(b"error "):
                # cut, because the program may send a line of any length
                return self.reply("failed", line[6:900].decode("utf-8", "replace")[:294])
            text = line.decode("latin-1")
            # JSON of results is printable ASCII, so the program itself has written to the pipe
            if not (text.isascii() and text.isprintable()):
                return self.reply("output", "it returned something that is not a value")
            self.lines.append(text)
            self.times.append(now - self.call_cpu_start)
            self.call_cpu_start = now
            self.call_wall_start = time.monotonic()
        if len(self.lines) > len(self.limits):
            return self.reply("crash", "more results than calls")
        return None

    def reply(self, status: str, error: str = "") -> Outcome:
        """The outcome so far. The first line and its time are omitted, because the line only
        reports that the program was loaded."""
        return Outcome(status, error, self.lines[1:], self.times[1:])


class _ScriptWatch(_Watch):
    """The text that a script has printed so far, and the time that it has used."""

    def receive(self, chunk: bytes) -> Outcome | None:
        """Do as `_Watch.receive`. The script decides by its exit code whether it has failed."""
        self.received_bytes += len(chunk)
        if self.received_bytes > self.request.output:
            return self.reply("output")
        self.partial_line += chunk
        if chunk:
            return None
        ending = os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ending is None:  # it has closed its output, and goes on
            time.sleep(_TICK)
            return None
        text = self.partial_line.decode("utf-8", "replace")
        if ending.si_code != os.CLD_EXITED:
            return self.reply("crash", f"killed by {signal.Signals(ending.si_status).name}")
        if ending.si_status:
            last_line = text.rstrip().rpartition("\n")[2]
            return self.reply("failed", f"exit code {ending.si_status}: {last_line[:200]}")
        self.lines = ["", json.dumps(text)]
        self.times = [0.0, _cpu_seconds(self.child) - self.cpu_start]
        return self.reply("ok")


# The child's side: nothing in this process can be trusted once the program has started.


def _set_up_child(request: Request, isolation: str, *descriptors: int) -> None:
    """Prepare this child process for a program, whose files 0, 1, ... are the `descriptors`."""
    die_with_parent()
    os.setsid()  # a signal to "my process group" must not reach the runner
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    os.closerange(len(descriptors), 256)
    limit_program(isolation, request.memory)
    random.seed(0)


def _run_script(request: Request, isolation: str, output_pipe: int) -> None:
    """Run the program as Python runs a script, in this child process."""
    # A file, as in contests: programs read as many bytes at once as the size of this file.
    input_file = os.memfd_create("input")
    with open(input_file, "wb", closefd=False) as file:
        file.write(request.inputs[0].encode("utf-8", "replace"))
    os.lseek(input_file, 0, os.SEEK_SET)
    null_device = os.open(os.devnull, os.O_RDWR)
    _set_up_child(request, isolation, input_file, output_pipe, null_device)
    # new objects, as the old ones may hold what the runner has read
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]
    sys.excepthook = _print_exception
    sys.argv = ["main.py"]
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    main_module.__file__ = sys.argv[0]
    # EvalScope, too, accepts any exit code of a program that ends by `exit`
    with suppress(SystemExit):
        _execute(request, vars(main_module))


def _print_exception(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Print an exception that ends a script as the last line of its output, for the runner."""
    with suppress(BaseException):  # __str__ may be code of the program
        sys.stdout.flush()
        os.write(1, f"\n{kind.__name__}: {error}\n".encode("utf-8", "replace"))


def _run_and_exit(request: Request, isolation: str, results_pipe: int) -> None:
    """Call the program's function, send its results to the file descriptor `results_pipe`, and end
    this child process."""
    try:
        null_device = os.open(os.devnull, os.O_RDWR)
        # `_send` writes to descriptor 3; no other file stays open
        _set_up_child(request, isolation, null_device, null_device, null_device, results_pipe)
        _call_program(request)
    except BaseException as error:  # noqa: BLE001 - the program may raise any exception, also SystemExit
        text = ""
        with suppress(BaseException):  # __str__ may be code of the program
            text = str(error)[:200].replace("\n", " ")
        _send(f"error {type(error).__name__}: {text}")
    finally:
        os._exit(0)


def _call_program(request: Request) -> None:
    """Execute the program, call its entry point on each input, and send each result as a line."""
    namespace: dict[str, Any] = {}
    _execute(request, namespace)
    function = namespace[str(request.entry_point)]
    _send("loaded")
    for arguments in map(decode, request.inputs):
        _send(json.dumps(encode_result(function(*arguments), request.parts)))


def _execute(request: Request, namespace: dict[str, Any]) -> None:
    """Execute the prelude and the program."""
    for source in (request.prelude, request.program):
        # dont_inherit: the __future__ imports of this file must not apply to the program
        exec(compile(source, "main.py", "exec", dont_inherit=True), namespace)


def _send(line: str) -> None:
    """Write a line to the pipe of results, which is file descriptor 3."""
    data = line.encode("utf-8", "replace") + b"\n"
    while data:
        data = data[os.write(3, data) :]


if __name__ == "__main__":
    main(sys.argv[1])
