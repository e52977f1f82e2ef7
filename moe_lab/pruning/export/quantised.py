"""What is special about exporting a quantised checkpoint: what it cannot become, and names of experts. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import read_json

ZEROS = ("mxfp4",)
"""Methods in which an expert whose bytes are all zero has weights of zero. Others store shapes or offsets beside the
weights."""
FILES = ("hf_quant_config.json", "quant_config.json", "quantize_config.json")
"""Files beside the weights that describe the quantisation to some programs, as config.json does to others."""
DOT = r"\\?\."
EXPERT_NAME = re.compile(
    rf"\blayers{DOT}(?P<layer>\d+){DOT}(?:\w+{DOT})*?experts{DOT}(?P<expert>\d+)(?={DOT}(?![*+?])|\$?$)"
)
"""A numbered expert of a numbered layer, in the name of a module or in a regular expression that names one."""
OTHER_NUMBER = re.compile(rf"\bexperts{DOT}[^.\\]*?\d")
"""Any other mention of experts by number, such as `re:.*experts.(0|1).*`."""
ANY_DIGIT = "[0-9]"


def check_quantised(method: str | None, shape: str, channels: bool = False) -> None:
    """Raise UserError if a checkpoint quantised by `method` cannot be exported in that shape; None: not quantised."""
    if method is None:
        return
    if channels:
        raise UserError(
            f"export={shape}: channels cannot be removed from experts stored as {method}, since several weights share "
            "a scale: expected a plan of whole experts, or a checkpoint in bfloat16 or float32"
        )
    if shape == "masked" and method not in ZEROS:
        raise UserError(
            f"export=masked fills dropped experts with zeros, which is not possible in weights stored as {method}: "
            "expected export=natural, or a checkpoint in bfloat16 or float32"
        )


def renumbered(content: Any, written: Mapping[int, Sequence[int]]) -> Any:
    """A copy of the content of a JSON file in which names of experts follow the experts that are written.

    A quantisation lists modules there that are stored otherwise, or not quantised. `written`: layer -> original ids of
    its experts, in order. List items and fields that name an expert which is not written are left out. Raises UserError
    for a name that means experts by number in several layers.
    """
    if isinstance(content, dict):
        named = ((_renamed(key, written), renumbered(value, written)) for key, value in content.items())
        return {key: value for key, value in named if key is not None}
    if isinstance(content, list):
        items = [_renamed(item, written) if isinstance(item, str) else renumbered(item, written) for item in content]
        return [item for item, original in zip(items, content, strict=True) if item is not None or original is None]
    return content


def renumbered_files(folder: Path, written: Mapping[int, Sequence[int]]) -> dict[str, dict[str, Any]]:
    """Name -> new content of the files of `FILES` that `folder` has."""
    return {name: renumbered(read_json(folder / name), written) for name in FILES if (folder / name).is_file()}


def _renamed(name: str, written: Mapping[int, Sequence[int]]) -> str | None:
    """The name with the expert's new number; None for an expert that is not written."""
    match = EXPERT_NAME.search(name)
    rest = f"{name[: match.start()]} {name[match.end() :]}" if match else name
    if OTHER_NUMBER.search(rest.replace(ANY_DIGIT, "")):
        raise UserError(
            f"quantization_config has {name}, which names experts by number in several layers, but pruning gives them "
            "other numbers in each: expected one name for each layer and expert, such as model.layers.0.mlp.experts.3"
        )
    if match is None or int(match["layer"]) not in written:
        return name
    experts, expert = written[int(match["layer"])], int(match["expert"])
    if expert not in experts:
        return None
    start, end = match.span("expert")
    return f"{name[:start]}{experts.index(expert)}{name[end:]}"
