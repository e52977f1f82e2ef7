"""Convert an exported checkpoint to GGUF, by llama.cpp's own converter. No torch in this
process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from moe_lab.child_process import ChildProcess, ErrorReply, ProcessEnded
from moe_lab.config import ExportConfig
from moe_lab.errors import Unavailable, UserError, mask
from moe_lab.models.checkpoint import open_checkpoint, read_json, read_json_if_there
from moe_lab.models.config_json import LAYERS_FIELD
from moe_lab.models.families import ROUTERS
from moe_lab.pruning.export.card import add_section
from moe_lab.pruning.export.write import copy_others, new_folder
from moe_lab.start import command

FILE = "model.gguf"
FETCHED = (
    Path(__file__).resolve().parents[3] / ".venv-llama" / "llama.cpp" / "convert_hf_to_gguf.py"
)
"""The converter that `make llama` fetches."""
PACKAGES = FETCHED.parents[1] / "packages"
"""What `make llama` installs for the converter: its own reader of GGUF files, and sentencepiece."""
LOG_LINES = 20
"""Last lines of a failing converter that are printed."""
TYPES = {"F32": "f32", "BF16": "bf16", "F16": "f16"}
"""Type of a tensor -> the converter's output type that holds its numbers exactly."""
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
DIGITS = {"type": "Digits", "individual_digits": True}
LINES = {"type": "Split", "pattern": {"String": "\n"}, "behavior": "Isolated", "invert": False}
PRE_TOKENIZERS = {"gpt-2": [BYTE_LEVEL], "smollm": [DIGITS, BYTE_LEVEL]}
"""llama.cpp's name of a pre-tokenizer -> its steps in tokenizer.json."""
LINE_BREAK = "Ċ"
"""A line break in the vocabulary of a byte-level tokenizer."""
LOADING = """The weights are in `{file}` ({size:,} bytes), converted by llama.cpp's own converter
without rounding, and not in safetensors. Load it with llama.cpp, or, for architectures that
transformers reads from GGUF, with

```python
config = AutoConfig.from_pretrained(folder)  # transformers does not read all of it from the file
AutoModelForCausalLM.from_pretrained(folder, gguf_file="{file}", config=config)
```"""


def converter(export: ExportConfig) -> Path:
    """Path of llama.cpp's converter: the setting export.converter, by default the converter that
    `make llama` fetched. UserError when the file does not exist."""
    path = FETCHED if export.converter is None else Path(export.converter).expanduser().absolute()
    if path.is_file():
        return path
    setting = (
        "export.format=gguf" if export.converter is None else f"export.converter={export.converter}"
    )
    raise UserError(
        f"{setting}: llama.cpp's converter is not there: copy llama.cpp's repository, and set "
        f"export.converter=PATH/{FETCHED.name}"
    )


def convert(checkpoint: Path, out: Path, path: Path, name: str) -> Path:
    """Convert the exported checkpoint in folder `checkpoint` to GGUF without rounding. Returns the
    new folder `out` with model.gguf and the checkpoint's files other than weights.

    `path`: llama.cpp's converter, a script. `name`: the model's name in model.gguf. UserError for a
    checkpoint whose layers differ."""
    if LAYERS_FIELD in read_json(checkpoint / "config.json"):
        raise UserError(
            "export.format=gguf: a GGUF file has one number of experts and one width for all "
            "layers, and this plan gives them different ones: expected allocation=uniform, or "
            "export=masked"
        )
    output_type = _output_type(checkpoint)
    with new_folder(out) as work:
        arguments = [
            str(checkpoint),
            "--outfile",
            str(work / FILE),
            "--outtype",
            output_type,
            "--model-name",
            name,
        ]
        _run(path, pre_tokenizer(checkpoint), arguments)
        copy_others(checkpoint, work)
        loading = LOADING.format(file=FILE, size=(work / FILE).stat().st_size)
        add_section(work, "GGUF", loading)
    return out


def pre_tokenizer(folder: Path) -> str | None:
    """llama.cpp's name of the pre-tokenizer in `folder`/tokenizer.json; None if PRE_TOKENIZERS does
    not have it."""
    tokenizer = read_json_if_there(folder / "tokenizer.json")
    model = tokenizer.get("model") or {}
    settings = tokenizer.get("pre_tokenizer") or {}
    if model.get("type") != "BPE" or tokenizer.get("normalizer") or model.get("ignore_merges"):
        return None
    steps = settings["pretokenizers"] if settings.get("type") == "Sequence" else [settings]
    # The step LINES prevents merges of a line break with other text. If the tokenizer has no such
    # merges, the tokens are the same without the step. A merge is a list of strings, or a string.
    if steps[0] == LINES and not any(LINE_BREAK in "".join(merge) for merge in model["merges"]):
        steps = steps[1:]
    return next(
        (name for name, known_steps in PRE_TOKENIZERS.items() if steps == known_steps), None
    )


def _output_type(checkpoint: Path) -> str:
    """The converter's output type with which it rounds no number. Vectors and routers do not count,
    because the converter stores them in fp32 with any output type."""
    types = set()
    for name, entry in open_checkpoint(checkpoint).tensors.items():
        if entry.dtype not in TYPES:
            raise UserError(
                f"export.format=gguf: {name} is of type {entry.dtype}: expected one of "
                f"{', '.join(TYPES)}, which GGUF can hold without rounding"
            )
        if len(entry.shape) > 1 and not {*ROUTERS} & {*name.split(".")}:
            types.add(entry.dtype)
    return TYPES[types.pop() if len(types) == 1 else "F32"]


def _run(path: Path, pre: str | None, arguments: list[str]) -> None:
    """Run llama.cpp's converter, the script `path`, in a child process. `pre`: as in
    `gguf_worker.convert`."""
    search_path = [*filter(None, [os.environ.get("PYTHONPATH")]), str(PACKAGES)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(search_path)}
    with ChildProcess(
        command("moe_lab.child_process", "moe_lab.pruning.export.gguf_worker"), environment
    ) as child:
        try:
            child.call("convert", converter=str(path), pre=pre, arguments=arguments)
            return
        except (ProcessEnded, ErrorReply) as error:
            code = child.process.poll() or 0  # 0: the child still runs, and replied with an error
            reason = f"killed by signal {-code}" if code < 0 else str(error)
    # `mask` hides secrets from the environment
    print(mask("\n".join(child.log().splitlines()[-LOG_LINES:])), file=sys.stderr, flush=True)
    error_type = Unavailable if code < 0 or "No space left on device" in reason else UserError
    raise error_type(f"export.format=gguf: llama.cpp's converter failed: {reason}")
