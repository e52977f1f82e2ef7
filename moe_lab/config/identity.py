"""What of a setting changes a result. Nothing else is part of the identity of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import singledispatch
from typing import Any


@singledispatch
def identity(setting: Any) -> Any:
    """What of `setting` changes a result, JSON-ready.

    A group of settings is its fields, except those that its class names in `runtime`. Where a setting stands for
    something else, such as a path for the content of a file, the module of its subject registers a function for it.
    """
    if is_dataclass(setting) or hasattr(type(setting), "model_fields"):
        return counting_fields(setting)
    if isinstance(setting, Mapping):
        return {str(name): identity(value) for name, value in setting.items()}
    if isinstance(setting, (list, tuple)):
        return [identity(value) for value in setting]
    return setting


def counting_fields(group: Any, *without: str) -> dict[str, Any]:
    """The fields of a group that change a result, by name, but for those in `without`. `group`: a dataclass or a
    pydantic model."""
    names = [field.name for field in fields(group)] if is_dataclass(group) else list(type(group).model_fields)
    runtime: frozenset[str] = getattr(type(group), "runtime", frozenset())
    return {name: identity(getattr(group, name)) for name in names if name not in (*runtime, *without)}
