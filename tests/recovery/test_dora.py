"""Adapters of MoE blocks, and the settings of all recoveries."""

import copy
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import naive
import numpy
import pytest
import tiny
import torch
from identities.plans import random_plan
from safetensors.torch import load_file
from second_device import SecondDevice, on_device
from torch import nn
from training_data import rows, text

from moe_lab.config import AllocationConfig, RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import linear_modules
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.pruning.selection import merge_experts
from moe_lab.recovery import check_merging, finetune
from moe_lab.recovery.apply import quantize, recovered
from moe_lab.recovery.dora import Dora, attach, merge, trainable
from moe_lab.recovery.finetune import answer_loss, rate_factor, rows_of_step, step_count, train
from moe_lab.statistics.gradients import differentiable
from moe_lab.statistics.gradients import forward_and_backward as forward_and_backward_of

SHARED = tuple(f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down"))


def recovery(**changes: Any) -> RecoveryConfig:
    fields = {
        "instructions": "tiny",
        "rank": 4,
        "router_rank": 2,
        "dropout": 0.0,
        "rows_per_step": 2,
        "learning_rate": 1e-2,
        "router_learning_rate": 1e-3,
    }
    return RecoveryConfig(**{**fields, **changes})


def small() -> Any:
    """One layer of eight experts: enough for how training goes."""
    return tiny.build("olmoe", num_hidden_layers=1, num_experts=8)


def trained(
    model: Any, settings: RecoveryConfig, partial: Path, layers: Any = None, seed: int = 0
) -> tuple[list[float], Any]:
    """Losses of a short training, and the layers with their adapters, new ones if none are
    given."""
    layers = layers or attach(model, settings, seed=0)
    run: dict[str, Any] = {"loss": answer_loss, "rows_at_once": 2, "seed": seed}
    parameters = trainable(layers)
    losses = train(model, parameters, rows(first_learnt=8), settings, partial=partial, **run)
    return losses, layers


def shake(layers: Any) -> None:
    """Give adapters, which start as the identity, an effect."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for part in trainable(layers).values():
            for parameter in part.values():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(
    "name",
    [*tiny.one_of_each(tiny.structure), "olmoe ragged", "olmoe constants", "olmoe merged"],
)
def test_merged_adapters_give_the_same_logits(name: str) -> None:
    """New adapters change nothing. Merging restores the modules, returns the changed tensors, and
    leaves the original model."""
    family, _, kind = name.partition(" ")
    original = tiny.build(family, dtype=torch.float64)
    original_state = tiny.cloned_state(original)
    model = prune(original, random_plan(original, kind) if kind else tiny.plan(original, 0.0))
    pruned_state = tiny.cloned_state(model)
    modules = set(map(type, model.modules()))
    plain = tiny.logits(model)
    layers = attach(model, recovery(), seed=0)
    assert torch.allclose(tiny.logits(model), plain, atol=1e-10)
    shake(layers)
    for module in (layers["experts"] | layers["shared_experts"]).values():
        module.eval()
    adapted = tiny.logits(model)
    assert float((adapted - plain).abs().max()) > 0.02
    with torch.no_grad():
        changed = merge(model, layers)
    assert torch.allclose(tiny.logits(model), adapted, atol=1e-10)
    state = model.state_dict()
    assert state.keys() == pruned_state.keys()
    assert set(map(type, model.modules())) == modules
    assert tiny.differing(state, pruned_state) == changed.keys()
    assert not tiny.differing(changed, state)
    shared = len(list(linear_modules(model, "shared_experts")))
    assert len(changed) == 3 * len(layers["experts"]) + shared
    assert not tiny.differing(original.state_dict(), original_state)


def forward_and_backward(compute: Any, rows: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The output, and the gradient of the input of a sum of its weighted squares."""
    torch.manual_seed(3)  # dropouts drop the same numbers
    x = rows.clone().requires_grad_()
    y = compute(x)
    (y * torch.arange(16)).square().sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("is_training", [False, True])
def test_outputs_gradients_and_merged_weights_are_those_of_peft(is_training: bool) -> None:
    """Of a linear map with a bias, and adapters of equal weights."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    plain = nn.Linear(24, 16).double()
    holder = nn.ModuleDict({"map": copy.deepcopy(plain)})
    adapter = peft.LoraConfig(
        r=4, lora_alpha=16, lora_dropout=0.4, target_modules=["map"], use_dora=True
    )
    theirs: Any = peft.inject_adapter_in_model(adapter, holder)["map"].double()
    theirs.train(is_training)
    ours = Dora(plain.weight, rank=4, dropout=0.4).train(is_training)
    parts = (theirs.lora_A, theirs.lora_B, theirs.lora_magnitude_vector)
    peft_weights = [part["default"].weight for part in parts]
    pairs = list(zip((ours.a, ours.b, ours.magnitude), peft_weights, strict=True))
    with torch.no_grad():
        for weight, peft_weight in pairs:
            peft_weight.copy_(torch.randn(peft_weight.shape, dtype=torch.float64))
            weight.copy_(peft_weight)
    rows = torch.randn(5, 7, 24, dtype=torch.float64)
    results = forward_and_backward(lambda x: ours(x, plain.weight, plain.bias), rows)
    expected = forward_and_backward(theirs, rows)
    gradients = [(weight.grad, peft_weight.grad) for weight, peft_weight in pairs]
    for mine, other in [*zip(results, expected, strict=True), *gradients]:
        assert mine is not None
        assert float((mine - other).abs().max()) < 1e-10 * float(other.abs().max())
    theirs.merge()
    with torch.no_grad():
        merged = ours.weight(plain.weight)
        assert float((merged - theirs.get_base_layer().weight).abs().max()) < 1e-10


def test_dora_keeps_a_row_of_zeros() -> None:
    weight = torch.zeros(2, 3)
    weight[0] = 1
    adapter = Dora(weight, rank=1)
    assert torch.equal(adapter.weight(weight), weight)
    assert torch.equal(adapter(torch.ones(1, 3), weight), torch.tensor([[3.0, 0.0]]))


def test_training_lowers_the_loss_and_changes_moe_blocks_only(tmp_path: Path) -> None:
    """Of DeepSeek-V3: a dense layer, then routed and shared experts. Only adapters are trained."""
    original = tiny.build("deepseek_v3")
    model = prune(original, tiny.plan(original, 0.25))
    losses, layers = trained(model, recovery(epochs=8), tmp_path)
    assert len(losses) == 24
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])
    parameters = trainable(layers)
    adapters = {id(tensor) for part in parameters.values() for tensor in part.values()}
    assert adapters == {id(tensor) for tensor in model.parameters() if tensor.requires_grad}
    shared = [tensor for name, tensor in parameters["shared_experts"].items() if name[-2:] == ".a"]
    assert [len(tensor) for tensor in shared] == [4] * 2 * len(SHARED), "the rank of experts"
    changed = ("gate.weight", "experts.gate_up_proj", "experts.down_proj", *SHARED)
    expected = {f"model.layers.{layer}.mlp.{part}" for layer in (1, 2) for part in changed}
    assert set(merge(model, layers)) == expected


def test_routers_have_a_rank_and_a_rate_of_their_own(tmp_path: Path) -> None:
    # the first step of AdamW moves every weight that has a gradient by the learning rate
    settings = recovery(epochs=0.1, learning_rate=1e-3, router_learning_rate=1e-5)
    model = small()
    initial_layers = attach(copy.deepcopy(model), settings, seed=0)
    _, layers = trained(model, settings, tmp_path)
    assert not trainable(attach(small(), recovery(router_rank=0), seed=0))["routers"]
    for part, rate in (("experts", 1e-3), ("routers", 1e-5)):
        initial = trainable(initial_layers)[part]
        final = trainable(layers)[part]
        steps = [float((final[name] - initial[name]).detach().abs().max()) for name in final]
        assert max(steps) == pytest.approx(rate, rel=0.02), part
        ranks = {tensor.shape[1] for name, tensor in final.items() if name.endswith(".b")}
        assert ranks == {4 if part == "experts" else 2}


@pytest.mark.parametrize("change", ["parameters", "damage"])
def test_checkpoint_that_does_not_fit_is_not_resumed(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "SAVE_EVERY", 1)
    trained(small(), recovery(epochs=1), tmp_path)
    if change == "damage":
        next(tmp_path.iterdir()).write_bytes(b"no safetensors")
    settings = recovery(epochs=1, router_rank=0 if change == "parameters" else 2)
    calls = tiny.count_calls(monkeypatch, finetune, "_backward")
    trained(small(), settings, tmp_path)
    assert len(calls) == 3


def test_learning_rate_rises_and_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune, "WARMUP", 0.2)
    cosine = [rate_factor(step, 10) for step in range(10)]
    assert cosine[:3] == [0.5, 1.0, 1.0]
    assert cosine[6] == pytest.approx(0.5)
    assert 0 < cosine[9] < 0.05


def test_steps_are_those_of_the_epochs() -> None:
    assert [step_count(recovery(epochs=epochs), 5) for epochs in (2, 0.1, 0.9)] == [5, 1, 3]


def test_every_epoch_reads_every_row_once_in_its_own_order() -> None:
    read = [row for step in range(10) for row in rows_of_step(step, 4, 20, seed=5)]
    first = read[:20]
    second = read[20:]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second != list(range(20))
    assert rows_of_step(7, 4, 20, seed=5) == read[28:32]
    assert rows_of_step(7, 4, 20, seed=6) != read[28:32]


# ---- the whole step


def test_finetuning_tunes_a_pruned_model_that_is_then_quantised(
    folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """It reports steps, tokens and parameters, writes tensors of MoE blocks, and leaves the model
    as it was."""
    model = tiny.build("olmoe", num_hidden_layers=2)
    original_state = tiny.cloned_state(model)
    plan = tiny.plan(model, 0.5)
    settings = RecoveryConfig(
        instructions="set", rank=2, router_rank=1, learning_rate=1e-2, rows_per_step=4
    )
    out = tmp_path / "out"
    answers = text(folder, "answers")
    partial = tmp_path / "partial"
    finetune.finetune(model, tokenizer, plan, settings, answers, seed=1, out=out, partial=partial)
    assert not tiny.differing(model.state_dict(), original_state)
    report = json.loads((out / "finetune.json").read_text())
    assert len(report["loss"]) == 4
    assert report["rows"] == 8
    assert report["tokens"] == 8 * 4
    # per map: A (rank, in), B (out, rank), magnitude (out,); gate and up are 32 -> 24, down is 24
    # -> 32
    of_experts = 2 * 8 * (2 * (2 * 32 + 24 * 2 + 24) + (2 * 24 + 32 * 2 + 32))
    of_routers = 2 * (32 + 8 + 8)
    assert report["trained_parameters"] == {
        "experts": of_experts,
        "routers": of_routers,
        "shared_experts": 0,
    }
    names = load_file(out / "tuned.safetensors").keys()
    assert len(names) == 6
    assert all(".mlp." in name for name in names)
    tuned = recovered(model, plan, modules=(), tuned=out)
    tuned_logits = tiny.logits(tuned)
    assert not torch.equal(tiny.logits(prune(model, plan)), tuned_logits)
    nf4_logits = tiny.logits(recovered(model, plan, modules=["experts"], tuned=out))
    quantize(tuned, ["experts"])
    assert torch.equal(nf4_logits, tiny.logits(tuned))
    assert not torch.equal(nf4_logits, tuned_logits)


def test_loss_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    model = small()
    model.lm_head.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"step 1\b.* nan.* recovery\.learning_rate"):
        trained(model, recovery(), tmp_path)


# ---- settings


def test_identity_has_the_use_of_a_text() -> None:
    uses = [RecoveryConfig(**{use: "c4"}) for use in ("instructions", "distill", "fit")]
    assert len({str(recovery.identity) for recovery in uses}) == 3


def test_identity_lacks_name_and_bits() -> None:
    stored = recovery(modules=["attention"], name="other")
    assert stored.identity == recovery().identity


@pytest.mark.parametrize(
    ("allocation", "ratio", "sentence"),
    [
        ({"replacement": "hc_smoe"}, 0.5, None),
        ({"replacement": "mean_output"}, 0.5, "replacement=mean_output "),
        ({"replacement": "hc_smoe"}, 0.0, "ratio=0 "),
        ({"path": "merging.json"}, 0.5, None),
        ({"path": "dropping.json"}, 0.5, "dropping.json merges none"),
        ({"path": "schedule.json"}, 0.5, "replacement=none "),
        ({"path": "schedule.json", "replacement": "m_smoe"}, 0.5, None),
    ],
)
def test_fit_needs_merged_experts(
    tmp_path: Path, allocation: dict[str, Any], ratio: float, sentence: str | None
) -> None:
    Plan({0: LayerPlan(2, (0, 1), numpy.ones((2, 4), dtype=bool))}).save(tmp_path / "dropping.json")
    Plan({0: merge_experts({0: {0: 0.5, 1: 0.5}}, 4)}).save(tmp_path / "merging.json")
    (tmp_path / "schedule.json").write_text('{"0": 1}')
    if "path" in allocation:
        allocation = {**allocation, "name": "list", "path": str(tmp_path / allocation["path"])}
    arguments = (AllocationConfig(**allocation), ratio)
    check_merging(RecoveryConfig(), *arguments)
    with nullcontext() if sentence is None else pytest.raises(UserError, match=sentence):
        check_merging(RecoveryConfig(fit="c4"), *arguments)


def test_a_step_returns_the_mean_loss_of_learnt_tokens() -> None:
    """The loss of each learnt token is twice the only parameter, which is 1."""
    parameter = nn.Parameter(torch.ones(()))
    model = nn.Module()
    model.device = torch.device("cpu")
    learnt = torch.tensor([False, True, True])
    row = (torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool), learnt)

    def loss(_: Any, ids: torch.Tensor, valid: torch.Tensor, learnt: torch.Tensor) -> torch.Tensor:
        return 2 * parameter * learnt.sum()

    assert finetune._backward(model, [row] * 3, loss, rows_at_once=2) == pytest.approx(2.0)
    assert parameter.grad is not None
    assert parameter.grad.item() == pytest.approx(2.0)


KINDS = ["olmoe", "gpt_oss", "olmoe ragged", "olmoe constants", "olmoe merged"]


@pytest.fixture(params=KINDS)
def original(request: pytest.FixtureRequest) -> Any:
    family, _, kind = request.param.partition(" ")
    model = tiny.build(family, num_hidden_layers=1, layer_types=["full_attention"])
    plan = random_plan(model, kind, share=0.5) if kind else tiny.plan(model, 0.0)
    return prune(model, plan)


def both(original: Any, settings: RecoveryConfig) -> Iterator[tuple[Any, Any]]:
    """A copy on the CPU and one on the device, each with its adapters, which are equal."""
    models = copy.deepcopy(original), on_device(original)
    layers = [attach(model, settings, seed=0) for model in models]
    shake(layers[0])
    for part in ("routers", "shared_experts"):
        parameters = (trainable(of_model)[part].values() for of_model in layers)
        for ours, theirs in zip(*parameters, strict=True):
            theirs.data.copy_(ours.data)
    for ours, theirs in zip(*(of_model["experts"].values() for of_model in layers), strict=True):
        for tensor, view in pairs(ours, theirs, lambda parameter: parameter.data):
            view.copy_(tensor)
    return zip(models, layers, strict=True)


def pairs(ours: Any, theirs: Any, part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of each map in each tensor of the adapters of one expert after the other, and their
    place in those of all experts. `part`: parameter -> its values or its gradient."""
    for expert, adapters in enumerate(ours.adapters):
        for name, adapter in adapters.items():
            grouped = theirs.adapters[0][name]
            maps = grouped.blocks.shape[1]
            for tensor, parameter in adapter.named_parameters():
                tensors = part(parameter), part(getattr(grouped, tensor))[expert]
                for number in range(maps):
                    if tensor == "a" or ours.layer.experts.is_concatenated:
                        one, of_all = (each.chunk(maps)[number] for each in tensors)
                    else:
                        one, of_all = (each[number::maps] for each in tensors)
                    yield one, of_all[tuple(map(slice, one.shape))]


def gradient_or_zeros(parameter: torch.Tensor) -> torch.Tensor:
    """Of an expert without tokens, zeros."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def test_gradients_of_all_experts_at_once_are_those_of_one_after_the_other(original: Any) -> None:
    with SecondDevice():
        layers = []
        for model, of_model in both(original, recovery(rank=3)):
            tiny.logits.__wrapped__(model).square().sum().backward()  # type: ignore[attr-defined]
            layers.append(of_model["experts"].values())
        for ours, theirs in zip(*layers, strict=True):
            for expected, gradient in pairs(ours, theirs, gradient_or_zeros):
                error = (gradient.cpu() - expected).abs().max()
                assert error <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", [None, "ragged"])
def test_a_training_on_another_device_has_the_losses_of_the_cpu(
    kind: str | None, tmp_path: Path
) -> None:
    """Of experts that all have tokens in each step: AdamW moves the others on the device only."""
    plan = random_plan(small(), kind, share=0.5) if kind else tiny.plan(small(), 0.0)
    model = prune(small(), plan)
    settings = recovery(rank=3)
    results = []
    with SecondDevice():
        for copied, layers in both(model, settings):
            losses, _ = trained(copied, settings, tmp_path / copied.device.type, layers)
            merge(copied, layers)
            results.append((losses, tiny.logits(copied).cpu()))
    (expected, expected_logits), (actual, logits) = results
    assert len(set(expected)) > 1
    assert actual == pytest.approx(expected, rel=1e-4)
    assert (logits - expected_logits).abs().max() < 0.01 * expected_logits.abs().max()


def test_a_rank_is_not_rounded_up(tmp_path: Path) -> None:
    with SecondDevice():
        _, layers = trained(on_device(small()), recovery(rank=3), tmp_path)
        (experts,) = layers["experts"].values()
        for adapter in experts.adapters[0].values():
            assert adapter.b.shape[-1] == 8
            assert adapter.b[:, :, :3].cpu().all(2).any()
            assert not adapter.b[:, :, 3:].cpu().any()


def test_adapters_make_a_device_wait_as_often_as_the_plain_model(original: Any) -> None:
    ids, valid = naive.batch()
    with SecondDevice() as device:
        plain = on_device(original)
        adapted = on_device(original).train()
        attach(adapted, recovery(dropout=0.1), seed=0)
        waits = []
        for model in (plain, adapted):
            with differentiable(model), torch.enable_grad():
                forward_and_backward_of(model, ids, valid)
                device.waits.clear()
                forward_and_backward_of(model, ids, valid)
                waits.append(device.waits.total())
                assert not [line for line in device.waits if "exported_code" in line]
    assert waits[1] == waits[0], device.waits
