"""A Python that has imported the heavy libraries already: importing them takes ten times as long as
a small study does.

`run(folder, "moe_lab", ...)` does what `[sys.executable, "-m", "moe_lab", ...]` does there, and
`python()` is what starts Python in it, for `launcher.python`. What it starts is a process of its
own with its own arguments, folder, environment and streams, in which nothing of moe_lab is imported
yet. It is forked from a server that has torch, transformers and the harnesses in memory, and
workers and reports that it starts are forked from there as well. `python(interpreter, libraries)`
is the same for another interpreter, such as that of vLLM.

Not for tests of what a start imports or costs. All share one seed of hashes: of two processes that
are compared bit by bit, one should be started as usual.
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
    "analysis",
    "submitit.core._submit",
)
"""What a study starts that is forked too; programs that a model wrote keep an interpreter of their
own."""
LIBRARIES = (
    "hydra._internal.hydra",
    "hydra.main",
    "torch",
    "transformers.integrations.moe",
    "transformers.masking_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.olmoe.modeling_olmoe",
    "datasets",
    "lm_eval.evaluator",
    "lm_eval.models.huggingface",
    "lm_eval.tasks",
    "matplotlib.pyplot",
    "pandas",
    "pyarrow.parquet",
    "scipy.stats",
)
VLLM = ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker")
"""What an engine of vLLM imports when it starts."""
CLIENT = """\
import json, os, signal, socket, sys
words = sys.argv[1:]
is_start = words[0].endswith("/moe_lab/start.py")
started = [word for word in words[1:] if word != "-u"] if is_start else []
if words[0] != "-m" and (started[:1] != ["-m"] or started[1] not in {modules!r}):
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b" "], [0, 1, 2])
request = {{"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}}
server.sendall(json.dumps(request).encode() + b"\\n")
for stream in (0, 1, 2):
    os.close(stream)
process = int.from_bytes(server.recv(4), "big")
passed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2)
for number in passed_on:
    signal.signal(number, lambda number, _: os.kill(process, number))
status = int.from_bytes(server.recv(4) or b"\\x09", "big")
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) in passed_on:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
"""
"""Asks the server for a process, passes signals on to it, and ends as it does."""


_STARTING = threading.Lock()


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module with its words in a folder to its end, with more variables in its
    environment."""
    variables = {**os.environ, **environment}
    return subprocess.run(
        [python(), "-m", *arguments], capture_output=True, text=True, cwd=folder, env=variables
    )


def python(
    interpreter: str = sys.executable, libraries: tuple[str, ...] = LIBRARIES, **environment: str
) -> Path:
    """The program that stands for an interpreter.

    Libraries that read variables when they are imported find those of `environment`, not those of
    the forked process.
    """
    with _STARTING:
        return _client(interpreter, libraries, tuple(environment.items()))


@lru_cache
def _client(
    interpreter: str, libraries: tuple[str, ...], environment: tuple[tuple[str, str], ...]
) -> Path:
    """The same; the server behind it ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="preloaded-"))
    client = folder / "python"
    from processes import executable

    about = {"python": interpreter, "modules": MODULES}
    executable(client, CLIENT.format(**about, address=str(folder / "server")), "-IS")
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


Asked = tuple[dict[str, Any], list[int]]
"""What a client asks for, and its streams."""


def serve(listening: socket.socket) -> Asked | None:
    """In each forked process: what was asked for. None in the server itself, when standard input
    ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who watch
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        client, _ = listening.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return watch(client)
        client.close()


def watch(client: socket.socket) -> Asked:
    """Fork a process, in which this returns, and tell the client how it ends; if the client is
    killed, so is it."""
    _, streams, _, _ = socket.recv_fds(client, 1, 3)
    with client.makefile("r") as asking:
        asked = json.loads(asking.readline())
    if (child := os.fork()) == 0:
        os.setsid()  # some that are started so kill their own group at the end
        client.close()
        return asked, streams
    for stream in streams:
        os.close(stream)
    client.sendall(child.to_bytes(4, "big"))
    ended = os.pidfd_open(child)
    if ended not in select.select([client, ended], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        client.sendall(status.to_bytes(4, "big"))
    os._exit(0)


def become(asked: dict[str, Any], streams: list[int], client: str) -> None:
    """Turn this process into the one that was asked for, and do its work."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    random.seed()
    numpy.random.seed()
    words = asked["words"]
    is_module = words[0] == "-m"
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = [
        os.getcwd() if is_module else os.path.dirname(os.path.dirname(words[0])),
        *named,
    ]
    # for a start.py, the one that it is, whatever another interpreter has installed
    import moe_lab.start

    moe_lab.start.command.__kwdefaults__["python"] = client
    if not is_module:
        sys.path[0] = os.path.dirname(words[0])
    sys.modules.pop("sitecustomize", None)  # Debian's Python has one, which stands for no other
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    if is_module:
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    import gc
    import importlib

    import numpy

    with socket.socket(fileno=int(sys.argv[1])) as _listening:
        for _library in sys.argv[3:]:
            importlib.import_module(_library)
        gc.freeze()
        _asked = serve(_listening)
    if _asked:
        become(*_asked, sys.argv[2])
    else:
        shutil.rmtree(Path(sys.argv[2]).parent)
        os._exit(0)  # libraries would say at the end what they leak
