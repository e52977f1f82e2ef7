"""An OpenAI-compatible endpoint with given replies for tests; as a program, a server.

Standard library only, so that it starts at once.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """A reply of the endpoint."""

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
    """A running endpoint with the bodies and headers of its requests."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def endpoint(answer: Callable[[dict[str, Any]], Reply], port: int = 0) -> Iterator[Endpoint]:
    """Run an endpoint on a port of this machine, by default on a free one. `answer` is called with
    the body of each request and returns the reply."""
    running = Endpoint("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            running.requests.append(body)
            running.headers.append({name.lower(): value for name, value in self.headers.items()})
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
            """Log nothing."""

    class QuietServer(ThreadingHTTPServer):
        def handle_error(self, *arguments: Any) -> None:
            """Ignore errors: a client may close its connection early."""

    server = QuietServer(("127.0.0.1", port), Handler)
    running.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    try:
        yield running
    finally:
        server.shutdown()
        server.server_close()


# endpoint.py PORT MODEL: completes a prompt with the length of the prompt, until it is stopped
if __name__ == "__main__":
    served = sys.argv[2]
    with endpoint(lambda body: completion(f" {len(body['prompt'])}", served), int(sys.argv[1])):
        threading.Event().wait()
