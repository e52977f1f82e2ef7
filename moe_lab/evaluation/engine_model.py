"""Texts and likelihoods by an engine of vLLM, which runs in a process and an environment of its own.

Prompts are tokenized here, and tokens are decoded here, as for a loaded model. No torch.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_lab.config import BackendConfig, ModelConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation.back_ends import ELSEWHERE, last_lines
from moe_lab.evaluation.generation import (
    TOKEN_SECONDS,
    AnswerRow,
    GenSpec,
    LanguageModel,
    Likelihood,
    check_finite,
    continuation,
    cut,
    end_tokens,
    fitting,
)
from moe_lab.evaluation.interpreters import interpreter
from moe_lab.pruning.plan import Plan
from moe_lab.start import command

GRACE = 20.0
"""Seconds that an engine may take to end."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, which ends with its standard input
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; by itself vLLM takes nearly all main memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
"""Settings of vLLM's process where the environment has none."""


class Engine:
    """The process of an engine that has loaded one checkpoint."""

    def __init__(self, checkpoint: Path, backend: BackendConfig, model: ModelConfig) -> None:
        """Start vLLM with `checkpoint`.

        Raises Unavailable, with vLLM's reason, when the engine does not start.
        """
        print(f"vLLM starts with {checkpoint}", file=sys.stderr, flush=True)
        self.patience = backend.ready_seconds
        self.masked = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        threads = {"OMP_NUM_THREADS": str(model.threads)} if model.threads else {}
        self.process = subprocess.Popen(
            command("moe_lab.serving.vllm_engine", python=interpreter("vllm", backend.python, "backend=vllm")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**ENVIRONMENT, **threads, **os.environ},
        )
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        arguments = {
            "dtype": _dtype(checkpoint, model),
            "trust_remote_code": model.trust_remote_code,
            **backend.arguments,
        }
        try:
            self.about = self._value("open", folder=str(checkpoint), arguments=arguments)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def set_plan(self, plan: Plan | None) -> None:
        """Mask the experts that `plan` drops; None takes the mask away.

        Raises UserError for a plan with channels, Unavailable if masks have no effect on this engine.
        """
        if plan is not None and plan.channels:
            raise UserError("a plan of channels is no mask of routers: expected an export of it")
        if plan is not None or self.masked:
            self._value("set_plan", kept=[] if plan is None else sorted(plan.experts.items()))
            self.masked = plan is not None

    def items(self, method: str, seconds: float, **arguments: Any) -> Iterator[Any]:
        """What a method of `vllm_engine.Engine` yields, each within `seconds` and the time that a start may take.

        Raises Unavailable when the engine fails, ends, or says nothing for too long. It is ended then, and when the
        caller does not take all items.
        """
        done = False
        try:
            for reply in self._exchange(method, seconds, arguments):
                if "done" in reply:
                    done = True
                    return
                yield reply["item"]
        finally:
            if not done:
                self.close()

    def _value(self, method: str, **arguments: Any) -> Any:
        return next(self._exchange(method, 0.0, arguments))["done"]

    def _exchange(self, method: str, seconds: float, arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The replies to one request; the last one has `done`."""
        assert self.process.stdin
        with suppress(OSError):  # it has ended, which the end of its replies reports
            self.process.stdin.write(json.dumps([method, arguments]) + "\n")
            self.process.stdin.flush()
        while True:
            try:
                line = self._replies.get(timeout=self.patience + seconds)
            except queue.Empty:
                self.close()  # a late reply would be taken for that to the next request
                raise Unavailable(
                    f"vLLM said nothing for {self.patience + seconds:g} s, which is backend.ready_seconds="
                    f"{self.patience:g} and {TOKEN_SECONDS:g} s per token: it seems to hang"
                ) from None
            if not line:
                raise Unavailable(f"vLLM ended (exit code {self.process.wait()}): {self._last_lines()}")
            reply = json.loads(line)
            if "error" in reply:
                said, reason = self._last_lines(), reply["error"]
                raise Unavailable(f"vLLM refuses: {said if ELSEWHERE in reason else reason}")
            yield reply

    def _last_lines(self) -> str:
        log = self._log.fileno()  # read by position, as vLLM writes at the place where this process is in the file
        return last_lines(os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace"))

    def _listen(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._replies.put(line)
        self._replies.put("")


@dataclass(frozen=True)
class EngineModel(LanguageModel):
    """A causal language model that an engine runs, under the plan that the engine has at the time."""

    engine: Engine
    """The engine, with the checkpoint and the plan."""
    tokenizer: Any
    """The checkpoint's tokenizer, in this process."""
    checkpoint_config: Any
    """The checkpoint's configuration, a transformers config."""
    ends: tuple[int, ...]
    """Tokens that end a text."""
    template_arguments: Mapping[str, Any]
    """Arguments of its chat template besides the messages."""

    @property
    def config(self) -> Any:
        return self.checkpoint_config

    @property
    def max_length(self) -> int:
        """Tokens that the engine reads, prompt and answer together."""
        length: int = self.engine.about["max_length"]
        return length

    def complete(
        self, prompts: Sequence[str], rows: Sequence[AnswerRow | None], spec: GenSpec
    ) -> Iterator[tuple[int, str, None]]:
        """(index, text, None) of each prompt as soon as it is done; vLLM batches them in its own way."""
        if not prompts:
            return
        encoded = self.encoded(prompts, spec)
        order = fitting([len(ids) for ids in encoded], spec, self.max_length)
        request = {
            "prompts": [encoded[index] for index in order],
            "most": spec.max_new_tokens,
            "stop": self.early_stop(spec),
            "ends": self.ends,
        }
        texts = self.engine.items("generate", TOKEN_SECONDS * spec.max_new_tokens, **request)
        for number, tokens, log_likelihood in texts:
            check_finite(log_likelihood, "log-likelihood")
            index = order[number]
            text = continuation(self.tokenizer, encoded[index], tokens, self.ends)
            yield index, cut(text, spec.stop, prompts[index], chat=spec.chat), None

    def log_likelihoods(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], batch_size: int
    ) -> list[Likelihood]:
        """As `LanguageModel.log_likelihoods`; vLLM batches in its own way."""
        if not rows:
            return []
        request = {"rows": [list(row) for row in rows], "starts": list(starts)}
        found = self.engine.items("log_likelihoods", TOKEN_SECONDS * max(map(len, rows)), **request)
        return [(total, likeliest) for _, total, likeliest in sorted(found)]


