"""A plan: which experts each layer keeps, and which channels of them. The only thing pruning needs, and plain JSON.
No torch.

    {"schema": 1, "digest": "<sha256 of layers>",
     "layers": {"0": {"experts": 64, "keep": [0, 2, ...]}, ...}, "provenance": {...}}

A plan about channels adds `width`, channels per expert before pruning, and `channels`, one bit mask per kept expert:
hexadecimal, the lowest bit of the first byte is channel 0. Readers refuse what they do not know.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from moe_lab.errors import UserError
from moe_lab.models.routing import PerLayer, at, fewest_experts

SCHEMA = 1
ZERO_EXPERT = ("keep_null", "drop")
"""What becomes of an expert that keeps no channel: it stays routable and gives 0, or it goes with its router row."""
Mask = NDArray[numpy.bool_]
"""(E, I): which channels of which experts are kept."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Kept experts per layer, their ids ascending, so that survivors stay in order.

    Plans that keep the same are equal.
    """

    experts: dict[int, tuple[int, ...]]
    """Layer -> ids of the experts to keep, ascending."""
    n_experts: dict[int, int]
    """Layer -> number of experts before pruning."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Where the plan comes from: model, criterion, calibration, ratio and so on; no part of the digest."""
    channels: dict[int, Mask] = field(default_factory=dict)
    """Layer -> (E, I) bool, True for kept channels, over all experts the layer had; empty for a plan of whole experts.
    Rows of dropped experts are False; a kept expert with a row of False is a null expert: tokens are routed to it and
    it gives 0."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __post_init__(self) -> None:
        if not self.experts or set(self.experts) != set(self.n_experts):
            raise UserError(
                f"plan: kept experts are given for layers {sorted(self.experts)} and expert counts for layers "
                f"{sorted(self.n_experts)}: both must name the same layers, at least one"
            )
        for layer, kept in self.experts.items():
            check_ids(layer, kept, self.n_experts[layer])
        if self.channels and set(self.channels) != set(self.experts):
            raise UserError(
                f"plan: channels are given for layers {sorted(self.channels)}, expected all of {sorted(self.experts)} "
                "or none"
            )
        for layer, mask in self.channels.items():
            check_mask(layer, mask, self.experts[layer], self.n_experts[layer])

    def widths(self, layer: int) -> tuple[int, ...]:
        """Kept channels of each kept expert of `layer`, in the order of `experts`; only for plans with channels."""
        return tuple(int(width) for width in self.channels[layer][list(self.experts[layer])].sum(1))

    @property
    def digest(self) -> str:
        """sha256 of what is kept: equal for plans that give the same pruned model."""
        return hashlib.sha256(_canonical(self._layers()).encode()).hexdigest()

    def check(self, top_k: PerLayer, n_group: PerLayer = 1, topk_group: PerLayer | None = None) -> None:
        """Raise UserError, naming layer and nearest feasible number, unless the routers work with what is kept.

        `top_k` is the number of experts a token is routed to; `n_group` and `topk_group` (None: all) describe
        group-limited routers, which need the same number of survivors in each group of adjacent experts. Each is one
        number for all layers, or a number per layer.
        """
        for layer, kept in self.experts.items():
            k, groups, reached = (at(value, layer) for value in (top_k, n_group, topk_group or n_group))
            fewest = fewest_experts(k, groups, reached)
            if len(kept) < fewest:
                raise UserError(
                    f"plan: layer {layer} keeps {len(kept)} of {self.n_experts[layer]} experts, but its router needs "
                    f"at least {fewest} (top_k={k}{f', n_group={groups}' if groups > 1 else ''}): keep {fewest} or "
                    "more"
                )
            check_groups(layer, kept, self.n_experts[layer], groups)

    def check_origin(self, sha256: str, where: object) -> None:
        """Raise UserError if the plan was made for another model than the one in the folder `where`.

        The plan says so by `model_sha256` of its provenance, if it has one; `sha256` is the fingerprint of the folder.
        """
        made_for = self.provenance.get("model_sha256") or sha256
        if made_for != sha256:
            raise UserError(
                f"plan is for another model: it was made for the one of fingerprint {str(made_for)[:12]}, and {where} "
                f"has {sha256[:12]}: give that model, or take model_sha256 out of the plan to try it on another"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, beside the target first and then renamed."""
        target = Path(path)
        content = {
            "schema": SCHEMA,
            "digest": self.digest,
            "layers": self._layers(),
            "provenance": self.provenance,
        }
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan; UserError when it is missing, damaged or of a newer schema."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"plan={path} does not exist: expected a plan.json") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"plan={path} is damaged: expected JSON, {error}") from None
        return cls._from_json(content, path)

    @classmethod
    def _from_json(cls, content: Any, path: str | os.PathLike[str]) -> Plan:
        schema = content.get("schema") if isinstance(content, dict) else None
        if isinstance(schema, int) and schema > SCHEMA:
            raise UserError(
                f"plan={path} has schema {schema}, written by a newer moe_lab: this one reads up to {SCHEMA}"
            )
        if schema != SCHEMA:
            raise UserError(f"plan={path} has schema {schema}: expected a plan of schema {SCHEMA}")
        layers = content.get("layers")
        if not isinstance(layers, dict) or not all(is_layer(key, layer) for key, layer in layers.items()):
            raise UserError(
                f"plan={path} is damaged: expected layers with the fields experts and keep, and width and channels in "
                "all layers or in none"
            )
        plan = cls(
            experts={int(layer): tuple(value["keep"]) for layer, value in layers.items()},
            n_experts={int(layer): value["experts"] for layer, value in layers.items()},
            provenance=content.get("provenance", {}),
            channels={int(layer): unpack_mask(value) for layer, value in layers.items() if "channels" in value},
        )
        if content.get("digest") != plan.digest:
            raise UserError(f"plan={path} is damaged: its digest is {content.get('digest')}, expected {plan.digest}")
        return plan

    def _layers(self) -> dict[str, Any]:
        layers: dict[str, Any] = {}
        for layer in sorted(self.experts):
            kept = list(self.experts[layer])
            layers[str(layer)] = {"experts": self.n_experts[layer], "keep": kept}
            if self.channels:
                mask = self.channels[layer]
                packed = numpy.packbits(mask[kept], axis=1, bitorder="little")
                layers[str(layer)] |= {"width": mask.shape[1], "channels": [row.tobytes().hex() for row in packed]}
        return layers


