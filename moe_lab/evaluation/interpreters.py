"""Python interpreters of programs whose packages conflict with those here, such as EvalScope and vLLM."""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from moe_lab.errors import UserError

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


def check_has(module: str, python: str) -> None:
    """Raise UserError when the interpreter lacks `module`."""
    if _answer(python, _HAS, module) != "True":
        raise UserError(f"interpreters.{module}={python} has no {module}: run make {module}, or name another")


def fields(module: str, file: str, name: str, python: str) -> list[str]:
    """Names of the fields that class `name` states in a source file of `module`; [] if there is no such class.

    `file` is relative to the module's folder. The file is read as text, since importing vLLM takes many seconds.
    """
    return _answer(python, _FIELDS, module, file, name).split()


_HAS = "import sys; from importlib.util import find_spec; print(find_spec(sys.argv[1]) is not None)"
_FIELDS = """
import ast, sys
from importlib.util import find_spec
from pathlib import Path
module, file, name = sys.argv[1:]
path = Path(find_spec(module).origin).parent / file
for node in ast.parse(path.read_bytes()).body:
    if isinstance(node, ast.ClassDef) and node.name == name:
        print(*[field.target.id for field in node.body if isinstance(field, ast.AnnAssign)])
"""


@lru_cache(maxsize=8)
def _answer(python: str, program: str, *words: str) -> str:
    """What a program prints in another interpreter; "" if it fails, or if there is no interpreter in that file."""
    try:
        done = subprocess.run([python, "-I", "-c", program, *words], capture_output=True, text=True, env={})
    except OSError:
        return ""
    return done.stdout.strip()
