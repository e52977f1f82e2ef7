"""Apply a recovery to a copy of a model: prune it, load its fine-tuned tensors, quantise it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from moe_lab.exported_code.ragged import replace_tensor
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune, share_copy
from moe_lab.recovery.quantize import quantize

TENSORS = "tuned.safetensors"


def recovered(model: Any, plan: Plan | None, *, bits: int, modules: Sequence[str], tuned: Path | None) -> Any:
    """Apply a recovery to `model`: prune by `plan`, load tuned tensors, quantise, in this order; returns a new model.

    `plan` None prunes nothing; `tuned` is the output folder of a fine-tuning, or None; with `bits` 4 the weights of
    `modules` are stored as NF4. `model` is not changed; tensors that stay the same are shared with it. The result can
    be used like any model: forward, generate, evaluation.
    """
    result = pruned(model, plan)
    if tuned is not None:
        load_tuned(result, tuned / TENSORS)
    if bits == 4:
        quantize(result, modules)
    return result


def pruned(model: Any, plan: Plan | None) -> Any:
    """A copy of `model`, pruned by `plan` unless that is None. Tensors that stay the same are shared."""
    return share_copy(model) if plan is None else prune(model, plan)


def load_tuned(model: nn.Module, file: Path, within: str = "") -> list[str]:
    """Replace the parameters of `model` by the tensors of the same names in `file`, and return these names. Only
    tensors whose names begin with `within` are read."""
    with safe_open(file, framework="pt") as tensors:
        names = [name for name in tensors.keys() if name.startswith(within)]  # noqa: SIM118
        for name in names:
            before = model.get_parameter(name)
            # a copy, because rows in the mapped file may start where matrix products round differently
            tensor = tensors.get_tensor(name).to(before.device, before.dtype, copy=True)
            owner, _, attribute = name.rpartition(".")
            replace_tensor(model.get_submodule(owner), attribute, nn.Parameter(tensor, requires_grad=False))
    return names
