"""Run models larger than the memory: one decoder layer at a time holds its weights, which are read
from safetensors. While it runs, the weights of the next layer are read and copied to the device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_lab.config import ModelConfig
from moe_lab.config.pruning import DEVICE_MAPS
from moe_lab.models.checkpoint import open_checkpoint
from moe_lab.models.config_json import check_dequantised, experts_implementation
from moe_lab.models.discover import MoELayer, moe_layers, routed_layers
from moe_lab.models.experts import check_first_layer, output_of, replace_output, run, to_device
from moe_lab.models.families import prediction_prefixes
from moe_lab.models.files import local_folder
from moe_lab.models.load import (
    check_finite,
    check_shapes,
    checked_names,
    load_tokenizer,
    precision,
    quiet_transformers,
    resolve_device,
    set_arithmetic,
    set_top_k,
    skeleton,
)
from moe_lab.models.stored_weights import StoredRouting, StoredWeights
from moe_lab.models.transformers_private import compute_buffers, load_tensors

_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")
Weights = dict[str, torch.Tensor]
"""Name -> tensor, as they are in the checkpoint, on the device."""
OUTSIDE = -1
"""Layer number of the tensors outside decoder layers: embeddings, the last norm, the vocabulary
head."""


def open_streamed(settings: ModelConfig) -> tuple[StreamedModel, Any]:
    """(model that is read layer by layer, tokenizer) for `settings`. A device map as model.device
    means the first GPU. UserError as from `load_model` and `check_dequantised`."""
    folder = local_folder(settings)
    check_dequantised(settings)
    tokenizer = load_tokenizer(folder, settings)
    if settings.device in DEVICE_MAPS:
        settings = replace(settings, device="auto")
    set_arithmetic(settings.threads)
    streamed = StreamedModel(
        folder,
        dtype=precision(settings, folder),
        device=resolve_device(settings),
        trust_remote_code=settings.trust_remote_code,
        top_k=settings.top_k,
    )
    moe_layers(streamed.model)  # raises for models that cannot be scored
    return streamed, tokenizer


class StreamedModel:
    """A causal language model whose decoder layers have weights only while they are needed, and
    otherwise are on the meta device. All other modules always have their weights."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: str,
        trust_remote_code: bool = False,
        top_k: int | None = None,
    ) -> None:
        """Open the checkpoint in `folder`, check it, and load all weights outside decoder layers.
        `top_k`: number of experts per token; None: the number in config.json. UserError as from
        `checked_names` and `layer`."""
        self.weights = StoredWeights(open_checkpoint(folder))
        self.checkpoint = self.weights.stored
        self.device = device
        self.dtype = dtype
        self.model = (
            skeleton(folder, trust_remote_code=trust_remote_code, dtype=dtype)
            .eval()
            .requires_grad_(False)
        )
        set_top_k(self.model, top_k)
        check_first_layer(self.model)
        names = checked_names(self.weights, self.model)
        self.routing = StoredRouting(self.model, self.weights.plain, names)
        self.moe_layers = {layer.index: layer for layer in routed_layers(self.model)}
        self.layers_path = next(iter(self.moe_layers.values())).stack
        """Module path of the list of decoder layers, such as model.layers."""
        self.layers: Any = self.model.get_submodule(self.layers_path)
        self.layer_of = dict(self._tensor_layers())
        """Name of a weight in the checkpoint -> number of its decoder layer, or OUTSIDE."""
        self._reader = ThreadPoolExecutor(1)
        self._pending: dict[int, Future[Weights]] = {}
        """Layer number or OUTSIDE -> future of `_read`."""
        self.model.set_experts_implementation(experts_implementation(device))
        compute_buffers(self.model, root=self.model, device=device)
        self._copy_stream = None if device == "cpu" else torch.Stream(device=device)
        """The stream on which weights are copied to the device while it computes."""
        self._request(OUTSIDE)
        self._fill(OUTSIDE, self.model)

    def _tensor_layers(self) -> Iterator[tuple[str, int]]:
        """(name, number of the decoder layer or OUTSIDE) for each weight in the checkpoint that the
        model has."""
        names = self.weights.plain.tensors
        prefixes = prediction_prefixes(names)
        for name in names:
            match = _NUMBER.search(name)  # the first number in the name is that of the layer
            number = int(match[1]) if match else OUTSIDE
            if not name.startswith(prefixes) and number < len(self.layers):
                yield name, number

    def _weight_names(self, number: int) -> list[str]:
        return [name for name, layer in self.layer_of.items() if layer == number]

    @contextmanager
    def layer(self, number: int, *, next_number: int = -1) -> Iterator[nn.Module]:
        """A context in which decoder layer `number` has its weights. Meanwhile, the weights of
        layer `next_number` (-1: none) are read from the disk and copied to the device. UserError
        for a weight that is missing, of the wrong shape, NaN or infinite."""
        module: nn.Module = self.layers[number]
        self._request(*(n for n in (number, next_number) if 0 <= n < len(self.layers)))
        compute_buffers(self.model, module, self.device)
        self._fill(number, module)
        try:
            yield module
        finally:
            module.to("meta")

    def loaded_moe_layers(self) -> Iterator[MoELayer]:
        """The layers with routed experts, in order. Each layer has its weights until the iterator
        advances to the next layer."""
        numbers = sorted(self.moe_layers)
        for number, next_number in zip(numbers, [*numbers[1:], -1], strict=True):
            with self.layer(number, next_number=next_number):
                yield self.moe_layers[number]

    def run_layer(
        self, number: int, ids: torch.Tensor, valid: torch.Tensor, state: torch.Tensor | None
    ) -> torch.Tensor:
        """The output (B, S, H) of layer `number`. The layer must have its weights. `ids` and
        `valid` (B, S): token ids and attention mask of a batch. `state` (B, S, H): the output of
        the layer before; None for layer 0, which gets the embeddings of `ids`."""
        with ExitStack() as undo:
            # The layer needs attention masks and positions, so the model is run up to this layer.
            # The layers before return `state` and compute nothing.
            if state is not None:
                for lower_layer in self.layers[:number]:
                    replace_output(lower_layer, state, undo)
            return output_of(self.layers[number], partial(run, self.model, ids, valid))

    def logits(self, ids: torch.Tensor, valid: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The logits (B, S, V) that follow from `state` (B, S, H), the output of the last decoder
        layer. `ids` and `valid` (B, S): token ids and attention mask of the batch."""
        with ExitStack() as undo:
            # all layers return `state`, so only the last norm and the vocabulary head are computed
            for layer in self.layers:
                replace_output(layer, state, undo)
            logits: torch.Tensor = self.model(
                to_device(ids, state.device),
                attention_mask=to_device(valid.long(), state.device),
                use_cache=False,
            ).logits
            return logits

    def _fill(self, number: int, module: nn.Module) -> None:
        """Load the weights of `number`, a layer or OUTSIDE. `module`: the layer, or for OUTSIDE the
        whole model."""
        tensors = self._pending.pop(number).result()
        if self._copy_stream:
            computing = torch.accelerator.current_stream(self.device)
            for tensor in tensors.values():
                # the memory of a freed tensor is used again only after computing
                tensor.record_stream(computing)
        # `tensors` is emptied, so that tensors are freed when they are converted
        plain_tensors = self.weights.tensors(self._weight_names(number), tensors.pop, self.dtype)
        with quiet_transformers():
            mismatched = load_tensors(
                self.model, plain_tensors, dtype=self.dtype, device=self.device
            )
        check_shapes(self.checkpoint.folder, mismatched)
        is_outside = number == OUTSIDE
        if is_outside:
            # like from_pretrained: if both of two tied weights are in the files and they differ,
            # they are not tied
            missing = {name for name, tensor in self.model.state_dict().items() if tensor.is_meta}
            self.model.tie_weights(missing_keys=missing, recompute_mapping=False)
        if number in self.moe_layers:
            self.routing.restore(self.moe_layers[number])
        module.requires_grad_(False)
        # for OUTSIDE, all tensors; those of decoder layers are on the meta device, and skipped
        check_finite(self.model, prefix="" if is_outside else f"{self.layers_path}.{number}.")

    def _request(self, *numbers: int) -> None:
        """Start to read the tensors of `numbers`, layers or OUTSIDE, unless they are being read.
        Those of other layers are dropped."""
        self._pending = {
            number: self._pending.get(number) or self._reader.submit(self._read, number)
            for number in numbers
        }

    def _read(self, number: int) -> Weights:
        """The stored tensors of `number`, a layer or OUTSIDE, on the device."""
        copy_stream = self._copy_stream
        with ExitStack() as stack:
            layouts = [self.weights.layouts[name] for name in self._weight_names(number)]
            names = [stored for layout in layouts for stored in layout.parts.values()]
            slices = self.checkpoint.slices(names, stack)
            stack.enter_context(copy_stream or nullcontext())
            tensors = {
                name: self._read_tensor(name, stored[...]).to(self.device, non_blocking=True)
                for name, stored in slices.items()
            }
        if copy_stream:
            copy_stream.synchronize()  # in the thread that reads
        return tensors

    def _read_tensor(self, name: str, mapped: torch.Tensor) -> torch.Tensor:
        """The tensor `name` of the checkpoint, in aligned memory, from which a GPU can copy.
        `mapped`: the tensor in a mapped file, whose bytes may still be on the disk."""
        entry = self.checkpoint.tensors[name]
        with (self.checkpoint.folder / entry.shard).open("rb") as file:
            file.seek(entry.start)
            try:
                tensor = torch.empty_like(mapped, pin_memory=self._copy_stream is not None)
            except RuntimeError:  # no memory can be pinned; the copy waits then
                tensor = torch.empty_like(mapped)
            file.readinto(tensor.flatten().view(torch.uint8).numpy().data)
            return tensor
