"""A language model that grades texts, behind an OpenAI-compatible endpoint, with retries and a cache of replies."""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import openai

from moe_lab.config import JudgeConfig
from moe_lab.errors import Unavailable
from moe_lab.evaluation.rubric import Unparsable, judge_identity, score
from moe_lab.json_files import read_json, write_json

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before the second request, and the most before any request."""
_BUSY = (408, 409, 425, 429)
"""HTTP status codes below 500 after which a request is sent again, as it is after any from 500 on."""
_BROKEN = ("abort", "error", "content_filter")
"""Reasons why a reply ends that leave it incomplete. Endpoints have words of their own for complete ones."""
_EXCERPT = 80
"""Bytes of an unexpected reply that an error quotes."""


@dataclass(frozen=True)
class Verdict:
    """A judge's verdict on one answer."""

    score: float | None
    """1 to 10; None without a usable reply."""
    reply: str
    """The judge's reply, or why there is none."""
    cached: bool = False
    """Whether the reply is from the cache."""


class Judge:
    """Requests scores from a judge. Replies with a score are kept in `cache`, one file each; failures are not.

    A reply's key in the cache is made of the judge's model and settings and of the prompt, but not of its address.
    """

    def __init__(self, settings: JudgeConfig, cache: Path) -> None:
        self.settings, self.cache = settings, cache
        local = urlsplit(settings.url).hostname in ("localhost", "127.0.0.1", "::1")
        self._client = openai.OpenAI(
            base_url=settings.url,
            api_key=os.environ.get(settings.key_variable, "").strip() or "none",
            timeout=settings.timeout,
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False) if local else None,  # no proxy to this machine
        )
        self._stop = threading.Event()
        self._refusal: Unavailable | None = None

    def verdicts(self, prompts: Sequence[str], tolerated: int) -> list[Verdict]:
        """A verdict for each prompt, in order.

        Raises Unavailable as soon as more than `tolerated` prompts got no score, with the first reason, and immediately
        when the endpoint refuses a request. Address and key are not part of a step, so another run may succeed.
        """
        self._stop.clear()
        self._refusal = None
        unscored: list[Verdict] = []
        with ThreadPoolExecutor(self.settings.parallel) as pool:
            futures = [pool.submit(self._verdict, prompt) for prompt in prompts]
            try:
                for future in as_completed(futures):
                    verdict = future.result()
                    if self._refusal is not None:
                        raise self._refusal
                    if verdict.score is None:
                        unscored.append(verdict)
                    if len(unscored) > tolerated:
                        raise Unavailable(
                            f"judge {self.settings.model} at {self.settings.url} gave no score to {len(unscored)} of "
                            f"{len(prompts)} answers, and at most {tolerated} may go without: {unscored[0].reply}"
                        )
            finally:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
        return [future.result() for future in futures]

    def _verdict(self, prompt: str) -> Verdict:
        file = self._file(prompt)
        with suppress(OSError, ValueError):  # not in the cache, or damaged: request it
            reply = read_json(file, {"reply": str})["reply"]
            return Verdict(score(reply), reply, cached=True)
        reason = "canceled"
        for _ in range(0 if self._stop.is_set() else self.settings.unparsable_attempts):
            try:
                reply = self._reply(prompt)
                verdict = Verdict(score(reply), reply)
            except Unparsable as error:
                reason = f"{self.settings.unparsable_attempts} replies in a row without a usable score ({error})"
            except _NoReply as error:
                return Verdict(None, str(error))
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, {"judge": judge_identity(self.settings), "reply": reply})
                return verdict
        return Verdict(None, reason)

    def _file(self, prompt: str) -> Path:
        document = json.dumps([judge_identity(self.settings), prompt], sort_keys=True)
        key = hashlib.sha256(document.encode()).hexdigest()
        return self.cache / key[:2] / f"{key}.json"

    def _reply(self, prompt: str) -> str:
        """The judge's reply. Raises _NoReply when the endpoint is busy, broken or unreachable for too long."""
        for attempt in range(1, self.settings.attempts + 1):
            requested_wait = 0.0
            try:
                return _text(self._request(prompt))
            except openai.APITimeoutError:
                reason = f"no answer within {self.settings.timeout:g} s"
            except openai.APIConnectionError as error:
                reason = f"no connection ({error.__cause__ or error})"
            except openai.APIStatusError as error:
                if error.status_code < 500 and error.status_code not in _BUSY:
                    self._refusal = self._refused(error)
                    self._stop.set()
                    raise self._refusal from None
                reason = f"HTTP {error.status_code}"
                requested_wait = _retry_after(error.response.headers.get("retry-after"))
            if attempt == self.settings.attempts or self._stop.wait(_pause(attempt, requested_wait)):
                break
        raise _NoReply(f"{reason}, after {attempt} {'attempt' if attempt == 1 else 'attempts'}")

    def _request(self, prompt: str) -> bytes:
        """The body of the endpoint's response."""
        answer = self._client.chat.completions.with_raw_response.create(
            model=self.settings.model,
            messages=[{"role": "user", "content": prompt}],
            temperature=self.settings.temperature,
            max_tokens=self.settings.max_tokens,
            extra_body=self.settings.extra or None,
        )
        body: bytes = answer.content
        return body

    def _refused(self, error: openai.APIStatusError) -> Unavailable:
        hint = {
            401: f": is the key in {self.settings.key_variable} right?",
            403: f": is the key in {self.settings.key_variable} right?",
            404: ": is judge.url right, and judge.model a model of this endpoint?",
        }.get(error.status_code, "")
        message = error.body.get("message", error.body) if isinstance(error.body, dict) else error.body
        reply = " ".join(str(message or error.response.text).split())[:200]
        return Unavailable(
            f"judge {self.settings.model} at {self.settings.url} refused a request with HTTP {error.status_code}"
            f"{f' ({reply})' if reply else ''}{hint}"
        )


class _NoReply(Exception):
    """The endpoint did not answer in any attempt."""


def _pause(attempt: int, requested: float) -> float:
    """Seconds before the next request: exponential backoff, at least what the endpoint requested, but limited."""
    backoff = FIRST_WAIT * 2.0 ** (attempt - 1) * random.uniform(0.5, 1)
    return min(LONGEST_WAIT, max(backoff, requested * random.uniform(1, 1.1)))


def _retry_after(header: str | None) -> float:
    """Seconds to wait from a Retry-After header, which is a number or a date; 0 if it is neither."""
    with suppress(TypeError, ValueError):
        return max(0.0, float(header or 0))
    with suppress(TypeError, ValueError):
        return max(0.0, (parsedate_to_datetime(str(header)) - datetime.now(UTC)).total_seconds())
    return 0.0


def _text(body: bytes) -> str:
    """The message in a response.

    Raises Unparsable if there is none, as when another program listens at the address, and if it was broken off.
    """
    try:
        choice = json.loads(body)["choices"][0]
        content = str(choice["message"]["content"] or "")
    except (ValueError, KeyError, IndexError, TypeError):
        raise Unparsable(f"no chat completion: {body[:_EXCERPT]!r}") from None
    if choice.get("finish_reason") in _BROKEN:
        raise Unparsable(f"ended by finish_reason={choice['finish_reason']}")
    if choice.get("finish_reason") == "length" and '"score"' not in content:
        raise Unparsable("cut off at judge.max_tokens before a score")
    return content
