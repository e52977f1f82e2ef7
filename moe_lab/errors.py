"""Errors for users: one sentence without a stack trace, and without secrets.

Results show settings, so settings contain no secrets: programs read secrets from their environment.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn, TypeVar

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
T = TypeVar("T")


class UserError(ValueError):
    """A mistake that the user can correct. The message is one sentence with field, value,
    expectation and nearest choice."""

    code = 2
    """Exit code of a command that ends with this error."""

    def __init__(self, message: str) -> None:
        super().__init__(mask(message))
        # only a SettingsError can have more than one
        self.sentences = [str(self)]


class Unavailable(UserError):
    """Something outside moe_lab, such as the hub or an endpoint, is not available now."""

    code = 3


def nearest(value: str, known: Iterable[str]) -> str | None:
    """The name in `known` that is closest to `value`, or None when no name is close."""
    matches = get_close_matches(str(value), list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def unknown_name_error(field: str, value: str, known: Iterable[str]) -> UserError:
    """The error for an unknown name `value` in the setting `field`."""
    names = sorted(known)
    close = nearest(value, names)
    hint = f": did you mean {close}?" if close else ""
    return UserError(f"{field}={value} is unknown{hint} (known: {', '.join(names) or 'none'})")


def check_known(field: str, value: str, known: Collection[str]) -> None:
    """Raise `unknown_name_error` unless `value` is one of the `known` names."""
    if value not in known:
        raise unknown_name_error(field, value, known)


class UnknownName(ValueError):
    """Error of a validator, which does not know the setting, for a name that is not in `known`."""

    def __init__(self, known: Iterable[str]) -> None:
        self.known = known


class Registry(dict[str, T]):
    """Name -> what is registered under this name.

    A name of the form PAPER.VARIANT belongs to the module moe_lab.papers.PAPER, which is imported
    when such a name is looked up. So the variants of a paper are found without importing the
    modules of other papers.
    """

    def __contains__(self, name: object) -> bool:
        paper, dot, _ = str(name).partition(".")
        if not super().__contains__(name) and dot and paper.isidentifier():
            module = f"moe_lab.papers.{paper}"
            if find_spec(module) is not None:
                import_module(module)
        return super().__contains__(name)

    def __missing__(self, name: str) -> T:
        if name in self:
            return self[name]
        raise KeyError(name)

    def known(self, name: str) -> str:
        """Return `name`, as pydantic requires of a validator. UnknownName if it is not
        registered."""
        if name not in self:
            raise UnknownName(self)
        return name


def check_installed(package: str, reason: str) -> None:
    """Raise UserError unless `package` is installed. `reason`: the setting that needs the
    package."""
    if find_spec(package.replace("-", "_")) is None:
        raise UserError(f"{reason} needs the package {package}: pip install {package}")


def reason_in(error: Exception) -> str:
    """The class of an error of a library, and its message: one line of at most 200 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def overflow_hint(dtype: object) -> str:
    """End of the message about a number that is not finite, in a model of the torch dtype
    `dtype`."""
    if str(dtype) != "torch.float16":
        return ""
    return ": dtype=float16 has numbers up to 65504, expected model.dtype=bfloat16 or float32"


def user_errors(check: Callable[..., object], *arguments: object) -> Iterator[str]:
    """Yield a sentence for each mistake that `check(*arguments)` reports. `check` returns an
    iterator over sentences, or raises UserError."""
    try:
        result = check(*arguments)
        if isinstance(result, Iterator):
            yield from result
    except UserError as error:
        yield str(error)


def run_and_exit(main: Callable[[], int | None]) -> NoReturn:
    """Run the command `main` and end the process with the exit code that `main` returns (0 for
    None). The message of a UserError is printed. Ctrl-C gives the exit code 130. A closed output,
    such as a pipe to `head`, gives 141."""
    try:
        try:
            os.getcwd()
        except FileNotFoundError:
            print("the current folder was removed: change into another", file=sys.stderr)
            sys.exit(UserError.code)
        try:
            code = main() or 0
        except UserError as user_error:
            print(f"moe_lab: {user_error}", file=sys.stderr)
            code = user_error.code
        except SystemExit as system_exit:
            code = system_exit.code  # type: ignore[assignment]
        # a closed output raises BrokenPipeError now instead of at exit
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BrokenPipeError:
        # Python flushes both streams again at exit; /dev/null prevents a second error
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        code = 141
    except BaseException as error:
        if not _is_interrupt(error):
            raise
        print("\nstopped", file=sys.stderr)
        code = 130
    sys.exit(code)


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether `error` is Ctrl-C, or an error that a library, such as OmegaConf, raised while it
    handled Ctrl-C."""
    return error is not None and (
        isinstance(error, KeyboardInterrupt) or _is_interrupt(error.__context__)
    )


MASK = "***"
SHORTEST = 8
"""Minimum number of characters of a value that is masked; shorter values also occur in ordinary
text."""
_SETTING = re.compile(
    r"(?!(bos|eos|pad|unk|sep|cls|mask|image|stop)_)"  # not settings such as eos_token
    r"(.*[_-])?(api[_-]?key|token|secret|password|passwd|authorization|credentials?)",
    re.IGNORECASE,
)
"""Pattern of the name of a setting whose value is a secret."""
_SECRET = re.compile(
    r"""://[^/\s]*@                                                # a URL with a user or a password
    | \bBearer\s+[^\s$]
    | --[\w-]*(?:key|token|secret|password)[=\s]+["']?[^\s"'$-]      # an option of a command line
    | \b\w*(?:KEY|TOKEN|SECRET|PASSWORD)=["']?[^\s"'$]             # an assignment in a shell
    | \b(?:hf_|sk-|ghp_|github_pat_)\w{12,}                      # a key in the form of a service
    """,
    re.VERBOSE,
)
"""Pattern of a text that contains a secret."""
_VARIABLE = re.compile(r"(.*_)?(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)", re.IGNORECASE)
"""Pattern of the name of an environment variable whose value is a secret."""


def secrets_in(setting: str, value: Any) -> Iterator[str]:
    """Yield one sentence if the `value` of a setting contains a secret. `setting`: dotted name."""
    name = setting.rpartition(".")[2]
    if (
        isinstance(value, str)
        and value
        and (_SECRET.search(value) or _SETTING.fullmatch(name) or mask(value) != value)
    ):
        yield (
            f"{setting} has a secret in it, which would be shown with the results: expected none, "
            "as servers and jobs read their own environment, and judge.key_variable names the "
            "variable that holds a key"
        )


def mask(text: str) -> str:
    """`text` with MASK in place of the values of environment variables that hold secrets."""
    values = {
        value
        for name, value in os.environ.items()
        if len(value) >= SHORTEST and _VARIABLE.fullmatch(name)
    }
    # the longest first, as a value may contain a shorter value
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text
