"""A pruned model whose MoE layers differ in shape. Made by moe_lab; needs torch and transformers >=
5.21.

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

It has a model type of its own, so that nothing else takes it for a model of its family. Weights are
read as those of the family. transformers lets the experts implementation be chosen where the text
@use_experts_implementation stands in the file of the model class.
"""

# no annotations from __future__: those of a configuration are types
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from .ragged import RaggedExperts, replace_tensor, set_counts

# of the family: moe_lab writes these three lines
KIND = "olmoe"
Config: Any = CONFIG_MAPPING[KIND]
Model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[Config]


class PrunedConfig(Config):
    """The family's configuration; `pruned` has the shapes of the layers: see `resize`."""

    model_type = "pruned_" + KIND


class PrunedForCausalLM(Model):
    """The family's model, in which each MoE layer has the shape that the configuration says."""

    config_class = PrunedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name, block in list(self.named_modules()):
            index = next((part for part in name.split(".") if part.isdigit()), None)
            if index in config.pruned["layers"] and hasattr(
                getattr(block, "experts", None), "is_transposed"
            ):
                resize(block, **config.pruned["layers"][index])
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # transformers looks at the name of the class
        answer: bool = Model._supports_default_dynamic_cache()
        return answer


def resize(
    block: nn.Module,
    experts: int,
    width: int | None = None,
    widths: Sequence[int] | None = None,
    owners: Sequence[int] | None = None,
    constants: bool = False,
) -> None:
    """Give a MoE block other numbers of `experts` and channels, in place and without weights.
    `width`: channels of each; None: as many as the family has. `widths`: where they differ; then
    `owners` says with whose weights each is computed, and `constants` whether those of width 0 put
    out constants."""
    stacks: Any = block.experts
    count = len(next(stacks.parameters()))
    if widths is not None:
        block.experts = RaggedExperts(stacks, widths, constants, owners)
    else:
        for name, tensor in list(stacks.named_parameters()):
            shape = [experts, *tensor.shape[1:]]
            if width is not None and name == "gate_up_proj":
                shape[1] = 2 * width
            elif width is not None and name == "down_proj":
                shape[2] = width
            replace_tensor(stacks, name, tensor.new_empty(shape))
        for name in ("intermediate_dim", "intermediate_size"):
            if width is not None and name in vars(stacks):
                setattr(stacks, name, width)
    router: Any = getattr(block, "gate", None) or getattr(block, "router", None)
    for owner in (*router.modules(), block):
        for name, tensor in [
            *owner.named_parameters(recurse=False),
            *owner.named_buffers(recurse=False),
        ]:
            shape = list(tensor.shape)
            # one row of the router, or one entry of a vector, each
            shape[0 if name == "weight" else -1] = experts
            replace_tensor(owner, name, tensor.new_empty(shape))
    resized: Any = block.experts
    set_counts((block, resized, *router.modules()), count, experts)


register_checkpoint_conversion_mapping(
    PrunedConfig.model_type, get_checkpoint_conversion_mapping(KIND) or [], overwrite=True
)
