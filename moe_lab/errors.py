"""Errors for users: one sentence without a stack trace, in which every secret is replaced by ***.

A secret is the value of a key such as api_key, the password in a URL, the word after --api-key or TOKEN= in a command
line, and the value of an environment variable with such a name.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any, NoReturn

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of an exhausted quota."""


class UserError(ValueError):
    """A mistake that the user can correct. The message is one sentence: field, value, expectation, nearest choice.
    Secrets in it are masked."""

    def __init__(self, message: str) -> None:
        super().__init__(mask(message))


class Unavailable(UserError):
    """Something outside moe_lab, such as an endpoint, is not available now. Another run tries again."""


def nearest(value: str, known: Iterable[str]) -> str | None:
    """The known name closest to `value`, or None when nothing is close."""
    matches = get_close_matches(str(value), list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def unknown(field: str, value: str, known: Iterable[str]) -> UserError:
    """The error for an unknown name, with the nearest known name and a list of all."""
    names = sorted(known)
    close = nearest(value, names)
    hint = f": did you mean {close}?" if close else ""
    return UserError(f"{field}={value} is unknown{hint} (known: {', '.join(names) or 'none'})")


def need(package: str, extra: str, reason: str) -> None:
    """Raise UserError with the command that installs `package` when it is not installed."""
    if find_spec(package.replace("-", "_")) is None:
        raise UserError(f"{reason} needs the package {package}: pip install 'moe-lab[{extra}]'")


def user_errors(check: Callable[..., object], *arguments: object) -> Iterator[str]:
    """Call `check` with `arguments`; yield the sentence of the UserError that it raises, if any."""
    try:
        check(*arguments)
    except UserError as error:
        yield str(error)


def end_with(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and end the process with its exit code.

    The code is 130 after Ctrl-C, and 141 when the reader of the output has closed it, as `head` does. Neither prints a
    stack trace.
    """
    try:
        try:
            code = main() or 0
        except SystemExit as exit_:
            code = exit_.code  # type: ignore[assignment]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):  # Python flushes both again at exit, which would raise again
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        code = 141
    sys.exit(code)


MASK = "***"
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ALWAYS = {"secret", "secrets", "password", "passwd", "passphrase", "apikey", "authorization", "credentials"}
_LAST = {"auth", "bearer", "cookie", "credential", "pw", "pwd"}
_PLAIN = {"bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop", "start", "begin", "end", "image", "next", "special"}
"""Words before `token` that make it a token of a tokenizer."""
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
_SHORTEST = 4
"""Fewest characters of a secret that is masked wherever it occurs; a shorter one cannot be told from other text."""
_known: set[str] = set()


def is_secret(name: str) -> bool:
    """Whether a key of this name holds a secret: api_key, HF_TOKEN and Authorization do; max_tokens, eos_token and
    key_variable do not."""
    words = [word.lower() for word in _WORD.findall(name)] or [""]
    before = words[-2] if len(words) > 1 else ""
    return (
        bool(_ALWAYS & set(words))
        or words[-1] in _LAST
        or (words[-1] == "token" and before not in _PLAIN)
        or (words[-1] == "key" and before not in _NO_KEY)
    )


def mask(text: str) -> str:
    """Replace every secret that this process knows, and everything that looks like a secret, by ***."""
    for value in sorted(_known, key=len, reverse=True):
        text = text.replace(value, MASK)
    for pattern in _PATTERNS:
        text = pattern.sub(_masked, text)
    return text


def _masked(match: re.Match[str]) -> str:
    """The text of a match of _PATTERNS with its value replaced, if that is a secret."""
    value, name = match["value"], match.groupdict().get("name")
    quote = value[0] if value[:1] in ("'", '"') else ""
    bare = value.strip(quote) if quote else value
    if not bare or bare == MASK or is_placeholder(bare) or (name is not None and not is_secret(name)):
        return match[0]
    start, end = match.start("value") - match.start(), match.end("value") - match.start()
    return f"{match[0][:start]}{quote}{MASK}{quote}{match[0][end:]}"


def check_no_secret(setting: str, value: Any) -> None:
    """Raise UserError for a value that looks like a secret: settings are stored with the results."""
    if (shown := masked(value, setting.rpartition(".")[2])) != value:
        raise UserError(
            f"{setting}={shown} looks like a secret, and settings are stored with the results: expected none; a "
            "program that is started reads the environment, as in $NAME"
        )


def masked(document: Any, name: str = "") -> Any:
    """A JSON document with every secret replaced by ***. `name` is its key, if it is part of another document."""
    if isinstance(document, Mapping):
        return {key: masked(value, name if is_secret(name) else str(key)) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [masked(value, name) for value in document]
    if not is_secret(name) or document is None or isinstance(document, bool):
        return mask(document) if isinstance(document, str) else document
    return mask(str(document)) if is_placeholder(str(document)) else MASK


def is_placeholder(value: str) -> bool:
    """Whether a value is a placeholder: a variable of the shell, KEY or VALUE."""
    return value.startswith(("$", "{")) or value in ("KEY", "VALUE")


def remember_secret(value: str) -> None:
    """Mask this value in every text from now on, unless it is too short."""
    if len(value) >= _SHORTEST:
        _known.add(value)
