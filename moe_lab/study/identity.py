"""What makes two pieces of work the same: a digest of everything that changes the result, and of nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

from moe_lab.paths import shortened

LONGEST_LABEL = 200
"""Bytes of a label, so that what is written beside a folder, under a longer name, can be called so too."""


def canonical(document: Any) -> str:
    """JSON text that is equal for equal documents: sorted keys, no spaces, no NaN."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(document: Any) -> str:
    """sha256 of the canonical JSON of `document`, in hexadecimal."""
    return sha256(canonical(document).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Part:
    """Settings that change a result. Many steps share one part, so that its digest is computed once."""

    settings: Mapping[str, Any]

    @cached_property
    def digest(self) -> str:
        return digest(self.settings)


@dataclass(frozen=True, eq=False)
class Step:
    """One cached, restartable piece of work.

    `parts` and `inputs` are its identity, by role. `runtime` (device, batch size, paths, permissions) tells how to
    do it on this machine and never what comes out; `label` makes its folder readable.
    """

    kind: str
    label: str
    parts: Mapping[str, Part] = field(default_factory=dict)
    inputs: Mapping[str, Step] = field(default_factory=dict)
    runtime: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def id(self) -> str:
        """sha256 over kind, parts and inputs."""
        lines = [f"{role}={part.digest}" for role, part in self.parts.items()]
        lines += [f"{role}<{step.id}" for role, step in self.inputs.items()]
        return sha256("\n".join([self.kind, *sorted(lines)]).encode()).hexdigest()

    @cached_property
    def folder(self) -> str:
        """Path inside the store: kind, readable label, and enough of the id to be unique."""
        return f"{self.kind}/{shortened(self.label, LONGEST_LABEL)}-{self.id[:12]}"

    def document(self) -> dict[str, Any]:
        """The identity in full, as stored beside the result."""
        return {
            "id": self.id,
            "kind": self.kind,
            "settings": {role: dict(part.settings) for role, part in self.parts.items()},
            "inputs": {role: step.folder for role, step in self.inputs.items()},
        }
