"""Packages in this Python and in other ones: versions, and the interpreter that has a package."""

from __future__ import annotations

import subprocess
import sys
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from moe_lab.errors import UserError

_ROOT = Path(__file__).resolve().parents[2]


@cache
def installed(package: str) -> str | None:
    """The version of `package`, None if it is not installed. Cached, because reading metadata takes
    milliseconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def interpreter(module: str, path: str | None, user: str) -> str:
    """The Python that has `module`: `path` of interpreters.MODULE, or that of `make MODULE`, or
    this one.

    Raises UserError, for the `user` that needs it, when there is none.
    """
    if path is not None:
        python = Path(path).expanduser()
        if not python.is_file():
            raise UserError(
                f"interpreters.{module}={path}, and there is no such file: run make {module}"
            )
        return str(python.absolute())
    # Links are resolved because torch compiles nothing below a path with a space, which vLLM needs.
    made = (_ROOT / f".venv-{module}").resolve() / "bin" / "python"
    if made.is_file():
        return str(made)
    if find_spec(module) is not None:
        return sys.executable
    raise UserError(
        f"{user} needs {module}, which is not installed: run make {module}, or name an interpreter "
        f"that has it, interpreters.{module}=PYTHON"
    )


@lru_cache(maxsize=8)
def installed_in(python: str, package: str) -> str | None:
    """The version of `package` in another interpreter; None if either does not exist."""
    program = f"from importlib.metadata import version; print(version({package!r}))"
    return _output(python, program) or None


def check_has(module: str, python: str) -> None:
    """Raise UserError when the interpreter `python` does not exist or has no `module`."""
    # a module, not a package: builds of vLLM have several names
    program = f"from importlib.util import find_spec; print(find_spec({module!r}) or '')"
    if not _output(python, program):
        raise UserError(
            f"interpreters.{module}={python} has no {module}: run make {module}, or name another"
        )


def _output(python: str, program: str) -> str:
    """What a program prints in another interpreter; "" if it fails, or there is no such
    interpreter."""
    line = [python, "-I", "-c", program]
    try:
        return subprocess.run(line, capture_output=True, text=True, env={}).stdout.strip()
    except OSError:
        return ""
