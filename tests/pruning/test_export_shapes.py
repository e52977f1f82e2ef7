"""The shapes an export can have besides the natural one, what they cannot express, and config.json."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from identities.plans import random_plan
from safetensors.torch import load_file, save_file
from tiny import logits
from transformers import AutoModelForCausalLM

from moe_lab.config import ExportConfig, ModelConfig, RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.export import export, parts
from moe_lab.pruning.export.settings import wrong
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune


@pytest.fixture(autouse=True)
def matrices_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BLOCK", 1000)


def load(folder: Path, **named: Any) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="eager", output_loading_info=True, **named
    )
    assert not any(report.values())
    return model


def config_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {**config, "num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in config else config


def check_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(logits(found), logits(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["olmoe", "mixtral", "deepseek_v3", "jamba", "phimoe", "granitemoe"])
def test_masked_channels_have_the_original_shape(name: str, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    plan = random_plan(model, "ragged", share=1.0)
    out = export(tmp_path / "model", plan, tmp_path / "out", shape="masked")
    assert config_of(out) == config_of(tmp_path / "model")
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", out))
    assert {name: value.shape for name, value in before.items()} == {name: value.shape for name, value in after.items()}
    reference = copy.deepcopy(model)
    for layer in moe_layers(reference):
        gone = ~torch.from_numpy(plan.channels[layer.index])
        layer.experts.gate_up_proj[torch.cat((gone, gone), 1)] = 0
        layer.experts.down_proj.transpose(1, 2)[gone] = 0
    masked, expected = load(out), reference.state_dict()
    assert all(torch.equal(masked.state_dict()[name], expected[name]) for name in expected)  # channels stay in place
    assert torch.equal(logits(masked), logits(reference))
    check_close(masked, prune(model, plan))


def masking_is_refused(folder: Path) -> str:
    """What is said before anything runs."""
    model = ModelConfig(name="m", path=str(folder))
    return " ".join(wrong(ExportConfig("masked"), model, RecoveryConfig(), "expert", verify=False))


BARRING = ("deepseek_v3", "deepseek_v3:grouped", "glm4_moe", "minimax_m2", "lfm2_moe", "afmoe", "gpt_oss", "dots1")


@pytest.mark.parametrize(("name", "way"), [*((name, "even") for name in BARRING), ("glm4_moe", "ragged")])
def test_masked_experts_are_never_chosen(name: str, way: str, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    plan = random_plan(model, way, share=0.5)
    assert not masking_is_refused(tmp_path / "model")
    out = export(tmp_path / "model", plan, tmp_path / "out", shape="masked")
    assert config_of(out) == config_of(tmp_path / "model")
    masked = load(out)
    check_close(masked, prune(model, plan))
    layer = moe_layers(masked)[0]
    gone = sorted(set(range(16)) - set(plan.experts[layer.index]))
    assert all(not weight[gone].any() and weight.any() for weight in layer.experts.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masked_experts_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny.save("gpt_oss", tmp_path / "model", dtype=dtype)
    out = load(export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out", shape="masked"), dtype=dtype)
    biases = [layer.router.bias for layer in moe_layers(out)]
    assert all(int((bias < -9000).sum()) == 8 and bool(bias.isfinite().all()) for bias in biases)


@pytest.mark.parametrize(("name", "layer"), [("olmoe", 0), ("ernie4_5_moe", 1)])
def test_routers_without_a_bias_cannot_be_masked(name: str, layer: int, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    with pytest.raises(UserError, match=rf"export=masked.* layer {re.escape(str(layer))}\b.* export=natural"):
        export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out", shape="masked")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert "no bias" in masking_is_refused(tmp_path / "model")


@pytest.mark.parametrize("name", ["olmoe", "glm4_moe", "hunyuan_v1_moe", "granitemoe"])
def test_padded_to_the_widest_expert_of_each_layer(name: str, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    plan = random_plan(model, "ragged", share=0.8)
    for place, mask in enumerate(plan.channels.values()):
        mask[:, 18 - 8 * place :] = False  # each layer is narrower than the one before it
    out = export(tmp_path / "model", plan, tmp_path / "out", shape="padded")
    padded, pruned = load(out, trust_remote_code=True), prune(model, plan)
    check_close(padded, pruned)
    zeros = 0
    for layer in moe_layers(padded):
        widths = plan.widths(layer.index)
        assert layer.width == -(-max(widths) // 4) * 4 < 24  # rows of 16 bytes
        zeros += 3 * 32 * 4 * (layer.width * len(widths) - sum(widths))
    assert zeros and f"{zeros:,} bytes" in (out / "README.md").read_text()
    padded.set_experts_implementation("grouped_mm")
    check_close(padded, pruned, 1e-4)


def test_padded_to_one_width_is_a_stock_checkpoint(tmp_path: Path) -> None:
    model = tiny.save("qwen3_moe", tmp_path / "model")
    plan = random_plan(model, "ragged", share=0.8)
    for mask in plan.channels.values():
        mask[:, 18:] = False
    out = export(tmp_path / "model", plan, tmp_path / "out", shape="padded")
    changed = {"moe_intermediate_size": 20, "num_local_experts": 13, "num_experts": 13}
    assert config_of(out) == {**config_of(tmp_path / "model"), **changed} and not list(out.glob("*.py"))
    check_close(load(out), prune(model, plan))


@pytest.mark.parametrize(("name", "stock"), [("olmoe", True), ("qwen2_moe", True), ("jamba", True), ("dots1", False)])
def test_one_width_for_all_is_stock_where_the_family_can_say_it(name: str, stock: bool, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    plan = random_plan(model, "one width", share=1.0, width=12)
    out = export(tmp_path / "model", plan, tmp_path / "out")
    assert {file.name for file in out.glob("*.py")} == (set() if stock else {"pruned.py", "ragged.py"})
    assert torch.equal(logits(load(out, trust_remote_code=not stock)), logits(prune(model, plan)))


def test_config_is_edited_and_not_written_anew(tmp_path: Path) -> None:
    """Fields of others stay, old remote code is no longer pointed at, the global numbers are those of the original."""
    model = tiny.save("qwen3_moe", tmp_path / "model")
    original = {
        **config_of(tmp_path / "model"),
        "note": "ä",
        "rope_theta": 1e6,
        "output_router_logits": True,
        "auto_map": {"AutoConfig": "configuration_old.Old", "AutoModelForCausalLM": "modeling_old.Old"},
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(original))
    kept = {0: tuple(range(16)), 1: tuple(range(9)), 2: (0, 3, 5, 7, 8)}
    after = config_of(export(tmp_path / "model", Plan(kept, dict.fromkeys(range(3), 16)), tmp_path / "out"))
    assert after.pop("pruned") == {
        "format": 2,
        "stock": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
        "layers": {str(layer): {"experts": len(ids)} for layer, ids in kept.items()},
    }
    changed = {
        "model_type": "pruned_qwen3_moe",
        "architectures": ["PrunedForCausalLM"],
        "auto_map": {"AutoConfig": "pruned.PrunedConfig", "AutoModelForCausalLM": "pruned.PrunedForCausalLM"},
        "output_router_logits": False,
    }
    assert after == {**original, **changed}
    plan = random_plan(model, "ragged", share=1.0)
    ragged = config_of(export(tmp_path / "model", plan, tmp_path / "ragged"))
    widths = {layer: list(plan.widths(int(layer))) for layer in ragged["pruned"]["layers"]}
    assert ragged["pruned"]["layers"] == {at: {"experts": 16, "widths": own} for at, own in widths.items()}
    assert ragged["num_local_experts"] == 16


def test_what_cannot_be_exported_is_named(tmp_path: Path) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    ragged, uneven = random_plan(model, "ragged"), random_plan(model, "uneven")

    def refused(field: str, plan: Plan, source: str = "model", shape: str = "natural") -> None:
        with pytest.raises(UserError, match=field):
            export(tmp_path / source, plan, tmp_path / "out", shape=shape)
        assert not list(tmp_path.glob("*out*"))

    refused(r"export=mask\b.* masked\?", uneven, shape="mask")
    refused("28 channels", random_plan(tiny.build("olmoe", intermediate_size=28), "ragged"))
    export(tmp_path / "model", uneven, tmp_path / "first")
    refused("model_type=pruned_olmoe", tiny.plan(model, 0.5), "first")
    config = {**config_of(tmp_path / "model"), "model_type": "homemade"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    for plan in (uneven, random_plan(model, "one width", share=1.0, width=12)):
        refused("model_type=homemade", plan)
    file = tmp_path / "model" / "model.safetensors"
    tensors = {
        name: value.to(torch.float8_e4m3fn) if "experts" in name else value for name, value in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "model_type": "olmoe"}))
    refused("F8_E4M3", ragged)
