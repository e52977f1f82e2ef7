"""With this folder on its path, Python performs steps that only count and wait, for tests of the
scheduler.

Every step has PARTS parts, and saves its progress after each part. The folder INSTANT_WORK has
these files:

- hold-KIND: stops steps of this kind in their last part until the file is removed
- break-KIND: makes steps of this kind fail
- parts: a line for every finished part
- begun: a line for every start of a step, with the id of its process
- apart: with this file, every step is a job
- fault: the number of an error, with which Python's calls that write to INSTANT_STORE fail

Environment variables: INSTANT_PAUSE is the number of seconds of a part, 0 by default. From
INSTANT_MANY steps on, steps are packed every second. INSTANT_BEAT is the number of seconds between
two heartbeats of a claim. The clock is INSTANT_CLOCK seconds fast, and the times of files are slow
by the same number.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from moe_lab.json_files import write_text
from moe_lab.study import claims, packing
from moe_lab.study.step import Step
from moe_lab.study.steps import KINDS
from moe_lab.study.steps.files import Files

PARTS = 2


def instant(step: Step, files: Files) -> None:
    """Perform the parts that are not saved yet, then write a result that depends on the settings
    alone."""
    folder = Path(os.environ["INSTANT_WORK"])
    partial = files.partial
    partial.mkdir(parents=True, exist_ok=True)
    saved = partial / "saved"
    _note(folder / "begun", f"{step.folder} {os.getpid()}")
    for part in range(int(saved.read_text()) if saved.exists() else 0, PARTS):
        while part == PARTS - 1 and (folder / f"hold-{step.kind}").exists():
            time.sleep(0.02)
        if (folder / f"break-{step.kind}").exists():
            raise ValueError("broken on purpose")
        time.sleep(float(os.environ.get("INSTANT_PAUSE", "0")))
        _note(folder / "parts", f"{step.folder} {part}")
        # a kill between emptying a file and writing it would break the next start
        write_text(saved, str(part + 1))
    (files.out / "instant.txt").write_text(f"{step.folder} {sorted(step.settings)}")


def _note(file: Path, line: str) -> None:
    with file.open("a") as notes:
        notes.write(line + "\n")


def _fail(event: str, arguments: tuple[Any, ...]) -> None:
    is_write = event in ("os.mkdir", "os.rename") or (
        event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    )
    if is_write and str(arguments[0]).startswith(os.environ["INSTANT_STORE"]) and FAULT.exists():
        raise OSError(number := int(FAULT.read_text()), os.strerror(number), arguments[0])


def _stamp(path: Any, times: Any = None, **keywords: Any) -> None:
    utime(path, **keywords) if keywords else utime(path, times or (clock() - CLOCK_LEAD,) * 2)


FAULT = Path(os.environ["INSTANT_WORK"], "fault")
CLOCK_LEAD = float(os.environ.get("INSTANT_CLOCK", "0"))
clock = time.time
utime = os.utime
if CLOCK_LEAD:
    time.time = lambda: clock() + CLOCK_LEAD
    os.utime = _stamp
if "INSTANT_STORE" in os.environ:
    sys.addaudithook(_fail)
if Path(os.environ["INSTANT_WORK"], "apart").exists():
    from moe_lab.study.slurm import arrays

    arrays.STEPS_PER_JOB = 1
if "INSTANT_BEAT" in os.environ:
    claims.BEAT = float(os.environ["INSTANT_BEAT"])
if "INSTANT_MANY" in os.environ:
    packing.MANY = int(os.environ["INSTANT_MANY"])
    packing.PACK_INTERVAL = 1.0
    packing.MOST_PACKS = 3
for kind in KINDS.values():
    kind.work = instant  # type: ignore[method-assign]
