"""Paths of files that ship with moe_lab and of caches, and checks of names that become part of a
path. No torch."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from moe_lab.errors import UserError, secrets_in, unknown

PREFIX = "pocket:"
DATA = Path(__file__).parent / "pocket" / "data"


def conf() -> Path:
    """The folder of configuration groups: inside the package in a wheel, at the top in a
    checkout."""
    packed = Path(__file__).parent / "conf"
    return packed if packed.is_dir() else Path(__file__).parents[1] / "conf"


def resolve(path: str) -> str:
    """The file or folder of `pocket:NAME`; any other path or hub id unchanged.

    NAME is the folder of a shipped model, such as pocket:olmoe, or a shipped file, such as
    pocket:calibration/general.jsonl. Raises UserError, with similar names, when it does not exist.
    """
    if not path.startswith(PREFIX):
        return path
    names = shipped_paths()
    name = path.removeprefix(PREFIX)
    if name not in names:
        folder = name.split("/")[0]
        similar = [
            other for other in names if other.split("/")[0] == folder or "/" not in name + other
        ]
        raise unknown("path", path, [PREFIX + other for other in similar or names])
    return str(names[name])


def local_path(path: str) -> Path:
    """Path of a file or folder on this machine, whether it exists or not; see `resolve`."""
    return Path(resolve(path)).expanduser()


@lru_cache
def shipped_paths() -> Mapping[str, Path]:
    """Name -> path of everything that ships: model folders, and the files of data folders as
    folder/file."""
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


def cache_folder(name: str) -> Path:
    """The folder `name` in the user's cache of moe_lab."""
    return user_cache() / "moe_lab" / name


def private_cache(name: str) -> Path:
    """The folder `name` in the user's cache of moe_lab, for files that are executed: no other user
    may enter or replace the folder. Raises UserError when it, or the folder around it, belongs to
    somebody else, and without a home folder."""
    if user_cache().name == f"moe_lab-{os.getuid()}":
        raise UserError(
            "the home folder cannot be written: expected XDG_CACHE_HOME=FOLDER that all nodes see"
        )
    _make_private(cache_folder(name).parent, 0o755)
    return _make_private(cache_folder(name), 0o700)


def _make_private(folder: Path, mode: int) -> Path:
    """`folder`, which is made if it does not exist, with at most the permissions in `mode`,
    whatever the umask. Raises UserError when it belongs to somebody else."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # lstat: a link of another user is refused, too
    if {folder.lstat().st_uid, folder.stat().st_uid} != {os.getuid()}:
        raise UserError(
            f"{folder} is somebody else's: expected XDG_CACHE_HOME=FOLDER, where you may write"
        )
    folder.chmod(folder.stat().st_mode & mode)
    return folder


def user_cache() -> Path:
    """The folder of the user's caches: $XDG_CACHE_HOME, or ~/.cache, or a folder of the user among
    temporary files where the home folder cannot be written. Raises UserError when that folder
    belongs to somebody else."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    # below a folder that may not be entered os.path.exists is false, where Path.exists raises
    existing_parent = next(filter(os.path.exists, (default, *default.parents)))
    # expanduser leaves "~" in place without a home folder
    if default.parts[0] != "~" and os.access(existing_parent, os.W_OK | os.X_OK):
        return default
    return _make_private(Path(tempfile.gettempdir(), f"moe_lab-{os.getuid()}"), 0o700)


def store_folder(store: str, field: str = "store") -> Path:
    """The folder of the store that a field names. Raises UserError for an empty path and for a
    URL."""
    if not store:
        raise UserError(f"{field}= names no folder: write {field}=FOLDER")
    if "://" in store:
        for problem in secrets_in(field, store):
            raise UserError(problem)
        raise UserError(
            f"{field}={store} is a URL: expected a folder, which `rclone copy FOLDER REMOTE:PATH` "
            "shares"
        )
    return Path(store)


LONGEST_NAME = 100
"""Most bytes of a name. Names of folders contain several names, and file systems allow 255
bytes."""
NAME = re.compile(r"\w[\w.+-]*")


def checked_name(text: str) -> str:
    """The text. ValueError, which says what is expected, unless it can be part of a folder's
    name."""
    if len(text.encode("utf-8", "replace")) > LONGEST_NAME:
        raise ValueError(f"expected at most {LONGEST_NAME} bytes, since folders are named by it")
    if not NAME.fullmatch(text):
        close = as_name(text, "")
        hint = f", such as {close}" if close else ""
        raise ValueError(
            f"expected a valid folder name: letters, digits and _, after the first also . + -{hint}"
        )
    return text


def as_name(text: str, default: str = "unnamed") -> str:
    """A valid name made of the characters of `text` that names may have; `default` without any."""
    plain = re.sub(r"[^\w.+-]+", "_", text).strip("_.+-")
    return plain.encode()[:LONGEST_NAME].decode(errors="ignore") or default


def check_name(field: str, name: str) -> None:
    """Raise UserError when `name` cannot be part of a path, or is none, which settings use for no
    choice."""
    if name == "none":
        raise UserError(f"{field}={name} is reserved: expected another name, such as {name}_1")
    try:
        checked_name(name)
    except ValueError as error:
        raise UserError(f"{field}={name}: {error}") from None


def shorten(name: str, longest: int = LONGEST_NAME) -> str:
    """`name` in at most `longest` bytes: a longer name is cut, and ends in a digest of the whole
    name."""
    encoded = name.encode()
    if len(encoded) <= longest:
        return name
    return f"{encoded[: longest - 9].decode(errors='ignore')}-{sha256(encoded).hexdigest()[:8]}"


def is_of_group(folder: Path) -> bool:
    """Whether all members of a group may write in a folder, and new files there belong to the
    group."""
    shared = stat.S_ISGID | stat.S_IWGRP
    return folder.exists() and folder.stat().st_mode & shared == shared
