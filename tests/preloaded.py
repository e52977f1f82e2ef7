"""A Python that has already imported the large libraries, because importing them takes ten times as
long as a small study.

`run(folder, "moe_lab", ...)` replaces the command `[sys.executable, "-m", "moe_lab", ...]` in the
folder, and `python()` replaces the interpreter, for `launcher.python`. The process has its own
arguments, folder, environment and streams, and has not imported moe_lab. It is forked from a server
that has torch, transformers and the harnesses in memory. Its workers and reports are forked from
this server too. `python(interpreter, libraries)` replaces another interpreter, such as that of
vLLM.

Not for tests of the imports or of the cost of a start. All processes have the same seed of hashes:
if two processes are compared bit by bit, one of them should be started without this module.
"""

import atexit
import contextlib
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

MODULES = (
    "moe_lab.child_process",
    "moe_lab.models.load",
    "moe_lab.serving.vllm_engine",
    "moe_lab.analysis",
    "submitit.core._submit",
)
"""Modules that a study starts, and whose processes are forked too. Programs that a model wrote run
in an interpreter of their own."""
LIBRARIES = (
    "hydra._internal.hydra",
    "hydra.main",
    "torch",
    "transformers.integrations.moe",
    "transformers.masking_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.olmoe.modeling_olmoe",
    "transformers.models.deepseek_v2.modeling_deepseek_v2",
    "torch.utils.flop_counter",
    "pydantic.dataclasses",
    "datasets",
    "lm_eval.evaluator",
    "lm_eval.models.huggingface",
    "lm_eval.tasks",
    "pandas",
    "pyarrow.parquet",
    "scipy.stats",
)
VLLM_LIBRARIES = ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker")
"""Modules that an engine of vLLM imports when it starts."""
CLIENT = """\
import json, os, signal, socket, sys
arguments = sys.argv[1:]
is_start = arguments[0].endswith("/moe_lab/start.py")
command = [argument for argument in arguments[1:] if argument != "-u"] if is_start else []
if arguments[0] != "-m" and (command[:1] != ["-m"] or command[1] not in {modules!r}):
    os.execv({python!r}, [{python!r}, *arguments])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b" "], [0, 1, 2])
request = {{"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}}
server.sendall(json.dumps(request).encode() + b"\\n")
for stream in (0, 1, 2):
    os.close(stream)
process = int.from_bytes(server.recv(4), "big")
forwarded = (signal.SIGINT, signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2)
for number in forwarded:
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda number, _: os.kill(process, number))
status = int.from_bytes(server.recv(4) or b"\\x09", "big")
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) in forwarded:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
"""
"""Program of the client: requests a process from the server, forwards signals to the process unless
it ignores them, and ends with its status."""


_START_LOCK = threading.Lock()
SHARED = "MOE_LAB_TEST_PYTHON"
"""Environment variable with the program that all workers of xdist use instead of this Python."""


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module with arguments in a folder to its end. environment: further variables."""
    variables = {**os.environ, **environment}
    return subprocess.run(
        [python(), "-m", *arguments], capture_output=True, text=True, cwd=folder, env=variables
    )


def python(
    interpreter: str = sys.executable, libraries: tuple[str, ...] = LIBRARIES, **environment: str
) -> Path:
    """Path of a program that replaces an interpreter.

    Libraries that read variables when they are imported find those of `environment`, not those of
    the forked process.
    """
    is_default = (interpreter, libraries, environment) == (sys.executable, LIBRARIES, {})
    if is_default and SHARED in os.environ:
        return Path(os.environ[SHARED])
    with _START_LOCK:
        return _client(interpreter, libraries, tuple(environment.items()))


@lru_cache
def _client(
    interpreter: str, libraries: tuple[str, ...], environment: tuple[tuple[str, str], ...]
) -> Path:
    """Start a server, which ends with this process. Returns the path of its client, a program that
    replaces `interpreter`."""
    folder = Path(tempfile.mkdtemp(prefix="preloaded-"))
    client = folder / "python"
    from processes import write_program

    fields = {"python": interpreter, "modules": MODULES}
    write_program(client, CLIENT.format(**fields, address=str(folder / "server")), "-IS")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "server"))
    listening.listen(64)
    arguments = [interpreter, __file__, str(listening.fileno()), str(client), *libraries]
    variables = {**os.environ, **dict(environment)}
    with listening:
        server = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, pass_fds=[listening.fileno()], cwd="/", env=variables
        )

    @atexit.register
    def end() -> None:
        assert server.stdin
        server.stdin.close()
        server.wait()

    return client


Request = tuple[dict[str, Any], list[int]]
"""(arguments, folder and environment of the requested process; the client's streams)."""


def serve(listening: socket.socket) -> Request | None:
    """Fork a process for each request. Returns the request in each forked process, and None in the
    server when standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the watching ones
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        client, _ = listening.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return watch(client)
        client.close()


def watch(client: socket.socket) -> Request:
    """Fork the requested process, in which this returns the request. The watching process kills it
    if the client is killed, and sends its status to the client."""
    _, streams, _, _ = socket.recv_fds(client, 1, 3)
    with client.makefile("r") as stream:
        request = json.loads(stream.readline())
    if (child := os.fork()) == 0:
        os.setsid()  # some that are started so kill their own group at the end
        client.close()
        return request, streams
    for number in streams:
        os.close(number)
    client.sendall(child.to_bytes(4, "big"))
    process = os.pidfd_open(child)
    if process not in select.select([client, process], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        client.sendall(status.to_bytes(4, "big"))
    os._exit(0)


def become(request: dict[str, Any], streams: list[int], client: str) -> None:
    """Turn this process into the requested one, and run its module or program."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    numpy.random.seed()
    arguments = request["arguments"]
    is_module = arguments[0] == "-m"
    python_path = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = [
        os.getcwd() if is_module else os.path.dirname(os.path.dirname(arguments[0])),
        *python_path,
    ]
    # for a start.py, the one that it is, whatever another interpreter has installed
    import moe_lab.start

    moe_lab.start.command.__kwdefaults__["python"] = client
    if not is_module:
        sys.path[0] = os.path.dirname(arguments[0])
    sys.modules.pop("sitecustomize", None)  # Debian's Python has one, which stands for no other
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    if is_module:
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    import gc
    import importlib

    import numpy

    with socket.socket(fileno=int(sys.argv[1])) as _listening:
        for _library in sys.argv[3:]:
            importlib.import_module(_library)
        gc.freeze()
        _request = serve(_listening)
    if _request:
        become(*_request, sys.argv[2])
    else:
        shutil.rmtree(Path(sys.argv[2]).parent)
        os._exit(0)  # libraries would say at the end what they leak
