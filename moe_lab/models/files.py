"""The folder of a model: find or download it, check that it can be loaded, and compute its fingerprint. No torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.checkpoint import open_checkpoint, read_json
from moe_lab.models.config_json import LAYERS_FIELD, check_numbers
from moe_lab.models.families import UNSUPPORTED
from moe_lab.models.hub import sha256_of, stated_files
from moe_lab.paths import local

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
"""Fields of config.json that describe how layers, or experts of a layer, differ."""
DESCRIBING = {".jinja", ".json", ".model", ".py", ".tiktoken", ".txt"}
"""Suffixes of files beside the weights that decide what a model computes and how text becomes tokens."""
SUBFOLDERS = ("additional_chat_templates", "custom_generate")
"""Folders beside the weights of which transformers reads files: further chat templates of the tokenizer, and the
model's own way of generating."""
BESIDE = ("generation_config.json", "tokenizer_config.json")
"""Optional files beside the weights; each must be a JSON object."""
SHORTEST_COMMIT = 7
"""Fewest digits of a commit by which model.revision can name it."""
CODE_FIELDS = ("attn_implementation", "experts_implementation")
"""Endings of the fields of config.json, at any depth, that name code: transformers fetches a name with a slash from the
hub and runs it."""
BUILT_IN = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
ADAPTER = "adapter_config.json"
"""A file that makes transformers fetch and load another model, which it names."""


def check(settings: ModelConfig) -> None:
    """Check everything about a model that needs neither torch nor network; raises UserError.

    A folder must be of model.revision, if that is set. It must hold config.json and complete safetensors files that
    agree with their index. Its family must not be known to be unsupported, and its layers must have one shape unless
    its own code may be run. Of a hub id, only the form of the name is checked.
    """
    folder = local(settings.path)
    if folder.is_dir():
        _check_revision(folder, settings)
        _check_folder(folder, settings)
    elif not HUB_ID.fullmatch(settings.path):
        raise UserError(
            f"model.path={settings.path} is no folder: expected a folder, a hub id (owner/name) or pocket:NAME"
        )


def check_code(folder: Path, trust_remote_code: bool) -> None:
    """Raise UserError when a file of the folder makes transformers fetch code or another model that is not trusted."""
    if trust_remote_code:
        return
    for field, value in _named_code(read_json(folder / "config.json")):
        raise UserError(
            f"{folder / 'config.json'} has {field}={value}, code that transformers would fetch from the hub and run: "
            f"take it out, or set model.trust_remote_code=true if you trust the author"
        )
    if (folder / ADAPTER).is_file():
        raise UserError(
            f"{folder} has {ADAPTER}, by which transformers loads another model than the one there: merge the adapter, "
            "or take the file out"
        )


