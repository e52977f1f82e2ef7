"""Adapters of MoE blocks, and the settings of all recoveries."""

import copy
import dataclasses
import json
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch
from identities.plans import random_plan
from learning import rows, text
from safetensors.torch import load_file
from torch import nn

from moe_lab.config import AllocationConfig, RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import linears
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.selection import merge_experts
from moe_lab.recovery import check_merging, finetune
from moe_lab.recovery.apply import pruned, quantize, recovered
from moe_lab.recovery.dora import Dora, attach, merge, trainable
from moe_lab.recovery.finetune import answer_loss, rate_factor, rows_of_step, step_count, train

SHARED = tuple(f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down"))


def recovery(**changes: Any) -> RecoveryConfig:
    base = {"instructions": "tiny", "rank": 4, "router_rank": 2, "dropout": 0.0, "rows_per_step": 2}
    return RecoveryConfig(
        **{**base, "learning_rate": 1e-2, "router_learning_rate": 1e-3, **changes}
    )


def small() -> Any:
    """One layer of eight experts: enough for how training goes."""
    return tiny.build("olmoe", num_hidden_layers=1, num_experts=8)


def trained(
    model: Any, settings: RecoveryConfig, partial: Path, **changes: Any
) -> tuple[list[float], Any]:
    """Losses of a short training, and the layers with their adapters."""
    layers = attach(model, settings, seed=0)
    run = {"loss": answer_loss, "rows_at_once": 2, "seed": 0, **changes}
    return train(model, trainable(layers), rows(first=8), settings, partial=partial, **run), layers


def shaken(layers: Any) -> None:
    """Give adapters, which start as the identity, an effect."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for part in trainable(layers).values():
            for parameter in part.values():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(
    "name", [*tiny.ARCHITECTURES, "olmoe ragged", "olmoe constants", "olmoe merged"]
)
def test_adapters_start_as_nothing_and_merge_into_what_they_did(name: str) -> None:
    family, _, kind = name.partition(" ")
    original = tiny.build(family, dtype=torch.float64)
    ids = tiny.tokens()
    before = {key: value.clone() for key, value in original.state_dict().items()}
    model = pruned(original, random_plan(original, kind) if kind else None)
    there = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        plain = model(ids).logits
        layers = attach(model, recovery(), seed=0)
        identity = model(ids).logits
        shaken(layers)
        for module in (layers["experts"] | layers["shared_experts"]).values():
            module.eval()
        adapted = model(ids).logits
        changed = merge(model, layers)
        merged = model(ids).logits
    assert torch.allclose(identity, plain, atol=1e-10)
    assert float((adapted - plain).abs().max()) > 0.02
    assert torch.allclose(merged, adapted, atol=1e-10)
    after = model.state_dict()
    assert after.keys() == there.keys() and {type(module) for module in model.modules()} == {
        type(module) for module in pruned(model, None).modules()
    }
    assert {
        key for key, value in after.items() if not torch.equal(value, there[key])
    } == changed.keys()
    assert all(torch.equal(after[key], value) for key, value in changed.items())
    assert len(changed) == 3 * len(layers["experts"]) + len(list(linears(model, "shared_experts")))
    assert all(torch.equal(value, before[key]) for key, value in original.state_dict().items())


@pytest.mark.parametrize("training", [False, True])
def test_outputs_and_gradients_are_those_of_pefts_layer(training: bool) -> None:
    """With a dropout that drops the same numbers in both, and rows of a bias."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    plain = nn.Linear(24, 16).double()
    holder = nn.ModuleDict({"map": copy.deepcopy(plain)})
    adapter = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.4, target_modules=["map"], use_dora=True
    )
    theirs: Any = peft.inject_adapter_in_model(adapter, holder)["map"].double().train(training)
    ours = Dora(plain.weight, rank=4, scaling=2.0, dropout=0.4).train(training)
    parts = (theirs.lora_A, theirs.lora_B, theirs.lora_magnitude_vector)
    pairs = [
        (mine, part["default"].weight)
        for mine, part in zip((ours.a, ours.b, ours.magnitude), parts, strict=True)
    ]
    with torch.no_grad():
        for mine, other in pairs:
            other.copy_(torch.randn(other.shape, dtype=torch.float64))
            mine.copy_(other)
    rows = torch.randn(5, 7, 24, dtype=torch.float64)
    results = []
    for compute in (lambda x: ours(x, plain.weight, plain.bias), theirs):
        torch.manual_seed(3)
        x = rows.clone().requires_grad_()
        y = compute(x)
        (y * torch.arange(16)).square().sum().backward()
        results.append((y.detach(), x.grad))
    for mine, other in [
        *zip(*results, strict=True),
        *((mine.grad, other.grad) for mine, other in pairs),
    ]:
        assert mine is not None and float((mine - other).abs().max()) < 1e-10 * float(
            other.abs().max()
        )
    theirs.merge()
    with torch.no_grad():
        assert (
            float((ours.weight(plain.weight) - theirs.get_base_layer().weight).abs().max()) < 1e-10
        )


