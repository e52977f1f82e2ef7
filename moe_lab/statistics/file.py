"""Read a file of statistics without torch: a process that scores needs a few sums per expert and no more."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from moe_lab.errors import UserError

SCHEMA = 1


def read(path: Path | str, framework: str = "np", only: Collection[str] | None = None) -> dict[int, dict[str, Any]]:
    """Layer -> name -> array (fp64 numpy; torch tensors with framework="pt"), names as in sums.py, or `only` some.

    UserError when the file is missing, damaged, not statistics, or written by a newer moe_lab.
    """
    header(path)
    layers: dict[int, dict[str, Any]] = {}
    with safe_open(path, framework=framework) as file:
        for key in file.keys():  # noqa: SIM118 (a safetensors file is not iterable)
            layer, name = key.split("/")
            if only is None or name in only:
                layers.setdefault(int(layer), {})[name] = file.get_tensor(key)
    return dict(sorted(layers.items()))


def by_layer(passes: Iterable[Mapping[int, Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Layer -> the arrays of several passes over one model, by name."""
    merged: dict[int, dict[str, Any]] = {}
    for layers in passes:
        for layer, arrays in layers.items():
            merged.setdefault(layer, {}).update(arrays)
    return merged


def header(path: Path | str) -> dict[str, Any]:
    """What the sums in a file are sums of: kind, fingerprint, rows. Errors as `read`."""
    try:
        with safe_open(path, framework="np") as file:
            content: dict[str, Any] = dict(json.loads((file.metadata() or {}).get("moe_lab", "{}")))
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise UserError(f"statistics={path} cannot be read: {error}") from error
    schema = content.pop("schema", None)
    if schema is None or schema > SCHEMA:
        raise UserError(
            f"statistics={path} has schema {schema}, expected at most {SCHEMA}: it is of a newer moe_lab or none"
        )
    return content
