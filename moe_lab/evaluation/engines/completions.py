"""An OpenAI-compatible server as an engine that generates. No torch."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai

from moe_lab.config import BackendConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation.engines import TOKEN_SECONDS, Engine, Prompt, Writing, Written
from moe_lab.evaluation.reasoning import special_marks

STOPS = 4
"""Most stop texts of one request: OpenAI's limit, and vLLM's default. Texts are cut at the other ones here."""
ATTEMPTS = 3
"""Requests for a text whose completions are none, before the server counts as failing."""
COMPLETE = ("stop", "length")
"""Reasons why a text ends that leave it whole: OpenAI's words. Others, such as abort or error, are of the server."""
_EXCERPT, _REFUSAL = 120, 1000
"""Characters quoted in an error: of an unexpected reply; of the reason that a server gives."""


@dataclass(frozen=True)
class Completions:
    """The text completions of one model at one server."""

    url: str
    """Base address, such as http://127.0.0.1:8000/v1."""
    model: str
    """Name of the model at the server."""
    last_words: Callable[[], str | None] = lambda: None
    """Returns the last output of a server that has ended; None while it runs."""

    def client(self, seconds: float | None = None) -> openai.OpenAI:
        """A client with a timeout of `seconds` per text; None by default, as a server may queue all texts."""
        direct = openai.DefaultHttpxClient(trust_env=False)  # no proxy to this machine
        return openai.OpenAI(base_url=self.url, api_key="none", timeout=seconds, max_retries=0, http_client=direct)

    def complete(self, client: openai.OpenAI, prompt: str, tokens: int, stop: Sequence[str]) -> tuple[str, str]:
        """(text, reason why it ended) of greedy generation without penalties after the prompt, at most `tokens` tokens.

        A completion without a text, or one that the server broke off, is requested again. Raises UserError for a
        refused request and for an answer of another model, Unavailable when the server has ended or fails.
        """
        for _ in range(ATTEMPTS):
            text, reason = self._read(self._request(client, prompt, tokens, stop))
            if isinstance(text, str) and reason in COMPLETE:
                return text, reason
        found = f"finish_reason={reason}" if isinstance(text, str) else f"text={json.dumps(text):.{_EXCERPT}}"
        raise Unavailable(
            f"the server of {self.model} gave no whole text in {ATTEMPTS} attempts: {found}, expected a text that ends "
            f"by {' or '.join(COMPLETE)}"
        )

    def _request(self, client: openai.OpenAI, prompt: str, tokens: int, stop: Sequence[str]) -> bytes:
        """The body of the server's response. For what it raises see `complete`."""
        try:
            answer = client.completions.with_raw_response.create(
                model=self.model,
                prompt=prompt,
                max_tokens=tokens,
                stop=list(stop[:STOPS]) or None,
                temperature=0,
                top_p=1,
                frequency_penalty=0,
                presence_penalty=0,
            )
        except openai.APIConnectionError as error:
            ended = self.last_words()
            reason = f"ended: {ended}" if ended else f"does not answer ({error.__cause__ or error})"
            raise Unavailable(f"the server of {self.model} {reason}") from None
        except openai.APIStatusError as error:
            kind = UserError if error.status_code < 500 else Unavailable
            sentence = error.body.get("message") if isinstance(error.body, dict) else None
            reply = " ".join(str(sentence or error.response.text).split())[:_REFUSAL]
            if error.status_code >= 500 and (ended := self.last_words()):
                raise Unavailable(f"the server of {self.model} ended: {ended}") from None
            raise kind(f"the server of {self.model} answered HTTP {error.status_code}: {reply}") from None
        content: bytes = answer.content
        return content

    def _read(self, body: bytes) -> tuple[Any, Any]:
        """(text, reason why it ended) in a response, as the server wrote them."""
        try:
            document = json.loads(body)
            choice = document["choices"][0]
            text, reason, model = choice["text"], choice["finish_reason"], document["model"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise UserError(f"what answers at {self.url} gives no text completions: {body[:_EXCERPT]!r}") from None
        if str(model).removesuffix("@main") != self.model:
            raise UserError(f"what answers at {self.url} serves {model}, expected {self.model}: is it another server?")
        return text, reason


@dataclass(frozen=True)
class ServedModel(Engine):
    """A causal language model that a server runs. Its tokenizer is loaded in this process."""

    completions: Completions
    """The endpoint that generates."""
    tokenizer: Any
    """The tokenizer the server uses."""
    length: int | None
    """Tokens the model can read, prompt and answer together; None when its configuration does not say."""
    template_arguments: Mapping[str, Any]
    """Arguments of its chat template besides the messages."""
    patience: float = BackendConfig.ready_seconds
    """Seconds without any finished text, in addition to the time for one text, after which a server counts as hung."""

    batches = 16  # so that the server rarely waits for the last text of a batch
    scores = False

    @property
    def max_length(self) -> int | None:
        return self.length

    def generate(self, prompts: Sequence[Prompt], writing: Writing) -> list[Written]:
        """As `Engine.generate`, with `writing.batch_size` requests at a time.

        Raises Unavailable when no text at all arrives for too long. A single late text is no error, because the server
        may finish all others first. Raises UserError where a server would leave out the marks of thoughts.
        """
        if writing.chat and (marks := special_marks(self.tokenizer)):
            raise UserError(
                f"a server leaves out special tokens, and {', '.join(marks.values())} part the model's thoughts from "
                "its answers: expected backend=hf or backend=vllm"
            )
        texts = [self._request_text(prompt) for prompt in prompts]
        pool = ThreadPoolExecutor(writing.batch_size)
        with self.completions.client() as client:
            futures = [pool.submit(self._text, client, text, writing) for text in texts]
            try:
                return self._await(futures, self.patience + TOKEN_SECONDS * writing.most)
            finally:  # do not wait for the others: they end with the server, which may hang
                pool.shutdown(wait=False, cancel_futures=True)

    def _await(self, futures: Sequence[Future[Written]], seconds: float) -> list[Written]:
        """The texts. Raises what the first one to fail raises, and Unavailable when for so long none arrives."""
        done: queue.SimpleQueue[Future[Written]] = queue.SimpleQueue()
        for future in futures:
            future.add_done_callback(done.put)
        for _ in futures:
            try:
                done.get(timeout=seconds).result()
            except queue.Empty:
                raise Unavailable(
                    f"the server of {self.completions.model} runs and wrote no text for {seconds:g} s, which is "
                    f"backend.ready_seconds={self.patience:g} and {TOKEN_SECONDS:g} s per token: it seems to hang"
                ) from None
        return [future.result() for future in futures]

    def _request_text(self, prompt: Prompt) -> str:
        """The text that a server tokenizes to the prompt, given that it always adds the tokenizer's special tokens."""
        candidates = (prompt.text, prompt.text.removeprefix(self.tokenizer.bos_token or ""))
        for text in candidates:
            if tuple(self.tokenizer(text).input_ids) == prompt.tokens:
                return text
        raise UserError(
            "a server adds the tokenizer's special tokens to every prompt, and the model's chat template wants none: "
            "expected backend=hf"
        )

    def _text(self, client: openai.OpenAI, prompt: str, writing: Writing) -> Written:
        """Generate one text, with stop texts searched in the generated text only.

        Some servers also stop at a stop text that begins in the prompt. A text that ended for that reason is requested
        again without such stop texts.
        """
        stops = writing.stop
        text, reason = self.completions.complete(client, prompt, writing.most, stops)
        if reason == "stop" and not any(stop in text for stop in stops) and _crosses(prompt, text, stops):
            inside = [stop for stop in stops if not _begins(prompt, stop)]
            text, reason = self.completions.complete(client, prompt, writing.most, inside)
        return Written(text, "limit" if reason == "length" else "end")


def _begins(prompt: str, stop: str) -> bool:
    """Whether the prompt ends with the beginning of a stop text."""
    return any(prompt.endswith(stop[:length]) for length in range(1, len(stop)))


def _crosses(prompt: str, text: str, stops: Sequence[str]) -> bool:
    """Whether a stop text begins in the prompt and ends in the text."""
    return any(stop in prompt[-(len(stop) - 1) :] + text for stop in stops if len(stop) > 1)
