"""Functions that start, observe and time processes, for any location of this repository and its
Python.

A time limit is in seconds of one thread's processor time on the idle machine of the figures in
docs/performance.md. Other processes slow even processor time (shared caches, two threads of one
core). Therefore a fixed piece of work, the yardstick, is timed just before and just after, and the
limit is extended by the same factor as the time of the yardstick.
"""

import gc
import math
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def python_command(*arguments: object) -> str:
    """A command line that runs this Python with `arguments`, quoted for a shell or for a setting
    that is parsed like a shell's."""
    return shlex.join([sys.executable, *map(str, arguments)])


def write_program(file: Path, text: str, *options: str) -> Path:
    """Write a program that this Python runs, with `options` before it.

    `#!` cannot name a Python whose path has a space or is long, so that a shell starts it: Python
    takes the shell's first command for a text.
    """
    file.write_text(f"""#!/bin/sh\n'''exec' {python_command(*options)} "$0" "$@"\n' '''\n{text}""")
    file.chmod(0o755)
    return file


NO_LOCKS = "errno = ENOSYS; return -1;"
"""Body of the lock functions on a file system without locks."""
LOCAL_LOCKS = "return 0;"
"""Body of the lock functions where each machine sees only its own locks, as on Lustre with
localflock or NFS with nolock: every request succeeds."""
LOCKS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
int flock(int file, int how) { %s }
static int other(const char *name, int file, int what, void *about) {
  int (*real)(int, int, ...) = dlsym(RTLD_NEXT, name);
  int open_file = what >= F_OFD_GETLK && what <= F_OFD_SETLKW;
  if (what == F_SETLK || what == F_SETLKW || what == F_GETLK || open_file) { %s }
  return real(file, what, about);
}
#define OTHER(name) int name(int file, int what, ...) { va_list more; va_start(more, what); \\
  void *about = va_arg(more, void *); va_end(more); return other(#name, file, what, about); }
OTHER(fcntl)
OTHER(fcntl64)
"""


def lock_environment(body: str, folder: Path) -> dict[str, str]:
    """Environment variables with which the lock functions have this body, by a library in `folder`;
    {} for an empty body, or without a compiler."""
    if not (body and shutil.which("cc")):
        return {}
    (folder / "locks.c").write_text(LOCKS % (body, body))
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", "locks.so", "locks.c", "-ldl"], cwd=folder, check=True
    )
    return {"LD_PRELOAD": str(folder / "locks.so")}


def wait_until(
    condition: Callable[[], object], seconds: float = math.inf, message: str = ""
) -> None:
    """Wait for a condition, by default without a time limit. AssertionError with a message when it
    is false for `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.02)


def is_running(process: int) -> bool:
    """Whether a process is running; a zombie is not."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


EXPORT_READER = """
import json, sys
from pathlib import Path

sys.modules["moe_lab"] = None
import torch, transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
root = Path(sys.argv[1])
tokens = load_file(root / "tokens.safetensors")["tokens"]
folders = sorted(path for path in root.iterdir() if (path / "config.json").exists())

def load(folder, trust=True, **named):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        experts_implementation="eager",
        output_loading_info=True,
        trust_remote_code=trust,
        **named
    )
    assert not any(report.values()), report
    return model
"""
"""First lines of a program that loads exports without moe_lab."""


def run_without_moe_lab(script: str, root: Path, *arguments: str, **environment: str) -> str:
    """Run Python code on the exports and the `tokens` in `root`, in a process that cannot import
    moe_lab. Returns its output."""
    variables = {
        "PATH": "",
        "HOME": str(root),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    command = [sys.executable, "-c", EXPORT_READER + script, str(root), *arguments]
    result = subprocess.run(
        command, cwd=root, env=variables, capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


YARDSTICK_SECONDS = 0.058
YARDSTICK_VALIDITY = 1
"""Seconds for which a time of the yardstick is used again."""
_last_measurement = (-1.0, 0.0)
"""(time of the last measurement of the yardstick, its seconds)."""


def yardstick() -> float:
    """Processor seconds of a fixed piece of plain Python (numbers, texts, a dictionary, a sort);
    the minimum of three runs."""

    def seconds() -> float:
        start = time.process_time()
        lengths: dict[str, int] = {}
        for number in range(400_000):
            text = f"{number % 5003}"
            lengths[text] = lengths.get(text, 0) + len(text)
        sorted(lengths.items(), key=lambda pair: (pair[1], pair[0]))
        return time.process_time() - start

    return min(seconds() for _ in range(3))


def children_seconds() -> float:
    """Processor seconds of all ended child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def time_limit(seconds: float, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
    """Fail when the body takes more than `seconds` of processor time on a machine as fast as the
    yardstick's.

    Objects of earlier tests are hidden from the garbage collector, because no user has them.
    """
    global _last_measurement
    gc.collect()
    gc.freeze()
    measurement_time, first_yardstick = _last_measurement
    if time.monotonic() - measurement_time > YARDSTICK_VALIDITY:
        first_yardstick = yardstick()
    start = clock()
    yield
    duration = clock() - start
    gc.unfreeze()
    second_yardstick = yardstick()
    _last_measurement = (time.monotonic(), second_yardstick)
    slowness = max(1.0, (first_yardstick + second_yardstick) / 2 / YARDSTICK_SECONDS)
    assert duration <= seconds * slowness, (
        f"{duration:.2f} s, on a machine {slowness:.2f} times as slow as the one of the bar"
    )
