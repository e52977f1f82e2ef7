"""Collect an engine's answers to items: prompts, tokens, order, batches, thoughts and answers. No
torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, TypeVar

from moe_lab import progress
from moe_lab.calibration.documents import TEMPLATE_ARGUMENTS, Tools, render_whole
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation.engines import (
    Engine,
    GeneratedText,
    GenerationSettings,
    Likelihood,
    Prompt,
    Row,
    appended_tokens,
    check_finite,
)
from moe_lab.evaluation.items import (
    MARKS,
    Answer,
    Document,
    Item,
    Messages,
    Pair,
    Reply,
    Request,
    Text,
    Window,
    answer_in,
    may_think,
    special_marks,
)
from moe_lab.json_files import ResultCache

PARTS = 16
"""Batches of likelihoods that are computed in one call, so that requests with a common prefix share
a batch."""
USUAL_LENGTH = 2048
"""Tokens of a window of a document, where neither the benchmark nor the model sets it."""
COMPUTED = "computed.jsonl"
"""File of the `ResultCache` of a step, in its folder of partial results."""
_EXCERPT = 40

_T = TypeVar("_T")


@dataclass
class _Query:
    """A request as an engine gets it."""

    request: Request
    prompt: str
    """The prompt, context or document as the model reads it."""
    tokens: tuple[int, ...] = ()
    """Tokens of the prompt or document."""
    rows: list[Row] = field(default_factory=list)
    """What is scored: the reference after the prompt, the continuation after the context, or the
    windows."""
    reference_bytes: int = 0
    """Bytes that the reference's row scores."""
    marks: tuple[tuple[int, str], ...] = ()
    """Special tokens that part the text into thought and answer, or may end it."""


def collect_answers(
    engine: Engine,
    items: Sequence[Item],
    benchmark: BenchmarkConfig,
    cache: ResultCache | None = None,
) -> list[Answer]:
    """An answer to every item, in order; in batches of `benchmark.batch_size`.

    UserError is raised before the engine computes anything: for a prompt that leaves too little
    room, and for a text to be scored that is too long or has no token. FloatingPointError for a
    likelihood that is no finite number.
    """
    cache = cache or ResultCache()
    encoder = _Encoder(engine, benchmark)
    queries = [encoder.query(request) for item in items for request in item.requests]
    encoder.check_pairs(queries)
    prompts = encoder.prompts(queries)
    texts = _generate(engine, prompts, queries, benchmark, cache)
    likelihoods: dict[Row, Likelihood] = {}
    for number, prompt in prompts.items():
        likelihood = texts[number].likelihood
        if prompt.answer and likelihood:
            likelihoods[prompt.answer] = likelihood
    rows = {row for query in queries for row in query.rows if row not in likelihoods}
    likelihoods |= _score(engine, rows, benchmark.batch_size, cache)
    answers = []
    start = 0
    for item in items:
        replies = []
        for number in range(start, start + len(item.requests)):
            text = texts.get(number)
            replies.append(_reply(queries[number], text, likelihoods, chat=benchmark.chat))
        answers.append(Answer(item.name, queries[start].prompt, tuple(replies)))
        start += len(item.requests)
    return answers


# Requests as the engine gets them.


def render(engine: Engine, messages: Messages, tools: Tools = ()) -> str:
    """The prompt for the next message of a conversation, in which the model may call `tools`.

    A last message of the assistant is the beginning of that message. Raises UserError without a
    chat template, and for one that refuses the conversation, ignores the tools or omits words.
    """
    if not engine.tokenizer.chat_template:
        raise UserError(
            "chat=true, but the model's tokenizer has no chat template: expected an instruction "
            "model"
        )

    has_answer_prefix = messages[-1]["role"] == "assistant"
    ends = {
        "add_generation_prompt": not has_answer_prefix,
        "continue_final_message": has_answer_prefix,
    }
    arguments: dict[str, Any] = {TEMPLATE_ARGUMENTS: engine.template_arguments}
    if tools:
        arguments["tools"] = list(tools)
    return render_whole(messages, arguments, engine.tokenizer, "the questions come with", **ends)


