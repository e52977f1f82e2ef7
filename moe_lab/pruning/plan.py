"""A plan: which experts each layer keeps, and which of their channels. Pruning needs nothing else. No torch.

Its JSON form, plan.json:

    {"schema": 1, "digest": "<sha256 of layers>",
     "layers": {"0": {"experts": 64, "keep": [0, 2, ...]}, ...}, "provenance": {...}}

A plan about channels adds `width`, channels per expert before pruning, and `channels`, one bit mask per kept expert:
hexadecimal, the lowest bit of the first byte is channel 0. A plan that merges experts adds `merged`: kept expert ->
{expert: weight} of those that it is the weighted sum of. Arrays are in the file plan.npz beside it, and plan.json has
the sha256 of each: `constants`, what a layer's null experts put out (null experts, hidden; little-endian fp32, named by
the number of the layer), and `alignments`, the order of the channels of experts that are merged into others (experts,
width; little-endian int32, named by the layer and ".alignments").
`Plan.load` rejects unknown fields of layers.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import ArrayLike, NDArray

from moe_lab.errors import UserError
from moe_lab.json_files import fits
from moe_lab.models.config_json import fewest_experts

SCHEMA = 1
Mask = NDArray[numpy.bool_]
"""(E, I): which channels of which experts are kept."""
Constants = NDArray[numpy.float32]
"""(N, H): the outputs of a layer's N null experts, in the order of their ids."""
Alignments = NDArray[numpy.int32]
"""(M, I): a permutation of the channels of each of the M experts of a layer that are merged into others, ascending."""
Routers = Mapping[int, Mapping[str, Any]]
"""Layer -> its facts. Its top_k, n_group and topk_group set how many experts its router needs; see `fewest_experts`.
`protected`, if it is there, are ids of experts that a plan must keep with all their channels."""
_LAYERS = {
    str: {
        "experts": int,
        "keep": [int],
        "width": int | None,
        "channels": list | None,
        "constants": str | None,
        "merged": dict | None,
        "alignments": str | None,
    }
}


