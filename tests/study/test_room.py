"""A disk that is too full for what a study would write is noticed before anything is loaded."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_lab.study import room
from moe_lab.study.identity import Step

GIB = 2**30
MODEL: dict[str, Any] = {
    "name": "m",
    "path": "owner/m",
    "dtype": "bfloat16",
    "expected": {
        "parameters": 10 * GIB,
        "layers": 48,
        "moe_layers": 48,
        "experts": 128,
        "top_k": 8,
        "hidden": 2048,
        "width": 768,
    },
}


def step(kind: str, **runtime: Any) -> Step:
    return Step(kind, "x", {}, {}, {"model": MODEL, **runtime})


def text(engine: str) -> dict[str, Any]:
    return {"tokens": 2**19, "engine": engine}


@pytest.mark.parametrize(
    ("steps", "gib"),
    [
        ([step("export"), step("export")], 40.0),
        ([step("statistics", calibration=text("streamed"))], 4.0),
        ([step("gradients", calibration=text("streamed"))], 100.0),
        ([step("cost", text=text("streamed")), step("cost", text=text("resident"))], 4.0),
        ([step("gradients", calibration=text("resident")), step("plan")], 0.0),
        ([step("generate", benchmark={"limit": None, "expected": 2**15, "max_new_tokens": 2**11})], 1.0),
    ],
)
def test_what_is_written_is_held_against_what_is_free(
    steps: list[Step], gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(tmp_path / "not" / "there")
    for free, fits in ((gib * GIB, True), (gib * GIB - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda place, free=free: SimpleNamespace(free=free))
        found = room.lacking(store, steps)
        assert found == [] if fits else f"about {gib:.1f} GiB would be written" in found[0]


@pytest.mark.parametrize(
    ("one", "changes", "says"),
    [
        (step("cost", text=text("resident")), {}, "cost of model=m loads 20.0 GiB .* 19.0 GiB of main memory: set cal"),
        (step("evaluate"), {}, "evaluate of model=m loads 20.0 GiB of weights.* leave it out"),
        (step("evaluate"), {"dtype": "auto"}, "loads 40.0 GiB"),
        (step("cost", text=text("streamed")), {}, None),
        (step("weights"), {}, None),
        (step("evaluate"), {"device": "cuda"}, None),
        (step("generate", backend={"name": "server"}), {}, None),
        (step("evaluate"), {"expected": None}, None),
    ],
)
def test_what_is_loaded_is_held_against_main_memory(
    one: Step, changes: dict[str, Any], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(one, runtime={**one.runtime, "model": {**MODEL, "device": "cpu", **changes}})
    for memory, fits in ((19 * GIB, says is None), (40 * GIB, True)):
        monkeypatch.setattr(room, "main_memory", lambda memory=memory: memory)
        found = room.unloadable([asked, asked])
        assert found == [] if fits else len(found) == 1 and re.search(str(says), found[0])
