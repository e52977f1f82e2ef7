"""lm-eval on shipped tasks, on its own and on those of users: its numbers are those of independent
scripts."""

import argparse
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import numpy as np
import pytest
from choices import read_choice
from fake_engines import (
    PLAIN,
    assert_equals_lm_eval,
    evaluate,
    generate,
    log_likelihood,
    problems,
    with_chat_template,
)
from harness_files import (
    BOOLQ,
    GENERATION,
    MINIATURES,
    MULTIPLE_CHOICE,
    RTE,
    Rows,
    custom_task,
    shipped_items,
    subject_rows,
    write_lines,
    write_mirror,
)
from lm_eval.api.filter import Filter
from lm_eval.api.registry import register_filter
from transformers import AutoTokenizer

from benchmarks import choices
from benchmarks.data_sets import file_name, mirror_files, write_data_set
from benchmarks.models import random_model
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import Policy, mirror, run
from moe_lab.evaluation.adapters import lm_eval_tasks
from moe_lab.evaluation.answers import collect_answers
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.harnesses.lm_eval import HARNESS
from moe_lab.evaluation.mirror import benchmarks
from moe_lab.paths import resolve

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    file.stem
    for file in (ROOT / "conf/benchmark").glob("pocket_*.yaml")
    if "harness: lm_eval" in file.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_sample_is_that_of_lm_evals_own_evaluation(name: str, subject: LoadedModel) -> None:
    assert_equals_lm_eval(
        subject, replace(read_choice(BenchmarkConfig, "benchmark", name), limit=6)
    )


WORKED = BenchmarkConfig(
    name="g",
    harness="lm_eval",
    task="pocket:benchmarks/gsm8k.yaml",
    reports={"gsm8k": "exact_match"},
    limit=6,
    max_new_tokens=48,
)


def test_loss_of_a_worked_answer_is_that_of_all_its_text(subject: LoadedModel) -> None:
    graded = evaluate(subject, WORKED)
    for row, sample in zip(shipped_items("gsm8k", 6), graded.samples, strict=True):
        answer = " " + row["target"]
        bits = -log_likelihood(subject, row["prompt"], answer) / math.log(2)
        assert sample["answer_loss"] == pytest.approx(bits / len(answer.encode()), abs=1e-4)
        assert sample["outcome"] == float(sample["extracted"] == row["target"].split("#### ")[1])


def test_chats_have_no_loss_of_answers(subject: LoadedModel) -> None:
    graded = evaluate(with_chat_template(subject, PLAIN), replace(WORKED, chat=True))
    assert {sample["answer_loss"] for sample in graded.samples} == {None}


def test_generated_answers_are_graded(subject: LoadedModel, tmp_path: Path) -> None:
    """The model's own texts are the right answers, but for the third."""
    prompts = [item["prompt"] for item in shipped_items("gsm8k", 3)]
    texts = generate(subject, prompts, 40)
    labels = [text.strip() + "0" * (number == 2) for number, text in enumerate(texts)]
    items = [
        {"id": f"a{number}", "q": prompts[number], "label": label}
        for number, label in enumerate(labels)
    ]
    filters = [{"function": "remove_whitespace"}, {"function": "take_first"}]
    definition = {
        **GENERATION,
        "generation_kwargs": {"until": ["<|endoftext|>"], "do_sample": False, "max_gen_toks": 3},
        "filter_list": [{"name": "strip", "filter": filters}],
    }
    task = custom_task(tmp_path, items, definition, max_new_tokens=40, expected=3)
    graded = evaluate(subject, task)
    outcomes = [(sample["item"], sample["outcome"]) for sample in graded.samples]
    assert outcomes == [("a0", 1), ("a1", 1), ("a2", 0)]
    assert [sample["output"] for sample in graded.samples] == texts
    assert None not in [sample["answer_loss"] for sample in graded.samples]
    assert graded.protocol["prompt"] == prompts[0]
    # max_new_tokens=0 leaves the length to the task
    cut = evaluate(subject, replace(task, max_new_tokens=0))
    assert cut.samples[0]["output"] != texts[0]
    # task objects are kept, but belong to the content of a file
    lines = [{**item, "label": "nothing"} for item in items]
    write_lines(Path(task.task).with_suffix(".jsonl"), lines)
    assert evaluate(subject, task).results[0]["score"] == 0


