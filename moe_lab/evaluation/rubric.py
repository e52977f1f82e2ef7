"""The prompt of a judge, and the score in its reply. No network, no torch.

The scale is that of WildBench v2: 1 (very poor) to 10 (perfect), reported as (score - 1) / 9.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from moe_lab.config import BenchmarkConfig, JudgeConfig
from moe_lab.errors import UserError, user_errors
from moe_lab.evaluation.reasoning import answer_in
from moe_lab.evaluation.sandbox.policy import Policy

LOWEST, HIGHEST = 1.0, 10.0
PLACES = ("history", "user_query", "model_output", "checklist")
"""Placeholders of a template, written {$history} and so on. All but the history are required."""

_DEFAULT = Path(__file__).with_name("wildbench_template.md")
_PLACE = re.compile(r"\{\$(\w+)\}")
_SCORE = re.compile(r'"score"\s*:\s*', re.IGNORECASE)
# A character must follow the number, because a reply may be cut off in the middle of 10.
_NUMBER = re.compile(r'"?\s*(\d+(?:\.\d+)?)(?=["},\s])')


class Unparsable(ValueError):
    """A reply without a usable score."""


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


def score(reply: str) -> float:
    """The number after the last "score" of the reply, between 1 and 10. Raises Unparsable when there is none.

    It is the last, because a judge may quote the form while it reasons, before it gives its score. What stands between
    the marks of a thought is not read.
    """
    verdict = answer_in(reply)
    if verdict is None:
        raise Unparsable("a thought that does not end")
    *_, last = [None, *_SCORE.finditer(verdict)]
    if last is None:
        raise Unparsable('no "score"')
    number = _NUMBER.match(verdict, last.end())
    if number is None:
        raise Unparsable(f'the last "score" is no number: {verdict[last.end() : last.end() + 20]!r}')
    value = float(number[1])
    if not LOWEST <= value <= HIGHEST:
        raise Unparsable(f"score {number[1]} is not between 1 and 10")
    return value


def rescaled(value: float) -> float:
    """A score of 1 to 10, rescaled to [0, 1]."""
    return (value - LOWEST) / (HIGHEST - LOWEST)


def judge_identity(judge: JudgeConfig) -> dict[str, Any]:
    """All settings that can change a judge's replies, so without its address and key."""
    return {"model": judge.model, "max_tokens": judge.max_tokens, "extra": judge.extra}


def identity(benchmark: BenchmarkConfig) -> dict[str, Any]:
    """All settings, besides the questions, that can change the results of a judged benchmark."""
    assert benchmark.judge is not None
    text = template(benchmark)
    return {"judge": judge_identity(benchmark.judge), "template": hashlib.sha256(text.encode()).hexdigest()}


def problems(benchmark: BenchmarkConfig, policy: Policy) -> Iterator[str]:
    """Problems of a judged benchmark, one sentence each."""
    name, judge = f"benchmark {benchmark.name}", benchmark.judge
    if not policy.allow_judge:
        yield (
            f"allow_judge=false, but {name} sends what the model wrote to the endpoint of a judge: set allow_judge=true"
        )
    if not benchmark.chat:
        yield (
            f"{name}: chat=false, but conversations are put to the model through its chat template: expected chat=true"
        )
    yield from user_errors(lambda: template(benchmark))
    if judge is None:
        yield f"{name} needs a judge: choose one, such as judge=gpt_oss_120b judge.url=URL"
    elif urlsplit(judge.url).scheme == "https" and not os.environ.get(judge.key_variable, "").strip():
        yield (
            f"judge.key_variable={judge.key_variable}: there is no such environment variable, and {judge.url} will "
            f"want a key: export {judge.key_variable}=KEY, or any word where none is needed"
        )
