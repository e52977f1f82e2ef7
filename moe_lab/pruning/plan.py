"""A plan: which experts each layer retains, and which of their channels. Pruning needs nothing
else. No torch.

The format of its files, plan.json and plan.npz: docs/export.md.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from moe_lab.errors import UserError
from moe_lab.json_files import write_json
from moe_lab.models.config_json import fewest_experts
from moe_lab.models.families import Family
from moe_lab.pruning.layer_plan import ARRAYS, LayerPlan

if TYPE_CHECKING:
    from moe_lab.models.discover import MoELayer

SCHEMA = 2
Routers = Mapping[int, Mapping[str, Any]]
"""Layer -> facts. The facts top_k, n_group and topk_group say how many experts the router needs;
see `fewest_experts`. The fact `protected`, if present, has the ids of experts that a plan must
retain with all their channels."""
ROUNDED = 5e-4
"""Largest difference between the ratio and the removed share that is not reported."""


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """The experts, and possibly channels, that each layer retains. Plans that give the same pruned
    model are equal."""

    layers: Mapping[int, LayerPlan]
    """Number of a decoder layer -> what the layer retains."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Where the plan comes from: model, criterion, calibration, ratio and so on; not part of the
    digest."""
    aligned: bool = True
    """False while channels of merged experts still have to be matched; such a plan cannot be
    used."""

    @classmethod
    def of_experts(
        cls,
        retained: Mapping[int, Sequence[int]],
        n_experts: Mapping[int, int],
        provenance: Mapping[str, Any] | None = None,
    ) -> Plan:
        """The plan that retains whole experts. `retained`: layer -> ids of these experts,
        ascending. `n_experts`: layer -> number of experts before pruning."""
        if set(retained) != set(n_experts):
            raise UserError(
                f"plan: retained experts are given for layers {sorted(retained)}, and numbers of "
                f"experts for layers {sorted(n_experts)}: expected the same layers"
            )
        layers = {
            layer: LayerPlan(n_experts[layer], tuple(experts))
            for layer, experts in retained.items()
        }
        return cls(layers, provenance or {})

    def __repr__(self) -> str:
        share = f"{self.removed_share:.3g} removed"
        return f"Plan({len(self.layers)} layers, {share}, digest {self.digest[:12]})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __post_init__(self) -> None:
        if not self.layers:
            raise UserError("plan: layers={}, expected at least one layer")
        without_channels = [
            number for number, layer in self.layers.items() if layer.channels is None
        ]
        if 0 < len(without_channels) < len(self.layers):
            raise UserError(
                f"plan: channels are missing in layers {without_channels}: expected channels in "
                "all layers or in none"
            )
        for number, layer in self.layers.items():
            _check_layer(number, layer)

    @property
    def retained(self) -> dict[int, tuple[int, ...]]:
        """Layer -> ids of the experts whose router rows are retained."""
        return {number: layer.retained for number, layer in self.layers.items()}

    @property
    def has_channels(self) -> bool:
        """Whether the plan states which channels of experts are retained."""
        return any(layer.channels is not None for layer in self.layers.values())

    @property
    def has_constants(self) -> bool:
        """Whether null experts put out constants instead of 0."""
        return any(layer.constants is not None for layer in self.layers.values())

    @property
    def merged_layers(self) -> list[int]:
        """Numbers of the layers with merged experts."""
        return [number for number, layer in self.layers.items() if layer.merged]

    @property
    def shares_experts(self) -> bool:
        """Whether a retained expert is computed with the weights of another expert, its owner."""
        return any(layer.owner_positions for layer in self.layers.values())

    @property
    def removed_share(self) -> float:
        """Share of the experts that are not retained. In a plan of channels, the share of the
        channels of all experts that are not retained."""
        retained = 0
        total = 0
        for layer in self.layers.values():
            if layer.channels is None:
                retained += len(layer.retained)
                total += layer.n_experts
            else:
                retained += int(layer.channels.sum())
                total += layer.channels.size
        return 1 - retained / total

    @property
    def digest(self) -> str:
        """sha256 of what the plan retains and replaces."""
        canonical = json.dumps(self._layers_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def check(self, routers: Routers) -> None:
        """Raise UserError unless the plan has exactly the layers of `routers`, each router works
        with the number of retained experts, all groups of a group-limited router retain equally
        many experts, and protected experts are unchanged."""
        self._check_layer_numbers(routers)
        for number, router in routers.items():
            _check_router(number, self.layers[number], router)

    def check_model(self, layers: Sequence[MoELayer]) -> None:
        """Raise UserError unless the plan fits a model with the MoE layers `layers`."""
        facts = {layer.index: {**vars(layer), "width": layer.width} for layer in layers}
        self.check_facts(facts, layers[0].family)

    def check_facts(self, facts: Routers, family: Family) -> None:
        """Raise UserError unless the plan fits a model of `family`. `facts`: layer -> facts, among
        them n_experts, width and hidden."""
        self._check_layer_numbers(facts)
        for number, layer in self.layers.items():
            _check_shape(number, layer, facts[number], family)
        self.check(facts)

    def _check_layer_numbers(self, numbers: Collection[int]) -> None:
        """Raise UserError unless the plan has exactly the layers `numbers`."""
        if set(self.layers) != set(numbers):
            raise UserError(
                f"plan is for another model: it has layers {sorted(self.layers)}, this model has "
                f"experts in layers {sorted(numbers)}"
            )

    def check_aligned(self) -> None:
        """Raise UserError if the channels of merged experts still have to be matched."""
        if self.merged_layers and not self.aligned:
            raise UserError(
                "plan: aligned=false: channels of the experts that layer "
                f"{min(self.merged_layers)} merges were not matched: expected the plan that "
                "moe_lab.align returns for this one"
            )

    def check_origin(
        self, identity: Iterable[tuple[str, Callable[[], str]]], model: object
    ) -> None:
        """Raise UserError if the plan was made for another model.

        `identity`: the digests of the given model, each as (name, function that computes it). Only
        one digest is compared: the first in `identity` whose name is in the provenance. `model`:
        name of the given model in messages.
        """
        for name, compute_digest in identity:
            if expected := self.provenance.get(name):
                digest = compute_digest()
                if digest == expected:
                    return
                actual = f"{model} has {digest[:12]}"
                break
        else:  # the given model has none of the digests that the plan states
            name = "model_sha256"
            if not self.provenance.get(name):
                warnings.warn(
                    f"plan {self.digest[:12]} states no model_sha256, so only its layers and "
                    f"counts are compared with {model}",
                    stacklevel=2,
                )
                return
            actual = f"{model} was not loaded from a checkpoint"
        raise UserError(
            "plan is for another model: it was made for the one of "
            f"{name}={str(self.provenance[name])[:12]}, and {actual}: give that model, or try the "
            f"plan on another with any_model=True, or without {name} in the plan"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON to the file `path`, and its arrays to the file of the same name
        with the suffix .npz. Each file is written atomically, the arrays first."""
        target = Path(path)
        arrays: dict[str, Any] = {}
        for number, layer in self.layers.items():
            arrays |= {f"{number}.{name}": array for name, array in layer.arrays().items()}
        if arrays:
            file = target.with_suffix(".npz")
            partial = file.with_name(f".{os.getpid()}.{file.name}")
            numpy.savez(partial, allow_pickle=False, **arrays)
            partial.replace(file)
        document = {
            "schema": SCHEMA,
            "digest": self.digest,
            "layers": self._layers_json(),
            "provenance": self.provenance,
        }
        if self.merged_layers:
            document["aligned"] = self.aligned
        write_json(target, document)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan that `save` wrote to the file `path`. UserError when a file of the plan is
        missing, damaged or of another schema."""
        files = {".json": Path(path), ".npz": Path(path).with_suffix(".npz")}
        return cls.read(lambda suffix: files[suffix].read_bytes(), str(path))

    @classmethod
    def read(cls, read_file: Callable[[str], bytes], path: str) -> Plan:
        """The plan from its files. `read_file(suffix)`: content of the file ".json" or ".npz".
        `path`: path of the plan for error messages. UserError as in `load`."""
        try:
            content = json.loads(read_file(".json"))
            if content.get("schema", SCHEMA) != SCHEMA:
                raise UserError(f"schema={content['schema']}, expected {SCHEMA}")
            layers = _read_layers(content["layers"], read_file)
            # `save` writes the field `aligned` only for a plan with merged experts
            has_merged = any(layer.merged for layer in layers.values())
            plan = cls(
                layers, content.get("provenance", {}), content["aligned"] if has_merged else True
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
        # the layers differ if the file has an unknown field, or if the arrays are of another plan
        # a plan that was written by hand has no digest
        expected = (plan._layers_json(), plan.digest)
        if (content["layers"], content.get("digest", plan.digest)) != expected:
            raise UserError(f"plan={path} is damaged: expected the layers and arrays of its digest")
        return plan

    def _layers_json(self) -> dict[str, Any]:
        """The field `layers` of plan.json."""
        return {str(number): layer.as_json() for number, layer in self.layers.items()}


def _read_layers(
    documents: Mapping[str, Any], read_file: Callable[[str], bytes]
) -> dict[int, LayerPlan]:
    """Layer number -> plan of the layer. `documents`: the field `layers` of plan.json."""
    arrays: dict[str, Any] = {}
    # for each array of a layer, its JSON has the sha256 under the array's name
    if any(name in document for document in documents.values() for name in ARRAYS):
        with numpy.load(io.BytesIO(read_file(".npz")), allow_pickle=False) as npz:
            arrays = dict(npz)
    layers = {}
    for number, document in documents.items():
        layer_arrays = {name: arrays[f"{number}.{name}"] for name in ARRAYS if name in document}
        layers[int(number)] = LayerPlan.from_json(document, layer_arrays)
    return layers


def _check_layer(number: int, layer: LayerPlan) -> None:
    """Raise UserError for invalid ids of retained experts, or an invalid mask of channels."""
    retained = layer.retained
    count = layer.n_experts
    mask = layer.channels
    if not retained or list(retained) != sorted(set(retained) & set(range(count))):
        raise UserError(
            f"plan: layer {number} retains experts {list(retained)}: expected ids from 0 to "
            f"{count - 1}, ascending, at least one"
        )
    if mask is None:
        return
    if mask.ndim != 2 or len(mask) != count or mask.dtype != numpy.bool_:
        raise UserError(
            f"plan: layer {number} has a mask of {mask.dtype} {mask.shape}: expected bool "
            f"({count}, channels)"
        )
    with_channels = set(numpy.flatnonzero(mask.any(1)).tolist())
    if dropped := sorted(with_channels - set(retained)):
        raise UserError(
            f"plan: layer {number} retains channels of expert {dropped[0]}, which it drops"
        )


def _check_router(number: int, layer: LayerPlan, router: Mapping[str, Any]) -> None:
    """Raise UserError unless layer `number` retains as many experts as its router needs, equally
    many in each group of the router, and protected experts unchanged. `router`: facts as in
    `Routers`."""
    retained = layer.retained
    count = layer.n_experts
    fewest = fewest_experts(router)
    n_group = router["n_group"]
    if len(retained) < fewest:
        settings = f"top_k={router['top_k']}"
        if n_group > 1:
            settings += f", n_group={n_group}"
        raise UserError(
            f"plan: layer {number} retains {len(retained)} of {count} experts, but its router "
            f"needs at least {fewest} ({settings}): retain {fewest} or more"
        )
    # a group has count // n_group experts with consecutive ids
    group_counts = numpy.bincount(
        numpy.array(retained) // (count // n_group), minlength=n_group
    ).tolist()
    if len(set(group_counts)) > 1:
        raise UserError(
            f"plan: layer {number} retains {group_counts} experts of the {n_group} groups of its "
            "router, which must retain equally many: "
            f"{max(1, round(len(retained) / n_group))} each is nearest"
        )
    for expert in router.get("protected", ()):
        if not layer.is_unchanged(expert):
            raise UserError(
                f"plan: layer {number} drops expert {expert}, or channels of it, or merges others "
                "into it, and allocation.protect retains it unchanged: expected a plan that does, "
                "or a smaller ratio"
            )


def _check_shape(number: int, plan: LayerPlan, facts: Mapping[str, Any], family: Family) -> None:
    """Raise UserError if `plan` has other sizes than layer `number`, which has these `facts`, or
    removes channels of experts that cannot lose channels."""
    # a plan without channels fits any width, a plan without constants fits any hidden size
    width = facts["width"] if plan.width is None else plan.width
    hidden = facts["hidden"] if plan.constants is None else plan.constants.shape[1]
    plan_sizes = (plan.n_experts, width, hidden)
    model_sizes = (facts["n_experts"], facts["width"], facts["hidden"])
    if plan_sizes != model_sizes:
        raise UserError(
            "plan is for another model: experts, channels of each and hidden size of layer "
            f"{number} are {plan_sizes} in the plan, and {model_sizes} in this model"
        )
    if plan.channels is not None and family.channel_obstacle:
        raise UserError(
            f"plan: channels of layer {number} cannot be removed, because its experts "
            f"{family.channel_obstacle}: use a criterion of whole experts"
        )
