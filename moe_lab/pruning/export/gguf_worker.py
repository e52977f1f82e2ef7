"""Run llama.cpp's converter, in a process of its own: `python -m moe_lab.child_process` serves this
module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def convert(converter: str, pre: str | None, arguments: list[str]) -> None:
    """Run the converter's main function with these arguments. `pre` is its name for the
    pre-tokenizer of the model, for a vocabulary that it does not recognise; None if there is no
    such name."""
    sys.path[:0] = [str(Path(converter).parent), str(Path(converter).parent / "gguf-py")]
    script = importlib.import_module(Path(converter).stem)
    # No code of a checkpoint is run, and nobody is there to be asked about it, for which 15 s would
    # be waited.
    remote: Any = importlib.import_module("transformers.dynamic_module_utils")
    remote.TIME_OUT_REMOTE_CODE = 0
    library = sys.modules.get("conversion.base", script)
    # as --no-mtp does, which is an error for families without such layers
    if hasattr(library, "ModelBase"):
        library.ModelBase.no_mtp = True
    if pre:
        _name_pre_tokenizer(library, pre)
    sys.argv = [converter, *arguments]
    script.main()


def _name_pre_tokenizer(module: Any, pre: str) -> None:
    """Make the converter take `pre` for the name of a pre-tokenizer that it does not recognise. It
    recognises vocabularies, by a hash of the tokens of a fixed text, so that no new one is ever
    recognised."""
    recognised = module.TextModel.get_vocab_base_pre

    def recognised_or_named(model: Any, tokenizer: Any) -> str:
        try:
            name: str = recognised(model, tokenizer)
        except NotImplementedError:
            return pre
        return name

    module.TextModel.get_vocab_base_pre = recognised_or_named
