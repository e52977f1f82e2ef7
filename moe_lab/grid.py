"""The grid of a study: cells, which are the points in the product of axes, and the benchmarks of
the cells. Each choice is composed once."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from moe_lab.config import (
    AllocationConfig,
    BenchmarkConfig,
    CalibrationConfig,
    CellConfig,
    Config,
    CriterionConfig,
    ModelConfig,
    ProtocolConfig,
    RecoveryConfig,
    SourceConfig,
    SuiteConfig,
)
from moe_lab.config.base import Mistakes, fields_of, type_at, valid
from moe_lab.config.pruning import TEXTS
from moe_lab.errors import UserError, check_known, unknown
from moe_lab.evaluation.harness import harness_of
from moe_lab.paths import PREFIX, as_name


@dataclass(frozen=True)
class Cell:
    """One point of the grid: model, criterion, calibration set, ratio, allocation, recovery, gate,
    seed, protocol."""

    model: ModelConfig
    criterion: CriterionConfig
    calibration: CalibrationConfig
    allocation: AllocationConfig
    recovery: RecoveryConfig
    ratio: float
    gate: str
    seed: int
    texts: Mapping[str, CalibrationConfig] = field(default_factory=dict)
    """Role -> text. Roles: search (for the allocation); instructions, distill or fit (for the
    recovery); flops."""
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    """Changes to the settings of the benchmarks."""

    def __hash__(self) -> int:
        # the generated hash would fail, since some fields, such as `texts`, cannot be hashed
        groups = (
            self.model,
            self.criterion,
            self.calibration,
            self.allocation,
            self.recovery,
            self.protocol,
        )
        return hash((*[group.name for group in groups], self.ratio, self.gate, self.seed))


Request = tuple[Sequence[Cell], Sequence[BenchmarkConfig]]
"""Cells, and the benchmarks on which all of them are evaluated."""
Choice = tuple[str, str]
"""(group, name of a file of the group)."""
Point = tuple[Any, ...]
"""One value per axis, in the order of AXES."""

KINDS = fields_of(CellConfig)
AXES = tuple(KINDS)
"""Keys for which a grid can list values. The product of the lists is in this order."""
GROUPS = tuple(axis for axis in AXES if fields_of(KINDS[axis]))
"""Axes whose values are files. Settings in the files, such as model.top_k, can have lists, too."""
VALUES = tuple(axis for axis in AXES if axis not in GROUPS)
"""Axes whose values are numbers or texts."""
SHIPPED_TEXT = "pocket_general"
"""Calibration set of a shipped model if none is named."""
SHIPPED_SUITE = "pocket_no_code"
"""Suite of a shipped model if none is named."""
REGISTERED = ("criterion", "allocation")
"""Groups whose choices have the name of a registered function, to which no settings are added."""
REMOVED = object()
"""Marker in place of the value of a setting that an override with ~ removes."""


class Files(Protocol):
    """Access to the files of configuration groups."""

    def names(self, group: str) -> list[str]:
        """Names of the files of a group."""

    def load(self, choices: Iterable[Choice]) -> dict[Choice, dict[str, Any]]:
        """The contents of files. Raises UserError for files that cannot be composed."""


@dataclass
class Draft:
    """Settings of cells from a command line and from the files that the command line names. The
    settings are not checked yet."""

    composed: Mapping[str, Any] = field(default_factory=dict)
    """Axis -> content in the composed configuration. This is the only value of an axis without a
    list."""
    file_names: Mapping[str, str] = field(default_factory=dict)
    """Group -> name of the file from which the content in `composed` comes."""
    command_lists: dict[str, Sequence[Any]] = field(default_factory=dict)
    """Axis, or setting in a group -> list of values on the command line, which replaces the list in
    a file."""
    overrides: list[tuple[str, Any]] = field(default_factory=list)
    """(setting in a group, value) from the command line. The value applies to all choices of the
    group."""
    lists: Sequence[Mapping[str, Any]] = ()
    """Axis -> list of values, for the first grid and for each further grid. For an axis without a
    list, a further grid has the list of the first grid."""


# ---- points


def points(draft: Draft, files: Files) -> list[Point]:
    """The points of all grids, each once. Raises SettingsError with all mistakes in values, names
    and files."""
    point_of_key: dict[Point, Point] = {}
    with Mistakes() as mistakes:
        axes = _Axes(draft, files)
        first, *further = [
            _valid_lists(lists, "more" if number else "grid", mistakes)
            for number, lists in enumerate(draft.lists)
        ]
        grids = [axes.grid_lists(first)]
        for lists in further:
            grids += axes.further_grid_lists(first, lists)
        with mistakes.caught():
            files.load(axes.named_files(grids))
        for lists in grids:
            # axes with mistakes are left out, and then the grid has no points
            values = []
            for axis in AXES:
                with mistakes.caught():
                    values.append(axes.values(axis, lists))
            if len(values) == len(AXES):
                for point in itertools.product(*values):
                    point_of_key.setdefault(_key(point), point)
    return list(point_of_key.values())


def _key(point: Point) -> Point:
    """A key that is equal for equal points. Choices are compared by `id`, which is sufficient as
    each choice is composed once."""
    pairs = zip(AXES, point, strict=True)
    return tuple(value if axis in VALUES else id(value) for axis, value in pairs)


Lists = Mapping[str, Sequence[Any]]
"""Axis, or setting in a group such as model.top_k -> list of values."""


def _valid_lists(lists: Any, field: str, mistakes: list[str]) -> Lists:
    """The lists of a grid, without invalid and empty lists. For each invalid list, a sentence is
    added to `mistakes`. `field`: the setting that has the lists, grid or more."""
    if not isinstance(lists, Mapping):
        mistakes.append(f"{field}={lists}: expected lists by axis, such as {{ratio: [0.25, 0.5]}}")
        return {}
    valid_lists = {}
    for key, values in ((str(key), values) for key, values in lists.items()):
        is_setting = key.partition(".")[0] in GROUPS and type_at(CellConfig, key.split("."))
        if key not in AXES and not is_setting:
            mistakes.append(str(unknown(field, key, AXES)))
        elif not isinstance(values, list):
            mistakes.append(f"{field}.{key}={values}: expected a list, such as [{values}]")
        elif values:
            valid_lists[key] = values
    return valid_lists


def _pattern(name: Any) -> str:
    """PATTERN for a name of the form glob(PATTERN); other names unchanged."""
    return re.sub(r"^glob\((.*)\)$", r"\1", str(name))


class _Axes:
    """The values of the axes of a study's grids. Each choice of a group is composed once."""

    def __init__(self, draft: Draft, files: Files) -> None:
        self.draft = draft
        self.files = files
        self._choices: dict[tuple[str, str | None, str], Any] = {}

    def grid_lists(self, lists: Lists) -> Lists:
        """The lists of a grid after the overrides of the command line. `lists`: lists of the grid
        in a file. A list of a setting that the command line sets is left out, and a list of the
        command line replaces the list of the same key."""
        override_keys = [key for key, _ in self.draft.overrides]
        file_lists = {key: values for key, values in lists.items() if key not in override_keys}
        return {**file_lists, **self.draft.command_lists}

    def further_grid_lists(self, first: Lists, lists: Lists) -> list[Lists]:
        """A list with the lists of a further grid, without choices that the command line excludes;
        [] if it excludes all choices of an axis. `lists`: the lists of the further grid in a file.
        `first`: the lists of the first grid, which count for axes without a list in `lists`."""
        axis_names = {}
        for axis, command_names in self.draft.command_lists.items():
            if axis not in GROUPS or axis not in lists:
                continue
            patterns = [_pattern(name) for name in command_names]
            axis_names[axis] = [
                name
                for name in lists[axis]
                if any(fnmatchcase(str(name), pattern) for pattern in patterns)
            ]
        if not all(axis_names.values()):  # no name is left in one of the lists
            return []
        return [{**self.grid_lists({**first, **lists}), **axis_names}]

    def _field(self, axis: str) -> str:
        """Name for messages of the field from which the values of an axis come."""
        return axis if axis in self.draft.command_lists else f"grid.{axis}"

    def values(self, axis: str, lists: Lists) -> list[Any]:
        """The values of an axis, checked. Raises SettingsError with all mistakes in the values."""
        return self._plain_values(axis, lists) if axis in VALUES else self._choices_of(axis, lists)

    def _plain_values(self, axis: str, lists: Lists) -> list[Any]:
        """The checked values of an axis of VALUES, each once. Without a list, the axis has the
        value in the composed configuration, or else the default."""
        values = []
        with Mistakes() as mistakes:
            if axis not in lists:
                only_value = self.draft.composed.get(axis)
                if only_value is None:
                    only_value = CellConfig.__dataclass_fields__[axis].default
                values.append(valid(KINDS[axis], only_value, axis))
            for value in lists.get(axis, ()):
                with mistakes.caught():
                    values.append(valid(KINDS[axis], value, self._field(axis)))
        return list(dict.fromkeys(values))

    def _names(self, axis: str, lists: Lists) -> list[str | None]:
        """Names of the files that match the list of a group; [None] if the group has no list. None
        stands for the content in the composed configuration, which also takes the place of the name
        of the file that this content comes from. SettingsError for names without a file."""
        available = self.files.names(axis)
        names: list[str | None] = []
        with Mistakes() as mistakes:
            for entry in lists.get(axis, ()):
                pattern = _pattern(entry)
                matches = [name for name in available if fnmatchcase(name, pattern)]
                if not matches:
                    mistakes.append(str(unknown(self._field(axis), pattern, available)))
                for name in matches:
                    names.append(None if name == self.draft.file_names.get(axis) else name)
        return list(dict.fromkeys(names)) or [None]

    def named_files(self, grids: Iterable[Lists]) -> Iterator[Choice]:
        """The files that the lists of `grids` name. Axes with a mistake are left out here, because
        `values` reports the mistake."""
        for axis, lists in itertools.product(GROUPS, grids):
            with Mistakes().caught():
                for name in self._names(axis, lists):
                    if name is not None:
                        yield axis, name

    def _choices_of(self, axis: str, lists: Lists) -> list[Any]:
        """The choices of a group, checked and each once: the product of the listed files and of the
        listed values of settings in the group."""
        prefix = f"{axis}."
        setting_lists = {
            key.removeprefix(prefix): values
            for key, values in lists.items()
            if key.startswith(prefix)
        }
        choices: dict[int, Any] = {}
        with Mistakes() as mistakes:
            names = self._names(axis, lists)
            for name, *values in itertools.product(names, *setting_lists.values()):
                with mistakes.caught():
                    choice = self._choice(axis, name, dict(zip(setting_lists, values, strict=True)))
                    choices[id(choice)] = choice
        return list(choices.values())

    def _choice(self, axis: str, name: str | None, settings: Mapping[str, Any]) -> Any:
        """The choice `name` of a group with all overrides; if `name` is None, the choice in the
        composed configuration. The choice is composed once, so equal arguments return the same
        object. `settings`: setting -> one value of its list, for the settings of the group that
        have lists. These values are appended to the name of the choice."""
        key = (axis, name, json.dumps(settings, sort_keys=True, default=str))
        if key not in self._choices:
            choice = self._compose(axis, name, settings)
            if isinstance(choice, CalibrationConfig):
                choice = add_sources(choice, self.files)
            self._choices[key] = choice
        return self._choices[key]

    def _compose(self, axis: str, name: str | None, settings: Mapping[str, Any]) -> Any:
        """A new object for `_choice`, checked. If it is a mixture of calibration sets, the settings
        of its sources are not filled in."""
        content = deepcopy(self._content(axis, name))
        for setting, value in self.draft.overrides:
            if setting.startswith(f"{axis}."):
                assign(content, setting.removeprefix(f"{axis}."), value)
        for setting, value in settings.items():
            assign(content, setting, value)
        choice = valid(KINDS[axis], content, axis, f"{axis}={name}" if name else "")
        if isinstance(choice, CalibrationConfig):
            choice = self._checked_text(choice, name)
        # ModelConfig appends the value of top_k itself
        if not settings or axis in REGISTERED or "top_k" in settings:
            return choice
        endings = [f"_{setting.rpartition('.')[2]}{value}" for setting, value in settings.items()]
        return replace(choice, name=as_name("".join([choice.name, *endings])))

    def _checked_text(self, text: CalibrationConfig, name: str | None) -> CalibrationConfig:
        """The calibration set `text`. In the result, `is_default` is true if the set is shipped and
        no setting names it. `name`: name of its file; None for the composed configuration.
        UserError for a set with the name none, which cells of the unpruned model have."""
        if text.name == "none":
            raise UserError(
                "calibration.name=none means no calibration: expected another name, such as none_1"
            )
        if name is None and text.path.startswith(PREFIX):
            composed = self.draft.composed.get("calibration") or {}
            return replace(text, is_default="name" not in composed)
        return text

    def _content(self, axis: str, name: str | None) -> dict[str, Any]:
        """The settings of a choice, not yet checked. They are the content of its file, with the
        changes that the composed configuration makes to the group: an experiment, for example, may
        set single settings of a group. If `name` is None, they are the composed content itself."""
        composed = self.draft.composed.get(axis) or {}
        if not isinstance(composed, dict):
            raise UserError(
                f"{axis}={composed}: expected settings and their values, such as {{name: value}}"
            )
        if name is None and (axis != "calibration" or "name" in composed):
            return composed
        composed_name = self.draft.file_names.get(axis, "")
        defaults = composed
        if name is None:  # no calibration set is named, so all that is composed are changes
            name = SHIPPED_TEXT
            defaults = {}
        elif composed_name in self.files.names(axis):
            defaults = self.files.load([(axis, composed_name)])[axis, composed_name]
        content = deepcopy(self.files.load([(axis, name)])[axis, name])
        for setting, value in _changes(defaults, composed):
            assign(content, setting, value)
        return content


