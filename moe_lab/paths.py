"""Where things that ship with moe_lab are. No torch."""

from __future__ import annotations

from pathlib import Path

from moe_lab.errors import unknown

PREFIX = "pocket:"
DATA = Path(__file__).parent / "pocket" / "data"


def conf() -> Path:
    """The folder of configuration groups: packed into the wheel, or at the top of a checkout."""
    packed = Path(__file__).parent / "conf"
    return packed if packed.is_dir() else Path(__file__).parents[1] / "conf"


def resolve(path: str) -> str:
    """The file or folder that `pocket:NAME` stands for; any other path or hub id as it is.

    NAME is the folder of a shipped model, such as pocket:olmoe, or a shipped file, such as
    pocket:calibration/general.jsonl. UserError with the nearest name for one that does not exist.
    """
    if not path.startswith(PREFIX):
        return path
    known = shipped()
    name = path.removeprefix(PREFIX)
    if name not in known:
        kin = [each for each in known if each.split("/")[0] == name.split("/")[0] or "/" not in name + each]
        raise unknown("path", path, [PREFIX + each for each in kin or known])
    return str(known[name])


def shipped() -> dict[str, Path]:
    """Name -> place of everything that ships: model folders, and the files of data folders as folder/file."""
    found: dict[str, Path] = {}
    for folder in sorted(path for path in DATA.iterdir() if path.is_dir()):
        if (folder / "config.json").exists():
            found[folder.name] = folder
        else:
            found.update({f"{folder.name}/{file.name}": file for file in sorted(folder.iterdir()) if file.is_file()})
    return found