class Unasked(LoadedModel):
    """The shipped model, which must not be run."""

    def score(self, *_: Any, **__: Any) -> Any:
        pytest.fail("the model was run")

    generate = score


CONTINUATIONS = [{"q": "A bird sleeps in a", "a": "nest"}, {"q": "A cat is a", "a": "animal"}]


def test_answers_are_graded_by_their_likelihoods(subject: LoadedModel, tmp_path: Path) -> None:
    """By `acc`, whether the model would write the answer. Perplexities are refused."""
    definition = {
        "output_type": "loglikelihood",
        "doc_to_text": "{{q}}",
        "doc_to_target": " {{a}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    }
    reports = {"a": "acc", "a,none": "acc,none"}
    benchmark = custom_task(tmp_path, CONTINUATIONS, definition, reports=reports)
    graded = evaluate(subject, benchmark)
    values = [log_likelihood(subject, item["q"], f" {item['a']}") for item in CONTINUATIONS]
    assert graded.results[0]["score"] == graded.results[1]["score"]
    assert graded.results[0]["score"] in (0.0, 0.5, 1.0)
    outputs = [json.loads(str(sample["output"])) for sample in graded.samples[:2]]
    assert np.allclose(outputs, np.transpose([values]), atol=1e-3)
    with pytest.raises(UserError, match=r"metric=perplexity of own is a perplexity.*acc"):
        run.list_items(replace(benchmark, reports={"own": "perplexity"}))


@pytest.mark.parametrize("higher", [True, False])
def test_the_task_says_whether_less_is_better(
    subject: LoadedModel, tmp_path: Path, higher: bool
) -> None:
    metrics = [{"metric": "acc", "aggregation": "mean", "higher_is_better": higher}]
    definition = {**MULTIPLE_CHOICE, "metric_list": metrics}
    [result] = evaluate(
        subject, custom_task(tmp_path, NUMBERED, definition, reports={"a": "acc"})
    ).results
    assert result["scale"] == ("score" if higher else "loss")


def test_unknown_metric_or_filter_is_named(subject: LoadedModel, tmp_path: Path) -> None:
    for metric, says in (
        ("ac", "did you mean acc"),
        ("acc,strict", "filter of acc=strict is unknown"),
    ):
        with pytest.raises(UserError, match=says):
            evaluate(
                subject, custom_task(tmp_path, NUMBERED, MULTIPLE_CHOICE, reports={"own": metric})
            )


def merging_tokens(tokenizer: Any) -> tuple[str, str]:
    """A token, and a longer one that begins with it."""
    tokens = sorted(token for token in tokenizer.get_vocab() if token.isascii() and token.isalpha())
    single = [token for token in tokens if len(tokenizer(token).input_ids) == 1]
    return next(
        (short, long)
        for short in single
        for long in single
        if long.startswith(short) and long != short
    )


def test_answer_without_a_token_is_refused(subject: LoadedModel, tmp_path: Path) -> None:
    """As where the end of the question and the answer are one token. Its likelihood is 1, whatever
    the model."""
    short, long = merging_tokens(subject.tokenizer)
    rest = long[len(short) :]
    merged = {"q": short, "c": [f"{short} {short}", rest], "label": 0}
    empty = {"q": "A bird sleeps in a", "c": [" nest", ""], "label": 0}
    only_space = {"q": "  ", "c": ["a nest", "a barn"], "label": 0}
    usual = {"q": "A dog sleeps in a", "c": [" kennel", " nest"], "label": 0}
    definition = {**MULTIPLE_CHOICE, "target_delimiter": ""}
    for item, value in ((merged, rest), (empty, ""), (only_space, "a nest")):
        task = custom_task(tmp_path, [usual, item], definition)
        with pytest.raises(UserError, match=re.escape(f"question={item['q']!r} answer={value!r}")):
            evaluate(Unasked(subject.model, subject.tokenizer), task)
    assert evaluate(subject, custom_task(tmp_path, [usual], definition)).results[0]["n"] == 1


NUMBERS = ["one", "two", "three", "four", "five", "six"]
NUMBERED = [
    {"q": f"Item number {word} is", "c": ["red", "blue"], "label": n % 2}
    for n, word in enumerate(NUMBERS)
]


BIRD = {"q": "A bird sleeps in a", "c": ["kennel", "nest"]}
MEDIAN = {"metric": "acc", "aggregation": "median", "higher_is_better": True}


@pytest.mark.parametrize(
    ("items", "definition", "changes", "says"),
    [
        (NUMBERED, MULTIPLE_CHOICE, {"expected": 7}, "has 6 items and should have 7"),
        (NUMBERED, MULTIPLE_CHOICE, {"shots": 6}, r"shots=6\b.*\b5 or fewer"),
        # one is a copy
        ([*NUMBERED[:5], NUMBERED[0]], MULTIPLE_CHOICE, {"shots": 5}, r"shots=5\b.*\b4 or fewer"),
        (
            NUMBERED,
            {**GENERATION, "generation_kwargs": {"do_sample": True}},
            {},
            "request sampling",
        ),
        (
            NUMBERED[:3],
            {**MULTIPLE_CHOICE, "metric_list": [MEDIAN, {"metric": "acc_norm"}]},
            {},
            r"own.*metric=acc\b.*acc_norm",
        ),
        ([{**BIRD, "label": 1.0}], MULTIPLE_CHOICE, {}, "item 0 .*label=1.0"),
        ([{**BIRD, "label": ["nest"]}], MULTIPLE_CHOICE, {}, "item 0 .*label="),
        (
            [{"q": "A bird."}],
            {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}}"},
            {},
            "own scores whole documents: .*harness=perplexity",
        ),
        (
            [{**BIRD, "label": 1}, {**BIRD, "label": -1}],
            {**GENERATION, "doc_to_choice": "c"},
            {},
            "item 1 .*label=-1",
        ),
        (
            [{**BIRD, "label": "nest"}, {**BIRD, "label": None}],
            GENERATION,
            {},
            "item 1 .*label=None",
        ),
    ],
)
def test_task_that_cannot_be_asked_is_refused(
    subject: LoadedModel,
    tmp_path: Path,
    items: Rows,
    definition: dict[str, Any],
    changes: dict[str, Any],
    says: str,
) -> None:
    with pytest.raises(UserError, match=says):
        evaluate(
            Unasked(subject.model, subject.tokenizer),
            custom_task(tmp_path, items, definition, **changes),
        )


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
def test_no_item_shows_itself(
    subject: LoadedModel, tmp_path: Path, shots: int, definition: dict[str, Any]
) -> None:
    benchmark = custom_task(tmp_path, NUMBERED, {**MULTIPLE_CHOICE, **definition}, shots=shots)
    (answers,) = collect_answers(subject, [(benchmark, run.list_items(benchmark))])
    reseeded = replace(benchmark, parameters={"fewshot_seed": 1})
    is_drawn = "fewshot_config" not in definition
    assert (run.list_items(reseeded) != run.list_items(benchmark)) == is_drawn
    for answer, item in zip(answers, NUMBERED, strict=True):
        counts = [answer.prompt.count(str(other["q"])) for other in NUMBERED]
        assert max(counts) == 1
        assert sum(counts) == (shots or 3) + 1
        assert answer.prompt.endswith(str(item["q"]))


