"""A refusal of the scheduler in its own words, with the setting to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WORDS = {
    "account": "account",
    "partition": "partition",
    "qos": "qos",
    "feature": "constraint",
    "time limit": "minutes",
    "memory": "memory",
    "gres": "gpus",
    "generic resource": "gpus",
    "cpu count": "cpus",
    "processor": "cpus",
}
"""What stands in a refusal -> the field of JobConfig that asked for it, the most telling first."""
SIZE = ("gpus", "cpus", "memory")


def refusal(kind: str, asks: Mapping[str, Any], words: str) -> str:
    """One sentence: what was refused, in the scheduler's words, and the setting that asked for it."""
    said = "; ".join(line.removeprefix("sbatch: error: ").strip() for line in words.splitlines() if line.strip())
    lower = said.lower()
    fields = [next((field for word, field in WORDS.items() if word in lower), None)]
    if fields == [None]:
        fields = [*SIZE] if "configuration" in lower else ["sbatch"]
    return less(kind, asks, [field for field in fields if field], f"Slurm says: {said}")


def less(kind: str, asks: Mapping[str, Any], fields: Sequence[str], reason: str) -> str:
    """One sentence: what jobs of a kind ask for, why it cannot be, and the settings to change."""
    values = " ".join(f"{field}={asks[field]}" for field in fields)
    places = " ".join(f"resources.every.{field}" for field in fields)
    return (
        f"{kind} jobs ask for {values}, and {reason}; set {places}, or resources.jobs of {kind} "
        "(nothing was left in the queue)"
    )
