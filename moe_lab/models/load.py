"""Load a model for scoring and evaluation."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils import logging

import moe_lab.exported_code  # noqa: F401 - registers families that transformers lacks
from moe_lab.config import ModelConfig
from moe_lab.config.pruning import DEVICE_MAPS
from moe_lab.errors import UserError, overflow_hint, reason_in
from moe_lab.machine import processor
from moe_lab.models import experts
from moe_lab.models.checkpoint import (
    open_checkpoint,
    read_json,
    read_json_if_there,
    stated_dtype,
)
from moe_lab.models.config_json import experts_implementation
from moe_lab.models.discover import is_ragged, routed_layers
from moe_lab.models.families import (
    NOT_LOADED,
    NOVICE_TENSOR,
    TOP_K_FIELDS,
    prediction_prefixes,
)
from moe_lab.models.files import described_model, local_folder, tokenizer_folder
from moe_lab.models.stored_weights import StoredRouting, StoredWeights
from moe_lab.models.transformers_private import NameMapping, configuration, loaded_from


def load_model(settings: ModelConfig) -> tuple[Any, Any]:
    """(model, tokenizer) for `settings`. The model is in eval mode with frozen weights, and the
    tokenizer has a pad token. Settings and sizes are checked before the weights are read.

    UserError for a folder that is incomplete or damaged, for an unsupported architecture, for
    weights that are missing, of the wrong shape, NaN or infinite, and for a GPU that this machine
    does not have.
    """
    device = resolve_device(settings)
    folder = local_folder(settings)
    dtype = precision(settings, folder)
    set_arithmetic(settings.threads)
    with quiet_transformers():
        meta_model = skeleton(folder, trust_remote_code=settings.trust_remote_code)
        set_top_k(meta_model, settings.top_k)  # only to check top_k before weights are read
        routed_layers(meta_model)  # raises UserError for models that are not supported
        weights = StoredWeights(open_checkpoint(folder))
        names = checked_names(weights, meta_model)
        tokenizer = load_tokenizer(folder, settings)
        model = _load_weights(weights, settings, dtype, device)
    routing = StoredRouting(model, weights.plain, names)
    for layer in routed_layers(model):
        routing.restore(layer)
    model.eval().requires_grad_(False)
    check_finite(model)
    set_top_k(model, settings.top_k)
    if device == "cpu":
        # ragged experts are computed by a forward of their own
        experts.use_cpu_experts(
            model, [layer for layer in routed_layers(model) if not is_ragged(layer.experts)]
        )
    if model.generation_config is not None and model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def skeleton(
    folder: Path, *, trust_remote_code: bool = False, dtype: torch.dtype | None = None
) -> Any:
    """The model that config.json in `folder` describes, on the meta device. `dtype`: dtype of the
    model's tensors; None: the dtype in config.json. UserError when transformers cannot build the
    model."""
    config = _configuration(folder, trust_remote_code)
    try:
        with quiet_transformers(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code, dtype=dtype
            )
    except Exception as error:  # noqa: BLE001 - whatever a family raises for wrong sizes and names
        raise UserError(
            f"{folder / 'config.json'} describes no model that can be built ({reason_in(error)})"
        ) from None


def set_top_k(model: Any, top_k: int | None) -> None:
    """Change `model` in place, so that every router selects `top_k` experts per token; None changes
    nothing. UserError unless every router can select `top_k` experts."""
    if top_k is None:
        return
    for layer in routed_layers(model):
        # a token goes to experts in topk_group groups, which have n_experts / n_group experts each
        max_top_k = layer.n_experts // layer.n_group * layer.topk_group
        if not 1 <= top_k <= max_top_k:
            raise UserError(
                f"model.top_k={top_k}: layer {layer.index} gives a token 1 to {max_top_k} experts"
            )
        if layer.family.fixed_top_k:
            raise UserError(
                f"model.top_k={top_k}: routers of this family are made for {layer.top_k}, "
                "expected null"
            )
        # families store top_k in different modules, under different names
        for module in (layer.block, *layer.router.modules()):
            for name in ("top_k", *TOP_K_FIELDS):
                if vars(module).get(name) == layer.top_k:
                    setattr(module, name, top_k)
    config = model.config.get_text_config()
    for field in TOP_K_FIELDS:
        value = vars(config).get(field)
        if value is not None:  # some families have a list, with one number per layer
            setattr(config, field, [top_k] * len(value) if isinstance(value, list) else top_k)


def check_finite(model: nn.Module, prefix: str = "") -> None:
    """Raise UserError if a parameter or buffer of `model` contains NaN or Inf. Only tensors whose
    names begin with `prefix` are checked."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not name.startswith(prefix) or not tensor.is_floating_point() or tensor.is_meta:
            continue
        # If the sum is finite, all numbers are. If it is not, it may only have overflowed. sum()
        # accumulates in fp32 by default; sum(dtype=float32) would take thirty times as long. torch
        # cannot add eight-bit numbers.
        numbers = tensor.float() if tensor.element_size() == 1 else tensor
        if bool(numbers.sum().isfinite()):
            continue
        if positions := (~numbers.isfinite()).nonzero().tolist():
            value = float(tensor[tuple(positions[0])])
            raise UserError(
                f"weights: {name} holds {value} at {positions[0]} and {len(positions) - 1} more "
                f"positions: expected finite numbers{overflow_hint(tensor.dtype)}"
            )


