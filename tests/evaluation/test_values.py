"""Return values survive the way through JSON, with their type where the type decides a verdict."""

import collections
import json
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_lab.evaluation.adapters.evalplus_rules import compare
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


def huge(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode_result(value, parts=0))))


numbers_and_texts = st.sampled_from([0, 1, True, 1.0, -0.0, 1 + 0j, 1.5, 2**70, 2.0**70, "1", b"1"])
small_values = st.recursive(
    numbers_and_texts,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.tuples(inner)
        | st.sets(numbers_and_texts, max_size=2)
        | st.dictionaries(numbers_and_texts, inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=500, deadline=None)
@given(small_values, small_values)
@example([1, 2.0, [True]], [True, 2, [1.0]])
@example({1: {2}}, {1.0: frozenset([2.0])})
def test_huge_values_are_equal_if_the_values_are(first: Any, second: Any) -> None:
    assert (huge(first) == huge(second)) == (first == second)
    assert (huge(first) == second) == (first == huge(second)) == (first == second)


def test_large_values_are_sent_if_their_tolerance_counts() -> None:
    floats = [number / 7 for number in range(4 * HUGE)]
    assert decode(encode_result(floats)) == floats
    assert len(json.dumps(encode_result(floats))) < 11 * len(floats)
    assert isinstance(decode(encode_result(["x"] * 2 * HUGE)), Huge)
    for unequal in (float("nan"), object(), [object()]):
        assert huge(["y", unequal]) != huge(["y", "z"])


@pytest.mark.parametrize(
    ("value", "expected", "agrees"),
    [
        ([np.array([2])], [[2]], True),
        ({"a": np.array([1.0])}, {"a": 1.0}, True),
        ([np.array([1, 2])], [[1, 2]], False),  # ambiguous, as in EvalPlus
        (np.array([0.1, 0.2]), [0.1, 0.2], False),
        (np.float32(0.1), 0.1, True),
        (MappingProxyType({1: 2}), {1: 2}, True),
        (collections.UserDict({1: 2}), {1: 2}, True),
        (collections.ChainMap({1: 2}), {1: 3}, False),
        (Decimal("0.1"), 0.1, False),
    ],
)
def test_values_are_compared_as_evalplus_compares_them(
    value: Any, expected: Any, agrees: bool
) -> None:
    problem = {"entry_point": "f", "atol": 0, "inputs": [encode([1])]}
    encoded = [json.dumps(encode_result(item)) for item in (value, expected)]
    verdict = compare("humaneval", problem, encoded[:1], encoded[1:])
    assert verdict == ("right" if agrees else "wrong")


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
    "decimal",
    "floats",
    "mapping",
    "numpy",
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
@example('{"kind":"numpy","value":["O",[1],"AAAAAAAAAAA="]}')
@example('{"kind":"numpy","value":["f8,(",[1],"AAAAAAAAAAA="]}')
@example('{"kind":"numpy","value":["<U9999999999",[1],"AAAAAAAAAAA="]}')
@example('{"kind":"decimal","value":"x"}')
@example('{"kind":"int","value":"' + "x" * 10_000_000 + '"}')
@example("[" * 100_000)
@example("9" * 10_000)
def test_whatever_is_sent_is_a_value_or_refused_in_few_words(text: str) -> None:
    """Programs of the campaign send more that cannot be a value."""
    try:
        decode_text(text)
    except ValueError as refused:
        assert len(str(refused)) < 300
