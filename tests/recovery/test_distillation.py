"""Learning what the unpruned model predicts, and fitting merged experts: losses, gradients,
resumption, closed form."""

import copy
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
from moe_lab.pruning.prune import merged_weights
from moe_lab.recovery import finetune as finetuning
from moe_lab.recovery import merge_fit
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


class RouterStep(NamedTuple):
    """A step of a student's routers against their gradients: the model that it was made from and
    its weights before, the student's trainable tensors, addresses of tensors in memory, and the
    student's logits and changed weights after the step."""

    model: Any
    original: dict[str, torch.Tensor]
    pruned: Any
    routers: dict[str, Any]
    trainable: list[Any]
    model_addresses: set[int]
    expert_addresses: set[int]
    logits: torch.Tensor
    changed: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=[*tiny.ARCHITECTURES, "olmoe ragged"])
def router_step(request: pytest.FixtureRequest) -> RouterStep:
    model = tiny.build(request.param.split()[0], dtype=torch.float64)
    plan = random_plan(model, "ragged") if "ragged" in request.param else tiny.plan(model, 0.5)
    original = tiny.cloned_state(model)
    with trained_routers(model, plan) as student:
        routers = student.parameters["routers"]
        trainable = [tensor for tensor in student.model.parameters() if tensor.requires_grad]
        model_addresses = {tensor.data_ptr() for tensor in model.parameters()}
        expert_addresses = {
            tensor.data_ptr()
            for name, module in student.model.named_modules()
            if name.endswith(".experts")
            for tensor in module.parameters()
        }
        ids, valid, learnt = batch()
        loss = distillation_loss(student.model, ids, valid, learnt, teacher=model, temperature=1.0)
        loss.backward()
        with torch.no_grad():
            for parameter in routers.values():
                parameter -= 0.05 * parameter.grad.sign()
            logits = student.model(ids).logits
        return RouterStep(
            model,
            original,
            pruned(model, plan),
            routers,
            trainable,
            model_addresses,
            expert_addresses,
            logits,
            student.finish(),
        )


def test_gradients_reach_routers_only(router_step: RouterStep) -> None:
    routers = router_step.routers
    assert {id(parameter) for parameter in routers.values()} == set(map(id, router_step.trainable))
    for key, parameter in routers.items():
        assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, key
    model = router_step.model
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_student_shares_experts_with_its_teacher(router_step: RouterStep) -> None:
    assert router_step.expert_addresses <= router_step.model_addresses
    assert not tiny.differing(router_step.model.state_dict(), router_step.original)


def test_changed_weights_are_those_of_routers(router_step: RouterStep) -> None:
    changed = router_step.changed
    weights = router_step.pruned.state_dict()
    routers = {key: value for key, value in weights.items() if key in changed}
    assert len(routers) == len(changed) == len(router_step.routers)
    assert all(
        value.shape == changed[key].shape and not torch.equal(value, changed[key])
        for key, value in routers.items()
    )


def test_student_is_the_pruned_model_with_its_routers(
    router_step: RouterStep, request: pytest.FixtureRequest
) -> None:
    student = copy.deepcopy(router_step.pruned)
    student.load_state_dict(router_step.changed, strict=False)
    ids, *_ = batch()
    with torch.no_grad():
        difference = float((student(ids).logits - router_step.logits).abs().max())
    assert difference < 1e-9 if "ragged" in request.node.name else difference == 0


def test_routers_in_bfloat16_are_trained_in_fp32(tmp_path: Path) -> None:
    model = tiny.build("olmoe", dtype=torch.bfloat16, num_hidden_layers=1)
    settings = RecoveryConfig(**ROUTERS, router_learning_rate=1e-5, epochs=1)
    original = router_weight(routed_layers(model)[0]).weight.clone()
    with trained_routers(model, None) as student:
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
        for ids, valid, learnt in text_rows(settings, tokenizer):
            assert [bool(flag) for flag in learnt[1:]] == [
                bool(valid[position] and valid[position - 1]) for position in range(1, len(ids))
            ]
            gaps += int((~valid).sum())
        assert gaps
    (tmp_path / "text.jsonl").write_text('{"text": "w3"}\n{"text": "w4"}\n')
    with pytest.raises(UserError, match=r"text\.jsonl: no token"):
        text_rows(replace(text(tmp_path), length=2, tokens=4), tokenizer)


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


