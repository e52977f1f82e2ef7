"""From a command line to valid settings: Hydra composes files, and pydantic checks their content.

Only this module and `moe_lab.overrides` use Hydra. All mistakes of a command are reported together.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hydra import compose as hydra_compose
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moe_lab import grid, overrides, plugins
from moe_lab.config import Config
from moe_lab.config.base import Mistakes, storage_problems, validated
from moe_lab.errors import UserError, unknown_name_error
from moe_lab.json_files import Document
from moe_lab.paths import conf, store_folder

Choice = grid.Choice
CONFIG = "config"
"""Name of the file in conf/ that composes all others, unless --config-name names another."""


@contextmanager
def hydra_context(folder: Path | str | None = None) -> Iterator[None]:
    """A context in which Hydra composes files of conf/. `folder`: the value of --config-dir, a
    folder or pkg://PACKAGE; its files take precedence over conf/."""
    search_path = create_config_search_path(str(conf()))
    if folder is not None:
        search_path.prepend("command-line", _location(str(folder)))
    GlobalHydra.instance().clear()
    with _config_store():
        Hydra.create_main_hydra2("moe_lab", search_path)
        try:
            yield
        finally:
            GlobalHydra.instance().clear()


def _location(folder: str) -> str:
    """The value of --config-dir, a folder or pkg://PACKAGE, as a location for Hydra. UserError when
    it does not exist."""
    is_package = folder.startswith("pkg://")
    with suppress(ModuleNotFoundError):
        path = files(folder.removeprefix("pkg://")) if is_package else Path(folder)
        if path.is_dir():
            return folder if is_package else f"file://{Path(folder).absolute()}"
    raise UserError(f"--config-dir={folder}: there is no such folder or package")


@contextmanager
def multirun_context(texts: Sequence[str]) -> Iterator[None]:
    """A context in which hydra.main can compose conf/config.yaml. `texts`: the overrides and the
    options of a command line. SettingsError for values that must not be stored, such as secrets,
    because Hydra writes the overrides into the store."""
    from moe_lab.config.table import basic_lines

    parsed = overrides.parse(text for text in texts if "=" in text and not text.startswith("-"))
    with Mistakes() as mistakes:
        for _, override in parsed:
            # glob(PATTERN) has no values to check
            if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
                continue
            for value in overrides.values_of(override):
                mistakes += storage_problems(value, override.key_or_group)
    # for ${sweeps:...} and ${basic_settings:} in conf/config.yaml
    OmegaConf.register_new_resolver("sweeps", _sweeps_folder)
    OmegaConf.register_new_resolver("basic_settings", basic_lines)
    try:
        with _config_store():
            register_choices(overrides.list_of_texts("plugins", parsed))
            yield
    finally:
        OmegaConf.clear_resolver("sweeps")
        OmegaConf.clear_resolver("basic_settings")


_temporary_folder = cache(lambda: tempfile.TemporaryDirectory(prefix="moe_lab_"))
"""A folder that is removed when the process ends."""


def _sweeps_folder(store: str, dry_run: bool) -> str:
    """Folder in which Hydra records a multirun."""
    if dry_run or not store:
        return _temporary_folder().name
    return f"{store_folder(store)}/hydra"


@contextmanager
def _config_store() -> Iterator[None]:
    """A context in which Hydra's ConfigStore has the registered criteria and allocations as
    choices."""
    repo = ConfigStore.instance().repo
    with (
        # copies, so that the choices which are added below are gone at the end
        patch.dict(repo, {group: dict(repo.get(group, {})) for group in grid.REGISTRIES}),
        # Hydra copies the ConfigStore for each group, which takes most of Hydra's time
        patch.object(ConfigStore, "__deepcopy__", lambda store, memo: store, create=True),
    ):
        register_choices()
        yield


def register_choices(modules: Sequence[str] = ()) -> None:
    """Load the plugins `modules`, and add all registered criteria and allocations that have no file
    in conf/ to Hydra's ConfigStore as choices. An application of Hydra that has pkg://moe_lab.conf
    in its search path calls this before hydra.main."""
    plugins.load(modules)
    for group, names in grid.REGISTRIES.items():
        for name in names:
            if not (conf() / group / f"{name}.yaml").exists():
                ConfigStore.instance().store(
                    name=name, node={"name": name}, group=group, provider="moe_lab"
                )


