"""From the words of a command to valid settings: Hydra composes files, pydantic checks what they
hold, once.

Beyond this module nothing knows Hydra, and there are no settings that are not valid. All mistakes
of a command are reported together.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString, ValueType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moe_lab import grid, plugins
from moe_lab.allocation import ALLOCATIONS
from moe_lab.config import CellConfig, Config
from moe_lab.config.base import Mistakes, fields_of, is_text, type_at, unfit, valid
from moe_lab.criteria import CRITERIA
from moe_lab.errors import UserError, unknown
from moe_lab.paths import conf, store_folder

Choice = grid.Choice
CONFIG = "config"
"""Name of the file in conf/ from which everything is composed, unless --config-name names
another."""


# ---- Hydra


@contextmanager
def started(folder: Path | None = None) -> Iterator[None]:
    """Hydra with the files of conf/, and before them those of `folder`, as --config-dir has it."""
    offer(())
    search_path = create_config_search_path(str(conf()))
    if folder is not None:
        if not folder.is_dir():
            raise UserError(f"--config-dir={folder}: there is no such folder")
        search_path.prepend("command-line", f"file://{folder.absolute()}")
    GlobalHydra.instance().clear()
    Hydra.create_main_hydra2("moe_lab", search_path)
    try:
        yield
    finally:
        GlobalHydra.instance().clear()


def prepare_multirun(words: Sequence[str]) -> None:
    """What hydra.main needs before it reads conf/config.yaml and `words`. Raises SettingsError for
    secrets in the words, which Hydra would write into the store."""
    from moe_lab.config.table import basic_lines

    OmegaConf.register_new_resolver("sweeps", _sweeps, replace=True)
    OmegaConf.register_new_resolver("basic_settings", basic_lines, replace=True)
    read = parsed(word for word in words if "=" in word and not word.startswith("-"))
    with Mistakes() as mistakes:
        for _, override in read:
            values = [] if override.value_type is ValueType.GLOB_CHOICE_SWEEP else _values(override)
            mistakes += [
                problem for value in values for problem in unfit(value, override.key_or_group)
            ]
    offer(_texts("plugins", read))


_temporary = cache(lambda: tempfile.TemporaryDirectory(prefix="moe_lab_"))


def _sweeps(store: str, dry_run: bool) -> str:
    """Folder in which Hydra records a multirun: in the store; for a dry run, one that ends with the
    process."""
    return _temporary().name if dry_run or not store else f"{store_folder(store)}/hydra"


def offer(modules: Sequence[str]) -> None:
    """Load plugins, and make every registered criterion and allocation without a file a choice of
    its group."""
    plugins.load(modules)
    # Hydra copies all registered choices for every group that it looks into, which would take most
    # of its time.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    for group, names in (("criterion", CRITERIA), ("allocation", ALLOCATIONS)):
        for name in names:
            if not (conf() / group / f"{name}.yaml").exists():
                ConfigStore.instance().store(
                    name=name, node={"name": name}, group=group, provider="moe_lab"
                )


class Groups:
    """The configuration groups as Hydra composes them, hydra.searchpath included. Each choice is
    composed once."""

    def __init__(self, searchpath: Sequence[str] = ()) -> None:
        self._words = [f"hydra.searchpath={json.dumps(list(searchpath))}"] if searchpath else []
        self._names: dict[str, list[str]] = {}
        self._composed: dict[Choice, dict[str, Any]] = {}

    def names(self, group: str) -> list[str]:
        """The choices of a group, none for what is no group; those in subgroups are called
        subgroup/name."""
        if group not in self._names:
            options = GlobalHydra.instance().config_loader().get_group_options
            folders = options(group, ObjectType.GROUP, overrides=self._words)
            nested = [
                f"{folder}/{name}" for folder in folders for name in self.names(f"{group}/{folder}")
            ]
            self._names[group] = sorted(
                [*options(group, ObjectType.CONFIG, overrides=self._words), *nested]
            )
        return self._names[group]

    def load(self, choices: Iterable[Choice]) -> dict[Choice, dict[str, Any]]:
        """The content of choices, all composed in one call: Hydra takes 50 ms for one, and no
        longer for fifty. Raises SettingsError with a sentence for each that cannot be composed, or
        that sets anything outside its group."""
        choices = list(dict.fromkeys(choices))
        new = [choice for choice in choices if choice not in self._composed]
        try:
            self._compose(new)
        except UserError:
            with Mistakes() as mistakes:
                for choice in new:
                    with mistakes.caught():
                        self._compose([choice])
        return {choice: self._composed[choice] for choice in choices}

    def _compose(self, choices: Sequence[Choice]) -> None:
        """Compose choices, each under a key of its own. An error names the first."""
        if not choices:
            return
        keys = {choice: f"choice{number}" for number, choice in enumerate(choices)}
        words = [f"+{group}@{key}={name}" for (group, name), key in keys.items()]
        group, name = choices[0]
        try:
            composed = _plain(hydra_compose(overrides=[*self._words, *words]))
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(f"{group}={name}: {explain(error)}") from None
        if outside := [key for key in composed if key not in keys.values()]:
            raise UserError(
                f"{group}={name} sets {outside[0]}, expected nothing outside {group}: a file that "
                "sets several groups "
                "is an experiment"
            )
        self._composed.update({choice: composed.get(key) or {} for choice, key in keys.items()})


def _plain(config: DictConfig) -> dict[str, Any]:
    """A configuration as plain dictionaries, without Hydra's settings, without values that are to
    be given (???), and with interpolations unresolved."""

    def given(content: Any) -> Any:
        if isinstance(content, dict):
            return {key: given(value) for key, value in content.items() if value != "???"}
        return content

    content = given(OmegaConf.to_container(config))
    return {str(key): value for key, value in content.items() if key != "hydra"}


# ---- words


_WORD = re.compile(r"(?P<sign>\+{0,2})(?P<key>[\w.]+)=(?P<value>.*)", re.DOTALL)
_TYPED = re.compile(r"[\w.+-]+")


def forced(word: str) -> str:
    """The word as Hydra takes it for a setting that its file may not have: study=2026_11_25 becomes
    ++study='2026_11_25', as what is typed for a text is no number. Other words stay."""
    match = _WORD.fullmatch(word)
    key = match["key"] if match else ""
    # and neither a group nor an experiment
    is_setting = "." in key or (_type(key) and not fields_of(_type(key)))
    if match is None or key.startswith("hydra.") or not is_setting:
        return quoted(word)
    value = match["value"]
    if is_text(_type(key)):
        texts = value.split(",")
        value = ",".join(
            f"'{text}'" if _TYPED.fullmatch(text) and text != "null" else text for text in texts
        )
    return quoted(f"++{key}={value}")


_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_PLAIN = r"""(?:[^,\[\]{}()'":]|:(?! ))+"""


def quoted(word: str) -> str:
    """The word `key=value`, with quotes around those of its values that have a letter outside
    ASCII. Hydra's grammar reads such letters in quotes alone, and folders of users have them."""

    def quote(match: re.Match[str]) -> str:
        text = match[0]
        if text.isascii() or text[0] in "'\"":
            return text
        return text.replace(text.strip(), f"'{text.strip()}'")

    key, equals, value = word.partition("=")
    return key + equals + re.sub(f"{_QUOTED}|{_PLAIN}", quote, value)


def _type(key: str) -> Any:
    """The type of a setting; None if there is no such setting."""
    group, _, _ = key.partition(".")
    return type_at(CellConfig if group in grid.AXES else Config, key.split("."))


def parsed(words: Iterable[str]) -> list[tuple[str, Override]]:
    """Each word with what Hydra reads in it. Raises UserError for one that Hydra cannot read."""
    hydra = GlobalHydra.instance()
    parser = OverridesParser.create(hydra.config_loader() if hydra.is_initialized() else None)
    found = []
    for word in words:
        try:
            found += [(word, override) for override in parser.parse_overrides([forced(word)])]
        except HydraException:
            raise UserError(
                f"{word} cannot be read: expected SETTING=VALUE or GROUP=NAME; a value with "
                "special characters is put "
                f"in quotes, as in {_quoted(word)}"
            ) from None
    return found


def _texts(key: str, words: Iterable[tuple[str, Override]]) -> list[str]:
    """What words set a list of texts to, which is needed before the others can be checked; [] for
    what is no list."""
    values = [override.value() for _, override in words if override.key_or_group == key]
    return [
        text
        for value in values
        if isinstance(value, list)
        for text in value
        if isinstance(text, str)
    ]


def _quoted(word: str) -> str:
    """A command-line word, for a shell, whose value is one text whatever characters it has."""
    key, _, value = word.partition("=")
    text = value.strip("'\"").replace("\\", "\\\\").replace("'", "\\'")
    return f"\"{key}='{text}'\""


def _sort(override: Override, word: str, groups: Groups, draft: grid.Draft) -> list[str]:
    """Note in `draft` what a word says of the cells; returns the word if Hydra composes with it.
    Raises UserError for a word that nobody can mean."""
    key = override.key_or_group
    values = _values(override)
    above = key.partition(".")[0]
    several = len(values) > 1 or override.is_sweep_override()
    if key.startswith("hydra") or override.package is not None:
        return [quoted(word)]
    if groups.names(key):
        return [word] if override.is_delete() else _sort_choice(key, values, word, groups, draft)
    if _type(above) is None:
        raise unknown("setting", above, [*fields_of(Config), *grid.AXES])
    if override.is_delete():
        if above not in grid.GROUPS:
            return [word]
        draft.words.append((key, grid.REMOVED))
    elif not values or (override.is_sweep_override() and not override.is_discrete_sweep()):
        raise UserError(f"{word} names no values: expected some, separated by commas")
    elif key in grid.VALUES or (several and above in grid.GROUPS):
        draft.typed[key] = values
    elif several:
        raise UserError(
            f"{word} names several values, and {key} has one in a study: expected one (a text "
            "with a comma as "
            f"{_quoted(word)}), or -m in front for several studies"
        )
    elif above in grid.GROUPS:
        draft.words.append((key, values[0]))
    else:
        return [forced(word)]
    return []


def _sort_choice(
    group: str, values: list[Any], word: str, groups: Groups, draft: grid.Draft
) -> list[str]:
    """`_sort` for a word that names files of a group."""
    known = groups.names(group)
    listed = [name for value in values for name in (value if isinstance(value, list) else [value])]
    names = ["null" if name is None else str(name) for name in listed]
    if group in grid.GROUPS:
        draft.typed[group] = names
    elif len(names) != 1:
        raise UserError(
            f"{word} names several files, and {group} has one in a study: expected one of them"
        )
    elif names[0] not in known:
        raise unknown(group, names[0], known)
    return [word] if len(names) == 1 and names[0] in known else []


def _values(override: Override) -> list[Any]:
    """The values of a word: several where it has commas or one of Hydra's functions for sweeps."""
    if not override.is_discrete_sweep():
        return [override.value()]
    return [
        value.text if isinstance(value, QuotedString) else value
        for value in override.sweep_iterator()
    ]


# ---- settings


def compose(words: Sequence[str], config_name: str = CONFIG) -> tuple[Config, list[grid.Request]]:
    """The study that a command line asks for, once Hydra is `started`: its settings, and its cells
    with their benchmarks. SettingsError with all mistakes in words and settings, or else with all
    in their combinations."""
    with Mistakes() as mistakes:
        read = parsed(words)
        with mistakes.caught():
            offer(_texts("plugins", read))
        groups = Groups(_texts("hydra.searchpath", read))
        draft = grid.Draft()
        composing = []
        for word, override in read:
            with mistakes.caught():
                composing += _sort(override, word, groups, draft)
        document, draft.taken, searchpath = _composed(composing, config_name)
        groups = Groups(searchpath)
        draft.lists = [document.pop("grid", None) or {}, *(document.pop("more", None) or [])]
        draft.own = {axis: document.pop(axis, None) for axis in grid.AXES}
        with mistakes.caught():
            config: Config = valid(Config, document, "")
            offer(config.plugins)
        with mistakes.caught():
            points = grid.points(draft, groups)
    return config, grid.requests(config, points, groups)


def _composed(
    words: Sequence[str], config_name: str
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """What Hydra composes: plain settings, the file that it took for each group, and the folders it
    searched."""
    try:
        composed = hydra_compose(config_name, overrides=list(words), return_hydra_config=True)
        choices = {str(group): str(name) for group, name in composed.hydra.runtime.choices.items()}
        return _plain(composed), choices, list(composed.hydra.searchpath)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from None


def explain(error: BaseException) -> str:
    """Hydra's and OmegaConf's errors as one sentence with the nearest valid choice."""
    if (
        isinstance(error, MissingConfigException)
        and error.missing_cfg_file
        and error.options is not None
    ):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return str(unknown(group.lstrip("/") or "config", name, error.options))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return (
            f"--config-name={error.missing_cfg_file}: there is no such file, in conf/ or in "
            "--config-dir"
        )
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def ask(config: Config, requests: Sequence[grid.Request], *, add: bool = False) -> Any:
    """Check the settings of a study, and run it; returns how it ended. `add`: add its cells to
    those recorded under its name."""
    from moe_lab.study.preflight import preflight
    from moe_lab.study.run import run

    with Mistakes() as mistakes:
        mistakes += preflight(config, requests)
    return run(config, requests, add=add)


def check_sweeper(choices: Mapping[str, str], config: Config) -> None:
    """Raise UserError when the sweeper that Hydra's `choices` name wants a number of each job, and
    there is none."""
    sweeper = choices.get("hydra/sweeper", "basic")
    if sweeper != "basic" and not config.objective:
        raise UserError(
            f"hydra/sweeper={sweeper} wants a number of each job: expected objective=Avg, or a "
            "result's name"
        )
