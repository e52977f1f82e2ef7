"""One calibration pass: read every batch once, keep the sums, survive being killed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from moe_lab.errors import UserError
from moe_lab.statistics.file import header
from moe_lab.statistics.forward import ForwardTap
from moe_lab.statistics.observe import Observer, Reading, Tap, forward
from moe_lab.statistics.snapshots import Snapshots
from moe_lab.statistics.sums import Layers, Statistics, check_finite

CHECKPOINT = "checkpoint.safetensors"
Batch = tuple[torch.Tensor, torch.Tensor]
"""(input_ids, valid), (B, S) int64 and (B, S) bool: the tokens, and which of them count."""


def gather(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    out: Path | None,
    fingerprint: Mapping[str, Any],
    groups: int,
    first_row: int = 0,
    progress: Callable[[int, int], None] | None = None,
    snapshots: Snapshots | None = None,
) -> Statistics:
    """All forward statistics of `model` over `batches`.

    Every `groups` batches the sums are saved in the folder `out`, unless it is None; a pass that finds sums there, of
    the same fingerprint and the same batches, goes on from them, to the very numbers of a pass that was never stopped.
    Anything else it finds is another pass's and is overwritten. `first_row` is the number of the first row within the
    whole calibration set, if `batches` are a part of it whose statistics will be merged. `progress` is called with
    (batches done, of how many). `snapshots` are told the sums after every batch they look at.

    UserError for no batches, NaN or infinite sums (naming layer and expert), and models that cannot be observed.
    """
    return read_all(
        model,
        ForwardTap,
        batches,
        kind="forward",
        fingerprint=fingerprint,
        out=out,
        groups=groups,
        first_row=first_row,
        progress=progress,
        snapshots=snapshots,
    )


def read_all(
    model: PreTrainedModel,
    tap: type[Tap],
    batches: Sequence[Batch],
    *,
    kind: str,
    fingerprint: Mapping[str, Any],
    out: Path | None,
    groups: int,
    first_row: int = 0,
    progress: Callable[[int, int], None] | None = None,
    reading: Reading = forward,
    snapshots: Snapshots | None = None,
) -> Statistics:
    """What `tap` sums over `batches`, each read by `reading`, with checkpoints; `kind` goes into the header, the rest
    is as in `gather`."""
    about = description(batches, kind, fingerprint, first_row)
    checkpoint = None if out is None else out / CHECKPOINT
    done, start = _resume(checkpoint, about)
    with Observer(model, tap, start, reading) as observer:
        for number, (ids, valid) in enumerate(batches[done:], done + 1):
            observer.read(ids, valid)
            if snapshots is not None and number in snapshots.points:  # before the sums to go on from, so none is missed
                snapshots.save(observer.layers(), about, number)
            if number % groups == 0 or number == len(batches):
                layers = observer.layers()
                check_finite(layers, f"batches {done + 1} to {number}")
                done = number
                if checkpoint is not None:
                    Statistics(layers, {**about, "done": done}).save(checkpoint)
            if progress is not None:
                progress(number, len(batches))
    return Statistics(observer.layers(), about)


def description(
    batches: Sequence[Batch], kind: str, fingerprint: Mapping[str, Any], first_row: int = 0
) -> dict[str, Any]:
    """The header of sums of that kind over `batches`. UserError when there are none."""
    if not batches:
        raise UserError("calibration gives no batches, expected at least one")
    rows = [first_row, first_row + sum(len(ids) for ids, _ in batches)]
    return {"kind": kind, "fingerprint": dict(fingerprint), "rows": [rows], "batches": digest(batches)}


def digest(batches: Sequence[Batch]) -> str:
    """sha256 of the token ids, the masks, and how they are cut into batches."""
    content = hashlib.sha256()
    for tensors in batches:
        for tensor in tensors:
            content.update(str((tuple(tensor.shape), tensor.dtype)).encode())
            content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest()


def _resume(checkpoint: Path | None, about: Mapping[str, Any]) -> tuple[int, Layers | None]:
    """(batches done, their sums) from a checkpoint of this very pass; (0, None) when there is none."""
    if checkpoint is None or not checkpoint.exists():
        return 0, None
    try:
        found = header(checkpoint)
        done = found.pop("done", 0)
        return (done, Statistics.load(checkpoint).layers) if found == _as_json(about) else (0, None)
    except UserError:  # damaged: what it held is computed again
        return 0, None


def _as_json(about: Mapping[str, Any]) -> Any:
    """`about` as it comes back from a file."""
    return json.loads(json.dumps(about))
