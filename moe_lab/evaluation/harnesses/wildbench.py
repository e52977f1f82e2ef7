"""WildBench v2: the model answers conversations of real users, and a judge scores the answers with checklists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import Unavailable, unknown
from moe_lab.evaluation import mirror, rubric
from moe_lab.evaluation.harness import Answer, Graded, Item, Text, check_count, graded_by_mean, replace_surrogates
from moe_lab.evaluation.judge import Judge, Verdict
from moe_lab.evaluation.sandbox.policy import Policy
from moe_lab.paths import cache

TOLERATED = 0.01
"""Share of items that may lack a score. If more do, the benchmark fails."""
EMPTY = Verdict(rubric.LOWEST, "nothing was written, which is 1 without asking")
UNFINISHED = Verdict(rubric.LOWEST, "a thought does not end, so that there is no answer, which is 1 without asking")
TOO_LONG = Verdict(
    rubric.LOWEST, "the conversation and max_new_tokens do not fit max_length, which is 1 without asking"
)


def items(benchmark: BenchmarkConfig) -> list[Item]:
    """The conversations, up to the user's last message. Nothing but an end token ends an answer.

    A conversation that is too long counts as an empty answer, as in HELM.
    """
    rows = _rows(benchmark)
    if benchmark.limit is None:
        check_count(benchmark, len(rows))
    asked = []
    for row in rows:
        messages = [{"role": message["role"], "content": message["content"]} for message in row["conversation_input"]]
        asked.append(Item(row["session_id"], (Text(messages, benchmark.max_new_tokens, skip_long=True),)))
    return asked


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """The judge's score of each answer, rescaled to [0, 1]. An empty answer scores 1 of 10 without a request.

    The judge does not see what the model thought before its answer.

    Items without a score are left out and named in the protocol. Raises Unavailable when they are more than 1 %.
    """
    for sentence in rubric.problems(benchmark, policy):
        raise Unavailable(sentence)  # permission, address and key are not part of the step: another run may have them
    assert benchmark.judge is not None
    rows = {row["session_id"]: row for row in _rows(benchmark)}
    template = rubric.template(benchmark)
    prompts = {}
    unasked = {}
    for answer in answers:
        row, text = rows[answer.item], answer.reply.text
        if text is None:
            unasked[answer.item] = UNFINISHED
        elif not text.strip():
            unasked[answer.item] = TOO_LONG if answer.reply.ended == "too_long" else EMPTY
        else:
            text = replace_surrogates(text)
            prompts[answer.item] = rubric.question(template, row["conversation_input"], text, row["checklist"])
    items = list(prompts)
    judge = Judge(benchmark.judge, cache("judge"))
    tolerated = math.floor(TOLERATED * len(answers))
    judged = judge.verdicts([prompts[item] for item in items], tolerated)
    verdicts = {**unasked, **dict(zip(items, judged, strict=True))}
    scores = {item: verdict.score for item, verdict in verdicts.items() if verdict.score is not None}
    samples = [
        answer.sample(name, rubric.rescaled(scores[answer.item]), verdicts[answer.item].reply)
        for name in benchmark.reports
        for answer in answers
        if answer.item in scores
    ]
    coverage = {
        "items": len(verdicts),
        "empty": len(unasked),
        "scored": len(scores),
        "cached": sum(verdict.cached for verdict in verdicts.values()),
        "unscored": {item: verdict.reply for item, verdict in verdicts.items() if item not in scores},
        "mean": math.fsum(scores.values()) / len(scores),
    }
    judge_prompt = prompts[items[0]] if items else None
    protocol = {**rubric.identity(benchmark), "coverage": coverage, "judge_prompt": judge_prompt}
    return graded_by_mean(samples, benchmark, protocol, tolerated)


def _rows(benchmark: BenchmarkConfig) -> list[dict[str, Any]]:
    """The rows with the benchmark's tag, or all rows if it has none. Raises UserError for a tag that no row has."""
    rows = mirror.rows(benchmark)
    tag = benchmark.parameters.get("tag")
    chosen = [row for row in rows if tag is None or row["primary_tag"] == tag]
    if not chosen:
        raise unknown(f"benchmark {benchmark.name}: parameters.tag", str(tag), {row["primary_tag"] for row in rows})
    return chosen[: benchmark.limit]