def router_limits(layers: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[int, int]]:
    """What plans must respect, as `make_plan` takes it: top_k, n_group and topk_group -> layer -> number.

    `layers`: layer -> facts of it (`models.facts`).
    """
    return {
        name: {layer: about[name] for layer, about in layers.items()} for name in ("top_k", "n_group", "topk_group")
    }


def make_plan(
    scores: Mapping[int, Sequence[float]],
    remove: Mapping[int, int],
    *,
    top_k: PerLayer,
    n_group: PerLayer = 1,
    topk_group: PerLayer | None = None,
    provenance: Mapping[str, Any],
) -> Plan:
    """The plan that drops, in each layer, the `remove[layer]` experts of lowest score.

    `scores`: layer -> one finite number per expert, higher means keep; equal scores fall by expert index, lower
    first. Layers of group-limited routers (`n_group` > 1) lose the same number in each group. `top_k`, `n_group` and
    `topk_group` are as in `Plan.check`. UserError for scores that are not finite, for layers that differ between
    `scores` and `remove`, and for what `Plan.check` refuses.
    """
    if set(scores) != set(remove):
        raise UserError(
            f"allocation: removes experts in layers {sorted(remove)}, but scores are of layers {sorted(scores)}"
        )
    values = {layer: _finite(layer, scores[layer]) for layer in sorted(scores)}
    plan = Plan(
        experts={layer: _survivors(layer, row, remove[layer], at(n_group, layer)) for layer, row in values.items()},
        n_experts={layer: len(row) for layer, row in values.items()},
        provenance=dict(provenance),
    )
    plan.check(top_k, n_group, topk_group)
    return plan


