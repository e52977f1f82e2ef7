"""Settings check themselves: every value that is out of place gets one sentence that names it, and
all at once; every file under conf/ fits its class and names what there is; and the grid is the
product of its axes."""

import re
import runpy
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import choices
import pytest
from choices import CONF, Files, cells
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

from moe_lab import config, grid
from moe_lab.calibration import shares_and_sets
from moe_lab.calibration.sources import locate
from moe_lab.config import (
    BenchmarkConfig,
    CellConfig,
    Config,
    JudgeConfig,
    ProtocolConfig,
    SuiteConfig,
    TimingConfig,
)
from moe_lab.config.base import Group, SettingsError, fields_of, valid, without_none
from moe_lab.config.table import basic_lines
from moe_lab.config.table import settings as table
from moe_lab.criteria import check as check_criterion
from moe_lab.grid import benchmarks

GROUPS = Group.__subclasses__()
NEEDED: dict[str, Any] = {
    group: choices.OWN[group] for group in ("model", "criterion", "calibration")
}
NEEDED["judge"] = {"model": "m", "url": "http://localhost:1"}
"""Group -> what it must have, for Config and CellConfig."""


def wrong(kind: Any) -> list[Any]:
    """Values that a setting of this type cannot have: of another type, and on the other side of
    each bound."""
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
def test_every_value_out_of_place_is_one_sentence_and_all_are_told_at_once(
    data: st.DataObject,
) -> None:
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
        named = [
            next((path for path in asked if one.startswith(f"{path}=")), one)
            for one in error.value.sentences
        ]
        assert sorted(named) == sorted(asked), error.value.sentences


@pytest.mark.parametrize("kind", GROUPS, ids=lambda kind: kind.__name__)
def test_an_unknown_setting_has_a_nearest_one_and_a_class_names_settings_of_its_own(
    kind: Any,
) -> None:
    first = next(iter(fields_of(kind)))
    with pytest.raises(
        SettingsError, match=rf"group\.{re.escape(first)}x .*group\.{re.escape(first)}"
    ):
        valid(kind, {f"{first}x": 1}, "group")
    basic, internal, runtime = (
        set(getattr(kind, names, ())) for names in ("basic", "internal", "runtime")
    )
    assert basic | internal | runtime <= {field.name for field in fields(kind)}
    assert not basic & internal and not set(fields_of(kind)) & internal


def test_what_other_settings_set_is_refused_and_what_must_be_given_is_asked_for() -> None:
    with pytest.raises((AttributeError, TypeError, ValidationError)):
        setattr(TimingConfig(), fields(TimingConfig)[0].name, 1)
    for name in BenchmarkConfig.internal:
        with pytest.raises(
            SettingsError, match=f"^group.{re.escape(name)} is set by other settings"
        ):
            valid(
                BenchmarkConfig,
                {"name": "b", "harness": "lm_eval", "task": "t", name: None},
                "group",
            )
    for kind in (JudgeConfig, BenchmarkConfig):
        with pytest.raises(SettingsError) as error:
            valid(kind, {}, "group")
        assert all("add group." in sentence for sentence in error.value.sentences)


def test_the_page_of_settings_is_that_of_the_classes_and_basic_ones_come_first() -> None:
    docs = Path(__file__).parents[1] / "docs"
    page = runpy.run_path(str(docs / "settings_page.py"))["page"]()
    assert (docs / "settings.md").read_text("utf-8") == page, "python docs/settings_page.py"
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    basic = [line.split("=")[0] for line in basic_lines().splitlines()]
    assert len(basic) > 30
    assert rows[: len(basic)] == basic
    assert len(set(rows)) == len(rows) == len(table())
    assert {path for path in ALL if not path.startswith("resources.")} <= set(rows)


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


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_group_file_fits_its_dataclass_and_is_named_as_it_says(file: Path) -> None:
    group = file.parent.name
    loaded = OmegaConf.load(file)
    given = {name: GIVEN[name] for name in loaded if OmegaConf.is_missing(loaded, name)}
    found = valid(SCHEMAS[group], {**choices.content(group, file.stem), **given}, group)
    named = (found.shape or "none") if group == "export" else getattr(found, "name", file.stem)
    is_a_choice_of_parameters = group == "criterion" or {"label", "replacement", "protect"} & set(
        loaded
    )
    assert named == file.stem or is_a_choice_of_parameters
    if group == "criterion":
        check_criterion(found.name, found.parameters)
    if group == "calibration":
        settings = grid.mixed(found, choices.Files())
        assert settings.tokens % settings.length == 0
        assert all(
            locate(part.path) is None or part.path.startswith("pocket:")
            for _, part in shares_and_sets(settings)
        )


