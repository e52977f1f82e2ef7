"""How much the results of a model change by rounding: `python -m benchmarks.rounding`.

Texts of a shipped benchmark are read by the shipped OLMoE and Qwen3-MoE in batches of other sizes,
and with another implementation of experts. Printed is the largest difference over both models of
the logits, as a share of the largest logit, of the likelihoods of rows, and how often another
token is the likeliest. `--device cuda` measures the same on a GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure import describe, parser
from moe_lab.config import ModelConfig
from moe_lab.models.load import load_model
from moe_lab.paths import resolve

MODELS = ("pocket:olmoe", "pocket:qwen3_moe")
ROWS, LENGTH = 64, 48
BATCHES = (1, 8, 64)
"""Rows in a forward pass; all differences are from the first."""


class Change(NamedTuple):
    """The largest difference of two results."""

    logits: float
    likeliest: float
    """Share of the positions at which another token is the likeliest."""
    likelihood: float


def main() -> int:
    """Measure and print."""
    options = parser("rounding", __doc__)
    options.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = options.parse_args()
    print(describe(arguments.device), flush=True)
    for dtype in ("float32", "bfloat16"):
        sizes, implementations = [], []
        for path in MODELS:
            model, tokenizer = load_model(
                ModelConfig(name="model", path=path, device=arguments.device, dtype=dtype)
            )
            ids = _ids(tokenizer).to(arguments.device)
            first, *others = (_logits(model, ids, rows) for rows in BATCHES)
            sizes += [_change(first, other, ids) for other in others]
            used = model.get_experts_implementation()[""]
            model.set_experts_implementation("eager" if used == "grouped_mm" else "grouped_mm")
            implementations.append(_change(first, _logits(model, ids, BATCHES[0]), ids))
        _print(f"{dtype}: batches of {', '.join(map(str, BATCHES))} rows", sizes)
        _print(f"{dtype}: another implementation of experts", implementations)
    return 0


def _ids(tokenizer: Any) -> torch.Tensor:
    """Token ids (ROWS, LENGTH) of the questions of a shipped benchmark, one after the other."""
    lines = Path(resolve("pocket:benchmarks/gsm8k.jsonl")).read_text("utf-8").splitlines()
    text = "\n\n".join(json.loads(line)["prompt"] for line in lines)
    tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    tokens = tokens * (ROWS * LENGTH // len(tokens) + 1)
    return torch.tensor(tokens[: ROWS * LENGTH]).view(ROWS, LENGTH)


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Logits (ROWS, LENGTH, V), of `rows` rows in a forward pass."""
    return torch.cat([model(part, use_cache=False).logits.cpu() for part in ids.split(rows)])


def _change(first: torch.Tensor, second: torch.Tensor, ids: torch.Tensor) -> Change:
    """How `second` differs from `first`, logits of `ids`."""
    tokens = ids[:, 1:, None].cpu()
    likelihoods = [
        logits[:, :-1].double().log_softmax(-1).gather(2, tokens).sum(1)
        for logits in (first, second)
    ]
    return Change(
        float((second - first).abs().max() / first.abs().max()),
        float((second.argmax(-1) != first.argmax(-1)).double().mean()),
        float(((likelihoods[1] - likelihoods[0]) / likelihoods[0]).abs().max()),
    )


def _print(what: str, changes: list[Change]) -> None:
    logits, likeliest, likelihood = map(max, zip(*changes, strict=True))
    print(
        f"{what}: logits {logits:.1e}, likeliest token changed {100 * likeliest:.1f} %, "
        f"likelihood of a row {likelihood:.1e}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
