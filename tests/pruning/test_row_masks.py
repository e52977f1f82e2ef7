"""Each row of a batch under a plan of its own gives what a mask of that plan gives, whatever the other rows are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import tiny
import torch

from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.row_masks import row_masks


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def plans(model: Any) -> list[Plan | None]:
    return [tiny.plan(model, 0.5), None, tiny.plan(model, 0.25)]


def alone(model: Any, plan: Plan | None, ids: torch.Tensor) -> torch.Tensor:
    with mask(model, plan) if plan else nullcontext():
        return logits(model, ids)


def rounding(model: Any, plan: Plan | None, ids: torch.Tensor, of_batch: torch.Tensor) -> float:
    """1e-6, or twice what computing each row alone changes, which is more for linear attention (3e-6)."""
    each = torch.cat([alone(model, plan, row) for row in ids.split(1)])
    return max(1e-6, 2 * float((each - of_batch).abs().max()))


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_rows_of_several_plans_are_those_of_each_plan_alone(name: str) -> None:
    model = tiny.build(name)
    ids, several, numbers = tiny.tokens(6), plans(model), [2, 0, 1, 0, 2, 1]
    by_plan = [alone(model, plan, ids) for plan in several]
    expected = torch.stack([by_plan[number][row] for row, number in enumerate(numbers)])
    before = logits(model, ids)
    with row_masks(model, several) as rows:
        rows.set(numbers)
        together = logits(model, ids)
        rows.set([0] * 6)
        only_first = logits(model, ids)
    limit = max(rounding(model, plan, ids, of_plan) for plan, of_plan in zip(several, by_plan, strict=True))
    assert (only_first - by_plan[0]).abs().max() <= limit
    assert (together - expected).abs().max() <= limit
    assert (before - expected).abs().max() > 1e-3
    assert torch.equal(logits(model, ids), before)


def channels(model: Any, seed: int) -> Plan:
    """Another number of channels for each expert; the first expert of each layer keeps none."""
    generator, masks, kept = numpy.random.default_rng(seed), {}, {}
    for layer in moe_layers(model):
        masks[layer.index] = generator.random((layer.n_experts, layer.width)) < 0.6
        masks[layer.index][0] = False
        kept[layer.index] = tuple(range(layer.n_experts))
    return Plan(kept, {layer.index: layer.n_experts for layer in moe_layers(model)}, {}, masks)


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3:grouped", "qwen2_moe", "minimax_m2"])
def test_rows_may_have_plans_of_channels_and_of_experts(name: str) -> None:
    model = tiny.build(name)
    ids, several, numbers = (
        tiny.tokens(4),
        [channels(model, 1), tiny.plan(model, 0.25), None, channels(model, 2)],
        [3, 1, 0, 2],
    )
    by_plan = [alone(model, plan, ids) for plan in several]
    with row_masks(model, several) as rows:
        rows.set(numbers)
        together = logits(model, ids)
    for row, number in enumerate(numbers):
        assert (together[row] - by_plan[number][row]).abs().max() < 1e-6


def test_batches_that_do_not_fit_the_rows_and_plans_of_another_model_are_noticed() -> None:
    model = tiny.build("olmoe")
    with row_masks(model, plans(model)) as rows:
        rows.set([0, 1, 2, 0, 1])
        with pytest.raises(RuntimeError, match="5 rows"):
            logits(model, tiny.tokens(3)[:, :4])
        rows.set([0, 1, 2])
        with pytest.raises(RuntimeError, match="3 rows"):  # as many tokens to each row as if there were 3
            logits(model, tiny.tokens(6))
    with pytest.raises(UserError, match="another model"), row_masks(model, [tiny.plan(tiny.build("mixtral"), 0.25)]):
        pass


@pytest.mark.parametrize("name", ["olmoe", "minimax_m2"])
def test_experts_called_past_the_router_are_noticed(name: str) -> None:
    model = tiny.build(name)
    layer = moe_layers(model)[1]
    hidden = torch.zeros(2, layer.hidden)
    with row_masks(model, plans(model)) as rows, torch.no_grad():
        rows.set([0, 1])
        logits(model, tiny.tokens(2))
        chosen = torch.zeros(2, layer.top_k, dtype=torch.int64)
        with pytest.raises(RuntimeError, match=r"not in force: model\.layers\.1\.mlp\.experts got a routing"):
            layer.experts(hidden, chosen, torch.ones(2, layer.top_k))


def test_channel_masks_that_are_bypassed_are_noticed() -> None:
    model = tiny.build("olmoe")
    with row_masks(model, [channels(model, 1), None]) as rows:
        rows.set([0, 1])
        model.set_experts_implementation("eager")
        with pytest.raises(RuntimeError, match="did not run the masked experts"):
            logits(model, tiny.tokens(2))


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3:grouped"])
def test_a_router_with_a_forward_of_its_own_gets_it_back(name: str) -> None:
    """As the forward of a model that is spread over devices."""
    model = tiny.build(name)
    router, calls = moe_layers(model)[0].router, []
    original = router.forward

    def own(*given: Any, **named: Any) -> Any:
        calls.append(len(given[0].reshape(-1, given[0].shape[-1])))
        return original(*given, **named)

    router.forward = own  # type: ignore[method-assign]
    several = plans(model)
    with row_masks(model, [*several, several[0]]) as rows:
        rows.set([0, 1, 3])
        logits(model, tiny.tokens(3, 4))
    assert router.forward is own
    assert sum(calls) == 12 and len(calls) <= 2  # plans 0 and 3 keep the same experts


def test_routers_that_are_not_in_memory_are_refused() -> None:
    for name in ("olmoe", "deepseek_v3"):
        model = tiny.build(name)
        several = plans(model)
        moe_layers(model)[1].router.to("meta")
        with pytest.raises(UserError, match="offloaded"), row_masks(model, several):
            pass
