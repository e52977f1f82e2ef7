from __future__ import annotations

import subprocess
from argparse import Namespace
from pathlib import Path

import preloaded
import pytest

from benchmarks import memory, models, streaming

ROOT = Path(__file__).parents[2]
SMALL = "--experts 8 --top-k 2 --layers 1 --hidden 64 --width 32 --rows 1 --every-rows 1 --length 64 --pairs 1"
TINY = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.slow
def test_the_benchmark_prints_all_ratios_and_says_whether_they_hold() -> None:
    command = preloaded.command("-m", "benchmarks.statistics", *SMALL.split(), "--every-pairs", "1")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("bar <= 1.10") == 3
    assert done.stdout.count("bar >= 5.00") == 1
    assert done.returncode == int("FAILED" in done.stdout), done.stderr


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """A published configuration, small for once."""
    monkeypatch.setitem(
        models.CONFIGURATIONS, "olmoe_7b", models.CONFIGURATIONS["olmoe_7b"] | TINY | HEADS | {"eos_token_id": 0}
    )
    shape = {"layers": 2, "batches": 2, "rows": 1, "length": 16, "vocabulary": 1024}
    return Namespace(folder=tmp_path / "model", model="olmoe_7b", device="cpu", **shape)


def test_streamed_and_resident_passes_are_measured(asked: Namespace) -> None:
    took = {name: part(asked) for name, part in streaming.PARTS.items()}
    assert all(took[name]["seconds"] > 0 for name in ("read", "resident", "streamed", "short"))
    size = sum(file.stat().st_size for file in asked.folder.glob("*.safetensors"))
    assert took["write"]["GiB"] == size / 2**30


@pytest.mark.parametrize("way", memory.WAYS)
def test_every_way_of_going_back_is_measured(way: str, asked: Namespace) -> None:
    asked.way = way
    assert memory._bytes(asked)["weights"] > 0
