"""Exact ways: the rise of the loss without an expert, and the error of a layer for each choice of
its experts."""

import copy
from collections import Counter
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import naive
import pytest
import tiny
import torch
from allocation.example_facts import layer as facts_of_layer

from moe_lab.allocation.shapes import count_subsets, removals_within_limit, retained_subsets
from moe_lab.errors import UserError
from moe_lab.models import load as device
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.search import ablation, reconstruction
from moe_lab.search.ablation import loss_rises
from moe_lab.search.reconstruction import choice_errors
from moe_lab.statistics import Statistics
from moe_lab.statistics.damage import DamageHook
from moe_lab.statistics.observe import Batch, collect_statistics
from moe_lab.statistics.streaming import stream


def ablate(model: Any, batches: list[Batch], **settings: Any) -> Statistics:
    return loss_rises(model, "ablation", batches, **settings)


@torch.no_grad()
def naive_rises(model: Any, ids: torch.Tensor, valid: torch.Tensor) -> dict[str, dict[int, Any]]:
    """Kind -> layer -> rise of the loss: "ablation", without each of its experts, and "scaling",
    with the output of all of them times 0.9.

    Down projections are changed, in an fp64 copy, and the whole model reads the whole batch.
    """
    wide = copy.deepcopy(model).double()
    loss = float(naive.loss(wide, ids, valid))
    count = int((valid[:, :-1] & valid[:, 1:]).sum())
    rises_of: dict[str, dict[int, Any]] = {"ablation": {}, "scaling": {}}
    for layer in moe_layers(wide):
        parts = [
            tensor
            for name, tensor in layer.experts.named_parameters()
            if name.startswith("down_proj")
        ]
        originals = [part.clone() for part in parts]

        def rise(
            position: int | slice, factor: float, parts: Any = parts, originals: Any = originals
        ) -> float:
            for part in parts:
                part[position] *= factor
            changed = float(naive.loss(wide, ids, valid))
            for part, original in zip(parts, originals, strict=True):
                part.copy_(original)
            return (changed - loss) / count

        rises_of["ablation"][layer.index] = [rise(i, 0.0) for i in range(layer.n_experts)]
        rises_of["scaling"][layer.index] = rise(slice(None), 0.9)
    return rises_of


