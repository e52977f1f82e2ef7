"""Learning what the unpruned model predicts, and fitting merged experts: losses, gradients,
resumption, closed form."""

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import tiny
import torch
from identities.plans import plan_without_alignment, random_plan
from safetensors.torch import load_file
from second_device import SecondDevice, on_device
from training_data import rows, text

from moe_lab.calibration.batches import batches
from moe_lab.config import RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers, routed_layers
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import merged_weights, prune
from moe_lab.recovery import finetune as finetuning
from moe_lab.recovery import merge_fit
from moe_lab.recovery.dora import router_weight
from moe_lab.recovery.finetune import (
    answer_loss,
    distillation_loss,
    finetune,
    rows_to_learn,
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


def unlearnt_span() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, valid and learnt of a batch: four valid tokens of the first row are not learnt."""
    ids, valid, _ = batch()
    learnt = valid.clone()
    learnt[0, 5:9] = False
    return ids, valid, learnt


def learnt_tokens(
    models: list[Any], temperature: float
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Each learnt token of `unlearnt_span`, and the probabilities (V,) that each model predicts for
    its place."""
    for row, flags, learnt in zip(*unlearnt_span(), strict=True):
        logits = [model(row[flags][None]).logits[0].double() / temperature for model in models]
        for position in range(1, int(flags.sum())):
            if learnt[position]:
                predicted = [torch.softmax(part[position - 1], -1) for part in logits]
                yield int(row[position]), predicted


LEARNT_MODELS = pytest.mark.parametrize("name", ["olmoe", "granitemoe"])


@torch.no_grad()
@LEARNT_MODELS
def test_answer_loss_is_the_cross_entropy_of_learnt_tokens(name: str) -> None:
    model = tiny.build(name, seed=1)
    loss = answer_loss(model, *unlearnt_span())
    expected = sum(-float(q[token].log()) for token, (q,) in learnt_tokens([model], 1))
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@LEARNT_MODELS
def test_distillation_loss_is_the_divergence_from_the_teacher(
    name: str, temperature: float
) -> None:
    teacher = tiny.build(name)
    model = tiny.build(name, seed=1)
    arguments = {"teacher": teacher, "temperature": temperature}
    loss = distillation_loss(model, *unlearnt_span(), **arguments)
    expected = 0.0
    for _, (p, q) in learnt_tokens([teacher, model], temperature):
        expected += temperature**2 * float((p * (p / q).log()).sum())
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", [*tiny.one_of_each(tiny.structure), "olmoe ragged"])
def test_a_step_of_a_student_changes_its_routers_only(name: str) -> None:
    """A step against their gradients. The student shares experts with its teacher, and is the
    pruned model with the changed routers."""
    family, _, ragged = name.partition(" ")
    model = tiny.build(family, dtype=torch.float64)
    plan = random_plan(model, "ragged") if ragged else tiny.plan(model, 0.5)
    original = tiny.cloned_state(model)
    ids, valid, learnt = batch()
    with trained_routers(model, plan) as student:
        routers = student.parameters["routers"]
        trainable = [tensor for tensor in student.model.parameters() if tensor.requires_grad]
        assert {id(parameter) for parameter in routers.values()} == set(map(id, trainable))
        expert_addresses = {
            tensor.data_ptr()
            for path, module in student.model.named_modules()
            if path.endswith(".experts")
            for tensor in module.parameters()
        }
        assert expert_addresses <= {tensor.data_ptr() for tensor in model.parameters()}
        loss = distillation_loss(student.model, ids, valid, learnt, teacher=model, temperature=1.0)
        loss.backward()
        with torch.no_grad():
            for key, parameter in routers.items():
                assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, key
                parameter -= 0.05 * parameter.grad.sign()
            logits = student.model(ids).logits
        changed = student.finish()
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not tiny.differing(model.state_dict(), original)
    expected = prune(model, plan)
    weights = expected.state_dict()
    assert len(changed) == len(routers)
    for key, value in changed.items():
        assert value.shape == weights[key].shape and not torch.equal(value, weights[key])
    expected.load_state_dict(changed, strict=False)
    with torch.no_grad():
        difference = float((expected(ids).logits - logits).abs().max())
    assert difference < 1e-9 if ragged else difference == 0


def test_routers_in_bfloat16_are_trained_in_fp32(tmp_path: Path) -> None:
    model = tiny.build("olmoe", dtype=torch.bfloat16, num_hidden_layers=1)
    settings = RecoveryConfig(**ROUTERS, router_learning_rate=1e-5, epochs=1)
    original = router_weight(routed_layers(model)[0]).weight.clone()
    with trained_routers(model, tiny.plan(model, 0.0)) as student:
        (parameter,) = student.parameters["routers"].values()
        loss = functools.partial(
            distillation_loss, teacher=tiny.build("olmoe", num_hidden_layers=1), temperature=1.0
        )
        run = {"loss": loss, "rows_at_once": 2, "partial": tmp_path, "seed": 0}
        train(student.model, student.parameters, rows(), settings, **run)
        (changed,) = student.finish().values()
        moved = (parameter.detach() - original).abs()
    assert parameter.dtype == torch.float32
    assert changed.dtype == torch.bfloat16
    assert 1e-6 < float(moved.max()) < 4e-5
    assert float((moved > 0).float().mean()) > 0.9
    assert float((changed != original).float().mean()) < 0.1
    assert torch.equal(changed, parameter.detach().bfloat16())


def test_padding_and_tokens_after_a_gap_are_not_learnt(
    folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    for settings in (text(folder), replace(text(folder), packing="chunk", gap="zero", tokens=72)):
        gaps = 0
        for ids, valid, learnt in rows_to_learn(settings, tokenizer, answers=False):
            assert [bool(flag) for flag in learnt[1:]] == [
                bool(valid[position] and valid[position - 1]) for position in range(1, len(ids))
            ]
            gaps += int((~valid).sum())
        assert gaps
    (tmp_path / "text.jsonl").write_text('{"text": "w3"}\n{"text": "w4"}\n')
    with pytest.raises(UserError, match=r"text\.jsonl: no token"):
        rows_to_learn(replace(text(tmp_path), length=2, tokens=4), tokenizer, answers=False)


@pytest.mark.parametrize("train_what", ["routers", "adapters"])
def test_killed_distillation_resumes_with_the_same_result(
    folder: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_what: str
) -> None:
    model = tiny.build("olmoe", num_hidden_layers=2)
    settings = RecoveryConfig(
        **{**ROUTERS, "train": train_what}, router_learning_rate=1e-2, temperature=2
    )
    monkeypatch.setattr(finetuning, "SAVE_EVERY", 2)
    plan = tiny.plan(model, 0.5)

    def run(name: str) -> Path:
        paths = {"out": tmp_path / name / "out", "partial": tmp_path / name / "partial"}
        finetune(model, tokenizer, plan, settings, text(folder), **paths, seed=0)
        return paths["out"]

    complete = run("complete")
    with monkeypatch.context() as patch, pytest.raises(tiny.SimulatedKill):
        tiny.count_calls(patch, finetuning, "_backward", kill_at=6)
        run("resumed")
    calls = tiny.count_calls(monkeypatch, finetuning, "_backward")
    resumed = run("resumed")
    assert len(calls) == 8 - 4  # 8 rows, twice, 2 in a step; 4 steps were saved
    files = [folder / "tuned.safetensors" for folder in (complete, resumed)]
    assert files[0].read_bytes() == files[1].read_bytes()
    report, again = (
        json.loads((folder / "finetune.json").read_text()) for folder in (complete, resumed)
    )
    assert report["loss"] == again["loss"]
    assert report["tokens"] == again["tokens"] > 0
    if train_what == "routers":
        assert report["trained_parameters"] == {"routers": 2 * 8 * 32}


# ---- merged experts fitted by least squares

SETTINGS = RecoveryConfig(name="fit", fit="text")
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def model() -> Any:
    return tiny.build("olmoe", num_hidden_layers=2, dtype=torch.float64)


def plan_of(model: Any, way: str = "merged") -> Plan:
    """A plan that merges a few experts in every layer, with random orders of their channels."""
    return random_plan(model, way, share=0.7)


@pytest.fixture
def run(folder: Path, tokenizer: Any) -> Run:
    def run(model: Any, out: Path, plan: Plan | None = None, tokens: int = 192) -> dict[str, Any]:
        rows = text(folder, tokens=tokens)
        paths = {"out": out, "partial": out / "partial"}
        return fit(model, tokenizer, plan or plan_of(model), SETTINGS, rows, **paths)

    return run


class Regression(NamedTuple):
    """The least-squares problem of a merged expert: inputs P (T, I), targets Y (T, H), and the
    average of the members' down projections (H, I)."""

    inputs: Any
    targets: Any
    average: Any

    def error(self, weight: Any) -> float:
        residuals = self.targets - self.inputs @ weight.T
        return float((residuals**2).sum() / (self.targets**2).sum())

    def solution(self) -> Any:
        """(H, I) the ridge regression towards the average."""
        size = self.inputs.shape[1]
        root = numpy.sqrt(RIDGE * (self.inputs**2).sum(0).mean())
        damped = numpy.concatenate((self.inputs, root * numpy.eye(size)))
        targets = numpy.concatenate((self.targets, root * self.average.T))
        return numpy.linalg.lstsq(damped, targets, rcond=None)[0].T


def routed_tokens(
    model: Any, rows: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """MoE layer -> hidden states (T, H) and chosen experts (T, K) of the valid tokens, from a
    forward pass of each row alone."""
    calls: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {
        layer.index: [] for layer in moe_layers(model)
    }
    hooks = [
        layer.experts.register_forward_pre_hook(
            lambda _, args, index=layer.index: calls[index].append(args[:2])
        )
        for layer in moe_layers(model)
    ]
    for ids, valid in rows:
        for row, flags in zip(ids, valid, strict=True):
            with torch.no_grad():
                model(input_ids=row[flags][None])
    for hook in hooks:
        hook.remove()
    return {
        index: (torch.cat([hidden for hidden, _ in parts]), torch.cat([top for _, top in parts]))
        for index, parts in calls.items()
    }


def regressions(
    model: Any, plan: Plan, rows: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[tuple[int, int], Regression]:
    """(layer, owner) -> the problem of the merged expert."""
    tokens = routed_tokens(model, rows)
    result = {}
    for layer in moe_layers(model):
        hidden, chosen = tokens[layer.index]
        merged = merged_weights(layer, plan.layers[layer.index])
        for owner, group in plan.layers[layer.index].merged.items():
            weights = layer.weights(owner, merged[owner])
            states = hidden[torch.isin(chosen, torch.tensor(list(group))).any(1)]
            targets = sum(share * layer.expert_output(states, i) for i, share in group.items())
            average = layer.output(torch.eye(layer.width, dtype=torch.float64), weights).T
            parts = (layer.phi(states, weights), targets, average)
            result[layer.index, owner] = Regression(*(part.numpy() for part in parts))
    return result


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
def test_fit_is_least_squares_on_the_tokens_routed_to_any_member(
    tokens: int,
    way: str,
    align: bool,
    model: Any,
    folder: Path,
    tokenizer: Any,
    run: Run,
    tmp_path: Path,
) -> None:
    """Errors before and after, and numbers of tokens are reported. With 48 tokens some groups
    see fewer than the 24 channels of an expert, and keep the average."""
    original = tiny.cloned_state(model)
    plan = plan_of(model, way) if align else plan_without_alignment(plan_of(model, way))
    report = run(model, tmp_path, plan, tokens)
    assert not tiny.differing(model.state_dict(), original)
    assert json.loads((tmp_path / "finetune.json").read_text()) == report
    rows = batches(text(folder, tokens=tokens), tokenizer).batches
    assert not all(bool(valid.all()) for _, valid in rows)
    problems = regressions(model, plan, rows)
    reported = {(row["layer"], row["expert"]): row for row in report["experts"]}
    assert reported.keys() == problems.keys()
    n_averaged = 0
    for key, problem in problems.items():
        weight = fitted_rows(tmp_path, plan, *key).numpy()
        row = reported[key]
        assert row["tokens"] == len(problem.inputs)
        averaged = problem.error(problem.average)
        assert row["error_averaged"] == pytest.approx(averaged, rel=1e-9)
        count, size = problem.inputs.shape
        if count < size:
            n_averaged += 1
            numpy.testing.assert_allclose(weight, problem.average, atol=1e-15)
            assert row["error_fitted"] is None
        else:
            numpy.testing.assert_allclose(weight, problem.solution(), rtol=0, atol=1e-9)
            error = problem.error(weight)
            assert row["error_fitted"] == pytest.approx(error, rel=1e-6, abs=1e-12)
            assert error < averaged
    assert report["averaged"] == n_averaged
    assert (n_averaged > 0) == (tokens == 48)
    assert n_averaged < len(problems)


def test_killed_fit_resumes_with_the_same_result(
    model: Any, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(model, tmp_path / "whole")
    monkeypatch.setattr(observe, "SAVE_INTERVAL", 0.0)
    monkeypatch.setattr(observe, "SAVE_FACTOR", 0)
    with monkeypatch.context() as patch, pytest.raises(tiny.SimulatedKill):
        tiny.count_calls(patch, Observer, "run_batch", kill_at=3)
        run(model, tmp_path / "cut")
    calls = tiny.count_calls(monkeypatch, Observer, "run_batch")
    run(model, tmp_path / "cut")
    assert len(calls) == 4 - 2
    complete, resumed = (tmp_path / name / "tuned.safetensors" for name in ("whole", "cut"))
    assert complete.read_bytes() == resumed.read_bytes()


def test_plans_and_texts_that_cannot_be_fitted_are_refused(
    model: Any, run: Run, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="merged experts, and the plan has none"):
        run(model, tmp_path, tiny.plan(model, 0.5))
    with pytest.raises(UserError, match=r"each of \d+ merged experts saw fewer tokens"):
        run(model, tmp_path, tokens=12)


def test_a_fit_on_another_device_is_that_of_the_cpu(
    folder: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the files: tensors of the second device have no memory of their own to write."""
    monkeypatch.setattr(merge_fit, "save_tuned", lambda *_: None)
    model = tiny.build("olmoe", num_hidden_layers=2)
    plan = plan_of(model)
    rows = text(folder, tokens=192)

    def fitted_on(name: str, copied: Any) -> list[dict[str, Any]]:
        paths = {"out": tmp_path / name, "partial": tmp_path / name / "partial"}
        report = fit(copied, tokenizer, plan, SETTINGS, rows, **paths)
        return [expert for expert in report["experts"] if expert["error_fitted"] is not None]

    expected = fitted_on("cpu", model)
    with SecondDevice():
        actual = fitted_on("gpu", on_device(model))
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        assert (one["layer"], one["expert"]) == (other["layer"], other["expert"])
        assert one["error_fitted"] == pytest.approx(other["error_fitted"], rel=1e-4)
