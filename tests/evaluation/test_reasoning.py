"""What a model thinks before it answers is no part of the answer, in every harness and back end."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import evalscope_files
import pyarrow.parquet as parquet
import pytest
import torch
import yaml
from asking import PLAIN, Said, ask, write
from endpoint import Reply, completion, endpoint, message
from harness_files import problem, write_lines
from test_evalplus_published import ALLOWED
from test_evalscope import needs_evalscope
from transformers import AddedToken

from moe_lab.config import BenchmarkConfig, JudgeConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import Policy, run
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.engines.server import ServedModel
from moe_lab.evaluation.engines.vllm import VllmModel
from moe_lab.evaluation.judge import Judge
from moe_lab.evaluation.mirror import benchmarks, make
from moe_lab.serving import vllm_engine

HARMONY = PLAIN + "<|start|>assistant"


def chatting(subject: LoadedModel, template: str) -> LoadedModel:
    tokenizer = deepcopy(subject.tokenizer)
    tokenizer.chat_template = template
    return replace(subject, tokenizer=tokenizer)


def writing(subject: LoadedModel, texts: Sequence[str], template: str) -> LoadedModel:
    """The shipped model, made to write given texts, one after the other, whatever it is asked."""
    model = deepcopy(subject.model)
    tokens = [*(subject.tokenizer(text, add_special_tokens=False).input_ids for text in texts)]
    state = {"text": -1, "place": 0}

    def choose(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
        if logits.shape[1] > 1 or state["text"] < 0:  # a prompt
            state.update(text=min(state["text"] + 1, len(tokens) - 1), place=0)
        ids = [*tokens[state["text"]], subject.tokenizer.eos_token_id]
        wanted = ids[min(state["place"], len(ids) - 1)]
        state["place"] += 1
        chosen = torch.zeros_like(logits)
        chosen[..., wanted] = 1
        return chosen

    model.lm_head.register_forward_hook(choose)
    return replace(chatting(subject, template), model=model)


# Generating tasks of lm-eval: a number is taken from the text, and "Question:" ends it.

RIGHT, WRONG, NONE = 1.0, 0.0, None
"""None: a thought that does not end."""
TEXTS = [
    ("The answer is 72.", "", RIGHT),
    ("The answer is 7.", "", WRONG),
    ("<think>70?</think>The answer is 72.", "", RIGHT),
    ("<think>Read the Question: how many? 48 + 24.</think>\n\nThe answer is 72.\nQuestion: 5", "", RIGHT),
    ("Read the Question: 48 + 24.</think>The answer is 72.", "", RIGHT),
    ("<think>It could be 72, but wait, let me", "", NONE),
    ("It could be 72, but wait, let me", "<think>\n", NONE),
    ("Read the Question: 48 + 24.\n</think>\n\nThe answer is 72.", "<think>\n", RIGHT),
    ("The answer is 72.", "<think>\n\n</think>\n\n", RIGHT),
    ("<think>a</think>It is 24.\n<think>No: 48 and", "", NONE),
    ("<think>a</think>It is 24.\n<think>No.</think>It is 72.", "", RIGHT),
    ("[THINK]Is it 24?[/THINK]It is 72.", "", RIGHT),
    ("[THINK]It is 72", "", NONE),
    ("<seed:think>Is it 24?</seed:think>It is 72.", "", RIGHT),
    ("<|channel|>analysis<|message|>24?<|end|><|start|>assistant<|channel|>final<|message|>It is 72.", HARMONY, RIGHT),
    ("<|channel|>analysis<|message|>It is 72, or", HARMONY, NONE),
    ("analysisThe assistant final answer: 24?assistantfinalIt is 72.", HARMONY, RIGHT),
    ("analysisIt is 72, or", HARMONY, NONE),
    ("It is 72.", HARMONY, RIGHT),
    ("It writes <think> and </think> around it: 72.", "", RIGHT),
    ("analysis of the text: 72", "", RIGHT),
]


def own_task(folder: Path, texts: Sequence[str], **changes: Any) -> BenchmarkConfig:
    definition = {
        "task": "t",
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "generation_kwargs": {"until": ["Question:"]},
        "filter_list": [
            {
                "name": "last",
                "filter": [
                    {"function": "regex", "regex_pattern": "([0-9]+)", "group_select": -1},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match"}],
        **changes,
    }
    (folder / "t.yaml").write_text(yaml.safe_dump(definition))
    write_lines(folder / "t.jsonl", [{"q": f"Q{number}", "a": "72"} for number in range(len(texts))])
    return BenchmarkConfig(
        name="t",
        harness="lm_eval",
        task=str(folder / "t.yaml"),
        reports={"t": "exact_match"},
        chat=True,
        max_new_tokens=120,
        batch_size=1,
    )


def samples(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(folder / "samples.parquet").to_pylist()
    return rows


def unfinished(folder: Path) -> list[str]:
    names: list[str] = json.loads((folder / "result.json").read_text())["protocol"].get("unfinished_thoughts", [])
    return names


@pytest.mark.parametrize(("text", "end", "right"), TEXTS)
def test_an_answer_to_a_generating_task_follows_its_thought(
    text: str, end: str, right: float | None, subject: LoadedModel, tmp_path: Path
) -> None:
    template = end if end == HARMONY else PLAIN + end + "{# <think> #}"
    model = writing(subject, [text], template)
    run.evaluate(model, own_task(tmp_path, [text]), tmp_path / "out", policy=Policy())
    (sample,) = samples(tmp_path / "out")
    assert sample["outcome"] == (right or 0.0), sample
    whole = sample["thought"] + (sample["output"] or "")
    assert whole == text.partition("\nQuestion: 5")[0] + ("\n" if "Question: 5" in text else "")
    assert (sample["output"] is None) == (right is None)
    assert unfinished(tmp_path / "out") == (["0"] if right is None else [])


def test_an_unfinished_thought_is_wrong_where_an_empty_answer_is_right(subject: LoadedModel, tmp_path: Path) -> None:
    texts = ["<think>hm", "<think>hm</think>"]
    benchmark = own_task(
        tmp_path, texts, doc_to_target="", filter_list=[{"name": "a", "filter": [{"function": "take_first"}]}]
    )
    run.evaluate(writing(subject, texts, PLAIN), benchmark, tmp_path / "out", policy=Policy())
    assert [sample["outcome"] for sample in samples(tmp_path / "out")] == [0.0, 1.0]
    assert unfinished(tmp_path / "out") == ["0"]


def test_a_completion_that_speaks_of_marks_is_no_thought(subject: LoadedModel, tmp_path: Path) -> None:
    """A base model continues a text; only what begins with a mark is a thought then."""
    text = "It drops </think> first: 72 Question: 5"
    model = writing(subject, [text], PLAIN)
    run.evaluate(model, replace(own_task(tmp_path, [text]), chat=False), tmp_path / "out", policy=Policy())
    (sample,) = samples(tmp_path / "out")
    assert (sample["outcome"], sample["output"]) == (1.0, text.removesuffix("Question: 5"))


# Programs.

FENCE = "```"
GOOD, BAD = "def f0(x):\n    return x + 1", "def f0(x):\n    return 0"


@pytest.mark.parametrize(
    ("text", "end", "right"),
    [
        (f"<think>\n{FENCE}python\n{BAD}\n{FENCE}\nno\n</think>\n{FENCE}python\n{GOOD}\n{FENCE}", "", RIGHT),
        (f"{FENCE}python\n{BAD}\nHmm, no.\n</think>\nSo:\n{FENCE}python\n{GOOD}\n{FENCE}\n", "<think>", RIGHT),
        (f"<think>\n{FENCE}python\n{BAD}\n{FENCE}\nno, wait.\n</think>\n\n{GOOD}\n", "", RIGHT),
        (f"<think>\n{FENCE}python\n{GOOD}\n{FENCE}\nBut wait, is it", "", NONE),
        (
            f"analysis{FENCE}python\n{BAD}\n{FENCE}assistantfinal{FENCE}python\n{GOOD}\n{FENCE}",
            "<|start|>assistant",
            RIGHT,
        ),
        (f'{FENCE}python\n{GOOD}\n\n\ndef strip(text):\n    return text.split("</think>")[-1]\n{FENCE}', "", RIGHT),
    ],
)
def test_a_program_follows_its_thought(
    text: str, end: str, right: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (benchmark,) = benchmarks(["humaneval"], str(tmp_path))
    benchmark = replace(benchmark, expected=1)
    make(benchmark, write_lines(tmp_path / "HumanEvalPlus.jsonl", [problem(0, "f0", "return x + 1", [[1]], [[2]])]))
    run.evaluate(Said([text], PLAIN + end), benchmark, tmp_path / "out", policy=ALLOWED)
    assert {sample["outcome"] for sample in samples(tmp_path / "out")} == {right or 0.0}
    sample = samples(tmp_path / "out")[0]
    assert sample["thought"] + (sample["output"] or "") == text
    assert unfinished(tmp_path / "out") == (["HumanEval/0"] if right is None else [])


# Mathematics by EvalScope.


@needs_evalscope
def test_a_number_follows_its_thought(tmp_path: Path) -> None:
    texts = [
        "<think>\\boxed{24}? no</think>The answer is \\boxed{72}.",
        "48 / 2, so \\boxed{24}? no, both.\n</think>\n\nThe answer is 72.",
        "<think>48 / 2 = 24, so \\boxed{72} I guess, but wait, let me",
    ]
    benchmark = evalscope_files.benchmark("gsm8k", tmp_path, expected=3)
    evalscope_files.write(benchmark, {"test": [{"question": f"Q{n}?", "answer": "so #### 72"} for n in range(3)]})
    run.evaluate(Said(texts), benchmark, tmp_path / "out", policy=Policy())
    assert [sample["outcome"] for sample in samples(tmp_path / "out")] == [1.0, 1.0, 0.0]
    assert len(unfinished(tmp_path / "out")) == 1


# A judge: what it is shown, and what it thinks itself.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('<think>{"score": "3"}? no</think>{"score": "8"}', 8.0),
        ('{"score": "8"}? So be it.</think>It is good.', None),
        ('<think>I lean to {"score": "3"}, but', None),
        ('{"score": "8"}', 8.0),
    ],
)
def test_a_score_inside_a_judges_thought_is_none(
    reply: str, score: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with endpoint(lambda body: message(reply)) as at:
        (verdict,) = Judge(JudgeConfig("j", at.url), tmp_path).verdicts(["?"], tolerated=1)
        assert verdict.score == score and len(at.asked) == (1 if score else 3)


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["abort", "error", "content_filter"])
def test_a_reply_that_the_judges_endpoint_broke_off_is_asked_for_again(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = [message('{"score": "3"}', finish_reason=reason), message('{"score": "8"}')]
    with endpoint(lambda body: replies.pop(0)) as at:
        (verdict,) = Judge(JudgeConfig("j", at.url), tmp_path).verdicts(["?"], tolerated=1)
        assert verdict.score == 8.0


# Back ends.


@pytest.mark.parametrize(("reason", "whole"), [("stop", True), ("length", True), ("abort", False), ("error", False)])
def test_a_text_that_an_engine_broke_off_is_an_error(reason: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the process of the engine sees it, with vLLM played."""
    text = SimpleNamespace(token_ids=(5, 7), finish_reason=reason, cumulative_logprob=-1.0)
    done = [SimpleNamespace(request_id="0", finished=True, outputs=[text])]
    played = SimpleNamespace(
        add_request=lambda *_: None, has_unfinished_requests=lambda: bool(done), step=lambda: [done.pop()]
    )
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **_: None))
    engine = vllm_engine.Engine()
    engine.llm = SimpleNamespace(llm_engine=played)
    if whole:
        assert list(engine.generate([[1]], 2, [], [0])) == [(0, [5, 7], -1.0)]
    else:
        with pytest.raises(ValueError, match=f"finish_reason={re.escape(str(reason))}"):
            list(engine.generate([[1]], 2, [], [0]))


