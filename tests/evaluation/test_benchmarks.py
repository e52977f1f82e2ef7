"""EvalPlus, stories and perplexity on the loaded model, and the folder an evaluation leaves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import torch
from asking import ask, write
from evalplus.provider.utility import EOS
from harness_files import write_lines

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import LIMITED, NAMESPACES, UNCONFINED, Policy, suite
from moe_lab.evaluation.engines import Written
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.harnesses import evalplus
from moe_lab.evaluation.run import evaluate
from moe_lab.evaluation.sandbox import client
from moe_lab.evaluation.sandbox.client import NoNamespaces, namespaces_missing
from moe_lab.paths import resolve
from moe_lab.results import Sample

ALLOWED = Policy(allow_code_execution=True, sandbox="none" if namespaces_missing() else "namespaces")
TEXT = "Karl took the spoon to the mill.\nThen it began to rain, and nobody was surprised. " * 12


def test_programs_are_completed_and_graded(
    subject: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right answers are made to be what the model writes; one problem wants something else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = Path(resolve("pocket:benchmarks/humaneval.jsonl")).read_text().splitlines()[:3]
    problems = [json.loads(line) for line in words]
    stop = ("\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert ", *EOS)
    written = write(subject, [row["prompt"].strip() + "\n" for row in problems], 64, stop=stop)
    for row, body in zip(problems, written, strict=True):
        row["canonical_solution"] = body
    problems[2]["canonical_solution"] = "    return 'something else'\n"
    data = write_lines(tmp_path / "mini.jsonl", problems)
    benchmark = BenchmarkConfig(
        name="mini",
        harness="evalplus",
        task=str(data),
        reports={"humaneval": "base", "humaneval_plus": "plus"},
        expected=3,
        max_new_tokens=64,
        parameters={"seconds": 0.5, "memory_mib": 512, "processes": 1},
    )
    eos = list(EOS)
    results = evaluate(subject, benchmark, tmp_path / "out", policy=ALLOWED)
    assert [(r["benchmark"], r["metric"], r["score"], r["n"]) for r in results] == [
        ("humaneval", "base", pytest.approx(2 / 3), 3),
        ("humaneval_plus", "plus", pytest.approx(2 / 3), 3),
    ]
    assert results[0]["stderr"] == pytest.approx(math.sqrt(2 / 9 / 2))
    assert eos == EOS, "EvalPlus's own list was changed"
    table = parquet.read_table(tmp_path / "out" / "samples.parquet").to_pylist()
    assert [row["output"] for row in table[:3]] == written
    assert [row["extracted"].splitlines()[0] for row in table[:3]] == [
        "pass",
        "pass",
        "fail: another value was expected",
    ]
    assert table[0]["extracted"].endswith(problems[0]["prompt"].strip() + "\n" + written[0])
    prompts, bodies = ([row[name] for row in problems] for name in ("prompt", "canonical_solution"))
    losses = [reply.loss for reply in ask(subject, prompts, 1, references=bodies)]
    assert [row["answer_loss"] for row in table] == pytest.approx([*losses, *losses], abs=1e-5)
    protocol = json.loads((tmp_path / "out" / "result.json").read_text())["protocol"]
    assert protocol["sandbox"] == (UNCONFINED if namespaces_missing() else NAMESPACES)
    assert protocol["prompt"] == problems[0]["prompt"].strip() + "\n"


def test_without_namespaces_only_closed_world_programs_of_shipped_benchmarks_run(
    subject: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise NoNamespaces("not on this machine")

    monkeypatch.setattr(client, "check_namespaces", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shipped = BenchmarkConfig(
        name="code",
        harness="evalplus",
        task="pocket:benchmarks/humaneval.jsonl",
        reports={"humaneval": "base"},
        max_new_tokens=32,
        limit=4,
        parameters={"seconds": 0.5},
    )
    evaluate(subject, shipped, tmp_path / "out", policy=Policy(True))
    assert json.loads((tmp_path / "out" / "result.json").read_text())["protocol"]["sandbox"] == LIMITED
    foreign = replace(shipped, task=resolve(shipped.task))
    with pytest.raises(UserError, match="sandbox=none"):
        evaluate(subject, foreign, tmp_path / "other", policy=Policy(True))
    assert not (tmp_path / "other").exists()
    monkeypatch.setattr(evalplus, "leaves_closed_world", lambda program: "the name open")
    evaluate(subject, shipped, tmp_path / "refused", policy=Policy(True))
    verdicts = parquet.read_table(tmp_path / "refused" / "samples.parquet")["extracted"].to_pylist()
    assert [verdict.splitlines()[0] for verdict in verdicts] == ["refused: not run: it uses the name open"] * 4


def test_stories_are_scored_by_the_share_of_their_rules(subject: LoadedModel, tmp_path: Path) -> None:
    prompt = (
        "Write a story about Karl, a spoon and the mill. Karl feels tired. End with: Then it began to rain.\nStory:"
    )
    (story,) = write(subject, [prompt], 48)
    word = story.split()[0].strip(".,")
    rules = [{"rule": "mentions", "text": word}, {"rule": "mentions", "text": "Xylophone"}]
    data = write_lines(
        tmp_path / "stories.jsonl",
        [
            {"id": "a", "prompt": prompt, "checklist": rules, "reference": story},
            {"id": "b", "prompt": prompt, "checklist": rules[:1]},
        ],
    )
    benchmark = BenchmarkConfig(
        name="s", harness="stories", task=str(data), reports={"wildbench": "score"}, max_new_tokens=48, expected=2
    )
    (result,) = evaluate(subject, benchmark, tmp_path / "out", policy=Policy())
    assert (result["score"], result["n"]) == (0.75, 2)
    first, second = parquet.read_table(tmp_path / "out" / "samples.parquet").to_pylist()
    assert first["answer_loss"] == pytest.approx(ask(subject, [prompt], 1, references=[story])[0].loss, abs=1e-5)
    assert second["answer_loss"] is None
    assert (first["item"], first["outcome"], first["output"], first["extracted"]) == ("a", 0.5, story, "[true, false]")


def test_perplexity_equals_an_independent_computation(subject: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    benchmark = BenchmarkConfig(
        name="perplexity",
        harness="perplexity",
        task=str(file),
        reports={"perplexity": "perplexity", "bits": "bits_per_byte", "loss": "loss"},
        parameters={"length": 64},
        batch_size=3,
    )
    perplexity, bits, loss = evaluate(subject, benchmark, tmp_path / "out", policy=Policy())
    ids = subject.tokenizer(TEXT).input_ids
    total, count, per_window = 0.0, 0, []
    for start in range(0, len(ids), 64):
        window = ids[start : start + 64]
        with torch.inference_mode():
            found = subject.model(torch.tensor([window])).logits[0].double().log_softmax(-1)
        losses = [-float(found[place, window[place + 1]]) for place in range(len(window) - 1)]
        total, count = total + sum(losses), count + len(losses)
        per_window.append(sum(losses) / len(losses) if losses else None)
    assert len(ids) % 64 > 1, "the last window is shorter, and counts by its tokens"
    assert loss["score"] == pytest.approx(total / count, rel=1e-5)
    assert perplexity["score"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert bits["score"] == pytest.approx(total / count * len(ids) / len(TEXT.encode()) / math.log(2), rel=1e-4)
    assert perplexity["n"] == len(per_window) > 3
    assert perplexity["stderr"] is not None and loss["stderr"] is not None
    assert perplexity["stderr"] == pytest.approx(loss["stderr"] * perplexity["score"])
    table = parquet.read_table(tmp_path / "out" / "samples.parquet").to_pylist()
    assert [row["outcome"] for row in table if row["benchmark"] == "loss"] == pytest.approx(per_window, rel=1e-4)


def test_the_folder_of_an_evaluation_is_whole_or_not_there(subject: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    benchmark = BenchmarkConfig(name="p", harness="perplexity", task=str(file), reports={"p": "loss"}, limit=2)
    evaluate(subject, benchmark, tmp_path / "out", policy=Policy())
    content = json.loads((tmp_path / "out" / "result.json").read_text())
    assert set(content) == {"schema", "results", "protocol", "versions"} and content["schema"] == 1
    assert content["protocol"]["data"] == suite.data_digest(benchmark)
    assert {"torch", "transformers"} <= set(content["versions"])
    columns = parquet.read_table(tmp_path / "out" / "samples.parquet").column_names
    assert columns == list(Sample.__annotations__) and {"replicate", "thought", "output", "ended"} < set(columns)
    hook = subject.model.lm_head.register_forward_hook(lambda module, given, logits: logits * math.nan)
    try:
        with pytest.raises(FloatingPointError, match="is nan"):
            evaluate(subject, benchmark, tmp_path / "broken", policy=Policy())
    finally:
        hook.remove()
    assert not (tmp_path / "broken").exists()


def test_half_a_character_can_be_stored(subject: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_lines(tmp_path / "s.jsonl", [{"id": "a", "prompt": "A", "checklist": [{"rule": "no_repeats"}]}])
    monkeypatch.setattr(LoadedModel, "generate", lambda *_: [Written("\ud800 half")])
    benchmark = BenchmarkConfig(name="s", harness="stories", task=str(data), reports={"s": "score"}, max_new_tokens=4)
    evaluate(subject, benchmark, tmp_path / "out", policy=Policy())
    assert parquet.read_table(tmp_path / "out" / "samples.parquet").to_pylist()[0]["output"] == "? half"


@pytest.mark.parametrize(
    ("changes", "says"), [({"parameters": {"length": 99999}}, "length"), ({"task": "nowhere.txt"}, "nowhere.txt")]
)
def test_a_mistake_leaves_no_folder(subject: LoadedModel, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    good = BenchmarkConfig(name="p", harness="perplexity", task=str(tmp_path / "text.txt"), reports={"p": "perplexity"})
    with pytest.raises(UserError, match=says):
        evaluate(subject, replace(good, **changes), tmp_path / "out", policy=Policy())
    assert not (tmp_path / "out").exists()
