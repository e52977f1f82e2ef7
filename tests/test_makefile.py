"""`make check` reads what git tracks, and nothing that a run leaves in the clone; `make test` keeps files together and
says what it skips; tests take no value for a pattern."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import elsewhere

ROOT = Path(__file__).parents[1]
LEFT = ("store", "results", "docs/results", "outputs", "wandb", "pandas")
TYPO = "re" + "cieve"
WRONG = f"import os,sys\nx = '{TYPO}'\n"


@pytest.mark.skipif(shutil.which("git") is None or shutil.which("make") is None, reason="no git, or no make")
def test_checks_read_what_git_tracks(tmp_path: Path) -> None:
    """Import-linter and mypy are given packages by name, and take longer than a test may."""
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("ruff", "codespell"):
        (tools / name).symlink_to(Path(sys.executable).parent / name)
    for name in ("lint-imports", "mypy", "python"):
        (tools / name).symlink_to("/bin/true")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv/.installed").touch()
    (tmp_path / ".venv/.installed-dev").touch()
    (tmp_path / "good.py").write_text('import os\n\nimport pandas\n\nprint(os.sep, pandas, "receive")\n')

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "GIT_"))}
        return subprocess.run(words, cwd=tmp_path, env=plain, capture_output=True, text=True)

    for words in (("init", "-q"), ("add", ".")):
        assert run("git", *words).returncode == 0
    for folder in LEFT:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "modeling.py").write_text(WRONG)
        (tmp_path / folder / "output.txt").write_text(TYPO)
    passed = run("make", "check")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    for name, text in {"bad.py": WRONG, "bad.md": TYPO}.items():
        (tmp_path / name).write_text(text)
        run("git", "add", name)
        failed = run("make", "check")
        assert failed.returncode != 0 and name in failed.stdout, failed.stdout
        run("git", "rm", "-qf", name)


SKIPPING = """import pytest
@pytest.mark.parametrize("number", range(3))
@pytest.mark.skip(reason="no vLLM: `make vllm` installs it")
def test_a(number): ...
@pytest.mark.parametrize("number", range(9))
def test_b(number): ...
"""


def test_what_is_skipped_is_a_line_for_each_cause_and_the_result_is_last(tmp_path: Path) -> None:
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    words = ["-p", "conftest", "--rootdir", str(tmp_path), "-c", str(ROOT / "pyproject.toml"), str(tmp_path)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=ROOT,
        env={**plain, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert [line for line in lines if "vLLM" in line] == ["skipped: 3 tests: no vLLM: `make vllm` installs it"]
    assert "9 passed, 3 skipped" in lines[-1], done.stdout


def test_no_value_is_taken_for_a_pattern() -> None:
    """A device called `Intel(R)` matches no pattern of that name: what is put into `match=` is escaped."""
    wrong = []
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "match" and isinstance(node.value, ast.JoinedStr):
                values = [part.value for part in node.value.values if isinstance(part, ast.FormattedValue)]
                wrong += [f"{file}:{node.lineno}" for each in values if not ast.unparse(each).startswith("re.escape(")]
    assert not wrong


def test_the_lowest_versions_are_all_lower_bounds() -> None:
    """`make elsewhere RUNS=lowest` would otherwise try newer ones, and pass."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = [about["project"]["dependencies"], *about["project"]["optional-dependencies"].values()]
    rows = [Requirement(row) for rows in [*lists, about["dependency-groups"]["dev"]] for row in rows]
    bounds = {row.name: bound.version for row in rows for bound in row.specifier if bound.operator == ">="}
    assert set(bounds) == {row.name for row in rows}
    lowest = dict(line.split("==") for line in elsewhere.lowest(ROOT / "pyproject.toml"))
    assert lowest == bounds
