from __future__ import annotations

import json
from pathlib import Path

import naive
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lab.errors import UserError
from moe_lab.statistics.weights import (
    CHUNK,
    absolute_and_square,
    compare_experts,
    rows_absolute_and_square,
    weigh_channels,
    weigh_experts,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_tensors_lose_nothing(dtype: torch.dtype) -> None:
    weights = torch.randn(5, CHUNK // 2 + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = [float(weights.double().abs().sum()), float(weights.double().square().sum())]
    assert absolute_and_square(weights).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_stacked_experts_are_summed_at_once(dtype: torch.dtype) -> None:
    weights = torch.randn(5, 70, 2048, generator=torch.Generator().manual_seed(0)).to(dtype)
    for sums, power in zip(rows_absolute_and_square(weights), (1, 2), strict=True):
        assert naive.relative(sums, weights.double().abs().pow(power).sum((1, 2))) < 1e-6


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["olmoe", "gpt_oss"])
def test_cuda_sums_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    naive.model(name).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")
    for read in (weigh_experts, weigh_channels, compare_experts):
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


DOWN = "model__layers__1__mlp__experts__3__down_proj__weight"


def test_a_broken_weight_is_named(folder: Path) -> None:
    rewrite(folder, **{DOWN: torch.full((32, 24), torch.nan)})
    with pytest.raises(UserError, match=r"layer 1, expert 3: weights model\.layers\.1\.mlp\.experts\.3\.down_proj"):
        weigh_experts(folder, fingerprint={})


def test_quantised_weights_are_refused(folder: Path) -> None:
    rewrite(folder, **{DOWN: torch.ones(32, 24).to(torch.float8_e4m3fn)})
    with pytest.raises(UserError, match=r"down_proj\.weight is stored as F8_E4M3, expected plain"):
        weigh_experts(folder, fingerprint={})


def test_missing_weights_are_noticed(folder: Path) -> None:
    rewrite(folder, **{DOWN: None})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts\.3\.down_proj"):
        weigh_experts(folder, fingerprint={})


def test_weights_that_cannot_be_compared_are_named(folder: Path) -> None:
    up = DOWN.replace("down", "up")
    broken = torch.ones(24, 32)
    broken[3, 4] = torch.inf
    for weights, message in (
        (broken, r"layer 1, expert 3: weights model\.layers\.1\.mlp\.experts\.3\.up_proj"),
        (torch.ones(24, 32).to(torch.float8_e4m3fn), r"up_proj\.weight is stored as F8_E4M3, expected plain"),
        (None, r"layer"),
    ):
        rewrite(folder, **{up: weights})
        with pytest.raises(UserError, match=message):
            compare_experts(folder, fingerprint={})


def test_layers_that_predict_further_tokens_are_left_out(folder: Path) -> None:
    extra = {
        f"model__layers__3__mlp__experts__0__{part}__weight": torch.ones(4, 4) for part in ("up_proj", "down_proj")
    }
    rewrite(folder, **extra, mtp__layers__0__mlp__experts__0__up_proj__weight=torch.ones(4, 4))
    assert list(weigh_experts(folder, fingerprint={}).layers) == [0, 1, 2]
    assert weigh_experts(folder, fingerprint={}).layers[0]["count"] == 3 * 24 * 32
    assert list(compare_experts(folder, fingerprint={}).layers) == [0, 1, 2]


def test_folders_without_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has neither model"):
        weigh_experts(tmp_path, fingerprint={})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no weights of routed experts"):
        weigh_experts(tmp_path, fingerprint={})
