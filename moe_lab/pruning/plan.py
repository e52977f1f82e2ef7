"""A plan: which experts each layer keeps, and which of their channels. Pruning needs nothing else.
No torch.

The form of its files, plan.json and plan.npz: docs/export.md.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import ArrayLike, NDArray

from moe_lab.errors import UserError
from moe_lab.json_files import write_json
from moe_lab.models.config_json import fewest_experts

SCHEMA = 1
Mask = NDArray[numpy.bool_]
"""(E, I): which channels of which experts are kept."""
Constants = NDArray[numpy.float32]
"""(N, H): the outputs of a layer's N null experts, in the order of their ids."""
Alignments = NDArray[numpy.int32]
"""(M, I): a permutation of the channels of each of the M experts of a layer that are merged into
others, ascending."""
Routers = Mapping[int, Mapping[str, Any]]
"""Layer -> its facts. Its top_k, n_group and topk_group set how many experts its router needs; see
`fewest_experts`. `protected`, if it is there, are ids of experts that a plan must keep with all
their channels."""
ROUNDED = 5e-4
"""Largest difference between a ratio and the share that is removed of which nothing is said."""
ARRAYS = ("constants", "alignments")
"""Fields of a plan that are in plan.npz."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The experts, and possibly channels, that each layer keeps. Kept experts stay in their
    original order. Plans that give the same pruned model are equal."""

    experts: dict[int, tuple[int, ...]]
    """Layer -> ids of the experts to keep, ascending."""
    n_experts: dict[int, int]
    """Layer -> number of experts before pruning."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Where the plan comes from: model, criterion, calibration, ratio and so on; not part of the
    digest."""
    channels: dict[int, Mask] = field(default_factory=dict)
    """Layer -> (E, I) bool, True for kept channels, over all experts the layer had; empty for a
    plan of whole experts. Rows of dropped experts are False. A kept expert whose row is False is a
    null expert: tokens are routed to it and its output is its constant, or 0."""
    constants: dict[int, Constants] = field(default_factory=dict)
    """Layer -> what its null experts put out; layers that are not named put out 0."""
    merged: dict[int, dict[int, dict[int, float]]] = field(default_factory=dict)
    """Layer -> expert with channels -> {expert: weight} of those that it stands for, itself among
    them. Its weights are the weighted sum of theirs. The others have no channels. Tokens that are
    routed to any kept one are computed with it, and their gates add up; a group may also have
    members that are not kept, to which no token is routed."""
    alignments: dict[int, Alignments] = field(default_factory=dict)
    """Layer -> for each of its `merged_away` experts, which of its channels is added to each
    channel of the expert that it is merged into. In layers that are not named, channel i is added
    to channel i."""
    aligned: bool = True
    """False for a plan whose way of merging matches channels first, until that is done; it cannot
    be used before."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __post_init__(self) -> None:
        layers = {
            frozenset(self.experts),
            frozenset(self.n_experts),
            frozenset(self.channels or self.experts),
        }
        if len(layers) > 1 or not self.experts:
            raise UserError(
                f"plan: kept experts are given for layers {sorted(self.experts)}, expert counts "
                "for layers "
                f"{sorted(self.n_experts)} and channels for layers {sorted(self.channels)}: "
                "expected the same layers, "
                "at least one; channels may be given for none"
            )
        for layer, kept in self.experts.items():
            count = self.n_experts[layer]
            mask = self.channels.get(layer)
            if not kept or list(kept) != sorted(set(kept) & set(range(count))):
                ids = f"ids from 0 to {count - 1}, ascending, at least one"
                raise UserError(f"plan: layer {layer} keeps experts {list(kept)}: expected {ids}")
            if mask is None:
                continue
            if mask.ndim != 2 or len(mask) != count or mask.dtype != numpy.bool_:
                given = f"a mask of {mask.dtype} {mask.shape}"
                raise UserError(
                    f"plan: layer {layer} has {given}: expected bool ({count}, channels)"
                )
            if dropped := sorted(set(numpy.flatnonzero(mask.any(1)).tolist()) - set(kept)):
                raise UserError(
                    f"plan: layer {layer} keeps channels of expert {dropped[0]}, which it does "
                    "not keep"
                )

    def null_experts(self, layer: int) -> list[int]:
        """Ids of the experts of `layer` that are kept without any channel and for which no other
        expert stands, ascending; only for plans with channels."""
        alone = set(self.experts[layer]) - {
            one for group in self.merged.get(layer, {}).values() for one in group
        }
        return [expert for expert in sorted(alone) if not self.channels[layer][expert].any()]

    def owners(self, layer: int) -> list[int]:
        """(E,) for each expert of `layer`, the expert that stands for it: itself unless it is
        merged into another."""
        owners = list(range(self.n_experts[layer]))
        for owner, group in self.merged.get(layer, {}).items():
            for member in group:
                owners[member] = owner
        return owners

    def computed_as(self, layer: int) -> tuple[int, ...] | None:
        """(E',) for each kept expert of `layer`, the position among the kept ones of the expert
        that stands for it; None where each stands for itself."""
        kept = self.experts[layer]
        owners = self.owners(layer)
        positions = tuple(kept.index(owners[expert]) for expert in kept)
        return None if positions == tuple(range(len(kept))) else positions

    @property
    def shares_experts(self) -> bool:
        """Whether tokens are routed to experts that are computed with the weights of others."""
        return any(self.computed_as(layer) for layer in self.merged)

    def merged_away(self, layer: int) -> list[int]:
        """Ids of the experts of `layer` that are merged into another one, ascending."""
        groups = self.merged.get(layer, {})
        return sorted(
            member for owner, group in groups.items() for member in group if member != owner
        )

    def width(self, layer: int) -> int | None:
        """Channels that each expert of `layer` had; None for a plan of whole experts."""
        return self.channels[layer].shape[1] if self.channels else None

    def widths(self, layer: int) -> tuple[int, ...]:
        """Kept channels of each kept expert of `layer`, in the order of `experts`; only for plans
        with channels."""
        return tuple(int(width) for width in self.channels[layer][list(self.experts[layer])].sum(1))

    @property
    def removed(self) -> float:
        """Share of the experts, or of the channels of all experts, that it removes or replaces."""
        if self.channels:
            masks = self.channels.values()
            return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.size for mask in masks)
        return 1 - sum(map(len, self.experts.values())) / sum(self.n_experts.values())

    @property
    def digest(self) -> str:
        """sha256 of what the plan keeps and puts in the place of the rest: equal for plans that
        give the same model."""
        canonical = json.dumps(self._layers(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def check(self, routers: Routers) -> None:
        """Raise UserError, with the nearest feasible number, unless routers work with the kept
        experts, equally many in each of their groups of adjacent experts, and protected experts are
        kept whole."""
        for layer, kept in self.experts.items():
            router = routers[layer]
            count = self.n_experts[layer]
            fewest = fewest_experts(router)
            n_group = router["n_group"]
            if len(kept) < fewest:
                raise UserError(
                    f"plan: layer {layer} keeps {len(kept)} of {count} experts, but its router "
                    f"needs at least {fewest} "
                    f"(top_k={router['top_k']}{f', n_group={n_group}' if n_group > 1 else ''}): "
                    f"keep {fewest} or more"
                )
            groups = numpy.bincount(
                numpy.array(kept) // (count // n_group), minlength=n_group
            ).tolist()
            if len(set(groups)) > 1:
                raise UserError(
                    f"plan: layer {layer} keeps {groups} experts of the {n_group} groups of its "
                    "router, which must "
                    f"keep equally many: {max(1, round(len(kept) / n_group))} each is nearest"
                )
            narrowed = {
                expert
                for expert in kept
                if self.channels and not self.channels[layer][expert].all()
            }
            untouched = set(kept) - narrowed - set(self.merged.get(layer, {}))
            if lost := sorted(set(router.get("protected", ())) - untouched):
                raise UserError(
                    f"plan: layer {layer} drops expert {lost[0]}, or channels of it, or merges "
                    "others into it, and "
                    "allocation.protect keeps it as it is: expected a plan that does none of "
                    "that, or a smaller ratio"
                )

    def check_origin(
        self, identity: Iterable[tuple[str, Callable[[], str]]], where: object
    ) -> None:
        """Raise UserError if the plan was made for another model than the one at `where`.
        `identity`: (name, function that computes it) of what tells that model from others, as by
        `models.identity`; the first name that the provenance has, too, decides. Warns if it has
        none of them, so that only layers and counts are compared."""
        for name, compute in identity:
            stated = self.provenance.get(name)
            if not stated:
                continue
            if (value := compute()) != stated:
                raise self._of_another(name, f"{where} has {value[:12]}")
            return
        if self.provenance.get("model_sha256"):
            raise self._of_another("model_sha256", f"{where} has the weights of no checkpoint")
        warnings.warn(
            f"plan {self.digest[:12]} states no model_sha256, so only its layers and counts are "
            f"compared with {where}",
            stacklevel=2,
        )

    def _of_another(self, name: str, given: str) -> UserError:
        return UserError(
            "plan is for another model: it was made for the one of "
            f"{name}={str(self.provenance[name])[:12]}, and "
            f"{given}: give that model, or try the plan on another with any_model=True, or "
            f"without {name} in the plan"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, and its arrays beside it (.npz), each to a temporary file that is
        then renamed."""
        target = Path(path)
        arrays = {
            f"{layer}.{name}": values
            for name in ARRAYS
            for layer, values in getattr(self, name).items()
        }
        if arrays:
            file = target.with_suffix(".npz")
            partial = file.with_name(f".{os.getpid()}.{file.name}")
            numpy.savez(partial, allow_pickle=False, **arrays)
            partial.replace(file)
        about = {
            "schema": SCHEMA,
            "digest": self.digest,
            "layers": self._layers(),
            "provenance": self.provenance,
        }
        write_json(target, {**about, "aligned": self.aligned} if self.merged else about)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan. Raises UserError when it is missing, damaged or of another schema."""
        files = {".json": Path(path), ".npz": Path(path).with_suffix(".npz")}
        return cls.read(lambda ending: files[ending].read_bytes(), str(path))

    @classmethod
    def read(cls, read: Callable[[str], bytes], path: str) -> Plan:
        """As `load`, with the content of the plan's files, .json and .npz, from `read`. `path`: its
        name in errors."""
        try:
            content = json.loads(read(".json"))
            stated = {int(layer): value for layer, value in content["layers"].items()}
            plan = cls(
                experts={layer: tuple(value["keep"]) for layer, value in stated.items()},
                n_experts={layer: value["experts"] for layer, value in stated.items()},
                provenance=content.get("provenance", {}),
                channels={
                    layer: _unpack_mask(value)
                    for layer, value in stated.items()
                    if "channels" in value
                },
                merged={
                    layer: {
                        int(owner): {int(one): share for one, share in group.items()}
                        for owner, group in groups
                    }
                    for layer, value in stated.items()
                    if (groups := value.get("merged", {}).items())
                },
                aligned=content["aligned"]
                if any("merged" in value for value in stated.values())
                else True,
                **_read_arrays(read, stated),
            )
        except FileNotFoundError as error:
            raise UserError(
                f"plan={path}: {error.filename} does not exist: expected all files of a plan"
            ) from None
        except (
            OSError,
            EOFError,
            zipfile.BadZipFile,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
        ) as error:
            raise UserError(
                f"plan={path} is damaged: expected a plan as it was saved: {error}"
            ) from None
        found = content.get("schema"), content["layers"], content.get("digest")
        # such as an unknown field, or the arrays of another plan
        if found != (SCHEMA, plan._layers(), plan.digest):
            raise UserError(
                f"plan={path} is damaged: expected schema {SCHEMA}, and layers and arrays of its "
                "digest"
            )
        return plan

    def _layers(self) -> dict[str, Any]:
        layers: dict[str, dict[str, Any]] = {}
        for layer, kept in self.experts.items():
            about = layers[str(layer)] = {"experts": self.n_experts[layer], "keep": list(kept)}
            if self.channels:
                mask = self.channels[layer]
                packed = numpy.packbits(mask[list(kept)], axis=1, bitorder="little")
                about |= {
                    "width": mask.shape[1],
                    "channels": [row.tobytes().hex() for row in packed],
                }
            if layer in self.merged:
                groups = self.merged[layer].items()
                about["merged"] = {
                    str(owner): {str(one): share for one, share in group.items()}
                    for owner, group in groups
                }
            about |= {
                name: _hash(getattr(self, name)[layer])
                for name in ARRAYS
                if layer in getattr(self, name)
            }
        return layers


def make_plan(
    scores: Mapping[int, ArrayLike],
    remove: Mapping[int, int],
    routers: Routers,
    *,
    provenance: Mapping[str, Any],
) -> Plan:
    """The plan that drops, in each layer, the `remove[layer]` experts of lowest score.

    `scores`: layer -> (E,), higher means keep; of equal scores, that of the lower id is dropped
    first, and protected experts (`Routers`) last. Layers of group-limited routers (`n_group` > 1)
    lose the same number in each group. UserError for scores that are not finite, and for plans that
    `Plan.check` rejects.
    """
    experts: dict[int, tuple[int, ...]] = {}
    for layer in sorted(scores):
        values = finite(layer, scores[layer]).copy()
        values[list(routers[layer].get("protected", ()))] = numpy.inf
        experts[layer] = _survivors(values, remove[layer], routers[layer]["n_group"])
    plan = Plan(
        experts, {layer: len(numpy.asarray(scores[layer])) for layer in experts}, dict(provenance)
    )
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

    `scores`: layer -> (E, I), higher means keep; of equal scores, that of the lower channel is
    dropped first. `keep`: layer -> (E,) numbers from 0 to I. An expert without channels stays as a
    null expert (`zero_expert` keep_null) or is dropped with its router row (drop). UserError as for
    `make_plan`.
    """
    masks: dict[int, Mask] = {}
    for layer in sorted(scores):
        places = finite(layer, scores[layer]).argsort(axis=1, kind="stable").argsort(axis=1)
        masks[layer] = places >= (places.shape[1] - keep[layer])[:, None]
    if not any(mask.any() for mask in masks.values()):
        raise UserError(
            "allocation: keeps no channel of any expert, expected at least one: choose a smaller "
            "ratio"
        )
    routable = {layer: mask.any(1) | (zero_expert == "keep_null") for layer, mask in masks.items()}
    plan = Plan(
        experts={
            layer: tuple(numpy.flatnonzero(flags).tolist()) for layer, flags in routable.items()
        },
        n_experts={layer: len(mask) for layer, mask in masks.items()},
        provenance=dict(provenance),
        channels=masks,
    )
    plan.check(routers)
    return plan


def _survivors(scores: NDArray[numpy.float64], remove: int, n_group: int) -> tuple[int, ...]:
    """Ids left after dropping the lowest `remove` of `scores`, an equal share from each group."""
    ids = numpy.arange(len(scores)).reshape(n_group, -1)
    order = scores.reshape(n_group, -1).argsort(axis=1, kind="stable")
    kept = numpy.take_along_axis(ids, order, axis=1)[:, remove // n_group :]
    return tuple(numpy.sort(kept, axis=None).tolist())


def ties(plan: Plan, scores: Mapping[int, ArrayLike], routers: Routers) -> dict[int, int]:
    """Layer -> how many experts, or channels, have a score that others have of which the plan
    decides otherwise, so that ids decided. Layers without such scores are left out; arguments are
    as for `make_plan` and `make_channel_plan`.
    """
    tied = {}
    for layer, given in scores.items():
        values = finite(layer, given).copy()
        router = routers[layer]
        values[list(router.get("protected", ()))] = numpy.inf
        if not plan.channels:
            retained = numpy.isin(numpy.arange(len(values)), plan.experts[layer])
        elif values.ndim == 1:  # what is replaced has no channels
            retained = plan.channels[layer].sum(axis=1) > 0
        else:
            retained = plan.channels[layer]
        groups = router["n_group"] if values.ndim == 1 else 1  # experts compete within a group
        count = 0
        for row, flags in zip(
            values.reshape(groups, -1), retained.reshape(groups, -1), strict=True
        ):
            count += int(numpy.isin(row, numpy.intersect1d(row[flags], row[~flags])).sum())
        if count:
            tied[layer] = count
    return tied


def finite(layer: int, scores: ArrayLike) -> NDArray[numpy.float64]:
    """Scores of experts (E,) or of channels (E, I) in fp64. Raises UserError naming the first that
    is not finite."""
    values = numpy.asarray(scores, dtype=numpy.float64)
    if places := numpy.argwhere(~numpy.isfinite(values)).tolist():
        names = zip(("expert", "channel"), places[0], strict=False)
        where = ", ".join(f"{name} {place}" for name, place in names)
        raise UserError(
            f"scores: layer {layer}, {where} is {values[tuple(places[0])]}: expected a finite "
            "number"
        )
    return values


def _hash(array: NDArray[Any]) -> str:
    return hashlib.sha256(array.astype(array.dtype.newbyteorder("<")).tobytes()).hexdigest()


def _read_arrays(
    read: Callable[[str], bytes], layers: Mapping[int, Mapping[str, Any]]
) -> dict[str, dict[int, NDArray[Any]]]:
    """Constants and alignments by layer, of the layers of plan.json that have some, from the file
    beside it."""
    arrays: dict[str, dict[int, NDArray[Any]]] = {}
    for name in ARRAYS:
        if having := [layer for layer, value in layers.items() if name in value]:
            with numpy.load(io.BytesIO(read(".npz")), allow_pickle=False) as file:
                arrays[name] = {layer: file[f"{layer}.{name}"] for layer in having}
    return arrays


def _unpack_mask(layer: Mapping[str, Any]) -> Mask:
    """The mask (E, I) of a layer of plan.json. Raises ValueError unless each kept expert has a mask
    of that width."""
    mask: Mask = numpy.zeros((layer["experts"], layer["width"]), dtype=numpy.bool_)
    for expert, text in zip(layer["keep"], layer["channels"], strict=True):
        bits = numpy.frombuffer(bytes.fromhex(text), dtype=numpy.uint8)
        mask[expert] = numpy.unpackbits(bits, bitorder="little")[: layer["width"]]
    return mask
