"""WildBench v2: the model answers conversations of real users, and a judge scores the answers with
checklists.

A score of 1 (very poor) to 10 (perfect) is reported as (score - 1) / 9.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from moe_lab.config import BenchmarkConfig, JudgeConfig
from moe_lab.errors import Unavailable, UserError, unknown, user_errors
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.engines import answer_in
from moe_lab.evaluation.harness import (
    Answer,
    Graded,
    Item,
    Text,
    graded_by_mean,
    replace_surrogates,
)
from moe_lab.json_files import read_sealed, write_sealed
from moe_lab.paths import cache

if TYPE_CHECKING:
    import openai

_BUSY = (408, 409, 429)
"""HTTP status codes below 500 after which the client sends a request again, as it does after any
from 500 on."""
_BROKEN = ("abort", "error", "content_filter")
"""Reasons why a reply ends that leave it incomplete. Endpoints have words of their own for complete
ones."""
ATTEMPTS = 8
"""How often a request is sent while the endpoint is busy, broken or unreachable: over about a
minute."""
PARALLEL = 8
"""Requests under way at the same time: enough for one server, and few enough for the limits of paid
endpoints."""
TIMEOUT = 120.0
"""Seconds to wait for one reply; judges that reason take up to a minute."""
LOWEST, HIGHEST = 1.0, 10.0
"""The scale of WildBench v2: very poor to perfect."""
_SCORE = re.compile(r'"score"\s*:\s*', re.IGNORECASE)
# A character must follow the number, because a reply may be cut off in the middle of 10.
_NUMBER = re.compile(r'"?\s*(\d+(?:\.\d+)?)(?=["},\s])')
UNPARSABLE_ATTEMPTS = 3
"""How often a text is sent while its replies hold no score: enough for one that broke off by
chance."""
TOLERATED = 0.01
"""Share of items that may lack a score. If more do, the benchmark fails."""
PLACES = ("history", "user_query", "model_output", "checklist")
"""Placeholders of a template, written {$history} and so on. All but the history are required."""
_DEFAULT = Path(__file__).parents[1] / "wildbench_template.md"
_PLACE = re.compile(r"\{\$(\w+)\}")


def items(benchmark: BenchmarkConfig) -> list[Item]:
    """The conversations, up to the user's last message. Nothing but an end token ends an answer.

    A conversation that is too long counts as an empty answer, as in HELM.
    """
    asked = []
    for row in _rows(benchmark):
        messages = [
            {"role": message["role"], "content": message["content"]}
            for message in row["conversation_input"]
        ]
        asked.append(
            Item(row["session_id"], (Text(messages, benchmark.max_new_tokens, skip_long=True),))
        )
    return asked


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """The judge's score of each answer, rescaled to [0, 1]. An empty answer scores 1 of 10 without
    a request.

    The judge does not see what the model thought before its answer. Items without a score are left
    out and named in the protocol. Raises Unavailable when they are more than 1 %.
    """
    assert benchmark.judge is not None
    rows = {row["session_id"]: row for row in _rows(benchmark)}
    text_of_judge = template(benchmark)
    prompts = {}
    unasked = {}
    for answer in answers:
        row = rows[answer.item]
        text = answer.reply.text
        if text and text.strip():
            text = replace_surrogates(text)
            prompts[answer.item] = question(
                text_of_judge, row["conversation_input"], text, row["checklist"]
            )
            continue
        why = (
            "nothing was written"
            if text is not None
            else "a thought does not end, so that there is no answer"
        )
        if answer.reply.ended == "too_long":
            why = "the conversation and max_new_tokens do not fit max_length"
        unasked[answer.item] = Verdict(LOWEST, f"{why}: 1 without asking")
    tolerated = math.floor(TOLERATED * len(answers))
    judged = verdicts(benchmark.judge, cache("judge"), list(prompts.values()), tolerated)
    found = {**unasked, **dict(zip(prompts, judged, strict=True))}
    scores = {item: verdict.score for item, verdict in found.items() if verdict.score is not None}

    def verdict(answer: Answer, metric: str) -> tuple[float, str]:
        return (scores[answer.item] - LOWEST) / (HIGHEST - LOWEST), found[answer.item].reply

    unscored = {item: verdict.reply for item, verdict in found.items() if item not in scores}
    asked = {
        "unasked": len(unasked),
        "unscored": unscored,
        "judge_prompt": next(iter(prompts.values()), None),
    }
    protocol = {**identity(benchmark), **asked}
    scored = [answer for answer in answers if answer.item in scores]
    return graded_by_mean(scored, benchmark, verdict, protocol, tolerated)


def _rows(benchmark: BenchmarkConfig) -> list[dict[str, Any]]:
    """The rows with the benchmark's tag, or all rows if it has none. Raises UserError for a tag
    that no row has."""
    rows = mirror.rows(benchmark)
    tag = benchmark.parameters.get("tag")
    chosen = [row for row in rows if tag is None or row["primary_tag"] == tag]
    if not chosen:
        raise unknown(
            f"benchmark {benchmark.name}: parameters.tag",
            str(tag),
            {row["primary_tag"] for row in rows},
        )
    return chosen[: benchmark.limit]


def template(benchmark: BenchmarkConfig) -> str:
    """The template in parameters.template, or the default one. Raises UserError for one that cannot
    be used."""
    named = benchmark.parameters.get("template")
    file = Path(named).expanduser() if named else _DEFAULT
    where = f"benchmark {benchmark.name}: parameters.template={file}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where} cannot be read: {error}") from None
    places = set(_PLACE.findall(text))
    if places | {"history"} != set(PLACES):
        found = ", ".join(f"{{${place}}}" for place in sorted(places)) or "none"
        expected = ", ".join(f"{{${place}}}" for place in PLACES)
        raise UserError(
            f"{where} has the places {found}: expected {expected}, of which only the first may be "
            "missing"
        )
    return text


def question(
    text: str, conversation: Sequence[Mapping[str, Any]], answer: str, checklist: Sequence[str]
) -> str:
    """The template `text`, filled: the prompt of the judge. Inserted texts are not searched for
    placeholders."""
    *before, last = conversation
    filled = {
        "history": "\n\n".join(
            f"{message['role'].upper()}: {message['content']}" for message in before
        ),
        "user_query": last["content"],
        "model_output": answer,
        "checklist": "\n".join(f"- {item}" for item in checklist),
    }
    return _PLACE.sub(lambda place: filled[place[1]], text)


# The judge, behind an OpenAI-compatible endpoint, with a cache of replies.


class Unparsable(ValueError):
    """A reply without a usable score."""


@dataclass(frozen=True)
class Verdict:
    """A judge's verdict on one answer."""

    score: float | None
    """1 to 10; None without a usable reply."""
    reply: str
    """The judge's reply, or why there is none."""


