"""Put a recovery into an exported checkpoint: fine-tuned or fitted tensors, and weights that are
rounded to 4 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_lab.models.discover import linear_modules
from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.export.chunks import ExportedTensor
from moe_lab.pruning.export.write import rewrite
from moe_lab.recovery.apply import (
    TENSORS,
    FourBitMatrix,
    expert_matrices,
    load_tuned,
    rounded_experts,
    tuned_names,
)

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def write_recovered(
    folder: Path,
    out: Path,
    *,
    dtype: torch.dtype,
    modules: Sequence[str],
    tuned: Path | None,
    sentence: str,
) -> Path:
    """Write the pruned checkpoint in `folder` to the new folder `out`, with the changed weights of
    the model that `apply.recovered` returns. Returns `out`.

    dtype: the precision in which the model was evaluated; modules: parts of the model whose weights
    are rounded to NF4; tuned: output folder of the fine-tuning or fit; sentence: description of the
    training for the model card, or "".

    Rounded weights are stored as plain numbers, because transformers has no 4-bit form for stacked
    experts. A tensor is stored in the precision of the evaluation, or in that of the files if that
    is wider.
    """
    recovered = _RecoveredLayers(folder, dtype, modules, tuned)
    dtype_name = str(dtype).removeprefix("torch.")
    if modules:
        sentence += (
            f" Weights of {', '.join(sorted(modules))} were rounded to NF4 with double "
            "quantisation, and are stored as the numbers they were rounded to."
        )
    sentence += (
        f" The model was evaluated in {dtype_name}: load the folder with "
        f"dtype=torch.{dtype_name} for the same numbers."
    )
    return rewrite(folder, recovered.changed_tensors(), sentence.strip(), out)


class _RecoveredLayers:
    """Computes the changed tensors of the pruned checkpoint in `folder`, with one decoder layer in
    memory at a time. modules: parts of the model whose weights are rounded to NF4. tuned: output
    folder of a fine-tuning or fit."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, modules: Sequence[str], tuned: Path | None
    ) -> None:
        # the code in the folder is moe_lab's own, since the folder is an export
        self.streamed = StreamedModel(folder, dtype=dtype, device="cpu", trust_remote_code=True)
        self.names = self.streamed.routing.names
        self.modules = modules
        self.tuned_file = tuned and tuned / TENSORS
        # one layer is cached, as the tensors of a layer are mostly written one after another
        self.tensors_of_layer = lru_cache(maxsize=1)(self._tensors_of_layer)

    def changed_tensors(self) -> dict[str, ExportedTensor]:
        """Name in the checkpoint -> tensor to write in its place."""
        model: Any = self.streamed.model
        names = {f"{path}.weight" for path, _ in self._maps_to_round()}
        if self.tuned_file is not None:
            names |= {*tuned_names(self.tuned_file)}
        if "experts" in self.modules:
            for layer in self.streamed.moe_layers.values():
                names |= {f"{layer.name}.{name}" for name in expert_matrices(layer.experts)}
        # on the meta device, so that nothing is computed
        tensors = self.names.to_checkpoint({name: model.get_parameter(name) for name in names})
        types = {dtype: name for name, dtype in TYPES.items()}
        changed = {}
        for name, tensor in tensors.items():
            stored_dtype = TYPES[self.streamed.checkpoint.tensors[name].dtype]
            dtype = torch.promote_types(stored_dtype, self.streamed.dtype)
            content = _RecoveredTensor(self, name, dtype, tensor.numel() * dtype.itemsize)
            changed[name] = ExportedTensor(name, types[dtype], tuple(tensor.shape), (content,))
        return changed

    def _maps_to_round(self, prefix: str = "") -> Iterator[tuple[str, nn.Linear]]:
        """Path and module of each linear map to round whose path begins with `prefix`. Routed
        experts are left out, because their weights are stacks."""
        for part in self.modules:
            if part != "experts":
                for path, module in linear_modules(self.streamed.model, part):
                    if path.startswith(prefix):
                        yield path, module

    @torch.no_grad()
    def _tensors_of_layer(self, number: int) -> Mapping[str, torch.Tensor]:
        """Name in the checkpoint -> tensor, for the changed tensors of decoder layer `number`."""
        model: Any = self.streamed.model
        prefix = f"{self.streamed.layers_path}.{number}."
        tensors: dict[str, torch.Tensor] = {}  # by name in the model
        with self.streamed.layer(number):
            if self.tuned_file is not None:
                names = load_tuned(model, self.tuned_file, prefix)
                tensors = {name: model.get_parameter(name) for name in names}
            if "experts" in self.modules and number in self.streamed.moe_layers:
                layer = self.streamed.moe_layers[number]
                for name, tensor in rounded_experts(layer.experts).items():
                    tensors[f"{layer.name}.{name}"] = tensor
            for path, module in self._maps_to_round(prefix):
                tensors[f"{path}.weight"] = FourBitMatrix(module.weight)()
            # copies, since tensors may be views of weights that are freed with the layer
            renamed = self.names.to_checkpoint(tensors)
            return {name: tensor.clone() for name, tensor in renamed.items()}


@dataclass(frozen=True)
class _RecoveredTensor:
    """The numbers of a changed tensor, computed when they are read."""

    layers: _RecoveredLayers
    name: str
    dtype: torch.dtype
    size: int

    def read(self, folder: Path) -> Iterator[memoryview]:
        """The bytes, in one block."""
        number = self.layers.streamed.layer_of[self.name]
        tensor = self.layers.tensors_of_layer(number)[self.name].to(self.dtype).contiguous()
        yield tensor.view(torch.uint8).numpy().data
