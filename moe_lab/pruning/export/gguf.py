"""Convert an exported checkpoint to GGUF, by llama.cpp's own converter. No torch in this process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from moe_lab.config import ExportConfig, ModelConfig, RecoveryConfig
from moe_lab.errors import Unavailable, UserError, mask, user_errors
from moe_lab.models.checkpoint import bits_of, open_checkpoint, read_json
from moe_lab.models.config_json import check_plain_weights
from moe_lab.models.families import DISK_ROUTER_WEIGHTS
from moe_lab.models.files import files_of
from moe_lab.paths import local
from moe_lab.pruning.export import CARD, NOT_COPIED, check_room, copy_files
from moe_lab.pruning.export.card import gguf_card
from moe_lab.pruning.export.config import describe_export
from moe_lab.pruning.export.layout import expert_type
from moe_lab.pruning.export.write import UNFINISHED
from moe_lab.pruning.form import make_form
from moe_lab.pruning.plan import Plan

FILE = "model.gguf"
OWN = Path(__file__).resolve().parents[3] / ".venv-llama" / "llama.cpp" / "convert_hf_to_gguf.py"
"""The converter that `make llama` fetches."""
PACKAGES = OWN.parents[1] / "packages"
"""What `make llama` installs for the converter: its own reader of GGUF files, and sentencepiece."""
LOG_LINES = 20
"""Last lines of a failing converter that are printed."""
TYPES = {"F32": "f32", "BF16": "bf16", "F16": "f16"}
"""Type of a tensor -> the converter's output type that holds its numbers exactly."""
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
LINES = {"type": "Split", "pattern": {"String": "\n"}, "behavior": "Isolated", "invert": False}
PRE_TOKENIZERS = {"gpt-2": [BYTE_LEVEL], "smollm": [DIGITS, BYTE_LEVEL]}
"""llama.cpp's name of a pre-tokenizer -> its steps in tokenizer.json."""
LINE_BREAK = "Ċ"
"""A line break in the vocabulary of a byte-level tokenizer."""


def converter(export: ExportConfig) -> Path:
    """llama.cpp's converter: export.converter, or the one that `make llama` fetched. UserError when there is none."""
    path = OWN if export.converter is None else Path(export.converter).expanduser().absolute()
    if path.is_file():
        return path
    if export.converter is None:
        raise UserError(
            "export.format=gguf needs llama.cpp's converter, which is not here: run make llama, or set "
            "export.converter=PATH/convert_hf_to_gguf.py"
        )
    raise UserError(f"export.converter={export.converter}: there is no such file: expected llama.cpp's {OWN.name}")


def check_converter(export: ExportConfig, model: ModelConfig) -> None:
    """Raise UserError when GGUF files are wanted and the converter is missing, or does not know the architecture.

    The architecture of a model that is not on this machine is not checked.
    """
    if export.format != "gguf" or export.shape is None:
        return
    path, config = converter(export), local(model.path) / "config.json"
    names = read_json(config).get("architectures") or [] if config.is_file() else []
    sources = [path, path.parent / "conversion" / "__init__.py"]
    known = "".join(source.read_text(encoding="utf-8") for source in sources if source.is_file())
    for name in names:
        if f'"{name}"' not in known:
            raise UserError(
                f"export.format=gguf: the architecture {name} of {model.name} is unknown to {path}: expected "
                "export.format=safetensors, or a newer llama.cpp in export.converter"
            )


def wrong(export: ExportConfig, model: ModelConfig, recovery: RecoveryConfig) -> Iterator[str]:
    """A sentence for each reason why the numbers of the model's weights cannot be stored in a GGUF file."""
    if export.format != "gguf":
        return
    yield from user_errors(check_plain_weights, model, "export.format=gguf")
    if recovery.bits == 4:
        yield (
            f"export.format=gguf keeps the numbers of the weights, but recovery={recovery.name} stores some in 4 bits: "
            "expected a recovery with bits=16"
        )


def check_uneven(export: ExportConfig, allocation: str) -> None:
    """Raise UserError when an allocation that is known to treat layers, or experts, differently is to be written as
    GGUF in a shape that keeps the difference."""
    if export.format == "gguf" and export.shape not in (None, "masked"):
        raise _uneven(export.shape, f"allocation={allocation}")


