"""Batched generation and likelihoods equal those of each row alone, and of transformers, and end
where they should."""

import copy
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import choices
import pytest
import tiny
import torch
from fake_engines import collect_replies, evaluate_into, generate, log_likelihood, vllm_with_replies
from harness_files import shipped_items
from transformers import GenerationConfig
from transformers.generation import utils as generation

from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation import Policy, run
from moe_lab.evaluation.answers import collect_answers
from moe_lab.evaluation.engines import GenerationSettings, Prompt, Row, hf
from moe_lab.evaluation.engines.hf import Batch, LoadedModel, generate_tokens
from moe_lab.evaluation.engines.likelihoods import log_likelihoods
from moe_lab.evaluation.items import Likelihood
from moe_lab.models.transformers_private import CACHE

NEW = 20


def by_transformers(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """New tokens of each prompt alone, from transformers' own loop, without an end."""
    settings = GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=[], pad_token_id=0
    )
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        shown = torch.ones_like(ids)
        produced = model.generate(ids, attention_mask=shown, generation_config=settings)
        texts.append(produced[0, len(prompt) :].tolist())
    return texts


def ended(text: list[int], ends: list[int]) -> list[int]:
    """The text up to and with its first end token."""
    for position, token in enumerate(text):
        if token in ends:
            return text[: position + 1]
    return text


def together(model: Any, prompts: list[list[int]], ends: list[int]) -> list[list[int]]:
    """Texts written in one batch, complete at `ends` alone."""
    settings = GenerationSettings(NEW)
    questions = [Prompt("", tuple(prompt), settings) for prompt in prompts]
    return generate_tokens(model, Batch(questions, frozenset(ends), 0))


def sizes_of_passes(model: Any) -> list[tuple[int, int]]:
    """The numbers of rows and of tokens in each that are read by every forward pass from now on."""
    sizes: list[tuple[int, int]] = []
    model.register_forward_pre_hook(
        lambda _, args, arguments: sizes.append(arguments["input_ids"].shape), with_kwargs=True
    )
    return sizes


class Loop(NamedTuple):
    """A model, prompts of several lengths, and the texts (20 tokens) that transformers writes."""

    model: Any
    prompts: list[list[int]]
    texts: list[list[int]]


@cache
def looped(name: str) -> Loop:
    model = tiny.build(name)
    generator = torch.Generator().manual_seed(4)
    prompts = [
        torch.randint(3, tiny.VOCABULARY, (length,), generator=generator).tolist()
        for length in (9, 3, 7, 7, 5, 6, 4)
    ]
    return Loop(model, prompts, by_transformers(model, prompts))


