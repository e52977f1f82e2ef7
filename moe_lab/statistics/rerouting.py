"""Run a router again as if some experts did not exist, a different one for every row, whatever its routing rule."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer

Routing = tuple[torch.Tensor, torch.Tensor]
"""Expert ids and gates, (R, K) each."""


class Rerouting:
    """A router and the arguments of one of its calls, ready to be called again on its own logits.

    `rule` runs the router's own code with two differences. Its linear map gives the logits of the recorded call, so
    that hidden states are projected once; and the logit of the removed expert is -inf, as is its entry wherever the
    router picks the best of all experts, so that no correction bias can win it back. Probabilities, groups and the
    selection follow as if the expert's row were not there; groups of a group-limited router then differ in size.
    UserError for routers that are not one linear map followed by a choice.
    """

    def __init__(self, layer: MoELayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.layer = layer
        self.args, self.kwargs = args, kwargs
        with _Record(layer.n_experts) as record:
            layer.router.forward(*args, **kwargs)
        if record.logits is None:
            raise UserError(f"the router of {layer.name} does not compute logits by one linear map: not supported")
        self.logits = record.logits.reshape(-1, layer.n_experts)

    def rule(self, token: torch.Tensor, removed: torch.Tensor | None) -> Routing:
        """Routing of the tokens `token` (R,), each without its expert in `removed` (R,); all experts if None."""
        logits = self.logits[token]
        if removed is not None:
            logits = logits.scatter(1, removed[:, None], float("-inf"))
        args, kwargs = self._given(len(token))
        with _Replay(logits, removed):
            result = self.layer.router.forward(*args, **kwargs)
        return result[2], result[1]

    def _given(self, n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The recorded arguments with n rows of hidden states, whose values no longer matter."""
        hidden = self.args[0] if self.args else self.kwargs["hidden_states"]
        width = hidden.shape[-1]
        row = hidden.reshape(-1, width)[:1].expand(n, width)
        rows = row if hidden.dim() == 2 else row[None]
        return ((rows, *self.args[1:]), self.kwargs) if self.args else ((), {**self.kwargs, "hidden_states": rows})


class _Record(TorchFunctionMode):
    """Keeps what a linear map with one output per expert gives."""

    def __init__(self, n_experts: int) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.logits: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and result.shape[-1] == self.n_experts:
            self.logits = result
        return result


class _Replay(TorchFunctionMode):
    """Gives `logits` (R, E) for the linear map, and hides expert `removed[r]` from every choice among all experts."""

    def __init__(self, logits: torch.Tensor, removed: torch.Tensor | None) -> None:
        super().__init__()
        self.logits = logits
        self.removed = removed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and args[1].shape[0] == self.logits.shape[1]:
            return self.logits
        best = func in (torch.topk, torch.Tensor.topk) and args[0].numel() == self.logits.numel()
        if best and self.removed is not None:  # of all experts, perhaps in groups
            return self._without(args[0], func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _without(self, scores: torch.Tensor, func: Any, args: Any, kwargs: Any) -> Any:
        """The best of `scores` without the removed experts; where too few are left, the removed one at value 0."""
        assert self.removed is not None
        left = scores.reshape(self.logits.shape).scatter(1, self.removed[:, None], float("-inf")).reshape(scores.shape)
        values, indices = func(left, *args[1:], **kwargs)
        filled = values.isneginf() & ~scores.gather(-1, indices).isneginf()
        return torch.return_types.topk((values.masked_fill(filled, 0.0), indices))
