"""EvalScope's tasks: checks of their settings without starting EvalScope, their questions, and
grading.

EvalScope runs in a separate process (`evalscope_worker.py`), once for the questions and later to
grade the answers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from moe_lab.child_process import Child, Ended, Refused
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, unknown, user_errors
from moe_lab.evaluation import NAMESPACES, Policy, harness, mirror
from moe_lab.evaluation.harness import (
    HARNESSES,
    Answer,
    Graded,
    Item,
    Text,
    graded_by_mean,
    replace_surrogates,
)
from moe_lab.evaluation.harnesses.evalscope_code import DataError
from moe_lab.models import cores
from moe_lab.start import command

UNSCORED_AT_MOST = 0.01
"""Share of answers that EvalScope may fail to compare, as its time for each is limited. They count
as wrong."""


SHOTS: Mapping[str, tuple[int, ...] | None] = {
    "gsm8k": None,
    "math_500": (0,),
    "aime25": (0,),
    "gpqa_diamond": (0, 5),
    "live_code_bench": (0,),
}
"""Task, by EvalScope's name -> numbers of examples it can show; None: any number. Questions and
grading of other tasks have not been checked."""
CODE = "live_code_bench"
"""The task whose answers are programs."""
OWN_SUBSETS = "math_500"
"""The task whose items EvalScope splits into subsets of its own."""


def interpreter(benchmark: BenchmarkConfig) -> str:
    """The Python interpreter with EvalScope. Raises UserError when there is none."""
    return harness.interpreter("evalscope", benchmark.python, f"benchmark {benchmark.name}")


def installed(benchmark: BenchmarkConfig) -> str | None:
    """EvalScope's version in the benchmark's interpreter; None if it is not installed."""
    try:
        return harness.installed_in(interpreter(benchmark), "evalscope")
    except UserError:
        return None


def wrong(benchmark: BenchmarkConfig) -> Iterator[str]:
    """Problems with the settings of an EvalScope benchmark, one sentence each."""
    name = f"benchmark {benchmark.name}"
    if benchmark.task not in SHOTS:
        yield str(unknown(f"{name}: task", benchmark.task, SHOTS))
        return
    shots = SHOTS[benchmark.task]
    if benchmark.data is None:
        yield (
            f"{name}: data is null, and EvalScope reads a mirror: expected a hub repository, "
            "such as openai/gsm8k"
        )
    if shots is not None and benchmark.shots not in shots:
        numbers = " or ".join(map(str, shots))
        yield (
            f"{name}: shots={benchmark.shots}, but EvalScope's {benchmark.task} shows {numbers} "
            "examples"
        )
    for parameter in HARNESSES["evalscope"].question_parameters if benchmark.task == CODE else ():
        try:
            date.fromisoformat(value := str(benchmark.parameters.get(parameter)))
        except ValueError:
            yield f"{name}: parameters.{parameter}={value}: expected a day, such as 2025-01-31"


def lacking(benchmark: BenchmarkConfig, policy: Policy) -> Iterator[str]:
    """Sentences if EvalScope is missing, and if running programs or reading pickled tests would
    need a permission."""
    yield from user_errors(lambda: harness.check_has("evalscope", interpreter(benchmark)))
    if benchmark.task == CODE:
        yield from user_errors(policy.protection)
        if not policy.allow_pickled_data:
            yield (
                f"allow_pickled_data=false, but the tests of benchmark {benchmark.name} are "
                "pickled: set "
                f"allow_pickled_data=true, and only text is read of them"
            )


# Questions and grades.


def items(benchmark: BenchmarkConfig) -> list[Item]:
    """EvalScope's prompts: conversations for a chat template, or their text where benchmark.chat is
    off.

    EvalScope reads complete answers, so nothing but an end token ends them.
    """
    asked = []
    for question in _asked(benchmark, None, "questions"):
        messages = question["messages"]
        text = "\n\n".join(message["content"] for message in messages) + "\n"
        asked.append(
            Item(
                question["item"],
                (Text(messages if benchmark.chat else text, benchmark.max_new_tokens),),
            )
        )
    return asked


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Grade answers by EvalScope, without the thoughts before them: one that does not end is an
    empty answer.

    Raises RuntimeError when EvalScope could not compare more than 1 % of them.
    """
    code = benchmark.task == CODE
    protection = policy.protection() if code else None
    texts = {answer.item: replace_surrogates(answer.reply.text or "") for answer in answers}
    reply = _asked(benchmark, policy, "grade", texts=texts)
    verdicts = {sample["item"]: sample for sample in reply["samples"]}
    unscored = [item for item, verdict in verdicts.items() if verdict["outcome"] is None]
    if len(unscored) > UNSCORED_AT_MOST * len(verdicts):
        raise RuntimeError(
            f"benchmark {benchmark.name}: EvalScope could not compare {len(unscored)} of "
            f"{len(verdicts)} answers, "
            f"such as that to {unscored[0]}"
        )

    def verdict(answer: Answer, metric: str) -> tuple[float, str]:
        found = verdicts[answer.item]
        if found["outcome"] is None:
            return 0.0, f"not compared: {found['why']}"
        return found["outcome"], ("pass" if found["outcome"] else found["why"]) if code else found[
            "extracted"
        ]

    protocol = {
        "evalscope": reply["versions"],
        "unscored": unscored,
        **({"sandbox": protection} if code else {}),
    }
    return graded_by_mean(answers, benchmark, verdict, protocol)


