"""vLLM as an engine, in a separate process and environment. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_lab.child_process import ChildProcess, ErrorReply, ProcessEnded
from moe_lab.config import BackendConfig, ModelConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation.engines import (
    CAUSE_MARK,
    TOKEN_SECONDS,
    Engine,
    GeneratedText,
    Prompt,
    Row,
    check_finite,
    end_token_ids,
    error_summary,
    generated_text,
    sampling_defaults,
)
from moe_lab.evaluation.items import Likelihood
from moe_lab.machine import interpreter, visible_gpus
from moe_lab.models.checkpoint import read_json, read_json_if_there
from moe_lab.models.config_json import tensor_parallel_sizes
from moe_lab.paths import user_cache
from moe_lab.pruning.plan import Plan
from moe_lab.start import command

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, which ends with its standard input
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; the default is nearly all main memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables of vLLM's process; the user's environment overrides them."""


class VllmModel(Engine):
    """A causal language model that a separate process of vLLM has loaded from one checkpoint.
    Experts that the plan of the last `set_plan` drops are masked."""

    batches = 16  # vLLM makes its own batches of all prompts of a call

    def __init__(self, checkpoint: Path, backend: BackendConfig, model: ModelConfig) -> None:
        """Start vLLM with `checkpoint`. Raises Unavailable when the engine does not start."""
        from moe_lab.models.load import load_tokenizer, precision, quiet_transformers

        print(f"vLLM starts with {checkpoint}", file=sys.stderr, flush=True)
        with quiet_transformers():
            self.tokenizer = load_tokenizer(checkpoint, model)
        self.end_token_ids = end_token_ids(checkpoint, self.tokenizer)
        self.sampling_defaults = sampling_defaults(
            read_json_if_there(checkpoint / "generation_config.json")
        )
        self.template_arguments = model.template_arguments
        self.ready_seconds = backend.ready_seconds
        self.has_mask = False
        threads = {"OMP_NUM_THREADS": str(model.threads)} if model.threads else {}
        argv = command(
            "moe_lab.serving.vllm_engine",
            python=interpreter("vllm", backend.python, "backend=vllm"),
        )
        self._child = ChildProcess(
            argv, {**ENVIRONMENT, **threads, **os.environ, "XDG_CACHE_HOME": str(user_cache())}
        )
        self.process = self._child.process
        try:
            with self._reply_limit() as limit:
                arguments = {
                    # by default, vLLM would load fp32 weights in half precision
                    "dtype": str(precision(model, checkpoint)).removeprefix("torch."),
                    "trust_remote_code": model.trust_remote_code,
                    "tokenizer": self.tokenizer.name_or_path,
                    **_parallel_arguments(checkpoint, model, backend.arguments),
                    **backend.arguments,
                }
                self.metadata = self._child.call(
                    "open", limit, folder=str(checkpoint), arguments=arguments
                )
                self.max_length = self.metadata["max_length"]
        except BaseException:  # also KeyboardInterrupt
            self.close()
            raise

    def close(self) -> None:
        """End the process."""
        self._child.close()

    def set_plan(self, plan: Plan | None) -> None:
        """Mask the experts that `plan` drops; None removes the mask. Raises UserError for a plan
        that prunes channels. Raises Unavailable if a mask does not change what vLLM computes."""
        if plan is not None and plan.has_channels:
            raise UserError("a plan of channels is no mask of routers: expected an export of it")
        # without a plan there is only an earlier mask to remove
        if plan is not None or self.has_mask:
            with self._reply_limit() as limit:
                self._child.call(
                    "set_plan",
                    limit,
                    retained_experts=[] if plan is None else sorted(plan.retained.items()),
                )
            self.has_mask = plan is not None

    def items(self, method: str, seconds: float, **arguments: Any) -> Iterator[Any]:
        """Yield the items that a method of `vllm_engine.Engine` yields, called with `arguments` in
        vLLM's process. Each item may take `seconds` plus backend.ready_seconds.

        Raises Unavailable when the process fails, ends, or sends nothing for too long. The process
        is then closed, because vLLM would go on with the texts that it has not finished.
        """
        try:
            with self._reply_limit(seconds) as limit:
                for reply in self._child.replies(method, limit, **arguments):
                    if "item" in reply:  # the last reply only says that all items were sent
                        yield reply["item"]
        except Unavailable:
            self.close()
            raise

    @contextmanager
    def _reply_limit(self, seconds: float = 0.0) -> Iterator[float]:
        """A context for one request to vLLM's process. Its `as` variable is the number of seconds
        that a reply may take. Errors of the process become Unavailable."""
        limit = self.ready_seconds + seconds
        try:
            yield limit
        except TimeoutError:
            raise Unavailable(
                f"vLLM sent nothing for {limit:g} s, which is "
                f"backend.ready_seconds={self.ready_seconds:g} and {TOKEN_SECONDS:g} s per token: "
                "it seems to hang"
            ) from None
        except ProcessEnded:
            reason = error_summary(self._child.log())
            raise Unavailable(
                f"vLLM ended (exit code {self.process.returncode}): {reason}"
            ) from None
        except ErrorReply as error:
            log = error_summary(self._child.log())
            # with CAUSE_MARK, the error only points to another error, which is in the log
            reason = log if CAUSE_MARK in str(error) else f"{error.kind}: {error}"
            raise Unavailable(f"vLLM refuses: {reason}") from None

    def generate(self, prompts: Sequence[Prompt], batch_size: int) -> list[GeneratedText]:
        """Implement `Engine.generate`. The replies come in the order in which vLLM finishes the
        texts. `batch_size` is not used."""
        requests = [
            {
                "tokens": prompt.tokens,
                "seed": prompt.seed,
                "max_tokens": prompt.generation.max_tokens,
                "stop": prompt.generation.stop,
                **prompt.generation.sampling.distribution,
            }
            for prompt in prompts
        ]
        replies = self.items(
            "generate",
            TOKEN_SECONDS * max(prompt.generation.max_tokens for prompt in prompts),
            requests=requests,
            end_token_ids=self.end_token_ids,
        )
        texts = []
        # sorted by the index of the prompt
        for prompt, (_, new_tokens, log_likelihood) in zip(prompts, sorted(replies), strict=True):
            check_finite(log_likelihood, "log-likelihood")
            texts.append(
                generated_text(self.tokenizer, new_tokens, prompt.generation, self.end_token_ids)
            )
        return texts

    def score(self, rows: Sequence[Row], batch_size: int) -> list[Likelihood]:
        """Implement `Engine.score`. `batch_size` is not used."""
        replies = self.items(
            "log_likelihoods",
            TOKEN_SECONDS * max(len(row.tokens) for row in rows),
            rows=[row.tokens for row in rows],
            starts=[row.start for row in rows],
        )
        return [
            Likelihood(nats, len(row.tokens) - row.start, is_likeliest)
            # sorted by the index of the row
            for row, (_, nats, is_likeliest) in zip(rows, sorted(replies), strict=True)
        ]


