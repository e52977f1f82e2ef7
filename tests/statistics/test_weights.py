from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import naive
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lab.errors import UserError
from moe_lab.statistics import Statistics
from moe_lab.statistics.weights import (
    compare_experts,
    rows_absolute_and_square,
    weigh_channels,
    weigh_experts,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_stacked_experts_are_summed_at_once(dtype: torch.dtype) -> None:
    weights = torch.randn(5, 70, 2048, generator=torch.Generator().manual_seed(0)).to(dtype)
    for sums, power in zip(rows_absolute_and_square(weights), (1, 2), strict=True):
        assert naive.relative(sums, weights.double().abs().pow(power).sum((1, 2))) < 1e-6


READS = (weigh_experts, weigh_channels, compare_experts)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["olmoe", "gpt_oss"])
def test_cuda_sums_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    naive.model(name).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")
    for read in READS:
        expected, found = (read(tmp_path, fingerprint={}, device=device).layers for device in ("cpu", "cuda"))
        assert expected.keys() == found.keys()
        for layer, named in expected.items():
            assert named.keys() == found[layer].keys()
            assert all(naive.relative(found[layer][statistic], sums) < 1e-6 for statistic, sums in named.items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    naive.model("olmoe").save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change or (None) drop tensors of the only shard; __ in a name stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


UP, DOWN = (f"model__layers__1__mlp__experts__3__{role}_proj__weight" for role in ("up", "down"))


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(
    ("value", "named"), [(torch.inf, r"layer 1, expert 3: weights .*\.up_proj"), (None, "layer"), ("fp8", "F8_E4M3")]
)
def test_weights_that_are_broken_missing_or_quantised_are_named(
    read: Callable[..., Statistics], value: object, named: str, folder: Path
) -> None:
    weights = torch.ones(24, 32)
    if isinstance(value, float):
        weights[3, 4] = value
    rewrite(folder, **{UP: None if value is None else weights.to(torch.float8_e4m3fn) if value == "fp8" else weights})
    with pytest.raises(UserError, match=named):
        read(folder, fingerprint={})


@pytest.mark.parametrize("read", READS)
def test_folders_without_experts_are_refused(read: Callable[..., Statistics], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no weights of routed experts"):
        read(tmp_path, fingerprint={})


def test_projections_of_several_widths_or_unknown_names_are_refused(folder: Path) -> None:
    rewrite(folder, **{DOWN.replace("__3__", f"__{number}__"): torch.ones(32, 23) for number in range(16)})
    with pytest.raises(UserError, match="experts of layer 1 have unequal widths"):
        weigh_channels(folder, fingerprint={})
    rewrite(folder, model__layers__0__mlp__experts__0__side_proj__weight=torch.ones(4, 4))
    with pytest.raises(UserError, match=r"side_proj\.weight"):
        weigh_channels(folder, fingerprint={})
