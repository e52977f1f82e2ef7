"""Gradient statistics of every channel, from gradients with respect to activations, and with
respect to weights (SNIP).

The loss is the summed cross-entropy of the next tokens, over pairs of neighbouring tokens that are
both valid. Sums, unlike means, do not depend on how rows are cut into batches. Two vectors per
expert replace HEAPr's (H, H) matrix, because the gradient at the input of down_proj is that
matrix's factor already multiplied with the channel's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer, whole
from moe_lab.models.experts import replace_output, run, to_device
from moe_lab.models.families import split
from moe_lab.models.load import backward
from moe_lab.models.rows import Part, at_least_fp32, sort_by_expert
from moe_lab.statistics import Statistics
from moe_lab.statistics.forward import channel_sums
from moe_lab.statistics.observe import Batch, Observer, StatisticsHook, collect_statistics

GRADIENT_SUMS = ("channel_gradient_square", "channel_product", "channel_product_abs")
LOSS_SCALE = 2.0**8
"""The loss is multiplied by this before the backward pass, so that half precision does not round
small gradients to zero. A power of two, so that dividing by it is exact."""
LOGITS = 1 << 26
"""Most vocabulary logits in memory at once: 256 MB in fp32."""


def collect_gradient_statistics(
    model: PreTrainedModel, hook: type[StatisticsHook], batches: Sequence[Batch], **settings: Any
) -> Statistics:
    """The sums that hooks of the class `hook` collect in a forward and a backward pass of `model`,
    in eval mode, over `batches`. `settings`: further arguments of `collect_statistics`. Errors are
    those of `collect_statistics` and `check_loss`."""
    check_loss(batches)
    with differentiable(model):
        return collect_statistics(model, hook, batches, reading=forward_and_backward, **settings)


def check_loss(batches: Sequence[Batch]) -> None:
    """Raise UserError when no two neighbouring tokens are both valid."""
    if batches and not any(bool((valid[:, :-1] & valid[:, 1:]).any()) for _, valid in batches):
        raise UserError(
            "calibration has no token that follows another one, so there is no loss: expected "
            "longer rows"
        )


class GradientHook(StatisticsHook):
    """The forward pass adds statistics of the activations of each channel. A backward pass, from
    LOSS_SCALE times the loss, adds statistics of the gradients with respect to these activations.
    """

    kind = "gradients"

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The routed output (T, H). Adds the statistics of the activations and each expert's number
        of valid tokens."""
        layer = self.layer
        rows = sort_by_expert(layer, index)
        ignored_tokens = self.ignored_tokens(hidden)
        ignored = None if ignored_tokens is None else ignored_tokens[rows.token]
        gate_square = at_least_fp32(weights.detach())[rows.token, rows.column].square()
        factors = torch.stack([torch.ones_like(gate_square), gate_square])
        channels = []

        def compute(part: Part, states: torch.Tensor) -> torch.Tensor:
            """The outputs (n, H) of the experts of a part."""
            expert_weights = part.weights(layer)
            phi = layer.phi(states, expert_weights)
            sums = channel_sums(part, phi.detach(), factors, ignored)
            sums["tokens"] = part.sum(phi.new_ones(len(phi)), ignored)
            channels.append((part, sums))
            if phi.requires_grad:
                phi.register_hook(partial(self._add_gradient, part, phi.detach(), ignored))
            return layer.output(phi, expert_weights)

        routed = rows.output(hidden, weights, compute)
        # `_add_gradient` adds to the gradient sums in place. Adding zeros before that creates each
        # sum, or moves the sum of an interrupted pass to the device of the activations.
        sums = rows.assemble(channels)
        zeros = {name: torch.zeros_like(sums["channel_square"]) for name in GRADIENT_SUMS}
        self.add({**sums, **zeros})
        return routed

    def _add_gradient(
        self,
        part: Part,
        phi: torch.Tensor,
        ignored: torch.Tensor | None,
        gradient: torch.Tensor,
    ) -> None:
        """Add the gradient sums of a part, without its `ignored` rows, (S,) bool. `phi` (n, I): the
        activations. `gradient` (n, I): LOSS_SCALE * dL/dphi."""
        gradient = at_least_fp32(gradient)
        product = gradient * phi
        sums = (
            part.sum(gradient.square(), ignored),
            part.sum(product, ignored),
            part.sum(product.abs_(), ignored),  # last: it overwrites `product`
        )
        for name, sums_of_part, scale in zip(
            GRADIENT_SUMS, sums, (LOSS_SCALE**2, LOSS_SCALE, LOSS_SCALE), strict=True
        ):
            self.sums[name][part.experts] += sums_of_part.double() / scale


def forward_and_backward(
    model: PreTrainedModel, input_ids: torch.Tensor, valid: torch.Tensor
) -> None:
    """Run a forward pass over one batch, and a backward pass from LOSS_SCALE times the loss of the
    batch. Call it within the context `differentiable(model)`."""
    output = run(model, input_ids, valid)
    states: torch.Tensor = output.last_hidden_state
    gradient = loss_gradient(model, output, input_ids, valid)
    backward(model, states, gradient)


