"""Quantised originals lose whole experts with their scales."""

import json
import re
import subprocess
from pathlib import Path

import preloaded
import pytest
import quantised
import tiny
import torch
from identities.plans import check_refused, random_plan
from safetensors.torch import save_file
from tiny import logits, weights

from moe_lab.config import ModelConfig
from moe_lab.models.load import load_model
from moe_lab.pruning.export import export
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from tests.campaign.models import reconfigure

pytestmark = pytest.mark.slow

CASES = [
    ("gpt_oss", "mxfp4"),
    *(("qwen2_moe", kind) for kind in quantised.FORMATS),
    ("deepseek_v3", "fp8"),
]


def check_tensors(folder: Path, stored: Path, plan: Plan) -> None:
    """An export has all tensors of the experts that stay, under their new numbers, and of the rest
    of the model."""
    expected = {}
    for name, tensor in weights(stored).items():
        layer, expert = (re.search(rf"\.{part}\.(\d+)\.", name) for part in ("layers", "experts"))
        retained = plan.retained.get(int(layer[1])) if layer else None
        if retained and expert:
            if (number := int(expert[1])) in retained:
                expected[
                    f"{name[: expert.start(1)]}{retained.index(number)}{name[expert.end(1) :]}"
                ] = tensor
        elif retained and re.search(r"\.(gate|router|experts)\.", name):
            expected[name] = tensor[list(retained)]
        else:
            expected[name] = tensor
    tensors = weights(folder)
    assert tensors.keys() == expected.keys()
    assert all(
        tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)
        for name, tensor in expected.items()
    )


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_all_parts_of_an_expert_stay_with_it(name: str, kind: str, tmp_path: Path) -> None:
    _, stored = quantised.save(name, kind, tmp_path)
    plan = tiny.plan(tiny.build(name), 0.5)
    exported_folder = export(stored, plan, tmp_path / "out")
    check_tensors(exported_folder, stored, plan)
    original, config = (
        json.loads((folder / "config.json").read_text()) for folder in (stored, exported_folder)
    )
    assert config["quantization_config"] == original["quantization_config"]


@pytest.mark.parametrize(
    ("kind", "shape", "alike"),
    [
        ("fp8", "natural", True),
        ("fp8", "natural", False),
        ("w4a16", "natural", True),
        ("compressed_fp8", "natural", False),
        ("mxfp4", "natural", True),
        ("mxfp4", "natural", False),
        ("mxfp4", "masked", False),
    ],
)
def test_reloaded_exports_are_the_masked_model(
    kind: str, shape: str, alike: bool, tmp_path: Path
) -> None:
    if kind in ("w4a16", "compressed_fp8"):
        pytest.importorskip("compressed_tensors")
    name = "gpt_oss" if kind == "mxfp4" else "qwen2_moe"
    _, stored = quantised.save(name, kind, tmp_path)
    plan = random_plan(tiny.build(name), "even" if alike else "uneven")
    exported_folder = export(stored, plan, tmp_path / "out", shape=shape)
    model, written = (
        load_model(ModelConfig(name="m", path=str(folder), device="cpu", trust_remote_code=True))[0]
        for folder in (stored, exported_folder)
    )
    with mask(model, plan):
        expected = logits(model)
    assert not torch.equal(logits(model), expected)
    torch.testing.assert_close(
        logits(written), expected, rtol=0, atol=0 if shape == "natural" else 1e-5
    )


EXPERTS = ((3, 4, 5, 6, 7, 8, 9, 15), range(8), (2, 3, 4, 5, 6, 7, 8, 11))
PLAN = Plan.of_experts(dict(enumerate(EXPERTS)), dict.fromkeys(range(3), 16))


