"""A tokenizer with a hundred words, w0 ... w99, each of which is one token, and with the special
tokens <s> and </s>."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_lab.config import CalibrationConfig

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{{ eos_token }}"
)


def make_tokenizer(chat_template: str | None = None, max_length: int = 100_000) -> Any:
    """A tokenizer that puts <s> in front when special tokens are added, as many published
    tokenizers do: `w3 w5` -> <s> w3 w5."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "user", "assistant", *(f"w{number}" for number in range(100))]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
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
        model_max_length=max_length,
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
    """Function (path, changed settings) that returns settings of a small set."""

    def make(path: object, **changes: Any) -> CalibrationConfig:
        defaults: dict[str, Any] = {
            "name": "words",
            "length": 8,
            "tokens": 16,
            "batch_tokens": 8192,
            "order": "first",
            "special_tokens": False,
        }
        return CalibrationConfig(path=str(path), **{**defaults, **changes})

    return make


@pytest.fixture
def source(
    tmp_path: Path, settings: Callable[..., CalibrationConfig]
) -> Callable[..., CalibrationConfig]:
    """Function (records, stem, changed settings) that writes the records to the file `stem`.jsonl
    and returns settings of this set."""

    def make(*records: Any, stem: str = "set", **changes: Any) -> CalibrationConfig:
        file = tmp_path / f"{stem}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return settings(file, **changes)

    return make
