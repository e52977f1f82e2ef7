"""Grades a story against a checklist of rules; no judge needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_lab.errors import UserError, unknown


def sentences(story: str) -> list[str]:
    """The sentences of a story, each with the mark that ends it; a last one that was cut off is not a sentence."""
    return [found.strip() for found in re.findall(r"[^.!?]+[.!?]", story)]


def _mentions(story: str, text: str) -> bool:
    """Whether the text occurs as whole words."""
    return re.search(rf"(?<!\w){re.escape(text)}(?!\w)", story) is not None


def _opens_with(story: str, text: str) -> bool:
    told = sentences(story)
    return bool(told) and _mentions(told[0], text)


def _ends_with(story: str, text: str) -> bool:
    return story.strip().endswith(text)


def _enough_sentences(story: str, least: int) -> bool:
    return len(sentences(story)) >= least


def _no_repeats(story: str) -> bool:
    told = sentences(story)
    return bool(told) and len(set(told)) == len(told)


RULES: dict[str, Callable[..., bool]] = {
    "mentions": _mentions,
    "opens_with": _opens_with,
    "ends_with": _ends_with,
    "sentences": _enough_sentences,
    "no_repeats": _no_repeats,
}


def grade(story: str, checklist: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Which rules the story keeps, in the checklist's order; the score of a story is their share.

    Each entry is {"rule": name, ...arguments}:
    mentions(text)    the text occurs as whole words;
    opens_with(text)  it does so in the first sentence;
    ends_with(text)   the story ends with exactly this text;
    sentences(least)  there are at least so many complete sentences;
    no_repeats()      there is a sentence, and none occurs twice.
    Raises UserError for a rule that does not exist or whose arguments do not fit.
    """
    kept = []
    for entry in checklist:
        arguments = {name: value for name, value in entry.items() if name != "rule"}
        name = str(entry.get("rule"))
        if name not in RULES:
            raise unknown("checklist.rule", name, RULES)
        try:
            kept.append(RULES[name](story, **arguments))
        except TypeError as error:
            raise UserError(f"checklist.rule={name} does not take {arguments}: {error}") from error
    return kept
