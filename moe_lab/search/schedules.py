"""A schedule, the plan it stands for, and what evaluating schedules has cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_lab.models.discover import moe_layers
from moe_lab.pruning.plan import Plan, make_plan
from moe_lab.search.prefix import Schedule


@dataclass
class Cost:
    """What has been run so far, in full forwards of the search set: decoder layers x rows / (all layers x all rows)."""

    candidates: int = 0
    """Schedules evaluated exactly."""
    forwards: float = 0.0
    """Run for candidates."""
    full: float = 0.0
    """Run for the unpruned model, to compare with."""
    screening: float = 0.0
    """Run to rank proposals; an expert on one token counts as its share of a layer whose experts do nothing else."""

    @property
    def all(self) -> float:
        """Everything together."""
        return self.forwards + self.full + self.screening


class Plans:
    """Schedules as plans: each layer drops the lowest of `scores` (layer -> a score per expert)."""

    def __init__(self, model: Any, scores: Mapping[int, Sequence[float]]) -> None:
        self.layers = moe_layers(model)
        self.scores = {layer.index: list(scores[layer.index]) for layer in self.layers}
        self.limits = {
            "top_k": {layer.index: layer.top_k for layer in self.layers},
            "n_group": {layer.index: layer.n_group for layer in self.layers},
            "topk_group": {layer.index: layer.topk_group for layer in self.layers},
        }

    def plan(self, schedule: Schedule, provenance: Mapping[str, Any] | None = None) -> Plan:
        """The plan of one schedule; UserError when a layer is left with too few experts."""
        remove = {layer.index: lost for layer, lost in zip(self.layers, schedule, strict=True)}
        return make_plan(self.scores, remove, provenance=dict(provenance or {}), **self.limits)
