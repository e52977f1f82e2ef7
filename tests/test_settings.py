"""Settings check themselves: every value that is out of place gets one sentence that names it, and all at once; and
every file under conf/ fits its class and names what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import choices
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

from moe_lab import config, grid
from moe_lab.calibration import check as check_text
from moe_lab.config import BenchmarkConfig, CellConfig, Config, JudgeConfig, TimingConfig
from moe_lab.config.base import SettingsError, fields_of, valid, without_none
from moe_lab.config.table import basic_lines, page
from moe_lab.config.table import settings as table
from moe_lab.criteria import check as check_criterion

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
def test_an_unknown_setting_has_a_nearest_one_and_a_class_names_settings_of_its_own(kind: Any) -> None:
    first = next(iter(fields_of(kind)))
    with pytest.raises(SettingsError, match=rf"group\.{re.escape(first)}x .*group\.{re.escape(first)}"):
        valid(kind, {f"{first}x": 1}, "group")
    basic, internal, runtime = (set(getattr(kind, names, ())) for names in ("basic", "internal", "runtime"))
    assert basic | internal | runtime <= {field.name for field in fields(kind)}
    assert not basic & internal and not set(fields_of(kind)) & internal


def test_what_other_settings_set_is_refused_and_what_must_be_given_is_asked_for() -> None:
    with pytest.raises((AttributeError, TypeError, ValidationError)):
        setattr(TimingConfig(), fields(TimingConfig)[0].name, 1)
    for name in BenchmarkConfig.internal:
        with pytest.raises(SettingsError, match=f"^group.{re.escape(name)} is set by other settings"):
            valid(BenchmarkConfig, {"name": "b", "harness": "lm_eval", "task": "t", name: None}, "group")
    for kind in (JudgeConfig, BenchmarkConfig):
        with pytest.raises(SettingsError) as error:
            valid(kind, {}, "group")
        assert all("add group." in sentence for sentence in error.value.sentences)


def test_the_page_of_settings_is_that_of_the_classes_and_basic_ones_come_first() -> None:
    assert (Path(__file__).parents[1] / "docs/settings.md").read_text("utf-8") == page(), "python -m moe_lab.config"
    rows = [line.split("`")[1] for line in page().splitlines() if line.startswith("| `")]
    basic = [line.split("=")[0] for line in basic_lines().splitlines()]
    assert len(basic) > 30 and rows[: len(basic)] == basic and len(set(rows)) == len(rows) == len(table())
    assert {path for path in ALL if not path.startswith("resources.")} <= set(rows)


CONF = Path(__file__).parents[1] / "conf"
SCHEMAS: dict[str, Any] = {
    folder.name: getattr(config, f"{folder.name.title()}Config")
    for folder in CONF.iterdir()
    if folder.is_dir() and folder.name != "experiment"
}
GIVEN: dict[str, Any] = {
    "path": "some/set",
    "sources": [{"calibration": "c4", "share": 0.5}, {"calibration": "tulu_math", "share": 0.5}],
}
"""What a file may leave to the user, and an example of it."""
FILES = sorted(file for group in SCHEMAS for file in (CONF / group).glob("*.yaml"))


def content(group: str, name: str) -> Any:
    return OmegaConf.load(CONF / group / f"{name}.yaml")


def names(group: str) -> set[str]:
    return {file.stem for file in (CONF / group).glob("*.yaml")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_group_file_fits_its_dataclass_and_is_named_as_it_says(file: Path) -> None:
    group, loaded = file.parent.name, OmegaConf.load(file)
    given = {name: GIVEN[name] for name in loaded if OmegaConf.is_missing(loaded, name)}
    found = valid(SCHEMAS[group], {**choices.content(group, file.stem), **given}, group)
    named = (found.shape or "none") if group == "export" else getattr(found, "name", file.stem)
    is_a_choice_of_parameters = group == "criterion" or {"label", "replacement", "protect"} & set(loaded)
    assert named == file.stem or is_a_choice_of_parameters
    if group == "criterion":
        check_criterion(found.name, found.parameters)
    if group == "calibration":
        settings = grid.mixed(found, choices.Files())
        assert settings.tokens % settings.length == 0
        check_text(settings)


def test_suites_name_benchmarks_that_exist() -> None:
    for name in names("suite"):
        listed = content("suite", name).benchmarks
        assert listed and set(listed) <= names("benchmark") and len(set(listed)) == len(listed), name


@pytest.mark.parametrize("name", sorted(names("protocol")))
def test_a_protocol_measures_results_of_benchmarks_that_exist_otherwise(name: str) -> None:
    for benchmark, differing in content("protocol", name).get("benchmarks", {}).items():
        own = choices.choose(config.BenchmarkConfig, "benchmark", benchmark)
        assert set(replace(own, **OmegaConf.to_container(differing)).reports) == set(own.reports)
        assert set(differing) <= {"reports", "shots", "max_length", "max_new_tokens"}
