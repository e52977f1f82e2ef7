"""The folder of a model: find or download it, check that it can be loaded, and compute its
fingerprint. No torch."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from moe_lab import json_files
from moe_lab.child_process import ChildProcess, ErrorReply
from moe_lab.config import ModelConfig
from moe_lab.config.base import SettingsError, identity_fields
from moe_lab.errors import Unavailable, UserError, reason_in
from moe_lab.models.checkpoint import (
    INDEX,
    check_no_pointer,
    open_checkpoint,
    read_json,
    read_json_if_there,
    shards_in,
)
from moe_lab.paths import cache_folder, local_path
from moe_lab.start import command

UNRESOLVED = "hub"
"""Key in the identity of a model or a text on the hub whose files are not known."""
REMEMBERED_FROM = 1 << 26
"""Bytes from which the sha256 of a file is remembered in the user's cache; smaller files take less
than a second to read."""
SHA256 = re.compile(r"[0-9a-f]{64}")
SECONDS = 10
"""Longest wait for an answer of the hub, after it has answered once."""
FIRST_SECONDS = 3
"""Longest wait for the first answer of the hub."""
NOT_DATA = (".md", ".gitattributes", ".png", ".jpg", ".svg")
"""Endings of files of a data set that hold no data."""


def sha256_of(file: Path) -> str:
    """sha256 (hex) of a file's bytes. A large file is read again only if its path, size, time of
    change or inode differs."""
    path = file.resolve()
    # the hub's cache names a large file by its sha256
    if path.parent.name == "blobs" and SHA256.fullmatch(path.name):
        return path.name
    status = path.stat()
    if status.st_size < REMEMBERED_FROM:
        return _hash_file(path)
    state = [str(path), status.st_size, status.st_mtime_ns, status.st_ino]
    record = cache_folder("hashes") / f"{json_files.digest(state)}.json"
    with suppress(OSError, json_files.Damaged):
        return str(json_files.read_sealed(record)["sha256"])
    sha256 = _hash_file(path)
    record.parent.mkdir(parents=True, exist_ok=True)
    json_files.write_sealed(record, {"path": str(path), "sha256": sha256})
    return sha256


def _hash_file(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def is_hub_reachable() -> bool:
    """Whether HF_HUB_OFFLINE is not set and the hub answers within FIRST_SECONDS."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and _is_reachable(constants.ENDPOINT)


@lru_cache
def _is_reachable(address: str) -> bool:
    """Whether the server at `address` answers within FIRST_SECONDS."""
    from httpx import HTTPError
    from huggingface_hub import get_session

    answers: list[object] = []

    def send_request() -> None:
        with suppress(HTTPError, OSError):
            answers.append(get_session().head(address, timeout=FIRST_SECONDS))

    # in a thread, because looking up the name of a host has no time limit of its own
    thread = Thread(target=send_request, daemon=True)
    thread.start()
    thread.join(FIRST_SECONDS)
    return bool(answers)


@lru_cache(maxsize=256)
def stated_files(name: str, revision: str | None, kind: str) -> dict[str, tuple[int, str]] | None:
    """Path of a file -> (size in bytes, digest), for all files of the repository `name` on the hub.
    The digest of a file that is stored in git LFS is its sha256; that of any other file is git's
    blob id. None when the hub cannot be reached or has no such repository. `kind`: model or
    dataset."""
    if not is_hub_reachable():
        return None
    from httpx import HTTPError
    from huggingface_hub import HfApi

    repository_info = HfApi().model_info if kind == "model" else HfApi().dataset_info
    try:
        info = repository_info(name, revision=revision, files_metadata=True, timeout=SECONDS)
    except (OSError, ValueError, HTTPError):
        return None
    return {
        file.rfilename: (file.size or 0, file.lfs.sha256 if file.lfs else file.blob_id or "")
        for file in info.siblings or []
    }


@lru_cache(maxsize=256)
def hub_json(name: str, revision: str | None, file: str = "config.json") -> dict[str, Any]:
    """The content of the JSON file `file` of the model `name` on the hub, from the hub's local
    cache or the network; {} when neither has the file."""
    from httpx import HTTPError
    from huggingface_hub import hf_hub_download

    with suppress(OSError, ValueError, HTTPError):
        offline = not is_hub_reachable()
        return read_json(
            Path(hf_hub_download(name, file, revision=revision, local_files_only=offline))
        )
    return {}


def data_set_digest(name: str) -> str | None:
    """sha256 (hex) of the names, sizes and digests of all data files of the data set `name` on the
    hub. None when the hub cannot be reached or has no such data set."""
    files = stated_files(name, None, "dataset")
    if files is None:
        return None
    return _digest({file: files[file] for file in files if not file.endswith(NOT_DATA)})


