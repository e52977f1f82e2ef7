"""Answers of engines: what is asked in which batch, wherever it was interrupted, and what is kept of each text."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asking import Said, Words, ask, write
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers.processors import TemplateProcessing

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import answers, harness
from moe_lab.evaluation.answers import Record, collect_answers, render
from moe_lab.evaluation.engines import Engine, Likelihood, Prompt, Row, Writing, Written
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.harness import Document, Item, Pair, Reply, Text

BENCHMARK = BenchmarkConfig("b", "lm_eval", "none", batch_size=2)


class Killed(Exception):
    """The process ends here."""


class Sums(Engine):
    """Writes prompts backwards; likelihoods are sums of tokens and depend on the batch. Ends after some batches."""

    def __init__(self, most: int = 1000, length: int | None = None, value: float | None = None) -> None:
        self.tokenizer, self.template_arguments = Words(), {}
        self.left, self.length, self.value = most, length, value
        self.batches_done: list[tuple[Any, ...]] = []

    @property
    def max_length(self) -> int | None:
        return self.length

    def generate(self, prompts: Sequence[Prompt], writing: Writing) -> list[Written]:
        self._count((writing, *prompts))
        return [Written(f"{prompt.text[::-1]} {len(prompts)}") for prompt in prompts]

    def score(self, rows: Sequence[Row], batch_size: int) -> list[Likelihood]:
        self._count(tuple(rows))
        value = -len(rows) / 3 if self.value is None else self.value
        return [(value - sum(row.tokens[row.start :]), len(row.tokens) > 3) for row in rows]

    def _count(self, batch: tuple[Any, ...]) -> None:
        if not self.left:
            raise Killed
        self.left -= 1
        self.batches_done.append(batch)


WORDS = st.lists(st.sampled_from(["a", "b", "\u2028", "\u00e4", "\ud800"]), max_size=5).map(" ".join)
TEXTS = st.builds(Text, WORDS, st.integers(1, 2), st.just(()) | st.just(("x",)), st.none() | WORDS.map(" {}".format))
REQUESTS = TEXTS | st.builds(Pair, WORDS.map("c {}".format), WORDS.map(" d{}".format)) | st.just(Document("a b c d e"))


@given(
    requests=st.lists(st.lists(REQUESTS, min_size=1, max_size=3), max_size=6),
    kills=st.lists(st.integers(0, 3), max_size=3),
    torn=st.booleans(),
)
def test_a_killed_run_goes_on_with_the_same_batches_and_repeats_none_that_was_done(
    tmp_path_factory: pytest.TempPathFactory, requests: list[list[Any]], kills: list[int], torn: bool
) -> None:
    asked = [Item(str(number), tuple(of_item)) for number, of_item in enumerate(requests)]
    whole = Sums()
    expected = collect_answers(whole, asked, BENCHMARK)
    file = tmp_path_factory.mktemp("partial") / "computed.jsonl"
    done: list[Any] = []
    for most in [*kills, 1000]:
        engine = Sums(most)
        with suppress(Killed):
            found = collect_answers(engine, asked, BENCHMARK, Record(file))
        done += engine.batches_done
        if torn and file.exists():
            with file.open("a") as lines:
                lines.write('["0 cut of')
    assert found == expected and done == whole.batches_done
    harness.write_answers(found, file)
    assert harness.read_answers(file) == expected


def test_what_was_recorded_for_another_question_is_not_taken(tmp_path: Path) -> None:
    engine, record = Sums(), Record(tmp_path / "computed.jsonl")
    for prompt, most, settings in (("a", 1, {}), ("a", 2, {}), ("a", 1, {"stop": ("x",)}), ("b", 1, {}), ("a", 1, {})):
        write(engine, [prompt], most, record=record, **settings)
    assert len(engine.batches_done) == 4
    write(engine, ["a"], 1, record=Record(tmp_path / "computed.jsonl"))
    assert len(engine.batches_done) == 4


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_likelihood_that_is_no_number_fails_and_is_computed_again(value: float, tmp_path: Path) -> None:
    asked = [Item("1", (Pair("a", " b"),))]
    with pytest.raises(FloatingPointError, match=str(value)):
        collect_answers(Sums(value=value), asked, BENCHMARK, Record(tmp_path / "computed.jsonl"))
    (answer,) = collect_answers(Sums(), asked, BENCHMARK, Record(tmp_path / "computed.jsonl"))
    assert math.isfinite(answer.reply.nats)


def test_rows_with_one_question_are_scored_together_the_longest_first() -> None:
    pairs = [Pair(f"q{number % 3} x", f" {answer}") for answer in ("a", "b c d", "e f") for number in range(3)]
    engine = Sums()
    collect_answers(engine, [Item("1", tuple(pairs))], BENCHMARK)
    (rows,) = engine.batches_done
    questions = [row.tokens[: row.start] for row in rows]
    assert len(rows) == 9 and questions == sorted(questions, key=questions.index)
    several = Sums()
    collect_answers(several, [Item(str(n), (Pair(f"q{n}", " a"),)) for n in range(70)], BENCHMARK)
    assert [len(batch) for batch in several.batches_done] == [32, 32, 6]


@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=30), length=st.integers(1, 12))
def test_windows_from_nothing_are_those_of_lm_eval(tokens: list[int], length: int) -> None:
    windows = get_rolling_token_windows(tokens, prefix_token=99, max_seq_len=length, context_len=1)
    expected = [(context, predicted) for context, predicted in map(make_disjoint_window, windows)]
    rows = answers._rolling_windows([99, *tokens], length)
    assert [(list(row.tokens[: row.start]), list(row.tokens[row.start :])) for row in rows] == expected


def test_windows_of_a_document_cover_it_once() -> None:
    engine = Sums(length=16)
    (answer,) = collect_answers(engine, [Item("1", (Document("a b c d e f g h", 3, windows=2),))], BENCHMARK)
    assert [window.tokens for window in answer.reply.windows] == [2, 2] and answer.reply.tokens == 8
    for length, text in ((1, "a b"), (17, "a b"), (3, "a")):
        with pytest.raises(UserError, match=rf"length={re.escape(str(length))}|expected at least two"):
            collect_answers(engine, [Item("1", (Document(text, length),))], BENCHMARK)


@pytest.mark.parametrize(
    ("text", "stop", "reply"),
    [
        ("yes", (), Reply("yes", "", "end")),
        ("yes. No", ("No", "s. N"), Reply("ye", "", "stop")),
        ("<think>No</think>\n\nyes No", ("No",), Reply("yes ", "<think>No</think>\n\n", "stop")),
        ("<think>hm", (), Reply(None, "<think>hm", "end")),
        ("", (), Reply("", "", "end")),
    ],
)
def test_a_text_is_parted_into_thought_and_answer(text: str, stop: tuple[str, ...], reply: Reply) -> None:
    said = Said(lambda _: text)
    assert ask(said, ["q"], stop=stop, chat=True) == [reply]
    assert said.writing.stop == stop, "what cannot think may stop early"
    thinking = Said(lambda _: text, "{# <think> #}")
    assert ask(thinking, ["q"], stop=stop, chat=True) == [reply] and thinking.writing.stop == ()


def test_the_loaded_model_says_why_a_text_ended(subject: LoadedModel) -> None:
    prompt = "The story"
    (cut,) = ask(subject, [prompt], 3)
    (whole,) = ask(subject, [prompt], 400)
    (stopped,) = ask(subject, [prompt], 400, stop=(str(whole.text)[5:8],))
    assert (cut.ended, whole.ended, stopped.ended) == ("limit", "end", "stop")


def test_prompts_leave_room_for_their_texts() -> None:
    engine = Sums(length=9)
    for settings, sentence in (({"max_length": 8}, "the benchmark's 8 tokens: lower"), ({}, "the model's 9 tokens: ")):
        with pytest.raises(UserError, match=sentence):
            ask(engine, ["a", "a b"], 40 if settings else 8, **settings)
    with pytest.raises(UserError, match="they need a model, or a max_length, of more"):
        ask(engine, ["word " * 9], 4)
    assert not engine.batches_done
    short, long = ask(engine, ["a", "a b c"], 7, skip_long=True)
    assert (short.text, long.text, long.ended) == ("a 1", "", "too_long")
    with pytest.raises(UserError, match="do not fit"):
        ask(engine, ["a b c"], 7, skip_long=True)


# Conversations.


def test_a_chat_template_writes_the_special_tokens_itself(subject: LoadedModel) -> None:
    tokenizer = deepcopy(subject.tokenizer)
    start, number = tokenizer.eos_token, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{start} $A", special_tokens=[(start, number)])
    tokenizer.chat_template = "{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ extra }}"
    chatting = LoadedModel(subject.model, tokenizer, {"extra": "!"})
    prompt = render(chatting, [{"role": "user", "content": "The story"}])
    assert prompt == f"{start}The story!"
    length = len(tokenizer(prompt, add_special_tokens=False).input_ids)
    assert write(chatting, [prompt], 4, max_length=length + 4, chat=True)
    assert write(chatting, [prompt], 4, max_length=length + 4), "nor is the first token added to a text that has it"
    with pytest.raises(UserError, match=rf"a prompt of {re.escape(str(length + 1))} tokens"):
        write(chatting, [prompt.removeprefix(start) + " a"], 4, max_length=length + 4)


def test_a_conversation_may_end_with_the_beginning_of_the_answer(subject: LoadedModel) -> None:
    tokenizer = deepcopy(subject.tokenizer)
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}<a>{% endif %}"
    chatting = replace(subject, tokenizer=tokenizer)
    begun = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "It is"}]
    assert render(chatting, begun[:1]) == "<user>How many?</><a>"
    assert render(chatting, begun) == "<user>How many?</><assistant>It is"


@pytest.mark.parametrize("template", [None, "{{ raise_exception('System role not supported') }}"])
def test_a_template_that_is_missing_or_refuses_is_a_sentence(template: str | None, subject: LoadedModel) -> None:
    tokenizer = deepcopy(subject.tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=r"no chat template|System role not supported"):
        render(replace(subject, tokenizer=tokenizer), [{"role": "user", "content": "hi"}])


def test_grading_imports_no_torch() -> None:
    program = (
        "import sys\nfrom moe_lab.evaluation import answers, run\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