def make_channel_plan(
    scores: Mapping[int, NDArray[numpy.float64]],
    keep: Mapping[int, NDArray[numpy.int64]],
    *,
    zero_expert: str = "keep_null",
    top_k: PerLayer,
    n_group: PerLayer = 1,
    topk_group: PerLayer | None = None,
    provenance: Mapping[str, Any],
) -> Plan:
    """The plan that keeps, of each expert, the `keep[layer][expert]` channels of highest score.

    `scores`: layer -> (E, I), finite, higher means keep; equal scores fall by channel index, lower first. `keep`:
    layer -> (E,) numbers from 0 to I. An expert without channels stays as a null expert (`zero_expert` keep_null) or
    is dropped with its router row (drop). UserError for scores that are not finite, numbers out of range, and what
    `Plan.check` refuses.
    """
    if set(scores) != set(keep):
        raise UserError(f"allocation: budgets are of layers {sorted(keep)}, but scores are of layers {sorted(scores)}")
    masks = {layer: _best_channels(layer, scores[layer], keep[layer]) for layer in sorted(scores)}
    if not any(mask.any() for mask in masks.values()):
        raise UserError("allocation: keeps no channel of any expert, expected at least one: choose a smaller ratio")
    routable = {layer: mask.any(1) | (zero_expert == "keep_null") for layer, mask in masks.items()}
    plan = Plan(
        experts={layer: tuple(numpy.flatnonzero(flags).tolist()) for layer, flags in routable.items()},
        n_experts={layer: len(mask) for layer, mask in masks.items()},
        provenance=dict(provenance),
        channels=masks,
    )
    try:
        plan.check(top_k, n_group, topk_group)
    except UserError as error:
        raise UserError(f"{error} (allocation.parameters.zero_expert=keep_null keeps them all routable)") from None
    return plan


def _best_channels(layer: int, scores: NDArray[numpy.float64], keep: NDArray[numpy.int64]) -> Mask:
    """(E, I) bool: the `keep` (E,) best of each row of `scores` (E, I)."""
    count, width = scores.shape
    if bad := numpy.argwhere(~numpy.isfinite(scores)).tolist():
        expert, channel = bad[0]
        raise UserError(
            f"scores: layer {layer}, expert {expert}, channel {channel} is {scores[expert, channel]}: expected a "
            "finite number"
        )
    if keep.shape != (count,) or keep.min() < 0 or keep.max() > width:
        raise UserError(
            f"allocation: keeps {keep.tolist()} channels in layer {layer}: expected {count} numbers from 0 to {width}"
        )
    order = numpy.argsort(scores, axis=1, kind="stable")
    places = numpy.empty_like(order)
    numpy.put_along_axis(places, order, numpy.arange(width)[None, :].repeat(count, 0), axis=1)
    best: Mask = places >= (width - keep)[:, None]
    return best


