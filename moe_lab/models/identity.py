"""Which checkpoint a model in memory is: its folder, what tells it from other models of its shape,
its tokenizer."""

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
from moe_lab.models.checkpoint import Checkpoint, open_checkpoint, read_json
from moe_lab.models.config_json import quantization_method
from moe_lab.models.discover import routed_layers
from moe_lab.models.families import Family
from moe_lab.models.files import fingerprint, in_cache
from moe_lab.models.load import load_tokenizer, quiet
from moe_lab.models.transformers_private import NameMapping

SAMPLE = 1 << 24
"""About how many weights of a model are hashed, at equal distances: all of a small one, and of a
large one as many as take a tenth of a second."""


def model_digests(model: Any) -> Iterator[tuple[str, Callable[[], str]]]:
    """(name, function that computes it) of what tells `model` from others of its shape, in the
    order in which they count. Hashing a large checkpoint for the first time takes minutes.

    weights_DTYPES: sha256 of a sample of its weights as they are now, in the types that they have;
    not of a model with offloaded weights. model_sha256: the `fingerprint` of the checkpoint it was
    loaded from, as studies write it into plans; not of a model that was built in memory, or that
    has other weights than its checkpoint.
    """
    weights = list(model.state_dict().values())
    if not any(tensor.is_meta for tensor in weights):
        dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights})
        yield f"weights_{'_'.join(dtypes)}", partial(_digest, weights)
    folder = checkpoint_folder(model)
    if folder is not None and _has_weights_of(model, folder):
        yield "model_sha256", partial(fingerprint, folder)


def checkpoint_folder(model: Any) -> Path | None:
    """The folder of the checkpoint that `model` was loaded from; None if there is none. Of a model
    that was loaded by its name on the hub, that of the default revision in the cache, as a model
    does not know its revision."""
    path = getattr(model, "name_or_path", None)
    if not path:
        return None
    return Path(path) if Path(path).is_dir() else in_cache(path, None)


def _digest(tensors: list[torch.Tensor]) -> str:
    step = 1 + sum(tensor.numel() for tensor in tensors) // SAMPLE
    content = hashlib.sha256()
    for tensor in tensors:
        sample = tensor.detach().reshape(-1)[::step].cpu()
        content.update(str(tuple(tensor.shape)).encode())
        content.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def _has_weights_of(model: Any, folder: Path) -> bool:
    """Whether each weight matrix of `model`, those of each expert included, has the shape and the
    first row that it has in the files of a folder. Those of quantised checkpoints are not
    compared."""
    try:
        checkpoint = open_checkpoint(folder)
    except UserError:  # such as for weights in another format, which have no fingerprint
        return False
    if quantization_method(read_json(folder / "config.json")) is not None:
        return True
    with ExitStack() as files:
        slices = checkpoint.slices(checkpoint.tensors, files)
        for name, weights in _as_stored(model, checkpoint):
            if weights is None:
                return False
            if weights.is_meta or not weights.dim():
                continue
            if checkpoint.tensors[name].shape != tuple(weights.shape):
                return False
            row = (*[slice(None)] * (weights.dim() - 2), slice(1))
            if not torch.equal(slices[name][row].to(weights.dtype), weights[row].cpu()):
                return False
    return True


def _as_stored(model: Any, checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(name of a tensor of a checkpoint, the tensor of `model` that it is read into, as a view in
    its layout). None for a tensor of an expert that `model` does not have."""
    state = model.state_dict()
    for name, stored_name in NameMapping(model, checkpoint.tensors).copied.items():
        if name in state:
            yield stored_name, state[name]
    layers = {layer.index: layer for layer in routed_layers(model)}
    for stored_name, part in Family().block_tensors(checkpoint.tensors).items():
        if part.expert is None or part.axes is None:
            continue
        layer = layers.get(part.layer)
        if layer is None or part.expert >= layer.n_experts:
            yield stored_name, None
            continue
        weights = layer.projections(part.expert)[part.axes.roles[0]]
        yield stored_name, weights if part.axes.channels == -2 else weights.t()


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Raise UserError unless `tokenizer` has the vocabulary and added tokens of the model's own
    one. Does nothing where that is not to be had, such as for a model that was built in memory."""
    folder = checkpoint_folder(model)
    if folder is None:
        return
    try:
        with quiet():
            expected = _vocabulary(load_tokenizer(folder, ModelConfig("model", str(folder))))
    except UserError:
        return
    given = _vocabulary(tokenizer)
    different = [
        token for token in expected.keys() | given.keys() if expected.get(token) != given.get(token)
    ]
    if different:
        token = min(different)
        raise UserError(
            f"tokenizer={tokenizer.name_or_path!r} is of another model: {len(different)} tokens "
            f"differ from those of {folder}, such as {token!r}, which is "
            f"{_described(given, token)} and expected to be {_described(expected, token)}: give "
            "the model's own tokenizer, or any_tokenizer=True"
        )


def _vocabulary(tokenizer: Any) -> dict[str, tuple[int, bool]]:
    """Token -> its id, and whether it was added, so that it is looked for before a text is
    split."""
    added = tokenizer.added_tokens_decoder
    return {token: (number, number in added) for token, number in tokenizer.get_vocab().items()}


def _described(vocabulary: dict[str, tuple[int, bool]], token: str) -> str:
    if token not in vocabulary:
        return "missing"
    number, is_added = vocabulary[token]
    return f"id {number}, added" if is_added else f"id {number}"
