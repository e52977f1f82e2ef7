"""docs/new_criterion.md works as it is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import naive
import pytest
import test_criteria
import torch
from omegaconf import OmegaConf

from moe_lab import criteria
from moe_lab.config import CriterionConfig

PAGE = Path(__file__).parents[2] / "docs" / "new_criterion.md"


@pytest.fixture
def blocks() -> Iterator[dict[str, list[str]]]:
    """The page's code by language; what it registers is forgotten afterwards."""
    found: dict[str, list[str]] = {}
    for language, code in re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        found.setdefault(language, []).append(code)
    before = set(criteria.CRITERIA)
    yield found
    for name in set(criteria.CRITERIA) - before:
        del criteria.CRITERIA[name]


def test_the_example_runs(blocks: dict[str, list[str]]) -> None:
    function, row = blocks["python"]
    exec(compile(function, str(PAGE), "exec"), {"__name__": "page"})
    naively: Any = SimpleNamespace(rows={})
    exec(row, {"NAIVE": naively.rows})
    (text,) = blocks["yaml"]
    assert len(text.strip().splitlines()) == 4
    config: Any = OmegaConf.merge(OmegaConf.structured(CriterionConfig), OmegaConf.create(text))
    criteria.check(config.name, config.parameters)

    inputs = test_criteria.statistics("olmoe")
    experts = test_criteria.experts(inputs)
    scores = criteria.score(config.name, inputs, experts=experts, parameters=config.parameters)
    plain = criteria.score(config.name, inputs, experts=experts)
    for layer, values in plain.items():
        expected = test_criteria.expected("olmoe", layer, "model", naively.rows[config.name])
        assert naive.relative(torch.from_numpy(values), expected) < 1e-5
        assert (scores[layer] == values**0.5).all()
