"""No benchmark item is in the training text or in a calibration set, and the training text is the recorded one."""

from __future__ import annotations

import hashlib
import json
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import pytest

from tools.pocket.benchmarks import PROGRAMS
from tools.pocket.build import CALIBRATION, calibration_examples
from tools.pocket.corpus import documents
from tools.pocket.examples import END_OF_TEXT, Example, held_out
from tools.pocket.functions import Program, side
from tools.pocket.recipes import RECIPES
from tools.pocket.world import World

FIRST = 5_000
"""Documents that are made again of each stream. All of a stream were looked through when the models were trained."""
RECORDED = {
    "deepseek_v2 0": "2eb7aaa09bb8fc259d847e2bbdc52e77fa2132f2e0f3889db745efef7dde7c29",
    "deepseek_v2 1": "217bea2f2f0b952a06edc228d858e56649f6fae4b4c62e22ed51e579430ad8f1",
    "deepseek_v2 2": "035ce5c29dd6d4c985f95c8d6f3deb4db1a955d2ae4ec0576e6d86b36890e1c6",
    "deepseek_v2 3": "8ce47a88351d4455d5183b5f1079ec7b51791d06f4249fa61bf806aa409ebd10",
    "function_calls 0": "ae60ee19526a6c440f536e3ed98af5e51b1af905e272db48fc4a919fedd7fd07",
    "function_calls 1": "51232bc97905f59fd48845a0225389c622ed5b8ca3c243b230e720f8c47fa67b",
    "function_calls 2": "c32f23a0a85164a6a8c4d0093c6a01558959ead8e76eaeeb8160144e9201eb98",
    "olmoe 0": "923e7cdeffbf21d55aebcd23c952eab4317b0b855e6548e2d60947b43af18797",
    "olmoe 1": "8a5bbfd07f1e170e82d443b043575cde323618936d85b9197a1388f421b4362a",
    "olmoe 2": "f76568064875c0bccd538252cc19b34d1456cf23d716072d38fe15aed9ee3d21",
    "olmoe 3": "a02648314f7b04e90702ea5b056ec7057233f1ddfab8cdfbdb7751dd0ae68072",
    "olmoe 4": "484935e6a4d47329e995d4790a65d06eadfd5b21694c756cbcad372d7640ac2d",
    "qwen3_moe 2": "e7e49b1084b6723acdca6229b15f1cb69b3c7121fc96d07b51e993d62a2d9e03",
}
"""Model and stage that a stream was made for -> sha256 of its first documents. One that has changed is another stream:
look through all of it, by FIRST = 200_000, before its new hash is written here."""


@pytest.fixture(scope="module")
def training(world: World, data: Path) -> list[Example]:
    """The first documents of every stream that a shipped model was trained on, stream after stream."""
    streams: dict[tuple[Any, ...], str] = {}
    for record in sorted(data.glob("*/training.json")):
        run, name = json.loads(record.read_text()), record.parent.name
        for number, (stage, facts) in enumerate(zip(RECIPES[name].stages, run["stages"], strict=True)):
            assert facts["steps"] == stage.steps
            streams.setdefault((run["seed"] + number, tuple(stage.mixture.items())), f"{name} {number}")
    assert sorted(streams.values()) == sorted(RECORDED)
    texts = []
    for (seed, mixture), name in streams.items():
        seen = list(islice(documents(world, seed, dict(mixture)), FIRST))
        digest = hashlib.sha256()
        for example in seen:
            digest.update(repr((example.skill, example.key, example.text)).encode())
        assert digest.hexdigest() == RECORDED[name], name
        texts += seen
    return texts


def test_the_training_text_holds_no_item(training: list[Example], items: dict[str, list[Example]]) -> None:
    texts = {example.text for examples in items.values() for example in examples}
    keys = {(example.skill, example.key) for examples in items.values() for example in examples}
    assert not [document.text for document in training if document.text in texts]
    assert not [document.text for document in training if (document.skill, document.key) in keys]


def test_no_item_is_part_of_a_longer_text(
    training: list[Example], items: dict[str, list[Example]], world: World
) -> None:
    joined = END_OF_TEXT.join(document.text for document in training[:20_000])
    calibration = "".join(
        example.text + END_OF_TEXT for name in CALIBRATION for example in calibration_examples(world, name)
    )
    everything = joined + calibration
    assert len(everything) > 2_000_000
    found = [example.text for examples in items.values() for example in examples if example.text in everything]
    assert found == []
    assert training[0].text in everything


def test_items_are_on_the_held_out_side_by_rule(items: dict[str, list[Example]]) -> None:
    for skill, examples in items.items():
        for example in examples:
            if skill in PROGRAMS:
                assert side(example.details["program"]) == skill
            else:
                assert held_out(example.skill, example.key)


def _pairs(program: Program) -> set[tuple[str, ...]]:
    names = [applied.name for applied in program.operations]
    return {(program.domain, *sorted(pair)) for pair in combinations(names, 2)}


def test_livecodebench_composes_what_training_never_composes(
    training: list[Example], items: dict[str, list[Example]]
) -> None:
    """Each problem has a pair of operations that no function of the training text has, but knows each of the two."""
    programs = [document.details["program"] for document in training if "program" in document.details]
    pairs = set().union(*map(_pairs, programs))
    operations = {(program.domain, applied.name) for program in programs for applied in program.operations}
    for example in items["livecodebench"]:
        program = example.details["program"]
        assert _pairs(program) - pairs
        assert {(program.domain, applied.name) for applied in program.operations} <= operations


def test_humaneval_and_mbpp_ask_for_compositions_training_does_not_hold(
    training: list[Example], items: dict[str, list[Example]]
) -> None:
    known = {document.details["program"].composition for document in training if "program" in document.details}
    asked = [example.key for skill in ("humaneval", "mbpp") for example in items[skill]]
    assert len(asked) == 120
    assert not known.intersection(asked)


def test_training_makes_no_call_that_an_item_asks_for(training: list[Example], items: dict[str, list[Example]]) -> None:
    """Not even as the second of two calls; but it has seen every value of every argument."""

    def calls(examples: list[Example]) -> set[tuple[Any, ...]]:
        return {call.key for example in examples for call in example.details.get("calls", ())}

    known, asked = calls(training), calls(items["function_calls"])
    assert not known & asked

    def values(keys: set[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
        return {(key[0], place, value) for key in keys for place, value in enumerate(key)}

    assert asked and values(asked) <= values(known)
