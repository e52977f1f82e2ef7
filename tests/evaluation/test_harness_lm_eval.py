"""lm-eval on the loaded model: its numbers are those of an independent computation, and it leaves no trace."""

from __future__ import annotations

import json
import math
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from asking import equals_lm_eval, evaluate, write
from harness_files import write_lines
from omegaconf import OmegaConf

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import Policy
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.paths import resolve

ROOT = Path(__file__).parents[2]
ARC = BenchmarkConfig(
    name="arc", harness="lm_eval", task="pocket:benchmarks/arc_challenge.yaml", reports={"arc": "acc_norm"}, limit=24
)


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(resolve(f"pocket:benchmarks/{name}.jsonl")).read_text().splitlines()]


def log_likelihood(subject: LoadedModel, prompt: str, answer: str) -> float:
    """One unpadded forward pass."""
    before = subject.tokenizer(prompt).input_ids
    whole = subject.tokenizer(prompt + answer).input_ids
    with torch.inference_mode():
        logits = subject.model(torch.tensor([whole[:-1]])).logits[0].double().log_softmax(-1)
    return float(sum(logits[place - 1, whole[place]] for place in range(len(before), len(whole))))


def bits_per_byte(likelihood: float, answer: str) -> float:
    return float(-likelihood / np.log(2) / len(answer.encode()))


