"""Plans that are computed together: each gets what it would compute alone, and nothing recorded is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from moe_lab.config import BackendConfig, BenchmarkConfig, ModelConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import generation, run, suite
from moe_lab.evaluation.generation import GenSpec
from moe_lab.evaluation.local_model import LocalModel
from moe_lab.evaluation.plans_model import PlansModel
from moe_lab.evaluation.recorded import COMPUTED, Record, Recorded, RecordedTogether
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.study.step import Job
from moe_lab.study.steps import evaluation, inputs, perform

PROMPTS = ["The story", "def add(a, b):", "1 + 1 =", "Once", "The story"]
SPEC = GenSpec(12, batch_size=2)
SHORT = replace(SPEC, stop=(" ", "\n"))
"""With stop texts that end some rows after their first tokens."""


@pytest.fixture(scope="module")
def plans(subject: LocalModel) -> list[Plan | None]:
    return [tiny.plan(subject.model, 0.25), None, tiny.plan(subject.model, 0.5)]


class Together:
    """Three plans whose results are recorded in one folder. The first `leader` of them have been done."""

    def __init__(self, subject: LocalModel, plans: list[Plan | None], folder: Path, leader: int = 0) -> None:
        self.subject, self.plans, self.files = subject, plans[leader:], [folder / f"{n}" for n in range(len(plans))]
        self.files = self.files[leader:]

    @contextmanager
    def open(self) -> Iterator[RecordedTogether]:
        with ExitStack() as stack:
            records = [stack.enter_context(Record(file)) for file in self.files]
            yield RecordedTogether(PlansModel(self.subject, self.plans), records, self.alone)

    def alone(self) -> Any:
        return mask(self.subject.model, self.plans[0]) if self.plans[0] else nullcontext()


def rows_of(subject: LocalModel) -> tuple[list[list[int]], list[int]]:
    rows = [row for row in subject.tokenizer(PROMPTS).input_ids if len(row) > 1]
    return [*rows, rows[0]], [1] * len(rows) + [2]


@contextmanager
def forward_calls(model: Any, before: Callable[[int], None] = lambda rows: None) -> Iterator[list[int]]:
    """The number of rows of every forward pass; `before` is called with it."""
    calls: list[int] = []

    def count(_: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        before(len(ids))
        calls.append(len(ids))

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def expected(subject: LocalModel, plan: Plan | None) -> tuple[list[str], list[str], list[tuple[float, bool]]]:
    with mask(subject.model, plan) if plan else nullcontext():
        rows, starts = rows_of(subject)
        return (
            subject.generate(PROMPTS, SPEC),
            subject.generate(PROMPTS, SHORT),
            subject.log_likelihoods(rows, starts, 2),
        )


def same(found: list[tuple[float, bool]], wanted: list[tuple[float, bool]]) -> bool:
    return [greedy for _, greedy in found] == [greedy for _, greedy in wanted] and [
        total for total, _ in found
    ] == pytest.approx([total for total, _ in wanted], abs=1e-4)


def check_all(subject: LocalModel, plans: list[Plan | None], folder: Path) -> None:
    """Whether each plan in turn, as its step asks, gets what it would get alone."""
    for leader, plan in enumerate(plans):
        with Together(subject, plans, folder, leader).open() as model:
            texts, short, likelihoods = expected(subject, plan)
            assert model.generate(PROMPTS, SPEC) == texts and model.generate(PROMPTS, SHORT) == short
            assert same(model.log_likelihoods(*rows_of(subject), 2), likelihoods)


def test_plans_together_give_what_each_gives_alone(
    subject: LocalModel, plans: list[Plan | None], tmp_path: Path
) -> None:
    texts = [expected(subject, plan) for plan in plans]
    assert len({str(each[0]) for each in texts}) == 3 and len(set(map(len, texts[0][1]))) > 1
    with Together(subject, plans, tmp_path).open() as model:
        model.generate(PROMPTS, SPEC)
        model.generate(PROMPTS, SHORT)
        model.log_likelihoods(*rows_of(subject), 2)
    with forward_calls(subject.model) as calls:
        for leader in range(3):
            with Together(subject, plans, tmp_path, leader).open() as model:
                assert model.generate(PROMPTS, SPEC) and model.log_likelihoods(*rows_of(subject), 2)
    assert not calls, "what was recorded is not computed again"
    check_all(subject, plans, tmp_path)


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
            with Record(tmp_path / f"alone{number}") as record:
                alone = Recorded(subject, record)
                assert alone.generate(PROMPTS, SPEC, answers) == texts
                with forward_calls(subject.model) as calls:
                    assert alone.answer_losses(PROMPTS, answers, SPEC) == pytest.approx(losses, abs=1e-5)
                assert not calls
        with Together(subject, plans, tmp_path, number).open() as model:
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


def test_seconds_of_shared_batches_are_divided(subject: LocalModel, plans: list[Plan | None], tmp_path: Path) -> None:
    with Together(subject, plans, tmp_path).open() as model:
        model.generate(PROMPTS, SPEC)
        spent = model.seconds_elsewhere
    others = [Record(tmp_path / str(number)).seconds for number in (1, 2)]
    assert spent < 0 < others[0] == pytest.approx(others[1]) and sum(others) == pytest.approx(-spent)


class Killed(BaseException):
    """The process ends here."""


def test_a_kill_in_the_middle_loses_nothing_that_was_recorded(
    subject: LocalModel, plans: list[Plan | None], tmp_path: Path
) -> None:
    rows, starts = rows_of(subject)
    total = 0
    for most in (1, 2, 100):
        left = [most]

        def kill(_: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        with forward_calls(subject.model, kill) as calls:
            try:
                with Together(subject, plans, tmp_path).open() as model:
                    for start in range(len(rows)):
                        model.log_likelihoods(rows[: start + 1], starts[: start + 1], 3)
            except Killed:
                pass
        total += sum(calls)
    assert total == 3 * 5, "two of six rows are equal"
    check_all(subject, plans, tmp_path)


def test_out_of_memory_in_a_large_batch_loses_nothing(
    subject: LocalModel, plans: list[Plan | None], tmp_path: Path
) -> None:
    def run_out(rows: int) -> None:
        if rows > 2:
            raise torch.OutOfMemoryError("injected")

    with forward_calls(subject.model, run_out) as calls, Together(subject, plans, tmp_path).open() as model:
        model.generate(PROMPTS, SPEC)
        model.log_likelihoods(*rows_of(subject), 2)
    assert 0 < max(calls) <= 2
    check_all(subject, plans, tmp_path)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("injected"), RuntimeError("a router without masks")])
def test_what_cannot_be_computed_together_is_computed_alone(
    subject: LocalModel, plans: list[Plan | None], tmp_path: Path, error: Exception
) -> None:
    alone = []

    def fail(_: int) -> None:
        if not alone:
            raise error

    together = Together(subject, plans, tmp_path)
    with together.open() as model, forward_calls(subject.model, fail) as calls:

        @contextmanager
        def enter(context: Callable[[], Any] = model.alone) -> Iterator[None]:
            with context():
                alone.append(True)
                yield
                alone.pop()

        model.alone = enter
        assert model.generate(PROMPTS, SPEC)
        assert set(calls) <= {1, 2}
    assert all(Record(file).alone for file in together.files), "the others do not try it again"
    check_all(subject, plans, tmp_path)


# The steps of a group, as workers do them.

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
    """A job that generates for each plan, the first with the others beside it."""
    monkeypatch.setattr(inputs, "_loaded", lambda settings: (subject.model, subject.tokenizer))
    model = asdict(ModelConfig(name="m", path="pocket:olmoe"))
    runtime = {"model": model, "benchmark": asdict(BENCHMARK), "backend": asdict(BackendConfig(name="hf"))}
    settings = {"benchmark": {"data": suite.data_digest(BENCHMARK)}}
    made: list[Job] = []
    for number, plan in reversed(list(enumerate(plans))):
        folder = tmp_path / f"step{number}"
        for name in ("plan", "scratch", "partial"):
            (folder / name).mkdir(parents=True)
        if plan:
            plan.save(folder / "plan/plan.json")
        given = {"plan": str(folder / "plan")} if plan else {}
        places = (str(folder / "scratch"), str(folder / "partial"))
        made.insert(0, Job("generate", f"step{number}", settings, runtime, given, *places, others=list(made)))
    return made


def test_jobs_with_others_write_what_they_write_alone(
    subject: LocalModel, plans: list[Plan | None], jobs: list[Job]
) -> None:
    with forward_calls(subject.model) as calls:
        perform(jobs[0])
        first = len(calls)
        perform(jobs[1])
        perform(replace(jobs[2], others=()))
    assert len(calls) == first, "the others only write"
    for plan, job in zip(plans, jobs, strict=True):
        with mask(subject.model, plan) if plan else nullcontext():
            alone = run.generate(subject, BENCHMARK, Path(job.partial))
        assert [a.output for a in generation.read(job.output(run.ANSWERS))] == [a.output for a in alone]
    seconds = [json.loads(job.output("provenance.json").read_text())["seconds"] for job in jobs]
    assert min(seconds) > max(seconds) / 10


def test_a_plan_that_does_not_fit_fails_alone(jobs: list[Job]) -> None:
    broken = Path(jobs[1].inputs.get("plan", Path(jobs[1].scratch).parent / "plan")) / "plan.json"
    tiny.plan(tiny.build("mixtral"), 0.25).save(broken)
    jobs[1].inputs["plan"] = str(broken.parent)
    evaluation.generate(jobs[0])
    assert not Record(Path(jobs[1].partial, COMPUTED)).results
    with pytest.raises(UserError, match="another model"):
        evaluation.generate(jobs[1])
    evaluation.generate(jobs[2])
    assert not Record(Path(jobs[2].partial, COMPUTED)).alone


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_plan_that_cannot_be_read_fails_alone(jobs: list[Job], content: str | None) -> None:
    file = jobs[2].input("plan", "plan.json")
    file.unlink()
    if content is not None:
        file.write_text(content)
    evaluation.generate(jobs[0])
    assert Record(Path(jobs[1].partial, COMPUTED)).results
    with pytest.raises(UserError, match="plan="):
        evaluation.generate(jobs[2])
