"""What is wrong with benchmarks is said together and before torch; and what an evaluation leaves,
by four harnesses."""

import csv
import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import preloaded
import pytest
import torch
from evalplus.provider.utility import EOS
from fake_engines import (
    collect_replies,
    evaluate_into,
    generate,
    made_up_answers,
    problems,
    protocol,
    samples,
)
from harness_files import GARBAGE, shipped_items, write_lines
from hypothesis import given, settings
from identities.plans import random_plan

from benchmarks.measure import program_isolation
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation import Policy, fidelity
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.harness import benchmark_errors, harness_of
from moe_lab.evaluation.harnesses import evalplus
from moe_lab.evaluation.harnesses.perplexity import HARNESS as PERPLEXITY
from moe_lab.evaluation.sandbox import client, isolation
from moe_lab.paths import resolve
from moe_lab.pruning.mask import mask
from moe_lab.result_files import Sample, TextMeasures

ROOT = Path(__file__).parents[2]

CODE = BenchmarkConfig(
    name="code",
    harness="evalplus",
    task="pocket:benchmarks/humaneval.jsonl",
    reports={"humaneval": "base"},
    expected=60,
    max_new_tokens=8,
)


def test_preflight_reports_all_problems_together() -> None:
    benchmarks = [
        CODE,
        replace(CODE, name="gone", task="gone.jsonl"),
        replace(CODE, name="count", expected=164),
    ]
    messages = problems(benchmarks, Policy(False))
    for says in ("allow_code_execution=false", "gone.jsonl", "60 items and should have 164"):
        assert sum(says in sentence for sentence in messages) == 1, says
    assert any(
        sentence.startswith("benchmarks code and count both report") for sentence in messages
    )
    assert problems([CODE], Policy(True, "none")) == []