def test_listed_examples_are_shown_as_they_are(subject: LoadedModel, tmp_path: Path) -> None:
    listed = [
        {"q": "Snow is", "c": ["white", "red"], "label": 0},
        {"q": "Blood is", "c": ["white", "red"], "label": 1},
    ]
    definition = {**MULTIPLE_CHOICE, "num_fewshot": 2, "fewshot_config": {"samples": listed}}
    graded = evaluate(subject, custom_task(tmp_path, NUMBERED, definition))
    assert (
        graded.protocol["prompt"].count("Snow is white")
        == graded.protocol["prompt"].count("Blood is red")
        == 1
    )


@pytest.mark.parametrize("label", [-1, 5, None, "1", "owl", [], [0, 5]])
@pytest.mark.parametrize("position", [0, 1])
def test_item_without_a_right_choice_is_refused(
    subject: LoadedModel, tmp_path: Path, label: Any, position: int
) -> None:
    right: Any = [1] if isinstance(label, list) else "nest" if isinstance(label, str) else 1
    items = [
        {"q": f"A {who} sleeps in a", "c": ["kennel", "nest"], "label": right}
        for who in ("bird", "dog")
    ]
    items[position]["label"] = label
    benchmark = custom_task(tmp_path, items, MULTIPLE_CHOICE)
    with pytest.raises(UserError, match=r"own.*label"):
        evaluate(Unasked(subject.model, subject.tokenizer), benchmark)
    if position == 1:
        assert evaluate(subject, replace(benchmark, limit=1)).results[0]["n"] == 1


