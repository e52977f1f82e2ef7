"""Sampled texts: their distribution, their independence of the batch, whose settings count, and the
grading of several answers to an item."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engines import ScriptedEngine, generate, protocol, samples, with_chat_template
from harness_files import GENERATION, custom_task, shipped_items, write_lines
from scipy.stats import chisquare
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moe_lab.config import BenchmarkConfig, Sampling
from moe_lab.errors import UserError
from moe_lab.evaluation import Policy, run
from moe_lab.evaluation.answers import collect_answers, resolved_sampling
from moe_lab.evaluation.engines import sampling_defaults
from moe_lab.evaluation.engines.hf import LoadedModel, drawn_tokens
from moe_lab.evaluation.harness import harness_of
from moe_lab.evaluation.items import Answer, Item, Reply, Text

PROMPT = "The story"
WARM = Sampling(temperature=1.5)
BENCHMARK = BenchmarkConfig("b", "lm_eval", "none", sampling=replace(WARM, samples=3))
DRAWS = 2000


def warped(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The probabilities by transformers' own classes."""
    warpers: list[Any] = [TemperatureLogitsWarper(float(sampling.temperature or 0))]
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p and sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    for warper in warpers:
        logits = warper(None, logits)
    return logits.double().softmax(-1)


@pytest.mark.parametrize(
    "sampling",
    [
        WARM,
        Sampling(temperature=0.7),
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=2.0, top_p=0.8),
        Sampling(temperature=2.0, min_p=0.2),
        Sampling(temperature=2.0, top_k=6, top_p=0.6),
    ],
)
def test_tokens_have_the_probabilities_of_transformers(sampling: Sampling) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    numbers = torch.rand(DRAWS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    drawn = drawn_tokens(logits.expand(DRAWS, 12), numbers, **sampling.resolved({}).distribution)
    expected = warped(logits, sampling)[0] * DRAWS
    counts = torch.bincount(drawn, minlength=12)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert chisquare(counts[possible], expected[possible]).pvalue > 1e-3


def test_first_tokens_of_a_model_have_its_probabilities(subject: LoadedModel) -> None:
    items = [Item("1", (Text(PROMPT, 1),))]
    benchmark = replace(BENCHMARK, sampling=replace(WARM, samples=DRAWS), batch_size=500)
    counts = Counter(answer.reply.text for answer in collect_answers(subject, items, benchmark))
    ids = subject.tokenizer([PROMPT], return_tensors="pt").input_ids
    with torch.inference_mode():
        probabilities = warped(subject.model(ids).logits[:, -1], WARM)[0]
    likeliest = probabilities.topk(8)
    observed = [
        counts[subject.tokenizer.decode([token], skip_special_tokens=True)]
        for token in likeliest.indices.tolist()
    ]
    expected = (likeliest.values * DRAWS).tolist()
    assert min(expected) > 5
    rest = [DRAWS - sum(observed)], [DRAWS - sum(expected)]
    assert chisquare(observed + rest[0], expected + rest[1]).pvalue > 1e-3


def written(subject: LoadedModel, prompts: Mapping[str, str], **changes: Any) -> dict[Any, Any]:
    """(item, replicate) -> text."""
    items = [Item(name, (Text(prompt, 12),)) for name, prompt in prompts.items()]
    answers = collect_answers(subject, items, replace(BENCHMARK, **changes))
    return {answer.key: answer.reply.text for answer in answers}


def test_a_text_depends_on_its_item_and_replicate_alone(subject: LoadedModel) -> None:
    prompts = {"1": PROMPT, "2": PROMPT, "3": "A dog sleeps in a big"}
    texts = written(subject, prompts)
    assert list(texts) == [(item, replicate) for item in prompts for replicate in range(3)]
    assert len(set(texts.values())) > 6
    assert written(subject, prompts, batch_size=2) == texts
    alone = written(subject, {"2": PROMPT}, sampling=replace(WARM, samples=2))
    assert alone == {key: text for key, text in texts.items() if key in alone}
    assert written(subject, prompts, sampling=replace(WARM, samples=3, seed=1)) != texts


def test_right_answers_have_their_losses_beside_sampled_texts(subject: LoadedModel) -> None:
    """And no sampled text begins with them because they were read."""
    items = [Item("1", (Text(PROMPT, 12, reference=" of a fox"),))]
    sampled = collect_answers(subject, items, BENCHMARK)
    (greedy,) = collect_answers(subject, items, replace(BENCHMARK, sampling=Sampling()))
    losses = [answer.reply.loss for answer in sampled]
    assert losses == [pytest.approx(greedy.reply.loss, abs=1e-5)] * 3
    assert {answer.key: answer.reply.text for answer in sampled} == written(subject, {"1": PROMPT})


OWN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_new_tokens": 5}
ASSISTANT = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{% endfor %}"
)
QUIET = "{% if add_generation_prompt %}{% if not on %}<think></think>{% endif %}{% endif %}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "settings", "own", "expected"),
    [
        (ASSISTANT, {}, OWN, (0.6, 1.0, 20)),
        (ASSISTANT, {"sampling": Sampling(temperature=0.9)}, OWN, (0.9, 1.0, 20)),
        (ASSISTANT, {}, {**OWN, "do_sample": False}, (0, 1.0, 0)),
        (ASSISTANT, {}, {"do_sample": True}, (1.0, 1.0, 0)),
        (ASSISTANT, {}, {"temperature": 0.3}, (0.3, 1.0, 0)),
        (ASSISTANT, {}, {}, (0, 1.0, 0)),
        (ASSISTANT, {"sampling": Sampling(temperature=0.0)}, OWN, (0, 1.0, 0)),
        (ASSISTANT, {"chat": False}, OWN, (0, 1.0, 0)),
        (ASSISTANT, {"chat": False, "sampling": Sampling(temperature=0.9)}, OWN, (0.9, 1.0, 0)),
        (ASSISTANT + QUIET, {}, OWN, (0, 1.0, 0)),
        (PLAIN + "{% if add_generation_prompt %}<think>\n{% endif %}", {}, OWN, (0.6, 1.0, 20)),
        (PLAIN, {}, OWN, (0, 1.0, 0)),
        (PLAIN + "{# <think> #}", {}, OWN, (0, 1.0, 0)),
    ],
)
def test_thinking_models_sample_by_their_own_settings(
    subject: LoadedModel,
    template: str,
    settings: dict[str, Any],
    own: dict[str, Any],
    expected: tuple[float, float, int],
) -> None:
    engine = with_chat_template(subject, template)
    engine.sampling_defaults = sampling_defaults(own)
    benchmark = BenchmarkConfig("b", "lm_eval", "none", **{"chat": True, **settings})
    resolved = resolved_sampling(engine, benchmark)
    assert (resolved.temperature, resolved.top_p, resolved.top_k) == expected
    if benchmark.chat and not benchmark.sampling.is_greedy:
        # the setting takes precedence over the template
        for thinking in (True, False):
            engine.tokenizer.thinking = thinking
            resolved = resolved_sampling(engine, benchmark)
            own_temperature = sampling_defaults(own).get("temperature") if thinking else None
            assert resolved.temperature == (benchmark.sampling.temperature or own_temperature or 0)