def data_file_sha256(name: str, file: str) -> str | None:
    """sha256 (hex) of the file `file` of the data set `name` on the hub. None when the file is not
    in the cache and the hub states no sha256."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, file, repo_type="dataset")
    if isinstance(cached, str):
        return sha256_of(Path(cached))
    _, digest = (stated_files(name, None, "dataset") or {}).get(file, (0, ""))
    # of small files, the hub states git's blob id instead of the sha256
    return digest if SHA256.fullmatch(digest) else None


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TOKENIZER = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "vocab*.txt",
    "merges*.txt",
    "tekken.json",
    "*.model",
    "*.tiktoken",
    "chat_template.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "tokenization*.py",
)
"""Patterns of the files of a tokenizer and its chat templates."""
DESCRIBING = (
    *TOKENIZER,
    "config.json",
    "generation_config.json",
    "*quant*_config.json",
    "*processor_config.json",
    "*.py",
    "custom_generate/*.py",
    "encoding/*.py",
)
"""Patterns of the files from which a model is loaded, apart from its weights."""
BESIDE = ("README.md", "LICEN[CS]E*", "NOTICE*")
"""Patterns of further files that belong to a model, but change nothing that it computes."""
USUAL_SHARDS = ("model.safetensors", "model-*-of-*.safetensors")
"""Patterns of the weight files of a model on the hub whose INDEX is not known."""
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"
"""A file that names another model, which transformers then fetches and loads."""
OTHER_FORMS = {
    "snapshots/*": "as a model in the hub's cache has: expected that folder, or the model's hub id",
    "models--*": "a model in the hub's cache: expected the model's hub id (owner/name)",
    "*/config.json": "expected that file's folder",
    "*.gguf": "which llama.cpp reads: expected the checkpoint that it was converted from",
    "params.json": "as the original code of its makers reads: expected the same model in the form "
    "of transformers",
    "model_index.json": "which diffusers reads: expected a language model",
    "*.bin": "without a configuration: expected all files of the checkpoint",
    "*.safetensors": "without a configuration: expected all files of the checkpoint",
}
"""Pattern of a path in a folder or repository without config.json -> end of the message about
it."""


def check_model_path(settings: ModelConfig) -> None:
    """Raise UserError for a model that cannot be loaded, as far as this can be known without torch.
    For a hub id, only the names of the files are checked, if the hub can be reached."""
    folder = local_path(settings.path)
    if folder.is_dir():
        if settings.revision is not None:
            raise UserError(
                f"model.revision={settings.revision} is of a model on the hub, and "
                f"model.path={settings.path} is a folder: expected null"
            )
        _check_folder(folder)
    elif folder.is_file():
        raise UserError(
            f"model.path={settings.path} is a file: expected a folder with a checkpoint of "
            "transformers"
        )
    elif not HUB_ID.fullmatch(settings.path):
        raise UserError(
            f"model.path={settings.path} is no folder: expected a folder, a hub id (owner/name) "
            "or pocket:NAME"
        )
    elif names := stated_files(settings.path, settings.revision, "model"):
        _check_names(settings.path, names)
    path = tokenizer_path(settings)
    name = settings.tokenizer
    if name and not (paths_in(path, TOKENIZER) if path.is_dir() else HUB_ID.fullmatch(name)):
        raise UserError(
            f"model.tokenizer={name} is no tokenizer: expected a folder with tokenizer.json, a hub "
            "id (owner/name), pocket:NAME, or null for that of model.path"
        )


def check_use(settings: ModelConfig, streams: bool) -> None:
    """Raise UserError if a model cannot be run, as far as this can be known without weights:
    because of its architecture, the names and shapes in its files, or its tokenizer. Not for a
    model that is only on the hub. `streams`: whether it is run layer by layer."""
    folder = folder_with_weights(settings)
    if folder is not None:
        arguments = {"folder": str(folder), "settings": asdict(settings), "streams": streams}
        with torch_functions("moe_lab.models.facts", **arguments) as call:
            call("check_use")


@contextmanager
def torch_functions(module: str, **shared: Any) -> Iterator[Callable[..., Any]]:
    """A context with a function that calls functions of `module`, which imports torch: in a child
    process unless torch is imported already, so that this process stays small. It takes the name of
    a function and its arguments beside those in `shared`."""
    if "torch" in sys.modules:
        functions = import_module(module)
        yield lambda name, **more: getattr(functions, name)(**shared, **more)
        return
    with ChildProcess(command("moe_lab.child_process", module), os.environ) as child:

        def call(name: str, **more: Any) -> Any:
            try:
                return child.call(name, **shared, **more)
            except ErrorReply as error:
                mistakes = (UserError, Unavailable, SettingsError)
                is_mistake = error.kind in [kind.__name__ for kind in mistakes]
                raise (UserError if is_mistake else RuntimeError)(str(error)) from None

        yield call


def tokenizer_path(settings: ModelConfig) -> Path:
    """The folder with the tokenizer of a model. No such folder is there for a hub id."""
    return local_path(settings.tokenizer or settings.path)


def described_model(folder: Path) -> dict[str, Any]:
    """The content of config.json in `folder`, with a model_type. UserError for something else than
    a checkpoint of transformers."""
    if (folder / ADAPTER).is_file():
        base = read_json(folder / ADAPTER).get("base_model_name_or_path")
        raise UserError(
            f"{folder} has {ADAPTER}: it is an adapter (such as LoRA) of the model {base}, which "
            "transformers would load in its place: expected a folder into which peft has merged "
            f"the adapter, or model.path={base} without it"
        )
    if not (folder / "config.json").is_file():
        files = (file for pattern in ("*", "*/*") for file in folder.glob(pattern))
        _check_names(folder, [file.relative_to(folder).as_posix() for file in files])
    content = read_json(folder / "config.json")
    if not isinstance(content.get("model_type"), str):
        raise UserError(
            f"{folder / 'config.json'} has no model_type: expected that of a language model"
        )
    return content


def _check_names(owner: str | Path, names: Collection[str]) -> None:
    """Raise UserError if the files `names` of `owner`, a folder or a repository on the hub, are
    something else than a checkpoint of transformers."""
    if "config.json" in names:
        return
    for pattern, message in OTHER_FORMS.items():
        if found := fnmatch.filter(names, pattern):
            raise UserError(f"{owner} has no config.json, but {min(found)}, {message}")


def local_folder(settings: ModelConfig) -> Path:
    """The folder of a model, including its weights. A hub model that is not in the cache is
    downloaded. UserError for a model that cannot be loaded, Unavailable when the hub cannot be
    reached."""
    check_model_path(settings)
    path = local_path(settings.path)
    if not path.is_dir():
        path = _download_model(settings, _hub_shards(settings))
        _check_folder(path)
    return path


def tokenizer_folder(settings: ModelConfig, folder: Path) -> Path:
    """The folder with the tokenizer of a model: `folder`, which has the model, unless
    model.tokenizer names another. A tokenizer on the hub is downloaded. Errors as from
    `local_folder`."""
    if settings.tokenizer is None:
        return folder
    path = tokenizer_path(settings)
    if path.is_dir():
        return path
    return _download("model.tokenizer", settings.tokenizer, None, TOKENIZER)


def configuration_folder(settings: ModelConfig) -> Path | None:
    """The folder of a model, with at least its configuration and tokenizer. None when the hub
    cannot be reached or has no such model. UserError as from `check_model_path`."""
    path = local_path(settings.path)
    if path.is_dir():
        return path
    check_model_path(settings)
    with suppress(UserError):  # or its subclass Unavailable
        return _download_model(settings, weights=())
    return None


def model_files(folder: Path) -> tuple[list[str], list[str]]:
    """(files that describe the model, weight files): paths in `folder` of all files from which the
    model is loaded. Shards that are missing are left out."""
    shards = shards_in([file.name for file in folder.iterdir()], read_json_if_there(folder / INDEX))
    return paths_in(folder, DESCRIBING), [name for name in shards if (folder / name).is_file()]


def paths_in(folder: Path, patterns: Iterable[str]) -> list[str]:
    """Paths in `folder` of the files that fit one of `patterns`, sorted. Hidden files, such as
    macOS's "._config.json", are left out."""
    return sorted(
        file.relative_to(folder).as_posix()
        for file in {file for pattern in patterns for file in folder.glob(pattern)}
        if file.is_file() and not file.name.startswith(".")
    )


