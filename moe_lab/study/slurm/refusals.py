"""What Slurm cannot or will not run, as sentences that name the setting to change."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from moe_lab.study.slurm import scheduler

SIZES = ("gpus", "cpus", "memory", "minutes")
OWN = {"clusters", "partition", "cpus-per-task", "mem", "mem-per-cpu", "mem-per-gpu", "gpus-per-node", "time"}
"""Options of sbatch that, set by hand, ask for something else than the fields of JobConfig say."""


@dataclass(frozen=True)
class Nodes:
    """Nodes of one partition that are alike: GPUs, CPUs and memory (GiB) of one, and how long a job may take there."""

    partition: str
    default: bool
    gpus: int
    cpus: int
    memory: float
    minutes: float


def nodes() -> list[Nodes]:
    """All nodes the scheduler has, those that are down or drained too, by partition and size."""
    text = scheduler.ask("sinfo", "--all", "--noheader", "--exact", "--format=%P|%G|%c|%m|%l")
    groups = []
    for partition, gres, cpus, megabytes, limit in (line.split("|") for line in text.splitlines()):
        gpus = sum(map(int, re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres)))
        name = partition.removesuffix("*")
        groups.append(Nodes(name, name != partition, gpus, int(cpus), int(megabytes) / 1024, _minutes(limit)))
    return groups


def _minutes(limit: str) -> float:
    """Minutes of a time as sinfo writes it: 1-12:00:00, 30:00, infinite."""
    days, _, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts):
        return inf
    minutes = sum(int(part) * 60.0**place for place, part in enumerate(reversed(parts), start=-1))
    return minutes + 1440 * int(days or 0)


def _of_partition(asks: Mapping[str, Any], available: Sequence[Nodes]) -> list[Nodes]:
    """The nodes a job may run on; none where that is unknown."""
    if OWN & {name.replace("_", "-") for name in asks["sbatch"]}:
        return []
    named = os.environ.get("SBATCH_PARTITION") or asks["partition"]
    return [each for each in available if (each.partition in named.split(",") if named else each.default)]


def time_limit(asks: Mapping[str, Any], available: Sequence[Nodes]) -> float:
    """Minutes that a job may take where it may run; infinite where that is unknown, or up to a quality of service."""
    own = [] if asks["qos"] else _of_partition(asks, available)
    return max((each.minutes for each in own), default=inf)


def too_much(asks: Mapping[str, Any], available: Sequence[Nodes]) -> tuple[list[str], str] | None:
    """What of `asks` no node has, as fields of JobConfig, with sinfo's figures in words; None where a node has all.

    None also where that is unknown: in a partition that sinfo does not list, which sbatch itself refuses, and where
    options of sbatch are set by hand. A quality of service may allow more time than the partition does.
    """
    own = _of_partition(asks, available)
    sizes = SIZES[:-1] if asks["qos"] else SIZES
    if not own or any(all(asks[name] <= getattr(each, name) for name in sizes) for each in own):
        return None
    fields = [name for name in sizes if asks[name] > max(getattr(each, name) for each in own)]
    shown = dict.fromkeys(" ".join(f"{name}={getattr(each, name):.6g}" for name in sizes) for each in own)
    partitions = ", ".join(dict.fromkeys(each.partition for each in own))
    return fields or [*sizes], f"no node of partition {partitions} has that: sinfo shows {' or '.join(shown)}"


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
    sentence = "; ".join(line.removeprefix("sbatch: error: ").strip() for line in words.splitlines() if line.strip())
    lower = sentence.lower()
    fields = [next((field for word, field in WORDS.items() if word in lower), None)]
    if fields == [None]:
        fields = [*SIZE] if "configuration" in lower else ["sbatch"]
    return less(kind, asks, [field for field in fields if field], f"Slurm says: {sentence}")


def less(kind: str, asks: Mapping[str, Any], fields: Sequence[str], reason: str) -> str:
    """One sentence: what jobs of a kind ask for, why it cannot be, and the settings to change."""
    values = " ".join(f"{field}={asks[field]}" for field in fields)
    places = " ".join(f"resources.every.{field}" for field in fields)
    if "minutes" in fields:  # which may be what a job gets whose time is unknown
        places += " or resources.longest"
    return (
        f"{kind} jobs ask for {values}, and {reason}; set {places}, or resources.jobs of {kind} "
        "(nothing was left in the queue)"
    )
