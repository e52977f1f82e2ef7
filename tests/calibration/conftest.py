"""A tokenizer of a hundred words, made here: w0 ... w99, each one token, with the special tokens
<s> and </s>."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_lab.config import CalibrationConfig

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{{ eos_token }}"
)


def make_tokenizer(chat_template: str | None = None, longest: int = 100_000) -> Any:
    """`w3 w5` -> <s> w3 w5: special tokens add <s> in front, as many published tokenizers do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "user", "assistant", *(f"w{number}" for number in range(100))]
    tokenizer = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=chat_template,
        model_max_length=longest,
    )


@pytest.fixture
def tokenizer_with() -> Callable[..., Any]:
    return make_tokenizer


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def chat_tokenizer() -> Any:
    return make_tokenizer(TEMPLATE)


@pytest.fixture
def settings() -> Callable[..., CalibrationConfig]:
    """Small settings around a path; keywords change them."""

    def make(path: object, **changes: Any) -> CalibrationConfig:
        small: dict[str, Any] = {
            "name": "words",
            "length": 8,
            "tokens": 16,
            "order": "first",
            "special_tokens": False,
        }
        return CalibrationConfig(path=str(path), **{**small, **changes})

    return make


@pytest.fixture
def source(
    tmp_path: Path, settings: Callable[..., CalibrationConfig]
) -> Callable[..., CalibrationConfig]:
    """Settings of a set of JSON lines with these records, in the file `stem`.jsonl; keywords change
    them."""

    def make(*records: Any, stem: str = "set", **changes: Any) -> CalibrationConfig:
        file = tmp_path / f"{stem}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return settings(file, **changes)

    return make