def engine(tokenizer: Any, text: str, stops: list[Any] | None = None) -> VllmModel:
    """vLLM played, which writes `text` and notes the stop texts it is given."""
    tokens = tokenizer(text, add_special_tokens=False).input_ids

    def items(_: str, __: float, stop: Sequence[str], **others: Any) -> Iterator[Any]:
        (stops if stops is not None else []).append(tuple(stop))
        return iter([[0, tokens, -1.0]])

    process: Any = SimpleNamespace(about={"max_length": 512}, items=items)
    return VllmModel(process, tokenizer, (tokenizer.eos_token_id,), {})


@pytest.mark.slow
def test_a_stop_text_in_a_thought_ends_no_text(subject: LoadedModel) -> None:
    whole = "Read the END: 5.</think>It is 7. END more"
    stops: list[Any] = []

    def answer(body: dict[str, Any]) -> Reply:
        stops.append(tuple(body["stop"] or ()))
        return completion(whole, "m")

    with endpoint(answer) as at:
        for template, sent in ((PLAIN + "<think>\n", ()), (PLAIN, ("END",))):
            tokenizer = chatting(subject, template).tokenizer
            for model in (ServedModel(at.url, "m", tokenizer, 512, {}), engine(tokenizer, whole, stops)):
                (reply,) = ask(model, ["Q<think>\n"], 40, stop=("END",), chat=True)
                assert (reply.thought, reply.text) == ("Read the END: 5.</think>", "It is 7. ") and stops[-1] == sent


