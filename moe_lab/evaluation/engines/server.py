"""A server with OpenAI's interface as an engine that generates texts."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import openai

from moe_lab.child_process import ChildProcess
from moe_lab.config import BackendConfig, ModelConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation.engines import (
    TOKEN_SECONDS,
    Engine,
    GeneratedText,
    GenerationSettings,
    Prompt,
    appended_tokens,
    command_line,
    end_token_ids,
    error_summary,
    sampling_defaults,
    search_path,
)
from moe_lab.evaluation.items import ThoughtMarks
from moe_lab.models.checkpoint import read_json, read_json_if_there
from moe_lab.models.config_json import eos_tokens
from moe_lab.models.files import paths_in
from moe_lab.paths import user_cache
from moe_lab.pruning.export.write import replace_tokenizer
from moe_lab.start import command

GRACE = 20.0
"""Seconds between telling a server to stop and killing it."""
STOPS = 4
"""Most stop texts of one request, by OpenAI's limit and vLLM's default."""
COMPLETE = ("stop", "length")
"""OpenAI's values of finish_reason for complete texts."""
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 30.0
"""Seconds that a server may take at least for its first text."""
PORTS = range(15_000, 32_000)
"""Ports for servers: below the range from which systems take ports for outgoing connections."""
_EXIT_SECONDS = 2.0
"""Seconds to wait for the end of a server that has closed a connection."""
_MOST_CHARACTERS = 1000
"""Most characters that are quoted of the reason that a server gives."""


