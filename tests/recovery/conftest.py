"""A tiny model on disk, its tokenizer, and texts in its words."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer


def sentence(words: Any) -> str:
    return " ".join(f"w{word}" for word in words)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a model of two layers, text.jsonl (plain documents) and answers.jsonl (an
    instruction set)."""
    folder = tmp_path_factory.mktemp("model")
    tiny.save("olmoe", folder, num_hidden_layers=2)
    documents = [
        {"text": sentence(3 + (7 * n + i * i) % 90 for i in range(5 + n))} for n in range(20)
    ]
    pairs = [
        {"instruction": sentence(range(3 + n, 8 + n)), "output": sentence(range(60 + n, 64 + n))}
        for n in range(12)
    ]
    for name, records in (("text", documents), ("answers", pairs)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer
