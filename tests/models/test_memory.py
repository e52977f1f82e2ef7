"""Main memory is seen as far as the machine, or the control group of a job, gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_lab import models as memory

GIB = 2**30


@pytest.mark.parametrize(
    ("line", "limit", "least"),
    [
        ("0::/job/step", "job/memory.max", 3 * GIB),
        ("0::/job/step", "job/step/memory.max", 3 * GIB),
        ("9:memory:/job/step", "memory/job/memory.limit_in_bytes", 3 * GIB),
        ("9:cpu:/job/step", "cpu/job/memory.limit_in_bytes", 64 * GIB),
    ],
)
def test_a_job_has_what_its_group_leaves(
    line: str, limit: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PHYS_PAGES": 64 * GIB, "SC_PAGE_SIZE": 1}.__getitem__)
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory, "LIMITS", tmp_path / "limits")
    assert memory.main_memory() == 64 * GIB
    (tmp_path / "groups").write_text(f"3:cpu:/\n{line}\n")
    (file := tmp_path / "limits" / limit).parent.mkdir(parents=True)
    for stated, expected in (("max", 64 * GIB), (str(3 * GIB), least)):
        file.write_text(f"{stated}\n")
        assert memory.main_memory() == expected
