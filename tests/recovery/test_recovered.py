from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from learning import text
from safetensors.torch import load_file

from moe_lab.config import RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.recovery.apply import pruned, recovered
from moe_lab.recovery.finetune import finetune
from moe_lab.recovery.quantize import quantize


def test_a_model_is_pruned_tuned_and_stored_in_this_order(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    model = tiny.build("olmoe", num_hidden_layers=2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plan = tiny.plan(model, 0.5)
    settings = RecoveryConfig(instructions="set", rank=2, router_rank=1, learning_rate=1e-2, rows_per_step=4)
    run = {"partial": tmp_path / "partial", "fingerprint": {}, "seed": 1}
    finetune(model, tokenizer, plan, settings, text(folder, "answers"), out=tmp_path / "out", **run)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    report = json.loads((tmp_path / "out" / "finetune.json").read_text())
    assert report["steps"] == len(report["loss"]) == 4 and report["rows"] == 8
    assert report["answer_tokens"] == 8 * 4
    # per map: A (rank, in), B (out, rank), magnitude (out,); gate and up are 32 -> 24, down is 24 -> 32
    assert report["trained_parameters"] == {
        "experts": 2 * 8 * (2 * (2 * 32 + 24 * 2 + 24) + (2 * 24 + 32 * 2 + 32)),
        "routers": 2 * (32 + 8 + 8),
        "shared_experts": 0,
    }
    ids = tiny.tokens()
    with torch.no_grad():
        again = recovered(model, plan, bits=16, modules=(), tuned=tmp_path / "out")
        expected = again(ids).logits
        assert not torch.equal(pruned(model, plan)(ids).logits, expected)
        stored = recovered(model, plan, bits=4, modules=["experts"], tuned=tmp_path / "out")
        quantize(again, ["experts"])
        assert torch.equal(stored(ids).logits, again(ids).logits)
        assert not torch.equal(stored(ids).logits, expected)
    names = load_file(tmp_path / "out" / "tuned.safetensors").keys()
    assert len(names) == 6 and all(".mlp." in name for name in names)


def test_rows_without_an_answer_are_refused(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    run: dict[str, Any] = {"out": tmp_path, "partial": tmp_path, "fingerprint": {}, "seed": 0}
    with pytest.raises(UserError, match="holds no answers"):
        finetune(tiny.build("olmoe"), tokenizer, None, RecoveryConfig(instructions="set"), text(folder), **run)