def verdicts(
    judge: JudgeConfig, cache: Path, prompts: Sequence[str], tolerated: int
) -> list[Verdict]:
    """The judge's verdict on each prompt, in order. Replies with a score are kept in `cache`;
    failures are not.

    Raises Unavailable as soon as more than `tolerated` prompts got no score, with the first reason,
    and immediately when the endpoint refuses a request. Address and key are not part of a step, so
    another run may succeed.
    """
    unscored: list[Verdict] = []
    refused = threading.Event()
    with _client(judge) as client:  # closed, it ends the requests that are still being repeated
        pool = ThreadPoolExecutor(PARALLEL)
        try:
            futures = [
                pool.submit(_verdict, judge, cache, client, prompt, refused) for prompt in prompts
            ]
            for future in as_completed(futures):
                verdict = future.result()
                if verdict.score is None:
                    unscored.append(verdict)
                if len(unscored) > tolerated and not refused.is_set():
                    raise Unavailable(
                        f"judge {judge.model} at {judge.url} gave no score to {len(unscored)} of "
                        f"{len(prompts)} "
                        f"answers, and at most {tolerated} may go without: {unscored[0].reply}"
                    )
        finally:
            refused.set()
            pool.shutdown(wait=False, cancel_futures=True)
    return [future.result() for future in futures]


def _client(judge: JudgeConfig) -> openai.OpenAI:
    """A client that repeats requests while the endpoint is busy, broken or unreachable."""
    import openai

    local = urlsplit(judge.url).hostname in ("localhost", "127.0.0.1", "::1")
    return openai.OpenAI(
        base_url=judge.url,
        api_key=os.environ.get(judge.key_variable, "").strip() or "none",
        timeout=TIMEOUT,
        max_retries=ATTEMPTS - 1,
        # no proxy to this machine
        http_client=openai.DefaultHttpxClient(trust_env=False) if local else None,
    )


