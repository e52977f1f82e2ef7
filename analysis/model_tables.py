"""What follows from configurations and from the registry: architectures, formulas, and what scores are made of."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis import names
from analysis.load import Study
from analysis.tables import Table

if TYPE_CHECKING:
    from moe_lab.criteria.layer import Array

SIGNALS = ("Text", "Activations", "Routing", "Gradients", "Weights")
MARKS = {True: "yes", False: "no"}
EXPERTS, CHANNELS, HIDDEN = 5, 3, 2
"""A layer on which it is tried out what scores depend on."""
_PARAMETERS = re.compile(r"(?P<name>\w+)(\((?P<inside>.*)\))?")


def architecture_table(study: Study, *, name: str) -> Table:
    """Unified Expert Pruning's Table 4: layers, experts and parameters, from configurations alone."""
    rows = []
    for model, facts in study.models.items():
        layers = list(facts["layers"].values())
        decoder = facts.get("decoder_layers", np.nan)
        one = {key: max(layer[key] for layer in layers) for key in ("n_experts", "top_k", "hidden", "width")}
        inactive = sum((each["n_experts"] - each["top_k"]) * each["expert_parameters"] for each in layers)
        counts = {
            "Parameters (M)": facts["parameters"] / 1e6,
            "Active (M)": (facts["parameters"] - inactive) / 1e6,
            "Experts": one["n_experts"],
            "Top-k": one["top_k"],
            "Shared experts": facts.get("shared_width", np.nan) / one["width"],
            "MoE layers": len(layers),
            "Dense layers": decoder - len(layers),
            "Hidden size": one["hidden"],
            "Channels": one["width"],
        }
        rows.append({"Model": model, "Type": str(facts.get("model_type", "")), **counts})
    formats = {"Parameters (M)": "{:,.2f}", "Active (M)": "{:,.2f}", "Shared experts": "{:g}"}
    counted = ("Experts", "Top-k", "MoE layers", "Dense layers", "Hidden size", "Channels")
    formats |= dict.fromkeys(counted, "{:,.0f}")
    columns = list(rows[0]) if rows else ["Model", "Type"]
    return Table(
        name=name,
        title="Architectures",
        caption="From configurations alone. Parameters: of the whole model; active: without the routed experts that a "
        "token does not go to. Experts, top-k and channels (the width of an expert): of a layer, the most where layers "
        "differ. Shared experts: in experts of that width.",
        frame=pd.DataFrame(rows, columns=columns),
        formats={column: formats[column] for column in columns if column in formats},
        optional=("Shared experts", "Dense layers"),
    )


def formula_table(study: Study, *, name: str) -> Table:
    """Unified Expert Pruning's Table 6: the formula of every criterion of the study, and whose it is."""
    from moe_lab import criteria

    rows = []
    for word in _criteria(study):
        found = criteria.get(_parsed(word)[0])
        text = (inspect.getdoc(found.function) or "").partition("\n\n")[0].replace("\n", " ")
        rows.append((names.criterion(word), found.granularity, text, found.reference))
    return Table(
        name=name,
        title="Formulas of the criteria",
        caption="Sums run over the N tokens that the router sent to an expert; g: the gate, f: the expert's output "
        "before the gate, phi: the input of down_proj, w: weights. What scores lowest goes first.",
        frame=pd.DataFrame(rows, columns=["Criterion", "Scores", "Formula", "From"]),
        formats={},
    )


def signal_table(study: Study, *, name: str) -> Table:
    """AIMER's Table 1: what each criterion of the study reads."""
    words = _criteria(study)
    rows = [(names.criterion(word), *(MARKS[found] for found in signals(word).values())) for word in words]
    return Table(
        name=name,
        title="What criteria read",
        caption="Text: a calibration set. The others were found by changing each kind of input of the registered "
        "criterion and looking whether scores change. Activations: outputs or channels of experts; routing: how many "
        "tokens an expert got, and their gates. Sums over the tokens that an expert got count as routing only where "
        "counts or gates stand in the formula.",
        frame=pd.DataFrame(rows, columns=["Criterion", *SIGNALS]),
        formats={},
    )


def signals(word: str) -> dict[str, bool]:
    """Signal -> whether the scores of a criterion, by the word of a study's record, depend on it."""
    from moe_lab.criteria import reads_text

    name, parameters = _parsed(word)
    usual = _score(name, parameters, _inputs())
    found = {
        signal: bool((_score(name, parameters, _inputs(signal)) != usual).any())
        for signal in SIGNALS
        if signal != "Text"
    }
    return {"Text": reads_text(name), **found}


def _score(name: str, parameters: Mapping[str, Any], inputs: Mapping[str, Array]) -> Array:
    from moe_lab.criteria import get
    from moe_lab.criteria.layer import Layer

    layer = Layer(name, 0, EXPERTS, CHANNELS, inputs, "model", np.random.default_rng(0))
    return get(name).function(layer, **parameters)


def _inputs(changed: str | None = None) -> dict[str, Array]:
    """Sums of a layer as statistics/sums.py names them; those that carry the signal `changed` are others."""
    from moe_lab.config import GATES

    act, route, grad, weight = (_draws(at + 10 * (signal == changed)) for at, signal in enumerate(SIGNALS) if at)
    channels = (EXPERTS, CHANNELS)
    tokens = 5 * route(EXPERTS)
    sums = act(EXPERTS, 3, 3) * np.concatenate([np.ones((EXPERTS, 1, 3)), route(EXPERTS, 2, 3)], axis=1)
    sums[:, :, 0] = route(EXPERTS, 3)
    sums[:, 0, 0] = tokens
    phi = act(*channels)
    gated = phi * route(*channels)
    return {
        "tokens": tokens,
        **{f"sums_{gate}": sums for gate in GATES},
        "output_sum": act(EXPERTS, HIDDEN) * 0.1,
        **{sums_of: act(EXPERTS) * route(EXPERTS) for sums_of in ("damage", "ala_first", "ala_second")},
        "layer_loss": act().reshape(()),
        "channel_square": phi,
        "channel_max": phi,
        "gate_channel_square": gated,
        "gate_channel_max": gated,
        "renormalized_channel_square": gated,
        "renormalized_channel_max": gated,
        "channel_gradient_square": grad(*channels),
        "channel_product": phi * grad(*channels),
        "channel_product_abs": phi * grad(*channels),
        **{f"snip_{part}": weight(*channels) * grad(*channels) for part in ("down", "gate", "up")},
        "abs_sum": weight(EXPERTS),
        "square_sum": weight(EXPERTS),
        "count": np.asarray(9.0),
        **{f"channel_{part}": weight(*channels) for part in ("down_square", "down_abs", "gate_square", "up_square")},
    }


def _draws(seed: int) -> Callable[..., Array]:
    """Shape -> numbers between 1 and 2, others at every call."""
    random = np.random.default_rng(seed)
    return lambda *shape: np.asarray(random.uniform(1, 2, shape))


def _criteria(study: Study) -> list[str]:
    """Registered criteria of the study, in the order of tables."""
    from moe_lab.criteria import CRITERIA

    words = names.in_order(set(study.cells["criterion"]) - {"none"}, names.CRITERIA)
    return [word for word in words if _parsed(word)[0] in CRITERIA]


def _parsed(word: str) -> tuple[str, dict[str, Any]]:
    """`s_family(alpha=0,b=1)` as its name and its parameters."""
    found = _PARAMETERS.fullmatch(word)
    if found is None:
        return word, {}
    pairs = (part.partition("=") for part in (found["inside"] or "").split(",") if part)
    return found["name"], {key: _value(text) for key, _, text in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # a word
        return text
