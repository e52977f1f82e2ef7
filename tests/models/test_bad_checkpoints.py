"""What is wrong with a checkpoint, a plan or a machine is said in one sentence, and nothing
half-written is left."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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
from moe_lab.models import files
from moe_lab.models.config_json import quantization
from moe_lab.models.facts import facts
from moe_lab.models.files import check_model_path, configuration_folder, local_folder
from moe_lab.models.load import load_model
from moe_lab.models.streamed import open_streamed
from moe_lab.models.transformers_private import attention_implementation, configuration
from moe_lab.statistics.forward import ForwardHook
from moe_lab.statistics.observe import collect_statistics
from moe_lab.statistics.streaming import stream
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
    streamed, _ = open_streamed(settings(folders[kind]))
    with streamed.layer(1) as layer:
        assert torch.equal(
            layer.mlp.experts.down_proj, expected.model.layers[1].mlp.experts.down_proj
        )


def test_the_files_that_transformers_reads_are_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the weights, the shards of the index; no second copy of them in another format."""
    described = [
        "config.json",
        "additional_chat_templates/tool_use.jinja",
        "encoding/messages.py",
        "LICENSE.md",
    ]
    shards = ["model-00001-of-00002.safetensors", "below/b.safetensors"]
    others = [
        "._config.json",
        "results_2026.json",
        "notes.txt",
        "model.bin",
        "consolidated.safetensors",
        "consolidated-00001-of-00002.safetensors",
        "model.fp16.safetensors",
        "original/model.safetensors",
    ]
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    monkeypatch.setattr(files, "hub_json", lambda *_: index)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", download := Mock(return_value=str(tmp_path))
    )

    def downloaded() -> list[str]:
        patterns = {
            name: download.call_args.kwargs[name] for name in ("allow_patterns", "ignore_patterns")
        }
        return list(filter_repo_objects([*described, *shards, *others], **patterns))

    assert configuration_folder(settings("some/model")) == tmp_path
    assert downloaded() == described
    with pytest.raises(UserError):  # the folder is empty
        files.local_folder(settings("some/model"))
    assert downloaded() == [*described, *shards]
    index.clear()
    with pytest.raises(UserError):
        files.local_folder(settings("some/model"))
    assert downloaded() == [*described, shards[0]]


