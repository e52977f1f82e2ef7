"""Collect an engine's answers to items. No torch."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import chain
from typing import Any, TypeVar

from pydantic import TypeAdapter

from moe_lab import progress
from moe_lab.calibration.documents import TEMPLATE_ARGUMENTS, Tools, render, render_whole
from moe_lab.config import BenchmarkConfig, Sampling
from moe_lab.errors import UserError
from moe_lab.evaluation.engines import (
    GREEDY_SAMPLING,
    Engine,
    GeneratedText,
    GenerationSettings,
    Prompt,
    Row,
    Tokens,
    appended_tokens,
    check_finite,
    encode,
)
from moe_lab.evaluation.items import (
    Answer,
    Document,
    Item,
    Likelihood,
    Messages,
    Pair,
    Reply,
    Request,
    Text,
    ThoughtMarks,
    answer_after_thought,
    may_think,
    special_marks,
)
from moe_lab.json_files import ResultCache

BATCHES_PER_CALL = 16
"""Batches of likelihoods that are computed in one call of the engine."""
USUAL_LENGTH = 2048
"""Tokens of a window of a document if neither the benchmark nor the model sets a length."""
COMPUTED = "computed.jsonl"
"""File of the `ResultCache` of a step, in its folder of partial results."""
_EXCERPT = 40
"""Characters of a question that an error quotes."""

_T = TypeVar("_T")
_Result = TypeVar("_Result", GeneratedText, Likelihood)


@dataclass
class _Query:
    """A request with its tokens and the rows whose likelihoods it needs."""

    request: Request
    prompt: str
    """The prompt, context or document as the model reads it."""
    tokens: Tokens = ()
    """Tokens of the prompt or document; () for a Pair, whose row has its tokens."""
    rows: list[Row] = field(default_factory=list)
    """Rows to score: the reference after the prompt, the continuation after the context, or the
    windows of the document."""
    reference_bytes: int = 0
    """Bytes of the reference's scored tokens."""
    prompts: list[Prompt] = field(default_factory=list)
    """A prompt for each text to generate; [] for a prompt that is too long, or without a text."""


def collect_answers(
    engine: Engine,
    items_of: Sequence[tuple[BenchmarkConfig, Sequence[Item]]],
    cache: ResultCache | None = None,
) -> list[list[Answer]]:
    """The engine's answers to the items of each benchmark, in the order of the items. The texts of
    all benchmarks are generated in the same batches; the size of a batch is that of the first
    benchmark.

    UserError for a prompt that leaves too few tokens for its answer, and for a text to score that
    is too long or has no token. FloatingPointError for a likelihood that is not finite.
    """
    cache = cache or ResultCache()
    questions = [_Questions(engine, benchmark, items) for benchmark, items in items_of]
    first_benchmark, _ = items_of[0]
    batch_size = first_benchmark.batch_size
    queries = [query for asked in questions for query in asked.queries]
    # a total order, so that batches do not depend on the order of the benchmarks
    prompts = sorted(
        {*chain.from_iterable(query.prompts for query in queries)},
        key=lambda prompt: (-len(prompt.tokens), prompt.tokens, repr(prompt)),
    )
    texts = _results(GeneratedText, engine.generate, prompts, batch_size, engine.batches, cache)
    rows = {*chain.from_iterable(query.rows for query in queries)}
    likelihoods = _results(
        Likelihood, engine.score, _sorted_by_question(rows), batch_size, BATCHES_PER_CALL, cache
    )
    return [list(asked.answers(texts, likelihoods)) for asked in questions]


# Sampling.


def resolved_sampling(engine: Engine, benchmark: BenchmarkConfig) -> Sampling:
    """How the engine generates the texts of a benchmark, without nulls: by the model's own settings
    where the benchmark has none, if the benchmark is a chat and the model thinks."""
    if not benchmark.max_new_tokens:  # likelihoods, or greedy texts with the limit of a task
        return GREEDY_SAMPLING
    defaults = engine.sampling_defaults
    may_sample = benchmark.chat and benchmark.sampling.temperature != 0
    is_own = may_sample and defaults and thinks(engine)
    return benchmark.sampling.resolved(defaults if is_own else {})