class Groups:
    """The configuration groups and their choices, composed by Hydra and cached. `searchpath`: value
    of hydra.searchpath, folders in addition to conf/."""

    def __init__(self, searchpath: Sequence[str] = ()) -> None:
        self._searchpath = (
            [f"hydra.searchpath={json.dumps(list(searchpath))}"] if searchpath else []
        )
        self._names: dict[str, list[str]] = {}
        """Group -> names of its choices."""
        self._contents: dict[Choice, Document] = {}
        """(group, name of a choice) -> settings, for the choices that were composed so far."""

    def names(self, group: str) -> list[str]:
        """Sorted names of the choices of a group. Choices of its subgroups have names of the form
        SUBGROUP/NAME. [] if there is no such group."""
        if group not in self._names:
            list_names = GlobalHydra.instance().config_loader().get_group_options
            subgroups = list_names(group, ObjectType.GROUP, overrides=self._searchpath)
            nested = [
                f"{subgroup}/{name}"
                for subgroup in subgroups
                for name in self.names(f"{group}/{subgroup}")
            ]
            self._names[group] = sorted(
                [*list_names(group, ObjectType.CONFIG, overrides=self._searchpath), *nested]
            )
        return self._names[group]

    def load(self, choices: Iterable[Choice]) -> dict[Choice, Document]:
        """(group, name of a choice) -> settings. SettingsError with a sentence for each
        choice that cannot be composed, or that sets a key outside its group."""
        choices = list(dict.fromkeys(choices))
        new_choices = [choice for choice in choices if choice not in self._contents]
        if any(grid.is_variant(*choice) for choice in new_choices):
            register_choices()
        try:
            # a call of Hydra takes 50 ms for one choice as well as for fifty
            self._compose(new_choices)
        except UserError:
            # the message may name the wrong choice
            with Mistakes() as mistakes:
                for choice in new_choices:
                    with mistakes.caught():
                        self._compose([choice])
        return {choice: self._contents[choice] for choice in choices}

    def _compose(self, choices: Sequence[Choice]) -> None:
        """Compose `choices` in one call of Hydra, and store the content of each in `_contents`. The
        message of a UserError names the first of `choices`, even if another one is to blame."""
        if not choices:
            return
        # +GROUP@KEY=NAME puts the content of a choice under a key that no other choice uses
        keys = {choice: f"choice{number}" for number, choice in enumerate(choices)}
        keyed_overrides = [f"+{group}@{key}={name}" for (group, name), key in keys.items()]
        group, name = choices[0]
        try:
            composed = _plain_content(
                hydra_compose(overrides=[*self._searchpath, *keyed_overrides])
            )
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(f"{group}={name}: {hydra_error_sentence(error)}") from None
        if outer_keys := [key for key in composed if key not in keys.values()]:
            raise UserError(
                f"{group}={name} sets {outer_keys[0]}, expected nothing outside {group}: a file "
                "that sets several groups is an experiment"
            )
        for choice, key in keys.items():
            self._contents[choice] = composed.get(key) or {}


def _plain_content(config: DictConfig) -> Document:
    """A composed configuration as plain dictionaries, without Hydra's own settings and missing
    values (???)."""

    def without_missing(content: Any) -> Any:
        if isinstance(content, dict):
            return {key: without_missing(value) for key, value in content.items() if value != "???"}
        return content

    content = without_missing(OmegaConf.to_container(config))
    return {str(key): value for key, value in content.items() if key != "hydra"}


