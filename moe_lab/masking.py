"""Secrets in settings: kept in the environment, shown as ***, and no part of what identifies a step. No torch.

A secret is the value of a key such as api_key, the password in a URL, what follows --api-key or TOKEN= in a command
line, and every variable of the environment that is called so. Settings that may hold one (`LATE`) keep interpolations
of the environment as they are written, `${oc.env:NAME}`, until they are used; a secret that is typed or stands in a
file is moved to a variable of this process, which workers and jobs inherit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

MASK = "***"
OWN = "MOE_LAB_SECRET"
"""How the variables begin that secrets are moved to."""
ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)\s*(?:,\s*([^${}]*?)\s*)?\}")
LATE = (
    "judge.url",
    "judge.extra",
    "backend.command",
    "launcher.python",
    "resources.every.setup",
    "resources.jobs",
)
"""Settings that are given to other programs, and may have secrets in them."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ALWAYS = {"secret", "secrets", "password", "passwd", "passphrase", "apikey", "authorization", "credentials"}
_LAST = {"auth", "bearer", "cookie", "credential", "pw", "pwd"}
_PLAIN = {"bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop", "start", "begin", "end", "image", "next", "special"}
"""What stands before `token` where that is one of a tokenizer."""
_NO_KEY = {"sort", "primary", "group", "cache"}
_VALUE = r"""(?P<value>"[^"]*"|'[^']*'|[^\s"',;&}\]]+)"""
_PATTERNS = (
    re.compile(r"://[^/\s@:]*:(?!\d+/)(?P<value>[^\s]+)@"),
    re.compile(r"://(?P<value>[^/\s@:]{16,})@"),
    re.compile(rf"(?P<name>[\w.-]+)={_VALUE}"),
    re.compile(rf"(?P<name>--[\w-]+)\s+{_VALUE}"),
    re.compile(rf"""[{{,\s"'](?P<name>[\w-]+)["']?\s*:\s*\[?(?=["'])(?:Bearer\s+)?{_VALUE}"""),
    re.compile(rf"[{{,]\s*(?P<name>[\w-]+)\s*:\s*(?:Bearer\s+)?{_VALUE}"),
    re.compile(r"\bBearer\s+(?P<value>[^\s\"']+)"),
)
_LEAST = 4
"""Characters of a value that is looked for wherever it stands."""
_known: set[str] = set()


def is_secret(name: str) -> bool:
    """Whether what is called so is a secret: api_key, HF_TOKEN, Authorization; not max_tokens, eos_token or
    key_variable."""
    words = [word.lower() for word in _WORD.findall(name)] or [""]
    before = words[-2] if len(words) > 1 else ""
    return (
        bool(_ALWAYS & set(words))
        or words[-1] in _LAST
        or (words[-1] == "token" and before not in _PLAIN)
        or (words[-1] == "key" and before not in _NO_KEY)
    )


def mask(text: str) -> str:
    """The text with *** for every secret in it: those this process knows, and whatever looks like one."""
    text = ENVIRONMENT.sub(lambda found: MASK if found[1].startswith(OWN) else found[0], text)
    for value in sorted(_known, key=len, reverse=True):
        text = text.replace(value, MASK)
    return _replaced(text, lambda _: MASK)


