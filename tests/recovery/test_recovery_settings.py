from __future__ import annotations

import dataclasses
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy
import pytest

from moe_lab.config import AllocationConfig, RecoveryConfig
from moe_lab.config.base import SettingsError, identity, valid
from moe_lab.errors import UserError
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.replace import merge_experts
from moe_lab.recovery import check_merging

TUNED: dict[str, Any] = {"instructions": "alpaca"}
ROUTERS: dict[str, Any] = {"distill": "c4", "train": "routers"}
FIT: dict[str, Any] = {"fit": "c4"}


@pytest.mark.parametrize(
    ("changes", "setting", "expected"),
    [
        ({"train": "routers"}, "train=routers", "distill"),
        ({**TUNED, "distill": "c4"}, "instructions=alpaca", "one of"),
        ({**TUNED, "temperature": 2.0}, "temperature=2.0", "distill"),
        ({**ROUTERS, "rank": 8}, "rank=8", "32"),
        ({**ROUTERS, "learning_rate": 1e-3}, "learning_rate=0.001", "0.0001"),
        ({**ROUTERS, **FIT}, "distill=c4", "one of"),
        ({**FIT, "epochs": 1.0}, "epochs=1.0", "2.0"),
        ({**FIT, "train": "routers"}, "train=routers", "adapters"),
    ],
)
def test_settings_that_nothing_would_read_are_refused(changes: dict[str, Any], setting: str, expected: str) -> None:
    with pytest.raises(SettingsError) as error:
        valid(RecoveryConfig, changes, "recovery")
    (sentence,) = error.value.sentences
    assert sentence.startswith(f"recovery.{setting} ") and expected in sentence.partition("expected")[2]


def test_identity_counts_a_text_by_its_use_and_not_the_bits_it_is_stored_in_afterwards() -> None:
    learnt, distilled, fitted = (RecoveryConfig(**{use: "c4"}) for use in ("instructions", "distill", "fit"))
    assert not any(identity(one) == identity(other) for one, other in combinations((learnt, distilled, fitted), 2))
    for use in (learnt, distilled, fitted):
        stored = dataclasses.replace(use, bits=4, modules=["attention"], name="other")
        assert identity(stored) == identity(use)


@pytest.mark.parametrize(
    ("allocation", "ratio", "sentence"),
    [
        ({"replacement": "hc_smoe"}, 0.5, None),
        ({"replacement": "none"}, 0.5, "replacement=none .* m_smoe"),
        ({"replacement": "mean_output"}, 0.5, "replacement=mean_output "),
        ({"replacement": "hc_smoe"}, 0.0, "ratio=0 "),
        ({"path": "merging.json"}, 0.5, None),
        ({"path": "dropping.json"}, 0.5, "dropping.json merges none"),
        ({"path": "schedule.json"}, 0.5, "replacement=none "),
        ({"path": "schedule.json", "replacement": "m_smoe"}, 0.5, None),
    ],
)
def test_a_fit_needs_merged_experts(
    tmp_path: Path, allocation: dict[str, Any], ratio: float, sentence: str | None
) -> None:
    whole = {0: numpy.ones((2, 4), dtype=bool)}
    Plan({0: (0, 1)}, {0: 2}, {}, whole).save(tmp_path / "dropping.json")
    merge_experts({0: {0: {0: 0.5, 1: 0.5}}}, {0: 4}, provenance={}).save(tmp_path / "merging.json")
    (tmp_path / "schedule.json").write_text('{"0": 1}')
    if "path" in allocation:
        allocation = {**allocation, "name": "list", "path": str(tmp_path / allocation["path"])}
    given = (AllocationConfig(**allocation), ratio)
    check_merging(RecoveryConfig(), *given)
    if sentence is None:
        check_merging(RecoveryConfig(**FIT), *given)
        return
    with pytest.raises(UserError, match=sentence):
        check_merging(RecoveryConfig(**FIT), *given)
