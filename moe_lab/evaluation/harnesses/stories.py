"""Stories from prompts, each graded against its checklist by rules: the shipped counterpart of WildBench."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, unknown
from moe_lab.evaluation.generation import GenSpec
from moe_lab.evaluation.harness import Graded, mean_result, prompt_hash
from moe_lab.evaluation.local_model import LocalModel
from moe_lab.evaluation.sandbox.policy import Policy
from moe_lab.evaluation.suite import check_count, data_files
from moe_lab.results import Sample


def evaluate(model: LocalModel, benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Score of a story: the share of its rules that it keeps. The data file has lines {"id", "prompt", "checklist"}; a
    "reference", a story as it follows the prompt, is what the loss on answers is of."""
    file = data_files(benchmark)[-1]
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    check_count(benchmark, len(rows))
    rows = rows[: benchmark.limit]
    for row in rows:
        if not {"id", "prompt", "checklist"} <= set(row) or not row["checklist"]:
            raise UserError(f"{file}: every line needs an id, a prompt and a checklist of at least one rule")
    spec = GenSpec(benchmark.max_new_tokens, batch_size=benchmark.batch_size)
    prompts = [row["prompt"] for row in rows]
    stories = model.generate(prompts, spec)
    losses = model.answer_losses(prompts, [row.get("reference") for row in rows], spec)
    samples = []
    for name in benchmark.reports:
        for row, story, loss in zip(rows, stories, losses, strict=True):
            kept = grade(story, row["checklist"])
            samples.append(
                Sample(
                    benchmark=name,
                    item=str(row["id"]),
                    outcome=sum(kept) / len(kept),
                    prompt_hash=prompt_hash(row["prompt"]),
                    output=story,
                    extracted=json.dumps(kept),
                    answer_loss=loss,
                )
            )
    results = [mean_result(name, metric, samples, benchmark) for name, metric in benchmark.reports.items()]
    return Graded(results, samples, {"prompt": rows[0]["prompt"]})


# Rules of a checklist.


def sentences(story: str) -> list[str]:
    """The sentences of a story, each with the mark that ends it; a last one that was cut off is not a sentence."""
    return [sentence.strip() for sentence in re.findall(r"[^.!?]+[.!?]", story)]


def _mentions(story: str, text: str) -> bool:
    """Whether the text occurs as whole words."""
    return re.search(rf"(?<!\w){re.escape(text)}(?!\w)", story) is not None


def _opens_with(story: str, text: str) -> bool:
    parts = sentences(story)
    return bool(parts) and _mentions(parts[0], text)


def _ends_with(story: str, text: str) -> bool:
    return story.strip().endswith(text)


def _enough_sentences(story: str, least: int) -> bool:
    return len(sentences(story)) >= least


def _no_repeats(story: str) -> bool:
    parts = sentences(story)
    return bool(parts) and len(set(parts)) == len(parts)


RULES: dict[str, Callable[..., bool]] = {
    "mentions": _mentions,
    "opens_with": _opens_with,
    "ends_with": _ends_with,
    "sentences": _enough_sentences,
    "no_repeats": _no_repeats,
}


def grade(story: str, checklist: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Which rules the story keeps, in the checklist's order; the score of a story is their share.

    Each entry is {"rule": name, ...arguments}:
    mentions(text)    the text occurs as whole words;
    opens_with(text)  it does so in the first sentence;
    ends_with(text)   the story ends with exactly this text;
    sentences(least)  there are at least so many complete sentences;
    no_repeats()      there is a sentence, and none occurs twice.
    Raises UserError for a rule that does not exist or whose arguments do not fit.
    """
    kept = []
    for entry in checklist:
        arguments = {name: value for name, value in entry.items() if name != "rule"}
        name = str(entry.get("rule"))
        if name not in RULES:
            raise unknown("checklist.rule", name, RULES)
        try:
            kept.append(RULES[name](story, **arguments))
        except TypeError as error:
            raise UserError(f"checklist.rule={name} does not take {arguments}: {error}") from error
    return kept
