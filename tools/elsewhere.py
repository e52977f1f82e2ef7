"""Run the tests on machines unlike the one they were written on: other users, Pythons, versions and
folders.

    python3 tools/elsewhere.py [NAME ...] [--folder FOLDER] [--list]

Each run clones the last commit of this checkout into FOLDER/NAME, installs it there and runs the
tests; its output is in FOLDER/NAME/log.txt, and it ends in a row of the table in
docs/robustness.md. As root, runs are done by an ordinary user without a name; otherwise by the user
who starts them, and what only root can prepare is left out and named. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = Path("/var/tmp/moe_lab-elsewhere")
USER = 12345
"""An id that no user has."""
IS_ROOT = os.geteuid() == 0
SHARED = ("vllm", "evalscope")
"""Environments that are interpreters of their own, so that all runs may use one copy."""
OWN = ("llama", "older")
"""Folders of packages for the interpreter that runs the tests."""
PYTEST = ".venv/bin/python -m pytest --dist loadgroup -n"
"""The tests as `make test` starts them; the number of processes follows."""
LACKS = "no {}: its tests are skipped"
LOOPBACK = (
    "import fcntl, os, socket, struct, sys\n"
    # SIOCSIFFLAGS: up and running
    "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh22x', b'lo', 0x41))\n"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


@dataclass(frozen=True)
class Run:
    """One machine to be imitated, and what is run on it."""

    name: str
    about: str
    python: str = "3.11"
    """Version of the interpreter: major.minor."""
    clone: str = "moe_lab"
    """Folder of the clone."""
    versions: str = "pinned"
    """Of dependencies: pinned (constraints.txt), lowest (that pyproject.toml allows) or newest."""
    as_root: bool = False
    network: bool = True
    """Whether the tests have a network; the installation does."""
    proc: bool = True
    """Whether there is /proc."""
    unreadable_path: bool = False
    """Whether PATH begins with a folder that may not be read."""
    readonly_home: bool = False
    umask: int = 0o022
    environment: dict[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ("make test",)
    """What is run in the clone, after the installation."""
    root_tests: bool = False
    """Whether tests that need root, or that root does in another way, are run afterwards, as
    root."""


MAIN_JOB = (
    "make run STORE={store} ARGS=suite=pocket_quick && test -s "
    "{store}/reports/task_agnostic/report.html"
)
STRICT = {"LC_ALL": "POSIX", "TZ": "Asia/Kolkata"}
CI = Run(
    "ci",
    "what must pass before a change lands",
    clone="dev höme/moe lab",
    network=False,
    unreadable_path=True,
    commands=(
        "make check",
        "make docs",
        MAIN_JOB.format(store="store"),
        MAIN_JOB.format(store="store"),  # again, with nothing left to do
        "make test",
        MAIN_JOB.format(store="docs/results"),  # where neither git nor a tool ignores it
        "make check",
    ),
    root_tests=True,
)
RUNS = (
    Run(
        "debian",
        "Debian's Python, space in the path, POSIX locale, other time zone, umask 077, no network",
        clone="dev home/moe lab",
        network=False,
        unreadable_path=True,
        umask=0o077,
        environment=STRICT,
    ),
    Run("newest-python", "the newest Python", python="3.13"),
    Run(
        "lowest",
        "lowest versions of dependencies, root",
        python="3.12",
        versions="lowest",
        as_root=True,
        # types are checked with the pinned versions alone, whose stubs they are
        commands=(f"{PYTEST} 2",),
    ),
    Run(
        "newest",
        (
            "newest versions of dependencies, random order, four processes, read-only home, /tmp "
            "on another file system"
        ),
        versions="newest",
        readonly_home=True,
        unreadable_path=True,
        environment={"TMPDIR": "/dev/shm/moe_lab-elsewhere"},
        commands=(f"{PYTEST} 4 --shuffle 2",),
    ),
    Run("alone", "random order, one process", commands=("make test JOBS=0 TESTS='--shuffle 1'",)),
    Run(
        "without-proc",
        "no /proc, as on a Mac: the main job alone, since tests look at processes there",
        proc=False,
        commands=(MAIN_JOB.format(store="store"),),
    ),
)


def main() -> int:
    """Do the runs that are named, or all; exit code 1 when one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {run.name: run for run in (*RUNS, CI)}
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--list", action="store_true", help="print what the runs are")
    words = parser.parse_args()
    if wrong := [name for name in words.names if name not in known]:
        parser.error(f"{wrong[0]} is unknown (known: {', '.join(known)})")
    runs = [known[name] for name in words.names] or list(RUNS)
    if words.list:
        print("\n".join(f"{run.name}: {run.about}" for run in runs))
        return 0
    results = [Place(run, words.folder).result() for run in runs]
    print("| run | what | Python | result | minutes |\n|---|---|---|---|---|")
    print("\n".join(row for row, _ in results))
    return int(not all(passed for _, passed in results))


