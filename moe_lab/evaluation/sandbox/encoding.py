"""Python values as JSON, so that values which a program returned can be read without running or
unpickling anything.

Plain values stay as they are; other values become {"kind": ..., "value": ...}. A value that cannot
be represented (a function, an object of the program's own class) becomes an `Opaque`, which equals
nothing, as such an object would. A value with more than `HUGE` parts (some published tests return
hundreds of millions) becomes a hash, by which it can be compared.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any, NamedTuple

HUGE = 50_000
"""Most parts of a value that is sent as a whole; `_remaining_budget` counts parts."""
_PLAIN = (type(None), bool, float, str)
_SHORT_INTEGER = 1 << 512  # longer integers would meet Python's limit on decimal digits


class Opaque:
    """A value that cannot be represented. It equals nothing."""


@dataclass(frozen=True)
class Huge:
    """A value too large to send. It equals other huge values with the same hash."""

    fingerprint: int

    def __iter__(self) -> Iterator[Any]:
        """Yield this value as the only item, for graders that compare values item by item."""
        return iter([self])


@dataclass(frozen=True, eq=False)
class Stream:
    """The items of an iterator, range or deque. It equals nothing."""

    items: list[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def _encode_items(value: Iterable[Any]) -> list[Any]:
    return [encode(item) for item in value]


def _decode_items(items: Any) -> list[Any]:
    return [decode(item) for item in items]


class _Form(NamedTuple):
    """How values of a type are written as JSON and read again."""

    to_json: Callable[[Any], Any]
    """Uses methods of the base type, because a subclass may have overridden them."""
    from_json: Callable[[Any], Any]


_FORMS: dict[type, _Form] = {
    int: _Form(lambda value: hex(int.__index__(value)), lambda text: int(text, 16)),
    float: _Form(float.__float__, float),
    complex: _Form(lambda value: [value.real, value.imag], lambda pair: complex(*pair)),
    str: _Form(str.__str__, str),
    bytes: _Form(bytes.hex, bytes.fromhex),
    list: _Form(_encode_items, _decode_items),
    tuple: _Form(_encode_items, lambda items: tuple(_decode_items(items))),
    set: _Form(_encode_items, lambda items: set(_decode_items(items))),
    frozenset: _Form(_encode_items, lambda items: frozenset(_decode_items(items))),
    dict: _Form(
        lambda value: [[encode(key), encode(item)] for key, item in dict.items(value)],
        lambda pairs: {decode(key): decode(item) for key, item in pairs},
    ),
}
_BY_NAME = {base.__name__: base for base in _FORMS}
# Base type -> class of decoded instances of its subclasses, such as a Counter, a named tuple or a
# numpy number: these equal the plain value, but have another type.
_SUBCLASSES = {base: type(f"Subclass_{base.__name__}", (base,), {}) for base in _FORMS}


def encode_result(value: Any, parts: int = HUGE) -> Any:
    """`value` in a form that json.dumps accepts. If the value has more than `parts` parts, only a
    hash of the value is encoded."""
    if _remaining_budget(value, parts) < 0:
        return {"kind": "huge", "value": _fingerprint(value)}
    return encode(value)


def _remaining_budget(value: Any, budget: int) -> int:
    """`budget` minus the number of parts of `value`.

    A value is one part. Each character, each byte and each full 64 bits of an int add one part.
    Each item of a container adds one part and the item's own parts.
    """
    if isinstance(value, (str, bytes)):
        return budget - 1 - len(value)
    if isinstance(value, int):
        return budget - 1 - value.bit_length() // 64
    if not isinstance(value, (list, tuple, set, frozenset, dict)):
        return budget - 1
    budget -= 1 + len(value)
    for item in value:
        if budget < 0:
            return budget
        budget = _remaining_budget(item, budget)
        if isinstance(value, dict):
            budget = _remaining_budget(value[item], budget)
    return budget


def _fingerprint(value: Any) -> int:
    """A hash of a value that may contain lists, sets and dicts. Processes with the same
    PYTHONHASHSEED give equal values the same hash."""
    try:
        return hash(value)
    except TypeError:
        pass
    if isinstance(value, (set, frozenset)):
        return hash(frozenset(value))
    if isinstance(value, dict):
        return hash(
            frozenset((_fingerprint(key), _fingerprint(item)) for key, item in value.items())
        )
    if isinstance(value, (list, tuple)):
        # a list never equals a tuple, so the hash of a list has another first item
        try:
            # faster than `_fingerprint` of each item, with the same result if all have a hash
            return hash((isinstance(value, list), *map(hash, value)))
        except TypeError:
            return hash((isinstance(value, list), *map(_fingerprint, value)))
    return id(value)  # an object that Python cannot hash counts as equal only to itself


def encode(value: Any) -> Any:
    """`value` in a form that json.dumps accepts: a plain value, a list, or a dict with the keys
    `kind` and `value`. Raises RecursionError for a value that is nested too deeply."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return _encode_items(value)
    if kind is int and -_SHORT_INTEGER < value < _SHORT_INTEGER:
        return value
    if kind in _FORMS:
        return {"kind": kind.__name__, "value": _FORMS[kind].to_json(value)}
    for base in _FORMS:
        if isinstance(value, base):
            return _encode_subclass(base, value)
    return _encode_other(value)


