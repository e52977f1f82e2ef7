"""Base of all groups of settings: their checks, the sentence for each mistake, and their entries in
the identity of a step."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Self,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass, is_pydantic_dataclass

from moe_lab.errors import UnknownName, UserError, nearest, secrets_in, unknown_name_error
from moe_lab.paths import validate_name

SETTINGS = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)
"""Checks of every group. A class is compiled when it is first used, which keeps the report of a
typo within half a second."""

LARGEST = 2**63 - 1
"""The largest whole number that random generators, counters and tensors take."""


def matching(pattern: str, expected: str) -> AfterValidator:
    """A validator that raises ValueError unless the regular expression `pattern` matches the whole
    text. `expected`: the message."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.DOTALL):
            raise ValueError(expected)
        return text

    return AfterValidator(check)


Count = Annotated[int, Strict(), Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Strict(), Field(ge=1, le=LARGEST)]
From2 = Annotated[int, Strict(), Field(ge=2, le=LARGEST)]
Above0 = Annotated[float, Strict(), Field(gt=0)]
Share = Annotated[float, Strict(), Field(ge=0, lt=1)]
Ratio = Annotated[Share, AfterValidator(lambda ratio: round(ratio, 9))]
"""Share to remove, rounded, so that the third value of range(0.1,0.35,0.1) equals a typed 0.3."""
Name = Annotated[str, AfterValidator(validate_name)]
"""Part of a folder's name."""
Text = Annotated[str, matching(r".*\S.*", "expected a text that is not empty")]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def group(cls: type[T]) -> type[T]:
    """Decorator of a class of settings, whose values are checked as SETTINGS say."""
    decorated: Any = dataclass(config=SETTINGS, frozen=True)(cls)
    return decorated  # type: ignore[no-any-return]


@group
class Group:
    """Settings that belong together. The text under each field is printed in docs and by --help."""

    basic = tuple[str, ...]()
    """Fields that most users set, which --help shows."""
    internal = tuple[str, ...]()
    """Fields that other settings set, which nobody can type."""
    runtime = tuple[str, ...]()
    """Fields that change how work is done but no result; they are not part of an identity."""
    references = tuple[str, ...]()
    """Fields that refer to something outside of the settings, such as a path to a file."""

    @classmethod
    def of(cls, settings: Any) -> Self:
        """An object of this class with the values of `settings`, which is an object of a base
        class."""
        if isinstance(settings, cls):
            return settings
        return cls(**{member.name: getattr(settings, member.name) for member in fields(settings)})

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that change a result, JSON-ready: all fields except those in `runtime`. A
        class with fields in `references` must override this property, to put the content in place
        of the reference."""
        if self.references:
            raise TypeError(
                f"{type(self).__name__} does not know what its {', '.join(self.references)} "
                "stands for"
            )
        return identity_fields(self)

    def check_default(self, names: Iterable[str], reason: str) -> None:
        """Raise ValueError for a setting in `names`, which is not read, unless it has its default.
        `reason`: why it is not read."""
        for name in names:
            value = getattr(self, name)
            default = default_of(type(self), name)
            if value != default:
                raise ValueError(f"{name}={value} {reason}: expected {as_typed(default)}")

    @model_validator(mode="before")
    @classmethod
    def _check_internal(cls, content: Any) -> Any:
        """Raise ValueError if a file or a command sets a field in `internal`."""
        # only files and commands give a dict; Python code may set these fields
        if isinstance(content, dict):
            for name in content.keys() & cls.internal:
                raise ValueError(
                    f"{name} is set by other settings, and neither by a file nor by a command"
                )
        return content

    @model_validator(mode="after")
    def _check_storable(self) -> Self:
        """Raise ValueError for values that cannot be stored with the results."""
        for member in fields(self):
            for problem in storage_problems(getattr(self, member.name), member.name):
                raise ValueError(problem)
        return self


def storage_problems(value: Any, setting: str) -> Iterator[str]:
    """A sentence for each part of a setting's `value` that cannot be stored with results, such as a
    secret."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from storage_problems(inner, f"{setting}.{name}")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from storage_problems(inner, setting)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{setting}={value}: expected a finite number"
    elif isinstance(value, int) and abs(value) > LARGEST:
        yield f"{setting}={value:.3g}: expected a number of at most {LARGEST}"
    elif isinstance(value, str) and "${" in value and not setting.startswith("hydra."):
        # Hydra's own settings are not stored with results
        yield (
            f"{setting}={value}: settings have no interpolation: expected the value, or $NAME for "
            "a shell"
        )
    else:
        yield from secrets_in(setting, value)


