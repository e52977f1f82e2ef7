"""With this folder on its path, Python does steps that only count and wait: for tests of what the scheduler does.

Every step has PARTS parts, and saves after each. In the folder that INSTANT_WORK names, a file `hold-KIND` stops steps
of that kind in their last part until it is removed, and `break-KIND` makes them fail; `parts` gets a line for every
part that was done, `begun` one for every start of a step, with the process that does it. Each part takes INSTANT_PAUSE
seconds, 0 by default.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

from moe_lab.study.step import Job
from moe_lab.study.steps import KINDS

PARTS = 2


def instant(job: Job) -> None:
    """Do the parts that are not saved yet, then leave a result that depends on the settings alone."""
    folder, partial = Path(os.environ["INSTANT_WORK"]), Path(job.partial)
    partial.mkdir(parents=True, exist_ok=True)
    saved = partial / "saved"
    _note(folder / "begun", f"{job.name} {os.getpid()}")
    for part in range(int(saved.read_text()) if saved.exists() else 0, PARTS):
        while part == PARTS - 1 and (folder / f"hold-{job.kind}").exists():
            time.sleep(0.02)
        if (folder / f"break-{job.kind}").exists():
            raise ValueError("broken on purpose")
        time.sleep(float(os.environ.get("INSTANT_PAUSE", "0")))
        _note(folder / "parts", f"{job.name} {part}")
        saved.write_text(str(part + 1))
    job.output("instant.txt").write_text(f"{job.name} {sorted(job.settings)}")


def _note(file: Path, line: str) -> None:
    with file.open("a") as notes:
        notes.write(line + "\n")


KINDS.update({name: replace(kind, work=instant) for name, kind in KINDS.items()})
