"""Compare the experts and channels that two plans keep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_lab.errors import UserError

FILE = "plan.json"


@dataclass(frozen=True)
class LayerPlan:
    """Experts and channels that a plan keeps in one layer."""

    experts: int
    """Number of experts in the unpruned layer."""
    kept: Mapping[int, int | None]
    """Kept expert -> its kept channels as bits of an integer; None: all channels."""
    width: int | None
    """Channels of an expert; None for plans of whole experts, which do not record it."""
    replaced: Mapping[str, Any] = field(default_factory=dict)
    """What the others are replaced by, as in plan.json: constants, merged; empty where they are removed."""


Layers = dict[int, LayerPlan]


def read(path: Path) -> Layers:
    """Read the plan in a file, or in a folder's plan.json. Raises UserError when it is not a plan."""
    file = path / FILE if path.is_dir() else path
    try:
        return layers(json.loads(file.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"plan={path} cannot be read as a plan: name a plan.json that moe_lab wrote") from None


def layers(document: Mapping[str, Any]) -> Layers:
    """The layers of a plan's JSON document."""
    return {int(layer): _layer(about) for layer, about in document["layers"].items()}


def _layer(about: Mapping[str, Any]) -> LayerPlan:
    keep = [int(expert) for expert in about["keep"]]
    if "channels" not in about:
        return LayerPlan(int(about["experts"]), dict.fromkeys(keep), None)
    kept = dict(zip(keep, (int(mask, 16) for mask in about["channels"]), strict=True))
    replaced = {name: about[name] for name in ("constants", "merged") if name in about}
    if replaced:
        kept = {expert: bits for expert, bits in kept.items() if bits}
    return LayerPlan(int(about["experts"]), kept, int(about["width"]), replaced)


COLUMNS = (
    *("layer", "experts", "both", "out", "in", "jaccard", "chance", "channels_both", "channels_out", "channels_in"),
    "replaced",
)


def changes(first: Layers, second: Layers) -> pd.DataFrame:
    """Compare two plans, one row per layer; columns COLUMNS.

    `out` and `in` are tuples of experts that only the first, or only the second, plan keeps; `both` counts experts that
    both keep. `jaccard` is intersection over union, `chance` its value for random sets of these sizes (ratio of
    expectations); NaN when neither plan keeps an expert. Channels are counted over all experts, of which a dropped one
    keeps none; NaN when neither plan has channels. `replaced`: whether they replace dropped experts by the same.
    Raises UserError for plans of different models.
    """
    if first.keys() != second.keys():
        only = sorted(first.keys() ^ second.keys())
        raise UserError(f"these plans are of different models: layer {only[0]} is in one of them only")
    return pd.DataFrame([{"layer": layer, **_change(first[layer], second[layer], layer)} for layer in sorted(first)])[
        list(COLUMNS)
    ]


def _change(first: LayerPlan, second: LayerPlan, layer: int) -> dict[str, Any]:
    if first.experts != second.experts:
        raise UserError(
            f"these plans are of different models: layer {layer} has {first.experts} experts in one and "
            f"{second.experts} in the other"
        )
    one, other = set(first.kept), set(second.kept)
    expected = len(one) * len(other) / first.experts
    change = {
        "experts": first.experts,
        "both": len(one & other),
        "out": tuple(sorted(one - other)),
        "in": tuple(sorted(other - one)),
        "jaccard": len(one & other) / len(one | other) if one | other else np.nan,
        "chance": expected / (len(one) + len(other) - expected) if one | other else np.nan,
    }
    return {**change, **_channels(first, second, layer), "replaced": first.replaced == second.replaced}


def _channels(first: LayerPlan, second: LayerPlan, layer: int) -> dict[str, float]:
    widths = {plan.width for plan in (first, second) if plan.width is not None}
    if not widths:
        return dict.fromkeys(("channels_both", "channels_out", "channels_in"), np.nan)
    if len(widths) > 1:
        low, high = sorted(widths)
        raise UserError(f"these plans are of different models: experts of layer {layer} have {low} and {high} channels")
    whole = (1 << widths.pop()) - 1

    def bits(plan: LayerPlan, expert: int) -> int:
        kept = plan.kept.get(expert, 0)
        return whole if kept is None else kept

    pairs = [(bits(first, expert), bits(second, expert)) for expert in {*first.kept, *second.kept}]
    return {
        "channels_both": sum((one & other).bit_count() for one, other in pairs),
        "channels_out": sum((one & ~other).bit_count() for one, other in pairs),
        "channels_in": sum((other & ~one).bit_count() for one, other in pairs),
    }
