"""Pruning layer after layer gives the plan of pruning the layers below and scoring the next one, in a whole model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from moe_lab import criteria
from moe_lab.models.discover import moe_layers
from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.pruning.replace import plan_from_scores
from moe_lab.search import sequential
from moe_lab.search.sequential import Sums, prune_sequentially
from moe_lab.statistics.forward import ForwardTap
from moe_lab.statistics.observe import Batch, gather

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


def run(name: str, choose: Any, folder: Path) -> Plan:
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
    found = run(name, choose, tmp_path)
    assert found.provenance == {"of": "a test"}
    for layer, plan in expected.items():
        assert found.experts[layer] == plan.experts[layer]
        assert not plan.channels or (found.channels[layer] == plan.channels[layer]).all()


def test_an_interrupted_one_goes_on_from_its_last_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = chooser(tiny.build("olmoe"), "camera")
    expected = run("olmoe", choose, tmp_path / "undisturbed")

    def killed(layer: int, sums: Sums) -> Plan:
        if layer == 1:
            raise KeyboardInterrupt
        return choose(layer, sums)

    with pytest.raises(KeyboardInterrupt):
        run("olmoe", killed, tmp_path / "killed")
    read: list[int] = []
    original = sequential.ForwardTap.experts

    def experts(self: Any, *given: Any) -> Any:
        read.append(self.layer.index)
        return original(self, *given)

    monkeypatch.setattr(sequential.ForwardTap, "experts", experts)
    found = run("olmoe", choose, tmp_path / "killed")
    assert found == expected and 0 not in read and set(read) == {1, 2}
