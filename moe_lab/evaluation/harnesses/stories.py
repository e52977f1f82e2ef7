"""Stories from prompts, each graded against its checklist by rules: the shipped counterpart of WildBench."""

from __future__ import annotations

import json

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation.generation import GenSpec
from moe_lab.evaluation.harness import Graded, mean_result, prompt_hash
from moe_lab.evaluation.local_model import LocalModel
from moe_lab.evaluation.sandbox.policy import Policy
from moe_lab.evaluation.suite import check_count, data_files
from moe_lab.pocket.stories import grade
from moe_lab.results import Sample


def evaluate(subject: LocalModel, benchmark: BenchmarkConfig, policy: Policy) -> Graded:
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
    stories = subject.generate(prompts, spec)
    losses = subject.answer_losses(prompts, [row.get("reference") for row in rows], spec)
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