class SettingsError(UserError):
    """One or several mistakes in settings. `sentences`: one sentence for each mistake."""

    def __init__(self, sentences: Iterable[str]) -> None:
        distinct = list(dict.fromkeys(sentences))
        heading = [] if len(distinct) == 1 else ["several mistakes:"]
        super().__init__("\n  - ".join([*heading, *distinct]))
        self.sentences = distinct


class Mistakes(list[str], AbstractContextManager["Mistakes"]):
    """A list of mistakes that are reported together. The end of its `with` block raises
    SettingsError unless the list is empty. A UserError in the block is added to the list."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, UserError):
            self += error.sentences
        if self and (error is None or isinstance(error, UserError)):
            raise SettingsError(self) from None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """A context that catches a UserError and adds its mistakes to the list."""
        try:
            yield
        except UserError as error:
            self += error.sentences


def validated(kind: type[T] | Any, content: Any, group: str, origin: str = "") -> T:
    """Check `content`, settings as plain values, and return an object of the type `kind`.
    SettingsError with all mistakes.

    `group`: dotted name of the settings, such as allocation.parameters; "" for a whole study.
    `origin`: the choice that `content` comes from, such as calibration=c4; "" for none.
    """
    try:
        settings: T = TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        prefix = f"{origin}: " if origin else ""
        raise SettingsError(
            prefix + sentence for sentence in error_sentences(error, kind, group)
        ) from None
    return settings


def error_sentences(error: ValidationError, kind: Any, group: str) -> list[str]:
    """A sentence for each mistake in `error`. `kind`, `group`: type and dotted name of the settings
    that were checked."""
    sentences: list[str] = []
    for mistake in error.errors(include_url=False):
        # pydantic's location also has names of types and parts in brackets, which are no keys
        path = [
            str(part)
            for part in mistake["loc"]
            if part not in _UNION_TYPES and not str(part).endswith("]")
        ]
        key = ".".join(filter(None, [group, *path]))
        # a wrong key of a mapping dict[Literal[...], ...]: the values of the Literal are the keys
        if mistake["loc"][-1:] == ("[key]",):
            key_type = get_args(setting_type(kind, path[:-1]))[0]
            sentence = _unknown_setting(key, literal_values(key_type))
        else:
            sentence = _sentence(dict(mistake), kind, key, path)
        # pydantic has a mistake for each member of a type such as str | list[str]
        start = f"{key}={mistake['input']}: expected "
        if sentences and sentence.startswith(start) and sentences[-1].startswith(start):
            sentences[-1] += f"; or {sentence.removeprefix(start)}"
        else:
            sentences.append(sentence)
    return sentences


_UNION_TYPES = ("int", "float", "str", "bool", "none", "nullable")
"""Parts of pydantic's location of a mistake that name a type of a union, not a setting."""
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text, in quotes if it is a number",
    "list_type": "a list, such as [a,b]",
    "tuple_type": "a list, such as [a,b]",
    "dict_type": "settings and their values, such as {{name: value}}",
    "dataclass_type": "settings and their values, such as {{name: value}}",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "a number below {lt}",
    "less_than_equal": "at most {le}",
    "too_short": "at least {min_length}",
    "string_too_short": "a text",
}
"""Kind of mistake -> expected value."""


