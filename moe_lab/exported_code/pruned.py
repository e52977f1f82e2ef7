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

    def __post_init__(self, per_layer_config: Any = None, **fields: Any) -> None:
        # it says for other programs what `pruned` says; transformers would refuse to read a field
        # of the whole model that differs between layers
        super().__post_init__(**fields)


class PrunedForCausalLM(Model):
    """`Model`, the model class of the family, with MoE layers of the shapes in `config.pruned`."""

    config_class = PrunedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for path, module in list(self.named_modules()):
            layer = next((part for part in path.split(".") if part.isdigit()), None)
            # only experts modules have `is_transposed`, which @use_experts_implementation sets
            if layer in config.pruned["layers"] and hasattr(
                getattr(module, "experts", None), "is_transposed"
            ):
                resize(module, **config.pruned["layers"][layer])
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # transformers decides by the name of the class, so `Model`, the family's class, is asked
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
    """Change the number of experts and of channels in a MoE block, in place. The new tensors are
    uninitialised.

    `experts`: new number of experts, E'. `width`: new number of channels of each expert; None: not
    changed. `widths` (E',): number of channels of each expert, if the numbers differ: the experts
    become `RaggedExperts`, with the arguments `owners` and `constants`.
    """
    # each parameter of this module has the weights of all experts: (E, ...)
    stacks: Any = block.experts
    count_before = len(next(stacks.parameters()))
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
    for module in (*router.modules(), block):
        for name, tensor in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            shape = list(tensor.shape)
            # an expert is a row in the router's weight, and an entry of the last dimension in all
            # other tensors, such as a bias
            shape[0 if name == "weight" else -1] = experts
            replace_tensor(module, name, tensor.new_empty(shape))
    resized: Any = block.experts
    set_counts((block, resized, *router.modules()), count_before, experts)


register_checkpoint_conversion_mapping(
    PrunedConfig.model_type, get_checkpoint_conversion_mapping(KIND) or [], overwrite=True
)
