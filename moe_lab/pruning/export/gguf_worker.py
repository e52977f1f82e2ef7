"""Run llama.cpp's converter in a process that ends when the process that started it ends. Nothing of moe_lab is used.

    python -P gguf_worker.py CONVERTER PRE ARGUMENT ...

PRE is the converter's name for the pre-tokenizer of the model, for a vocabulary that it does not recognise; "" if there
is no such name. The rest are arguments of the converter. Standard input has to stay open until it is done.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any


def main(converter: Path, pre: str, arguments: list[str]) -> None:
    """Run the converter's main function with these arguments."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path[:0] = [str(converter.parent), str(converter.parent / "gguf-py")]
    script = importlib.import_module(converter.stem)
    # No code of a checkpoint is run, and nobody is there to be asked about it, for which 15 s would be waited.
    remote: Any = importlib.import_module("transformers.dynamic_module_utils")
    remote.TIME_OUT_REMOTE_CODE = 0
    library = sys.modules.get("conversion.base", script)
    if hasattr(library, "ModelBase"):  # as --no-mtp does, which is an error for families without such layers
        library.ModelBase.no_mtp = True
    if pre:
        _name_pre_tokenizer(library, pre)
    sys.argv = [str(converter), *arguments]
    script.main()


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the parent has closed its end, or has died
    os.kill(os.getpid(), signal.SIGKILL)


def _name_pre_tokenizer(module: Any, pre: str) -> None:
    """Make the converter take `pre` for the name of a pre-tokenizer that it does not recognise. It recognises
    vocabularies, by a hash of the tokens of a fixed text, so that no new one is ever recognised."""
    recognised = module.TextModel.get_vocab_base_pre

    def recognised_or_named(model: Any, tokenizer: Any) -> str:
        try:
            name: str = recognised(model, tokenizer)
        except NotImplementedError:
            return pre
        return name

    module.TextModel.get_vocab_base_pre = recognised_or_named


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
