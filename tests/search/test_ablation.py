from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import naive
import pytest
import tiny
import torch
from torch.nn.functional import cross_entropy

from moe_lab.errors import UserError
from moe_lab.models import load as device
from moe_lab.models.discover import moe_layers
from moe_lab.search import ablation
from moe_lab.search.ablation import loss_rises
from moe_lab.statistics import Statistics
from moe_lab.statistics.observe import CHECKPOINT, Batch


def ablate(model: Any, batches: list[Batch], **settings: Any) -> Statistics:
    return loss_rises(model, "ablation", batches, **settings)


SMALL: dict[str, dict[str, int]] = {
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 2},
    "qwen3_next": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {"n_routed_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v3:grouped": {"n_routed_experts": 8},
    "ernie4_5_moe": {"moe_num_experts": 5, "moe_k": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "phimoe": {"num_local_experts": 4},
    "jamba": {"num_experts": 4},
    "lfm2_moe": {"num_experts": 5, "num_experts_per_tok": 2},
    "afmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


@torch.no_grad()
def naive_loss(model: Any, ids: torch.Tensor, valid: torch.Tensor) -> tuple[float, int]:
    """Summed loss and number of predicted tokens, row by row, in fp64."""
    total, count = 0.0, 0
    logits = model(input_ids=ids, attention_mask=valid.long(), use_cache=False).logits.double()
    for row, tokens, real in zip(logits, ids, valid, strict=True):
        for at in range(len(tokens) - 1):
            if real[at] and real[at + 1]:
                total += float(cross_entropy(row[at], tokens[at + 1]))
                count += 1
    return total, count


@torch.no_grad()
def naive_rises(model: Any, ids: torch.Tensor, valid: torch.Tensor) -> dict[int, tuple[list[float], float]]:
    """Layer -> (rise of the loss without each of its experts, rise with the output of all of them times 0.9).

    Down projections are changed, in an fp64 copy, and the whole model reads the whole batch.
    """
    wide = copy.deepcopy(model).double()
    whole, count = naive_loss(wide, ids, valid)
    found = {}
    for layer in moe_layers(wide):
        parts = [tensor for name, tensor in layer.experts.named_parameters() if name.startswith("down_proj")]
        originals = [part.clone() for part in parts]

        def rise(at: int | slice, factor: float, parts: Any = parts, originals: Any = originals) -> float:
            for part in parts:
                part[at] *= factor
            changed = naive_loss(wide, ids, valid)[0]
            for part, original in zip(parts, originals, strict=True):
                part.copy_(original)
            return (changed - whole) / count

        found[layer.index] = [rise(expert, 0.0) for expert in range(layer.n_experts)], rise(slice(None), 0.9)
    return found


@pytest.mark.parametrize("name", SMALL)
def test_rises_are_those_of_changed_weights(name: str) -> None:
    model = tiny.build(name, **SMALL[name])
    ids, valid = (part[:2, 2:14] for part in naive.batch())
    before = dict(model.named_parameters())
    without = ablate(model, [(ids, valid)], fingerprint={}).layers
    scaled = loss_rises(model, "scaling", [(ids[:1], valid[:1]), (ids[1:], valid[1:])], fingerprint={})
    expected = naive_rises(model, ids, valid)
    assert scaled.header["kind"] == "scaling" and scaled.layers.keys() == expected.keys() == without.keys()
    for index, (of_experts, of_layer) in expected.items():
        assert {without[index]["ablation"].dtype, scaled.layers[index]["scaling"].dtype} == {torch.float64}
        assert without[index]["ablation"].tolist() == pytest.approx(of_experts, abs=3e-6), index
        assert max(map(abs, of_experts)) > 1e-3
        assert scaled.layers[index]["scaling"].tolist() == pytest.approx(of_layer, abs=3e-6), index
    assert max(abs(of_layer) for _, of_layer in expected.values()) > 1e-4
    assert all(tensor is before[key] for key, tensor in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_parts_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row at a time and one expert at a time, or all at once, in batches of different lengths."""
    model = tiny.build("mixtral")
    ids, valid = naive.batch()
    batches = [(ids, valid), (ids[:1, :9], torch.ones(1, 9, dtype=torch.bool))]
    together = ablate(model, batches, fingerprint={}).layers
    monkeypatch.setattr(device, "PASS_TOKENS", 1)
    alone = ablate(model, batches, fingerprint={}).layers
    monkeypatch.setattr(device, "PASS_TOKENS", 4096)
    monkeypatch.setattr(device, "LOGITS", 4 * tiny.VOCABULARY * 50)
    few = ablate(model, batches, fingerprint={}).layers
    for index, named in together.items():
        assert torch.allclose(named["ablation"], alone[index]["ablation"], atol=2e-6)
        assert torch.allclose(named["ablation"], few[index]["ablation"], atol=2e-6)


def test_layers_before_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("mixtral", num_hidden_layers=4)
    monkeypatch.setattr(device, "PASS_TOKENS", 1)
    run: list[int] = []
    for layer in moe_layers(model):
        layer.block.register_forward_pre_hook(lambda module, given, at=layer.index: run.append(at))
    ids = tiny.tokens(1, 96)
    ablate(model, [(ids, torch.ones_like(ids, dtype=torch.bool))], fingerprint={})
    assert [run.count(index) for index in range(4)] == [1 + 8 * (index + 1) for index in range(4)]


def test_an_expert_without_tokens_makes_no_difference() -> None:
    model = tiny.build("olmoe")
    ids, valid = naive.batch()
    found = ablate(model, [(ids[:1, 10:13], valid[:1, 10:13])], fingerprint={}).layers
    assert all((named["ablation"] == 0).sum() >= 16 - 3 * 4 for named in found.values())


def test_a_killed_pass_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("mixtral")
    ids, valid = naive.batch()
    batches = [(ids[:2], valid[:2]), (ids[2:], valid[2:])]
    whole = ablate(model, batches, fingerprint={"model": 1})

    with monkeypatch.context() as patch, pytest.raises(tiny.Killed):
        tiny.count_calls(patch, ablation, "save_checkpoint", kill_at=5)
        ablate(model, batches, fingerprint={"model": 1}, out=tmp_path)
    calls = tiny.count_calls(monkeypatch, ablation, "save_checkpoint")
    rest = ablate(model, batches, fingerprint={"model": 1}, out=tmp_path)
    assert len(calls) == 2
    assert rest.header == whole.header
    assert all(torch.equal(rest.layers[at]["ablation"], whole.layers[at]["ablation"]) for at in whole.layers)
    ablate(model, batches, fingerprint={"model": 2}, out=tmp_path)
    assert len(calls) == 8
    (tmp_path / CHECKPOINT).write_bytes(b"damaged")
    ablate(model, batches, fingerprint={"model": 2}, out=tmp_path)
    assert len(calls) == 14
    rest.save(tmp_path / "statistics.safetensors")
    assert Statistics.load(tmp_path / "statistics.safetensors").header == rest.header


def test_a_loss_that_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("mixtral")
    ids, valid = naive.batch()
    broken = torch.tensor([0.0, 0.0, 0.0, float("nan")]).repeat(2)
    monkeypatch.setitem(ablation.KINDS, "ablation", lambda self, place: broken)
    with pytest.raises(UserError, match="NaN or Inf in layer 0, expert 3: ablation of the changed loss"):
        ablate(model, [(ids, valid)], fingerprint={})
    moe_layers(model)[2].experts.down_proj[3] = float("inf")  # type: ignore[operator, index]
    with pytest.raises(UserError, match="loss of the unpruned model is NaN or infinite"):
        ablate(model, [(ids, valid)], fingerprint={})


def test_text_without_anything_to_predict_is_refused() -> None:
    model = tiny.build("mixtral")
    with pytest.raises(UserError, match="no token that follows another"):
        ablate(model, [(torch.full((2, 1), 5), torch.ones(2, 1, dtype=torch.bool))], fingerprint={})
    with pytest.raises(UserError, match="no batches"):
        ablate(model, [], fingerprint={})
