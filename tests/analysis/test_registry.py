"""Every published table and figure has its name, tables of scores their rows and columns; adding
one is one file."""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_lab.analysis import published
from moe_lab.analysis.registry import aliases, find, outputs
from moe_lab.analysis.report import CHAPTERS

LAST = {
    "unified": (6, 5),
    "evoesap": (10, 3),
    "heapr": (2, 3),
    "aimer": (7, 6),
    "coverage": (19, 16),
}
"""The papers, and their numbers of tables and figures."""
PUBLISHED = re.compile(rf"({'|'.join(LAST)})\.(table|fig)(\d+)")


def documented() -> dict[str, str | None]:
    """Published table or figure -> the output that makes it, or None, from the page of
    reproduction."""
    found: dict[str, str | None] = {}
    with (Path(published.__file__).parent / "items.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            kind, _, number = row["item"].partition(" ")
            if number:
                name = f"{row['paper']}.{'fig' if kind == 'Figure' else 'table'}{number}"
                assert name not in found and (row["output"] or row["note"]), row
                found[name] = row["output"] or None
    return found


def test_published_tables_and_figures_are_documented() -> None:
    expected = [
        f"{paper}.table{n + 1}" for paper, (tables, _) in LAST.items() for n in range(tables)
    ]
    expected += [
        f"{paper}.fig{n + 1}" for paper, (_, figures) in LAST.items() for n in range(figures)
    ]
    assert sorted(documented()) == sorted(expected)
    registered = {
        name: find(name).name for name in (*outputs(), *aliases()) if PUBLISHED.fullmatch(name)
    }
    assert {name: output for name, output in documented().items() if output} == registered
    assert not set(aliases()) & set(outputs())


def test_outputs_are_in_a_chapter_or_files_only() -> None:
    """Those without a chapter are tables of a paper whose rows stand in another one, too, or
    compare with a paper."""
    chapters_of_outputs = {output.chapter for output in outputs().values()} - {""}
    assert chapters_of_outputs == set(CHAPTERS) - {"published"}
    assert all(PUBLISHED.match(name) for name, output in outputs().items() if not output.chapter)


@pytest.mark.slow
def test_documented_table_is_added_by_one_file(small: Path, tmp_path: Path) -> None:
    """In a copy of the package; the command and its help then have it."""
    root = Path(__file__).parents[2]
    ignored = shutil.ignore_patterns("__pycache__", "pocket")
    shutil.copytree(root / "moe_lab", tmp_path / "moe_lab", ignore=ignored)
    [example] = re.findall(
        r"```python\n(.*?@output.*?)```", (root / "docs/analysis.md").read_text("utf-8"), re.DOTALL
    )
    (tmp_path / "moe_lab/analysis/outputs/experts_kept.py").write_text(example)
    store = f"store={small}"
    out = f"out={tmp_path / 'out'}"
    for name in ("help", "experts_kept"):
        command = [sys.executable, "-m", "moe_lab.analysis", name, store, out]
        process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        assert name != "help" or "experts_kept" in process.stdout
    written = (tmp_path / "out/tables/experts_kept.md").read_text(encoding="utf-8")
    [rows] = re.findall(r"^(?:\|.*\n)+", written, re.MULTILINE)
    assert rows in (root / "docs/analysis.md").read_text("utf-8"), rows
