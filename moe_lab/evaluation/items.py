"""Items of benchmarks: requests to a model, its replies, where an answer begins after thoughts, and
signs of degeneration in a text. No torch."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from moe_lab.result_files import Sample, TextMeasures

_Row = TypeVar("_Row")
Messages = Sequence[Mapping[str, str]]
"""A conversation: role and content of each message."""


@dataclass(frozen=True)
class Text:
    """Request for a generated text."""

    prompt: str | Messages
    """Text to continue, or a conversation for the model's chat template."""
    max_tokens: int
    """Largest number of tokens of the text."""
    stop: tuple[str, ...] = ()
    """Stop texts: an answer ends before the first stop text in the answer."""
    reference: str | None = None
    """A right answer, with exactly the text that follows the prompt."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Functions that the model may call in a conversation."""
    skip_long: bool = False
    """Whether a prompt that leaves too little room is skipped; False: such a prompt is an error."""


@dataclass(frozen=True)
class Pair:
    """Request for the likelihood of a continuation after a context."""

    context: str
    continuation: str


@dataclass(frozen=True)
class Document:
    """Request for the likelihood of a whole text, window by window. Windows do not overlap, and the
    first token of each window is not predicted."""

    text: str
    length: int | None = None
    """Tokens of a window; None for 2048, or as many as the model can read if these are fewer."""
    windows: int | None = None
    """Largest number of windows."""


Request = Text | Pair | Document


@dataclass(frozen=True)
class Item:
    """One item of a benchmark."""

    name: str
    """Unique in its benchmark."""
    requests: tuple[Request, ...]
    right_answer: str = ""
    """The right answer as the data or the harness gives it; "" if there is no single one."""
    doc_hash: str = ""
    """lm-eval's hash of the item's row of the data; "" for other harnesses."""


@dataclass(frozen=True)
class Likelihood:
    """The likelihood of a part of a text."""

    nats: float
    """Summed log-likelihood of the predicted tokens."""
    tokens: int
    """Number of predicted tokens."""
    likeliest: bool
    """Whether each predicted token was the likeliest."""
    divergence: float = 0.0
    """Summed KL divergence of the model's distributions from those of the unpruned model."""
    disagreements: int = 0
    """Number of predicted tokens at which the likeliest token of the unpruned model is not the
    likeliest of the model."""


@dataclass(frozen=True)
class Reply:
    """The model's reply to one request."""

    text: str | None = ""
    """The generated answer without the thought before it; None where the thought does not end."""
    thought: str = ""
    """The text that was generated before the answer."""
    ended: str | None = None
    """Why a text ended: end (an end token), stop (a stop text), limit (too many tokens), or
    too_long (prompt and limit together are too long, and nothing was generated). None where no text
    was requested. A server does not distinguish end from stop."""
    loss: float | None = None
    """Loss on the reference, in bits per byte."""
    windows: tuple[Likelihood, ...] = ()
    """Likelihood of a Pair's continuation, or of each window of a Document."""


@dataclass(frozen=True)
class Answer:
    """A model's answer to an item."""

    item: str
    prompt: str
    """The prompt of the first request as the model read it."""
    replies: tuple[Reply, ...]
    """The reply to each request of the item."""
    replicate: int = 0
    """Index of this answer among several answers to the same item."""
    sampling: dict[str, Any] | None = None
    """Sampling settings of generated texts; None for greedy generation."""

    @property
    def reply(self) -> Reply:
        """The reply to the first request, the only one for which text is generated."""
        return self.replies[0]

    def sample(
        self, result_name: str, outcome: float, extracted: str, output: str | None = None
    ) -> Sample:
        """The row of samples.parquet for this answer in the result `result_name`. `output`: None
        for the generated text."""
        digest = hashlib.sha256(self.prompt.encode("utf-8", "surrogatepass")).hexdigest()
        return Sample(
            benchmark=result_name,
            item=self.item,
            replicate=self.replicate,
            outcome=outcome,
            prompt_hash=digest[:16],
            thought=self.reply.thought,
            output=self.reply.text if output is None else output,
            ended=self.reply.ended,
            extracted=extracted,
            answer_loss=self.reply.loss,
            units=None,
            **text_measures(self.reply),
        )


def write_rows(rows: Sequence[Any], file: Path) -> None:
    """Write one JSON line for each of the dataclasses `rows`, compressed by gzip, as the choices of
    an item repeat its context."""
    lines = [json.dumps(asdict(row)) + "\n" for row in rows]
    # without the time of writing, equal rows give equal files
    file.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


def read_rows(kind: type[_Row], content: bytes) -> list[_Row]:
    """The rows, of the class `kind`, in the content of a file that `write_rows` wrote."""
    # pydantic accepts half characters in Python objects, but not in JSON
    rows = [json.loads(line) for line in gzip.decompress(content).splitlines()]
    return TypeAdapter(list[kind]).validate_python(rows)  # type: ignore[valid-type]


