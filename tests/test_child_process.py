"""Processes that are asked by lines of JSON: what they reply, and how they end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import is_running, wait_until

from moe_lab.child_process import ChildProcess, ErrorReply, ProcessEnded

WORKER = """
import os, signal, subprocess, sys, time
from moe_lab.child_process import serve

class Worker:
    def echo(self, value):
        print("said on standard output")
        return value

    def count(self, most):
        yield from range(most)

    def fail(self):
        raise KeyError("a\\nb")

    def sleeper(self):
        return subprocess.Popen(["sleep", "600"]).pid

    def hang(self):
        print("thinking")
        sys.stdout.flush()
        time.sleep(600)

    def die(self):
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

serve(Worker(), lambda: open(sys.argv[1], "w").close())
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[ChildProcess]:
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", WORKER, str(tmp_path / "ended")]
    with ChildProcess(command, {**os.environ, "PYTHONPATH": str(root)}, tmp_path) as process:
        yield process


def test_replies_are_the_values_of_methods(child: ChildProcess) -> None:
    """Items of a generator are replies in order. Errors do not end the process; output and
    tracebacks are in the log."""
    value = {"text": "\u2028\ud83c" + "x" * 200_000, "list": [1, None, 2.5]}
    assert child.call("echo", value=value) == value
    replies = list(child.replies("count", most=3))
    assert replies == [{"item": 0}, {"item": 1}, {"item": 2}, {"done": None}]
    for method in ("fail", "nothing_like_it"):
        with pytest.raises(ErrorReply) as refused:
            child.call(method)
        assert refused.value.kind == "KeyError" or method in str(refused.value)
        assert "\n" not in str(refused.value)
    assert "said on standard output" in child.log()
    assert "Traceback" in child.log()


def test_replies_that_are_not_read_end_the_process(child: ChildProcess, tmp_path: Path) -> None:
    replies = child.replies("count", most=3)
    next(replies)
    replies.close()  # type: ignore[attr-defined]
    assert child.process.returncode is not None
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize(
    ("method", "seconds", "messages"),
    [
        ("die", None, "killed by SIGKILL: last words"),
        ("hang", 0.5, "no reply within 0.5 s: thinking"),
    ],
)
def test_output_of_a_process_that_ends_or_hangs_is_in_the_error(
    child: ChildProcess, method: str, seconds: Any, messages: str
) -> None:
    sleeper = child.call("sleeper")
    with pytest.raises(TimeoutError if method == "hang" else ProcessEnded) as ended:
        child.call(method, seconds)
    assert all(part in str(ended.value) for part in messages.split(": "))
    wait_until(lambda: not is_running(sleeper))
    with pytest.raises(ProcessEnded):
        child.call("echo", value=1)


def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed; the processes that the child has started end too."""
    program = (
        "import os, sys; from moe_lab.child_process import ChildProcess\n"
        f"child = ChildProcess([sys.executable, '-c', {WORKER!r}, {str(tmp_path / 'ended')!r}], "
        "os.environ)\n"
        "print(child.process.pid, child.call('sleeper'), flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes)
    assert parent.stdin is not None
    assert parent.stdout is not None
    numbers = [int(number) for number in parent.stdout.readline().split()]
    assert all(map(is_running, numbers))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not any(map(is_running, numbers)))
    parent.stdin.close()
    parent.stdout.close()
