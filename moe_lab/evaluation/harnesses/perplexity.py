"""Perplexity and bits per byte of a text, over windows that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from moe_lab.calibration.documents import BLANK_LINE
from moe_lab.calibration.sources import read_as_one_text
from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.harness import Graded, Harness, loss_result
from moe_lab.evaluation.items import Answer, Document, Item
from moe_lab.results import Sample, Scale


class Perplexity(Harness):
    """The likelihood of a text, in windows of `parameters.length` tokens. The default length is
    2048 tokens, or as many as the model can read if these are fewer."""

    metrics = ("perplexity", "bits_per_byte", "loss")
    question_parameters = ("length",)
    numeric_parameters = ("length",)
    chat = False
    least_new_tokens = 0
    reads_path = True
    counts_items = False

    def items(self, benchmark: BenchmarkConfig) -> list[Item]:
        """One item: the whole text. Rows of a mirror are joined by blank lines, as papers do with
        WikiText."""
        if benchmark.data is None:
            text = _text(self.data_files(benchmark)[0])  # the only file
        else:
            text = BLANK_LINE.join(row["text"] for row in mirror.rows(benchmark))
        length = benchmark.parameters.get("length")
        window_length = None if length is None else int(length)
        return [Item("text", (Document(text, window_length, windows=benchmark.limit),))]

    def grade(
        self, answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy
    ) -> Graded:
        """The results, with each window as a sample. All tokens of a window but the first are
        predicted.

        The loss is the mean over all predicted tokens, in nats per token. The perplexity is
        exp(loss). The bits per byte are loss / ln 2 * (tokens of the text) / (bytes of the text).
        """
        (answer,) = answers
        text = answer.prompt
        counts = [window.tokens for window in answer.reply.windows]
        nats_per_token = [-window.nats / window.tokens for window in answer.reply.windows]
        # factor from nats per token to bits per byte
        factor = answer.reply.tokens / len(text.encode("utf-8")) / math.log(2)
        samples: list[Sample] = []
        results = []
        for name, metric in benchmark.reports.items():
            losses = nats_per_token
            unit = "nats per token"
            if metric == "bits_per_byte":
                losses = [loss * factor for loss in nats_per_token]
                unit = "bits per byte"
            for number, (loss, count) in enumerate(zip(losses, counts, strict=True)):
                sample = answer.sample(name, loss, extracted="", output="")
                samples.append({**sample, "item": str(number), "units": count})
            scale: Scale = "perplexity" if metric == "perplexity" else "loss"
            results.append(loss_result(name, metric, scale, unit, losses, counts, benchmark))
        protocol = {
            "length": counts[0] + 1,  # with the first token, which is not predicted
            "predicted_tokens": sum(counts),
            "prompt": text[:200],
        }
        return Graded(results, samples, protocol)

    def check_data(self, benchmark: BenchmarkConfig) -> None:
        """Raise UserError if the file is missing or cannot be read as a text."""
        _text(self.data_files(benchmark)[0])


def _text(file: Path) -> str:
    """The file's text. Errors name the setting suite.path."""
    return read_as_one_text(file, "suite.path")


HARNESS = Perplexity()
