"""vLLM as an engine, in a separate process and environment.

Prompts are tokenized and tokens are decoded in this process, as for a loaded model. Imports no
torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_lab.child_process import Child, Ended, Refused
from moe_lab.config import BackendConfig, ModelConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation.engines import (
    CAUSE_MARK,
    TOKEN_SECONDS,
    Engine,
    GeneratedText,
    GenerationSettings,
    Likelihood,
    Prompt,
    Row,
    check_finite,
    end_tokens,
    generated_text,
    last_lines,
)
from moe_lab.json_files import read_json
from moe_lab.machine import interpreter, visible_gpus
from moe_lab.models.config_json import tensor_parallel
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
    """A causal language model that a separate process of vLLM has loaded from one checkpoint. The
    model is under the plan of the last `set_plan`."""

    batches = 16  # vLLM makes its own batches of all prompts of a call

    def __init__(self, checkpoint: Path, backend: BackendConfig, model: ModelConfig) -> None:
        """Start vLLM with `checkpoint`. Raises Unavailable, with vLLM's reason, when the engine
        does not start."""
        from moe_lab.models.load import load_tokenizer, quiet

        print(f"vLLM starts with {checkpoint}", file=sys.stderr, flush=True)
        with quiet():
            self.tokenizer = load_tokenizer(checkpoint, model)
        self.ends = end_tokens(checkpoint, self.tokenizer)
        self.template_arguments = model.template_arguments
        self.patience = backend.ready_seconds
        self.has_mask = False
        threads = {"OMP_NUM_THREADS": str(model.threads)} if model.threads else {}
        line = command(
            "moe_lab.serving.vllm_engine",
            python=interpreter("vllm", backend.python, "backend=vllm"),
        )
        self._child = Child(
            line, {**ENVIRONMENT, **threads, **os.environ, "XDG_CACHE_HOME": str(user_cache())}
        )
        self.process = self._child.process
        try:
            with self._reply_seconds(0.0) as limit:
                arguments = {
                    "dtype": _dtype(checkpoint, model),
                    "trust_remote_code": model.trust_remote_code,
                    **_parallel_arguments(checkpoint, model, backend.arguments),
                    **backend.arguments,
                }
                self.metadata = self._child.call(
                    "open", limit, folder=str(checkpoint), arguments=arguments
                )
                self.max_length = self.metadata["max_length"]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process."""
        self._child.close()

    def set_plan(self, plan: Plan | None) -> None:
        """Mask the experts that `plan` drops; None removes the mask. UserError for a plan that
        prunes channels. Unavailable if masks have no effect on this engine."""
        if plan is not None and plan.has_channels:
            raise UserError("a plan of channels is no mask of routers: expected an export of it")
        if plan is not None or self.has_mask:
            with self._reply_seconds(0.0) as limit:
                self._child.call(
                    "set_plan",
                    limit,
                    retained_experts=[] if plan is None else sorted(plan.retained.items()),
                )
            self.has_mask = plan is not None

    def items(self, method: str, seconds: float, **arguments: Any) -> Iterator[Any]:
        """Yield the items that a method of `vllm_engine.Engine` yields. Each item may take
        `seconds` plus backend.ready_seconds. `arguments`: the arguments of the method.

        Raises Unavailable when the engine fails, ends, or sends nothing for too long. After such a
        failure the engine is closed, because other requests are still under way.
        """
        try:
            with self._reply_seconds(seconds) as limit:
                for reply in self._child.replies(method, limit, **arguments):
                    if "item" in reply:  # the last reply has none
                        yield reply["item"]
        except Unavailable:
            self.close()
            raise

    @contextmanager
    def _reply_seconds(self, seconds: float) -> Iterator[float]:
        """A context in which errors of vLLM's process become Unavailable. Its value is the number
        of seconds that a reply may take: `seconds` plus backend.ready_seconds."""
        limit = self.patience + seconds
        try:
            yield limit
        except TimeoutError:
            raise Unavailable(
                f"vLLM sent nothing for {limit:g} s, which is "
                f"backend.ready_seconds={self.patience:g} and {TOKEN_SECONDS:g} s per token: it "
                "seems to hang"
            ) from None
        except Ended:
            reason = last_lines(self._child.log())
            raise Unavailable(
                f"vLLM ended (exit code {self.process.returncode}): {reason}"
            ) from None
        except Refused as error:
            log = last_lines(self._child.log())
            reason = log if CAUSE_MARK in str(error) else f"{error.kind}: {error}"
            raise Unavailable(f"vLLM refuses: {reason}") from None

    def generate(
        self, prompts: Sequence[Prompt], generation: GenerationSettings
    ) -> list[GeneratedText]:
        """Do as `Engine.generate`; vLLM makes the batches itself. Replies come in any order: each
        has the number of a prompt, the new tokens and their summed log-likelihood."""
        replies = self.items(
            "generate",
            TOKEN_SECONDS * generation.max_tokens,
            prompts=[prompt.tokens for prompt in prompts],
            max_tokens=generation.max_tokens,
            stop=generation.stop,
            ends=self.ends,
        )
        texts: dict[int, GeneratedText] = {}
        for number, tokens, nats in replies:
            check_finite(nats, "log-likelihood")
            texts[number] = generated_text(
                self.tokenizer, prompts[number].tokens, tokens, generation, self.ends
            )
        return [texts[number] for number in range(len(prompts))]

    def score(self, rows: Sequence[Row], batch_size: int) -> list[Likelihood]:
        """Do as `Engine.score`; vLLM makes the batches itself, so `batch_size` is not used. Each
        reply begins with the number of its row."""
        replies = self.items(
            "log_likelihoods",
            TOKEN_SECONDS * max(len(row.tokens) for row in rows),
            rows=[row.tokens for row in rows],
            starts=[row.start for row in rows],
        )
        return [(nats, is_likeliest) for _, nats, is_likeliest in sorted(replies)]


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
        """The model in `checkpoint`, with `plan` as its mask. The open engine is used again if it
        has the same settings; otherwise it is closed and a new engine starts. Raises Unavailable
        for an engine that does not start; later calls with its settings do not try again. The
        template arguments and the date of prompts need no new engine."""
        settings = [
            str(checkpoint),
            asdict(backend),
            model.dtype,
            model.device,
            model.threads,
            model.trust_remote_code,
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
        engine.template_arguments = model.template_arguments
        engine.tokenizer.date = model.date
        engine.set_plan(plan)
        return engine

    def close(self) -> None:
        """End the process of vLLM, so that a model can be loaded here into the freed memory."""
        if self.engine:
            self.engine.close()
        self.engine = None


def _dtype(checkpoint: Path, model: ModelConfig) -> str:
    """The name of the dtype, such as bfloat16, in which backend=hf would load the model. It is
    given to vLLM because vLLM would by default load fp32 weights in half precision."""
    from moe_lab.models.load import precision
    from moe_lab.models.streamed import stored_dtype

    setting = precision(model)
    return str(stored_dtype(checkpoint) if setting == "auto" else setting).removeprefix("torch.")


def _parallel_arguments(
    checkpoint: Path, model: ModelConfig, arguments: Mapping[str, Any]
) -> dict[str, int]:
    """vLLM's arguments for dividing a model among as many GPUs of this process as possible. {} for
    a single GPU, for the CPU, and if backend.arguments (`arguments`) already divide the model."""
    if model.device == "cpu" or any(name.endswith("parallel_size") for name in arguments):
        return {}
    gpus = max(1, len(visible_gpus()))
    # the numbers of GPUs among which vLLM can divide this model
    counts = tensor_parallel(read_json(checkpoint / "config.json", {}))
    count = max(count for count in counts if count <= gpus)
    return {"tensor_parallel_size": count} if count > 1 else {}
