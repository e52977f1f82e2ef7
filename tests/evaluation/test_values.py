"""Return values survive the way through JSON, with their type where the type decides a verdict."""

import collections
import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_lab.evaluation.sandbox.encoding import (
    HUGE,
    Huge,
    Opaque,
    Stream,
    decode,
    decode_text,
    encode,
    encode_result,
)

scalars = st.one_of(
    st.none() | st.booleans() | st.text() | st.binary(),
    st.integers() | st.integers(min_value=2**600, max_value=2**700),
    st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False),
)
hashable = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=8
)
values = st.recursive(
    hashable | st.sets(hashable, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(hashable, inner, max_size=3)
    ),
    max_leaves=15,
)


def carried(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


def same_types(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, (list, tuple)):
        return all(map(same_types, first, second))
    return not isinstance(first, dict) or all(same_types(first[key], second[key]) for key in first)


@settings(max_examples=200, deadline=None)
@given(values)
def test_plain_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    assert carried(value) == value
    assert same_types(carried(value), value)


@pytest.mark.parametrize(
    ("value", "equal"),
    [
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.namedtuple("Point", "x y")(1, 2), (1, 2)),
        (np.float64(2.5), 2.5),
        (np.int64(3), 3),
        (bytearray(b"ab"), b"ab"),
        ({1: 2}.keys(), {1}),
        (Fraction(1, 3), Fraction(1, 3)),
        (Decimal("1.5"), 1.5),
    ],
)
def test_kin_of_plain_values_are_equal_but_of_another_type(value: Any, equal: Any) -> None:
    result = carried(value)
    assert result == equal
    assert isinstance(value, Fraction) or type(result) is not type(equal)


def test_values_without_a_json_form_equal_nothing() -> None:
    class AlwaysEqual:
        def __eq__(self, other: object) -> bool:
            return True

    assert isinstance(carried(AlwaysEqual()), Opaque)
    assert carried(AlwaysEqual()) != 1
    stream = carried(iter([1, 2]))
    assert isinstance(stream, Stream)
    assert list(stream) == [1, 2]
    assert stream != [1, 2]


def test_huge_values_are_compared_by_hash() -> None:
    large = [(number, "x") for number in range(HUGE)]
    result = decode(json.loads(json.dumps(encode_result(large))))
    assert isinstance(result, Huge)
    assert result == decode(encode_result(list(large)))
    assert result != decode(encode_result(large[::-1]))
    assert result != decode(encode_result(tuple(large)))
    assert encode_result([1] * 10) == [1] * 10
    # whether or not they have a hash
    for item, equal in (({"b"}, frozenset("b")), ([1, {"b"}], [1, frozenset("b")])):
        first, second = (decode(encode_result(["a", value] * HUGE)) for value in (item, equal))
        assert first == second != decode(encode_result(["b", item] * HUGE))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


KINDS = [
    "opaque",
    "huge",
    "stream",
    "ratio",
    "like",
    "int",
    "float",
    "complex",
    "str",
    "bytes",
    "list",
    "dict",
    "set",
]
forgeries = st.recursive(
    json_values,
    lambda inner: st.builds(
        lambda kind, value: {"kind": kind, "value": value},
        st.sampled_from(KINDS),
        inner | st.lists(inner, max_size=2) | st.tuples(st.sampled_from(KINDS), inner).map(list),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(forgeries.map(json.dumps) | st.text())
@example('{"kind":"huge","value":Infinity}')
@example('{"kind":"int","value":"' + "x" * 10_000_000 + '"}')
@example("[" * 100_000)
@example("9" * 10_000)
def test_whatever_is_sent_is_a_value_or_refused_in_few_words(text: str) -> None:
    """Programs of the campaign send more that cannot be a value."""
    try:
        decode_text(text)
    except ValueError as refused:
        assert len(str(refused)) < 300