def _changes(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value in `new`) for each key that `old` does not have or has with another
    value."""
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            for inner_key, inner_value in _changes(old[key], value):
                yield f"{key}.{inner_key}", inner_value
        elif key not in old or old[key] != value:
            yield str(key), value


def assign(content: dict[str, Any], key: str, value: Any) -> None:
    """Set the value under a dotted key in `content`, in place. If the old and the new value are
    mappings, the entries of the new mapping are added to the old one. The value REMOVED removes the
    key."""
    *parents, last = key.split(".")
    for part in parents:
        if not isinstance(content.get(part), dict):
            content[part] = {}
        content = content[part]
    if value is REMOVED:
        content.pop(last, None)
    elif isinstance(value, dict) and isinstance(content.get(last), dict):
        content[last] = {**content[last], **value}
    else:
        content[last] = value


# ---- cells


def is_shipped(model: ModelConfig) -> bool:
    """Whether the model ships with moe_lab."""
    return model.path.startswith(PREFIX)


def suite_of(config: Config, model: ModelConfig, files: Files) -> SuiteConfig:
    """The suite on which a model is evaluated. It is `config.suite`, but a shipped model has the
    benchmarks of SHIPPED_SUITE if no suite is named."""
    if config.suite.benchmarks is not None or not is_shipped(model):
        return config.suite
    choice = ("suite", SHIPPED_SUITE)
    return replace(config.suite, benchmarks=files.load([choice])[choice]["benchmarks"])


def requests(config: Config, points: Iterable[Point], files: Files) -> list[Request]:
    """The cells of a study with their benchmarks. The benchmarks of a cell depend on its protocol
    and on whether its model is shipped; cells with the same benchmarks are in one request.
    SettingsError for texts and benchmarks that are unknown or invalid."""
    # (id of a model, id of an allocation) -> the allocation with the model's parameters
    searches: dict[tuple[int, int], AllocationConfig] = {}

    @cache
    def text_of(setting: str, name: str, engine: Any = None) -> CalibrationConfig:
        """The text `name` that a setting names, as the same object for all cells. Overrides such as
        calibration.X=... do not apply to this text. `engine`: replaces the text's own engine."""
        text = add_sources(_text(setting, name, files), files)
        return replace(text, engine=engine) if engine else text

    def cell_at(point: Point) -> Cell:
        """The cell at a point, with its texts and with the model's parameters of searches."""
        cell = Cell(**dict(zip(AXES, point, strict=True)))
        # flops_text is read by the engine of the calibration set, since the model is the same
        texts = {"flops": text_of("flops_text", config.flops_text, cell.calibration.engine)}
        if cell.allocation.search is not None:
            texts["search"] = text_of("allocation.search", cell.allocation.search)
        for role in TEXTS:
            if (name := getattr(cell.recovery, role)) is not None:
                texts[role] = text_of(f"recovery.{role}", name)
        if cell.allocation.search is None or not cell.model.search:
            return replace(cell, texts=texts)
        key = (id(cell.model), id(cell.allocation))
        if key not in searches:
            # the model's parameters are defaults for those of the allocation
            parameters = {**cell.model.search, **cell.allocation.parameters}
            searches[key] = replace(cell.allocation, parameters=parameters)
        return replace(cell, allocation=searches[key], texts=texts)

    # (id of a protocol, whether the model is shipped) -> cells with the same benchmarks
    groups: dict[tuple[int, bool], list[Cell]] = {}
    with Mistakes() as mistakes:
        for point in points:
            with mistakes.caught():
                cell = cell_at(point)
                groups.setdefault((id(cell.protocol), is_shipped(cell.model)), []).append(cell)
        study_requests: list[Request] = []
        for cells in groups.values():
            with mistakes.caught():
                suite = suite_of(config, cells[0].model, files)
                settings = replace(config, suite=suite)
                study_requests.append((cells, benchmarks(settings, cells[0].protocol, files)))
    return study_requests


