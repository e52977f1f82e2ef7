"""What is wrong with benchmarks is said together and before torch; what identifies them is content, not place."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation import LIMITED, NAMESPACES, UNCONFINED, Policy, suite
from moe_lab.evaluation.sandbox import client
from moe_lab.evaluation.sandbox.runner import NO_NAMESPACES, Request
from moe_lab.paths import resolve

CODE = BenchmarkConfig(
    name="code",
    harness="evalplus",
    task="pocket:benchmarks/humaneval.jsonl",
    reports={"humaneval": "base"},
    expected=60,
    max_new_tokens=8,
)


def test_all_problems_are_reported_together() -> None:
    benchmarks = [
        CODE,
        replace(CODE, name="typo", harness="lm_evil"),
        replace(CODE, name="gone", task="gone.jsonl"),
        replace(CODE, name="count", expected=164),
    ]
    found = suite.preflight(benchmarks, Policy(False))
    for says in ("allow_code_execution=false", "did you mean lm_eval", "gone.jsonl", "60 items and should have 164"):
        assert sum(says in sentence for sentence in found) == 1, says


def test_what_is_right_is_silent() -> None:
    assert suite.preflight([CODE], Policy(True, "none")) == []


def test_preflight_imports_neither_torch_nor_a_harness() -> None:
    program = (
        "import sys\nfrom moe_lab.evaluation import suite\nfrom moe_lab.config import BenchmarkConfig as B\n"
        "from moe_lab.evaluation import Policy\nimport moe_lab.results\n"
        "b = B(name='b', harness='evalplus', task='pocket:benchmarks/mbpp.jsonl', reports={'m': 'base'})\n"
        "assert len(suite.preflight([b], Policy(True))) == 1\nsuite.identity(b)\n"
        "heavy = {'torch', 'transformers', 'lm_eval', 'evalplus', 'datasets', 'pandas', 'pyarrow', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root)


def test_identity_follows_content_and_settings_not_place(tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(Path(resolve(CODE.task)).read_bytes())
    known = suite.identity(CODE)
    for same in ({"task": str(copy)}, {"name": "other"}, {"parameters": {"processes": 3}}):
        assert suite.identity(replace(CODE, **same)) == known, same  # type: ignore[arg-type]
    copy.write_bytes(copy.read_bytes() + b"\n")
    changes = (
        {"task": str(copy)},
        {"limit": 3},
        {"batch_size": 1},
        {"max_new_tokens": 9},
        {"parameters": {"seconds": 1}},
        {"reports": {}},
    )
    for other in changes:
        assert suite.identity(replace(CODE, **other)) != known, other  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sandbox", "missing", "closed_world", "expected"),
    [
        ("auto", False, False, NAMESPACES),
        ("auto", True, True, LIMITED),
        ("auto", True, False, UserError),
        ("namespaces", False, True, NAMESPACES),
        ("namespaces", True, True, UserError),
        ("none", True, False, UNCONFINED),
    ],
)
def test_programs_run_behind_the_walls_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, sandbox: str, missing: bool, closed_world: bool, expected: object
) -> None:
    monkeypatch.setattr(client, "check_namespaces", no_namespaces if missing else lambda: None)
    if expected is UserError:
        with pytest.raises(UserError, match=f"sandbox={re.escape(sandbox)}"):
            Policy(True, sandbox).protection(closed_world=closed_world)
    else:
        assert Policy(True, sandbox).protection(closed_world=closed_world) == expected
    with pytest.raises(UserError, match=r"allow_code_execution=false"):
        Policy(False, sandbox).protection(closed_world=closed_world)


def no_namespaces() -> None:
    raise client.NoNamespaces("none here")


def test_a_kernel_that_refuses_namespaces_is_told_from_one_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the words that a runner ends with, and at once."""
    words = f"raise SystemExit('{NO_NAMESPACES} (clone: Operation not permitted)')"
    monkeypatch.setattr(client, "runner_command", lambda *, confined: ([sys.executable, "-c", words], {}))
    with pytest.raises(client.NoNamespaces, match="not permitted"):
        client.start(confined=True)


def broken_starts(monkeypatch: pytest.MonkeyPatch, count: int, how: str) -> list[str]:
    """Let the next starts of the sandbox fail. Returns what failed so far."""
    failed: list[str] = []
    plain = client.runner_command

    def command(*, confined: bool) -> tuple[list[str], dict[str, str]]:
        if len(failed) == count:
            return plain(confined=confined)
        failed.append(how)
        if how == "no process":
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], {}

    monkeypatch.setattr(client, "runner_command", command)
    return failed


@pytest.fixture
def fresh_sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has not found out yet what this machine can do."""
    if client.namespaces_missing():
        pytest.skip(f"no namespaces: {client.namespaces_missing()}")
    monkeypatch.setattr(client, "PAUSE", 0.0)
    client.check_namespaces.cache_clear()
    yield
    client.check_namespaces.cache_clear()


FAILURES = ["no process", "killed"]


@pytest.mark.usefixtures("fresh_sandbox")
@pytest.mark.parametrize("how", FAILURES)
def test_a_start_of_the_sandbox_that_fails_once_is_tried_again(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    failed = broken_starts(monkeypatch, 1, how)
    assert Policy(True).protection() == NAMESPACES
    assert failed == [how]


@pytest.mark.usefixtures("fresh_sandbox")
@pytest.mark.parametrize("how", FAILURES)
def test_no_weaker_sandbox_takes_the_place_of_one_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    broken_starts(monkeypatch, 3, how)
    with pytest.raises(Unavailable, match="sandbox=auto"):
        Policy(True).protection()
    assert Policy(True).protection() == NAMESPACES  # the failure is not remembered


@pytest.mark.usefixtures("fresh_sandbox")
def test_a_start_that_fails_while_programs_are_graded_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_starts(monkeypatch, 2, "killed")
    runners = client.Runners(confined=True)
    try:
        request = Request("def f(x): return x", "f", [[3]], [1.0], 2.0, 1 << 30, 1 << 20)
        assert runners.run(request).status == "ok"
    finally:
        runners.close()


def test_two_benchmarks_do_not_report_one_result() -> None:
    (sentence,) = suite.wrong([CODE, replace(CODE, name="again")])
    assert sentence.startswith("benchmarks code and again both report")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"shots": 3}, "shots=3: expected 0"),
        ({"parameters": {"seconds": "abc"}}, "parameters.seconds=abc: expected a number"),
        ({"parameters": {"memory_mib": -3}}, "parameters.memory_mib=-3"),
        ({"harness": "stories", "reports": {"s": "score"}, "chat": True}, "chat=true, but stories"),
    ],
)
def test_settings_that_cannot_be_or_would_do_nothing_are_told(changed: dict[str, Any], says: str) -> None:
    assert any(says in sentence for sentence in suite.wrong([replace(CODE, **changed)]))
