"""The pocket networks: stock transformers models, and a faster way to run their experts in
training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tools.pocket.recipes import BIAS_STEP, RECIPES

SORTED_EXPERTS = "pocket_sorted"


def sorted_experts(
    self: Any, hidden: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """Output (T, H) of routed experts for hidden (T, H), chosen experts and gates (T, K).

    Computes the same as the eager loop of transformers, but sorts the assignments by expert, with
    one gather instead of one per expert.
    """
    top_k = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=self.num_experts).tolist()
    parts = torch.split(hidden[order // top_k], counts)
    outputs = []
    # unbind, not indexing: the gradient of each index would be a zero tensor of all experts' size.
    for part, gate_up_proj, down_proj in zip(
        parts, self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True
    ):
        gate, up = functional.linear(part, gate_up_proj).chunk(2, dim=-1)
        outputs.append(functional.linear(self.act_fn(gate) * up, down_proj))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    by_token = torch.cat(outputs)[inverse].view(*chosen.shape, -1)
    return (by_token * gates[..., None]).sum(dim=1)


ALL_EXPERTS_FUNCTIONS.register(SORTED_EXPERTS, sorted_experts)


def build_network(name: str, vocabulary: int, end: int, padding: int) -> Any:
    """A freshly initialised model of the recipe of this name."""
    config = AutoConfig.for_model(
        **{"model_type": name, **RECIPES[name].fields},
        vocab_size=vocabulary,
        max_position_embeddings=512,
        eos_token_id=end,
        pad_token_id=padding,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation(SORTED_EXPERTS)
    return model


def load_network(folder: Path) -> Any:
    """The model stored in `folder`, in float32, ready to be trained further."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_experts_implementation(SORTED_EXPERTS)
    return model.train()


@torch.no_grad()
def copy_agreeing(model: Any, base: Any) -> int:
    """Copy into `model` every parameter of `base` whose name and shape agree; returns the number of
    copied elements."""
    base_parameters = dict(base.named_parameters())
    copied = 0
    for name, parameter in model.named_parameters():
        source = base_parameters.get(name)
        if source is not None and source.shape == parameter.shape:
            parameter.copy_(source)
            copied += parameter.numel()
    return copied


@dataclass(frozen=True)
class Routing:
    """Outputs of one router in one forward pass: logits (T, E) and chosen experts (T, K), and its
    correction bias or None."""

    logits: torch.Tensor
    chosen: torch.Tensor
    bias: torch.nn.Parameter | None

    @property
    def load(self) -> torch.Tensor:
        """Share of the tokens that each expert gets, (E,); sums to K."""
        counts = torch.bincount(self.chosen.flatten(), minlength=self.logits.shape[1])
        return counts / len(self.chosen)


def correction_bias(router: torch.nn.Module) -> torch.nn.Parameter | None:
    """The bias that a router adds to the probabilities to choose experts, but not to their gates;
    None for a router without one."""
    for name, parameter in router.named_parameters():
        if name.endswith("e_score_correction_bias"):
            return parameter
    return None


@contextmanager
def watched_routers(model: Any) -> Iterator[list[Routing]]:
    """Context with a list to which each forward pass of the model appends a Routing per MoE
    layer."""
    routings: list[Routing] = []

    def watch(router: torch.nn.Module, _: Any, output: tuple[torch.Tensor, ...]) -> None:
        logits, _, chosen = output[:3]
        routings.append(Routing(logits, chosen, correction_bias(router)))

    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    handles = [router.register_forward_hook(watch) for router in routers]
    try:
        yield routings
    finally:
        for handle in handles:
            handle.remove()


def balance_loss(routing: Routing) -> torch.Tensor:
    """Balance loss of one layer: E * sum over experts of (share of tokens) * (mean probability);
    top_k when the experts are balanced.

    transformers' own loss pools the layers, with which an expert of one layer can get no tokens at
    all.
    """
    probabilities = routing.logits.float().softmax(dim=-1)
    return probabilities.shape[1] * (routing.load * probabilities.mean(dim=0)).sum()


@torch.no_grad()
def move_bias(bias: torch.Tensor, load: torch.Tensor) -> None:
    """Do one step of balancing without a loss: raise the bias of experts below the mean load, lower
    that of the others.

    DeepSeek-V3 (2412.19437) section 2.1.2, which ERNIE 4.5 follows. Routers with a bias are
    balanced by it alone.
    """
    bias += BIAS_STEP * (load.mean() - load).sign().view_as(bias)


def token_loss(logits: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean cross entropy in nats of each token given the ones before it; logits (B, S, V),
    tokens (B, S)."""
    losses = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    counted = weights[:, 1:].flatten()
    return (losses * counted).sum() / counted.sum()