@dataclass(frozen=True)
class ServedModel(Engine):
    """A causal language model that a server runs."""

    url: str
    """Base address, such as http://127.0.0.1:8000/v1."""
    name: str
    """Name of the model at the server."""
    tokenizer: Any
    max_length: int | None
    template_arguments: Mapping[str, Any]
    ready_seconds: float = BackendConfig.ready_seconds
    """A server counts as hung if it finishes no text within these seconds plus the time that one
    text may take."""
    exit_reason: Callable[[], str | None] = lambda: None
    """Returns the last output of a server that has ended; None while it runs."""
    end_token_ids: list[int] = field(default_factory=list)
    """Tokens besides the tokenizer's end token at which the server ends a text."""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    batches = 16  # so that the server rarely waits for the last text of a batch
    scores = False

    def __post_init__(self) -> None:
        """Raise UserError for a tokenizer that appends tokens, such as an end token, to prompts."""
        if appended_ids := appended_tokens(self.tokenizer):
            raise UserError(
                "backend=server: the model's tokenizer appends "
                f"{self.tokenizer.decode(appended_ids)!r} to every prompt, and a server tokenizes "
                "prompts itself: expected backend=hf or backend=vllm"
            )

    def generate(self, prompts: Sequence[Prompt], batch_size: int) -> list[GeneratedText]:
        """Implement `Engine.generate`.

        Unavailable if the server finishes no text in time. A server omits special tokens from
        texts. UserError if such a token is needed: as the mark of a thought in a chat, or in a stop
        text.
        """
        for generation in dict.fromkeys(prompt.generation for prompt in prompts):
            self._check_marks(generation)
        texts = [self._request_text(prompt) for prompt in prompts]
        pool = ThreadPoolExecutor(batch_size)
        with self.client() as client:
            pending = futures = [
                pool.submit(self.complete, client, text, prompt.generation, prompt.seed)
                for text, prompt in zip(texts, prompts, strict=True)
            ]
            longest = max(prompt.generation.max_tokens for prompt in prompts)
            seconds = self.ready_seconds + TOKEN_SECONDS * longest
            try:
                while pending:
                    done, not_done = wait(pending, seconds, FIRST_COMPLETED)
                    if not done:
                        raise Unavailable(
                            f"the server of {self.name} runs and wrote no text for {seconds:g} s, "
                            f"which is backend.ready_seconds={self.ready_seconds:g} and "
                            f"{TOKEN_SECONDS:g} s per token: it seems to hang"
                        )
                    for future in done:
                        future.result()  # raises the request's error
                    pending = list(not_done)
                return [future.result() for future in futures]
            finally:  # do not wait for pending requests: the server may hang
                pool.shutdown(wait=False, cancel_futures=True)

    def _check_marks(self, generation: GenerationSettings) -> None:
        """Raise UserError if a special token that the server omits is needed."""
        end_token_ids = eos_tokens(self.end_token_ids, self.tokenizer)
        thought_marks = ThoughtMarks.of(self.tokenizer)
        # An end token ends a text even if it is omitted. `generation.marks` are marks of thoughts,
        # which matter only in a chat, and special tokens in stop texts.
        if omitted_marks := [
            mark
            for token, mark in generation.marks
            if token not in end_token_ids and (generation.chat or not thought_marks.contain(mark))
        ]:
            raise UserError(
                "backend=server: a server leaves out special tokens, and "
                f"{', '.join(omitted_marks)} part the model's thoughts from its answers, or end "
                "them: expected backend=hf or backend=vllm"
            )

    def client(self, seconds: float | None = None) -> openai.OpenAI:
        """An HTTP client for the server. `seconds`: timeout of a request. By default there is no
        timeout, because a request may have to wait for all earlier requests."""
        transport = openai.DefaultHttpxClient(trust_env=False)  # no proxy to this machine
        return openai.OpenAI(
            base_url=self.url, api_key="none", timeout=seconds, max_retries=0, http_client=transport
        )

    def complete(
        self, client: openai.OpenAI, prompt: str, generation: GenerationSettings, seed: int = 0
    ) -> GeneratedText:
        """The server's text after `prompt`, generated without penalties. At most STOPS stop texts
        are sent. `seed`: seed of the random numbers, if the text is sampled. UserError for a
        refused request, and for a text of another model. Unavailable for a text that the server
        broke off, and for a server that has ended or fails."""
        # if the prompt ends with the beginning of a stop text, some servers would stop at once
        sent_stops = [
            stop_text
            for stop_text in generation.stop
            if not any(prompt.endswith(stop_text[:end]) for end in range(1, len(stop_text)))
        ]
        # OpenAI's interface lacks top_k and min_p: a server without them must refuse them
        settings = generation.sampling.distribution.items()
        fields = {"temperature": 0, **{name: value for name, value in settings if value}}
        if fields["temperature"]:
            fields["seed"] = seed
        server = f"the server of {self.name}"
        try:
            completion = client.completions.create(
                model=self.name,
                prompt=prompt,
                max_tokens=generation.max_tokens,
                stop=sent_stops[:STOPS] or None,
                frequency_penalty=0,
                presence_penalty=0,
                extra_body=fields,
            )
            choice = completion.choices[0]
            model = completion.model
            text = choice.text
            finish_reason = choice.finish_reason
        except openai.APIConnectionError as error:
            cause = self.exit_reason()
            state = f"ended: {cause}" if cause else f"does not answer ({error.__cause__ or error})"
            raise Unavailable(f"{server} {state}") from None
        except openai.APIStatusError as error:
            error_type = UserError if error.status_code < 500 else Unavailable
            if error_type is Unavailable and (cause := self.exit_reason()):
                raise Unavailable(f"{server} ended: {cause}") from None
            message = error.body.get("message") if isinstance(error.body, dict) else None
            reply = " ".join(str(message or error.response.text).split())[:_MOST_CHARACTERS]
            raise error_type(f"{server} answered HTTP {error.status_code}: {reply}") from None
        except (AttributeError, IndexError, TypeError, ValueError):  # the client checks no types
            raise UserError(f"what answers at {self.url} gives no text completions") from None
        # `transformers serve` answers with NAME@REVISION
        if str(model).removesuffix("@main") != self.name:
            raise UserError(
                f"what answers at {self.url} serves {model}, expected {self.name}: is it another "
                "server?"
            )
        if not isinstance(text, str) or finish_reason not in COMPLETE:
            raise Unavailable(
                f"{server} broke a text off: finish_reason={finish_reason}, expected "
                f"{' or '.join(COMPLETE)}"
            )
        return GeneratedText(text, "limit" if finish_reason == "length" else "end")

    def _request_text(self, prompt: Prompt) -> str:
        """The text to send for `prompt`: the server tokenizes it to the prompt's tokens. UserError
        if there is no such text."""
        # a server puts the tokenizer's BOS token, if there is one, before every text
        for text in (prompt.text, prompt.text.removeprefix(self.tokenizer.bos_token or "")):
            if tuple(self.tokenizer(text).input_ids) == prompt.tokens:
                return text
        raise UserError(
            "a server adds the tokenizer's special tokens to every prompt, and the model's chat "
            "template allows no more tokens: expected backend=hf"
        )


