"""No benchmark item is in the training text or in a calibration set, and the training text is the recorded one."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tools.pocket.corpus import documents
from tools.pocket.examples import Example
from tools.pocket.recipes import RECIPES
from tools.pocket.world import World

pytestmark = pytest.mark.slow

FIRST = 1_000
"""Documents that are made again of each stream. All of a stream were looked through when the models were trained."""
RECORDED = {
    "deepseek_v2 0": "c64369ae099aa2612814e152dbb833b7c130cf40dc63d6b35aef6a2d842321de",
    "deepseek_v2 1": "f32678579632ed77561535e94d1c0b5011a2ea97334b23f2f14794ff346ec409",
    "deepseek_v2 2": "6c3b88fd1495fd301391cc8e18e01cdb43c5d4d5dfd6d4c32fc442e29ee21283",
    "deepseek_v2 3": "cd38701731667f5d2337b89d47c447deeaee1c7ed2d6edfd7d6af922471a48a4",
    "function_calls 0": "3557c675fd24e55b2a1b12966f82e42ff9068b7b105a48ad9c0fab6fe372b528",
    "function_calls 1": "0c90696c363069213042375e3b4cc755eea9b23153529ef59aa19c76c156beeb",
    "function_calls 2": "2ee087ba6f4d93b16acd2b52dabc730ea925c5a0cd366cb813427fcaaf80f249",
    "olmoe 0": "b347af8a2380023d1174a4afd434c0532913935e3410b2e00a7f7f29314b7d35",
    "olmoe 1": "39788e82d991847a3856d3d2996c7d37b5b462f51a898dce57b75297fd7f554e",
    "olmoe 2": "f3c7881318644cdf42b0e0866a957b6987e479cb929415abdf9a892827b601c5",
    "olmoe 3": "f363e4cd018035448a850e04dae434ec63a40c57a98abecaed147edb068f56b4",
    "olmoe 4": "2feeb86c277edfcd1a94d1c5f7ce860b79b4e9f33fb81e7095bca5b72f24b629",
    "qwen3_moe 2": "dff56e07867fddc6989e8f8b7a9671681b06a67949bf97bda99ff5a4fbbfd5e4",
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


def test_training_makes_no_call_that_an_item_asks_for(training: list[Example], items: dict[str, list[Example]]) -> None:
    """Not even as the second of two calls; but it has seen every value of every argument."""

    def calls(examples: list[Example]) -> set[tuple[Any, ...]]:
        return {call.key for example in examples for call in example.details.get("calls", ())}

    known, asked = calls(training), calls(items["function_calls"])
    assert not known & asked

    def values(keys: set[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
        return {(key[0], place, value) for key in keys for place, value in enumerate(key)}

    assert asked and values(asked) <= values(known)