def compose(texts: Sequence[str], config_name: str = CONFIG) -> tuple[Config, list[grid.Request]]:
    """The study that a command line describes. Returns (settings of the study, requests). `texts`:
    overrides. `config_name`: name of the file in conf/ to which the overrides are applied. Must be
    called within a `hydra_context`.

    SettingsError with all mistakes in overrides and settings. Cells are checked only if there are
    no such mistakes.
    """
    with Mistakes() as mistakes:
        parsed = overrides.parse(texts)
        with mistakes.caught():
            register_choices(overrides.list_of_texts("plugins", parsed))
        # the files are composed later, and can add folders to the search path only then
        groups = Groups(overrides.list_of_texts("hydra.searchpath", parsed))
        draft = grid.Draft()
        hydra_texts = _defaults_of_own_model(parsed, groups) if config_name == CONFIG else []
        for text, override in parsed:
            with mistakes.caught():
                hydra_texts += overrides.add_to_draft(text, override, groups, draft)
        settings, draft.file_names, searchpath = _compose_study(hydra_texts, config_name)
        # `searchpath` also has the folders that the composed files added
        groups = Groups(searchpath)
        # pop moves the settings of cells to the draft; the settings of the study are left
        draft.lists = [settings.pop("grid", None) or {}, *(settings.pop("more", None) or [])]
        draft.composed = {axis: settings.pop(axis) for axis in grid.AXES if axis in settings}
        with mistakes.caught():
            config: Config = validated(Config, settings, "")
            register_choices(config.plugins)
        with mistakes.caught():
            cells = grid.product_cells(draft, groups)
    return config, grid.requests(config, cells, groups)


def _defaults_of_own_model(parsed: overrides.Parsed, groups: Groups) -> list[str]:
    """Overrides for a model that is named by its path, if a calibration set is named, but no suite,
    export or experiment: plans are compared by their distance from the unpruned model on the other
    half of the set, and written as checkpoints."""
    values = {override.key_or_group: overrides.values_of(override) for _, override in parsed}
    named_groups = {key.partition(".")[0] for key in values}
    if named_groups & {"suite", "export", "experiment"} or "calibration" not in named_groups:
        return []
    known = groups.names("model")
    are_paths = [str(name) not in known for name in values.get("model", ())]
    return ["suite=fidelity", "export=natural"] if any(are_paths) else []


def _compose_study(
    texts: Sequence[str], config_name: str
) -> tuple[Document, dict[str, str | None], list[str]]:
    """Returns (settings as plain dictionaries, group -> name of the chosen file or None, folders of
    hydra.searchpath)."""
    try:
        composed = hydra_compose(config_name, overrides=list(texts), return_hydra_config=True)
        hydra = composed.hydra
        return _plain_content(composed), dict(hydra.runtime.choices), list(hydra.searchpath)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(hydra_error_sentence(error)) from None


def hydra_error_sentence(error: BaseException) -> str:
    """An error of Hydra or OmegaConf as one sentence."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        # Hydra gives a list of options for a file of a group, and None for --config-name
        if error.options is None:
            return (
                f"--config-name={error.missing_cfg_file}: there is no such file, in conf/ or in "
                "--config-dir"
            )
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return str(unknown_name_error(group.lstrip("/") or "config", name, error.options))
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


EXIT_CODES: list[int] = []
"""Exit codes of the studies that `run_jobs` has run in this command."""


def run_jobs(hydra: HydraConf, jobs: Sequence[Sequence[str]], **options: bool) -> list[float]:
    """Run jobs of Hydra as one study. Returns the value of the setting `objective` of each job,
    which a sweeper optimises. `hydra`: Hydra's own settings. `jobs`: the overrides of each job.
    `options`: those of `study.run.run`.

    SettingsError with all mistakes; for no jobs, and for a sweeper other than `basic` if
    `objective` is not set."""
    from moe_lab.study.run import objective_value, run

    # hydra.searchpath: the folders with further configuration files
    searchpath = [text for text in hydra.overrides.hydra if "searchpath" in text]
    configs: list[Config] = []
    requests_of_jobs = []
    with Mistakes() as mistakes:
        if not jobs:
            texts = " ".join(hydra.overrides.task)
            mistakes.append(f"{texts} sweeps over nothing: expected patterns that match a name")
        for job in jobs:
            with mistakes.caught():
                config, requests = compose([*searchpath, *job], hydra.job.config_name or CONFIG)
                configs.append(config)
                requests_of_jobs.append(requests)
    sweeper = hydra.runtime.choices["hydra/sweeper"]
    if sweeper != "basic" and not configs[0].objective:
        raise UserError(
            f"hydra/sweeper={sweeper} wants a number of each job: expected objective=Avg, or a "
            "result's name"
        )
    result = run(configs[0], list(chain.from_iterable(requests_of_jobs)), **options)
    EXIT_CODES.append(result.code)
    return [objective_value(result, requests) for requests in requests_of_jobs]
