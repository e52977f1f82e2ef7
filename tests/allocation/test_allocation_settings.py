from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
from facts_of import layer, settings

from moe_lab.allocation import ALLOCATIONS, allocate, budgets, check, fits, get, needs, routed_ratio, zero_expert
from moe_lab.config import AllocationConfig
from moe_lab.config.base import SettingsError, valid
from moe_lab.errors import UserError


@pytest.mark.parametrize(
    ("fields", "granularity", "named"),
    [
        ({"name": "coverage"}, "expert", "allocation=coverage.*evolutionary"),
        ({"name": "evolutionary", "search": "code"}, "channel", "allocation=evolutionary.*coverage, global"),
        ({"name": "globl"}, "expert", "allocation=globl.*global"),
        ({"multiple_of": 4}, "channel", "multiple_of=4"),
        ({"name": "global", "by": "reap"}, "channel", "allocation.by=reap"),
        ({"name": "u_shaped", "parameters": {"betta": 1}}, "expert", "betta.*beta"),
        ({"name": "u_shaped", "parameters": {"beta": "much"}}, "expert", "beta=much"),
        ({"name": "u_shaped", "parameters": {"align": None}}, "expert", "align"),
        ({"name": "coverage", "parameters": {"prior": "ala3"}}, "channel", "prior=ala3.*ala"),
        ({"name": "global", "parameters": {"zero_expert": "dropp"}}, "channel", "zero_expert=dropp.*drop"),
        ({"name": "global", "parameters": {"align": {"block": 1.5}}}, "channel", "align.block=1.5"),
        ({"name": "global", "parameters": {"align": {"block": 0}}}, "channel", "align.block=0"),
        ({"name": "global", "parameters": {"align": {"block": 8, "min_channels": -1}}}, "channel", "min_channels=-1"),
        ({"replacement": "ream", "parameters": {"group_size": 8.5}}, "expert", "allocation.parameters.group_size"),
        ({"replacement": "m_smoe", "parameters": {"group_size": 8}}, "expert", "allocation.parameters.group_size"),
        ({"protect": "super"}, "channel", "allocation.protect=super.*layerwise"),
        ({"protect": "supper"}, "expert", "allocation.protect=supper"),
    ],
)
def test_mistakes_are_said_before_anything_runs(fields: Any, granularity: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        check(AllocationConfig(**fields), granularity)


@pytest.mark.parametrize("field", ["by", "search", "path", "protect_layers"])
def test_what_nothing_would_read_is_refused(field: str) -> None:
    with pytest.raises(SettingsError, match=f"allocation.{re.escape(field)}=") as error:
        valid(AllocationConfig, {"name": "uniform", field: 0.5 if field == "protect_layers" else "x"}, "allocation")
    assert len(error.value.sentences) == 1


def test_needs() -> None:
    def of(name: str, **parameters: Any) -> tuple[str, ...]:
        return needs({"name": name, "parameters": parameters})

    assert of("uniform") == of("global") == of("coverage", inter="uniform", intra="ranking") == ()
    assert of("loss_based") == of("coverage") == of("coverage", intra="uniform") == ("statistics",)
    assert of("coverage", prior="ala_lm") == ("gradients", "statistics")
    assert of("coverage", prior="loss", layer_prior="none") == ("ablation",)
    assert of("coverage", prior="none", inter="u_shaped") == ()
    assert of("loss_based", layer_prior="nll") == of("coverage", prior="none", layer_prior="nll") == ("scaling",)
    assert needs(vars(AllocationConfig(protect="super"))) == ("statistics",)
    assert needs({"name": "global", "by": "frequency", "parameters": {}}) == ("by",)


def test_what_becomes_of_empty_experts() -> None:
    assert zero_expert(settings("coverage", 0.5)) == "drop"
    assert zero_expert(settings("global", 0.5)) == "keep_null"
    assert zero_expert(settings("global", 0.5, zero_expert="drop")) == "drop"


def test_what_another_step_decides_is_not_decided_from_scores() -> None:
    for name, allocation in ALLOCATIONS.items():
        if not allocation.functions.get("expert"):
            with pytest.raises(UserError, match=f"allocation={re.escape(name)}"):
                allocate(settings(name, 0.25), {0: layer(4)}, {0: [0.0] * 4})


FACTS = {"parameters": 10_000, "layers": {0: {**layer(10), "expert_parameters": 800}}}


def test_ratio_of_the_model() -> None:
    assert routed_ratio(0.2, "routed", FACTS) == 0.2
    assert routed_ratio(0.2, "model", FACTS) == pytest.approx(0.25)
    published = {"parameters": 1000, "layers": {0: {"n_experts": 1, "expert_parameters": 913}}}
    assert routed_ratio(0.2, "model", published) == pytest.approx(0.219, abs=5e-4)
    chosen = {**settings("uniform", 0.4), "ratio_basis": "model"}
    assert allocate(chosen, FACTS["layers"], {0: [0.0] * 10}, {}, FACTS) == {0: 5}
    scores = {0: numpy.arange(80.0).reshape(10, 8)}
    assert budgets({**chosen, "name": "global"}, FACTS["layers"], scores, {}, FACTS)[0].sum() == 40
    for layers, ratio, nearest in ((FACTS["layers"], 0.8, 0.79), ({0: layer(10, top_k=4)}, 0.79, 0.559)):
        with pytest.raises(UserError, match=rf"ratio={re.escape(str(ratio))}: .*; {re.escape(str(nearest))}\d* is "):
            allocate({**chosen, "ratio": ratio}, layers, {0: [0.0] * 10}, {}, FACTS)
    with pytest.raises(UserError, match="ratio_basis=model needs the number of the model's parameters"):
        allocate(chosen, FACTS["layers"], {0: [0.0] * 10})


def test_fits_says_without_scores_what_cannot_be_had() -> None:
    layers = {0: layer(16, top_k=8, width=48)}
    for name in ("uniform", "global", "evolutionary", "reconstruction"):
        fits(settings(name, 0.5), layers, "expert")
        with pytest.raises(UserError, match=r"0.562 is the largest feasible ratio"):
            fits(settings(name, 0.75), layers, "expert")
    for ratio, block in ((0.75, None), (0.75, 16), (0.75, 32)):
        fits(settings("global", ratio, align=block and {"block": block}), layers, "channel")
    for ratio, block, named in ((0.75, 64, "block=64"), (0.25, 32, "block=32.* smallest"), (1, None, "ratio=1")):
        with pytest.raises(UserError, match=named):
            fits(settings("global", ratio, align=block and {"block": block}), layers, "channel")
    fits({**settings("uniform", 0.75), "ratio_basis": "model"}, layers, "expert")
    assert get("reconstruction").step == "reconstruction"
