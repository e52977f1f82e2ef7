"""Python values as JSON, so that values which a program returned can be read without running or
unpickling anything.

Plain values stay as they are; other values become {"kind": ..., "value": ...}. A value that cannot
be represented (a function, an object of the program's own class) becomes an `Opaque`, which equals
nothing, as such an object would. A value with more than `HUGE` parts (some published tests return
hundreds of millions) becomes a digest of a canonical form, by which it can be compared.
"""

from __future__ import annotations

import json
import numbers
import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from hashlib import sha256
from itertools import chain, islice
from pickle import Pickler
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

HUGE = 50_000
"""Most parts of a value that is sent as a whole; `_remaining_budget` counts parts."""
_PLAIN = (type(None), bool, float, str)
_COMPACT = 1000
"""Lists of at least so many floats are sent in binary, which takes half the bytes of text."""
_CONTAINERS = (list, tuple, set, frozenset, dict)
_SHORT_BITS = 512  # longer integers would meet Python's limit on decimal digits


class Opaque:
    """A value that cannot be represented. It equals nothing."""


@dataclass(frozen=True, eq=False)
class Huge:
    """A value too large to send. It equals values whose canonical form has the same digest."""

    digest: str

    def __eq__(self, other: object) -> bool:
        return self.digest == (other.digest if isinstance(other, Huge) else _digest_or_none(other))

    def __hash__(self) -> int:
        return hash(self.digest)

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


def _encode_pairs(value: Iterable[tuple[Any, Any]]) -> list[Any]:
    return [[encode(key), encode(item)] for key, item in value]


def _decode_pairs(pairs: Any) -> dict[Any, Any]:
    return {decode(key): decode(item) for key, item in pairs}


def _decode_items(items: Any) -> list[Any]:
    return [decode(item) for item in items]


_NUMPY_KINDS = "biufcUSmM"
"""Kinds of numpy's types whose values are bytes: numbers, texts and times."""


def _decode_ratio(pair: list[str]) -> Fraction:
    numerator, denominator = (int(part, 16) for part in pair)
    return Fraction(numerator, denominator)


def _decode_subclass(content: Any) -> Any:
    base_value = decode(content)
    return _SUBCLASSES[type(base_value)](base_value)


class _Form(NamedTuple):
    """How values of a type are written as JSON and read again."""

    kind: str
    """The name of a type whose values are rebuilt, or another word."""
    to_json: Callable[[Any], Any]
    """Uses methods of the type, because a subclass may have overridden them."""
    from_json: Callable[[Any], Any]


_FORMS: dict[type, _Form] = {
    int: _Form("int", lambda value: hex(int.__index__(value)), lambda text: int(text, 16)),
    float: _Form("float", float.__float__, float),
    complex: _Form("complex", lambda value: [value.real, value.imag], lambda pair: complex(*pair)),
    str: _Form("str", str.__str__, str),
    bytes: _Form("bytes", bytes.hex, bytes.fromhex),
    bytearray: _Form("bytearray", bytearray.hex, bytearray.fromhex),
    list: _Form("list", _encode_items, _decode_items),
    tuple: _Form("tuple", _encode_items, lambda items: tuple(_decode_items(items))),
    set: _Form("set", _encode_items, lambda items: set(_decode_items(items))),
    frozenset: _Form("frozenset", _encode_items, lambda items: frozenset(_decode_items(items))),
    dict: _Form("dict", lambda value: _encode_pairs(dict.items(value)), _decode_pairs),
    numbers.Rational: _Form(
        "ratio", lambda value: [hex(value.numerator), hex(value.denominator)], _decode_ratio
    ),
    Decimal: _Form("decimal", Decimal.__str__, Decimal),
    AbstractSet: _Form(
        "like",
        lambda value: {"kind": "set", "value": _encode_items(islice(value, HUGE))},
        _decode_subclass,
    ),
    Mapping: _Form(
        "mapping",
        lambda value: _encode_pairs(islice(value.items(), HUGE)),
        lambda pairs: MappingProxyType(_decode_pairs(pairs)),
    ),
    Iterable: _Form(
        "stream",
        lambda value: _encode_items(islice(value, HUGE)),
        lambda items: Stream(_decode_items(items)),
    ),
    object: _Form("opaque", lambda _: None, lambda _: Opaque()),
}
"""Type -> form of its values. The first type of which a value is an instance counts."""
# Base type -> class of decoded instances of its subclasses, such as a Counter or a named tuple:
# these equal the plain value, but have another type.
_SUBCLASSES = {
    base: type(f"Subclass_{form.kind}", (base,), {})
    for base, form in _FORMS.items()
    if form.kind == base.__name__
}


def encode_result(value: Any, parts: int = HUGE) -> Any:
    """`value` in a form that json.dumps accepts. If the value has more than `parts` parts, only a
    digest of the value is encoded."""
    if _remaining_budget(value, parts) >= 0:
        return encode(value)
    digest = _digest_or_none(value)
    return {"kind": "huge", "value": digest} if digest else encode(Opaque())