def test_several_greedy_answers_are_refused(subject: LoadedModel) -> None:
    with pytest.raises(ValueError, match="samples=3 with temperature=0"):
        Sampling(temperature=0.0, samples=3)
    with pytest.raises(UserError, match=r"sampling.samples=3.*expected sampling.temperature"):
        written(subject, {"1": PROMPT}, sampling=Sampling(samples=3))


def graded(benchmark: BenchmarkConfig, texts: list[list[str]], out: Path) -> Any:
    """The only result of `texts`, the answers to each item in order."""
    answers = []
    for item, of_item in zip(harness_of(benchmark).items(benchmark), texts, strict=True):
        prompt = str(item.requests[0].prompt)  # type: ignore[union-attr]
        for number, text in enumerate(of_item):
            answers.append(Answer(item.name, prompt, (Reply(text, "", "end"),), number))
    (result,) = run.grade(answers, benchmark, out, policy=Policy(True, "none"))
    return result


def lm_eval_task(folder: Path) -> tuple[BenchmarkConfig, list[list[str]]]:
    items = [{"q": f"Q{number}", "label": "a"} for number in range(2)]
    benchmark = custom_task(folder, items, GENERATION, max_new_tokens=9)
    return benchmark, [["a", "a", "b", "b"], ["b", "b", "b", "a"]]


