"""Between Hydra and the study: schema, typed configurations, group files, and Hydra's errors as sentences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from moe_lab import grid
from moe_lab.config import Config
from moe_lab.errors import UserError, nearest, unknown


def register() -> None:
    """Tell Hydra the schema that conf/config.yaml starts from."""
    ConfigStore.instance().store(name="schema", node=Config, provider="moe_lab")


def group_files(overrides: Sequence[str] = ()) -> grid.Files:
    """The configuration groups Hydra was started with, and what `overrides` set inside them."""
    loader = GlobalHydra.instance().config_loader()
    entries = [entry.path for entry in loader.get_search_path().get_path()]
    folders = [Path(path.removeprefix("file://")) for path in entries if path and path.startswith("file://")]

    def names(group: str) -> list[str]:
        return sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})

    def load(group: str, name: str) -> DictConfig:
        file = next(file for folder in folders if (file := folder / group / f"{name}.yaml").exists())
        content = OmegaConf.load(file)
        assert isinstance(content, DictConfig)
        return content

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    values = ((item.key_or_group, item.value()) for item in parsed if "." in item.key_or_group)
    return grid.Files(names, load, tuple(values))


def typed(config: DictConfig) -> Config:
    """The composed configuration as typed objects. UserError for a value that is required and missing."""
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    try:
        result = OmegaConf.to_object(plain)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} is not set: add {error.full_key}=VALUE") from None
    assert isinstance(result, Config)
    return result


def ask(configs: Sequence[DictConfig], overrides: Sequence[str] | None = None) -> int:
    """Run one study over the cells of all `configs`; the exit code."""
    from moe_lab.study.run import run

    if overrides is None:
        overrides = OmegaConf.to_object(configs[0].hydra.overrides.task) if "hydra" in configs[0] else _task_overrides()
    files = group_files(overrides)
    settings = [typed(config) for config in configs]
    requests = [(grid.cells(one, files), grid.benchmarks(one, files)) for one in settings]
    return run(settings[0], requests)


def _task_overrides() -> Sequence[str]:
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


def explain(error: BaseException) -> str:
    """Hydra's and OmegaConf's errors as one sentence with the nearest valid choice."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return str(unknown(group.lstrip("/") or "config", name, error.options))
    cause = error.__cause__ if isinstance(error, ConfigCompositionException) and error.__cause__ else error
    if isinstance(cause, ConfigKeyError):
        return _unknown_key(cause)
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return f"{cause.full_key}: {str(cause).splitlines()[0]}"
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _unknown_key(error: ConfigKeyError) -> str:
    key = str(error.full_key or error.key)
    parent, _, name = key.rpartition(".")
    known = [str(field) for field in error.parent_node] if isinstance(error.parent_node, (DictConfig, ListConfig)) else []
    close = nearest(name, known)
    hint = f": did you mean {parent + '.' if parent else ''}{close}?" if close else ""
    return f"{key} is no setting{hint} (known: {', '.join(sorted(known)) or 'none'})"
