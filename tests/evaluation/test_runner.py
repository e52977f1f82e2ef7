"""Programs that a model wrote: in a runner with limits and a sandbox, and graded by EvalPlus's
rules."""

import errno
import json
import os
import shutil
import socket
import subprocess
import venv
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness_files import problem, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measure import program_isolation
from moe_lab.child_process import ProcessEnded
from moe_lab.evaluation.adapters.evalplus import GRADER, Grader, GradeRequest
from moe_lab.evaluation.sandbox import isolation as isolation_rules
from moe_lab.evaluation.sandbox import runner
from moe_lab.evaluation.sandbox.client import LimitedCalls, Runner, RunnerError, Runners
from moe_lab.evaluation.sandbox.isolation import NONE, PACKAGE
from moe_lab.evaluation.sandbox.runner import Outcome, Request
from moe_lab.paths import resolve
from tests.campaign.programs import (
    BROKEN,
    CHEATS,
    ENDLESS,
    FILES,
    GRADING,
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


SUM_LINES = "for _ in range(int(input())): print(sum(map(int, input().split())))"
SUM_ALL = "\nfor i in range(int(d[0])): print(int(d[1 + 2 * i]) + int(d[2 + 2 * i]))"
SCRIPTS = {
    "reads by input": SUM_LINES,
    "reads bytes": f"import sys\nd = sys.stdin.buffer.read().split(){SUM_ALL}",
    "opens 0": f"d = open(0).read().split(){SUM_ALL}",
    "reads the size": f"import os\nd = os.read(0, os.fstat(0).st_size).split(){SUM_ALL}",
    "replaces stdin": "import io, os, sys\nsys.stdin = io.StringIO(os.read(0, 99).decode())\n"
    f"{SUM_LINES}",
    "writes bytes": "import sys\nw = sys.stdout.buffer.write\n"
    + SUM_LINES.replace("print(", "w(b'%d\\n' % "),
    "ends at once": f"import os, sys\n{SUM_LINES}\nsys.stdout.flush()\nos._exit(0)",
    "prints when it ends": f"import atexit\natexit.register(lambda: exec({SUM_LINES!r}))",
    "prints when it is deleted": "class A:\n  def __del__(self): print(4, 8)\na = A()",
    "is of the future": f"from __future__ import annotations\n{SUM_LINES}",
    "reads files": "import fileinput\nd = ' '.join(fileinput.input()).split()" + SUM_ALL,
    "runs in a thread": "from threading import Thread\n"
    f"Thread(target=exec, args=[{SUM_LINES!r}]).start()",
    "recurses": "import sys\nsys.setrecursionlimit(10 ** 6)\ndef f(n): return n and f(n - 1)\n"
    f"f(10 ** 5)\n{SUM_LINES}",
    "is the main module": f"if __name__ == '__main__':\n  {SUM_LINES}\n  exit(1)",
    "pickles": f"import pickle\nclass A: pass\npickle.loads(pickle.dumps(A()))\n{SUM_LINES}",
    "uses the prelude": SUM_LINES.replace("input()", "stdin.readline()"),
}
WRONG_SCRIPTS = {
    "1 // 0": ("failed", "exit code 1: ZeroDivisionError"),
    "for": ("failed", "exit code 1: SyntaxError"),
    "import os\nprint('no')\nos._exit(3)": ("failed", "exit code 3"),
    "import ctypes\nctypes.string_at(0)": ("crash", "killed by SIGSEGV"),
    "while True: print('x' * 999)": ("output", ""),
    "import os\nos.close(1)\nwhile True: pass": ("timeout", ""),
    "import os\nos.write(0, b'x')": ("failed", "exit code 1: OSError"),
}


def test_scripts_read_and_print_as_in_a_contest(runner: Runner) -> None:
    def run_script(text: str) -> Outcome:
        limits = ([1.0], 1.0, 512 * MEBI, MEBI)
        return runner.run(
            Request(text, None, ["2\n1 3\n3 5\n"], *limits, prelude="from sys import *")
        )

    outcomes = {name: run_script(text) for name, text in SCRIPTS.items()}
    printed = {name: " ".join(outcome.values()[0].split()) for name, outcome in outcomes.items()}
    assert printed == dict.fromkeys(SCRIPTS, "4 8")
    for text, (status, error) in WRONG_SCRIPTS.items():
        outcome = run_script(text)
        assert (outcome.status, outcome.encoded) == (status, []), text
        assert outcome.error.startswith(error)


WHOLE_LINES = st.text().map(lambda text: json.dumps(text).encode() + b"\n")


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(WHOLE_LINES | st.binary(min_size=1) | st.just(b"error "), max_size=6))
def test_runner_replies_to_any_bytes(
    chunks: list[bytes],
) -> None:
    watch = runner._Watch(os.getpid(), Request("", "f", [[1], [2]], [1.0, 1.0], 9.0, MEBI, MEBI))
    replies = (watch.receive(chunk) for chunk in [b"loaded\n", *chunks, b""])
    reply = vars(next(reply for reply in replies if reply))
    outcome = Outcome(**json.loads(json.dumps(reply)))
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
        (b"loaded\n\0\n", MEBI, "output"),
    ],
)
def test_status_of_a_program_follows_from_what_it_sends(
    sent: bytes, output: int, status: str
) -> None:
    watch = runner._Watch(os.getpid(), Request("", "f", [[1]], [1.0], 9.0, MEBI, output))
    reply = watch.receive(sent) or watch.receive(b"")
    assert reply is not None
    assert reply.status == status


