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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, a file stays with one of them, for it shares what is costly; so does the one cluster."""
    for item in items:
        group = "slurm" if item.path.parent.name == "slurm" else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Published data sets, as people have them, in the folder ../shared/data beside the repository."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"there is no {folder}")
    return folder
