"""Reference implementation of multiple choice and perplexity: explicit prompts, one unpadded
forward pass per answer.

benchmarks/evaluation.py compares the adapters with it. It imports neither lm-eval nor moe_lab.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    """A question with its answers."""

    contexts: list[str]
    """Text before each answer."""
    endings: list[str]
    """Scored text of each answer."""
    label: int
    """Index of the right answer."""
    lengths: list[int]
    """Characters of each answer, by which acc_norm divides."""


def _after(context: str, answers: list[str], label: int) -> Choice:
    """A choice whose answers all follow `context` and a space."""
    return Choice(
        [context] * len(answers), [f" {a}" for a in answers], label, [len(a) for a in answers]
    )


def _arc(row: Row) -> Choice:
    return _after(
        f"Question: {row['question']}\nAnswer:",
        list(row["choices"]["text"]),
        list(row["choices"]["label"]).index(row["answerKey"]),
    )


def _boolq(row: Row) -> Choice:
    return _after(
        f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:", ["no", "yes"], row["label"]
    )


def _hellaswag(row: Row) -> Choice:
    def cleaned(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return _after(
        cleaned(context), [cleaned(ending) for ending in row["endings"]], int(row["label"])
    )


def _mathqa(row: Row) -> Choice:
    answers = re.split(r" ?, ?(?=[b-e] \) )", row["options"])
    texts = [answer.partition(" ) ")[2].rstrip(" ,") for answer in answers]
    return _after(f"Question: {row['Problem']}\nAnswer:", texts, "abcde".index(row["correct"]))


def _mmlu(row: Row) -> Choice:
    head = (
        "The following are multiple choice questions (with answers) about "
        f"{row['subject'].replace('_', ' ')}.\n\n"
    )
    lines = [f"{letter}. {text}" for letter, text in zip("ABCD", row["choices"], strict=True)]
    return _after(
        "\n".join([head + row["question"].strip(), *lines, "Answer:"]), list("ABCD"), row["answer"]
    )


def _openbookqa(row: Row) -> Choice:
    label = list(row["choices"]["label"]).index(row["answerKey"].strip())
    return _after(row["question_stem"], list(row["choices"]["text"]), label)


def _piqa(row: Row) -> Choice:
    return _after(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"])


def _rte(row: Row) -> Choice:
    question = f"{row['sentence1']}\nQuestion: {row['sentence2']} True or False?\nAnswer:"
    return _after(question, ["True", "False"], row["label"])


def _winogrande(row: Row) -> Choice:
    """The end of the sentence is scored after each of the names; the names are not scored."""
    before, _, end = row["sentence"].partition("_")
    names = [row["option1"], row["option2"]]
    ending = f" {end.strip()}"
    return Choice(
        [before + name for name in names],
        [ending] * 2,
        int(row["answer"]) - 1,
        [len(n) for n in names],
    )


CHOICES: Mapping[str, Callable[[Row], Choice]] = {
    "arc_challenge": _arc,
    "arc_easy": _arc,
    "boolq": _boolq,
    "hellaswag": _hellaswag,
    "mathqa": _mathqa,
    "mmlu": _mmlu,
    "openbookqa": _openbookqa,
    "piqa": _piqa,
    "rte": _rte,
    "winogrande": _winogrande,
}
"""Benchmark -> function that makes a `Choice` of a row of its data."""


def likelihoods(model: Any, tokenizer: Any, choice: Choice) -> list[float]:
    """Log-likelihood of each answer; answers of one token after the same text share a forward
    pass."""
    log_likelihoods: list[float] = []
    read: list[int] = []  # tokens of the last forward pass
    logits = torch.empty(0)
    for context, ending in zip(choice.contexts, choice.endings, strict=True):
        # a space at the end of the context belongs to the answer
        start = len(tokenizer(context.rstrip()).input_ids)
        ids = tokenizer(context + ending).input_ids
        if ids[:-1] != read:
            read = ids[:-1]
            with torch.inference_mode():
                logits = model(torch.tensor([read])).logits[0]
        log_probabilities = logits[start - 1 :].double().log_softmax(-1)
        log_likelihoods.append(
            sum(
                float(log_probabilities[position - start, ids[position]])
                for position in range(start, len(ids))
            )
        )
    return log_likelihoods


def outcome(scores: list[float], choice: Choice, metric: str) -> float:
    """1 if the right answer has the highest score (acc), or the highest score per character
    (acc_norm), else 0; of equal scores the first counts as highest."""
    lengths = choice.lengths if metric == "acc_norm" else [1] * len(scores)
    shares = [score / length for score, length in zip(scores, lengths, strict=True)]
    return float(shares.index(max(shares)) == choice.label)


def perplexity(
    model: Any, tokenizer: Any, text: str, length: int, windows: int | None = None
) -> float:
    """exp of the mean loss per token, over the first `windows` windows (all if None) of `length`
    tokens; the first token of a window has no loss."""
    tokens = tokenizer(text, verbose=False).input_ids
    starts = list(range(0, len(tokens), length))[:windows]
    total = 0.0
    count = 0
    for window in (tokens[start : start + length] for start in starts):
        with torch.inference_mode():
            logits = model(torch.tensor([window])).logits[0].double().log_softmax(-1)
        losses = [-float(logits[k - 1, window[k]]) for k in range(1, len(window))]
        total = total + math.fsum(losses)
        count = count + len(losses)
    return math.exp(total / count)
