"""Is a model the one that is expected? As far as its config.json says, before anything is loaded. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.checkpoint import read_json
from moe_lab.models.families import COUNT_FIELDS, TOP_K_FIELDS, WIDTH_FIELDS
from moe_lab.paths import resolve

FIELDS = {
    "layers": ("num_hidden_layers",),
    "experts": COUNT_FIELDS,
    "top_k": TOP_K_FIELDS,
    "hidden": ("hidden_size",),
    "width": WIDTH_FIELDS,
}
"""Name in model.expected -> fields of config.json, of which the first that is there states it."""


def check_expected(settings: ModelConfig) -> None:
    """UserError if the config.json of a model on this machine states another number than `model.expected`."""
    folder = Path(resolve(settings.path)).expanduser()
    if settings.expected is not None and (folder / "config.json").is_file():
        config = read_json(folder / "config.json")
        text = config.get("text_config", config)
        stated = {name: next((text[of] for of in fields if of in text), None) for name, fields in FIELDS.items()}
        compare({name: value for name, value in stated.items() if isinstance(value, int)}, settings)


def compare(found: Mapping[str, int], settings: ModelConfig) -> None:
    """UserError naming the first number of `found` that is not as `model.expected` says, if that says anything; the sum
    of all parameters tells least, so it comes last."""
    expected = {} if settings.expected is None else asdict(settings.expected)
    for name, value in sorted(expected.items(), key=lambda item: item[0] == "parameters"):
        if (there := found.get(name, value)) != value:
            raise UserError(
                f"model={settings.name}: {settings.path} has {name}={there}, but model.expected.{name}={value}: "
                "give the path and revision of that model, or model=local, which expects nothing"
            )
