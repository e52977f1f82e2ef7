"""Two phases: texts are generated once, wherever they were interrupted, and graded as often as one likes."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from moe_lab.errors import UserError
from moe_lab.evaluation.generation import (
    Answer,
    AnswerRow,
    Generator,
    GenSpec,
    LanguageModel,
    Messages,
    Question,
    Tools,
    collect,
    read,
    write,
)
from moe_lab.evaluation.local_model import LocalModel
from moe_lab.evaluation.recorded import Record, Recorded, RecordedTexts

SPEC = GenSpec(8)


class Killed(Exception):
    """The process ends here."""


class Reversing(Generator):
    """Answers with the prompt backwards, the last prompt first; ends after so many answers."""

    tokenizer, template_arguments = None, {}  # type: ignore[var-annotated]

    def __init__(self, most: int = 1000) -> None:
        self.left = most
        self.asked: list[str] = []

    def render(self, messages: Messages, tools: Tools = ()) -> str:
        return " ".join(f"<{message['role']}>{message['content']}" for message in messages)

    def complete(
        self, prompts: Sequence[str], rows: Sequence[AnswerRow | None], spec: GenSpec
    ) -> Iterator[tuple[int, str, None]]:
        for index in reversed(range(len(prompts))):
            if not self.left:
                raise Killed
            self.left -= 1
            self.asked.append(prompts[index])
            yield index, prompts[index][::-1], None

    def answer_losses(self, prompts: Sequence[str], answers: Sequence[str | None], spec: GenSpec) -> list[float | None]:
        """The share of the answer in both texts together."""
        return [answer and len(answer) / len(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]


def test_answers_carry_the_loss_on_their_reference(tmp_path: Path) -> None:
    questions = [Question("1", "abc", "d"), Question("2", "ab"), Question("3", "a", "bc")]
    answers = collect(Reversing(), questions, SPEC)
    assert [answer.loss for answer in answers] == [1 / 4, None, 2 / 3]
    write(answers, tmp_path / "answers.jsonl")
    assert read(tmp_path / "answers.jsonl") == answers


def answers_of(generator: Generator, prompts: Sequence[str], file: Path) -> list[Answer]:
    """The answers to `prompts` by a generator whose texts are recorded in `file`."""
    questions = [Question(str(number), prompt) for number, prompt in enumerate(prompts)]
    with Record(file) as record:
        return collect(RecordedTexts(generator, record), questions, SPEC)


@given(
    prompts=st.lists(st.sampled_from(["a", "ab", "\u2028x", "a\nb", "ä"]) | st.text(max_size=4), max_size=8),
    kills=st.lists(st.integers(0, 4), max_size=3),
    torn=st.booleans(),
)
def test_a_killed_generation_goes_on_and_asks_nothing_twice(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str], kills: list[int], torn: bool
) -> None:
    file = tmp_path_factory.mktemp("partial") / "computed.jsonl"
    asked: list[str] = []
    for most in kills:
        generator = Reversing(most)
        try:
            answers_of(generator, prompts, file)
        except Killed:
            if torn:
                with file.open("a") as lines:
                    lines.write('["0 cut of')
        asked += generator.asked
    generator = Reversing()
    answers = answers_of(generator, prompts, file)
    assert answers == [Answer(str(number), prompt, prompt[::-1]) for number, prompt in enumerate(prompts)]
    assert sorted(asked + generator.asked) == sorted(set(prompts))


def test_texts_of_other_prompts_or_settings_are_not_taken(tmp_path: Path) -> None:
    generator = Reversing()
    with Record(tmp_path / "computed.jsonl") as record:
        recorded = RecordedTexts(generator, record)
        assert recorded.generate(["old"], SPEC) == ["dlo"] and recorded.generate(["new"], SPEC) == ["wen"]
        for changed in ({"max_new_tokens": 9}, {"stop": ("x",)}, {"special_tokens": False}, {"batch_size": 1}):
            recorded.generate(["old"], replace(SPEC, **changed))
    assert generator.asked == ["old", "new", "old", "old", "old"]


class Summing(Reversing, LanguageModel):
    """Gives the sum of the tokens from a start on as their likelihood; ends after so many batches."""

    config, max_length = None, None  # type: ignore[assignment]

    def log_likelihoods(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], batch_size: int
    ) -> list[tuple[float, bool]]:
        if not self.left:
            raise Killed
        self.left -= 1
        self.asked += [f"{row} from {start}" for row, start in zip(rows, starts, strict=True)]
        return [(self.of(row[start:]), len(row) > 3) for row, start in zip(rows, starts, strict=True)]

    def of(self, tokens: Sequence[int]) -> float:
        return sum(tokens) / 3


def test_a_killed_evaluation_computes_no_likelihood_twice(tmp_path: Path) -> None:
    rows = [[number] * length for number in range(40) for length in (2, 3, 4)]
    rows, starts = [*rows, *rows], [1] * len(rows) + [2, 1, 1] * 40
    wanted = [(sum(row[start:]) / 3, len(row) > 3) for row, start in zip(rows, starts, strict=True)]
    asked = []
    for most in (1, 2, 100):
        model = Summing(most)
        try:
            with Record(tmp_path / "computed.jsonl") as record:
                assert Recorded(model, record).log_likelihoods(rows, starts, batch_size=2) == wanted
        except Killed:
            pass
        asked += model.asked
    assert most == 100 and len(asked) == len(set(asked)) == 120 + 40


def test_what_is_not_finite_is_computed_again_by_the_next_process(tmp_path: Path) -> None:
    class Broken(Summing):
        def of(self, tokens: Sequence[int]) -> float:
            return math.nan

    for model, finite in ((Broken(), False), (Summing(), True)):
        with Record(tmp_path / "computed.jsonl") as record:
            ((total, _),) = Recorded(model, record).log_likelihoods([[1, 2]], [1], 2)
        assert math.isfinite(total) is finite


def test_conversations_are_rendered_and_kept_as_the_model_read_them(tmp_path: Path) -> None:
    question = Question("1", [{"role": "user", "content": "hi"}])
    answers = collect(Reversing(), [question], SPEC)
    assert answers[0].prompt == "<user>hi"
    write(answers, tmp_path / "answers.jsonl")
    assert read(tmp_path / "answers.jsonl") == answers


def test_a_chat_template_writes_the_special_tokens_itself(subject: LocalModel) -> None:
    tokenizer = deepcopy(subject.tokenizer)
    start, number = tokenizer.eos_token, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{start} $A", special_tokens=[(start, number)])
    tokenizer.chat_template = "{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ extra }}"
    chatting = LocalModel(subject.model, tokenizer, {"extra": "!"})
    prompt = chatting.render([{"role": "user", "content": "The story"}])
    assert prompt == f"{start}The story!"
    length = len(tokenizer(prompt, add_special_tokens=False).input_ids)
    assert chatting.generate([prompt], GenSpec(4, max_length=length + 4, special_tokens=False))
    with pytest.raises(UserError, match=f"a prompt of {re.escape(str(length + 1))} tokens"):
        chatting.generate([prompt], GenSpec(4, max_length=length + 4))


def test_without_a_chat_template_there_is_no_conversation(subject: LocalModel) -> None:
    with pytest.raises(UserError, match="no chat template"):
        subject.render([{"role": "user", "content": "hi"}])


def test_prompt_and_text_fit_the_benchmark_too(subject: LocalModel) -> None:
    with pytest.raises(UserError, match="do not fit the benchmark's 8 tokens: lower max_new_tokens to"):
        subject.generate(["a"], GenSpec(40, max_length=8))
    with pytest.raises(UserError, match="they need a model, or a max_length, of more"):
        subject.generate(["word " * 9], GenSpec(40, max_length=8))


def test_grading_imports_no_torch() -> None:
    program = (
        "import sys\nfrom moe_lab.evaluation import generation, run\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
