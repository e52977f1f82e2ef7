"""Command lines that try to break out or never end: each costs its own outcome, and nothing of it is left."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_lab.evaluation.commands import Finished, Limits, interpreter_paths, run_confined
from moe_lab.evaluation.programs import RunnerError, namespaces_missing

MEBI = 1 << 20
Run = Callable[..., Finished]


@pytest.fixture(params=[True, False], ids=["namespaces", "limits"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Run Python source in a folder of its own, with and without namespaces."""
    return _running(tmp_path, confined=request.param)


@pytest.fixture
def confined(tmp_path: Path) -> Run:
    """Run Python source behind namespaces."""
    return _running(tmp_path, confined=True)


def _running(tmp_path: Path, *, confined: bool) -> Run:
    if confined and namespaces_missing():
        pytest.skip(f"no namespaces: {namespaces_missing()}")
    folder = tmp_path / "own"
    folder.mkdir()

    def run(source: str, stdin: bytes = b"", readable: Any = (), environment: Any = None, **limits: Any) -> Finished:
        line = [sys.executable, "-I", "-c", source]
        settings = Limits(**{"seconds": 20, "memory": 512 * MEBI, "files": 4 * MEBI, "output": MEBI, **limits})
        return run_confined(
            line, folder, settings, confined=confined, stdin=stdin, readable=readable, environment=environment
        )

    return run


def test_a_command_reads_writes_and_says_its_code(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    source = (
        "import os, sys\nprint(sys.stdin.read().upper(), sorted(os.environ), file=sys.stderr)\n"
        "print(os.getcwd())\nopen('made', 'w').write('x')\nsys.exit(3)"
    )
    done = run(source, b"given", environment={"EXTRA": "1"})
    names = ["EXTRA", "HOME", "LANG", *(["LD_LIBRARY_PATH"] if "LD_LIBRARY_PATH" in os.environ else [])]
    assert done.stderr.decode() == f"GIVEN {[*names, 'OMP_NUM_THREADS', 'PATH', 'TMPDIR']}\n"
    assert (done.status, done.code, done.stdout.decode().strip()) == ("failed", 3, str(tmp_path / "own"))
    assert (tmp_path / "own" / "made").read_text() == "x"
    assert run("import os; os.kill(os.getpid(), 11)").code == 128 + 11
    assert run("pass").status == "ok"


@pytest.mark.parametrize(
    ("source", "status", "limits"),
    [
        ("while True: pass", "timeout", {"cpu_seconds": 0.2}),
        ("import time; time.sleep(99)", "timeout", {"seconds": 0.5}),
        ("import os, time; os.close(1); os.close(2); time.sleep(99)", "timeout", {"seconds": 0.5}),
        ("import signal\nsignal.signal(15, signal.SIG_IGN)\nwhile True: pass", "timeout", {"seconds": 0.5}),
        ("while True: print('x' * 9999)", "output", {}),
        ("import sys\nwhile True: sys.stderr.write('x' * 9999)", "output", {}),
        ("for n in range(99): open(str(n), 'wb').write(bytes(1 << 20))\nimport time; time.sleep(99)", "files", {}),
        ("open('big', 'wb').write(bytes(9 << 20))", "failed", {}),
        ("bytearray(10 << 30)", "failed", {}),
        (
            "import os, time\nfor _ in range(5):\n    if os.fork() == 0: x = b'x' * (200 << 20); time.sleep(99)\n"
            "time.sleep(99)",
            "memory",
            {},
        ),
    ],
)
def test_a_broken_limit_ends_a_command(run: Run, source: str, status: str, limits: dict[str, Any]) -> None:
    begin = time.monotonic()
    done = run(source, **limits)
    assert done.status == status, done
    assert len(done.stdout) <= MEBI and len(done.stderr) <= MEBI
    assert time.monotonic() - begin < 15


def test_a_fork_bomb_is_small_and_leaves_nothing(confined: Run) -> None:
    marker = f"marker-{os.getpid()}"
    count = (
        "import os, time\nn = 0\ntry:\n    while n < 99:\n        if os.fork() == 0:\n            os.setsid()\n"
        f"            os.execv('/bin/sh', ['sh', '-c', ': {marker}; sleep 60'])\n        n += 1\n"
        "except OSError: print(n)\ntime.sleep(0.1)"
    )
    assert 0 < int(confined(count).stdout) < 8
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(marker.encode() in command for command in commands)


def test_killing_everybody_kills_nobody_else(confined: Run) -> None:
    done = confined(
        "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nfor target in (0, -1, os.getppid()):\n"
        "    try: os.kill(target, 15)\n    except OSError: pass\nos.kill(os.getppid(), 9)\nprint('alive')"
    )
    assert (done.status, done.stdout) == ("ok", b"alive\n")


def test_only_its_folder_can_be_written_and_private_files_cannot_be_read(confined: Run, tmp_path: Path) -> None:
    secret, shown = tmp_path / "secret", tmp_path / "shown"
    secret.write_text("s3cret")
    shown.mkdir()
    (shown / "file").write_text("shown")
    folders = ["/", "/tmp", "/dev", "/usr", str(Path.home()), str(tmp_path), str(shown), sys.prefix]
    source = f"""
import os, ctypes
for folder in {folders!r}:
    try: open(folder + "/evil", "w"); print("wrote", folder)
    except OSError: pass
for path in {[str(secret), __file__, "/etc/passwd", "/proc/1/environ"]!r}:
    try: open(path).read(); print("read", path)
    except OSError: pass
libc = ctypes.CDLL(None)
print([libc.mount(b"none", place, None, 32 | 4096, None) for place in (b"/", b"/usr")], libc.setuid(0), end=" ")
libc.unshare(0x10020000)
print(libc.mount(b"none", b"/usr", None, 32 | 4096, None), open({str(shown / "file")!r}).read())
"""
    done = confined(source, readable=[shown])
    assert done.stdout == b"[-1, -1] -1 -1 shown\n", done
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "secret", "shown"]
    assert confined("import moe_lab.errors").status == "failed"


def test_there_is_no_network(confined: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)"
        assert b"unreachable" in confined(source).stderr


def test_multiprocessing_and_another_interpreter_work(confined: Run, tmp_path: Path) -> None:
    source = (
        "import multiprocessing\nmultiprocessing = multiprocessing.get_context('fork')\n"
        "queue = multiprocessing.Queue()\nother = multiprocessing.Process(target=queue.put, args=(7,))\n"
        "other.start()\nprint(queue.get())\nother.join()"
    )
    assert confined(source).stdout == b"7\n"
    (tmp_path / "bin").mkdir()
    other = tmp_path / "bin" / "python"
    other.symlink_to(sys.executable)
    limits = Limits(seconds=20)
    with pytest.raises(RunnerError, match="No such file"):
        run_confined([str(other), "-c", ""], tmp_path / "own", limits, confined=True)
    done = run_confined(
        [str(other), "-c", "print(1)"], tmp_path / "own", limits, confined=True, readable=interpreter_paths(str(other))
    )
    assert done.stdout == b"1\n"
