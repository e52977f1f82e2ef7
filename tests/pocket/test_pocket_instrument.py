"""What a criterion that was calibrated on a skill keeps serves that skill better than what chance keeps.

`python -m benchmarks.instrument` asks it of all models, skills, items and tokens.
"""

from __future__ import annotations

from statistics import mean

import pytest

from benchmarks.instrument import ABLATION, SKILLS, items_of, pruned_loss, random_scores, rankings
from moe_lab.config import ModelConfig
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.models.load import load_model

pytestmark = pytest.mark.slow

RATIO = 0.25


@pytest.mark.parametrize("skill", SKILLS)
def test_criteria_calibrated_on_a_skill_keep_it_better_than_chance(skill: str) -> None:
    subject = LoadedModel(*load_model(ModelConfig(name="small", path="pocket:qwen3_moe", threads=1)))
    items = [item for benchmark in SKILLS[skill] for item in items_of(benchmark)[:10]]
    chance = mean(pruned_loss(subject, random_scores(subject.model, seed), items, RATIO) for seed in range(4))
    found = {name: pruned_loss(subject, scores, items, RATIO) for name, scores in rankings(subject, skill, 4096, 1024)}
    assert {ABLATION, "man", "reap", "frequency", "exact_damage"} <= set(found)
    assert {name: loss for name, loss in found.items() if loss >= chance} == {}
