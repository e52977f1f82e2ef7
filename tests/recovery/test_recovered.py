from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer

from moe_lab.config import CalibrationConfig, RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.recovery.apply import pruned, recovered
from moe_lab.recovery.finetune import finetune
from moe_lab.recovery.quantize import quantize


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> CalibrationConfig:
    """An instruction set in the words of the tiny tokenizer."""
    file = tmp_path_factory.mktemp("instructions") / "set.jsonl"
    pairs = [
        {
            "instruction": " ".join(f"w{3 + n + i}" for i in range(5)),
            "output": " ".join(f"w{60 + n + i}" for i in range(4)),
        }
        for n in range(12)
    ]
    file.write_text("\n".join(map(json.dumps, pairs)))
    return CalibrationConfig(name="set", path=str(file), packing="none", length=12, tokens=96, batch_size=4, seed=0)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A tiny model and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tiny.save("olmoe", folder, num_hidden_layers=2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    return tiny.build("olmoe", num_hidden_layers=2), tokenizer


def test_a_model_is_pruned_tuned_and_stored_in_this_order(
    subject: tuple[Any, Any], text: CalibrationConfig, tmp_path: Path
) -> None:
    model, tokenizer = subject
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plan = tiny.plan(model, 0.5)
    settings = RecoveryConfig(instructions="set", rank=2, router_rank=1, learning_rate=1e-2, rows_per_step=4)
    run = {"partial": tmp_path / "partial", "fingerprint": {}, "seed": 1}
    finetune(model, tokenizer, plan, settings, text, out=tmp_path / "out", **run)
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


def test_rows_without_an_answer_are_refused(subject: tuple[Any, Any], text: CalibrationConfig, tmp_path: Path) -> None:
    model, tokenizer = subject
    file = tmp_path / "plain.jsonl"
    file.write_text("\n".join(json.dumps({"text": "w3 w4 w5 w6"}) for _ in range(20)))
    settings = RecoveryConfig(instructions="set")
    plain = CalibrationConfig(**{**vars(text), "path": str(file)})
    with pytest.raises(UserError, match="holds no answers"):
        finetune(model, tokenizer, None, settings, plain, out=tmp_path, partial=tmp_path, fingerprint={}, seed=0)
