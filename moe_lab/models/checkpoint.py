"""List the tensors in the safetensors files of a folder from the headers, and check the files. No
torch."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open

from moe_lab import json_files
from moe_lab.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the text that git leaves in place of a file that git-lfs has not fetched."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: `size` bytes from byte `start` of the file `shard`, row-major,
    little-endian."""

    shard: str
    """Path in the folder of the checkpoint."""
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Checkpoint:
    """The tensors in the safetensors files of a folder. The files are called shards."""

    folder: Path
    shards: tuple[str, ...]
    metadata: dict[str, dict[str, str]]
    """Shard -> the metadata of its header."""
    tensors: dict[str, Entry]
    """Name of a tensor -> entry, in the order of the shards and of the bytes in each shard."""

    def slices(self, names: Iterable[str], files: ExitStack) -> dict[str, Any]:
        """Name of a tensor -> its slice. Indexing a slice reads bytes into a torch tensor. Slices
        can be indexed until `files` is closed."""
        shards = {name: self.tensors[name].shard for name in names}
        shard_files = {
            shard: files.enter_context(safe_open(self.folder / shard, framework="pt"))
            for shard in set(shards.values())
        }
        return {name: shard_files[shard].get_slice(name) for name, shard in shards.items()}


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder, from the headers of its shards. UserError when a shard is missing
    or damaged, or when the shards and the index list different tensors."""
    shards, index = _shards_and_index(folder)
    metadata: dict[str, dict[str, str]] = {}
    tensors: dict[str, Entry] = {}
    for shard in shards:
        metadata[shard], entries = read_header(folder, shard)
        for name in entries:
            if index is not None and index.get(name) != shard:
                raise UserError(
                    f"{folder}: {shard} has tensor {name}, which {INDEX} does not list there"
                )
        tensors.update(entries)
    if missing := sorted((index or {}).keys() - tensors.keys()):
        raise UserError(f"{folder}: no file has tensor {missing[0]}, which {INDEX} lists")
    return Checkpoint(folder, shards, metadata, tensors)


def read_header(folder: Path, shard: str) -> tuple[dict[str, str], dict[str, Entry]]:
    """(metadata, name of a tensor -> entry) of the safetensors file `shard` in `folder`. The
    tensors come in the order of their bytes. UserError when the file is damaged."""
    path = folder / shard
    try:
        check_no_pointer(path)
        safe_open(path, framework="np")  # checks the file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged: expected a safetensors file ({error})") from None
    with path.open("rb") as file:
        # the first 8 bytes are the length of the header; the data follow the header, from `base`
        base = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(base - 8))
    metadata = header.pop("__metadata__", {})
    entries = {}
    for name, fields in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = fields["data_offsets"]  # counted from `base`
        entries[name] = Entry(
            shard, fields["dtype"], tuple(fields["shape"]), base + start, end - start
        )
    return metadata, entries


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. UserError when the file is missing or holds no JSON object."""
    try:
        # any JSON object has the shape {}
        content: dict[str, Any] = json_files.read_json(path, {})
    except FileNotFoundError:
        raise UserError(
            f"{path.parent} has no {path.name}: expected a transformers checkpoint"
        ) from None
    except json_files.Damaged as error:
        raise UserError(f"{error}: expected a JSON object") from None
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Like `read_json`, but {} when the file is missing."""
    return read_json(path) if path.is_file() else {}


def bits_of(dtype: str) -> int:
    """Number of bits of one value. `dtype`: the name of its type in safetensors, such as BF16 or
    F8_E4M3."""
    number = re.search(r"\d+", dtype)
    return int(number[0]) if number else 8  # BOOL takes a byte


def stated_dtype(config: Mapping[str, Any]) -> str:
    """The precision of the weights according to config.json, such as bfloat16. "None" if
    config.json states no precision."""
    return str(config.get("dtype", config.get("torch_dtype"))).removeprefix("torch.")


def check_no_pointer(path: Path) -> None:
    """Raise UserError if the file `path` is a pointer of git-lfs."""
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise UserError(
                f"{path} is a git-lfs pointer, not the file itself: fetch the file with git lfs "
                f"pull in {path.parent}"
            )


def shards_in(names: Container[str], index: Mapping[str, Any]) -> tuple[str, ...]:
    """Paths of the weight files that transformers loads from a folder or a repository. `names`:
    paths of its files. `index`: content of its file INDEX; {} if there is none."""
    return (SINGLE,) if SINGLE in names else tuple(sorted(set(weight_map(index).values())))


def weight_map(index: Mapping[str, Any]) -> dict[str, str]:
    """Name of a tensor -> its shard. `index`: as in `shards_in`."""
    shards: Any = index.get("weight_map")
    return shards if json_files.fits(shards, {str: str}) else {}


def _shards_and_index(folder: Path) -> tuple[tuple[str, ...], Mapping[str, str] | None]:
    """(paths of the shards, index: name of a tensor -> its shard) of a checkpoint. The index is
    None for a single shard."""
    if (folder / SINGLE).exists():
        return (SINGLE,), None
    if not (folder / INDEX).exists():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        present = f"only {', '.join(names)}" if names else "no safetensors file"
        hint = ": convert its .bin files to safetensors" if any(folder.glob("*.bin")) else ""
        raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}: found {present}{hint}")
    content = read_json(folder / INDEX)
    index = weight_map(content)
    if not index:
        raise UserError(f"{folder / INDEX} is damaged: expected a weight_map from tensor to file")
    shards = shards_in((), content)
    for shard in shards:
        tensors = list(index.values()).count(shard)
        # the index of a foreign checkpoint must not lead to files outside the folder
        if PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
            raise UserError(
                f"{folder / INDEX} expects {tensors} tensors in {shard}: expected a file in "
                f"{folder}"
            )
        if not (folder / shard).is_file():
            raise UserError(
                f"{folder}: shard {shard} is missing, {INDEX} expects {tensors} tensors in it"
            )
    return shards, index