def _configuration(folder: Path, trust_remote_code: bool) -> Any:
    """The configuration of the model in `folder`, as an object of transformers."""
    content = described_model(folder)
    kind = content["model_type"]
    file = folder / "config.json"
    _check_fields(content, file)
    has_code = "auto_map" in content
    # for a type that exported_code registers, transformers ignores the code in the folder
    is_code_used = has_code and trust_remote_code
    if not is_code_used and not has_causal_model(kind):
        reason = "transformers has no causal language model of that type"
        hint = (
            "; its own code is used with model.trust_remote_code=true, if you trust the author"
            if has_code
            else ""
        )
        raise UserError(f"model_type={kind} is not supported: {reason}{hint}")
    try:
        if is_code_used:
            return AutoConfig.from_pretrained(folder, trust_remote_code=True)
        return configuration(content)
    except Exception as error:  # noqa: BLE001 - whatever a family raises for wrong fields
        raise UserError(f"{file} is damaged: {reason_in(error)}") from None


def has_causal_model(kind: str) -> bool:
    """Whether transformers or a port has a causal language model for the model_type `kind`."""
    return kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING


def _check_fields(content: dict[str, Any], file: Path) -> None:
    """Change, in the `content` of config.json, fields that some programs write and transformers
    cannot read: it names precisions without "torch.", and leaves out what is not stated. UserError
    for a precision that torch does not have."""
    if not content.get("quantization_config", True):
        del content["quantization_config"]
    sections = [content, *(value for value in content.values() if isinstance(value, dict))]
    for section in sections:
        for field in section.keys() & {"dtype", "torch_dtype"}:
            name = str(section[field]).removeprefix("torch.")
            if name in ("auto", "None"):
                del section[field]
            elif isinstance(getattr(torch, name, None), torch.dtype):
                section[field] = name
            else:
                raise UserError(
                    f"{file}: {field}={name} is no precision: expected one of torch, such as "
                    "bfloat16"
                )


