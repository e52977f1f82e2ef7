"""Run llama.cpp's converter in a child process: `python -m moe_lab.child_process` serves this
module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def convert(converter: str, pre: str | None, arguments: list[str]) -> None:
    """Run the main function of the script `converter` with the command line `arguments`. `pre`:
    llama.cpp's name of the model's pre-tokenizer, for a vocabulary that the converter does not
    recognise; None: not known."""
    sys.path[:0] = [str(Path(converter).parent), str(Path(converter).parent / "gguf-py")]
    script = importlib.import_module(Path(converter).stem)
    # No code of a checkpoint is run. Without this timeout, transformers would wait 15 s for a user
    # to allow the code.
    dynamic_modules: Any = importlib.import_module("transformers.dynamic_module_utils")
    dynamic_modules.TIME_OUT_REMOTE_CODE = 0
    # some versions of the converter have their classes in conversion.base, others in the script
    module = sys.modules.get("conversion.base", script)
    # Layers for multi-token prediction are not converted. The option --no-mtp has the same effect,
    # but is an error for families without such layers.
    if hasattr(module, "ModelBase"):
        module.ModelBase.no_mtp = True
    if pre:
        _set_pre_tokenizer(module, pre)
    sys.argv = [converter, *arguments]
    script.main()


def _set_pre_tokenizer(module: Any, pre: str) -> None:
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
