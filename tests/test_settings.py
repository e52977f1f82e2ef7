"""Settings check themselves: every value that is out of place gets one sentence that names it, and all at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from moe_lab import config
from moe_lab.config import BenchmarkConfig, CellConfig, Config, JudgeConfig, TimingConfig
from moe_lab.config.base import SettingsError, fields_of, is_text, type_at, valid, without_none
from moe_lab.config.table import basic_lines, page
from moe_lab.config.table import settings as table

GROUPS = [kind for name in config.__all__ if is_dataclass(kind := getattr(config, name))]
NEEDED: dict[str, Any] = {
    "model": {"name": "m", "path": "p"},
    "criterion": {"name": "man"},
    "calibration": {"name": "c", "path": "p"},
    "judge": {"model": "m", "url": "http://localhost:1"},
}
"""Group -> what it must have, for Config and CellConfig."""


def wrong(kind: Any) -> list[Any]:
    """Values that a setting of this type cannot have: of another type, and on the other side of each bound."""
    schema = TypeAdapter(kind).json_schema()
    options = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    one = options[0]
    if "enum" in one:
        return ["nonesuch", 7.5]
    found: list[Any] = {
        "integer": ["word", 1.5, [1]],
        "number": ["word", float("nan"), float("inf")],
        "string": [7, 1.5, ["a"]],
        "boolean": ["maybe", 2],
        "array": ["word", 3],
        "object": ["word", 3],
    }.get(one.get("type", "object"), ["word"])
    bounds = {"minimum": -1, "exclusiveMinimum": 0, "maximum": 1, "exclusiveMaximum": 0}
    return found + [one[bound] + beyond for bound, beyond in bounds.items() if bound in one]


def settable(kind: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, type) of every setting that a word can name."""
    for name, hint in fields_of(kind).items():
        inner = without_none(hint)
        if name == "expected":  # given whole, or not at all
            continue
        if fields_of(inner):
            yield from settable(inner, f"{above}{name}.")
        elif inner is not Any:
            yield f"{above}{name}", hint


ALL = {
    **{path: (Config, hint) for path, hint in settable(Config)},
    **{path: (CellConfig, hint) for path, hint in settable(CellConfig)},
}


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_every_value_out_of_place_is_one_sentence_and_all_are_told_at_once(data: st.DataObject) -> None:
    for kind in (Config, CellConfig):
        paths = [path for path, (owner, _) in ALL.items() if owner is kind]
        asked = data.draw(st.sets(st.sampled_from(paths), min_size=1, max_size=6))
        content = {name: dict(needed) for name, needed in NEEDED.items() if name in fields_of(kind)}
        for path in asked:
            *groups, last = path.split(".")
            place: Any = content
            for group in groups:
                place = place.setdefault(group, {})
            place[last] = data.draw(st.sampled_from(wrong(ALL[path][1])), label=path)
        with pytest.raises(SettingsError) as error:
            valid(kind, content, "")
        named = [next((path for path in asked if one.startswith(f"{path}=")), one) for one in error.value.sentences]
        assert sorted(named) == sorted(asked), error.value.sentences


@pytest.mark.parametrize("kind", GROUPS, ids=lambda kind: kind.__name__)
def test_an_unknown_setting_has_a_nearest_one_and_settings_are_immutable(kind: Any) -> None:
    first = next(iter(fields_of(kind)))
    with pytest.raises(SettingsError, match=rf"group\.{re.escape(first)}x .*group\.{re.escape(first)}"):
        valid(kind, {f"{first}x": 1}, "group")
    with pytest.raises((AttributeError, TypeError, ValidationError)):
        setattr(TimingConfig(), fields(TimingConfig)[0].name, 1)


def test_a_text_is_told_from_a_number_by_its_type() -> None:
    texts = {path for path, (owner, _) in ALL.items() if is_text(type_at(owner, path.split(".")))}
    assert {"study", "model.revision", "gate", "export.shape", "launcher.name", "push", "judge.url"} <= texts
    assert not {"ratio", "seed", "calibration.tokens", "timing", "plugins", "judge.extra"} & texts


@pytest.mark.parametrize("name", sorted(BenchmarkConfig.internal))
def test_what_other_settings_set_is_refused_in_a_file(name: str) -> None:
    with pytest.raises(SettingsError, match=f"^group.{re.escape(name)} is set by other settings"):
        valid(BenchmarkConfig, {"name": "b", "harness": "lm_eval", "task": "t", name: None}, "group")


@pytest.mark.parametrize("kind", [JudgeConfig, BenchmarkConfig])
def test_what_must_be_given_is_asked_for(kind: Any) -> None:
    with pytest.raises(SettingsError) as error:
        valid(kind, {}, "group")
    assert all("add group." in sentence for sentence in error.value.sentences)


def test_the_page_of_settings_is_that_of_the_classes_and_basic_ones_come_first() -> None:
    assert (Path(__file__).parents[1] / "docs/settings.md").read_text("utf-8") == page(), "python -m moe_lab.config"
    rows = [line.split("`")[1] for line in page().splitlines() if line.startswith("| `")]
    basic = [line.split("=")[0] for line in basic_lines().splitlines()]
    assert len(basic) > 30 and rows[: len(basic)] == basic and len(set(rows)) == len(rows) == len(table())
    assert {path for path in ALL if not path.startswith("resources.")} <= set(rows)


@pytest.mark.parametrize("kind", GROUPS, ids=lambda kind: kind.__name__)
def test_what_a_class_says_of_its_settings_names_them(kind: Any) -> None:
    own = {field.name for field in fields(kind)}
    said = [getattr(kind, names, frozenset()) for names in ("basic", "internal", "runtime")]
    assert set().union(*said) <= own and not said[0] & said[1] and not set(fields_of(kind)) & said[1]
