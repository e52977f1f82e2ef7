"""Recorded texts and likelihoods: each plan gets what the masked model gives, and nothing is computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tiny

from moe_lab.config import BackendConfig, BenchmarkConfig, ModelConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import generation, run, suite
from moe_lab.evaluation.generation import GenSpec
from moe_lab.evaluation.local_model import LocalModel
from moe_lab.evaluation.recorded import COMPUTED, Record, Recorded
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.study.step import Job
from moe_lab.study.steps import evaluation, inputs, perform

PROMPTS = ["The story", "def add(a, b):", "1 + 1 =", "Once", "The story"]
SPEC = GenSpec(12, batch_size=2)


@pytest.fixture(scope="module")
def plans(subject: LocalModel) -> list[Plan | None]:
    return [tiny.plan(subject.model, 0.25), None, tiny.plan(subject.model, 0.5)]


@contextmanager
def forward_calls(model: Any) -> Iterator[list[int]]:
    """The number of rows of every forward pass."""
    calls: list[int] = []

    def count(_: Any, args: Any, kwargs: Any) -> None:
        calls.append(len(kwargs["input_ids"] if "input_ids" in kwargs else args[0]))

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def test_questions_whose_answers_differ_in_length_are_read_once(
    subject: LocalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_lab.evaluation.recorded.BATCHES", 2)
    rows = [[10 + n, *range(20, 31), *range(40, 40 + length)] for length in (1, 4, 8) for n in range(8)]
    subject.log_likelihoods(rows[:1], [12], 1)  # tries whether answers can be read together
    with Record(tmp_path / "record") as record, forward_calls(subject.model) as calls:
        Recorded(subject, record).log_likelihoods(rows, [12] * len(rows), 6)
    assert sum(calls) == 8


def answers_of(subject: LocalModel) -> list[str | None]:
    """What the model writes, the beginning of it, something else, no answer, and the first again."""
    texts = subject.generate(PROMPTS, SPEC)
    return [texts[0], f"{texts[1][:6]} 7", " No", None, texts[0]]


def test_losses_of_right_answers_come_with_the_texts(
    subject: LocalModel, plans: list[Plan | None], tmp_path: Path
) -> None:
    answers = answers_of(subject)
    for number, plan in enumerate(plans):
        with mask(subject.model, plan) if plan else nullcontext():
            texts, losses = subject.generate(PROMPTS, SPEC), subject.answer_losses(PROMPTS, answers, SPEC)
            with Record(tmp_path / str(number)) as record:
                model = Recorded(subject, record)
                assert model.generate(PROMPTS, SPEC, answers) == texts
                with forward_calls(subject.model) as calls:
                    assert model.answer_losses(PROMPTS, answers, SPEC) == pytest.approx(losses, abs=1e-5)
                assert not calls


def test_a_loss_that_is_recorded_stays(subject: LocalModel, tmp_path: Path) -> None:
    answers = answers_of(subject)
    with Record(tmp_path / "record") as record:
        model = Recorded(subject, record)
        losses = model.answer_losses(PROMPTS, answers, SPEC)
        before = dict(record.results)
        model.generate(PROMPTS, SPEC, answers)
        assert before.items() <= record.results.items() and model.answer_losses(PROMPTS, answers, SPEC) == losses
        kept = record.file.read_text().splitlines()
    assert len(kept) - kept.count("") == len(record.results), "nothing was written twice"


# The steps of these plans, as workers do them.

BENCHMARK = BenchmarkConfig(
    name="code",
    harness="evalplus",
    task="pocket:benchmarks/humaneval.jsonl",
    reports={"humaneval": "base"},
    limit=3,
    max_new_tokens=12,
    batch_size=2,
)


@pytest.fixture
def jobs(subject: LocalModel, plans: list[Plan | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """A job that generates for each plan."""
    monkeypatch.setattr(inputs, "_loaded", lambda settings: (subject.model, subject.tokenizer))
    model = asdict(ModelConfig(name="m", path="pocket:olmoe"))
    runtime = {"model": model, "benchmark": asdict(BENCHMARK), "backend": asdict(BackendConfig(name="hf"))}
    settings = {"benchmark": {"data": suite.data_digest(BENCHMARK)}}
    made: list[Job] = []
    for number, plan in enumerate(plans):
        folder = tmp_path / f"step{number}"
        for name in ("plan", "scratch", "partial"):
            (folder / name).mkdir(parents=True)
        if plan:
            plan.save(folder / "plan/plan.json")
        given = {"plan": str(folder / "plan")} if plan else {}
        places = (str(folder / "scratch"), str(folder / "partial"))
        made.append(Job("generate", f"step{number}", settings, runtime, given, *places))
    return made


def test_a_job_writes_what_its_plan_gives(subject: LocalModel, plans: list[Plan | None], jobs: list[Job]) -> None:
    for plan, job in zip(plans, jobs, strict=True):
        perform(job)
        with mask(subject.model, plan) if plan else nullcontext():
            alone = run.generate(subject, BENCHMARK, Path(job.partial))
        written = generation.read(job.output(run.ANSWERS))
        assert [answer.output for answer in written] == [answer.output for answer in alone]
        with forward_calls(subject.model) as calls:
            perform(job)
        assert not calls, "what was recorded is not computed again"
        assert generation.read(job.output(run.ANSWERS)) == written


def test_a_plan_that_does_not_fit_is_refused(jobs: list[Job]) -> None:
    tiny.plan(tiny.build("mixtral"), 0.25).save(jobs[0].input("plan", "plan.json"))
    with pytest.raises(UserError, match="another model"):
        evaluation.generate(jobs[0])
    assert not Record(Path(jobs[0].partial, COMPUTED)).results


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_plan_that_cannot_be_read_is_refused(jobs: list[Job], content: str | None) -> None:
    file = jobs[2].input("plan", "plan.json")
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match="plan="):
        evaluation.generate(jobs[2])
