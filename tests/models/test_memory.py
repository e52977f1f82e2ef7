"""Main memory is seen as far as the machine, or the control group of a job, gives it; a model too large is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models import memory
from moe_lab.models.load import load_model

GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of 64 GiB, 48 of them free, without groups."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemFree: 5 kB\nMemAvailable: {48 * 2**20} kB\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory, "LIMITS", tmp_path / "limits")
    return tmp_path


def limit(folder: Path, names: tuple[str, str, str], values: tuple[object, int, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{values[0]}\n")
    (folder / names[1]).write_text(f"{values[1]}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {values[2]}\n")


def test_the_machine_counts_where_no_group_does(machine: Path) -> None:
    assert memory.free_memory() == 48 * GIB
    second = ("memory.max", "memory.current", "inactive_file")
    (machine / "groups").write_text("0::/job/step\n")
    limit(machine / "limits" / "job" / "step", second, ("max", GIB, 0))
    assert memory.free_memory() == 48 * GIB


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/job/step", "job", ("memory.max", "memory.current", "inactive_file")),
        ("9:memory:/job/step", "memory/job", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)
def test_a_job_has_what_its_group_leaves(machine: Path, line: str, folder: str, names: tuple[str, str, str]) -> None:
    (machine / "groups").write_text(f"3:cpu:/\n{line}\n")
    limit(machine / "limits" / folder, names, (16 * GIB, 10 * GIB, 4 * GIB))
    assert memory.free_memory() == 10 * GIB


def test_a_model_larger_than_main_memory_is_refused_before_its_weights_are_read(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(file.stat().st_size for file in original.glob("*.safetensors"))
    settings = ModelConfig(name="m", path=str(original), device="cpu")
    monkeypatch.setattr("moe_lab.models.device.free_memory", lambda: needed - 20_000)
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"main memory has .*dtype=bfloat16"):
        patch.setattr("moe_lab.models.load._weights", lambda *_: pytest.fail("weights were read"))
        load_model(settings)
    monkeypatch.setattr("moe_lab.models.device.free_memory", lambda: needed)
    load_model(settings)
