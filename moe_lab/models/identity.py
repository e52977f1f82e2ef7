"""Identify a model in memory: the folder of its checkpoint, digests of its weights, its
tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.checkpoint import Checkpoint, open_checkpoint
from moe_lab.models.config_json import quantization_of
from moe_lab.models.discover import routed_layers, whole
from moe_lab.models.families import Family
from moe_lab.models.files import cached_folder, fingerprint
from moe_lab.models.load import load_tokenizer, quiet_transformers
from moe_lab.models.transformers_private import NameMapping

SAMPLE = 1 << 24
"""About how many weights of a model are hashed, at equal distances. This takes a tenth of a
second."""


def model_digests(model: Any) -> Iterator[tuple[str, Callable[[], str]]]:
    """Up to two digests of `model`, each as (name, function that computes the digest).

    weights_DTYPES  sha256 of a sample of the current weights. DTYPES: their dtypes, such as
                    bfloat16. Left out if some weights are offloaded.
    model_sha256    `fingerprint` of the checkpoint that the model was loaded from. Left out if
                    there is no checkpoint, or the current weights differ from it. The first
                    computation takes minutes for a large checkpoint.
    """
    weights = list(model.state_dict().values())
    if not any(tensor.is_meta for tensor in weights):
        dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights})
        yield f"weights_{'_'.join(dtypes)}", partial(_digest, weights)
    folder = checkpoint_folder(model)
    if folder is not None and _has_weights_of(model, folder):
        yield "model_sha256", partial(fingerprint, folder)


def checkpoint_folder(model: Any) -> Path | None:
    """The folder of the checkpoint that `model` was loaded from. For a model that was loaded by its
    hub id, the default revision is assumed."""
    path = getattr(model, "name_or_path", None)
    if not path:
        return None
    return Path(path) if Path(path).is_dir() else cached_folder(path, None)


def _digest(tensors: list[torch.Tensor]) -> str:
    """sha256 (hex) of the shapes of `tensors` and of about SAMPLE of their numbers."""
    step = 1 + sum(tensor.numel() for tensor in tensors) // SAMPLE
    content = hashlib.sha256()
    for tensor in tensors:
        sample = whole(tensor.detach()).reshape(-1)[::step].cpu()
        content.update(str(tuple(tensor.shape)).encode())
        content.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def _has_weights_of(model: Any, folder: Path) -> bool:
    """Whether `model` has the weights in the files of `folder`. Only the shape and the first row of
    each matrix are compared. True for any quantised checkpoint, because its numbers cannot be
    compared."""
    try:
        checkpoint = open_checkpoint(folder)
    except UserError:
        return False
    if quantization_of(checkpoint) is not None:
        return True
    with ExitStack() as files:
        slices = checkpoint.slices(checkpoint.tensors, files)
        for name, weights in _stored_layout(model, checkpoint):
            if weights is None:  # `model` lacks an expert of the checkpoint
                return False
            # offloaded weights and single numbers are not compared
            if weights.is_meta or not weights.dim():
                continue
            if checkpoint.tensors[name].shape != tuple(weights.shape):
                return False
            # the index [..., :1, :] for matrices and stacks of matrices, [:1] for vectors
            first_row = (*[slice(None)] * (weights.dim() - 2), slice(1))
            actual = whole(weights)[first_row].cpu()
            if not torch.equal(slices[name][first_row].to(weights.dtype), actual):
                return False
    return True


def _stored_layout(model: Any, checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(name in the checkpoint, tensor of `model` in the checkpoint's layout). (name, None) for a
    tensor of an expert that `model` lacks."""
    state = model.state_dict()
    # tensors of the same layout in both
    for name, stored_name in NameMapping(model, checkpoint.tensors).copied.items():
        if name in state:
            yield stored_name, state[name]
    layers = {layer.index: layer for layer in routed_layers(model)}
    for stored_name, part in Family().expert_tensors(checkpoint.tensors).items():
        if part.expert is None or part.axes is None:
            continue
        layer = layers.get(part.layer)
        if layer is None or part.expert >= layer.n_experts:
            yield stored_name, None
            continue
        # A tensor of one expert holds a single projection. Channels are rows in `projections`, but
        # may be columns in the checkpoint.
        weights = layer.projections(part.expert)[part.axes.roles[0]]
        yield stored_name, weights if part.axes.channels == -2 else weights.t()


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Raise UserError unless `tokenizer` has the same vocabulary and added tokens as the tokenizer
    of the model's checkpoint, if there is one."""
    folder = checkpoint_folder(model)
    if folder is None:
        return
    try:
        with quiet_transformers():
            expected = _vocabulary(
                load_tokenizer(folder, ModelConfig(name="model", path=str(folder)))
            )
    except UserError:
        return
    actual = _vocabulary(tokenizer)
    mismatches = [
        token
        for token in expected.keys() | actual.keys()
        if expected.get(token) != actual.get(token)
    ]
    if mismatches:
        token = min(mismatches)
        raise UserError(
            f"tokenizer={tokenizer.name_or_path!r} is of another model: {len(mismatches)} tokens "
            f"differ from those of {folder}, such as {token!r}, which is "
            f"{actual.get(token, 'missing')} and expected to be {expected.get(token, 'missing')}: "
            "give the model's own tokenizer, or any_tokenizer=True"
        )


def _vocabulary(tokenizer: Any) -> dict[str, str]:
    """Token -> its id, and whether it is an added token, such as "id 7, added"."""
    added = tokenizer.added_tokens_decoder  # id -> token
    return {
        token: f"id {number}, added" if number in added else f"id {number}"
        for token, number in tokenizer.get_vocab().items()
    }
