"""Made-up plans, costs and searches of a synthetic store, in the layout of the real steps."""

import zlib
from typing import Any

import numpy as np

from moe_lab.pruning.plan import SCHEMA

LAYERS = 4
EXPERTS = 32
WIDTH = 64
TOP_K = 4
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
SEARCHED = "evolutionary"
"""Allocations of this name are searched for; one that ends in `spec dec` has that fitness."""
GENERATIONS = 6
POPULATION = 8


def rng(*words: object) -> np.random.Generator:
    """Random numbers that depend on the words alone."""
    return np.random.default_rng(zlib.crc32("/".join(map(str, words)).encode()))


def granularity(criterion: str) -> str:
    """What a criterion scores."""
    return (
        "none" if criterion == "none" else "channel" if criterion in CHANNEL_CRITERIA else "expert"
    )


def removed(axes: dict[str, Any]) -> list[int]:
    """Experts removed per layer: the same everywhere, or drawn around it with the same sum."""
    each = int(EXPERTS * axes["ratio"])
    if axes["allocation"].startswith("uniform"):
        return [each] * LAYERS
    drawn = rng(
        "removed", axes["criterion"], axes["calibration"], axes["ratio"], axes["allocation"]
    )
    shift = int(drawn.integers(1, 5))
    return [each - shift, each + shift, each + 1, each - 1]


def channel_masks(axes: dict[str, Any]) -> np.ndarray:
    """Kept channels (layers, experts, width); expert 3 of layer 0 is a null expert unless the
    allocation is uniform."""
    drawn = rng(
        "channels", axes["criterion"], axes["calibration"], axes["ratio"], axes["allocation"]
    )
    scores = drawn.uniform(size=(LAYERS, EXPERTS, WIDTH))
    if axes["allocation"] != "uniform":
        scores += drawn.uniform(0, 0.5, (LAYERS, EXPERTS, 1))
        scores[0, 3] = -1
    return (
        scores > np.quantile(scores, axes["ratio"])
        if axes["ratio"]
        else np.ones(scores.shape, bool)
    )


def plan(axes: dict[str, Any]) -> dict[str, Any]:
    """The content of plan.json."""
    if granularity(axes["criterion"]) == "channel":
        packed = np.packbits(channel_masks(axes), axis=-1, bitorder="little")
        whole = {"experts": EXPERTS, "retained": list(range(EXPERTS)), "width": WIDTH}
        masks = [[row.tobytes().hex() for row in rows] for rows in packed]
        layers = {
            str(layer): {**whole, "channels": channels} for layer, channels in enumerate(masks)
        }
    else:
        layers = {
            str(layer): {"experts": EXPERTS, "retained": list(range(count, EXPERTS))}
            for layer, count in enumerate(removed(axes))
        }
    if "replacement" in axes["allocation"]:
        layers = {layer: replaced(about, axes["allocation"]) for layer, about in layers.items()}
    made_by = {
        "name": axes["allocation"].partition(" ")[0].rstrip(","),
        "parameters": parameters(axes["allocation"]),
    }
    return {
        "schema": SCHEMA,
        "digest": "made up",
        "layers": layers,
        "provenance": {"allocation": made_by},
    }


def parameters(allocation: str) -> dict[str, Any]:
    """Settings that the words of an allocation stand for: a prior, or blocks of channels."""
    _, _, prior = allocation.partition(", prior ")
    _, _, block = allocation.partition(" aligned ")
    _, _, least = allocation.partition(" min ")
    align = (
        {"align": {"block": int(block or 128), "min_channels": int(least or 128)}}
        if block or least
        else {}
    )
    return {
        **align,
        **({"prior": prior} if prior else {}),
        **({"intra": "uniform"} if prior == "none" else {}),
    }


def replaced(about: dict[str, Any], allocation: str) -> dict[str, Any]:
    """A layer of a plan whose dropped experts put out constants, or are merged into the last
    expert."""
    masks = [
        "f" * (WIDTH // 4) if expert in about["retained"] else "0" * (WIDTH // 4)
        for expert in range(EXPERTS)
    ]
    whole = {
        "experts": EXPERTS,
        "retained": list(range(EXPERTS)),
        "width": WIDTH,
        "channels": masks,
    }
    if allocation.endswith("mean_output"):
        return {**whole, "constants": "made up"}
    group = [*(expert for expert in range(EXPERTS) if expert not in about["retained"]), EXPERTS - 1]
    return {
        **whole,
        "merged": {str(EXPERTS - 1): {str(expert): 1 / len(group) for expert in group}},
    }


def cost(axes: dict[str, Any]) -> dict[str, Any]:
    """The content of cost.json."""
    if granularity(axes["criterion"]) == "channel":
        gone = int((~channel_masks(axes)).sum()) * EXPERT_PARAMETERS // WIDTH
        active = 1 - axes["ratio"] / 2
    else:
        count = 0 if axes["criterion"] == "none" else sum(removed(axes))
        gone = count * (EXPERT_PARAMETERS + ROUTER_PARAMETERS)
        active = 1.0
    parameters = PARAMETERS - gone
    bits = 4 if "nf4" in axes["recovery"] else 16
    return {
        "bits": bits,
        "parameters": parameters,
        "parameters_unpruned": PARAMETERS,
        "parameters_kept": parameters / PARAMETERS,
        "routed_kept": 1 - gone / (LAYERS * EXPERTS * EXPERT_PARAMETERS),
        "storage_bytes": parameters * bits // 8,
        "loading_bytes": 2 * parameters,
        "flops_per_token": 2_600_000 * active,
        "flops_per_token_unpruned": 2_600_000,
        "flops_ratio": active,
    }


def profile(axes: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of profile.parquet; the first layer has no router."""
    drawn = rng("profile", axes["criterion"], axes["calibration"], axes["ratio"])
    left = EXPERTS - (
        0 if granularity(axes["criterion"]) == "channel" else int(EXPERTS * axes["ratio"])
    )
    rows = []
    for layer in range(LAYERS):
        entropy = float("nan") if layer == 0 else float(np.log(left) * drawn.uniform(0.7, 0.9))
        entropies = {
            "router_entropy": entropy,
            "gate_entropy": entropy / 2,
            "load_entropy": entropy,
        }
        variance = (layer + 1.0) * (1 + axes["ratio"] * float(drawn.uniform(0, 1)))
        loss = axes["ratio"] ** 2 * (layer + 1) / 8 if axes["ratio"] and layer else float("nan")
        experts = 0 if layer == 0 else left
        rows.append(
            {
                "layer": layer,
                "variance": variance,
                **entropies,
                "experts": experts,
                "output_loss": loss,
            }
        )
    return rows


def search(axes: dict[str, Any]) -> dict[str, Any]:
    """The content of search.json."""
    each = int(EXPERTS * axes["ratio"])
    fitness = "spec_dec" if axes["allocation"].endswith("spec dec") else "esap"
    return {
        "schema": 1,
        "layers": list(range(LAYERS)),
        "budget": each * LAYERS,
        "settings": {"population": POPULATION, "generations": GENERATIONS, "fitness": fitness},
        "best": {"schedule": removed(axes), "fitness": 0.6},
        "uniform": {"schedule": [each] * LAYERS, "fitness": 0.5},
        "counts": {"generations": GENERATIONS, "made": 48, "evaluated": 36, "known": 12},
        "cost": {
            "candidates": 36,
            "forwards": 24.5,
            "full": 1.0,
            "per_candidate": 24.5 / 36,
            "seconds": 12.5,
        },
    }
