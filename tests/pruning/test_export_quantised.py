"""Quantised originals lose whole experts with their scales; exports are quantised by compressed-tensors."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import preloaded
import pytest
import quantised
import tiny
import torch
from identities.plans import random_plan
from safetensors.torch import load_file, save_file
from tiny import logits, weights
from transformers import CompressedTensorsConfig

from moe_lab.config import ExportConfig, ModelConfig, RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.models.load import load_model
from moe_lab.pruning.export import export
from moe_lab.pruning.export.compressed import compression_changes
from moe_lab.pruning.export.rewrite import Changes, rewrite
from moe_lab.pruning.export.settings import wrong
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from tests.campaign.models import reconfigure

pytestmark = pytest.mark.slow

CASES = [("gpt_oss", "mxfp4"), *(("qwen2_moe", kind) for kind in quantised.FORMATS), ("deepseek_v3", "fp8")]


def check_tensors(out: Path, stored: Path, plan: Plan) -> None:
    """An export has all tensors of the experts that stay, under their new numbers, and of the rest of the model."""
    expected = {}
    for name, tensor in weights(stored).items():
        layer, expert = (re.search(rf"\.{part}\.(\d+)\.", name) for part in ("layers", "experts"))
        kept = plan.experts.get(int(layer[1])) if layer else None
        if kept and expert:
            if (number := int(expert[1])) in kept:
                expected[f"{name[: expert.start(1)]}{kept.index(number)}{name[expert.end(1) :]}"] = tensor
        elif kept and re.search(r"\.(gate|router|experts)\.", name):
            expected[name] = tensor[list(kept)]
        else:
            expected[name] = tensor
    found = weights(out)
    assert found.keys() == expected.keys()
    assert all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_all_parts_of_an_expert_stay_with_it(name: str, kind: str, tmp_path: Path) -> None:
    _, stored = quantised.save(name, kind, tmp_path)
    plan = tiny.plan(tiny.build(name), 0.5)
    out = export(stored, plan, tmp_path / "out")
    check_tensors(out, stored, plan)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (stored, out))
    assert after["quantization_config"] == before["quantization_config"]


RELOADED = [("fp8", "natural", True), ("fp8", "natural", False), ("w4a16", "natural", True)]
RELOADED += [("compressed_fp8", "natural", False), ("mxfp4", "natural", True), ("mxfp4", "natural", False)]


@pytest.mark.parametrize(("kind", "shape", "alike"), [*RELOADED, ("mxfp4", "masked", False)])
def test_reloaded_exports_are_the_masked_model(kind: str, shape: str, alike: bool, tmp_path: Path) -> None:
    if kind in ("w4a16", "compressed_fp8"):
        pytest.importorskip("compressed_tensors")
    name = "gpt_oss" if kind == "mxfp4" else "qwen2_moe"
    _, stored = quantised.save(name, kind, tmp_path)
    plan = random_plan(tiny.build(name), "even" if alike else "uneven")
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
FIRST = "model.layers.0.mlp.experts"
BEFORE = {
    "modules_to_not_convert": [f"{FIRST}.0", f"{FIRST}.3.gate_proj", f"{FIRST}.15", *LEFT_ALONE],
    "config_groups": {"group_0": {"targets": [r"re:model\.layers\.0\.mlp\.experts\.4\..*", "Linear"], "bits": None}},
    "dynamic": {
        r"-:model\.layers\.2\.mlp\.experts\.9\..*": {},
        r"-:model\.layers\.2\.mlp\.experts\.11\..*": {"bits": 8},
    },
}
AFTER = {
    "modules_to_not_convert": [f"{FIRST}.0.gate_proj", f"{FIRST}.7", *LEFT_ALONE],
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
    _, stored = quantised.save("qwen2_moe", "w4a16", tmp_path)
    apart = ("model.layers.0.mlp.experts.15.up_proj", "model.layers.0.mlp.experts.3.gate_proj")
    tensors = {name: tensor for name, tensor in weights(stored).items() if not name.startswith(apart)}
    ones = {f"{name}.weight": torch.ones(24, 32) for name in apart}
    save_file({**tensors, **ones}, stored / "model.safetensors", {"format": "pt"})
    plan, about = Plan(EXPERTS, COUNTS), quantised.FORMATS["w4a16"].config
    reconfigure(stored, quantization_config={**about, "ignore": ["lm_head", *apart]})
    check_tensors(export(stored, plan, tmp_path / "out"), stored, plan)


def check_refused(said: str, stored: Path, plan: Plan, shape: str = "natural") -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        export(stored, plan, stored.parent / "out", shape=shape)
    assert sorted(path.name for path in stored.parent.iterdir()) == ["fp8", "plain"]


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
    check_refused(f"quantization_config has {name}", stored, Plan(EXPERTS, COUNTS))


def test_unknown_scales_zeros_and_channels_are_refused(tmp_path: Path) -> None:
    model, (_, stored) = tiny.build("qwen2_moe"), quantised.save("qwen2_moe", "fp8", tmp_path)
    for plan, shape in ((tiny.plan(model, 0.5), "masked"), (random_plan(model, "ragged"), "natural")):
        check_refused(f"export={shape}", stored, plan, shape)
    tensors = weights(stored)
    for name, scale in (("gate.weight_scale_inv", torch.ones(2, 4)), ("experts_scale", torch.ones(16))):
        save_file({**tensors, f"model.layers.1.mlp.{name}": scale}, stored / "model.safetensors", {"format": "pt"})
        check_refused(name, stored, Plan(EXPERTS, COUNTS))


STUDY = ["model=local", "calibration=pocket_code", "calibration.tokens=128", "calibration.length=64", "ratio=0.25"]
STUDY += ["suite.benchmarks=[]", "report=false", "launcher=inline", "model.device=cpu"]


def study(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run(folder.parent, "moe_lab", *STUDY, f"model.path={folder}", "store=store", *words)


def test_a_study_scores_prunes_and_exports_an_fp8_checkpoint(tmp_path: Path) -> None:
    _, stored = quantised.save("qwen2_moe", "fp8", tmp_path)
    done = study(stored, "criterion=reap", "export=natural")
    assert done.returncode == 0, done.stderr
    (out,) = tmp_path.glob("store/export/*/checkpoint")
    plan = Plan.load(out / "plan.json")
    assert all(len(kept) == 12 for kept in plan.experts.values())
    check_tensors(out, stored, plan)


def test_what_quantised_weights_do_not_allow_is_refused_first(tmp_path: Path) -> None:
    _, stored = quantised.save("deepseek_v3", "fp8", tmp_path)
    fields = ("verify=true", "export=masked", "criterion=heapr", "calibration.engine=streamed")
    done = study(stored, *fields)
    lines = [line for line in done.stderr.splitlines() if "stored as fp8" in line]
    assert done.returncode == 2 and not (tmp_path / "store").exists()
    assert all(any(field in line for line in lines) for field in fields), done.stderr


# ---- export.format

COMPRESSED = [(name, scheme) for name in ("even", "uneven") for scheme in ("fp8", "w4a16")]
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64}


def scheme_of(folder: Path) -> tuple[Any, Any]:
    """The library's scheme, and the class that stores weights, as config.json names them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    stated = QuantizationConfig(**json.loads((folder / "config.json").read_text())["quantization_config"])
    return stated.config_groups["group_0"], BaseCompressor.get_value_from_registry(stated.format)