def fingerprint(path: str | Path) -> str:
    """sha256 (hex) of a model's configuration, tokenizer and weights. `path`: the model's folder,
    or pocket:NAME. UserError when there is no such folder."""
    folder = local_path(str(path))
    if not folder.is_dir():
        raise UserError(
            f"model.path={path} is no folder: expected a folder to take the fingerprint of"
        )
    return _fingerprint(folder, remote_weights={})


def cached_folder(path: str, revision: str | None) -> Path | None:
    """The folder of the hub model `path` in the local cache; None unless the cache has all
    weights."""
    with suppress(OSError, ValueError):
        folder = _snapshot(path, revision, local_files_only=True)
        open_checkpoint(folder)  # raises UserError, a ValueError, if a shard is missing
        return folder
    return None


def folder_with_weights(settings: ModelConfig) -> Path | None:
    """The folder of a model, or of its copy in the hub's cache; None if neither is there."""
    path = local_path(settings.path)
    return path if path.is_dir() else cached_folder(settings.path, settings.revision)


@lru_cache(maxsize=256)
def hub_fingerprint(path: str, revision: str | None) -> str | None:
    """The fingerprint of the hub model `path`, from the cache or from the digests that the hub
    states. None for a model that is neither in the cache nor on a hub that can be reached.
    UserError for a path that is no hub id."""
    if (cached := cached_folder(path, revision)) is not None:
        return fingerprint(cached)
    folder = configuration_folder(ModelConfig(name="any", path=path, revision=revision))
    # the folder's name is the commit of its files; the digests must be of the same commit
    if folder is None or (files := stated_files(path, folder.resolve().name, "model")) is None:
        return None
    shards = shards_in(files, read_json_if_there(folder / INDEX))
    remote_weights = {name: files[name] for name in shards if name in files}
    return _fingerprint(folder, remote_weights)