@pytest.mark.parametrize(
    ("file", "content", "method"),
    [
        *(
            ("config.json", {"quantization_config": {"quant_method": method}}, method)
            for method in ("fp8", "mxfp4", "bitsandbytes")
        ),
        ("config.json", {"compression_config": {"quant_method": "awq"}}, "awq"),
        ("config.json", {"quantization": {"bits": 4}}, "quantised weights"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "nvfp4"),
        ("quantize_config.json", {"bits": 4}, "quantised weights"),
    ],
)
def test_quantised_checkpoints_are_recognised(
    folder: Path,
    file: str,
    content: dict[str, Any],
    method: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = json.loads((folder / file).read_text()) if file == "config.json" else {}
    (folder / file).write_text(json.dumps({**config, **content}))
    with pytest.raises(UserError, match=f"quantization_config={method}"):  # all are in fp32
        quantization(settings(folder))
    for shard in folder.glob("*.safetensors*"):
        shard.unlink()
    assert quantization(settings(folder)) == method
    assert inspect.main(["model=local", f"model.path={folder}"]) == 0
    output = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"criteria of channels none, for its weights are stored as {method}" in output
    assert "exports natural, padded" in output
    assert "reap" in output
    assert "aimer" not in output


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "changes"),
    [
        *(("olmoe", "fp8", dtype, {}) for dtype in ("float32", "bfloat16")),
        *(("gpt_oss", "mxfp4", dtype, {}) for dtype in ("float32", "bfloat16")),
        *(
            ("qwen2_moe", kind, "bfloat16", {})
            for kind, stored in quantised.FORMATS.items()
            if stored.decode is not None
        ),
        # the last block of a matrix may be smaller: two scales for 12 rows are of blocks of 8 and 4
        # rows, not two of 6
        ("olmoe", "fp8", "float32", {"intermediate_size": 12}),
        ("qwen3_moe", "fp8", "bfloat16", {"head_dim": 6}),
        ("qwen3_moe", "fp8", "float32", {"dtype": torch.bfloat16}),
        ("deepseek_v3", "fp8", "float32", {"kv_lora_rank": 12}),
    ],
)
def test_scores_are_of_the_dequantised_experts(
    name: str, kind: str, dtype: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """To the bit, of the whole model and layer by layer."""
    changes = {"dtype": getattr(torch, dtype), **changes}
    plain, stored = quantised.save(name, kind, tmp_path, **changes)
    expected, actual = (
        collect_statistics(
            load_model(settings(folder, dtype=dtype))[0],
            ForwardHook,
            tiny.batches(),
            out=tmp_path / f"{folder.name}_sums",
        )
        for folder in (plain, stored)
    )
    naive.assert_sums_close(actual.layers, expected.layers)
    model, _ = open_streamed(settings(stored, dtype=dtype))
    streamed = stream(model, ForwardHook, tiny.batches(), out=tmp_path / "streamed")
    naive.assert_sums_close(streamed.layers, expected.layers)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *(("fp8", {"weight_block_size": block}) for block in ([8, 4], [16, 16], [8], "8")),
        ("w4a16", {"config_groups": {}}),
        ("w4a16_asymmetric", {}),
    ],
)
def test_unknown_layouts_are_refused_before_weights_are_read(
    kind: str, changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, stored = quantised.save("qwen2_moe", kind, tmp_path)
    reconfigure(stored, quantization_config={**quantised.FORMATS[kind].config, **changes})
    for read in (load_model, open_streamed, facts):
        refused(lambda read=read: read(settings(stored)), r"_proj\.weight")  # type: ignore[misc]
    assert inspect.main(["model=local", f"model.path={stored}"]) == 1
    assert "_proj" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "part", "tensor"),
    [
        ("nvfp4", "weight_scale_2", None),
        ("nvfp4", "weight_scale", torch.ones(32, 2)),
        ("compressed_mxfp4", "weight_scale", torch.full((32, 2), 127, dtype=torch.uint8)),
        ("fp8_matrix", "weight_scale", None),
        ("fp8_matrix", "weight_scale", torch.ones(3)),
    ],
)
def test_unknown_scales_are_named(
    kind: str, part: str, tensor: torch.Tensor | None, tmp_path: Path
) -> None:
    _, stored = quantised.save("qwen2_moe", kind, tmp_path)
    name = f"model.layers.1.self_attn.q_proj.{part}"
    tiny.rewrite(
        stored,
        lambda tensors: tensors.pop(name) if tensor is None else tensors.update({name: tensor}),
    )
    refused(lambda: open_streamed(settings(stored)), r"layers\.1\.self_attn\.q_proj\.weight is")


def test_quantised_caches_are_no_quantised_weights(folder: Path) -> None:
    algorithms = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": algorithms}))
    assert quantization(settings(folder)) is None


@pytest.mark.parametrize(
    "fields", [{"dtype": "torch.bfloat16"}, {"torch_dtype": "auto"}, {"quantization_config": {}}]
)
def test_fields_that_transformers_cannot_read_are_read(
    fields: dict[str, Any], folder: Path
) -> None:
    expected = tiny.logits(load_model(settings(folder))[0])
    reconfigure(folder, **fields)
    file = folder / "config.json"
    file.write_text("\ufeff" + file.read_text())
    assert torch.equal(tiny.logits(load_model(settings(folder))[0]), expected)


