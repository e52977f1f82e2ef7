"""The steps that run the model to make a plan: an evolutionary search, and pruning layer after layer."""

from __future__ import annotations

import copy
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

from moe_lab import criteria
from moe_lab.calibration.batches import answer_batches
from moe_lab.config import CalibrationConfig
from moe_lab.models.discover import moe_layers
from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.pruning.replace import plan_from_scores
from moe_lab.search import sequential
from moe_lab.search.candidates import Candidates, Plans
from moe_lab.search.evolution import SearchSettings, problem_of
from moe_lab.search.run import search
from moe_lab.search.schedules import space_of
from moe_lab.search.sequential import Sums, prune_sequentially
from moe_lab.statistics.forward import ForwardTap
from moe_lab.statistics.observe import Batch, gather

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


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3:grouped"])
def test_the_optimum_of_enumeration_is_found(name: str, tmp_path: Path) -> None:
    world = World(name, tmp_path)
    folder = world.run("found", generations=20)
    space = space_of(problem_of(world.settings(), world.facts), 2)
    schedules = [space.nth(number) for number in range(space.size)]
    plans = Plans(world.model, world.scores)
    tasks = answer_batches(world.text, world.tokenizer)
    values = Candidates(world.model, plans, tasks, SearchSettings(), seed=5).evaluate(schedules)
    report = json.loads((folder / "search.json").read_text())
    assert report["best"]["fitness"] == pytest.approx(max(values), abs=1e-9)
    assert tuple(report["best"]["schedule"]) == schedules[values.index(max(values))]
    assert Plan.load(folder / "plan.json") == plans.plan(tuple(report["best"]["schedule"]))
    assert report["best"]["fitness"] >= report["uniform"]["fitness"]
    rows = parquet.read_table(folder / "history.parquet").to_pylist()
    assert len(rows) == report["counts"]["made"] and all(sum(row["schedule"]) == report["budget"] for row in rows)
    assert sum(row["evaluated"] for row in rows) == report["counts"]["evaluated"] == report["cost"]["candidates"]
    assert report["cost"]["per_candidate"] > 0


def test_a_killed_search_ends_as_if_it_had_not_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("olmoe", tmp_path)
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


def test_what_was_answered_counts_for_the_same_search_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers depend on all settings but the memory, and on the text."""
    world = World("olmoe", tmp_path)
    world.run("found")
    calls = tiny.count_calls(monkeypatch, Candidates, "evaluate")
    world.run("found", memory_budget=0)
    assert not calls
    for change in ({"fitness": "kl"}, {"elites": 2}, {"text": replace(world.text, tokens=80)}):
        before = len(calls)
        world.run("found", **change)
        assert len(calls) > before


# ---- layer after layer

NAMES = ["olmoe", "deepseek_v2", "qwen3_next", "ernie4_5_moe"]


def chooser(model: Any, name: str) -> Any:
    """(layer, its sums) -> the plan of that layer by a criterion; squared norms of the down columns are the model's."""
    granularity = criteria.get(name).granularity
    allocation = "uniform" if granularity == "expert" else "layerwise"
    settings = {"name": allocation, "ratio": 0.25, "multiple_of": 1, "parameters": {}, "ratio_basis": "routed"}
    layers = {layer.index: layer for layer in moe_layers(model)}

    def choose(index: int, sums: Sums) -> Plan:
        layer = layers[index]
        sums = {**sums, "channel_down_square": layer.experts.down_proj.double().square().sum(1).numpy()}
        shapes = {"experts": {index: layer.n_experts}, "widths": {index: layer.width}}
        scores = criteria.score(name, {index: sums}, **shapes)
        return plan_from_scores(
            settings, scores, granularity, {"layers": {index: {**vars(layer), "width": layer.width}}}, provenance={}
        )

    return choose


def pruned(model: Any, plans: dict[int, Plan]) -> Any:
    """A copy of the model in which some layers have lost what their plans drop; columns of dropped channels are 0."""
    changed = copy.deepcopy(model)
    layers = {layer.index: layer for layer in moe_layers(changed)}
    for index, plan in plans.items():
        for expert, kept in enumerate(plan.channels.get(index, ())):
            layers[index].experts.down_proj.data[expert][:, ~torch.from_numpy(kept)] = 0
    kept = {i: plans[i].experts[i] if i in plans else tuple(range(layer.n_experts)) for i, layer in layers.items()}
    return prune(changed, Plan(kept, {i: layer.n_experts for i, layer in layers.items()}))


def one_after_the_other(model: Any, choose: Any, batches: list[Batch]) -> dict[int, Plan]:
    """The definition: statistics of a model whose layers below are pruned, read anew for each layer."""
    plans: dict[int, Plan] = {}
    for layer in moe_layers(model):
        statistics = gather(pruned(model, plans), ForwardTap, batches, fingerprint={})
        plans[layer.index] = choose(layer.index, statistics.layers[layer.index])
    return plans


def run_sequentially(name: str, choose: Any, folder: Path) -> Plan:
    tiny.save(name, folder / "model")
    streamed = StreamedModel(folder / "model", dtype=torch.float32, device="cpu")
    return prune_sequentially(
        streamed, tiny.batches(), choose, fingerprint={}, out=folder, budget=0.0, provenance={"of": "a test"}
    )


@pytest.mark.parametrize("criterion", ["camera", "reap"])
@pytest.mark.parametrize("name", NAMES)
def test_each_layer_is_scored_on_what_the_pruned_ones_below_it_give(name: str, criterion: str, tmp_path: Path) -> None:
    model = tiny.build(name)
    choose = chooser(model, criterion)
    expected = one_after_the_other(model, choose, tiny.batches())
    found = run_sequentially(name, choose, tmp_path)
    assert found.provenance == {"of": "a test"}
    for layer, plan in expected.items():
        assert found.experts[layer] == plan.experts[layer]
        assert not plan.channels or (found.channels[layer] == plan.channels[layer]).all()


def test_an_interrupted_one_goes_on_from_its_last_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = chooser(tiny.build("olmoe"), "camera")
    expected = run_sequentially("olmoe", choose, tmp_path / "undisturbed")

    def killed(layer: int, sums: Sums) -> Plan:
        if layer == 1:
            raise KeyboardInterrupt
        return choose(layer, sums)

    with pytest.raises(KeyboardInterrupt):
        run_sequentially("olmoe", killed, tmp_path / "killed")
    read: list[int] = []
    original = sequential.ForwardTap.experts

    def experts(self: Any, *given: Any) -> Any:
        read.append(self.layer.index)
        return original(self, *given)

    monkeypatch.setattr(sequential.ForwardTap, "experts", experts)
    found = run_sequentially("olmoe", choose, tmp_path / "killed")
    assert found == expected and 0 not in read and set(read) == {1, 2}
