"""What every test gets: one thread, no network, no hub.

This file makes the folder importable: `import tiny` gives the tiny models.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


TOGETHER = {"test_browser.py": "report", "test_report.py": "report"}
"""Files that share a report."""
FIRST = ("slurm", "test_experiments.py", "report", "test_end_to_end.py", "test_methods.py")
"""What takes longest begins first, and Slurm's jobs, which are waited for, run beside the others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, a file stays with one of them, for it shares what is costly; so does the one cluster."""
    groups: dict[pytest.Item, str] = {}
    for item in items:
        group = "slurm" if item.path.parent.name == "slurm" else TOGETHER.get(item.path.name, str(item.path))
        item.add_marker(pytest.mark.xdist_group(group))
        groups[item] = Path(group).name
    items.sort(key=lambda item: FIRST.index(groups[item]) if groups[item] in FIRST else len(FIRST))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Published data sets, as people have them, in the folder ../shared/data beside the repository."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"there is no {folder}")
    return folder
