"""Quantised originals lose whole experts with their scales, and stay what they are otherwise."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy
import preloaded
import pytest
import quantised
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny import logits

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.load import load_model
from moe_lab.pruning.export import export
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from tests.campaign.models import reconfigure

pytestmark = pytest.mark.slow

CASES = [("gpt_oss", "mxfp4"), *(("qwen2_moe", kind) for kind in quantised.FORMATS), ("deepseek_v3", "fp8")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_dequantising_and_pruning_can_change_places(name: str, kind: str, tmp_path: Path) -> None:
    if "nf4" in kind:
        pytest.importorskip("bitsandbytes")
    plain, stored = quantised.save(name, kind, tmp_path)
    plan = tiny.plan(tiny.build(name), 0.5)
    expected = weights(export(plain, plan, tmp_path / "expected"))
    out = export(stored, plan, tmp_path / "out")
    found = quantised.dequantised(weights(out), kind)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (stored, out))
    assert after["quantization_config"] == before["quantization_config"]


def uneven() -> Plan:
    return Plan({0: tuple(range(8)), 1: (1, 2, 3, 5, 8, 13), 2: tuple(range(4, 16))}, dict.fromkeys(range(3), 16))


@pytest.mark.parametrize(
    ("name", "kind", "shape", "alike"),
    [
        ("qwen2_moe", "fp8", "natural", True),
        ("qwen2_moe", "fp8", "natural", False),
        ("gpt_oss", "mxfp4", "natural", True),
        ("gpt_oss", "mxfp4", "natural", False),
        ("gpt_oss", "mxfp4", "masked", False),
        ("qwen2_moe", "w4a16", "natural", True),
        ("qwen2_moe", "compressed_fp8", "natural", False),
    ],
)
def test_reloaded_exports_are_the_masked_model(name: str, kind: str, shape: str, alike: bool, tmp_path: Path) -> None:
    if kind in ("w4a16", "compressed_fp8"):
        pytest.importorskip("compressed_tensors")
    _, stored = quantised.save(name, kind, tmp_path)
    plan = tiny.plan(tiny.build(name), 0.5) if alike else uneven()
    out = export(stored, plan, tmp_path / "out", shape=shape)
    model, written = (
        load_model(ModelConfig(name="m", path=str(folder), device="cpu", trust_remote_code=True))[0]
        for folder in (stored, out)
    )
    with mask(model, plan):
        expected = logits(model)
    assert not torch.equal(logits(model), expected)
    torch.testing.assert_close(logits(written), expected, rtol=0, atol=0 if shape == "natural" else 1e-5)


EXPERTS = {0: (3, 4, 5, 6, 7, 8, 9, 15), 1: tuple(range(8)), 2: (2, 3, 4, 5, 6, 7, 8, 11)}
COUNTS = dict.fromkeys(range(3), 16)
LEFT_ALONE = [
    "lm_head",
    "model.layers.1.mlp.shared_expert.gate_proj",
    "model.layers.1.mlp.experts.3.gate_proj",
    "model.layers.7.mlp.experts.3",
    r"re:.*mlp\.experts\.\d+\.down_proj",
    "re:.*mlp.experts.[0-9]+.up_proj",
]
BEFORE = {
    "modules_to_not_convert": [
        "model.layers.0.mlp.experts.0",
        "model.layers.0.mlp.experts.3.gate_proj",
        "model.layers.0.mlp.experts.15",
        *LEFT_ALONE,
    ],
    "config_groups": {"group_0": {"targets": [r"re:model\.layers\.0\.mlp\.experts\.4\..*", "Linear"], "bits": None}},
    "dynamic": {
        r"-:model\.layers\.2\.mlp\.experts\.9\..*": {},
        r"-:model\.layers\.2\.mlp\.experts\.11\..*": {"bits": 8},
    },
}
AFTER = {
    "modules_to_not_convert": [
        "model.layers.0.mlp.experts.0.gate_proj",
        "model.layers.0.mlp.experts.7",
        *LEFT_ALONE,
    ],
    "config_groups": {"group_0": {"targets": [r"re:model\.layers\.0\.mlp\.experts\.1\..*", "Linear"], "bits": None}},
    "dynamic": {r"-:model\.layers\.2\.mlp\.experts\.7\..*": {"bits": 8}},
}


def test_names_of_experts_in_lists_follow_the_experts(tmp_path: Path) -> None:
    _, stored = quantised.save("qwen2_moe", "w4a16", tmp_path)
    about = quantised.FORMATS["w4a16"].config
    reconfigure(stored, quantization_config={**about, **BEFORE})
    (stored / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"exclude_modules": list(BEFORE["dynamic"])}})
    )
    out = export(stored, Plan(EXPERTS, COUNTS), tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["quantization_config"] == {**about, **AFTER}
    beside = json.loads((out / "hf_quant_config.json").read_text())
    assert beside == {"quantization": {"exclude_modules": list(AFTER["dynamic"])}}


def test_experts_that_are_not_quantised_keep_their_own_tensors(tmp_path: Path) -> None:
    plain, stored = quantised.save("qwen2_moe", "w4a16", tmp_path)
    apart = ("model.layers.0.mlp.experts.15.up_proj", "model.layers.0.mlp.experts.3.gate_proj")
    tensors = {name: tensor for name, tensor in weights(stored).items() if not name.startswith(apart)}
    ones = {f"{name}.weight": torch.ones(24, 32) for name in apart}
    save_file({**tensors, **ones}, stored / "model.safetensors", {"format": "pt"})
    save_file({**weights(plain), **ones}, plain / "model.safetensors", {"format": "pt"})
    plan = Plan(EXPERTS, COUNTS)
    about = quantised.FORMATS["w4a16"].config
    reconfigure(stored, quantization_config={**about, "ignore": ["lm_head", *apart]})
    out = export(stored, plan, tmp_path / "out")
    found, expected = quantised.dequantised(weights(out), "w4a16"), weights(export(plain, plan, tmp_path / "expected"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "name",
    [
        "re:.*mlp.experts.3.gate_proj",
        r"re:.*layers\.(0|1)\.mlp\.experts\.3\..*",
        r"re:.*layers\.0\.mlp\.experts\.(2|3)\..*",
        "re:.*layers.0.mlp.experts.[2-4].*",
        "re:.*layers.0.mlp.experts.3.*",
        r"re:model\.layers\.0\.mlp\.experts\.3\.up_proj|model\.layers\.1\.mlp\.experts\.4\.up_proj",
    ],
)
def test_names_that_mean_experts_of_several_layers_are_refused(name: str, tmp_path: Path) -> None:
    _, stored = quantised.save("qwen2_moe", "fp8", tmp_path)
    reconfigure(stored, quantization_config={**quantised.FORMATS["fp8"].config, "ignore": [name]})
    with pytest.raises(UserError) as caught:
        export(stored, Plan(EXPERTS, COUNTS), tmp_path / "out")
    assert f"quantization_config has {name}" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8", "plain"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"model.layers.1.mlp.gate.weight_scale_inv": torch.ones(2, 4)}), "gate.weight_scale_inv"),
        (lambda t: t.update({"model.layers.1.mlp.experts_scale": torch.ones(16)}), "experts_scale"),
    ],
)
def test_scales_that_are_unknown(change: Any, message: str, tmp_path: Path) -> None:
    _, stored = quantised.save("qwen2_moe", "fp8", tmp_path)
    tensors = weights(stored)
    change(tensors)
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=message):
        export(stored, Plan(EXPERTS, COUNTS), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8", "plain"]


def test_zeros_and_channels_are_refused(tmp_path: Path) -> None:
    _, stored = quantised.save("deepseek_v3", "fp8", tmp_path)
    experts = {1: tuple(range(8)), 2: tuple(range(8))}
    masks = {layer: numpy.ones((16, 24), bool) for layer in experts}
    for mask_of_layer in masks.values():
        mask_of_layer[8:] = mask_of_layer[:, :8] = False
    for plan, shape in (
        (Plan(experts, {1: 16, 2: 16}), "masked"),
        (Plan(experts, {1: 16, 2: 16}, {}, masks), "natural"),
    ):
        with pytest.raises(UserError) as caught:
            export(stored, plan, tmp_path / "out", shape=shape)
        assert f"export={shape}" in str(caught.value) and "stored as fp8" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8", "plain"]


STUDY = ["model=local", "calibration=pocket_code", "calibration.tokens=128", "calibration.length=64", "ratio=0.25"]
STUDY += ["suite.benchmarks=[]", "report=false", "launcher=inline", "model.device=cpu"]


def study(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    store = folder.parent / "store"
    words = (*STUDY, f"model.path={folder}", f"store={store}", *words)
    return subprocess.run(preloaded.command("-m", "moe_lab", *words), capture_output=True, text=True, cwd=folder.parent)


def test_a_study_scores_prunes_and_exports_an_fp8_checkpoint(tmp_path: Path) -> None:
    plain, stored = quantised.save("qwen2_moe", "fp8", tmp_path)
    done = study(stored, "criterion=reap", "export=natural")
    assert done.returncode == 0, done.stderr
    (out,) = tmp_path.glob("store/export/*/checkpoint")
    plan = Plan.load(out / "plan.json")
    assert all(len(kept) == 12 for kept in plan.experts.values())
    expected = weights(export(plain, Plan(plan.experts, plan.n_experts), tmp_path / "expected"))
    found = quantised.dequantised(weights(out), "fp8")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_quantised_weights_do_not_allow_is_refused_first(tmp_path: Path) -> None:
    _, stored = quantised.save("deepseek_v3", "fp8", tmp_path)
    fields = ("verify=true", "export=masked", "criterion=heapr", "calibration.engine=streamed")
    done = study(stored, *fields)
    lines = [line for line in done.stderr.splitlines() if "stored as fp8" in line]
    assert done.returncode == 2 and not (tmp_path / "store").exists()
    assert all(any(field in line for line in lines) for field in fields), done.stderr
