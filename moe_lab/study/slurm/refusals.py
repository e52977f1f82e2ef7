"""Jobs that Slurm cannot or will not run, explained in sentences that name the setting to change."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from moe_lab.study.slurm import scheduler

SIZES = ("gpus", "cpus", "memory", "minutes")


@dataclass(frozen=True)
class Nodes:
    """Equal nodes of one partition: GPUs, CPUs and memory (GiB) of each, and the partition's time limit in minutes."""

    partition: str
    default: bool
    gpus: int
    cpus: int
    memory: float
    minutes: float


def nodes() -> list[Nodes]:
    """All nodes that sinfo lists, down and drained ones included, grouped by partition and size."""
    text = scheduler.ask("sinfo", "--all", "--noheader", "--exact", "--format=%P|%G|%c|%m|%l")
    groups = []
    for partition, gres, cpus, megabytes, limit in (line.split("|") for line in text.splitlines()):
        gpus = sum(map(int, re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres)))
        name = partition.removesuffix("*")
        groups.append(Nodes(name, name != partition, gpus, int(cpus), int(megabytes) / 1024, _minutes(limit)))
    return groups


def _minutes(limit: str) -> float:
    """Minutes of a time as written by sinfo: 1-12:00:00, 30:00, infinite."""
    days, _, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts):
        return inf
    minutes = sum(int(part) * 60.0**place for place, part in enumerate(reversed(parts), start=-1))
    return minutes + 1440 * int(days or 0)


def _of_partition(asks: Mapping[str, Any], available: Sequence[Nodes]) -> list[Nodes]:
    """The nodes that a job may run on; none when they are not known."""
    named = asks["partition"] or os.environ.get("SBATCH_PARTITION")
    return [each for each in available if (each.partition in named.split(",") if named else each.default)]


def time_limit(asks: Mapping[str, Any], available: Sequence[Nodes]) -> float:
    """Longest time limit in minutes of the nodes that a job may run on.

    Infinite when they are not known, and when a quality of service (qos) determines the limit.
    """
    own = [] if asks["qos"] else _of_partition(asks, available)
    return max((each.minutes for each in own), default=inf)


def too_much(asks: Mapping[str, Any], available: Sequence[Nodes]) -> tuple[list[str], str] | None:
    """Resources that a job asks for and no node has: fields of JobConfig, and the nodes' sizes as text. None if a node
    has all of them.

    None also when it is not known: for a partition that sinfo does not list, which sbatch itself refuses. Time is not
    compared with a qos, which may allow more than the partition does.
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
"""Words in Slurm's message -> the field of JobConfig that was refused, the most specific words first."""
SIZE = ("gpus", "cpus", "memory")


def refusal(kind: str, asks: Mapping[str, Any], words: str) -> str:
    """One sentence with the scheduler's reason for refusing a job, and the setting that caused it."""
    sentence = "; ".join(line.removeprefix("sbatch: error: ").strip() for line in words.splitlines() if line.strip())
    lower = sentence.lower()
    fields = [next((field for word, field in WORDS.items() if word in lower), None)]
    if fields == [None]:
        fields = [*SIZE] if "configuration" in lower else ["sbatch"]
    if "gpus" in fields and asks["gpu_type"]:
        fields.insert(1, "gpu_type")
    return less(kind, asks, [field for field in fields if field], f"Slurm says: {sentence}")


def less(kind: str, asks: Mapping[str, Any], fields: Sequence[str], reason: str) -> str:
    """One sentence: what jobs of a kind ask for, why they cannot have it, and the settings to change."""
    values = " ".join(f"{field}={asks[field]}" for field in fields)
    places = " ".join(f"resources.every.{field}" for field in fields)
    if "minutes" in fields:  # jobs of unknown time ask for it
        places += " or resources.longest"
    return (
        f"{kind} jobs ask for {values}, and {reason}; set {places}, or resources.jobs of {kind} "
        "(nothing was left in the queue)"
    )
