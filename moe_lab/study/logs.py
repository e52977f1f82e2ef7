"""What a step printed, found in the logs of workers and jobs."""

from __future__ import annotations

import re
from pathlib import Path

from moe_lab.study.state import StepState, StudyState
from moe_lab.study.store import Store

LINES = 20
"""How many of the last lines are shown."""
HEADING = re.compile(r"\d\d:\d\d:\d\d (\w+/\S+)")
"""How a worker announces a step."""


def step_log(store: Store, state: StudyState, step: StepState) -> tuple[Path, list[str]] | None:
    """The log a step was last announced in, and the last lines it printed there."""
    error = store.error_of(step.id) or {}
    named = [Path(error["log"])] if "log" in error else []
    named += [store.root / "logs" / f"slurm-{step.job}.log"] if step.job else []
    others = sorted((store.root / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in dict.fromkeys([*named, *others]):
        if path.exists() and (lines := excerpt(path.read_text(errors="replace").splitlines(), step.name)):
            return path, lines
    return None


def excerpt(lines: list[str], name: str) -> list[str]:
    """The last lines printed by the step `name`: from where it was last announced to where another one was."""
    found: list[str] = []
    inside = False
    for line in lines:
        if heading := HEADING.fullmatch(line.strip()):
            inside = heading[1] == name
            found = [] if inside else found
        if inside:
            found.append(line)
    return found[-LINES:]


def job_log(state: StudyState, job: str) -> tuple[Path, list[str]] | None:
    """What a job printed outside its steps: how it was started, and what ended it."""
    path = state.logs[job].logs / f"{job}_0_log.err"
    if not path.exists():
        return None
    return path, path.read_text(errors="replace").splitlines()[-LINES:]
