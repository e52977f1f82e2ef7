"""Parse overrides of a command line, such as ratio=0.25,0.5, by Hydra's grammar, and add them to a
`grid.Draft`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException

from moe_lab import grid
from moe_lab.config import CellConfig, Config
from moe_lab.config.base import fields_of, is_text, literal_values, setting_type
from moe_lab.errors import UserError, unknown_name_error

_OVERRIDE = re.compile(r"(?P<sign>\+{0,2})(?P<key>[\w.]+)=(?P<value>.*)", re.DOTALL)
_PLAIN_TEXT = re.compile(r"[\w.+-]+")
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_UNQUOTED = r"""(?:[^,\[\]{}()'":]|:(?! ))+"""


def for_hydra(text: str) -> str:
    """An override in the form that Hydra accepts. An override of a setting gets ++ in front, so
    that the setting need not be in a file. The value of a setting that is a text gets quotes:
    study=2026_11_25 becomes ++study='2026_11_25'."""
    match = _OVERRIDE.fullmatch(text)
    key = match["key"] if match else ""
    # a key without a dot is a group if its type has fields, and an experiment if it has no type
    is_setting = "." in key or (_type(key) and not fields_of(_type(key)))
    if match is None or key.startswith("hydra.") or not is_setting:
        return quote_letters(text)
    value = match["value"]
    if is_text(_type(key)):
        parts = value.split(",")
        value = ",".join(
            f"'{part}'" if _PLAIN_TEXT.fullmatch(part) and part != "null" else part
            for part in parts
        )
    return quote_letters(f"++{key}={value}")


def quote_letters(text: str) -> str:
    """An override with quotes around each value that has letters outside ASCII, because Hydra's
    grammar accepts such letters only in quotes."""

    def quote(match: re.Match[str]) -> str:
        value = match[0]
        if value.isascii() or value[0] in "'\"":
            return value
        # spaces around the value stay outside the quotes
        return value.replace(value.strip(), f"'{value.strip()}'")

    key, equals, value = text.partition("=")
    return key + equals + re.sub(f"{_QUOTED}|{_UNQUOTED}", quote, value)


def _type(key: str) -> Any:
    """The type of the setting or group `key`, such as model.top_k or model; None if there is no
    such setting or group."""
    group, _, _ = key.partition(".")
    return setting_type(CellConfig if group in grid.AXES else Config, key.split("."))


Parsed = list[tuple[str, Override]]
"""Overrides as text, and as parsed by Hydra."""


def parse(texts: Iterable[str]) -> Parsed:
    """(override as text, the same override parsed by Hydra) for each of `texts`. UserError for an
    override that Hydra cannot parse, and for a path with a comma without quotes."""
    hydra = GlobalHydra.instance()
    parser = OverridesParser.create(hydra.config_loader() if hydra.is_initialized() else None)
    parsed = []
    for text in texts:
        path = text.partition("=")[2]
        if "," in path and os.path.exists(path):  # a long text makes Path.exists fail
            quoted = _quote_override(text)
            raise UserError(f"{path} exists: expected quotes for its comma: {quoted}")
        try:
            [override] = parser.parse_overrides([for_hydra(text)])
            parsed.append((text, override))
        except HydraException:
            raise UserError(
                f"{text} cannot be read: expected SETTING=VALUE or GROUP=NAME; a value with "
                f"special characters is put in quotes, as in {_quote_override(text)}"
            ) from None
    return parsed


def list_of_texts(key: str, parsed: Iterable[tuple[str, Override]]) -> list[str]:
    """All texts in the lists that overrides give the setting `key`. Other values are skipped,
    because overrides are checked later."""
    texts: list[str] = []
    for _, override in parsed:
        value = override.value() if override.key_or_group == key else None
        if isinstance(value, list):
            texts += [item for item in value if isinstance(item, str)]
    return texts


def _quote_override(text: str) -> str:
    """An override as it can be typed in a shell."""
    key, _, value = text.partition("=")
    escaped = value.strip("'\"").replace("\\", "\\\\").replace("'", "\\'")
    return f"\"{key}='{escaped}'\""


def add_to_draft(text: str, override: Override, files: grid.Files, draft: grid.Draft) -> list[str]:
    """Add an override to `draft` if it is about an axis of the grid, such as ratio, or about a
    setting in an axis, such as model.top_k. Returns the overrides that Hydra must apply: a list of
    one override as text, or []. The choice of one file, as in model=NAME, is added and returned.

    UserError for an unknown setting or file, for an override without values, and for several values
    of a setting that can have only one in a study.
    """
    key = override.key_or_group
    group = key.partition(".")[0]
    # Hydra's own settings, and overrides of the form GROUP@PACKAGE=NAME
    if key.startswith("hydra") or override.package is not None:
        return [quote_letters(text)]
    if files.names(key):  # the key is a group, and its value the name of a file
        return [text] if override.is_delete() else _add_choices(text, override, files, draft)
    if _type(group) is None:
        raise unknown_name_error("setting", group, [*fields_of(Config), *grid.AXES])
    if override.is_delete():  # ~KEY
        if group not in grid.GROUPS:
            return [text]
        draft.overrides.append((key, grid.REMOVED))
        return []
    override_values = values_of(override)
    has_several = len(override_values) > 1 or override.is_sweep_override()
    if not override_values or (override.is_sweep_override() and not override.is_discrete_sweep()):
        raise UserError(f"{text} names no values: expected some, separated by commas")
    if key in grid.PLAIN_AXES or (has_several and group in grid.GROUPS):
        draft.command_lists[key] = override_values
        return []
    if has_several:
        raise UserError(
            f"{text} names several values, and {key} has one in a study: expected one (a text with "
            f"a comma as {_quote_override(text)}), or -m in front for several studies"
        )
    if group in grid.GROUPS:
        draft.overrides.append((key, override_values[0]))
        return []
    return [for_hydra(text)]


def _add_choices(text: str, override: Override, files: grid.Files, draft: grid.Draft) -> list[str]:
    """Add an override that names files of a group to `draft`, if the group is an axis of the grid.
    Returns the overrides that Hydra must apply."""
    group = override.key_or_group
    available = files.names(group)
    benchmarks = files.names("benchmark") if group == "suite" else []
    names: list[str] = []
    for value in values_of(override):
        # GROUP=[A,B] means the same as GROUP=A,B
        items: Sequence[Any] = value if isinstance(value, list) else [value]
        names += ["null" if item is None else str(item) for item in items]
    if group in grid.GROUPS:
        draft.command_lists[group] = names
    elif names[0] not in available and set(names) <= set(benchmarks):
        return [for_hydra(f"suite.benchmarks=[{','.join(names)}]")]
    elif len(names) != 1:
        raise UserError(
            f"{text} names several files, and {group} has one in a study: expected one of them"
        )
    elif names[0] not in available:
        for field, kind in fields_of(_type(group)).items():
            if names[0] in literal_values(kind):
                raise UserError(f"{text} is no file: expected {group}.{field}={names[0]}")
        raise unknown_name_error(group, names[0], {*available, *benchmarks})
    # Hydra takes one name of a file; `grid` resolves several names, and patterns such as glob(a*)
    return [text] if len(names) == 1 and names[0] in available else []


def values_of(override: Override) -> list[Any]:
    """The values of an override. There are several if the override has commas or one of Hydra's
    functions for sweeps, such as choice(...)."""
    if not override.is_discrete_sweep():
        return [override.value()]
    return [
        value.text if isinstance(value, QuotedString) else value
        for value in override.sweep_iterator()
    ]
