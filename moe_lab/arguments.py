"""Parse the arguments NAME and KEY=VALUE of a command, by argparse."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from moe_lab.errors import UserError, unknown_name_error

_SETTING = re.compile(r"[A-Za-z]\w*=")
"""Beginning of KEY=VALUE. The name of a step may contain = too, after a slash."""


class Parser(argparse.ArgumentParser):
    """A parser whose options are written KEY=VALUE or --KEY=VALUE. It raises UserError where
    argparse would exit."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The values of `arguments` by name. Raises UserError for an unknown key, an empty value, a
        value that is no choice, and for too many or too few names."""
        words = [f"--{word}" if _SETTING.match(word) else word for word in arguments]
        request, unknown = self.parse_known_intermixed_args(words)
        for word in words:
            if word.startswith("--") and word.endswith("="):
                raise UserError(f"{word[2:]} has no value: write {word[2:]}VALUE")
        for word in unknown:
            key, is_setting, _ = word.removeprefix("--").partition("=")
            if not is_setting:
                self.error(f"{word} is neither an option nor one of the names")
            raise unknown_name_error("setting", key, vars(request))
        return request

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")
