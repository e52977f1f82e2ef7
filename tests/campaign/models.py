"""Damaged model folders: each must be refused with one sentence that names the file or the field,
without a trace."""

import json
import shutil
import struct
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file, save_file

from moe_lab.allocation.problem import limits
from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.checkpoint import INDEX
from moe_lab.models.facts import facts
from moe_lab.models.files import check_model_path, check_use
from moe_lab.models.load import load_model

from .commands import Outcome

SHARD = "model-00002-of-00007.safetensors"
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 99\n"


@dataclass(frozen=True)
class Damage:
    """A damage to a tiny OLMoE in seven files, with a tokenizer. `apply` damages the folder. The
    message must contain one of `message_parts`."""

    name: str
    apply: Callable[[Path], object]
    message_parts: tuple[str, ...]


def reconfigure(folder: Path, **changes: object) -> None:
    """Change fields of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def reindex(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    """Change the index: tensor -> file."""
    content = json.loads((folder / INDEX).read_text())
    change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


def pickle_weights(folder: Path) -> None:
    """Replace all weights by a file of pickled weights."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def rewrite(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Change one tensor. If `change` returns None, the tensor is removed from its file and from the
    index."""
    shard = json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(folder / shard)
    new_tensor = change(tensors.pop(name))
    if new_tensor is None:
        reindex(folder, lambda index: index.pop(name))
    else:
        tensors[name] = new_tensor.contiguous()
    save_file(tensors, folder / shard, {"format": "pt"})


def _replace_head(folder: Path) -> None:
    """Replace the head for tokens by that of a classifier."""
    shard = json.loads((folder / INDEX).read_text())["weight_map"]["lm_head.weight"]
    tensors = load_file(folder / shard)
    tensors["score.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, folder / shard, {"format": "pt"})
    reindex(folder, lambda index: index.update({"score.weight": index.pop("lm_head.weight")}))


def _replace_maximum(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.masked_fill(tensor == tensor.max(), value)


def _write(name: str, content: str | bytes) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def _replace(file: Path, put: Callable[[Path], object]) -> None:
    file.unlink()
    put(file)


def _config_damages(field: str, *values: object) -> list[Damage]:
    """A damage for each invalid value of a field of config.json."""
    message_parts = (field, "config.json", "is not supported")
    return [
        Damage(
            f"{field}={json.dumps(value)}",
            lambda f, value=value: reconfigure(f, **{field: value}),
            message_parts,
        )
        for value in values
    ]


def _file_damages(file: str, contents: dict[str, str | bytes], *message_parts: str) -> list[Damage]:
    """A damage for each of `contents` (description -> content) that replaces the content of a
    file."""
    return [
        Damage(f"{file} {description}", _write(file, content), (file, *message_parts))
        for description, content in contents.items()
    ]


def _header(**tensor: object) -> bytes:
    """Content of a file of weights with one tensor in three bytes."""
    header = json.dumps({"a": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(3)


INVALID_JSON: dict[str, str | bytes] = {
    "cut": "{",
    "a list": "[]",
    "null": "null",
    "empty": "",
    "no text": bytes([200, 201, 10]),
}
DAMAGES = [
    Damage("an empty folder", lambda f: [file.unlink() for file in f.iterdir()], ("config.json",)),
    Damage("no folder", shutil.rmtree, ("model.path",)),
    Damage("config.json missing", lambda f: (f / "config.json").unlink(), ("config.json",)),
    Damage(
        "config.json a folder", lambda f: _replace(f / "config.json", Path.mkdir), ("config.json",)
    ),
    *_file_damages("config.json", {**INVALID_JSON, "without fields": "{}"}),
    *_config_damages("model_type", 7, None, "llama4_text", "jetmoe", "llama", "bert", "novel"),
    *_config_damages("num_hidden_layers", "three", -1, 0, 2.5, 4),
    *_config_damages("hidden_size", "wide", -128, 0, 33, 64),
    *_config_damages("num_experts", "many", -1, 0, 12),
    *_config_damages("num_experts_per_tok", "many", -1, 0, 99),
    *_config_damages("intermediate_size", "wide", -1, 0, 48),
    *_config_damages("vocab_size", "all", -1, 10, float("inf")),
    *_config_damages("num_attention_heads", "some", 0, -4, 5),
    *_config_damages("hidden_act", "nobody", 7),
    *_config_damages("dtype", "bf16"),
    *_config_damages("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
    Damage(
        "quantised",
        lambda f: reconfigure(f, quantization_config={"quant_method": "gptq"}),
        ("gptq",),
    ),
    Damage(
        "code of its own that is not there",
        lambda f: reconfigure(f, model_type="novel", auto_map={"AutoConfig": "x.Y"}),
        ("model.trust_remote_code",),
    ),
    Damage(
        "no weights",
        lambda f: [file.unlink() for file in f.glob("*.safetensors*")],
        ("safetensors",),
    ),
    Damage("pickled weights", pickle_weights, ("safetensors",)),
    *(
        Damage(f"a file of weights {what}", lambda f, change=change: change(f / SHARD), (SHARD,))
        for what, change in {
            "missing": Path.unlink,
            "that leads nowhere": lambda file: _replace(
                file, lambda file: file.symlink_to("nowhere")
            ),
            "that is a folder": lambda file: _replace(file, Path.mkdir),
            "cut by 5 bytes": lambda file: file.write_bytes(file.read_bytes()[:-5]),
            "cut to nothing": lambda file: file.write_bytes(b""),
            "and 5 bytes": lambda file: file.write_bytes(file.read_bytes() + b"12345"),
        }.items()
    ),
    *_file_damages(
        SHARD,
        {
            "a pointer": POINTER,
            "a page": "<html>404</html>",
            "zeros": bytes(4096),
            "no header": b"\x08" + bytes(7) + b"notjson!",
            "of another type": _header(dtype="F7", shape=[3], data_offsets=[0, 3]),
            "of another size": _header(dtype="U8", shape=[4], data_offsets=[0, 3]),
            "with a gap": _header(dtype="U8", shape=[2], data_offsets=[1, 3]),
        },
    ),
    *_file_damages(
        INDEX,
        {**INVALID_JSON, "without tensors": "{}", "of nothing": '{"weight_map": {}}'},
        "index",
        SHARD,
    ),
    Damage(
        "the index lacks a tensor", lambda f: reindex(f, lambda index: index.pop(EXPERT)), (EXPERT,)
    ),
    Damage(
        "the index has one more",
        lambda f: reindex(f, lambda index: index.update(a=SHARD)),
        ("tensor a",),
    ),
    Damage(
        "the index leads outside",
        lambda f: reindex(f, lambda index: index.update({EXPERT: "../x.safetensors"})),
        ("x.safetensors",),
    ),
    Damage(
        "a tensor in two files",
        lambda f: save_file(
            {**load_file(f / SHARD), "model.norm.weight": torch.ones(32)}, f / SHARD
        ),
        ("model.norm.weight",),
    ),
    Damage(
        "a tensor of no file",
        lambda f: rewrite(f, "model.norm.weight", lambda t: None),
        ("model.norm.weight",),
    ),
    Damage("an expert of no file", lambda f: rewrite(f, EXPERT, lambda t: None), ("experts",)),
    Damage(
        "an expert of another shape", lambda f: rewrite(f, EXPERT, lambda t: t[:-8]), ("experts",)
    ),
    Damage("a router of another shape", lambda f: rewrite(f, ROUTER, lambda t: t[:-1]), (ROUTER,)),
    Damage(
        "an expert of NaN",
        lambda f: rewrite(f, EXPERT, _replace_maximum(float("nan"))),
        ("layers.1.mlp.experts",),
    ),
    Damage(
        "a router that is infinite",
        lambda f: rewrite(f, ROUTER, _replace_maximum(float("-inf"))),
        (ROUTER,),
    ),
    Damage("tokenizer.json missing", lambda f: (f / "tokenizer.json").unlink(), ("tokenizer",)),
    Damage(
        "no tokenizer", lambda f: [file.unlink() for file in f.glob("tokenizer*")], ("tokenizer",)
    ),
    *_file_damages("tokenizer.json", {**INVALID_JSON, "without fields": "{}"}, "tokenizer"),
    *_file_damages("tokenizer_config.json", INVALID_JSON, "tokenizer"),
    *_file_damages("generation_config.json", INVALID_JSON),
    Damage("a classifier", _replace_head, ("score.weight",)),
    Damage(
        "no head",
        lambda f: rewrite(f, "lm_head.weight", lambda t: None),
        ("lm_head.weight",),
    ),
]


def _outcome(row: Damage, original: Path, folder: Path) -> Outcome:
    """Outcome of the checks before a study, of its first step, and of loading, with the damaged
    model in this process. What only a step refuses is no refusal, unless it is about numbers."""
    row.apply(shutil.copytree(original, folder))
    settings = ModelConfig(name="m", path=str(folder), device="cpu")
    is_start = True
    try:
        check_model_path(settings)
        check_use(settings, streams=True)
        is_start = False
        limits(facts(settings)["layers"])
        load_model(settings)
    except UserError as error:
        return Outcome(2 if is_start or "finite" in str(error) else 1, str(error))
    except Exception:  # noqa: BLE001 - whatever else is raised is a trace that a user would see
        return Outcome(1, traceback.format_exc())
    return Outcome(0, "it was loaded")


def failures() -> list[str]:
    """A sentence for each of DAMAGES that is not refused as it should be."""
    sentences = []
    with tempfile.TemporaryDirectory(prefix="moe_lab_campaign-") as name:
        tiny.save("olmoe", original := Path(name) / "original", shard="100KB")
        for number, row in enumerate(DAMAGES):
            (folder_of_case := Path(name) / str(number)).mkdir()
            outcome = _outcome(row, original, folder_of_case / "model")
            if not outcome.is_refusal(row.message_parts):
                sentences.append(f"{row.name}: {outcome}")
            shutil.rmtree(folder_of_case)
    return sentences
