"""Perplexity of a text, over windows that do not overlap, and the distance of a
pruned model from the unpruned model on this text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from moe_lab.calibration import IdentifiedText, held_out_text, plain_text, shares_and_sets
from moe_lab.calibration.documents import BLANK_LINE
from moe_lab.calibration.sources import first_document, read_as_one_text
from moe_lab.config import BenchmarkConfig
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.harness import Graded, Harness
from moe_lab.evaluation.items import Answer, Document, Item
from moe_lab.json_files import digest
from moe_lab.result_files import Result, Sample, Scale

UNITS = {
    "perplexity": "nats per token",
    "kl": "nats per token",
    "disagreement": "share of tokens",
}
"""Metric -> unit of its loss."""
CHARACTERS = 150_000
"""Default length of a held-out text."""


class Perplexity(Harness):
    """The likelihood of a text, in windows of `parameters.length` tokens. The default length is
    2048 tokens, or as many as the model can read if these are fewer. `parameters.characters` is the
    length of a held-out text, and `parameters.top` the number of log-probabilities of the unpruned
    model with which a pruned one is compared at each token."""

    metrics = tuple(UNITS)
    numeric_parameters: Mapping[str, float] = {"length": 2, "characters": 2, "top": 1}
    question_parameters = tuple(numeric_parameters)
    chat = False
    max_new_tokens = False
    reads_path = True
    counts_items = False

    def items(self, benchmark: BenchmarkConfig) -> Iterator[Item]:
        """Yield one item: the whole text. Rows of a mirror are joined by blank lines, as papers do
        with WikiText."""
        if benchmark.data is not None:
            text = BLANK_LINE.join(row["text"] for row in mirror.rows(benchmark))
        elif benchmark.held_out:
            text = held_out_text(
                benchmark.held_out, benchmark.parameters.get("characters", CHARACTERS)
            )
        else:
            text = self._text(benchmark)
        length = benchmark.parameters.get("length")
        yield Item("text", (Document(text, length, windows=benchmark.limit),))

    def grade(
        self, answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy
    ) -> Graded:
        """The results, with each window as a sample. All tokens of a window but the first are
        predicted.

        Results are means over all predicted tokens: of the loss in nats per token, of the KL
        divergence, or of disagreements. The perplexity is exp(loss).
        """
        (answer,) = answers
        windows = answer.reply.windows
        samples: list[Sample] = []
        results = []
        for name, metric in benchmark.reports.items():
            of_result: list[Sample] = []
            for number, window in enumerate(windows):
                totals = {
                    "perplexity": -window.nats,
                    "kl": window.divergence,
                    "disagreement": window.disagreements,
                }
                loss = totals[metric] / window.tokens
                sample = answer.sample(name, loss, extracted="", output="")
                of_result.append({**sample, "item": str(number), "units": window.tokens})
            results.append(_loss_result(name, metric, of_result, benchmark))
            samples += of_result
        protocol = {
            "length": windows[0].tokens + 1,  # with the first token, which is not predicted
            "prompt": answer.prompt[:200],
        }
        return Graded(results, samples, protocol)

    def data_digest(self, benchmark: BenchmarkConfig) -> str:
        """sha256 over the text or, for a held-out text, over the identity of the calibration
        set."""
        if benchmark.held_out:
            return digest(IdentifiedText.of(benchmark.held_out).identity)
        return super().data_digest(benchmark)

    def check_data(self, benchmark: BenchmarkConfig) -> None:
        """Raise UserError if the file is missing or cannot be read as a text, and if a held-out
        text would be one of conversations."""
        if benchmark.held_out:
            for _, part in shares_and_sets(benchmark.held_out):
                plain_text(first_document(part), part)
        else:
            self._text(benchmark)

    def _text(self, benchmark: BenchmarkConfig) -> str:
        """The text of the benchmark's only file. UserError if it is missing or unreadable."""
        (file,) = self.data_files(benchmark)
        return read_as_one_text(file, "suite.path")


HARNESS = Perplexity()


def _loss_result(
    name: str, metric: str, samples: Sequence[Sample], benchmark: BenchmarkConfig
) -> Result:
    """The mean loss over the windows in `samples`, weighted by their tokens ("units") or, for the
    metric "perplexity", exp of this mean.

    The standard error is the square root of the variance of the mean loss; for a perplexity it is
    multiplied by exp(mean), the derivative.
    """
    losses = [sample["outcome"] for sample in samples]
    weights = [sample["units"] or 0.0 for sample in samples]
    mean = fmean(losses, weights)
    squares = math.fsum(
        (weight * (loss - mean)) ** 2 for weight, loss in zip(weights, losses, strict=True)
    )
    score = mean
    derivative = 1.0  # of the score with respect to the mean loss
    scale: Scale = "loss"
    if metric == "perplexity":
        score = derivative = math.exp(mean)
        scale = "perplexity"
    return Result(
        benchmark=name,
        metric=metric,
        score=score,
        scale=scale,
        unit=UNITS[metric],
        stderr=math.sqrt(squares) / math.fsum(weights) * derivative if len(losses) > 1 else None,
        n=len(losses),
        expected=benchmark.expected,
    )