def test_names_of_all_experts_are_exported_as_they_are(tmp_path: Path) -> None:
    _, stored = quantised.save("qwen2_moe", "fp8", tmp_path)
    names = [
        "lm_head",
        "model.layers.1.mlp.shared_expert.gate_proj",
        r"re:.*mlp\.experts\.\d+\.down_proj",
        "re:.*mlp.experts.[0-9]+.up_proj",
    ]
    scheme = {**quantised.FORMATS["fp8"].config, "ignore": names}
    reconfigure(stored, quantization_config=scheme)
    folder = export(stored, PLAN, tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == scheme


def test_compressed_tensors_states_how_many_experts_layers_have(tmp_path: Path) -> None:
    """In the field of its ExpertSparsityConfig (0.20.1): null for a dense layer."""
    _, stored = quantised.save("deepseek_v3", "compressed_fp8", tmp_path)
    plan = random_plan(tiny.build("deepseek_v3"), "uneven")
    config = json.loads((export(stored, plan, tmp_path / "out") / "config.json").read_text())
    counts = [len(experts) for experts in plan.retained.values()]
    assert config["quantization_config"]["moe_sparsity_config"] == {
        "method": "prune",
        "num_experts": [None, *counts],
    }


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.3.gate_proj",
        "re:.*mlp.experts.3.gate_proj",
        r"re:.*layers\.(0|1)\.mlp\.experts\.3\..*",
        r"re:.*layers\.0\.mlp\.experts\.(2|3)\..*",
        "re:.*layers.0.mlp.experts.[2-4].*",
        "re:.*layers.0.mlp.experts.3.*",
        r"re:model\.layers\.0\.mlp\.experts\.3\.up_proj|model\.layers\.1\.mlp\.experts\.4\.up_proj",
    ],
)
def test_names_of_numbered_experts_are_refused(name: str, tmp_path: Path) -> None:
    _, stored = quantised.save("qwen2_moe", "fp8", tmp_path)
    reconfigure(stored, quantization_config={**quantised.FORMATS["fp8"].config, "ignore": [name]})
    check_refused(stored, "names experts by number", PLAN)


def test_unknown_scales_zeros_and_channels_are_refused(tmp_path: Path) -> None:
    model, (_, stored) = tiny.build("qwen2_moe"), quantised.save("qwen2_moe", "fp8", tmp_path)
    for plan, shape in (
        (tiny.plan(model, 0.5), "masked"),
        (random_plan(model, "ragged"), "natural"),
    ):
        check_refused(stored, f"export={shape}", plan, shape)
    tensors = weights(stored)
    for name, scale in (
        ("gate.weight_scale_inv", torch.ones(2, 4)),
        ("experts_scale", torch.ones(16)),
    ):
        save_file(
            {**tensors, f"model.layers.1.mlp.{name}": scale},
            stored / "model.safetensors",
            {"format": "pt"},
        )
        check_refused(stored, name, PLAN)


STUDY = [
    "model=local",
    "calibration=pocket_code",
    "calibration.tokens=128",
    "calibration.length=64",
    "ratio=0.25",
    "suite.benchmarks=[]",
    "report=false",
    "launcher=inline",
    "model.device=cpu",
]


def study(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run(
        folder.parent, "moe_lab", *STUDY, f"model.path={folder}", "store=store", *arguments
    )


@pytest.mark.parametrize("engine", ["resident", "streamed"])
def test_study_prunes_and_exports_an_fp8_checkpoint(engine: str, tmp_path: Path) -> None:
    _, stored = quantised.save("qwen2_moe", "fp8", tmp_path)
    tokenizer = tmp_path / "tokenizer"
    tiny.tokenizer(pad_token="w5").save_pretrained(tokenizer)
    process = study(
        stored,
        "criterion=reap",
        "export=natural",
        f"calibration.engine={engine}",
        f"model.tokenizer={tokenizer}",
    )
    assert process.returncode == 0, process.stderr
    (folder,) = tmp_path.glob("store/export/*/checkpoint")
    plan = Plan.load(folder / "plan.json")
    assert all(len(experts) == 12 for experts in plan.retained.values())
    check_tensors(folder, stored, plan)
    for file in tokenizer.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_quantised_weights_refuse_before_anything_runs(tmp_path: Path) -> None:
    _, stored = quantised.save("deepseek_v3", "fp8", tmp_path)
    fields = ("verify=true", "export=masked", "criterion=heapr")
    process = study(stored, *fields)
    lines = [line for line in process.stderr.splitlines() if "stored as fp8" in line]
    assert process.returncode == 2
    assert not (tmp_path / "store").exists()
    assert all(any(field in line for line in lines) for field in fields), process.stderr
