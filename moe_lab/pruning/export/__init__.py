"""Write a pruned checkpoint from the files of the original checkpoint. Imports no torch: a child
process asks the class of the model, unless all experts get one new width."""

from __future__ import annotations

import json
import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moe_lab.config import ExportConfig, ModelConfig, RecoveryConfig
from moe_lab.errors import UserError, user_errors
from moe_lab.models.checkpoint import Checkpoint, open_checkpoint, read_json
from moe_lab.models.config_json import (
    LAYERS_FIELD,
    check_plain_weights,
    check_trained_top_k,
    quantization,
    quantization_of,
)
from moe_lab.models.families import NOVICES, family_of
from moe_lab.models.files import fingerprint, torch_functions
from moe_lab.pruning import make_form
from moe_lab.pruning.export.card import CARD, model_card
from moe_lab.pruning.export.chunks import ExportedTensor
from moe_lab.pruning.export.config import check_numbers, describe_export
from moe_lab.pruning.export.layout import (
    Block,
    exported_tensors,
    predicting_blocks,
)
from moe_lab.pruning.export.write import (
    KEEP_LIST,
    PLAN_FILES,
    check_target,
    copy_others,
    new_folder,
    replace_tokenizer,
    write_json,
    write_weights,
)
from moe_lab.pruning.plan import Plan

CHECK = "moe_lab.pruning.export.check"
"""The module that needs torch."""
ROUTING_FIELDS = ("n_experts", "top_k", "n_group", "topk_group")
"""Facts of a layer that config.json has to state for the export."""
ZEROS = ("mxfp4",)
"""Methods in which an expert whose bytes are all zero has weights of zero."""
Call = Callable[..., Any]
"""Name of a function of `CHECK`, and its arguments -> its result."""


def export(
    source: str | os.PathLike[str],
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    shape: str = "natural",
    any_model: bool = False,
    trust_remote_code: bool = False,
    tokenizer: Path | None = None,
) -> Path:
    """Write the checkpoint in folder `source`, pruned by `plan`, to the new or empty folder
    `out`. Returns its absolute path. A new folder appears only when it is complete.

    `shape`: how MoE layers are stored: natural, masked or padded. In the shape natural, weights
    equal those of `prune` bit for bit. `out` gets the pruned weights, an edited config.json,
    plan.json, a model card, and the other files of the original. If the family's configuration
    cannot describe the layers, the export has its own model type, with code beside the weights.
    `trust_remote_code`: whether code in `source` may be run. `tokenizer`: the folder with the
    tokenizer of the export; None: `source`. UserError if `plan` does not fit the
    model or `shape`, is not aligned, or is for another model (unless `any_model`). UserError also
    if the checkpoint is damaged or has an unknown tensor in a MoE block, and if transformers could
    not load the export."""
    folder = Path(source)
    target = Path(out).expanduser().resolve()
    check_target(target)
    checkpoint = _open_source(folder, plan, shape, any_model)
    with (
        torch_functions(CHECK, source=str(source), trust_remote_code=trust_remote_code) as call,
        new_folder(target) as work,
    ):
        described = call("describe")
        shards, kind, predicting = _describe(checkpoint, described, plan, shape, work, call)
        replace_tokenizer(work, tokenizer or folder)
        size = write_weights(checkpoint, shards, work)
        card = model_card(
            plan,
            _model_name(folder),
            _card_of(folder),
            shape=shape,
            kind=kind,
            unpruned_bytes=sum(entry.size for entry in checkpoint.tensors.values()),
            written=size,
            predicting=[f"{block.prefix}experts" for block in predicting],
        )
        (work / CARD).write_text(card, encoding="utf-8")
    return target


def check_export(
    folder: Path,
    make_plan: Callable[[dict[int, dict[str, Any]]], Plan],
    shape: str | None,
    trust_remote_code: bool,
) -> None:
    """Raise UserError if the checkpoint in `folder` cannot be exported in `shape` with the numbers
    of experts and channels of a plan. Reads no weights. `make_plan`: layer -> facts (see
    `models.facts`) -> the plan; it may raise UserError. `shape` None: no export is tried."""
    with (
        torch_functions(CHECK, source=str(folder), trust_remote_code=trust_remote_code) as call,
        TemporaryDirectory() as work,
    ):
        described = call("describe")
        plan = make_plan(_by_number(described["layers"]))
        if shape is None:
            return
        checkpoint = _open_source(folder, plan, shape, any_model=True)
        _describe(checkpoint, described, plan, shape, Path(work), call)


