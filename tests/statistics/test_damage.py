from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import naive
import pytest
import tiny
import torch
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.statistics.damage import DamageTap, Rerouting, coefficients
from moe_lab.statistics.observe import Observer, gather

UNGROUPED = [name for name in tiny.ARCHITECTURES if not name.endswith(":grouped")]
GROUPED = [name for name in tiny.ARCHITECTURES if name.endswith(":grouped")]


@pytest.mark.parametrize("name", UNGROUPED)
def test_damage_is_that_of_really_removing_the_expert(name: str) -> None:
    """Reference: in fp64, the block run again on the rows of a router that has lost the expert's row."""
    model, (ids, valid) = naive.model(name), naive.batch()
    measured = gather(model, DamageTap, [(ids, valid)], fingerprint={}).layers
    wide = copy.deepcopy(model).double()
    layers = moe_layers(wide)
    layer = layers[-1]
    seen = naive.routed(name)[layer.index]
    hidden = seen.block_input.double()
    everything = {each.index: tuple(range(each.n_experts)) for each in layers}
    with torch.no_grad():
        whole = block(layer, hidden)
        for expert in range(layer.n_experts):
            kept = tuple(other for other in range(layer.n_experts) if other != expert)
            plan = Plan({**everything, layer.index: kept}, {each.index: each.n_experts for each in layers}, {})
            with mask(wide, plan):
                lost = whole - block(layer, hidden)
            expected = lost[seen.experts[expert].token].norm(dim=-1).sum()
            assert naive.relative(measured[layer.index]["damage"][expert], expected) < 1e-5, expert


def block(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    result = layer.block(hidden)
    return (result[0] if isinstance(result, tuple) else result).flatten(0, -2)


@pytest.mark.parametrize("name", GROUPED)
def test_damage_of_group_limited_routers(name: str) -> None:
    """Reference: the routing rule by hand, token by token, with sets of experts."""
    model, (ids, valid) = naive.model(name), naive.batch()
    measured = gather(model, DamageTap, [(ids, valid)], fingerprint={}).layers
    layer = moe_layers(model)[-1]
    seen = naive.routed(name)[layer.index]
    experts = copy.deepcopy(layer.experts).double()
    router: Any = layer.router
    hidden = seen.block_input.double().flatten(0, -2)
    logits = hidden @ router.weight.double().T
    n, k = layer.n_experts, layer.top_k
    with torch.no_grad():
        outputs = torch.stack(
            [experts(hidden, torch.full((len(hidden), 1), e), torch.ones(len(hidden), 1).double()) for e in range(n)], 1
        )
    expected = torch.zeros(n, dtype=torch.float64)
    for t in seen.valid.nonzero().flatten().tolist():
        chosen, whole = by_hand(name, router, logits[t], set(), k)
        assert chosen == set(seen.index[t].tolist())
        for expert in chosen:
            _, without = by_hand(name, router, logits[t], {expert}, k)
            expected[expert] += ((whole - without) @ outputs[t]).norm()
    assert naive.relative(measured[layer.index]["damage"], expected) < 1e-5


def by_hand(name: str, router: Any, logits: torch.Tensor, removed: set[int], k: int) -> tuple[set[int], torch.Tensor]:
    """Experts of one token, and gates (E,), by the papers of DeepSeek-V2 and V3."""
    n = len(logits)
    size = n // router.num_group
    left = [expert for expert in range(n) if expert not in removed]
    sigmoid = name.startswith("deepseek_v3")
    if sigmoid:
        scores = logits.sigmoid()
        choice = scores + router.e_score_correction_bias.double()
        best = 2
    else:
        scores = torch.zeros_like(logits)
        scores[left] = logits[left].softmax(-1)
        choice, best = scores, 1
    groups = [[e for e in range(g * size, (g + 1) * size) if e in left] for g in range(router.num_group)]
    worth = [sum(sorted((float(choice[e]) for e in group), reverse=True)[:best]) for group in groups]
    reached = sorted(range(len(groups)), key=lambda g: -worth[g])[: router.topk_group]
    chosen = sorted((e for g in reached for e in groups[g]), key=lambda e: -float(choice[e]))[:k]
    gates = torch.zeros_like(logits)
    gates[chosen] = scores[chosen] / (scores[chosen].sum() if sigmoid else 1)
    return set(chosen), gates * router.routed_scaling_factor


@torch.no_grad()
def test_without_a_replacement_the_rest_carries_on() -> None:
    """All experts are chosen: removing one leaves the others renormalised, no division by zero."""
    config = SimpleNamespace(num_local_experts=4, num_experts_per_tok=4, hidden_size=4)
    router = MixtralTopKRouter(config)
    router.weight.data = torch.eye(4)
    z = torch.tensor([[2.0, 1.0, 0.5, -1.0]])
    layer: Any = SimpleNamespace(name="all", n_experts=4, router=router)
    gates = coefficients(Rerouting(layer, (z,), {}, router(z)), torch.tensor([0]), torch.tensor([[0, 1, 2, 3]]), 4)[0]
    for expert in range(4):
        rest = z[0].clone()
        rest[expert] = -torch.inf
        assert torch.allclose(gates[1 + expert], z[0].softmax(-1) - rest.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("name", ["olmoe", "ernie4_5_moe", "gpt_oss"])
def test_the_model_computes_what_it_always_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_lab.statistics.damage.TOKENS", 40)  # 96 tokens: three parts, the last one shorter
    model, (ids, _) = naive.model(name), naive.batch()
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with Observer(model, DamageTap) as observer:
            watched = model(input_ids=ids).logits
    parts = observer.layers()
    assert torch.allclose(plain, watched, atol=1e-4)
    monkeypatch.setattr("moe_lab.statistics.damage.TOKENS", 2048)
    with torch.no_grad(), Observer(model, DamageTap) as observer:
        model(input_ids=ids)
    for layer, named in observer.layers().items():
        assert torch.allclose(named["damage"], parts[layer]["damage"], rtol=1e-5)


def test_a_router_that_cannot_be_repeated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, valid) = tiny.build("olmoe"), naive.batch()
    for layer in moe_layers(model):
        layer.experts.register_forward_pre_hook(lambda module, given: (given[0], given[1], given[2] * 0.5))
    with pytest.raises(UserError, match=r"cannot repeat the router of model\.layers\.0\.mlp\.experts"):
        gather(model, DamageTap, [(ids, valid)], fingerprint={})
