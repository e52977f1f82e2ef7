"""What is timed is what generating does, under the conditions that were asked for, on the device that is named."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import tiny
import torch
from example_steps import Example, cell_of

from moe_lab.config import CalibrationConfig, Config, LauncherConfig, ModelConfig, RecoveryConfig, TimingConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation import timing as evaluation_timing
from moe_lab.evaluation.timing import measure
from moe_lab.models.discover import is_experts
from moe_lab.models.load import device_name
from moe_lab.results import TIMINGS
from moe_lab.study import estimates
from moe_lab.study.graph import build
from moe_lab.study.step import Step, provenance
from moe_lab.study.steps.costs import Timing, wrong_timing
from moe_lab.study.steps.files import Files
from moe_lab.study.steps.passes import loaded_as
from moe_lab.study.steps.recovery import Pruned, Storage

ASKED = TimingConfig(batch_sizes=[1, 3], prompt_lengths=[4, 10], new_tokens=5)


def test_requests_read_and_write_what_generate_does_and_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("olmoe")
    read: list[torch.Tensor] = []
    now = [0.0]
    forward = model.forward

    def slow(**given: Any) -> Any:
        """Takes seconds that are known, and, of the shortest prompt, bytes."""
        read.append(given["input_ids"])
        now[0] += 0.2 if given["input_ids"].shape[1] > 1 else 0.004
        model.held = torch.ones(32 << 20 if given["input_ids"].shape == (1, 4) else 1)
        return forward(**given)

    monkeypatch.setattr(model, "forward", slow)
    monkeypatch.setattr(evaluation_timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    text = tiny.tokens(rows=1)[0]
    rows = pd.DataFrame(measure(model, text, ASKED), columns=list(TIMINGS))
    assert rows.groupby(["batch_size", "prompt_length"]).size().tolist() == [7] * 4
    assert (rows["new_tokens"] == 5).all()
    assert rows["prefill_seconds"].tolist() == pytest.approx([0.2] * 28)
    assert rows["decode_seconds"].tolist() == pytest.approx([5 * 0.004] * 28)
    held = rows["working_bytes"][0]
    assert math.isnan(held) or held == pytest.approx(4 * (32 << 20), rel=0.1)
    requests = [read[at : at + 6] for at in range(0, len(read), 6)]
    shapes = [shape for shape in ((1, 4), (1, 10), (3, 4), (3, 10)) for _ in range(9)]
    assert [tuple(request[0].shape) for request in requests] == shapes
    assert torch.equal(requests[-1][0].flatten(), torch.cat([text, text])[:30])
    longest = model.config.max_position_embeddings
    said = f"timed.prompt_lengths={longest} with timed.new_tokens=5 makes {longest + 6} tokens"
    with pytest.raises(UserError, match=re.escape(said)):
        measure(model, text, replace(ASKED, prompt_lengths=[longest]))
    monkeypatch.undo()
    expected = model.generate(requests[-1][0], max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(torch.cat(requests[-1], dim=1), expected)


TEXT = CalibrationConfig(name="text", path="pocket:calibration/general.jsonl", tokens=512, length=128, seed=1)
MODEL = ModelConfig(name="m", path="pocket:olmoe", device="cpu", threads=1)


def step(device: str, plan: Step | None = None, storage: Storage | None = None) -> Timing:
    pruned = Pruned(loaded_as(MODEL), plan, None, storage, RecoveryConfig(), True)
    return Timing.of(pruned, TEXT, replace(ASKED, device=device))


def test_a_step_is_about_one_device_and_is_done_on_no_other(tmp_path: Path) -> None:
    here = device_name("cpu")
    assert step(here).id != step("another").id
    files = Files(tmp_path, tmp_path, {}, tmp_path / "log", tmp_path)
    with pytest.raises(Unavailable, match=f"timing is about another, and this machine has {re.escape(here)}"):
        step("another").work(files)
    step(here).work(files)
    about = json.loads((tmp_path / "timing.json").read_text())
    assert about["device"] == here and about["threads"] == 1 and about["weight_bytes"] > 14e6
    assert len(pd.read_parquet(tmp_path / "timing.parquet")) == 4 * 7


def test_what_is_timed_is_without_what_the_plan_removes_and_in_its_bits(tmp_path: Path) -> None:
    model, plan = tiny.build("olmoe"), Example()
    tiny.plan(model, 0.5).save(tmp_path / "plan.json")
    files = Files(tmp_path, tmp_path, {plan.id: tmp_path}, tmp_path / "log", tmp_path)

    def weights(*changes: Any) -> int:
        """Bytes of the experts that are timed."""
        experts = filter(is_experts, step("cpu", *changes).deployed(model, files).modules())
        return sum(tensor.nbytes for module in experts for tensor in (*module.parameters(), *module.buffers()))

    whole, four = weights(), Storage(4, ("experts",))
    assert weights(plan) == whole / 2
    assert weights(None, four) < whole / 6 and weights(plan, four) < whole / 12


def test_the_device_is_asked_for_once_and_what_is_not_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def answer(words: list[str], **_: Any) -> SimpleNamespace:
        asked.append(words)
        error = "Traceback\nmoe_lab.errors.UserError: model.device=cuda:7: this machine has none"
        return SimpleNamespace(returncode=int("cuda:7" in words), stdout="a note\nA GPU\n", stderr=error)

    monkeypatch.setattr(estimates.subprocess, "run", answer)
    cells = [cell_of(MODEL, TEXT, ratio=ratio) for ratio in (0.25, 0.5)]
    graph = build(Config(timing=True, timed=ASKED), [(cells, [])])
    timed = [cell.timing for cell in graph.cells]
    assert len(timed) == 3 and {one.timed.device for one in timed if isinstance(one, Timing)} == {"A GPU"}
    assert len(asked) == 1 and asked[0][-1] == "cpu"
    with pytest.raises(UserError, match=r"^model\.device=cuda:7: this machine has none"):
        estimates.device_here("cuda:7")


def test_what_a_step_held_on_gpus_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert provenance(time.time())["peak_gpu_memory_bytes"] is None or torch.cuda.is_available()
    held = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        max_memory_allocated=lambda number: 7 + number,
        get_device_name=lambda number: f"GPU {number}",
    )
    used = SimpleNamespace(cuda=held, get_num_threads=lambda: 3, version=SimpleNamespace(cuda="12.8"))
    monkeypatch.setitem(sys.modules, "torch", used)
    about = provenance(time.time())
    assert about["peak_gpu_memory_bytes"] == 7 + 8 and about["gpus"] == ["GPU 0", "GPU 1"] and about["driver"]
    assert about["threads"] == 3 and about["processor"]


def test_what_cannot_be_timed_is_said_before() -> None:
    local, slurm = (list(wrong_timing(LauncherConfig(name=n), TimingConfig(), MODEL)) for n in ("local", "slurm"))
    assert "timing=true beside other work" in local[0]
    assert "timing=true with launcher=slurm needs timed.device" in slurm[0]
    assert not list(wrong_timing(LauncherConfig(name="inline"), TimingConfig(), MODEL))
