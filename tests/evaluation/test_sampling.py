"""Sampled texts: their distribution, their independence of the batch, whose settings count, and the
grading of several answers to an item."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engines import (
    PLAIN,
    ScriptedEngine,
    assert_only_answers_are_graded,
    collect_replies,
    generate,
    with_chat_template,
)
from harness_files import GENERATION, custom_task, shipped_items, write_lines
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
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
from moe_lab.evaluation.harness import harness_of, with_item_outcomes
from moe_lab.evaluation.items import Item, Pair, Reply, Text

WARM = Sampling(temperature=1.5, samples=3)
BENCHMARK = BenchmarkConfig("b", "lm_eval", "none", sampling=WARM, max_new_tokens=12)
PROMPT = "The story"
DRAWS = 2000


@pytest.mark.parametrize(
    ("settings", "warpers"),
    [
        ({"temperature": 1.0, "min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        (
            {"temperature": 2.0, "top_k": 6, "top_p": 0.6},
            [TemperatureLogitsWarper(2.0), TopKLogitsWarper(6), TopPLogitsWarper(0.6)],
        ),
    ],
)
def test_tokens_have_the_probabilities_of_transformers(
    settings: dict[str, Any], warpers: list[Any]
) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    numbers = torch.rand(DRAWS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    distribution = Sampling(**settings).resolved({}).distribution
    drawn = drawn_tokens(logits.expand(DRAWS, 12), numbers, **distribution)
    counts = torch.bincount(drawn, minlength=12)
    expected = LogitsProcessorList(warpers)(None, logits)[0].double().softmax(-1) * DRAWS
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert chisquare(counts[possible], expected[possible]).pvalue > 1e-3


def test_a_text_depends_on_its_item_and_replicate_alone(subject: LoadedModel) -> None:
    """Neither on its batch nor on the right answer, whose loss is that beside a greedy text."""

    def written(names: str, **changes: Any) -> dict[Any, Reply]:
        items = [Item(name, (Text(PROMPT, 12, reference=" of"),)) for name in names]
        (answers,) = collect_answers(subject, [(replace(BENCHMARK, **changes), items)])
        return {(answer.item, answer.replicate): answer.reply for answer in answers}

    replies = written("abc")
    texts = {key: reply.text for key, reply in replies.items()}
    assert list(texts) == [(item, replicate) for item in "abc" for replicate in range(3)]
    assert len(set(texts.values())) > 6
    pairs = written("bd", batch_size=2, sampling=replace(WARM, samples=2))
    assert [pairs["b", number].text for number in (0, 1)] == [texts["b", 0], texts["b", 1]]
    assert written("abc", sampling=replace(WARM, seed=1)) != replies
    greedy = written("a", sampling=Sampling())["a", 0]
    losses = [reply.loss for reply in replies.values()]
    assert losses == [pytest.approx(greedy.loss, abs=1e-5)] * 9
    cold = Sampling(temperature=1e-6)
    assert written("a", sampling=cold)["a", 0].text == greedy.text
    assert written("a", sampling=Sampling(temperature=0.0))["a", 0].text == greedy.text


OWN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_new_tokens": 5}
ASSISTANT = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{% endfor %}"
)
PROMPTED = "{% if add_generation_prompt %}<think>\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "temperature", "own", "expected"),
    [
        (ASSISTANT, None, OWN, (0.6, 20)),
        (ASSISTANT, 0.9, OWN, (0.9, 20)),
        (ASSISTANT, None, {**OWN, "do_sample": False}, (0, 0)),
        (ASSISTANT, None, {"do_sample": True, "top_k": None}, (1.0, 0)),
        (ASSISTANT, None, {"do_sample": None, "temperature": 0.3}, (0.3, 0)),
        (PLAIN + PROMPTED, None, OWN, (0.6, 20)),
        (ASSISTANT + PROMPTED.replace("\n", "</think>"), None, OWN, (0, 0)),
        (PLAIN + "{# <think> #}", None, OWN, (0, 0)),
        (PLAIN, 0.9, OWN, (0.9, 0)),
    ],
)
def test_thinking_models_sample_by_their_own_settings(
    subject: LoadedModel,
    template: str,
    temperature: float | None,
    own: dict[str, Any],
    expected: tuple[float, int],
) -> None:
    engine = with_chat_template(subject, template)
    engine.sampling_defaults = sampling_defaults(own)
    benchmark = replace(BENCHMARK, chat=True, sampling=Sampling(temperature=temperature))
    resolved = resolved_sampling(engine, benchmark)
    assert (resolved.temperature, resolved.top_k) == expected
    completed = resolved_sampling(engine, replace(benchmark, chat=False))
    assert (completed.temperature, completed.top_k) == (temperature or 0, 0)
    engine.tokenizer.thinking = False  # model.thinking, which precedes the template
    assert resolved_sampling(engine, benchmark) == completed


def test_thoughts_have_tokens_of_their_own(subject: LoadedModel) -> None:
    engine = ScriptedEngine(lambda _: "", PLAIN + "<think>\n")
    settings = {"max_new_tokens": 24, "thinking_tokens": 900}
    for chat, tokens in ((True, 924), (False, 24)):
        generate(engine, [PROMPT], 24, chat=chat, **settings)
        assert engine.generation.max_tokens == tokens
    for text, reply in (
        ("a b </think> c d", Reply("c d", "a b </think> ", "end")),
        ("a b c </think> d", Reply(None, "a b c", "limit")),
        ("a </think> c d e", Reply("c d", "a </think> ", "limit")),
    ):
        engine.texts = lambda _, text=text: text
        replies = collect_replies(
            engine, [PROMPT], 2, chat=True, max_new_tokens=2, thinking_tokens=3
        )
        assert replies == [reply]
    thinker = with_chat_template(subject, PLAIN + PROMPTED)
    with pytest.raises(UserError, match="max_new_tokens=24 with thinking_tokens=900 do not fit"):
        generate(thinker, [PROMPT], 24, chat=True, **settings)


def test_several_greedy_answers_are_refused_and_likelihoods_are_not_sampled(
    subject: LoadedModel,
) -> None:
    benchmark = replace(BENCHMARK, sampling=Sampling(samples=3))
    with pytest.raises(UserError, match=r"sampling.samples=3.*expected sampling.temperature"):
        collect_answers(subject, [(benchmark, [])])
    items = [Item("a", (Pair("A cat", " sleeps"),))]
    ((answer,),) = collect_answers(subject, [(replace(benchmark, max_new_tokens=0), items)])
    assert answer.sampling is None


@pytest.mark.parametrize(
    ("metric", "outcomes"),
    [("pass@2", (5 / 6, 1 / 2)), ("pass@9", (1, 1)), ("avg@2", (1, 0)), ("own_maj@3,f", (1, 0))],
)
def test_answers_have_the_outcome_of_their_item(metric: str, outcomes: tuple[float, float]) -> None:
    """All answers count where some have no score, so that there are fewer than K."""
    of_answers: list[Any] = [
        {"item": item, "outcome": outcome, "extracted": str(outcome)}
        for item, of_item in (("a", [1, 1, 0, 0]), ("b", [0, 0, 0, 1]))
        for outcome in of_item
    ]
    first, second = outcomes
    found = [sample["outcome"] for sample in with_item_outcomes(of_answers, metric)]
    assert found == pytest.approx([first] * 4 + [second] * 4)


def lm_eval_task(folder: Path) -> BenchmarkConfig:
    items = [{"q": "Q", "label": "a"}]
    return custom_task(folder, items, GENERATION, max_new_tokens=9)


def test_thoughts_about_questions_and_stories_are_not_graded(tmp_path: Path) -> None:
    items = [{"q": f"Q{number}?", "label": str(number)} for number in range(3)]
    definition = {**GENERATION, "generation_kwargs": {"until": ["\n\n"]}}
    task = custom_task(tmp_path, items, definition, chat=True)
    answers = [(str(number), "9") for number in range(3)]
    assert_only_answers_are_graded(task, answers, tmp_path / "out")
    checklist = [{"rule": "mentions", "text": "Karl"}]
    rows = [{"id": n, "prompt": f"Story {n}:", "checklist": checklist} for n in range(3)]
    file = write_lines(tmp_path / "stories.jsonl", rows)
    stories = BenchmarkConfig("s", "stories", str(file), reports={"s": "score"})
    assert_only_answers_are_graded(stories, [("Karl.", "Vera.")] * 3, tmp_path / "stories")


def test_programs_in_thoughts_are_not_graded(tmp_path: Path) -> None:
    problems = shipped_items("humaneval", 3)
    file = write_lines(tmp_path / "problems.jsonl", problems)
    benchmark = BenchmarkConfig("code", "evalplus", str(file), reports={"own": "plus"}, chat=True)
    programs = [
        f"```python\n{problem['prompt']}{problem['canonical_solution']}```" for problem in problems
    ]
    answers = [(program, program.replace("return", "return 'wrong' #")) for program in programs]
    assert_only_answers_are_graded(benchmark, answers, tmp_path / "out", Policy(True, "none"))


@pytest.mark.parametrize(
    ("extracted", "outcome"),
    [
        (["2", "2", "7", "7.", "$7$"], 0.0),
        (["2", "2", "0.5", "1/2", r"\dfrac{1}{2}"], 0.0),
        (["2", "2", "1,000", "1000", "+1 000"], 0.0),
        (["2", "0", "0.00"], 0.0),
        (["7", "7", "2", "two", "2."], 1.0),  # right answers are equal, in whatever words
        (["1/0", "x", "2", "2"], 1.0),
        (["", "", "2"], 1.0),
        (["", ""], 0.0),
    ],
)
def test_equal_answers_are_votes_for_the_same(extracted: list[str], outcome: float) -> None:
    of_item: Any = [
        {"item": "a", "extracted": text, "outcome": float(text in ("2", "2.", "two"))}
        for text in extracted
    ]
    graded_samples = with_item_outcomes(of_item, f"maj@{len(extracted)}")
    assert [sample["outcome"] for sample in graded_samples] == [outcome] * len(extracted)


@pytest.mark.parametrize(
    ("metric", "sentence"),
    [
        ("pass@5", "sampling.samples=5"),
        ("maj@2", "expected pass@2"),
        ("bas_pass@2", "metric=bas"),
    ],
)
def test_wrong_metrics_of_several_answers_are_told(metric: str, sentence: str) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 9, "sampling": WARM, "reports": {"own": metric}}
    task = "pocket:benchmarks/humaneval.jsonl"
    benchmark = BenchmarkConfig("code", "evalplus", task, **settings)
    assert any(sentence in error for error in harness_of(benchmark).setting_errors(benchmark))


def test_tasks_of_lm_eval_name_the_metric_and_the_length_of_several_answers(tmp_path: Path) -> None:
    benchmark = lm_eval_task(tmp_path)
    unnamed = replace(benchmark, sampling=WARM, reports={"own": "maj@3"})
    assert "metric=maj@3" in " ".join(harness_of(unnamed).setting_errors(unnamed))
    with pytest.raises(UserError, match="max_new_tokens=256"):
        run.list_items(replace(benchmark, max_new_tokens=0, sampling=WARM))
    chat = replace(benchmark, max_new_tokens=0, chat=True)
    assert "max_new_tokens=0" in " ".join(harness_of(chat).setting_errors(chat))


def test_only_settings_that_change_texts_are_part_of_an_identity(tmp_path: Path) -> None:
    benchmark = lm_eval_task(tmp_path)
    chat = replace(benchmark, chat=True)
    same = [
        benchmark,
        replace(benchmark, sampling=Sampling(temperature=0.0)),
        replace(benchmark, thinking_tokens=5),
    ]
    distinct = [
        *(replace(chat, sampling=sampling) for sampling in (WARM, replace(WARM, seed=1))),
        *(replace(chat, thinking_tokens=tokens) for tokens in (0, 5)),
        replace(chat, system_prompt="Be brief."),
        chat,
    ]
    likelihoods = replace(benchmark, max_new_tokens=0)
    for each in (likelihoods, replace(likelihoods, chat=True)):
        warm = replace(each, sampling=WARM)
        assert harness_of(each).identity(warm) == harness_of(each).identity(each)
    identities = [repr(harness_of(each).identity(each)) for each in same + distinct]
    assert len(set(identities[: len(same)])) == 1
    assert len(set(identities)) == 1 + len(distinct)