def replace_surrogates(text: str) -> str:
    """Replace each character that UTF-8 cannot encode by "?"."""
    return text.encode("utf-8", "replace").decode("utf-8")


_KNOWN_PAIRS: Mapping[str, str] = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<longcat_think>": "</longcat_think>",
    "<thought>": "</thought>",
    "<thinking>": "</thinking>",
    "<reasoning>": "</reasoning>",
    "<analysis>": "</analysis>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "◁think▷": "◁/think▷",
    "Here is my thought process:": "Here is my response:",
    "Here's my thought process:": "Here's my response:",
}
"""Opening mark of a thought -> closing mark, of all families."""
_THOUGHT_FIELD = re.compile("reason|think|thought")
"""In the name of a thought's field in a response template of transformers."""


@dataclass(frozen=True)
class ThoughtMarks:
    """The marks of a model's thoughts."""

    pairs: tuple[tuple[str, str], ...]
    """(opening mark, closing mark), as regular expressions that ignore case."""

    @classmethod
    def of(cls, model: Any) -> ThoughtMarks:
        """The known marks, those of model.thinking_marks, and those of the tokenizer's response
        template. `model`: the tokenizer or the settings of a model."""
        literals = [*getattr(model, "thinking_marks", ()), *_KNOWN_PAIRS.items()]
        pairs = [(re.escape(opening), re.escape(closing)) for opening, closing in literals]
        template = getattr(model, "response_template", None) or {"fields": {}}
        for name, field in template["fields"].items():
            anchors = _anchor(field, "open"), _anchor(field, "close")
            if _THOUGHT_FIELD.search(name) and all(anchors):
                pairs.append(anchors)
        return cls(tuple(dict.fromkeys(pairs)))

    def are_in(self, text: str) -> bool:
        """Whether `text` has a mark."""
        # the opening mark of gpt-oss is not among the pairs
        return _HARMONY_THOUGHT in text or any(
            re.search(mark, text, re.IGNORECASE) for pair in self.pairs for mark in pair
        )

    def contain(self, token: str) -> bool:
        """Whether a mark contains the text of a special token."""
        pattern = re.escape(token).lower()
        return any(pattern in mark.lower() for pair in self.pairs for mark in pair)


def _anchor(field: Mapping[str, Any], end: str) -> str:
    """The regular expression at an end, "open" or "close", of a field of a response template; "" if
    there is none."""
    literals = field.get(end, [])
    literals = [literals] if isinstance(literals, str) else literals
    return field.get(f"{end}_pattern") or "|".join(map(re.escape, literals))


_KNOWN_MARKS = ThoughtMarks.of(None)
_HARMONY = "<|start|>assistant"
"""End of a prompt in the harmony format of gpt-oss."""
_HARMONY_THOUGHT = "<|channel|>analysis<|message|>"
_CHANNEL = re.compile(r"\s*(?:<\|channel\|>|analysis|commentary|final|to=)")
"""Beginning of a text in the harmony format, with or without special tokens, which decoding
omits."""
_HARMONY_ANSWER = re.compile(
    r"(?:\A\s*|assistant)(?:<\|channel\|>)?final\s*(?:<\|constrain\|>\w+)?(?:<\|message\|>)?"
    r"|(?:\A|(?:<\|start\|>)?assistant)(?=\s*(?:<\|channel\|>)?(?:(?:commentary|analysis)\s+)?to=functions\.)"
)
"""The header of a message to the user, or the empty text before a message to a function."""


def answer_after_thought(
    text: str, prompt: str = "", *, chat: bool = True, marks: ThoughtMarks = _KNOWN_MARKS
) -> str | None:
    """The answer in a text that a model wrote after `prompt`: the part after the thought, or the
    whole text if there is no thought. None if a thought does not end.

    `chat`: whether a chat template made the prompt. The opening mark of a thought may then be
    missing, or follow a sentence. `marks`: by default the known marks.
    """
    if _is_harmony(text, prompt):  # the format of gpt-oss, which has other marks
        answer = _HARMONY_ANSWER.search(text)
        return None if answer is None else text[answer.end() :].lstrip()
    for opening, closing in marks.pairs:
        is_open = re.search(rf"(?:{opening})\s*\Z", prompt, re.IGNORECASE)
        if is_open or re.match(rf"\s*(?:{opening})", text, re.IGNORECASE):
            return _after_thoughts(text, opening, closing)
    if not chat:
        return text
    for opening, closing in marks.pairs:
        end = _end_of_mark(closing, text)
        # a closing mark without an opening mark before it still ends a thought
        if end is not None and not re.search(opening, text[:end], re.IGNORECASE):
            return _after_thoughts(text, opening, closing)
        start = _end_of_later_opening(opening, text)
        if start is not None:
            return _after_thoughts(text[start:], opening, closing)
    return text


