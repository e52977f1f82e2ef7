"""Between Hydra and the study: schema, typed configurations, group files, and Hydra's errors as sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from moe_lab import grid
from moe_lab.config import Config
from moe_lab.errors import UserError, nearest, unknown


def register() -> None:
    """Tell Hydra the schema that conf/config.yaml starts from."""
    ConfigStore.instance().store(name="schema", node=Config, provider="moe_lab")


def group_files(overrides: Sequence[str] = ()) -> grid.Files:
    """The configuration groups Hydra was started with, and what `overrides` set inside them."""
    loader = GlobalHydra.instance().config_loader()
    entries = [entry.path.removeprefix("file://") for entry in loader.get_search_path().get_path() if entry.path]
    folders = [Path(path) for path in entries if "://" not in path]

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
    own = config.copy()
    with open_dict(own):
        own.pop("hydra", None)  # a job of a multirun carries Hydra's own settings along
    try:
        result = OmegaConf.to_object(own)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} is not set: add {error.full_key}=VALUE") from None
    assert isinstance(result, Config)
    return result


def ask(configs: Sequence[DictConfig], overrides: Sequence[Sequence[str]] | None = None) -> int:
    """Run one study over the cells of all `configs`; the exit code.

    `overrides`: what the command line set for each of them; None takes those of the job that runs now.
    """
    from moe_lab.study.run import run

    words = [list(HydraConfig.get().overrides.task)] * len(configs) if overrides is None else overrides
    files = group_files([word for word in words[0] if all(word in others for others in words)])
    settings = [grid.chosen(typed(config), _axes(own)) for config, own in zip(configs, words, strict=True)]
    requests = [(grid.cells(one, files), grid.benchmarks(one, files)) for one in settings]
    return run(settings[0], requests, add=overrides is None and HydraConfig.get().mode == RunMode.MULTIRUN)


def _axes(overrides: Sequence[str]) -> set[str]:
    """The axes that a command line sets to one value; a list it gives for an axis stands above that."""
    keys = {item.key_or_group for item in OverridesParser.create().parse_overrides(list(overrides))}
    return {axis for axis in grid.AXES if f"grid.{axis}" not in keys and {axis, f"model.{axis}"} & keys}


_OPEN = (
    "allocation.parameters.",
    "criterion.parameters.",
    "interpreters.",
    "judge.extra.",
    "model.template_arguments.",
    "protocol.benchmarks.",
)


def addable(argument: str) -> str:
    """The argument as Hydra takes it: parameters and protocols are open to names their file does not have, so `++` adds
    or sets."""
    return f"++{argument}" if argument.startswith(_OPEN) else argument


def explain(error: BaseException) -> str:
    """Hydra's and OmegaConf's errors as one sentence with the nearest valid choice."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return str(unknown(group.lstrip("/") or "config", name, error.options))
    cause = error.__cause__ if isinstance(error, ConfigCompositionException) and error.__cause__ else error
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        return _unknown_key(cause)
    if str(error).startswith("Ambiguous value"):
        override = str(error).partition("'")[2].partition("'")[0]
        axis, _, values = override.partition("=")
        return f"{override} names several values: write grid.{axis}=[{values}], or put -m in front to sweep"
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return f"{cause.full_key}: {str(cause).splitlines()[0]}"
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _unknown_key(error: OmegaConfBaseException) -> str:
    key = str(error.full_key or error.key)
    parent, _, name = key.rpartition(".")
    known = [f.name for f in fields(error.object_type)] if is_dataclass(error.object_type) else []
    close = nearest(name, known)
    hint = f": did you mean {parent + '.' if parent else ''}{close}?" if close else ""
    return f"{key} is no setting{hint} (known: {', '.join(sorted(known)) or 'none'})"