def _encode_subclass(base: type, value: Any) -> Any:
    """Encode `value`, which equals a value of the type `base` but has another type."""
    return {"kind": "like", "value": [base.__name__, _FORMS[base].to_json(value)]}


def _encode_other(value: Any) -> Any:
    """Encode a value whose type is not derived from a type in `_FORMS`."""
    # Importing numpy and decimal would slow every start. So their types are recognized by the name
    # of the module.
    if (
        type(value).__module__ == "numpy"
        and getattr(value, "shape", None) == ()
        and hasattr(value, "item")
    ):
        plain = value.item()  # equals the numpy scalar, but has another type
        return _encode_subclass(type(plain), plain) if type(plain) in _FORMS else encode(plain)
    if isinstance(value, numbers.Rational):
        return {"kind": "ratio", "value": [hex(value.numerator), hex(value.denominator)]}
    if (
        type(value).__module__ == "decimal"
        and hasattr(value, "as_integer_ratio")
        and value.is_finite()
    ):
        numerator, denominator = value.as_integer_ratio()
        return {"kind": "ratio", "value": [hex(numerator), hex(denominator)]}
    if isinstance(value, bytearray):
        return _encode_subclass(bytes, bytes(value))
    if isinstance(value, AbstractSet):
        return _encode_subclass(set, islice(value, HUGE))
    if isinstance(value, Iterable) and not isinstance(value, Mapping):
        return {"kind": "stream", "value": _encode_items(islice(value, HUGE))}
    return {"kind": "opaque", "value": None}


def decode(encoded: Any) -> Any:
    """The value that `encode` or `encode_result` has encoded. A value that cannot be rebuilt is
    replaced by an Opaque, Huge, Stream, Fraction or instance of a class in `_SUBCLASSES`."""
    if isinstance(encoded, list):
        return _decode_items(encoded)
    if not isinstance(encoded, dict):
        return encoded
    if set(encoded) != {"kind", "value"}:
        raise ValueError("expected the keys kind and value")
    kind = encoded["kind"]
    value = encoded["value"]
    if kind == "opaque":
        return Opaque()
    if kind == "huge":
        return Huge(int(value))
    if kind == "stream":
        return Stream(_decode_items(value))
    if kind == "ratio":
        numerator, denominator = (int(part, 16) for part in value)
        return Fraction(numerator, denominator)
    if kind == "like":  # [name of a base type, content]
        base = _BY_NAME[value[0]]
        return _SUBCLASSES[base](_FORMS[base].from_json(value[1]))
    return _FORMS[_BY_NAME[kind]].from_json(value)


def decode_text(text: str) -> Any:
    """The value whose encoding is the JSON `text`. Raises ValueError if `text` is no encoding or
    is nested too deeply."""
    try:
        return decode(json.loads(text))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"not an encoded value ({type(error).__name__})") from error
