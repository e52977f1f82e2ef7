"""Fine-tune a pruned model on an instruction set, and leave its changed tensors behind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from moe_lab.calibration.answers import answer_batches
from moe_lab.config import CalibrationConfig, RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.pruning.plan import Plan
from moe_lab.recovery.adapters import Adapted, attach, merge, trainable
from moe_lab.recovery.apply import TENSORS, pruned
from moe_lab.recovery.nf4 import check_unquantized
from moe_lab.recovery.settings import check
from moe_lab.recovery.train import Row, train

REPORT = "finetune.json"


def finetune(
    model: Any,
    tokenizer: Any,
    plan: Plan | None,
    settings: RecoveryConfig,
    text: CalibrationConfig,
    *,
    out: Path,
    partial: Path,
    fingerprint: Mapping[str, Any],
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Train DoRA adapters on the MoE blocks of `model`, pruned by `plan` (None: as it is), on the
    answers of `text`, merge them, and write into the folder `out`:

    tuned.safetensors  the merged tensors that differ from the pruned model's, by their names in its state dict
    finetune.json      loss of each step, trained parameters, answer tokens, steps, seconds

    AdamW without weight decay, as the paper; the end of an assistant's turn is learnt with its answer. Progress is
    kept in `partial`, and what another run of the same `fingerprint` left there is gone on from, exactly. `model`
    stays as it is; returned is the fine-tuned one. UserError for settings that cannot work, a set without answers, a
    quantised model, a loss that is not finite.
    """
    check(settings)
    check_unquantized(model)
    rows = [row for batch in answer_batches(text, tokenizer, header=True) for row in zip(*batch, strict=True)]
    rows = [row for row in rows if bool(row[2][1:].any())]  # what is left has nothing to learn from
    if not rows:
        raise UserError(f"calibration.path={text.path}: no row holds an answer after its first token: expected answers")
    tuned = pruned(model, plan)
    started = time.monotonic()
    layers = attach(tuned, settings, seed)
    report = _counts(layers, rows)
    losses = train(
        tuned,
        layers,
        rows,
        settings,
        rows_at_once=text.batch_size,
        partial=partial,
        fingerprint=fingerprint,
        seed=seed,
        progress=progress,
    )
    changed = merge(tuned, layers)
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, out / TENSORS)
    report |= {"steps": len(losses), "seconds": round(time.monotonic() - started, 1), "loss": losses}
    (out / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    return tuned


def _counts(layers: list[Adapted], rows: list[Row]) -> dict[str, Any]:
    """How much is trained, on how much."""
    parts = trainable(layers)
    return {
        "trained_parameters": {part: sum(p.numel() for p in parts[part].values()) for part in parts},
        "rows": len(rows),
        "answer_tokens": sum(int(answers[1:].sum()) for _, _, answers in rows),
    }
