"""Put a recovery into an exported checkpoint: fine-tuned or fitted tensors, and rounded weights.
Rounded weights are stored in NF4 if transformers can load them so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_lab.models.discover import linear_modules
from moe_lab.models.streamed import OUTSIDE, StreamedModel
from moe_lab.pruning.cost import NF4_BLOCK
from moe_lab.pruning.export.rewrite import Changes
from moe_lab.recovery.apply import (
    TENSORS,
    FourBitMatrix,
    load_tuned,
    nf4_tensors,
    rounded_experts,
)


def recovery_changes(
    folder: Path,
    *,
    dtype: torch.dtype,
    bits: int,
    modules: Sequence[str],
    tuned: Path | None,
    sentence: str,
) -> Changes:
    """The changes that turn the pruned checkpoint in `folder` into the model that `apply.recovered`
    returns.

    dtype: the dtype of changed weights, in which the model was evaluated; bits: 4 to round the
    weights of `modules` to NF4, any other number to leave them; tuned: output folder of the
    fine-tuning or fit; sentence: description of the training for the model card, or "".

    Rounded linear maps that bitsandbytes can use on every machine are stored in NF4. All other
    rounded weights are stored as plain numbers, also those of routed experts, because transformers
    has no 4-bit form for stacked experts.
    """
    recovered = _RecoveredTensors(folder, dtype, modules if bits == 4 else (), tuned)
    dtype_name = str(dtype).removeprefix("torch.")
    if bits == 4:
        sentence += (
            f" Weights of {', '.join(sorted(modules))} were rounded to NF4 with double "
            f"quantisation; {len(recovered.nf4_names)} linear maps are stored in 4 bits, as "
            "bitsandbytes does, the others as the numbers they were rounded to."
        )
    sentence += (
        f" The changed weights are stored in {dtype_name}: load the folder with "
        f"dtype=torch.{dtype_name} for these numbers."
    )
    return Changes(
        recovered.change, sentence.strip(), recovered.config() if recovered.nf4_names else {}
    )


class _RecoveredTensors:
    """Computes the changed tensors of the pruned checkpoint in `folder`, with one decoder layer in
    memory at a time. modules: parts of the model whose weights are rounded to NF4. tuned: output
    folder of a fine-tuning or fit."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, modules: Sequence[str], tuned: Path | None
    ) -> None:
        # the code in the folder is moe_lab's own, since the folder is an export
        self.streamed = StreamedModel(folder, dtype=dtype, device="cpu", trust_remote_code=True)
        self.names = self.streamed.routing.names
        self.dtype = dtype
        self.modules = modules
        self.tuned = tuned
        # one layer is cached, as the tensors of a layer are mostly written one after another
        self.cached_tensors = lru_cache(maxsize=1)(self._tensors_of_layer)
        self.nf4_names: dict[str, str] = {}
        """Path of each linear map that is stored in 4 bits -> name of its weight in the
        checkpoint."""
        for path, module in self._maps_to_round():
            names = list(self.names.to_checkpoint({f"{path}.weight": module.weight}))
            # On the CPU, bitsandbytes 0.50 reads rows that end inside a block wrongly. Where it
            # uses AVX512 for bfloat16, it fails unless the number of rows is a multiple of 32.
            has_readable_rows = (
                module.in_features % NF4_BLOCK == 0 and module.out_features % 32 == 0
            )
            # a weight that is part of a tensor, or in several tensors, cannot be stored by itself
            if has_readable_rows and len(names) == 1:
                self.nf4_names[path] = names[0]

    def change(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Name -> tensor to write in place of the checkpoint's `tensor` called `name`."""
        number = self.streamed.layer_of.get(name, OUTSIDE)
        return self.cached_tensors(number).get(name, {name: tensor})

    def config(self) -> dict[str, Any]:
        """{"quantization_config": value} for config.json."""
        from transformers import BitsAndBytesConfig

        skipped = {
            path
            for path, module in self.streamed.model.named_modules()
            if type(module) is nn.Linear and path not in self.nf4_names
        }
        # a class that builds more than the text model, such as a vision tower, has the names of the
        # files
        skipped |= {
            name.removesuffix(".weight")
            for name in self.names.copied.values()
            if len(self.streamed.checkpoint.tensors[name].shape) == 2
            and name not in self.nf4_names.values()
        }
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self.dtype,
            llm_int8_skip_modules=sorted(skipped),
        )
        return {"quantization_config": quantization.to_dict()}

    def _maps_to_round(self, prefix: str = "") -> Iterator[tuple[str, nn.Linear]]:
        """Path and module of each linear map to round whose path begins with `prefix`. Routed
        experts are left out, because their weights are stacks."""
        for part in self.modules:
            if part != "experts":
                for path, module in linear_modules(self.streamed.model, part):
                    if path.startswith(prefix):
                        yield path, module

    @torch.no_grad()
    def _tensors_of_layer(self, number: int) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """For the changed tensors of decoder layer `number`: name of a tensor in the checkpoint ->
        tensors to write instead of this tensor, by name."""
        if number == OUTSIDE:
            return {}
        model: Any = self.streamed.model
        prefix = f"{self.streamed.layers_path}.{number}."
        # changed tensors that are not stored in 4 bits, by name in the model
        new_tensors: dict[str, torch.Tensor] = {}
        nf4_by_name = {}  # tensors in 4 bits, by name of the replaced tensor in the checkpoint
        with self.streamed.layer(number):
            if self.tuned is not None:
                names = load_tuned(model, self.tuned / TENSORS, prefix)
                new_tensors = {name: model.get_parameter(name) for name in names}
            if "experts" in self.modules and number in self.streamed.moe_layers:
                layer = self.streamed.moe_layers[number]
                for name, tensor in rounded_experts(layer.experts).items():
                    new_tensors[f"{layer.name}.{name}"] = tensor
            for path, module in self._maps_to_round(prefix):
                if path in self.nf4_names:
                    name = self.nf4_names[path]
                    nf4_by_name[name] = {
                        f"{name}{suffix}": tensor
                        for suffix, tensor in nf4_tensors(module.weight).items()
                    }
                    # a fine-tuned weight is written only in 4 bits
                    new_tensors.pop(f"{path}.weight", None)
                else:
                    new_tensors[f"{path}.weight"] = FourBitMatrix(module.weight)()
            renamed = self.names.to_checkpoint(new_tensors)
            # copies, since tensors may be views of weights that are freed with the layer
            return {name: {name: tensor.clone()} for name, tensor in renamed.items()} | nf4_by_name
