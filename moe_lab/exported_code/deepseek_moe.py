"""DeepSeekMoE, model_type deepseek, for transformers >= 5.21, which cannot import the code
published with the weights.

Attention, norms and dense layers are those of Llama; a MoE layer adds shared experts to routed ones
(Dai et al. 2024, equations 9 to 11). Experts go through the registry of transformers, which lets
their implementation be chosen where the text @use_experts_implementation stands in the file of the
model class. Needs nothing but torch and transformers: this file lies beside the weights of pruned
checkpoints, which load with trust_remote_code=True.
"""

# no annotations from __future__: the types of a configuration are checked where they are types, not
# where they are text
from typing import Any, ClassVar, Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn.functional import linear
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    initialization,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts, DeepseekV2MLP


@strict
class DeepseekConfig(LlamaConfig):
    """The fields of the published config.json, with the defaults of the published code."""

    model_type = "deepseek"
    attribute_map: ClassVar = {"num_experts": "n_routed_experts"}

    vocab_size: int = 102400
    bos_token_id: int | None = 100000
    eos_token_id: int | list[int] | None = 100001
    moe_intermediate_size: int = 1407
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_layer_freq: int = 1
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False
    scoring_func: Literal["softmax"] = "softmax"


class DeepseekGate(nn.Module):
    """Router: softmax over all routed experts, in the dtype of the model. The gates of a
    token are its `top_k` highest probabilities, normalised to the sum 1 if the setting
    `norm_topk_prob` is true."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.n_routed_experts
        self.hidden_dim = config.hidden_size
        self.normalised = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim))

    def forward(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(logits (T, E), gates (T, K), numbers of the chosen experts (T, K)) for the T tokens in
        `hidden_states` (..., H)."""
        logits = linear(hidden_states.view(-1, self.hidden_dim), self.weight)
        gates, experts = torch.topk(logits.softmax(dim=-1), self.top_k, dim=-1, sorted=False)
        if self.normalised and self.top_k > 1:
            gates = gates / (gates.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, gates, experts


class DeepseekMoE(nn.Module):
    """MoE block: the gated sum of the outputs of a token's routed experts, plus the output of the
    shared experts. All shared experts together are one wide MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = DeepseekGate(config)
        self.experts = DeepseekV2Experts(config)
        self.shared_experts = None
        if config.n_shared_experts is not None:
            width = config.n_shared_experts * config.moe_intermediate_size
            self.shared_experts = DeepseekV2MLP(config, intermediate_size=width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The output (B, S, H) of the block for `hidden_states` (B, S, H)."""
        _, gates, experts = self.gate(hidden_states)
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        output: torch.Tensor = self.experts(tokens, experts, gates).view_as(hidden_states)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)
        return output


class DeepseekPreTrainedModel(LlamaPreTrainedModel):
    """Base class of the decoder and of the language model."""

    # transformers looks for its decorator in the source of a class and remembers the answer on the
    # class. That of Llama, which has no experts, would be inherited.
    _can_set_experts_implementation_cached_value = True

    config_class = DeepseekConfig
    config: DeepseekConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DeepseekGate | DeepseekV2Experts):
            for weight in module.parameters(recurse=False):
                initialization.normal_(weight, mean=0.0, std=self.config.initializer_range)


class DeepseekModel(DeepseekPreTrainedModel, LlamaModel):
    """Llama's decoder, with MoE blocks in some layers."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.layers):
            if (
                config.n_routed_experts is not None
                and number >= config.first_k_dense_replace
                and number % config.moe_layer_freq == 0
            ):
                layer.mlp = DeepseekMoE(config)
        self.post_init()


class DeepseekForCausalLM(DeepseekPreTrainedModel, LlamaForCausalLM):
    """Language model: the decoder with a vocabulary head."""

    def __init__(self, config: DeepseekConfig) -> None:
        # not the constructor of LlamaForCausalLM, which would also build a decoder of Llama
        super(LlamaForCausalLM, self).__init__(config)
        self.model = DeepseekModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


# the files have single experts, under the names of the next generation of the family
register_checkpoint_conversion_mapping(
    DeepseekConfig.model_type,
    get_checkpoint_conversion_mapping("deepseek_v2") or [],
    overwrite=True,
)
