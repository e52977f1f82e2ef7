"""Interface to Hydra: schema, typed configurations, group files, and Hydra's errors as single sentences."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from fnmatch import fnmatch
from functools import cache
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from moe_lab import grid, plugins
from moe_lab.allocation import ALLOCATIONS
from moe_lab.config import Config
from moe_lab.criteria import CRITERIA
from moe_lab.errors import UserError, nearest, unknown
from moe_lab.paths import conf, store_folder


@cache
def _folder_of_nothing() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="moe_lab_")


def _sweeps(store: str, dry_run: bool) -> str:
    """Folder in which Hydra records a multirun: in the store; for a dry run, a temporary one that ends with the
    process."""
    return _folder_of_nothing().name if dry_run or not store else f"{store_folder(store)}/hydra"


def register(words: Sequence[str] = ()) -> None:
    """Register with Hydra the schema of conf/config.yaml, and a choice for every criterion and allocation that has no
    file.

    Includes those of plugins that the command line `words` names. Raises UserError for a plugin that cannot be loaded.
    """
    # Hydra copies its sources, all schemas included, for every group that --help lists. That is two thirds of the time.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    ConfigStore.instance().store(name="schema", node=Config, provider="moe_lab")
    OmegaConf.register_new_resolver("sweeps", _sweeps, replace=True)
    named = OverridesParser.create().parse_overrides([word for word in words if word.startswith("plugins=")])
    offer([module for item in named if isinstance(item.value(), list) for module in cast(list[str], item.value())])


def offer(modules: Sequence[str]) -> None:
    """Load plugins, and make every registered criterion and allocation without a file a choice of its group."""
    plugins.load(modules)
    for group, names in (("criterion", CRITERIA), ("allocation", ALLOCATIONS)):
        for name in names:
            if not (conf() / group / f"{name}.yaml").exists():
                ConfigStore.instance().store(name=name, node={"name": name}, group=group, provider="moe_lab")


PLAIN_RUN: dict[str, object] = {
    "mode": None,
    "output_subdir": None,
    "run.dir": ".",
    "callbacks": {},
    "verbose": False,
    "job.chdir": None,
    "job.env_set": {},
    "job_logging.root": None,
    "hydra_logging.root": None,
}
"""Settings of Hydra, as in conf/config.yaml, with which it only composes the configuration of a run."""


def compose_plain(words: Sequence[str]) -> DictConfig | None:
    """Compose the configuration of the command line `words`. None when hydra.main is needed: -m, --cfg, hydra.run.dir.

    `hydra.main` composes everything twice, the first time to find hydra.mode, which is a fifth of the start-up time.
    """
    if any(word.startswith("-") or "hydra" in word for word in words):
        return None
    config = hydra_compose("config", overrides=list(words), return_hydra_config=True)
    if any(OmegaConf.select(config.hydra, key) != value for key, value in PLAIN_RUN.items()):  # a file has set it
        return None
    HydraConfig.instance().set_config(config)
    return config


Choice = tuple[str, str]
"""Group, and the name of a file in it."""


class Groups:
    """The configuration groups as Hydra composes them, hydra.searchpath included. Each choice is composed once."""

    def __init__(self, searchpath: Sequence[str] = ()) -> None:
        self._words = [f"hydra.searchpath={json.dumps(list(searchpath))}"] if searchpath else []
        self._names: dict[str, list[str]] = {}
        self._composed: dict[Choice, DictConfig] = {}

    def names(self, group: str) -> list[str]:
        """The choices of a group; those in subgroups are called subgroup/name."""
        if group not in self._names:
            options = GlobalHydra.instance().config_loader().get_group_options
            folders = options(group, ObjectType.GROUP, overrides=self._words)
            nested = [f"{folder}/{name}" for folder in folders for name in self.names(f"{group}/{folder}")]
            self._names[group] = sorted([*options(group, ObjectType.CONFIG, overrides=self._words), *nested])
        return self._names[group]

    def load(self, group: str, name: str) -> DictConfig:
        """The content of the group under `group=name`. Raises UserError when it cannot be composed, or when it sets
        anything outside the group."""
        if (group, name) not in self._composed:
            self._compose([(group, name)])
        return self._composed[group, name].copy()

    def prepare(self, choices: Iterable[Choice]) -> None:
        """Compose choices that will be loaded, all at once: Hydra takes 50 ms for one, and no longer for fifty."""
        with suppress(UserError):  # `load` of the faulty choice raises it again
            self._compose(list(dict.fromkeys(choices)))

    def _compose(self, choices: Sequence[Choice]) -> None:
        """Compose all choices at once, each under a key of its own. An error names the first."""
        group, name = choices[0]
        keys = [f"choice{number}" for number in range(len(choices))]
        words = [f"+{choice[0]}@{key}={choice[1]}" for key, choice in zip(keys, choices, strict=True)]
        try:
            composed = hydra_compose(overrides=[*self._words, *words])
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(f"{group}={name}: {explain(error)}") from None
        if outside := [str(key) for key in composed if key not in keys]:
            raise UserError(
                f"{group}={name} sets {outside[0]}, expected nothing outside {group}: a file that sets several groups "
                "is an experiment"
            )
        for choice, key in zip(choices, keys, strict=True):
            self._composed[choice] = OmegaConf.create(_plain(composed[key]) if key in composed else {})


def group_files(
    groups: Groups,
    config: DictConfig,
    several: Collection[str] = (),
    words: Sequence[str] = (),
    choices: Mapping[str, str] | None = None,
) -> grid.Files:
    """The configuration groups for the grid of one job.

    `config`: the job's composed configuration, to which interpolations refer. `several`: axes for which its grid lists
    values. `words`: its command line. `choices`: the file that Hydra took for each group. Settings in the configuration
    that are not from that file, such as those of an experiment, hold for every choice of the group, and so do settings
    on the command line.
    """
    parsed = OverridesParser.create().parse_overrides(list(words))
    values = [(item.key_or_group, item.value()) for item in parsed if "." in item.key_or_group]
    beyond = []
    for group, name in (choices or {}).items():
        if group in several:
            schema = OmegaConf.structured(OmegaConf.get_type(config[group]))
            usual = cast(DictConfig, OmegaConf.merge(schema, groups.load(group, name)))
            beyond += [(f"{group}.{key}", value) for key, value in _differing(_plain(usual), _plain(config[group]))]
    return grid.Files(groups.names, groups.load, (*beyond, *values), _plain(config), frozenset(several))


def _plain(config: DictConfig) -> dict[Any, Any]:
    """A configuration as plain dictionaries, without Hydra's settings and with interpolations unresolved."""
    content = OmegaConf.to_container(config)
    assert isinstance(content, dict)
    return {key: value for key, value in content.items() if key != "hydra"}