class Place:
    """A clone with its interpreter and its environments."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder / run.name
        self.clone, self.home, self.cache = (
            self.folder / run.clone,
            self.folder / "home",
            folder / "pip",
        )
        # CI uses nothing that was left from before
        self.shared = (self.folder if run is CI else folder) / "shared"
        self.log = self.folder / "log.txt"

    def result(self) -> tuple[str, bool]:
        """(the run's row of the table, whether it passed)"""
        start = time.monotonic()
        python = interpreter(self.run.python, self.shared)
        self.make()
        passed = self.do([*self.installation(python)], network=True, hide_proc=False)
        if passed:
            self.restrict()
            passed = self.do(self.run.commands, self.run.network, not self.run.proc)
            if self.run.root_tests and IS_ROOT:
                passed &= self.do(
                    [f"{PYTEST} 2 -m 'root or sandbox'"],
                    network=True,
                    hide_proc=False,
                    as_root=True,
                )
        tests = re.findall(
            r"^=*\s*((?:\d+ \w+,? ?)+) in [\d.]+s.*$", self.log.read_text(errors="replace"), re.M
        )
        said = "; ".join(tests) or ("passed" if passed else f"failed: {self.log}")
        minutes = (time.monotonic() - start) / 60
        return (
            f"| {self.run.name} | {self.run.about} | {version(python)} | {said} | {minutes:.0f} |",
            passed,
        )

    def make(self) -> None:
        """Clone, and make what the run's environment names, all of them the user's."""
        subprocess.run(["chmod", "-R", "u+rwX", self.folder], stderr=subprocess.DEVNULL)
        shutil.rmtree(self.folder, ignore_errors=True)
        folders = (self.shared, self.cache, Path(self.environment()["TMPDIR"]))
        for folder in (self.clone.parent, self.home, *folders):
            folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, self.clone], check=True)
        data = ROOT.parent / "shared" / "data"
        # published data sets, which some tests read, in a folder that the user may enter
        if data.is_dir():
            shutil.copytree(
                data, self.clone.parent / "shared" / "data", copy_function=shutil.copyfile
            )
        if IS_ROOT and not self.run.as_root:
            for folder in (self.folder, *folders):
                subprocess.run(["chown", "-R", f"{USER}:{USER}", folder], check=True)
        hidden = self.folder / "unreadable"
        hidden.mkdir(mode=0o000)

    def installation(self, python: Path) -> Iterator[str]:
        """The commands that install what the run needs, into .venv and beside it."""
        constraints = {"pinned": "constraints.txt", "lowest": "lowest.txt", "newest": "newest.txt"}[
            self.run.versions
        ]
        if self.run.versions == "lowest":
            (self.clone / constraints).write_text("\n".join(lowest(self.clone / "pyproject.toml")))
        elif self.run.versions == "newest":
            (self.clone / constraints).write_text("")
        make = f"make PYTHON={python} CONSTRAINTS={constraints}"
        docs = " .venv/.installed-docs" if "make docs" in self.run.commands else ""
        yield f"{make} .venv/.installed-dev{docs}"
        for name in SHARED:
            kept = self.shared / f"venv-{name}"
            own = interpreter("3.11", self.shared)
            command = (
                f"make {name} {name.upper()}={kept} PYTHON={own} && ln -sfn {kept} .venv-{name}"
            )
            yield (
                f"test -e {kept}/.installed && ln -sfn {kept} .venv-{name} || {command} || echo "
                f"{LACKS.format(name)}"
            )
        # the plugin of this clone
        yield ".venv-vllm/bin/python -m pip install -q --no-deps -e . || true"
        for name in OWN:
            yield f"{make} {name} || echo {LACKS.format(name)}"

    def restrict(self) -> None:
        """Take away what the installation needed."""
        if self.run.readonly_home:
            self.home.chmod(0o555)

    def environment(self, as_root: bool = False) -> dict[str, str]:
        """The environment of a command; root's own, where root tests in the clone of another
        user."""
        usual = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "XDG_", "MAKE"))
        }
        if as_root:
            return {**usual, "OMP_NUM_THREADS": "1"}
        path = os.environ["PATH"]
        return {
            **usual,
            "HOME": str(self.home),
            "USER": "somebody",
            "LOGNAME": "somebody",
            "TMPDIR": str(self.folder / "tmp"),
            "OMP_NUM_THREADS": "1",
            "PIP_CACHE_DIR": str(self.cache),
            "PATH": f"{self.folder / 'unreadable'}:{path}" if self.run.unreadable_path else path,
            **self.run.environment,
        }

    def do(
        self, commands: Sequence[str], network: bool, hide_proc: bool, as_root: bool = False
    ) -> bool:
        """Whether all commands succeed, one after another; their output goes to the log, and CI's
        also to the terminal."""
        for command in commands:
            words = [
                *self.prefix(network, hide_proc, as_root or self.run.as_root),
                "bash",
                "-c",
                command,
            ]
            with self.log.open("ab") as log:
                process = subprocess.Popen(
                    words,
                    cwd=self.clone,
                    env=self.environment(as_root),
                    umask=self.run.umask,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                assert process.stdout
                for line in process.stdout:
                    log.write(line)
                    log.flush()
                    if self.run is CI:
                        sys.stdout.buffer.write(line)
                        sys.stdout.flush()
            if process.wait():
                print(
                    f"{self.run.name}: {command}: exit code {process.returncode}; see {self.log}",
                    flush=True,
                )
                return False
        return True

    def prefix(self, network: bool, hide_proc: bool, as_root: bool) -> list[str]:
        """The words before a command that give it its namespaces and its user."""
        if not IS_ROOT:
            if not network or hide_proc:
                print(
                    f"{self.run.name}: only root can take away the network or /proc: they stay",
                    flush=True,
                )
            return []
        words = [
            "unshare",
            *(["--net"] if not network else []),
            *(["--mount"] if hide_proc else []),
        ]
        words = [*words, "--"] if len(words) > 1 else []
        if not network:
            words += [sys.executable, "-c", LOOPBACK]
        if hide_proc:
            words += ["sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
        return (
            words
            if as_root
            else [*words, "setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--"]
        )


def interpreter(wanted: str, shared: Path) -> Path:
    """A Python of the version `wanted` that every user may run; SystemExit when there is none.

    One below a private folder, such as root's home, is copied into `shared`.
    """
    names = [Path("/usr/bin") / f"python{wanted}", Path(f"/usr/local/bin/python{wanted}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    names += sorted(pyenv.glob(f"versions/{wanted}.*/bin/python{wanted}"))
    if found := shutil.which(f"python{wanted}"):
        names.append(Path(found))
    for name in names:
        if not name.exists():
            continue
        real = name.resolve()
        if all(folder.stat().st_mode & 0o005 == 0o005 for folder in real.parents):
            return name
        copy = shared / f"python-{wanted}"
        if not copy.exists():
            shutil.copytree(real.parents[1], copy, symlinks=True)
            # One with a library of its own looks for it where it was installed.
            subprocess.run(
                ["patchelf", "--set-rpath", "$ORIGIN/../lib", copy / "bin" / real.name], check=True
            )
        return copy / "bin" / real.name
    raise SystemExit(f"there is no Python {wanted} here")


def version(python: Path) -> str:
    """Its version in full."""
    return subprocess.run(
        [python, "-V"], capture_output=True, text=True, check=True
    ).stdout.split()[1]


def lowest(pyproject: Path) -> Iterator[str]:
    """A constraint for each dependency in pyproject.toml, at its lower bound."""
    about = tomllib.loads(pyproject.read_text())
    lists = [about["project"]["dependencies"], *about["project"]["optional-dependencies"].values()]
    for requirement in (
        row for rows in [*lists, about["dependency-groups"]["dev"]] for row in rows
    ):
        if match := re.match(r"([\w-]+)(?:\[.*\])?>=([\w.]+)", requirement):
            yield f"{match[1]}=={match[2]}"


if __name__ == "__main__":
    sys.exit(main())
