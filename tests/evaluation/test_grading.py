"""Programs graded by EvalPlus's rules in a process that no program can reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness_files import problem, write_lines

from moe_lab.evaluation.harnesses.evalplus import Grader, GradeRequest, kept_grader
from moe_lab.evaluation.sandbox.client import LimitedCalls, RunnerError, Runners, namespaces_missing
from moe_lab.evaluation.sandbox.closed_world import leaves_closed_world
from moe_lab.paths import resolve
from tests.campaign.programs import BROKEN, CHEATS, ENDLESS, FILES, MEMORY, NETWORK, PROCESSES, SENDING, wrong

pytestmark = [pytest.mark.slow, pytest.mark.walls]
ADD = problem(900, "add", "return x + 1", [[1], [2]], [[-5], [10**30]])
MEAN = problem(901, "mean", "return sum(x) / len(x) if x else 0.0", [[[1.0, 2.0]]], [[[]], [[0.1, 0.2]]], atol=1e-6)
TWICE = problem(902, "twice", "return [x, x]", [[1]], [[2]])
ROOT = problem(
    32, "find_zero", "return -x[0] / x[1]", [[[1, 2]], [[-6, 3]]], [[[5, 1]]], atol=1e-4
)  # EvalPlus judges this entry point by putting the answer in, and 0.3.1 then fails it in any case
SHARED = {
    **problem(0, "similar_elements", "", [[[3, 4, 5], [5, 4, 7]]], [[[1], [2]]]),
    "task_id": "Mbpp/2",
    "prompt": '"""\nFind the shared elements.\n"""\n',
    "canonical_solution": "def similar_elements(a, b):\n    return tuple(set(a) & set(b))\n",
}


def verdicts(
    folder: Path, problems: list[dict[str, Any]], bodies: dict[str, str], dataset: str = "humaneval", **changes: Any
) -> dict[str, tuple[str, str]]:
    """Entry point -> (base, plus) for whole programs by entry point."""
    data = write_lines(folder / "data.jsonl", problems)
    tasks = {row["entry_point"]: row["task_id"] for row in problems}
    settings = {"confined": not namespaces_missing(), "seconds": 2.0, "memory_mib": 512}
    programs = {tasks[name]: body for name, body in bodies.items()}
    request = GradeRequest(dataset, str(data), programs, **{**settings, **changes})
    found = kept_grader.grade(request)
    return {name: (found[task].base, found[task].plus) for name, task in tasks.items() if name in bodies}


def test_right_half_right_and_wrong_programs(tmp_path: Path) -> None:
    programs = {
        "add": "def add(x): return x + 1",
        "mean": "def mean(x): return sum(x) / len(x) + 1e-9",  # close enough, but fails on the empty list of plus
        "twice": "def twice(x): return (x, x)",  # a tuple is no list
        "find_zero": "def find_zero(x): return -x[0] / x[1] + 1e-7",
    }
    found = verdicts(tmp_path, [ADD, MEAN, TWICE, ROOT], programs)
    right, half, wrong = ("pass", "pass"), ("pass", "fail"), ("fail", "fail")
    assert found == {"add": right, "mean": half, "twice": wrong, "find_zero": right}
    assert verdicts(tmp_path, [ROOT], {"find_zero": "def find_zero(x): return 0.5"}) == {"find_zero": wrong}


def test_mbpp_has_its_own_input_types_and_oracles(tmp_path: Path) -> None:
    right = "def similar_elements(a, b):\n    assert type(a) is tuple\n    return sorted(set(a) & set(b))"
    found = verdicts(tmp_path, [SHARED], {"similar_elements": right}, dataset="mbpp")
    assert found == {"similar_elements": ("pass", "pass")}
    wrong = "def similar_elements(a, b): return a"
    assert verdicts(tmp_path, [SHARED], {"similar_elements": wrong}, dataset="mbpp")["similar_elements"][0] == "fail"


def test_without_walls_a_program_that_ends_its_runner_costs_one_verdict(tmp_path: Path) -> None:
    kill = "import os, signal\ndef {}(x): os.kill(os.getppid(), signal.SIGKILL); return x + 1"
    bodies = {"add": kill.format("add"), "mean": kill.format("mean"), "twice": "def twice(x): return [x, x]"}
    found = verdicts(tmp_path, [ADD, MEAN, TWICE], bodies, confined=False, processes=1)
    assert found == {"add": ("crash", "crash"), "mean": ("crash", "crash"), "twice": ("pass", "pass")}


@pytest.mark.root  # a limit on processes counts all of an ordinary user, whose program can start none
def test_without_walls_a_runner_that_is_ended_later_costs_the_next_program_nothing(tmp_path: Path) -> None:
    """What `add` leaves behind ends the runner while `mean` runs: that it does is seen in empty files."""
    runs, ended = tmp_path / "runs", tmp_path / "ended"
    later = (
        "import os, signal, time\ndef add(x):\n    runner = os.getppid()\n    if os.fork() == 0:\n"
        "        os.setsid(); os.close(3)\n"
        f"        while not os.path.exists({str(runs)!r}): time.sleep(0.01)\n"
        f"        os.kill(runner, signal.SIGKILL); open({str(ended)!r}, 'w'); os._exit(0)\n"
        "    return x + 1"
    )
    waiting = (
        f"import os, time\nopen({str(runs)!r}, 'w')\ndef mean(x):\n"
        f"    while not os.path.exists({str(ended)!r}): time.sleep(0.01)\n    return sum(x) / len(x) if x else 0.0"
    )
    bodies = {"add": later, "mean": waiting}
    found = verdicts(tmp_path, [ADD, MEAN], bodies, confined=False, processes=1, seconds=30.0)
    assert found["mean"] == ("pass", "pass") and ended.exists()


ATTEMPTS = {
    "broken": [*BROKEN, *ENDLESS],
    "sending": SENDING,
    "cheats": CHEATS,
    "files": FILES,
    "others": [*NETWORK, *PROCESSES, *MEMORY],
}


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("what", ATTEMPTS)
def test_whatever_a_program_attempts_costs_its_own_verdict_alone_and_leaves_nothing(what: str) -> None:
    assert not wrong(ATTEMPTS[what])


HOSTILE = ["__import__('os').abort()", "sum(range(10**12))", "len(bytearray(200 << 20))", "1 / 0"]


@pytest.mark.parametrize("work", HOSTILE)
def test_a_call_that_ends_its_process_costs_no_other_call(work: str) -> None:
    limits, calls = (0.2, 100 << 20), LimitedCalls("builtins", {})
    try:
        assert calls("eval", [work], *limits) is None
        for _ in range(3):  # what one has taken counts for no other
            assert calls("eval", ["len(bytearray(50 << 20)) - sum(range(10**6)) * 0"], *limits) == 50 << 20
    finally:
        calls.close()


def test_what_cannot_be_called_is_an_error_and_no_verdict() -> None:
    with pytest.raises(RunnerError, match="no_such_module cannot be called"):
        LimitedCalls("no_such_module", {})("f", [], 1.0, 1 << 20)


@pytest.mark.usefixtures("namespaces")
def test_equal_programs_are_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [ADD, {**ADD, "task_id": "HumanEval/905", "canonical_solution": "    return x + 2\n"}]
    data, runs = write_lines(tmp_path / "data.jsonl", rows), []
    plain = Runners.run
    monkeypatch.setattr(Runners, "run", lambda *given: runs.append(1) or plain(*given))
    grader = Grader()

    def plus(text: str, **changes: Any) -> tuple[list[str], int]:
        """Verdicts, and how many programs were run."""
        runs.clear()
        programs = {row["task_id"]: text for row in rows}
        found = grader.grade(GradeRequest("humaneval", str(data), programs, True, **changes))
        return [verdict.plus for verdict in found.values()], len(runs)

    try:
        solutions = 4
        assert plus("def add(x): return x + 1") == (["pass", "fail"], solutions + 3)
        assert plus("def add(x): return x + 1") == (["pass", "fail"], 0)
        assert plus("def add(x): return 1 + x") == plus("def add(x): return x + 1", seconds=3.0)
        assert runs == [1] * 3
        write_lines(data, rows[::-1])
        assert plus("def add(x): return x + 1") == (["pass", "fail"], solutions + 3)
    finally:
        grader.close()


def test_a_broken_canonical_solution_is_an_error(tmp_path: Path) -> None:
    broken = {**ADD, "canonical_solution": "    return y\n"}
    with pytest.raises(RuntimeError, match="canonical solution of HumanEval/900 does not run: failed NameError"):
        verdicts(tmp_path, [broken], {"add": "def add(x): return 1"})


def test_closed_world_programs_are_told_from_others() -> None:
    reaching = [
        "import os\ndef add(x): return x + 1",
        "def add(x): return ().__class__",
        "def add(x): return (i for i in [1]).gi_frame",
        "def add(x): return open('/etc/passwd')",
        "def add(x): return '{0.real}'.format(x)",
        "def add(x):\n    match x:\n        case int(__reduce_ex__=r): return r",
        "async def add(x): return x",
        "def add(x):\n    with x as y: return y",
    ]
    assert all(leaves_closed_world(program) for program in reaching)
    assert leaves_closed_world("def add(x): return sorted(w.upper() for w in x.split() if 'a' in w)[-1]") is None
    assert leaves_closed_world("def add(x: return") is None


@pytest.mark.parametrize(
    ("name", "dataset"), [("humaneval", "humaneval"), ("mbpp", "mbpp"), ("livecodebench", "humaneval")]
)
def test_the_shipped_problems_are_passed_by_their_own_solutions_alone(name: str, dataset: str) -> None:
    data = Path(resolve(f"pocket:benchmarks/{name}.jsonl"))
    problems = [json.loads(line) for line in data.read_text().splitlines()]
    right = {row["task_id"]: row["prompt"] + row["canonical_solution"] for row in problems}
    assert not any(leaves_closed_world(program) for program in right.values())
    wrong = {row["task_id"]: f"def {row['entry_point']}(*a): return None" for row in problems}
    for programs, status in ((right, "pass"), (wrong, "fail")):
        request = GradeRequest(dataset, str(data), programs, confined=not namespaces_missing())
        assert {verdict.plus for verdict in kept_grader.grade(request).values()} == {status}
