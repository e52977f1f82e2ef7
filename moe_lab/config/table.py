"""The settings that users can type, with the texts under them in their classes, for --help and
docs/settings.md."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING
from itertools import pairwise
from typing import Any, NamedTuple, get_args, get_origin

from moe_lab.config import BenchmarkConfig, CellConfig, Config
from moe_lab.config.base import as_typed, default_of, fields_of, without_none


class Setting(NamedTuple):
    """One setting. `group`: dotted name of its group. `default`: the value as a user would type it.
    `meaning`: the text under the setting in its class. `basic`: whether --help shows the
    setting."""

    group: str
    name: str
    default: str
    meaning: str
    basic: bool

    @property
    def key(self) -> str:
        """Dotted name of the setting."""
        return f"{self.group}.{self.name}".lstrip(".")


def settings() -> list[Setting]:
    """All settings that users can type, group by group."""
    return [
        *_settings_of(CellConfig, ""),
        *_settings_of(Config, ""),
        *_settings_of(BenchmarkConfig, "benchmark"),
    ]


def _settings_of(kind: Any, group: str) -> Iterator[Setting]:
    """The settings of the class `kind`, and then the settings of its subgroups. `group`: dotted
    name of `kind`; "" for settings outside groups."""
    meanings = _meanings(kind)
    subgroups = []
    for name, hint in fields_of(kind).items():
        setting_type = without_none(hint)
        entry_type = setting_type
        if get_origin(setting_type) is list:
            (entry_type,) = get_args(setting_type)
        # a list of groups counts twice: as one setting, and as a subgroup with the settings of an
        # entry
        if fields_of(entry_type):
            subgroups.append((entry_type, f"{group}.{name}".lstrip(".")))
        if not fields_of(setting_type):
            default = default_of(kind, name)
            text = "" if default is MISSING else as_typed(default)
            yield Setting(group, name, text, meanings[name], name in kind.basic)
    for subgroup, key in subgroups:
        yield from _settings_of(subgroup, key)


def _meanings(kind: Any) -> dict[str, str]:
    """Name of a field of the class `kind` -> the docstring below the field, joined into one line.
    Read from the source code, because Python does not keep docstrings of fields."""
    (class_definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(class_definition, ast.ClassDef)
    meanings = {}
    for field, docstring in pairwise(class_definition.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(docstring, ast.Expr)
        ):
            meanings[field.target.id] = " ".join(ast.literal_eval(docstring.value).split())
    return meanings


def basic_lines() -> str:
    """A text for --help, with one line for each basic setting."""
    sentences = {
        f"{setting.key}={setting.default}": setting.meaning.split(". ")[0].rstrip(".")
        for setting in settings()
        if setting.basic
    }
    width = max(map(len, sentences))
    return "\n".join(f"{start:{width}}  {sentence}" for start, sentence in sentences.items())
