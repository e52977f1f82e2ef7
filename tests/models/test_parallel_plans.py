"""Models that a parallel plan of transformers divides over two processes (gloo, on the CPU): each
process has the sums of the model in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import naive
import pytest
import tiny
import torch
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import moe_lab
from moe_lab.errors import UserError
from moe_lab.models.identity import model_digests
from moe_lab.statistics.damage import DamageHook, SimilarityHook
from moe_lab.statistics.forward import ForwardHook
from moe_lab.statistics.gradients import (
    GradientHook,
    WeightGradientHook,
    collect_gradient_statistics,
)
from moe_lab.statistics.observe import collect_statistics

pytestmark = pytest.mark.slow
PLANS = {
    "tensors": ({"tp_size": 2}, "eager"),
    "experts": ({"tp_size": 2, "ep_size": 2}, "grouped_mm"),
}
"""Name -> (sizes of the plan, implementation of experts)."""
FORWARD = (ForwardHook, DamageHook, SimilarityHook)
BACKWARD = (GradientHook, WeightGradientHook)
TOLERANCE = 2e-6
"""Largest difference from one process, as a share of the largest number of a tensor: attention adds
the parts of the processes."""


def results(model: Any) -> dict[str, Any]:
    """The sums of all passes, and the digests of the model."""
    sums = [collect_statistics(model, hook, tiny.batches()).layers for hook in FORWARD]
    sums += [collect_gradient_statistics(model, hook, tiny.batches()).layers for hook in BACKWARD]
    digests = {name: compute() for name, compute in model_digests(model)}
    return {"sums": sums, "digests": digests}


def process(rank: int, folder: Path) -> None:
    """One of two processes: writes PLAN-RANK.pt for all plans."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", store, rank=rank, world_size=2)
    for plan, (sizes, experts) in PLANS.items():
        model = AutoModelForCausalLM.from_pretrained(
            folder / "model",
            distributed_config=DistributedConfig(**sizes),
            experts_implementation=experts,
        )
        model.eval().requires_grad_(False)
        result = results(model)
        try:
            moe_lab.prune(model, tiny.plan(model, 0.5))
        except UserError as error:
            result["refusal"] = str(error)
        torch.save(result, folder / f"{plan}-{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    tiny.save("qwen3_moe", folder / "model")
    torch.multiprocessing.spawn(process, (folder,), nprocs=2)  # type: ignore[no-untyped-call]
    return folder


@pytest.mark.parametrize("plan", PLANS)
def test_each_of_two_processes_has_the_sums_of_one(plan: str, folder: Path) -> None:
    """Its experts are not pruned."""
    expected = results(tiny.load(folder / "model").requires_grad_(False).eval())
    first, second = (torch.load(folder / f"{plan}-{rank}.pt") for rank in range(2))
    for one, other, layers in zip(first["sums"], second["sums"], expected["sums"], strict=True):
        naive.assert_sums_close(one, layers, TOLERANCE)
        naive.assert_sums_close(other, one, 0)
    assert first["digests"] == expected["digests"]
    assert "divided over processes" in first["refusal"]
