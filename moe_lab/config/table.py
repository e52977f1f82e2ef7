"""The settings that users can type, with what their classes say of them, for --help and docs/settings.md."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field
from itertools import pairwise
from typing import Any, NamedTuple, get_args, get_origin

from moe_lab.config import BenchmarkConfig, CellConfig, Config
from moe_lab.config.base import fields_of, without_none

HEAD = """# Settings

Settings are typed as `GROUP.SETTING=VALUE`, such as `calibration.tokens=4096`, and stand in the files of `conf/`
without the name of their group. Those of most use come first. This page is printed by `python -m moe_lab.config`.
"""
IN_FILES = {"benchmark": BenchmarkConfig}
"""Group -> class of what stands in files alone."""


class Setting(NamedTuple):
    """One setting."""

    group: str
    """The group that has it, such as calibration; empty for one of the study."""
    name: str
    """Its name there."""
    default: str
    """As it is typed; empty for one that must be set."""
    meaning: str
    """What it says, as in the source of its class."""
    basic: bool
    """Whether --help shows it."""

    @property
    def key(self) -> str:
        return f"{self.group}.{self.name}".lstrip(".")


def settings() -> list[Setting]:
    """All settings; those of a class that stands in several places once."""
    found: dict[str, Setting] = {}
    roots = {"": (CellConfig, Config), **{group: (kind,) for group, kind in IN_FILES.items()}}
    seen: set[Any] = set()
    for group, kinds in roots.items():
        for kind in kinds:
            found |= {setting.key: setting for setting in _of(kind, group, seen)}
    return list(found.values())


def _of(kind: Any, group: str, seen: set[Any]) -> Iterator[Setting]:
    """The settings of a class, and of the classes inside it that are not in `seen`."""
    seen.add(kind)
    meanings, basic = _meanings(kind), getattr(kind, "basic", ())
    inside = []
    for name, hint in fields_of(kind).items():
        inner = without_none(hint)
        part = get_args(inner)[-1] if get_origin(inner) in (list, dict) else inner
        if fields_of(part):
            inside.append((part, f"{group}.{name}".lstrip(".")))
        if part is inner and fields_of(inner):
            continue
        yield Setting(group, name, _default(kind.__dataclass_fields__[name]), meanings[name], name in basic)
    for part, place in inside:
        if part not in seen:
            yield from _of(part, place, seen)


def _meanings(kind: Any) -> dict[str, str]:
    """Field -> the text under it in the source of its class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found


def _default(field: Field[Any]) -> str:
    if field.default is MISSING and field.default_factory is MISSING:
        return ""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return value if isinstance(value, str) and value else json.dumps(value)


def basic_lines() -> str:
    """The basic settings for a terminal, one a line: the setting with its default, and a sentence."""
    lines = {f"{one.key}={one.default}": one.meaning.split(". ")[0].rstrip(".") for one in settings() if one.basic}
    width = max(map(len, lines))
    return "\n".join(f"{setting:{width}}  {meaning}" for setting, meaning in lines.items())


def page() -> str:
    """The page of settings in Markdown: the basic ones, then the others by group."""
    every = settings()
    parts = [HEAD, "## Basic settings\n", _rows(setting for setting in every if setting.basic)]
    for group in dict.fromkeys(setting.group for setting in every):
        parts += [f"## {group or 'Study'}\n", _rows(one for one in every if one.group == group and not one.basic)]
    return "\n".join(parts)


def _rows(listed: Iterable[Setting]) -> str:
    rows = [f"| `{one.key}` | {f'`{one.default}`' if one.default else ''} | {one.meaning} |\n" for one in listed]
    return "".join(["| setting | default | meaning |\n|---|---|---|\n", *rows])
