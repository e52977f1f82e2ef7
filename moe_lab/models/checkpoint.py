"""List the tensors in the safetensors files of a folder from the headers, and check the files. No torch."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from moe_lab.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OF_EXPERT = re.compile(r"(?P<layer>.*\bexperts\.)(?P<expert>\d+)(?P<part>\..*\bweight)")
"""Name of a weight that belongs to one numbered expert. Tensors that a quantisation stores beside it do not match."""
BITS = {
    "BOOL": 8,
    "C64": 64,
    "F16": 16,
    "F32": 32,
    "F4": 4,
    "F64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "BF16": 16,
    "I16": 16,
    "I32": 32,
    "I64": 64,
    "I8": 8,
    "U16": 16,
    "U32": 32,
    "U64": 64,
    "U8": 8,
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: `size` bytes from byte `start` of the file `shard`, row-major, little-endian."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder. Shards and tensors are in the order of the files and of the bytes in them."""

    folder: Path
    shards: tuple[str, ...]
    metadata: dict[str, dict[str, str]]
    """Shard -> the metadata of its header."""
    tensors: dict[str, Entry]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the headers of all shards.

    UserError when one is missing, truncated or damaged, when they contradict the index, or when an expert has another
    shape than the others of its layer.
    """
    shards, index = _shards(folder)
    metadata: dict[str, dict[str, str]] = {}
    tensors: dict[str, Entry] = {}
    for shard in shards:
        metadata[shard], entries = read_header(folder / shard)
        if twice := sorted(set(entries) & set(tensors)):
            raise UserError(f"{folder}: tensor {twice[0]} is both in {tensors[twice[0]].shard} and in {shard}")
        tensors.update(entries)
    if index is not None:
        _check_index(folder, index, tensors)
    _check_experts(folder, tensors)
    return Checkpoint(folder, shards, metadata, tensors)


def read_header(path: Path) -> tuple[dict[str, str], dict[str, Entry]]:
    """Metadata and tensors of one safetensors file, in the order of their bytes.

    UserError naming the file when it is truncated, too long, or not safetensors.
    """
    try:
        with safe_open(path, framework="np") as checked:
            metadata: dict[str, str] = checked.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged: expected a safetensors file ({error})") from None
    with path.open("rb") as file:
        base = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(base - 8))
    header.pop("__metadata__", None)
    entries = {}
    for name, fields in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = fields["data_offsets"]
        entries[name] = Entry(path.name, fields["dtype"], tuple(fields["shape"]), base + first, last - first)
    return metadata, entries


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; UserError when the file is missing or holds no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}: expected a transformers checkpoint") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): expected a JSON file") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: expected JSON, {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: expected a JSON object, found a {type(content).__name__}")
    return content


def stated_dtype(config: Mapping[str, Any]) -> str:
    """The precision of the weights that a config.json states, such as bfloat16; `torch_dtype` in older files."""
    return str(config.get("dtype", config.get("torch_dtype")))


def _shards(folder: Path) -> tuple[tuple[str, ...], Mapping[str, str] | None]:
    """Names of the weight files, and the index (tensor -> file), or None without an index."""
    if (folder / SINGLE).exists():
        return (SINGLE,), None
    if not (folder / INDEX).exists():
        loose = sorted(path.name for path in folder.glob("*.safetensors"))
        there = f"only {', '.join(loose)}" if loose else "no safetensors file"
        hint = ": convert its .bin files to safetensors" if any(folder.glob("*.bin")) else ""
        raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}: found {there}{hint}")
    content = read_json(folder / INDEX)
    index = content.get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(shard, str) for shard in index.values()):
        raise UserError(f"{folder / INDEX} is damaged: expected a weight_map from tensor to file")
    shards = tuple(sorted(set(index.values())))
    for shard in shards:
        if os.path.basename(shard) != shard or not (folder / shard).is_file():
            tensors = sum(1 for value in index.values() if value == shard)
            raise UserError(f"{folder}: shard {shard} is missing, {INDEX} expects {tensors} tensors in it")
    return shards, index


def _check_index(folder: Path, index: Mapping[str, str], tensors: Mapping[str, Entry]) -> None:
    for name, shard in index.items():
        if name not in tensors:
            raise UserError(f"{folder}: {INDEX} expects tensor {name} in {shard}, but it is not there")
        if tensors[name].shard != shard:
            raise UserError(f"{folder}: {INDEX} expects tensor {name} in {shard}, but it is in {tensors[name].shard}")
    if extra := sorted(set(tensors) - set(index)):
        raise UserError(f"{folder}: {tensors[extra[0]].shard} holds tensor {extra[0]}, which {INDEX} does not list")


def _check_experts(folder: Path, tensors: Mapping[str, Entry]) -> None:
    """Raise UserError naming the first expert weight that is missing or differs from the other experts of its layer.

    The expected shape is that of most experts of the layer.
    """
    alike: dict[tuple[str, str], dict[str, Entry]] = {}
    numbers: dict[str, set[str]] = {}
    for name, entry in tensors.items():
        if match := OF_EXPERT.fullmatch(name):
            alike.setdefault((match["layer"], match["part"]), {})[name] = entry
            numbers.setdefault(match["layer"], set()).add(match["expert"])
    for (layer, part), group in alike.items():
        for name in (f"{layer}{number}{part}" for number in sorted(numbers[layer], key=int)):
            if name not in group and not _is_stored_otherwise(name, tensors):
                raise UserError(f"{folder}: {name} is missing, which other experts of its layer have")
        usual = Counter(entry.shape for entry in group.values()).most_common(1)[0][0]
        for name, entry in group.items():
            if entry.shape != usual:
                raise UserError(
                    f"{folder / entry.shard} is damaged: {name} has shape {entry.shape}, expected {usual}, which other "
                    "experts of its layer have"
                )


def _is_stored_otherwise(weight: str, tensors: Mapping[str, Entry]) -> bool:
    """Whether there is no tensor `weight` because the matrix is quantised, unlike those of other experts."""
    return any(name.startswith(f"{weight.removesuffix('weight')}") for name in tensors)
