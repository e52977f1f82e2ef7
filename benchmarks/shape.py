"""How large the code is, and how much of it one cell loads: `python -m benchmarks.shape`.

Counts tokens, settings, lines of the longest function, circles of imports, and the modules of
moe_lab that one cell loads (`criterion=reap ratio=.25`, one benchmark; in the command and in its
worker). Exit code 1 when a ceiling is exceeded. Size is counted in tokens, because a ceiling of
lines is met by writing more on each line.
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
TOKENS = {("moe_lab", "analysis"): 320_000, ("tests",): 340_000}
"""Folders -> most tokens in all of them together."""
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
NOTES_IMPORTS = """
import os, sys
def note(event, arguments):
    if event == "import" and arguments[0].partition(".")[0] == "moe_lab":
        with open(os.environ["MOE_LAB_IMPORTS"], "a") as file:
            print(arguments[0], file=file)
sys.addaudithook(note)
"""
"""sitecustomize of the command and of all that it starts. An audit hook also sees what a process
that is killed has imported."""


def main() -> int:
    """Count, print, compare with the ceilings."""
    parser("shape", __doc__).parse_args()
    failed = False
    for folders, most in TOKENS.items():
        sizes = {folder: tokens(ROOT / folder) for folder in folders}
        detail = ", ".join(f"{folder} {size}" for folder, size in sizes.items())
        failed |= misses(f"tokens ({detail})", sum(sizes.values()), "<=", most)
    failed |= misses("settings that a user can type", len(list(settings())), "<=", SETTINGS)
    length, function = max(functions(ROOT / "moe_lab"))
    failed |= misses(f"longest function ({function}), lines", length, "<=", FUNCTION)
    found = circles()
    failed |= misses("circles of imports", len(found), "<=", 0, f" {found}")
    loaded = modules_of_a_cell()
    files = [file for name in loaded if (file := source(name)) is not None]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    failed |= misses(f"modules that one cell loads ({lines} lines)", len(files), "<=", MODULES)
    return int(failed)


def tokens(folder: Path) -> int:
    """Tokens of the Python below `folder`, and words and signs of its JavaScript, CSS and HTML."""
    count = sum(python_tokens(file) for file in folder.rglob("*.py"))
    for pattern in ("*.js", "*.css", "*.html"):
        for file in folder.rglob(pattern):
            count += len(re.findall(r"\w+|[^\w\s]", file.read_text()))
    return count


def python_tokens(file: Path) -> int:
    """Tokens of a Python file without comments, docstrings and layout."""
    docstrings = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstrings |= {(line.lineno, line.col_offset) for line in node.body if is_text(line)}
    with file.open() as opened:
        counted = [
            token for token in tokenize.generate_tokens(opened.readline) if token.type not in LAYOUT
        ]
    return sum(token.start not in docstrings for token in counted)


def is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a text alone: a docstring, or what a name above it means."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def functions(folder: Path) -> Iterator[tuple[int, str]]:
    """(lines, name) of each function below `folder`."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                yield length, f"{file.relative_to(folder.parent)}: {node.name}"


def circles() -> list[list[str]]:
    """Modules of moe_lab that import each other, inside functions too, but not for types alone."""
    graph = grimp.build_graph("moe_lab", exclude_type_checking_imports=True)
    modules = sorted(graph.modules)
    imports = [
        [name in graph.find_modules_directly_imported_by(module) for name in modules]
        for module in modules
    ]
    _, labels = connected_components(csr_array(imports), connection="strong")
    groups = [
        [name for name, own in zip(modules, labels, strict=True) if own == label]
        for label in set(labels)
    ]
    return [group for group in groups if len(group) > 1]


def modules_of_a_cell() -> set[str]:
    """Names of the modules of moe_lab that the command and its workers import for `CELL`, in a new
    store."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(NOTES_IMPORTS)
        names = Path(folder) / "names"
        environment = {
            **os.environ,
            "MOE_LAB_IMPORTS": str(names),
            "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        words = [*command("moe_lab"), *CELL.split(), "report=false", f"store={folder}/store"]
        subprocess.run(
            words, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return set(names.read_text().split())


def source(module: str) -> Path | None:
    """The file of a module; None when it is none of ours, such as an attribute."""
    path = ROOT.joinpath(*module.split("."))
    return next(
        (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None
    )


if __name__ == "__main__":
    sys.exit(main())
