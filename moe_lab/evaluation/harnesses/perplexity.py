"""Perplexity and bits per byte of a text, over windows that do not overlap."""

from __future__ import annotations

from collections.abc import Sequence

from moe_lab.calibration.documents import BLANK_LINE
from moe_lab.calibration.sources import whole_text
from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.harness import Answer, Document, Graded, Item, data_files, loss_result
from moe_lab.results import Sample


def items(benchmark: BenchmarkConfig) -> list[Item]:
    """The whole text, in windows of `parameters.length` tokens, the last of which may be shorter.

    By default they have 2048 tokens, or what the model can read.
    """
    length = benchmark.parameters.get("length")
    if benchmark.data is None:
        text = whole_text(data_files(benchmark)[-1], "suite.path")
    else:  # joined as papers do with WikiText, and as `calibration.joined` does
        text = BLANK_LINE.join(row["text"] for row in mirror.rows(benchmark))
    return [Item("text", (Document(text, None if length is None else int(length), windows=benchmark.limit),))]


def grade(answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Loss in nats, weighted by tokens; perplexity = exp(loss); bits per byte = loss * tokens / bytes / ln 2.

    Every token of a window but the first is predicted. Each window is a sample.
    """
    (answer,) = answers
    windows, text = answer.reply.windows, answer.prompt
    counts = [window.tokens for window in windows]
    losses = [-window.nats / window.tokens for window in windows]
    sample = answer.sample("", 0.0, "", output="")
    samples = [
        Sample(**{**sample, "benchmark": name, "item": str(number), "outcome": loss, "units": count})
        for name in benchmark.reports
        for number, (loss, count) in enumerate(zip(losses, counts, strict=True))
    ]
    tokens_per_byte = answer.reply.tokens / len(text.encode("utf-8"))
    results = [
        loss_result(name, metric, losses, counts, benchmark, tokens_per_byte)
        for name, metric in benchmark.reports.items()
    ]
    protocol = {"length": counts[0] + 1, "predicted_tokens": sum(counts), "prompt": text[:200]}
    return Graded(results, samples, protocol)
