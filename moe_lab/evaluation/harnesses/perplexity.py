"""Perplexity and bits per byte of a text, over windows that do not overlap."""

from __future__ import annotations

import math

from moe_lab.calibration.documents import BLANK_LINE
from moe_lab.calibration.sources import whole_text
from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import mirror
from moe_lab.evaluation.generation import LanguageModel
from moe_lab.evaluation.harness import Graded, loss_result, prompt_hash
from moe_lab.evaluation.sandbox.policy import Policy
from moe_lab.evaluation.suite import data_files
from moe_lab.results import Sample

_USUAL_LENGTH = 2048


def evaluate(model: LanguageModel, benchmark: BenchmarkConfig, policy: Policy) -> Graded:
    """Loss in nats, weighted by tokens; perplexity = exp(loss); bits per byte = loss * tokens / bytes / ln 2.

    The text is cut into windows of `parameters.length` tokens (default 2048, or what the model can read), the last of
    which may be shorter. Every token of a window but the first is predicted.
    """
    place, text = _text(benchmark)
    tokens = model.tokenizer(text, verbose=False).input_ids
    longest = model.max_length
    length = int(benchmark.parameters.get("length", min(_USUAL_LENGTH, longest or _USUAL_LENGTH)))
    if length < 2 or (longest is not None and length > longest):
        expected = f"2 to {longest or 'any number of'} tokens"
        raise UserError(f"benchmark {benchmark.name}: length={length}: expected {expected}")
    cuts = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    windows = [window for window in cuts if len(window) > 1][: benchmark.limit]
    if not windows:
        raise UserError(f"{place} has {len(tokens)} tokens: perplexity needs at least two")
    counts = [len(window) - 1 for window in windows]
    likelihoods = model.log_likelihoods(windows, [1] * len(windows), benchmark.batch_size)
    losses = [-total / count for (total, _), count in zip(likelihoods, counts, strict=True)]
    for number, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of window {number} of {place} is not finite")
    samples = [
        Sample(
            benchmark=name,
            item=str(number),
            outcome=loss,
            prompt_hash=prompt_hash(str(window)),
            output="",
            extracted="",
        )
        for name in benchmark.reports
        for number, (loss, window) in enumerate(zip(losses, windows, strict=True))
    ]
    tokens_per_byte = len(tokens) / len(text.encode("utf-8"))
    results = [
        loss_result(name, metric, losses, counts, benchmark, tokens_per_byte)
        for name, metric in benchmark.reports.items()
    ]
    protocol = {"length": length, "predicted_tokens": sum(counts), "prompt": text[:200]}
    return Graded(results, samples, protocol)


def _text(benchmark: BenchmarkConfig) -> tuple[str, str]:
    """The source of the text, and the text.

    Rows of a mirror and documents of a JSON file are joined by blank lines, as papers do with WikiText and as
    `calibration.joined` does.
    """
    if benchmark.data is None:
        file = data_files(benchmark)[-1]
        return str(file), whole_text(file, "suite.path")
    return str(mirror.folder(benchmark)), BLANK_LINE.join(row["text"] for row in mirror.rows(benchmark))