def test_preflight_and_grading_import_no_torch() -> None:
    program = (
        "import sys\nfrom dataclasses import replace\nfrom pkgutil import iter_modules\n"
        "from moe_lab.evaluation.harness import benchmark_errors\n"
        "from moe_lab.config import BenchmarkConfig as B\n"
        "from moe_lab.config.evaluation import HARNESSES\nfrom moe_lab.evaluation.harness import "
        "harness_of\n"
        "from moe_lab.evaluation.harnesses import evalplus\nimport moe_lab.result_files\n"
        "b = B(name='b', harness='evalplus', task='pocket:benchmarks/mbpp.jsonl', reports={'m': "
        "'base'})\n"
        "assert len(benchmark_errors([b])) == 1\n"
        "for name in iter_modules([str(HARNESSES)]):\n"
        "    harness_of(replace(b, harness=name.name))\n"
        "evalplus.HARNESS.identity(b)\n"
        "heavy = {'torch', 'transformers', 'lm_eval', 'evalplus', 'datasets', 'pandas', "
        "'pyarrow', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "from moe_lab.evaluation import answers, run\nfrom moe_lab.evaluation.adapters import "
        "evalplus\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_identity_follows_content_and_settings_not_place(tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(Path(resolve(CODE.task)).read_bytes())
    known = evalplus.HARNESS.identity(CODE)
    for same in ({"task": str(copy)}, {"name": "other"}, {"parameters": {"processes": 3}}):
        assert evalplus.HARNESS.identity(replace(CODE, **same)) == known, same  # type: ignore[arg-type]
    copy.write_bytes(copy.read_bytes() + b"\n")
    changes: tuple[dict[str, Any], ...] = (
        {"task": str(copy)},
        {"limit": 3},
        {"batch_size": 1},
        {"max_new_tokens": 9},
        {"parameters": {"seconds": 1}},
        {"reports": {}},
    )
    for values in changes:
        assert evalplus.HARNESS.identity(replace(CODE, **values)) != known, values  # type: ignore[arg-type]


@pytest.fixture
def fresh_sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has not found out yet what this machine can do."""
    monkeypatch.setattr(client, "PAUSE", 0.0)
    isolation.missing.cache_clear()
    client.check_runner.cache_clear()
    yield
    isolation.missing.cache_clear()
    client.check_runner.cache_clear()


@pytest.mark.usefixtures("fresh_sandbox")
@pytest.mark.parametrize(
    ("sandbox", "version", "bwrap", "expected"),
    [
        ("auto", 7, "/usr/bin/bwrap", "landlock"),
        ("auto", 0, "/usr/bin/bwrap", "bubblewrap"),
        ("auto", 0, None, "Landlock.*bwrap"),
        ("landlock", 0, "/usr/bin/bwrap", "Landlock"),
        ("bubblewrap", 7, "/usr/bin/bwrap", "bubblewrap"),
        ("bubblewrap", 7, None, "bwrap"),
        ("none", 0, None, "none"),
    ],
)
def test_the_sandbox_setting_selects_the_isolation(
    monkeypatch: pytest.MonkeyPatch, sandbox: str, version: int, bwrap: str | None, expected: str
) -> None:
    """On kernels with and without Landlock, the second of which is only pretended."""
    monkeypatch.setattr(isolation, "landlock_version", lambda: version)
    monkeypatch.setattr(isolation.shutil, "which", lambda program: bwrap)
    monkeypatch.setattr(client, "start", lambda kind: nullcontext())
    monkeypatch.setattr(nullcontext, "close", lambda self: None, raising=False)
    if expected in ("landlock", "bubblewrap", "none"):
        assert Policy(True, sandbox).program_sandbox() == expected
    else:
        with pytest.raises(UserError, match=f"sandbox={sandbox} .*{expected}.*sandbox=none"):
            Policy(True, sandbox).program_sandbox()
    with pytest.raises(UserError, match=r"allow_code_execution=false"):
        Policy(False, sandbox).program_sandbox()


def broken_starts(monkeypatch: pytest.MonkeyPatch, count: int, how: str) -> list[str]:
    """Let the next starts of the sandbox fail. Returns what failed so far."""
    failed: list[str] = []
    plain = client.runner_command

    def command(kind: str) -> tuple[list[str], dict[str, str]]:
        if len(failed) == count:
            return plain(kind)
        failed.append(how)
        if how == "no process":
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], {}

    monkeypatch.setattr(client, "runner_command", command)
    return failed


@pytest.mark.usefixtures("fresh_sandbox")
@pytest.mark.parametrize("how", ["no process", "killed"])
def test_failed_sandbox_start_is_repeated_not_weakened(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with monkeypatch.context() as three_times:
        broken_starts(three_times, 3, how)
        with pytest.raises(Unavailable, match="sandbox=auto"):
            Policy(True).program_sandbox()
    failed = broken_starts(monkeypatch, 1, how)  # the failure before is not remembered
    assert Policy(True).program_sandbox() == program_isolation()
    assert failed == [how]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"shots": 3}, "shots=3: evalplus has no shots"),
        ({"parameters": {"seconds": "abc"}}, "parameters.seconds=abc: expected a number"),
        ({"parameters": {"memory_mib": 0}}, "parameters.memory_mib=0"),
        ({"parameters": {"processes": True}}, "parameters.processes=True: expected a whole"),
        ({"parameters": {"memory_mib": 0.5}}, "parameters.memory_mib=0.5: expected a whole"),
        (
            {"harness": "perplexity", "reports": {"p": "kl"}, "parameters": {"top": 0}},
            "parameters.top=0: expected a whole number, 1 or more",
        ),
        ({"parameters": {"as_harness": "no"}}, "parameters.as_harness=no: expected true or false"),
        (
            {"harness": "stories", "reports": {"s": "score"}, "chat": True},
            "chat=true: stories has no chat",
        ),
    ],
)
def test_settings_that_cannot_be_or_would_do_nothing_are_told(
    changed: dict[str, Any], says: str
) -> None:
    assert any(says in sentence for sentence in benchmark_errors([replace(CODE, **changed)]))


CALLS = ROOT / "examples/function_calls/questions.jsonl"
QUESTIONS = {
    "evalplus": {"task": CODE.task, "parameters": {"seconds": 0.5}},
    "stories": {"task": "pocket:benchmarks/wildbench.jsonl"},
    "lm_eval": {"task": "pocket:benchmarks/math500.yaml", "max_new_tokens": 48},
    "function_calls": {"task": str(CALLS), "parameters": {"answers": "answers.jsonl"}},
}
METRICS = {
    "evalplus": "base",
    "stories": "score",
    "lm_eval": "exact_match",
    "function_calls": "acc",
}


@pytest.mark.slow
@pytest.mark.parametrize("harness", QUESTIONS)
@settings(max_examples=10, deadline=None)
@given(text=GARBAGE)
def test_garbage_costs_only_its_own_item(harness: str, text: str) -> None:
    reports = {"result": METRICS[harness]}
    benchmark = BenchmarkConfig(
        "b", harness, reports=reports, chat=True, limit=2, **QUESTIONS[harness]
    )

    def outcomes(first: str) -> list[float]:
        answers = made_up_answers(benchmark, [first, "other"])
        policy = Policy(True, program_isolation())
        graded = harness_of(benchmark).grade(answers, benchmark, policy)
        return [sample["outcome"] for sample in graded.samples]

    assert outcomes(text)[0] < 1
    assert outcomes(text)[1:] == outcomes("other")[1:]


OTHER_BODY = "    return 'something else'\n"
STOP = ("\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert ", *EOS)


def test_programs_are_completed_and_run(subject: LoadedModel, tmp_path: Path) -> None:
    """Three problems: two whose right answer is what the model generates, and another."""
    problems = shipped_items("humaneval", 3)
    prompts = [problem["prompt"].strip() + "\n" for problem in problems]
    texts = generate(subject, prompts, 64, stop=STOP)
    right = [*texts[:2], OTHER_BODY]
    for problem, body in zip(problems, right, strict=True):
        problem["canonical_solution"] = body
    data = write_lines(tmp_path / "problems.jsonl", problems)
    limits = {"seconds": 0.5, "memory_mib": 512, "processes": 1}
    benchmark = replace(CODE, task=str(data), expected=3, max_new_tokens=64, parameters=limits)
    policy = Policy(True, sandbox=program_isolation())
    (result,) = evaluate_into(subject, benchmark, tmp_path, policy=policy)
    rows = samples(tmp_path)
    assert [row["output"] for row in rows] == texts
    verdicts = [row["extracted"].partition("\n")[0] for row in rows]
    assert verdicts == ["pass", "pass", "fail: another value was expected"]
    assert rows[0]["extracted"].endswith(prompts[0] + texts[0])
    assert (result["score"], result["n"]) == (pytest.approx(2 / 3), 3)
    assert result["stderr"] == pytest.approx(math.sqrt(2 / 9 / 2))
    losses = [reply.loss for reply in collect_replies(subject, prompts, 1, references=right)]
    assert [row["answer_loss"] for row in rows] == pytest.approx(losses, abs=1e-5)
    content = protocol(tmp_path)
    assert content["sandbox"] == program_isolation()
    assert content["prompt"] == prompts[0]
    item = next(evalplus.HARNESS.items(benchmark))
    assert set(EOS) <= set(item.requests[0].stop)  # type: ignore[union-attr]
    assert tuple(EOS) == STOP[5:], "EvalPlus's own list was changed"


STORY_PROMPT = (
    "Write a story about Karl, a spoon and the mill. End with: Then it began to rain.\nStory:"
)


def test_stories_are_scored_by_the_share_of_their_rules(
    subject: LoadedModel, tmp_path: Path
) -> None:
    """The first of two stories has itself as its reference, and so its loss."""
    (story,) = generate(subject, [STORY_PROMPT], 48)
    names = (story.split()[0].strip(".,"), "Xylophone")
    rules = [{"rule": "mentions", "text": name} for name in names]
    items = [
        {"id": "a", "prompt": STORY_PROMPT, "checklist": rules, "reference": story},
        {"id": "b", "prompt": STORY_PROMPT, "checklist": rules[:1]},
    ]
    data = write_lines(tmp_path / "stories.jsonl", items)
    benchmark = BenchmarkConfig(
        "s", "stories", str(data), reports={"s": "score"}, max_new_tokens=48, expected=2
    )
    (result,) = evaluate_into(subject, benchmark, tmp_path, policy=Policy())
    first, second = samples(tmp_path)
    assert (first["item"], first["output"]) == ("a", story)
    assert (first["outcome"], first["extracted"]) == (0.5, "[true, false]")
    assert second["outcome"] == 1
    assert (result["score"], result["n"]) == (0.75, 2)
    (reply,) = collect_replies(subject, [STORY_PROMPT], 1, references=[story])
    assert first["answer_loss"] == pytest.approx(reply.loss, abs=1e-5)
    assert second["answer_loss"] is None


def test_stories_of_the_same_id_are_refused(subject: LoadedModel, tmp_path: Path) -> None:
    story = {"id": "a", "prompt": STORY_PROMPT, "checklist": [{"rule": "mentions", "text": "x"}]}
    data = write_lines(tmp_path / "stories.jsonl", [story, {**story, "prompt": "Another story:"}])
    reports = {"s": "score"}
    benchmark = BenchmarkConfig("s", "stories", str(data), reports=reports, max_new_tokens=8)
    with pytest.raises(UserError, match=r"\bs\b.*\ba$"):
        evaluate_into(subject, benchmark, tmp_path, policy=Policy())


TEXT = "Karl took the spoon to the mill.\nThen it began to rain, and nobody was surprised. " * 12
WINDOW = 64


@pytest.fixture(scope="module")
def measured(subject: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The perplexity of a text by a masked model and its distance from the unpruned model, by name;
    and the log-probabilities of each token's prediction by both, window by window, in fp64. The
    last window is shorter than others."""
    folder = tmp_path_factory.mktemp("perplexity")
    (folder / "text.txt").write_text(TEXT)
    benchmark = BenchmarkConfig(
        name="perplexity",
        harness="perplexity",
        task=str(folder / "text.txt"),
        reports={name: name for name in ("perplexity", "kl", "disagreement")},
        parameters={"length": WINDOW},
        batch_size=3,
    )
    vocabulary = subject.model.config.vocab_size

    def run_model(out: Path, read: Any) -> tuple[Any, list[torch.Tensor]]:
        engine = replace(subject, compare=fidelity.Comparison(vocabulary, folder / "stored", read))
        results = evaluate_into(engine, benchmark, out, policy=Policy())
        ids = torch.tensor(subject.tokenizer(TEXT).input_ids)
        with torch.inference_mode():
            logits = [subject.model(window[None]).logits[0, :-1] for window in ids.split(WINDOW)]
        by_name = {result["benchmark"]: result for result in results}
        return by_name, [window.double().log_softmax(-1) for window in logits]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fidelity, "LOGITS", 20 * vocabulary)  # several blocks in each window
        unpruned, log_p = run_model(folder / "unpruned", None)
        with mask(subject.model, random_plan(subject.model, "even")):
            results, log_q = run_model(folder, lambda name: (folder / "stored" / name).read_bytes())
    return SimpleNamespace(
        folder=folder,
        benchmark=benchmark,
        unpruned=unpruned,
        results=results,
        windows=list(zip(log_p, log_q, strict=True)),
    )


