"""Check that the settings of an export suit each other, the model and the recovery. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from moe_lab.config import ExportConfig, ModelConfig, RecoveryConfig
from moe_lab.errors import UserError, user_errors
from moe_lab.models.config_json import check_plain_weights, check_trained_top_k, quantization

ZEROS = ("mxfp4",)
"""Methods in which an expert whose bytes are all zero has weights of zero."""


def check_quantised(method: str | None, shape: str, channels: bool = False) -> None:
    """Raise UserError if a checkpoint quantised by `method` (None: not quantised) cannot be
    exported in `shape`, a value of export.shape. `channels`: whether the plan removes channels."""
    if method is None:
        return
    if channels:
        raise UserError(
            f"export={shape}: channels cannot be removed from experts stored as {method}, since "
            "several weights share a scale: expected a plan of whole experts, or a checkpoint in "
            "bfloat16 or float32"
        )
    if shape == "masked" and method not in ZEROS:
        raise UserError(
            "export=masked fills dropped experts with zeros, which is not possible in weights "
            f"stored as {method}: expected export=natural, or a checkpoint in bfloat16 or float32"
        )


def export_conflicts(
    export: ExportConfig,
    model: ModelConfig,
    recovery: RecoveryConfig,
    *,
    verify: bool,
) -> Iterator[str]:
    """A sentence for each reason why plans for the model cannot be exported with these settings."""
    shape_setting = f"export={export.shape}"
    format_setting = f"export.format={export.format}"
    recovery_setting = f"recovery={recovery.name}"
    is_recovered = recovery.name != "none"
    # sentence -> whether the settings have this conflict
    conflicts = {
        f"verify=true compares an export with the masked model, which {recovery_setting} changes: "
        "expected verify=false with a recovery": verify and is_recovered,
        f"{format_setting} stores weights in a way of its own, and {recovery_setting} stores some "
        "in 4 bits: expected a recovery with bits=16": (
            export.format != "safetensors" and recovery.bits == 4
        ),
        f"{shape_setting} has a shape other than that of the model that {recovery_setting} "
        "changes: expected export=natural with a recovery": (
            is_recovered and export.shape not in (None, "natural")
        ),
    }
    yield from (sentence for sentence, conflict in conflicts.items() if conflict)
    if export.shape is None:
        return
    yield from user_errors(check_trained_top_k, model, shape_setting)
    yield from user_errors(check_quantised, quantization(model), export.shape)
    # settings that need plain weights; a list times False is empty
    for setting in ["verify=true"] * verify + [format_setting] * (export.format != "safetensors"):
        yield from user_errors(check_plain_weights, model, setting)


def check_uneven(export: ExportConfig, allocation: str) -> None:
    """Raise UserError if the export is a GGUF file, in which layers and experts of unequal sizes
    cannot be stored. `allocation`: name of an allocation that gives unequal sizes."""
    if export.format == "gguf" and export.shape not in (None, "masked"):
        raise UserError(
            "export.format=gguf: a GGUF file has one number of experts and one width for all "
            f"layers, and allocation={allocation} gives them different ones: expected "
            "allocation=uniform, or export=masked"
        )