def thinks(engine: Engine) -> bool:
    """Whether the model writes thoughts in a chat: model.thinking or, if that is null, whether its
    chat template writes marks of thoughts. A template that ends a thought at the end of a prompt
    has turned thoughts off."""
    tokenizer = engine.tokenizer
    thinking: bool | None = getattr(tokenizer, "thinking", None)
    if thinking is not None or not may_think(tokenizer, tokenizer.chat_template):
        return bool(thinking)
    marks = ThoughtMarks.of(tokenizer)
    question = {"role": "user", "content": "Hello"}
    arguments = {TEMPLATE_ARGUMENTS: engine.template_arguments}
    prompt = render([question], arguments, tokenizer, add_generation_prompt=True)
    if answer_after_thought("", prompt, marks=marks) is None:
        return True
    _, _, end = prompt.rpartition(question["content"])
    if marks.are_in(end):
        return False
    # most templates have one of these names for a thought
    thought = {"reasoning_content": "Hello", "thinking": "Hello"}
    message = {"role": "assistant", "content": "Hello", **thought}
    return marks.are_in(render([question, message], arguments, tokenizer))


# Requests as the engine gets them.


def render_prompt(engine: Engine, messages: Messages, tools: Tools = ()) -> str:
    """Render a conversation as a prompt for the model's next message. The model may call `tools`.

    If the last message is the assistant's, the model continues this message. UserError if the
    tokenizer has no chat template, or if the template refuses the conversation, ignores the tools
    or omits words of the messages.
    """
    if not engine.tokenizer.chat_template:
        raise UserError(
            "chat=true, but the model's tokenizer has no chat template: expected an instruction "
            "model"
        )

    has_answer_prefix = messages[-1]["role"] == "assistant"
    arguments: dict[str, Any] = {TEMPLATE_ARGUMENTS: engine.template_arguments}
    if tools:
        arguments["tools"] = list(tools)
    return render_whole(
        messages,
        arguments,
        engine.tokenizer,
        error_start="the questions come with",
        add_generation_prompt=not has_answer_prefix,
        continue_final_message=has_answer_prefix,
    )


