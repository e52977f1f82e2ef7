"""Exact ways: the rise of the loss without an expert, and the error of a layer for each choice of
its experts."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import naive
import pytest
import tiny
import torch

from moe_lab.errors import UserError
from moe_lab.models import load as device
from moe_lab.models.discover import moe_layers
from moe_lab.search import ablation
from moe_lab.search.ablation import loss_rises
from moe_lab.statistics import Statistics
from moe_lab.statistics.damage import DamageHook
from moe_lab.statistics.observe import Batch, collect_statistics


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


class Rises(NamedTuple):
    """Rises of the loss of a model, without each expert and with scaled outputs: measured, and from
    changed weights."""

    model: Any
    weights: dict[str, Any]
    measured: dict[str, Statistics]
    expected: dict[str, dict[int, Any]]


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def rises(request: pytest.FixtureRequest) -> Rises:
    model = tiny.build(request.param, **tiny.few_experts(request.param))
    ids, valid = (part[:2, 2:14] for part in naive.batch())
    weights = dict(model.named_parameters())
    rows = [(ids[:1], valid[:1]), (ids[1:], valid[1:])]
    measured = {
        "ablation": ablate(model, [(ids, valid)]),
        "scaling": loss_rises(model, "scaling", rows),
    }
    return Rises(model, weights, measured, naive_rises(model, ids, valid))


@pytest.mark.parametrize(("kind", "least"), [("ablation", 1e-3), ("scaling", 1e-4)])
def test_rises_are_those_of_changed_weights(kind: str, least: float, rises: Rises) -> None:
    measured, expected = rises.measured[kind], rises.expected[kind]
    assert measured.header["kind"] == kind
    assert measured.layers.keys() == expected.keys()
    for index, values in expected.items():
        rise = measured.layers[index][kind]
        assert rise.dtype == torch.float64
        assert rise.tolist() == pytest.approx(values, abs=3e-6), index
    assert torch.tensor(list(expected.values())).abs().max() > least


def test_measuring_rises_leaves_the_model(rises: Rises) -> None:
    model = rises.model
    assert all(tensor is rises.weights[key] for key, tensor in model.named_parameters())
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


def test_router_that_cannot_be_repeated_is_refused() -> None:
    model = tiny.build("olmoe", **tiny.few_experts("olmoe"))
    for layer in moe_layers(model):
        layer.experts.register_forward_pre_hook(
            lambda module, args: (args[0], args[1], args[2] * 0.5)
        )
    with pytest.raises(
        UserError, match=r"cannot repeat the router of model\.layers\.0\.mlp\.experts"
    ):
        collect_statistics(model, DamageHook, [naive.batch()])
