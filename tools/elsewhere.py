"""Run the tests in other environments: other users, Pythons, versions and folders.

    python3 tools/elsewhere.py [NAME ...] [--folder FOLDER] [--list]

Each run clones the last commit of this checkout into FOLDER/NAME, installs it there and runs the
tests. Its output is in FOLDER/NAME/log.txt; its result is printed as a row of the table in
docs/robustness.md. If root starts this program, runs are done by an ordinary user without a name;
otherwise they are done by the user who starts it, without the restrictions that need root, which
are printed. Uses the standard library only.
"""

from __future__ import annotations

import argparse
import itertools
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
"""Virtual environments with their own interpreters, of which all runs use one copy."""
PACKAGES = ("llama", "older")
"""Folders of packages for the interpreter that runs the tests."""
PYTEST = ".venv/bin/python -m pytest --dist loadgroup -n"
"""Command of the tests as in `make test`, without the number of processes at its end."""
MISSING = "no {}: its tests are skipped"
LOOPBACK = (
    "import fcntl, os, socket, struct, sys\n"
    # SIOCSIFFLAGS: up and running
    "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh22x', b'lo', 0x41))\n"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


@dataclass(frozen=True)
class Run:
    """An environment, and the commands that are run in it."""

    name: str
    description: str
    python: str = "3.11"
    """Version of the interpreter: major.minor."""
    clone: str = "moe_lab"
    """Folder of the clone."""
    versions: str = "pinned"
    """Versions of dependencies: pinned (constraints.txt), lowest (that pyproject.toml allows) or
    newest."""
    as_root: bool = False
    network: bool = True
    """Whether the tests have a network; the installation always has one."""
    proc: bool = True
    """Whether there is /proc."""
    unreadable_path: bool = False
    """Whether PATH begins with a folder that may not be read."""
    readonly_home: bool = False
    umask: int = 0o022
    environment: dict[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ("make test",)
    """Commands that are run in the clone, after the installation."""
    root_tests: bool = False
    """Whether the tests marked root or sandbox are run afterwards as root."""


MAIN_JOB = "make run ARGS=suite=pocket_quick && test -s store/reports/task_agnostic/report.html"
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
        ".venv/bin/python -m benchmarks.launches",
        MAIN_JOB,
        MAIN_JOB,  # again, with nothing left to do
        "make test",
        "cp -r store docs/results && make check",  # a store where neither git nor a tool ignores it
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
        commands=(MAIN_JOB,),
    ),
)


