"""The shipped models: stock, small, with instruments that work, and knowing their world."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from safetensors import safe_open

from benchmarks.instrument import ABLATION, SKILLS, items_of, pruned_loss, random_scores, rankings
from moe_lab.config import ModelConfig
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.models.load import load_model
from tools.pocket import train as training
from tools.pocket.card import write_card
from tools.pocket.network import load_network
from tools.pocket.recipes import BIAS_STEP, RECIPES, Batches

pytestmark = pytest.mark.slow


SHIPPED = {
    "olmoe": "e5fb75f12bae38030b9616457c62966d785da4ae3139d73ca83c37948fa26a99",
    "qwen3_moe": "ec6ef29644ec583471b7f8a6354ec0d746f6a14891607ad945a896c554008379",
    "ernie4_5_moe": "a707a5059ef8c6eab379d9858c58f35bebe172ae9fbe75a78c7d59cfd2151ab2",
    "deepseek_v2": "9c0fe58c4c56c534900dab253c475057490b8bdbaeb1e7a5ca991001c34a9c0e",
    "function_calls": "48c13b070f19fa6b11081d4cfc4063f6a0bf92f8742fe455ee541b2c0990bf44",
}
"""sha256 of the weights of each model."""
CALLING = "function_calls"
"""The model that knows nothing but function calls, with a tokenizer of its own: test_pocket_items.py."""


@pytest.mark.parametrize("name", SHIPPED)
def test_it_is_a_stock_model_of_the_recorded_bytes_and_shape(name: str, data: Path) -> None:
    assert sorted(file.parent.name for file in data.glob("*/model.safetensors")) == sorted(SHIPPED)
    folder = data / name
    template = set() if RECIPES[name].chat_template is None else {".jinja"}
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors", ".md", *template}
    weights = folder / "model.safetensors"
    assert weights.stat().st_size <= 8_000_000
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == SHIPPED[name]
    with safe_open(weights, "pt") as stored:
        assert {str(stored.get_slice(tensor).get_dtype()) for tensor in stored.keys()} == {"BF16"}  # noqa: SIM118
    model, _ = load_model(ModelConfig(name=name, path=f"pocket:{name}", device="cpu"))
    assert type(model).__module__.startswith("transformers.models.")
    assert model.config.max_position_embeddings == 512
    if name != CALLING:
        assert (folder / "tokenizer.json").read_bytes() == (data / "olmoe" / "tokenizer.json").read_bytes()
    assert {field: getattr(model.config, field) for field in RECIPES[name].fields} == RECIPES[name].fields


@pytest.mark.parametrize("name", ["olmoe", "ernie4_5_moe"])
def test_training_is_repeatable_and_can_go_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = tuple(replace(stage, steps=1, warmup=1) for stage in RECIPES[name].stages[:2])
    recipe = replace(RECIPES[name], batches=Batches(short=(2, 128), long=(1, 512)))
    monkeypatch.setattr(training, "TOKENIZER_DOCUMENTS", 1000)
    for folder, count, first in (("at once", 2, 0), ("in two", 1, 0), ("in two", 2, 1)):
        monkeypatch.setitem(RECIPES, name, replace(recipe, stages=stages[:count]))
        training.train(name, tmp_path / folder, first_stage=first)
    one, other = ((tmp_path / part / "model.safetensors").read_bytes() for part in ("at once", "in two"))
    assert one == other
    biases = [value for key, value in load_network(tmp_path / "in two").named_parameters() if "correction" in key]
    assert all(bias.abs().max() > BIAS_STEP for bias in biases)
    assert bool(biases) == (name == "ernie4_5_moe")
    run = json.loads((tmp_path / "at once" / "training.json").read_text())
    assert [(stage["steps"], stage["tokens"]) for stage in run["stages"]] == [(1, 2 * 128)] * 2
    write_card(tmp_path / "at once", name, {"ARC-C": 0.5, "HumanEval": 0.25})
    card = (tmp_path / "at once" / "README.md").read_text()
    assert RECIPES[name].title in card and f"{run['parameters']:,}" in card
    assert "| ARC-C | 0.500 | 0.25 |" in card


@pytest.mark.parametrize("skill", SKILLS)
def test_criteria_calibrated_on_a_skill_keep_it_better_than_chance(skill: str) -> None:
    """`python -m benchmarks.instrument` asks it of all models, skills, items and tokens."""
    subject = LoadedModel(*load_model(ModelConfig(name="small", path="pocket:qwen3_moe", threads=1)))
    items, ratio = [item for benchmark in SKILLS[skill] for item in items_of(benchmark)[:10]], 0.25
    chance = mean(pruned_loss(subject, random_scores(subject.model, seed), items, ratio) for seed in range(4))
    found = {name: pruned_loss(subject, scores, items, ratio) for name, scores in rankings(subject, skill, 4096, 1024)}
    assert {ABLATION, "man", "reap", "frequency", "exact_damage"} <= set(found)
    assert {name: loss for name, loss in found.items() if loss >= chance} == {}