def test_perplexity_and_distance_equal_an_independent_computation(
    measured: Any, subject: LoadedModel
) -> None:
    """Samples of windows average to the result by their tokens."""
    windows = torch.tensor(subject.tokenizer(TEXT).input_ids).split(WINDOW)
    window_losses = [
        -log_q.gather(1, window[1:, None])[:, 0]
        for window, (_, log_q) in zip(windows, measured.windows, strict=True)
    ]
    assert 1 < len(window_losses[-1]) < WINDOW - 1
    assert len(window_losses) > 3
    losses = torch.cat(window_losses)
    mean = float(losses.mean())
    log_p, log_q = (torch.cat(windows) for windows in zip(*measured.windows, strict=True))
    kl = float((log_p.exp() * (log_p - log_q)).sum(1).mean())
    disagreement = float((log_p.argmax(1) != log_q.argmax(1)).double().mean())
    for name, expected, scale, unit in (
        ("perplexity", math.exp(mean), "perplexity", "nats per token"),
        ("kl", kl, "loss", "nats per token"),
        ("disagreement", disagreement, "loss", "share of tokens"),
    ):
        result = measured.results[name]
        assert result["score"] == pytest.approx(expected, rel=1e-4)
        assert (result["scale"], result["unit"]) == (scale, unit)
        assert result["n"] == len(window_losses)
    assert 0 == measured.unpruned["kl"]["score"] == measured.unpruned["disagreement"]["score"] < kl
    rows = [row for row in samples(measured.folder) if row["benchmark"] == "perplexity"]
    outcomes = [float(window.mean()) for window in window_losses]
    counts = [len(window) for window in window_losses]
    assert [row["outcome"] for row in rows] == pytest.approx(outcomes, rel=1e-4)
    assert [row["units"] for row in rows] == counts
    # the standard error of the mean loss, times the derivative of exp
    deviations = np.multiply(counts, np.subtract(outcomes, mean))
    stderr = np.linalg.norm(deviations) / sum(counts) * math.exp(mean)
    assert measured.results["perplexity"]["stderr"] == pytest.approx(stderr, rel=1e-3)


