"""The identity of a step: canonical JSON, its digest, and what each field contributes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple, dataclass_transform

from moe_lab.config.base import identity

MEANING = "4"
"""Changes the id of every step. It goes up where results of earlier versions may be wrong, so that
none is found again; CHANGELOG.md says which."""
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(document: Any) -> str:
    """JSON text that is equal for equal documents: sorted keys, no spaces, no NaN."""
    return _ENCODER.encode(document)


def digest(document: Any) -> str:
    """sha256 of the canonical JSON of `document`, in hexadecimal."""
    return sha256(canonical(document).encode()).hexdigest()


class IdentityEntry(NamedTuple):
    """What a field contributes to the identity of a step."""

    value: Any
    """The input step, or the JSON document of a setting."""
    line: str
    """Its line in the text whose hash is the id."""


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
class StepFields:
    """Fields that several steps share, as one field of each: they count as fields of the step. A
    class that is derived from it is a frozen dataclass."""

    runtime: ClassVar[frozenset[str]] = frozenset()
    """Fields that determine how the work is done (device, paths, permissions), and not its
    result."""
    _identifying: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, eq=False)(cls)
        runtime = {name for base in cls.__mro__ for name in vars(base).get("runtime", ())}
        of_class: Any = cls
        cls._identifying = tuple(
            each.name for each in fields(of_class) if each.init and each.name not in runtime
        )

    @cached_property
    def identity_entries(self) -> dict[str, IdentityEntry]:
        """Role -> what it contributes, of all fields but those in `runtime`."""
        return self.collect_entries()

    def collect_entries(self) -> dict[str, IdentityEntry]:
        """The `identity_entries`, without keeping them."""
        entries: dict[str, IdentityEntry] = {}
        for name in self._identifying:
            value = getattr(self, name)
            if type(value) is dict:
                for role, inner in value.items():
                    entries.update(_entries(role, inner))
            elif value is not None:
                entries.update(_entries(name, value))
        return entries

    def entries_as(self, role: str) -> Mapping[str, IdentityEntry]:
        """What this contributes to the identity of a step of which it is the field `role`."""
        return self.identity_entries


def _entries(role: str, value: Any) -> Mapping[str, IdentityEntry]:
    if isinstance(value, StepFields):
        return value.entries_as(role)
    document = identity(value)
    return {role: IdentityEntry(document, f"{role}={digest(document)}")}