class OpenEngine:
    """Keeps one process of vLLM open for the next step."""

    def __init__(self) -> None:
        self._key = ""
        """Settings of the open engine, as JSON."""
        self.engine: VllmModel | None = None
        self._failures: dict[str, str] = {}
        """Settings of an engine that did not start, as JSON -> the reason."""

    def open(
        self, checkpoint: Path, backend: BackendConfig, model: ModelConfig, plan: Plan | None
    ) -> VllmModel:
        """An engine with the model in `checkpoint`, masked by `plan`: the open engine if its
        settings are the same, otherwise a new one. Raises Unavailable if a new engine does not
        start. Later calls with the same settings then raise the same error without a new
        attempt."""
        from moe_lab.models.load import set_template_settings

        settings = [
            str(checkpoint),
            asdict(backend),
            model.dtype,
            model.device,
            model.threads,
            model.trust_remote_code,
            model.tokenizer,
        ]
        key = json.dumps(settings, sort_keys=True)
        if key in self._failures:
            raise Unavailable(self._failures[key])
        engine = self.engine
        if engine is None or key != self._key or engine.process.poll() is not None:
            self.close()
            try:
                engine = VllmModel(checkpoint, backend, model)
            except Unavailable as error:
                self._failures[key] = str(error)
                raise
            self.engine = engine
            self._key = key
        # these settings change only prompts and where answers begin, so they need no new engine
        engine.template_arguments = model.template_arguments
        set_template_settings(engine.tokenizer, model)
        engine.set_plan(plan)
        return engine

    def close(self) -> None:
        """End the process of vLLM."""
        if self.engine:
            self.engine.close()
        self.engine = None


def _parallel_arguments(
    checkpoint: Path, model: ModelConfig, arguments: Mapping[str, Any]
) -> dict[str, int]:
    """vLLM's argument that divides a model among as many GPUs of this process as possible.
    `arguments`: backend.arguments."""
    if model.device == "cpu" or any(name.endswith("parallel_size") for name in arguments):
        return {}
    gpu_count = max(1, len(visible_gpus()))
    # the numbers of GPUs among which vLLM can divide this model
    counts = tensor_parallel_sizes(read_json(checkpoint / "config.json"))
    count = max(count for count in counts if count <= gpu_count)
    return {"tensor_parallel_size": count} if count > 1 else {}
