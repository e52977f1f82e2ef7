"""Function calls about the closed world: their text, the right answers of the items, and the model that calls."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from moe_lab.calibration.documents import document, tokenize
from moe_lab.config import BenchmarkConfig, ModelConfig
from moe_lab.evaluation import Policy, run, suite
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.harnesses import function_calls
from moe_lab.evaluation.harnesses.function_call_rules import mistake
from moe_lab.models.load import load_model
from moe_lab.paths import conf
from tools.pocket.build import calibration_examples
from tools.pocket.calls import KINDS
from tools.pocket.examples import END_OF_TEXT, Example
from tools.pocket.world import World


@pytest.fixture(scope="module")
def benchmark() -> BenchmarkConfig:
    """The benchmark as it is configured."""
    file = conf() / "benchmark/pocket_function_calls.yaml"
    return BenchmarkConfig(**yaml.safe_load(file.read_text(encoding="utf-8")))


def test_the_items_are_of_every_kind_and_fit_the_format(benchmark: BenchmarkConfig) -> None:
    assert suite.wrong([benchmark]) == []
    kinds = Counter(item.name.rpartition("_")[0] for item in function_calls.items(benchmark))
    assert set(kinds) == set(KINDS)
    assert min(kinds.values()) >= 16


def test_no_call_of_an_item_is_in_a_calibration_conversation(world: World, items: dict[str, list[Example]]) -> None:
    examples = items["function_calls"], calibration_examples(world, "function_calls")
    asked, shown = ({call.key for example in of_set for call in example.details["calls"]} for of_set in examples)
    assert len(asked) >= 100 and len(shown) >= 400
    assert not asked & shown


def test_right_answers_are_right_and_others_wrong(benchmark: BenchmarkConfig, items: dict[str, list[Example]]) -> None:
    for question, example in zip(function_calls._questions(benchmark), items["function_calls"], strict=True):
        reason = partial(mistake, functions=question.functions, right=question.right)
        assert reason(example.answer) is None, question.name
        if not question.right:
            assert reason(items["function_calls"][0].answer)
            continue
        blocks = re.findall("<tool_call>.*?</tool_call>", example.answer)
        assert len(blocks) == len(question.right)
        assert reason("".join(reversed(blocks))) is None
        assert reason("".join(blocks[:-1])) and reason(example.answer + blocks[0])
        for value in example.details["calls"][-1].values:
            before, _, after = example.answer.rpartition(json.dumps(value))
            assert reason(before + json.dumps("Zed") + after), question.name


def test_the_chat_template_writes_the_text_that_was_learnt(data: Path, items: dict[str, list[Example]]) -> None:
    """Prompts as evaluation asks for them, whole conversations as calibration reads them, and no token across both."""
    reader = AutoTokenizer.from_pretrained(data / "function_calls")
    for example in items["function_calls"]:
        messages, tools = example.details["messages"], example.details["tools"]
        prompt = reader.apply_chat_template(messages[:1], tools=tools, tokenize=False, add_generation_prompt=True)
        assert prompt == example.prompt
        text = example.text + END_OF_TEXT
        assert reader.apply_chat_template(messages, tools=tools, tokenize=False) == text
        chat = document({"messages": messages, "tools": tools}, None, "item")
        tokens = tokenize(chat, reader, special_tokens=True)
        assert tokens == reader.encode(prompt) + reader.encode(example.answer) + [reader.eos_token_id]
        assert len(tokens) <= 128


def test_the_model_calls_functions(benchmark: BenchmarkConfig, tmp_path: Path) -> None:
    """A loose bound on its score, which nonsense cannot reach: that is right only where no function fits."""
    model = LoadedModel(*load_model(ModelConfig(name="calls", path="pocket:function_calls", threads=1, device="cpu")))
    (result,) = run.evaluate(model, benchmark, tmp_path, policy=Policy(False, "namespaces", False, False))
    assert result["n"] == 160
    assert result["score"] >= 0.9
