"""Two phases: texts are generated once, wherever they were interrupted, and graded as often as one likes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from moe_lab.errors import UserError
from moe_lab.evaluation.generation import Answer, Generator, GenSpec, Messages, Question, collect, read, write
from moe_lab.evaluation.local_model import LocalModel

SPEC = GenSpec(8)


class Killed(Exception):
    """The process ends here."""


class Reversing(Generator):
    """Answers with the prompt backwards, the last prompt first; ends after so many answers."""

    def __init__(self, most: int = 1000) -> None:
        self.left = most
        self.asked: list[str] = []

    def render(self, messages: Messages) -> str:
        return " ".join(f"<{message['role']}>{message['content']}" for message in messages)

    def stream(self, prompts: Sequence[str], spec: GenSpec) -> Iterator[tuple[int, str]]:
        for index in reversed(range(len(prompts))):
            if not self.left:
                raise Killed
            self.left -= 1
            self.asked.append(prompts[index])
            yield index, prompts[index][::-1]

    def answer_losses(self, prompts: Sequence[str], answers: Sequence[str | None], spec: GenSpec) -> list[float | None]:
        """The share of the answer in both texts together."""
        return [answer and len(answer) / len(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]


def test_answers_carry_the_loss_on_their_reference(tmp_path: Path) -> None:
    questions = [Question("1", "abc", "d"), Question("2", "ab"), Question("3", "a", "bc")]
    answers = collect(Reversing(), questions, SPEC, tmp_path / "partial")
    assert [answer.loss for answer in answers] == [1 / 4, None, 2 / 3]
    write(answers, tmp_path / "answers.jsonl")
    assert read(tmp_path / "answers.jsonl") == answers


@given(
    prompts=st.lists(st.sampled_from(["a", "ab", "\u2028x", "a\nb", "ä"]) | st.text(max_size=4), max_size=8),
    kills=st.lists(st.integers(0, 4), max_size=3),
    torn=st.booleans(),
)
def test_a_killed_generation_goes_on_and_asks_nothing_twice(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str], kills: list[int], torn: bool
) -> None:
    partial = tmp_path_factory.mktemp("partial") / "answers.jsonl"
    questions = [Question(str(number), prompt) for number, prompt in enumerate(prompts)]
    asked: list[str] = []
    for most in kills:
        generator = Reversing(most)
        try:
            collect(generator, questions, SPEC, partial)
        except Killed:
            if torn:
                with partial.open("a") as lines:
                    lines.write('["0 cut of')
        asked += generator.asked
    generator = Reversing()
    answers = collect(generator, questions, SPEC, partial)
    assert answers == [Answer(str(number), prompt, prompt[::-1]) for number, prompt in enumerate(prompts)]
    assert sorted(asked + generator.asked) == sorted(prompts)


def test_answers_of_another_prompt_are_not_taken(tmp_path: Path) -> None:
    collect(Reversing(), [Question("1", "old")], SPEC, tmp_path / "partial")
    (answer,) = collect(Reversing(), [Question("1", "new")], SPEC, tmp_path / "partial")
    assert answer.output == "wen"


def test_conversations_are_rendered_and_kept_as_the_model_read_them(tmp_path: Path) -> None:
    question = Question("1", [{"role": "user", "content": "hi"}])
    answers = collect(Reversing(), [question], SPEC, tmp_path / "partial")
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
    with pytest.raises(UserError, match=f"a prompt of {length + 1} tokens"):
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
