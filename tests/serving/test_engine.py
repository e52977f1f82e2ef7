"""Plans as masks on an engine of vLLM: the same as the masked model, and as the plan's export served alone."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_vllm import FAMILIES, PROMPTS, PYTHON, Models, ask, expected, uneven

from moe_lab.models.discover import moe_layers
from moe_lab.pruning.export import export
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM: `make vllm` installs it")
PLANS = ("no plan", "uneven", "uniform", "no plan again")


def uniform(model: Any) -> Plan:
    """Every layer without its first experts, one of each group."""
    kept = {}
    for layer in moe_layers(model):
        size = layer.n_experts // layer.n_group
        kept[layer.index] = tuple(expert for expert in range(layer.n_experts) if expert % size)
    return Plan(kept, {layer.index: layer.n_experts for layer in moe_layers(model)})


def as_request(plan: Plan | None) -> list[Any]:
    return [] if plan is None else sorted(plan.experts.items())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Name -> the model, a plan whose layers differ, and its natural export."""
    made = {}
    for name, changes in FAMILIES.items():
        folder = tmp_path_factory.mktemp("model")
        model = tiny.save(name, folder / "model", **changes)
        plan = uneven(model)
        made[name] = (model, plan, export(folder / "model", plan, folder / "uneven"))
    return made


@pytest.fixture(scope="module")
def said(models: Models) -> dict[str, Any]:
    """What engines answer under each of PLANS, and what an engine for the export of the uneven plan does."""
    runs = {}
    for name, (model, plan, folder) in models.items():
        runs[name] = under_plans(model, plan, folder)
        runs[f"{name}, export"] = {"folder": str(folder), "plans": [[]]}
    return answers(runs)


@pytest.fixture(scope="module")
def said_otherwise(models: Models) -> dict[str, Any]:
    """What a compiled engine answers, one whose masks do nothing, and one with the plan of another model."""
    model, plan, folder = models["olmoe"]
    usual = under_plans(model, plan, folder)
    wrong = Plan({**plan.experts, 7: (0, 1)}, {**plan.n_experts, 7: 4})
    return answers(
        {
            "no effect": {**usual, "unmasked": True},  # the first, before routers of the process are patched
            "another model": {**usual, "plans": [as_request(wrong)]},
            "compiled": {**usual, "arguments": {"enforce_eager": False}},
        }
    )


def under_plans(model: Any, plan: Plan, exported: Path) -> dict[str, Any]:
    plans = [as_request(each) for each in (None, plan, uniform(model), None)]
    return {"folder": str(exported.parent / "model"), "plans": plans}


def answers(runs: dict[str, Any]) -> dict[str, Any]:
    replies = ask("masked_engine.py", {"prompts": PROMPTS, "runs": list(runs.values())})
    return dict(zip(runs, replies, strict=True))


def flat(losses: list[list[float]]) -> torch.Tensor:
    return torch.tensor([loss for row in losses for loss in row])


def check_masked(replies: Any, model: Any, plan: Plan) -> None:
    """The replies under each of PLANS are those of the masked model."""
    assert not isinstance(replies, str), replies
    for each, reply in zip((None, plan, uniform(model), None), replies, strict=True):
        with mask(model, each) if each else nullcontext():
            right = expected(model)
        assert (torch.tensor(reply["losses"]) - flat(right)).abs().max() < 1e-4
        assert (torch.tensor(reply["sums"]) - torch.tensor(right).sum(1)).abs().max() < 1e-3
    first, of_uneven, of_uniform, again = (torch.tensor(reply["losses"]) for reply in replies)
    assert min((first - of_uneven).abs().max(), (of_uneven - of_uniform).abs().max()) > 1e-3
    assert (first - again).abs().max() < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_masks_on_one_engine_are_the_masked_model(name: str, models: Models, said: dict[str, Any]) -> None:
    model, plan, _ = models[name]
    check_masked(said[name], model, plan)


def test_masks_are_in_a_compiled_engine(models: Models, said_otherwise: dict[str, Any]) -> None:
    model, plan, _ = models["olmoe"]
    check_masked(said_otherwise["compiled"], model, plan)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mask_is_the_export_of_its_plan(name: str, said: dict[str, Any]) -> None:
    (served,) = said[f"{name}, export"]
    masked = said[name][PLANS.index("uneven")]
    assert masked["tokens"] == served["tokens"]
    assert (torch.tensor(masked["losses"]) - torch.tensor(served["losses"])).abs().max() < 1e-4
    assert masked["likeliest"] == served["likeliest"]


def test_masks_that_have_no_effect_are_refused(said_otherwise: dict[str, Any]) -> None:
    refused = said_otherwise["no effect"]
    assert isinstance(refused, str) and "no effect" in refused


def test_the_plan_of_another_model_is_refused(said_otherwise: dict[str, Any]) -> None:
    refused = said_otherwise["another model"]
    assert isinstance(refused, str) and "layer 7" in refused