class _Questions:
    """The items of a benchmark as queries for an engine."""

    def __init__(self, engine: Engine, benchmark: BenchmarkConfig, items: Sequence[Item]) -> None:
        self.engine = engine
        self.benchmark = benchmark
        self.items = items
        self.name = f"benchmark {benchmark.name}"
        self.sampling = resolved_sampling(engine, benchmark)
        self.marks = ThoughtMarks.of(engine.tokenizer)
        limits = filter(None, (engine.max_length, benchmark.max_length))
        self.max_length: int | None = min(limits, default=None)
        """Most tokens of a prompt and its answer together; None for any number."""
        has_thoughts = benchmark.longest_text > benchmark.max_new_tokens and thinks(engine)
        self.thinking_tokens = benchmark.thinking_tokens if has_thoughts else 0
        tokenizer = engine.tokenizer
        self.may_think = benchmark.chat and may_think(tokenizer, tokenizer.chat_template)
        self.kept_tokens = cache(partial(special_marks, tokenizer, marks=self.marks))
        """Stop texts -> (token id, text) of special tokens that stay in the generated text: those
        that begin or end a thought, and those that stop texts contain."""
        self.first_token: int | None = (
            tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        )
        """The token that precedes a text if the first token of the text is predicted too."""
        self._first_text = None if self.first_token is None else tokenizer.decode(self.first_token)
        self._appended = appended_tokens(tokenizer)
        """Tokens that the tokenizer appends to every text, such as an end token."""
        if self._appended:
            warnings.warn(
                f"the model's tokenizer appends {tokenizer.decode(self._appended)!r} to every "
                "text: prompts, answers and documents are evaluated without it",
                stacklevel=2,
            )
        self.queries_of_items = [
            [self._query(request) for request in item.requests] for item in items
        ]
        """For each item, a query for each of its requests."""
        self.queries = list(chain.from_iterable(self.queries_of_items))
        self._add_prompts()

    def _query(self, request: Request) -> _Query:
        """The query of a request."""
        if isinstance(request, Document):
            tokens = self._tokens(request.text)
            return _Query(request, request.text, tokens, self._windows(request, tokens))
        if isinstance(request, Pair):
            row = self._pair_row(request.context, request.continuation)
            return _Query(request, request.context, rows=[row])
        prompt = request.prompt
        if not isinstance(prompt, str) and self.benchmark.system_prompt:
            system = {"role": "system", "content": self.benchmark.system_prompt}
            prompt = [system, *(turn for turn in prompt if turn["role"] != "system")]
        text = (
            prompt if isinstance(prompt, str) else render_prompt(self.engine, prompt, request.tools)
        )
        query = _Query(request, text, self._tokens(text))
        if request.reference and self.engine.scores:
            self._add_reference(query, request.reference)
        return query

    def _tokens(self, text: str) -> Tokens:
        """Token ids of `text`, with the tokenizer's leading special tokens. Appended tokens are
        dropped, because the model must continue the text."""
        # the text has its leading special tokens already
        if self.benchmark.chat or (self._first_text and text.startswith(self._first_text)):
            return encode(self.engine.tokenizer, text, add_special=False)
        tokens = encode(self.engine.tokenizer, text, add_special=True)
        return tokens[: len(tokens) - len(self._appended)]

    def _add_reference(self, query: _Query, reference: str) -> None:
        """Set the row of `query` to its prompt followed by the reference. As in lm-eval, white
        space at the end of the prompt counts as part of the reference."""
        stripped_prompt = query.prompt.rstrip()
        text = query.prompt + reference
        start = len(self._tokens(stripped_prompt))
        tokens = self._tokens(text)
        # both parts have tokens, and the row is not too long
        if 0 < start < len(tokens) <= (self.max_length or len(tokens)):
            query.rows = [Row(tokens, start)]
            query.reference_bytes = len(
                text[len(stripped_prompt) :].encode("utf-8", "surrogatepass")
            )

    def _pair_row(self, context: str, continuation: str) -> Row:
        """The row of a context and its continuation. As in lm-eval, white space at the end of the
        context counts as part of the continuation.

        An empty context is replaced by `first_token`. If `first_token` is None, or the continuation
        begins with it, the first token of the continuation is not scored."""
        if context:
            tokens = self._tokens(context + continuation)
            start = len(self._tokens(context.rstrip()))
        else:
            tokens = encode(self.engine.tokenizer, continuation, add_special=False)
            start = 1
            if self.first_token is not None and tokens[:1] != (self.first_token,):
                tokens = (self.first_token, *tokens)
        # a continuation without tokens would have the largest likelihood, 1
        if not 0 < start < len(tokens):
            raise UserError(
                f"{self.name}: the {'answer' if start else 'question'} has no token of its own in "
                f"question={context[-_EXCERPT:]!r} answer={continuation!r}: expected an answer "
                "that adds tokens"
            )
        # one more, because the model does not read the last token of a row
        if self.max_length is not None and len(tokens) > self.max_length + 1:
            setting = "model" if self.max_length == self.engine.max_length else "max_length"
            raise UserError(
                f"{self.name}: a question with its answer has {len(tokens)} tokens, and "
                f"{self.max_length} are read: expected a {setting} of {len(tokens) - 1} tokens or "
                "more, to read it whole"
            )
        return Row(tokens, start)

    def _windows(self, document: Document, tokens: Sequence[int]) -> list[Row]:
        """The rows of a document, one for each window."""
        limit = self.max_length
        length = document.length or min(USUAL_LENGTH, limit or USUAL_LENGTH)
        if limit is not None and length > limit:
            raise UserError(f"{self.name}: length={length}: expected {limit} tokens or fewer")
        # without overlap, the first token of a window is not predicted
        windows = [tuple(tokens[start : start + length]) for start in range(0, len(tokens), length)]
        rows = [Row(window, 1) for window in windows if len(window) > 1][: document.windows]
        if not rows:
            raise UserError(
                f"{self.name}: its text has {len(tokens)} tokens: expected at least two"
            )
        return rows

    def _add_prompts(self) -> None:
        """Set the prompts of the queries whose request is a `Text`.

        UserError for a prompt that does not fit into `max_length` together with its answer. If its
        request has `skip_long`, and another prompt fits, the query gets no prompt instead.
        """
        # (tokens of the prompt, request) of prompts that do not fit
        long_prompts: list[tuple[int, Text]] = []
        for item, queries in zip(self.items, self.queries_of_items, strict=True):
            for number, query in enumerate(queries):
                if not isinstance(query.request, Text):
                    continue
                settings = self._generation_settings(query.request)
                length = len(query.tokens)
                if self.max_length is not None and length + settings.max_tokens > self.max_length:
                    long_prompts.append((length, query.request))
                    continue
                prompt = Prompt(query.prompt, query.tokens, settings)
                if self.sampling.temperature:
                    query.prompts = [
                        replace(prompt, seed=self._text_seed(f"{item.name} {number}", sample))
                        for sample in range(self.sampling.samples)
                    ]
                else:
                    query.prompts = [prompt]
        if any(query.prompts for query in self.queries):
            long_prompts = [entry for entry in long_prompts if not entry[1].skip_long]
        if self.max_length is not None and long_prompts:
            length, request = max(long_prompts, key=lambda entry: entry[0] + entry[1].max_tokens)
            remaining_tokens = self.max_length - length - self.thinking_tokens
            hint = "expected a model, or a max_length, of more"
            if remaining_tokens > 0:
                hint = f"expected max_new_tokens={remaining_tokens} or less"
            raise UserError(
                f"a prompt of {length} tokens and max_new_tokens={request.max_tokens} with "
                f"thinking_tokens={self.thinking_tokens} do not fit the"
                f" {'model' if self.max_length == self.engine.max_length else 'benchmark'}'s "
                f"{self.max_length} tokens: {hint}"
            )

    def _generation_settings(self, request: Text) -> GenerationSettings:
        """How the text of a request is generated."""
        return GenerationSettings(
            request.max_tokens + self.thinking_tokens,
            # a stop text must not end a thought; `reply` applies the stop texts later
            () if self.may_think else request.stop,
            self.benchmark.chat,
            self.kept_tokens(request.stop),
            self.sampling,
        )

    def _text_seed(self, name: str, sample: int) -> int:
        """Seed of the random numbers of a text. `name`: unique name of its request."""
        digest = hashlib.sha256(json.dumps([self.sampling.seed, name, sample]).encode()).digest()
        return int.from_bytes(digest[:8]) >> 1  # the engines take signed numbers of 64 bits

    def answers(
        self, texts: Mapping[Prompt, GeneratedText], likelihoods: Mapping[Row, Likelihood]
    ) -> Iterator[Answer]:
        """Yield the answers to the items."""
        for item, queries in zip(self.items, self.queries_of_items, strict=True):
            is_generated = any(isinstance(request, Text) for request in item.requests)
            is_sampled = is_generated and bool(self.sampling.temperature)
            for sample in range(self.sampling.samples if is_sampled else 1):
                replies = []
                for query in queries:
                    text = texts[query.prompts[sample]] if query.prompts else None
                    replies.append(self._reply(query, text, likelihoods))
                sampling = asdict(self.sampling) if is_sampled else None
                yield Answer(item.name, queries[0].prompt, tuple(replies), sample, sampling)

    def _reply(
        self, query: _Query, text: GeneratedText | None, likelihoods: Mapping[Row, Likelihood]
    ) -> Reply:
        """The reply to the request of `query`. `text`: the generated text; None for a request other
        than a `Text`, and for a prompt that was too long."""
        if not isinstance(query.request, Text):
            windows = tuple(likelihoods[row] for row in query.rows)
            return Reply(windows=windows)
        loss = None
        if query.rows:
            # bits per byte
            loss = -likelihoods[query.rows[0]].nats / math.log(2) / query.reference_bytes
        if text is None:
            return Reply(ended="too_long", loss=loss)
        thought_and_answer = self._cut_at_stop_text(text.text, query.request.stop, query.prompt)
        ended = "stop" if thought_and_answer != text.text else text.ended
        # special tokens outside of marks were only needed to find stop texts
        for _, special_token in self.kept_tokens(query.request.stop):
            if not self.marks.contain(special_token):
                thought_and_answer = thought_and_answer.replace(special_token, "")
        answer = self._answer(thought_and_answer, query.prompt)
        thought = thought_and_answer[: len(thought_and_answer) - len(answer or "")]
        if self.thinking_tokens:  # engines limit a thought and its answer together
            if beginning := self._cut(thought.rstrip(), self.thinking_tokens):
                return Reply(None, beginning, "limit", loss)
            if beginning := self._cut(answer or "", query.request.max_tokens):
                return Reply(beginning, thought, "limit", loss)
        return Reply(answer, thought, ended, loss)

    def _cut(self, text: str, most: int) -> str:
        """The first `most` tokens of a text that has more; "" for another text."""
        tokenizer = self.engine.tokenizer
        tokens = tokenizer([text], add_special_tokens=False, verbose=False).input_ids[0]
        return tokenizer.decode(tokens[:most]) if len(tokens) > most else ""

    def _answer(self, text: str, prompt: str) -> str | None:
        """The answer in a generated `text`; None if its thought does not end."""
        return answer_after_thought(text, prompt, chat=self.benchmark.chat, marks=self.marks)

    def _cut_at_stop_text(self, text: str, stop: Sequence[str], prompt: str) -> str:
        """The generated `text`, cut at the first text of `stop` in its answer."""
        answer = self._answer(text, prompt) or ""
        ends = [answer.index(stop_text) for stop_text in stop if stop_text in answer]
        return text[: len(text) - len(answer) + min(ends, default=len(answer))]