def _differing(usual: Mapping[Any, Any], own: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each value in `own` that differs from `usual` or is missing there."""
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(usual.get(key), dict):
            yield from ((f"{key}.{inner}", inner_value) for inner, inner_value in _differing(usual[key], value))
        elif key not in usual or usual[key] != value:
            yield str(key), value


def typed(config: DictConfig) -> Config:
    """The composed configuration as typed objects. Raises UserError for a required value that is missing."""
    own = config.copy()
    with open_dict(own):
        own.pop("hydra", None)  # the configuration of a multirun's job includes Hydra's settings
    _check_keys(own)
    try:
        result = OmegaConf.to_object(own)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} is not set: add {error.full_key}=VALUE") from None
    assert isinstance(result, Config)
    grid.check_numbers(asdict(result), "")
    return result


def _check_keys(config: DictConfig, prefix: str = "") -> None:
    """Raise UserError for a key, added by `+` or `++`, that is not a setting."""
    kind = OmegaConf.get_type(config)
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else [str(key) for key in config]
    for key in map(str, config):
        if key not in names:
            raise unknown("setting", f"{prefix}{key}", [f"{prefix}{name}" for name in names])
        inner = config._get_node(key)
        if isinstance(inner, DictConfig) and not (inner._is_none() or inner._is_missing() or inner._is_interpolation()):
            _check_keys(inner, f"{prefix}{key}.")


def ask(configs: Sequence[DictConfig]) -> int:
    """Run one study over the cells of all `configs`: the jobs of a multirun, or a single run. Returns the exit code."""
    from moe_lab.study.run import run

    hydra = [config.hydra if "hydra" in config else HydraConfig.get() for config in configs]
    groups = Groups(hydra[0].searchpath)
    jobs = [
        requests(config, groups, own.overrides.task, own.runtime.choices)
        for config, own in zip(configs, hydra, strict=True)
    ]
    alone = "hydra" not in configs[0] and HydraConfig.get().mode == RunMode.MULTIRUN
    wanted = [request for _, asked in jobs for request in asked]
    return run(jobs[0][0], wanted, add=alone)


def requests(
    config: DictConfig, groups: Groups, words: Sequence[str] = (), choices: Mapping[str, str] | None = None
) -> tuple[Config, list[grid.Request]]:
    """Expand one composed configuration: its typed settings, and its cells with their benchmarks."""
    settings = grid.chosen(typed(config), _axes(words))
    if settings.plugins:  # plugins named in a file, not on the command line
        offer(settings.plugins)
    groups.prepare(_named(settings, groups))
    files = group_files(groups, config, grid.several(settings), words, choices)
    for group in set(grid.AXES) - files.several:
        if isinstance(config.get(group), DictConfig):
            grid.check_references(group, group, config[group], files)
    return settings, grid.requests(settings, files)


def _named(settings: Config, groups: Groups) -> Iterator[Choice]:
    """The choices that a study names and that exist. Choices that its texts name in turn are not included."""
    for lists in (settings.grid, *settings.more):
        for group in (axis for axis in grid.AXES if is_dataclass(getattr(settings, axis, None))):
            patterns = getattr(lists, group)
            yield from ((group, name) for name in groups.names(group) if any(fnmatch(name, one) for one in patterns))
    for group, names in (("calibration", [settings.flops_text]), ("benchmark", settings.suite.benchmarks)):
        yield from ((group, name) for name in names if name in groups.names(group))


def _axes(overrides: Sequence[str]) -> set[str]:
    """The axes that a command line sets to a single value, unless it also gives a list for the axis in `grid`."""
    keys = {item.key_or_group for item in OverridesParser.create().parse_overrides(list(overrides))}
    return {axis for axis in grid.AXES if f"grid.{axis}" not in keys and {axis, f"model.{axis}"} & keys}


_OPEN = (
    "allocation.parameters.",
    "backend.arguments.",
    "criterion.parameters.",
    "interpreters.",
    "judge.extra.",
    "model.template_arguments.",
    "protocol.benchmarks.",
)


_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_PLAIN = r"""(?:[^,\[\]{}()'":]|:(?! ))+"""


def quoted(argument: str) -> str:
    """The argument `key=value`, with quotes around those of its values that have a letter outside ASCII.

    Hydra's grammar reads such letters in quotes alone, and folders of users have them.
    """

    def quote(match: re.Match[str]) -> str:
        text = match[0]
        if text.isascii() or text[0] in "'\"":
            return text
        return text.replace(text.strip(), f"'{text.strip()}'")

    key, equals, value = argument.partition("=")
    return key + equals + re.sub(f"{_QUOTED}|{_PLAIN}", quote, value)


def addable(argument: str) -> str:
    """The argument, prefixed by `++` if its setting may have any keys, such as criterion.parameters.power=2.

    Hydra then adds the key, or sets it if it exists.
    """
    return f"++{argument}" if argument.startswith(_OPEN) else argument


def mistake(error: Exception, words: Sequence[str]) -> str:
    """An error of Hydra or OmegaConf on the command line `words`, as one sentence. Any other error is raised again."""
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return explain(error)
    if str(error).startswith("Config group override"):
        empty = [word for word in words if word.endswith("=null")]
        return f"{empty[0] if empty else 'a group'} names no file: `python -m moe_lab --help` lists the choices"
    # OmegaConf cannot add keys to null
    if null := re.search(r"full_key: (\S+)\n.*\n *object_type=NoneType", str(error)):
        return f"{null[1]} is null here, and {{...}} would add to it: expected all of it in a file of its group"
    raise error


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
    names = [f.name for f in fields(error.object_type)] if is_dataclass(error.object_type) else []
    close = nearest(name, names)
    hint = f": did you mean {parent + '.' if parent else ''}{close}?" if close else ""
    return f"{key} is no setting{hint} (known: {', '.join(sorted(names)) or 'none'})"