def test_divergence_rises_with_the_stored_tokens_up_to_the_exact_one() -> None:
    log_p, log_q = torch.arange(480.0).view(2, 6, 40).mul(9).sin().mul(3).log_softmax(-1)
    stored = [fidelity.top_log_probabilities(log_p, top) for top in range(1, 41)]
    kl = torch.stack([fidelity.distances(entry, log_q)[:, 0] for entry in stored])
    assert (kl[0] >= 0).all()
    assert (kl.diff(dim=0) > -1e-5).all()
    assert (kl[0] < kl[-1] - 0.1).any()
    torch.testing.assert_close(kl[-1], (log_p.double().exp() * (log_p - log_q)).sum(1))
    all_equal = torch.zeros_like(log_q)
    assert not fidelity.distances(stored[0], all_equal)[:, 1].any(), "each is the likeliest"


def test_result_file_has_data_and_versions(measured: Any) -> None:
    content = json.loads((measured.folder / "result.json").read_text())
    assert set(content) == {"schema", "results", "protocol"}
    assert content["schema"] == 1
    assert content["protocol"]["data"] == PERPLEXITY.data_digest(measured.benchmark)
    # no text was generated, and there is no right answer
    empty = {"ended", "answer_loss", *TextMeasures.__annotations__}
    columns = [name for name in Sample.__annotations__ if name not in empty]
    assert list(samples(measured.folder)[0]) == columns


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"parameters": {"length": 99999}}, "length"), ({"task": "nowhere.txt"}, r"nowhere\.txt")],
)
def test_failed_evaluation_leaves_no_folder(
    measured: Any, subject: LoadedModel, changes: Any, field: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=field):
        evaluate_into(
            subject, replace(measured.benchmark, **changes), tmp_path / "x", policy=Policy()
        )
    assert not (tmp_path / "x").exists()


