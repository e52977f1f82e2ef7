"""lm-eval's own tasks from mirrors: to the item what an independent script says, with nothing else read or left."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import equals_lm_eval, evaluate, write
from lm_eval.tasks import TaskManager
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from mirrors import BOOLQ, MINIATURES, RTE, Rows, mirrored, subject_rows
from transformers import AutoTokenizer

from benchmarks import choices
from benchmarks.data_sets import mirror_files
from benchmarks.models import random_model
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import Policy, mirror, suite
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.harness import Graded
from moe_lab.evaluation.harnesses import lm_eval_tasks
from moe_lab.evaluation.mirror import benchmarks
from moe_lab.paths import resolve

REAL = ("arc_challenge", "arc_easy", "openbookqa", "winogrande", "piqa", "mmlu")


@pytest.fixture(scope="module")
def reader() -> LoadedModel:
    """A random model that reads 4,096 tokens."""
    shape = argparse.Namespace(hidden=64, width=32, layers=2, top_k=2)
    return LoadedModel(random_model(8, shape), AutoTokenizer.from_pretrained(resolve("pocket:olmoe")))


def equals_the_script(graded: Graded, reader: LoadedModel, rows: Rows, name: str) -> None:
    """Outcomes, likelihoods and choices of every item."""
    samples = {metric: [s for s in graded.samples if s["benchmark"] == metric] for metric in ("acc", "acc_norm")}
    for number, row in enumerate(rows):
        choice = choices.CHOICES[name](row)
        scores = choices.likelihoods(reader.model, reader.tokenizer, choice)
        for metric, own in samples.items():
            if own:
                assert own[number]["outcome"] == choices.outcome(scores, choice, metric)
                assert np.allclose(json.loads(own[number]["output"]), scores, atol=1e-3)
                right = int(own[number]["extracted"]) == choice.label
                assert right == bool(own[number]["outcome"]), "what is said to be chosen is what was graded"
    for result in graded.results:
        own = [sample["outcome"] for sample in samples[result["metric"]]]
        assert result["n"] == len(own) == len(rows) and result["score"] == pytest.approx(np.mean(own))


def both(name: str) -> dict[str, str]:
    only = name in ("boolq", "mmlu", "rte", "winogrande")
    return {"acc": "acc"} if only else {"acc": "acc", "acc_norm": "acc_norm"}


@pytest.fixture(scope="module")
def real(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, BenchmarkConfig]:
    found = benchmarks(REAL, str(tmp_path_factory.mktemp("data")))
    for benchmark in found:
        mirror_files(benchmark, shared_data, tmp_path_factory.getbasetemp() / "published")
    return {benchmark.name: benchmark for benchmark in found}


@pytest.mark.parametrize("name", REAL)
def test_published_questions_equal_an_independent_script(
    reader: LoadedModel, real: dict[str, BenchmarkConfig], name: str
) -> None:
    """A slice; `python -m benchmarks.evaluation` does it for every item."""
    benchmark = replace(real[name], limit=8, reports=both(name), batch_size=5)
    graded = evaluate(reader, benchmark, Policy())
    subsets = mirror.subsets(benchmark)
    if name == "mmlu":
        first = [sample["item"].removeprefix("mmlu_").removesuffix("/0") for sample in graded.samples]
        assert sorted(first) == sorted(subsets)[:8]
        rows = [mirror.read_rows(subsets[subject]["test"][0])[0] for subject in first]
    else:
        rows = mirror.rows(benchmark)[:8]
    equals_the_script(graded, reader, rows, name)


@pytest.mark.parametrize("name", sorted(MINIATURES))
def test_miniatures_in_the_schema_of_the_hub_equal_an_independent_script(
    reader: LoadedModel, tmp_path: Path, name: str
) -> None:
    benchmark = replace(mirrored(tmp_path, name, MINIATURES[name]), reports=both(name))
    assert suite.preflight([benchmark], Policy()) == []
    equals_the_script(evaluate(reader, benchmark, Policy()), reader, MINIATURES[name], name)
    equals_lm_eval(reader, benchmark)


def test_every_question_of_a_group_counts_the_same(reader: LoadedModel, tmp_path: Path) -> None:
    """Also when subjects have different numbers of them: no mean of means."""
    rows = []
    for task in lm_eval_subjects():
        rows += subject_rows(task, 5 if task == "anatomy" else 1)
    benchmark = mirrored(tmp_path, "mmlu", rows)
    graded = evaluate(reader, benchmark, Policy())
    asked = [choices.CHOICES["mmlu"](row) for row in rows]
    outcomes = [choices.outcome(choices.likelihoods(reader.model, reader.tokenizer, c), c, "acc") for c in asked]
    assert graded.results[0]["score"] == pytest.approx(np.mean(outcomes))
    assert len({sample["item"] for sample in graded.samples}) == graded.results[0]["n"] == 61
    limited = evaluate(reader, replace(benchmark, limit=59), Policy())
    assert len({sample["item"].partition("/")[0] for sample in limited.samples}) == 57, "each subject before any twice"
    assert limited.results[0]["n"] == 59


def lm_eval_subjects() -> list[str]:
    import lm_eval

    folder = Path(lm_eval.__file__).parent / "tasks" / "mmlu" / "default"
    return sorted(file.stem.removeprefix("mmlu_") for file in folder.glob("mmlu_*.yaml"))


def test_perplexities_equal_independent_computations(reader: LoadedModel, shared_data: Path, tmp_path: Path) -> None:
    """Of the first articles of WikiText-2; `python -m benchmarks.evaluation` takes all of them."""
    lines = (shared_data / "wikitext2_test.txt").read_text().split("\n")[:200]
    (tmp_path / "wikitext2_test.txt").write_text("\n".join(lines) + "\n")
    windows, pages = benchmarks(["wikitext2", "wikitext2_word"], str(tmp_path / "data"))
    pages = replace(pages, expected=2, max_length=512)
    for benchmark in (windows, pages):
        mirror_files(replace(benchmark, expected=None), tmp_path, tmp_path / "source")
    windows = replace(windows, limit=3, parameters={"length": 256}, batch_size=2)
    text = "\n\n".join(row["text"] for row in mirror.rows(windows))
    (result,) = evaluate(reader, windows).results
    naive = choices.perplexity(reader.model, reader.tokenizer, text, 256, 3)
    assert result["score"] == pytest.approx(naive, rel=1e-4) and result["n"] == 3
    reports = {metric: metric for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte")}
    rows = mirror.rows(pages)
    pages = replace(pages, reports=reports, expected=len(rows))
    graded = evaluate(reader, pages, Policy())
    read = [(wikitext_detokenizer(row), row["page"]) for row in rows]
    naive = choices.word_perplexity(reader.model, reader.tokenizer, read, 512)
    word, byte, bits = graded.results
    words, size = sum(len(re.split(r"\s+", p)) for _, p in read), sum(len(p.encode()) for _, p in read)
    assert word["score"] == pytest.approx(naive, rel=1e-4)
    assert np.log(byte["score"]) * size == pytest.approx(np.log(naive) * words, rel=1e-4)
    assert bits["score"] == pytest.approx(np.log2(byte["score"]), rel=1e-6)
    assert word["stderr"] is not None and word["n"] == len(rows) > 1
    outcomes = [sample["outcome"] for sample in graded.samples if sample["benchmark"] == "word_perplexity"]
    assert min(outcomes) <= np.log(naive) <= max(outcomes)


def test_examples_are_shown_and_drawn_the_same_every_time(reader: LoadedModel, tmp_path: Path) -> None:
    benchmark = replace(mirrored(tmp_path, "rte", RTE, train=[*RTE[::-1], *BOOLQ_AS_RTE]), shots=2)
    random.seed(1)
    first = evaluate(reader, benchmark, Policy())
    again = evaluate(reader, benchmark, Policy())
    lm_eval_tasks._built.clear()
    random.seed(2)
    fresh = evaluate(reader, benchmark, Policy())
    assert first.samples == again.samples == fresh.samples
    assert first.protocol["prompt"].count("True or False?") == 3 and first.protocol["num_fewshot"] == 2
    assert first.protocol["prompt"].endswith(f"{RTE[0]['sentence2']} True or False?\nAnswer:")
    equals_lm_eval(reader, benchmark)
    with pytest.raises(UserError, match=r"shots=2, but boolq has 0 examples"):
        evaluate(reader, replace(mirrored(tmp_path, "boolq", BOOLQ), shots=2), Policy())


BOOLQ_AS_RTE: Rows = [
    {"sentence1": r["passage"], "sentence2": r["question"], "label": r["label"], "idx": 9} for r in BOOLQ
]


GSM8K: Rows = [
    {"question": f"What is {n} and {n}?", "answer": f"It is <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}"} for n in (2, 3)
]


def test_a_task_that_generates_does_so_through_the_subject(subject: LoadedModel, tmp_path: Path) -> None:
    benchmark = replace(mirrored(tmp_path, "gsm8k_8shot", GSM8K), shots=1, max_new_tokens=12, max_length=None)
    graded = evaluate(subject, benchmark, Policy())
    prompt = graded.protocol["prompt"]
    assert prompt.startswith("Q: There are 15 trees") and prompt.endswith("\n\nQ: What is 2 and 2?\nA:")
    written = write(subject, [prompt], 12, stop=("Q:", "</s>", "<|im_end|>"))
    assert graded.samples[0]["output"] == written[0]
    with pytest.raises(UserError, match=r"several filters: add one of strict-match, flexible-extract"):
        evaluate(subject, replace(benchmark, reports={"gsm8k": "exact_match"}), Policy())
    with pytest.raises(UserError, match="do not fit the benchmark's 64 tokens"):
        evaluate(subject, replace(benchmark, max_length=64), Policy())


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mark }}<assistant>"


def test_a_chat_template_gets_its_arguments(subject: LoadedModel, tmp_path: Path) -> None:
    from copy import copy

    tokenizer = copy(subject.tokenizer)
    tokenizer.chat_template = TEMPLATE
    talking = LoadedModel(subject.model, tokenizer, {"mark": "<no thinking>"})
    benchmark = replace(mirrored(tmp_path, "gsm8k_8shot", GSM8K), shots=1, max_new_tokens=4, chat=True)
    assert suite.preflight([benchmark], Policy()) == []
    prompt = evaluate(talking, benchmark, Policy()).protocol["prompt"]
    assert (
        prompt.count("<user>") == 2
        and prompt.endswith("<user>Q: What is 3 and 3?\nA:<no thinking><assistant>") is False
    )
    assert prompt.endswith("<user>Q: What is 2 and 2?\nA:<no thinking><assistant>")


def test_nothing_but_the_mirror_is_read_and_nothing_is_left(
    reader: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import datasets

    benchmark = replace(mirrored(tmp_path, "hellaswag", MINIATURES["hellaswag"]), max_length=None)
    expected = evaluate(reader, benchmark, Policy()).samples
    work = tmp_path / "work"
    (work / "Rowan" / "hellaswag").mkdir(parents=True)  # `datasets` would take a folder of that name
    (work / "Rowan" / "hellaswag" / "validation.jsonl").write_text('{"label": "0"}\n')
    monkeypatch.chdir(work)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lm_eval_tasks._built.clear()
    load_dataset = datasets.load_dataset
    capfd.readouterr()
    assert evaluate(reader, benchmark, Policy()).samples == expected
    assert capfd.readouterr() == ("", "")
    assert datasets.load_dataset is load_dataset and Path(os.getcwd()) == work
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task": "boolqq"}, "task=boolqq is unknown: did you mean boolq"),
        ({"parameters": {"folder": "super_glue/bolq"}}, "did you mean super_glue/boolq"),
        ({"parameters": {"folder": "."}}, "parameters.folder=. is unknown"),
        ({"chat": True}, "chat=true, but max_new_tokens=0 says that answers are scored"),
        ({"data": "aps/superglue"}, "has no mirror of it: python -m moe_lab.evaluation.mirror boolq data_root="),
    ],
)
def test_mistakes_are_said_before_a_model_is_loaded(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    benchmark = mirrored(tmp_path, "boolq", BOOLQ)
    assert suite.preflight([benchmark], Policy()) == []
    said = suite.preflight([replace(benchmark, **changes)], Policy())
    assert len(said) == 1 and says in said[0], said


def test_what_only_the_task_tells_is_said_too(reader: LoadedModel, tmp_path: Path) -> None:
    wrong = mirrored(tmp_path, "rte", RTE, test=RTE)
    with pytest.raises(UserError, match="split=test, but rte asks validation"):
        evaluate(reader, replace(wrong, split="test"), Policy())


def test_one_folder_is_indexed(reader: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexed: list[int] = []

    class Manager(TaskManager):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            indexed.append(len(self.task_index))

    monkeypatch.setattr(lm_eval_tasks, "TaskManager", Manager)
    passages = [{**BOOLQ[0], "passage": "salt " * n} for n in range(10)]
    evaluate(reader, mirrored(tmp_path, "boolq", passages), Policy())
    assert 0 < indexed[0] < 10
