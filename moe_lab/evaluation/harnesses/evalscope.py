"""EvalScope's tasks: checks of their settings without starting EvalScope, their questions, and
grading.

EvalScope runs in a separate process (`evalscope_worker.py`), once for the questions and later to
grade the answers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from moe_lab.child_process import ChildProcess, ErrorReply, ProcessEnded, environment
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, unknown_name_error, user_errors
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.harness import Graded, ProgramHarness, graded_by_mean
from moe_lab.evaluation.items import Answer, Item, Text, replace_surrogates
from moe_lab.machine import check_has, cores, interpreter, package_version_in
from moe_lab.start import command

SHOTS: Mapping[str, tuple[int, ...] | None] = {
    "gsm8k": None,
    "math_500": (0,),
    "aime25": (0,),
    "gpqa_diamond": (0, 5),
    "live_code_bench": (0,),
}
"""EvalScope's name of a task -> numbers of examples that the task can show; None: any number. The
questions and grading of tasks that are not listed here have not been checked."""
CODE = "live_code_bench"
"""The task whose answers are programs."""


class EvalScope(ProgramHarness):
    """The harness that calls EvalScope. EvalScope runs in a separate interpreter, because its
    requirements contradict moe_lab's."""

    metrics = ("acc",)
    question_parameters = ("start_date", "end_date")
    data = True
    shots = None
    votes = True

    def items(self, benchmark: BenchmarkConfig) -> Iterator[Item]:
        """Yield items with EvalScope's prompts."""
        for question in _call_worker(benchmark, "questions"):
            messages = question["messages"]
            text = "\n\n".join(message["content"] for message in messages) + "\n"
            request = Text(messages if benchmark.chat else text, benchmark.max_new_tokens)
            yield Item(question["item"], (request,), question["right_answer"])

    def grade(
        self, answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy
    ) -> Graded:
        """Let EvalScope grade the answers. A mathematical answer is right, too, if only Math-Verify
        accepts it, except with the parameter `as_harness`. An answer counts as wrong if EvalScope
        cannot compare it within its time limit. RuntimeError if that is so for all answers."""
        limits = None
        if self.runs_programs(benchmark):  # arguments of `evalscope_worker.Programs`
            settings = benchmark.parameters.items()
            limits = {
                "processes": cores(),
                **{key: value for key, value in settings if key in self.numeric_parameters},
                "isolation": policy.program_sandbox(),
            }
        texts = [(answer.item, replace_surrogates(answer.reply.text or "")) for answer in answers]
        graded = _call_worker(
            benchmark,
            "grade",
            texts=texts,
            as_harness=benchmark.parameters.get("as_harness", False),
            limits=limits,
        )
        samples = graded["samples"]
        pairs = list(zip(answers, samples, strict=True))
        unscored_items = [answer.item for answer, sample in pairs if sample["outcome"] is None]
        unlike_harness = [answer.item for answer, sample in pairs if sample.get("unlike_harness")]
        if len(unscored_items) == len(answers):
            raise RuntimeError(
                f"benchmark {benchmark.name}: EvalScope could compare no answer, such as that to "
                f"{unscored_items[0]}"
            )

        protocol = {
            "evalscope": graded["versions"],
            "unscored": unscored_items,
            "unlike_harness": unlike_harness,
        }
        if limits:
            protocol["sandbox"] = limits["isolation"]
        verdicts = [(sample["outcome"] or 0.0, sample["extracted"]) for sample in samples]
        return graded_by_mean(answers, benchmark, {"acc": verdicts}, protocol)

    def version(self, benchmark: BenchmarkConfig) -> str | None:
        """EvalScope's version in the benchmark's interpreter; None if the interpreter or EvalScope
        is missing."""
        try:
            return package_version_in(_python(benchmark), "evalscope")
        except UserError:
            return None

    def setting_errors(self, benchmark: BenchmarkConfig) -> Iterator[str]:
        """Do as `Harness.setting_errors`, and check the task, the number of examples and the
        contest days."""
        yield from super().setting_errors(benchmark)
        name = f"benchmark {benchmark.name}"
        if benchmark.task not in SHOTS:
            yield str(unknown_name_error(f"{name}: task", benchmark.task, SHOTS))
            return
        shots = SHOTS[benchmark.task]
        if shots is not None and benchmark.shots not in shots:
            numbers = " or ".join(map(str, shots))
            yield (
                f"{name}: shots={benchmark.shots}, but EvalScope's {benchmark.task} shows "
                f"{numbers} examples"
            )
        if benchmark.task == CODE:
            for key in self.question_parameters:  # first and last contest day
                value = str(benchmark.parameters.get(key))
                try:
                    date.fromisoformat(value)
                except ValueError:
                    yield f"{name}: parameters.{key}={value}: expected a day, such as 2025-01-31"

    def further_requirements(self, benchmark: BenchmarkConfig, policy: Policy) -> Iterator[str]:
        """Check that there is EvalScope and that pickled tests are allowed."""
        # a lambda, so that a UserError of `_python` is yielded, too
        yield from user_errors(lambda: check_has("evalscope", _python(benchmark)))
        if benchmark.task == CODE and not policy.allow_pickled_data:
            yield (
                f"allow_pickled_data=false, but the tests of benchmark {benchmark.name} are "
                "pickled: set allow_pickled_data=true (only text is unpickled)"
            )

    def runs_programs(self, benchmark: BenchmarkConfig) -> bool:
        """Whether the answers of the benchmark's task are programs."""
        return benchmark.task == CODE


