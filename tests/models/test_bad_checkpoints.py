"""What is wrong with a checkpoint, a plan or a machine is said in one sentence, and nothing
half-written is left."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import naive
import pytest
import quantised
import tiny
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tiny import settings
from transformers.integrations import hub_kernels
from transformers.quantizers import quantizer_finegrained_fp8

from moe_lab import inspect
from moe_lab.errors import UserError
from moe_lab.models.config_json import quantization
from moe_lab.models.facts import facts
from moe_lab.models.files import check_model_path, configuration_folder
from moe_lab.models.load import load_model, skeleton
from moe_lab.models.streamed import open_streamed
from moe_lab.statistics.forward import ForwardHook
from moe_lab.statistics.weights import expert_weight_sums
from tests.campaign.models import reconfigure

pytestmark = pytest.mark.slow


def refused(attempt: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        attempt()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fields", "stated", "lost"),
    [
        ("glm4_moe", {"use_qk_norm": True}, {"use_qk_norm": False}, "self_attn.k_norm.weight"),
        ("qwen3_moe", {"attention_bias": True}, {"attention_bias": False}, "self_attn.k_proj.bias"),
        ("ernie4_5_moe", {}, {"moe_num_shared_experts": 0}, "shared_experts.down_proj.weight"),
        (
            "deepseek_v3",
            {},
            {"num_hidden_layers": 2, "num_nextn_predict_layers": 1},
            "model.layers.2.",
        ),
        ("olmoe", {}, {"hidden_size": 33}, "config.json asks for"),
    ],
)
def test_unexpected_weights_are_named_before_reading(
    name: str,
    fields: dict[str, Any],
    stated: dict[str, Any],
    lost: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny.save(name, tmp_path, **fields)
    load_model(settings(tmp_path))
    reconfigure(tmp_path, **stated)
    monkeypatch.setattr(
        tiny.AutoModelForCausalLM,
        "from_pretrained",
        lambda *_, **__: pytest.fail("weights were read"),
    )
    for read in (load_model, open_streamed, facts):
        refused(lambda read=read: read(settings(tmp_path)), re.escape(lost))  # type: ignore[misc]
    assert inspect.main(["model=local", f"model.path={tmp_path}"]) == 1


@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_weights_that_no_model_uses_are_not_missed(kind: str, tmp_path: Path) -> None:
    """Of layers that predict several tokens, rotary frequencies, and scales of activations and
    caches."""
    folders = dict(
        zip(("plain", "fp8"), quantised.save("deepseek_v3", "fp8", tmp_path), strict=True)
    )
    expected, _ = load_model(settings(folders["plain"]))
    added = """
        mtp.fc.weight model.mtp_block.0.input_layernorm.weight model.layers.3.eh_proj.weight
        model.layers.3.input_layernorm.weight model.layers.1.self_attn.rotary_emb.inv_freq
        model.layers.1.self_attn.k_scale model.layers.1.self_attn.v_proj.v_scale
        model.layers.1.self_attn.o_proj.input_scale
    """
    tiny.rewrite(
        folders[kind],
        lambda tensors: tensors.update({name: torch.ones(2) for name in added.split()}),
    )
    model, _ = load_model(settings(folders[kind]))
    assert torch.equal(tiny.logits(model), tiny.logits(expected))
    if kind == "plain":
        streamed, _ = open_streamed(settings(folders[kind]))
        with streamed.layer(1) as layer:
            assert torch.equal(
                layer.mlp.experts.down_proj, expected.model.layers[1].mlp.experts.down_proj
            )


def test_the_files_that_transformers_reads_are_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = [
        "config.json",
        "additional_chat_templates/tool_use.jinja",
        "original/model.safetensors",
        "model.bin",
    ]
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", download := Mock(return_value=str(tmp_path))
    )
    assert configuration_folder(settings("some/model")) == tmp_path
    patterns = {
        name: download.call_args.kwargs.get(name) for name in ("allow_patterns", "ignore_patterns")
    }
    assert list(filter_repo_objects(names, **patterns)) == names[:2]


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "bitsandbytes"])
def test_quantised_checkpoints_are_recognised(
    folder: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reconfigure(folder, quantization_config={"quant_method": method})
    assert quantization(settings(folder)) == method
    assert inspect.main(["model=local", f"model.path={folder}"]) == 0
    output = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"criteria of channels none, for its weights are stored as {method}" in output
    assert "exports natural, padded" in output
    assert "reap" in output
    assert "aimer" not in output


@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("olmoe", "fp8", {}),
        ("gpt_oss", "mxfp4", {}),
        ("qwen2_moe", "compressed_fp8", {}),
        ("qwen2_moe", "w4a16", {}),
        # the last block of a matrix may be smaller: two scales for 12 rows are of blocks of 8 and 4
        # rows, not two of 6
        ("olmoe", "fp8", {"intermediate_size": 12}),
        ("qwen3_moe", "fp8", {"head_dim": 6}),
        ("deepseek_v3", "fp8", {"kv_lora_rank": 12}),
    ],
)
def test_scores_are_of_the_dequantised_experts(
    name: str, kind: str, changes: dict[str, int], tmp_path: Path
) -> None:
    if kind in ("compressed_fp8", "w4a16"):
        pytest.importorskip("compressed_tensors")
    plain, stored = quantised.save(name, kind, tmp_path, **changes)
    if kind == "w4a16":  # the package rounds four-bit numbers to the precision of their scales
        tensors = load_file(plain / "model.safetensors")
        rounded = {
            name: tensor.bfloat16().float() if "_proj.w" in name else tensor
            for name, tensor in tensors.items()
        }
        save_file(rounded, plain / "model.safetensors", {"format": "pt"})
    expected, actual = (
        naive.hook_sums(load_model(settings(folder))[0], ForwardHook) for folder in (plain, stored)
    )
    naive.assert_sums_close(actual, expected)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *(("fp8", {"weight_block_size": block}) for block in ([8, 4], [16, 16], [8], "8")),
        *((kind, {}) for kind in ("fp8_matrix", "w4a16_asymmetric", "nf4")),
    ],
)
def test_unknown_quantised_experts_are_refused(
    kind: str, changes: dict[str, object], tmp_path: Path
) -> None:
    if kind != "fp8":
        pytest.importorskip("bitsandbytes" if kind == "nf4" else "compressed_tensors")
    _, stored = quantised.save("qwen2_moe", kind, tmp_path)
    config = quantised.FORMATS[kind].config
    reconfigure(stored, quantization_config={**config, **changes})
    refused(lambda: load_model(settings(stored)), f"stored as {re.escape(config['quant_method'])}")


def test_kernels_for_eight_bits_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU transformers would run the experts by functions that moe_lab cannot observe."""
    answers: list[bool] = []

    def validate(self: Any, *words: Any, **named: Any) -> None:
        answers.append(self.quantization_config.dequantize)

    monkeypatch.setattr(
        quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer, "validate_environment", validate
    )
    _, stored = quantised.save("olmoe", "fp8", tmp_path)
    load_model(settings(stored))
    assert answers == [True]
    _, stored = quantised.save("gpt_oss", "mxfp4", tmp_path / "mxfp4")
    refused(lambda: expert_weight_sums(stored), "down_proj_blocks is stored as U8")


