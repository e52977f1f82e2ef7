"""Whether a measured number agrees with a printed one, or why the two cannot be compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis import names
from analysis.published.numbers import NOT_COMPARABLE, Printed, Split, protocol, split, stands_for

AGREES, DIFFERS, MISSING = "agrees", "differs", "missing"
BECAUSE = "not comparable because "
READS_GATES = ("seer", "reap", "mone", "mone_freq", "gate_ean", "gate_energy", "camera")
"""Printed criteria whose scores depend on what the gate is taken to be."""
UNGRADED = 0.99
"""Share of the items that must have been graded: a judge may be silent about a few."""
_ASKED = {
    "harness": "harness",
    "chat": "use of the chat template",
    "shots": "number of examples in the prompt",
    "max_new_tokens": "limit of answers",
    "length": "length of windows",
    "judge": "judge",
}
_SEARCH = ("search set", "generations")
_NAMED = 3
"""Benchmarks that a reason lists by name; of more it says how many."""


@dataclass(frozen=True)
class Evaluation:
    """How one benchmark was measured here; None where the store does not say."""

    benchmark: str
    n: int
    expected: int | None
    metric: str
    asked: Mapping[str, str]
    """Of `published_numbers.ASKED`, what the store says, in words."""


@dataclass(frozen=True)
class Measured:
    """A number of a study with the ends of its interval, and what it rests on."""

    value: float
    low: float
    high: float
    cell: Mapping[str, Any]
    """Axes of its cell."""
    tokens: int | None
    """Slots of the calibration pass, gaps counted; None where the store does not say, or no data was read."""
    search: tuple[str | None, int | None] | None = None
    """Of a searched allocation: the set it was searched on and the generations, None where the store does not say."""
    evaluations: Sequence[Evaluation] = ()
    lacking: Sequence[str] = ()
    """Why it is not the quantity that is printed, in words."""


def verdict(number: Printed, measured: Measured) -> str:
    """`agrees`, `differs`, `missing`, or `not comparable because` and every reason.

    It agrees when the printed number, as far as its rounding leaves it open, lies in the interval of the measured one.
    """
    if math.isnan(measured.value):
        return MISSING
    differences = list(reasons(number, measured))
    if differences:
        return BECAUSE + "; ".join(differences)
    low, high = number.ends
    word = AGREES if measured.low <= high and low <= measured.high else DIFFERS
    return f"{word} ({number.note})" if number.note else word


def reasons(number: Printed, measured: Measured) -> Iterator[str]:
    """Why the two numbers cannot be compared, one part of a sentence each; nothing when they can.

    That it is another model is said alone: nothing else about it could be alike.
    """
    if number.note.startswith(NOT_COMPARABLE):
        yield number.note.removeprefix(NOT_COMPARABLE)
    for axis in ("model", "calibration"):
        own = str(measured.cell[axis])
        if (printed := stands_for(axis, own)) != own:
            yield f"{own} stands in for {printed}"
            if axis == "model":
                return
    yield from _calibrated(number, measured)
    yield from measured.lacking
    yield from _evaluated(number, measured.evaluations)
    if math.isnan(measured.low + measured.high):
        yield "it has no interval"


def _calibrated(number: Printed, measured: Measured) -> Iterator[str]:
    paper, cell = protocol(number), measured.cell
    if cell["criterion"] == "none":
        return
    if cell["calibration"] != "none" and paper.tokens is not None and measured.tokens != paper.tokens:
        measured_tokens = "an unknown number of" if measured.tokens is None else f"{measured.tokens:,}"
        yield f"calibrated on {measured_tokens} tokens, published on {paper.tokens:,}"
    if cell["criterion"] in READS_GATES and paper.gate not in (None, cell["gate"]):
        yield f"gate {cell['gate']}, published with {paper.gate}"
    if paper.seed not in (None, cell["seed"]):
        yield f"seed {cell['seed']}, published with {paper.seed}"
    if measured.search is not None:
        for kind, own, theirs in zip(_SEARCH, measured.search, (paper.search, paper.generations), strict=True):
            if theirs is not None and own != theirs:
                yield f"{kind} {'unknown' if own is None else own}, published with {theirs}"


def _evaluated(number: Printed, evaluations: Sequence[Evaluation]) -> Iterator[str]:
    with_split = [(found, split(number, found.benchmark)) for found in evaluations]
    kinds = {
        "other items": [_items(found, paper) for found, paper in with_split],
        "other metric": [_other(found.metric, paper.metric) for found, paper in with_split],
        **{
            f"other {kind}": [_other(found.asked.get(word), paper.asked.get(word)) for found, paper in with_split]
            for word, kind in _ASKED.items()
        },
    }
    for kind, details in kinds.items():
        differing = [
            f"{names.benchmark(found.benchmark)} ({detail})"
            for (found, _), detail in zip(with_split, details, strict=True)
            if detail
        ]
        if differing:
            many = len(differing) > _NAMED
            yield f"{kind}: {f'{len(differing)} benchmarks' if many else ', '.join(differing)}"


def _items(evaluation: Evaluation, paper: Split) -> str:
    whole = evaluation.n if evaluation.expected is None else evaluation.expected
    graded = evaluation.n >= UNGRADED * whole
    if graded and paper.items in (None, whole):
        return ""
    of = "" if graded else f" of {whole:,}"
    published = "" if paper.items is None else f", published on {paper.items:,}"
    return f"{evaluation.n:,}{of}{published}"


def _other(value: object, paper: object) -> str:
    if paper is None or value == paper:
        return ""
    return f"{'unknown' if value is None else value}, published {paper}"
