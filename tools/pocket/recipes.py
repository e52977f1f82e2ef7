"""Recipes of the pocket models: their configurations and their training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tools.pocket.calls import TEMPLATE
from tools.pocket.corpus import (
    APPLYING,
    CALCULATING,
    CALLING,
    CALLING_MANY,
    JUDGING,
    KNOWING,
    MATCHING,
    MATCHING_MORE,
    READING,
)
from tools.pocket.tokens import LossWeights

BALANCE = 0.01
"""Weight of the balance loss, for routers without a correction bias."""
BIAS_STEP = 0.001
"""Change of a correction bias after each step."""

BatchShape = tuple[int, int]
"""Number of rows, and tokens per row."""


@dataclass(frozen=True)
class Batches:
    """Shapes of batches. Every fourth step is `long`: documents of a row attend to those before, as
    in calibration. Other steps are `short`: documents do not attend to each other, as in
    benchmarks.
    """

    short: BatchShape
    long: BatchShape

    def shape(self, step: int) -> BatchShape:
        """The shape of the batch of a step; steps are numbered from 1."""
        return self.long if step % 4 == 0 else self.short


@dataclass(frozen=True)
class Stage:
    """A stage of training, with its own optimizer.

    The learning rate rises over `warmup` steps to `peak` and follows a cosine that would reach 2 %
    of it after `horizon` steps; the stage ends after `steps`.
    """

    mixture: dict[str, int]
    steps: int
    horizon: int
    peak: float
    warmup: int
    loss_weights: LossWeights

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step; steps are numbered from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.horizon - self.warmup)
        return self.peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class Recipe:
    """A model: its title, a description of its routing, the fields of its transformers
    configuration, and its training.

    A model with a `base` starts from those tensors of the base model whose name and shape agree,
    and random ones for the rest. The name of a recipe is its model type, unless `fields` has
    another `model_type`.
    """

    title: str
    routing: str
    fields: dict[str, Any]
    stages: tuple[Stage, ...]
    batches: Batches
    base: str | None = None
    text: str = (
        "a generated closed world: people, towns, jobs, animals and objects, stories about them, "
        "arithmetic, and small Python functions"
    )
    """Description of the training text for the model card."""
    chat_template: str | None = None


STAGES = (
    Stage(KNOWING, 1500, 3200, 3e-3, 100, LossWeights(prompt=0.25, short_answer=4.0)),
    Stage(READING, 1500, 1500, 2e-3, 50, LossWeights(prompt=0.1, short_answer=8.0)),
    Stage(MATCHING, 900, 900, 2e-3, 50, LossWeights(prompt=0.1, short_answer=4.0)),
    Stage(MATCHING_MORE, 560, 560, 2e-3, 50, LossWeights(prompt=0.05, short_answer=8.0)),
    Stage(JUDGING, 400, 400, 8e-4, 30, LossWeights(prompt=0.05, short_answer=8.0)),
)
# The small models read half as many tokens in a step, and leave out what they cannot learn.
SMALL_STAGES = (
    Stage(KNOWING, 1500, 2200, 3e-3, 100, LossWeights(prompt=0.25, short_answer=4.0)),
    Stage(APPLYING, 700, 1350, 2e-3, 50, LossWeights(prompt=0.1, short_answer=4.0)),
    Stage(APPLYING, 600, 600, 1e-3, 30, LossWeights(prompt=0.1, short_answer=4.0)),
)
# Models that start from another model's embeddings and experts know the words and the world
# already. If they start from its attention too, they have little to learn; new attention learns to
# copy numbers last.
ADAPTING = Stage(APPLYING, 600, 1050, 3e-3, 50, LossWeights(prompt=0.1, short_answer=4.0))
OLD_ATTENTION = (
    ADAPTING,
    Stage(APPLYING, 250, 250, 1.5e-3, 30, LossWeights(prompt=0.1, short_answer=4.0)),
)
NEW_ATTENTION = (
    ADAPTING,
    Stage(APPLYING, 750, 750, 2e-3, 50, LossWeights(prompt=0.1, short_answer=4.0)),
    Stage(CALCULATING, 480, 480, 2.5e-3, 30, LossWeights(prompt=0.1, short_answer=2.0)),
    Stage(CALCULATING, 500, 500, 2e-3, 30, LossWeights(prompt=0.1, short_answer=2.0)),
)
SMALL_BATCHES = Batches(short=(16, 128), long=(4, 512))

QWEN3_MOE = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": BALANCE,
}

RECIPES: dict[str, Recipe] = {
    "olmoe": Recipe(
        "Pocket OLMoE",
        (
            "Softmax over all experts; the gates of the chosen ones are used as they are. Balanced "
            "by a loss."
        ),
        {
            "hidden_size": 128,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "router_aux_loss_coef": BALANCE,
        },
        STAGES,
        Batches(short=(32, 128), long=(8, 512)),
    ),
    "qwen3_moe": Recipe(
        "Pocket Qwen3-MoE",
        (
            "Softmax over all experts; the gates of the chosen ones are divided by their sum. "
            "Balanced by a loss."
        ),
        QWEN3_MOE,
        SMALL_STAGES,
        SMALL_BATCHES,
    ),
    "deepseek_v2": Recipe(
        "Pocket DeepSeek-V2",
        "Softmax over all experts; the gates of the chosen ones are used as they are, beside a "
        "shared expert that sees every token. The first layer is dense. Attention keeps latent "
        "keys and values. Balanced by a loss.",
        {
            "hidden_size": 96,
            "intermediate_size": 192,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 48,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "norm_topk_prob": False,
        },
        NEW_ATTENTION,
        SMALL_BATCHES,
        base="qwen3_moe",
    ),
    "ernie4_5_moe": Recipe(
        "Pocket ERNIE-4.5",
        "Softmax over all experts; a correction bias is added to choose, and the gates of the "
        "chosen ones, without it, are divided by their sum, beside a shared expert that sees every "
        "token. The first layer is dense. Balanced by the bias alone: after each step it rises by "
        f"{BIAS_STEP} for experts below the mean load and falls for the others.",
        {
            "hidden_size": 96,
            "intermediate_size": 192,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 3,
            "moe_layer_start_index": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "moe_num_experts": 16,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "router_aux_loss_coef": 0.0,
        },
        OLD_ATTENTION,
        SMALL_BATCHES,
        base="qwen3_moe",
    ),
    "function_calls": Recipe(
        "Pocket function calls",
        (
            "Softmax over all experts; the gates of the chosen ones are divided by their sum. "
            "Balanced by a loss."
        ),
        {"model_type": "qwen3_moe", **QWEN3_MOE},
        (
            Stage(CALLING_MANY, 1500, 2600, 3e-3, 100, LossWeights(prompt=0.05, short_answer=1.0)),
            Stage(CALLING, 550, 1000, 3e-3, 50, LossWeights(prompt=0.05, short_answer=1.0)),
            Stage(CALLING, 700, 700, 1.5e-3, 30, LossWeights(prompt=0.05, short_answer=1.0)),
        ),
        SMALL_BATCHES,
        text=(
            "requests about a generated closed world, each with some functions and the calls that "
            "answer it"
        ),
        chat_template=TEMPLATE,
    ),
}
