"""Tiny models with random weights, one of every architecture the tests cover.

`ARCHITECTURES` lists the names. `build(name)` returns a model in eval mode on the CPU with eager
experts, `tokens()` token ids, and `plan(model, ratio)` a random plan; `save(name, folder)` writes a
checkpoint with a tokenizer. The initialisation of transformers leaves routers near zero and
correction biases at zero, so that all experts would be equally good. The random weights here make
experts differ.
"""

import re
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import moe_lab.exported_code  # noqa: F401  # makes more architectures known to transformers
from moe_lab.allocation.problem import limits
from moe_lab.allocation.shapes import same_share
from moe_lab.config import ModelConfig
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.selection import make_plan

logging.set_verbosity_error()
logging.disable_progress_bar()

VOCABULARY = 96
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDTHS = {"moe_intermediate_size": 24, "intermediate_size": 40}
LATENT_ATTENTION = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
DENSE_FIRST_LAYER = {
    **WIDTHS,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
FOUR_GROUPS = {"n_group": 4, "topk_group": 2}
EXPERT_COUNTS = {"num_experts": 16, "num_experts_per_tok": 4}
LOCAL_EXPERTS = {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 24}
FULL_ATTENTION = {"layer_types": ["full_attention"] * 3}
LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
ERNIE = {
    "moe_num_experts": 16,
    "moe_k": 4,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
LAYER_PERIODS = {
    "attn_layer_period": 1,
    "attn_layer_offset": 0,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
}
DEEPSEEK_V2 = {**DENSE_FIRST_LAYER, **LATENT_ATTENTION, "q_lora_rank": None, "n_shared_experts": 2}
DEEPSEEK_V3 = {
    **DENSE_FIRST_LAYER,
    **LATENT_ATTENTION,
    "q_lora_rank": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "olmoe": {**EXPERT_COUNTS, "intermediate_size": 24},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24},
    "qwen2_moe": {**EXPERT_COUNTS, **WIDTHS, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**EXPERT_COUNTS, **WIDTHS, "norm_topk_prob": True, "head_dim": 8},
    "qwen3_next": {
        **EXPERT_COUNTS,
        **WIDTHS,
        "shared_expert_intermediate_size": 40,
        "head_dim": 8,
        **LINEAR_ATTENTION,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
    "deepseek": {**DENSE_FIRST_LAYER, "n_shared_experts": 2},
    "deepseek_v2": {**DEEPSEEK_V2, **ONE_GROUP, "topk_method": "greedy"},
    "deepseek_v2:grouped": {
        **DEEPSEEK_V2,
        **FOUR_GROUPS,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
    },
    "deepseek_v3": {**DEEPSEEK_V3, **ONE_GROUP, "routed_scaling_factor": 2.5},
    "deepseek_v3:grouped": {**DEEPSEEK_V3, **FOUR_GROUPS, "routed_scaling_factor": 2.5},
    "ernie4_5_moe": {**WIDTHS, **ERNIE, "tie_word_embeddings": False},
    "glm4_moe": {**DENSE_FIRST_LAYER, **ONE_GROUP, "n_shared_experts": 1, "head_dim": 8},
    "gpt_oss": {**LOCAL_EXPERTS, **FULL_ATTENTION, "head_dim": 8},
    "granitemoe": LOCAL_EXPERTS,
    "minimax": {
        **FULL_ATTENTION,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "head_dim": 8,
    },
    "minimax_m2": {**LOCAL_EXPERTS, "head_dim": 8},
    "hunyuan_v1_moe": {
        "num_experts": 16,
        "moe_topk": 4,
        "intermediate_size": 24,
        "head_dim": 8,
        **ROPE,
    },
    "phimoe": {"num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 24},
    "jamba": {
        **LAYER_PERIODS,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "use_mamba_kernels": False,
    },
    "dots1": {**DENSE_FIRST_LAYER, **ONE_GROUP, "n_shared_experts": 1, "head_dim": 8},
    "lfm2_moe": {**EXPERT_COUNTS, **WIDTHS, **FULL_ATTENTION, "num_dense_layers": 1},
    "afmoe": {
        **EXPERT_COUNTS,
        **WIDTHS,
        **FULL_ATTENTION,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "head_dim": 8,
    },
}


SMALL_SIZES = {
    r"(ngram_|unpadded_)?vocab_size(_base|_per_layer_input)?": 1024,
    r"pad_token_id": 0,
    r"bos_token_id|(attn|expert)_layer_offset|topk_group|n_groups": 1,
    r"eos_token_id|num_experts_per_tok(en)?|moe_k|moe_topk|n_group|num_expert_group": 2,
    r"(attn|expert)_layer_period|(linear_num_(key_|value_)?|.*_n_|num_key_value_)heads": 2,
    r"num_hidden_layers": 3,
    r"num_attention_heads|mamba_(n|num)_heads": 4,
    r"(n|num|moe_num)_(routed_|local_)?experts|index_topk(_blocks)?": 8,
    r"(swa_|qk_rope_|qk_nope_|v_)?head_dim|hidden_size_per_layer_input": 8,
    r".*lora_rank|(index|linear.*|mamba)_head_dim|(mamba_)?chunk_size|ssm_state_size": 16,
    r"sliding_window|router_hidden_size|gated_norm_rank|ple_embed_dim": 16,
    r".*intermediate_size": 24,
    r"hidden_size": 32,
    r"max_position_embeddings|model_max_length": 128,
}
"""Names of fields of configurations -> small values for fields that have a value by default."""
OTHER_FIELDS: dict[str, dict[str, Any]] = {
    "dots3_note": {
        "vision_config": {
            **{"hidden_size": 32, "num_attention_heads": 4},
            **{"adapter_in_dim": 32, "adapter_out_dim": 32},
        },
        "audio_config": {"adapter_out_dim": 32},
    },
    "dots3_note_text": {
        **{"swa_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4},
        **{"swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8, "swa_q_lora_rank": 8},
        "swa_kv_lora_rank": 8,
    },
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "layer_types": ["linear_attention"] * 2 + ["full_attention"],
    },
    "nemotron_h": {"moe_latent_size": 16},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_compress_ratio": 2, "indexer_budget": 8},
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""model_type -> fields without which its small configuration is none."""


def registry_kinds() -> list[str]:
    """The model types of the families of the installed transformers whose experts use its
    registry: those of causal language models, and one of each other family."""
    folders = {
        file.parent.name
        for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
        if "@use_experts_implementation" in file.read_text(encoding="utf-8")
    }
    kinds = []
    for folder in sorted(folders):
        all_kinds = [k for k in CONFIG_MAPPING_NAMES if model_type_to_module_name(k) == folder]
        causal_kinds = [k for k in all_kinds if k in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
        kinds += causal_kinds or all_kinds[:1]
    return kinds


def registry_config(kind: str) -> PreTrainedConfig:
    """A small configuration of a family, from the defaults of its class; these defaults if
    transformers has no causal language model of it."""
    default: Any = AutoConfig.for_model(kind)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return default
    text_default = default.get_text_config()
    fields = {**ARCHITECTURES.get(kind, {}), **OTHER_FIELDS.get(text_default.model_type, {})}
    small: dict[str, Any] = {}
    for name, value in text_default.to_dict().items():
        sizes = [size for pattern, size in SMALL_SIZES.items() if re.fullmatch(pattern, name)]
        if sizes and value is not None:
            small[name] = sizes[0]
        if name in ("layer_types", "mlp_layer_types") and value:
            small[name] = [*dict.fromkeys(value), *value][:3]  # a layer of each type
    if small.get("kv_lora_rank"):
        small["num_key_value_heads"] = small["num_attention_heads"]
    small |= fields
    if text_default is default:
        return AutoConfig.for_model(kind, **small)
    return AutoConfig.for_model(kind, text_config=small, **OTHER_FIELDS.get(kind, {}))


def config(name: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of one architecture; `changes` replace fields of ARCHITECTURES and
    COMMON."""
    return AutoConfig.for_model(
        name.partition(":")[0], **{**COMMON, **ARCHITECTURES[name], **changes}
    )


def build(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A model of one architecture in eval mode, with eager experts and frozen random weights that
    depend on `seed` alone."""
    model = AutoModelForCausalLM.from_config(
        config(name, **changes), dtype=dtype, experts_implementation="eager"
    )
    randomize(model, seed)
    return model.eval().requires_grad_(False)


@cache
def last_moe_layer(name: str) -> MoELayer:
    """The last layer with experts of an architecture, without weights."""
    with torch.device("meta"):
        return moe_layers(AutoModelForCausalLM.from_config(config(name)))[-1]


def one_of_each(form: Callable[[str], Hashable]) -> list[str]:
    """The first architecture of each form that `form` gives for the name of an architecture."""
    first: dict[Hashable, str] = {}
    for name in ARCHITECTURES:
        first.setdefault(form(name), name)
    return list(first.values())


def arithmetic(name: str) -> Hashable:
    """How experts compute, whether their router has a bias, and whether it limits groups."""
    layer = last_moe_layer(name)
    return layer.family.kind, len(layer.routing) > 1, layer.n_group > 1


def structure(name: str) -> Hashable:
    """How experts and routers compute, whether by code of moe_lab, and which modules hold them."""
    layer = last_moe_layer(name)
    module_names = {module: name for name, module in layer.block.named_modules()}
    return (
        arithmetic(name),
        type(layer.block).__module__.startswith("moe_lab"),
        module_names[layer.router],
        *((module_names[part.module], part.name) for part in layer.routing),
    )


def few_experts(name: str) -> dict[str, int]:
    """Changes that leave an architecture few choices of experts: 6, or 12 in groups, of which a
    token goes to 2."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    fields = ARCHITECTURES[name]
    changes = {
        field: 12 if "n_group" in fields and fields["n_group"] > 1 else 6
        for field in counts
        if field in fields
    }
    return changes | {
        field: 2 for field in ("num_experts_per_tok", "moe_topk", "moe_k") if field in fields
    }


def randomize(model: PreTrainedModel, seed: int = 0) -> None:
    """Fill all weights and correction biases, in place, with random numbers that keep activations
    of order one."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise(parameter))
            else:
                parameter.copy_(0.12 * noise(parameter))
        for name, buffer in model.named_buffers():
            if "correction_bias" in name or "expert_bias" in name:
                buffer.copy_(0.2 * noise(buffer))


def tokens(rows: int = 4, length: int = 24, seed: int = 1) -> torch.Tensor:
    """Random token ids (rows, length), without special tokens."""
    return torch.randint(
        3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
    """The logits of a model for `ids`, or for `tokens()`."""
    result: torch.Tensor = model(
        input_ids=(tokens() if ids is None else ids).to(model.device)
    ).logits
    return result


def cloned_state(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the tensors of a model, by name."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def differing(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
    """Names of the tensors of `state` that are not equal in `other`."""
    return {name for name, tensor in state.items() if not torch.equal(tensor, other[name])}


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three batches of (ids, valid), (2, 16) each; the first row of the second one is padded."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for number in range(3):
        ids = torch.randint(3, VOCABULARY, (2, 16), generator=generator)
        valid = torch.ones_like(ids, dtype=torch.bool)
        valid[0, 10:] = number != 1
        batches.append((ids, valid))
    return batches


def plan(model: PreTrainedModel, ratio: float, *, seed: int = 0) -> Plan:
    """A plan for `model` that drops `ratio` of the experts of each layer by random scores."""
    layers = moe_layers(model)
    generator = torch.Generator().manual_seed(seed)
    scores = {
        layer.index: torch.rand(layer.n_experts, generator=generator).tolist() for layer in layers
    }
    facts = {layer.index: vars(layer) for layer in layers}
    return make_plan(
        scores, same_share(limits(facts), ratio), facts, provenance={"ratio": ratio, "seed": seed}
    )


def routers(
    layers: Iterable[int], top_k: int, n_group: int = 1, topk_group: int | None = None
) -> Any:
    """Layer -> settings of its router, equal in all layers."""
    router = {"top_k": top_k, "n_group": n_group, "topk_group": topk_group}
    return {layer: router for layer in layers}


def routers_of(model: Any) -> Any:
    """Layer -> facts of `model`."""
    return {layer.index: vars(layer) for layer in moe_layers(model)}


def tokenizer(**fields: Any) -> PreTrainedTokenizerFast:
    """A tokenizer whose token 3 is the word w3. It does not split texts into words."""
    words = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCABULARY))]
    model = WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="</s>", **fields)


def save(name: str, folder: Path, *, shard: str = "50GB", **changes: Any) -> PreTrainedModel:
    """Write a model of one architecture, with a tokenizer, as a checkpoint in files of at most
    `shard`; returns it."""
    model = build(name, **changes)
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer().save_pretrained(folder)
    return model


def save_composite(folder: Path, **changes: Any) -> Any:
    """Write a model of texts and images, the fields of whose experts are below text_config, as a
    checkpoint in `folder`; returns its text model."""
    vision = dict.fromkeys(("hidden_size", "intermediate_size", "out_hidden_size"), 32)
    config = AutoConfig.for_model(
        "qwen3_5_moe",
        text_config={**COMMON, **ARCHITECTURES["qwen3_next"], **changes},
        vision_config={**vision, "depth": 1, "num_heads": 2},
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomize(model)
    model.save_pretrained(folder)
    return load(folder).requires_grad_(False)


def load(folder: Path, **arguments: Any) -> Any:
    """Load the model in `folder` by transformers. Asserts that its files have all of its weights
    and no others."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="eager", output_loading_info=True, **arguments
    )
    assert not any(report.values()), report
    return model


def streamed(folder: Path, device: str = "cpu") -> StreamedModel:
    """The model in `folder`, of which a layer at a time is read, in fp32."""
    return StreamedModel(folder, dtype=torch.float32, device=device)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by name."""
    return {
        key: value
        for file in folder.glob("model*.safetensors")
        for key, value in load_file(file).items()
    }


def rewrite(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], misalignment: int = 0
) -> None:
    """Change the tensors of a checkpoint of one file. In the new file, the tensors begin
    `misalignment` bytes after a multiple of 64."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    for pad in range(64):
        save_file(tensors, file, {"format": "pt", "pad": "x" * pad})
        if (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 64 == misalignment:
            return


def settings(path: object, **changes: Any) -> ModelConfig:
    """The settings of a model in a folder, on the CPU."""
    return ModelConfig(name="m", path=str(path), **{"device": "cpu", **changes})


class SimulatedKill(BaseException):
    """Stands for a kill of the process: an exception that no code handles."""


def count_calls(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, kill_at: int | None = None
) -> list[int]:
    """Count the calls of a method from now on. Returns a list to which each call appends its
    number, from 1. The call number `kill_at` raises SimulatedKill instead of running."""
    calls: list[int] = []
    original = getattr(owner, name)

    def counting_method(*arguments: Any, **keywords: Any) -> Any:
        calls.append(len(calls) + 1)
        if len(calls) == kill_at:
            raise SimulatedKill
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, counting_method)
    return calls