class _Encoder:
    """Makes what an engine gets of the requests of a benchmark."""

    def __init__(self, engine: Engine, benchmark: BenchmarkConfig) -> None:
        self.engine, self.benchmark, self.name = engine, benchmark, f"benchmark {benchmark.name}"
        limits = [
            length for length in (engine.max_length, benchmark.max_length) if length is not None
        ]
        self.room: int | None = min(limits, default=None)
        """Tokens that are read of a prompt and its answer together; None for any number."""
        tokenizer = engine.tokenizer
        self.first: int | None = (
            tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        )
        """The token before a text of which every token is predicted."""
        self._first_text = None if self.first is None else tokenizer.decode(self.first)
        self._appended = appended_tokens(tokenizer)
        """Tokens that are dropped from the end of every text: the model continues it, or answers
        it."""
        if self._appended:
            warnings.warn(
                f"the model's tokenizer appends {tokenizer.decode(self._appended)!r} to every "
                "text: prompts, answers and documents are evaluated without it",
                stacklevel=2,
            )

    def query(self, request: Request) -> _Query:
        """A request with its tokens and with the rows that are to be scored."""
        if isinstance(request, Document):
            tokens = self._tokens(request.text)
            return _Query(request, request.text, tokens, self._windows(request, tokens))
        prompt, tools = (
            (request.prompt, request.tools) if isinstance(request, Text) else (request.context, ())
        )
        text = prompt if isinstance(prompt, str) else render(self.engine, prompt, tools)
        if isinstance(request, Pair):
            return _Query(request, text, rows=[self._pair(text, request.continuation)])
        query = _Query(
            request,
            text,
            self._tokens(text),
            marks=special_marks(self.engine.tokenizer, request.stop),
        )
        if request.reference and self.engine.scores:
            self._add_reference(query, request.reference)
        return query

    def _tokens(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`. The tokenizer's leading special tokens are added, unless the text
        has them already or is a rendered chat. Trailing ones are cut off."""
        if self.benchmark.chat or (self._first_text and text.startswith(self._first_text)):
            return _encoded(self.engine.tokenizer, text, False)
        tokens = _encoded(self.engine.tokenizer, text, True)
        return tokens[: len(tokens) - len(self._appended)]

    def _add_reference(self, query: _Query, reference: str) -> None:
        """Add the row of a reference after its prompt, unless there is no prompt or no room for
        both. As in lm-eval, white space at the end of the prompt counts as part of the answer."""
        head = query.prompt.rstrip()
        whole = query.prompt + reference
        start = len(self._tokens(head))
        row = self._tokens(whole)
        if 0 < start < len(row) <= (self.room or len(row)):
            query.rows = [Row(row, start)]
            query.reference_bytes = len(whole[len(head) :].encode("utf-8", "surrogatepass"))

    def _pair(self, context: str, continuation: str) -> Row:
        """Context and continuation in tokens, divided as by lm-eval; without a context, after the
        first token of texts. UserError for one of them without a token: its likelihood of 1 would
        beat all others."""
        if context:
            row = self._tokens(context + continuation)
            start = len(self._tokens(context.rstrip()))
        else:
            row = _encoded(self.engine.tokenizer, continuation, False)
            start = 1
            if self.first is not None and row[:1] != (self.first,):
                row = (self.first, *row)
        if not 0 < start < len(row):
            raise UserError(
                f"{self.name}: the {'answer' if start else 'question'} has no token of its own in "
                f"question={context[-_EXCERPT:]!r} answer={continuation!r}: expected an answer "
                "that adds tokens"
            )
        return Row(row, start)

    def check_pairs(self, queries: Sequence[_Query]) -> None:
        """Raise UserError for a question and answer with more tokens than are read; their last one
        never is."""
        rows = [query.rows[0] for query in queries if isinstance(query.request, Pair)]
        longest = max((len(row.tokens) for row in rows), default=0)
        if self.room is not None and longest > self.room + 1:
            limit = "model" if self.room == self.engine.max_length else "max_length"
            raise UserError(
                f"{self.name}: a question with its answer has {longest} tokens, and {self.room} "
                f"are read: expected a {limit} of {longest - 1} tokens or more, to read it whole"
            )

    def _windows(self, document: Document, tokens: Sequence[int]) -> list[Row]:
        room = self.room
        if document.from_nothing:
            return _rolling_windows(
                [token for token in (self.first, *tokens) if token is not None],
                room or USUAL_LENGTH,
            )
        length = document.length or min(USUAL_LENGTH, room or USUAL_LENGTH)
        if length < 2 or (room is not None and length > room):
            raise UserError(
                f"{self.name}: length={length}: expected 2 to {room or 'any number of'} tokens"
            )
        cuts = [tuple(tokens[start : start + length]) for start in range(0, len(tokens), length)]
        rows = [Row(cut, 1) for cut in cuts if len(cut) > 1][: document.windows]
        if not rows:
            raise UserError(
                f"{self.name}: its text has {len(tokens)} tokens: expected at least two"
            )
        return rows

    def prompts(self, queries: Sequence[_Query]) -> dict[int, Prompt]:
        """Number of a request -> prompt, for every text that fits.

        Raises UserError when a prompt leaves too little room, unless its request may be skipped,
        and when all do.
        """
        prompts: dict[int, Prompt] = {}
        long: list[tuple[int, Text]] = []
        for number, query in enumerate(queries):
            if isinstance(query.request, Text):
                if self.room is None or len(query.tokens) + query.request.max_tokens <= self.room:
                    prompts[number] = Prompt(
                        query.prompt, query.tokens, query.rows[0] if query.rows else None
                    )
                else:
                    long.append((len(query.tokens), query.request))
        refused = [(length, text) for length, text in long if not text.skip_long or not prompts]
        if self.room is not None and refused:
            length, text = max(refused, key=lambda entry: entry[0] + entry[1].max_tokens)
            remaining = self.room - length
            hint = "expected a model, or a max_length, of more"
            if remaining > 0:
                hint = f"expected max_new_tokens={remaining} or less"
            raise UserError(
                f"a prompt of {length} tokens and max_new_tokens={text.max_tokens} do not fit the "
                f"{'model' if self.room == self.engine.max_length else 'benchmark'}'s {self.room} "
                f"tokens: {hint}"
            )
        return prompts


# all plans of a model get the same questions, one plan after the other
@lru_cache(maxsize=1 << 13)
def _encoded(tokenizer: Any, text: str, special: bool) -> tuple[int, ...]:
    return tuple(tokenizer([text], add_special_tokens=special, verbose=False).input_ids[0])


def _rolling_windows(tokens: Sequence[int], length: int) -> list[Row]:
    """Windows that predict `length` tokens each, all but the first of `tokens` together, as those
    of lm-eval do. The last one predicts what is left, after as many tokens as are read."""
    last = len(tokens) - 1
    ends = [*range(length, last, length), last] if last > 0 else []
    return [
        Row(tuple(tokens[max(0, end - length) : end + 1]), min(end, length) + 1 - (end - before))
        for before, end in pairwise([0, *ends])
    ]


# Batches.


def _generate(
    engine: Engine,
    prompts: Mapping[int, Prompt],
    queries: Sequence[_Query],
    benchmark: BenchmarkConfig,
    cache: ResultCache,
) -> dict[int, GeneratedText]:
    """Number of a request -> its text. Equal prompts are written once; the longest come first."""
    # Stop texts in a thought do not end it, so texts of models that may think are cut at the end.
    thinks = benchmark.chat and may_think(engine.tokenizer)
    groups: dict[GenerationSettings, dict[Prompt, list[int]]] = {}
    for number, prompt in prompts.items():
        request = queries[number].request
        marks = queries[number].marks
        assert isinstance(request, Text)
        stop = () if thinks else request.stop
        generation = GenerationSettings(
            request.max_tokens, stop, benchmark.chat, benchmark.batch_size, marks
        )
        groups.setdefault(generation, {}).setdefault(prompt, []).append(number)
    texts: dict[int, GeneratedText] = {}
    for generation, of_group in groups.items():
        order = sorted(
            of_group, key=lambda prompt: (-len(prompt.tokens), prompt.tokens, prompt.text)
        )
        for batch in _parts(order, generation.batch_size * engine.batches):
            progress.update(len(texts), len(prompts), "requests")
            for prompt, text in zip(
                batch, _generated(engine, batch, generation, cache), strict=True
            ):
                texts |= dict.fromkeys(of_group[prompt], text)
    return texts


def _generated(
    engine: Engine, batch: Sequence[Prompt], generation: GenerationSettings, cache: ResultCache
) -> list[GeneratedText]:
    def compute() -> list[Any]:
        texts = engine.generate(batch, generation)
        for text in texts:
            check_finite(text.likelihood[0] if text.likelihood else 0.0, "log-likelihood")
        return [[text.text, text.ended, text.likelihood] for text in texts]

    rows = [
        [prompt.tokens, prompt.answer and [prompt.answer.start, prompt.answer.tokens]]
        for prompt in batch
    ]
    results = cache.result(
        [generation.max_tokens, generation.stop, generation.marks, rows], compute
    )
    return [
        GeneratedText(text, ended, likelihood and tuple(likelihood))
        for text, ended, likelihood in results
    ]


def _score(
    engine: Engine, rows: Set[Row], batch_size: int, cache: ResultCache
) -> dict[Row, Likelihood]:
    """The likelihood of each row."""
    likelihoods: dict[Row, Likelihood] = {}
    for part in _parts(_by_question(rows), batch_size * PARTS):
        progress.update(len(likelihoods), len(rows), "requests")
        key = ["likelihoods", batch_size, [[row.start, *row.tokens] for row in part]]
        results = cache.result(key, partial(_finite_scores, engine, part, batch_size))
        likelihoods |= {
            row: (total, likeliest) for row, (total, likeliest) in zip(part, results, strict=True)
        }
    return likelihoods


def _finite_scores(engine: Engine, rows: Sequence[Row], batch_size: int) -> list[Any]:
    likelihoods = engine.score(rows, batch_size)
    for total, _ in likelihoods:
        check_finite(total, "log-likelihood")
    return likelihoods


def _by_question(rows: Iterable[Row]) -> list[Row]:
    """The rows in the order in which they are computed: those that are equal up to their start
    follow each other, as they share a forward pass, and the question with the longest row comes
    first."""
    longest: dict[tuple[int, ...], int] = {}
    for row in rows:
        question = row.tokens[: row.start]
        longest[question] = max(longest.get(question, 0), len(row.tokens))
    return sorted(
        rows,
        key=lambda row: (-longest[row.tokens[: row.start]], row.tokens[: row.start], row.tokens),
    )


def _parts(values: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


# Replies.


def _reply(
    query: _Query, text: GeneratedText | None, likelihoods: Mapping[Row, Likelihood], *, chat: bool
) -> Reply:
    """The likelihoods of a request's rows; of a request for a text its thought and answer, and the
    loss on its reference."""
    if not isinstance(query.request, Text):
        windows = []
        for row in query.rows:
            total, likeliest = likelihoods[row]
            windows.append(Window(total, len(row.tokens) - row.start, likeliest))
        return Reply(windows=tuple(windows), tokens=len(query.tokens))
    loss = None
    if query.rows:
        total, _ = likelihoods[query.rows[0]]
        loss = -total / math.log(2) / query.reference_bytes
    if text is None:
        return Reply(ended="too_long", loss=loss)
    whole = cut(text.text, query.request.stop, query.prompt, chat=chat)
    ended = "stop" if whole != text.text else text.ended
    # Marks of stop texts remain in a thought, or where a stop text is incomplete.
    for _, mark in query.marks:
        if mark not in MARKS:
            whole = whole.replace(mark, "")
    answer = answer_in(whole, query.prompt, chat=chat)
    thought = whole[: len(whole) - len(answer or "")]
    return Reply(answer, thought, ended, loss)


def cut(text: str, stop: Sequence[str], prompt: str = "", *, chat: bool = True) -> str:
    """The text up to the first stop text in its answer; a thought before the answer is not
    searched."""
    answer = answer_in(text, prompt, chat=chat) or ""
    end = min((answer.index(end) for end in stop if end in answer), default=len(answer))
    return text[: len(text) - len(answer) + end]
