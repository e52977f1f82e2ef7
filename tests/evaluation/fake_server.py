"""`transformers serve` without its web framework: fake_server.py CHECKPOINT PORT.

Loads, sets, generates and decodes with the server's own functions; only HTTP, and the few lines of its handler of
/v1/completions, are of another make. For machines that lack fastapi and uvicorn.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from endpoint import Reply, _server, completion
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseHandler, GenerateManager, GenerationState


def serve(checkpoint: str, port: int) -> None:
    manager = ModelManager(device="cpu", dtype="float32", force_model=checkpoint)
    handler = BaseHandler(manager, GenerationState())
    thread = GenerateManager()

    def answer(body: dict[str, Any]) -> Reply:
        if body["model"] != checkpoint:
            return Reply({"detail": f"Server is pinned to '{checkpoint}'"}, 400)
        name = manager.process_model_name(checkpoint)
        model, tokenizer = manager.load_model_and_processor(name)
        settings = handler._build_generation_config(body, model.generation_config)
        settings.max_new_tokens = body["max_tokens"]
        settings.repetition_penalty = 1.0 + body["frequency_penalty"]
        if body.get("stop") is not None:
            settings.stop_strings = body["stop"]
        inputs = tokenizer(body["prompt"], return_tensors="pt")
        text, _, ids = asyncio.run(thread.generate_non_streaming(model, tokenizer, inputs, settings, "x"))
        return completion(text, name, "length" if len(ids) >= body["max_tokens"] else "stop")

    server, _ = _server(answer, ["some/other-model"], port)
    server.serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