def test_program_has_no_standard_streams() -> None:
    body = (
        "import os\ndef f(x): return os.read(0, 1).decode(), os.write(1, b'x'), os.write(2, b'x')"
    )
    with Runner(NONE) as limited:
        assert run(limited, body).values() == [("", 1, 1)]
        assert run(limited, "def f(x): return x").values() == [1]


def test_the_environment_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the sandbox a program of the campaign looks for it."""
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    with Runner(NONE) as fresh:
        (environment,) = run(fresh, "import os\ndef f(x): return dict(os.environ)").values()
        assert "SECRET_KEY" not in environment
        assert "HOME" not in environment


@pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="other machines have one set of system calls"
)
def test_other_sets_of_system_calls_are_no_way_around(isolated_runner: Runner) -> None:
    # the call of 32-bit programs, 117
    shmget = "53 b875000000 bb17000000 b907000000 ba00100000 be80030000 cd80 5b c3"
    body = (
        "import ctypes, mmap\ncode = mmap.mmap(-1, 4096, prot=7)\n"
        f"code.write(bytes.fromhex('{shmget}'))\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(code))\ndef f(x): return "
        "ctypes.CFUNCTYPE(ctypes.c_int)(at)()"
    )
    assert run(isolated_runner, body).status == "crash"
    body = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def f(number): return libc.syscall(number, 7, 4096, 0o1600), ctypes.get_errno()"
    )
    assert run(isolated_runner, body, [[(1 << 30) + 29]]).values() == [(-1, errno.ENOSYS)]


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
    with Runner(NONE) as limited:
        outcome = run(
            limited,
            f"def f(x):\n    with open({str(tmp_path / 'evil')!r}, 'w') as file: file.write('x')",
        )
        assert (outcome.status, outcome.error[:7]) == ("failed", "OSError")
    assert (tmp_path / "evil").read_text() == ""


READING = """
import sys
from moe_lab.evaluation.sandbox.client import Runner
from moe_lab.evaluation.sandbox.runner import Request
program = "import own_package\\ndef f(path): return open(path).read(1)"
with Runner(sys.argv[1]) as runner:
    for path in sys.argv[2:]:
        outcome = runner.run(Request(program, "f", [[path]], [9.0], 9.0, 1 << 29, 1 << 20))
        print(*outcome.encoded, outcome.error)
"""


def test_packages_are_readable_but_not_the_answers_in_ours(tmp_path: Path, isolation: str) -> None:
    """Where moe_lab is a package of an environment that was moved, with a link in its place."""
    venv.create(tmp_path / "moved", symlinks=True)
    (packages,) = (tmp_path / "moved").glob("lib/python*/site-packages")
    shutil.copytree(PACKAGE, packages / "moe_lab")
    (packages / "own_package.py").write_text("VALUE = 7\n")
    (tmp_path / "linked").symlink_to(tmp_path / "moved")
    paths = [packages / "own_package.py", packages / "moe_lab/pocket/data/benchmarks/mbpp.jsonl"]
    assert all(path.exists() for path in paths)
    line = [tmp_path / "linked/bin/python", "-c", READING, isolation, *paths]
    result = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
    readable, hidden = result.stdout.splitlines()
    assert readable.strip() == '"V"'
    assert hidden.strip().startswith(("PermissionError", "FileNotFoundError"))


REFUSED = """
# name  number on x86_64  on aarch64 (-: it does not have the call)  arguments