def programs(folder: Path) -> tuple[BenchmarkConfig, list[list[str]]]:
    problems = shipped_items("humaneval", 2)
    file = write_lines(folder / "problems.jsonl", problems)
    right = [problem["canonical_solution"] for problem in problems]
    benchmark = BenchmarkConfig(
        "code", "evalplus", str(file), reports={"code": "plus"}, max_new_tokens=9
    )
    return benchmark, [[right[0], right[0], "", "pass"], ["", "", "", right[1]]]


def stories(folder: Path) -> tuple[BenchmarkConfig, list[list[str]]]:
    rule = [{"rule": "mentions", "text": "fox"}]
    rows = [{"id": f"{number}", "prompt": "A", "checklist": rule} for number in range(2)]
    file = write_lines(folder / "stories.jsonl", rows)
    benchmark = BenchmarkConfig("s", "stories", str(file), reports={"s": "score"}, max_new_tokens=9)
    return benchmark, [["fox", "fox", "dog", "dog"], ["dog", "dog", "dog", "fox"]]


@pytest.mark.parametrize("harness", [lm_eval_task, programs, stories])
def test_answers_are_replicates_within_items(harness: Any, tmp_path: Path) -> None:
    """The score is the mean, its error that of the items' means, and every answer has a row."""
    benchmark, texts = harness(tmp_path)
    result = graded(benchmark, texts, tmp_path / "out")
    assert (result["score"], result["n"]) == (0.375, 2)
    assert result["stderr"] == pytest.approx(math.sqrt(2) * 0.125 / math.sqrt(2))
    rows = samples(tmp_path / "out")
    outcomes = {(row["item"], row["replicate"]): row["outcome"] for row in rows}
    assert [row["replicate"] for row in sorted(rows, key=lambda row: row["item"])] == [
        *range(4),
        *range(4),
    ]
    assert list(dict(sorted(outcomes.items())).values()) == [1, 1, 0, 0, 0, 0, 0, 1]


def test_sampling_settings_are_in_the_result(tmp_path: Path) -> None:
    benchmark, _ = lm_eval_task(tmp_path)
    engine = ScriptedEngine(lambda _: "a")
    for sampling in (Sampling(), Sampling(temperature=0.7, samples=2)):
        run.evaluate(engine, replace(benchmark, sampling=sampling), tmp_path / "o", policy=Policy())
    assert protocol(tmp_path / "o")["sampling"] == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 0,
        "samples": 2,
    }
    assert sorted(row["replicate"] for row in samples(tmp_path / "o")) == [0, 0, 1, 1]


def test_greedy_benchmarks_keep_their_identity(tmp_path: Path) -> None:
    benchmark, _ = lm_eval_task(tmp_path)
    chat = replace(benchmark, chat=True)
    greedy = Sampling(temperature=0.0)
    identity = harness_of(benchmark).identity

    def identities(base: BenchmarkConfig, *settings: Sampling) -> list[Any]:
        return [identity(replace(base, sampling=sampling)) for sampling in settings]

    first, second = identities(benchmark, Sampling(), greedy)
    assert first == second
    distinct = identities(chat, Sampling(), greedy, WARM, replace(WARM, seed=1))
    assert len({repr(entry) for entry in distinct}) == 4


def test_greedy_texts_do_not_depend_on_the_setting(subject: LoadedModel) -> None:
    expected = generate(subject, [PROMPT], 12)
    assert generate(subject, [PROMPT], 12, sampling=Sampling(temperature=0.0)) == expected
    nearly = generate(subject, [PROMPT], 12, sampling=Sampling(temperature=1e-6))
    assert nearly == expected
