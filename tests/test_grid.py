"""The grid: the product of its axes, each choice loaded once, each wrong one a sentence."""

from __future__ import annotations

import re
from dataclasses import replace

import choices
import pytest
from omegaconf import DictConfig

from moe_lab.config import (
    CalibrationConfig,
    Config,
    CriterionConfig,
    GridConfig,
    ModelConfig,
    ProtocolConfig,
    SuiteConfig,
)
from moe_lab.errors import UserError
from moe_lab.grid import Files, benchmarks, cells, chosen


class Counting:
    """The real choices of groups, criteria without a file included, counting how often each is read."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def files(self, **overrides: object) -> Files:
        named = tuple((key.replace("__", "."), value) for key, value in overrides.items())
        return Files(choices.names, self.load, named)

    def load(self, group: str, name: str) -> DictConfig:
        self.reads.append(f"{group}/{name}")
        return choices.load(group, name)


def config(**grid: object) -> Config:
    return Config(
        model=ModelConfig(name="m", path="p"),
        criterion=CriterionConfig(name="man"),
        calibration=CalibrationConfig(name="c", path="p"),
        grid=GridConfig(**grid),  # type: ignore[arg-type]
    )


def test_no_axis_is_one_cell_of_the_configuration_itself() -> None:
    settings = config()
    (cell,) = cells(settings, Counting().files())
    assert cell.criterion is settings.criterion and cell.ratio == 0.25 and cell.gate == "model" and cell.seed == 42


def test_product_of_axes_reads_each_file_once() -> None:
    counting = Counting()
    found = cells(
        config(criterion=["man", "reap"], calibration=["pocket_code", "pocket_math"], ratio=[0.25, 0.5], seed=[1, 2]),
        counting.files(),
    )
    points = {(c.criterion.name, c.calibration.name, c.ratio, c.seed) for c in found}
    assert len(found) == len(points) == 16
    assert sorted(counting.reads) == sorted(set(counting.reads)) and len(counting.reads) == 5  # and flops_text


def test_every_model_is_a_model_of_its_own_with_every_number_of_experts_a_token() -> None:
    counting = Counting()
    found = cells(config(model=["pocket_olmoe"], top_k=[None, 2, 1], ratio=[0.25, 0.5]), counting.files())
    assert [cell.model.name for cell in found[::2]] == ["pocket_olmoe", "pocket_olmoe_top2", "pocket_olmoe_top1"]
    assert [cell.model.top_k for cell in found[::2]] == [None, 2, 1]
    assert len({id(cell.model) for cell in found}) == 3 and counting.reads.count("model/pocket_olmoe") == 1
    (own,) = cells(replace(config(), model=ModelConfig(name="m", path="p", top_k=3)), counting.files())
    assert own.model.name == "m_top3"


def test_further_grids_add_cells_and_take_missing_axes_from_the_first() -> None:
    settings = config(criterion=["man"], ratio=[0.25, 0.5])
    settings.more = [GridConfig(criterion=["heapr"], allocation=["global"]), GridConfig(ratio=[0.5, 0.75])]
    found = cells(settings, Counting().files())
    points = [(c.criterion.name, c.allocation.name, c.ratio) for c in found]
    assert points == [
        ("man", "uniform", 0.25),
        ("man", "uniform", 0.5),
        ("heapr", "global", 0.25),
        ("heapr", "global", 0.5),
        ("man", "uniform", 0.75),
    ]


def test_a_value_of_an_axis_stands_above_every_grid() -> None:
    settings = config(model=["pocket_olmoe"], criterion=["man", "reap"], ratio=[0.25, 0.5])
    settings.more = [GridConfig(model=["pocket_qwen3_moe"])]
    settings = replace(settings, model=ModelConfig(name="own", path="x"), criterion=CriterionConfig("aimer"))
    found = cells(chosen(settings, {"model", "criterion"}), Counting().files())
    assert [(c.model.name, c.criterion.name, c.ratio) for c in found] == [("own", "aimer", r) for r in (0.25, 0.5)]
    assert len(cells(chosen(settings, ()), Counting().files())) == 8


def test_other_texts_are_named_by_what_reads_them() -> None:
    files = Counting().files(calibration__tokens=1024)
    (cell,) = cells(config(allocation=["pocket_evolutionary"], recovery=["pocket_dora"]), files)
    assert {role: text.name for role, text in cell.texts.items()} == {
        "search": "pocket_math_search",
        "instructions": "pocket_math_search",
        "flops": "pocket_excerpt",
    }
    assert all(text.tokens != 1024 for text in cell.texts.values())  # those of the calibration set are set, not theirs


def test_what_was_published_for_a_model_is_its_default_search() -> None:
    grid = {"model": ["qwen3_30b_a3b_instruct", "pocket_olmoe"], "allocation": ["evolutionary", "uniform"]}
    found = {
        (c.model.name, c.allocation.name): c.allocation.parameters for c in cells(config(**grid), Counting().files())
    }
    assert found["qwen3_30b_a3b_instruct", "evolutionary"]["generations"] == 10
    assert "generations" not in found["pocket_olmoe", "evolutionary"]
    assert not found["qwen3_30b_a3b_instruct", "uniform"]


def test_an_unknown_text_names_the_setting_and_the_nearest() -> None:
    settings = config()
    settings.flops_text = "pocket_excrpt"
    with pytest.raises(UserError, match=r"flops_text=pocket_excrpt.*did you mean pocket_excerpt"):
        cells(settings, Counting().files())


def test_patterns_and_repetitions() -> None:
    found = cells(config(criterion=["man", "m*", "man"]), Counting().files())
    names = [cell.criterion.name for cell in found]
    assert names[0] == "man" and len(names) == len(set(names)) and {"mone", "msan"} <= set(names)


def test_overrides_hold_for_every_choice() -> None:
    found = cells(config(calibration=["pocket_code", "pocket_math"]), Counting().files(calibration__tokens=1024))
    assert [cell.calibration.tokens for cell in found] == [1024, 1024]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"criterion": ["reep"]}, "did you mean reap"),
        ({"model": ["poket_olmoe"]}, "did you mean pocket_olmoe"),
        ({"ratio": [1.0]}, r"ratio=1.0 is not in \[0, 1\)"),
        ({"ratio": [-0.1]}, r"ratio=-0.1 is not in \[0, 1\)"),
        ({"gate": ["modle"]}, "did you mean model"),
        ({"criterion": ["zz*"]}, r"grid.criterion=zz\* is unknown"),
    ],
)
def test_wrong_values_are_sentences(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        cells(config(**change), Counting().files())


def test_a_value_of_the_wrong_type_names_the_file() -> None:
    with pytest.raises(UserError, match=r"calibration=pocket_code: Value 'many'"):
        cells(config(calibration=["pocket_code"]), Counting().files(calibration__tokens="many"))


def test_suite_gives_its_text_and_limit_to_its_benchmarks() -> None:
    settings = replace(config(), suite=SuiteConfig(name="s", benchmarks=["perplexity"], path="text.txt", limit=3))
    (benchmark,) = benchmarks(settings, Counting().files())
    assert (benchmark.task, benchmark.limit) == ("text.txt", 3)


def test_an_unknown_benchmark_is_a_sentence() -> None:
    settings = replace(config(), suite=SuiteConfig(name="s", benchmarks=["pocket_humanevil"]))
    with pytest.raises(UserError, match="did you mean pocket_humaneval"):
        benchmarks(settings, Counting().files())


def test_a_protocol_changes_what_it_names_and_every_published_benchmark() -> None:
    settings = config()
    settings.suite = SuiteConfig(name="s", benchmarks=["pocket_arc_easy", "arc_easy", "mmlu"], limit=3)
    settings.protocol = ProtocolConfig(name="p", benchmarks={"every": {"max_length": 99}, "mmlu": {"shots": 5}})
    settings.data_root = "there"
    own, easy, mmlu = benchmarks(settings, Counting().files())
    assert (own.max_length, own.root) == (None, None) and {easy.max_length, mmlu.max_length} == {99}
    assert (easy.shots, mmlu.shots) == (0, 5) and easy.root == "there"
    assert {own.limit, easy.limit, mmlu.limit} == {3}


@pytest.mark.parametrize(
    ("protocol", "says"),
    [
        ({"mmul": {"shots": 5}}, "did you mean mmlu"),
        ({"mmlu": {"shot": 5}}, "did you mean shots"),
        ({"mmlu": {"shots": "a"}}, "'a'"),
        ({"mmlu": {"limit": 5}}, "limit"),
    ],
)
def test_a_wrong_protocol_is_one_sentence(protocol: dict[str, object], says: str) -> None:
    settings = config()
    settings.suite = SuiteConfig(name="s", benchmarks=["mmlu"])
    settings.protocol = ProtocolConfig(name="p", benchmarks=protocol)
    with pytest.raises(UserError, match=f"protocol=p.*{re.escape(says)}"):
        benchmarks(settings, Counting().files())


def test_a_protocol_adds_to_the_parameters_of_a_benchmark() -> None:
    settings = config()
    settings.suite = SuiteConfig(name="s", benchmarks=["wildbench"])
    settings.protocol = ProtocolConfig(name="p", benchmarks={"wildbench": {"parameters": {"template": "t.md"}}})
    (found,) = benchmarks(settings, Counting().files())
    assert found.parameters == {"tag": "Creative Writing", "template": "t.md"}
