"""Quantised exports on a device: `python -m benchmarks.compressed [--device cuda] [--vllm PYTHON]`.

The shipped OLMoE loses half of its experts and is exported in FP8 and in 4 bits (`export.format=fp8` and `w4a16`).
Log-probabilities of prompts are compared with those of the dequantised model on the CPU in fp32: in transformers,
which dequantises experts, and in vLLM, whose kernels compute with the stored weights. vLLM's interpreter is the one
given, or this one; where there is no vLLM, its figures are called absent. Its CPU build has no such kernels, so that
`--device cpu` leaves it out.

Exit code 1 when a bar fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import moe_lab
from benchmarks.measure import describe, misses, parser
from moe_lab.config import ModelConfig
from moe_lab.models.checkpoint import read_json
from moe_lab.models.load import load_model, quiet
from moe_lab.paths import resolve
from moe_lab.pruning.export.compressed import compression_changes
from moe_lab.pruning.export.rewrite import rewrite
from moe_lab.pruning.plan import Plan

BARS = {"fp8": 0.3, "w4a16": 0.1}
"""Scheme -> largest mean difference of a log-probability, in nats: at least twice that of transformers on a CPU (0.14
and 0.03). fp8 rounds activations as well, vLLM also those of experts."""
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
folder, prompts = sys.argv[1], json.load(sys.stdin)
engine = LLM(folder, dtype="bfloat16", enforce_eager=True, max_model_len=128, gpu_memory_utilization=0.2)
asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
found = [
    [position[token].logprob for token, position in zip(ids[1:], answer.prompt_logprobs[1:])]
    for ids, answer in zip(prompts, answers)
]
print("RESULT " + json.dumps(found))
"""


def main() -> int:
    """Export, measure, print, compare with the bars."""
    options = parser("compressed", __doc__)
    options.add_argument("--device", default="cpu", help="cpu or cuda")
    options.add_argument("--vllm", help="interpreter that has vLLM; this one by default")
    options.add_argument("--prompts", type=int, default=16, help="questions of the shipped GSM8K")
    arguments = options.parse_args()
    print(describe(arguments.device), flush=True)
    tokenizer = AutoTokenizer.from_pretrained(resolve("pocket:olmoe"))
    items = Path(resolve("pocket:benchmarks/gsm8k.jsonl")).read_text().splitlines()[: arguments.prompts]
    rows = [tokenizer(json.loads(item)["prompt"])["input_ids"] for item in items]
    ids = torch.tensor([row[: min(map(len, rows))] for row in rows])
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        pruned = _pruned(Path(temporary))
        for scheme, bar in BARS.items():
            folder = Path(temporary) / scheme
            rewrite(pruned, compression_changes(pruned, scheme), folder)
            settings = ModelConfig(name=scheme, path=str(folder), device="cpu", dtype="float32")
            expected = _logprobs(load_model(settings)[0], ids)
            with quiet():
                model: Any = AutoModelForCausalLM.from_pretrained(folder, device_map=arguments.device)
            what = "mean difference of a log-probability from the dequantised model's"
            difference = (_logprobs(model, ids) - expected).abs().mean()
            failed |= misses(f"transformers, {scheme}: {what}", float(difference), "<=", bar)
            answer = _served(folder, ids, arguments.device, arguments.vllm)
            if isinstance(answer, str):
                print(f"  vLLM, {scheme}: {answer}: absent", flush=True)
            else:
                failed |= misses(f"vLLM, {scheme}: {what}", float((answer - expected).abs().mean()), "<=", bar)
    return int(failed)


def _pruned(folder: Path) -> Path:
    """The shipped model without every other expert."""
    source = Path(resolve("pocket:olmoe"))
    config = read_json(source / "config.json")
    count, layers = config["num_experts"], range(config["num_hidden_layers"])
    plan = Plan({layer: tuple(range(0, count, 2)) for layer in layers}, dict.fromkeys(layers, count))
    return moe_lab.export("pocket:olmoe", plan, folder / "pruned")


@torch.no_grad()
def _logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token but the first of each row of `ids` (B, S): (B, S - 1) in fp32, on the CPU."""
    scores = model(input_ids=ids.to(model.device)).logits.float().log_softmax(-1).cpu()
    found: torch.Tensor = scores[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return found


def _served(folder: Path, ids: torch.Tensor, device: str, python: str | None) -> torch.Tensor | str:
    """Log-probabilities by vLLM, as `_logprobs`, or why there are none."""
    if device == "cpu":
        return "its CPU build has no kernels for these experts"
    if python is None and find_spec("vllm") is None:
        return "not installed, --vllm names its interpreter"
    command = [python or sys.executable, "-c", ENGINE, str(folder)]
    done = subprocess.run(command, input=json.dumps(ids.tolist()), capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return torch.tensor(json.loads(line.removeprefix("RESULT ")))
    print(done.stderr[-3000:], flush=True)
    raise SystemExit(f"vLLM ended with exit code {done.returncode}")


if __name__ == "__main__":
    sys.exit(main())
