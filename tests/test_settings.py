"""Settings check themselves: every value that is out of place gets one sentence that names it, and
all at once; every file under conf/ fits its class and names what there is; and the grid is the
product of its axes."""

import re
import runpy
from collections.abc import Iterator
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Any

import choices
import pytest
from choices import CONF, Files, cells
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError
from safetensors import safe_open

from moe_lab import config, grid
from moe_lab.calibration import shares_and_sets
from moe_lab.calibration.sources import local_files
from moe_lab.config import (
    BenchmarkConfig,
    CellConfig,
    Config,
    JudgeConfig,
    ProtocolConfig,
    SuiteConfig,
    TimingConfig,
)
from moe_lab.config.base import Group, SettingsError, fields_of, validated, without_none
from moe_lab.config.table import basic_lines
from moe_lab.config.table import settings as table
from moe_lab.criteria import check as check_criterion
from moe_lab.errors import UserError
from moe_lab.grid import benchmarks
from moe_lab.paths import resolve

GROUPS = Group.__subclasses__()
REQUIRED: dict[str, Any] = {
    group: choices.COMPOSED_CHOICES[group] for group in ("model", "criterion", "calibration")
}
REQUIRED["judge"] = {"model": "m", "url": "http://localhost:1"}
"""Group -> required settings, for Config and CellConfig."""


def invalid_values(kind: Any) -> list[Any]:
    """Values that a setting of this type cannot have: of another type, and on the other side of
    each bound."""
    schema = TypeAdapter(kind).json_schema()
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    option = options[0]
    if "enum" in option:
        return ["nonesuch", 7.5]
    values: list[Any] = {
        "integer": ["word", 1.5, [1]],
        "number": ["word", float("nan"), float("inf")],
        "string": [7, 1.5, {"a": 1}],
        "boolean": ["maybe", 2],
        "array": ["word", 3],
        "object": ["word", 3],
    }.get(option.get("type", "object"), ["word"])
    bounds = {"minimum": -1, "exclusiveMinimum": 0, "maximum": 1, "exclusiveMaximum": 0}
    return values + [option[name] + step for name, step in bounds.items() if name in option]


