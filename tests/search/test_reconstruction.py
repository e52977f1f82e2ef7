from __future__ import annotations

import copy
import math
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import naive
import pytest
import tiny
import torch

from moe_lab.allocation.shapes import check_removals, count_subsets, kept_subsets
from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.search import reconstruction
from moe_lab.search.reconstruction import Reconstruction, SubsetTap, reconstruct
from moe_lab.statistics.observe import Batch, Observer, gather
from moe_lab.statistics.streaming import stream

FEW: dict[str, tuple[float, dict[str, int]]] = {
    "olmoe": (0.5, {"num_experts": 6, "num_experts_per_tok": 2}),
    "mixtral": (0.5, {}),
    "minimax": (0.75, {}),
    "minimax_m2": (0.375, {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "phimoe": (0.25, {"num_local_experts": 8}),
    "gpt_oss": (0.25, {"num_local_experts": 8}),
    "ernie4_5_moe": (0.5, {"moe_num_experts": 7, "moe_k": 3}),
    "qwen2_moe": (0.5, {"num_experts": 6, "num_experts_per_tok": 3}),
    "lfm2_moe": (0.5, {"num_experts": 6, "num_experts_per_tok": 3}),
    "deepseek_v3:grouped": (0.25, {}),
    "deepseek_v2:grouped": (0.25, {}),
}
"""Name -> ratio and fields that make the number of choices small."""


def facts(model: Any) -> dict[str, Any]:
    """The entries of facts.json that matter here, with the text keys of JSON."""
    names = ("n_experts", "top_k", "n_group", "topk_group")
    return {"layers": {str(layer.index): {name: getattr(layer, name) for name in names} for layer in moe_layers(model)}}


def inputs(model: Any, layer: MoELayer, ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """(B, S, H): what enters the MoE block of the unpruned model."""
    seen: list[torch.Tensor] = []
    hook = layer.block.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.no_grad():
        model(input_ids=ids, attention_mask=valid.long(), use_cache=False)
    hook.remove()
    return seen[0].double()


@torch.no_grad()
def brute_force(model: Any, layer: MoELayer, removed: int) -> dict[tuple[int, ...], float]:
    """Kept ids -> || F - F_S ||_F in fp64, for every subset that the mask accepts: the masked block is really run."""
    ids, valid = naive.batch()
    hidden = inputs(model, layer, ids, valid)
    wide = copy.deepcopy(model).double()
    layers = moe_layers(wide)
    block = next(each for each in layers if each.index == layer.index).block

    def run() -> torch.Tensor:
        result = block(hidden)
        return (result[0] if isinstance(result, tuple) else result).flatten(0, -2)[valid.flatten()]

    whole, errors = run(), {}
    everything = {each.index: tuple(range(each.n_experts)) for each in layers}
    for kept in combinations(range(layer.n_experts), layer.n_experts - removed):
        plan = Plan({**everything, layer.index: kept}, {each.index: each.n_experts for each in layers})
        if layer.n_group > 1 and len({sum(e // (16 // layer.n_group) == g for e in kept) for g in range(4)}) > 1:
            continue
        with mask(wide, plan):
            errors[kept] = float((whole - run()).norm())
    return errors


def reconstructed(model: Any, batches: list[Batch], ratio: float, **settings: Any) -> Reconstruction:
    read = partial(gather, model, batches=batches, **{"fingerprint": {}, **settings})
    return reconstruct(lambda tap: read(tap=tap), facts=facts(model), ratio=ratio)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3:grouped"])
def test_one_layer_in_memory_is_enough(name: str, tmp_path: Path) -> None:
    ratio, changes = FEW[name]
    model = tiny.build(name, **changes)
    expected = reconstructed(model, [naive.batch()], ratio=ratio)
    tiny.save(name, tmp_path / "model", **changes)
    streamed = StreamedModel(tmp_path / "model", dtype=torch.float32, device="cpu")
    read = partial(stream, streamed, batches=[naive.batch()], out=tmp_path / "out", fingerprint={}, budget=0.0)
    found = reconstruct(lambda tap: read(tap=tap), facts=facts(model), ratio=ratio)
    assert found == expected


@pytest.mark.parametrize("name", FEW)
def test_every_choice_has_the_error_of_really_making_it(name: str) -> None:
    ratio, changes = FEW[name]
    model = tiny.build(name, **changes)
    found = reconstructed(model, [naive.batch()], ratio=ratio)
    layer = moe_layers(model)[-1]
    expected = brute_force(model, layer, int(layer.n_experts * ratio))
    rows = {tuple(kept): (error, chosen) for index, kept, error, _, chosen in found.errors if index == layer.index}
    assert set(rows) == set(expected)
    for kept, error in expected.items():
        assert rows[kept][0] == pytest.approx(error, rel=2e-5, abs=1e-6), kept
    best = found.kept[layer.index]
    assert expected[best] <= min(expected.values()) * (1 + 2e-5) + 1e-6 < max(expected.values()) / 1.2
    assert [kept for kept, (_, chosen) in rows.items() if chosen] == [best]
    assert set(found.kept) == {each.index for each in moe_layers(model)}


def test_parts_and_batches_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("mixtral")
    ids, valid = naive.batch()
    whole = reconstructed(model, [(ids, valid)], ratio=0.5)
    monkeypatch.setattr(reconstruction, "BUDGET", 8 * 8 * 32 * 7)  # 7 tokens of outputs, 28 of products at once
    parts = reconstructed(model, [(ids[:2], valid[:2]), (ids[2:], valid[2:])], ratio=0.5)
    assert parts.kept == whole.kept
    for one, other in zip(parts.errors, whole.errors, strict=True):
        assert one[1] == other[1] and one[2] == pytest.approx(other[2], rel=1e-5)


def test_nothing_lost_costs_nothing_and_errors_are_also_shares_of_the_output() -> None:
    model = tiny.build("mixtral")
    found = reconstructed(model, [naive.batch()], ratio=0.0)
    assert all(kept == tuple(range(8)) for kept in found.kept.values())
    assert [row[2] for row in found.errors] == [0.0] * 3
    layer = moe_layers(model)[-1]
    seen = naive.routed("mixtral")[layer.index]
    whole = float(seen.mixed[seen.valid].norm())
    for index, _, error, relative, _ in reconstructed(model, [naive.batch()], ratio=0.25).errors:
        if index == layer.index:
            assert relative == pytest.approx(error / whole, rel=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "minimax_m2", "gpt_oss", "deepseek_v3"])
def test_the_model_computes_what_it_always_does(name: str) -> None:
    model, (ids, _) = naive.model(name), naive.batch()
    before = dict([*model.named_parameters(), *model.named_buffers()])

    class Two(SubsetTap):
        subsets = {layer.index: kept_subsets(layer.n_experts, 1) for layer in moe_layers(model)}  # noqa: RUF012

    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with Observer(model, Two):
            assert torch.allclose(model(input_ids=ids).logits, plain, atol=1e-4)
        assert torch.equal(model(input_ids=ids).logits, plain)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(after[key] is before[key] for key in before)


def test_subsets() -> None:
    assert kept_subsets(4, 2) == [(2, 3), (1, 3), (1, 2), (0, 3), (0, 2), (0, 1)]
    grouped = kept_subsets(8, 4, 4)
    assert grouped[0] == (1, 3, 5, 7) and len(set(grouped)) == len(grouped) == count_subsets(8, 4, 4) == 2**4
    for n, removed, groups in ((8, 3, 1), (6, 0, 1), (12, 6, 3)):
        assert len(kept_subsets(n, removed, groups)) == count_subsets(n, removed, groups)


LAYERS = {0: {"n_experts": 64, "top_k": 8, "n_group": 1, "topk_group": 1}}


def test_too_many_choices_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"ratio=0.5: .* 1.833e\+18 choices .*layer 0\b.*limit=10000; 0.046 is the largest"
    ):
        check_removals(LAYERS, 0.5)
    assert check_removals(LAYERS, 0.046) == {0: 2} and math.comb(64, 2) < 10_000 < math.comb(64, 3)
    grouped = {3: {"n_experts": 16, "top_k": 4, "n_group": 4, "topk_group": 2}}
    assert check_removals(grouped, 0.25, limit=256) == {3: 4}
    with pytest.raises(UserError, match=r" 256 choices .*layer 3\b.*limit=255; 0.249 is the largest"):
        check_removals(grouped, 0.25, limit=255)
    with pytest.raises(UserError, match="limit=0"):
        check_removals(LAYERS, 0.5, limit=0)
    with pytest.raises(UserError, match=r"ratio=0.92: .* layer 0"):
        check_removals(LAYERS, 0.92)


def test_a_router_that_cannot_be_repeated_is_refused() -> None:
    model = tiny.build("olmoe", num_experts=6, num_experts_per_tok=2)
    for layer in moe_layers(model):
        layer.experts.register_forward_pre_hook(lambda module, given: (given[0], given[1], given[2] * 0.5))
    with pytest.raises(UserError, match=r"cannot repeat the router of model\.layers\.0\.mlp\.experts"):
        reconstructed(model, [naive.batch()], ratio=0.5)


def test_an_expert_that_gives_nan_is_named() -> None:
    model = tiny.build("mixtral")
    moe_layers(model)[1].experts.down_proj[5] = float("nan")  # type: ignore[operator, index]
    with pytest.raises(UserError, match="NaN or Inf in layer 1, expert 5"):
        reconstructed(model, [naive.batch()], ratio=0.25)