def _text(
    setting: str, name: str, files: Files, changes: Mapping[str, Any] | None = None
) -> CalibrationConfig:
    """The text `name` of conf/calibration, checked. `setting`: the setting that names the text, for
    messages. `changes`: setting of the text -> value that replaces the one in the file."""
    check_known(setting, name, files.names("calibration"))
    content = {**files.load([("calibration", name)])["calibration", name], **(changes or {})}
    text: CalibrationConfig = valid(CalibrationConfig, content, "", f"calibration={name}")
    return text


def add_sources(text: CalibrationConfig, files: Files) -> CalibrationConfig:
    """The calibration set `text`. If it is a mixture, the settings of its sources, which are read
    from their files, are added. Overrides such as calibration.X=... do not apply to sources.
    UserError for an unknown source, a source that is named twice, and a mixture in a mixture."""
    if not text.sources:
        return text
    sources: list[SourceConfig] = []
    for source in text.sources:
        changes = {}
        if source.path is not None:
            changes = {"name": as_name(Path(source.path).stem), "path": source.path}
        settings = _text(f"calibration={text.name}: source", source.calibration, files, changes)
        if settings.sources:
            raise UserError(
                f"calibration={text.name}: source {source.calibration} is a mixture itself, and a "
                "mixture takes none: expected its sets, each with its share of the whole"
            )
        if settings.name in [other.settings.name for other in sources if other.settings]:
            raise UserError(
                f"calibration.sources names {settings.name} twice: expected each set once"
            )
        sources.append(replace(source, settings=settings))
    return replace(text, sources=sources)


