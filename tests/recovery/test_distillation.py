"""Learning what the unpruned model predicts, and fitting merged experts: losses, gradients,
resumption, closed form."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch
from identities.plans import random_plan, unaligned
from learning import rows, text
from safetensors.torch import load_file

from moe_lab.calibration.batches import batches
from moe_lab.config import RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers, routed_layers
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import merged_weights
from moe_lab.recovery import finetune as finetuning
from moe_lab.recovery.apply import pruned
from moe_lab.recovery.dora import router_weight
from moe_lab.recovery.finetune import (
    answer_loss,
    distillation_loss,
    finetune,
    text_rows,
    train,
    trained_routers,
)
from moe_lab.recovery.merge_fit import RIDGE, fit
from moe_lab.statistics import observe
from moe_lab.statistics.observe import Observer

ROUTERS = {"train": "routers", "distill": "tiny", "rows_per_step": 2}


@pytest.fixture(autouse=True)
def at_full_rate_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetuning, "WARMUP", 0.0)


def batch(count: int = 4) -> tuple[torch.Tensor, ...]:
    return tuple(torch.stack(parts) for parts in zip(*rows(count), strict=True))


@torch.no_grad()
@pytest.mark.parametrize("temperature", [None, 1.0, 2.0])
@pytest.mark.parametrize("name", ["olmoe", "granitemoe"])
def test_losses_are_those_of_each_learnt_token(name: str, temperature: float | None) -> None:
    """The divergence from the teacher, or, without a temperature, the cross entropy of answers."""
    teacher = tiny.build(name)
    model = tiny.build(name, seed=1)
    ids, valid, _ = batch()
    learnt = valid.clone()
    learnt[0, 5:9] = False
    if temperature is None:
        found = answer_loss(model, ids, valid, learnt)
    else:
        found = distillation_loss(
            model, ids, valid, learnt, teacher=teacher, temperature=temperature
        )
    expected = 0.0
    for row, flags, wanted in zip(ids, valid, learnt, strict=True):
        logits = [
            network(row[flags][None]).logits[0].double() / (temperature or 1)
            for network in (teacher, model)
        ]
        p, q = (torch.softmax(part, -1) for part in logits)
        for token in (place for place in range(1, int(flags.sum())) if wanted[place]):
            if temperature is None:
                expected -= float(q[token - 1, row[token]].log())
            else:
                expected += temperature**2 * float(
                    (p[token - 1] * (p[token - 1] / q[token - 1]).log()).sum()
                )
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", [*tiny.ARCHITECTURES, "olmoe ragged"])
def test_gradients_reach_routers_and_nothing_else(name: str) -> None:
    """Also: the student shares all other tensors with its teacher, and is what the pruned model
    with its routers is."""
    model = tiny.build(name.split()[0], dtype=torch.float64)
    plan = random_plan(model, "ragged") if "ragged" in name else tiny.plan(model, 0.5)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    structural = pruned(model, plan)
    ids, valid, learnt = batch()
    with trained_routers(model, plan) as student:
        parameters = student.parameters["routers"]
        assert {id(parameter) for parameter in parameters.values()} == {
            id(parameter) for parameter in student.model.parameters() if parameter.requires_grad
        }
        held = {tensor.data_ptr() for tensor in model.parameters()}
        experts = [
            module for name, module in student.model.named_modules() if name.endswith(".experts")
        ]
        assert all(
            tensor.data_ptr() in held for module in experts for tensor in module.parameters()
        )
        loss = distillation_loss(student.model, ids, valid, learnt, teacher=model, temperature=1.0)
        loss.backward()
        for key, parameter in parameters.items():
            assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, key
        assert not any(parameter.grad is not None for parameter in model.parameters())
        with torch.no_grad():
            for parameter in parameters.values():
                parameter -= 0.05 * parameter.grad.sign()
            trained = student.model(ids).logits
        changed = student.changed()
    routers = {key: value for key, value in structural.state_dict().items() if key in changed}
    assert len(routers) == len(changed) == len(parameters)
    assert all(
        value.shape == changed[key].shape and not torch.equal(value, changed[key])
        for key, value in routers.items()
    )
    structural.load_state_dict(changed, strict=False)
    with torch.no_grad():
        difference = float((structural(ids).logits - trained).abs().max())
    assert difference < 1e-9 if "ragged" in name else difference == 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_steps_that_bfloat16_would_lose_are_kept_in_fp32(tmp_path: Path) -> None:
    model = tiny.build("olmoe", dtype=torch.bfloat16, num_hidden_layers=1)
    settings = RecoveryConfig(**ROUTERS, router_learning_rate=1e-5, epochs=1)
    before = router_weight(routed_layers(model)[0]).weight.clone()
    with trained_routers(model, None) as student:
        (parameter,) = student.parameters["routers"].values()
        loss = functools.partial(
            distillation_loss, teacher=tiny.build("olmoe", num_hidden_layers=1), temperature=1.0
        )
        run = {"loss": loss, "rows_at_once": 2, "partial": tmp_path, "seed": 0}
        train(student.model, student.parameters, rows(), settings, **run)
        (changed,) = student.changed().values()
        moved = (parameter.detach() - before).abs()
    assert parameter.dtype == torch.float32 and changed.dtype == torch.bfloat16
    assert 1e-6 < float(moved.max()) < 4e-5 and float((moved > 0).float().mean()) > 0.9
    assert float((changed != before).float().mean()) < 0.1
    assert torch.equal(changed, parameter.detach().bfloat16())


def test_padding_and_what_follows_a_gap_are_not_learnt(
    folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    for settings in (text(folder), replace(text(folder), packing="chunk", gap="zero", tokens=72)):
        gaps = 0
        for ids, valid, learnt in text_rows(settings, tokenizer):
            assert [bool(flag) for flag in learnt[1:]] == [
                bool(valid[place] and valid[place - 1]) for place in range(1, len(ids))
            ]
            gaps += int((~valid).sum())
        assert gaps
    (tmp_path / "text.jsonl").write_text('{"text": "w3"}\n{"text": "w4"}\n')
    with pytest.raises(UserError, match=r"text\.jsonl: no token"):
        text_rows(replace(text(tmp_path), length=2, tokens=4), tokenizer)


@pytest.mark.parametrize("train_what", ["routers", "adapters"])
def test_a_killed_distillation_goes_on_to_the_same_bits(
    folder: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_what: str
) -> None:
    model = tiny.build("olmoe", num_hidden_layers=2)
    settings = RecoveryConfig(
        **{**ROUTERS, "train": train_what}, router_learning_rate=1e-2, temperature=2
    )
    monkeypatch.setattr(finetuning, "SAVE_EVERY", 2)
    plan = tiny.plan(model, 0.5)

    def run(name: str) -> None:
        places = {"out": tmp_path / name / "out", "partial": tmp_path / name / "partial"}
        finetune(model, tokenizer, plan, settings, text(folder), **places, seed=0)

    run("whole")
    with monkeypatch.context() as patch, pytest.raises(tiny.Killed):
        tiny.count_calls(patch, finetuning, "_backward", kill_at=6)
        run("cut")
    calls = tiny.count_calls(monkeypatch, finetuning, "_backward")
    run("cut")
    assert len(calls) == 8 - 4  # 8 rows, twice, 2 in a step; 4 steps were saved
    whole, cut = (tmp_path / name / "out" for name in ("whole", "cut"))
    assert (whole / "tuned.safetensors").read_bytes() == (cut / "tuned.safetensors").read_bytes()
    reports = [json.loads((out / "finetune.json").read_text()) for out in (whole, cut)]
    assert (
        reports[0]["loss"] == reports[1]["loss"]
        and reports[0]["tokens"] == reports[1]["tokens"] > 0
    )
    if train_what == "routers":
        assert reports[0]["trained_parameters"] == {"routers": 2 * 8 * 32}


# ---- merged experts fitted by least squares

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
        rows = text(folder, tokens=tokens)
        places = {"out": out, "partial": out / "partial"}
        return fit(model, tokenizer, plan or plan_of(model), SETTINGS, rows, **places)

    return run


def naive(
    model: Any, plan: Plan, rows: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[tuple[int, int], Any]:
    """(layer, expert) -> P (T, I), Y (T, H) and W_D (H, I), token by token, with each row of the
    text alone."""
    seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {
        layer.index: [] for layer in moe_layers(model)
    }
    hooks = [
        layer.experts.register_forward_pre_hook(
            lambda _, given, at=layer.index: seen[at].append(given[:2])
        )
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
        merged = merged_weights(layer, plan.layers[layer.index])
        for owner, group in plan.layers[layer.index].merged.items():
            own = layer.weights(owner, merged[owner])
            states = hidden[torch.isin(chosen, torch.tensor(list(group))).any(1)]
            outputs = sum(share * layer.expert_output(states, one) for one, share in group.items())
            average = layer.output(torch.eye(layer.width, dtype=torch.float64), own).T
            found[layer.index, owner] = tuple(
                part.numpy() for part in (layer.phi(states, own), outputs, average)
            )
    return found


def fitted_rows(folder: Path, plan: Plan, layer: int, expert: int) -> torch.Tensor:
    """The down projection (H, I) of an expert in the written tensors."""
    tensors = load_file(folder / "tuned.safetensors")
    name = f"model.layers.{layer}.mlp.experts"
    if f"{name}.down_proj" in tensors:
        return tensors[f"{name}.down_proj"][plan.layers[layer].retained.index(expert)]
    packed = tensors[f"{name}.down_packed"]
    widths = plan.layers[layer].channels.sum(1)
    start = int(widths[:expert].sum())
    return packed[start : start + int(widths[expert])].T


@pytest.mark.parametrize(
    ("tokens", "way", "align"),
    [
        (192, "merged", False),
        (48, "merged", False),
        (192, "merged", True),
        (192, "merged rows", True),
    ],
)
def test_the_fit_is_least_squares_on_the_tokens_routed_to_any_member(
    model: Any,
    folder: Path,
    tokenizer: Any,
    run: Run,
    tmp_path: Path,
    tokens: int,
    way: str,
    align: bool,
) -> None:
    """With 48 tokens some groups see fewer than the 24 channels of an expert, and keep the
    average."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = plan_of(model, way) if align else unaligned(plan_of(model, way))
    report = run(model, tmp_path, plan, tokens)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    read = batches(text(folder, tokens=tokens), tokenizer).rows
    assert not all(bool(valid.all()) for _, valid in read)
    about = {(one["layer"], one["expert"]): one for one in report["experts"]}
    expected = naive(model, plan, read)
    assert about.keys() == expected.keys()
    averaged = 0
    for (layer, owner), (p, y, average) in expected.items():
        own = about[layer, owner]
        written = fitted_rows(tmp_path, plan, layer, owner).numpy()
        assert own["tokens"] == len(p) and own["members"] == sorted(
            plan.layers[layer].merged[owner]
        )
        residuals = [
            ((y - p @ weight.T) ** 2).sum() / (y**2).sum() for weight in (average, written)
        ]
        assert own["error_averaged"] == pytest.approx(residuals[0], rel=1e-9)
        if len(p) < p.shape[1]:
            averaged += 1
            assert own["error_fitted"] is None
            numpy.testing.assert_allclose(written, average, atol=1e-15)
            continue
        root = numpy.sqrt(RIDGE * (p**2).sum(0).mean())
        damped = numpy.concatenate((p, root * numpy.eye(p.shape[1])))
        weight = numpy.linalg.lstsq(damped, numpy.concatenate((y, root * average.T)), rcond=None)[
            0
        ].T
        numpy.testing.assert_allclose(written, weight, rtol=0, atol=1e-9)
        assert own["error_fitted"] == pytest.approx(residuals[1], rel=1e-6, abs=1e-12)
        assert residuals[1] < residuals[0]
    assert (report["fitted"], report["averaged"]) == (len(expected) - averaged, averaged)
    assert (averaged > 0) == (tokens == 48) and averaged < len(expected)
    assert json.loads((tmp_path / "finetune.json").read_text()) == report


def test_a_killed_fit_ends_the_same(
    model: Any, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(model, tmp_path / "whole")
    monkeypatch.setattr(observe, "SAVED", 0.0)
    monkeypatch.setattr(observe, "PER_SAVE", 0)
    with monkeypatch.context() as patch, pytest.raises(tiny.Killed):
        tiny.count_calls(patch, Observer, "read", kill_at=3)
        run(model, tmp_path / "cut")
    calls = tiny.count_calls(monkeypatch, Observer, "read")
    run(model, tmp_path / "cut")
    assert len(calls) == 4 - 2
    whole, cut = (tmp_path / name / "tuned.safetensors" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()


def test_what_cannot_be_fitted_is_said(model: Any, run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="merged experts, and the plan has none"):
        run(model, tmp_path, tiny.plan(model, 0.5))
    with pytest.raises(UserError, match=r"each of \d+ merged experts saw fewer tokens"):
        run(model, tmp_path, tokens=12)
