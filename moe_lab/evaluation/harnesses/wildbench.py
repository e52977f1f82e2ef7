"""WildBench v2: the model answers conversations of real users, and a judge scores the answers with checklists.

A score of 1 (very poor) to 10 (perfect) is reported as (score - 1) / 9.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from moe_lab.config import BenchmarkConfig
from moe_lab.config.base import identity as settings_identity
from moe_lab.errors import UserError, unknown, user_errors
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.harness import Answer, Graded, Item, Text, graded_by_mean, replace_surrogates
from moe_lab.paths import cache

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
        messages = [{"role": message["role"], "content": message["content"]} for message in row["conversation_input"]]
        asked.append(Item(row["session_id"], (Text(messages, benchmark.max_new_tokens, skip_long=True),)))
    return asked


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """The judge's score of each answer, rescaled to [0, 1]. An empty answer scores 1 of 10 without a request.

    The judge does not see what the model thought before its answer. Items without a score are left out and named in
    the protocol. Raises Unavailable when they are more than 1 %.
    """
    from moe_lab.evaluation.judge import HIGHEST, LOWEST, Judge, Verdict

    assert benchmark.judge is not None
    rows = {row["session_id"]: row for row in _rows(benchmark)}
    text_of_judge = template(benchmark)
    prompts = {}
    unasked = {}
    for answer in answers:
        row, text = rows[answer.item], answer.reply.text
        if text and text.strip():
            text = replace_surrogates(text)
            prompts[answer.item] = question(text_of_judge, row["conversation_input"], text, row["checklist"])
            continue
        why = "nothing was written" if text is not None else "a thought does not end, so that there is no answer"
        if answer.reply.ended == "too_long":
            why = "the conversation and max_new_tokens do not fit max_length"
        unasked[answer.item] = Verdict(LOWEST, f"{why}: 1 without asking")
    tolerated = math.floor(TOLERATED * len(answers))
    judged = Judge(benchmark.judge, cache("judge")).verdicts(list(prompts.values()), tolerated)
    verdicts = {**unasked, **dict(zip(prompts, judged, strict=True))}
    scores = {item: verdict.score for item, verdict in verdicts.items() if verdict.score is not None}

    def verdict(answer: Answer, metric: str) -> tuple[float, str]:
        return (scores[answer.item] - LOWEST) / (HIGHEST - LOWEST), verdicts[answer.item].reply

    coverage = {
        "items": len(verdicts),
        "empty": len(unasked),
        "scored": len(scores),
        "cached": sum(verdict.cached for verdict in verdicts.values()),
        "unscored": {item: verdict.reply for item, verdict in verdicts.items() if item not in scores},
        "mean": math.fsum(scores.values()) / len(scores),
    }
    protocol = {**identity(benchmark), "coverage": coverage, "judge_prompt": next(iter(prompts.values()), None)}
    scored = [answer for answer in answers if answer.item in scores]
    return graded_by_mean(scored, benchmark, verdict, protocol, tolerated)


def _rows(benchmark: BenchmarkConfig) -> list[dict[str, Any]]:
    """The rows with the benchmark's tag, or all rows if it has none. Raises UserError for a tag that no row has."""
    rows = mirror.rows(benchmark)
    tag = benchmark.parameters.get("tag")
    chosen = [row for row in rows if tag is None or row["primary_tag"] == tag]
    if not chosen:
        raise unknown(f"benchmark {benchmark.name}: parameters.tag", str(tag), {row["primary_tag"] for row in rows})
    return chosen[: benchmark.limit]


# The prompt of the judge.


def template(benchmark: BenchmarkConfig) -> str:
    """The template in parameters.template, or the default one. Raises UserError for one that cannot be used."""
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
        raise UserError(f"{where} has the places {found}: expected {expected}, of which only the first may be missing")
    return text


def question(text: str, conversation: Sequence[Mapping[str, Any]], answer: str, checklist: Sequence[str]) -> str:
    """The template `text` with its placeholders filled. The inserted texts are not searched for placeholders."""
    *before, last = conversation
    filled = {
        "history": "\n\n".join(f"{message['role'].upper()}: {message['content']}" for message in before),
        "user_query": last["content"],
        "model_output": answer,
        "checklist": "\n".join(f"- {item}" for item in checklist),
    }
    return _PLACE.sub(lambda place: filled[place[1]], text)


# What a study must know of it.


def identity(benchmark: BenchmarkConfig) -> dict[str, Any]:
    """All settings, besides the questions, that can change the results of a judged benchmark."""
    text = template(benchmark)
    return {"judge": settings_identity(benchmark.judge), "template": hashlib.sha256(text.encode()).hexdigest()}


def problems(benchmark: BenchmarkConfig, policy: Policy) -> Iterator[str]:
    """Problems of a judged benchmark, one sentence each."""
    name, judge = f"benchmark {benchmark.name}", benchmark.judge
    if not policy.allow_judge:
        yield (
            f"allow_judge=false, but {name} sends what the model wrote to the endpoint of a judge: set allow_judge=true"
        )
    yield from user_errors(lambda: template(benchmark))
    if judge is None:
        yield f"{name} needs a judge: choose one, such as judge=gpt_oss_120b judge.url=URL"
    elif urlsplit(judge.url).scheme == "https" and not os.environ.get(judge.key_variable, "").strip():
        yield (
            f"judge.key_variable={judge.key_variable}: there is no such environment variable, and {judge.url} will "
            f"want a key: export {judge.key_variable}=KEY, or any word where none is needed"
        )
