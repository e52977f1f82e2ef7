"""Program for the environment of vLLM: prints the answers of engines as JSON on standard output.

Standard input: {"prompts": [[token ids]], "runs": [RUN, ...]}. The output has the answers of each
run, or a sentence if the engine raised an error. A run {"folder", "trusted": whether its code may
run} uses vLLM's own engine; its answer is a list for each prompt, with the log-probability of each
token but the first. A run with "plans": [retained experts by layer, ...] uses the engine of
moe_lab; it has an answer for each plan. "arguments" are those of vLLM. If "unmasked" is set, which
only the first run may do, routers do not use their masks.
"""

import gc
import json
import os
import sys
from typing import Any
from unittest.mock import patch

import torch._dynamo.config

# it may have been imported before a fork
torch._dynamo.config.disable = os.environ["TORCHDYNAMO_DISABLE"] == "1"
ARGUMENTS = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 64,
}


def logprobs(request: dict[str, Any], prompts: list[list[int]]) -> list[list[float]]:
    from vllm import LLM, SamplingParams

    engine = LLM(
        request["folder"], trust_remote_code=request["trusted"], enforce_eager=True, **ARGUMENTS
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    answers = engine.generate(
        [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
    )
    return [
        [
            position[token].logprob
            for token, position in zip(ids[1:], answer.prompt_logprobs[1:], strict=True)
        ]
        for ids, answer in zip(prompts, answers, strict=True)
    ]


def plan_answers(request: dict[str, Any], prompts: list[list[int]]) -> list[dict[str, Any]]:
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    select_unmasked = BaseRouter._select_experts
    from moe_lab.serving import vllm_engine, vllm_masks  # noqa: F401 - the second masks it, once

    select_masked = BaseRouter._select_experts
    engine = vllm_engine.Engine()
    with patch.object(
        BaseRouter, "_select_experts", select_unmasked if request.get("unmasked") else select_masked
    ):
        engine.open(request["folder"], {**ARGUMENTS, **request.get("arguments", {})})
        results = []
        for plan in request["plans"]:
            engine.set_plan(plan)
            results.append(answers(engine, prompts))
        return results


def answers(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    rows = [ids[:length] for ids in prompts for length in range(2, len(ids) + 1)]
    losses = sorted(engine.log_likelihoods(rows, [len(row) - 1 for row in rows]))
    sums = sorted(engine.log_likelihoods(prompts, [1] * len(prompts)))
    return {"losses": [value for _, value, _ in losses], "sums": [value for _, value, _ in sums]}


def run(request: dict[str, Any], prompts: list[list[int]]) -> Any:
    try:
        return plan_answers(request, prompts) if "plans" in request else logprobs(request, prompts)
    except Exception as error:  # noqa: BLE001 - whatever an engine raises is its refusal
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    from vllm.model_executor.models import registry

    request = json.load(sys.stdin)
    gc.freeze()
    # vLLM collects garbage seven times for an engine, in all that it has imported
    gc.unfreeze = lambda: None
    # it looks at each architecture in another process, which imports vLLM again
    registry._run_in_subprocess = lambda look: look()
    results = [run(run_request, request["prompts"]) for run_request in request["runs"]]
    sys.__stdout__.write("\nRESULT " + json.dumps(results) + "\n")
