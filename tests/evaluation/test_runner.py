"""Programs that a model wrote: in a runner with limits and a sandbox, and graded by EvalPlus's
rules."""

import errno
import json
import os
import socket
import venv
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from harness_files import problem, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measure import namespaces_missing
from moe_lab.child_process import ProcessEnded
from moe_lab.evaluation.adapters.evalplus import GRADER, Grader, GradeRequest
from moe_lab.evaluation.sandbox import runner
from moe_lab.evaluation.sandbox.client import LimitedCalls, Outcome, Runner, RunnerError, Runners
from moe_lab.evaluation.sandbox.closed_world import closed_world_violation
from moe_lab.evaluation.sandbox.runner import Request, runner_command
from moe_lab.paths import resolve
from tests.campaign.programs import (
    BROKEN,
    CHEATS,
    ENDLESS,
    FILES,
    MEMORY,
    NETWORK,
    PROCESSES,
    SENDING,
    Program,
    failures,
)

pytestmark = pytest.mark.sandbox
MEBI = 1 << 20


def run(
    runner: Runner, body: str, inputs: list[Any] | None = None, seconds: float = 3.0, **changes: Any
) -> Outcome:
    """Run a program that defines f(x); `body` is the whole program."""
    inputs = [[1]] if inputs is None else inputs
    settings = {
        "seconds": [seconds] * len(inputs),
        "total_seconds": 5.0,
        "memory": 512 * MEBI,
        "output": MEBI,
    }
    return runner.run(
        Request(program=body, entry_point="f", inputs=inputs, **{**settings, **changes})
    )


@pytest.mark.slow
@pytest.mark.parametrize("row", BROKEN, ids=lambda row: row.name)
def test_failing_program_is_described_and_the_next_runs(runner: Runner, row: Program) -> None:
    outcome = run(runner, row.text)
    assert outcome.status in row.verdict.replace("fail", "failed").split(), (
        "the grader has another word"
    )
    assert outcome.error.startswith(row.error)
    assert run(runner, "def f(x): return x + 1").values() == [2]


WHOLE_LINES = st.text().map(lambda text: json.dumps(text).encode() + b"\n")


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(WHOLE_LINES | st.binary(min_size=1) | st.just(b"error "), max_size=6))
def test_runner_replies_to_any_bytes(
    chunks: list[bytes],
) -> None:
    watch = runner._Watch(os.getpid(), Request("", "f", [[1], [2]], [1.0, 1.0], 9.0, MEBI, MEBI))
    replies = (watch.receive(chunk) for chunk in [b"loaded\n", *chunks, b""])
    reply = json.loads(json.dumps(next(reply for reply in replies if reply)))
    outcome = Outcome(**reply)
    assert outcome.status in ("ok", "failed", "crash", "output")
    with suppress(ValueError):  # which the grader gives the verdict `output`
        outcome.values()


COMPLETE = b"loaded\n1\n"
"""What a program sends that is called once."""


@pytest.mark.parametrize(
    ("sent", "output", "status"),
    [
        (COMPLETE, MEBI, "ok"),
        (COMPLETE, len(COMPLETE), "ok"),
        (COMPLETE, len(COMPLETE) - 1, "output"),
        (COMPLETE + b"2\n", MEBI, "crash"),
        (COMPLETE[:-1], MEBI, "crash"),
    ],
)
def test_status_of_a_program_follows_from_what_it_sends(
    sent: bytes, output: int, status: str
) -> None:
    watch = runner._Watch(os.getpid(), Request("", "f", [[1]], [1.0], 9.0, MEBI, output))
    reply = watch.receive(sent) or watch.receive(b"")
    assert reply is not None
    assert reply["status"] == status


def test_program_has_no_standard_streams() -> None:
    body = (
        "import os\ndef f(x): return os.read(0, 1).decode(), os.write(1, b'x'), os.write(2, b'x')"
    )
    with Runner(confined=False) as limited:
        assert run(limited, body).values() == [("", 1, 1)]
        assert run(limited, "def f(x): return x").values() == [1]


