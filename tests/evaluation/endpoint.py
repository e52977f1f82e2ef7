"""An OpenAI-compatible endpoint for tests, which behaves as it is told; as a program, a server that
can be started.

Standard library only, so that it starts at once.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What the endpoint sends."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


def message(text: str | None, **choice: Any) -> Reply:
    """A chat completion."""
    answer = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text},
        **choice,
    }
    return Reply(
        {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [answer]}
    )


def completion(text: str, model: str, finish_reason: str = "stop") -> Reply:
    """A text completion."""
    answer = {"index": 0, "finish_reason": finish_reason, "text": text}
    return Reply(
        {"id": "x", "object": "text_completion", "created": 0, "model": model, "choices": [answer]}
    )


@dataclass
class Endpoint:
    """A running endpoint and what it was asked."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def endpoint(
    answer: Callable[[dict[str, Any]], Reply], models: Sequence[str] = (), port: int = 0
) -> Iterator[Endpoint]:
    """Listens on a port of this machine, by default on a free one; `answer` gets the body of each
    request."""
    found = Endpoint("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(
                Reply(
                    {"object": "list", "data": [{"id": name, "object": "model"} for name in models]}
                )
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.asked.append(body)
            found.headers.append({name.lower(): value for name, value in self.headers.items()})
            self._send(answer(body))

        def _send(self, reply: Reply) -> None:
            content = (
                reply.body.encode()
                if isinstance(reply.body, str)
                else json.dumps(reply.body).encode()
            )
            self.send_response(reply.status)
            self.send_header("Content-Type", "application/json")
            for name, value in {"Content-Length": str(len(content)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            """Says nothing."""

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *arguments: Any) -> None:
            """A client that gave up is no error of the endpoint."""

    server = Quiet(("127.0.0.1", port), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()


# endpoint.py PORT MODEL: goes on with a prompt by its length, until it is stopped
if __name__ == "__main__":
    served = sys.argv[2]
    with endpoint(
        lambda body: completion(f" {len(body['prompt'])}", served), [served], int(sys.argv[1])
    ):
        threading.Event().wait()
