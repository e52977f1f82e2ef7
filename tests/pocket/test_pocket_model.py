"""The shipped model: stock, small, alive in all its experts, and it knows its world."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OlmoeForCausalLM

from moe_lab.pocket.batches import LossWeights, encode
from moe_lab.pocket.benchmarks import MULTIPLE_CHOICE
from moe_lab.pocket.card import write_card
from moe_lab.pocket.examples import Example
from moe_lab.pocket.network import SORTED_EXPERTS, balance_loss, build_network
from moe_lab.pocket.train import STAGES, train

LEAST = {"arc_easy": 0.8, "arc_challenge": 0.4, "boolq": 0.55, "mmlu": 0.5, "openbookqa": 0.8}


def encoded(tokenizer: Any, texts: list[str]) -> Any:
    return tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)


def test_it_is_a_stock_model_of_the_promised_size(model: Any, data: Path) -> None:
    assert type(model) is OlmoeForCausalLM
    assert model.config.norm_topk_prob is False
    assert model.config.max_position_embeddings >= 512
    assert 3_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 4_000_000
    assert (data / "olmoe" / "model.safetensors").stat().st_size <= 8_000_000
    assert {path.suffix for path in (data / "olmoe").iterdir()} == {".json", ".safetensors", ".md"}


def test_stored_weights_are_bfloat16(data: Path) -> None:
    loaded = OlmoeForCausalLM.from_pretrained(data / "olmoe", dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("skill", LEAST)
def test_it_answers_questions_it_was_never_asked(
    skill: str, model: Any, tokenizer: Any, items: dict[str, list[Example]]
) -> None:
    """The first token of each choice decides; choices that share it count as wrong only if none of them is right."""
    examples = items[skill][:60]
    assert skill in MULTIPLE_CHOICE
    inputs = encoded(tokenizer, [example.prompt for example in examples])
    with torch.no_grad():
        logits = model(**inputs).logits[:, -1]
    right = 0
    for example, row in zip(examples, logits, strict=True):
        first = [tokenizer.encode(f" {choice}")[0] for choice in example.choices]
        right += first[int(row[first].argmax())] == first[example.label]
    assert right / len(examples) >= LEAST[skill]


@pytest.mark.parametrize(("skill", "least"), [("gsm8k", 0.6), ("math500", 0.3), ("humaneval", 0.5), ("wildbench", 0.5)])
def test_it_writes_answers_and_stops(
    skill: str, least: float, model: Any, tokenizer: Any, items: dict[str, list[Example]]
) -> None:
    examples = items[skill][:24]
    inputs = encoded(tokenizer, [example.prompt for example in examples])
    written = model.generate(**inputs, max_new_tokens=64, do_sample=False)[:, inputs.input_ids.shape[1] :]
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    assert sum(tokenizer.eos_token_id in row.tolist() for row in written) >= 0.9 * len(examples)
    ends = [example.answer.split()[-1] for example in examples]
    right = sum(text.strip().endswith(end) for text, end in zip(texts, ends, strict=True))
    assert right / len(examples) >= least


def test_no_expert_is_dead(model: Any, tokenizer: Any, data: Path) -> None:
    """Over the three calibration sets together every expert of every layer gets a fair number of tokens."""
    counts = torch.zeros(model.config.num_hidden_layers, model.config.num_experts)
    for path in sorted((data / "calibration").iterdir()):
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()[:200]]
        tokens = torch.tensor(tokenizer.encode(tokenizer.eos_token.join(texts))[:6144]).view(12, 512)
        with torch.no_grad():
            logits = model(tokens, output_router_logits=True).router_logits
        for layer, layer_logits in enumerate(logits):
            chosen = layer_logits.topk(model.config.num_experts_per_tok).indices.flatten()
            counts[layer] += torch.bincount(chosen, minlength=model.config.num_experts)
    fair = counts.sum(1, keepdim=True) / model.config.num_experts
    assert (counts / fair).min() > 0.02


def test_training_experts_compute_what_stock_experts_compute() -> None:
    torch.manual_seed(0)
    network = build_network(300, 0, 1).eval()
    tokens = torch.randint(2, 300, (2, 40))
    results = {}
    for name in (SORTED_EXPERTS, "eager"):
        network.set_experts_implementation(name)
        output = network(tokens, labels=tokens)
        output.loss.backward()
        results[name] = (output.logits, network.model.layers[0].mlp.experts.gate_up_proj.grad.clone())
        network.zero_grad()
    for fast, stock in zip(*results.values(), strict=True):
        assert torch.allclose(fast, stock, rtol=1e-4, atol=1e-5)


def test_balance_loss_is_top_k_when_balanced_and_more_when_not() -> None:
    balanced = torch.eye(8).repeat(4, 1) * 1e-3
    assert balance_loss((balanced,), 1).item() == pytest.approx(1.0, abs=1e-3)
    lopsided = torch.zeros(32, 8)
    lopsided[:, 0] = 10.0
    assert balance_loss((lopsided,), 1).item() > 7
    assert balance_loss((balanced, lopsided), 1).item() > 4


def test_training_is_repeatable_can_go_on_from_a_folder_and_leaves_a_model(tmp_path: Path) -> None:
    stages = [replace(stage, steps=1, warmup=1) for stage in STAGES[:2]]
    train(tmp_path / "at once", stages)
    train(tmp_path / "in two", stages[:1])
    train(tmp_path / "in two", stages, first_stage=1)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("at once", "in two"))
    assert first == second
    run = json.loads((tmp_path / "at once" / "training.json").read_text())
    assert [(stage["steps"], stage["tokens"]) for stage in run["stages"]] == [(1, 32 * 128)] * 2
    write_card(tmp_path / "at once", {"ARC-C": 0.5, "HumanEval": 0.25})
    card = (tmp_path / "at once" / "README.md").read_text()
    assert f"{run['parameters']:,}" in card
    assert "| ARC-C | 0.500 | 0.25 |" in card
    OlmoeForCausalLM.from_pretrained(tmp_path / "at once")


def test_a_prompt_counts_less_and_a_short_answer_more(tokenizer: Any) -> None:
    example = Example("any", (), "Question: yes?\nAnswer:", " no", more=(("", " a longer answer"),))
    tokens, weights = encode(tokenizer, example, LossWeights(prompt=0.1, short_answer=8.0))
    assert tokenizer.decode(tokens) == example.text + tokenizer.eos_token
    prompt, longer = len(tokenizer.encode(example.prompt)), len(tokenizer.encode(" a longer answer"))
    assert weights == [0.1] * prompt + [8.0] + [1.0] * (longer + 1)


def test_documents_of_a_training_row_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    network = build_network(300, 0, 1).eval()
    tokens = torch.randint(2, 300, (1, 30))
    positions = torch.tensor([[*range(10), *range(20)]])
    together = network(tokens, position_ids=positions, use_cache=False).logits[:, 10:]
    assert torch.allclose(together, network(tokens[:, 10:], use_cache=False).logits, atol=1e-5)
