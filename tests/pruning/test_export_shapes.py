"""The shapes an export can have besides the natural one, and what they cannot express."""

from __future__ import annotations

import ast
import copy
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny import logits
from transformers import AutoModelForCausalLM

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.export import export, parts
from moe_lab.pruning.export.layout import check_masked
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
    return json.loads((folder / "config.json").read_text())


def channel_plan(model: Any, widths: list[int] | None = None, drop: int = 0, seed: int = 0) -> Plan:
    """Drops the first `drop` experts of each layer; the others keep random channels, `widths[place]` of them or, with
    None, a random number, one expert none at all."""
    generator = numpy.random.default_rng(seed)
    layers = moe_layers(model)
    channels = {}
    for place, layer in enumerate(layers):
        mask = numpy.zeros((layer.n_experts, layer.width), dtype=bool)
        for expert in range(drop, layer.n_experts):
            width = int(generator.integers(1, 20)) * (expert != drop + 1) if widths is None else widths[place]
            mask[expert, generator.permutation(layer.width)[:width]] = True
        channels[layer.index] = mask
    kept = {layer.index: tuple(range(drop, layer.n_experts)) for layer in layers}
    return Plan(kept, {layer.index: layer.n_experts for layer in layers}, {}, channels)


def zeroed(model: Any, plan: Plan) -> Any:
    """A copy whose dropped channels are zero: the definition of what an export computes."""
    other = copy.deepcopy(model)
    for layer in moe_layers(other):
        gone = ~torch.from_numpy(plan.channels[layer.index])
        layer.experts.gate_up_proj[torch.cat((gone, gone), 1)] = 0
        layer.experts.down_proj.transpose(1, 2)[gone] = 0
    return other


