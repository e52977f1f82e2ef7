"""The search step: finds what enumeration finds, survives being killed, refuses what cannot work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import tiny
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from moe_lab.calibration.batches import answer_batches
from moe_lab.config import CalibrationConfig
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.plan import Plan
from moe_lab.search.candidates import Candidates, Plans
from moe_lab.search.evolution import FitnessSettings, problem_of
from moe_lab.search.run import search
from moe_lab.search.schedules import space_of

SMALL = {"population": 14, "elites": 3, "generations": 6}


class World:
    """A tiny model with its facts, scores, tokenizer and a search set of twelve tasks."""

    def __init__(self, name: str, folder: Path) -> None:
        self.model = tiny.build(name)
        self.folder = folder
        layers = moe_layers(self.model)
        generator = torch.Generator().manual_seed(1)
        self.scores = {layer.index: torch.rand(layer.n_experts, generator=generator).tolist() for layer in layers}
        names = ("n_experts", "top_k", "n_group", "topk_group")
        about = {str(layer.index): {name: getattr(layer, name) for name in names} for layer in layers}
        self.facts = {"layers": about}  # as facts.json has it
        words = {"<pad>": 0, **{f"w{number}": number for number in range(1, tiny.VOCABULARY)}}
        tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", model_max_length=128)
        tasks = torch.randint(3, tiny.VOCABULARY, (12, 10), generator=generator).tolist()
        halves = [[" ".join(f"w{n}" for n in half) for half in (row[:5], row[5:])] for row in tasks]
        lines = [json.dumps({"instruction": task, "output": answer}) for task, answer in halves]
        (folder / "tasks.jsonl").write_text("\n".join(lines))
        rows = {"packing": "none", "length": 10, "tokens": 120, "batch_size": 4, "order": "first"}
        self.text = CalibrationConfig("tasks", str(folder / "tasks.jsonl"), **rows)

    def settings(self, **parameters: Any) -> dict[str, Any]:
        return {"name": "evolutionary", "ratio": 0.5, "multiple_of": 1, "parameters": {**SMALL, **parameters}}

    def run(self, out: str, text: CalibrationConfig | None = None, **parameters: Any) -> Path:
        folder = self.folder / out
        folder.mkdir(exist_ok=True)
        about = {"facts": self.facts, "scores": self.scores, "settings": self.settings(**parameters)}
        places = {"out": folder, "partial": self.folder / f"{out}.partial", "fingerprint": {"model": "tiny"}}
        search(self.model, self.tokenizer, text=text or self.text, seed=5, **about, **places)
        return folder


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World("olmoe", tmp_path)


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3:grouped"])
def test_the_optimum_of_enumeration_is_found(name: str, tmp_path: Path) -> None:
    world = World(name, tmp_path)
    folder = world.run("found", generations=20)
    space = space_of(problem_of(world.settings(), world.facts), 2)
    schedules = [space.nth(number) for number in range(space.size)]
    plans = Plans(world.model, world.scores)
    tasks = answer_batches(world.text, world.tokenizer)
    values = Candidates(world.model, plans, tasks, FitnessSettings(), seed=5).evaluate(schedules)
    report = json.loads((folder / "search.json").read_text())
    assert report["best"]["fitness"] == pytest.approx(max(values), abs=1e-9)
    assert tuple(report["best"]["schedule"]) == schedules[values.index(max(values))]
    assert Plan.load(folder / "plan.json") == plans.plan(tuple(report["best"]["schedule"]))
    assert report["best"]["fitness"] >= report["uniform"]["fitness"]
    rows = parquet.read_table(folder / "history.parquet").to_pylist()
    assert len(rows) == report["counts"]["made"] and all(sum(row["schedule"]) == report["budget"] for row in rows)
    assert sum(row["evaluated"] for row in rows) == report["counts"]["evaluated"] == report["cost"]["candidates"]
    assert report["cost"]["per_candidate"] > 0


def test_a_killed_search_ends_as_if_it_had_not_been(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = world.run("whole")
    with monkeypatch.context() as patch, pytest.raises(tiny.Killed):
        tiny.count_calls(patch, Candidates, "evaluate", kill_at=4)
        world.run("killed")
    assert not (world.folder / "killed" / "plan.json").exists()
    resumed = world.run("killed")
    for file in ("plan.json", "history.parquet"):
        assert (resumed / file).read_bytes() == (whole / file).read_bytes()
    costs = [json.loads((folder / "search.json").read_text())["cost"]["candidates"] for folder in (whole, resumed)]
    assert costs[1] < costs[0]


def test_what_was_answered_counts_for_the_same_search_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers depend on all settings but the memory, and on the text."""
    world.run("found")
    calls = tiny.count_calls(monkeypatch, Candidates, "evaluate")
    world.run("found", memory_budget=0)
    assert not calls
    for change in ({"fitness": "kl"}, {"elites": 2}, {"text": replace(world.text, tokens=80)}):
        before = len(calls)
        world.run("found", **change)
        assert len(calls) > before