def test_the_environment_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the sandbox a program of the campaign looks for it."""
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    with Runner(confined=False) as fresh:
        (environment,) = run(fresh, "import os\ndef f(x): return dict(os.environ)").values()
        assert "SECRET_KEY" not in environment
        assert "HOME" not in environment


@pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="other machines have one set of system calls"
)
def test_other_sets_of_system_calls_are_no_way_around(confined_runner: Runner) -> None:
    # the call of 32-bit programs, 117
    shmget = "53 b875000000 bb17000000 b907000000 ba00100000 be80030000 cd80 5b c3"
    body = (
        "import ctypes, mmap\ncode = mmap.mmap(-1, 4096, prot=7)\n"
        f"code.write(bytes.fromhex('{shmget}'))\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(code))\ndef f(x): return "
        "ctypes.CFUNCTYPE(ctypes.c_int)(at)()"
    )
    assert run(confined_runner, body).status == "crash"
    body = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def f(number): return libc.syscall(number, 7, 4096, 0o1600), ctypes.get_errno()"
    )
    assert run(confined_runner, body, [[(1 << 30) + 29]]).values() == [(-1, errno.EPERM)]


def test_calls_are_limited_in_processor_time_and_wall_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = {"busy": 0.0, "wall": 0.0}
    monkeypatch.setattr(runner, "_cpu_seconds", lambda _: now["busy"])
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now["wall"]))

    def left(total: float, calls: int, busy: float, wall: float) -> float:
        """Seconds of a call that may take 0.2 after calls that took so much each."""
        now.update(busy=0.0, wall=0.0)
        watch = runner._Watch(0, Request("", "f", [], [0.2] * 12, total, 0, MEBI))
        for _ in range(calls):
            now.update(busy=now["busy"] + busy, wall=now["wall"] + wall)
            assert watch.receive(b"1\n") is None
        return watch.seconds_remaining()

    assert left(5.0, 3, 0.1, 0.5) == pytest.approx(0.2)
    assert left(0.25, 2, 0.1, 0.5) == pytest.approx(0.05)  # of what all may take on the processor
    assert left(0.2, 3, 0.0, 0.5) == pytest.approx(0.2)
    assert left(0.2, 3, 0.0, 0.55) == pytest.approx(0.15)
    assert left(0.2, 4, 0.0, 0.5) == pytest.approx(-0.2)  # 1.8 s by the clock


def test_limits_alone_let_no_file_grow(tmp_path: Path) -> None:
    with Runner(confined=False) as limited:
        outcome = run(
            limited,
            f"def f(x):\n    with open({str(tmp_path / 'evil')!r}, 'w') as file: file.write('x')",
        )
        assert (outcome.status, outcome.error[:7]) == ("failed", "OSError")
    assert (tmp_path / "evil").read_text() == ""


def starting(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[str]], list[str]]) -> None:
    """Change the command line of every runner from now on."""

    def changed(*, confined: bool) -> tuple[list[str], dict[str, str]]:
        line, environment = runner_command(confined=confined)
        return change(line), environment

    monkeypatch.setattr("moe_lab.evaluation.sandbox.client.runner_command", changed)


def test_mounts_are_read_only_and_some_folders_hidden(
    confined_runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        "import os\ndef f(x): return [os.statvfs(path).f_flag & 1 for path in ('/', '/usr', "
        "'/dev/null')]"
    )
    assert run(confined_runner, body).values() == [[1, 1, 1]]
    stdlib = str(Path(os.__file__).resolve().parent)
    look = f"import os\ndef f(x): return sorted(os.listdir('{stdlib}/xml'))"
    assert "dom" in run(confined_runner, look).values()[0]
    starting(monkeypatch, lambda line: [*line, f"{stdlib}/xml"])
    with Runner(confined=True) as second:
        assert run(second, look).values() == [[]]


@pytest.mark.usefixtures("namespaces")
def test_the_library_is_readable_whoever_starts_the_runner() -> None:
    """Folders above it are made anew, for a user who does not own them."""
    umask = os.umask(0o077)
    try:
        with Runner(confined=True) as private:
            assert run(private, "import wave\ndef f(x): return wave.__name__").values() == ["wave"]
    finally:
        os.umask(umask)


def test_environment_behind_a_link_is_readable(
    confined_runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a folder of environments was moved to another disk, with a link in its place."""
    venv.create(tmp_path / "moved", symlinks=True)
    (packages,) = (tmp_path / "moved").glob("lib/python*/site-packages")
    (packages / "own_package.py").write_text("VALUE = 7\n")
    (tmp_path / "linked").symlink_to(tmp_path / "moved")
    starting(monkeypatch, lambda line: [str(tmp_path / "linked/bin/python"), *line[1:]])
    with Runner(confined=True) as linked:
        outcome = run(linked, "def f(x):\n    import own_package\n    return own_package.VALUE")
    assert outcome.values() == [7], outcome.error