SHIPPED = sorted(
    file.stem
    for file in (ROOT / "conf/benchmark").glob("pocket_*.yaml")
    if "harness: lm_eval" in file.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_sample_is_that_of_lm_evals_own_evaluation(name: str, subject: LoadedModel) -> None:
    fields: Any = OmegaConf.to_container(OmegaConf.load(ROOT / f"conf/benchmark/{name}.yaml"))
    equals_lm_eval(subject, replace(BenchmarkConfig(**fields), limit=6))


def test_multiple_choice_equals_an_independent_script_to_the_item(subject: LoadedModel) -> None:
    reports = {"plain": "acc", "normalised": "acc_norm"}
    graded = evaluate(subject, replace(ARC, reports=reports, limit=40, batch_size=16), Policy())
    outcomes = {(sample["benchmark"], sample["item"]): sample["outcome"] for sample in graded.samples}
    for row in rows("arc_challenge")[:40]:
        scores = np.array([log_likelihood(subject, row["prompt"], " " + choice) for choice in row["choices"]])
        lengths = np.array([len(choice) for choice in row["choices"]])
        assert outcomes["plain", row["id"]] == float(scores.argmax() == row["label"])
        assert outcomes["normalised", row["id"]] == float((scores / lengths).argmax() == row["label"])
        (sample,) = [s for s in graded.samples if s["item"] == row["id"] and s["benchmark"] == "plain"]
        assert np.abs(np.array(json.loads(sample["output"])) - scores).max() < 1e-3
        assert sample["extracted"] == str(scores.argmax())
        right = " " + row["choices"][row["label"]]
        assert sample["answer_loss"] == pytest.approx(bits_per_byte(scores[row["label"]], right), abs=1e-4)
    mean = np.mean([value for (name, _), value in outcomes.items() if name == "plain"])
    assert graded.results[0]["score"] == pytest.approx(mean)
    assert graded.results[0]["stderr"] == pytest.approx(np.sqrt(mean * (1 - mean) / 39))


def test_choices_whose_contexts_differ_are_scored_by_their_common_ending(subject: LoadedModel) -> None:
    benchmark = BenchmarkConfig(
        name="w", harness="lm_eval", task="pocket:benchmarks/winogrande.yaml", reports={"winogrande": "acc"}, limit=12
    )
    graded = evaluate(subject, benchmark, Policy())
    for row, sample in zip(rows("winogrande")[:12], graded.samples, strict=True):
        scores = [log_likelihood(subject, context, " " + row["ending"]) for context in row["contexts"]]
        assert sample["outcome"] == float(np.argmax(scores) == row["label"])
        expected = bits_per_byte(scores[row["label"]], " " + row["ending"])
        assert sample["answer_loss"] == pytest.approx(expected, abs=1e-4)


def test_the_loss_of_a_worked_answer_is_that_of_all_its_text(subject: LoadedModel) -> None:
    reports = {"gsm8k": "exact_match"}
    benchmark = BenchmarkConfig(
        name="g", harness="lm_eval", task="pocket:benchmarks/gsm8k.yaml", reports=reports, limit=6, max_new_tokens=48
    )
    graded = evaluate(subject, benchmark, Policy())
    for row, sample in zip(rows("gsm8k")[:6], graded.samples, strict=True):
        answer = " " + row["target"]
        expected = bits_per_byte(log_likelihood(subject, row["prompt"], answer), answer)
        assert sample["answer_loss"] == pytest.approx(expected, abs=1e-4)
        assert sample["outcome"] == float(sample["extracted"] == row["target"].split("#### ")[1])
    (chat,) = {s["answer_loss"] for s in evaluate(_chatting(subject), replace(benchmark, chat=True), Policy()).samples}
    assert chat is None


def _chatting(subject: LoadedModel) -> LoadedModel:
    tokenizer = deepcopy(subject.tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return replace(subject, tokenizer=tokenizer)


@pytest.fixture
def story_task(subject: LoadedModel, tmp_path: Path) -> BenchmarkConfig:
    """A generation task whose right answers are what the model writes; the last is made wrong."""
    prompts = [row["prompt"] for row in rows("gsm8k")[:3]]
    texts = write(subject, prompts, 40)
    items = [
        {"id": f"a{n}", "prompt": p, "target": t.strip()} for n, (p, t) in enumerate(zip(prompts, texts, strict=True))
    ]
    items[-1]["target"] += "0"
    definition = {
        "task": "mini",
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "target",
        "generation_kwargs": {"until": ["<|endoftext|>"], "do_sample": False, "max_gen_toks": 3},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "filter_list": [{"name": "strip", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}],
    }
    (tmp_path / "mini.yaml").write_text(yaml.safe_dump(definition))
    write_lines(tmp_path / "mini.jsonl", items)
    return BenchmarkConfig(
        name="mini",
        harness="lm_eval",
        task=str(tmp_path / "mini.yaml"),
        reports={"mini": "exact_match"},
        expected=3,
        max_new_tokens=40,
    )


def test_generated_answers_are_graded_right_and_wrong(subject: LoadedModel, story_task: BenchmarkConfig) -> None:
    graded = evaluate(subject, story_task, Policy())
    assert [sample["outcome"] for sample in graded.samples] == [1.0, 1.0, 0.0]
    assert [sample["item"] for sample in graded.samples] == ["a0", "a1", "a2"]
    expected = write(subject, [row["prompt"] for row in rows("gsm8k")[:3]], 40)
    assert [sample["output"] for sample in graded.samples] == expected
    assert graded.protocol["prompt"] == rows("gsm8k")[0]["prompt"]
    assert evaluate(subject, replace(story_task, max_new_tokens=0), Policy()).samples[0]["output"] != expected[0]


def test_the_loss_on_the_right_answer_takes_no_pass_after_the_text(
    subject: LoadedModel, story_task: BenchmarkConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = evaluate(subject, story_task, Policy()).samples
    monkeypatch.setattr(LoadedModel, "score", None)
    found = evaluate(subject, story_task, Policy()).samples
    assert found == expected and None not in [sample["answer_loss"] for sample in found]


def test_changed_data_is_seen(subject: LoadedModel, story_task: BenchmarkConfig) -> None:
    """Task objects are kept over plans, but belong to the content of their files."""
    evaluate(subject, story_task, Policy())
    items = Path(story_task.task).with_suffix(".jsonl")
    changed = [{**json.loads(line), "target": "nothing"} for line in items.read_text().splitlines()]
    write_lines(items, changed)
    assert evaluate(subject, story_task, Policy()).results[0]["score"] == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reports": {"arc": "acc_nrom"}}, "did you mean acc_norm"),
        ({"reports": {"arc": "acc_norm,strict"}}, "filter=strict is unknown"),
        ({"expected": 113, "limit": None}, "has 112 items and should have 113"),
    ],
)
def test_mistakes_are_said(subject: LoadedModel, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        evaluate(subject, replace(ARC, **changes), Policy())


def test_a_task_that_samples_is_refused(subject: LoadedModel, story_task: BenchmarkConfig) -> None:
    definition = yaml.safe_load(Path(story_task.task).read_text())
    definition["generation_kwargs"] |= {"do_sample": True, "temperature": 0.7}
    Path(story_task.task).write_text(yaml.safe_dump(definition))
    with pytest.raises(UserError, match="ask for sampling"):
        evaluate(subject, story_task, Policy())


MULTIPLE_CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_choice": "{{c}}",
    "doc_to_target": "label",
    "metric_list": [{"metric": "acc"}],
}


def own_task(folder: Path, items: list[dict[str, Any]], definition: dict[str, Any], **settings: Any) -> BenchmarkConfig:
    """A benchmark with a task and items of its own."""
    (folder / "own.yaml").write_text(yaml.safe_dump({"task": "own", "test_split": "test", **definition}))
    write_lines(folder / "own.jsonl", items)
    task = BenchmarkConfig(name="own", harness="lm_eval", task=str(folder / "own.yaml"), reports={"own": "acc"})
    return replace(task, **settings)


class Unasked(LoadedModel):
    """The shipped model, which must not be run."""

    def score(self, *_: Any, **__: Any) -> Any:
        pytest.fail("the model was run")

    generate = score


CONTINUATIONS = [{"q": "A bird sleeps in a", "a": "nest"}, {"q": "A cat is a", "a": "animal"}]


@pytest.mark.parametrize("metric", ["perplexity", "perplexity,none"])
def test_perplexity_of_answers_is_that_of_their_mean_likelihood(
    subject: LoadedModel, tmp_path: Path, metric: str
) -> None:
    definition = {
        "output_type": "loglikelihood",
        "doc_to_text": "{{q}}",
        "doc_to_target": " {{a}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    }
    graded = evaluate(
        subject, own_task(tmp_path, CONTINUATIONS, definition, reports={"p": metric, "a": "acc"}), Policy()
    )
    likelihoods = [log_likelihood(subject, item["q"], f" {item['a']}") for item in CONTINUATIONS]
    perplexity, accuracy = graded.results
    assert perplexity["metric"] == metric
    assert perplexity["score"] == pytest.approx(math.exp(-np.mean(likelihoods)), rel=1e-3)
    half = (
        abs(likelihoods[0] - likelihoods[1]) / 2
    )  # the standard error of the mean of two, without correction / sqrt 2
    assert perplexity["stderr"] == pytest.approx(perplexity["score"] * half / np.sqrt(2), rel=1e-2)
    losses = [sample["outcome"] for sample in graded.samples if sample["benchmark"] == "p"]
    assert losses == pytest.approx([-likelihood for likelihood in likelihoods], abs=1e-3)
    assert accuracy["score"] in (0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    "metric",
    [
        {"metric": "mcc"},
        {"metric": "acc", "aggregation": "median", "higher_is_better": True},
    ],
    ids=lambda metric: metric["metric"],
)
def test_metrics_of_all_items_together_are_refused_before_the_model_is_asked(
    subject: LoadedModel, tmp_path: Path, metric: dict[str, Any]
) -> None:
    items = [{"q": f"A {word} is", "c": ["no", "yes"], "label": n % 2} for n, word in enumerate(("dog", "cat", "bird"))]
    metrics = [metric, {"metric": "acc_norm"}]
    benchmark = own_task(
        tmp_path, items, {**MULTIPLE_CHOICE, "metric_list": metrics}, reports={"own": metric["metric"]}
    )
    with pytest.raises(UserError, match=rf"own.*metric={re.escape(metric['metric'])}\b.*acc_norm"):
        evaluate(Unasked(subject.model, subject.tokenizer), benchmark, Policy())


def test_an_answer_without_a_token_of_its_own_is_refused(subject: LoadedModel, tmp_path: Path) -> None:
    """As where the end of the question and the answer are one token. Its likelihood is 1, whatever the model."""
    tokens = sorted(token for token in subject.tokenizer.get_vocab() if token.isascii() and token.isalpha())

    def is_one(text: str) -> bool:
        return len(subject.tokenizer(text).input_ids) == 1

    short, long = next((a, b) for a in tokens for b in tokens if b.startswith(a) and b != a and is_one(a) and is_one(b))
    merged = {"q": short, "c": [f"{short} {short}", long[len(short) :]], "label": 0}
    empty = {"q": "A bird sleeps in a", "c": [" nest", ""], "label": 0}
    only_space = {"q": "  ", "c": ["a nest", "a barn"], "label": 0}
    usual = {"q": "A dog sleeps in a", "c": [" kennel", " nest"], "label": 0}
    definition = {**MULTIPLE_CHOICE, "target_delimiter": ""}
    for item, value in ((merged, long[len(short) :]), (empty, ""), (only_space, "a nest")):
        with pytest.raises(UserError, match=re.escape(f"question={item['q']!r} answer={value!r}")):
            evaluate(Unasked(subject.model, subject.tokenizer), own_task(tmp_path, [usual, item], definition), Policy())
    assert evaluate(subject, own_task(tmp_path, [usual], definition), Policy()).results[0]["n"] == 1


NUMBERS = ["one", "two", "three", "four", "five", "six"]
NUMBERED = [{"q": f"Item number {word} is", "c": ["red", "blue"], "label": n % 2} for n, word in enumerate(NUMBERS)]


@pytest.mark.parametrize(
    ("shots", "definition"),
    [
        (3, {}),
        (0, {"num_fewshot": 3}),
        (0, {"num_fewshot": 3, "training_split": "train"}),
        (0, {"num_fewshot": 3, "fewshot_split": "dev", "fewshot_config": {"sampler": "first_n"}}),
        (3, {"test_split": None, "validation_split": "dev", "fewshot_split": "dev"}),
    ],
)
def test_an_item_is_not_among_its_own_examples(
    subject: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shots: int, definition: dict[str, Any]
) -> None:
    benchmark = own_task(tmp_path, NUMBERED, {**MULTIPLE_CHOICE, **definition}, shots=shots)
    asked: list[str] = []
    plain = LoadedModel.score

    def noting(self: LoadedModel, rows: Any, *rest: Any) -> Any:
        asked.extend(self.tokenizer.batch_decode([row.tokens for row in rows]))
        return plain(self, rows, *rest)

    monkeypatch.setattr(LoadedModel, "score", noting)
    evaluate(subject, benchmark, Policy())
    assert len(asked) == 12
    for prompt in asked:
        shown = [prompt.count(item["q"]) for item in NUMBERED]
        assert max(shown) == 1 and sum(shown) == (shots or 3) + 1


def test_more_examples_than_other_items_are_refused(subject: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"shots=6\b.*\b5 or fewer"):
        evaluate(subject, own_task(tmp_path, NUMBERED, MULTIPLE_CHOICE, shots=6), Policy())
    with pytest.raises(UserError, match=r"shots=5\b.*\b4 or fewer"):  # a copy of an item has its answer, too
        evaluate(subject, own_task(tmp_path, [*NUMBERED[:5], NUMBERED[0]], MULTIPLE_CHOICE, shots=5), Policy())


def test_listed_examples_are_shown_as_they_are(subject: LoadedModel, tmp_path: Path) -> None:
    listed = [{"q": "Snow is", "c": ["white", "red"], "label": 0}, {"q": "Blood is", "c": ["white", "red"], "label": 1}]
    definition = {**MULTIPLE_CHOICE, "num_fewshot": 2, "fewshot_config": {"samples": listed}}
    graded = evaluate(subject, own_task(tmp_path, NUMBERED, definition), Policy())
    assert graded.protocol["prompt"].count("Snow is white") == graded.protocol["prompt"].count("Blood is red") == 1


@pytest.mark.parametrize("label", [-1, 5, None, "1", "owl", [], [0, 5]])
@pytest.mark.parametrize("first", [True, False])
def test_an_item_without_a_right_choice_is_refused(
    subject: LoadedModel, tmp_path: Path, label: Any, first: bool
) -> None:
    known: Any = [1] if isinstance(label, list) else "nest" if isinstance(label, str) else 1
    items = [{"q": f"A {who} sleeps in a", "c": ["kennel", "nest"], "label": known} for who in ("bird", "dog", "hen")]
    items[0 if first else 1]["label"] = label
    benchmark = own_task(tmp_path, items, MULTIPLE_CHOICE)
    with pytest.raises(UserError, match=r"own.*label"):
        evaluate(Unasked(subject.model, subject.tokenizer), benchmark, Policy())
    if not first:
        assert evaluate(subject, replace(benchmark, limit=1), Policy()).results[0]["n"] == 1


def test_labels_are_numbers_texts_or_lists_of_choices(subject: LoadedModel, tmp_path: Path) -> None:
    for label in (1, "nest", [1], [0, 1]):
        items = [{"q": "A bird sleeps in a", "c": ["kennel", "nest"], "label": label}]
        graded = evaluate(subject, own_task(tmp_path, items, MULTIPLE_CHOICE), Policy())
        right = {1} if label != [0, 1] else {0, 1}
        assert graded.results[0]["score"] == float(int(graded.samples[0]["extracted"]) in right)


GENERATED = {
    "output_type": "generate_until",
    "doc_to_text": "{{q}}",
    "doc_to_target": "label",
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.mark.parametrize(("label", "choices"), [(-1, ["kennel", "nest"]), (None, None)])
def test_a_text_without_a_right_answer_is_refused(
    subject: LoadedModel, tmp_path: Path, label: Any, choices: list[str] | None
) -> None:
    definition = {**GENERATED, "doc_to_choice": "c"} if choices else GENERATED
    items = [{"q": "A bird sleeps in a", "c": choices, "label": of} for of in (1 if choices else "nest", label)]
    benchmark = own_task(tmp_path, items, definition, reports={"own": "exact_match"}, max_new_tokens=4)
    with pytest.raises(UserError, match=rf"item 1 .*label={re.escape(str(label))}\b"):
        evaluate(Unasked(subject.model, subject.tokenizer), benchmark, Policy())


@pytest.mark.parametrize("until", ["", [""], ["", "\n\n\n"]])
def test_an_empty_stop_text_ends_nothing(subject: LoadedModel, tmp_path: Path, until: Any) -> None:
    definition = {**GENERATED, "generation_kwargs": {"until": until, "do_sample": False}}
    items = [{"q": "A bird sleeps in a", "label": "nest"}]
    benchmark = own_task(tmp_path, items, definition, reports={"own": "exact_match"}, max_new_tokens=4)
    (sample,) = evaluate(subject, benchmark, Policy()).samples
    assert sample["output"] == write(subject, [items[0]["q"]], 4)[0] != ""
