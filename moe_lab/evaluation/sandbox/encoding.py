"""Python values as JSON, so that what a program returned can be looked at without running or unpickling any of it.

Plain values stay themselves. Others become {"kind": ..., "value": ...}. What has no honest form (a function, an object
of the program's own class) becomes an `Opaque`, which equals nothing, as such an object would. A value of more than
`HUGE` parts (some published tests return hundreds of millions) is carried over as a hash: it can be compared, exactly.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from fractions import Fraction
from itertools import islice
from typing import Any

HUGE = 50_000
_PLAIN = (type(None), bool, float, str)
_SHORT_INTEGER = 1 << 512  # longer ones would meet Python's limit on decimal digits


class Opaque:
    """A value that could not be carried over; equal to nothing but not None."""


class Huge:
    """A value too large to carry over; equal to another one of the same hash."""

    def __init__(self, fingerprint: int) -> None:
        self.fingerprint = fingerprint

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Huge) and other.fingerprint == self.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __iter__(self) -> Iterator[Any]:
        return iter([self])


class Stream:
    """What an iterator, range or deque would have given; equal to nothing, but iterable once more."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class LikeInt(int):
    """An instance of a subclass of int, or a numpy integer: equal, but of another type."""


class LikeFloat(float):
    """An instance of a subclass of float, or a numpy float."""


class LikeComplex(complex):
    """An instance of a subclass of complex, or a numpy complex."""


class LikeStr(str):
    """An instance of a subclass of str."""


class LikeBytes(bytes):
    """An instance of a subclass of bytes, or a bytearray."""


class LikeList(list[Any]):
    """An instance of a subclass of list."""


class LikeTuple(tuple[Any, ...]):
    """An instance of a subclass of tuple, such as a named tuple."""


class LikeSet(set[Any]):
    """An instance of a subclass of set, or a set-like view."""


class LikeFrozenset(frozenset[Any]):
    """An instance of a subclass of frozenset."""


class LikeDict(dict[Any, Any]):
    """An instance of a subclass of dict, such as a Counter."""


_LIKE: dict[type, type] = {
    int: LikeInt,
    float: LikeFloat,
    complex: LikeComplex,
    str: LikeStr,
    bytes: LikeBytes,
    list: LikeList,
    tuple: LikeTuple,
    set: LikeSet,
    frozenset: LikeFrozenset,
    dict: LikeDict,
}
_BY_NAME = {kind.__name__: kind for kind in _LIKE}


def encode_result(value: Any, parts: int = HUGE) -> Any:
    """As `encode`, but a value of more than `parts` parts becomes its hash."""
    if _left_over(value, parts) < 0:
        return {"kind": "huge", "value": _fingerprint(value)}
    return encode(value)


def _left_over(value: Any, budget: int) -> int:
    """What remains of a budget of parts after counting those of `value`; negative as soon as it is used up."""
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
        budget = _left_over(item, budget)
        if isinstance(value, dict):
            budget = _left_over(value[item], budget)
    return budget


def _fingerprint(value: Any) -> int:
    """A hash that is the same for equal values; needs PYTHONHASHSEED to be fixed."""
    try:
        return hash(value)
    except TypeError:
        pass
    if isinstance(value, (set, frozenset)):
        return hash(frozenset(value))
    if isinstance(value, dict):
        return hash(frozenset((_fingerprint(key), _fingerprint(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return hash((isinstance(value, list), *map(_fingerprint, value)))
    return id(value)


def encode(value: Any) -> Any:
    """`value` as something json.dumps takes. Deeply nested values raise RecursionError, as comparing them would."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [encode(item) for item in value]
    if kind is int:
        return value if -_SHORT_INTEGER < value < _SHORT_INTEGER else {"kind": "int", "value": hex(value)}
    if kind in _LIKE:
        return {"kind": kind.__name__, "value": _parts(kind, value)}
    for base in _LIKE:
        if isinstance(value, base):
            return {"kind": "like", "value": [base.__name__, _parts(base, value)]}
    return _encode_other(value)


def _parts(base: type, value: Any) -> Any:
    """The content of an instance of `base` or of a subclass of it, with the base's own methods only."""
    if base is int:
        return hex(int.__index__(value))
    if base is float:
        return float.__float__(value)
    if base is complex:
        return [value.real, value.imag]
    if base is str:
        return str.__str__(value)
    if base is bytes:
        return bytes.hex(value)
    if base is dict:
        return [[encode(key), encode(item)] for key, item in dict.items(value)]
    return [encode(item) for item in value]


def _encode_other(value: Any) -> Any:
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        plain = value.item()  # a numpy scalar: equal to the plain number, of another type
        if type(plain) in _LIKE:
            return {"kind": "like", "value": [type(plain).__name__, _parts(type(plain), plain)]}
        return encode(plain)
    if isinstance(value, numbers.Rational):
        return {"kind": "ratio", "value": [hex(value.numerator), hex(value.denominator)]}
    if type(value).__module__ == "decimal" and hasattr(value, "as_integer_ratio") and value.is_finite():
        above, below = value.as_integer_ratio()
        return {"kind": "ratio", "value": [hex(above), hex(below)]}
    if isinstance(value, bytearray):
        return {"kind": "like", "value": ["bytes", value.hex()]}
    if isinstance(value, AbstractSet):
        return {"kind": "like", "value": ["set", [encode(item) for item in islice(value, HUGE)]]}
    if isinstance(value, Iterable) and not isinstance(value, Mapping):
        return {"kind": "stream", "value": [encode(item) for item in islice(value, HUGE)]}
    return {"kind": "opaque", "value": None}


def decode(encoded: Any) -> Any:
    """The value `encode` saw. Raises ValueError for anything `encode` cannot have written, however deep it is."""
    try:
        return _decode(encoded)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"not an encoded value ({type(error).__name__})") from error


def decode_text(text: str) -> Any:
    """The value whose encoding is the JSON `text`. Raises ValueError for anything else, however deep it is."""
    try:
        return decode(json.loads(text))
    except RecursionError as error:
        raise ValueError("not an encoded value (RecursionError)") from error


def _decode(encoded: Any) -> Any:
    if isinstance(encoded, list):
        return [_decode(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if set(encoded) != {"kind", "value"}:
        raise ValueError("no kind and value")
    return _decode_kind(encoded["kind"], encoded["value"])


def _decode_kind(kind: str, value: Any) -> Any:
    if kind == "opaque":
        return Opaque()
    if kind == "huge":
        return Huge(int(value))
    if kind == "stream":
        return Stream(_decode(list(value)))
    if kind == "ratio":
        above, below = (int(part, 16) for part in value)
        return Fraction(above, below)
    if kind == "like":
        base = _BY_NAME[value[0]]
        return _LIKE[base](_build(base, value[1]))
    base = _BY_NAME[kind]
    return _build(base, value)


def _build(base: type, value: Any) -> Any:
    builders: dict[type, Callable[[Any], Any]] = {
        int: lambda text: int(text, 16),
        float: float,
        complex: lambda pair: complex(*pair),
        str: str,
        bytes: bytes.fromhex,
        dict: lambda pairs: {_decode(key): _decode(item) for key, item in pairs},
    }
    if base in builders:
        return builders[base](value)
    return base(_decode(list(value)))
