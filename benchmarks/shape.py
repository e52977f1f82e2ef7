"""How large the code is, and how much of it one cell loads: `python -m benchmarks.shape`.

Counts lines, the longest function, circles of imports, and the modules of moe_lab that one cell loads (`criterion=reap
ratio=.25` and one benchmark, in the command and in its worker). Exit code 1 when a ceiling is exceeded.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from benchmarks.measure import misses, parser
from moe_lab.start import command

ROOT = Path(__file__).parents[1]
LINES = {"moe_lab": 30_000, "tests": 28_000}
"""Folder -> most lines of Python."""
FUNCTION, MODULES = 60, 80
"""Most lines of a function, and most modules of moe_lab that one cell loads."""
CELL = "model=pocket_olmoe criterion=reap ratio=.25 suite=pocket_quick suite.benchmarks=[pocket_arc_easy]"
NOTES_IMPORTS = """
import os, sys
def note(event, arguments):
    if event == "import" and arguments[0].partition(".")[0] == "moe_lab":
        with open(os.environ["MOE_LAB_IMPORTS"], "a") as file:
            print(arguments[0], file=file)
sys.addaudithook(note)
"""
"""sitecustomize of the command and of all that it starts. An audit hook also sees what a process that is killed has
imported."""


def main() -> int:
    """Count, print, compare with the ceilings."""
    parser("shape", __doc__).parse_args()
    failed = False
    for folder, most in LINES.items():
        files = list((ROOT / folder).rglob("*.py"))
        lines = sum(len(file.read_text().splitlines()) for file in files)
        failed |= misses(f"{folder}: lines in {len(files)} files", lines, "<=", most)
    length, function = max(functions(ROOT / "moe_lab"))
    failed |= misses(f"longest function ({function}), lines", length, "<=", FUNCTION)
    modules = circle(ROOT / "moe_lab")
    failed |= misses("modules in a circle of imports", len(modules), "<=", 0, f" {' '.join(modules)}")
    loaded = modules_of_a_cell()
    files = [file for name in loaded if (file := source(name)) is not None]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    failed |= misses(f"modules that one cell loads ({lines} lines)", len(files), "<=", MODULES)
    return int(failed)


def functions(folder: Path) -> Iterator[tuple[int, str]]:
    """(lines, name) of each function below `folder`."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                yield length, f"{file.relative_to(folder.parent)}: {node.name}"


def circle(folder: Path) -> list[str]:
    """Modules that import each other when they are loaded, the first one again at the end; [] when there are none."""
    imports = {name(file): set(imported(file)) for file in folder.rglob("*.py")}
    try:
        TopologicalSorter({module: used & set(imports) - {module} for module, used in imports.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def imported(file: Path) -> Iterator[str]:
    """Modules that the statements outside of functions import, but for types alone."""
    pending: list[ast.AST] = [ast.parse(file.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:  # a module of a package, or what a module defines
                module = f"{node.module}.{alias.name}"
                yield module if source(module) else node.module
        elif not isinstance(node, ast.FunctionDef) and not _is_for_types(node):
            pending += ast.iter_child_nodes(node)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def modules_of_a_cell() -> set[str]:
    """Names of the modules of moe_lab that the command and its workers import for `CELL`, in a new store."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(NOTES_IMPORTS)
        names = Path(folder) / "names"
        environment = {
            **os.environ,
            "MOE_LAB_IMPORTS": str(names),
            "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        words = [*command("moe_lab"), *CELL.split(), "report=false", f"store={folder}/store"]
        subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return set(names.read_text().split())


def source(module: str) -> Path | None:
    """The file of a module; None when it is none of ours, such as an attribute."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def name(file: Path) -> str:
    """The module's name."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


if __name__ == "__main__":
    sys.exit(main())
