"""Secrets in settings: kept in the environment, and no part of the identity of a step. No torch.

Settings that may contain secrets (`LATE`) keep interpolations of the environment, `${oc.env:NAME}`, until they are
used. A secret in a command line or a file is moved to a variable of this process, which workers and jobs inherit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from moe_lab.errors import (
    ENVIRONMENT,
    MASK,
    OWN,
    UserError,
    is_placeholder,
    is_secret,
    masked,
    remember_secret,
    replace_secrets,
)

LATE = (
    "judge.url",
    "judge.extra",
    "backend.command",
    "launcher.python",
    "resources.every.setup",
    "resources.jobs",
)
"""Settings that are given to other programs, and may have secrets in them."""
STORED = (
    "model.path",
    "model.template_arguments",
    "model.search",
    "criterion.parameters",
    "calibration.path",
    "allocation.path",
    "allocation.parameters",
    "protocol.benchmarks",
    "interpreters",
    "resources.every.sbatch",
)
"""Settings that take anything, and whose values are stored as they are."""


def check_stored(field: str, value: Any) -> None:
    """UserError for a secret that would be stored: results are shown to people who must not know it."""
    if (shown := masked(value)) != value:
        raise UserError(
            f"{field}={shown} has a secret in it and would be stored with the results: expected none, for "
            f"only {', '.join(LATE)} may have one"
        )


def hidden(value: Any, name: str, secret: bool = False) -> Any:
    """`value` of the setting `name` with every secret in it moved to a variable of the environment."""
    if isinstance(value, dict):
        return {key: hidden(inner, f"{name}.{key}", secret or is_secret(str(key))) for key, inner in value.items()}
    if isinstance(value, list):
        return [hidden(inner, name, secret) for inner in value]
    if secret and value is not None and not isinstance(value, bool):
        return str(value) if is_placeholder(str(value)) else _moved(str(value), name)
    return replace_secrets(value, lambda secret_text: _moved(secret_text, name)) if isinstance(value, str) else value


def escaped(value: Any) -> Any:
    """`value` with interpolations of the environment escaped, so that OmegaConf does not resolve them."""
    return _substituted(value, lambda match: f"\\{match[0]}")


def revealed(value: Any) -> Any:
    """`value` with interpolations of the environment resolved. UserError for a variable that does not exist."""
    return _substituted(value, _variable)


def filled(text: str) -> str:
    """The text with interpolations of the environment resolved, except those of secrets."""
    return ENVIRONMENT.sub(lambda match: match[0] if is_secret(match[1]) else _variable(match), text)


def identified(value: Any) -> Any:
    """What of `value` can change a result: without keys of secrets, *** for secrets in texts, and a digest for every
    other variable of the environment."""
    if isinstance(value, dict):
        return {key: identified(inner) for key, inner in value.items() if not is_secret(str(key))}
    if isinstance(value, list):
        return [identified(inner) for inner in value]
    return _substituted(value, _identity)


def _substituted(value: Any, substitute: Callable[[re.Match[str]], str]) -> Any:
    """`value` with every interpolation of the environment substituted, in nested texts as well."""
    if isinstance(value, dict):
        return {key: _substituted(inner, substitute) for key, inner in value.items()}
    if isinstance(value, list):
        return [_substituted(inner, substitute) for inner in value]
    return ENVIRONMENT.sub(substitute, value) if isinstance(value, str) else value


def shell(text: str) -> str:
    """A line of a shell script in which the shell reads the environment, so that the script holds no secret."""
    return ENVIRONMENT.sub(
        lambda match: f"${{{match[1]}}}" if match[2] is None else f"${{{match[1]}-{match[2]}}}", text
    )


def _moved(value: str, name: str) -> str:
    """Move the value to a new variable, whose name is made from the setting's. Returns the variable's interpolation."""
    usual = f"{OWN}_{re.sub(r'[^0-9A-Za-z]+', '_', name).upper()}"
    variable, number = usual, 1
    while os.environ.get(variable, value) != value:  # another study of this process, or another part of the text
        number += 1
        variable = f"{usual}_{number}"
    os.environ[variable] = value
    remember_secret(value)
    return f"${{oc.env:{variable}}}"


def _variable(match: re.Match[str]) -> str:
    name, default = match[1], match[2]
    value = os.environ.get(name, default)
    if value is None:
        raise UserError(f"${{oc.env:{name}}}: there is no such environment variable here: export it where steps run")
    if is_secret(name):
        remember_secret(value)
    return value


def _identity(match: re.Match[str]) -> str:
    if is_secret(match[1]):
        return MASK
    return f"{match[0]}={sha256(_variable(match).encode()).hexdigest()[:12]}"