def test_labels_are_numbers_texts_or_lists_of_choices(subject: LoadedModel, tmp_path: Path) -> None:
    for label, right in ((1, {1}), ("nest", {1}), ([1], {1}), ([0, 1], {0, 1})):
        items = [{"q": "A bird sleeps in a", "c": ["kennel", "nest"], "label": label}]
        graded = evaluate(subject, custom_task(tmp_path, items, MULTIPLE_CHOICE))
        assert graded.results[0]["score"] == float(
            int(str(graded.samples[0]["extracted"])) in right
        )


CHOICES = [["nest", "in", "kennel by the old house", "a nest"], ["zq", "漢字", "éé", "😀😀😀"]]
CHOICE_METRICS = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match")
QUESTIONS = ("A bird sleeps in a", "A dog lives", "She found the", "It was")


@register_filter("second_likeliest_first")
class SecondLikeliestFirst(Filter):
    """Exchange the likelihoods of the likeliest choice and the next one."""

    def apply(self, resps: Any, docs: Any) -> Any:
        resps = [list(replies) for replies in resps]
        first, second = sorted(range(len(resps)), key=lambda index: -resps[index][0][0])[:2]
        resps[first], resps[second] = resps[second], resps[first]
        return [replies[0] for replies in resps]


@pytest.mark.parametrize("delimiter", [" ", ""])
@pytest.mark.parametrize("filter_name", ["take_first", "second_likeliest_first"])
def test_extracted_choice_is_the_one_that_the_metric_takes(
    subject: LoadedModel, tmp_path: Path, delimiter: str, filter_name: str
) -> None:
    """The outcome is 1 with this choice as label, and 0 with every other. Metrics take different
    choices; of other metrics than acc and acc_norm, none is extracted."""
    items = [
        {"q": question, "c": choices, "label": label}
        for question in QUESTIONS
        for choices in CHOICES
        for label in range(4)
    ]
    definition = {
        **MULTIPLE_CHOICE,
        "target_delimiter": delimiter,
        "filter_list": [{"name": "f", "filter": [{"function": filter_name}]}],
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True}
            for metric in CHOICE_METRICS
        ],
    }
    reports = {metric: metric for metric in CHOICE_METRICS}
    if filter_name != "take_first":  # which sees one item at a time
        items, reports = items[:1], {"acc": "acc"}
    graded = evaluate(subject, custom_task(tmp_path, items, definition, reports=reports))
    taken = {metric: [] for metric in reports}
    for sample, item in zip(graded.samples, items * len(reports), strict=True):
        choice = str(sample["extracted"])
        is_known = sample["benchmark"] in ("acc", "acc_norm")
        assert sample["outcome"] == float(str(item["label"]) == choice) or not is_known
        assert bool(choice) == is_known
        taken[sample["benchmark"]].append(choice)
    if filter_name == "take_first":
        assert taken["acc"] != taken["acc_norm"]


