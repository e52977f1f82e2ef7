"""Run in the environment of vLLM: log-probabilities of prompts by an engine per folder, as JSON on standard output.

Standard input: {"prompts": [[token ids]], "models": {name: folder}, "trusted": names whose code may run}. Out: name ->
a list per prompt, or a sentence for a folder that vLLM refused.
"""

import json
import os
import sys
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}


def logprobs(folder: str, prompts: list[list[int]], trusted: bool) -> Any:
    from vllm import LLM, SamplingParams

    try:
        limits = {"enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4}
        engine = LLM(folder, dtype="float32", trust_remote_code=trusted, **limits)
    except Exception as error:  # noqa: BLE001 - whatever an engine raises is its refusal
        return f"{type(error).__name__}: {error}"
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    return [
        [position[token].logprob for token, position in zip(ids[1:], answer.prompt_logprobs[1:], strict=True)]
        for ids, answer in zip(prompts, answers, strict=True)
    ]


if __name__ == "__main__":
    request = json.load(sys.stdin)
    found = {
        name: logprobs(folder, request["prompts"], name in request["trusted"])
        for name, folder in request["models"].items()
    }
    sys.__stdout__.write("\nRESULT " + json.dumps(found) + "\n")
