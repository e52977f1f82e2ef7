"""Paths of files that ship with moe_lab, of caches and of stores, and checks of names that become
part of a path. Does not import torch."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from moe_lab.errors import UserError, secrets_in, unknown_name_error

PREFIX = "pocket:"
"""Beginning of the paths of shipped models and files."""
DATA = Path(__file__).parent / "pocket" / "data"
"""Folder of shipped models and files."""


def conf() -> Path:
    """The folder of configuration groups. In a clone, a link to conf/ of the repository."""
    return Path(__file__).parent / "conf"


def resolve(path: str) -> str:
    """The path of the file or folder that `pocket:NAME` stands for. Other paths and hub ids are
    returned unchanged.

    NAME is the folder of a shipped model, such as pocket:olmoe, or a shipped file, such as
    pocket:calibration/general.jsonl. Raises UserError when nothing with this name is shipped.
    """
    if not path.startswith(PREFIX):
        return path
    shipped = shipped_paths()
    name = path.removeprefix(PREFIX)
    if name not in shipped:
        folder = name.split("/")[0]
        # names in the same folder; if `name` has no slash, also all names without one: the models
        similar = [
            other for other in shipped if other.split("/")[0] == folder or "/" not in name + other
        ]
        raise unknown_name_error("path", path, [PREFIX + other for other in similar or shipped])
    return str(shipped[name])


def local_path(path: str) -> Path:
    """The path on this machine that `path` stands for. `path` may be pocket:NAME (see `resolve`) or
    begin with ~."""
    return Path(resolve(path)).expanduser()


@lru_cache
def shipped_paths() -> Mapping[str, Path]:
    """Name -> path, for all models and other files that ship with moe_lab. The name of a model is
    that of its folder. The name of any other file has the form FOLDER/FILE."""
    paths: dict[str, Path] = {}
    for folder in sorted(path for path in DATA.iterdir() if path.is_dir()):
        if (folder / "config.json").exists():
            paths[folder.name] = folder
        else:
            paths.update(
                {
                    f"{folder.name}/{file.name}": file
                    for file in sorted(folder.iterdir())
                    if file.is_file()
                }
            )
    return paths


def is_path(text: str) -> bool:
    """Whether `text` looks like a path, a hub id or pocket:NAME, or is a file or folder here."""
    return "/" in text or text.startswith(PREFIX) or os.path.exists(text)


def name_of_path(path: str) -> str:
    """A valid name made from a path: NAME of FOLDER/NAME, AUTHOR/NAME and pocket:NAME."""
    return valid_name(path.rstrip("/").rpartition("/")[2].rpartition(":")[2])


def cache_folder(name: str) -> Path:
    """The folder `name` in the user's cache of moe_lab."""
    return user_cache() / "moe_lab" / name


def private_cache(name: str) -> Path:
    """The folder `name` in the user's cache of moe_lab, for files that are executed. Its
    permissions let no other user enter or replace it. Raises UserError when the folder or its
    parent belongs to another user, and when the home folder cannot be written."""
    # `user_cache` returns a temporary folder of this name if the home folder cannot be written;
    # other nodes do not see that folder
    if user_cache().name == f"moe_lab-{os.getuid()}":
        raise UserError(
            "the home folder cannot be written: expected XDG_CACHE_HOME=FOLDER that all nodes see"
        )
    _make_private(cache_folder(name).parent, 0o755)
    return _make_private(cache_folder(name), 0o700)


def _make_private(folder: Path, mode: int) -> Path:
    """Make `folder` if it does not exist, and remove its permissions that are not in `mode`.
    UserError when the folder belongs to another user."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # if `folder` is a link, lstat has the owner of the link, and stat the owner of its target
    if {folder.lstat().st_uid, folder.stat().st_uid} != {os.getuid()}:
        raise UserError(
            f"{folder} is somebody else's: expected XDG_CACHE_HOME=FOLDER, where you may write"
        )
    folder.chmod(folder.stat().st_mode & mode)
    return folder


def user_cache() -> Path:
    """The folder of the user's caches: $XDG_CACHE_HOME, by default ~/.cache. If the folder cannot
    be written, a temporary folder of the user. UserError when the temporary folder belongs to
    another user."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    # not Path.exists, which raises an error below a folder that may not be entered
    nearest_existing = next(filter(os.path.exists, (default, *default.parents)))
    # without a home folder, expanduser does not replace "~"
    if default.parts[0] != "~" and os.access(nearest_existing, os.W_OK | os.X_OK):
        return default
    return _make_private(Path(tempfile.gettempdir(), f"moe_lab-{os.getuid()}"), 0o700)


def store_folder(store: str) -> Path:
    """The setting `store` as a path. UserError for an empty path and for a URL."""
    if not store:
        raise UserError("store= names no folder: write store=FOLDER")
    if "://" in store:
        for problem in secrets_in("store", store):  # at most one, whose text does not show the URL
            raise UserError(problem)
        raise UserError(
            f"store={store} is a URL: expected a folder, which `rclone copy FOLDER REMOTE:PATH` "
            "shares"
        )
    return Path(store)


LONGEST_NAME = 100
"""Maximum number of bytes of a name. Names of folders contain several names, and file systems allow
255 bytes."""
NAME = re.compile(r"\w[\w.+-]*")
"""Pattern of a name that may be part of a path."""


def validate_name(text: str) -> str:
    """Return `text` unchanged, as pydantic requires of a validator. ValueError unless `text` can be
    part of a folder's name."""
    # "replace": a surrogate, which cannot be encoded, counts as one byte
    if len(text.encode("utf-8", "replace")) > LONGEST_NAME:
        raise ValueError(f"expected at most {LONGEST_NAME} bytes, since folders are named by it")
    if not NAME.fullmatch(text):
        suggestion = valid_name(text, "")
        hint = f", such as {suggestion}" if suggestion else ""
        raise ValueError(
            f"expected a valid folder name: letters, digits and _, after the first also . + -{hint}"
        )
    return text


def valid_name(text: str, default: str = "unnamed") -> str:
    """A valid part of a folder's name, made from `text`; `default` if nothing is left of `text`."""
    name = re.sub(r"[^\w.+-]+", "_", text).strip("_.+-")
    # "ignore" removes the bytes of a last character that the cut has split
    return name.encode()[:LONGEST_NAME].decode(errors="ignore") or default


def check_name(field: str, name: str) -> None:
    """Raise UserError when `name`, the value of the setting `field`, cannot be part of a folder's
    name. "none" is reserved: a setting with this value chooses nothing."""
    if name == "none":
        raise UserError(f"{field}={name} is reserved: expected another name, such as {name}_1")
    try:
        validate_name(name)
    except ValueError as error:
        raise UserError(f"{field}={name}: {error}") from None


def shorten(name: str, longest: int = LONGEST_NAME) -> str:
    """`name` with at most `longest` bytes: in a longer `name`, a digest of the whole replaces the
    end."""
    encoded = name.encode()
    if len(encoded) <= longest:
        return name
    # 9 bytes: a hyphen and 8 digits of the digest
    return f"{encoded[: longest - 9].decode(errors='ignore')}-{sha256(encoded).hexdigest()[:8]}"


def is_of_group(folder: Path) -> bool:
    """Whether a folder is shared by a group: all members may write in it, and new files in it
    belong to the group."""
    shared = stat.S_ISGID | stat.S_IWGRP
    return folder.exists() and folder.stat().st_mode & shared == shared