@pytest.fixture
def with_special_marks(subject: LoadedModel) -> LoadedModel:
    """The shipped model with marks of thoughts that are special tokens, in place of two others."""
    tokenizer = deepcopy(subject.tokenizer)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("[THINK]", "[/THINK]")], special_tokens=True)
    tokenizer.chat_template = PLAIN + "{# [THINK] #}"
    return replace(subject, tokenizer=tokenizer)


def test_marks_that_are_special_tokens_part_thoughts_too(with_special_marks: LoadedModel) -> None:
    whole = "[THINK]Is it 24?[/THINK] It is 72."
    (reply,) = ask(engine(with_special_marks.tokenizer, whole), ["Q"], 40, chat=True)
    assert reply.thought + str(reply.text) == whole and reply.text == "It is 72."


@pytest.mark.slow
def test_a_server_that_would_leave_marks_out_is_refused(with_special_marks: LoadedModel) -> None:
    with endpoint(lambda body: completion("Is it 24? It is 72.", "m")) as at:
        served = ServedModel(at.url, "m", with_special_marks.tokenizer, 512, {})
        with pytest.raises(UserError, match=r"\[THINK\].*expected backend=hf"):
            ask(served, ["Q"], 40, chat=True)
        assert write(served, ["Q"], 40), "a completion has no thoughts"
