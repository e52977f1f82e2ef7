"""EvalScope's tasks before EvalScope is started: their settings, its interpreter, and what is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, unknown, user_errors
from moe_lab.evaluation import mirror
from moe_lab.evaluation.harness import HARNESSES
from moe_lab.evaluation.sandbox.policy import Policy


@dataclass(frozen=True)
class Task:
    """One task."""

    split: str
    """Split it asks."""
    shots: tuple[int, ...] | None = (0,)
    """Numbers of examples it can show; None is any."""
    code: bool = False
    """Answers are programs."""
    parted: bool = False
    """EvalScope parts the items into subsets of its own."""


TASKS: Mapping[str, Task] = {
    "gsm8k": Task("test", shots=None),
    "math_500": Task("test", parted=True),
    "aime25": Task("test"),
    "gpqa_diamond": Task("train", shots=(0, 5)),
    "live_code_bench": Task("test", code=True),
}
"""EvalScope's name -> what it is. Others may work, but nobody has looked at what they ask and how they grade."""
OWN = Path(__file__).resolve().parents[3] / ".venv-evalscope" / "bin" / "python"
"""What `make evalscope` makes."""


def interpreter(benchmark: BenchmarkConfig) -> str:
    """The Python that has EvalScope: interpreters.evalscope, or what `make evalscope` made, or this one."""
    if benchmark.python is not None:
        python = Path(benchmark.python).expanduser()
        if not python.is_file():
            raise UserError(f"interpreters.evalscope={benchmark.python}, and there is no such file: run make evalscope")
        return str(python.absolute())
    if OWN.is_file():
        return str(OWN)
    if find_spec("evalscope") is not None:
        return sys.executable
    raise UserError(
        f"benchmark {benchmark.name} needs EvalScope, which is not here: run make evalscope, or name an interpreter "
        f"that has it, interpreters.evalscope=PYTHON"
    )


def installed(benchmark: BenchmarkConfig) -> str | None:
    """EvalScope's version under the benchmark's interpreter; None for other harnesses, or where there is none."""
    if benchmark.harness != "evalscope":
        return None
    try:
        return _version(interpreter(benchmark)) or None
    except UserError:
        return None


@lru_cache(maxsize=8)
def _version(python: str) -> str:
    ask = "from importlib.metadata import version; print(version('evalscope'))"
    return subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True, env={}).stdout.strip()


def wrong(benchmark: BenchmarkConfig) -> Iterator[str]:
    """One sentence per setting that EvalScope's task cannot take."""
    name = f"benchmark {benchmark.name}"
    if benchmark.task not in TASKS:
        yield str(unknown(f"{name}: task", benchmark.task, TASKS))
        return
    task = TASKS[benchmark.task]
    if benchmark.data is None:
        yield f"{name}: data is null, and EvalScope reads a mirror: expected a hub repository, such as openai/gsm8k"
    if benchmark.split != task.split:
        yield f"{name}: split={benchmark.split}, and {benchmark.task} asks {task.split}: set split={task.split}"
    if task.shots is not None and benchmark.shots not in task.shots:
        yield f"{name}: shots={benchmark.shots}, but EvalScope's {benchmark.task} shows {_either(task.shots)} examples"
    if benchmark.executes_code != task.code:
        yield f"{name}: executes_code={benchmark.executes_code}, but answers to {benchmark.task} are " + (
            "programs" if task.code else "no programs"
        )
    if task.code:
        yield from _wrong_dates(name, benchmark.parameters)


def lacking(benchmark: BenchmarkConfig, policy: Policy) -> Iterator[str]:
    """EvalScope itself, where it is not here, and the permission to read pickled tests, where there are some."""
    yield from user_errors(lambda: _check_interpreter(benchmark))
    task = TASKS.get(benchmark.task)
    if task and task.code and benchmark.data is not None and not policy.allow_pickled_data:
        yield from user_errors(lambda: _check_pickles(benchmark))


def _check_interpreter(benchmark: BenchmarkConfig) -> None:
    python = interpreter(benchmark)
    if not _version(python):
        raise UserError(f"interpreters.evalscope={python} has no EvalScope: run make evalscope, or name another")


def _either(numbers: tuple[int, ...]) -> str:
    return " or ".join(map(str, numbers))


def _wrong_dates(name: str, parameters: Mapping[str, Any]) -> Iterator[str]:
    for parameter in HARNESSES["evalscope"].question_parameters:
        try:
            date.fromisoformat(str(parameters[parameter]))
        except KeyError:
            yield f"{name}: parameters.{parameter} is missing: expected a day, such as 2025-01-31"
        except ValueError:
            yield f"{name}: parameters.{parameter}={parameters[parameter]}: expected a day, such as 2025-01-31"


def _check_pickles(benchmark: BenchmarkConfig) -> None:
    """UserError when the first row has private tests that are no JSON."""
    import pyarrow.parquet as parquet

    for files in mirror.subsets(benchmark).get(benchmark.subset or "default", {}).values():
        for file in filter(Path.is_file, files):
            for batch in parquet.ParquetFile(file).iter_batches(batch_size=1, columns=["private_test_cases"]):
                if not batch.column(0)[0].as_py().lstrip().startswith("["):
                    raise UserError(
                        f"benchmark {benchmark.name}: {file} holds pickled tests: set allow_pickled_data=true, "
                        f"and only text is read of them"
                    )
                return
