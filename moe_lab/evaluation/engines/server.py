"""Serve a checkpoint: start a server on a free port, check that it serves the right model, and stop it."""

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
from functools import partial
from pathlib import Path
from typing import Any

from moe_lab.config import BackendConfig, ModelConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation.back_ends import command_line, last_lines, search_path
from moe_lab.evaluation.engines import end_tokens
from moe_lab.evaluation.engines.completions import Completions, ServedModel
from moe_lab.paths import caches

GRACE = 20.0
"""Seconds between telling a server to stop and killing it."""
_POLL_SECONDS, _ANSWER = 0.2, 30.0
_ENDING = 2.0
"""Seconds in which a server that has closed a connection may end."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy to this machine


@contextmanager
def serving(checkpoint: Path, backend: BackendConfig, model: ModelConfig, name: str) -> Iterator[ServedModel]:
    """A context with a server of the checkpoint; the name of the served model begins with `name`.

    The server reads a view of the checkpoint with greedy generation settings, because it may take defaults from the
    settings of the checkpoint's author. Raises UserError for a folder that is no checkpoint, Unavailable for a server
    that ends, serves another model or does not answer within backend.ready_seconds.
    """
    if not (checkpoint / "config.json").is_file():
        raise UserError(f"backend=server: {checkpoint} is no checkpoint: expected a folder with config.json")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=model.trust_remote_code)
    config = _json(checkpoint / "config.json")
    max_length = (config.get("text_config") or config).get("max_position_embeddings")
    with tempfile.TemporaryDirectory(prefix="moe_lab-server-") as scratch:
        view = Path(scratch, "checkpoint")
        make_view(checkpoint, view, tokenizer)
        port = _free_port()
        served_name = f"{name}-{secrets.token_hex(4)}"  # so that another server cannot be mistaken for this one
        with running(command_line(backend, view, port, served_name), Path(scratch, "log")) as server:
            url = f"http://127.0.0.1:{port}/v1"
            completions = _await(server, url, (served_name, str(view)), backend.ready_seconds)
            yield ServedModel(completions, tokenizer, max_length, model.template_arguments, backend.ready_seconds)


# The checkpoint as it is served.


def make_view(checkpoint: Path, view: Path, tokenizer: Any) -> None:
    """Make a folder with links to the checkpoint's files and its own, neutral settings of generation and decoding."""
    view.mkdir()
    changed = {
        "generation_config.json": _greedy(checkpoint, tokenizer),
        "tokenizer_config.json": {**_json(checkpoint / "tokenizer_config.json"), "clean_up_tokenization_spaces": False},
    }
    for file_name, content in changed.items():  # before the links, so that nothing is ever written through a link
        (view / file_name).write_text(json.dumps(content))
    for file in checkpoint.iterdir():
        if file.name not in changed:
            (view / file.name).symlink_to(file.resolve())


def _greedy(checkpoint: Path, tokenizer: Any) -> dict[str, Any]:
    """Settings of greedy generation, with the same end tokens as `LoadedModel` uses."""
    ends = end_tokens(checkpoint, tokenizer)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    return {"do_sample": False, "eos_token_id": ends, "pad_token_id": padding}


def _json(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return document


# The process.


class Server:
    """The process of a server, and its log."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log

    def last_words(self, seconds: float = 0.0) -> str | None:
        """Why the process ended, by its log; None if it still runs after `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return None if self.process.poll() is None else last_lines(self.log.read_text(errors="replace"))


@contextmanager
def running(command: list[str], log: Path) -> Iterator[Server]:
    """A context that runs the command as a process group, which ends with the context and when this process dies."""
    watcher = Path(__file__).with_name("server_process.py")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", str(watcher), str(os.getpid()), str(GRACE), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"HF_HUB_OFFLINE": "1", **os.environ, "PATH": search_path(), "XDG_CACHE_HOME": str(caches())},
            start_new_session=True,
        )
    try:
        yield Server(process, log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE + 5)
        with suppress(ProcessLookupError):  # as expected, no process of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


# The endpoint.


def _await(server: Server, url: str, names: tuple[str, str], seconds: float) -> Completions:
    """Wait until the server answers requests for a model of one of these names."""
    deadline = time.monotonic() + seconds
    while (served := _models(url)) is None:
        if (ended := server.last_words()) is not None:
            raise Unavailable(f"the server ended before it was ready: {ended}")
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the server did not answer at {url} within backend.ready_seconds={seconds:g}; the last it said: "
                f"{last_lines(server.log.read_text(errors='replace'))}"
            )
        time.sleep(_POLL_SECONDS)
    # `vllm serve` lists the name it is given; `transformers serve` lists other models and takes the checkpoint's path.
    name = names[0] if names[0] in served else names[1]
    completions = Completions(url, name, partial(server.last_words, _ENDING))
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
    """Names of the models that the server lists, [] if it answers without a list; None while nothing answers."""
    try:
        with _DIRECT.open(f"{url}/models", timeout=_ANSWER) as answer:
            return [str(entry["id"]) for entry in json.load(answer)["data"]]
    except urllib.error.HTTPError as error:
        return None if error.code == 503 else []  # 503: it is still loading
    except (OSError, http.client.HTTPException):
        return None
    except (ValueError, KeyError, TypeError):
        return []
