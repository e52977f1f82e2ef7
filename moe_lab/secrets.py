"""Secrets, such as keys and passwords, are no part of settings, which results show: programs read their environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"
SHORTEST = 8
"""Fewest characters of a value that is masked; a shorter one cannot be told from other text."""
_NAME = re.compile(
    r"(?!(bos|eos|pad|unk|sep|cls|mask|image|stop)_)"  # tokens of a tokenizer
    r"(.*[_-])?(api[_-]?key|token|secret|password|passwd|authorization|credentials?)",
    re.IGNORECASE,
)
_TEXT = re.compile(
    r"""://[^/\s]*@                                                # a URL with a user or a password
    | \bBearer\s+[^\s$]
    | --[\w-]*(?:key|token|secret|password)[=\s]+["']?[^\s"'$-]      # an option of a command line
    | \b\w*(?:KEY|TOKEN|SECRET|PASSWORD)=["']?[^\s"'$]             # an assignment in a shell
    | \b(?:hf_|sk-|ghp_|github_pat_)\w{12,}                            # as services write their keys
    """,
    re.VERBOSE,
)
_VARIABLE = re.compile(r"(.*_)?(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)", re.IGNORECASE)


def problems(value: Any, setting: str = "") -> Iterator[str]:
    """A sentence for each text in `value`, the settings under the dotted name `setting`, that looks like a secret."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from problems(inner, f"{setting}.{name}" if setting else str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from problems(inner, setting)
    elif isinstance(value, str) and (_TEXT.search(value) or (_NAME.fullmatch(setting.rpartition(".")[2]) and value)):
        yield (
            f"{setting} has a secret in it, which would be shown with the results: expected none, as servers and jobs "
            "read their own environment, and judge.key_variable names the variable that holds a key"
        )


def mask(text: str) -> str:
    """Replace the values of environment variables that are called like secrets by ***."""
    values = {value for name, value in os.environ.items() if len(value) >= SHORTEST and _VARIABLE.fullmatch(name)}
    for value in sorted(values, key=len, reverse=True):  # the longest first, as one may begin with another
        text = text.replace(value, MASK)
    return text
