"""Run a module of this installation in a process, regardless of the current folder and PYTHONPATH.

    python start.py [OPTIONS] -m MODULE ARGUMENTS

does what `python OPTIONS -m MODULE ARGUMENTS` does, except that the current folder is not searched,
that `moe_lab` is imported from the folder around this package, and that plugins are imported from
its subfolder PLUGINS if they have a copy there. All other packages are found as usual, so that
another interpreter uses its own. Standard library only.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's folder: some of its modules have names of standard ones

import os
import runpy

FILE = os.path.abspath(__file__)
_ROOT = os.path.dirname(os.path.dirname(FILE))
PLUGINS = "moe_lab_plugins"
"""Folder beside `moe_lab` with copies of plugins."""


def command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command line that runs `module` of moe_lab by means of this file."""
    return [python, FILE, "-m", module, *arguments]


def _run() -> None:
    """Run the module that follows -m on the command line of this process."""
    sys.path.insert(0, _ROOT)
    __import__("moe_lab")  # an imported package finds its modules without sys.path
    # all other packages are found in PLUGINS, or where this interpreter finds packages as usual
    sys.path[0] = os.path.join(_ROOT, PLUGINS)
    # remove options of Python, such as -u, which the module does not expect
    while sys.argv[1] != "-m":
        del sys.argv[1]
    module = sys.argv[2]
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
