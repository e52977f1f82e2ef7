"""A plan: which experts each layer keeps. The only thing pruning needs, and plain JSON. No torch.

    {"schema": 1, "digest": "<sha256 of layers>",
     "layers": {"0": {"experts": 64, "keep": [0, 2, ...]}, ...}, "provenance": {...}}

A layer is an object so that it can say more one day, such as kept channels per expert; readers refuse what they do
not know.
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

from moe_lab.errors import UserError
from moe_lab.models.routing import PerLayer, at, fewest_experts

SCHEMA = 1


@dataclass(frozen=True)
class Plan:
    """Kept experts per layer; the ids are sorted, so that survivors stay in order."""

    experts: dict[int, tuple[int, ...]]
    """Layer -> ids of the experts to keep, ascending."""
    n_experts: dict[int, int]
    """Layer -> number of experts before pruning."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Where the plan comes from: model, criterion, calibration, ratio and so on; no part of the digest."""

    def __post_init__(self) -> None:
        if not self.experts or set(self.experts) != set(self.n_experts):
            raise UserError(
                f"plan: kept experts are given for layers {sorted(self.experts)} and expert counts for layers "
                f"{sorted(self.n_experts)}: both must name the same layers, at least one"
            )
        for layer, kept in self.experts.items():
            _check_ids(layer, kept, self.n_experts[layer])

    @property
    def digest(self) -> str:
        """sha256 of what is kept: equal for plans that give the same pruned model."""
        return hashlib.sha256(_canonical(self._layers()).encode()).hexdigest()

    def check(self, top_k: PerLayer, n_group: PerLayer = 1, topk_group: PerLayer | None = None) -> None:
        """Raise UserError, naming the layer and the nearest feasible number, unless the routers can work with what is
        kept.

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
            _check_groups(layer, kept, self.n_experts[layer], groups)

    def uniform_count(self) -> int:
        """The number of experts every layer keeps; UserError when layers differ."""
        counts = sorted({len(kept) for kept in self.experts.values()})
        if len(counts) > 1:
            raise UserError(
                f"plan keeps {counts[0]} to {counts[-1]} experts a layer, but a stock checkpoint has one number for "
                "all: evaluate it with a mask, or use allocation=uniform"
            )
        return counts[0]

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
        if not isinstance(layers, dict) or not all(_is_layer(key, layer) for key, layer in layers.items()):
            raise UserError(f"plan={path} is damaged: expected layers with the fields experts and keep")
        plan = cls(
            experts={int(layer): tuple(value["keep"]) for layer, value in layers.items()},
            n_experts={int(layer): value["experts"] for layer, value in layers.items()},
            provenance=content.get("provenance", {}),
        )
        if content.get("digest") != plan.digest:
            raise UserError(f"plan={path} is damaged: its digest is {content.get('digest')}, expected {plan.digest}")
        return plan

    def _layers(self) -> dict[str, Any]:
        return {
            str(layer): {"experts": self.n_experts[layer], "keep": list(self.experts[layer])}
            for layer in sorted(self.experts)
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


def _check_ids(layer: int, kept: tuple[int, ...], count: int) -> None:
    if not kept:
        raise UserError(f"plan: layer {layer} keeps no expert of {count}: keep at least 1")
    for expert in kept:
        if not 0 <= expert < count:
            raise UserError(f"plan: layer {layer} keeps expert {expert}: expected an id from 0 to {count - 1}")
    if list(kept) != sorted(set(kept)):
        raise UserError(
            f"plan: layer {layer} keeps {list(kept)}: expected {sorted(set(kept))}, ascending and each once"
        )


def _check_groups(layer: int, kept: tuple[int, ...], count: int, n_group: int) -> None:
    if count % n_group:
        raise UserError(f"plan: layer {layer} has {count} experts, which do not fall into {n_group} equal groups")
    size = count // n_group
    survivors = [sum(1 for expert in kept if expert // size == group) for group in range(n_group)]
    if len(set(survivors)) > 1:
        raise UserError(
            f"plan: layer {layer} keeps {survivors} experts of the {n_group} groups of its router, which must keep "
            f"equally many: {max(1, round(len(kept) / n_group))} each is nearest"
        )


def _is_layer(key: str, layer: Any) -> bool:
    return (
        key.isdigit()
        and isinstance(layer, dict)
        and set(layer) == {"experts", "keep"}
        and type(layer["experts"]) is int
        and isinstance(layer["keep"], list)
        and all(type(expert) is int for expert in layer["keep"])
    )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