def loss_gradient(
    model: PreTrainedModel, output: Any, input_ids: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """LOSS_SCALE times the gradient (B, S, H) of the summed next-token loss with respect to the
    hidden states of `output`, the decoder's result."""
    states: torch.Tensor = output.last_hidden_state.detach()
    gradient = torch.zeros_like(states)
    row, column = (valid[:, :-1] & valid[:, 1:]).nonzero(as_tuple=True)  # on the CPU, as `valid`
    found = torch.stack([row, column, input_ids[row, column + 1]])
    row, column, targets = to_device(found, states.device)
    vocabulary = int(model.config.get_text_config().vocab_size)
    for part in torch.arange(len(row), device=states.device).split(max(1, LOGITS // vocabulary)):
        selected = states[row[part], column[part]][None].requires_grad_()
        logits = head(model, selected, output)[0]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        loss = cross_entropy(logits, targets[part].to(logits.device), reduction="sum") * LOSS_SCALE
        (selected_gradient,) = torch.autograd.grad(loss, selected)
        gradient[row[part], column[part]] = selected_gradient[0]
    return gradient


def head(model: PreTrainedModel, states: torch.Tensor, output: Any) -> torch.Tensor:
    """Logits (B, n, V) for `states` (B, n, H), the output of the decoder. The model's own forward
    computes them, because it may scale or cap logits."""
    with ExitStack() as undo:
        replace_output(model.base_model, type(output)(last_hidden_state=states), undo)
        # the model requires an input, which the replaced decoder ignores
        logits: torch.Tensor = model(inputs_embeds=states, use_cache=False).logits
        return logits


@contextmanager
def differentiable(model: PreTrainedModel) -> Iterator[None]:
    """A context in which gradients are taken with respect to activations only. Embedded tokens
    require gradients, so that all activations computed from them do, too."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    embeddings: Any = model.get_input_embeddings()
    with ExitStack() as stack, torch.enable_grad():
        for weight in weights:
            stack.callback(weight.requires_grad_, True)
            weight.requires_grad_(False)
        stack.callback(
            embeddings.register_forward_hook(
                lambda module, args, result: result.requires_grad_()
            ).remove
        )
        yield


class WeightGradientHook(StatisticsHook):
    """Computes the statistics of SNIP (Lee et al. 2019) by channel: "snip_down", "snip_up" and, for
    gated experts, "snip_gate", (E, I) each. They are sums of |w dL/dw| over the weights w of a
    channel in one projection.

    The absolute value is taken after dL/dw has been summed over all batches. So the sums of
    LOSS_SCALE * dL/dw of all routed experts stay in memory, in fp32 or fp64.
    """

    kind = "weight_gradients"
    resumes = False

    def __init__(self, observer: Observer, layer: MoELayer, start: dict[str, torch.Tensor]) -> None:
        super().__init__(observer, layer, start)
        self.gradients: dict[str, torch.Tensor] = {}
        """Name of a stack of all experts' matrices, such as gate_up_proj -> LOSS_SCALE * dL/dw of
        the stack, summed over the batches so far."""

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The routed output (T, H). A later backward pass adds to `gradients`."""
        layer = self.layer

        def compute(part: Part, states: torch.Tensor) -> torch.Tensor:
            """The outputs (n, H) of the experts of a part."""
            # name of a stack -> matrices or biases of the experts in it
            tensors = layer.tensors(part.experts)
            for name, tensor in tensors.items():
                if not layer.family.stacks[name].is_bias:
                    # a leaf of autograd, because the model's own stacks require no gradients
                    leaf = tensor.detach().requires_grad_()
                    leaf.register_post_accumulate_grad_hook(partial(self._add_gradient, name, part))
                    tensors[name] = leaf
            expert_weights = part.weights(layer, tensors)
            return layer.output(layer.phi(states, expert_weights), expert_weights)

        return sort_by_expert(layer, index).output(hidden, weights, compute)

    def result(self) -> dict[str, torch.Tensor]:
        """Name -> statistic (E, I) fp64, 0 for experts without tokens."""
        shape = (self.layer.n_experts, self.layer.width)
        stacks = self.layer.family.stacks
        sums = {
            f"snip_{role}": torch.zeros(shape, dtype=torch.float64)
            for axes in stacks.values()
            if not axes.is_bias
            for role in axes.roles
        }
        for name, gradients in self.gradients.items():
            for expert, gradient in enumerate(gradients):
                stored = whole(self.layer.tensors(expert)[name])
                weights = at_least_fp32(stored.to(gradient.device))
                # `projection` (I, H) has a row for each channel
                for role, projection in split((weights * gradient).abs_(), stacks[name]).items():
                    sums[f"snip_{role}"][expert] = projection.sum(-1).double().cpu() / LOSS_SCALE
        return sums

    def _add_gradient(self, name: str, part: Part, leaf: torch.Tensor) -> None:
        """Move `leaf.grad` to `gradients`. `leaf`: the matrices of the part's experts in the stack
        `name`."""
        assert leaf.grad is not None
        gradient = at_least_fp32(leaf.grad)
        leaf.grad = None
        if name not in self.gradients:
            stack = getattr(self.layer.experts, name)
            self.gradients[name] = gradient.new_zeros(stack.shape)
        self.gradients[name][part.experts] += gradient
