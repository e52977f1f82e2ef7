"""Check that a program cannot reach outside itself: no import, no private attribute, no builtin
that opens anything.

The check is used where programs of a shipped model run without namespaces. The check is a second
barrier in addition to the limits of the subprocess, not a sandbox for programs of unknown models.
"""

from __future__ import annotations

import ast
import builtins

_BUILTINS = """
abs all any bin bool bytes chr complex dict divmod enumerate filter float frozenset hash hex int
isinstance iter len
list map max min next oct ord pow print range repr reversed round set slice sorted str sum tuple zip
True False None Exception ValueError TypeError KeyError IndexError ZeroDivisionError StopIteration
"""
_ALLOWED = frozenset(_BUILTINS.split())
_NODES = """
Module FunctionDef arguments arg keyword Lambda Return Delete Assign AugAssign AnnAssign For While
If Raise Try
ExceptHandler Assert Global Nonlocal Expr Pass Break Continue BoolOp NamedExpr BinOp UnaryOp IfExp
Dict Set ListComp
SetComp DictComp GeneratorExp comprehension Yield YieldFrom Compare Call FormattedValue JoinedStr
Constant Attribute
Subscript Starred Name List Tuple Slice Match match_case MatchValue MatchSingleton MatchSequence
MatchMapping MatchStar
MatchAs MatchOr expr_context boolop operator unaryop cmpop
"""
_SYNTAX = tuple(getattr(ast, name) for name in _NODES.split())
"""Allowed syntax. Class patterns are refused, because they read attributes by name:
`case int(__reduce_ex__=r)`."""
# Allowed attributes: public methods of base types, except those that format.
_ATTRIBUTES = frozenset(
    name
    for kind in (str, list, tuple, dict, set, frozenset, int, float, bytes)
    for name in dir(kind)
    if not name.startswith("_") and name not in ("format", "format_map")
)


def closed_world_violation(program: str) -> str | None:
    """The name of a part of `program` that is not allowed, such as "an import" or "the name open".
    None if all parts are allowed, or if `program` is not Python."""
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # the program will fail when it is run, which is the right verdict
    for node in ast.walk(tree):
        if part := _forbidden_part(node):
            return part
    return None


def _forbidden_part(node: ast.AST) -> str | None:
    """What is not allowed in a node, such as "the attribute format"; None if the node is
    allowed."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return "an import"
    if isinstance(node, ast.Attribute) and node.attr not in _ATTRIBUTES:
        return f"the attribute {node.attr}"
    if isinstance(node, ast.Name) and (
        node.id.startswith("_") or (hasattr(builtins, node.id) and node.id not in _ALLOWED)
    ):
        return f"the name {node.id}"
    if isinstance(node, ast.FunctionDef) and node.decorator_list:
        return "a decorator"
    if not isinstance(node, _SYNTAX):
        return (
            f"{type(node).__name__}, which is not in the list of what closed-world programs are "
            "written with"
        )
    return None