def _sentence(mistake: Mapping[str, Any], kind: Any, key: str, path: list[str]) -> str:
    """The sentence for one `mistake`, an item of ValidationError.errors(). `key`: dotted name of
    the setting. `path`: the keys that lead to the setting from the group `kind`."""
    mistake_type = mistake["type"]
    value = mistake["input"]
    if mistake_type == "missing":
        return f"{key} is not set: add {key}=VALUE"
    if mistake_type in ("unexpected_keyword_argument", "extra_forbidden"):
        return _unknown_setting(key, fields_of(setting_type(kind, path[:-1])))
    if mistake_type == "literal_error":
        return str(unknown_name_error(key, str(value), literal_values(setting_type(kind, path))))
    if mistake_type == "value_error":
        error = mistake["ctx"]["error"]
        if isinstance(error, UnknownName):
            return str(unknown_name_error(key, value, error.known))
        message = str(error)
        # for a whole group, the message begins with the setting: tokens=1 is less than ...
        return (
            f"{key}={value}: {message}"
            if isinstance(value, str | int | float)
            else f"{key}.{message}".lstrip(".")
        )
    expected = mistake["msg"]
    if mistake_type in _EXPECTED:
        expected = _EXPECTED[mistake_type].format(**mistake.get("ctx", {}))
    return f"{key}={value}: expected {expected}"


def _unknown_setting(key: str, known: Iterable[str]) -> str:
    """The sentence for a setting that does not exist. `known`: names of the settings in its
    group."""
    group, dot, name = key.rpartition(".")
    names = sorted(known)
    close = nearest(name, names)
    hint = f": did you mean {group}{dot}{close}?" if close else ""
    return f"{key} is not a setting{hint} (known: {', '.join(names)})"


def fields_of(kind: Any) -> dict[str, Any]:
    """The settings of the group `kind` that users can set: name -> type annotation."""
    if not (isinstance(kind, type) and is_pydantic_dataclass(kind)):
        return {}
    hints = get_type_hints(kind, include_extras=True)
    internal = getattr(kind, "internal", ())
    return {name: hints[name] for name in kind.__dataclass_fields__ if name not in internal}


def setting_type(kind: Any, path: Iterable[str]) -> Any:
    """The type of the setting to which the keys in `path` lead from the group `kind`. The type X |
    None is returned as X. None if there is no such setting."""
    for part in path:
        plain = without_none(kind)
        if get_origin(plain) is Annotated:
            plain = get_args(plain)[0]
        if plain is Any:
            return Any
        origin = get_origin(plain)
        arguments = get_args(plain)
        if origin is dict:
            kind = arguments[1]
        elif origin in (list, tuple):
            kind = arguments[0]
        else:
            kind = fields_of(plain).get(part)
    return without_none(kind)


def default_of(kind: Any, name: str) -> Any:
    """The default of the field `name` of the class `kind`; MISSING if there is none."""
    member = kind.__dataclass_fields__[name]
    return member.default if member.default_factory is MISSING else member.default_factory()


def as_typed(value: Any) -> str:
    """The value of a setting, as users type it."""
    # an empty text is typed as two quotation marks, which json.dumps makes
    return value if isinstance(value, str) and value else json.dumps(value)


def without_none(kind: Any) -> Any:
    """`X` of `X | None`; any other type unchanged."""
    if get_origin(kind) in (Union, UnionType):
        members = [member for member in get_args(kind) if member is not NoneType]
        return members[0] if len(members) == 1 else kind
    return kind


def literal_values(kind: Any) -> list[str]:
    """The values of a Literal, as texts; [] for any other type."""
    return [str(value) for value in get_args(kind)] if get_origin(kind) is Literal else []


def is_text(kind: Any) -> bool:
    """Whether a setting of the type `kind` is a text: a str, or a Literal with texts."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return any(isinstance(value, str) for value in get_args(kind))
    return kind is str


def identity(value: Any) -> Any:
    """The part of `value` that changes a result, JSON-ready."""
    own_identity = getattr(value, "identity", None)
    if own_identity is not None:
        return own_identity
    if is_dataclass(value):
        return identity_fields(value)
    if isinstance(value, Mapping):
        return {str(name): identity(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [identity(inner) for inner in value]
    return value


def identity_fields(settings: Any, *excluded: str) -> dict[str, Any]:
    """The fields of a dataclass that change a result: name -> `identity` of the value."""
    skipped = {*getattr(settings, "runtime", ()), *excluded}
    return {
        member.name: identity(getattr(settings, member.name))
        for member in fields(settings)
        if member.name not in skipped
    }
