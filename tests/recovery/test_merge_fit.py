"""Down projections of merged experts, fitted to their members' outputs, against least squares on explicit tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch
from identities.plans import random_plan
from learning import text
from safetensors.torch import load_file

from moe_lab.calibration.batches import batches
from moe_lab.config import RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import merged_weights
from moe_lab.recovery import merge_fit
from moe_lab.recovery.merge_fit import RIDGE, fit
from moe_lab.statistics.observe import Observer

SETTINGS = RecoveryConfig(name="fit", fit="text")
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def model() -> Any:
    return tiny.build("olmoe", num_hidden_layers=2, dtype=torch.float64)


def plan_of(model: Any, way: str = "merged", seed: int = 0) -> Plan:
    """A plan that merges a few experts in every layer, with random orders of their channels."""
    return random_plan(model, way, seed, share=0.7)


@pytest.fixture
def run(folder: Path, tokenizer: Any) -> Run:
    def run(model: Any, out: Path, plan: Plan | None = None, tokens: int = 192) -> dict[str, Any]:
        rows, places = text(folder, tokens=tokens), {"out": out, "partial": out / "partial"}
        return fit(model, tokenizer, plan or plan_of(model), SETTINGS, rows, **places, fingerprint={"of": "test"})

    return run


def naive(model: Any, plan: Plan, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[tuple[int, int], Any]:
    """(layer, expert) -> P (T, I), Y (T, H) and W_D (H, I), token by token, with each row of the text alone."""
    seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {layer.index: [] for layer in moe_layers(model)}
    hooks = [
        layer.experts.register_forward_pre_hook(lambda _, given, at=layer.index: seen[at].append(given[:2]))
        for layer in moe_layers(model)
    ]
    for ids, valid in rows:
        for row, flags in zip(ids, valid, strict=True):
            with torch.no_grad():
                model(input_ids=row[flags][None])
    for hook in hooks:
        hook.remove()
    found = {}
    for layer in moe_layers(model):
        hidden, chosen = (torch.cat(parts) for parts in zip(*seen[layer.index], strict=True))
        merged = merged_weights(layer, plan)
        for owner, group in plan.merged[layer.index].items():
            own = layer.weights(owner, merged[owner])
            states = hidden[torch.isin(chosen, torch.tensor(list(group))).any(1)]
            outputs = sum(share * layer.expert_output(states, one) for one, share in group.items())
            average = layer.output(torch.eye(layer.width, dtype=torch.float64), own).T
            found[layer.index, owner] = tuple(part.numpy() for part in (layer.phi(states, own), outputs, average))
    return found


def fitted_rows(folder: Path, plan: Plan, layer: int, expert: int) -> torch.Tensor:
    """The down projection (H, I) of an expert in the written tensors."""
    tensors, name = load_file(folder / "tuned.safetensors"), f"model.layers.{layer}.mlp.experts"
    if f"{name}.down_proj" in tensors:
        return tensors[f"{name}.down_proj"][plan.experts[layer].index(expert)]
    packed, widths = tensors[f"{name}.down_packed"], plan.channels[layer].sum(1)
    start = int(widths[:expert].sum())
    return packed[start : start + int(widths[expert])].T


@pytest.mark.parametrize(
    ("tokens", "way", "align"),
    [(192, "merged", False), (48, "merged", False), (192, "merged", True), (192, "merged rows", True)],
)
def test_the_fit_is_least_squares_on_the_tokens_routed_to_any_member(
    model: Any, folder: Path, tokenizer: Any, run: Run, tmp_path: Path, tokens: int, way: str, align: bool
) -> None:
    """With 48 tokens some groups see fewer than the 24 channels of an expert, and keep the average."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = plan_of(model, way) if align else replace(plan_of(model, way), alignments={})
    report = run(model, tmp_path, plan, tokens)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    read = batches(text(folder, tokens=tokens), tokenizer).rows
    assert not all(bool(valid.all()) for _, valid in read)
    about = {(one["layer"], one["expert"]): one for one in report["experts"]}
    expected = naive(model, plan, read)
    assert about.keys() == expected.keys()
    averaged = 0
    for (layer, owner), (p, y, average) in expected.items():
        own, written = about[layer, owner], fitted_rows(tmp_path, plan, layer, owner).numpy()
        assert own["tokens"] == len(p) and own["members"] == sorted(plan.merged[layer][owner])
        residuals = [((y - p @ weight.T) ** 2).sum() / (y**2).sum() for weight in (average, written)]
        assert own["error_averaged"] == pytest.approx(residuals[0], rel=1e-9)
        if len(p) < p.shape[1]:
            averaged += 1
            assert own["error_fitted"] is None
            numpy.testing.assert_allclose(written, average, atol=1e-15)
            continue
        root = numpy.sqrt(RIDGE * (p**2).sum(0).mean())
        damped = numpy.concatenate((p, root * numpy.eye(p.shape[1])))
        weight = numpy.linalg.lstsq(damped, numpy.concatenate((y, root * average.T)), rcond=None)[0].T
        numpy.testing.assert_allclose(written, weight, rtol=0, atol=1e-9)
        assert own["error_fitted"] == pytest.approx(residuals[1], rel=1e-6, abs=1e-12)
        assert residuals[1] < residuals[0]
    assert (report["fitted"], report["averaged"]) == (len(expected) - averaged, averaged)
    assert (averaged > 0) == (tokens == 48) and averaged < len(expected)
    assert json.loads((tmp_path / "finetune.json").read_text()) == report


def test_a_killed_fit_goes_on_to_the_same_bits(
    model: Any, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(model, tmp_path / "whole")
    monkeypatch.setattr(merge_fit, "SAVE_EVERY", 1)
    with monkeypatch.context() as patch, pytest.raises(tiny.Killed):
        tiny.count_calls(patch, Observer, "read", kill_at=3)
        run(model, tmp_path / "cut")
    calls = tiny.count_calls(monkeypatch, Observer, "read")
    run(model, tmp_path / "cut")
    assert len(calls) == 4 - 2
    whole, cut = (tmp_path / name / "tuned.safetensors" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()
    run(model, tmp_path / "cut", plan_of(model, seed=1))  # the sums of another plan are not used
    assert len(calls) == 2 + 4


def test_what_cannot_be_fitted_is_said(model: Any, run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="merged experts, and the plan has none"):
        run(model, tmp_path, tiny.plan(model, 0.5))
    with pytest.raises(UserError, match=r"each of \d+ merged experts saw fewer tokens"):
        run(model, tmp_path, tokens=12)