EVERY = "every"
"""Key of a protocol under which changes to all benchmarks with `data` are."""


def benchmarks(config: Config, protocol: ProtocolConfig, files: Files) -> list[BenchmarkConfig]:
    """The benchmarks of the suite, with the protocol's changes and with the settings of `config`
    that apply to benchmarks. Raises SettingsError for unknown benchmarks, and for unknown or
    invalid fields in the protocol."""
    names = config.suite.benchmarks or []
    known = files.names("benchmark")
    with Mistakes() as mistakes:
        for name in protocol.benchmarks:
            if name not in (EVERY, *known):
                field = f"protocol={protocol.name}: benchmark"
                mistakes.append(str(unknown(field, name, [EVERY, *known])))
        mistakes += [str(unknown("benchmark", name, known)) for name in names if name not in known]
    contents = files.load(("benchmark", name) for name in names)
    with Mistakes() as mistakes:
        configs = []
        for (_, name), content in contents.items():
            with mistakes.caught():
                configs.append(_benchmark_config(name, content, config, protocol))
    return configs


def _benchmark_config(
    name: str, content: Mapping[str, Any], config: Config, protocol: ProtocolConfig
) -> BenchmarkConfig:
    """The config of the benchmark `name`: its file, changed by the protocol and by the settings of
    `config` that apply to it. Changes under EVERY count only if the benchmark has `data`.
    `content`: content of the file. UserError for suite.path with a benchmark that has its own data.
    SettingsError for invalid fields."""
    changes: dict[str, Any] = {}
    if content.get("data"):
        changes |= protocol.benchmarks.get(EVERY, {})
    changes |= protocol.benchmarks.get(name, {})
    if "parameters" in changes:
        changes["parameters"] = {**content.get("parameters", {}), **changes["parameters"]}
    origin = f"protocol={protocol.name}: benchmark {name}" if changes else f"benchmark={name}"
    benchmark: BenchmarkConfig = valid(BenchmarkConfig, {**content, **changes}, "", origin)
    harness = harness_of(benchmark)
    if config.suite.path is not None and not harness.reads_path:
        raise UserError(
            f"suite.path={config.suite.path} is the text of suite=perplexity or the folder of "
            f"suite=bfcl, expected null with benchmark {name}, which has its own data"
        )
    # suite.path is the file that a benchmark without `task` reads, or the folder of the file `task`
    path = config.suite.path
    task = benchmark.task
    return replace(
        benchmark,
        limit=config.suite.limit,
        task=str(Path(path, task)) if path and task else path or task,
        root=config.data_root if benchmark.data else None,
        judge=config.judge if harness.judged else None,
        python=config.interpreters.get(benchmark.harness),  # type: ignore[call-overload]
    )
