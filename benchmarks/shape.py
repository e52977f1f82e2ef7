"""How large the code is, and how much of it one cell loads: `python -m benchmarks.shape`.

Counts tokens, settings, lines of the longest function, circles of imports, and the modules of
moe_lab that one cell loads in the command and in its worker (`criterion=reap ratio=.25`, one
benchmark). Exit code 1 when a ceiling is exceeded. Size is counted in tokens, because a ceiling on
lines could be met by longer lines.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

import grimp
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from benchmarks.measure import misses, parser
from moe_lab.config.table import settings
from moe_lab.start import command

ROOT = Path(__file__).parents[1]
TOKENS = {("moe_lab", "analysis"): 305_000, ("tests",): 340_000}
"""Folders -> most tokens of these folders together."""
FUNCTION, MODULES, SETTINGS = 60, 90, 175
"""Most lines of a function, modules of moe_lab that one cell loads, and settings that a user can
type."""
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
"""Tokens of Python that are not counted."""
CELL = (
    "model=pocket_olmoe criterion=reap ratio=.25 suite=pocket_quick "
    "suite.benchmarks=[pocket_arc_easy]"
)
LOG_IMPORTS = """
import os, sys
def note(event, arguments):
    if event == "import" and arguments[0].partition(".")[0] == "moe_lab":
        with open(os.environ["MOE_LAB_IMPORTS"], "a") as file:
            print(arguments[0], file=file)
sys.addaudithook(note)
"""
"""Content of a sitecustomize.py that logs imports of moe_lab. An audit hook logs them at once, so
the imports of a process that is killed are logged too."""


def main() -> int:
    """Count, print, compare with the ceilings; returns 1 when one is exceeded."""
    parser("shape", __doc__).parse_args()
    failed = False
    for folders, most in TOKENS.items():
        sizes = {folder: tokens(ROOT / folder) for folder in folders}
        detail = ", ".join(f"{folder} {size}" for folder, size in sizes.items())
        failed |= misses(f"tokens ({detail})", sum(sizes.values()), "<=", most)
    failed |= misses("settings that a user can type", len(list(settings())), "<=", SETTINGS)
    length, function = max(functions(ROOT / "moe_lab"))
    failed |= misses(f"longest function ({function}), lines", length, "<=", FUNCTION)
    import_circles = circles()
    failed |= misses("circles of imports", len(import_circles), "<=", 0, f" {import_circles}")
    files = [file for name in modules_of_a_cell() if (file := source(name)) is not None]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    failed |= misses(f"modules that one cell loads ({lines} lines)", len(files), "<=", MODULES)
    return int(failed)


def tokens(folder: Path) -> int:
    """Number of tokens of the Python files below `folder`, plus the number of words and signs of
    its JavaScript, CSS and HTML files."""
    count = sum(python_tokens(file) for file in folder.rglob("*.py"))
    for pattern in ("*.js", "*.css", "*.html"):
        for file in folder.rglob(pattern):
            count += len(re.findall(r"\w+|[^\w\s]", file.read_text()))
    return count


def python_tokens(file: Path) -> int:
    """Number of tokens of a Python file without comments, docstrings and layout."""
    docstrings = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                if is_docstring(statement):
                    docstrings.add((statement.lineno, statement.col_offset))
    count = 0
    with file.open() as lines:
        for token in tokenize.generate_tokens(lines.readline):
            count += token.type not in LAYOUT and token.start not in docstrings
    return count


def is_docstring(statement: ast.stmt) -> bool:
    """Whether a statement is a string alone: a docstring, or the description of the name above
    it."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def functions(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield (number of lines, file and name) of each function below `folder`."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                yield length, f"{file.relative_to(folder.parent)}: {node.name}"


def circles() -> list[list[str]]:
    """Groups of modules of moe_lab that import each other, directly or not. Imports inside
    functions and for type checking count."""
    # the cache would keep the imports of a file that changes twice within a second
    graph = grimp.build_graph("moe_lab", cache_dir=None)
    modules = sorted(graph.modules)
    imports = [
        [name in graph.find_modules_directly_imported_by(module) for name in modules]
        for module in modules
    ]
    _, labels = connected_components(csr_array(imports), connection="strong")
    components: dict[int, list[str]] = {}
    for module, label in zip(modules, labels, strict=True):
        components.setdefault(int(label), []).append(module)
    return [component for component in components.values() if len(component) > 1]


def modules_of_a_cell() -> set[str]:
    """Names of the modules of moe_lab that the command and its workers import for CELL in a new
    store."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(LOG_IMPORTS)
        names = Path(folder) / "names"
        environment = {
            **os.environ,
            "MOE_LAB_IMPORTS": str(names),
            "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        cell = [*command("moe_lab"), *CELL.split(), "report=false", f"store={folder}/store"]
        subprocess.run(
            cell, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return set(names.read_text().split())


def source(module: str) -> Path | None:
    """The file of a module; None when the name is not a module, but an attribute of one."""
    path = ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists():
            return file
    return None


if __name__ == "__main__":
    sys.exit(main())