@pytest.mark.parametrize("metric", ["mcc", "f1", "f1_pass@2", "brier_score", "perplexity"])
def test_metrics_of_a_whole_set_are_refused(tmp_path: Path, metric: str) -> None:
    metrics = [{"metric": metric.partition("_pass")[0]}, {"metric": "acc"}]
    definition = {**MULTIPLE_CHOICE, "metric_list": metrics}
    with pytest.raises(UserError, match=f"metric={metric} of own .*no outcome of an item.*acc"):
        run.list_items(custom_task(tmp_path, NUMBERED, definition, reports={"own": metric}))


@pytest.mark.parametrize("until", ["", [""], ["", "\n\n\n"]])
def test_empty_stop_text_is_ignored(subject: LoadedModel, tmp_path: Path, until: Any) -> None:
    definition = {**GENERATION, "generation_kwargs": {"until": until, "do_sample": False}}
    items = [{"q": "A bird sleeps in a", "label": "nest"}]
    (sample,) = evaluate(
        subject, custom_task(tmp_path, items, definition, max_new_tokens=4)
    ).samples
    assert sample["output"] == generate(subject, [str(items[0]["q"])], 4)[0] != ""


@pytest.mark.parametrize(
    "name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"]
)
def test_generation_settings_are_followed(subject: LoadedModel, tmp_path: Path, name: str) -> None:
    """As by lm-eval, which is greedy where nothing is sampled, and takes max_gen_toks before other
    names."""
    greedy = {
        "do_sample": False,
        "temperature": 0.7,
        "top_p": 0.9,
        "num_beams": 1,
        "repetition_penalty": 1.0,
    }
    settings = {"max_completion_tokens": 7, name: 3, "until": "<none>", **greedy}
    items = [{"id": "1", "q": "A bird sleeps in a", "label": "nest"}]
    benchmark = custom_task(tmp_path, items, {**GENERATION, "generation_kwargs": settings})
    assert_equals_lm_eval(subject, benchmark)
    (sample,) = evaluate(subject, benchmark).samples
    assert sample["output"] == generate(subject, ["A bird sleeps in a"], 3)[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("repetition_penalty", 3.0),
        ("no_repeat_ngram_size", 2),
        ("min_new_tokens", 20),
        ("max_length", 20),
        ("max_gen_tok", 20),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("until", 5),
        ("until", [5]),
        ("temperature", 0.7),
    ],
)
def test_generation_settings_that_are_not_followed_are_refused(
    subject: LoadedModel, tmp_path: Path, name: str, value: Any
) -> None:
    definition = {**GENERATION, "generation_kwargs": {name: value}}
    items = [{"q": "A bird sleeps in a", "label": "nest"}]
    with pytest.raises(
        UserError,
        match=rf"own.*generation_kwargs.*{re.escape(str(value if name == 'max_tokens' else name))}",
    ):
        evaluate(
            Unasked(subject.model, subject.tokenizer), custom_task(tmp_path, items, definition)
        )


REAL = ("arc_challenge", "arc_easy", "openbookqa", "winogrande", "piqa", "mmlu")


@pytest.fixture(scope="module")
def reader() -> LoadedModel:
    """A random model that reads 4,096 tokens."""
    shape = argparse.Namespace(hidden=64, width=32, layers=2, top_k=2)
    return LoadedModel(
        random_model(8, shape), AutoTokenizer.from_pretrained(resolve("pocket:olmoe"))
    )


def mmlu_rows(benchmark: BenchmarkConfig, grades: Any) -> Rows:
    """The first row of each subject that was asked."""
    subsets = mirror.subsets(benchmark)
    items = [str(sample["item"]) for sample in grades.samples]
    subjects = [item.removeprefix("mmlu_").removesuffix("/0") for item in items]
    assert sorted(subjects) == sorted(subsets)[:8]
    return [mirror.read_rows(subsets[subject]["test"][0])[0] for subject in subjects]