def test_a_row_of_zeros_stays() -> None:
    weight = torch.zeros(2, 3)
    weight[0] = 1
    adapter = Dora(weight, rank=1, scaling=1.0)
    assert torch.equal(adapter.weight(weight), weight)
    assert torch.equal(adapter(torch.ones(1, 3), weight), torch.tensor([[3.0, 0.0]]))


def test_training_lowers_the_loss_and_changes_the_moe_blocks_alone(tmp_path: Path) -> None:
    """DeepSeek-V3: a dense layer, then routed and shared experts; a shared expert's maps have the
    experts' rank."""
    original = tiny.build("deepseek_v3")
    plan = tiny.plan(original, 0.25)
    model = pruned(original, plan)
    before = copy.deepcopy(original.state_dict())
    there = {key: value.clone() for key, value in model.state_dict().items()}
    losses, layers = trained(model, recovery(epochs=8), tmp_path)
    assert len(losses) == 24 and sum(losses[-3:]) < 0.6 * sum(losses[:3])
    parameters = [parameter for part in trainable(layers).values() for parameter in part.values()]
    assert {id(parameter) for parameter in parameters} == {
        id(p) for p in model.parameters() if p.requires_grad
    }
    shared = [
        tensor
        for name, tensor in trainable(layers)["shared_experts"].items()
        if name.endswith(".a")
    ]
    assert len(shared) == 2 * len(SHARED) and {len(tensor) for tensor in shared} == {4}
    changed = merge(model, layers)
    parts = ("gate.weight", "experts.gate_up_proj", "experts.down_proj", *SHARED)
    assert changed.keys() == {
        f"model.layers.{layer}.mlp.{part}" for layer in (1, 2) for part in parts
    }
    assert {
        key for key, value in model.state_dict().items() if not torch.equal(value, there[key])
    } == changed.keys()
    assert all(torch.equal(original.state_dict()[name], value) for name, value in before.items()), (
        "it shares tensors"
    )


def test_routers_have_a_rank_and_a_rate_of_their_own(tmp_path: Path) -> None:
    # the first step of AdamW moves every weight that has a gradient by the learning rate
    settings = recovery(epochs=0.1, learning_rate=1e-3, router_learning_rate=1e-5)
    model = small()
    start = attach(copy.deepcopy(model), settings, seed=0)
    _, layers = trained(model, settings, tmp_path)
    assert not trainable(attach(small(), recovery(router_rank=0), seed=0))["routers"]
    for part, rate in (("experts", 1e-3), ("routers", 1e-5)):
        there = trainable(start)[part]
        now = trainable(layers)[part]
        moved = max(float((now[name] - there[name]).detach().abs().max()) for name in now)
        assert moved == pytest.approx(rate, rel=0.02), part
        ranks = {len(tensor) for name, tensor in now.items() if name.endswith(".a")}
        assert ranks == {4 if part == "experts" else 2}


@pytest.mark.parametrize("change", ["settings", "seed", "damage"])
def test_another_training_is_not_gone_on_from(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "SAVE_EVERY", 1)
    trained(small(), recovery(epochs=1), tmp_path)
    if change == "damage":
        next(tmp_path.iterdir()).write_bytes(b"no safetensors")
    settings = recovery(epochs=1, dropout=0.1 if change == "settings" else 0.0)
    calls = tiny.count_calls(monkeypatch, finetune, "_backward")
    trained(small(), settings, tmp_path, seed=int(change == "seed"))
    assert len(calls) == 3


def test_rows_at_once_change_rounding_alone(tmp_path: Path) -> None:
    settings = recovery(rows_per_step=6, epochs=2)
    one, six = (trained(small(), settings, tmp_path, rows_at_once=n)[0] for n in (1, 6))
    assert one == pytest.approx(six, abs=1e-4)