HALF = {"calibration": "a", "share": 0.5}
CANNOT_BE: list[tuple[str, dict[str, Any], str]] = [
    ("calibration", {"path": "a.txt", "length": 8, "tokens": 7}, "tokens"),
    ("calibration", {"path": ""}, "path"),
    (
        "calibration",
        {"sources": [HALF, {**HALF, "share": 0.6}]},
        "sources: the shares add up to 1.1",
    ),
    ("calibration", {"sources": [HALF, HALF], "order": "first"}, "order=first beside sources"),
    ("calibration", {"sources": [HALF, HALF], "path": "a.txt"}, "path=a.txt beside sources"),
    (
        "calibration",
        {"path": "a.txt", "length": 8, "tokens": 56, "batch_size": 2, "parts": 5},
        "parts=5 .* 4 batches",
    ),
    ("calibration", {"path": "a.txt", "parts": 0}, "parts=0"),
    ("allocation", {"by": "x"}, "by=x"),
    ("allocation", {"search": "x"}, "search=x"),
    ("allocation", {"path": "x"}, "path=x"),
    ("allocation", {"protect_layers": 0.5}, "protect_layers=0.5"),
    ("recovery", {"train": "routers"}, "train=routers .*expected.* distill"),
    (
        "recovery",
        {"instructions": "alpaca", "distill": "c4"},
        "instructions=alpaca .*expected one of",
    ),
    (
        "recovery",
        {"instructions": "alpaca", "temperature": 2.0},
        "temperature=2.0 .*expected.* distill",
    ),
    ("recovery", {"distill": "c4", "train": "routers", "rank": 8}, "rank=8 .*expected.* 32"),
    (
        "recovery",
        {"distill": "c4", "train": "routers", "learning_rate": 1e-3},
        "learning_rate=0.001 .*expected.* 0.0001",
    ),
    (
        "recovery",
        {"distill": "c4", "train": "routers", "fit": "c4"},
        "distill=c4 .*expected one of",
    ),
    ("recovery", {"fit": "c4", "epochs": 1.0}, "epochs=1.0 .*expected.* 2.0"),
    ("recovery", {"fit": "c4", "train": "routers"}, "train=routers .*expected.* adapters"),
    ("export", {"shape": None, "format": "gguf"}, "format=gguf .*add export=natural"),
    (
        "backend",
        {"name": "hf", "arguments": {"max_num_seqs": 8}},
        "arguments=.*expected backend=vllm",
    ),
    ("backend", {"name": "vllm", "arguments": {"dtype": "float16"}}, "arguments.dtype"),
    (
        "backend",
        {"name": "vllm", "arguments": {"tensor_parallel_size": "two"}},
        "arguments.tensor_parallel_size=two",
    ),
    (
        "resources",
        {"every": {"sbatch": {"gpus-per-node": "a100:1"}}},
        "every.sbatch.gpus-per-node .*expected gpus and",
    ),
    *(
        (
            "resources",
            {"every": {"sbatch": {name: 2}}},
            f"every.sbatch.{name}.*expected other options",
        )
        for name in ("ntasks-per-node", "ntasks-per-n", "wait", "parsable", "test-only", "chdir")
    ),
    (
        "resources",
        {"every": {"sbatch": {"tres_per_task": "gres/gpu:1"}}},
        "every.sbatch.tres-per-task .*d gpus, gpu_t",
    ),
    (
        "resources",
        {"jobs": {"plan": {"sbatch": {"cpus_per_task": 4}}}},
        "jobs.plan.sbatch.cpus-per-task .*d cpus",
    ),
    ("judge", {"url": "localhost:8000"}, "url="),
    ("judge", {"max_tokens": 0}, "max_tokens=0"),
    ("judge", {"key_variable": "sk-0123"}, "key_variable="),
    ("judge", {"model": " "}, "model="),
    ("judge", {"extra": {"stream": 1}}, "extra.stream"),
]
"""Group, settings beside what it must have, and how the sentence goes on after the group."""


@pytest.mark.parametrize(("group", "given", "says"), CANNOT_BE)
def test_settings_that_cannot_be_together_are_one_sentence(
    group: str, given: dict[str, Any], says: str
) -> None:
    needed = {"calibration": {"name": "c"}, "judge": NEEDED["judge"]}.get(group, {})
    with pytest.raises(SettingsError) as error:
        valid(SCHEMAS[group], {**needed, **given}, group)
    (sentence,) = error.value.sentences
    assert re.match(rf"{group}\.{says}", sentence), sentence