def test_sandbox_allows_socket_pairs_and_threads_only(
    confined_runner: Runner,
) -> None:
    """A network namespace alone leaves AF_VSOCK, which reaches other virtual machines and their
    host."""
    body = (
        "import socket\ndef f(x):\n    made = []\n    for family in range(64):\n        for kind "
        "in (1, 2, 3, 5):\n"
        "            try: socket.socket(family, kind)\n            except OSError: continue\n"
        "            made.append(('socket', family, kind))\n"
        "        try: socket.socketpair(family, 1)\n        except OSError: continue\n"
        "        made.append(('pair', family))\n    return made"
    )
    assert run(confined_runner, body, seconds=3).values() == [[("pair", socket.AF_UNIX)]]
    loop = "import asyncio\nasync def add(x): return x + 1\ndef f(x): return asyncio.run(add(x))"
    assert run(confined_runner, loop, seconds=3).values() == [2]
    body = (
        "import threading\ndef f(x):\n    t = threading.Thread(target=print)\n    t.start(); "
        "t.join()\n    return x"
    )
    assert run(confined_runner, body).values() == [1]


def test_confined_runner_that_ends_twice_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dying(self: Runner, request: Request) -> Outcome:
        raise ProcessEnded("it ended")

    monkeypatch.setattr(Runner, "__init__", lambda self, *, confined: None)
    monkeypatch.setattr(Runner, "close", lambda self: None)
    monkeypatch.setattr(Runner, "run", dying)
    request = Request("", "f", [], [], 1.0, MEBI, MEBI)
    assert Runners(confined=False).run(request).status == "crash"
    with pytest.raises(RunnerError, match="ended twice"):
        Runners(confined=True).run(request)


def test_the_same_program_gives_the_same_values() -> None:
    body = "import random\ndef f(x): return [list({'a', 'b', 'c', 'd', 'e'}), random.random()]"
    results = []
    for _ in range(2):
        with Runner(confined=False) as worker:
            results.append(run(worker, body).values())
    assert results[0] == results[1]


# ---- graded in a process that no program can reach

ADD = problem(900, "add", "return x + 1", [[1], [2]], [[-5], [10**30]])
MEAN = problem(
    901,
    "mean",
    "return sum(x) / len(x) if x else 0.0",
    [[[1.0, 2.0]]],
    [[[]], [[0.1, 0.2]]],
    atol=1e-6,
)
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
    folder: Path,
    problems: list[dict[str, Any]],
    bodies: dict[str, str],
    dataset: str = "humaneval",
    **changes: Any,
) -> dict[str, tuple[str, str]]:
    """Entry point -> (base, plus) for whole programs by entry point."""
    data = write_lines(folder / "data.jsonl", problems)
    tasks = {row["entry_point"]: row["task_id"] for row in problems}
    settings = {"confined": not namespaces_missing(), "seconds": 2.0, "memory_mib": 512}
    programs = {tasks[name]: body for name, body in bodies.items()}
    request = GradeRequest(dataset, str(data), programs, **{**settings, **changes})
    result = GRADER.grade(request)
    return {
        name: (result[task].base, result[task].plus)
        for name, task in tasks.items()
        if name in bodies
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "program", "verdict"),
    [
        (ADD, "def add(x): return x + 1", ("pass", "pass")),
        # close enough, but fails on the empty list of plus
        (MEAN, "def mean(x): return sum(x) / len(x) + 1e-9", ("pass", "fail")),
        (TWICE, "def twice(x): return (x, x)", ("fail", "fail")),  # a tuple is no list
        (ROOT, "def find_zero(x): return -x[0] / x[1] + 1e-7", ("pass", "pass")),
        (ROOT, "def find_zero(x): return 0.5", ("fail", "fail")),
    ],
)
def test_programs_of_humaneval_have_their_verdicts(
    task: dict[str, Any], program: str, verdict: tuple[str, str], tmp_path: Path
) -> None:
    name = task["entry_point"]
    assert verdicts(tmp_path, [task], {name: program}) == {name: verdict}


