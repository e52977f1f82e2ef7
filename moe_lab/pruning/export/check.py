"""Check that what an export would write can be loaded, before it is written."""

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

ROUTING_FIELDS = ("n_experts", "top_k", "n_group", "topk_group")


def check(
    source: str, written: str, shape: str, tensors: Mapping[str, tuple[str, Sequence[int]]]
) -> None:
    """Raise UserError unless transformers could load the export in folder `written`, which has no
    weights yet.

    The plan in `written` must fit the model in folder `source`. The model that config.json in
    `written` describes must have the experts and routers of the pruned model in `shape`. This model
    must be able to load `tensors`: name -> (type, shape). A model type for which transformers has
    no code is not checked."""
    if not has_causal_model(str(read_json(Path(source, "config.json")).get("model_type"))):
        return
    plan = Plan.load(Path(written, "plan.json"))
    layers = routed_layers(skeleton(Path(source)))
    plan.check_model(layers)
    # weights are not written yet: no shards, start 0 and size 0
    entries = {
        name: Entry("", dtype, tuple(lengths), 0, 0) for name, (dtype, lengths) in tensors.items()
    }
    try:
        # with this field, the code in `written` is that of moe_lab, and may be run
        code_is_ours = LAYERS_FIELD in read_json(Path(written, "config.json"))
        model = skeleton(Path(written), trust_remote_code=code_is_ours)
        check_sizes(Checkpoint(Path(written), (), {}, entries), NameMapping(model, entries))
        actual = {
            layer.index: tuple(getattr(layer, field) for field in ROUTING_FIELDS)
            for layer in routed_layers(model)
        }
    except UserError as error:
        # the path of `written` is removed from the message, because the folder is temporary
        reason = str(error).replace(f"{written}/", "").replace(f"{written}: ", "")
        raise UserError(f"export: nothing could load what would be written: {reason}") from None
    for layer in layers:
        n_experts = layer.n_experts if shape == "masked" else len(plan.layers[layer.index].retained)
        expected = (n_experts, layer.top_k, layer.n_group, layer.topk_group)
        if actual.get(layer.index) != expected:
            raise UserError(
                f"export: layer {layer.index} would be loaded with {', '.join(ROUTING_FIELDS)} = "
                f"{actual.get(layer.index)}, expected {expected}: state these fields in "
                f"{source}/config.json"
            )
