from __future__ import annotations

import dataclasses
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy
import pytest

from moe_lab import errors
from moe_lab.config import AllocationConfig, RecoveryConfig
from moe_lab.config.base import SettingsError, valid
from moe_lab.errors import UserError
from moe_lab.pruning.plan import Plan, merge_experts
from moe_lab.recovery.settings import check, check_merging, finetune_identity, storage_identity

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


@pytest.mark.parametrize(
    ("changes", "command"),
    [({"bits": 4}, r"pip install 'moe-lab\[quantisation\]'"), (TUNED, r"pip install 'moe-lab\[fine-tuning\]'")],
)
def test_missing_packages_are_said_with_the_command(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], command: str
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=command):
        check(RecoveryConfig(**changes))
    check(RecoveryConfig())
    for without_adapters in (ROUTERS, FIT):
        check(RecoveryConfig(**without_adapters))


def test_identity_holds_what_changes_the_result_and_nothing_else() -> None:
    assert finetune_identity(RecoveryConfig()) == storage_identity(RecoveryConfig()) == {}
    base = RecoveryConfig(bits=4, instructions="alpaca")
    same = {"name": "other", "save_every": 7, "instructions": "other"}  # a text counts by its own identity
    for name, value in same.items():
        assert finetune_identity(dataclasses.replace(base, **{name: value})) == finetune_identity(base)
    fields = {field.name for field in dataclasses.fields(base)} - {"distill", "temperature", "train", "fit"}
    for name in fields - {*same, "bits", "modules"}:
        values = {"schedule": "linear", "shared_experts": False, "dropout": 0.1, "warmup": 0.2}
        other = values.get(name, getattr(base, name) * 2)
        assert finetune_identity(dataclasses.replace(base, **{name: other})) != finetune_identity(base), name
    assert finetune_identity(dataclasses.replace(base, bits=16)) == finetune_identity(base)
    stored = {"bits": 4, "modules": ["experts", "shared_experts"]}
    assert storage_identity(base) == stored
    assert storage_identity(dataclasses.replace(base, modules=["shared_experts", "experts", "experts"])) == stored
    no_router = dataclasses.replace(base, router_rank=0)
    assert finetune_identity(no_router) == finetune_identity(dataclasses.replace(no_router, router_learning_rate=1.0))


def test_identity_of_a_distillation_holds_its_teacher_and_what_is_trained() -> None:
    learnt = RecoveryConfig(instructions="alpaca")
    distilled = RecoveryConfig(distill="alpaca")
    routers = RecoveryConfig(**ROUTERS)
    identities = [finetune_identity(settings) for settings in (learnt, distilled, routers)]
    assert "teacher" not in identities[0] and not any(one == other for one, other in combinations(identities, 2))
    for name in ("temperature", "router_learning_rate", "epochs", "rows_per_step", "warmup", "clip"):
        other = dataclasses.replace(routers, **{name: getattr(routers, name) * 2})
        assert finetune_identity(other) != finetune_identity(routers), name
    for name, value in {"name": "other", "save_every": 7, "distill": "other"}.items():
        assert finetune_identity(dataclasses.replace(routers, **{name: value})) == finetune_identity(routers)


def test_identity_of_a_fit_is_that_of_no_training() -> None:
    fit = finetune_identity(RecoveryConfig(**FIT))
    assert fit and finetune_identity(RecoveryConfig(**{"fit": "other", "name": "other", "save_every": 7})) == fit
    others = [RecoveryConfig(instructions="c4"), RecoveryConfig(distill="c4"), RecoveryConfig(**ROUTERS)]
    assert not any(fit == finetune_identity(other) for other in others)


@pytest.mark.parametrize(
    ("allocation", "ratio", "sentence"),
    [
        ({"replacement": "hc_smoe"}, 0.5, None),
        ({"replacement": "none"}, 0.5, "allocation.replacement=none merges none: expected one of m_smoe"),
        ({"replacement": "mean_output"}, 0.5, "allocation.replacement=mean_output merges none"),
        ({"replacement": "hc_smoe"}, 0.0, "ratio=0 merges none"),
        ({"path": "merging.json"}, 0.5, None),
        ({"path": "dropping.json"}, 0.5, "dropping.json merges none"),
        ({"path": "schedule.json"}, 0.5, "allocation.replacement=none merges none"),
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


def test_settings_are_checked_without_torch() -> None:
    code = "import sys, moe_lab.recovery.settings; sys.exit(any(m in sys.modules for m in ('torch', 'peft')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