HARNESS = EvalScope()


def _python(benchmark: BenchmarkConfig) -> str:
    """The Python interpreter with EvalScope; UserError if there is none."""
    return interpreter("evalscope", benchmark.python, f"benchmark {benchmark.name}")


def _call_worker(benchmark: BenchmarkConfig, method: str, **arguments: Any) -> Any:
    """The result, as JSON, of the function `method` of `evalscope_worker`, called in a new
    process."""
    dataset_args: dict[str, Any] = {
        "few_shot_num": benchmark.shots,
        "eval_split": benchmark.split,
    }
    # EvalScope splits the items of this task into its own subsets
    if benchmark.task != "math_500":
        dataset_args["subset_list"] = [benchmark.subset or "default"]
    with tempfile.TemporaryDirectory(prefix="moe_lab-evalscope-") as scratch:
        folder = Path(scratch)
        arguments |= {
            "name": benchmark.task,
            "folder": str(_link_data(benchmark, folder / "data")),
            "dataset_args": dataset_args,
            "limit": benchmark.limit,
            "days": [
                str(benchmark.parameters[key])
                for key in HARNESS.question_parameters
                if benchmark.task == CODE
            ],
        }
        worker = "moe_lab.evaluation.adapters.evalscope_worker"
        line = command("moe_lab.child_process", worker, python=_python(benchmark))
        with ChildProcess(line, _environment(folder), folder) as process:
            try:
                return process.call(method, **arguments)
            except ErrorReply as error:
                if error.kind == UserError.__name__:
                    raise UserError(f"benchmark {benchmark.name}: {error}") from None
                reason = f"{error.kind}: {error}"
            except ProcessEnded as error:
                reason = str(error)
            raise RuntimeError(f"benchmark {benchmark.name}: EvalScope failed: {reason}")


def _environment(folder: Path) -> dict[str, str]:
    """All environment variables of EvalScope's process."""
    return environment(
        "PATH",
        **dict.fromkeys(("HF_HOME", "MODELSCOPE_CACHE", "EVALSCOPE_CACHE"), str(folder / "cache")),
        **dict.fromkeys(("HOME", "TMPDIR"), str(folder)),
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        LANG="C.UTF-8",
    )


def _link_data(benchmark: BenchmarkConfig, folder: Path) -> Path:
    """Fill `folder` with a dataset card and links to the files of the benchmark's mirror. Returns
    `folder`."""
    from huggingface_hub import metadata_save

    configs = []
    for subset, by_split in mirror.subsets(benchmark).items():
        data_files = []
        for split, files in by_split.items():
            (folder / subset / split).mkdir(parents=True)
            for file in files:  # links, because EvalScope may delete files in `folder`
                (folder / subset / split / file.name).symlink_to(file)
            data_files.append({"split": split, "path": f"{subset}/{split}/*"})
        configs.append({"config_name": subset, "data_files": data_files})
    metadata_save(folder / "README.md", {"configs": configs})
    return folder