BLOCK = re.compile(r"^`([\w/.]+)`[^\n]*:\n\n```\w+\n(.*?)```", re.DOTALL | re.MULTILINE)


STUDY_OF_COLOURS = (
    "suite.benchmarks=[colours,pocket_rte]",
    "criterion=frequency,man",
    "calibration.tokens=2048",
    "calibration.length=128",
    "suite.limit=4",
    "launcher=inline",
    "report=false",
    "store=store",
)


def run_command(folder: Path, *arguments: str) -> None:
    process = preloaded.run(folder, *arguments, PYTHONPATH=str(folder))
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.slow
def test_added_benchmark_is_asked_graded_and_reported(tmp_path: Path) -> None:
    """In a copy of the repository, the benchmark that docs/evaluation.md#adding-a-benchmark
    adds."""
    folder = tmp_path / "repository"
    for name in ("moe_lab", "analysis", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True)
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    section = page.partition("### Adding a benchmark\n")[2].partition("\n## ")[0]
    blocks = dict(BLOCK.findall(section))
    assert list(blocks) == ["colours.jsonl", "conf/benchmark/colours.yaml"]
    for file, text in blocks.items():
        assert not (folder / file).exists()
        (folder / file).write_text(text, encoding="utf-8")
    run_command(folder, "moe_lab", *STUDY_OF_COLOURS)
    for criterion in ("frequency", "man"):
        (evaluation,) = (folder / "store" / "evaluate").glob(f"*-{criterion}-*-colours-*")
        assert [sample["item"] for sample in samples(evaluation)] == ["grass", "blood", "snow"]
        assert {sample["outcome"] for sample in samples(evaluation)} <= {0.0, 1.0}
    tables = ("unified.table1", "winners", "store=store", f"out={tmp_path / 'tables'}")
    run_command(folder, "moe_lab.analysis", *tables)
    for name, column in (("unified.table1", None), ("winners", "Column")):
        with next((tmp_path / "tables").rglob(f"{name}.csv")).open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert "colours" in ([row[column] for row in rows] if column else rows[0]), name


def test_harness_is_a_module_in_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file of that name is all that the configuration asks for."""
    with pytest.raises(ValueError, match="'perplexity'"):
        replace(CODE, harness="perplexityy")
    monkeypatch.setattr("moe_lab.config.evaluation.HARNESSES", tmp_path)
    (tmp_path / "new_harness.py").touch()
    assert replace(CODE, harness="new_harness").harness == "new_harness"