@pytest.mark.slow
def test_programs_of_mbpp_have_their_verdicts(tmp_path: Path) -> None:
    """MBPP has input types and oracles of its own."""

    def verdict(body: str) -> tuple[str, str]:
        programs = {"similar_elements": f"def similar_elements(a, b):\n    {body}"}
        return verdicts(tmp_path, [SHARED], programs, dataset="mbpp")["similar_elements"]

    right = verdict("assert type(a) is tuple\n    return sorted(set(a) & set(b))")
    assert right == ("pass", "pass")
    assert verdict("return a")[0] == "fail"


@pytest.mark.slow
def test_unconfined_program_that_ends_its_runner_costs_its_verdict(tmp_path: Path) -> None:
    kill = "import os, signal\ndef {}(x): os.kill(os.getppid(), signal.SIGKILL); return x + 1"
    bodies = {
        "add": kill.format("add"),
        "mean": kill.format("mean"),
        "twice": "def twice(x): return [x, x]",
    }
    result = verdicts(tmp_path, [ADD, MEAN, TWICE], bodies, confined=False, processes=1)
    assert result == {
        "add": ("crash", "crash"),
        "mean": ("crash", "crash"),
        "twice": ("pass", "pass"),
    }


# a limit on processes counts all of an ordinary user, whose program can start none
@pytest.mark.slow
@pytest.mark.root
def test_unconfined_runner_that_ends_later_costs_no_verdict(
    tmp_path: Path,
) -> None:
    """What `add` leaves behind ends the runner while `mean` runs: that it does is seen in empty
    files."""
    runs = tmp_path / "runs"
    ended = tmp_path / "ended"
    later = (
        "import os, signal, time\ndef add(x):\n    runner = os.getppid()\n    if os.fork() == 0:\n"
        "        os.setsid(); os.close(3)\n"
        f"        while not os.path.exists({str(runs)!r}): time.sleep(0.01)\n"
        f"        os.kill(runner, signal.SIGKILL); open({str(ended)!r}, 'w'); os._exit(0)\n"
        "    return x + 1"
    )
    waiting = (
        f"import os, time\nopen({str(runs)!r}, 'w')\ndef mean(x):\n"
        f"    while not os.path.exists({str(ended)!r}): time.sleep(0.01)\n    return sum(x) / "
        "len(x) if x else 0.0"
    )
    bodies = {"add": later, "mean": waiting}
    result = verdicts(tmp_path, [ADD, MEAN], bodies, confined=False, processes=1, seconds=30.0)
    assert result["mean"] == ("pass", "pass")
    assert ended.exists()


ATTEMPTS = {
    "broken": [*BROKEN, *ENDLESS],
    "sending": SENDING,
    "cheats": CHEATS,
    "files": FILES,
    "others": [*NETWORK, *PROCESSES, *MEMORY],
}


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("what", ATTEMPTS)
def test_attacks_of_programs_cost_only_their_own_verdict(
    what: str,
) -> None:
    assert not failures(ATTEMPTS[what])


@pytest.mark.slow
@pytest.mark.parametrize(
    "work", ["__import__('os').abort()", "sum(range(10**12))", "len(bytearray(200 << 20))", "1 / 0"]
)
def test_call_that_ends_its_process_costs_no_other_call(work: str) -> None:
    limits = (0.2, 100 << 20)
    calls = LimitedCalls("builtins", {})
    try:
        assert calls("eval", [work], *limits) is None
        for _ in range(3):  # what one has taken counts for no other
            assert (
                calls("eval", ["len(bytearray(50 << 20)) - sum(range(10**6)) * 0"], *limits)
                == 50 << 20
            )
    finally:
        calls.close()


