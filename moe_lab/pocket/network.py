"""The pocket network: a stock OlmoeForCausalLM, and a faster way to run its experts in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import OlmoeConfig, OlmoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

SORTED_EXPERTS = "pocket_sorted"
BALANCE = 0.01


def sorted_experts(self: Any, hidden: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Routed experts, hidden (T, H), chosen and gates (T, K): assignments sorted by expert, one product per expert.

    The same function as the eager loop of transformers, with one gather instead of one per expert.
    """
    top_k = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=self.num_experts).tolist()
    parts = torch.split(hidden[order // top_k], counts)
    outputs = []
    # unbind, not indexing: the gradient of each index would be a zero tensor of all experts' size.
    for part, gate_up_proj, down_proj in zip(parts, self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True):
        gate, up = functional.linear(part, gate_up_proj).chunk(2, dim=-1)
        outputs.append(functional.linear(self.act_fn(gate) * up, down_proj))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    by_token = torch.cat(outputs)[inverse].view(*chosen.shape, -1)
    return (by_token * gates[..., None]).sum(dim=1)


ALL_EXPERTS_FUNCTIONS.register(SORTED_EXPERTS, sorted_experts)


def build_network(vocabulary: int, end: int, padding: int) -> Any:
    """A freshly initialised model of 3.7M parameters: 4 layers of 32 experts, 4 of them active."""
    config = OlmoeConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=False,
        router_aux_loss_coef=BALANCE,
        max_position_embeddings=512,
        eos_token_id=end,
        pad_token_id=padding,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = OlmoeForCausalLM(config)
    model.set_experts_implementation(SORTED_EXPERTS)
    return model


def load_network(folder: Path) -> Any:
    """The model stored in `folder`, in float32, ready to be trained further."""
    model = OlmoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_experts_implementation(SORTED_EXPERTS)
    return model.train()


def balance_loss(router_logits: tuple[torch.Tensor, ...], top_k: int) -> torch.Tensor:
    """E * sum over experts of (share of tokens) * (mean probability), mean over layers; top_k when balanced.

    Computed per layer, unlike transformers' own, which pools the layers and so lets an expert die in one of them.
    """
    losses = []
    for logits in router_logits:
        probabilities = logits.float().softmax(dim=-1)
        experts = logits.shape[-1]
        load = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(top_k).indices, 1.0).mean(dim=0)
        losses.append(experts * (load * probabilities.mean(dim=0)).sum())
    return torch.stack(losses).mean()


def token_loss(logits: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean cross entropy in nats of each token given the ones before it; logits (B, S, V), tokens (B, S)."""
    losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    counted = weights[:, 1:].flatten()
    return (losses * counted).sum() / counted.sum()