@pytest.mark.parametrize("name", [*REAL, *sorted(MINIATURES)])
def test_choices_equal_those_of_an_independent_script_and_of_lm_eval(
    name: str,
    reader: LoadedModel,
    tmp_path: Path,
    published_data: Callable[[str, str], Path],
) -> None:
    """Up to eight questions of miniatures, and of what is published; `python -m
    benchmarks.evaluation` does it for every item."""
    if name in MINIATURES:
        benchmark = write_mirror(tmp_path, name, MINIATURES[name])
    else:
        (benchmark,) = benchmarks([name], str(tmp_path / "data"))
        file = published_data(file_name(benchmark), f"{benchmark.split} of {benchmark.data}")
        mirror_files(benchmark, file.parent, tmp_path)
    metrics = ["acc"] if name in ("boolq", "mmlu", "rte", "winogrande") else ["acc", "acc_norm"]
    reports = {metric: metric for metric in metrics}
    benchmark = replace(benchmark, limit=8, reports=reports, batch_size=5)
    assert problems([benchmark], Policy()) == []
    grades = evaluate(reader, benchmark)
    rows = mmlu_rows(benchmark, grades) if name == "mmlu" else mirror.rows(benchmark)[:8]
    for result in grades.results:
        samples = [sample for sample in grades.samples if sample["benchmark"] == result["metric"]]
        for sample, row in zip(samples, rows, strict=True):
            choice = choices.CHOICES[name](row)
            scores = choices.likelihoods(reader.model, reader.tokenizer, choice)
            assert sample["outcome"] == choices.outcome(scores, choice, result["metric"])
            assert np.allclose(json.loads(str(sample["output"])), scores, atol=1e-3)
            right = int(str(sample["extracted"])) == choice.label
            assert right == bool(sample["outcome"]), "the choice that is shown was graded"
        mean = np.mean([sample["outcome"] for sample in samples])
        assert result["n"] == len(rows)
        assert result["score"] == pytest.approx(mean)
    assert_equals_lm_eval(reader, benchmark)


def test_every_question_of_a_group_counts_the_same(reader: LoadedModel, tmp_path: Path) -> None:
    """Also when subjects have different numbers of them: no mean of means."""
    folder = Path(lm_eval.__file__).parent / "tasks/mmlu/default"
    subjects = sorted(file.stem.removeprefix("mmlu_") for file in folder.glob("mmlu_*.yaml"))
    rows = [row for name in subjects for row in subject_rows(name, 5 if name == "anatomy" else 1)]
    benchmark = write_mirror(tmp_path, "mmlu", rows)
    graded = evaluate(reader, benchmark)
    questions = [choices.CHOICES["mmlu"](row) for row in rows]
    outcomes = [
        choices.outcome(choices.likelihoods(reader.model, reader.tokenizer, c), c, "acc")
        for c in questions
    ]
    assert graded.results[0]["score"] == pytest.approx(np.mean(outcomes))
    assert len({sample["item"] for sample in graded.samples}) == graded.results[0]["n"] == 61
    limited = evaluate(reader, replace(benchmark, limit=59))
    assert len({str(sample["item"]).partition("/")[0] for sample in limited.samples}) == 57, (
        "each before any twice"
    )
    assert limited.results[0]["n"] == 59


def test_group_of_tasks_that_weigh_the_same_is_refused(tmp_path: Path) -> None:
    tasks = Path(lm_eval.__file__).parent / "tasks/bhs"
    row = {"context": "Bird sleeps in a", "ending_good": "nest.", "ending_bad": "kennel."}
    parts = {(file.stem, "test"): [row] for file in tasks.glob("basque-*.yaml")}
    benchmark = BenchmarkConfig(
        name="bhs_basque",
        harness="lm_eval",
        task="bhs_basque",
        data="owner/data",
        split="test",
        root=str(tmp_path / "data"),
        reports={"bhs": "acc"},
        parameters={"folder": "bhs"},
    )
    mirror.make(benchmark, write_data_set(tmp_path / "source", parts))
    with pytest.raises(UserError, match=r"tasks of bhs_basque weigh the same.*bhs__basque"):
        run.list_items(benchmark)


