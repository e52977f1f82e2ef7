"""Run llama.cpp's converter in a child process: `python -m moe_lab.child_process` serves this
module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def convert(converter: str, pre: str | None, arguments: list[str]) -> None:
    """Run the script `converter` with the command line `arguments`. `pre`: llama.cpp's name of the
    model's pre-tokenizer, for a vocabulary that the converter does not recognise."""
    sys.path[:0] = [str(Path(converter).parent), str(Path(converter).parent / "gguf-py")]
    script = importlib.import_module(Path(converter).stem)
    # without this timeout, transformers would wait 15 s for a user to allow code of the checkpoint
    dynamic_modules: Any = importlib.import_module("transformers.dynamic_module_utils")
    dynamic_modules.TIME_OUT_REMOTE_CODE = 0
    # some versions of the converter have their classes in conversion.base, others in the script
    module = sys.modules.get("conversion.base", script)
    # the option --no-mtp would be an error for families without layers for multi-token prediction
    if hasattr(module, "ModelBase"):
        module.ModelBase.no_mtp = True
    if pre:
        _set_pre_tokenizer(module, pre)
    sys.argv = [converter, *arguments]
    script.main()


def _set_pre_tokenizer(module: Any, pre: str) -> None:
    """Make the converter use the pre-tokenizer `pre` for a vocabulary that it does not
    recognise."""
    original = module.TextModel.get_vocab_base_pre

    def name_or_pre(model: Any, tokenizer: Any) -> str:
        try:
            name: str = original(model, tokenizer)
        except NotImplementedError:
            return pre
        return name

    module.TextModel.get_vocab_base_pre = name_or_pre