def test_four_bits_of_bitsandbytes_can_be_scored(tmp_path: Path) -> None:
    """transformers leaves stacked experts as they are: the statistics are theirs, behind another
    attention."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    plain = tmp_path / "plain"
    stored = tmp_path / "four"
    tiny.save("olmoe", plain, hidden_size=64)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = tiny.AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=four, device_map="cpu"
    )
    shutil.copytree(plain, stored, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(stored)
    expected, actual = (
        naive.hook_sums(load_model(settings(folder))[0], ForwardHook) for folder in (plain, stored)
    )
    for index, tensors in actual.items():
        assert torch.equal(tensors["tokens"].sum(), expected[index]["tokens"].sum())
        assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
        assert not torch.equal(tensors["output_sum"], expected[index]["output_sum"])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"_attn_implementation": "owner/kernels"}, "_attn_implementation=owner/kernels"),
        (
            {"attn_implementation": {"": "owner/kernels@v1:attention"}},
            "attn_implementation=owner/kernels",
        ),
        (
            {"sub_config": {"_attn_implementation": "paged|owner/kernels"}},
            "_attn_implementation=paged|owner/kernels",
        ),
        ({"experts_implementation": "owner/experts"}, "experts_implementation=owner/experts"),
    ],
)
def test_code_of_the_hub_is_never_fetched_for_a_config_json(
    changes: dict[str, Any], field: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_kernels, "get_kernel", fetch := Mock())
    reconfigure(folder, **changes)
    for attempt in (lambda: check_model_path(settings(folder)), lambda: skeleton(folder)):
        refused(
            attempt, rf"{re.escape(field)}.*trust_remote_code|trust_remote_code.*{re.escape(field)}"
        )
    check_model_path(settings(folder, trust_remote_code=True))
    assert not fetch.called


def test_folder_with_a_revision_or_an_adapter_is_refused(folder: Path) -> None:
    refused(
        lambda: check_model_path(settings(folder, revision="main")),
        r"model\.revision=main .*: expected null",
    )
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "owner/other"})
    )
    refused(lambda: check_model_path(settings(folder)), "adapter_config.json")
