"""Recorded texts and likelihoods: each plan gets what the masked model gives, and nothing is computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
from example_steps import Example, evaluated

from moe_lab.config import BackendConfig, BenchmarkConfig, ModelConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import generation, run, suite
from moe_lab.evaluation.generation import GenSpec
from moe_lab.evaluation.local_model import LocalModel
from moe_lab.evaluation.recorded import COMPUTED, Record, Recorded
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.study.steps import files as step_files
from moe_lab.study.steps import perform
from moe_lab.study.steps.evaluation import Generate
from moe_lab.study.steps.files import Files

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


Job = tuple[Generate, Files]


@pytest.fixture
def jobs(subject: LocalModel, plans: list[Plan | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """A step that generates for each plan, and its files."""
    model = ModelConfig(name="m", path="pocket:olmoe")
    monkeypatch.setattr(step_files, "_LOADED", {"of": model, "pair": (subject.model, subject.tokenizer)})
    made: list[Job] = []
    for number, plan in enumerate(plans):
        folder = tmp_path / f"step{number}"
        for name in ("plan", "scratch", "partial"):
            (folder / name).mkdir(parents=True)
        if plan:
            plan.save(folder / "plan/plan.json")
        step = Example(number=number) if plan else None
        pruned = evaluated(model, BENCHMARK, step).pruned
        generate = Generate(pruned, BackendConfig(name="hf"), None, None, suite.Questions(BENCHMARK))
        folders = {step.id: folder / "plan"} if step else {}
        made.append((generate, Files(folder / "scratch", folder / "partial", folders)))
    return made


def test_a_step_writes_what_its_plan_gives(subject: LocalModel, plans: list[Plan | None], jobs: list[Job]) -> None:
    for plan, (step, files) in zip(plans, jobs, strict=True):
        perform(step, files)
        with mask(subject.model, plan) if plan else nullcontext():
            alone = run.generate(subject, BENCHMARK, files.partial)
        written = generation.read(files.out / run.ANSWERS)
        assert [answer.output for answer in written] == [answer.output for answer in alone]
        with forward_calls(subject.model) as calls:
            perform(step, files)
        assert not calls, "what was recorded is not computed again"
        assert generation.read(files.out / run.ANSWERS) == written


def plan_file(job: Job) -> Path:
    step, files = job
    return files.path(step.pruned.plan, "plan.json")


def test_a_plan_that_does_not_fit_is_refused(jobs: list[Job]) -> None:
    tiny.plan(tiny.build("mixtral"), 0.25).save(plan_file(jobs[0]))
    step, files = jobs[0]
    with pytest.raises(UserError, match="another model"):
        step.work(files)
    assert not Record(files.partial / COMPUTED).results


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_plan_that_cannot_be_read_is_refused(jobs: list[Job], content: str | None) -> None:
    file = plan_file(jobs[2])
    file.unlink()
    if content is not None:
        file.write_text(content)
    step, files = jobs[2]
    with pytest.raises(UserError, match="plan="):
        step.work(files)