def _survivors(layer: int, scores: list[float], remove: int, n_group: int) -> tuple[int, ...]:
    """Ids left after dropping the lowest `remove` of `scores`, an equal share from each group."""
    count = len(scores)
    if not 0 <= remove < count:
        raise UserError(f"allocation: removes {remove} of {count} experts in layer {layer}: expected 0 to {count - 1}")
    if remove % n_group or count % n_group:
        nearest = min((remove // n_group) * n_group, count - n_group)
        raise UserError(
            f"allocation: removes {remove} of {count} experts in layer {layer}, whose router has {n_group} groups that "
            f"must lose equally: {nearest} is the nearest below"
        )
    size, share = count // n_group, remove // n_group
    dropped: set[int] = set()
    for first in range(0, count, size):
        group = range(first, first + size)
        dropped.update(sorted(group, key=lambda expert: (scores[expert], expert))[:share])
    return tuple(expert for expert in range(count) if expert not in dropped)


def _finite(layer: int, scores: Sequence[float]) -> list[float]:
    values = [float(score) for score in scores]
    for expert, value in enumerate(values):
        if not math.isfinite(value):
            raise UserError(f"scores: layer {layer}, expert {expert} is {value}: expected a finite number")
    return values


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def check_ids(layer: int, kept: tuple[int, ...], count: int) -> None:
    """Raise UserError unless `kept` are ids of `count` experts, ascending, at least one."""
    if not kept:
        raise UserError(f"plan: layer {layer} keeps no expert of {count}: keep at least 1")
    for expert in kept:
        if not 0 <= expert < count:
            raise UserError(f"plan: layer {layer} keeps expert {expert}: expected an id from 0 to {count - 1}")
    if list(kept) != sorted(set(kept)):
        raise UserError(
            f"plan: layer {layer} keeps {list(kept)}: expected {sorted(set(kept))}, ascending and each once"
        )


def check_mask(layer: int, mask: Mask, kept: tuple[int, ...], count: int) -> None:
    """Raise UserError unless `mask` is (count, I) bool and only keeps channels of kept experts."""
    if mask.ndim != 2 or mask.shape[0] != count or mask.dtype != numpy.bool_:
        raise UserError(
            f"plan: layer {layer} has a mask of {mask.dtype} {mask.shape}: expected bool ({count}, channels)"
        )
    if strange := sorted(set(numpy.flatnonzero(mask.any(1)).tolist()) - set(kept)):
        raise UserError(f"plan: layer {layer} keeps channels of expert {strange[0]}, which it does not keep")


def check_groups(layer: int, kept: tuple[int, ...], count: int, n_group: int) -> None:
    """Raise UserError unless every group of adjacent experts keeps equally many."""
    if count % n_group:
        raise UserError(f"plan: layer {layer} has {count} experts, which do not fall into {n_group} equal groups")
    size = count // n_group
    survivors = [0] * n_group
    for expert in kept:
        survivors[expert // size] += 1
    if len(set(survivors)) > 1:
        raise UserError(
            f"plan: layer {layer} keeps {survivors} experts of the {n_group} groups of its router, which must keep "
            f"equally many: {max(1, round(len(kept) / n_group))} each is nearest"
        )


def is_layer(key: str, layer: Any) -> bool:
    """Whether `layer` is the content of a layer in plan.json."""
    return (
        key.isdigit()
        and isinstance(layer, dict)
        and set(layer) in ({"experts", "keep"}, {"experts", "keep", "width", "channels"})
        and type(layer["experts"]) is int
        and isinstance(layer["keep"], list)
        and all(type(expert) is int for expert in layer["keep"])
        and ("channels" not in layer or are_masks(layer))
    )


def are_masks(layer: dict[str, Any]) -> bool:
    """Whether the channels of a layer in plan.json are one bit mask per kept expert, of the right length."""
    width, masks = layer["width"], layer["channels"]
    if type(width) is not int or width < 1 or not isinstance(masks, list) or not isinstance(layer["keep"], list):
        return False
    if not all(type(expert) is int and 0 <= expert < layer["experts"] for expert in layer["keep"]):
        return False
    if len(masks) != len(layer["keep"]):
        return False
    digits = 2 * ((width + 7) // 8)
    for mask in masks:
        if not isinstance(mask, str) or len(mask) != digits:
            return False
        if not set(mask) <= set("0123456789abcdef"):
            return False
    return True


def unpack_mask(layer: dict[str, Any]) -> Mask:
    """The mask (E, I) of a layer of plan.json."""
    mask: Mask = numpy.zeros((layer["experts"], layer["width"]), dtype=numpy.bool_)
    for expert, text in zip(layer["keep"], layer["channels"], strict=True):
        bits = numpy.frombuffer(bytes.fromhex(text), dtype=numpy.uint8)
        mask[expert] = numpy.unpackbits(bits, count=layer["width"], bitorder="little")
    return mask
