"""What files consist of, here and on the hub: their sha256, each found out once. No torch.

The hub's cache names large files by their sha256, and the hub states it of files that are not here. So a folder and the
hub id of the same weights are the same model.
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe_lab.json_files import Damaged, read_json, write_json
from moe_lab.paths import cache

UNRESOLVED = "hub"
"""Key of the identity of a model or a text on the hub whose files are not known."""
REMEMBERED_FROM = 1 << 26
"""Bytes from which the sha256 of a file is remembered in the user's cache: smaller ones take less than a second."""
SHA256 = re.compile(r"[0-9a-f]{64}")
SHAPE = {"size": int, "changed": int, "inode": int, "sha256": str}
SECONDS = 10
"""Longest wait for an answer of the hub."""
NOT_DATA = (".md", ".gitattributes", ".png", ".jpg", ".svg")
"""Endings of files of a data set that hold no data."""


def sha256_of(file: Path) -> str:
    """sha256 (hex) of a file's bytes. A large file is read once, while its path, size, time and inode stay."""
    real = file.resolve()
    if real.parent.name == "blobs" and SHA256.fullmatch(real.name):
        return real.name
    status = real.stat()
    if status.st_size < REMEMBERED_FROM:
        return _read(real)
    about = {"size": status.st_size, "changed": status.st_mtime_ns, "inode": status.st_ino}
    note = cache("hashes") / f"{hashlib.sha256(os.fsencode(real)).hexdigest()[:32]}.json"
    with suppress(OSError, Damaged):
        known: dict[str, Any] = read_json(note, SHAPE)
        if known.items() >= about.items():
            return str(known["sha256"])
    sha256 = _read(real)
    note.parent.mkdir(parents=True, exist_ok=True)
    write_json(note, {"path": str(real), **about, "sha256": sha256})
    return sha256


def _read(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@lru_cache(maxsize=256)
def stated_files(name: str, revision: str | None, kind: str) -> dict[str, tuple[int, str]] | None:
    """File -> (size, sha256, or git's digest of a small file) of what a repository on the hub has; None when the hub
    cannot be asked. `kind`: model or dataset."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    from httpx import HTTPError
    from huggingface_hub import HfApi

    ask = HfApi().model_info if kind == "model" else HfApi().dataset_info
    try:
        siblings = ask(name, revision=revision, files_metadata=True, timeout=SECONDS).siblings or []
    except (OSError, ValueError, HTTPError):
        return None
    return {file.rfilename: (file.size or 0, file.lfs.sha256 if file.lfs else file.blob_id or "") for file in siblings}


def data_files(name: str) -> str | None:
    """Digest of the data in a data set on the hub; None when the hub cannot be asked."""
    files = stated_files(name, None, "dataset")
    if files is None:
        return None
    lines = [f"{file} {size} {digest}\n" for file, (size, digest) in files.items() if not file.endswith(NOT_DATA)]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def data_file(name: str, file: str) -> str | None:
    """sha256 of a file of a data set on the hub; None when it is not in the cache and the hub cannot be asked."""
    from huggingface_hub import try_to_load_from_cache

    here = try_to_load_from_cache(name, file, repo_type="dataset")
    if isinstance(here, str):
        return sha256_of(Path(here))
    _, digest = (stated_files(name, None, "dataset") or {}).get(file, (0, ""))
    return digest if SHA256.fullmatch(digest or "") else None