def settable(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, type) of every setting that a command line can set."""
    for name, hint in fields_of(kind).items():
        inner = without_none(hint)
        if name == "expected":  # given whole, or not at all
            continue
        if fields_of(inner):
            yield from settable(inner, f"{prefix}{name}.")
        elif inner is not Any:
            yield f"{prefix}{name}", hint


DOCS = Path(__file__).parents[1] / "docs"
ALL = {
    **{path: (Config, hint) for path, hint in settable(Config)},
    **{path: (CellConfig, hint) for path, hint in settable(CellConfig)},
}


@pytest.mark.parametrize("kind", [Config, CellConfig])
@given(st.data())
@settings(max_examples=30, deadline=None)
def test_all_invalid_values_are_reported_at_once(kind: Any, data: st.DataObject) -> None:
    """Each gets one sentence."""
    known_paths = [path for path, (owner, _) in ALL.items() if owner is kind]
    paths = data.draw(st.sets(st.sampled_from(known_paths), min_size=1, max_size=6))
    content = {name: dict(needed) for name, needed in REQUIRED.items() if name in fields_of(kind)}
    for path in paths:
        *groups, name = path.split(".")
        group: Any = content
        for group_name in groups:
            group = group.setdefault(group_name, {})
        group[name] = data.draw(st.sampled_from(invalid_values(ALL[path][1])), label=path)
    with pytest.raises(SettingsError) as error:
        validated(kind, content, "")
    sentences = error.value.sentences
    reported = [
        next((path for path in paths if sentence.startswith(f"{path}=")), sentence)
        for sentence in sentences
    ]
    assert sorted(reported) == sorted(paths), sentences


@pytest.mark.parametrize("kind", GROUPS, ids=lambda kind: kind.__name__)
def test_an_unknown_setting_suggests_the_nearest(kind: Any) -> None:
    name = next(iter(fields_of(kind)))
    message = rf"group\.{re.escape(name)}x .*group\.{re.escape(name)}"
    with pytest.raises(SettingsError, match=message):
        validated(kind, {f"{name}x": 1}, "group")


@pytest.mark.parametrize("kind", GROUPS, ids=lambda kind: kind.__name__)
def test_lists_of_settings_of_a_class_name_its_own(kind: Any) -> None:
    basic, internal, runtime = (
        set(getattr(kind, names, ())) for names in ("basic", "internal", "runtime")
    )
    assert basic | internal | runtime <= {field.name for field in fields(kind)}
    assert not basic & internal
    assert not set(fields_of(kind)) & internal


def test_settings_are_frozen() -> None:
    with pytest.raises((AttributeError, TypeError, ValidationError)):
        setattr(TimingConfig(), fields(TimingConfig)[0].name, 1)


@pytest.mark.parametrize(
    ("timeout", "message"), [(1e400, "a finite number"), (1 << 70, "a number of at most")]
)
def test_a_number_that_json_cannot_store_is_refused(timeout: float, message: str) -> None:
    judge = {**REQUIRED["judge"], "extra": {"timeout": timeout}}
    with pytest.raises(SettingsError, match=message):
        validated(JudgeConfig, judge, "judge")


@pytest.mark.parametrize("name", sorted(BenchmarkConfig.internal))
def test_an_internal_setting_is_refused(name: str) -> None:
    benchmark = {"name": "b", "harness": "lm_eval", "task": "t", name: None}
    with pytest.raises(SettingsError, match=f"^group.{re.escape(name)} is set by other settings"):
        validated(BenchmarkConfig, benchmark, "group")


@pytest.mark.parametrize("kind", [JudgeConfig, BenchmarkConfig])
def test_missing_settings_are_requested(kind: Any) -> None:
    with pytest.raises(SettingsError) as error:
        validated(kind, {}, "group")
    assert all("add group." in sentence for sentence in error.value.sentences)


@pytest.fixture(scope="module")
def settings_page() -> str:
    """docs/settings.md as it is generated."""
    page: str = runpy.run_path(str(DOCS / "settings_page.py"))["page"]()
    return page


def test_settings_page_is_up_to_date(settings_page: str) -> None:
    assert (DOCS / "settings.md").read_text("utf-8") == settings_page, (
        "python docs/settings_page.py"
    )


def test_settings_page_lists_all_settings_basic_ones_first(settings_page: str) -> None:
    rows = [line.split("`")[1] for line in settings_page.splitlines() if line.startswith("| `")]
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
EXAMPLES: dict[str, Any] = {
    "path": "some/set",
    "sources": [{"calibration": "c4", "share": 0.5}, {"calibration": "tulu_math", "share": 0.5}],
}
"""Setting that a file may leave to the user -> example of it."""
FILES = sorted(file for group in SCHEMAS for file in (CONF / group).glob("*.yaml"))


def load_group(file: Path) -> Any:
    """The settings of a file under conf/, with examples for those that a user must give."""
    content = OmegaConf.load(file)
    examples = {name: EXAMPLES[name] for name in content if OmegaConf.is_missing(content, name)}
    group = file.parent.name
    return validated(SCHEMAS[group], {**choices.content(group, file.stem), **examples}, group)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_group_file_is_valid_and_named_after_its_content(file: Path) -> None:
    """Files that give parameters to a criterion or an allocation may have other names."""
    group_settings = load_group(file)
    name = getattr(group_settings, "name", file.stem)
    if file.parent.name == "export":
        name = group_settings.shape or "none"
    has_parameters = {"label", "replacement", "protect"} & set(OmegaConf.load(file))
    assert name == file.stem or file.parent.name == "criterion" or has_parameters


@pytest.mark.parametrize(
    "file", sorted((CONF / "criterion").glob("*.yaml")), ids=lambda file: file.stem
)
def test_a_criterion_file_has_valid_parameters(file: Path) -> None:
    criterion = load_group(file)
    check_criterion(criterion.name, criterion.parameters)


@pytest.mark.parametrize(
    "file", sorted((CONF / "calibration").glob("*.yaml")), ids=lambda file: file.stem
)
def test_a_calibration_file_has_whole_rows_and_no_local_path(file: Path) -> None:
    text = grid.add_sources(load_group(file), choices.Files())
    assert text.tokens % text.length == 0
    for _, part in shares_and_sets(text):
        assert not local_files(part) or part.path.startswith("pocket:")


HALF = {"calibration": "a", "share": 0.5}
INVALID_COMBINATIONS: list[tuple[str, dict[str, Any], str]] = [
    ("calibration", {"path": "a.txt", "length": 8, "tokens": 7}, "tokens"),
    ("calibration", {"path": ""}, "path"),
    (
        "calibration",
        {"sources": [HALF, {**HALF, "share": 0.6}]},
        "sources: the shares add up to 1.1",
    ),
    ("calibration", {"sources": [HALF, HALF], "order": "first"}, "order=first beside sources"),
    ("calibration", {"sources": [HALF, HALF], "path": "a.txt"}, "path=a.txt beside sources"),
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
        "temperature=2.0 .*distill=.*expected 1.0",
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
        "arguments=.*backend=vllm.*expected {}",
    ),
    ("backend", {"name": "vllm", "arguments": {"dtype": "float16"}}, "arguments.dtype"),
    (
        "backend",
        {"name": "vllm", "arguments": {"tensor_parallel_size": "two"}},
        "arguments.tensor_parallel_size=two",
    ),
    *(
        ("resources", {"every": {"sbatch": {name: value}}}, "every.sbatch.*gpu.*expected gpus and")
        for name, value in (("gpus_per_node", "a100:1"), ("gres", "nvme:1,gpu:a100:1"))
    ),
    *(
        (
            "resources",
            {"every": {"sbatch": {name: 2}}},
            f"every.sbatch.{name}.*expected other options",
        )
        for name in ("ntasks-per-node", "wait", "parsable", "test-only", "chdir")
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
"""Group, its settings without the required ones, and the sentence after the group."""


@pytest.mark.parametrize(("group", "content", "message"), INVALID_COMBINATIONS)
def test_invalid_combinations_are_one_sentence(
    group: str, content: dict[str, Any], message: str
) -> None:
    needed = {"calibration": {"name": "c"}, "judge": REQUIRED["judge"]}.get(group, {})
    with pytest.raises(SettingsError) as error:
        validated(SCHEMAS[group], {**needed, **content}, group)
    (sentence,) = error.value.sentences
    assert re.match(rf"{group}\.{message}", sentence), sentence


@pytest.mark.parametrize("name", Files().names("suite"))
def test_a_suite_names_known_benchmarks_once(name: str) -> None:
    names = choices.content("suite", name)["benchmarks"]
    assert names
    assert set(names) <= set(Files().names("benchmark"))
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", Files().names("protocol"))
def test_a_protocol_changes_settings_of_known_benchmarks(name: str) -> None:
    for benchmark, changes in choices.content("protocol", name).get("benchmarks", {}).items():
        unchanged = choices.read_choice(config.BenchmarkConfig, "benchmark", benchmark)
        assert set(replace(unchanged, **changes).reports) == set(unchanged.reports)
        of_prompts = {"chat", "reports", "shots", "max_length", "max_new_tokens", "parameters"}
        assert set(changes) <= of_prompts


def test_a_cell_has_its_settings() -> None:
    (cell,) = cells(ratio=0.5, seed=7, gate="renormalized")
    values = (cell.criterion.name, cell.ratio, cell.gate, cell.seed)
    assert values == ("man", 0.5, "renormalized", 7)


def test_a_ratio_of_the_model_becomes_one_of_its_routed_experts() -> None:
    """HEAPr, Figure 2: the share of all parameters."""
    with safe_open(Path(resolve("pocket:olmoe")) / "model.safetensors", "pt") as file:
        names = file.keys()
        sizes = {name: prod(file.get_slice(name).get_shape()) for name in names}
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    axes = {"model": {"name": "m", "path": "pocket:olmoe"}, "ratio_of": "model"}
    (cell,) = cells(ratio=0.2, **axes)
    assert cell.ratio * routed == pytest.approx(0.2 * sum(sizes.values()), rel=1e-6)
    with pytest.raises(UserError, match=r"ratio=0\.9 .*ratio_of=model"):
        cells(ratio=0.9, **axes)


GRID = {
    "criterion": ["man", "reap"],
    "calibration": ["pocket_code", "pocket_math"],
    "ratio": [0.25, 0.5],
    "seed": [1, 2],
}


def test_a_grid_is_the_product_of_its_axes() -> None:
    """It reads each file and makes each choice once."""
    files = Files()
    grid_cells = cells(None, GRID, files=files)
    axes = {(c.criterion.name, c.calibration.name, c.ratio, c.seed) for c in grid_cells}
    assert len(grid_cells) == len(axes) == 16
    assert len(files.reads) == len(set(files.reads)) == 5  # and flops_text
    assert len({id(cell.calibration) for cell in grid_cells}) == 2


def test_patterns_add_choices_once() -> None:
    names = [cell.criterion.name for cell in cells(None, {"criterion": ["man", "m*", "man"]})]
    assert names[0] == "man"
    assert len(names) == len(set(names))
    assert {"mone", "msan"} <= set(names)


@given(st.lists(st.decimals("0.01", "0.99", places=2), min_size=1, max_size=4))
def test_a_ratio_is_a_decimal_however_it_was_computed(shares: list[Any]) -> None:
    steps = [sum([float(share) / 3] * 3) for share in shares]  # such as 0.30000000000000004
    assert {cell.ratio for cell in cells(None, {"ratio": steps})} == {
        float(share) for share in shares
    }


def test_each_top_k_is_a_model_of_its_own() -> None:
    files = Files()
    lists = {"model": ["pocket_olmoe"], "model.top_k": [None, 2, 1], "ratio": [0.25, 0.5]}
    grid_cells = cells(None, lists, files=files)
    assert [(cell.model.name, cell.model.top_k) for cell in grid_cells[::2]] == [
        ("pocket_olmoe", None),
        ("pocket_olmoe_top2", 2),
        ("pocket_olmoe_top1", 1),
    ]
    assert len({id(cell.model) for cell in grid_cells}) == 3
    assert files.reads.count("model/pocket_olmoe") == 1


def test_a_list_of_a_setting_gives_choices_with_names_of_their_own() -> None:
    grid_cells = cells(
        None, {"calibration": ["pocket_code"]}, command_lists={"calibration.tokens": [1024, 2048]}
    )
    names = {cell.calibration.name: cell.calibration.tokens for cell in grid_cells}
    assert names == {"pocket_code_tokens1024": 1024, "pocket_code_tokens2048": 2048}


def test_further_grids_take_missing_axes_from_the_first() -> None:
    more = ({"criterion": ["heapr"], "allocation": ["global"]}, {"ratio": [0.5, 0.75]})
    grid_cells = cells(None, {"criterion": ["man"], "ratio": [0.25, 0.5]}, *more)
    assert [(c.criterion.name, c.allocation.name, c.ratio) for c in grid_cells] == [
        ("man", "uniform", 0.25),
        ("man", "uniform", 0.5),
        ("heapr", "global", 0.25),
        ("heapr", "global", 0.5),
        ("man", "uniform", 0.75),
    ]


LISTS = {
    "model": ["pocket_olmoe"],
    "criterion": ["man", "reap"],
    "ratio": [0.25, 0.5],
}
MORE = {"model": ["pocket_qwen3_moe"]}


def test_the_command_line_overrides_every_grid() -> None:
    typed = {"model": ["pocket_qwen3_moe"], "criterion": ["aimer"]}
    grid_cells = cells(None, LISTS, MORE, command_lists=typed)
    names = {(cell.model.name, cell.criterion.name) for cell in grid_cells}
    assert names == {("pocket_qwen3_moe", "aimer")}
    assert [cell.ratio for cell in grid_cells] == [0.25, 0.5]


def test_settings_of_the_command_line_hold_for_every_choice() -> None:
    settings = [("calibration.tokens", 1024), ("recovery.rows_per_step", 7)]
    lists = {"calibration": ["pocket_code", "pocket_math"], "allocation": ["pocket_evolutionary"]}
    grid_cells = cells(None, {**lists, "recovery": ["pocket_dora"]}, overrides=settings)
    values = {(cell.calibration.tokens, cell.recovery.rows_per_step) for cell in grid_cells}
    assert values == {(1024, 7)}
    assert len(grid_cells) == 2
    texts = grid_cells[0].texts
    assert {role: text.name for role, text in texts.items()} == {
        "search": "pocket_math_search",
        "instructions": "pocket_math_search",
        "flops": "pocket_excerpt",
    }
    assert all(text.tokens != 1024 for text in texts.values())


INVALID_LISTS: dict[str, tuple[dict[str, Any], str]] = {
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
"""Part of a sentence -> the lists that it is about, and the expectation in it."""


@given(st.sets(st.sampled_from(sorted(INVALID_LISTS)), min_size=1))
def test_all_invalid_lists_are_reported_at_once(beginnings: set[str]) -> None:
    """Each gets one sentence; of two values for one key, the last counts."""
    lists: dict[str, Any] = {}
    beginning_of: dict[str, str] = {}
    for beginning in sorted(beginnings):
        for key, values in INVALID_LISTS[beginning][0].items():
            lists[key] = values
            beginning_of[key] = beginning
    with pytest.raises(SettingsError) as error:
        cells(None, lists)
    sentences = error.value.sentences
    assert len(sentences) == len(lists)
    for beginning in beginning_of.values():
        expected = INVALID_LISTS[beginning][1]
        assert any(beginning in text and expected in text for text in sentences), beginning


def suite_benchmarks(suite: SuiteConfig, protocol: ProtocolConfig | None = None) -> Any:
    return benchmarks(Config(suite=suite, data_root="there"), protocol or ProtocolConfig(), Files())


def test_a_suite_gives_its_text_and_limit_to_its_benchmarks() -> None:
    (benchmark,) = suite_benchmarks(SuiteConfig(["perplexity"], path="text.txt", limit=3))
    assert (benchmark.task, benchmark.limit) == ("text.txt", 3)
    with pytest.raises(SettingsError, match=r"suite\.path=text"):
        suite_benchmarks(SuiteConfig(["pocket_boolq"], path="text.txt"))


def test_a_protocol_changes_published_benchmarks() -> None:
    protocol = ProtocolConfig("p", {"every": {"max_length": 99}, "mmlu": {"shots": 5}})
    suite = SuiteConfig(["pocket_arc_easy", "arc_easy", "mmlu"], limit=3)
    pocket, arc_easy, mmlu = suite_benchmarks(suite, protocol)
    assert (pocket.max_length, pocket.root) == (None, None)
    assert {arc_easy.max_length, mmlu.max_length} == {99}
    assert (arc_easy.shots, mmlu.shots) == (0, 5)
    assert arc_easy.root == "there"
    assert {pocket.limit, arc_easy.limit, mmlu.limit} == {3}


def test_parameters_of_a_protocol_are_added() -> None:
    protocol = ProtocolConfig("p", {"wildbench": {"parameters": {"template": "t"}}})
    (benchmark,) = suite_benchmarks(SuiteConfig(["wildbench"]), protocol)
    assert benchmark.parameters == {"tag": "Creative Writing", "template": "t"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mmul": {"shots": 5}}, "mmlu"),
        ({"mmlu": {"shot": 5}}, "shots"),
        ({"mmlu": {"shots": "a"}}, "shots=a"),
        ({"mmlu": {"limit": 5}}, "limit"),
    ],
)
def test_an_invalid_protocol_is_one_sentence(
    changes: dict[str, dict[str, object]], message: str
) -> None:
    with pytest.raises(SettingsError, match=f"protocol=p.*{re.escape(message)}") as error:
        suite_benchmarks(SuiteConfig(["mmlu"]), ProtocolConfig("p", changes))
    assert len(error.value.sentences) == 1