def _fingerprint(folder: Path, remote_weights: Mapping[str, tuple[int, str]]) -> str:
    """The fingerprint of the model in `folder`. `remote_weights`: name -> (size, sha256) of weight
    files that are only on the hub."""
    descriptions, weights = model_files(folder)
    files = {
        name: ((folder / name).stat().st_size, sha256_of(folder / name))
        for name in descriptions + weights
    }
    return _digest({**files, **remote_weights})


def _digest(files: Mapping[str, tuple[int, str]]) -> str:
    """sha256 (hex) of a list of files. `files`: name -> (size in bytes, digest)."""
    lines = sorted(f"{name} {size} {digest}\n" for name, (size, digest) in files.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class IdentifiedModel(ModelConfig):
    """A model that is identified by the content of its files, and by the settings that change what
    the model computes."""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """For the fields that change what the model computes, name -> `identity` of the value. The
        value of "path" is {"sha256": fingerprint}, or {UNRESOLVED: path, "revision": revision} if
        the fingerprint is not known. "tokenizer" is a hash of the files of model.tokenizer, and
        left out if that is not set."""
        sha256 = (
            fingerprint(self.path)
            if local_path(self.path).is_dir()
            else hub_fingerprint(self.path, self.revision)
        )
        files = {"sha256": sha256} if sha256 else {UNRESOLVED: self.path, "revision": self.revision}
        fields = {**identity_fields(self, "path", "tokenizer"), "path": files}
        if self.tokenizer is not None:
            folder = tokenizer_folder(self, local_path(self.path))
            names = paths_in(folder, TOKENIZER)
            fields["tokenizer"] = _digest({name: (0, sha256_of(folder / name)) for name in names})
        return fields


def _check_folder(folder: Path) -> None:
    """Raise UserError unless the folder is a readable checkpoint."""
    described_model(folder)
    for name in paths_in(folder, DESCRIBING):
        check_no_pointer(folder / name)
    # both calls raise UserError for a damaged file; transformers would ignore damage in GENERATION
    read_json_if_there(folder / GENERATION)
    open_checkpoint(folder)


def _hub_shards(settings: ModelConfig) -> tuple[str, ...]:
    """Paths, or patterns of paths, of the weight files of a model on the hub."""
    files = stated_files(settings.path, settings.revision, "model") or {}
    return shards_in(files, hub_json(settings.path, settings.revision, INDEX)) or USUAL_SHARDS


def _download_model(settings: ModelConfig, weights: Iterable[str]) -> Path:
    """The folder of a hub model in the cache. `weights`: patterns of paths of weight files."""
    patterns = (*DESCRIBING, INDEX, *BESIDE, ADAPTER, *weights)
    return _download("model.path", settings.path, settings.revision, patterns)


def _download(setting: str, path: str, revision: str | None, patterns: Iterable[str]) -> Path:
    """The folder in the cache of the hub model `path`, with the files that fit `patterns`.
    `setting`: the setting that names the model."""
    from huggingface_hub.errors import HFValidationError

    try:
        return _snapshot(
            path,
            revision,
            local_files_only=not is_hub_reachable(),
            allow_patterns=[*patterns],
            ignore_patterns=[".*", "*/.*"],
        )
    except (OSError, HFValidationError) as error:
        # all errors of the hub and of the network are OSErrors
        at_revision = f" at revision {revision}" if revision else ""
        error_type = UserError if is_hub_reachable() else Unavailable
        raise error_type(
            f"{setting}={path} is no folder, and the hub gave no such model{at_revision} "
            f"({reason_in(error)}): check the name, the revision and the network, or give a folder"
        ) from None


def _snapshot(path: str, revision: str | None, **options: Any) -> Path:
    """The folder of the hub model `path` in the cache. `options`: further arguments of
    snapshot_download."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, revision=revision, **options))