@contextmanager
def served_model(
    checkpoint: Path, backend: BackendConfig, model: ModelConfig, name: str
) -> Iterator[ServedModel]:
    """Run a server with the model in `checkpoint` for the duration of a `with` block. The model's
    name at the server begins with `name`.

    UserError for a folder that is no checkpoint. Unavailable for a server that ends, serves another
    model or does not answer within backend.ready_seconds.
    """
    from moe_lab.models.load import load_tokenizer

    tokenizer = load_tokenizer(checkpoint, model)
    config = read_json(checkpoint / "config.json")
    # a multimodal model has the fields of its language model in text_config
    max_length = (config.get("text_config") or config).get("max_position_embeddings")
    with tempfile.TemporaryDirectory(prefix="moe_lab-server-") as scratch:
        view = Path(scratch, "checkpoint")
        # a server may take sampling settings of the checkpoint as defaults
        make_view(checkpoint, view, tokenizer)
        end_ids = end_token_ids(checkpoint, tokenizer)
        port = _free_port()
        # unique, so that another server at this port is not mistaken for the started server
        unique_name = f"{name}-{secrets.token_hex(4)}"
        with start_process(command_line(backend, view, port, unique_name)) as server:
            engine = ServedModel(
                url=f"http://127.0.0.1:{port}/v1",
                # servers that get no name go by the path of the checkpoint
                name=unique_name if "{name}" in str(backend.command) else str(view),
                tokenizer=tokenizer,
                max_length=max_length,
                template_arguments=model.template_arguments,
                ready_seconds=backend.ready_seconds,
                exit_reason=partial(_exit_reason, server, _EXIT_SECONDS),
                end_token_ids=end_ids,
                sampling_defaults=sampling_defaults(
                    read_json_if_there(checkpoint / "generation_config.json")
                ),
            )
            _wait_until_ready(engine, server)
            yield engine


def make_view(checkpoint: Path, view: Path, tokenizer: Any) -> None:
    """Make a folder `view` with links to the files of `tokenizer` and to the checkpoint's other
    files. Two files are written instead of linked: generation_config.json leaves sampling to each
    request, and tokenizer_config.json leaves spaces in decoded texts as they are."""
    end_ids = end_token_ids(checkpoint, tokenizer)
    folder = Path(tokenizer.name_or_path)
    written_files = {
        "generation_config.json": {
            # with a temperature of 0 in the request, generation is greedy
            "do_sample": True,
            "top_k": 0,
            "eos_token_id": end_ids,
            "pad_token_id": tokenizer.pad_token_id,  # `load_tokenizer` has set one
        },
        "tokenizer_config.json": {
            **read_json_if_there(folder / "tokenizer_config.json"),
            "clean_up_tokenization_spaces": False,
        },
    }
    for name in paths_in(checkpoint, ("**/*",)):
        (view / name).parent.mkdir(parents=True, exist_ok=True)
        (view / name).symlink_to((checkpoint / name).resolve())
    replace_tokenizer(view, folder)
    for name, content in written_files.items():
        (view / name).unlink(missing_ok=True)  # it may be a link to a file of the checkpoint
        (view / name).write_text(json.dumps(content))


def start_process(argv: Sequence[str]) -> ChildProcess:
    """Start a server. The server ends when the returned `ChildProcess` is closed or when this
    process dies."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        "PATH": search_path(),
        "XDG_CACHE_HOME": str(user_cache()),
    }
    return ChildProcess(
        command("moe_lab.evaluation.server_process", str(GRACE), *argv), environment
    )


def _exit_reason(server: ChildProcess, seconds: float = 0.0) -> str | None:
    """Why the server ended; None if the server still runs after `seconds`."""
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(seconds)
    return None if server.process.poll() is None else error_summary(server.log())


def _free_port() -> int:
    """A random port of `PORTS` that is free now."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _wait_until_ready(engine: ServedModel, server: ChildProcess) -> None:
    """Wait until the server of `engine` has generated a text, which alone shows that the checkpoint
    is loaded under the name of `engine`."""
    deadline = time.monotonic() + engine.ready_seconds
    # whether the server has ended is asked below, without waiting for its end
    probe = replace(engine, exit_reason=lambda: None)
    while True:
        problem = ""
        try:
            with probe.client(max(_ANSWER_SECONDS, deadline - time.monotonic())) as client:
                probe.complete(client, "Hello", GenerationSettings(1))
        except Unavailable as error:
            problem = str(error)
        except UserError as error:
            raise Unavailable(f"the server does not serve the checkpoint ({error})") from None
        # it may have ended although another server at its port has answered
        if (reason := _exit_reason(server)) is not None:
            raise Unavailable(f"the server ended before it was ready: {reason}")
        if not problem:
            return
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the server did not answer at {engine.url} within "
                f"backend.ready_seconds={engine.ready_seconds:g} ({problem}); its last output: "
                f"{error_summary(server.log())}"
            )
        time.sleep(_POLL_SECONDS)