@pytest.fixture
def shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are made smaller as soon as a row ends."""
    monkeypatch.setattr("moe_lab.evaluation.engines.hf.SHRINK", 0.9)


@pytest.mark.slow
@pytest.mark.usefixtures("shrinking")
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_loop_writes_what_transformers_does_whenever_rows_end(name: str) -> None:
    loop = looped(name)
    # rows end one after another, unless a model repeats one token
    first = {text[0] for text in loop.texts}
    ends = [loop.texts[2][0], *(text[8] for text in loop.texts if text[8] not in first)]
    expected = [ended(text, ends) for text in loop.texts]
    sizes = sizes_of_passes(loop.model)
    texts = together(loop.model, loop.prompts, ends)
    assert texts == expected
    assert len(set(map(len, expected))) > 1
    rows = [count for count, _ in sizes]
    assert rows[0] == len(loop.prompts) > rows[-1]
    assert rows == sorted(rows, reverse=True)


@pytest.mark.slow
@pytest.mark.usefixtures("shrinking")
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_loop_writes_what_transformers_does_in_however_many_passes_prompts_are_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = looped(name)
    ends = [loop.texts[2][6]]
    monkeypatch.setattr(hf, "PASS_TOKENS", 35)
    warnings: list[str] = []
    monkeypatch.setattr(generation.logger, "warning", warnings.append)
    sizes = sizes_of_passes(loop.model)
    texts = together(loop.model, loop.prompts, ends)
    assert texts == [ended(text, ends) for text in loop.texts]
    # whose caches cannot be joined
    is_whole = name in ("qwen3_next", "minimax")
    assert (sizes[0][0] == len(loop.prompts)) == is_whole
    assert not warnings


@pytest.mark.parametrize("further", [[], ["token_type_ids"]])
def test_caches_are_joined_only_with_inputs_that_are_known(further: list[str]) -> None:
    model = tiny.build("olmoe")
    inputs = {CACHE: model(tiny.tokens(1, 4), use_cache=True)[CACHE]}
    names = ["attention_mask", "position_ids", *further]
    assert hf._can_join(model, inputs, names) == (not further)


def score(
    model: Any, rows: list[list[int]], starts: list[int], batch_size: int
) -> list[Likelihood]:
    with_starts = zip(map(tuple, rows), starts, strict=True)
    return log_likelihoods(model, [Row(row, start) for row, start in with_starts], batch_size)


QUESTION = [5, 6, 7, 8, 9, 10, 11, 12]
ANSWERS = [
    [13],
    [14],
    [15, 16, 17],
    [15, 18],
    [19, 20],
    [13],
]


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_answers_to_a_question_have_likelihoods_as_alone(name: str) -> None:
    model = tiny.build(name)
    rows = [[*QUESTION, *answer] for answer in ANSWERS]
    rows += [[5, *answer] for answer in ANSWERS]
    rows += [[30, 31]]
    starts = [len(QUESTION)] * 6 + [1] * 7
    together = score(model, rows, starts, 3)
    for row, start, likelihood in zip(rows, starts, together, strict=True):
        [alone] = score(model, [row], [start], 1)
        ids = torch.tensor([row])
        with torch.no_grad():
            logits = model(ids).logits[0, start - 1 : -1].double()
        expected = logits.log_softmax(-1).gather(1, ids[0, start:, None]).sum()
        assert likelihood.nats == pytest.approx(float(expected), abs=1e-4)
        assert alone == replace(likelihood, nats=pytest.approx(likelihood.nats, abs=1e-4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("olmoe", 8 + 2 + 1),
        ("deepseek_v3", 8 + 2 + 1),
        ("qwen3_next", 3 * 10),
    ],
)
def test_question_is_read_once_with_full_attention(name: str, tokens: int) -> None:
    model = tiny.build(name)
    rows = [[*QUESTION, *answer] for answer in ANSWERS[:3]] + [[*QUESTION, *ANSWERS[4]]]
    score(model, rows, [8] * 4, 64)
    read = sizes_of_passes(model)
    score(model, rows, [8] * 4, 64)
    assert sum(map(math.prod, read)) == tokens


@pytest.mark.slow
def test_family_without_shared_prefixes_reads_answers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [[*QUESTION, *answer] for answer in ANSWERS]
    expected = [score(tiny.build("olmoe"), [row], [8], 1)[0].nats for row in rows]
    second = tiny.build("olmoe")
    forward = second.forward

    def causal(*arguments: Any, **named: Any) -> Any:
        if named["attention_mask"].dim() == 4:
            del named["attention_mask"]
        return forward(*arguments, **named)

    monkeypatch.setattr(second, "forward", causal)
    values = [likelihood.nats for likelihood in score(second, rows, [8] * 6, 64)]
    assert values == pytest.approx(expected, abs=1e-5)


def prompts(name: str, count: int) -> list[str]:
    return [item["prompt"] for item in shipped_items(name, count)]


def losses(
    subject: LoadedModel, prompts: list[str], references: list[Any], **settings: Any
) -> list[float | None]:
    replies = collect_replies(
        subject, prompts, 1, references=references, skip_long=True, **settings
    )
    return [reply.loss for reply in replies]


def loss(subject: LoadedModel, prompt: str, answer: str) -> float:
    """Bits per byte of the answer, space before it included."""
    space = prompt[len(prompt.rstrip()) :]
    size = len((space + answer).encode())
    return -log_likelihood(subject, prompt, answer) / math.log(2) / size


def test_answer_losses_are_those_of_each_text_alone(
    subject: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [*prompts("gsm8k", 3), *prompts("humaneval", 3), *prompts("wildbench", 2)]
    answers = [*generate(subject, texts[:7], 24), " The end \u00e4."]
    expected = [loss(subject, *pair) for pair in zip(texts, answers, strict=True)]
    assert min(expected) < 0.5 < max(expected)
    for size in (1, 3, 64):
        result = losses(subject, texts, answers, batch_size=size)
        assert result == pytest.approx(expected, abs=1e-5)
    monkeypatch.setattr("moe_lab.models.load.LOGITS", 1)
    assert losses(subject, texts, answers) == pytest.approx(expected, abs=1e-5)
    read = len(subject.tokenizer(texts[0] + " 12").input_ids)  # what cannot be read has no loss
    result = losses(subject, texts[:1] * 3, [" 12", None, " 12 34"], max_length=read)
    assert result == [pytest.approx(loss(subject, texts[0], " 12"), abs=1e-5), None, None]


def test_stop_texts_cut_and_are_not_looked_for_in_prompts(subject: LoadedModel) -> None:
    """The longest prompt comes last, after shorter ones, and holds a stop text; another begins in
    the first prompt."""
    texts = prompts("humaneval", 4)
    texts.append("\n\n".join([*texts, texts[0]]))
    unstopped = generate(subject, texts, 32)
    spanning = texts[0][-1] + unstopped[0][:3]
    stop = ("\ndef ", ")", spanning)
    assert stop[0] in texts[-1]
    assert any(")" in text for text in unstopped)
    assert spanning not in unstopped[0]
    ends = [[text.index(end) for end in stop if end in text] for text in unstopped]
    cut = generate(subject, texts, 32, stop=stop)
    assert cut == [
        text[: min(positions, default=None)]
        for text, positions in zip(unstopped, ends, strict=True)
    ]
    assert len(cut[-1]) > 4


def test_stop_texts_save_forward_passes(
    subject: LoadedModel,
) -> None:
    texts = prompts("humaneval", 4)
    passes: list[object] = []
    with subject.model.register_forward_hook(lambda *_: passes.append(1)):
        generate(subject, texts, 48, stop=("    r",))
        assert len(passes) < 12


def test_sampling_and_penalties_of_models_are_unused(
    subject: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = prompts("wildbench", 3)
    expected = generate(subject, texts, 24)
    settings = subject.model.generation_config
    changes = {
        "do_sample": True,
        "temperature": 5.0,
        "repetition_penalty": 3.0,
        "min_new_tokens": 23,
        "num_beams": 2,
    }
    for name, value in changes.items():
        monkeypatch.setattr(settings, name, value)
    assert generate(subject, texts, 24) == expected
    assert subject.model.generation_config is settings


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["arc_challenge", "humaneval", "gsm8k"])
def test_infinite_logit_is_an_error(
    name: str, number: float, subject: LoadedModel, tmp_path: Path
) -> None:
    """vLLM's samplers choose a token whatever the logits are; its log-likelihood is what they leave
    to see."""
    benchmark = replace(
        choices.read_choice(BenchmarkConfig, "benchmark", f"pocket_{name}"), limit=2
    )
    fifth = torch.tensor([5])
    hook = subject.model.lm_head.register_forward_hook(
        lambda _, __, logits: logits.index_fill(-1, fifth, number)
    )
    with hook, pytest.raises(FloatingPointError, match=r"is (nan|inf)\b"):
        evaluate_into(subject, benchmark, tmp_path, policy=Policy(True))
    assert not (tmp_path / "result.json").exists()
    vllm = vllm_with_replies(subject.tokenizer, [[0, [5, 5], number]])
    with pytest.raises(FloatingPointError, match=str(number)):
        vllm.generate([Prompt("A dog", (5, 6), GenerationSettings(2))], 1)


def test_overflow_after_a_complete_text_is_ignored(subject: LoadedModel) -> None:
    """A row whose text is complete stays in a batch of five, and is computed without being used."""
    texts = prompts("gsm8k", 5)
    unstopped = generate(subject, texts, 24)
    # the first row
    longest = max(range(5), key=lambda number: len(subject.tokenizer(texts[number]).input_ids))
    ends = [unstopped[longest][start : start + 3] for start in range(9)]
    stop = next(end for end in ends if sum(end in text for text in unstopped) == 1)
    tokens: list[int] = []
    overflowed = []

    def overflow(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
        if len(logits) == 5 and stop in subject.tokenizer.decode(tokens):
            logits = logits.index_fill(0, torch.tensor([0]), math.nan)
            overflowed.append(1)
        tokens.append(int(logits[0, -1].argmax()))
        return logits

    expected = generate(subject, texts, stop=(stop,))
    with subject.model.lm_head.register_forward_hook(overflow):
        assert generate(subject, texts, stop=(stop,)) == expected
        assert overflowed


def test_benchmarks_that_share_batches_have_the_answers_of_each_alone(subject: LoadedModel) -> None:
    """Their texts differ in length, stop texts and references."""
    sources = []
    for name in ("humaneval", "wildbench", "gsm8k"):
        benchmark = choices.read_choice(BenchmarkConfig, "benchmark", f"pocket_{name}")
        benchmark = replace(benchmark, limit=5, batch_size=15)
        sources.append((benchmark, run.list_items(benchmark)))
    alone = [collect_answers(subject, [source])[0] for source in sources]
    observed = replace(subject, model=copy.deepcopy(subject.model))  # others use the subject, too
    passes = sizes_of_passes(observed.model)
    shared = collect_answers(observed, sources)
    assert passes[0][0] == 15
    for answers, expected in zip(shared, alone, strict=True):
        for answer, reference in zip(answers, expected, strict=True):
            loss = pytest.approx(reference.reply.loss, rel=1e-4)
            assert answer == replace(reference, replies=(replace(reference.reply, loss=loss),))
