"""What the identities hold on the CPU, on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from tiny import logits

from moe_lab.config import ModelConfig
from moe_lab.models.load import load_model
from moe_lab.pruning.export import export
from moe_lab.pruning.mask import mask
from moe_lab.pruning.prune import prune
from moe_lab.statistics import Statistics
from moe_lab.statistics.forward import ForwardTap
from moe_lab.statistics.gradients import GradientTap, gather_gradients
from moe_lab.statistics.observe import gather

NAMES = ["olmoe", "deepseek_v3", "gpt_oss", "qwen3_moe", "ernie4_5_moe"]
pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("read", "tap"), [(gather, ForwardTap), (gather_gradients, GradientTap)])
def test_sums_are_those_of_the_cpu(read: Callable[..., Statistics], tap: type, name: str) -> None:
    def sums(place: str) -> dict[int, dict[str, torch.Tensor]]:
        return read(tiny.build(name).to(place), tap, tiny.batches(), fingerprint={}).layers

    expected, measured = sums("cpu"), sums("cuda")
    assert expected.keys() == measured.keys()
    for layer, named in expected.items():
        for statistic, value in named.items():
            assert (measured[layer][statistic] - value).abs().max() <= 1e-4 * value.abs().max(), (layer, statistic)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_mask_is_the_pruned_model_is_its_export(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model", dtype=dtype).to("cuda")
    plan = tiny.plan(model, 0.5)
    with mask(model, plan):
        masked = logits(model)
    assert torch.equal(masked, logits(prune(model, plan)))
    out = export(tmp_path / "model", plan, tmp_path / "out")
    about = ModelConfig(name="m", path=str(out), dtype=str(dtype).removeprefix("torch."), device="cuda")
    reloaded, _ = load_model(about)
    reloaded.set_experts_implementation("eager")
    assert torch.equal(masked, logits(reloaded))
