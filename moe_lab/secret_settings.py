"""Secrets in settings: they are kept in the environment, and are not part of the identity of a step. No torch.

Settings that may contain secrets (`LATE`) keep interpolations of the environment, `${oc.env:NAME}`, until they are
used. A secret in a command line or a file is moved to an environment variable of this process, which workers and jobs
inherit.
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
"""Settings that are passed to other programs, and may contain secrets."""
STORED = (
    "model.path",
    "model.template_arguments",
    "model.search",
    "criterion.parameters",
    "calibration.path",
    "allocation.path",
    "allocation.parameters",
    "backend.arguments",
    "export.converter",
    "protocol.benchmarks",
    "interpreters",
    "resources.every.sbatch",
)
"""Settings that accept any text and are stored unchanged, so that they must not contain secrets."""


def check_stored(field: str, value: Any) -> None:
    """Raise UserError for a secret that would be stored, since results are shown to people who must not know it."""
    if (shown := masked(value)) != value:
        raise UserError(
            f"{field}={shown} has a secret in it and would be stored with the results: expected none, for "
            f"only {', '.join(LATE)} may have one"
        )


def hidden(value: Any, name: str, secret: bool = False) -> Any:
    """`value` of the setting `name`, with every secret in it moved to an environment variable."""
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
    """`value` with interpolations of the environment resolved. Raises UserError for a variable that does not exist."""
    return _substituted(value, _variable)


def filled(text: str) -> str:
    """The text with interpolations of the environment resolved, except those of secrets."""
    return ENVIRONMENT.sub(lambda match: match[0] if is_secret(match[1]) else _variable(match), text)


def identified(value: Any) -> Any:
    """The part of `value` that can change a result, for the identity of a step.

    Keys of secrets are left out, secrets in texts become ***, and the values of other environment variables become
    digests.
    """
    if isinstance(value, dict):
        return {key: identified(inner) for key, inner in value.items() if not is_secret(str(key))}
    if isinstance(value, list):
        return [identified(inner) for inner in value]
    return _substituted(value, _identity)


def _substituted(value: Any, substitute: Callable[[re.Match[str]], str]) -> Any:
    """`value` with `substitute` applied to every interpolation of the environment, also in nested texts."""
    if isinstance(value, dict):
        return {key: _substituted(inner, substitute) for key, inner in value.items()}
    if isinstance(value, list):
        return [_substituted(inner, substitute) for inner in value]
    return ENVIRONMENT.sub(substitute, value) if isinstance(value, str) else value


def shell(text: str) -> str:
    """The text as a line of a shell script: the shell reads the environment, so that the script holds no secret."""
    return ENVIRONMENT.sub(
        lambda match: f"${{{match[1]}}}" if match[2] is None else f"${{{match[1]}-{match[2]}}}", text
    )


def _moved(value: str, name: str) -> str:
    """Move the value to a new environment variable, named after the setting. Returns the variable's interpolation."""
    usual = f"{OWN}_{re.sub(r'[^0-9A-Za-z]+', '_', name).upper()}"
    variable, number = usual, 1
    while os.environ.get(variable, value) != value:  # taken by another study of this process, or for another secret
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
