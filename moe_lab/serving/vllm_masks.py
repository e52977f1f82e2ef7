"""Plans of whole experts as masks on the routers of an engine of vLLM. Importing this module gives
all routers a mask.

A mask is added to the logits of a router: it is 0 for retained experts and minus infinity for
dropped experts. Routers get their mask when they are built, because a compiled engine ignores
attributes that are added later. Afterwards the numbers in a mask are changed in place, which takes
about a millisecond. vLLM imports this module in each of its workers before the worker builds the
model, because `PlanWorker` extends the workers.

Private names of vLLM that are used in addition to those of `vllm_plugin`, tested with 0.32:
BaseRouter._select_experts, e_score_correction_bias of routers, WorkerBase.model_runner.model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_lab.serving.vllm_plugin import register, replace_method, routers


def mask_routers() -> None:
    """Add a mask to every router that is built after this call."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    replace_method(BaseRouter, "__init__", _init_with_mask)
    replace_method(BaseRouter, "_select_experts", _select_with_mask)


def _init_with_mask(original: Any) -> Any:
    """A new `__init__` of routers that adds the attribute `moe_lab_mask` (E,)."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.moe_lab_mask = torch.zeros(self.global_num_experts)

    return __init__


def _select_with_mask(original: Any) -> Any:
    """A new `_select_experts` of routers that adds `moe_lab_mask` to the logits."""

    def _select_experts(
        self: Any, hidden_states: Any, router_logits: Any, *args: Any, **kwargs: Any
    ) -> Any:
        logits = router_logits + self.moe_lab_mask.to(router_logits.dtype)
        return original(self, hidden_states, logits, *args, **kwargs)

    return _select_experts


register()
mask_routers()


class PlanWorker:
    """Methods that vLLM adds to the workers of an engine."""

    model_runner: Any

    def experts_of_layers(self) -> list[tuple[int, int, int]]:
        """(index of the layer, number of experts, top k) of every MoE layer."""
        return [
            (layer, router.global_num_experts, router.top_k)
            for layer, router in routers(self.model_runner.model)
        ]

    @torch.inference_mode()
    def set_plan(self, retained_experts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Set the masks of all routers. `retained_experts`: pairs (layer, ids of the experts that
        the layer retains). Layers without a pair retain all experts."""
        experts_of_layer = {layer: list(experts) for layer, experts in retained_experts}
        for layer, router in routers(self.model_runner.model):
            mask = torch.zeros(router.global_num_experts)
            if layer in experts_of_layer:
                mask.fill_(-torch.inf)
                mask[experts_of_layer[layer]] = 0.0
            router.moe_lab_mask.copy_(mask)
            # a large bias of a dropped expert could bring the expert back
            bias = getattr(router, "e_score_correction_bias", None)
            if bias is not None:
                # moe_lab_bias: the bias as the checkpoint has it
                if not hasattr(router, "moe_lab_bias"):
                    router.moe_lab_bias = bias.detach().clone()
                bias.detach().copy_(router.moe_lab_bias + mask.to(bias))