def check_plan(source: Path, plan: Plan, shape: str) -> None:
    """Raise UserError when the plan, exported from folder `source` in that shape, is no stock checkpoint."""
    checkpoint = open_checkpoint(source)
    form = make_form(plan, shape, max(1, bits_of(expert_type(checkpoint)) // 8))
    if describe_export(read_json(source / "config.json"), plan, form).kind not in ("stock", "ported"):
        raise _uneven(shape, "this plan")


def _uneven(shape: str, cause: str) -> UserError:
    return UserError(
        f"export={shape} export.format=gguf: a GGUF file has one number of experts and one width for all layers, and "
        f"{cause} gives them different ones: expected allocation=uniform, or export=masked"
    )


def convert(checkpoint: Path, out: Path, path: Path, name: str) -> Path:
    """Convert the exported stock checkpoint in folder `checkpoint` to `out`/model.gguf by the converter `path`.

    `name` is that of the model in the file. The new folder `out` also has the small files of the checkpoint. Weights
    keep their type, or become fp32 where they have several, so that all numbers are the same. Raises UserError, quoting
    the last line of the converter, when it fails, and Unavailable when the disk is too full; `out` does not exist then.
    """
    kind, size = _output(checkpoint)
    out.mkdir(parents=True)
    try:
        check_room(out, size)
        unfinished = out / f"{FILE}{UNFINISHED}"
        arguments = [str(checkpoint), "--outfile", str(unfinished), "--outtype", kind, "--model-name", name]
        _run(path, [pre_tokenizer(checkpoint) or "", *arguments], out / f"log{UNFINISHED}")
        others = (file for file in files_of(checkpoint) if file.suffix not in NOT_COPIED)
        copy_files((file for file in others if not file.name.endswith(".index.json")), checkpoint, out)
        card = (out / CARD).read_text(encoding="utf-8")
        (out / CARD).write_text(gguf_card(card, FILE, unfinished.stat().st_size), encoding="utf-8")
        unfinished.rename(out / FILE)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return out


def pre_tokenizer(folder: Path) -> str | None:
    """llama.cpp's name for the pre-tokenizer of tokenizer.json in `folder`; None where none of PRE_TOKENIZERS is it."""
    file = folder / "tokenizer.json"
    described = read_json(file) if file.is_file() else {}
    model, steps = described.get("model") or {}, described.get("pre_tokenizer") or {}
    if model.get("type") != "BPE" or described.get("normalizer") or model.get("ignore_merges"):
        return None
    sequence = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    if sequence[0] == LINES and not any(LINE_BREAK in _pair(merge) for merge in model["merges"]):
        sequence = sequence[1:]  # without merges across line breaks, they are tokens of their own in any case
    return next((name for name, known in PRE_TOKENIZERS.items() if sequence == known), None)


def _pair(merge: str | list[str]) -> str:
    return merge if isinstance(merge, str) else "".join(merge)


def _output(checkpoint: Path) -> tuple[str, int]:
    """The converter's output type that keeps all numbers, and the bytes of the weights in it.

    The converter stores vectors and routers in fp32, so that their types do not matter.
    """
    tensors = open_checkpoint(checkpoint).tensors
    types = set()
    for name, entry in tensors.items():
        if entry.dtype not in TYPES:
            raise UserError(
                f"export.format=gguf: {name} is of type {entry.dtype}: expected one of {', '.join(TYPES)}, which GGUF "
                "can hold without rounding"
            )
        if len(entry.shape) > 1 and not name.endswith(DISK_ROUTER_WEIGHTS):
            types.add(entry.dtype)
    kind = types.pop() if len(types) == 1 else "F32"
    return TYPES[kind], sum(entry.size * bits_of(kind) // bits_of(entry.dtype) for entry in tensors.values())


def _run(path: Path, words: list[str], log: Path) -> None:
    """Run the converter until it ends. It ends with this process, whatever ends this one."""
    worker = Path(__file__).with_name("gguf_worker.py")
    search = [*filter(None, [os.environ.get("PYTHONPATH")]), str(PACKAGES)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", str(worker), str(path), *words],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(search)},
            stdin=subprocess.PIPE,  # stays open as long as this process lives
            stdout=output,
            stderr=output,
        )
        try:
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    log.unlink()
    if code == 0:
        return
    print(mask("\n".join(lines[-LOG_LINES:])), file=sys.stderr, flush=True)
    reason = f"killed by signal {-code}" if code < 0 else lines[-1] if lines else f"exit code {code}"
    error = Unavailable if code < 0 or "No space left on device" in reason else UserError
    raise error(f"export.format=gguf: llama.cpp's converter failed: {reason}")