def decompressed(folder: Path) -> dict[str, torch.Tensor]:
    """Name of each quantised matrix -> the numbers that are stored, by the library."""
    scheme, compressor = scheme_of(folder)
    stored, matrices = weights(folder), {}
    for name in stored:
        if name.endswith(".weight_scale"):
            module = name.removesuffix("weight_scale")
            parts = {key.removeprefix(module): value for key, value in stored.items() if key.startswith(module)}
            matrices[f"{module}weight"] = compressor.decompress(parts, scheme)["weight"]
    return matrices


def compress(folder: Path, case: str, scheme: str, dtype: torch.dtype = torch.float32) -> None:
    """An export as it is evaluated, and compressed, each in a folder of its own."""
    pytest.importorskip("compressed_tensors")
    model = tiny.save("qwen2_moe" if case == "even" else "qwen3_moe", folder / "model", dtype=dtype, **SIZES)
    evaluated = export(folder / "model", random_plan(model, case), folder / "evaluated")
    rewrite(evaluated, compression_changes(evaluated, scheme), folder / "compressed")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, also with the stored numbers as plain weights; and the logits of all of them."""
    root = tmp_path_factory.mktemp("compressed")
    for case, scheme in COMPRESSED:
        folder = root / f"{case}-{scheme}"
        compress(folder, case, scheme)
        stored = decompressed(folder / "compressed")
        changes = Changes(lambda name, tensor, stored=stored: {name: stored.get(name, tensor)}, "")
        rewrite(folder / "evaluated", changes, folder / "decompressed")
        found = {name: loaded(folder / name) for name in ("evaluated", "decompressed")}
        dequantised = CompressedTensorsConfig(dequantize=True)
        found["dequantised"] = loaded(folder / "compressed", quantization_config=dequantised)
        save_file({**found, "loaded": loaded(folder / "compressed")}, folder / "found.safetensors")
    return root


def loaded(folder: Path, **named: Any) -> torch.Tensor:
    """The logits of the model in a folder, all of whose weights are there."""
    return logits(tiny.load(folder, trust_remote_code=True, **named)).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["fp8", "w4a16"])
def test_weights_are_rounded_to_the_nearest(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    compress(tmp_path, "even", scheme, dtype)
    stored, found = weights(tmp_path / "compressed"), decompressed(tmp_path / "compressed")
    originals, arguments = weights(tmp_path / "evaluated"), scheme_of(tmp_path / "compressed")[0].weights
    assert any("shared_expert." in name for name in found) and any("self_attn" in name for name in found)
    for name, matrix in found.items():
        original, scales = originals[name], stored[f"{name}_scale"]
        assert scales.dtype == dtype and matrix.dtype == dtype
        largest = original.unflatten(1, (scales.shape[1], -1)).abs().amax(2).double()
        torch.testing.assert_close(scales.double() * {"fp8": 448, "w4a16": 7.5}[scheme], largest, rtol=2**-7, atol=0)
        assert torch.equal(matrix, fake_quantize(original, scales, torch.zeros_like(scales), arguments))


@pytest.mark.parametrize("scheme", ["fp8", "w4a16"])
def test_routers_embeddings_norms_and_lm_head_stay(folders: Path, scheme: str) -> None:
    before, after = (weights(folders / f"even-{scheme}" / name) for name in ("evaluated", "compressed"))
    kept = {name for name in before if name in after and torch.equal(before[name].float(), after[name].float())}
    ends = ("mlp.gate.weight", "shared_expert_gate.weight", "norm.weight", "embed_tokens.weight", "bias")
    expected = {name for name in before if name.endswith((*ends, "lm_head.weight"))}
    if scheme == "w4a16":  # its rows of 40 numbers are no multiple of the group of 64
        expected |= {name for name in before if name.endswith("shared_expert.down_proj.weight")}
    assert kept == expected
    stated = json.loads((folders / f"even-{scheme}" / "compressed" / "config.json").read_text())["quantization_config"]
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate"} <= set(stated["ignore"])
    assert "rounded to the nearest" in (folders / f"even-{scheme}" / "compressed" / "README.md").read_text()


@pytest.mark.parametrize(("case", "scheme"), COMPRESSED)
def test_transformers_computes_with_the_stored_numbers(folders: Path, case: str, scheme: str) -> None:
    """When an FP8 folder is loaded as config.json says, activations are rounded too."""
    found = load_file(folders / f"{case}-{scheme}" / "found.safetensors")
    torch.testing.assert_close(found["dequantised"], found["decompressed"], rtol=0, atol=1e-5)
    if scheme == "w4a16":
        torch.testing.assert_close(found["loaded"], found["decompressed"], rtol=0, atol=1e-5)
    else:
        rounding, both = (float((found[name] - found["evaluated"]).norm()) for name in ("decompressed", "loaded"))
        assert 0 < both <= 3 * rounding


@pytest.mark.parametrize(("hidden", "width", "group"), [(256, 128, 128), (128, 192, 64), (64, 96, 32)])
def test_the_largest_group_that_divides_is_taken(hidden: int, width: int, group: int, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    sizes = {"hidden_size": hidden, "moe_intermediate_size": width}
    model = tiny.save("qwen3_moe", tmp_path / "model", num_hidden_layers=1, **sizes)
    export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "pruned")
    stated = compression_changes(tmp_path / "pruned", "w4a16").config["quantization_config"]
    assert stated["config_groups"]["group_0"]["weights"]["group_size"] == group


def test_what_the_format_cannot_store_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = tiny.save("qwen3_moe", tmp_path / "model", **SIZES)
    ragged = random_plan(model, "ragged")
    narrow = export(tmp_path / "model", random_plan(model, "one width", width=24), tmp_path / "narrow")
    packed = export(tmp_path / "model", ragged, tmp_path / "ragged")
    stacked = tiny.plan(tiny.save("gpt_oss", tmp_path / "gpt_oss"), 0.5)
    for folder, scheme, said in (
        (narrow, "w4a16", r"rows of 24 and 64: expected export\.format=fp8"),
        (packed, "fp8", "expected export=padded"),
        (export(tmp_path / "gpt_oss", stacked, tmp_path / "stacked"), "fp8", r"expected export\.format=safetensors"),
    ):
        with pytest.raises(UserError, match=said):
            compression_changes(folder, scheme)
    assert compression_changes(export(tmp_path / "model", ragged, tmp_path / "padded", shape="padded"), "fp8").config


def test_wrong_settings_are_named_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("compressed_tensors")
    tiny.save("gpt_oss", tmp_path / "gpt_oss")
    model = ModelConfig("tiny", "pocket:olmoe")

    def said(model: ModelConfig = model, verify: bool = False) -> str:
        return " ".join(wrong(ExportConfig("natural", "fp8"), model, RecoveryConfig(), "expert", verify=verify))

    assert said() == ""
    assert "expected verify=false" in said(verify=True)
    assert "in one tensor: expected export.format=safetensors" in said(ModelConfig("tiny", str(tmp_path / "gpt_oss")))
    monkeypatch.setattr("moe_lab.errors.find_spec", lambda name: None)
    assert "pip install 'moe-lab[compression]'" in said()