def test_kernels_for_eight_bits_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU transformers would run the experts by functions that moe_lab cannot observe."""
    monkeypatch.setattr(
        quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer,
        "validate_environment",
        lambda *_, **__: pytest.fail("transformers knows of the quantisation"),
    )
    _, stored = quantised.save("olmoe", "fp8", tmp_path)
    load_model(settings(stored))
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
    "changes",
    [
        {"_attn_implementation": "owner/kernels"},
        {"experts_implementation": "owner/experts"},
    ],
)
def test_kernels_that_a_config_json_names_are_never_fetched(
    changes: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tiny.logits(load_model(settings(folder))[0])
    monkeypatch.setattr(hub_kernels, "get_kernel", fetch := Mock())
    reconfigure(folder, **changes)
    assert torch.equal(tiny.logits(load_model(settings(folder))[0]), expected)
    composite = configuration({"model_type": "qwen3_5_moe", "text_config": changes})
    assert attention_implementation(SimpleNamespace(config=composite)) is None
    assert not fetch.called


def test_folder_with_a_revision_or_an_adapter_is_refused(folder: Path) -> None:
    refused(
        lambda: check_model_path(settings(folder, revision="main")),
        r"model\.revision=main .*: expected null",
    )
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "owner/other"})
    )
    refused(lambda: check_model_path(settings(folder)), "adapter.*owner/other")
    (folder / "config.json").unlink()
    refused(lambda: check_model_path(settings(folder)), "adapter.*owner/other")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("snapshots/c0ffee/config.json", "hub's cache"),
        ("snapshots", "hub's cache"),
        ("models--owner--name/blobs", "hub's cache"),
        ("model-Q4_K_M.gguf", "gguf.*llama.cpp"),
        ("params.json", "params.json"),
        ("checkpoint-500/config.json", "checkpoint-500"),
        ("model_index.json", "diffusers"),
        ("pytorch_model.bin", "pytorch_model.bin"),
        ("model-00001-of-00002.safetensors", "model-00001-of-00002.safetensors"),
    ],
)
def test_what_is_no_checkpoint_is_called_what_it_is(path: str, field: str, tmp_path: Path) -> None:
    if "." in Path(path).name:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("{}")
        refused(lambda: check_model_path(settings(tmp_path / path)), "is a file: expected a folder")
    else:
        (tmp_path / path).mkdir(parents=True)
        if path == "snapshots":
            refused(lambda: check_model_path(settings(tmp_path)), "has no config.json")
            (tmp_path / path / "c0ffee").mkdir()
    refused(lambda: check_model_path(settings(tmp_path)), field)


def test_what_is_no_checkpoint_on_the_hub_is_called_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"README.md": (1, ""), "Q4/model.gguf": (1, "")}
    monkeypatch.setattr(files, "stated_files", lambda *_: names)
    for attempt in (local_folder, inspect.describe):
        refused(partial(attempt, settings("owner/name")), "owner/name .*Q4/model.gguf.*llama.cpp")
    names["config.json"] = (1, "")
    check_model_path(settings("owner/name"))


@pytest.mark.parametrize("name", ["model-00003-of-00007.safetensors", "tokenizer.json"])
def test_pointers_of_git_lfs_are_called_that(name: str, folder: Path) -> None:
    (folder / name).write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4983213\n"
    )
    refused(lambda: check_model_path(settings(folder)), f"{name} is a git-lfs pointer")


def test_numbers_too_large_for_float16_name_the_setting(tmp_path: Path) -> None:
    """A weight, and a sum of products."""
    tiny.save("olmoe", tmp_path)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    weights = load_file(tmp_path / "model.safetensors")
    for weight, message in ((7e4, "down_proj"), (6e4, "NaN or Inf in layer 1")):
        save_file(
            {**weights, name: torch.full_like(weights[name], weight)},
            tmp_path / "model.safetensors",
            {"format": "pt"},
        )
        refused(
            lambda: naive_pass(tmp_path, dtype="float16"), f"{message}.*dtype=float16.*bfloat16"
        )
        naive_pass(tmp_path, dtype="float32")


def naive_pass(folder: Path, dtype: str) -> None:
    model, _ = load_model(settings(folder, dtype=dtype))
    ids = tiny.tokens()
    collect_statistics(model, ForwardHook, [(ids, torch.ones_like(ids, dtype=torch.bool))])
