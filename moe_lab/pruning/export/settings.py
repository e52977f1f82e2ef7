"""Which settings of an export cannot be combined, with each other, the model and the recovery. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from moe_lab.config import ExportConfig, ModelConfig, RecoveryConfig
from moe_lab.errors import need, user_errors
from moe_lab.models.checkpoint import open_checkpoint
from moe_lab.models.config_json import check_plain_weights, check_trained_top_k, quantization
from moe_lab.paths import local
from moe_lab.pruning.export.layout import NO_BIAS, can_bar, check_stored_apart
from moe_lab.pruning.export.quantised import check_quantised


def wrong(
    export: ExportConfig, model: ModelConfig, recovery: RecoveryConfig, granularity: str | None, *, verify: bool
) -> Iterator[str]:
    """A sentence for each reason why plans of `granularity` for the model cannot be exported with these settings.

    What needs the model's files is checked only if they are on this machine.
    """
    shape, stored, recovers = f"export={export.shape}", f"export.format={export.format}", f"recovery={recovery.name}"
    is_recovered, is_compressed = recovery.name != "none", export.format == "compressed_tensors"
    conflicts = {
        f"verify=true compares an export with the masked model, which {recovers} changes: expected verify=false with "
        "a recovery": verify and is_recovered,
        f"verify=true compares with the masked model, and {stored} rounds its weights: expected verify=false": verify
        and is_compressed,
        f"{stored} stores weights in a way of its own, and {recovers} stores some in 4 bits: expected a recovery with "
        "bits=16": export.format != "safetensors" and recovery.bits == 4,
        f"{shape} has a shape other than that of the model that {recovers} changes: expected export=natural with a "
        "recovery": is_recovered and export.shape not in (None, "natural"),
    }
    yield from (sentence for sentence, conflict in conflicts.items() if conflict)
    if is_compressed:
        yield from user_errors(need, "compressed-tensors", "compression", stored)
    if export.shape is None:
        return
    yield from user_errors(check_trained_top_k, model, shape)
    yield from user_errors(check_quantised, quantization(model), export.shape)
    for setting in ["verify=true"] * verify + [stored] * (export.format != "safetensors"):
        yield from user_errors(check_plain_weights, model, setting)
    folder = local(model.path)
    if (folder / "config.json").is_file():
        names = open_checkpoint(folder).tensors
        if is_compressed:
            yield from user_errors(check_stored_apart, names, folder)
        if export.shape == "masked" and granularity == "expert" and not can_bar(names):
            yield f"export=masked: the routers in {folder} have {NO_BIAS}"
