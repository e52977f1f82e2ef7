"""Find operations in moe_lab that add floats in any order on CUDA: `python -m tools.unordered`.

Their results differ from run to run. Exempt are the class `Rows`, which computes on the CPU, and
lines that end in a comment `# ordered: REASON`, such as that integers are added. Exit code 1 when
others are found.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "moe_lab"
ALWAYS = frozenset(
    [
        "atomic_add",
        "cumsum",
        "index_add",
        "index_add_",
        "put_",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce",
        "scatter_reduce_",
    ]
)
"""Operations that can add floats in any order."""
WITH_ARGUMENT = {
    "bincount": ("weights", 2),
    "index_put": ("accumulate", 4),
    "index_put_": ("accumulate", 4),
}
"""Operation -> the argument with which it adds floats, and its position, with the tensor first."""
REASON = re.compile(r"# ordered: \S")


def is_unordered(call: ast.Call) -> bool:
    """Whether a call may add floats in any order. Functions of numpy run on the CPU."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value
    if isinstance(owner, ast.Name) and owner.id in ("np", "numpy"):
        return False
    name = function.attr
    if name in ALWAYS:
        return True
    if name not in WITH_ARGUMENT:
        return False
    # a method has one positional argument less than the function of torch
    is_method = not (isinstance(owner, ast.Name) and owner.id == "torch")
    argument, position = WITH_ARGUMENT[name]
    is_named = any(keyword.arg == argument for keyword in call.keywords)
    return is_named or len(call.args) + is_method >= position


def calls(node: ast.AST) -> Iterator[ast.Call]:
    """The calls in a module, without those in the class `Rows`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and child.name == "Rows":
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from calls(child)


def unordered(source: str) -> list[int]:
    """Numbers of the lines of `source` with an operation that may add floats in any order, and
    without a reason."""
    lines = source.splitlines()
    return [
        call.lineno
        for call in calls(ast.parse(source))
        if is_unordered(call)
        and not any(REASON.search(line) for line in lines[call.lineno - 1 : call.end_lineno])
    ]


def main() -> int:
    """Print what is found; returns 1 if that is anything."""
    found = False
    for path in sorted(PACKAGE.rglob("*.py")):
        for number in unordered(path.read_text(encoding="utf-8")):
            print(
                f"{path.relative_to(PACKAGE.parent)}:{number}: adds floats in any order on CUDA: "
                "use rows.Rows, or end the line in `# ordered: REASON`"
            )
            found = True
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
