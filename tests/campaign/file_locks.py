"""Disks that several machines share, on which file locks do not work: a library that a command loads first."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

UNSEEN = "return 0;"
"""Each machine sees its own locks only, as on Lustre with localflock or NFS with nolock: whoever asks gets one."""
MISSING = "errno = ENOSYS; return -1;"
"""There are none."""


def why_not() -> str | None:
    """Why no such library can be made here; None when it can."""
    return None if shutil.which("cc") else "no C compiler"


def library(body: str, folder: Path) -> Path:
    """Compile a library for LD_PRELOAD with that body of flock."""
    source, made = folder / "flock.c", folder / "flock.so"
    folder.mkdir(parents=True, exist_ok=True)
    source.write_text(f"#include <errno.h>\nint flock(int file, int how) {{ (void)file; (void)how; {body} }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return made
