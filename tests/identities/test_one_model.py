"""A plan gives one model, whether it masks a model, prunes it, or is exported and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from identities.plans import KINDS, random_plan

from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.cost import size
from moe_lab.pruning.export import export
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune

WAYS = [(name, kind, way) for name in tiny.ARCHITECTURES for kind, ways in KINDS.items() for way in ways]


def answers(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and tokens that are written with a cache."""
    with torch.no_grad():
        logits = model.eval()(input_ids=tiny.tokens()).logits
    return logits, model.generate(tiny.tokens(2, 5), max_new_tokens=5, do_sample=False, eos_token_id=None)


@pytest.mark.parametrize(("name", "kind", "way"), WAYS)
def test_masked_pruned_and_exported_are_one_model(name: str, kind: str, way: str, tmp_path: Path) -> None:
    """To the bit; but masked channels are multiplied in another order than those that are left."""
    model = tiny.save(name, tmp_path / "model", shard="60KB")
    plan, before = random_plan(model, way), answers(model)
    if kind != "experts" and moe_layers(model)[0].family.unfit:
        for refused in (lambda: mask(model, plan).__enter__(), lambda: prune(model, plan)):
            with pytest.raises(UserError, match="cannot be removed"):
                refused()
        with pytest.raises(UserError, match="cannot be removed"):
            export(tmp_path / "model", plan, tmp_path / "out")
        return
    with mask(model, plan):
        masked = answers(model)
    pruned = prune(model, plan)
    found = answers(pruned)
    assert not torch.equal(masked[0], before[0]) or way == "uneven"
    if kind == "experts":
        assert torch.equal(found[0], masked[0])
    assert (found[0] - masked[0]).abs().max() <= 1e-5 and torch.equal(found[1], masked[1])
    out = export(tmp_path / "model", plan, tmp_path / "out")
    _check_loaded(tiny.load(out, trust_remote_code=True), pruned, found)
    assert Plan.load(out / "plan.json") == plan
    facts = {"parameters": sum(weight.numel() for weight in model.parameters()), "bytes_per_parameter": 2}
    assert size(model, plan, facts=facts)["parameters"] == sum(weight.numel() for weight in pruned.parameters())
    assert all(torch.equal(*pair) for pair in zip(answers(model), before, strict=True))
    if way == "even":
        shapes = {name: tensor.shape for name, tensor in type(model)(pruned.config).state_dict().items()}
        assert shapes == {name: tensor.shape for name, tensor in pruned.state_dict().items()}


def _check_loaded(loaded: Any, pruned: Any, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    theirs, ours = loaded.state_dict(), pruned.state_dict()
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in ours)
    assert all(torch.equal(*pair) for pair in zip(answers(loaded), found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3:grouped", "granitemoe"])
def test_an_export_in_half_precision_is_the_pruned_model(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Sums of merged experts are rounded alike, to nearest."""
    model = tiny.save(name, tmp_path / "model", dtype=dtype)
    for way in (way for ways in KINDS.values() for way in ways):
        plan = random_plan(model, way, seed=1)
        pruned = prune(model, plan)
        loaded = tiny.load(export(tmp_path / "model", plan, tmp_path / way), trust_remote_code=True)
        assert loaded.dtype is dtype
        _check_loaded(loaded, pruned, answers(pruned))