def _remaining_budget(value: Any, budget: int) -> int:
    """`budget` minus the number of parts of `value`.

    A value is one part. Each character, each byte and each full 64 bits of an int add one part, and
    so do 8 items of a long list of floats. Each item of another container adds one part and the
    item's own parts.
    """
    if isinstance(value, (str, bytes)):
        return budget - 1 - len(value)
    if isinstance(value, int):
        return budget - 1 - value.bit_length() // 64
    if _is_numpy(value):
        return budget - 1 - int(value.nbytes) // 64
    if not isinstance(value, _CONTAINERS):
        return budget - 1
    if _is_float_list(value):
        return budget - 1 - len(value) // 8
    budget -= 1 + len(value)
    for item in value:
        if budget < 0:
            return budget
        budget = _remaining_budget(item, budget)
        if isinstance(value, dict):
            budget = _remaining_budget(value[item], budget)
    return budget


def _is_float_list(value: Any) -> bool:
    """Whether `value` is a list of floats that is sent in binary."""
    return type(value) is list and len(value) >= _COMPACT and set(map(type, value)) == {float}


def _is_numpy(value: Any) -> bool:
    """Whether `value` is an array or a number of numpy. Importing numpy would slow every start, and
    a program that has not imported it has no such value."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


_CANONICAL_TYPES = {type(None), int, str, bytes}
"""Types whose values are their own canonical forms."""


def _digest_or_none(value: Any) -> str | None:
    """`_digest`, or None for a value that equals no other, or contains such a value."""
    try:
        return _digest(value)
    except (TypeError, ValueError):
        return None


def _digest(value: Any) -> str:
    """A digest that is the same for equal values, and different for different ones. TypeError or
    ValueError for a value that equals no other, or contains such a value."""
    digest = sha256()
    # with this protocol, what is written is not collected in memory
    pickler = Pickler(SimpleNamespace(write=digest.update), protocol=4)
    # without references to earlier objects, what is written is a function of the value alone
    pickler.fast = True
    pickler.dump(_canonical(value))
    return digest.hexdigest()


def _canonical(value: Any) -> Any:
    """A value of plain types that is the same for equal values. TypeError for a value that equals
    no other."""
    if type(value) in _CANONICAL_TYPES or _is_canonical_list(value):
        return value
    if isinstance(value, complex) and value.imag == 0:
        value = value.real
    if isinstance(value, float) and value == value:  # NaN equals nothing
        return int(value) if value.is_integer() else float.__float__(value)
    if isinstance(value, (list, tuple)):
        items = map(_canonical, value)
        return list(items) if isinstance(value, list) else tuple(items)
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(map(_digest, value))}
    if isinstance(value, dict):
        return {"dict": sorted(map(_digest, dict.items(value)))}
    if isinstance(value, bytearray):
        return bytes(value)
    for base in (int, complex, str, bytes):
        if isinstance(value, base) and value == value:
            return _FORMS[base].from_json(_FORMS[base].to_json(value))
    raise TypeError(f"a {type(value).__name__} equals no other value")


def _is_canonical_list(value: Any) -> bool:
    """Whether `value` is a list or tuple of values of `_CANONICAL_TYPES`, or of lists or tuples of
    such values. Most long results are, and to call `_canonical` for each item would take ten times
    as long."""
    if type(value) not in (list, tuple):
        return False
    types = set(map(type, value))
    if types <= {list, tuple}:
        types = set(map(type, chain.from_iterable(value)))
    return types <= _CANONICAL_TYPES


def encode(value: Any) -> Any:
    """`value` in a form that json.dumps accepts: a plain value, a list, or a dict with the keys
    `kind` and `value`. Raises RecursionError for a value that is nested too deeply."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if _is_float_list(value):
        return {"kind": "floats", "value": b64encode(array("d", value)).decode()}
    if kind is list:
        return _encode_items(value)
    if kind is int and value.bit_length() <= _SHORT_BITS:
        return value
    if _is_numpy(value) and value.dtype.kind in _NUMPY_KINDS:
        content = b64encode(value.tobytes()).decode()
        return {"kind": "numpy", "value": [value.dtype.str, list(value.shape), content]}
    base = kind if kind in _FORMS else next(base for base in _FORMS if isinstance(value, base))
    form = _FORMS[base]
    encoded = {"kind": form.kind, "value": form.to_json(value)}
    is_subclass = base is not kind and base in _SUBCLASSES
    return {"kind": "like", "value": encoded} if is_subclass else encoded


def decode(encoded: Any) -> Any:
    """The value that `encode` or `encode_result` has encoded. A value that cannot be rebuilt is
    replaced by an Opaque, Huge, Stream, Fraction, mappingproxy or instance of a class in
    `_SUBCLASSES`."""
    if isinstance(encoded, list):
        return _decode_items(encoded)
    if not isinstance(encoded, dict):
        return encoded
    if set(encoded) != {"kind", "value"}:
        raise ValueError("expected the keys kind and value")
    return _DECODERS[encoded["kind"]](encoded["value"])


def _decode_numpy(dtype: str, shape: list[int], content: str) -> Any:
    """A number of numpy, if the shape is (), or an array."""
    import numpy

    if numpy.dtype(dtype).kind not in _NUMPY_KINDS:
        raise ValueError(f"the type {dtype[:20]} is not allowed")
    # [()] makes an array of shape () a number
    return numpy.frombuffer(b64decode(content), dtype).reshape(shape)[()]


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "huge": lambda digest: Huge(str(digest)),
    "floats": lambda content: array("d", b64decode(content)).tolist(),
    "numpy": lambda value: _decode_numpy(*value),
    **{form.kind: form.from_json for form in _FORMS.values()},
}
"""Kind of an encoded value -> function that decodes its content."""


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
        SyntaxError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"not an encoded value ({type(error).__name__})") from error
