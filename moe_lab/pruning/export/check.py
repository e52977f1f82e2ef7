"""What transformers knows of a model: before an export, the class of the model is asked for what
the files do not state, and whether it could load what would be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import Checkpoint, Entry, open_checkpoint, read_json
from moe_lab.models.config_json import LAYERS_FIELD, quantization_of
from moe_lab.models.facts import model_facts
from moe_lab.models.families import COUNT_FIELDS, NOVICE_TENSOR, WIDTH_FIELDS
from moe_lab.models.load import checked_names, skeleton
from moe_lab.models.stored_weights import StoredWeights, stored_routing
from moe_lab.models.transformers_private import NameMapping


def describe(source: str, trust_remote_code: bool) -> dict[str, Any]:
    """What the class of the model in folder `source` adds to its files.

    layers   layer -> facts, as from `model_facts`
    fields   name -> value of each field for the numbers of experts and layers, and the width of
             experts; and "architectures"
    routing  as from `stored_routing`

    UserError for a model that is not supported or whose weight files do not fit its config.json,
    and for tensors of experts or routers that moe_lab does not know."""
    model = skeleton(Path(source), trust_remote_code=trust_remote_code)
    checkpoint = open_checkpoint(Path(source))
    routing = stored_routing(NameMapping(model, checkpoint.tensors))
    _check_sizes(checkpoint, model)
    text_config = model.config.get_text_config().to_dict()
    names = (*COUNT_FIELDS, *WIDTH_FIELDS, "num_hidden_layers")
    fields = {name: text_config.get(name) for name in names}
    return {
        "layers": model_facts(model)["layers"],
        "fields": {
            **{name: value for name, value in fields.items() if isinstance(value, int)},
            "architectures": [type(model).__name__],
        },
        "routing": routing,
    }


def loaded_layers(
    source: str,
    written: str,
    shape: str,
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    trust_remote_code: bool,
) -> dict[int, dict[str, Any]]:
    """Layer -> facts, as from `model_facts`, of the export in folder `written`, which has no
    weights yet, as transformers would load it. `tensors`: its tensors, name -> (type, shape). An
    export in the shape "masked" also has all other tensors of the original, in folder `source`.

    UserError if the model that config.json in `written` describes could not load these tensors."""
    # weights are not written yet: no shards, start 0 and size 0
    entries = {
        name: Entry("", dtype, tuple(lengths), 0, 0)
        for name, (dtype, lengths) in tensors.items()
        if not name.endswith(NOVICE_TENSOR)
    }
    if shape == "masked":  # it has the tensors of the original, except those that vLLM adds
        entries = {**open_checkpoint(Path(source)).tensors, **entries}
    try:
        # with this field, the code in `written` is that of moe_lab, and may be run
        code_is_ours = LAYERS_FIELD in read_json(Path(written, "config.json"))
        model = skeleton(Path(written), trust_remote_code=trust_remote_code or code_is_ours)
        _check_sizes(Checkpoint(Path(written), (), {}, entries), model)
        layers: dict[int, dict[str, Any]] = model_facts(model)["layers"]
        return layers
    except UserError as error:
        # the path of `written` is removed from the message, because the folder is temporary
        reason = str(error).replace(f"{written}/", "").replace(f"{written}: ", "")
        raise UserError(f"export: nothing could load what would be written: {reason}") from None


def _check_sizes(checkpoint: Checkpoint, model: Any) -> None:
    """UserError as from `checked_names`; quantised weights are not dequantised for an export."""
    if quantization_of(checkpoint) is None:
        checked_names(StoredWeights(checkpoint), model)
