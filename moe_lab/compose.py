"""Between Hydra and the study: schema, typed configurations, group files, and Hydra's errors as sentences."""

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

from moe_lab import errors, grid, plugins, secret_settings
from moe_lab.allocation import ALLOCATIONS
from moe_lab.config import Config
from moe_lab.criteria import CRITERIA
from moe_lab.errors import UserError, nearest, unknown
from moe_lab.paths import conf


@cache
def _folder_of_nothing() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="moe_lab_")


def _sweeps(store: str, dry_run: bool) -> str:
    """Where Hydra notes a multirun: in the store, and of a dry run, which leaves nothing, until the process ends."""
    return _folder_of_nothing().name if dry_run or not store else f"{store}/hydra"


def register(words: Sequence[str] = ()) -> None:
    """Tell Hydra the schema that conf/config.yaml starts from, and a choice for every criterion and allocation without
    a file, those of plugins that a command line names included. UserError for a plugin that cannot be loaded."""
    # Hydra copies its sources for every group that --help lists, and all schemas with them: two thirds of the time.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    ConfigStore.instance().store(name="schema", node=Config, provider="moe_lab")
    OmegaConf.register_new_resolver("sweeps", _sweeps, replace=True)
    named = OverridesParser.create().parse_overrides([word for word in words if word.startswith("plugins=")])
    offer([module for item in named if isinstance(item.value(), list) for module in cast(list[str], item.value())])


def offer(modules: Sequence[str]) -> None:
    """Load plugins, and make what is registered by now a choice of its group where no file of the name is."""
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
"""Settings of Hydra with which it does nothing for a run but compose its configuration: those of conf/config.yaml."""


def compose_plain(words: Sequence[str]) -> DictConfig | None:
    """The configuration of the command line `words`; None where Hydra has more to do, as by -m, --cfg or hydra.run.dir.

    `hydra.main` composes everything twice, the first time to find hydra.mode: a fifth of a start.
    """
    if any(word.startswith("-") or "hydra" in word for word in words):
        return None
    config = hydra_compose("config", overrides=list(words), return_hydra_config=True)
    if any(OmegaConf.select(config.hydra, key) != value for key, value in PLAIN_RUN.items()):  # set by a file
        return None
    HydraConfig.instance().set_config(config)
    return config


Choice = tuple[str, str]
"""Group, and the name of a file in it."""


class Groups:
    """The configuration groups as Hydra composes them, user folders and hydra.searchpath included; each choice once."""

    def __init__(self, searchpath: Sequence[str] = ()) -> None:
        self._words = [f"hydra.searchpath={json.dumps(list(searchpath))}"] if searchpath else []
        self._names: dict[str, list[str]] = {}
        self._composed: dict[Choice, DictConfig] = {}

    def names(self, group: str) -> list[str]:
        """The choices of a group, those of its subgroups as subgroup/name."""
        if group not in self._names:
            options = GlobalHydra.instance().config_loader().get_group_options
            folders = options(group, ObjectType.GROUP, overrides=self._words)
            nested = [f"{folder}/{name}" for folder in folders for name in self.names(f"{group}/{folder}")]
            self._names[group] = sorted([*options(group, ObjectType.CONFIG, overrides=self._words), *nested])
        return self._names[group]

    def load(self, group: str, name: str) -> DictConfig:
        """What `group=name` puts into the group. UserError when it cannot be composed, or sets anything else."""
        if (group, name) not in self._composed:
            self._compose([(group, name)])
        return self._composed[group, name].copy()

    def prepare(self, choices: Iterable[Choice]) -> None:
        """Compose choices that will be loaded. Hydra takes 50 ms to compose one, and no longer for fifty."""
        with suppress(UserError):  # loading the one at fault raises it again
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
    """The groups as the grid of one job takes them.

    `config`: the job's composed configuration, to which interpolations refer. `several`: axes of which its grid lists
    values. `words`: what its command line sets. `choices`: the file that Hydra took for each group. What the
    configuration sets beyond that file, such as the body of an experiment, holds for every choice of the group, and so
    does what the command line sets.
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
    """A configuration as plain dictionaries, interpolations as they are written."""
    content = OmegaConf.to_container(config)
    assert isinstance(content, dict)
    return {key: value for key, value in content.items() if key != "hydra"}


def _differing(usual: Mapping[Any, Any], own: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each value in `own` that is another one in `usual`, or missing there."""
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(usual.get(key), dict):
            yield from ((f"{key}.{inner}", inner_value) for inner, inner_value in _differing(usual[key], value))
        elif key not in usual or usual[key] != value:
            yield str(key), value


