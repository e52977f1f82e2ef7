"""What a user's mistake gets: one sentence, and no stack trace."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from typing import NoReturn

from moe_lab.masking import mask

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk without room, and of a quota that is used up."""


class UserError(ValueError):
    """A mistake the user can mend. The message is one sentence: field, value, what was expected, nearest choice.
    Secrets in it are masked."""

    def __init__(self, message: str) -> None:
        super().__init__(mask(message))


class Unavailable(UserError):
    """Something outside, such as an endpoint, does not answer now. Nothing is wrong: a rerun simply tries again."""


def nearest(value: str, known: Iterable[str]) -> str | None:
    """The known name closest to `value`, or None when nothing is close."""
    found = get_close_matches(str(value), list(known), n=1, cutoff=0.5)
    return found[0] if found else None


def unknown(field: str, value: str, known: Iterable[str]) -> UserError:
    """The error for a name nobody knows: says the nearest one, and all of them."""
    names = sorted(known)
    close = nearest(value, names)
    hint = f": did you mean {close}?" if close else ""
    return UserError(f"{field}={value} is unknown{hint} (known: {', '.join(names) or 'none'})")


def said(check: Callable[[], object]) -> Iterator[str]:
    """What is wrong according to `check`: its UserError as a sentence, or nothing."""
    try:
        check()
    except UserError as error:
        yield str(error)


def end_with(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and end the process with its exit code, as a shell has it: 130 after Ctrl-C, and 141 when whoever
    reads the output has stopped, as `head` does; neither prints a trace."""
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
        for stream in (sys.stdout, sys.stderr):  # Python flushes them once more when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        code = 141
    sys.exit(code)