def _verdict(
    judge: JudgeConfig, cache: Path, client: openai.OpenAI, prompt: str, refused: threading.Event
) -> Verdict:
    """The verdict on one prompt. Raises Unavailable, and sets `refused`, when the endpoint refuses
    the request."""
    import openai

    asked = judge.identity  # without the address
    key = hashlib.sha256(json.dumps([asked, prompt], sort_keys=True).encode()).hexdigest()
    file = cache / key[:2] / f"{key}.json"
    with suppress(OSError, ValueError):  # not in the cache, or damaged: request it
        reply = read_sealed(file, {"reply": str})["reply"]
        return Verdict(score(reply), reply)
    reason = "canceled"
    for _ in range(0 if refused.is_set() else UNPARSABLE_ATTEMPTS):
        try:
            response = client.chat.completions.with_raw_response.create(
                model=judge.model,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=judge.max_tokens,
                extra_body={"temperature": 0, **judge.extra},
            )
            reply = _text(response.content)
            verdict = Verdict(score(reply), reply)
        except Unparsable as error:
            reason = f"{UNPARSABLE_ATTEMPTS} replies in a row without a usable score ({error})"
        except openai.APITimeoutError:
            return Verdict(None, f"no answer within {TIMEOUT:g} s")
        except openai.APIConnectionError as error:
            return Verdict(None, f"no connection ({error.__cause__ or error})")
        except openai.APIStatusError as error:
            if error.status_code >= 500 or error.status_code in _BUSY:
                return Verdict(None, f"HTTP {error.status_code}")
            refused.set()
            raise Unavailable(
                f"judge {judge.model} at {judge.url} refused a request with HTTP "
                f"{error.status_code} "
                f"({' '.join(error.message.split()):.200}): expected that judge.url and "
                "judge.model are right, and "
                f"the key in {judge.key_variable}"
            ) from None
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(file, {"judge": asked, "reply": reply})
            return verdict
    return Verdict(None, reason)


def _text(body: bytes) -> str:
    """The message in a response. Unparsable without one, as of another program, and for one that
    was broken off."""
    try:
        choice = json.loads(body)["choices"][0]
        content = choice["message"]["content"] or ""
    except (ValueError, KeyError, IndexError, TypeError):
        raise Unparsable(f"no chat completion: {body[:80]!r}") from None
    if not isinstance(content, str):
        raise Unparsable(f"a {type(content).__name__} in place of a text")
    if choice.get("finish_reason") in _BROKEN:
        raise Unparsable(f"ended by finish_reason={choice['finish_reason']}")
    if choice.get("finish_reason") == "length" and '"score"' not in content:
        raise Unparsable("cut off at judge.max_tokens before a score")
    return content


def score(reply: str) -> float:
    """The number, from 1 to 10, after the last "score" of the reply: a judge may quote the form
    first. Thoughts are not read. Raises Unparsable when there is none."""
    verdict = answer_in(reply)
    if verdict is None:
        raise Unparsable("a thought that does not end")
    *_, last = [None, *_SCORE.finditer(verdict)]
    if last is None:
        raise Unparsable('no "score"')
    number = _NUMBER.match(verdict, last.end())
    if number is None:
        raise Unparsable(
            f'the last "score" is no number: {verdict[last.end() : last.end() + 20]!r}'
        )
    value = float(number[1])
    if not LOWEST <= value <= HIGHEST:
        raise Unparsable(f"score {number[1]} is not between 1 and 10")
    return value


# What a study must know of it.


def identity(benchmark: BenchmarkConfig) -> dict[str, Any]:
    """All settings, besides the questions, that can change the results of a judged benchmark."""
    text = template(benchmark)
    return {
        "judge": benchmark.judge.identity if benchmark.judge else None,
        "template": hashlib.sha256(text.encode()).hexdigest(),
    }


def lacking(benchmark: BenchmarkConfig, policy: Policy) -> Iterator[str]:
    """Problems of a judged benchmark, one sentence each."""
    name = f"benchmark {benchmark.name}"
    judge = benchmark.judge
    if not policy.allow_judge:
        yield (
            f"allow_judge=false, but {name} sends what the model wrote to the endpoint of a "
            "judge: set allow_judge=true"
        )
    yield from user_errors(lambda: template(benchmark))
    if judge is None:
        yield f"{name} needs a judge: choose one, such as judge=gpt_oss_120b judge.url=URL"
    elif (
        urlsplit(judge.url).scheme == "https" and not os.environ.get(judge.key_variable, "").strip()
    ):
        yield (
            f"judge.key_variable={judge.key_variable}: there is no such environment variable, and "
            f"{judge.url} will "
            f"want a key: export {judge.key_variable}=KEY, or any word where none is needed"
        )