@dataclass(frozen=True, eq=False)
class Plan:
    """The experts, and possibly channels, that each layer keeps. Kept experts stay in their original order.

    Plans that give the same pruned model are equal.
    """

    experts: dict[int, tuple[int, ...]]
    """Layer -> ids of the experts to keep, ascending."""
    n_experts: dict[int, int]
    """Layer -> number of experts before pruning."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Where the plan comes from: model, criterion, calibration, ratio and so on; not part of the digest."""
    channels: dict[int, Mask] = field(default_factory=dict)
    """Layer -> (E, I) bool, True for kept channels, over all experts the layer had; empty for a plan of whole experts.
    Rows of dropped experts are False. A kept expert whose row is False is a null expert: tokens are routed to it and
    its output is its constant, or 0."""
    constants: dict[int, Constants] = field(default_factory=dict)
    """Layer -> what its null experts put out; layers that are not named put out 0."""
    merged: dict[int, dict[int, dict[int, float]]] = field(default_factory=dict)
    """Layer -> expert with channels -> {expert: weight} of those that it stands for, itself among them. Its weights are
    the weighted sum of theirs. The others have no channels. Tokens that are routed to any kept one are computed with
    it, and their gates add up; a group may also have members that are not kept, to which no token is routed."""
    alignments: dict[int, Alignments] = field(default_factory=dict)
    """Layer -> for each of its `merged_away` experts, which of its channels is added to each channel of the expert that
    it is merged into. In layers that are not named, channel i is added to channel i."""

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
            _check_ids(layer, kept, self.n_experts[layer])
        if self.channels and set(self.channels) != set(self.experts):
            raise UserError(
                f"plan: channels are given for layers {sorted(self.channels)}, expected all of {sorted(self.experts)} "
                "or none"
            )
        for layer, mask in self.channels.items():
            _check_mask(layer, mask, self.experts[layer], self.n_experts[layer])
        for layer, constants in self.constants.items():
            null = len(self.null_experts(layer)) if layer in self.channels else 0
            if constants.shape[:-1] != (null,) or constants.dtype != numpy.float32:
                raise UserError(
                    f"plan: layer {layer} has constants of {constants.dtype} {constants.shape}: expected float32 "
                    f"({null}, hidden), one for each expert without channels"
                )
            if len(wrong := numpy.flatnonzero(~numpy.isfinite(constants).all(1))):
                expert = self.null_experts(layer)[wrong[0]]
                raise UserError(f"plan: the constant of expert {expert} of layer {layer} is not finite")
        for layer, merged in self.merged.items():
            self._check_merged(layer, merged)
        for layer, alignments in self.alignments.items():
            self._check_alignments(layer, alignments)

    def null_experts(self, layer: int) -> list[int]:
        """Ids of the experts of `layer` that are kept without any channel and for which no other expert stands,
        ascending; only for plans with channels."""
        alone = set(self.experts[layer]) - {one for group in self.merged.get(layer, {}).values() for one in group}
        return [expert for expert in sorted(alone) if not self.channels[layer][expert].any()]

    def owners(self, layer: int) -> list[int]:
        """(E,) for each expert of `layer`, the expert that stands for it: itself unless it is merged into another."""
        owners = list(range(self.n_experts[layer]))
        for owner, group in self.merged.get(layer, {}).items():
            for member in group:
                owners[member] = owner
        return owners

    def computed_as(self, layer: int) -> tuple[int, ...] | None:
        """(E',) for each kept expert of `layer`, the position among the kept ones of the expert that stands for it.

        None where every kept expert stands for itself.
        """
        kept, owners = self.experts[layer], self.owners(layer)
        positions = tuple(kept.index(owners[expert]) for expert in kept)
        return None if positions == tuple(range(len(kept))) else positions

    @property
    def shares_experts(self) -> bool:
        """Whether tokens are routed to experts that are computed with the weights of others."""
        return any(self.computed_as(layer) for layer in self.merged)

    def merged_away(self, layer: int) -> list[int]:
        """Ids of the experts of `layer` that are merged into another one, ascending."""
        groups = self.merged.get(layer, {})
        return sorted(member for owner, group in groups.items() for member in group if member != owner)

    def channel_order(self, layer: int, expert: int) -> Alignments | None:
        """(I,): which channel of `expert` is added to each channel of the expert that it is merged into.

        None for an expert that keeps its order.
        """
        members = self.merged_away(layer)
        if layer not in self.alignments or expert not in members:
            return None
        order: Alignments = self.alignments[layer][members.index(expert)]
        return order

    def _check_merged(self, layer: int, merged: Mapping[int, Mapping[int, float]]) -> None:
        """Raise UserError unless groups are disjoint and each has one expert with all channels, its owner."""
        if layer not in self.channels:
            raise UserError(f"plan: layer {layer} merges experts without a mask of channels: expected one")
        members = [member for group in merged.values() for member in group]
        if len(members) != len(set(members)) or not set(members) <= set(range(self.n_experts[layer])):
            raise UserError(
                f"plan: layer {layer} merges experts {sorted(members)}: expected ids below {self.n_experts[layer]}, "
                "each once"
            )
        for owner, group in merged.items():
            widths = self.channels[layer].sum(1)
            if owner not in group or any(
                widths[one] != (one == owner) * self.channels[layer].shape[1] for one in group
            ):
                raise UserError(
                    f"plan: layer {layer} merges experts {sorted(group)} into {owner}: expected it among them, with "
                    "all channels, and the others without"
                )
            if not all(isinstance(weight, float) and math.isfinite(weight) for weight in group.values()):
                raise UserError(f"plan: layer {layer} merges into expert {owner} with weights that are not finite")

    def _check_alignments(self, layer: int, alignments: Alignments) -> None:
        """Raise UserError unless there is a permutation of all channels for each expert merged into another."""
        shape = (len(self.merged_away(layer)), self.channels[layer].shape[1] if layer in self.merged else 0)
        if alignments.shape != shape or alignments.dtype != numpy.int32:
            raise UserError(
                f"plan: layer {layer} has alignments of {alignments.dtype} {alignments.shape}: expected int32 {shape}, "
                "a permutation for each expert merged into another"
            )
        wrong = numpy.flatnonzero((numpy.sort(alignments, axis=1) != numpy.arange(shape[1])).any(1))
        if len(wrong):
            expert = self.merged_away(layer)[wrong[0]]
            raise UserError(
                f"plan: the alignment of expert {expert} of layer {layer} is not a permutation of {shape[1]} channels"
            )

    def widths(self, layer: int) -> tuple[int, ...]:
        """Kept channels of each kept expert of `layer`, in the order of `experts`; only for plans with channels."""
        return tuple(int(width) for width in self.channels[layer][list(self.experts[layer])].sum(1))

    @property
    def digest(self) -> str:
        """sha256 of what the plan keeps and puts in the place of the rest: equal for plans that give the same model."""
        canonical = json.dumps(self._layers(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def check(self, routers: Routers) -> None:
        """Raise UserError, naming the layer and the nearest feasible number, unless routers work with the kept experts
        and protected experts are kept whole.

        Group-limited routers need the same number of kept experts in each group of adjacent experts.
        """
        for layer, kept in self.experts.items():
            router, count = routers[layer], self.n_experts[layer]
            fewest, n_group = fewest_experts(router), router["n_group"]
            if len(kept) < fewest:
                raise UserError(
                    f"plan: layer {layer} keeps {len(kept)} of {count} experts, but its router needs at least {fewest} "
                    f"(top_k={router['top_k']}{f', n_group={n_group}' if n_group > 1 else ''}): keep {fewest} or more"
                )
            if count % n_group:
                raise UserError(
                    f"plan: layer {layer} has {count} experts, which do not fall into {n_group} equal groups"
                )
            groups = numpy.bincount(numpy.array(kept) // (count // n_group), minlength=n_group).tolist()
            if len(set(groups)) > 1:
                raise UserError(
                    f"plan: layer {layer} keeps {groups} experts of the {n_group} groups of its router, which must "
                    f"keep equally many: {max(1, round(len(kept) / n_group))} each is nearest"
                )
            self._check_protected(layer, router.get("protected", ()))

    def _check_protected(self, layer: int, protected: Sequence[int]) -> None:
        """Raise UserError unless these experts of a layer are kept, with all their channels and no others in them."""
        if lost := sorted(set(protected) - set(self.experts[layer])):
            raise UserError(
                f"plan: layer {layer} keeps {len(self.experts[layer])} of {self.n_experts[layer]} experts and drops "
                f"expert {lost[0]}, one of the {len(protected)} that allocation.protect keeps: expected a plan with "
                "all of them, or a smaller ratio"
            )
        narrowed = [expert for expert in protected if self.channels and not self.channels[layer][expert].all()]
        if narrowed:
            raise UserError(
                f"plan: layer {layer} drops channels of expert {narrowed[0]}, which allocation.protect keeps whole: "
                "expected all of them, or a smaller ratio"
            )
        changed = set(protected) & set(self.merged.get(layer, {}))
        if changed:
            raise UserError(
                f"plan: layer {layer} merges others into expert {min(changed)}, which allocation.protect keeps as it "
                "is: expected it in no group"
            )

    def check_origin(self, sha256: str, where: object) -> None:
        """Raise UserError if the plan was made for another model than the one in the folder `where`.

        `sha256` is the fingerprint of that folder. It is compared with `model_sha256` in the provenance, if that is
        given.
        """
        made_for = self.provenance.get("model_sha256") or sha256
        if made_for != sha256:
            raise UserError(
                f"plan is for another model: it was made for the one of fingerprint {str(made_for)[:12]}, and {where} "
                f"has {sha256[:12]}: give that model, or take model_sha256 out of the plan to try it on another"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, and its arrays beside it (.npz), each to a temporary file that is then renamed."""
        target = Path(path)
        arrays = {
            name.format(layer): values
            for field, name in _ARRAYS.items()
            for layer, values in getattr(self, field).items()
        }
        if arrays:
            file = target.with_suffix(".npz")
            partial = file.with_name(f".{os.getpid()}.{file.name}")
            numpy.savez(partial, allow_pickle=False, **arrays)
            partial.replace(file)
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
        """Read a plan. Raises UserError when it is missing, damaged or of a newer schema."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"plan={path} does not exist: expected a plan.json") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"plan={path} is damaged: expected JSON, {error}") from None
        return cls._from_json(content, Path(path))

    @classmethod
    def _from_json(cls, content: Any, path: Path) -> Plan:
        schema = content.get("schema") if isinstance(content, dict) else None
        if schema != SCHEMA:
            raise UserError(f"plan={path} has schema {schema}: expected a plan of schema {SCHEMA}")
        layers = content.get("layers")
        damaged = UserError(
            f"plan={path} is damaged: expected layers with the fields experts and keep, width and channels in all "
            "layers or in none, and maybe constants, merged or alignments"
        )
        if not fits(layers, _LAYERS):
            raise damaged
        try:
            numbered = {int(layer): value for layer, value in layers.items()}
            channels = {layer: _unpack_mask(value) for layer, value in numbered.items() if "channels" in value}
            merged = {
                layer: {
                    int(owner): {int(member): weight for member, weight in group.items()}
                    for owner, group in value["merged"].items()
                }
                for layer, value in numbered.items()
                if "merged" in value
            }
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            raise damaged from None
        plan = cls(
            experts={layer: tuple(value["keep"]) for layer, value in numbered.items()},
            n_experts={layer: value["experts"] for layer, value in numbered.items()},
            provenance=content.get("provenance", {}),
            channels=channels,
            constants=_read_arrays(path, "constants", numbered),
            merged=merged,
            alignments=_read_arrays(path, "alignments", numbered),
        )
        if layers != plan._layers():  # such as an unknown field, or bits beyond the width
            raise damaged
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
            if layer in self.constants:
                layers[str(layer)]["constants"] = _hash(self.constants[layer])
            if layer in self.merged:
                layers[str(layer)]["merged"] = {
                    str(owner): {str(member): weight for member, weight in sorted(group.items())}
                    for owner, group in sorted(self.merged[layer].items())
                }
            if layer in self.alignments:
                layers[str(layer)]["alignments"] = _hash(self.alignments[layer])
        return layers


def make_plan(
    scores: Mapping[int, ArrayLike], remove: Mapping[int, int], routers: Routers, *, provenance: Mapping[str, Any]
) -> Plan:
    """The plan that drops, in each layer, the `remove[layer]` experts of lowest score.

    `scores`: layer -> one finite number per expert, higher means keep; of equal scores, that of the lower expert id is
    dropped first, and protected experts (`Routers`) last. Layers of group-limited routers (`n_group` > 1) lose the same
    number in each group. Raises UserError for scores that are not finite, for layers that differ between `scores` and
    `remove`, and for plans that `Plan.check` rejects.
    """
    if set(scores) != set(remove):
        raise UserError(
            f"allocation: removes experts in layers {sorted(remove)}, but scores are of layers {sorted(scores)}"
        )
    experts: dict[int, tuple[int, ...]] = {}
    for layer in sorted(scores):
        values = _finite(layer, scores[layer]).copy()
        values[list(routers[layer].get("protected", ()))] = numpy.inf
        experts[layer] = _survivors(layer, values, remove[layer], routers[layer]["n_group"])
    plan = Plan(experts, {layer: len(numpy.asarray(scores[layer])) for layer in experts}, dict(provenance))
    plan.check(routers)
    return plan


def make_channel_plan(
    scores: Mapping[int, NDArray[numpy.float64]],
    keep: Mapping[int, NDArray[numpy.int64]],
    routers: Routers,
    *,
    zero_expert: str = "keep_null",
    provenance: Mapping[str, Any],
) -> Plan:
    """The plan that keeps, of each expert, the `keep[layer][expert]` channels of highest score.

    `scores`: layer -> (E, I), finite, higher means keep; of equal scores, that of the lower channel is dropped first.
    `keep`: layer -> (E,) numbers from 0 to I. An expert without channels stays as a null expert (`zero_expert`
    keep_null) or is dropped with its router row (drop). Raises UserError for scores that are not finite, numbers out of
    range, and plans that `Plan.check` rejects.
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
        plan.check(routers)
    except UserError as error:
        if zero_expert == "keep_null":
            raise
        raise UserError(f"{error} (allocation.parameters.zero_expert=keep_null keeps them all routable)") from None
    return plan


def replace_by_constants(plan: Plan, outputs: Mapping[int, NDArray[numpy.float64]], widths: Mapping[int, int]) -> Plan:
    """The plan in which the experts that `plan`, one of whole experts, drops stay routable and put out constants.

    `outputs`: layer -> (E, H), the constant of each expert; with the mean output of each, this is MoNE (arXiv
    2507.00390): tokens are routed as in the original, and a token that is routed to a replaced expert j with gate g_j
    gets g_j c_j. `widths`: layer -> channels of an expert. Raises UserError for outputs that are not finite.
    """
    channels, constants = {}, {}
    for layer, kept in plan.experts.items():
        values = _finite(layer, outputs[layer])
        channels[layer] = numpy.zeros((plan.n_experts[layer], widths[layer]), dtype=numpy.bool_)
        channels[layer][list(kept)] = True
        if len(kept) < plan.n_experts[layer]:
            constants[layer] = values[~channels[layer].any(1)].astype(numpy.float32)
    everything = {layer: tuple(range(count)) for layer, count in plan.n_experts.items()}
    return Plan(everything, plan.n_experts, plan.provenance, channels, constants)


def merge_experts(
    groups: Mapping[int, Mapping[int, Mapping[int, float]]],
    widths: Mapping[int, int],
    *,
    rows: str = "all",
    provenance: Mapping[str, Any],
) -> Plan:
    """The plan that merges experts.

    `groups`: layer -> expert -> {expert: weight} of those that it stands for, as in `Plan.merged`; every expert is in
    one group, and one that stays as it is has a group of its own. `widths`: layer -> channels of an expert. `rows`:
    "all" if the router stays whole, so that tokens are routed to all members of a group, or "kept" if it only keeps the
    rows of the experts that stand for a group.
    """
    n_experts = {layer: sum(map(len, of_layer.values())) for layer, of_layer in groups.items()}
    channels, merged = {}, {}
    for layer, of_layer in groups.items():
        channels[layer] = numpy.zeros((n_experts[layer], widths[layer]), dtype=numpy.bool_)
        channels[layer][list(of_layer)] = True
        if several := {owner: dict(group) for owner, group in of_layer.items() if len(group) > 1}:
            merged[layer] = several
    experts = {
        layer: tuple(range(count)) if rows == "all" else tuple(sorted(groups[layer]))
        for layer, count in n_experts.items()
    }
    return Plan(experts, n_experts, dict(provenance), channels, merged=merged)


def _best_channels(layer: int, scores: NDArray[numpy.float64], keep: NDArray[numpy.int64]) -> Mask:
    """(E, I) bool: the `keep` (E,) best of each row of `scores` (E, I)."""
    count, width = _finite(layer, scores).shape
    if keep.shape != (count,) or keep.min() < 0 or keep.max() > width:
        raise UserError(
            f"allocation: keeps {keep.tolist()} channels in layer {layer}: expected {count} numbers from 0 to {width}"
        )
    places = scores.argsort(axis=1, kind="stable").argsort(axis=1)
    best: Mask = places >= (width - keep)[:, None]
    return best


def _survivors(layer: int, scores: NDArray[numpy.float64], remove: int, n_group: int) -> tuple[int, ...]:
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
    ids = numpy.arange(count).reshape(n_group, -1)
    order = scores.reshape(n_group, -1).argsort(axis=1, kind="stable")
    kept = numpy.take_along_axis(ids, order, axis=1)[:, remove // n_group :]
    return tuple(numpy.sort(kept, axis=None).tolist())


def _finite(layer: int, scores: ArrayLike) -> NDArray[numpy.float64]:
    """Scores of experts (E,) or of channels (E, I) in fp64. Raises UserError naming the first that is not finite."""
    values = numpy.asarray(scores, dtype=numpy.float64)
    if places := numpy.argwhere(~numpy.isfinite(values)).tolist():
        names = zip(("expert", "channel"), places[0], strict=False)
        where = ", ".join(f"{name} {place}" for name, place in names)
        raise UserError(f"scores: layer {layer}, {where} is {values[tuple(places[0])]}: expected a finite number")
    return values


def _check_ids(layer: int, kept: tuple[int, ...], count: int) -> None:
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


def _check_mask(layer: int, mask: Mask, kept: tuple[int, ...], count: int) -> None:
    """Raise UserError unless `mask` is (count, I) bool and only keeps channels of kept experts."""
    if mask.ndim != 2 or mask.shape[0] != count or mask.dtype != numpy.bool_:
        raise UserError(
            f"plan: layer {layer} has a mask of {mask.dtype} {mask.shape}: expected bool ({count}, channels)"
        )
    if dropped := sorted(set(numpy.flatnonzero(mask.any(1)).tolist()) - set(kept)):
        raise UserError(f"plan: layer {layer} keeps channels of expert {dropped[0]}, which it does not keep")


_ARRAYS = {"constants": "{}", "alignments": "{}.alignments"}
"""Field of a layer in plan.json -> name of its array in plan.npz, with the number of the layer."""


def _hash(array: NDArray[Any]) -> str:
    return hashlib.sha256(array.astype(array.dtype.newbyteorder("<")).tobytes()).hexdigest()


def _read_arrays(plan: Path, field: str, layers: Mapping[int, Mapping[str, Any]]) -> dict[int, NDArray[Any]]:
    """Layer -> its constants or alignments, from the file beside a plan, for layers of plan.json with such a field.

    Raises UserError when the file is missing, damaged, or of another plan.
    """
    hashes = {layer: value[field] for layer, value in layers.items() if field in value}
    if not hashes:
        return {}
    path = plan.with_suffix(".npz")
    try:
        with numpy.load(path, allow_pickle=False) as file:
            arrays = {layer: file[_ARRAYS[field].format(layer)] for layer in hashes}
    except FileNotFoundError:
        raise UserError(f"plan={plan} has {field}, but {path} does not exist: copy both files") from None
    except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"plan={plan} has {field}, but {path} is damaged: {error}") from None
    if wrong := [layer for layer, stated in hashes.items() if _hash(arrays[layer]) != stated]:
        raise UserError(f"plan={plan} has other {field} in layer {wrong[0]} than {path}: copy both files of a plan")
    return arrays


def _unpack_mask(layer: Mapping[str, Any]) -> Mask:
    """The mask (E, I) of a layer of plan.json. Raises ValueError unless each kept expert has a mask of that width."""
    mask: Mask = numpy.zeros((layer["experts"], layer["width"]), dtype=numpy.bool_)
    for expert, text in zip(layer["keep"], layer["channels"], strict=True):
        bits = numpy.frombuffer(bytes.fromhex(text), dtype=numpy.uint8)
        mask[expert] = numpy.unpackbits(bits, bitorder="little")[: layer["width"]]
    return mask
