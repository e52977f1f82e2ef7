"""A checkpoint of published size on a small machine: written, scored from its weights, pruned, and verified.

`python -m benchmarks.size --folder FOLDER [--layers 16]` makes a checkpoint with the configuration of
Qwen3-30B-A3B, cut to so many layers (1.16 GiB each), of random weights in the layout of the hub; scores it by AIMER,
exports half of the experts and compares the export with the masked model. Each part runs in a process of its own, whose
peak memory is measured. FOLDER needs twice the room and is left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moe_lab import criteria
from moe_lab.allocation.uniform import uniform
from moe_lab.models.checkpoint import INDEX
from moe_lab.pruning.export import export
from moe_lab.pruning.plan import Plan, make_plan
from moe_lab.pruning.verify import verify
from moe_lab.statistics.weights import weigh

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
GIB = 2**30


def main() -> None:
    """Run all parts, each in a process of its own, and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--part", choices=PARTS)
    arguments = parser.parse_args()
    if arguments.part:
        start = time.monotonic()
        found = PARTS[arguments.part](arguments)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"seconds": time.monotonic() - start, "peak": peak, **found}))
        return
    for name, part in PARTS.items():
        command = [sys.executable, "-m", "benchmarks.size", "--folder", str(arguments.folder)]
        done = subprocess.run(
            [*command, "--layers", str(arguments.layers), "--part", name], stdout=subprocess.PIPE, check=True
        )
        took = json.loads(done.stdout)
        rest = ", ".join(f"{key} {value:.3g}" for key, value in took.items() if key not in ("seconds", "peak"))
        print(f"{part.__doc__} {took['seconds']:.0f} s, at most {took['peak']:.2f} GiB of memory; {rest}", flush=True)


def write(arguments: argparse.Namespace) -> dict[str, float]:
    """the checkpoint is written:"""
    folder = arguments.folder / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": arguments.layers}))
    random = torch.randn(1 << 26, generator=torch.Generator().manual_seed(0), dtype=torch.float32).bfloat16() / 45
    index: dict[str, str] = {}
    for number in range(arguments.layers + 1):
        tensors = _rest(random) if number == arguments.layers else _layer(number, random)
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return {"GiB": _size(folder) / GIB}


def score(arguments: argparse.Namespace) -> dict[str, float]:
    """AIMER scores are read from it, and a plan made:"""
    folder = arguments.folder / "model"
    raw = _read(folder)
    _forget(folder)
    start = time.monotonic()
    sums = weigh(folder, fingerprint={})
    seconds = time.monotonic() - start
    experts = dict.fromkeys(range(arguments.layers), int(CONFIG["num_experts"]))
    scores = criteria.score("aimer", sums.layers, experts=experts)
    top_k = int(CONFIG["num_experts_per_tok"])
    listed = {layer: values.tolist() for layer, values in scores.items()}
    plan = make_plan(listed, uniform(experts, 0.5, top_k=top_k), top_k=top_k, provenance={"ratio": 0.5})
    plan.save(arguments.folder / "plan.json")
    return {"share of the raw read speed": raw / seconds}


def write_export(arguments: argparse.Namespace) -> dict[str, float]:
    """half of the experts are exported:"""
    folder = arguments.folder / "model"
    _forget(folder)
    start = time.monotonic()
    export(folder, Plan.load(arguments.folder / "plan.json"), arguments.folder / "export")
    os.sync()
    seconds = time.monotonic() - start
    _forget(arguments.folder / "export")
    start = time.monotonic()
    for file in sorted((arguments.folder / "export").glob("*.safetensors")):
        shutil.copyfile(file, arguments.folder / "copy")
    os.sync()
    copying = time.monotonic() - start
    (arguments.folder / "copy").unlink()
    return {"GiB": _size(arguments.folder / "export") / GIB, "share of the speed of cp": copying / seconds}


def compare(arguments: argparse.Namespace) -> dict[str, float]:
    """the export is compared with the masked model, layer by layer:"""
    plan = Plan.load(arguments.folder / "plan.json")
    return {"difference": verify(arguments.folder / "model", plan, arguments.folder / "export")}


PARTS = {"write": write, "score": score, "export": write_export, "verify": compare}


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


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _forget(folder: Path) -> None:
    """Let the system drop the files of a folder from its cache."""
    os.sync()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(folder: Path) -> float:
    """Seconds that reading all files takes."""
    _forget(folder)
    start = time.monotonic()
    buffer = bytearray(8 << 20)
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.monotonic() - start


if __name__ == "__main__":
    main()