@pytest.mark.parametrize("name", ["olmoe", "mixtral", "deepseek_v3", "jamba", "phimoe", "granitemoe"])
def test_masked_channels_have_the_original_shape(name: str, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    plan = channel_plan(model)
    out = export(tmp_path / "model", plan, tmp_path / "out", shape="masked")
    extra = {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in config_of(out) else {}
    assert config_of(out) == {**config_of(tmp_path / "model"), **extra}
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", out))
    assert {name: value.shape for name, value in before.items()} == {name: value.shape for name, value in after.items()}
    masked, reference = load(out), zeroed(model, plan)
    found, expected = masked.state_dict(), reference.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)  # channels stay where they were
    assert torch.equal(logits(masked), logits(reference))
    torch.testing.assert_close(logits(load(out)), logits(prune(model, plan)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["deepseek_v3", "deepseek_v3:grouped", "glm4_moe", "minimax_m2", "lfm2_moe", "afmoe", "gpt_oss", "dots1"],
)
def test_masked_experts_are_never_chosen(name: str, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    plan = tiny.plan(model, 0.5)
    check_masked(ModelConfig(name="m", path=str(tmp_path / "model")))
    out = export(tmp_path / "model", plan, tmp_path / "out", shape="masked")
    extra = {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in config_of(out) else {}
    assert config_of(out) == {**config_of(tmp_path / "model"), **extra}
    masked = load(out)
    torch.testing.assert_close(logits(masked), logits(prune(model, plan)), rtol=0, atol=1e-5)
    layer = moe_layers(masked)[0]
    gone = sorted(set(range(16)) - set(plan.experts[layer.index]))
    assert all(not weight[gone].any() and weight.any() for weight in layer.experts.parameters())


def test_both_kinds_of_dropping_masked_at_once(tmp_path: Path) -> None:
    model = tiny.save("glm4_moe", tmp_path / "model")
    plan = channel_plan(model, drop=5)
    out = export(tmp_path / "model", plan, tmp_path / "out", shape="masked")
    torch.testing.assert_close(logits(load(out)), logits(prune(model, plan)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masked_experts_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny.save("gpt_oss", tmp_path / "model", dtype=dtype)
    plan = tiny.plan(model, 0.5)
    out = load(export(tmp_path / "model", plan, tmp_path / "out", shape="masked"), dtype=dtype)
    biases = [layer.router.bias for layer in moe_layers(out)]
    assert all(int((bias < -9000).sum()) == 8 and bool(bias.isfinite().all()) for bias in biases)


@pytest.mark.parametrize(("name", "layer"), [("olmoe", 0), ("ernie4_5_moe", 1)])
def test_routers_without_a_bias_cannot_be_masked(name: str, layer: int, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    with pytest.raises(
        UserError, match=rf"masked: the plan drops experts of layer {re.escape(str(layer))}.* no bias.* export=natural"
    ):
        export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out", shape="masked")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(UserError, match=r"export=masked: routers in .* no bias.* export=natural"):
        check_masked(ModelConfig(name="m", path=str(tmp_path / "model")))


@pytest.mark.parametrize("name", ["olmoe", "glm4_moe", "hunyuan_v1_moe", "granitemoe"])
def test_padded_to_the_widest_expert_of_each_layer(name: str, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    plan = channel_plan(model, drop=3)
    for mask in plan.channels.values():
        mask[4] = False  # a null expert
    mask[:, 10:] = False  # the last layer gets narrower than the others
    out = export(tmp_path / "model", plan, tmp_path / "out", shape="padded")
    padded = load(out, trust_remote_code=True)
    torch.testing.assert_close(logits(padded), logits(prune(model, plan)), rtol=0, atol=1e-5)
    for layer in moe_layers(padded):
        widest = max(plan.widths(layer.index))
        assert layer.width == -(-widest // 4) * 4 < 24  # rows of 16 bytes
    padded.set_experts_implementation("grouped_mm")
    torch.testing.assert_close(logits(padded), logits(prune(model, plan)), rtol=0, atol=1e-4)
    zeros = sum(
        3 * 32 * 4 * (layer.width * 13 - sum(plan.widths(layer.index)))
        for layer in moe_layers(padded)
        if layer.n_experts == 13
    )
    assert zeros and f"{zeros:,} bytes" in (out / "README.md").read_text()


def test_padded_to_one_width_is_a_stock_checkpoint(tmp_path: Path) -> None:
    model = tiny.save("qwen3_moe", tmp_path / "model")
    plan = channel_plan(model, drop=3)
    out = export(tmp_path / "model", plan, tmp_path / "out", shape="padded")
    before, after = config_of(tmp_path / "model"), config_of(out)
    changed = {"moe_intermediate_size": 20, "num_local_experts": 13, "num_experts": 13}
    assert after == {**before, **changed} and not list(out.glob("*.py"))
    torch.testing.assert_close(logits(load(out)), logits(prune(model, plan)), rtol=0, atol=1e-5)


def test_shapes_are_named(tmp_path: Path) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    with pytest.raises(UserError, match=r"export=mask is unknown: did you mean masked\?"):
        export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out", shape="mask")


@pytest.mark.parametrize(("name", "stock"), [("olmoe", True), ("qwen2_moe", True), ("jamba", True), ("dots1", False)])
def test_one_width_for_all_is_stock_where_the_family_can_say_it(name: str, stock: bool, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    plan = channel_plan(model, [12, 12, 12])
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
    plan = channel_plan(model)
    ragged = config_of(export(tmp_path / "model", plan, tmp_path / "ragged"))
    widths = {layer: list(plan.widths(int(layer))) for layer in ragged["pruned"]["layers"]}
    assert ragged["pruned"]["layers"] == {at: {"experts": 16, "widths": own} for at, own in widths.items()}
    assert ragged["num_local_experts"] == 16


def test_code_needs_torch_and_transformers_only(tmp_path: Path) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    out = export(tmp_path / "model", channel_plan(model), tmp_path / "out")
    roots = set()
    for node in [node for file in out.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))]:
        if isinstance(node, ast.Import):
            roots.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").split(".")[0])
    assert roots <= {"__future__", "collections", "copy", "itertools", "ragged", "typing", "torch", "transformers"}


def test_only_one_tensor_is_in_memory(tmp_path: Path) -> None:
    """9 MB of experts, 192 kB a matrix: the peak is a few matrices."""
    tiny.save("olmoe", tmp_path / "model", hidden_size=128, intermediate_size=384)
    model = tiny.build("olmoe", hidden_size=128, intermediate_size=384)
    plan = channel_plan(model, drop=0)
    generator = numpy.random.default_rng(0)
    for mask in plan.channels.values():
        mask[:] = generator.random(mask.shape) < 0.5
    export(tmp_path / "model", plan, tmp_path / "warm")  # imports and caches
    tracemalloc.start()
    export(tmp_path / "model", plan, tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 384 * 128 * 4


def test_quantised_experts_cannot_lose_channels(tmp_path: Path) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = {
        name: value.to(torch.float8_e4m3fn) if "experts" in name else value for name, value in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"is of type F8_E4M3: .* not quantised"):
        export(tmp_path / "model", channel_plan(model), tmp_path / "out")


def test_families_transformers_does_not_know_stay_uniform(tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path / "model")
    config = {**config_of(tmp_path / "model"), "model_type": "homemade"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    plan = Plan({0: tuple(range(8)), 1: tuple(range(8)), 2: tuple(range(5))}, dict.fromkeys(range(3), 16))
    for uneven in (plan, channel_plan(tiny.build("olmoe"), [12, 12, 12])):
        with pytest.raises(UserError, match="model_type=homemade: layers and experts of another shape"):
            export(tmp_path / "model", uneven, tmp_path / "out")


def test_uneven_checkpoints_are_not_pruned_again(tmp_path: Path) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    first = export(tmp_path / "model", channel_plan(model, [8, 16, 24]), tmp_path / "first")
    with pytest.raises(UserError, match=r"layers differ already .* export from the original model"):
        export(first, tiny.plan(model, 0.5), tmp_path / "second")


def test_plan_of_another_width(tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path / "model")
    plan = channel_plan(tiny.build("olmoe", intermediate_size=28))
    with pytest.raises(UserError, match=r"it is about 28 channels, .* has shape \(32, 24\)"):
        export(tmp_path / "model", plan, tmp_path / "out")
