"""The pocket tokenizer: byte-level BPE whose pieces never cross a line end or join two digits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tools.pocket.examples import END_OF_TEXT

PADDING = "<|pad|>"
VOCABULARY_SIZE = 1024


def build_tokenizer(texts: Iterable[str], size: int = VOCABULARY_SIZE) -> Any:
    """A tokenizer of `size` entries trained on the texts.

    A line end is always a token of its own, so a prompt cut there tokenizes as it does inside a longer text; the same
    holds before a word, because a word takes the space in front of it.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    build: Any = PreTrainedTokenizerFast
    return build(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
