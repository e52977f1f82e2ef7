"""What is wrong with a checkpoint, a plan or a machine is said in one sentence, and nothing half-written is left."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import quantised
import tiny
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers.integrations import hub_kernels
from transformers.quantizers import quantizer_finegrained_fp8

from moe_lab import inspect
from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.config_json import quantization
from moe_lab.models.discover import moe_layers
from moe_lab.models.facts import facts
from moe_lab.models.files import check, configuration_folder, fingerprint
from moe_lab.models.load import load_model, skeleton
from moe_lab.models.streamed import open_streamed
from moe_lab.pruning.export import export
from moe_lab.pruning.plan import Plan
from moe_lab.statistics.forward import ForwardTap
from moe_lab.statistics.observe import Observer
from moe_lab.statistics.weights import weigh_experts
from tests.campaign.models import SHARD, reconfigure

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plan() -> Plan:
    return tiny.plan(tiny.build("olmoe"), 0.5)


def settings(path: object, **changes: object) -> ModelConfig:
    return ModelConfig(name="m", path=str(path), **{"device": "cpu", **changes})  # type: ignore[arg-type]


def refused(attempt: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        attempt()
    assert "\n" not in str(caught.value)


def test_a_plan_knows_the_model_it_was_made_for(folder: Path, plan: Plan) -> None:
    """Two models of one shape are told apart by their weights."""
    made = Plan(plan.experts, plan.n_experts, {"model_sha256": fingerprint(folder)})
    shutil.rmtree(export(folder, made, folder.parent / "out"))
    tensors = load_file(folder / SHARD)
    next(iter(tensors.values())).view(-1)[:1].add_(1)
    save_file(tensors, folder / SHARD, {"format": "pt"})
    refused(lambda: export(folder, made, folder.parent / "out"), "plan is for another model: .* of fingerprint")
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def add(folder: Path, *names: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **{name: torch.ones(2) for name in names}}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "made", "stated", "lost"),
    [
        ("glm4_moe", {"use_qk_norm": True}, {"use_qk_norm": False}, "self_attn.k_norm.weight"),
        ("qwen3_moe", {"attention_bias": True}, {"attention_bias": False}, "self_attn.k_proj.bias"),
        ("ernie4_5_moe", {}, {"moe_num_shared_experts": 0}, "shared_experts.down_proj.weight"),
        ("olmoe", {}, {"num_hidden_layers": 2}, "model.layers.2."),
        ("deepseek_v3", {}, {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}, "model.layers.2."),
        ("olmoe", {}, {"hidden_size": 33}, "config.json asks for"),
        ("olmoe", {}, {"num_experts": 12}, "config.json asks for"),
    ],
)
def test_weights_that_the_configuration_does_not_ask_for_are_named_before_they_are_read(
    name: str,
    made: dict[str, Any],
    stated: dict[str, Any],
    lost: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "model"
    tiny.save(name, folder, **made)
    load_model(settings(folder))
    reconfigure(folder, **stated)
    monkeypatch.setattr(tiny.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    for read in (load_model, open_streamed, facts):
        refused(lambda read=read: read(settings(folder)), re.escape(lost))  # type: ignore[misc]
    assert inspect.main(["model=local", f"model.path={folder}"]) == 1


def test_unused_weights_are_named_however_they_are_stored(tmp_path: Path) -> None:
    """Quantised, and for a model whose code is beside the weights."""
    lost = "model.layers.1.self_attn.q_proj.bias"
    _, stored = quantised.save("olmoe", "fp8", tmp_path)
    add(stored, lost)
    refused(lambda: load_model(settings(stored)), re.escape(lost))

    tiny.save("olmoe", tmp_path / "plain")
    plan = Plan({0: (0, 1, 2, 3), 1: (0, 1, 2, 3, 4), 2: (0, 1, 2, 3)}, {0: 16, 1: 16, 2: 16})
    own_code = export(tmp_path / "plain", plan, tmp_path / "own_code")
    add(own_code, lost)
    refused(lambda: load_model(settings(own_code, trust_remote_code=True)), re.escape(lost))


@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_weights_that_no_model_uses_are_not_missed(kind: str, tmp_path: Path) -> None:
    """Of layers that predict several tokens, rotary frequencies, and scales of activations and caches."""
    folders = dict(zip(("plain", "fp8"), quantised.save("deepseek_v3", "fp8", tmp_path), strict=True))
    expected, _ = load_model(settings(folders["plain"]))
    added = (
        "mtp.fc.weight",
        "model.mtp_block.0.input_layernorm.weight",
        "model.layers.3.eh_proj.weight",
        "model.layers.3.input_layernorm.weight",
        "model.layers.1.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.k_scale",
        "model.layers.1.self_attn.v_proj.v_scale",
        "model.layers.1.self_attn.o_proj.input_scale",
    )
    add(folders[kind], *added)
    models = [load_model(settings(folders[kind]))[0]]
    if kind == "plain":
        streamed, _ = open_streamed(settings(folders[kind]))
        with streamed.layer(1) as layer:
            assert torch.equal(layer.mlp.experts.down_proj, expected.model.layers[1].mlp.experts.down_proj)
    for model in models:
        assert torch.equal(model(input_ids=tiny.tokens()).logits, expected(input_ids=tiny.tokens()).logits)


def test_experts_that_transformers_builds_otherwise() -> None:
    model = tiny.build("olmoe")
    experts: Any = moe_layers(model)[1].experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.flatten(0, 1))
    refused(lambda: moe_layers(model), r"layers\.1\.mlp\.experts is not a stack of experts")


def test_the_files_that_transformers_reads_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = ["config.json", "additional_chat_templates/tool_use.jinja", "original/model.safetensors", "model.bin"]
    asked: list[str] = []

    def download(*_: Any, allow_patterns: Any = None, ignore_patterns: Any = None, **__: Any) -> str:
        asked.extend(filter_repo_objects(there, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert configuration_folder(settings("some/model")) == tmp_path
    assert asked == there[:2]


def test_a_folder_has_no_revision(folder: Path) -> None:
    refused(lambda: check(settings(folder, revision="main")), r"model\.revision=main .*: expected null")


@pytest.mark.parametrize(
    ("stated", "method"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_quantised_checkpoints_are_recognised(
    folder: Path, stated: dict[str, Any], method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reconfigure(folder, quantization_config=stated)
    assert quantization(settings(folder)) == method
    assert inspect.main(["model=local", f"model.path={folder}"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"criteria of channels none, for its weights are stored as {method}" in said
    assert "exports natural, padded" in said
    assert "reap" in said and "aimer" not in said


def test_a_quantisation_whose_package_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("Loading needs a thing\n(`pip install thing`)")

    monkeypatch.setattr(tiny.AutoModelForCausalLM, "from_pretrained", missing)
    with pytest.raises(ImportError):
        load_model(settings(folder))
    reconfigure(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(lambda: load_model(settings(folder)), r"stored as gptq.*\(`pip install thing`\)")


def observed(model: Any) -> dict[int, dict[str, torch.Tensor]]:
    ids = tiny.tokens()
    plain = model(input_ids=ids).logits
    with Observer(model, ForwardTap) as observer:
        assert torch.equal(model(input_ids=ids).logits, plain)
    return observer.layers()


@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("olmoe", "fp8", {}),
        ("gpt_oss", "mxfp4", {}),
        ("qwen2_moe", "compressed_fp8", {}),
        ("qwen2_moe", "w4a16", {}),
        # the last block of a matrix may be smaller: two scales for 12 rows are of blocks of 8 and 4 rows, not two of 6
        ("olmoe", "fp8", {"intermediate_size": 12}),
        ("olmoe", "fp8", {"intermediate_size": 20}),
        ("qwen3_moe", "fp8", {"head_dim": 6}),
        ("deepseek_v3", "fp8", {"kv_lora_rank": 12}),
    ],
)
def test_quantised_experts_are_scored_as_the_numbers_they_stand_for(
    name: str, kind: str, changes: dict[str, int], tmp_path: Path
) -> None:
    if kind in ("compressed_fp8", "w4a16"):
        pytest.importorskip("compressed_tensors")
    plain, stored = quantised.save(name, kind, tmp_path, **changes)
    if kind == "w4a16":  # the package rounds four-bit numbers to the precision of their scales
        tensors = load_file(plain / "model.safetensors")
        rounded = {name: tensor.bfloat16().float() if "_proj.w" in name else tensor for name, tensor in tensors.items()}
        save_file(rounded, plain / "model.safetensors", {"format": "pt"})
    expected, found = (observed(load_model(settings(folder))[0]) for folder in (plain, stored))
    for index, named in expected.items():
        assert all(torch.equal(found[index][name], tensor) for name, tensor in named.items())


@pytest.mark.parametrize("block", [[8, 4], [16, 16], [8], "8"])
def test_scales_of_other_blocks_than_the_configuration_states_are_refused(block: object, tmp_path: Path) -> None:
    _, stored = quantised.save("olmoe", "fp8", tmp_path)
    reconfigure(stored, quantization_config={**quantised.FORMATS["fp8"].config, "weight_block_size": block})
    refused(lambda: load_model(settings(stored)), "stored as fp8")


@pytest.mark.parametrize("kind", ["fp8_matrix", "w4a16_asymmetric", "nf4"])
def test_quantised_experts_that_transformers_does_not_read_are_refused(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes" if kind == "nf4" else "compressed_tensors")
    _, stored = quantised.save("qwen2_moe", kind, tmp_path)
    refused(lambda: load_model(settings(stored)), f"stored as {quantised.FORMATS[kind].config['quant_method']}")


def test_kernels_for_eight_bits_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU transformers would run the experts by functions that moe_lab cannot observe."""
    asked: list[bool] = []
    quantizer = quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer
    original = quantizer.validate_environment

    def validate(self: Any, *words: Any, **named: Any) -> None:
        asked.append(self.quantization_config.dequantize)
        original(self, *words, **named)

    monkeypatch.setattr(quantizer, "validate_environment", validate)
    _, stored = quantised.save("olmoe", "fp8", tmp_path)
    load_model(settings(stored))
    assert asked == [True]


