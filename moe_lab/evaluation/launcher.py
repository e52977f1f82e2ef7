"""Between moe_lab and a command line that must not be trusted: a process that puts up the walls, then becomes it.

Standard library only. `commands.py` starts it, watches it and kills it with all it started.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from moe_lab.evaluation.confinement import count_processes_anew, enter, exit_code, limit_process

_OPEN_FILES = 256


def main(text: str) -> None:
    """Do what `text` asks, an order of `order` as JSON. What goes wrong before the command runs is written to the file
    descriptor `report`, which is closed without a word when the command starts."""
    order = json.loads(text)
    report = order["report"]
    os.set_inheritable(report, False)
    try:
        if order["root"] is not None:
            enter(order["root"], order["hidden"], order["readable"], order["folder"])
            count_processes_anew()
            command = os.fork()
            if command != 0:
                _be_first_process(command)
            os.setsid()  # a signal to "my process group" must not reach who waits for it
        _become(order)
    except OSError as error:
        os.write(report, str(error).encode())
        os._exit(1)


def _be_first_process(command: int) -> None:
    """Reap whatever ends in this tree, and end with the command: all that it left behind dies then."""
    os.closerange(0, 256)  # who reads what the command writes waits for the command alone
    while True:
        ended, status = os.wait()
        if ended == command:
            os._exit(exit_code(status))


def _become(order: dict[str, Any]) -> None:
    os.chdir(order["folder"])
    limit_process(order["memory"], order["processes"], order["files"], _OPEN_FILES)
    if order["cpu_seconds"] is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (order["cpu_seconds"], order["cpu_seconds"] + 1))
    os.execve(order["command"][0], order["command"], order["environment"])


_BOOT = "import sys; sys.path[0] = sys.argv[1]; from moe_lab.evaluation.launcher import main; main(sys.argv[2])"


def command(order: dict[str, Any]) -> list[str]:
    """The command line of a launcher that carries out `order`."""
    package = Path(__file__).resolve().parents[1]
    return [sys.executable, "-s", "-c", _BOOT, str(package.parent), json.dumps({**order, "hidden": [str(package)]})]
