"""Made-up plans, costs and searches of a synthetic store, in the layout of the real steps."""

import zlib
from typing import Any

import numpy as np

from moe_lab.pruning.plan import SCHEMA

LAYERS = 4
EXPERTS = 32
WIDTH = 64
EXPERT_PARAMETERS = 3 * 128 * 64
ROUTER_PARAMETERS = 128
PARAMETERS = 3_700_000
CHANNEL_CRITERIA = (
    "heapr",
    "camera",
    "channel_weight",
    "channel_activation",
    "snip",
    "channel_random",
)
SEARCHED_ALLOCATION = "evolutionary"
"""Start of the names of searched allocations. An allocation whose name ends in `spec dec` has the
fitness spec_dec, others esap."""
GENERATIONS = 6
POPULATION = 8


def rng(*words: object) -> np.random.Generator:
    """A random number generator that depends on the words alone."""
    return np.random.default_rng(zlib.crc32("/".join(map(str, words)).encode()))


def granularity(criterion: str) -> str:
    """The granularity at which a criterion scores: none, channel or expert."""
    return (
        "none" if criterion == "none" else "channel" if criterion in CHANNEL_CRITERIA else "expert"
    )


def removed_counts(axes: dict[str, Any]) -> list[int]:
    """Number of experts removed from each layer: equal numbers under uniform allocations, otherwise
    random numbers with the same sum."""
    per_layer = int(EXPERTS * axes["ratio"])
    if axes["allocation"].startswith("uniform"):
        return [per_layer] * LAYERS
    random = rng(
        "removed", axes["criterion"], axes["calibration"], axes["ratio"], axes["allocation"]
    )
    shift = int(random.integers(1, 5))
    return [per_layer - shift, per_layer + shift, per_layer + 1, per_layer - 1]


def channel_masks(axes: dict[str, Any]) -> np.ndarray:
    """Kept channels (layers, experts, width); expert 3 of layer 0 is a null expert unless the
    allocation is uniform."""
    random = rng(
        "channels", axes["criterion"], axes["calibration"], axes["ratio"], axes["allocation"]
    )
    scores = random.uniform(size=(LAYERS, EXPERTS, WIDTH))
    if axes["allocation"] != "uniform":
        scores += random.uniform(0, 0.5, (LAYERS, EXPERTS, 1))
        scores[0, 3] = -1
    return (
        scores > np.quantile(scores, axes["ratio"])
        if axes["ratio"]
        else np.ones(scores.shape, bool)
    )


def plan(axes: dict[str, Any]) -> dict[str, Any]:
    """The content of plan.json."""
    if granularity(axes["criterion"]) == "channel":
        packed_masks = np.packbits(channel_masks(axes), axis=-1, bitorder="little")
        all_experts = {"experts": EXPERTS, "retained": list(range(EXPERTS)), "width": WIDTH}
        masks = [[row.tobytes().hex() for row in rows] for rows in packed_masks]
        layers = {
            str(layer): {**all_experts, "channels": channels}
            for layer, channels in enumerate(masks)
        }
    else:
        layers = {
            str(layer): {"experts": EXPERTS, "retained": list(range(count, EXPERTS))}
            for layer, count in enumerate(removed_counts(axes))
        }
    if "replacement" in axes["allocation"]:
        layers = {
            layer: replacement_layer(fields, axes["allocation"]) for layer, fields in layers.items()
        }
    allocation = {
        "name": axes["allocation"].partition(" ")[0].rstrip(","),
        "parameters": parameters(axes["allocation"]),
    }
    return {
        "schema": SCHEMA,
        "digest": "made up",
        "layers": layers,
        "provenance": {"allocation": allocation},
    }


def parameters(allocation: str) -> dict[str, Any]:
    """The parameters that the text of an allocation names: a prior, or blocks of channels."""
    _, _, prior = allocation.partition(", prior ")
    _, _, block = allocation.partition(" aligned ")
    _, _, min_channels = allocation.partition(" min ")
    alignment = (
        {"align": {"block": int(block or 128), "min_channels": int(min_channels or 128)}}
        if block or min_channels
        else {}
    )
    return {
        **alignment,
        **({"prior": prior} if prior else {}),
        **({"intra": "uniform"} if prior == "none" else {}),
    }


def replacement_layer(fields: dict[str, Any], allocation: str) -> dict[str, Any]:
    """The layer of a plan whose dropped experts are replaced by constants, or merged into the last
    expert.

    fields: the layer without replacement."""
    masks = [
        "f" * (WIDTH // 4) if expert in fields["retained"] else "0" * (WIDTH // 4)
        for expert in range(EXPERTS)
    ]
    layer = {
        "experts": EXPERTS,
        "retained": list(range(EXPERTS)),
        "width": WIDTH,
        "channels": masks,
    }
    if allocation.endswith("mean_output"):
        return {**layer, "constants": "made up"}
    group = [
        *(expert for expert in range(EXPERTS) if expert not in fields["retained"]),
        EXPERTS - 1,
    ]
    return {
        **layer,
        "merged": {str(EXPERTS - 1): {str(expert): 1 / len(group) for expert in group}},
    }


def cost(axes: dict[str, Any]) -> dict[str, Any]:
    """The content of cost.json."""
    if granularity(axes["criterion"]) == "channel":
        removed_parameters = int((~channel_masks(axes)).sum()) * EXPERT_PARAMETERS // WIDTH
        active_share = 1 - axes["ratio"] / 2
    else:
        count = 0 if axes["criterion"] == "none" else sum(removed_counts(axes))
        removed_parameters = count * (EXPERT_PARAMETERS + ROUTER_PARAMETERS)
        active_share = 1.0
    parameters = PARAMETERS - removed_parameters
    bits = 4 if "nf4" in axes["recovery"] else 16
    return {
        "bits": bits,
        "parameters": parameters,
        "parameters_unpruned": PARAMETERS,
        "parameters_kept": parameters / PARAMETERS,
        "routed_kept": 1 - removed_parameters / (LAYERS * EXPERTS * EXPERT_PARAMETERS),
        "storage_bytes": parameters * bits // 8,
        "loading_bytes": 2 * parameters,
        "flops_per_token": 2_600_000 * active_share,
        "flops_per_token_unpruned": 2_600_000,
        "flops_ratio": active_share,
    }


def profile(axes: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of profile.parquet; the first layer has no router, so no loss."""
    random = rng("profile", axes["criterion"], axes["calibration"], axes["ratio"])
    rows = []
    for layer in range(LAYERS):
        variance = (layer + 1.0) * (1 + axes["ratio"] * float(random.uniform(0, 1)))
        loss = axes["ratio"] ** 2 * (layer + 1) / 8 if axes["ratio"] and layer else float("nan")
        rows.append({"layer": layer, "variance": variance, "output_loss": loss})
    return rows


def search(axes: dict[str, Any]) -> dict[str, Any]:
    """The content of search.json."""
    fitness = "spec_dec" if axes["allocation"].endswith("spec dec") else "esap"
    return {
        "layers": list(range(LAYERS)),
        "settings": {"population": POPULATION, "generations": GENERATIONS, "fitness": fitness},
        "cost": {
            "candidates": 36,
            "forwards": 24.5,
            "seconds": 12.5,
        },
    }
