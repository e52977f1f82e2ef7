"""Run in the environment of vLLM: what an engine says under plans, as JSON on standard output.

Standard input: {"prompts": [[token ids]], "runs": [{"folder", "plans": [kept experts by layer, ...], "arguments",
"unmasked": whether routers do not use their masks, in the first run only}]}. Out: for each run a list, for each plan
{"losses": log-probability of each token of the prompts but the first, "tokens": greedy answers}, or a sentence if it
was refused.
"""

import json
import os
import sys
from typing import Any
from unittest.mock import patch

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

from moe_lab.serving import vllm_engine

ARGUMENTS = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}


def answers(engine: vllm_engine.Engine, prompts: list[list[int]]) -> dict[str, Any]:
    rows = [ids[:length] for ids in prompts for length in range(2, len(ids) + 1)]
    single = sorted(engine.log_likelihoods(rows, [len(row) - 1 for row in rows]))
    whole = sorted(engine.log_likelihoods(prompts, [1] * len(prompts)))
    return {
        "losses": [value for _, value, _ in single],
        "sums": [value for _, value, _ in whole],
        "likeliest": [likeliest for _, _, likeliest in single],
        "tokens": [tokens for _, tokens, _ in sorted(engine.generate(prompts, 12, [], []))],
    }


def run(asked: dict[str, Any], prompts: list[list[int]]) -> Any:
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    unmasked = BaseRouter._select_experts
    from moe_lab.serving import vllm_masks  # noqa: F401 - which masks it, once

    masked = BaseRouter._select_experts
    engine = vllm_engine.Engine()
    try:
        with patch.object(BaseRouter, "_select_experts", unmasked if asked.get("unmasked") else masked):
            engine.open(asked["folder"], {**ARGUMENTS, **asked.get("arguments", {})})
            said = []
            for plan in asked["plans"]:
                engine.set_plan(plan)
                said.append(answers(engine, prompts))
            return said
    except Exception as error:  # noqa: BLE001 - whatever an engine raises is its refusal
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    request = json.load(sys.stdin)
    results = [run(asked, request["prompts"]) for asked in request["runs"]]
    sys.__stdout__.write("\nRESULT " + json.dumps(results) + "\n")
