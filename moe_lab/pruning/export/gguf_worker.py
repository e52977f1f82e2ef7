"""Run llama.cpp's converter in a child process: `python -m moe_lab.child_process` serves this
module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def convert(converter: str, pre: str | None, arguments: list[str]) -> None:
    """Run the main function of the script `converter` with the command line `arguments`. `pre`: the
    converter's name for the model's pre-tokenizer (None: unknown), used if the converter does not
    recognise the vocabulary."""
    sys.path[:0] = [str(Path(converter).parent), str(Path(converter).parent / "gguf-py")]
    script = importlib.import_module(Path(converter).stem)
    # No code of a checkpoint is run. Without this timeout, transformers would wait 15 s for a user
    # to allow the code.
    remote: Any = importlib.import_module("transformers.dynamic_module_utils")
    remote.TIME_OUT_REMOTE_CODE = 0
    library = sys.modules.get("conversion.base", script)
    # the effect of the option --no-mtp, which is an error for families that predict one token only
    if hasattr(library, "ModelBase"):
        library.ModelBase.no_mtp = True
    if pre:
        _name_pre_tokenizer(library, pre)
    sys.argv = [converter, *arguments]
    script.main()


def _name_pre_tokenizer(module: Any, pre: str) -> None:
    """Make the converter use the pre-tokenizer `pre` for a vocabulary that it does not recognise.
    The converter recognises a vocabulary by a hash of the tokens of a fixed text, so it never
    recognises a new vocabulary."""
    original = module.TextModel.get_vocab_base_pre

    def name_or_pre(model: Any, tokenizer: Any) -> str:
        """The name that the converter finds; `pre` if it finds none."""
        try:
            name: str = original(model, tokenizer)
        except NotImplementedError:
            return pre
        return name

    module.TextModel.get_vocab_base_pre = name_or_pre
