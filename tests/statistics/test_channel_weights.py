from __future__ import annotations

import json
from pathlib import Path

import naive
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_expert_weights import DOWN, rewrite

from moe_lab.errors import UserError
from moe_lab.statistics.weights import weigh_channels


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    naive.model("olmoe").save_pretrained(tmp_path)
    return tmp_path


def test_a_broken_weight_is_named(folder: Path) -> None:
    broken = torch.ones(32, 24)
    broken[3, 4] = torch.inf
    rewrite(folder, **{DOWN: broken})
    with pytest.raises(UserError, match=r"layer 1, expert 3: weights model\.layers\.1\.mlp\.experts\.3\.down_proj"):
        weigh_channels(folder, fingerprint={})


def test_quantised_weights_are_refused(folder: Path) -> None:
    rewrite(folder, **{DOWN: torch.ones(32, 24).to(torch.float8_e4m3fn)})
    with pytest.raises(UserError, match=r"down_proj\.weight is stored as F8_E4M3, expected plain"):
        weigh_channels(folder, fingerprint={})


def test_missing_weights_are_noticed(folder: Path) -> None:
    rewrite(folder, **{DOWN: None})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts\.3\.down_proj"):
        weigh_channels(folder, fingerprint={})


def test_projections_of_several_widths_are_refused(folder: Path) -> None:
    rewrite(folder, **{DOWN.replace("__3__", f"__{number}__"): torch.ones(32, 23) for number in range(16)})
    with pytest.raises(UserError, match=r"experts of layer 1 have \[23, 24\] channels, expected one width"):
        weigh_channels(folder, fingerprint={})


def test_projections_of_unknown_names_are_refused(folder: Path) -> None:
    rewrite(folder, model__layers__0__mlp__experts__0__side_proj__weight=torch.ones(4, 4))
    with pytest.raises(UserError, match=r"side_proj\.weight"):
        weigh_channels(folder, fingerprint={})


def test_fused_weights_of_another_layout_are_refused(tmp_path: Path) -> None:
    naive.model("granitemoe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("output_linear.weight"))
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"output_linear\.weight .*hidden_size=32"):
        weigh_channels(tmp_path, fingerprint={})


def test_layers_that_predict_further_tokens_are_left_out(folder: Path) -> None:
    rewrite(folder, model__layers__3__mlp__experts__0__up_proj__weight=torch.ones(4, 4))
    assert list(weigh_channels(folder, fingerprint={}).layers) == [0, 1, 2]


def test_folders_without_experts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no weights of routed experts"):
        weigh_channels(tmp_path, fingerprint={})
