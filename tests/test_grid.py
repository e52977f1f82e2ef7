"""The grid: the product of its axes, each choice made once, all mistakes together."""

from __future__ import annotations

import re
from typing import Any

import pytest
from choices import Files, cells
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.config import Config, ProtocolConfig, SuiteConfig
from moe_lab.config.base import SettingsError
from moe_lab.grid import benchmarks


def test_the_product_of_axes_reads_each_file_and_makes_each_choice_once() -> None:
    (cell,) = cells(ratio=0.5, seed=7, gate="renormalized")
    assert (cell.criterion.name, cell.ratio, cell.gate, cell.seed) == ("man", 0.5, "renormalized", 7)
    files = Files()
    lists = {"criterion": ["man", "reap"], "calibration": ["pocket_code", "pocket_math"], "ratio": [0.25, 0.5]}
    found = cells(None, {**lists, "seed": [1, 2]}, files=files)
    assert len(found) == len({(c.criterion.name, c.calibration.name, c.ratio, c.seed) for c in found}) == 16
    assert len(files.reads) == len(set(files.reads)) == 5  # and flops_text
    assert len({id(cell.calibration) for cell in found}) == 2
    names = [cell.criterion.name for cell in cells(None, {"criterion": ["man", "m*", "man"]})]
    assert names[0] == "man" and len(names) == len(set(names)) and {"mone", "msan"} <= set(names)


@given(st.lists(st.decimals("0.01", "0.99", places=2), min_size=1, max_size=4))
def test_a_ratio_is_a_decimal_however_it_was_computed(shares: list[Any]) -> None:
    steps = [sum([float(share) / 3] * 3) for share in shares]  # such as 0.30000000000000004
    assert {cell.ratio for cell in cells(None, {"ratio": steps})} == {float(share) for share in shares}


def test_every_model_is_a_model_of_its_own_with_every_number_of_experts_a_token() -> None:
    files = Files()
    found = cells(None, {"model": ["pocket_olmoe"], "model.top_k": [None, 2, 1], "ratio": [0.25, 0.5]}, files=files)
    assert [cell.model.name for cell in found[::2]] == ["pocket_olmoe", "pocket_olmoe_top2", "pocket_olmoe_top1"]
    assert [cell.model.top_k for cell in found[::2]] == [None, 2, 1]
    assert len({id(cell.model) for cell in found}) == 3 and files.reads.count("model/pocket_olmoe") == 1


def test_a_list_of_a_setting_makes_choices_that_are_told_apart_by_their_names() -> None:
    found = cells(None, {"calibration": ["pocket_code"]}, typed={"calibration.tokens": [1024, 2048]})
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
    assert {(cell.model.name, cell.criterion.name) for cell in found} == {("pocket_qwen3_moe", "aimer")}
    assert [cell.ratio for cell in found] == [0.25, 0.5]
    assert len(cells(None, lists, more)) == 8
    assert {cell.criterion.name for cell in cells(None, lists, typed={"criterion": ["ean", "seer"]})} == {"ean", "seer"}


def test_settings_that_are_typed_hold_for_every_choice_but_not_for_other_texts() -> None:
    words = [("calibration.tokens", 1024), ("recovery.rows_per_step", 7)]
    lists = {"calibration": ["pocket_code", "pocket_math"], "allocation": ["pocket_evolutionary"]}
    found = cells(None, {**lists, "recovery": ["pocket_dora"]}, words=words)
    assert {(cell.calibration.tokens, cell.recovery.rows_per_step) for cell in found} == {(1024, 7)} and len(found) == 2
    roles = {"search": "pocket_math_search", "instructions": "pocket_math_search", "flops": "pocket_excerpt"}
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


def test_an_unknown_text_names_the_setting_and_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"flops_text=pocket_excrpt.*pocket_excerpt"):
        cells(Config(flops_text="pocket_excrpt"))


def asked(suite: SuiteConfig, protocol: ProtocolConfig | None = None) -> Any:
    return benchmarks(Config(suite=suite, data_root="there"), protocol or ProtocolConfig(), Files())


def test_a_suite_gives_its_text_and_limit_to_its_benchmarks() -> None:
    (benchmark,) = asked(SuiteConfig(["perplexity"], path="text.txt", limit=3))
    assert (benchmark.task, benchmark.limit) == ("text.txt", 3)
    with pytest.raises(SettingsError, match=r"suite\.path=text"):
        asked(SuiteConfig(["pocket_boolq"], path="text.txt"))


def test_a_protocol_changes_what_it_names_and_every_published_benchmark() -> None:
    published = ProtocolConfig("p", {"every": {"max_length": 99}, "mmlu": {"shots": 5}})
    own, easy, mmlu = asked(SuiteConfig(["pocket_arc_easy", "arc_easy", "mmlu"], limit=3), published)
    assert (own.max_length, own.root) == (None, None) and {easy.max_length, mmlu.max_length} == {99}
    assert (easy.shots, mmlu.shots) == (0, 5) and easy.root == "there"
    assert {own.limit, easy.limit, mmlu.limit} == {3}
    (added,) = asked(SuiteConfig(["wildbench"]), ProtocolConfig("p", {"wildbench": {"parameters": {"template": "t"}}}))
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
def test_a_wrong_protocol_is_one_sentence(differing: dict[str, dict[str, object]], says: str) -> None:
    with pytest.raises(SettingsError, match=f"protocol=p.*{re.escape(says)}") as error:
        asked(SuiteConfig(["mmlu"]), ProtocolConfig("p", differing))
    assert len(error.value.sentences) == 1