def test_perplexity_of_windows_equals_an_independent_computation(
    reader: LoadedModel, tmp_path: Path, published_data: Callable[[str, str], Path]
) -> None:
    """Of the first articles of WikiText-2; `python -m benchmarks.evaluation` takes all."""
    (benchmark,) = benchmarks(["wikitext2"], str(tmp_path / "data"))
    file = published_data(file_name(benchmark), f"{benchmark.split} of {benchmark.data}")
    lines = file.read_text().split("\n")[:200]
    (tmp_path / file.name).write_text("\n".join(lines) + "\n")
    mirror_files(replace(benchmark, expected=None), tmp_path, tmp_path / "source")
    windows = replace(benchmark, limit=3, parameters={"length": 256}, batch_size=2)
    text = "\n\n".join(row["text"] for row in mirror.rows(windows))
    (result,) = evaluate(reader, windows).results
    expected = choices.perplexity(reader.model, reader.tokenizer, text, 256, 3)
    assert result["score"] == pytest.approx(expected, rel=1e-4)
    assert result["n"] == 3


def test_examples_are_shown_and_drawn_the_same_every_time(
    reader: LoadedModel, tmp_path: Path
) -> None:
    benchmark = replace(write_mirror(tmp_path, "rte", RTE, train=RTE[::-1] * 2), shots=2)
    random.seed(1)
    first = evaluate(reader, benchmark)
    again = evaluate(reader, benchmark)
    lm_eval_tasks._tasks_by_identity.clear()
    random.seed(2)
    fresh = evaluate(reader, benchmark)
    assert first.samples == again.samples == fresh.samples
    assert first.protocol["prompt"].count("True or False?") == 3
    assert first.protocol["prompt"].endswith(f"{RTE[0]['sentence2']} True or False?\nAnswer:")
    assert_equals_lm_eval(reader, benchmark)
    with pytest.raises(UserError, match="split=train, but rte evaluates validation"):
        evaluate(reader, replace(benchmark, split="train"))
    with pytest.raises(UserError, match=r"shots=2, but boolq has 0 examples"):
        evaluate(reader, replace(write_mirror(tmp_path, "boolq", BOOLQ), shots=2))


GSM8K: Rows = [
    {
        "question": f"What is {n} and {n}?",
        "answer": f"It is <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}",
    }
    for n in (2, 3)
]


def test_generating_tasks_use_the_model(subject: LoadedModel, tmp_path: Path) -> None:
    benchmark = replace(
        write_mirror(tmp_path, "gsm8k_8shot", GSM8K), shots=1, max_new_tokens=12, max_length=None
    )
    graded = evaluate(subject, benchmark)
    prompt = graded.protocol["prompt"]
    assert prompt.startswith("Q: There are 15 trees")
    assert prompt.endswith("\n\nQ: What is 2 and 2?\nA:")
    written = generate(subject, [prompt], 12, stop=("Q:", "</s>", "<|im_end|>"))
    assert graded.samples[0]["output"] == written[0]
    with pytest.raises(
        UserError, match=r"filter of exact_match= is unknown .*flexible-extract, strict-match"
    ):
        evaluate(subject, replace(benchmark, reports={"gsm8k": "exact_match"}))
    with pytest.raises(UserError, match="do not fit the benchmark's 64 tokens"):
        evaluate(subject, replace(benchmark, max_length=64))


def test_chat_template_gets_its_arguments(subject: LoadedModel, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mark }}<assistant>"
    )
    benchmark = replace(
        write_mirror(tmp_path, "gsm8k_8shot", GSM8K), shots=1, max_new_tokens=4, chat=True
    )
    assert problems([benchmark], Policy()) == []
    prompt = evaluate(
        with_chat_template(subject, template, mark="<no thinking>"), benchmark
    ).protocol["prompt"]
    assert prompt.count("<user>") == 2
    assert prompt.endswith("<user>Q: What is 2 and 2?\nA:<no thinking><assistant>")


