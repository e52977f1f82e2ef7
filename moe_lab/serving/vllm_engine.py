"""An engine of vLLM that evaluates many plans of one model. Another process sends requests to it,
as lines of JSON.

    python -m moe_lab.serving.vllm_engine      (in the environment of vLLM)

Requests and replies are those of `moe_lab/child_process.py`, for the methods of `Engine`.

A plan of whole experts is a mask in every router (`vllm_masks.py`).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moe_lab.child_process import serve

PROBE_TOKENS = 24
"""Tokens of the text that shows whether a mask takes effect."""
EFFECT = 1e-3
"""A mask takes effect if it changes a log-probability of the text by more than this number."""
REPEAT_TOLERANCE = 1e-4
"""Largest change of a log-probability of the text when it is computed again without a mask."""

RetainedExperts = Sequence[tuple[int, Sequence[int]]]
"""Pairs (layer, ids of the experts that the layer retains). Layers without a pair retain all
experts."""


class Engine:
    """A vLLM engine that holds one checkpoint."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.masks_take_effect = False
        """Whether `_prove_masks` has succeeded."""

    def open(self, folder: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Load the checkpoint in `folder`. `arguments`: further arguments of vllm.LLM. Keys of the
        result: "vllm" (the version of vLLM), "max_length" (in tokens) and "dtype" of the model."""
        import vllm
        from vllm.platforms import current_platform

        # this import also adds a mask to the routers that are built in this process
        from moe_lab.serving import vllm_masks

        defaults = {
            # compiling for the CPU takes longer than most benchmarks
            "enforce_eager": current_platform.is_cpu(),
            "generation_config": "vllm",
            "disable_log_stats": True,
            "worker_extension_cls": f"{vllm_masks.__name__}.{vllm_masks.PlanWorker.__name__}",
        }
        self.llm = vllm.LLM(folder, **{**defaults, **arguments})
        config = self.llm.llm_engine.vllm_config.model_config
        return {
            "vllm": vllm.__version__,
            "max_length": config.max_model_len,
            "dtype": str(config.dtype),
        }

    def set_plan(self, retained_experts: RetainedExperts) -> None:
        """Mask the experts that a plan drops. ValueError if masks have no effect on this engine,
        and for experts that the model does not have."""
        if retained_experts and not self.masks_take_effect:
            self._prove_masks()
        # layer -> number of experts
        counts = {layer: count for layer, count, _ in self._call_workers("experts_of_layers")}
        for layer, retained in retained_experts:
            if layer not in counts or not set(retained) <= set(range(counts[layer])):
                raise ValueError(
                    f"the plan retains experts {list(retained)} of layer {layer}, the model has "
                    f"{counts}"
                )
        self._mask(retained_experts)

    def _mask(self, retained_experts: RetainedExperts) -> None:
        """Mask experts as `Engine.set_plan`, without its checks."""
        self._call_workers("set_plan", retained_experts)  # PlanWorker.set_plan
        # the cached values were computed with the earlier mask
        if not self.llm.reset_prefix_cache():
            raise ValueError(
                "vLLM did not forget what it had computed of earlier prompts: are requests under "
                "way?"
            )

    def generate(
        self, requests: Sequence[Mapping[str, Any]], end_token_ids: Sequence[int]
    ) -> Iterator[tuple[int, list[int], float]]:
        """Generate a text for each of the `requests`. A request has the "tokens" of the prompt, a
        list "stop", and other arguments of vLLM's SamplingParams. Yields (index of the request, new
        tokens, log-likelihood of the new tokens in nats) for each complete text.

        A text is complete when it has "max_tokens" new tokens, contains one of the strings "stop",
        or ends with one of the tokens `end_token_ids`. The log-likelihood is NaN if a logit was
        NaN. ValueError if vLLM stops a text for another reason.
        """
        from vllm import SamplingParams

        def parameters(tokens: Sequence[int], stop: Sequence[str], **settings: Any) -> Any:
            return tokens, SamplingParams(
                **settings,
                stop=list(stop) or None,
                stop_token_ids=list(end_token_ids),
                ignore_eos=True,  # only the caller's `end_token_ids` end a text
                detokenize=bool(stop),
                logprobs=0,  # log-probabilities of the generated tokens only
            )

        for number, output in self._finished_outputs(parameters(**request) for request in requests):
            (text,) = output.outputs
            if text.finish_reason not in ("stop", "length"):
                raise ValueError(
                    f"a text ended by finish_reason={text.finish_reason}: expected stop or length"
                )
            yield number, list(text.token_ids), text.cumulative_logprob

    def log_likelihoods(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> Iterator[tuple[int, float, bool]]:
        """Yield (index of the row, sum of the log-probabilities of the scored tokens in nats,
        whether every scored token is the likeliest token) for each of `rows`, which are token ids.
        The scored tokens of row i begin at position starts[i] and end with the row."""
        from vllm import SamplingParams

        # all tokens of a row but the last -> indices of the rows that differ only in the last token
        rows_of_prefix: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, row in enumerate(rows):
            rows_of_prefix[*row[:-1]].append(number)
        requests = []
        for prefix, numbers in rows_of_prefix.items():
            is_prefix_scored = min(starts[number] for number in numbers) < len(prefix)
            sampling = SamplingParams(
                temperature=0,
                max_tokens=1,
                prompt_logprobs=0 if is_prefix_scored else None,
                logprob_token_ids=sorted({rows[number][-1] for number in numbers}),
                detokenize=False,
            )
            requests.append((prefix, sampling))
        rows_of_request = list(rows_of_prefix.values())
        for request, output in self._finished_outputs(requests):
            # generated at the position of each row's last token
            (generated_token,) = output.outputs[0].token_ids
            (last_logprobs,) = output.outputs[0].logprobs
            for number in rows_of_request[request]:
                row = rows[number]
                nats = last_logprobs[row[-1]].logprob
                is_likeliest = row[-1] == generated_token
                for index in range(starts[number], len(row) - 1):
                    entry = output.prompt_logprobs[index][row[index]]
                    nats += entry.logprob
                    is_likeliest &= entry.rank == 1
                yield number, nats, is_likeliest

    def _call_workers(self, method: str, *arguments: Any) -> Any:
        """Call `method` of all workers of vLLM, which return the same result."""
        return self.llm.collective_rpc(method, args=arguments)[0]

    def _finished_outputs(self, requests: Any) -> Iterator[tuple[int, Any]]:
        """Yield (index of a request, its output) as soon as the request is finished. `requests`:
        pairs (token ids, sampling parameters)."""
        engine = self.llm.llm_engine
        for number, (ids, sampling) in enumerate(requests):
            engine.add_request(str(number), {"prompt_token_ids": list(ids)}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    yield int(output.request_id), output

    def _prove_masks(self) -> None:
        """Set `masks_take_effect`, or raise ValueError if masks do not take effect on this
        engine."""
        vocabulary = self.llm.llm_engine.vllm_config.model_config.get_vocab_size()
        # arbitrary token ids: multiples of a prime
        tokens = [number * 7919 % vocabulary for number in range(1, PROBE_TOKENS + 1)]
        plan = []
        for layer, count, top_k in self._call_workers("experts_of_layers"):
            # half of the experts, but at least top_k: even ids first, then odd ids
            order = [*range(0, count, 2), *range(1, count, 2)]
            plan.append((layer, sorted(order[: max(top_k, (count + 1) // 2)])))
        if not plan:
            raise ValueError(
                "vLLM built no router that can be masked: expected a plan that is exported, or "
                "backend=hf"
            )
        values_before, values_under_mask, values_after = (
            self._log_probabilities(tokens, retained_experts) for retained_experts in ([], plan, [])
        )
        if not _difference(values_before, values_under_mask) > EFFECT:
            raise ValueError(
                "masks have no effect on this engine, whose experts may be run by a kernel that "
                f"routes by itself: no log-probability of {len(tokens)} tokens changes by more "
                f"than {EFFECT} without half of the experts: expected backend=hf, or "
                "backend=server, which exports each plan"
            )
        if not _difference(values_before, values_after) <= REPEAT_TOLERANCE:
            raise ValueError(
                "a mask has an effect on this engine after it was taken away: expected backend=hf"
            )
        self.masks_take_effect = True

    def _log_probabilities(
        self, tokens: list[int], retained_experts: RetainedExperts
    ) -> list[float]:
        """Log-probability in nats of each of the `tokens` except the first. The mask of
        `retained_experts` stays."""
        self._mask(retained_experts)
        # only the last token of each row is scored
        rows = [tokens[:length] for length in range(2, len(tokens) + 1)]
        # requests may finish in another order
        likelihoods = sorted(self.log_likelihoods(rows, [len(row) - 1 for row in rows]))
        return [nats for _, nats, _ in likelihoods]


def _difference(first: Sequence[float], second: Sequence[float]) -> float:
    return max(abs(value - other) for value, other in zip(first, second, strict=True))


def _add_to_search_path(folder: str) -> None:
    """Make this moe_lab importable in the processes that vLLM starts, by a link in `folder`. The
    folder around the package itself may contain other packages of moe_lab's environment, which vLLM
    must not import."""
    Path(folder, "moe_lab").symlink_to(Path(__file__).resolve().parents[1])
    folders = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)  # for programs that vLLM starts
    sys.path.insert(0, folder)  # for processes of multiprocessing, which inherit sys.path


if __name__ == "__main__":
    folder_of_link = tempfile.mkdtemp(prefix=f"moe_lab-vllm-{os.getpid()}-")
    _add_to_search_path(folder_of_link)
    serve(Engine(), partial(shutil.rmtree, folder_of_link, ignore_errors=True))