def test_suites_name_benchmarks_that_exist() -> None:
    for name in Files().names("suite"):
        listed = choices.content("suite", name)["benchmarks"]
        assert (
            listed
            and set(listed) <= set(Files().names("benchmark"))
            and len(set(listed)) == len(listed)
        ), name


@pytest.mark.parametrize("name", Files().names("protocol"))
def test_a_protocol_measures_results_of_benchmarks_that_exist_otherwise(name: str) -> None:
    for benchmark, differing in choices.content("protocol", name).get("benchmarks", {}).items():
        own = choices.choose(config.BenchmarkConfig, "benchmark", benchmark)
        assert set(replace(own, **differing).reports) == set(own.reports)
        assert set(differing) <= {"reports", "shots", "max_length", "max_new_tokens"}


def test_the_product_of_axes_reads_each_file_and_makes_each_choice_once() -> None:
    (cell,) = cells(ratio=0.5, seed=7, gate="renormalized")
    assert (cell.criterion.name, cell.ratio, cell.gate, cell.seed) == (
        "man",
        0.5,
        "renormalized",
        7,
    )
    files = Files()
    lists = {
        "criterion": ["man", "reap"],
        "calibration": ["pocket_code", "pocket_math"],
        "ratio": [0.25, 0.5],
    }
    found = cells(None, {**lists, "seed": [1, 2]}, files=files)
    assert (
        len(found)
        == len({(c.criterion.name, c.calibration.name, c.ratio, c.seed) for c in found})
        == 16
    )
    assert len(files.reads) == len(set(files.reads)) == 5  # and flops_text
    assert len({id(cell.calibration) for cell in found}) == 2
    names = [cell.criterion.name for cell in cells(None, {"criterion": ["man", "m*", "man"]})]
    assert names[0] == "man" and len(names) == len(set(names)) and {"mone", "msan"} <= set(names)


@given(st.lists(st.decimals("0.01", "0.99", places=2), min_size=1, max_size=4))
def test_a_ratio_is_a_decimal_however_it_was_computed(shares: list[Any]) -> None:
    steps = [sum([float(share) / 3] * 3) for share in shares]  # such as 0.30000000000000004
    assert {cell.ratio for cell in cells(None, {"ratio": steps})} == {
        float(share) for share in shares
    }


def test_every_model_is_a_model_of_its_own_with_every_number_of_experts_a_token() -> None:
    files = Files()
    found = cells(
        None,
        {"model": ["pocket_olmoe"], "model.top_k": [None, 2, 1], "ratio": [0.25, 0.5]},
        files=files,
    )
    assert [cell.model.name for cell in found[::2]] == [
        "pocket_olmoe",
        "pocket_olmoe_top2",
        "pocket_olmoe_top1",
    ]
    assert [cell.model.top_k for cell in found[::2]] == [None, 2, 1]
    assert len({id(cell.model) for cell in found}) == 3
    assert files.reads.count("model/pocket_olmoe") == 1


def test_a_list_of_a_setting_makes_choices_that_are_told_apart_by_their_names() -> None:
    found = cells(
        None, {"calibration": ["pocket_code"]}, typed={"calibration.tokens": [1024, 2048]}
    )
    names = {cell.calibration.name: cell.calibration.tokens for cell in found}
    assert names == {"pocket_code_tokens1024": 1024, "pocket_code_tokens2048": 2048}


def test_further_grids_add_cells_and_take_missing_axes_from_the_first() -> None:
    more = ({"criterion": ["heapr"], "allocation": ["global"]}, {"ratio": [0.5, 0.75]})
    found = cells(None, {"criterion": ["man"], "ratio": [0.25, 0.5]}, *more)
    assert [(c.criterion.name, c.allocation.name, c.ratio) for c in found] == [
        ("man", "uniform", 0.25),
        ("man", "uniform", 0.5),
        ("heapr", "global", 0.25),
        ("heapr", "global", 0.5),
        ("man", "uniform", 0.75),
    ]


def test_what_is_typed_stands_above_every_grid() -> None:
    lists = {"model": ["pocket_olmoe"], "criterion": ["man", "reap"], "ratio": [0.25, 0.5]}
    more = {"model": ["pocket_qwen3_moe"]}
    found = cells(None, lists, more, typed={"model": ["pocket_qwen3_moe"], "criterion": ["aimer"]})
    assert {(cell.model.name, cell.criterion.name) for cell in found} == {
        ("pocket_qwen3_moe", "aimer")
    }
    assert [cell.ratio for cell in found] == [0.25, 0.5]
    assert len(cells(None, lists, more)) == 8
    assert {
        cell.criterion.name for cell in cells(None, lists, typed={"criterion": ["ean", "seer"]})
    } == {"ean", "seer"}


