"""Families as their code is read, compared with the classes transformers imports."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moe_lab.models.families import COUNT_FIELDS, PORTS, read_family
from moe_lab.models.ports import ask_family
from moe_lab.pruning.export import export, remote
from moe_lab.pruning.plan import Plan


def with_experts(kind: str) -> bool:
    names = {*CONFIG_MAPPING[kind].attribute_map, *CONFIG_MAPPING[kind].__annotations__}
    return bool(names & {*COUNT_FIELDS})


def test_what_is_read_is_what_the_classes_say() -> None:
    kinds = {kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if with_experts(kind)}
    assert len(kinds) > 30 and {"olmoe", "mixtral", "qwen3_moe", "deepseek_v3"} <= kinds
    for kind in sorted({*kinds, *PORTS}):
        assert read_family(kind) == ask_family(kind) is not None, kind


def test_types_without_a_causal_language_model_have_no_family() -> None:
    assert (
        [read_family(kind) for kind in ("homemade", "vit")]
        == [ask_family(kind) for kind in ("homemade", "vit")]
        == [None, None]
    )


def test_what_cannot_be_read_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save("olmoe", tmp_path / "model")
    plan = Plan({0: (0, 1, 2, 3), 1: (1, 2, 3, 4, 5), 2: (0, 1, 7, 9)}, dict.fromkeys(range(3), 16))
    read = export(tmp_path / "model", plan, tmp_path / "read")
    monkeypatch.setattr(remote, "read_family", lambda kind: None)
    asked = export(tmp_path / "model", plan, tmp_path / "asked")
    for name in ("config.json", "modeling_pruned_olmoe.py"):
        assert (read / name).read_bytes() == (asked / name).read_bytes()
