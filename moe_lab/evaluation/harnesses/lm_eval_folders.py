"""Folders of lm-eval's own task definitions, and problems of benchmarks that use one. Does not import lm-eval."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import unknown, user_errors

_NAME = re.compile(r"^[\"']?(?:task|group)[\"']?: *[\"']?([\w-]+)[\"']? *$", re.MULTILINE)


def folder(benchmark: BenchmarkConfig) -> Path:
    """The folder of lm-eval that defines benchmark.task: parameters.folder, or the one with the task's name.

    Only this folder is indexed, as indexing all of lm-eval's 14,000 files takes ten seconds. Raises UserError when the
    folder or the task does not exist.
    """
    package = find_spec("lm_eval")
    assert package is not None and package.origin is not None  # `suite.lacking` has reported it
    tasks = Path(package.origin).parent / "tasks"
    name = str(benchmark.parameters.get("folder", benchmark.task))
    place = tasks / name
    if not place.is_dir() or place == tasks:
        beside = place.parent if place.parent.is_dir() and place != tasks else tasks
        raise unknown(
            f"benchmark {benchmark.name}: parameters.folder",
            name,
            [str(folder.relative_to(tasks)) for folder in beside.iterdir() if folder.is_dir()],
        )
    defined = {match for file in place.rglob("*.yaml") for match in _NAME.findall(file.read_text(encoding="utf-8"))}
    if benchmark.task not in defined:
        raise unknown(f"benchmark {benchmark.name}: task", benchmark.task, defined)
    return place


def problems(benchmark: BenchmarkConfig) -> Iterator[str]:
    """Problems of an lm-eval benchmark that reads a mirror, one sentence each."""
    yield from user_errors(lambda: folder(benchmark))
    if benchmark.chat and not benchmark.max_new_tokens:
        yield (
            f"benchmark {benchmark.name}: chat=true, but max_new_tokens=0 says that answers are scored, not generated, "
            f"and a chat template would move them: expected chat=false"
        )