def test_settings_that_are_typed_hold_for_every_choice_but_not_for_other_texts() -> None:
    words = [("calibration.tokens", 1024), ("recovery.rows_per_step", 7)]
    lists = {"calibration": ["pocket_code", "pocket_math"], "allocation": ["pocket_evolutionary"]}
    found = cells(None, {**lists, "recovery": ["pocket_dora"]}, words=words)
    assert {(cell.calibration.tokens, cell.recovery.rows_per_step) for cell in found} == {(1024, 7)}
    assert len(found) == 2
    roles = {
        "search": "pocket_math_search",
        "instructions": "pocket_math_search",
        "flops": "pocket_excerpt",
    }
    assert {role: text.name for role, text in found[0].texts.items()} == roles
    assert all(text.tokens != 1024 for text in found[0].texts.values())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "grid.criterion=reep": ({"criterion": ["reep"]}, "reap"),
    "grid.model=poket_olmoe": ({"model": ["poket_olmoe"]}, "pocket_olmoe"),
    "grid.criterion=zz*": ({"criterion": ["zz*"]}, "known"),
    "grid.ratio=1.0": ({"ratio": [1.0]}, "below 1"),
    "grid.ratio=-0.1": ({"ratio": [-0.1]}, "0.0 or more"),
    "grid.gate=modle": ({"gate": ["modle"]}, "model"),
    "grid.seed=1.5": ({"seed": [1.5]}, "whole number"),
    "grid.ratio=0.5": ({"ratio": 0.5}, "list"),
    "critereon": ({"critereon": ["man"]}, "criterion"),
}
"""How a sentence begins, or a word of it -> lists, and what is expected in it."""


@given(st.sets(st.sampled_from(sorted(WRONG)), min_size=1))
def test_every_wrong_list_is_one_sentence_and_all_are_told_at_once(begins: set[str]) -> None:
    lists = {key: values for begin in sorted(begins) for key, values in WRONG[begin][0].items()}
    told = {key: begin for begin in sorted(begins) for key in WRONG[begin][0]}
    with pytest.raises(SettingsError) as error:
        cells(None, lists)
    assert len(error.value.sentences) == len(lists)
    for begin in told.values():
        assert any(begin in one and WRONG[begin][1] in one for one in error.value.sentences), begin


def asked(suite: SuiteConfig, protocol: ProtocolConfig | None = None) -> Any:
    return benchmarks(Config(suite=suite, data_root="there"), protocol or ProtocolConfig(), Files())


def test_a_suite_gives_its_text_and_limit_to_its_benchmarks() -> None:
    (benchmark,) = asked(SuiteConfig(["perplexity"], path="text.txt", limit=3))
    assert (benchmark.task, benchmark.limit) == ("text.txt", 3)
    with pytest.raises(SettingsError, match=r"suite\.path=text"):
        asked(SuiteConfig(["pocket_boolq"], path="text.txt"))


def test_a_protocol_changes_what_it_names_and_every_published_benchmark() -> None:
    published = ProtocolConfig("p", {"every": {"max_length": 99}, "mmlu": {"shots": 5}})
    own, easy, mmlu = asked(
        SuiteConfig(["pocket_arc_easy", "arc_easy", "mmlu"], limit=3), published
    )
    assert (own.max_length, own.root) == (None, None) and {easy.max_length, mmlu.max_length} == {99}
    assert (easy.shots, mmlu.shots) == (0, 5) and easy.root == "there"
    assert {own.limit, easy.limit, mmlu.limit} == {3}
    (added,) = asked(
        SuiteConfig(["wildbench"]),
        ProtocolConfig("p", {"wildbench": {"parameters": {"template": "t"}}}),
    )
    assert added.parameters == {"tag": "Creative Writing", "template": "t"}


@pytest.mark.parametrize(
    ("differing", "says"),
    [
        ({"mmul": {"shots": 5}}, "mmlu"),
        ({"mmlu": {"shot": 5}}, "shots"),
        ({"mmlu": {"shots": "a"}}, "shots=a"),
        ({"mmlu": {"limit": 5}}, "limit"),
    ],
)
def test_a_wrong_protocol_is_one_sentence(
    differing: dict[str, dict[str, object]], says: str
) -> None:
    with pytest.raises(SettingsError, match=f"protocol=p.*{re.escape(says)}") as error:
        asked(SuiteConfig(["mmlu"]), ProtocolConfig("p", differing))
    assert len(error.value.sentences) == 1
