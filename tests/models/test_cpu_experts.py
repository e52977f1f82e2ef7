"""The experts function of the CPU against the eager forward of transformers: the very bits, or eager stays."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

from moe_lab.models import experts
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.mask import mask
from moe_lab.pruning.prune import prune
from moe_lab.statistics.forward import ForwardTap
from moe_lab.statistics.observe import Observer

EAGER = ("gpt_oss",)
"""Families with biases."""
SERVED = [name for name in tiny.ARCHITECTURES if name not in EAGER]
WIDTHS = ("moe_intermediate_size", "intermediate_size")
ALIGNED = 32


def build(name: str, **changes: Any) -> Any:
    model = tiny.build(name, **changes)
    experts.use_cpu_experts(model, moe_layers(model))
    return model


def aligned(name: str) -> Any:
    """A model whose experts have 32 channels, so that few tokens take the way for few tokens."""
    field = next(field for field in WIDTHS if field in tiny.ARCHITECTURES[name])
    return build(name, **{field: ALIGNED})


def implementation(model: Any) -> str:
    (layer, *_) = moe_layers(model)
    return str(layer.experts.config._experts_implementation)


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def generated(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of every new token, one decoding step each, with left padding."""
    padded = torch.nn.functional.pad(ids, (3, 0))
    mask = (padded != 0).long()
    out = model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.stack(out.logits)


@pytest.mark.parametrize("make", [build, aligned], ids=["unaligned", "aligned"])
@pytest.mark.parametrize("name", SERVED)
def test_every_shape_has_the_bits_of_the_eager_forward(name: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(name)
    assert implementation(model) == experts.CPU_EXPERTS
    used = []
    for way in ("_together", "_one_by_one"):
        original = getattr(experts, way)
        monkeypatch.setattr(experts, way, lambda *args, way=way, original=original: used.append(way) or original(*args))
    prefill, long, one = tiny.tokens(), tiny.tokens(6, 60), tiny.tokens(1, 1)
    assert long.numel() > experts.FEW > prefill.numel()
    found = [logits(model, input_ids=ids) for ids in (prefill, long, one)] + [generated(model, prefill)]
    assert set(used) == ({"_together", "_one_by_one"} if make is aligned else {"_one_by_one"})
    model.set_experts_implementation("eager")
    expected = [logits(model, input_ids=ids) for ids in (prefill, long, one)] + [generated(model, prefill)]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tokens", [(4, 24), (6, 60)], ids=["few", "many"])
@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3:grouped", "ernie4_5_moe"])
def test_masks_and_statistics_keep_their_bits(name: str, tokens: tuple[int, int]) -> None:
    model, ids = aligned(name), tiny.tokens(*tokens)
    plan = tiny.plan(model, 0.5)
    plain = logits(model, input_ids=ids)
    with Observer(model, ForwardTap):
        assert torch.equal(logits(model, input_ids=ids), plain)
    assert implementation(model) == experts.CPU_EXPERTS
    with mask(model, plan):
        masked = logits(model, input_ids=ids)
    pruned = prune(model, plan)
    assert implementation(pruned) == experts.CPU_EXPERTS
    assert torch.equal(logits(pruned, input_ids=ids), masked)
    for each in (model, pruned):
        each.set_experts_implementation("eager")
    assert torch.equal(logits(pruned, input_ids=ids), masked)
    assert torch.equal(logits(model, input_ids=ids), plain)


def test_two_threads_change_nothing() -> None:
    model, ids = aligned("olmoe"), tiny.tokens(8, 16)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = logits(model, input_ids=ids)
        model.set_experts_implementation("eager")
        assert torch.equal(found, logits(model, input_ids=ids))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", EAGER)
def test_experts_of_another_form_stay_eager(name: str) -> None:
    assert implementation(build(name)) == "eager"


def test_other_precisions_stay_eager() -> None:
    assert implementation(build("olmoe", dtype=torch.bfloat16)) == "eager"


def test_a_family_that_computes_otherwise_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("olmoe")
    layer = moe_layers(model)[0]
    original = layer.experts.forward
    monkeypatch.setattr(layer.experts, "forward", lambda hidden, index, gates: original(hidden * 1.0001, index, gates))
    experts.use_cpu_experts(model, moe_layers(model))
    assert implementation(model) == "eager"


def test_the_choice_is_not_written_to_checkpoints(tmp_path: Any) -> None:
    build("olmoe").save_pretrained(tmp_path)
    assert experts.CPU_EXPERTS not in (tmp_path / "config.json").read_text()
