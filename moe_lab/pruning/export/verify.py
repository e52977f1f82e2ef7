"""Compare an exported checkpoint with the masked model, one decoder layer at a time."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch.nn.functional import rms_norm

from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer
from moe_lab.models.experts import replace_experts
from moe_lab.models.load import stored_dtype
from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.mask import mask_layers, planned_experts
from moe_lab.pruning.plan import Plan

TOKENS = 64
"""Number of random tokens on which the models are compared."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest relative difference of outputs that is accepted where channels are summed in another
order."""
Pair = tuple[str, torch.Tensor, torch.Tensor]
"""Outputs to compare: (name, outputs of the masked model (..., H), outputs of the export (...,
H))."""


def verify(
    source: Path,
    plan: Plan,
    exported: Path,
    *,
    trust_remote_code: bool = False,
) -> float:
    """Compare the checkpoint in folder `exported` with the model in folder `source`, masked by
    `plan`. Returns the largest `_relative_difference` of their outputs.

    Both models get TOKENS random tokens, and each decoder layer of the export gets the input of the
    same layer in the masked model. The outputs of each layer, of each retained expert and the
    logits are compared, on the CPU. They must be equal bit for bit. MoE layers may differ by
    TOLERANCE if the plan has channels, or if the export has zeros for dropped experts. Code in
    `exported` is always run. UserError naming the first layer that differs.
    """
    dtype = stored_dtype(source)
    masked = StreamedModel(source, dtype=dtype, device="cpu", trust_remote_code=trust_remote_code)
    pruned = StreamedModel(exported, dtype=dtype, device="cpu", trust_remote_code=True)
    plan.check_model(list(masked.moe_layers.values()))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        masked.model.config.get_text_config().vocab_size, (1, TOKENS), generator=generator
    )
    valid = torch.ones_like(ids, dtype=torch.bool)
    state: torch.Tensor | None = None
    largest = 0.0
    with torch.no_grad():
        for number in range(len(masked.layers)):
            masked_moe = masked.moe_layers.get(number)
            exported_moe = pruned.moe_layers.get(number)
            with ExitStack() as stack:
                for model in (masked, pruned):
                    stack.enter_context(model.layer(number, next_number=number + 1))
                with mask_layers([] if masked_moe is None else [masked_moe], plan):
                    output = masked.run_layer(number, ids, valid, state)
                pairs = [("outputs", output, pruned.run_layer(number, ids, valid, state))]
                if masked_moe is not None and exported_moe is not None:
                    hidden = rms_norm(output.flatten(0, -2), output.shape[-1:])
                    # experts may work in a narrower space, to which the block projects
                    hidden = hidden[:, : masked_moe.hidden]
                    pairs.append(
                        _all_experts(masked_moe, exported_moe, plan.layers[number], hidden)
                    )
            has_same_order = exported_moe is None or (
                not plan.has_channels and exported_moe.n_experts == len(plan.retained[number])
            )
            bound = 0.0 if has_same_order else TOLERANCE[dtype]
            location = f"decoder layer {number} of {exported}"
            largest = max(largest, *(_difference(location, pair, bound) for pair in pairs))
            state = output
        assert state is not None
        logits = ("logits", masked.logits(ids, valid, state), pruned.logits(ids, valid, state))
    return max(largest, _difference(str(exported), logits, 0.0))


def _all_experts(
    layer: MoELayer, exported: MoELayer, plan: LayerPlan, hidden: torch.Tensor
) -> Pair:
    """(name, expected outputs, actual outputs) of all retained experts of a layer. Each expert is
    called for one row of `hidden` (T, H)."""
    retained = torch.tensor(plan.retained)
    positions = torch.arange(len(retained))  # of the retained experts in `exported`
    hidden = hidden[positions % len(hidden)]
    if exported.n_experts == layer.n_experts:
        positions = retained
    gates = hidden.new_ones(len(retained), 1)
    with ExitStack() as stack:
        if plan.channels is not None:
            replace_experts(layer, lambda _: planned_experts(layer, plan), stack)
        expected = layer.experts(hidden, retained[:, None], gates)
    actual = exported.experts(hidden, positions[:, None], gates)
    return "outputs of all retained experts, called in turn,", expected, actual


def _difference(location: str, compared: Pair, bound: float) -> float:
    """The `_relative_difference` of the outputs in `compared`. UserError when it is above `bound`
    or NaN."""
    name, expected, actual = compared
    difference = _relative_difference(expected.flatten(0, -2), actual.flatten(0, -2))
    if not difference <= bound:
        raise UserError(
            f"export: {location} gives something else than the masked model: its {name} differ by "
            f"{difference:.1e} of the largest, expected "
            f"{f'{bound:.0e} at most' if bound else 'the same bits'}"
        )
    return difference


def _relative_difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """The largest relative difference of two tensors (T, H). Each absolute difference is divided by
    the largest expected magnitude in its row or in its column, whichever is smaller."""
    magnitude = expected.float().abs()
    scale = torch.minimum(magnitude.amax(0, keepdim=True), magnitude.amax(1, keepdim=True)).clamp(
        min=1e-30
    )
    return float(((expected.float() - actual.float()).abs() / scale).max())
