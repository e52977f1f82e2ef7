"""A checkpoint of published size with random weights, in the layout of the hub, and what the disk does with it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_lab.models.checkpoint import INDEX

if TYPE_CHECKING:  # what needs no torch is measured without it
    import torch

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def write_checkpoint(folder: Path, layers: int) -> None:
    """Write the configuration of Qwen3-30B-A3B cut to so many layers, a file per layer and one for the rest."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    random = torch.randn(1 << 26, generator=torch.Generator().manual_seed(0), dtype=torch.float32).bfloat16() / 45
    index: dict[str, str] = {}
    for number in range(layers + 1):
        tensors = _rest(random) if number == layers else _layer(number, random)
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _layer(number: int, random: torch.Tensor) -> dict[str, torch.Tensor]:
    """A decoder layer as on the hub: every expert another stretch of the same random numbers, and of another size."""
    hidden, width = int(CONFIG["hidden_size"]), int(CONFIG["moe_intermediate_size"])
    heads, keys, size = (int(CONFIG[name]) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads * size, hidden),
        "self_attn.k_proj.weight": (keys * size, hidden),
        "self_attn.v_proj.weight": (keys * size, hidden),
        "self_attn.o_proj.weight": (hidden, heads * size),
        "self_attn.q_norm.weight": (size,),
        "self_attn.k_norm.weight": (size,),
        "mlp.gate.weight": (int(CONFIG["num_experts"]), hidden),
    }
    for expert in range(int(CONFIG["num_experts"])):
        shapes[f"mlp.experts.{expert}.gate_proj.weight"] = (width, hidden)
        shapes[f"mlp.experts.{expert}.up_proj.weight"] = (width, hidden)
        shapes[f"mlp.experts.{expert}.down_proj.weight"] = (hidden, width)
    tensors = {}
    for place, (name, shape) in enumerate(shapes.items()):
        tensors[f"model.layers.{number}.{name}"] = _stretch(random, 1009 * (number + 1) * (place + 1), shape)
    return tensors


def _rest(random: torch.Tensor) -> dict[str, torch.Tensor]:
    shape = (int(CONFIG["vocab_size"]), int(CONFIG["hidden_size"]))
    return {
        "model.embed_tokens.weight": _stretch(random, 1, shape),
        "model.norm.weight": _stretch(random, 2, shape[1:]),
        "lm_head.weight": _stretch(random, 3, shape),
    }


def _stretch(random: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers of `random` from `start` on, around its end; norms are ones."""
    import torch

    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    count = shape[0] * shape[1]
    found = torch.empty(count, dtype=torch.bfloat16)
    filled, start = 0, start % len(random)
    while filled < count:
        part = random[start : start + count - filled]
        found[filled : filled + len(part)] = part
        filled, start = filled + len(part), 0
    return found.view(shape) * (1 + start % 7 / 7)


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Let the system drop the files of a folder from its cache."""
    os.sync()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_of_reading(folder: Path) -> float:
    """Seconds that reading all files takes."""
    forget(folder)
    start = time.monotonic()
    buffer = bytearray(8 << 20)
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.monotonic() - start
