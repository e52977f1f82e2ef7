"""With this folder on its path, Python does steps that only count and wait: for tests of what the
scheduler does.

Every step has PARTS parts, and saves after each. In the folder that INSTANT_WORK names, a file
`hold-KIND` stops steps of that kind in their last part until it is removed, and `break-KIND` makes
them fail; `parts` gets a line for every part that was done, `begun` one for every start of a step,
with the process that does it. With `apart`, every step is a job. Each part takes INSTANT_PAUSE
seconds, 0 by default. From INSTANT_MANY steps on they are packed, each second. INSTANT_BEAT is the
number of seconds between two heartbeats of a claim.
The clock is INSTANT_CLOCK seconds fast, and files get times that are as slow. While there is a file
`fault`, with the number of an error, Python's calls that write to INSTANT_STORE fail with that.
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
    """Do the parts that are not saved yet, then leave a result that depends on the settings
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
    writes = event in ("os.mkdir", "os.rename") or (
        event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    )
    if writes and str(arguments[0]).startswith(os.environ["INSTANT_STORE"]) and FAULT.exists():
        raise OSError(number := int(FAULT.read_text()), os.strerror(number), arguments[0])


def _stamp(path: Any, times: Any = None, **more: Any) -> None:
    utime(path, **more) if more else utime(path, times or (clock() - LATE,) * 2)


FAULT = Path(os.environ["INSTANT_WORK"], "fault")
LATE = float(os.environ.get("INSTANT_CLOCK", "0"))
clock = time.time
utime = os.utime
if LATE:
    time.time = lambda: clock() + LATE
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
