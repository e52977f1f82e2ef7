"""Two nodes on one network disk: GlusterFS and sshfs, each mounted twice on this machine.

A node has a host name, processes and a mount of its own. Steps take no time; heartbeats are five a
second.
"""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from cluster import instant_environment
from processes import wait_until
from studies import command, study_output

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(600)]
PROGRAMS = {
    "gluster": ("glusterd", "gluster", "mount.glusterfs"),
    "sshfs": ("sshfs", "sshd", "ssh-keygen"),
}
"""Disk -> programs that it needs; Debian: glusterfs-server glusterfs-client sshfs
openssh-server."""
STUDY = ["criterion=random", "ratio=0.1,0.2,0.3,0.4", "suite.benchmarks=[]", "launcher.processes=1"]
SSHD = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/sshd.pid
Subsystem sftp internal-sftp
StrictModes no
UsePAM no
PermitRootLogin yes
"""


def run(*command: object) -> None:
    """Run a program that must succeed."""
    result = subprocess.run([str(argument) for argument in command], capture_output=True, text=True)
    assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"


@contextmanager
def mounted(mounts: list[Path], mount: Callable[[Path], None]) -> Iterator[list[Path]]:
    """Mount the disk at each of the folders, and unmount it afterwards."""
    with ExitStack() as stack:
        for folder in mounts:
            folder.mkdir()
            mount(folder)
            stack.callback(run, "umount", "--lazy", folder)
        yield mounts


@contextmanager
def gluster(folder: Path, mounts: list[Path]) -> Iterator[list[Path]]:
    """A volume of one brick, with two clients."""
    # GlusterFS refuses loopback addresses
    host, volume = socket.gethostname(), f"test-{secrets.token_hex(4)}"
    manager = subprocess.Popen(["glusterd", "--no-daemon", f"--log-file={folder}/log"])
    try:
        command = ["gluster", "--mode=script", "volume"]
        wait_until(lambda: subprocess.run([*command, "list"], capture_output=True).returncode == 0)
        run(*command, "create", volume, f"{host}:{folder}/brick", "force")
        run(*command, "start", volume)
        with mounted(
            mounts, lambda mount: run("mount", "-t", "glusterfs", f"{host}:/{volume}", mount)
        ):
            yield mounts
        run(*command, "stop", volume, "force")
        run(*command, "delete", volume)
    finally:
        manager.terminate()
        manager.wait()


@contextmanager
def sshfs(folder: Path, mounts: list[Path]) -> Iterator[list[Path]]:
    """A folder behind a server of its own, with two clients."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in ("key", "host"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name)
    (folder / "config").write_text(SSHD.format(port=port, folder=folder))
    (folder / "data").mkdir()
    Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen(
        [shutil.which("sshd") or "sshd", "-D", "-f", folder / "config", "-E", folder / "log"]
    )
    options = f"IdentityFile={folder}/key,StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null"
    try:
        wait_until(lambda: (folder / "sshd.pid").exists())
        source = f"root@127.0.0.1:{folder}/data"
        with mounted(mounts, lambda mount: run("sshfs", "-p", port, "-o", options, source, mount)):
            yield mounts
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(params=["gluster", "sshfs"])
def mounts(request: pytest.FixtureRequest) -> Iterator[list[Path]]:
    """Two mounts of one network disk; skips where there cannot be one."""
    missing = [program for program in PROGRAMS[request.param] if shutil.which(program) is None]
    if missing or not Path("/dev/fuse").exists():
        pytest.skip(f"no {request.param} here: {', '.join(missing) or '/dev/fuse'} is missing")
    with tempfile.TemporaryDirectory(
        prefix="disk-", dir="/var/tmp", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        disk = {"gluster": gluster, "sshfs": sshfs}[request.param]
        with disk(folder, [folder / "a", folder / "b"]) as pair:
            yield pair


ISOLATED = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""A signal that ends `unshare` ends all processes of the node."""


def start(mount: Path, work: Path, node: str = "") -> subprocess.Popen[str]:
    """Start the study on a node; without a name on this machine."""
    isolated = [*ISOLATED, "sh", "-c", 'hostname "$0" && exec "$@"', node] if node else []
    # Clients remember times of files for some seconds, so that a heartbeat may seem that old.
    settings = [*STUDY, "launcher.stale_minutes=0.5"]
    return subprocess.Popen(
        [*isolated, *command(mount / "store", *settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=work,
        env={
            **os.environ,
            **instant_environment(work),
            "INSTANT_PAUSE": "0.1",
            "INSTANT_BEAT": "0.2",
        },
    )


def exit_code(process: subprocess.Popen[str]) -> int:
    printed, _ = process.communicate()
    print(printed)  # shown when a test fails
    return process.returncode


@pytest.mark.parametrize(
    "nodes", [("node-a", "node-b"), ("", "")], ids=["two nodes", "one machine"]
)
def test_equal_commands_on_two_mounts_do_each_step_once(
    mounts: list[Path], tmp_path: Path, nodes: tuple[str, str]
) -> None:
    commands = [start(mount, tmp_path, node) for mount, node in zip(mounts, nodes, strict=True)]
    assert [exit_code(process) for process in commands] == [0, 0]
    begun = [line.split()[0] for line in (tmp_path / "begun").read_text().splitlines()]
    assert begun
    assert len(set(begun)) == len(begun)
    for mount in mounts:
        assert "damaged" not in study_output(mount / "store", "verify", "study")


def test_a_node_goes_on_when_another_is_killed(mounts: list[Path], tmp_path: Path) -> None:
    """A third command finds all steps finished."""
    begun = tmp_path / "begun"
    killed = start(mounts[0], tmp_path, "node-a")
    surviving = start(mounts[1], tmp_path, "node-b")
    wait_until(lambda: begun.exists() and len(begun.read_text().splitlines()) >= 3)
    killed.kill()
    exit_code(killed)
    assert exit_code(surviving) == 0
    steps = begun.read_text()
    assert exit_code(start(mounts[0], tmp_path, "node-a")) == 0
    assert begun.read_text() == steps
    for mount in mounts:
        assert "damaged" not in study_output(mount / "store", "verify", "study")