def _load_weights(
    weights: StoredWeights, settings: ModelConfig, dtype: torch.dtype, device: str
) -> Any:
    """The model with the weights of a checkpoint. `device`: a device, or a device map for several
    GPUs."""
    folder = weights.stored.folder
    source = f"{folder}, stored as {weights.method}" if weights.method else str(folder)
    config = _configuration(folder, settings.trust_remote_code)
    try:
        with ExitStack() as files:
            if weights.method and not weights.is_opaque:
                for part in (config, config.get_text_config()):
                    vars(part).pop("quantization_config", None)
                slices = weights.stored.slices(weights.stored.tensors, files)
                target = "cpu" if device in DEVICE_MAPS else device
                tensors = weights.tensors(
                    weights.plain.tensors, lambda name: slices[name][...].to(target), dtype
                )
                files.enter_context(loaded_from(tensors))
            result: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                device_map=device,
                experts_implementation=experts_implementation(device),
                trust_remote_code=settings.trust_remote_code,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # `check_shapes` below reports them
                output_loading_info=True,
            )
    except (AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # only what moe_lab does not dequantise is expected to fail: a package may be missing
        if not weights.is_opaque or isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(
            f"{source}: the installed transformers cannot load this model, {reason_in(error)}"
        ) from None
    model, report = result
    check_shapes(source, report["mismatched_keys"])
    check_names(source, report["unexpected_keys"], report["missing_keys"])
    # with a device map, weights that do not fit on the GPUs are on the CPU or on the disk
    if device != "cpu" and any(weight.device.type != "cuda" for weight in model.parameters()):
        raise UserError(
            f"model.device={device}: {source} does not fit on the GPUs that are here: expected "
            "more of them"
        )
    return model


def check_names(source: Path | str, unused: Iterable[str], missing: Iterable[str]) -> None:
    """Raise UserError if a checkpoint lacks tensors of its model (`missing`: their names), or has
    tensors that its model lacks (`unused`: names of all), unless they are tensors of multi-token
    prediction layers or have names that NOT_LOADED matches."""
    names = list(unused)
    if any(name.endswith(NOVICE_TENSOR) for name in names):
        raise UserError(
            f"{source} has constants in place of experts, which only vLLM reads: expected "
            "export=natural"
        )
    prefixes = prediction_prefixes(names)
    if disallowed := sorted(
        name for name in names if not name.startswith(prefixes) and not NOT_LOADED.search(name)
    ):
        raise UserError(
            f"{source}: the model that config.json describes does not use {len(disallowed)} of the "
            f"weights in the files, the first is {disallowed[0]}: expected the config.json that "
            "was stored with them"
        )
    if lacking := sorted(missing):
        raise UserError(
            f"{source}: {len(lacking)} weights are missing that config.json asks for, the first is "
            f"{lacking[0]}"
        )


def checked_names(weights: StoredWeights, model: Any) -> NameMapping:
    """The mapping from `weights.plain` to `model`. UserError if the checkpoint lacks experts of a
    layer, and if a tensor has the wrong number of elements. UserError also as from `check_names`.
    Shapes are not compared, because some experts are stored
    transposed."""
    folder = weights.plain.folder
    stored = weights.plain.tensors
    names = NameMapping(model, stored)
    if weights.is_opaque:
        return names
    check_names(folder, *names.unmatched())
    # name in the model -> number of weights in the tensors that are converted to it
    counts: Counter[str] = Counter()
    for name, renamed, _ in names.renamed:
        counts[renamed] += prod(stored[name].shape)
    # other tensors may be converted to fewer or more numbers
    compared = names.copied.keys() | {
        name
        for layer in routed_layers(model)
        for name, _ in layer.experts.named_parameters(prefix=layer.name)
    }
    for name, tensor in model.state_dict().items():
        if name in compared and counts[name] != tensor.numel():
            raise UserError(
                f"{folder}: {name} has {counts[name]} numbers, but config.json asks for the shape "
                f"{tuple(tensor.shape)}: they are of two models"
            )
    return names


def check_shapes(source: Path | str, mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """Raise UserError if `mismatched` has an item. Items are (name of a tensor, stored shape, shape
    that config.json asks for)."""
    for name, shape, expected in sorted(mismatched):  # raises for the first item
        raise UserError(
            f"{source}: {name} has shape {tuple(shape)}, but config.json asks for "
            f"{tuple(expected)}: they are of two models"
        )


def load_tokenizer(folder: Path, settings: ModelConfig) -> Any:
    """The tokenizer of the model in `folder`, see `tokenizer_folder`, with a pad token and the
    attributes of `set_template_settings`. UserError when its folder has no tokenizer, or one with
    neither a pad token nor an end-of-text token."""
    folder = tokenizer_folder(settings, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        read_json_if_there(folder / name)  # raises UserError for a damaged file
    config = None
    # a tokenizer can be read without the class of its model
    with suppress(UserError, OSError):
        config = _configuration(folder, settings.trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, config=config, trust_remote_code=settings.trust_remote_code
        )
        if not tokenizer.encode("a", add_special_tokens=False):
            # without tokenizer files, transformers makes a tokenizer with an empty vocabulary
            raise ValueError("transformers made one up")
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises plain Exception
        raise UserError(
            f"{folder} has no tokenizer that can be loaded: expected tokenizer.json "
            f"({reason_in(error)})"
        ) from None
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(
                f"{folder}: the tokenizer has neither a pad nor an end-of-text token: expected "
                "one of them"
            )
        tokenizer.pad_token = tokenizer.eos_token
    set_template_settings(tokenizer, settings)
    return tokenizer


def set_template_settings(tokenizer: Any, settings: ModelConfig) -> None:
    """Set attributes of a tokenizer: `date`, which chat templates write as today's date, `thinking`
    and `thinking_marks`. They are the settings of the model with the same names."""
    for name in ("date", "thinking", "thinking_marks"):
        setattr(tokenizer, name, getattr(settings, name))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """A context in which transformers shows no progress bars and no warnings."""
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def set_arithmetic(threads: int | None) -> None:
    """Set how torch computes in this process: with `threads` on the CPU (None: torch decides), and
    on a GPU by operations that have the full precision of their type and give the same bits each
    time. Call it before the process uses a GPU."""
    if threads is not None:
        torch.set_num_threads(threads)
    # read when cuBLAS starts: with this workspace, streams do not change how products are added
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    products = torch.backends.cuda.matmul
    products.allow_tf32 = False
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
    # torch names it as not deterministic; other kernels of attention can be, see `backward`
    torch.backends.cuda.enable_cudnn_sdp(False)
    # `backward` needs no filled memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def backward(
    model: PreTrainedModel, output: torch.Tensor, gradient: torch.Tensor | None = None
) -> None:
    """Run the backward pass of `model` from `output`. On a GPU, the gradients of attention and of
    gathered rows are added in the same order each time. This excludes models with linear attention:
    torch adds their cumulative sums in any order."""
    mode = torch.get_deterministic_debug_mode()
    if model.device.type != "cpu":
        set_arithmetic(None)  # also for a model that `load_model` has not loaded
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
        torch.use_deterministic_algorithms("linear_attention" not in kinds)
    try:
        output.backward(gradient)
    finally:
        torch.set_deterministic_debug_mode(mode)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PASS_TOKENS = 4096
"""Most tokens of one forward pass over several rows; more tokens would only take memory."""
LOGITS = 1 << 30
"""Most bytes of the logits of one forward pass, unless a single row has more."""


def max_logit_tokens(model: Any) -> int:
    """The number of tokens whose logits together take LOGITS bytes in fp32, rounded down."""
    return LOGITS // (4 * int(model.get_output_embeddings().weight.shape[0]))


def resolve_device(settings: ModelConfig) -> str:
    """The device, or the device map, on which the model is loaded. UserError for a GPU that this
    machine does not have."""
    device = settings.device
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    # cuda:N needs GPU N; "cuda" and device maps, which have no colon, need GPU 0
    if device != "cpu" and int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise UserError(
            f"model.device={device}: this machine has {torch.cuda.device_count()} CUDA devices, "
            "cpu is there"
        )
    return device


def precision(settings: ModelConfig, folder: Path) -> torch.dtype:
    """The dtype in which the weights of the checkpoint in `folder` are loaded."""
    if settings.dtype == "auto":
        return torch.float32 if resolve_device(settings) == "cpu" else stored_dtype(folder)
    return DTYPES[settings.dtype]


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of the weights, as stated in config.json of `folder`."""
    return DTYPES.get(stated_dtype(read_json(folder / "config.json")), torch.float32)


def device_name(device: str) -> str:
    """Name of the GPU or of the processor that `device`, a value of model.device, selects."""
    target = resolve_device(ModelConfig(name="any", path="any", device=device))
    if target == "cpu":
        return processor()
    name = torch.cuda.get_device_name(0 if target in DEVICE_MAPS else target)
    count = torch.cuda.device_count()
    return f"{count} x {name}" if target in DEVICE_MAPS and count > 1 else name


if __name__ == "__main__":
    print(device_name(sys.argv[1]))