def on_engine(engine: Engine, checkpoint: Path, model: ModelConfig) -> EngineModel:
    """The model of an engine that has loaded `checkpoint`."""
    from transformers import AutoConfig

    from moe_lab.models.load import load_tokenizer, quiet

    with quiet():
        tokenizer = load_tokenizer(checkpoint, trust_remote_code=model.trust_remote_code)
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=model.trust_remote_code)
    ends = end_tokens(checkpoint, tokenizer)
    return EngineModel(engine, tokenizer, config, tuple(ends), model.template_arguments)


def opened(checkpoint: Path, backend: BackendConfig, model: ModelConfig, plan: Plan | None) -> EngineModel:
    """The model in `checkpoint` on an engine, with `plan` as its mask. The engine stays open for the next call.

    An engine that could not be started is not started again for the same settings in this process.
    """
    settings = [str(checkpoint), asdict(backend), model.dtype, model.device, model.threads, model.trust_remote_code]
    key = json.dumps(settings, sort_keys=True)
    if key in _REFUSED:
        raise Unavailable(_REFUSED[key])
    if _OPEN.get("key") != key or _OPEN["engine"].process.poll() is not None:
        close()
        try:
            _OPEN.update(engine=Engine(checkpoint, backend, model), key=key)
        except Unavailable as error:
            _REFUSED[key] = str(error)
            raise
    engine: Engine = _OPEN["engine"]
    engine.set_plan(plan)
    return on_engine(engine, checkpoint, model)


def _dtype(checkpoint: Path, model: ModelConfig) -> str:
    """The precision that a loaded model would have; vLLM by itself never takes fp32."""
    from moe_lab.models.device import precision
    from moe_lab.models.streamed import stored_dtype

    dtype = precision(model)
    return str(stored_dtype(checkpoint) if dtype == "auto" else dtype).removeprefix("torch.")


def close() -> None:
    """End the engine that is open, if there is one; a model that is loaded here may need its memory."""
    if _OPEN:
        _OPEN["engine"].close()
        _OPEN.clear()


_OPEN: dict[str, Any] = {}
_REFUSED: dict[str, str] = {}
"""Settings of an engine that did not start -> why."""