def test_weights_of_mxfp4_are_not_scored(tmp_path: Path) -> None:
    _, stored = quantised.save("gpt_oss", "mxfp4", tmp_path)
    refused(lambda: weigh_experts(stored, fingerprint={}), r"down_proj_blocks \(U8\)")


def test_four_bits_of_bitsandbytes_can_be_scored(tmp_path: Path) -> None:
    """transformers leaves stacked experts as they are: the statistics are theirs, behind another attention."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    tiny.save("olmoe", tmp_path / "plain", hidden_size=64)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = tiny.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=four, device_map="cpu")
    shutil.copytree(tmp_path / "plain", tmp_path / "four", ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(tmp_path / "four")
    again, _ = load_model(settings(tmp_path / "four"))
    assert again.model.layers[0].self_attn.q_proj.weight.dtype == torch.uint8
    plain, found = observed(load_model(settings(tmp_path / "plain"))[0]), observed(again)
    for index, named in found.items():
        assert int(named["tokens"].sum()) == 4 * tiny.tokens().numel() == int(plain[index]["tokens"].sum())
        assert all(bool(tensor.isfinite().all()) for tensor in named.values())
        assert not torch.equal(named["output_sum"], plain[index]["output_sum"])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"_attn_implementation": "owner/kernels"}, "_attn_implementation=owner/kernels"),
        ({"attn_implementation": {"": "owner/kernels@v1:attention"}}, "attn_implementation=owner/kernels"),
        ({"sub_config": {"_attn_implementation": "paged|owner/kernels"}}, "_attn_implementation=paged|owner/kernels"),
        ({"experts_implementation": "owner/experts"}, "experts_implementation=owner/experts"),
    ],
)
def test_code_of_the_hub_is_never_fetched_for_a_config_json(
    changes: dict[str, Any], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[object] = []
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *words, **_: fetched.append(words))
    tiny.save("olmoe", tmp_path)
    reconfigure(tmp_path, **changes)
    for attempt in (check, configuration):
        with pytest.raises(UserError) as caught:
            attempt(settings(tmp_path))
        assert field in str(caught.value) and "trust_remote_code" in str(caught.value)
    check(settings(tmp_path, trust_remote_code=True))
    assert not fetched


def configuration(of: ModelConfig) -> Any:
    """What `python -m moe_lab.inspect` builds."""
    return skeleton(Path(of.path))


def test_an_adapter_beside_a_model_does_not_fetch_another_one(tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/other"}))
    refused(lambda: check(settings(tmp_path)), "adapter_config.json")


@pytest.mark.parametrize("word", ["ratio=2", "model.threads=0", "calibration.tokens=-1", "++a.b=1"])
def test_inspecting_a_model_takes_no_value_that_a_study_refuses(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(["model=pocket_olmoe", word]) == 2
    assert "expected" in (said := capsys.readouterr().err) or "in [0, 1)" in said or "known" in said
