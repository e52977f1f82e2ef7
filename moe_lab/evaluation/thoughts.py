"""Thoughts before an answer: where they end in a text, and which special tokens mark them. No
torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

PAIRS: Mapping[str, str] = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<longcat_think>": "</longcat_think>",
    "<thought>": "</thought>",
    "<thinking>": "</thinking>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "◁think▷": "◁/think▷",
}
"""Opening -> closing mark of a thought, of all families."""
MARKS = frozenset({*PAIRS, *PAIRS.values()})
_HARMONY = "<|start|>assistant"
"""How the prompt ends in the harmony format of gpt-oss."""
_HARMONY_THOUGHT = "<|channel|>analysis<|message|>"
_CHANNEL = re.compile(r"\s*(?:<\|channel\|>|analysis|commentary|final|to=)")
"""How a text in the harmony format begins; tokenizers leave out its special tokens."""
_HARMONY_ANSWER = re.compile(
    r"(?:\A\s*|assistant)(?:<\|channel\|>)?final\s*(?:<\|constrain\|>\w+)?(?:<\|message\|>)?"
    r"|(?:\A|(?:<\|start\|>)?assistant)(?=\s*(?:<\|channel\|>)?(?:(?:commentary|analysis)\s+)?to=functions\.)"
)
"""What precedes an answer in the harmony format: its header, or nothing if it is a message to a
function."""


def answer_in(text: str, prompt: str = "", *, chat: bool = True) -> str | None:
    """The answer in a text that a model wrote after `prompt`: the part after the thought. None if
    the thought does not end.

    A text without a thought is an answer as a whole. In a chat, a closing mark alone also ends a
    thought: where the opening one may have been in the prompt. Marks in quotes are ignored.
    """
    if _is_harmony(text, prompt):
        answer = _HARMONY_ANSWER.search(text)
        return None if answer is None else text[answer.end() :].lstrip()
    for opening, closing in PAIRS.items():
        if prompt.rstrip().endswith(opening) or text.lstrip().startswith(opening):
            return _after_thoughts(text, opening, closing)
    for opening, closing in PAIRS.items() if chat else ():
        end = _end_of(closing, text)
        if end is not None and opening not in text[:end]:
            return _after_thoughts(text, opening, closing)
    return text


def may_think(tokenizer: Any) -> bool:
    """Whether a tokenizer's chat templates know thoughts, by their marks."""
    templates = str(getattr(tokenizer, "chat_template", None))
    return _HARMONY_THOUGHT in templates or any(mark in templates for mark in MARKS)


def special_marks(tokenizer: Any, stop: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """Special tokens, id and text, that mark thoughts or occur in stop texts; decoding would leave
    them out."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = [(number, token.content) for number, token in added.items() if token.special]
    return tuple(
        (number, mark)
        for number, mark in special
        if mark in MARKS or any(mark in text for text in stop)
    )


def _after_thoughts(text: str, opening: str, closing: str) -> str | None:
    """What follows the first thought, and every later one that begins a line."""
    answer = text
    again = re.compile(rf"^[ \t]*{re.escape(opening)}", re.MULTILINE)
    while True:
        end = _end_of(closing, answer)
        if end is None:
            return None
        answer = answer[end:]
        if not (later := again.search(answer)):
            return answer.lstrip()
        answer = answer[later.end() :]


def _end_of(closing: str, text: str) -> int | None:
    """The end of the first closing mark that is not in quotes."""
    for mark in re.finditer(re.escape(closing), text):
        around = text[mark.start() - 1 : mark.start()], text[mark.end() : mark.end() + 1]
        if around[0] != around[1] or around[0] not in ("'", '"', "`"):
            return mark.end()
    return None


def _is_harmony(text: str, prompt: str) -> bool:
    if prompt.endswith(_HARMONY_THOUGHT) or text.lstrip().startswith("<|channel|>"):
        return True
    if prompt.rstrip().endswith(_HARMONY):
        return bool(_CHANNEL.match(text))
    return text.lstrip().startswith("analysis") and bool(_HARMONY_ANSWER.search(text))
