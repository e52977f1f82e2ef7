"""WildBench v2: the model answers conversations of real users, and a judge scores the answers with
checklists.

A score of 1 (very poor) to 10 (perfect) is reported as (score - 1) / 9.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, unknown_name_error, user_errors
from moe_lab.evaluation import Policy, judge, mirror
from moe_lab.evaluation.harness import Graded, Harness, graded_by_mean
from moe_lab.evaluation.items import Answer, Item, Text, replace_surrogates
from moe_lab.paths import cache_folder

UNSCORED_AT_MOST = 0.01
"""Largest share of items without a score."""
PLACEHOLDERS = ("{$history}", "{$user_query}", "{$model_output}", "{$checklist}")
"""Placeholders of a template. All but the history are required."""
_DEFAULT_TEMPLATE = Path(__file__).parents[1] / "wildbench_template.md"
_PLACEHOLDER = re.compile(r"\{\$\w+\}")
_EMPTY = judge.Verdict(judge.LOWEST, "the answer is empty: 1 without a request")
"""The column `ended` of samples.parquet has the reason why an answer is empty."""


class WildBench(Harness):
    """Conversations up to the user's last message, which the model answers."""

    metrics = ("score",)
    question_parameters = ("tag",)
    other_parameters = ("template",)
    data = True
    chat = True
    judged = True

    def items(self, benchmark: BenchmarkConfig) -> Iterator[Item]:
        """Yield an item for each conversation. A conversation that is too long for the model gets
        an empty answer, as in HELM."""
        for row in _rows(benchmark):
            messages = [
                {"role": message["role"], "content": message["content"]}
                for message in row["conversation_input"]
            ]
            request = Text(messages, benchmark.max_new_tokens, skip_long=True)
            yield Item(row["session_id"], (request,))

    def grade(
        self, answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy
    ) -> Graded:
        """Let a judge score each answer from 1 to 10. The outcome is the score, rescaled to [0, 1].
        An empty answer gets the score 1.

        An item without a score is left out of the results. Raises Unavailable if more than 1 % of
        the items have no score.
        """
        assert benchmark.judge is not None
        rows = {row["session_id"]: row for row in _rows(benchmark)}
        judge_template = template(benchmark)
        prompts = []  # "" for an empty answer
        for answer in answers:
            row = rows[answer.item]
            text = replace_surrogates(answer.reply.text or "")
            prompt = question(judge_template, row["conversation_input"], text, row["checklist"])
            prompts.append(prompt if text.strip() else "")
        sent_prompts = [*filter(None, prompts)]
        max_unscored = math.floor(UNSCORED_AT_MOST * len(answers))
        replies = iter(
            judge.verdicts(benchmark.judge, cache_folder("judge"), sent_prompts, max_unscored)
        )
        scored_answers = []
        scores = []
        unscored = {}
        for answer, prompt in zip(answers, prompts, strict=True):
            verdict = next(replies) if prompt else _EMPTY
            if verdict.score is None:
                unscored[answer.item] = verdict.reply
            else:
                scored_answers.append(answer)
                outcome = (verdict.score - judge.LOWEST) / (judge.HIGHEST - judge.LOWEST)
                scores.append((outcome, verdict.reply))
        verdicts = {"score": scores}
        protocol = {"unscored": unscored}
        return graded_by_mean(scored_answers, benchmark, verdicts, protocol, max_unscored)

    def identity(self, benchmark: BenchmarkConfig) -> dict[str, Any]:
        """Do as `Harness.identity`, and add the hash of the judge's template."""
        digest = hashlib.sha256(template(benchmark).encode()).hexdigest()
        return {**super().identity(benchmark), "template": digest}

    def further_requirements(self, benchmark: BenchmarkConfig, policy: Policy) -> Iterator[str]:
        """Check the judge and its template."""
        yield from judge.missing_requirements(benchmark, policy)
        yield from user_errors(template, benchmark)


HARNESS = WildBench()


def _rows(benchmark: BenchmarkConfig) -> list[mirror.DataRow]:
    """The rows with the tag parameters.tag (not set: all rows), at most benchmark.limit."""
    rows = mirror.rows(benchmark)
    tag = benchmark.parameters.get("tag")
    selected_rows = [row for row in rows if tag is None or row["primary_tag"] == tag]
    if not selected_rows:
        known_tags = {row["primary_tag"] for row in rows}
        raise unknown_name_error(
            f"benchmark {benchmark.name}: parameters.tag", str(tag), known_tags
        )
    return selected_rows[: benchmark.limit]


def template(benchmark: BenchmarkConfig) -> str:
    """The text of the file parameters.template, by default moe_lab's template. UserError if the
    file cannot be read, or if the text has an unknown placeholder or lacks a placeholder."""
    path = benchmark.parameters.get("template")
    file = Path(path).expanduser() if path else _DEFAULT_TEMPLATE
    setting = f"benchmark {benchmark.name}: parameters.template={file}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{setting} cannot be read: {error}") from None
    # the first placeholder is optional
    placeholders = {PLACEHOLDERS[0], *_PLACEHOLDER.findall(text)}
    if placeholders != set(PLACEHOLDERS):
        raise UserError(
            f"{setting} has the placeholders {', '.join(sorted(placeholders))}: expected "
            f"{', '.join(PLACEHOLDERS)}, of which only the first may be missing"
        )
    return text


def question(
    template: str, conversation: Sequence[Mapping[str, Any]], answer: str, checklist: Sequence[str]
) -> str:
    """The prompt of the judge: the template with its placeholders filled in. Inserted texts are not
    searched for placeholders."""
    *history, last_message = conversation
    turns = [f"{message['role'].upper()}: {message['content']}" for message in history]
    values = {
        "{$history}": "\n\n".join(turns),
        "{$user_query}": last_message["content"],
        "{$model_output}": answer,
        "{$checklist}": "\n".join(f"- {item}" for item in checklist),
    }
    return _PLACEHOLDER.sub(lambda match: values[match[0]], template)
