"""The process that runs EvalScope: it returns the questions of a task, or grades answers to them.

It needs EvalScope and the standard library, but no other package of moe_lab's environment. EvalScope writes the
prompts, extracts the answers and scores them. In place of a model it gets a stand-in that records the questions (ask)
or returns texts that were generated before (grade).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from moe_lab.evaluation.harnesses import evalscope_code

_MODEL = "moe_lab"
_SCORED = "success"  # EvalScope's other states are for judges and for answers that could not be compared
_VERSIONS = ("evalscope", "datasets", "math-verify", "sympy")
Item = tuple[str, int]
"""Subset of the task and number of the sample in it."""


@dataclass(frozen=True)
class Request:
    """One run of one task."""

    task: str
    """EvalScope's name, such as gsm8k."""
    folder: str
    """The data, in the layout of the hub. EvalScope may delete files in it."""
    work: str
    """An empty folder for EvalScope's files."""
    dataset_args: dict[str, Any]
    """EvalScope's settings of the task: subset_list, eval_split, few_shot_num."""
    settings: dict[str, Any]
    """Generation settings, which EvalScope must pass with every question."""
    limit: int | None = None
    """Number of items, taken evenly from the subsets; None: all."""
    texts: dict[str, str] | None = None
    """Name of an item -> the model's answer, for grading; None: return the questions."""
    code: evalscope_code.CodeSettings | None = None
    """Selection of problems and limits of programs, for tasks whose answers are programs."""


@dataclass
class Reply:
    """Result of a request."""

    error: str = ""
    """A sentence for the user; the other fields are empty then."""
    questions: list[dict[str, Any]] = field(default_factory=list)
    """Dicts of item and messages."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Dicts of item, outcome (None where EvalScope could not compare), extracted and why."""
    score: float | None = None
    """EvalScope's own mean over the samples with an outcome."""
    versions: dict[str, str] = field(default_factory=dict)


def main(request_file: str, reply_file: str) -> None:
    """Perform the request. Ends immediately when the process that started this one has ended."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    content = json.loads(Path(request_file).read_text(encoding="utf-8"))
    code = content.pop("code")
    request = Request(**content, code=evalscope_code.CodeSettings(**code) if code else None)
    try:
        reply = run(request)
    except evalscope_code.DataError as error:
        reply = Reply(error=str(error))
    Path(reply_file).write_text(json.dumps(asdict(reply)), encoding="utf-8")


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin, whose lock, held here, would block every process that EvalScope forks
    os.killpg(0, signal.SIGKILL)


def run(request: Request) -> Reply:
    """Collect the task's questions, or grade `request.texts`. Raises AssertionError if EvalScope did anything else."""
    from evalscope import TaskConfig, run_task

    stand_in = _stand_in()(request.texts)
    programs = evalscope_code.Programs(request.code) if request.code else None
    task = _Task(request, stand_in, programs)
    with task.in_place(), programs.in_place() if programs else nullcontext():
        reports = run_task(
            TaskConfig(
                model=stand_in,
                model_id=_MODEL,
                eval_type="custom",
                datasets=[request.task],
                dataset_args={request.task: {"dataset_id": request.folder, **request.dataset_args}},
                generation_config=dict(request.settings),
                eval_batch_size=request.code.processes if request.code and request.texts is not None else 1,
                work_dir=request.work,
                no_timestamp=True,
                ignore_errors=False,
            )
        )
    if not task.names:
        raise evalscope_code.DataError("no item is left to ask: the data or the dates are others than expected")
    _check(request, task, stand_in, reports[request.task])
    versions = {name: version(name) for name in _VERSIONS}
    if request.texts is None:
        questions = [{"item": name, "messages": stand_in.questions[name]} for name in task.names.values()]
        return Reply(questions=questions, versions=versions)
    samples = list(_samples(request, task.names, stand_in.read))
    metrics = reports[request.task].metrics  # none where nothing could be scored
    return Reply(samples=samples, score=metrics[0].score if metrics else None, versions=versions)


def _check(request: Request, task: _Task, stand_in: Any, report: Any) -> None:
    names = set(task.names.values())
    assert len(names) == len(task.names), "two items have one name"
    assert set(stand_in.questions) == names, "EvalScope asked other questions than it has"
    assert stand_in.calls == len(names), f"{stand_in.calls} questions were asked for {len(names)} items"
    for arrived in stand_in.settings:
        lost = {name: value for name, value in request.settings.items() if arrived.get(name) != value}
        assert not lost, f"settings that did not arrive: {lost}"
    done = report.execution_summary
    assert (done.requested, done.succeeded, done.errored) == (len(names), len(names), 0), str(done)
    assert not done.incomplete


