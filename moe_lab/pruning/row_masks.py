"""Several plans as masks on one loaded model: each row of a batch is computed under a plan of its own.

The experts run once for all rows, which is what makes many plans cheap: their weights are read once, and their matrix
products are larger. Routers run once too where minus infinity can be added to the logits of what a row's plan drops;
others, with groups or a correction bias, run once for each plan on its rows, with its own experts, as in `mask`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from moe_lab.models.discover import MoELayer, check_in_memory, moe_layers
from moe_lab.models.partial_forward import replace_forward
from moe_lab.pruning.mask import (
    experts_function,
    masked_experts,
    require_routing,
    sliced_router,
    sorted_function,
    sorted_functions,
    with_constants,
)
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import check_fit
from moe_lab.pruning.replace import check_aligned
from moe_lab.statistics.observe import ExpertsFunction


class RowPlans:
    """The plan of each row of the batches that a model reads."""

    def __init__(self) -> None:
        self.set([0])

    def set(self, numbers: Sequence[int]) -> None:
        """From now on, row i of a batch is computed under the plan `numbers[i]`."""
        self.numbers = list(numbers)
        self._of_token: dict[tuple[int, torch.device], torch.Tensor] = {}

    def check(self, block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A hook before a MoE block: RuntimeError for hidden states (B, S, H) of another number of rows."""
        hidden = inputs[0] if inputs else named["hidden_states"]
        if hidden.dim() != 3 or len(hidden) != len(self.numbers):
            raise RuntimeError(
                f"{type(block).__name__} got hidden states {tuple(hidden.shape)}, expected those of "
                f"{len(self.numbers)} rows, for which plans were set"
            )

    def of_token(self, tokens: int, device: torch.device) -> torch.Tensor:
        """(T,) int64: the plan of each of `tokens` tokens of a batch (B, S) that was flattened."""
        if (tokens, device) not in self._of_token:  # every layer of a pass asks for the same
            of_row = torch.tensor(self.numbers, device=device)
            self._of_token[tokens, device] = of_row.repeat_interleave(tokens // len(self.numbers))
        return self._of_token[tokens, device]


@contextmanager
def row_masks(model: PreTrainedModel, plans: Sequence[Plan | None]) -> Iterator[RowPlans]:
    """A context in which `model` computes each row of a batch under one of `plans`, None for the unpruned model.

    Yields what sets the plan of each row before a forward pass, which has to be done for every new batch. A row's
    logits are those of `mask` with its plan up to rounding (1e-6 in fp32), whatever plans the other rows have: matrix
    products of another size may round differently. Expert weights are neither copied nor changed, but the
    merged experts of each plan have weights of their own meanwhile.

    Raises UserError when a plan does not fit the model or still has to be aligned, and RuntimeError when a batch has
    another number of rows than plans were set for, and where `mask` does.
    """
    layers = moe_layers(model)
    for plan in plans:
        if plan is not None:
            check_fit(plan, layers)
            check_aligned(plan)
    rows = RowPlans()
    with ExitStack() as undo:
        for layer in layers:
            _router(layer, plans, rows).install(undo)
        if any(plan is not None and plan.channels for plan in plans):
            functions = {layer.index: _experts_function(layer, plans, rows) for layer in layers}
            undo.enter_context(masked_experts(model, layers, functions))
        yield rows


def _router(layer: MoELayer, plans: Sequence[Plan | None], rows: RowPlans) -> _Router:
    """The router of `layer` for rows of several plans."""
    kept = [range(layer.n_experts) if plan is None else plan.experts[layer.index] for plan in plans]
    # With a correction bias or groups, a dropped expert could still be chosen, or change the choice of a group.
    by_logits = layer.n_group == 1 and {part.name for part in layer.routing} <= {"weight", "bias"}
    return (_LogitsRouter if by_logits else _SlicedRouters)(layer, kept, rows)


class _Router:
    """The router of one layer, whose forward is replaced while it is open."""

    def __init__(self, layer: MoELayer, kept: Sequence[Sequence[int]], rows: RowPlans) -> None:
        self.layer, self.kept, self.rows = layer, kept, rows
        check_in_memory(layer)
        self.forward = layer.router.forward
        self.device = layer.routing[0].tensor.device

    def install(self, undo: ExitStack) -> None:
        """Replace the router's forward until `undo` is closed."""
        replace_forward(self.layer.router, self.route, undo)
        require_routing(self.layer, undo)
        undo.callback(self.layer.block.register_forward_pre_hook(self.rows.check, with_kwargs=True).remove)

    def route(self, hidden: torch.Tensor, *passed: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        """As the router's forward: logits (T, E), gates and ids (T, K)."""
        raise NotImplementedError


class _LogitsRouter(_Router):
    """Runs once for all rows: the logits of what a row's plan drops are minus infinity.

    Exact for routers whose choice and gates depend on the logits alone: such an expert is never chosen, and adds
    exactly 0 to a softmax.
    """

    def __init__(self, layer: MoELayer, kept: Sequence[Sequence[int]], rows: RowPlans) -> None:
        super().__init__(layer, kept, rows)
        self.added = torch.full((len(kept), layer.n_experts), -torch.inf, device=self.device)
        for number, experts in enumerate(kept):
            self.added[number, list(experts)] = 0

    def route(self, hidden: torch.Tensor, *passed: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        added = self.added[self.rows.of_token(hidden.shape[:-1].numel(), hidden.device)]
        with _AddedLogits(added) as mode:
            found: tuple[torch.Tensor, ...] = self.forward(hidden, *passed, **named)
        if mode.calls != 1:
            raise RuntimeError(f"{type(self.layer.router).__name__} computed logits {mode.calls} times: expected once")
        return found


class _AddedLogits(TorchFunctionMode):
    """While open, adds to the result of a linear map with one output for each expert."""

    def __init__(self, added: torch.Tensor) -> None:
        super().__init__()
        self.added, self.calls = added, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is linear and result.shape[-1] == self.added.shape[1]:
            self.calls += 1
            result = result + self.added.reshape(result.shape).to(result.dtype)
        return result


class _SlicedRouters(_Router):
    """Runs once for each set of experts that plans of the batch keep, on the tokens of their rows."""

    def __init__(self, layer: MoELayer, kept: Sequence[Sequence[int]], rows: RowPlans) -> None:
        super().__init__(layer, kept, rows)
        sets = list(dict.fromkeys(tuple(experts) for experts in kept))
        self.set_of = [sets.index(tuple(experts)) for experts in kept]
        """Number of the set of experts that each plan keeps: in one layer, different plans may keep the same."""
        self.ids = [torch.tensor(experts, device=self.device) for experts in sets]
        self.routers = [sliced_router(layer, experts) for experts in sets]

    def route(self, hidden: torch.Tensor, *passed: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        flat = hidden.reshape(-1, hidden.shape[-1])
        plan_of = self.rows.of_token(len(flat), flat.device)
        set_of = torch.tensor(self.set_of, device=flat.device)[plan_of]
        logits = flat.new_full((len(flat), self.layer.n_experts), -torch.inf)
        by_set, places = [], []
        for number in sorted({self.set_of[plan] for plan in self.rows.numbers}):
            tokens = (set_of == number).nonzero()[:, 0]
            states = flat.index_select(0, tokens).reshape(*[1] * (hidden.dim() - 2), len(tokens), -1)
            of_set = self.routers[number].call(self.forward, (states, *passed), named)
            ids = self.ids[number]
            logits[tokens[:, None], ids] = of_set[0].reshape(len(tokens), -1).to(logits.dtype)
            chosen = ids[of_set[2].reshape(len(tokens), -1)]
            by_set.append((of_set[1].reshape(len(tokens), -1), chosen))
            places.append(tokens)
        back = torch.cat(places).argsort()
        gates, chosen = (torch.cat(values)[back] for values in zip(*by_set, strict=True))
        shaped = (
            value if part.dim() == 2 else value.reshape(*hidden.shape[:-1], -1)
            for value, part in zip((logits, gates, chosen), of_set, strict=True)
        )
        return tuple(shaped)


def _experts_function(layer: MoELayer, plans: Sequence[Plan | None], rows: RowPlans) -> ExpertsFunction:
    """A function for the routed output (T, H) where each token's plan says what experts are."""
    if any(plan is not None and layer.index in plan.merged for plan in plans):
        return _functions_by_plan(layer, plans, rows)
    kept = torch.ones(len(plans), layer.n_experts, layer.width, dtype=torch.bool)
    for number, plan in enumerate(plans):
        if plan is not None and plan.channels:
            kept[number] = torch.from_numpy(plan.channels[layer.index])

    def plan_of(hidden: torch.Tensor) -> torch.Tensor:
        return rows.of_token(len(hidden), hidden.device)

    return with_constants(sorted_functions(layer, kept, plan_of), layer, plans, plan_of)


def _functions_by_plan(layer: MoELayer, plans: Sequence[Plan | None], rows: RowPlans) -> ExpertsFunction:
    """The same, computed for each plan on its tokens: merged experts have weights of their own under each plan."""
    everything = numpy.ones((layer.n_experts, layer.width), dtype=bool)
    whole = sorted_function(layer, everything)
    functions = [experts_function(layer, plan) if plan is not None and plan.channels else whole for plan in plans]

    def compute(hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        of_token = rows.of_token(len(hidden), hidden.device)
        mixed = torch.empty_like(hidden)
        for number in sorted(set(rows.numbers)):
            tokens = (of_token == number).nonzero()[:, 0]
            mixed[tokens] = functions[number](hidden[tokens], index[tokens], gates[tokens])
        return mixed

    return compute
