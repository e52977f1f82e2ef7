"""Models of published size: their configurations as on the hub, random weights, as many layers as there is room for."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from benchmarks.random_model import uneven

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "olmoe_7b": {
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "pad_token_id": 1,
        "eos_token_id": 50279,
    },
    "qwen3_30b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
}


def published_model(name: str, layers: int | None, device: str, *, vocabulary: int | None = None) -> PreTrainedModel:
    """The model `name` of CONFIGURATIONS with its first `layers` layers, all if None: frozen, in eval mode.

    `vocabulary` cuts its words, so that a head made for many layers does not hide what few of them cost. In fp32 with
    eager experts on the CPU; elsewhere in bf16, made there, with the experts function of loaded models.
    """
    settings = dict(CONFIGURATIONS[name])
    kind = settings.pop("model_type")
    if layers is not None:
        settings["num_hidden_layers"] = layers
    if vocabulary is not None:
        settings |= {"vocab_size": vocabulary, "eos_token_id": 0}
    config = AutoConfig.for_model(kind, **settings)
    if device == "cpu":
        return uneven(config, "eager", torch.float32, device)
    return uneven(config, "grouped_mm", torch.bfloat16, device)