class Fitted(NamedTuple):
    """A model whose merged experts were fitted, and the problem and the written weight (H, I) of
    each, by (layer, owner)."""

    plan: Plan
    tokens: int
    report: dict[str, Any]
    folder: Path
    problems: dict[tuple[int, int], Regression]
    written: dict[tuple[int, int], Any]

    @property
    def rows(self) -> dict[tuple[int, int], dict[str, Any]]:
        return {(row["layer"], row["expert"]): row for row in self.report["experts"]}

    def is_averaged(self, key: tuple[int, int]) -> bool:
        """Whether a merged expert saw fewer tokens than it has channels."""
        count, size = self.problems[key].inputs.shape
        return bool(count < size)


@pytest.fixture(
    params=[
        (192, "merged", False),
        (48, "merged", False),
        (192, "merged", True),
        (192, "merged rows", True),
    ]
)
def fitted(
    request: pytest.FixtureRequest,
    model: Any,
    folder: Path,
    tokenizer: Any,
    run: Run,
    tmp_path: Path,
) -> Fitted:
    """With 48 tokens some groups see fewer than the 24 channels of an expert, and keep the
    average."""
    tokens, way, align = request.param
    original = tiny.cloned_state(model)
    plan = plan_of(model, way) if align else plan_without_alignment(plan_of(model, way))
    report = run(model, tmp_path, plan, tokens)
    assert not tiny.differing(model.state_dict(), original)
    rows = batches(text(folder, tokens=tokens), tokenizer).batches
    assert not all(bool(valid.all()) for _, valid in rows)
    problems = regressions(model, plan, rows)
    written = {key: fitted_rows(tmp_path, plan, *key).numpy() for key in problems}
    return Fitted(plan, tokens, report, tmp_path, problems, written)


def test_fit_is_least_squares_on_the_tokens_routed_to_any_member(fitted: Fitted) -> None:
    for key, problem in fitted.problems.items():
        if fitted.is_averaged(key):
            numpy.testing.assert_allclose(fitted.written[key], problem.average, atol=1e-15)
        else:
            solution = problem.solution()
            numpy.testing.assert_allclose(fitted.written[key], solution, rtol=0, atol=1e-9)


def test_fit_reports_errors_before_and_after(fitted: Fitted) -> None:
    for key, problem in fitted.problems.items():
        row = fitted.rows[key]
        averaged = problem.error(problem.average)
        assert row["error_averaged"] == pytest.approx(averaged, rel=1e-9)
        if fitted.is_averaged(key):
            assert row["error_fitted"] is None
        else:
            error = problem.error(fitted.written[key])
            assert row["error_fitted"] == pytest.approx(error, rel=1e-6, abs=1e-12)
            assert error < averaged


def test_fit_reports_members_and_their_tokens(fitted: Fitted) -> None:
    assert fitted.rows.keys() == fitted.problems.keys()
    for (layer, owner), problem in fitted.problems.items():
        row = fitted.rows[layer, owner]
        members = sorted(fitted.plan.layers[layer].merged[owner])
        assert row["tokens"] == len(problem.inputs)
        assert row["members"] == members


def test_fit_counts_experts_that_keep_the_average(fitted: Fitted) -> None:
    report, count = fitted.report, len(fitted.problems)
    averaged = sum(map(fitted.is_averaged, fitted.problems))
    assert (report["fitted"], report["averaged"]) == (count - averaged, averaged)
    assert (averaged > 0) == (fitted.tokens == 48)
    assert averaged < count
    assert json.loads((fitted.folder / "finetune.json").read_text()) == report


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
        assert one["members"] == other["members"]
        assert one["error_fitted"] == pytest.approx(other["error_fitted"], rel=1e-4)
