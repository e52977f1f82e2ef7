"""The settings that users can type, with what their classes say of them, for --help and
docs/settings.md."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field
from itertools import pairwise
from typing import Any, NamedTuple, get_args, get_origin

from moe_lab.config import BenchmarkConfig, CellConfig, Config
from moe_lab.config.base import fields_of, without_none


class Setting(NamedTuple):
    """One setting, as it is typed, and what the source of its class says of it. `basic`: --help
    shows it."""

    group: str
    name: str
    default: str
    meaning: str
    basic: bool

    @property
    def key(self) -> str:
        return f"{self.group}.{self.name}".lstrip(".")


def settings() -> list[Setting]:
    """All settings; those of jobs, which stand in several places, once."""
    return [*_of(CellConfig, ""), *_of(Config, ""), *_of(BenchmarkConfig, "benchmark")]


def _of(kind: Any, group: str) -> Iterator[Setting]:
    """The settings of a class that stands under the name `group`, then those of the classes inside
    it."""
    meanings = _meanings(kind)
    inside = []
    for name, hint in fields_of(kind).items():
        inner = without_none(hint)
        part = get_args(inner)[0] if get_origin(inner) is list else inner
        if fields_of(part):
            inside.append((part, f"{group}.{name}".lstrip(".")))
        if not fields_of(inner):
            yield Setting(
                group,
                name,
                _default(kind.__dataclass_fields__[name]),
                meanings[name],
                name in kind.basic,
            )
    for part, place in inside:
        yield from _of(part, place)


def _meanings(kind: Any) -> dict[str, str]:
    """Field -> the text under it in the source of its class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in pairwise(body.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
        ):
            found[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found


def _default(field: Field[Any]) -> str:
    if field.default is MISSING and field.default_factory is MISSING:
        return ""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return value if isinstance(value, str) and value else json.dumps(value)


def basic_lines() -> str:
    """The basic settings for a terminal, one a line: the setting with its default, and a
    sentence."""
    lines = {
        f"{one.key}={one.default}": one.meaning.split(". ")[0].rstrip(".")
        for one in settings()
        if one.basic
    }
    width = max(map(len, lines))
    return "\n".join(f"{setting:{width}}  {meaning}" for setting, meaning in lines.items())
