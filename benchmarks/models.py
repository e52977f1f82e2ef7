"""Models with random weights, of any size or of published configurations, and checkpoints in the
layout of the hub.

torch is imported late, so that programs that do not need it are measured without it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_lab.models.checkpoint import INDEX

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

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
    "glm_4_7": {
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "first_k_dense_replace": 3,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 160,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
}
QWEN3_30B = CONFIGURATIONS["qwen3_30b"]
ON_DISK = {"architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "dtype": "bfloat16"}
"""Entries of a checkpoint's config.json in addition to QWEN3_30B."""


def random_model(n_experts: int, arguments: argparse.Namespace) -> PreTrainedModel:
    """A frozen model of OLMoE's architecture, with eager experts and routers that use experts
    unevenly.

    arguments: has hidden, width (channels per expert), layers and top_k.
    """
    import torch
    from transformers import AutoConfig

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
    return _uneven(config, "eager", torch.float32, "cpu")


def _uneven(config: Any, experts: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A frozen model of a configuration, with a large spread of router weights, so that routers use
    experts unevenly.

    experts: name of transformers' experts function.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from moe_lab.models.discover import moe_layers

    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, experts_implementation=experts
        )
    for layer in moe_layers(model):
        for weight in layer.routing:
            torch.nn.init.normal_(weight.tensor, std=layer.hidden**-0.5)
    model.eval().requires_grad_(False)
    return model


def published_model(
    name: str,
    layers: int | None,
    device: str,
    *,
    vocabulary: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """A frozen model of the configuration `name` of CONFIGURATIONS, with its first `layers` layers,
    or all if None.

    vocabulary: a smaller size of the vocabulary, whose cost would otherwise hide that of few
    layers. On the CPU the model is in fp32 with eager experts; on another device it is created
    there in bf16, with the experts function of loaded models.
    changes: further settings that replace those of the configuration.
    """
    import torch
    from transformers import AutoConfig

    settings = dict(CONFIGURATIONS[name])
    kind = settings.pop("model_type")
    if layers is not None:
        settings["num_hidden_layers"] = layers
    if vocabulary is not None:
        settings |= {"vocab_size": vocabulary, "eos_token_id": 0}
    config = AutoConfig.for_model(kind, **{**settings, **(changes or {})})
    if device == "cpu":
        return _uneven(config, "eager", torch.float32, device)
    return _uneven(config, "grouped_mm", torch.bfloat16, device)


def write_checkpoint(folder: Path, layers: int) -> None:
    """Write a checkpoint of Qwen3-30B-A3B's configuration with `layers` layers: a file per layer,
    and one file for embeddings, head and final norm."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({**QWEN3_30B, **ON_DISK, "num_hidden_layers": layers})
    )
    random = (
        torch.randn(
            1 << 26, generator=torch.Generator().manual_seed(0), dtype=torch.float32
        ).bfloat16()
        / 45
    )
    index: dict[str, str] = {}
    for number in range(layers + 1):
        tensors = _outside_layers(random) if number == layers else _layer(number, random)
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _layer(number: int, random: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name -> tensor of a decoder layer as on the hub. Tensors are different parts of `random`,
    differently scaled."""
    hidden = int(QWEN3_30B["hidden_size"])
    width = int(QWEN3_30B["moe_intermediate_size"])
    head_size = int(QWEN3_30B["head_dim"])
    queries = int(QWEN3_30B["num_attention_heads"]) * head_size
    keys = int(QWEN3_30B["num_key_value_heads"]) * head_size
    shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head_size,),
        "self_attn.k_norm.weight": (head_size,),
        "mlp.gate.weight": (int(QWEN3_30B["num_experts"]), hidden),
    }
    for expert in range(int(QWEN3_30B["num_experts"])):
        shapes[f"mlp.experts.{expert}.gate_proj.weight"] = (width, hidden)
        shapes[f"mlp.experts.{expert}.up_proj.weight"] = (width, hidden)
        shapes[f"mlp.experts.{expert}.down_proj.weight"] = (hidden, width)
    tensors = {}
    for index, (name, shape) in enumerate(shapes.items(), start=1):
        start = 1009 * (number + 1) * index
        tensors[f"model.layers.{number}.{name}"] = _weight(random, start, shape)
    return tensors


def _outside_layers(random: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name -> tensor of the embeddings, the head and the final norm."""
    shape = (int(QWEN3_30B["vocab_size"]), int(QWEN3_30B["hidden_size"]))
    return {
        "model.embed_tokens.weight": _weight(random, 1, shape),
        "model.norm.weight": _weight(random, 2, shape[1:]),
        "lm_head.weight": _weight(random, 3, shape),
    }


def _weight(random: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A matrix of scaled numbers of `random`, cyclically from the index `start` on; ones for a
    vector, the weight of a norm."""
    import torch

    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    count = shape[0] * shape[1]
    numbers = torch.empty(count, dtype=torch.bfloat16)
    filled = 0
    start = start % len(random)
    while filled < count:
        piece = random[start : start + count - filled]
        numbers[filled : filled + len(piece)] = piece
        filled = filled + len(piece)
        start = 0
    return numbers.view(shape) * (1 + start % 7 / 7)