def test_nothing_but_the_mirror_is_read_and_nothing_is_left(
    reader: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    benchmark = replace(
        write_mirror(tmp_path, "hellaswag", MINIATURES["hellaswag"]), max_length=None
    )
    expected = evaluate(reader, benchmark).samples
    folder = tmp_path / "work/Rowan/hellaswag"  # as `datasets` would take a folder of that name
    folder.mkdir(parents=True)
    (folder / "validation.jsonl").write_text('{"label": "0"}\n')
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lm_eval_tasks._tasks_by_identity.clear()
    load_dataset = datasets.load_dataset
    capfd.readouterr()
    assert evaluate(reader, benchmark).samples == expected
    assert capfd.readouterr() == ("", "")
    assert datasets.load_dataset is load_dataset
    assert Path.cwd() == tmp_path / "work"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task": "boolqq"}, "task=boolqq is unknown: did you mean boolq"),
        ({"parameters": {"folder": "super_glue/bolq"}}, "did you mean super_glue/boolq"),
        ({"parameters": {"folder": "."}}, "parameters.folder=. is unknown"),
        ({"chat": True}, "chat=true with max_new_tokens=0: expected chat=false"),
        (
            {"data": "aps/superglue"},
            "has no mirror of it: moe-lab mirror boolq data_root=",
        ),
    ],
)
def test_mistakes_are_said_before_a_model_is_loaded(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    benchmark = write_mirror(tmp_path, "boolq", BOOLQ)
    assert problems([benchmark], Policy()) == []
    messages = problems([replace(benchmark, **changes)], Policy())
    assert len(messages) == 1 and says in messages[0], messages


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        ("include: base.yaml", r"own\.yaml has include=base\.yaml"),
        ("use_prompt: 'prompts.yaml:a'", r"own\.yaml has use_prompt="),
        ("class: tools.Task", r"own\.yaml has class="),
        ("group: two\ntask: [a, b]", r"own\.yaml has group="),
        ("doc_to_text: !function tools.prompt", r"own\.yaml cannot be read .*!function"),
        ("a: [", r"own\.yaml cannot be read"),
        ("a", r"own\.yaml=a: expected a task in lm-eval's format"),
    ],
)
def test_definition_with_code_or_other_files_is_refused(
    tmp_path: Path, definition: str, says: str
) -> None:
    """Before a model is loaded. Only the definition and the items identify the items."""
    benchmark = custom_task(tmp_path, NUMBERED, MULTIPLE_CHOICE)
    assert problems([benchmark], Policy()) == []
    (tmp_path / "own.yaml").write_text(definition)
    (sentence,) = problems([benchmark], Policy())
    assert re.search(says, sentence)


@pytest.mark.parametrize("metric", [{"metric": "acc2"}, {"metric": "acc", "hf_evaluate": True}])
def test_metric_of_other_packages_is_refused(tmp_path: Path, metric: dict[str, Any]) -> None:
    benchmark = custom_task(tmp_path, NUMBERED, {**MULTIPLE_CHOICE, "metric_list": [metric]})
    with pytest.raises(UserError, match=r"own: metric_list\.metric=acc"):
        run.list_items(benchmark)


@pytest.mark.parametrize("change", [{"doc_to_text": "{{q}}!"}, {"description": "Choose."}])
def test_definition_identifies_the_items(tmp_path: Path, change: dict[str, str]) -> None:
    benchmark = custom_task(tmp_path, NUMBERED, MULTIPLE_CHOICE)
    identity = HARNESS.question_identity(benchmark)
    items = [*HARNESS.items(benchmark)]
    changed = custom_task(tmp_path, NUMBERED, {**MULTIPLE_CHOICE, **change})
    assert HARNESS.question_identity(changed) != identity
    assert [*HARNESS.items(changed)] != items