def may_think(model: Any, templates: Any) -> bool:
    """Whether a model may write thoughts: model.thinking or, if that is null, whether its chat
    `templates` (a text, a dictionary or None) contain a mark. `model`: as in `ThoughtMarks.of`."""
    thinking: bool | None = getattr(model, "thinking", None)
    return ThoughtMarks.of(model).are_in(str(templates)) if thinking is None else thinking


def special_marks(
    tokenizer: Any, stop: Sequence[str], marks: ThoughtMarks
) -> tuple[tuple[int, str], ...]:
    """(token id, text) of each special token that is a part of a mark of a thought or of a text in
    `stop`."""
    added_tokens: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return tuple(
        (number, token.content)
        for number, token in added_tokens.items()
        if token.special
        and (marks.contain(token.content) or any(token.content in text for text in stop))
    )


def _after_thoughts(text: str, opening: str, closing: str) -> str | None:
    """The part of `text` after its last thought; None if a thought does not end. The first thought
    may have begun before `text`."""
    rest = text
    while True:
        end = _end_of_mark(closing, rest)
        if end is None:
            return None
        rest = rest[end:]
        start = _end_of_later_opening(opening, rest)
        if start is None:
            return rest.lstrip()
        rest = rest[start:]


def _end_of_later_opening(opening: str, text: str) -> int | None:
    """The index in `text` at which the first mark `opening` ends that begins a line or follows a
    sentence, outside of fences; None if there is no such mark."""
    marks = rf"(?:^|[.!?…。！？][\"'”’)\]*_]*)[ \t]*(?:{opening})"
    for mark in re.finditer(marks, text, re.IGNORECASE | re.MULTILINE):
        fences = re.findall(r"^[ \t]*```", text[: mark.start()], re.MULTILINE)
        if len(fences) % 2 == 0:
            return mark.end()
    return None


def _end_of_mark(closing: str, text: str) -> int | None:
    """The index in `text` at which the first mark `closing` that is not in quotes ends; None if
    there is no such mark."""
    for mark in re.finditer(closing, text, re.IGNORECASE):
        # "" if the text has no character there
        character_before = text[mark.start() - 1 : mark.start()]
        character_after = text[mark.end() : mark.end() + 1]
        is_quoted = character_before == character_after and character_before in ("'", '"', "`")
        # a thought may end in a program, and the answer begin with one
        if not is_quoted or text.endswith("```", 0, mark.start()):
            return mark.end()
    return None


def _is_harmony(text: str, prompt: str) -> bool:
    """Whether `text`, which was generated after `prompt`, has the harmony format of gpt-oss."""
    if prompt.endswith(_HARMONY_THOUGHT) or text.lstrip().startswith("<|channel|>"):
        return True
    if prompt.rstrip().endswith(_HARMONY):
        return bool(_CHANNEL.match(text))
    # an ordinary text may begin with the word "analysis", too
    return text.lstrip().startswith("analysis") and bool(_HARMONY_ANSWER.search(text))


# Degeneration.


REPEATS = 4
"""Fewest repetitions of the block at the end of a text that count as a loop."""
LONGEST_BLOCK = 50
"""Largest number of units (words or characters) of a repeated block."""
SHORTEST_RUN = 32
"""Fewest characters of a loop of characters: shorter ones are numbers, rulers or brackets."""


def text_measures(reply: Reply) -> TextMeasures:
    """The measures of the text of a reply; {} if no text was generated."""
    thought, answer, ended = reply.thought, reply.text, reply.ended
    if ended in (None, "too_long"):
        return {}
    text = thought + (answer or "")
    is_cut = ended == "limit"
    is_unfinished = answer is None
    return TextMeasures(
        limit=float(is_cut),
        unfinished=float(is_unfinished),
        loop=float(ends_in_loop(text, is_cut=is_cut)),
        empty=float(answer is not None and not answer.strip()),
        natural_end=float(not is_cut and not is_unfinished),
        distinct_4=_distinct_4(text.split()),
        characters=float(len(text)),
    )


def ends_in_loop(text: str, *, is_cut: bool) -> bool:
    """Whether a text ends in a block of at most LONGEST_BLOCK words that is repeated REPEATS times
    or more, or in such a block of characters, over at least SHORTEST_RUN characters. Words are
    separated by white space. `is_cut`: whether the last word may be incomplete. The time is linear
    in the length of the text."""
    words = text.split()
    if _ends_in_repeats(words) or _ends_in_repeats(text, SHORTEST_RUN):
        return True
    return is_cut and _ends_in_repeats(words[:-1])


def _ends_in_repeats(units: Sequence[str], shortest: int = 0) -> bool:
    """Whether `units` end in a repeated block, over at least `shortest` units."""
    for period in range(1, LONGEST_BLOCK + 1):
        length = max(REPEATS * period, shortest)
        end = units[-length:]
        if len(end) == length and end[period:] == end[:-period]:
            return True
    return False


def _distinct_4(words: Sequence[str]) -> float | None:
    """Distinct sequences of four words as a share of all; None for fewer than four words."""
    sequences = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    return len(set(sequences)) / len(sequences) if sequences else None