class _Task:
    """EvalScope's task with three changes: items have names, a limit applies to all, and asking scores nothing."""

    def __init__(self, request: Request, stand_in: Any, programs: evalscope_code.Programs | None) -> None:
        self.request, self.stand_in, self.programs = request, stand_in, programs
        self.names: dict[Item, str] = {}

    def in_place(self) -> Any:
        """A context in which EvalScope uses this task instead of its own."""
        from evalscope.api.registry import BENCHMARK_REGISTRY

        meta = BENCHMARK_REGISTRY.lookup(self.request.task)
        return patch.object(meta, "data_adapter", self._adapter(meta.data_adapter))

    def _adapter(self, of_evalscope: type) -> type:
        task = self

        class Adapter(of_evalscope):
            def load_dataset(self) -> Any:
                return task.name_items(super().load_dataset())

            def _on_inference_start(self, model: Any, sample: Any) -> None:
                task.stand_in.now.item = sample.metadata["moe_lab item"]

            if task.request.texts is None:

                def calculate_metrics(self, task_state: Any) -> Any:
                    from evalscope.api.metric import SampleScore, Score

                    score = Score(value={"acc": 0.0}, main_score_name="acc")
                    return SampleScore(score=score, sample_id=task_state.sample_id, group_id=task_state.group_id)

        return self.programs.adapter(Adapter, asking=self.request.texts is None) if self.programs else Adapter

    def name_items(self, subsets: Any) -> Any:
        """Name every sample by subset, number and a digest of its prompt; drop samples beyond the limit."""
        order = sorted((sample.id, subset) for subset, samples in subsets.items() for sample in samples)
        wanted = {(subset, number) for number, subset in order[: self.request.limit]}
        for subset, samples in subsets.items():
            samples.samples = [sample for sample in samples if (subset, sample.id) in wanted]
            for sample in samples:
                name = f"{subset}/{sample.id} {_digest(_messages(sample.input))}"
                sample.metadata["moe_lab item"] = self.names[subset, sample.id] = name
        texts = self.request.texts
        if texts is not None:
            other = set(texts) ^ set(self.names.values())
            assert not other, f"answers and questions are not the same: {sorted(other)[0]} is only on one side"
        return subsets


def _stand_in() -> Callable[[dict[str, str] | None], Any]:
    """The class of the stand-in for a model, defined in a function so that EvalScope is imported only when needed."""
    from evalscope.api.model import ModelAPI, ModelOutput

    class StandIn(ModelAPI):
        def __init__(self, texts: dict[str, str] | None) -> None:
            super().__init__(model_name=_MODEL)
            self.texts = texts
            self.now = threading.local()
            self.questions: dict[str, list[dict[str, str]]] = {}
            self.read: dict[str, str] = {}  # texts as EvalScope reads them, without <think> ... </think>
            self.settings: list[dict[str, Any]] = []
            self.calls = 0
            self.lock = threading.Lock()

        def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
            item = self.now.item
            with self.lock:
                self.calls += 1
                self.questions[item] = _messages(input)
                self.settings.append(config.model_dump(exclude_none=True))
            output = ModelOutput.from_content(_MODEL, "" if self.texts is None else self.texts[item])
            self.read[item] = output.completion
            return output

    return StandIn


def _messages(conversation: Any) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.text} for message in conversation]


def _digest(messages: list[dict[str, str]]) -> str:
    return sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:8]


def _samples(request: Request, names: dict[Item, str], read: dict[str, str]) -> Iterator[dict[str, Any]]:
    """EvalScope's review of each item, in the order of the data."""
    by_item: dict[Item, dict[str, Any]] = {}
    for subset in {subset for subset, _ in names}:
        reviews = Path(request.work, "reviews", _MODEL, f"{request.task}_{subset}.jsonl")
        for line in reviews.read_text(encoding="utf-8").split("\n"):
            if not line:
                continue
            review = json.loads(line)
            item = subset, review["index"]
            assert item not in by_item, f"{item} was graded twice"
            by_item[item] = review["sample_score"]["score"]
    assert set(by_item) == set(names), "EvalScope reviewed other items than it asked"
    for item, name in names.items():
        score = by_item[item]
        assert score["prediction"] == read[name], f"{name} was graded with another text"
        values = list(score["value"].values()) if score["status"] == _SCORED else [None]
        assert len(values) == 1, f"{name} has several scores: {score}"
        yield {
            "item": name,
            "outcome": values[0] if values[0] is None else float(values[0]),
            "extracted": score["extracted_prediction"] or "",
            "why": _why(score),
        }


def _why(score: dict[str, Any]) -> str:
    """Why an answer is wrong, or could not be scored."""
    notes = score.get("metadata") or {}
    if "final_metadata" in notes:  # of a program; right programs have no error
        of_program = json.loads(notes["final_metadata"][0][0])
        return " ".join(of_program.get(name) or "" for name in ("error_message", "program_error")).strip()
    return str(notes.get("error") or notes.get("acc") or notes.get("math_reason") or "")


if __name__ == "__main__":
    main(*sys.argv[1:])