def main() -> int:
    """Do the requested runs, or all; returns 1 when one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {run.name: run for run in (*RUNS, CI)}
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--list", action="store_true", help="print what the runs are")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"{unknown[0]} is unknown (known: {', '.join(known)})")
    runs = [known[name] for name in arguments.names] or list(RUNS)
    if arguments.list:
        print("\n".join(f"{run.name}: {run.description}" for run in runs))
        return 0
    results = [Environment(run, arguments.folder).result() for run in runs]
    print("| run | what | Python | result | minutes |\n|---|---|---|---|---|")
    print("\n".join(row for row, _ in results))
    return int(not all(passed for _, passed in results))


class Environment:
    """The clone of a run, with its interpreter and its virtual environments."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run = run
        self.folder = folder / run.name
        self.clone = self.folder / run.clone
        self.home = self.folder / "home"
        self.cache = folder / "pip"
        # CI uses nothing from earlier runs
        self.shared = (self.folder if run is CI else folder) / "shared"
        self.log = self.folder / "log.txt"

    def result(self) -> tuple[str, bool]:
        """Do the run; returns (its row of the table, whether it passed)."""
        start = time.monotonic()
        python = interpreter(self.run.python, self.shared)
        self.prepare()
        passed = self.execute([*self.installation(python)], network=True, hide_proc=False)
        if passed:
            self.restrict()
            passed = self.execute(self.run.commands, self.run.network, not self.run.proc)
            if self.run.root_tests and IS_ROOT:
                passed &= self.execute(
                    [f"{PYTEST} 2 -m 'root or sandbox'"],
                    network=True,
                    hide_proc=False,
                    as_root=True,
                )
        tests = re.findall(
            r"^=*\s*((?:\d+ \w+,? ?)+) in [\d.]+s.*$", self.log.read_text(errors="replace"), re.M
        )
        outcome = "; ".join(tests) or ("passed" if passed else f"failed: {self.log}")
        minutes = f"{(time.monotonic() - start) / 60:.0f}"
        columns = (self.run.name, self.run.description, version(python), outcome, minutes)
        return f"| {' | '.join(columns)} |", passed

    def prepare(self) -> None:
        """Clone the repository and create the folders of the environment, all owned by the user who
        runs the tests."""
        subprocess.run(["chmod", "-R", "u+rwX", self.folder], stderr=subprocess.DEVNULL)
        shutil.rmtree(self.folder, ignore_errors=True)
        folders = (self.shared, self.cache, Path(self.environment()["TMPDIR"]))
        for folder in (self.clone.parent, self.home, *folders):
            folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, self.clone], check=True)
        # published data sets, which some tests read, in a folder that the user may enter
        data = ROOT.parent / "shared" / "data"
        if data.is_dir():
            shutil.copytree(
                data, self.clone.parent / "shared" / "data", copy_function=shutil.copyfile
            )
        if IS_ROOT and not self.run.as_root:
            for folder in (self.folder, *folders):
                subprocess.run(["chown", "-R", f"{USER}:{USER}", folder], check=True)
        unreadable = self.folder / "unreadable"
        unreadable.mkdir(mode=0o000)

    def installation(self, python: Path) -> Iterator[str]:
        """Yield the commands that install what the run needs, into .venv and its sibling
        folders."""
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
            venv = self.shared / f"venv-{name}"
            venv_python = interpreter("3.11", self.shared)
            link = f"ln -sfn {venv} .venv-{name}"
            install = f"make {name} {name.upper()}={venv} PYTHON={venv_python} && {link}"
            yield (
                f"test -e {venv}/.installed && {link} || {install} || echo {MISSING.format(name)}"
            )
        # the plugin of this clone
        yield ".venv-vllm/bin/python -m pip install -q --no-deps -e . || true"
        for name in PACKAGES:
            yield f"{make} {name} || echo {MISSING.format(name)}"

    def restrict(self) -> None:
        """Apply the restrictions with which the installation would not work."""
        if self.run.readonly_home:
            self.home.chmod(0o555)

    def environment(self, as_root: bool = False) -> dict[str, str]:
        """The environment variables of a command; as_root: of root, who keeps root's home and
        PATH."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "XDG_", "MAKE"))
        }
        if as_root:
            return {**inherited, "OMP_NUM_THREADS": "1"}
        path = os.environ["PATH"]
        return {
            **inherited,
            "HOME": str(self.home),
            "USER": "somebody",
            "LOGNAME": "somebody",
            "TMPDIR": str(self.folder / "tmp"),
            "OMP_NUM_THREADS": "1",
            "PIP_CACHE_DIR": str(self.cache),
            "PATH": f"{self.folder / 'unreadable'}:{path}" if self.run.unreadable_path else path,
            **self.run.environment,
        }

    def execute(
        self, commands: Sequence[str], network: bool, hide_proc: bool, as_root: bool = False
    ) -> bool:
        """Run commands one after another, up to the first that fails; returns whether all
        succeeded. Output goes to the log; that of CI also to the terminal."""
        prefix = self.prefix(network, hide_proc, as_root or self.run.as_root)
        for command in commands:
            with self.log.open("ab") as log:
                process = subprocess.Popen(
                    [*prefix, "bash", "-c", command],
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
        """The start of a command line that runs the command in its namespaces and as its user."""
        if not IS_ROOT:
            if not network or hide_proc:
                print(
                    f"{self.run.name}: only root can take away the network or /proc: they stay",
                    flush=True,
                )
            return []
        prefix: list[str] = []
        if not network or hide_proc:
            prefix.append("unshare")
            prefix += ["--net"] if not network else []
            prefix += ["--mount"] if hide_proc else []
            prefix.append("--")
        if not network:
            prefix += [sys.executable, "-c", LOOPBACK]
        if hide_proc:
            prefix += ["sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
        if not as_root:
            prefix += ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--"]
        return prefix


def interpreter(python: str, shared: Path) -> Path:
    """An interpreter of the version `python` (major.minor) that every user may run; SystemExit when
    there is none.

    An interpreter in a private folder, such as root's home, is copied into `shared`.
    """
    candidates = [Path(f"/usr/bin/python{python}"), Path(f"/usr/local/bin/python{python}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates += sorted(pyenv.glob(f"versions/{python}.*/bin/python{python}"))
    if on_path := shutil.which(f"python{python}"):
        candidates.append(Path(on_path))
    for path in candidates:
        if not path.exists():
            continue
        real = path.resolve()
        if all(folder.stat().st_mode & 0o005 == 0o005 for folder in real.parents):
            return path
        copy = shared / f"python-{python}"
        if not copy.exists():
            shutil.copytree(real.parents[1], copy, symlinks=True)
            # an interpreter with a shared library looks for it where it was installed
            subprocess.run(
                ["patchelf", "--set-rpath", "$ORIGIN/../lib", copy / "bin" / real.name], check=True
            )
        return copy / "bin" / real.name
    raise SystemExit(f"there is no Python {python} here")


def version(python: Path) -> str:
    """The full version of an interpreter, such as 3.11.7."""
    return subprocess.run(
        [python, "-V"], capture_output=True, text=True, check=True
    ).stdout.split()[1]


def lowest(pyproject: Path) -> Iterator[str]:
    """Yield a constraint for each dependency in pyproject.toml, at its lower bound."""
    document = tomllib.loads(pyproject.read_text())
    requirements = [
        *document["project"]["dependencies"],
        *itertools.chain(*document["project"]["optional-dependencies"].values()),
        *document["dependency-groups"]["dev"],
    ]
    for requirement in requirements:
        if match := re.match(r"([\w-]+)(?:\[.*\])?>=([\w.]+)", requirement):
            yield f"{match[1]}=={match[2]}"


if __name__ == "__main__":
    sys.exit(main())