@pytest.mark.parametrize("name", tiny.one_of_each(tiny.arithmetic))
def test_rises_are_those_of_changed_weights(name: str) -> None:
    """MoE-Slimming, Figure 3(a) and step 3 of Appendix A.1. Measuring them leaves the model as it
    was."""
    model = tiny.build(name, **tiny.few_experts(name))
    ids, valid = (part[:2, 2:14] for part in naive.batch())
    weights = dict(model.named_parameters())
    rows = [(ids[:1], valid[:1]), (ids[1:], valid[1:])]
    scaling = loss_rises(model, "scaling", rows)
    all_measured = {"ablation": ablate(model, [(ids, valid)]), "scaling": scaling}
    for kind, expected in naive_rises(model, ids, valid).items():
        measured = all_measured[kind]
        assert measured.header["kind"] == kind
        assert measured.layers.keys() == expected.keys()
        for index, values in expected.items():
            rise = measured.layers[index][kind]
            assert rise.dtype == torch.float64
            assert rise.tolist() == pytest.approx(values, abs=3e-6), index
        largest = torch.tensor(list(expected.values())).abs().max()
        assert largest > {"ablation": 1e-3, "scaling": 1e-4}[kind]
    assert all(tensor is weights[key] for key, tensor in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("limit", "value"), [("PASS_TOKENS", 1), ("LOGITS", 4 * tiny.VOCABULARY * 50)]
)
def test_parts_do_not_matter(limit: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row and one expert at a time, or all at once, in batches of different lengths."""
    model = tiny.build("mixtral")
    ids, valid = naive.batch()
    batches = [(ids, valid), (ids[:1, :9], torch.ones(1, 9, dtype=torch.bool))]
    together = ablate(model, batches).layers
    monkeypatch.setattr(device, limit, value)
    for index, tensors in ablate(model, batches).layers.items():
        assert torch.allclose(tensors["ablation"], together[index]["ablation"], atol=2e-6)


def test_layers_before_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("mixtral", num_hidden_layers=4)
    monkeypatch.setattr(device, "PASS_TOKENS", 1)
    run: list[int] = []
    for layer in moe_layers(model):
        layer.block.register_forward_pre_hook(
            lambda module, args, position=layer.index: run.append(position)
        )
    ids = tiny.tokens(1, 96)
    ablate(model, [(ids, torch.ones_like(ids, dtype=torch.bool))])
    assert [run.count(index) for index in range(4)] == [1 + 8 * (index + 1) for index in range(4)]


def test_killed_ablation_resumes_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.build("mixtral")
    ids, valid = naive.batch()
    batches = [(ids[:2], valid[:2]), (ids[2:], valid[2:])]
    complete = ablate(model, batches)

    with monkeypatch.context() as patch, pytest.raises(tiny.SimulatedKill):
        tiny.count_calls(patch, ablation, "save_checkpoint", kill_at=5)
        ablate(model, batches, out=tmp_path)
    calls = tiny.count_calls(monkeypatch, ablation, "save_checkpoint")
    resumed = ablate(model, batches, out=tmp_path)
    assert len(calls) == 2
    assert resumed.header == complete.header
    naive.assert_sums_close(resumed.layers, complete.layers)
    ablate(model, batches[::-1], out=tmp_path)  # another text
    assert len(calls) == 8


def test_ablation_without_a_finite_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("mixtral")
    ids, valid = naive.batch()
    for batches, says in (
        (
            [(torch.full((2, 1), 5), torch.ones(2, 1, dtype=torch.bool))],
            "no token that follows another",
        ),
        ([], "no batches"),
    ):
        with pytest.raises(UserError, match=says):
            ablate(model, batches)
    broken = torch.tensor([0.0, 0.0, 0.0, float("nan")]).repeat(2)
    monkeypatch.setitem(ablation.KINDS, "ablation", lambda self, place: broken)
    with pytest.raises(
        UserError, match="NaN or Inf in layer 0, expert 3: ablation of the changed loss"
    ):
        ablate(model, [(ids, valid)])
    moe_layers(model)[2].experts.down_proj[3] = float("inf")  # type: ignore[operator, index]
    with pytest.raises(UserError, match="loss of the unpruned model is NaN or infinite"):
        ablate(model, [(ids, valid)])


# ---- reconstruction

THIRD = 0.34
"""The ratio at which architectures with few experts lose a third of them."""


def facts(model: Any) -> dict[str, Any]:
    """The layers as in facts.json, with the text keys of JSON."""
    return {"layers": {str(layer.index): vars(layer) for layer in moe_layers(model)}}


@torch.no_grad()
def brute_force(model: Any, layer: MoELayer, removed: int) -> dict[tuple[int, ...], float]:
    """Kept ids -> || F - F_S ||_F in fp64, for every subset that the mask accepts: the masked block
    is really run."""
    ids, valid = naive.batch()
    entered: list[torch.Tensor] = []
    with layer.block.register_forward_pre_hook(
        lambda module, args: entered.append(args[0].double())
    ):
        model(input_ids=ids, attention_mask=valid.long(), use_cache=False)
    wide = copy.deepcopy(model).double()
    changed = next(other for other in moe_layers(wide) if other.index == layer.index)
    unpruned = naive.block_output(changed, entered[0])
    errors = {}
    every_expert = tiny.plan(wide, 0.0)
    size = layer.n_experts // layer.n_group
    for retained in combinations(range(layer.n_experts), layer.n_experts - removed):
        in_groups = Counter(expert // size for expert in retained)
        if len({in_groups[group] for group in range(layer.n_group)}) > 1:
            continue
        pruned_layer = LayerPlan(layer.n_experts, retained)
        with mask(wide, Plan({**every_expert.layers, layer.index: pruned_layer})):
            errors[retained] = float(
                (unpruned - naive.block_output(changed, entered[0]))[valid.flatten()].norm()
            )
    return errors


def errors_of(
    model: Any, batches: list[Batch], ratio: float
) -> dict[int, dict[tuple[int, ...], float]]:
    read = partial(collect_statistics, model, batches=batches)
    return choice_errors(lambda hook: read(hook=hook), facts=facts(model), ratio=ratio)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3:grouped"])
def test_streamed_ablation_equals_the_loaded_model(name: str, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model", **tiny.few_experts(name))
    expected = errors_of(model, [naive.batch()], ratio=THIRD)
    streamed = StreamedModel(tmp_path / "model", dtype=torch.float32, device="cpu")
    read = partial(stream, streamed, batches=[naive.batch()], out=tmp_path / "out")
    result = choice_errors(lambda hook: read(hook=hook), facts=facts(model), ratio=THIRD)
    assert result == expected


@pytest.mark.parametrize("name", tiny.one_of_each(tiny.arithmetic))
def test_every_choice_has_the_error_of_really_making_it(name: str) -> None:
    model = tiny.build(name, **tiny.few_experts(name))
    result = errors_of(model, [naive.batch()], ratio=THIRD)
    layer = moe_layers(model)[-1]
    expected = brute_force(model, layer, layer.n_experts // 3)
    assert result[layer.index] == pytest.approx(expected, rel=2e-5, abs=1e-6)
    assert min(expected.values()) < max(expected.values()) / 1.2
    assert set(result) == {moe_layer.index for moe_layer in moe_layers(model)}


def test_parts_and_batches_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("mixtral")
    ids, valid = naive.batch()
    complete = errors_of(model, [(ids, valid)], ratio=0.5)
    monkeypatch.setattr(reconstruction, "DENSE_TOKENS", 7)
    monkeypatch.setattr(reconstruction, "TOKENS", 28)
    parts = errors_of(model, [(ids[:2], valid[:2]), (ids[2:], valid[2:])], ratio=0.5)
    for layer, errors in complete.items():
        assert parts[layer] == pytest.approx(errors, rel=1e-5)


def test_choice_of_all_experts_has_no_error() -> None:
    model = tiny.build("mixtral")
    (errors,) = {tuple(layer.items()) for layer in errors_of(model, [naive.batch()], 0.0).values()}
    assert errors == ((tuple(range(8)), 0.0),)


def test_subsets() -> None:
    assert retained_subsets(4, 2) == [(2, 3), (1, 3), (1, 2), (0, 3), (0, 2), (0, 1)]
    assert retained_subsets(8, 4, 4)[0] == (1, 3, 5, 7)
    assert len(set(retained_subsets(8, 4, 4))) == 2**4
    for n, removed, groups, protected in (
        (6, 0, 1, ()),
        (12, 6, 3, ()),
        (8, 4, 1, (0, 5)),
        (8, 4, 2, (0, 4)),
    ):
        subsets = retained_subsets(n, removed, groups)
        some = retained_subsets(n, removed, groups, protected)
        assert some == [subset for subset in subsets if set(protected) <= set(subset)]
        assert len(some) == count_subsets(n, removed, groups, protected)


PLAIN_LAYER = {0: facts_of_layer(64, top_k=8)}
GROUPED_LAYER = {3: facts_of_layer(16, top_k=4, n_group=4, topk_group=2)}
PROTECTED_LAYER = {0: {**facts_of_layer(8), "protected": [0, 5]}}


@pytest.mark.parametrize(
    ("layers", "ratio", "limit", "message"),
    [
        (
            PLAIN_LAYER,
            0.5,
            10_000,
            r"ratio=0.5: .* 1.833e\+18 choices .*layer 0\b.*limit=10000; 0.046 is the largest",
        ),
        (GROUPED_LAYER, 0.25, 255, r" 256 choices .*layer 3\b.*limit=255; 0.249 is the largest"),
        (PROTECTED_LAYER, 0.5, 14, r" 15 choices .* 0.249 is the largest"),
        (PLAIN_LAYER, 0.5, 0, "limit=0"),
        (PLAIN_LAYER, 0.92, 10_000, r"ratio=0.92: .* layer 0"),
    ],
)
def test_too_many_choices_are_refused(
    layers: dict[int, Any], ratio: float, limit: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        removals_within_limit(layers, ratio, limit=limit)


def test_choices_within_the_limit_are_allowed() -> None:
    assert removals_within_limit(PLAIN_LAYER, 0.046) == {0: 2}
    assert removals_within_limit(GROUPED_LAYER, 0.25, limit=256) == {3: 4}


def test_router_that_cannot_be_repeated_is_refused() -> None:
    model = tiny.build("olmoe", **tiny.few_experts("olmoe"))
    for layer in moe_layers(model):
        layer.experts.register_forward_pre_hook(
            lambda module, args: (args[0], args[1], args[2] * 0.5)
        )
    for read in (partial(collect_statistics, hook=DamageHook), partial(errors_of, ratio=0.5)):
        with pytest.raises(
            UserError, match=r"cannot repeat the router of model\.layers\.0\.mlp\.experts"
        ):
            read(model, batches=[naive.batch()])


def test_expert_that_gives_nan_is_named() -> None:
    model = tiny.build("mixtral")
    moe_layers(model)[1].experts.down_proj[5] = float("nan")  # type: ignore[operator, index]
    with pytest.raises(UserError, match="NaN or Inf in layer 1, expert 5"):
        errors_of(model, [naive.batch()], ratio=0.25)
