"""A judge: a language model behind an OpenAI-compatible endpoint that scores texts, with a cache of
replies."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from moe_lab.config import BenchmarkConfig, JudgeConfig
from moe_lab.errors import Unavailable
from moe_lab.evaluation import Policy
from moe_lab.evaluation.items import answer_after_thought
from moe_lab.json_files import digest, read_sealed, write_sealed

if TYPE_CHECKING:
    import openai

_BUSY = (408, 409, 429)
"""HTTP status codes below 500 after which the client repeats a request."""
_BROKEN = ("abort", "error", "content_filter")
"""Values of finish_reason of incomplete replies. The values of complete replies differ between
endpoints."""
ATTEMPTS = 8
"""How often a request is sent while the endpoint is busy, broken or unreachable: about a minute."""
PARALLEL = 8
"""Concurrent requests: enough for one server, and few enough for the limits of paid endpoints."""
TIMEOUT = 120.0
"""Seconds to wait for one reply; judges that reason take up to a minute."""
LOWEST, HIGHEST = 1.0, 10.0
"""The scale of WildBench v2: very poor to perfect."""
_FIELDS = ("strengths", "weaknesses", "score")
"""Fields of the object that a judge is asked for."""
_OBJECT = re.compile(r"""\{\s*["'}]""")
"""Beginning of a JSON object, or of an object with single quotes."""
_TRAILING_COMMA = re.compile(r",(?=\s*[}\]])")
# A character must follow the value, because a reply may be cut off in the middle of 10.
_SCORE = re.compile(r"""["']score["']\s*:\s*["']?([^"'}\n]*)["'}\n]""", re.IGNORECASE)
_NUMBER = re.compile(r"([0-9]+(?:[.,][0-9]+)?)\s*(?:(?:/|out of)\s*10)?")
_DECODER = json.JSONDecoder(strict=False)  # judges write line breaks into texts
UNPARSABLE_ATTEMPTS = 3
"""How often a text is sent while the replies have no score: enough for a reply that broke off by
chance."""


class Unparsable(ValueError):
    """A reply without a usable score."""


@dataclass(frozen=True)
class Verdict:
    """A judge's verdict on one answer."""

    score: float | None
    """1 to 10; None without a usable reply."""
    reply: str
    """The judge's reply, or the reason why there is none."""


def missing_requirements(benchmark: BenchmarkConfig, policy: Policy) -> Iterator[str]:
    """Yield a sentence for each requirement of the judge that is missing."""
    name = f"benchmark {benchmark.name}"
    judge = benchmark.judge
    if not policy.allow_judge:
        yield (
            f"allow_judge=false, but {name} sends the model's texts to the endpoint of a judge: "
            "set allow_judge=true"
        )
    if judge is None:
        yield f"{name} needs a judge: choose one, such as judge=gpt_oss_120b judge.url=URL"
    elif urlsplit(judge.url).scheme == "https" and not _key(judge):
        yield (
            f"judge.key_variable={judge.key_variable}: this environment variable is not set, and "
            f"{judge.url} expects a key: export {judge.key_variable}=KEY, or any value where no "
            "key is needed"
        )


def _key(judge: JudgeConfig) -> str:
    """The API key of the judge's endpoint; "" if it is not set."""
    return os.environ.get(judge.key_variable, "").strip()


def verdicts(
    judge: JudgeConfig, cache: Path, prompts: Sequence[str], max_unscored: int
) -> list[Verdict]:
    """The judge's verdict on each prompt, in order. Replies with a score are stored in `cache`.

    Raises Unavailable as soon as more than `max_unscored` prompts have no score, or as soon as the
    endpoint refuses a request.
    """
    unscored_verdicts: list[Verdict] = []
    # the end of this block closes the client, so that its threads stop repeating failed requests
    with _client(judge) as client:
        pool = ThreadPoolExecutor(PARALLEL)
        try:
            futures = [pool.submit(_verdict, judge, cache, client, prompt) for prompt in prompts]
            for future in as_completed(futures):
                verdict = future.result()
                if verdict.score is None:
                    unscored_verdicts.append(verdict)
                if len(unscored_verdicts) > max_unscored:
                    raise Unavailable(
                        f"judge {judge.model} at {judge.url} gave no score to "
                        f"{len(unscored_verdicts)} of {len(prompts)} answers, and at most "
                        f"{max_unscored} may go without: {unscored_verdicts[0].reply}"
                    )
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return [future.result() for future in futures]


def _client(judge: JudgeConfig) -> openai.OpenAI:
    """A client that repeats requests while the endpoint is busy, broken or unreachable."""
    import openai

    is_local = urlsplit(judge.url).hostname in ("localhost", "127.0.0.1", "::1")
    return openai.OpenAI(
        base_url=judge.url,
        api_key=_key(judge) or "none",
        timeout=TIMEOUT,
        max_retries=ATTEMPTS - 1,
        # a judge on this machine is not called through the proxy of the environment
        http_client=openai.DefaultHttpxClient(trust_env=False) if is_local else None,
    )


def _verdict(judge: JudgeConfig, cache: Path, client: openai.OpenAI, prompt: str) -> Verdict:
    """The verdict on one prompt, from the cache or else from the endpoint. Raises Unavailable if
    the endpoint refuses the request."""
    import openai

    settings = judge.identity  # without judge.url, so that a cached reply holds for every URL
    key = digest([settings, prompt])
    file = cache / key[:2] / f"{key}.json"
    with suppress(OSError, ValueError):  # if the cached reply is missing or unusable, request it
        reply = read_sealed(file)["reply"]
        return Verdict(score(reply), reply)
    # a setting that is null in judge.extra is left out of the request
    fields = {"temperature": 0, "max_tokens": judge.max_tokens, **judge.extra}
    sent_fields = {name: value for name, value in fields.items() if value is not None}
    reason = ""
    for _ in range(UNPARSABLE_ATTEMPTS):
        try:
            response = client.chat.completions.with_raw_response.create(
                model=judge.model,
                messages=[{"role": "user", "content": prompt}],
                extra_body=sent_fields,
            )
            reply = _message(response.content)
            verdict = Verdict(score(reply), reply)
        except Unparsable as error:
            reason = f"{UNPARSABLE_ATTEMPTS} replies in a row without a usable score ({error})"
        except openai.APIConnectionError as error:  # also a timeout
            return Verdict(None, f"{error} ({error.__cause__})")
        except openai.APIStatusError as error:
            if error.status_code >= 500 or error.status_code in _BUSY:
                return Verdict(None, f"HTTP {error.status_code}")
            raise Unavailable(
                f"judge {judge.model} at {judge.url} refused a request with HTTP "
                f"{error.status_code} ({' '.join(error.message.split()):.200}): check judge.url, "
                f"judge.model and the key in {judge.key_variable}"
            ) from None
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(file, {"judge": settings, "reply": reply})
            return verdict
    return Verdict(None, reason)


def _message(body: bytes) -> str:
    """The judge's message in the `body` of a response. Raises Unparsable if the message is
    missing or incomplete."""
    try:
        choice = json.loads(body)["choices"][0]
        content = choice["message"]["content"] or ""
    except (ValueError, KeyError, IndexError, TypeError):
        raise Unparsable(f"no chat completion: {body[:80]!r}") from None
    if not isinstance(content, str):
        raise Unparsable(f"a {type(content).__name__} in place of a text")
    finish_reason = choice.get("finish_reason")
    if finish_reason in _BROKEN:
        raise Unparsable(f"ended by finish_reason={finish_reason}")
    # a message that was cut off after the score is usable
    if finish_reason == "length" and '"score"' not in content:
        raise Unparsable("cut off at judge.max_tokens before a score")
    return content


def score(reply: str) -> float:
    """The score, from 1 to 10, in the JSON object of a judge's reply.

    A judge may quote other objects, such as the form of a reply or the answer that it judges. So
    the object with the most of the fields that were asked for counts, then one that begins a line,
    then the last one. Raises Unparsable for a reply without such a score.
    """
    answer = answer_after_thought(reply)
    if answer is None:
        raise Unparsable("a thought that does not end")
    best = max(_ranked_scores(answer), default=None)
    if best is None:
        raise Unparsable('no "score"')
    *_, value = best
    if isinstance(value, str) and (number := _NUMBER.fullmatch(value.strip(" ,"))):
        value = float(number[1].replace(",", "."))
    if type(value) not in (int, float) or not LOWEST <= value <= HIGHEST:
        raise Unparsable(f"score {value!r:.40} is no number from 1 to 10")
    return float(value)


def _ranked_scores(answer: str) -> Iterator[tuple[int, bool, int, Any]]:
    """Yield (number of fields that were asked for, whether the object begins a line, index, value
    of "score") of each JSON object in a judge's answer, without objects inside objects.

    After a damaged or incomplete object, only objects that begin a line are read, because all
    others may be inside it. The score of a damaged object is None unless all later scores are the
    same.
    """
    text = _TRAILING_COMMA.sub(" ", answer)
    is_damaged = False
    end = 0
    while match := _OBJECT.search(text, end):
        start, end = match.span()
        begins_line = text[start - 1 : start] in ("", "\n")
        if is_damaged and not begins_line:
            continue
        try:
            document, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            is_damaged = True
            scores = set(_SCORE.findall(text, start))
            value = scores.pop() if len(scores) == 1 else None
            yield len(_FIELDS), begins_line, start, value
            continue
        fields = {name.lower(): value for name, value in document.items()}
        if "score" in fields:
            count = sum(name in fields for name in _FIELDS)
            yield count, begins_line, start, fields["score"]
