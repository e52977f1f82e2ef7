"""The choices of configuration groups as Hydra has them: files of conf/, and criteria, which need none."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from moe_lab.criteria import CRITERIA

CONF = Path(__file__).parents[1] / "conf"


def names(group: str) -> list[str]:
    """All choices of a group."""
    return sorted({file.stem for file in (CONF / group).glob("*.yaml")} | set(CRITERIA if group == "criterion" else ()))


def load(group: str, name: str) -> DictConfig:
    """What a choice is made of."""
    file = CONF / group / f"{name}.yaml"
    content = OmegaConf.load(file) if file.exists() else OmegaConf.create({"name": name})
    assert isinstance(content, DictConfig)
    return content