fork 57 -
vfork 58 -
clone 56 220 17
clone3 435 435
execve 59 221 /bin/true
execveat 322 281 -100 /bin/true
unshare 272 97 0x10000000
setns 308 268
ptrace 101 117
process_vm_readv 310 270
process_vm_writev 311 271
process_madvise 440 440
kcmp 312 272
kill 62 129 1
tkill 200 130 1
tgkill 234 131 1 1
pidfd_open 434 434 1
pidfd_send_signal 424 424
pidfd_getfd 438 438
prlimit64 302 261 1 7
setpriority 141 140
sched_setscheduler 144 119
prctl 157 167 1
fcntl 72 25 0 8 1
ioctl 16 29 0 0x40086602
vmsplice 278 75
splice 275 76
tee 276 77
memfd_create 319 279
memfd_secret 447 447
shmget 29 194 7 4096 0x380
semget 64 190 7 1 0x380
msgget 68 186 7 0x380
mq_open 240 180 name
add_key 248 217
request_key 249 218
keyctl 250 219
io_uring_setup 425 425
io_setup 206 0
bpf 321 280
perf_event_open 298 241
userfaultfd 323 282
socket 41 198 2 1
socketpair 53 199 1 2
connect 42 203
bind 49 200
sendmsg 46 211
sendmmsg 307 269
mount 165 40 none / none
umount2 166 39 /usr
pivot_root 155 41 / /
chroot 161 51 /
fsopen 430 430 tmpfs
open_tree 428 428 -100 / 1
move_mount 429 429 -100 / -100 /
chmod 90 - /usr
fchmodat 268 53 -100 /usr
chown 92 - /usr
fchownat 260 54 -100 /usr
utimensat 280 88 -100 /usr
truncate 76 45 /usr
setxattr 188 5 /usr name
inotify_init1 294 26
fanotify_init 300 262
landlock_create_ruleset 444 444
setuid 105 146 1
setgid 106 144 1
"""
"""Calls by which a program could reach beyond its own process. They are not read from the filter's
own table, which may lack one."""
CALLS = [
    "import ctypes",
    "libc = ctypes.CDLL(None, use_errno=True)",
    "def call(*row):",
    "    result = libc.syscall(*(a if isinstance(a, int) else a.encode() for a in row))",
    "    return result, ctypes.get_errno()",
    "def f(rows): return [call(*row) for row in rows]",
]


def argument(text: str) -> int | str:
    """A number, or the text of a pointer to characters."""
    try:
        return int(text, 0)
    except ValueError:
        return text


def test_calls_beyond_the_own_process_are_refused(isolated_runner: Runner) -> None:
    """By their numbers on this machine, with arguments that do no harm."""
    column = {"x86_64": 1, "aarch64": 2}[os.uname().machine]
    rows = [line.split() for line in REFUSED.splitlines() if line and line[0] != "#"]
    calls = {
        row[0]: [int(row[column]), *map(argument, row[3:]), 0, 0, 0, 0]
        for row in rows
        if row[column] != "-"
    }
    (results,) = run(isolated_runner, "\n".join(CALLS), [[list(calls.values())]]).values()
    errors = dict.fromkeys(calls, errno.EPERM)
    errors |= {"clone3": errno.ENOSYS, "socket": errno.EAFNOSUPPORT}
    assert dict(zip(calls, results, strict=True)) == {
        name: (-1, error) for name, error in errors.items()
    }


@pytest.mark.parametrize(
    ("version", "size", "rights"),
    [(1, 8, 13), (2, 8, 14), (3, 8, 15), (4, 16, 15), (5, 16, 16), (6, 24, 16), (9, 24, 16)],
)
def test_each_version_of_landlock_gets_the_rights_that_it_knows(
    version: int, size: int, rights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel refuses rights that it does not know. Here there is one kernel only."""
    calls: list[Any] = []

    def record(*arguments: Any) -> int:
        calls.append(arguments)
        return os.open(os.devnull, os.O_RDONLY) if len(calls) == 1 else 0

    monkeypatch.setattr(isolation_rules, "_call", record)
    isolation_rules._restrict_files(version)
    _, _, refused_rights, given_size, _ = calls[0]
    assert given_size.value == size
    assert int.from_bytes(refused_rights.raw[:8], "little") == (1 << rights) - 1


def test_sandbox_allows_socket_pairs_and_threads_only(
    isolated_runner: Runner,
) -> None:
    body = (
        "import socket\ndef f(x):\n    made = []\n    for family in range(64):\n        for kind "
        "in (1, 2, 3, 5):\n"
        "            try: socket.socket(family, kind)\n            except OSError: continue\n"
        "            made.append(('socket', family, kind))\n"
        "        try: socket.socketpair(family, 1)\n        except OSError: continue\n"
        "        made.append(('pair', family))\n    return made"
    )
    assert run(isolated_runner, body, seconds=3).values() == [[("pair", socket.AF_UNIX)]]
    loop = "import asyncio\nasync def add(x): return x + 1\ndef f(x): return asyncio.run(add(x))"
    assert run(isolated_runner, loop, seconds=3).values() == [2]
    body = (
        "import threading\ndef f(x):\n    t = threading.Thread(target=print)\n    t.start(); "
        "t.join()\n    return x"
    )
    assert run(isolated_runner, body).values() == [1]


