"""The random model that timings are taken on: it exists at any size, and its experts are not used evenly."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moe_lab.models.discover import moe_layers


def random_model(n_experts: int, arguments: argparse.Namespace) -> PreTrainedModel:
    """A random model in OLMoE architecture, eager and frozen, its router widened.

    `arguments`: hidden, width (channels per expert), layers and top_k.
    """
    config = AutoConfig.for_model(
        "olmoe",
        vocab_size=1024,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        num_experts=n_experts,
        num_experts_per_tok=arguments.top_k,
        pad_token_id=0,
        eos_token_id=1,
    )
    return uneven(config, "eager", torch.float32, "cpu")


def uneven(config: Any, experts: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A random model of a configuration, frozen, with routers that tell experts apart, which fresh ones hardly do.

    `experts` is the name of transformers' experts function.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=experts)
    for layer in moe_layers(model):
        for part in layer.routing:
            torch.nn.init.normal_(part.tensor, std=layer.hidden**-0.5)
    model.eval().requires_grad_(False)
    return model
