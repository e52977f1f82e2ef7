"""What models would run on in this process's workers; no torch here, which takes seconds to import."""

from __future__ import annotations

import subprocess

from moe_lab.errors import UserError
from moe_lab.start import command


def here(device: str) -> str:
    """The name of what `model.device` stands for on this machine. UserError when it is not there."""
    asked = subprocess.run(command("moe_lab.models.device", device), capture_output=True, text=True)
    if asked.returncode:
        reason = asked.stderr.strip().splitlines()[-1].partition(": ")[2]
        raise UserError(reason if reason.startswith("model.device=") else f"model.device={device}: {reason}")
    return asked.stdout.strip().splitlines()[-1]
