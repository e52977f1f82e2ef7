"""Python interpreters of programs whose packages conflict with those here, such as EvalScope and vLLM."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from moe_lab.errors import UserError

PROGRAMS = ("evalscope", "vllm")
"""Fields of `interpreters`; `make NAME` makes an environment with the program."""
_ROOT = Path(__file__).resolve().parents[2]


def interpreter(module: str, named: str | None, user: str) -> str:
    """The Python that has `module`: interpreters.MODULE (`named`), or that of `make MODULE`, or this one.

    Raises UserError, for the `user` that needs it, when there is none.
    """
    if named is not None:
        python = Path(named).expanduser()
        if not python.is_file():
            raise UserError(f"interpreters.{module}={named}, and there is no such file: run make {module}")
        return str(python.absolute())
    # The folder that a link names: torch compiles nothing below a path with a space, which vLLM needs.
    own = (_ROOT / f".venv-{module}").resolve() / "bin" / "python"
    if own.is_file():
        return str(own)
    if find_spec(module) is not None:
        return sys.executable
    raise UserError(
        f"{user} needs {module}, which is not here: run make {module}, or name an interpreter that has it, "
        f"interpreters.{module}=PYTHON"
    )


def check_names(names: Iterable[str]) -> None:
    """Raise UserError for a field of `interpreters` that nothing reads."""
    for name in names:
        if name not in PROGRAMS:
            known = " or ".join(f"interpreters.{program}" for program in PROGRAMS)
            raise UserError(f"interpreters.{name} names no program that moe_lab runs: expected {known}")


@lru_cache(maxsize=8)
def check_has(module: str, python: str) -> None:
    """Raise UserError when the interpreter lacks `module`, or there is none in that file."""
    try:
        found = subprocess.run([python, "-I", "-c", _HAS, module], capture_output=True, text=True, env={}).stdout
    except OSError:
        found = ""
    if found.strip() != "True":
        raise UserError(f"interpreters.{module}={python} has no {module}: run make {module}, or name another")


_HAS = "import sys; from importlib.util import find_spec; print(find_spec(sys.argv[1]) is not None)"