def test_missing_entry_point_is_an_error_and_no_verdict() -> None:
    with pytest.raises(RunnerError, match="no_such_module cannot be called"):
        LimitedCalls("no_such_module", {})("f", [], 1.0, 1 << 20)


class CountingGrader(NamedTuple):
    """A grader of two problems whose solutions differ, the file of these, and the programs that it
    has run."""

    grader: Grader
    data: Path
    runs: list[int]

    def plus(self, text: str, **changes: Any) -> tuple[list[str], int]:
        """The verdicts on a program for both problems, and how many programs were run."""
        self.runs.clear()
        programs = {row["task_id"]: text for row in ADDITIONS}
        request = GradeRequest("humaneval", str(self.data), programs, True, **changes)
        result = self.grader.grade(request)
        return [verdict.plus for verdict in result.values()], len(self.runs)


ADDITIONS = [ADD, {**ADD, "task_id": "HumanEval/905", "canonical_solution": "    return x + 2\n"}]
SOLUTION_RUNS = 4
RIGHT_PROGRAM = "def add(x): return x + 1"


@pytest.fixture
def counting_grader(
    namespaces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CountingGrader]:
    data = write_lines(tmp_path / "data.jsonl", ADDITIONS)
    runs: list[int] = []
    run_program = Runners.run
    monkeypatch.setattr(
        Runners, "run", lambda *arguments: runs.append(1) or run_program(*arguments)
    )
    grader = Grader()
    yield CountingGrader(grader, data, runs)
    grader.close()


@pytest.mark.slow
def test_equal_programs_are_run_once(counting_grader: CountingGrader) -> None:
    verdicts = ["pass", "fail"]
    assert counting_grader.plus(RIGHT_PROGRAM) == (verdicts, SOLUTION_RUNS + 3)
    assert counting_grader.plus(RIGHT_PROGRAM) == (verdicts, 0)


@pytest.mark.slow
def test_other_programs_settings_and_problems_are_run_again(
    counting_grader: CountingGrader,
) -> None:
    counting_grader.plus(RIGHT_PROGRAM)
    other_program = counting_grader.plus("def add(x): return 1 + x")
    assert other_program == counting_grader.plus(RIGHT_PROGRAM, seconds=3.0)
    assert counting_grader.runs == [1] * 3
    write_lines(counting_grader.data, ADDITIONS[::-1])
    assert counting_grader.plus(RIGHT_PROGRAM) == (["pass", "fail"], SOLUTION_RUNS + 3)


def test_broken_canonical_solution_is_an_error(tmp_path: Path) -> None:
    broken = {**ADD, "canonical_solution": "    return y\n"}
    with pytest.raises(
        RuntimeError, match="canonical solution of HumanEval/900 does not run: failed NameError"
    ):
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
    assert all(closed_world_violation(program) for program in reaching)
    assert (
        closed_world_violation(
            "def add(x): return sorted(w.upper() for w in x.split() if 'a' in w)[-1]"
        )
        is None
    )
    assert closed_world_violation("def add(x: return") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dataset"),
    [
        ("humaneval", "humaneval"),
        ("mbpp", "mbpp"),
        ("livecodebench", "humaneval"),
    ],
)
def test_shipped_problems_are_passed_by_their_solutions_only(name: str, dataset: str) -> None:
    data = Path(resolve(f"pocket:benchmarks/{name}.jsonl"))
    problems = [json.loads(line) for line in data.read_text().splitlines()]
    right = {row["task_id"]: row["prompt"] + row["canonical_solution"] for row in problems}
    assert not any(closed_world_violation(program) for program in right.values())
    wrong = {row["task_id"]: f"def {row['entry_point']}(*a): return None" for row in problems}
    for programs, status in ((right, "pass"), (wrong, "fail")):
        request = GradeRequest(dataset, str(data), programs, confined=not namespaces_missing())
        assert {verdict.plus for verdict in GRADER.grade(request).values()} == {status}