def test_isolated_runner_that_ends_twice_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dying(self: Runner, request: Request) -> Outcome:
        raise ProcessEnded("it ended")

    monkeypatch.setattr(Runner, "__init__", lambda self, kind: None)
    monkeypatch.setattr(Runner, "close", lambda self: None)
    monkeypatch.setattr(Runner, "run", dying)
    request = Request("", "f", [], [], 1.0, MEBI, MEBI)
    assert Runners(NONE).run(request).status == "crash"
    with pytest.raises(RunnerError, match="ended twice"):
        Runners("landlock").run(request)


def test_the_same_program_gives_the_same_values() -> None:
    body = "import random\ndef f(x): return [list({'a', 'b', 'c', 'd', 'e'}), random.random()]"
    results = []
    for _ in range(2):
        with Runner(NONE) as worker:
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
    settings = {"isolation": program_isolation(), "seconds": 2.0, "memory_mib": 512}
    programs = [(tasks[name], body) for name, body in bodies.items()]
    request = GradeRequest(dataset, str(data), programs, **{**settings, **changes})
    result = zip(bodies, GRADER.grade(request), strict=True)
    return {name: (verdict.base, verdict.plus) for name, verdict in result}


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
    result = verdicts(tmp_path, [ADD, MEAN, TWICE], bodies, isolation=NONE, processes=1)
    assert result == {
        "add": ("crash", "crash"),
        "mean": ("crash", "crash"),
        "twice": ("pass", "pass"),
    }


ATTEMPTS = {
    "broken": [*BROKEN, *ENDLESS],
    "sending": SENDING,
    "cheats": CHEATS,
    "grading": GRADING,
    "files": FILES,
    "others": [*NETWORK, *PROCESSES, *MEMORY],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ATTEMPTS)
def test_attacks_of_programs_cost_only_their_own_verdict(what: str, isolation: str) -> None:
    assert not failures(ATTEMPTS[what], isolation)


@pytest.mark.slow
@pytest.mark.parametrize(
    "work", ["__import__('os').abort()", "sum(range(10**12))", "len(bytearray(200 << 20))", "1 / 0"]
)
def test_call_that_ends_its_process_costs_no_other_call(work: str) -> None:
    limits = (1.0, 100 << 20)
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


ADDITIONS = [ADD, {**ADD, "task_id": "HumanEval/905", "canonical_solution": "    return x + 2\n"}]


@pytest.mark.slow
def test_equal_programs_are_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For two problems whose solutions differ. Other programs, settings and problems are run
    again."""
    data = write_lines(tmp_path / "data.jsonl", ADDITIONS)
    runs: list[int] = []
    run_program = Runners.run
    monkeypatch.setattr(
        Runners, "run", lambda *arguments: runs.append(1) or run_program(*arguments)
    )

    def count_runs(text: str, **changes: Any) -> int:
        runs.clear()
        programs = [(row["task_id"], text) for row in ADDITIONS]
        request = GradeRequest("humaneval", str(data), programs, program_isolation(), **changes)
        verdicts = [verdict.plus for verdict in grader.grade(request)]
        assert verdicts == ["pass", "fail"]
        return len(runs)

    program = "def add(x): return x + 1"
    with closing(Grader()) as grader:
        assert count_runs(program) == 3 + 3, "and solutions, but one whose outcome is not needed"
        assert count_runs(program) == 0
        assert count_runs("def add(x): return 1 + x") == count_runs(program, seconds=3.0) == 3
        write_lines(data, ADDITIONS[::-1])
        assert count_runs(program) == 3 + 3


def test_broken_canonical_solution_is_an_error(tmp_path: Path) -> None:
    broken = {**ADD, "canonical_solution": "    return y\n"}
    with pytest.raises(
        RuntimeError, match="canonical solution of HumanEval/900 does not run: failed NameError"
    ):
        verdicts(tmp_path, [broken], {"add": "def add(x): return 1"})


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
    right = [(row["task_id"], row["prompt"] + row["canonical_solution"]) for row in problems]
    wrong = [(row["task_id"], f"def {row['entry_point']}(*a): return None") for row in problems]
    for programs, status in ((right, "pass"), (wrong, "fail")):
        request = GradeRequest(dataset, str(data), programs, program_isolation())
        assert {verdict.plus for verdict in GRADER.grade(request)} == {status}