def _describe(
    checkpoint: Checkpoint,
    described: Mapping[str, Any],
    plan: Plan,
    shape: str,
    work: Path,
    call: Call,
) -> tuple[Mapping[str, Sequence[ExportedTensor]], str, Sequence[Block]]:
    """Write all files of an export other than weights, index and card into the folder `work`, and
    check that the export can be loaded. Returns (path of a weight file of the export -> its
    tensors, a key of `card.LOADING`, the pruned MoE blocks of layers that predict further tokens).
    `described`: result of `check.describe`. `call`: as from `torch_functions`."""
    folder = checkpoint.folder
    config = read_json(folder / "config.json")
    layers = _by_number(described["layers"])
    family = family_of(config.get("text_config", config).get("model_type"))
    form = make_form(plan, shape)
    new_config, code = describe_export(config, described["fields"], form, checkpoint.tensors)
    plan.check_facts(layers, family)
    check_numbers(folder, form)
    predicting = predicting_blocks(checkpoint, family, form, next(iter(layers.values())))
    shards = exported_tensors(checkpoint, family, described["routing"], plan, form, predicting)
    copy_others(folder, work)
    for name in PLAN_FILES:  # the plan of `folder`, if that is an export
        (work / name).unlink(missing_ok=True)
    write_json(work / "config.json", new_config)
    for name, text in code.items():
        (work / name).write_text(text, encoding="utf-8")
    plan.save(work / "plan.json")
    if not plan.has_channels:  # other programs know no more than retained experts
        keep_list = {"ratio": plan.removed_share, "kept_experts": plan.retained}
        (work / KEEP_LIST).write_text(json.dumps(keep_list), encoding="utf-8")
    types_and_shapes = {
        tensor.name: (tensor.dtype, tensor.shape)
        for content in shards.values()
        for tensor in content
    }
    loaded = _by_number(
        call("loaded_layers", written=str(work), shape=shape, tensors=types_and_shapes)
    )
    for number, layer in form.items():
        expected = {**layers[number], "n_experts": len(layer.experts)}
        for field in ROUTING_FIELDS:
            if (value := loaded.get(number, {}).get(field)) != expected[field]:
                raise UserError(
                    f"export: layer {number} would be loaded with {field}={value}, expected "
                    f"{expected[field]}: state {field} in {folder / 'config.json'}"
                )
    return shards, _kind(new_config, code), predicting


def _by_number(layers: Mapping[Any, Any]) -> dict[int, Any]:
    """`layers`, whose keys a child process may have sent as text."""
    return {int(number): facts for number, facts in layers.items()}


def _open_source(folder: Path, plan: Plan, shape: str, any_model: bool) -> Checkpoint:
    """The checkpoint in the `folder` of the original model. UserError unless `plan` suits the model
    and the checkpoint can be written in this `shape`."""
    plan.check_aligned()
    checkpoint = open_checkpoint(folder)
    if not any_model:
        plan.check_origin([("model_sha256", partial(fingerprint, folder))], folder)
    check_quantised(quantization_of(checkpoint), shape, channels=plan.has_channels)
    return checkpoint


def _kind(new_config: Mapping[str, Any], code: Mapping[str, str]) -> str:
    """The key of `card.LOADING` for an export with this config.json and these files of `code`."""
    if LAYERS_FIELD in new_config:
        return "uneven"
    if NOVICES in new_config.get("text_config", new_config):
        return "constants"
    return "ported" if code else "stock"


def _card_of(folder: Path) -> str:
    """The text of the model card in `folder`."""
    card = folder / CARD
    content = card.read_bytes() if card.is_file() else b""
    encoding = "utf-16" if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig"
    # the front matter can be read in any encoding that contains ASCII
    return content.decode(encoding, errors="replace").replace("\r\n", "\n")


def _model_name(folder: Path) -> str:
    """The name of the original model: OWNER/NAME if `folder` is in the hub's cache, otherwise the
    name of `folder`."""
    resolved = folder.resolve()
    # in the cache, the path ends with models--OWNER--NAME/snapshots/COMMIT
    if resolved.parent.name == "snapshots":
        return resolved.parent.parent.name.removeprefix("models--").replace("--", "/")
    return resolved.name


# Checks of settings, before a model is read.


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
    recovery_setting = f"recovery={recovery.name}"
    if recovery.name != "none":
        if verify:
            yield (
                f"verify=true compares an export with the masked model, which {recovery_setting} "
                "changes: expected verify=false with a recovery"
            )
        if export.shape not in (None, "natural"):
            yield (
                f"export={export.shape} has a shape other than that of the model that "
                f"{recovery_setting} changes: expected export=natural with a recovery"
            )
    if export.shape is None:
        return
    yield from user_errors(check_trained_top_k, model, f"export={export.shape}")
    yield from user_errors(check_quantised, quantization(model), export.shape)
    if verify:
        yield from user_errors(check_plain_weights, model, "verify=true")
    if export.format != "safetensors":
        yield from user_errors(check_plain_weights, model, f"export.format={export.format}")


def check_uneven(export: ExportConfig, allocation: str) -> None:
    """Raise UserError if the export is a GGUF file, in which layers and experts of unequal sizes
    cannot be stored. `allocation`: name of an allocation that gives unequal sizes."""
    if export.format == "gguf" and export.shape not in (None, "masked"):
        raise UserError(
            "export.format=gguf: a GGUF file has one number of experts and one width for all "
            f"layers, and allocation={allocation} gives them different ones: expected "
            "allocation=uniform, or export=masked"
        )