def masked(document: Any, name: str = "") -> Any:
    """A JSON document with *** for every secret in it; `name` is what it stands under."""
    if isinstance(document, Mapping):
        return {key: masked(value, name if is_secret(name) else str(key)) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [masked(value, name) for value in document]
    if not is_secret(name) or document is None or isinstance(document, bool):
        return mask(document) if isinstance(document, str) else document
    return mask(str(document)) if _from_elsewhere(str(document)) else MASK


def hidden(value: Any, name: str, secret: bool = False) -> Any:
    """`value` of the setting `name` with every secret in it moved to a variable of the environment."""
    if isinstance(value, dict):
        return {key: hidden(inner, f"{name}.{key}", secret or is_secret(str(key))) for key, inner in value.items()}
    if isinstance(value, list):
        return [hidden(inner, name, secret) for inner in value]
    if secret and value is not None and not isinstance(value, bool):
        return str(value) if _from_elsewhere(str(value)) else _moved(str(value), name)
    return _replaced(value, lambda found: _moved(found, name)) if isinstance(value, str) else value


def escaped(value: Any) -> Any:
    """`value` with interpolations of the environment as OmegaConf leaves them standing."""
    if isinstance(value, dict):
        return {key: escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [escaped(inner) for inner in value]
    return ENVIRONMENT.sub(lambda found: f"\\{found[0]}", value) if isinstance(value, str) else value


def revealed(value: Any) -> Any:
    """`value` with what the environment holds in place of each interpolation; UserError for a variable it lacks."""
    if isinstance(value, dict):
        return {key: revealed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [revealed(inner) for inner in value]
    return ENVIRONMENT.sub(_variable, value) if isinstance(value, str) else value


def filled(text: str) -> str:
    """The text with what the environment holds in place of each interpolation but those of secrets."""
    return ENVIRONMENT.sub(lambda found: found[0] if is_secret(found[1]) else _variable(found), text)


def identified(value: Any) -> Any:
    """What of `value` can change a result: without keys of secrets, *** for secrets in texts, and a digest for every
    other variable of the environment."""
    if isinstance(value, dict):
        return {key: identified(inner) for key, inner in value.items() if not is_secret(str(key))}
    if isinstance(value, list):
        return [identified(inner) for inner in value]
    return ENVIRONMENT.sub(_identity, value) if isinstance(value, str) else value


def shell(text: str) -> str:
    """A line of a shell script in which the shell reads the environment, so that the script holds no secret."""
    return ENVIRONMENT.sub(
        lambda found: f"${{{found[1]}}}" if found[2] is None else f"${{{found[1]}-{found[2]}}}", text
    )


def _replaced(text: str, new: Callable[[str], str]) -> str:
    """The text with something new for whatever looks like a secret."""

    def replace(found: re.Match[str]) -> str:
        value, name = found["value"], found.groupdict().get("name")
        quote = value[0] if value[:1] in ("'", '"') else ""
        bare = value.strip(quote) if quote else value
        if not bare or bare == MASK or _from_elsewhere(bare) or (name is not None and not is_secret(name)):
            return found[0]
        start, end = found.start("value") - found.start(), found.end("value") - found.start()
        return f"{found[0][:start]}{quote}{new(bare)}{quote}{found[0][end:]}"

    for pattern in _PATTERNS:
        text = pattern.sub(replace, text)
    return text


def _from_elsewhere(value: str) -> bool:
    """Whether a value is only the place of one: an interpolation, a variable of the shell, a word to be filled in."""
    return value.startswith(("$", "{")) or value in ("KEY", "VALUE")


def _moved(value: str, name: str) -> str:
    """The interpolation of a variable that now holds the value. Its name tells the setting, never the value."""
    usual = f"{OWN}_{re.sub(r'[^0-9A-Za-z]+', '_', name).upper()}"
    variable, number = usual, 1
    while os.environ.get(variable, value) != value:  # another study of this process, or another part of the text
        number += 1
        variable = f"{usual}_{number}"
    os.environ[variable] = value
    _remember(value)
    return f"${{oc.env:{variable}}}"


def _remember(value: str) -> None:
    if len(value) >= _LEAST:
        _known.add(value)


def _variable(found: re.Match[str]) -> str:
    name, default = found[1], found[2]
    value = os.environ.get(name, default)
    if value is None:
        from moe_lab.errors import UserError  # which masks its sentences

        raise UserError(f"${{oc.env:{name}}}: there is no such environment variable here: export it where steps run")
    if is_secret(name):
        _remember(value)
    return value


def _identity(found: re.Match[str]) -> str:
    if is_secret(found[1]):
        return MASK
    return f"{found[0]}={sha256(_variable(found).encode()).hexdigest()[:12]}"