# Batches.


def _results(
    kind: type[_Result],
    compute: Callable[[Sequence[_T], int], list[_Result]],
    requests: Sequence[_T],
    batch_size: int,
    batches: int,
    cache: ResultCache,
) -> dict[_T, _Result]:
    """Request -> its result of the class `kind`, from the cache or else from `compute`, which is
    called with requests for several `batches`. FloatingPointError for a likelihood that is not
    finite."""
    adapter = TypeAdapter(list[kind])  # type: ignore[valid-type]

    def compute_json(call: Sequence[_T]) -> Any:
        call_results = compute(call, batch_size)
        for result in call_results:
            if isinstance(result, Likelihood):
                check_finite(result.nats + result.divergence, "log-likelihood")
        return adapter.dump_python(call_results)

    results: dict[_T, _Result] = {}
    size = batch_size * batches
    for start in range(0, len(requests), size):
        progress.update(start, len(requests), "requests")
        call: Sequence[_T] = requests[start : start + size]
        content = cache.result([*map(repr, call)], partial(compute_json, call))
        results |= zip(call, adapter.validate_python(content), strict=True)
    return results


def _sorted_by_question(rows: Iterable[Row]) -> list[Row]:
    """The rows sorted by question, so that rows with the same question get into the same batch. The
    question of a row is the tokens before `row.start`."""
    # question -> number of tokens of its longest row
    lengths: dict[Tokens, int] = {}
    for row in rows:
        question = row.tokens[: row.start]
        lengths[question] = max(lengths.get(question, 0), len(row.tokens))
    return sorted(
        rows,
        key=lambda row: (-lengths[row.tokens[: row.start]], row.tokens[: row.start], row.tokens),
    )