def _named_code(config: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """(field, value) of each field that names code which is not part of transformers.

    Flash attention counts as such when it is not installed, because transformers would fetch it.
    """
    if isinstance(config, dict):
        for key, value in config.items():
            yield from _named_code(value, field if field.endswith(CODE_FIELDS) else key)
    elif isinstance(config, list):
        for value in config:
            yield from _named_code(value, field)
    elif field.endswith(CODE_FIELDS) and isinstance(config, str):
        installed = ("flash_attention_2",) if find_spec("flash_attn") else ()
        if config.removeprefix("paged|") not in (*BUILT_IN, *installed):
            yield field, config


def local_folder(settings: ModelConfig) -> Path:
    """The folder of a model, downloaded from the hub if its path is a hub id; checked as `check` does."""
    check(settings)
    path = local(settings.path)
    if not path.is_dir():
        path = _download(settings, ["*.safetensors"])
        _check_folder(path, settings)
    return path


def configuration_folder(settings: ModelConfig) -> Path | None:
    """The folder of a model, with at least its configuration and tokenizer, which are downloaded from the hub.

    None when the hub cannot be reached or has no such model. UserError for a folder that is not known to be of
    model.revision.
    """
    path = local(settings.path)
    if path.is_dir():
        _check_revision(path, settings)
        return path
    check(settings)
    try:
        return _download(settings, weights=[])
    except UserError:
        return None


def files_of(folder: Path) -> list[Path]:
    """All files of a model's folder that transformers may read, those of SUBFOLDERS among them, in order."""
    places = [folder, *(folder / name for name in SUBFOLDERS)]
    return sorted(file for place in places if place.is_dir() for file in place.iterdir() if file.is_file())


def fingerprint(path: str | Path) -> str:
    """sha256 (hex) of a model folder: its configuration, tokenizer and weights.

    Independent of where the folder is and of file times. `path` may be `pocket:NAME`. UserError when it is no folder.
    """
    folder = local(str(path))
    if not folder.is_dir():
        raise UserError(f"model.path={path} is no folder: expected a folder to take the fingerprint of")
    return _fingerprint(folder, [file for file in files_of(folder) if file.suffix == ".safetensors"], {})


def fingerprint_of(settings: ModelConfig) -> str | None:
    """The fingerprint of a model that may be on the hub; None when it is not in the cache and the hub cannot be asked.

    Of a model that is not here, the small files are downloaded, and the hub states the sha256 of its weights.
    """
    folder = local(settings.path)
    return fingerprint(folder) if folder.is_dir() else _fingerprint_there(settings.path, settings.revision)


@lru_cache(maxsize=256)
def _fingerprint_there(path: str, revision: str | None) -> str | None:
    with suppress(UserError, OSError, ValueError):  # not in the cache, or not all of its weights
        open_checkpoint(cached := _cached(path, revision))
        return fingerprint(cached)
    described = configuration_folder(ModelConfig(name="any", path=path, revision=revision))
    if described is None:
        return None
    stated = stated_files(path, described.resolve().name, "model")
    if stated is None:
        return None
    weights = {name: about for name, about in stated.items() if name.endswith(".safetensors") and "/" not in name}
    return _fingerprint(described, [], weights)


def _cached(path: str, revision: str | None) -> Path:
    """The folder of a model in the hub's cache. OSError or ValueError when it is not there, or known to lack files."""
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", *(f"*{suffix}" for suffix in sorted(DESCRIBING))]
    asked: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": ["*/*"], "local_files_only": True}
    return Path(snapshot_download(path, revision=revision, **asked))


def _fingerprint(folder: Path, weights: list[Path], elsewhere: Mapping[str, tuple[int, str]]) -> str:
    """The fingerprint of the files of a folder that describe a model, of its weights, and of those that are elsewhere:
    name -> (size, sha256)."""
    describing = [f for f in files_of(folder) if f.suffix in DESCRIBING and not f.name.endswith(".index.json")]
    here = {
        file.relative_to(folder).as_posix(): (file.stat().st_size, sha256_of(file)) for file in describing + weights
    }
    lines = sorted(f"{name} {size} {digest}\n" for name, (size, digest) in {**here, **elsewhere}.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _check_revision(folder: Path, settings: ModelConfig) -> None:
    """Raise UserError when a revision is given and the folder is not a snapshot of it in the hub's cache.

    In the cache a folder is named by its commit, models--OWNER--NAME/snapshots/COMMIT, and refs/NAME holds the commit
    that a branch or tag had when it was downloaded. A commit may be given by its first seven digits or more.
    """
    revision = settings.revision
    if revision is None:
        return
    commit, cache = folder.resolve().name, folder.resolve().parent.parent
    if folder.resolve().parent.name != "snapshots":
        raise UserError(
            f"model.revision={revision} cannot be checked, because model.path={settings.path} is a folder that does "
            "not state its revision: expected model.revision=null, or a hub id as model.path"
        )
    named = cache / "refs" / revision
    if named.is_file():
        revision = named.read_text(encoding="utf-8").strip()
    if not (commit.startswith(revision) and len(revision) >= SHORTEST_COMMIT):
        raise UserError(
            f"model.revision={settings.revision} is not that of model.path={settings.path}, which is of commit "
            f"{commit}: expected that, or null"
        )


def _check_folder(folder: Path, settings: ModelConfig) -> None:
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UserError(f"{folder / 'config.json'} has no model_type: expected a transformers checkpoint")
    if kind in UNSUPPORTED:
        raise UserError(f"model_type={kind} is not supported: it {UNSUPPORTED[kind]}")
    check_code(folder, settings.trust_remote_code)
    check_numbers(folder)
    for name in (name for name in BESIDE if (folder / name).exists()):
        read_json(folder / name)
    if LAYERS_FIELD in config and not settings.trust_remote_code:
        raise UserError(
            f"{folder} has MoE layers of different shapes, which only its own code can build: set "
            "model.trust_remote_code=true if you trust the author"
        )
    open_checkpoint(folder)


def _download(settings: ModelConfig, weights: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(
            settings.path,
            revision=settings.revision,
            allow_patterns=[*weights, *(f"*{suffix}" for suffix in sorted(DESCRIBING))],
            ignore_patterns=["*/*"],
        )
        commit = Path(folder).name
        snapshot_download(settings.path, revision=commit, allow_patterns=[f"{name}/*" for name in SUBFOLDERS])
    except (OSError, HFValidationError) as error:  # all errors of the hub and of the network are OSErrors
        at = f" at revision {settings.revision}" if settings.revision else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"model.path={settings.path} is no folder, and the hub gave no such model{at} ({type(error).__name__}: "
            f"{reason}): check the name, the revision and the network, or give a folder"
        ) from None
    return Path(folder)