def _asked(benchmark: BenchmarkConfig, policy: Policy | None, method: str, **arguments: Any) -> Any:
    """What a method of EvalScope's process, which has a minimal environment, returns. UserError for
    a problem of the data, RuntimeError if the process failed."""
    dataset_args: dict[str, Any] = {"few_shot_num": benchmark.shots, "eval_split": benchmark.split}
    if benchmark.task != OWN_SUBSETS:
        dataset_args["subset_list"] = [benchmark.subset or "default"]
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "LANG": "C.UTF-8",
    }
    with tempfile.TemporaryDirectory(prefix="moe_lab-evalscope-") as folder:
        place = Path(folder)
        caches = {
            name: str(place / "cache")
            for name in ("HF_HOME", "MODELSCOPE_CACHE", "EVALSCOPE_CACHE")
        }
        homes = {"PYTHONNOUSERSITE": "1", "HOME": folder, "TMPDIR": folder}
        arguments |= {
            "name": benchmark.task,
            "folder": str(_linked_data(benchmark, place / "data")),
            "dataset_args": dataset_args,
            "limit": benchmark.limit,
            "code": _code(benchmark, policy) if benchmark.task == CODE else None,
        }
        worker = "moe_lab.evaluation.harnesses.evalscope_worker"
        line = command("moe_lab.child_process", worker, python=interpreter(benchmark))
        with Child(line, {**kept, **caches, **offline, **homes}, place) as process:
            try:
                return process.call(method, **arguments)
            except Refused as error:
                if error.kind == DataError.__name__:
                    raise UserError(f"benchmark {benchmark.name}: {error}") from None
                raise RuntimeError(
                    f"benchmark {benchmark.name}: EvalScope failed: {error.kind}: {error}"
                ) from None
            except Ended as error:
                raise RuntimeError(
                    f"benchmark {benchmark.name}: EvalScope failed: {error}"
                ) from None


def _linked_data(benchmark: BenchmarkConfig, folder: Path) -> Path:
    """A data set of links to the benchmark's files, because EvalScope may delete files in a folder
    that it reads."""
    card = ["---", "configs:"]
    for subset, by_split in mirror.subsets(benchmark).items():
        card += [f"- config_name: {subset}", "  data_files:"]
        for split, files in by_split.items():
            (folder / subset / split).mkdir(parents=True)
            for file in files:
                (folder / subset / split / file.name).symlink_to(file)
            card += [f"  - split: {split}", f"    path: {subset}/{split}/*"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))
    return folder


def _code(benchmark: BenchmarkConfig, policy: Policy | None) -> dict[str, Any]:
    """Days, pickles and limits. Without a policy, no program is run."""
    chosen = {
        name: benchmark.parameters.get(name) for name in HARNESSES["evalscope"].grading_parameters
    }
    limits = {"processes": cores(), **{name: value for name, value in chosen.items() if value}}
    return {
        "days": [str(benchmark.parameters[name]) for name in ("start_date", "end_date")],
        "pickles": policy is not None and policy.allow_pickled_data,
        "limits": {**limits, "confined": policy is None or policy.protection() == NAMESPACES},
    }
