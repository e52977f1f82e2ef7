"""A server of a checkpoint: started on a free port, checked for the right model, and stopped in any case."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moe_lab.config import BackendConfig, ModelConfig
from moe_lab.errors import Unavailable, UserError, mask
from moe_lab.evaluation.served_model import Completions, ServedModel
from moe_lab.evaluation.server_command import command_line, search_path

GRACE = 20.0
"""Seconds a server that is told to stop may take before it is killed."""
_WATCHER = Path(__file__).with_name("server_process.py")
_LOOK, _ANSWER = 0.2, 30.0
_TAIL = 60
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy to this machine


@contextmanager
def serving(checkpoint: Path, backend: BackendConfig, model: ModelConfig, name: str) -> Iterator[ServedModel]:
    """A server of the checkpoint for as long as the context lasts; `name` is what it is called there.

    What is served is a view of the checkpoint: the same files, but for the settings of generation, so that it is
    greedy whatever the checkpoint's author preferred. Raises UserError for a checkpoint that is none, Unavailable for
    a server that ends, serves another model or does not answer within backend.ready_seconds.
    """
    if not (checkpoint / "config.json").is_file():
        raise UserError(f"backend=server: {checkpoint} is no checkpoint: expected a folder with config.json")
    with tempfile.TemporaryDirectory(prefix="moe_lab-server-") as scratch:
        tokenizer = _tokenizer(checkpoint, model)
        view = Path(scratch, "checkpoint")
        make_view(checkpoint, view, tokenizer)
        port = _free_port()
        called = f"{name}-{secrets.token_hex(4)}"  # so that nobody else's server can be mistaken for this one
        with running(command_line(backend, view, port, called), Path(scratch, "log")) as server:
            url = f"http://127.0.0.1:{port}/v1"
            served = _await(server, url, (called, str(view)), backend.ready_seconds)
            arguments, patience = model.template_arguments, backend.ready_seconds
            yield ServedModel(served, tokenizer, _max_length(checkpoint), arguments, patience)


# What is served.


def _tokenizer(folder: Path, model: ModelConfig) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=model.trust_remote_code)


def make_view(checkpoint: Path, view: Path, tokenizer: Any) -> None:
    """A folder with the checkpoint's files as links, and neutral settings of generation and decoding."""
    view.mkdir()
    neutral = {
        "generation_config.json": _greedy(checkpoint, tokenizer),
        "tokenizer_config.json": {**_json(checkpoint / "tokenizer_config.json"), "clean_up_tokenization_spaces": False},
    }
    for file_name, content in neutral.items():  # first, so that nothing is ever written through a link
        (view / file_name).write_text(json.dumps(content))
    for file in checkpoint.iterdir():
        if file.name not in neutral:
            (view / file.name).symlink_to(file.resolve())


def _greedy(checkpoint: Path, tokenizer: Any) -> dict[str, Any]:
    """Settings of generation that prefer nothing, with the end tokens that a loaded model has."""
    for file in ("generation_config.json", "config.json"):
        own = _json(checkpoint / file).get("eos_token_id")
        if own is not None:
            break
    several = own if isinstance(own, list) else [own]
    ends = sorted({token for token in (*several, tokenizer.eos_token_id) if token is not None})
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    return {"do_sample": False, "eos_token_id": ends, "pad_token_id": padding}


def _max_length(checkpoint: Path) -> int | None:
    config = _json(checkpoint / "config.json")
    length: int | None = (config.get("text_config") or config).get("max_position_embeddings")
    return length


def _json(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return document


# The process.


class Server:
    """A running command line and what it says."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log

    def last_words(self) -> str | None:
        """The last it said, once it has ended; None while it runs."""
        return None if self.process.poll() is None else self.said()

    def said(self) -> str:
        """Its last lines as part of a sentence; more of them go to standard error, which workers keep."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        print(mask("\n".join(lines[-_TAIL:])), file=sys.stderr, flush=True)
        return "; ".join(line.strip() for line in lines[-2:]) or "it said nothing"


@contextmanager
def running(command: list[str], log: Path) -> Iterator[Server]:
    """The command as a process group that is gone afterwards: after an exception, and after this process dies, too."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", str(_WATCHER), str(os.getpid()), str(GRACE), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"HF_HUB_OFFLINE": "1", **os.environ, "PATH": search_path()},
            start_new_session=True,
        )
    try:
        yield Server(process, log)
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE + 5)
    with suppress(ProcessLookupError):  # as it should be
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


# The endpoint.


def _await(server: Server, url: str, names: tuple[str, str], seconds: float) -> Completions:
    """The completions of the server, once it answers with the model of one of these names."""
    deadline = time.monotonic() + seconds
    while (served := _models(url)) is None:
        if (ended := server.last_words()) is not None:
            raise Unavailable(f"the server ended before it was ready: {ended}")
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the server did not answer at {url} within backend.ready_seconds={seconds:g}; the last it said: "
                f"{server.said()}"
            )
        time.sleep(_LOOK)
    # `vllm serve` lists the name it is told; `transformers serve` lists other models and takes the checkpoint's path.
    completions = Completions(url, names[0] if names[0] in served else names[1], server.last_words)
    try:
        with completions.client(max(_ANSWER, deadline - time.monotonic())) as client:
            completions.complete(client, "Hello", 1, ())
    except UserError as error:
        ended = server.last_words()
        raise Unavailable(
            f"the server does not serve the checkpoint ({error}); it lists {', '.join(served) or 'no model'}"
            f"{f', and what was started ended: {ended}' if ended else ''}"
        ) from None
    if (ended := server.last_words()) is not None:
        raise Unavailable(f"the server ended ({ended}), and another one answers at {url}")
    return completions


def _models(url: str) -> list[str] | None:
    """The models the server lists, none where it answers without a list; None while nothing answers."""
    try:
        with _DIRECT.open(f"{url}/models", timeout=_ANSWER) as answer:
            return [str(entry["id"]) for entry in json.load(answer)["data"]]
    except urllib.error.HTTPError as error:
        return None if error.code == 503 else []  # 503: it is still loading
    except (OSError, http.client.HTTPException):
        return None
    except (ValueError, KeyError, TypeError):
        return []
