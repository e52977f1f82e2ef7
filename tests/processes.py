"""How tests start processes, ask about them and time them, wherever this repository and its Python
lie.

A bar is in seconds of one thread's processor time on the machine that the figures in
docs/performance.md come from, at rest. Neighbours slow even processor time (shared caches, two
threads of one core), so a fixed piece of work is timed just before and just after: as much longer
as it takes, so much longer may the thing itself take.
"""

import gc
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
    """A command line of this Python that a shell, or a setting that is read like one, takes apart
    into `words`."""
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
"""What locks of files do where there are none."""
LOCAL_LOCKS = "return 0;"
"""And where each machine sees its own alone, as on Lustre with localflock or NFS with nolock:
whoever asks gets one."""
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
    """An environment in which locks of files do this, by a library in `folder`; none for "" and
    without a compiler."""
    if not (body and shutil.which("cc")):
        return {}
    (folder / "locks.c").write_text(LOCKS % (body, body))
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", "locks.so", "locks.c", "-ldl"], cwd=folder, check=True
    )
    return {"LD_PRELOAD": str(folder / "locks.so")}


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for a condition, however long a busy machine takes."""
    while not condition():
        time.sleep(0.02)


def is_running(process: int) -> bool:
    """Whether a process has not ended; one that nobody waits for has ended too."""
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
"""How a program begins that reads exports without moe_lab."""


def run_without_moe_lab(script: str, root: Path, *arguments: str, **environment: str) -> str:
    """Run Python code about the exports in `root`, and its `tokens`, in a process of its own; what
    it printed."""
    alone = {
        "PATH": "",
        "HOME": str(root),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    command = [sys.executable, "-c", EXPORT_READER + script, str(root), *arguments]
    result = subprocess.run(
        command, cwd=root, env=alone, capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


YARDSTICK_SECONDS = 0.058
YARDSTICK_VALIDITY = 1
"""Seconds for which a measurement of the machine also holds for what begins next."""
_last_measurement = (-1.0, 0.0)
"""When the machine was measured last, and what came out."""


def yardstick() -> float:
    """Processor seconds of a fixed piece of plain Python: numbers, texts, a dictionary, a sort;
    least of three."""

    def once() -> float:
        start = time.process_time()
        lengths: dict[str, int] = {}
        for number in range(400_000):
            text = f"{number % 5003}"
            lengths[text] = lengths.get(text, 0) + len(text)
        sorted(lengths.items(), key=lambda pair: (pair[1], pair[0]))
        return time.process_time() - start

    return min(once() for _ in range(3))


def children_seconds() -> float:
    """Processor seconds of the processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def time_limit(seconds: float, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
    """Fail when the body takes more than `seconds` of processor time, on a machine as fast as the
    yardstick's.

    What earlier tests left in memory is kept out of the collector's sight, for no user has it.
    """
    global _last_measurement
    gc.collect()
    gc.freeze()
    measured, first_yardstick = _last_measurement
    if time.monotonic() - measured > YARDSTICK_VALIDITY:
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