def test_rates_rise_and_fall_and_every_pass_reads_every_row_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finetune, "WARMUP", 0.2)
    cosine = [rate_factor(step, 10) for step in range(10)]
    assert (
        cosine[:3] == [0.5, 1.0, 1.0] and cosine[6] == pytest.approx(0.5) and 0 < cosine[9] < 0.05
    )
    assert [step_count(recovery(epochs=epochs), 5) for epochs in (2, 0.1, 0.9)] == [5, 1, 3]
    read = [row for step in range(10) for row in rows_of_step(step, 4, 20, seed=5)]
    assert sorted(read[:20]) == sorted(read[20:]) == list(range(20))
    assert read[:20] != read[20:] != list(range(20))
    assert rows_of_step(7, 4, 20, seed=5) == read[28:32] != rows_of_step(7, 4, 20, seed=6)


# ---- the whole step


def test_a_model_is_pruned_tuned_and_stored_in_this_order(
    folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny.build("olmoe", num_hidden_layers=2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plan = tiny.plan(model, 0.5)
    out = tmp_path / "out"
    settings = RecoveryConfig(
        instructions="set", rank=2, router_rank=1, learning_rate=1e-2, rows_per_step=4
    )
    run = {"partial": tmp_path / "partial", "seed": 1}
    finetune.finetune(model, tokenizer, plan, settings, text(folder, "answers"), out=out, **run)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    report = json.loads((out / "finetune.json").read_text())
    assert report["steps"] == len(report["loss"]) == 4 and report["rows"] == 8
    assert report["answer_tokens"] == 8 * 4
    # per map: A (rank, in), B (out, rank), magnitude (out,); gate and up are 32 -> 24, down is 24
    # -> 32
    of_experts = 2 * 8 * (2 * (2 * 32 + 24 * 2 + 24) + (2 * 24 + 32 * 2 + 32))
    of_routers = 2 * (32 + 8 + 8)
    assert report["trained_parameters"] == {
        "experts": of_experts,
        "routers": of_routers,
        "shared_experts": 0,
    }
    again = recovered(model, plan, bits=16, modules=(), tuned=out)
    expected = tiny.logits(again)
    assert not torch.equal(tiny.logits(pruned(model, plan)), expected)
    stored = tiny.logits(recovered(model, plan, bits=4, modules=["experts"], tuned=out))
    quantize(again, ["experts"])
    assert torch.equal(stored, tiny.logits(again)) and not torch.equal(stored, expected)
    names = load_file(out / "tuned.safetensors").keys()
    assert len(names) == 6 and all(".mlp." in name for name in names)


def test_what_cannot_be_learnt_is_said(tmp_path: Path) -> None:
    model = small()
    model.lm_head.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"step 1\b.* nan.* recovery\.learning_rate"):
        trained(model, recovery(), tmp_path)


# ---- settings


def test_identity_counts_a_text_by_its_use_and_not_the_bits_it_is_stored_in_afterwards() -> None:
    learnt, distilled, fitted = (
        RecoveryConfig(**{use: "c4"}) for use in ("instructions", "distill", "fit")
    )
    assert not any(
        one.identity == other.identity
        for one, other in combinations((learnt, distilled, fitted), 2)
    )
    for use in (learnt, distilled, fitted):
        stored = dataclasses.replace(use, bits=4, modules=["attention"], name="other")
        assert stored.identity == use.identity


@pytest.mark.parametrize(
    ("allocation", "ratio", "sentence"),
    [
        ({"replacement": "hc_smoe"}, 0.5, None),
        ({"replacement": "none"}, 0.5, "replacement=none .* m_smoe"),
        ({"replacement": "mean_output"}, 0.5, "replacement=mean_output "),
        ({"replacement": "hc_smoe"}, 0.0, "ratio=0 "),
        ({"path": "merging.json"}, 0.5, None),
        ({"path": "dropping.json"}, 0.5, "dropping.json merges none"),
        ({"path": "schedule.json"}, 0.5, "replacement=none "),
        ({"path": "schedule.json", "replacement": "m_smoe"}, 0.5, None),
    ],
)
def test_a_fit_needs_merging(
    tmp_path: Path, allocation: dict[str, Any], ratio: float, sentence: str | None
) -> None:
    Plan({0: LayerPlan(2, (0, 1), numpy.ones((2, 4), dtype=bool))}).save(tmp_path / "dropping.json")
    Plan({0: merge_experts({0: {0: 0.5, 1: 0.5}}, 4)}).save(tmp_path / "merging.json")
    (tmp_path / "schedule.json").write_text('{"0": 1}')
    if "path" in allocation:
        allocation = {**allocation, "name": "list", "path": str(tmp_path / allocation["path"])}
    given = (AllocationConfig(**allocation), ratio)
    check_merging(RecoveryConfig(), *given)
    with nullcontext() if sentence is None else pytest.raises(UserError, match=sentence):
        check_merging(RecoveryConfig(fit="c4"), *given)
