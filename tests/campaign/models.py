"""Broken model folders: each is refused in one sentence that names the file or the field, and by no
trace."""

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
from moe_lab.models.files import check_model_path
from moe_lab.models.load import load_model

from .commands import Ended

SHARD = "model-00002-of-00007.safetensors"
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 99\n"


@dataclass(frozen=True)
class Broken:
    """One damage to a tiny OLMoE in seven files, with a tokenizer. The message must have one of
    `names`."""

    name: str
    damage: Callable[[Path], object]
    names: tuple[str, ...]


def reconfigure(folder: Path, **changes: object) -> None:
    """Change fields of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def reindex(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    """Change which file the index says each tensor is in."""
    content = json.loads((folder / INDEX).read_text())
    change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


def pickled(folder: Path) -> None:
    """Pickled weights in place of all others."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def rewrite(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Change one tensor; None takes it out of its file and out of the index."""
    shard = json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(folder / shard)
    changed = change(tensors.pop(name))
    if changed is None:
        reindex(folder, lambda index: index.pop(name))
    else:
        tensors[name] = changed.contiguous()
    save_file(tensors, folder / shard, {"format": "pt"})


def _with_one(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.masked_fill(tensor == tensor.max(), value)


def _write(name: str, content: str | bytes) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def _replace(file: Path, put: Callable[[Path], object]) -> None:
    file.unlink()
    put(file)


def _of_config(field: str, *values: object) -> list[Broken]:
    """A field of config.json that cannot be."""
    names = (field, "config.json", "is not supported")
    return [
        Broken(
            f"{field}={json.dumps(value)}",
            lambda f, value=value: reconfigure(f, **{field: value}),
            names,
        )
        for value in values
    ]


def _of_file(file: str, contents: dict[str, str | bytes], *names: str) -> list[Broken]:
    """A file that holds something else."""
    return [
        Broken(f"{file} {what}", _write(file, content), (file, *names))
        for what, content in contents.items()
    ]


def _header(**tensor: object) -> bytes:
    """A file of weights with one tensor in three bytes."""
    header = json.dumps({"a": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(3)


NO_JSON: dict[str, str | bytes] = {
    "cut": "{",
    "a list": "[]",
    "null": "null",
    "empty": "",
    "no text": bytes([200, 201, 10]),
}
BROKEN = [
    Broken("an empty folder", lambda f: [file.unlink() for file in f.iterdir()], ("config.json",)),
    Broken("no folder", shutil.rmtree, ("model.path",)),
    Broken("config.json missing", lambda f: (f / "config.json").unlink(), ("config.json",)),
    Broken(
        "config.json a folder", lambda f: _replace(f / "config.json", Path.mkdir), ("config.json",)
    ),
    *_of_file("config.json", {**NO_JSON, "without fields": "{}"}),
    *_of_config("model_type", 7, None, "llama4_text", "jetmoe", "llama", "bert", "novel"),
    *_of_config("num_hidden_layers", "three", -1, 0, 2.5, 4),
    *_of_config("hidden_size", "wide", -128, 0, 33, 64),
    *_of_config("num_experts", "many", -1, 0, 12),
    *_of_config("num_experts_per_tok", "many", -1, 0, 99),
    *_of_config("intermediate_size", "wide", -1, 0, 48),
    *_of_config("vocab_size", "all", -1, 10, float("inf")),
    *_of_config("num_attention_heads", "some", 0, -4, 5),
    *_of_config("hidden_act", "nobody", 7),
    Broken(
        "quantised",
        lambda f: reconfigure(f, quantization_config={"quant_method": "gptq"}),
        ("gptq",),
    ),
    Broken(
        "code of its own that is not there",
        lambda f: reconfigure(f, model_type="novel", auto_map={"AutoConfig": "x.Y"}),
        ("model.trust_remote_code",),
    ),
    Broken(
        "no weights",
        lambda f: [file.unlink() for file in f.glob("*.safetensors*")],
        ("safetensors",),
    ),
    Broken("pickled weights", pickled, ("safetensors",)),
    *(
        Broken(f"a file of weights {what}", lambda f, change=change: change(f / SHARD), (SHARD,))
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
    *_of_file(
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
    *_of_file(
        INDEX,
        {**NO_JSON, "without tensors": "{}", "of nothing": '{"weight_map": {}}'},
        "index",
        SHARD,
    ),
    Broken(
        "the index lacks a tensor", lambda f: reindex(f, lambda index: index.pop(EXPERT)), (EXPERT,)
    ),
    Broken(
        "the index has one more",
        lambda f: reindex(f, lambda index: index.update(a=SHARD)),
        ("tensor a",),
    ),
    Broken(
        "the index leads outside",
        lambda f: reindex(f, lambda index: index.update({EXPERT: "../x.safetensors"})),
        ("x.safetensors",),
    ),
    Broken(
        "a tensor in two files",
        lambda f: save_file(
            {**load_file(f / SHARD), "model.norm.weight": torch.ones(32)}, f / SHARD
        ),
        ("model.norm.weight",),
    ),
    Broken(
        "a tensor of no file",
        lambda f: rewrite(f, "model.norm.weight", lambda t: None),
        ("model.norm.weight",),
    ),
    Broken("an expert of no file", lambda f: rewrite(f, EXPERT, lambda t: None), ("experts",)),
    Broken(
        "an expert of another shape", lambda f: rewrite(f, EXPERT, lambda t: t[:-8]), ("experts",)
    ),
    Broken("a router of another shape", lambda f: rewrite(f, ROUTER, lambda t: t[:-1]), (ROUTER,)),
    Broken(
        "an expert of NaN",
        lambda f: rewrite(f, EXPERT, _with_one(float("nan"))),
        ("layers.1.mlp.experts",),
    ),
    Broken(
        "a router that is infinite",
        lambda f: rewrite(f, ROUTER, _with_one(float("-inf"))),
        (ROUTER,),
    ),
    Broken("tokenizer.json missing", lambda f: (f / "tokenizer.json").unlink(), ("tokenizer",)),
    Broken(
        "no tokenizer", lambda f: [file.unlink() for file in f.glob("tokenizer*")], ("tokenizer",)
    ),
    *_of_file("tokenizer.json", {**NO_JSON, "without fields": "{}"}, "tokenizer"),
    *_of_file("tokenizer_config.json", NO_JSON, "tokenizer"),
    *_of_file("generation_config.json", NO_JSON),
]


def _ended(row: Broken, original: Path, folder: Path) -> Ended:
    """What the checks before a study, its first step, and loading say of the model, in this
    process."""
    row.damage(shutil.copytree(original, folder))
    settings = ModelConfig(name="m", path=str(folder), device="cpu")
    try:
        check_model_path(settings)
        limits(facts(settings)["layers"])
        load_model(settings)
    except UserError as error:
        return Ended(2, str(error))
    except Exception:  # noqa: BLE001 - whatever else is raised is a trace that a user would see
        return Ended(1, traceback.format_exc())
    return Ended(0, "it was loaded")


def wrong() -> list[str]:
    """A sentence for each of BROKEN that is not refused as it must be."""
    sentences = []
    with tempfile.TemporaryDirectory(prefix="moe_lab_campaign-") as name:
        tiny.save("olmoe", original := Path(name) / "original", shard="100KB")
        for number, row in enumerate(BROKEN):
            (folder_of_case := Path(name) / str(number)).mkdir()
            ended = _ended(row, original, folder_of_case / "model")
            if not ended.refuses(row.names):
                sentences.append(f"{row.name}: {ended}")
            shutil.rmtree(folder_of_case)
    return sentences
