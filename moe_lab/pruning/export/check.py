"""Check that what an export would write can be loaded, before it is written.

`python -m moe_lab.child_process` serves this module where a process without torch writes an export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import Checkpoint, Entry, read_json
from moe_lab.models.config_json import LAYERS_FIELD
from moe_lab.models.discover import routed_layers
from moe_lab.models.families import has_causal_model
from moe_lab.models.load import check_sizes, skeleton
from moe_lab.models.transformers_private import NameMapping
from moe_lab.pruning.plan import Plan

ROUTING_FACTS = ("n_experts", "top_k", "n_group", "topk_group")


def check(
    source: str, written: str, shape: str, tensors: Mapping[str, tuple[str, Sequence[int]]]
) -> None:
    """Raise UserError unless three conditions hold: the plan in folder `written` fits the model in
    folder `source`, as for `prune`; the model that `written` describes has the experts and routers
    of the pruned model in `shape`; and it takes all of `tensors`, name -> (type, shape).
    transformers builds both models, without weights. A model type for which transformers has no
    code is not checked."""
    if not has_causal_model(str(read_json(Path(source, "config.json")).get("model_type"))):
        return
    plan = Plan.load(Path(written, "plan.json"))
    layers = routed_layers(skeleton(Path(source)))
    plan.check_model(layers)
    # weights are not written yet, so these entries have no file, no position and no size
    entries = {
        name: Entry("", dtype, tuple(sides), 0, 0) for name, (dtype, sides) in tensors.items()
    }
    try:
        code_is_ours = LAYERS_FIELD in read_json(Path(written, "config.json"))
        model = skeleton(Path(written), trust_remote_code=code_is_ours)
        check_sizes(Checkpoint(Path(written), (), {}, entries), NameMapping(model, entries))
        actual = {
            layer.index: tuple(getattr(layer, fact) for fact in ROUTING_FACTS)
            for layer in routed_layers(model)
        }
    except UserError as error:
        # without the path of `written`, which does not stay
        reason = str(error).replace(f"{written}/", "").replace(f"{written}: ", "")
        raise UserError(f"export: nothing could load what would be written: {reason}") from None
    for layer in layers:
        count = layer.n_experts if shape == "masked" else len(plan.layers[layer.index].retained)
        expected = (count, layer.top_k, layer.n_group, layer.topk_group)
        if actual.get(layer.index) != expected:
            raise UserError(
                f"export: layer {layer.index} would be loaded with {', '.join(ROUTING_FACTS)} = "
                f"{actual.get(layer.index)}, expected {expected}: state these fields in "
                f"{source}/config.json"
            )