def typed(config: DictConfig) -> Config:
    """The composed configuration as typed objects, without the secrets in it (secret_settings.py).

    UserError for a value that is required and missing, and for a variable that the environment lacks.
    """
    own = config.copy()
    with open_dict(own):
        own.pop("hydra", None)  # a job of a multirun carries Hydra's own settings along
    _check_keys(own)
    written = _plain(own)
    for key in secret_settings.LATE:
        value = _at(written, key)
        if value is not None:
            kept = secret_settings.hidden(value, key)
            secret_settings.revealed(kept)
            OmegaConf.update(own, key, secret_settings.escaped(kept), merge=False, force_add=True)
    try:
        result = OmegaConf.to_object(own)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} is not set: add {error.full_key}=VALUE") from None
    assert isinstance(result, Config)
    grid.check_numbers(asdict(result), "")
    return result


def _check_keys(config: DictConfig, prefix: str = "") -> None:
    """UserError for a key that `+` or `++` has added and no setting has."""
    kind = OmegaConf.get_type(config)
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else [str(key) for key in config]
    for key in map(str, config):
        if key not in names:
            raise unknown("setting", f"{prefix}{key}", [f"{prefix}{name}" for name in names])
        inner = config._get_node(key)
        if isinstance(inner, DictConfig) and not (inner._is_none() or inner._is_missing() or inner._is_interpolation()):
            _check_keys(inner, f"{prefix}{key}.")


def _at(document: Any, key: str) -> Any:
    """What stands under a dotted key; None where nothing does."""
    for part in key.split("."):
        document = document.get(part) if isinstance(document, dict) else None
    return document


def from_environment(config: DictConfig) -> dict[str, Any]:
    """Dotted key -> the interpolation written there, of every setting that is taken from the environment now. Those of
    `secret_settings.LATE` are taken when they are used."""
    late = tuple(f"{key}." for key in secret_settings.LATE)
    return {
        key: value
        for key, value in _leaves(_plain(config))
        if errors.ENVIRONMENT.search(str(value)) and not f"{key}.".startswith(late)
    }


def _leaves(document: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a document that is no mapping itself."""
    for name, value in document.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def ask(configs: Sequence[DictConfig]) -> int:
    """Run one study over the cells of all `configs`, jobs of a multirun or the one that runs now; the exit code."""
    from moe_lab.study.run import run

    hydra = [config.hydra if "hydra" in config else HydraConfig.get() for config in configs]
    groups = Groups(hydra[0].searchpath)
    jobs = [
        requests(config, groups, own.overrides.task, own.runtime.choices)
        for config, own in zip(configs, hydra, strict=True)
    ]
    alone = "hydra" not in configs[0] and HydraConfig.get().mode == RunMode.MULTIRUN
    wanted = [request for _, asked in jobs for request in asked]
    return run(jobs[0][0], wanted, add=alone, written=from_environment(configs[0]))


def requests(
    config: DictConfig, groups: Groups, words: Sequence[str] = (), choices: Mapping[str, str] | None = None
) -> tuple[Config, list[grid.Request]]:
    """What one composed configuration asks for: its settings, and its cells with their benchmarks."""
    settings = grid.chosen(typed(config), _axes(words))
    if settings.plugins:  # those that only a file names
        offer(settings.plugins)
    groups.prepare(_named(settings, groups))
    files = group_files(groups, config, grid.several(settings), words, choices)
    for group in set(grid.AXES) - files.several:
        if isinstance(config.get(group), DictConfig):
            grid.check_references(group, group, config[group], files)
    return settings, grid.requests(settings, files)


def _named(settings: Config, groups: Groups) -> Iterator[Choice]:
    """The choices that a study names, as far as there are such files: what its texts name in turn comes later."""
    for lists in (settings.grid, *settings.more):
        for group in (axis for axis in grid.AXES if is_dataclass(getattr(settings, axis, None))):
            patterns = getattr(lists, group)
            yield from ((group, name) for name in groups.names(group) if any(fnmatch(name, one) for one in patterns))
    for group, names in (("calibration", [settings.flops_text]), ("benchmark", settings.suite.benchmarks)):
        yield from ((group, name) for name in names if name in groups.names(group))


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
    """The argument with `++` before a setting that may have names its file lacks, such as criterion.parameters.power=2:
    Hydra then adds it, or sets it if it is there."""
    return f"++{argument}" if argument.startswith(_OPEN) else argument


def mistake(error: Exception, words: Sequence[str]) -> str:
    """What Hydra or OmegaConf found wrong with the command line `words`, as one sentence; any other error is raised."""
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return explain(error)
    if str(error).startswith("Config group override"):
        empty = [word for word in words if word.endswith("=null")]
        return f"{empty[0] if empty else 'a group'} names no file: `python -m moe_lab --help` lists the choices"
    if null := re.search(r"full_key: (\S+)\n.*\n *object_type=NoneType", str(error)):  # which OmegaConf cannot add to
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
