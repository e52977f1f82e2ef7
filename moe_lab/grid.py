"""The grid of a study: its cells, which are the product of its axes, and their benchmarks. Each
choice is composed once."""

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
    """Role -> text: search (of the allocation), instructions, distill or fit (of the recovery),
    flops."""
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    """Changes to the settings of its benchmarks."""

    def __hash__(self) -> int:
        names = (
            self.model,
            self.criterion,
            self.calibration,
            self.allocation,
            self.recovery,
            self.protocol,
        )
        return hash((*[group.name for group in names], self.ratio, self.gate, self.seed))


Request = tuple[Sequence[Cell], Sequence[BenchmarkConfig]]
"""Cells, and the benchmarks on which all of them are evaluated."""
Choice = tuple[str, str]
"""Group, and the name of a file in it."""
Point = tuple[Any, ...]
"""A value for each of AXES."""

KINDS = fields_of(CellConfig)
AXES = tuple(KINDS)
"""Keys for which a grid can list values; the product of the lists is in this order."""
GROUPS = tuple(axis for axis in AXES if fields_of(KINDS[axis]))
"""Axes whose values are files. Their settings, such as model.top_k, can have lists, too."""
VALUES = tuple(axis for axis in AXES if axis not in GROUPS)
"""Axes whose values are numbers or texts."""
SHIPPED_TEXT = "pocket_general"
"""Calibration set of a shipped model if none is named."""
SHIPPED_SUITE = "pocket_no_code"
"""Suite of a shipped model if none is named."""
REGISTERED = ("criterion", "allocation")
"""Groups whose choices are named after registered functions, also if their settings differ."""
REMOVED = object()
"""Value of a setting that an override with ~ removes."""


class Files(Protocol):
    """Access to the files of configuration groups."""

    def names(self, group: str) -> list[str]:
        """Names of the files of a group."""

    def load(self, choices: Iterable[Choice]) -> dict[Choice, dict[str, Any]]:
        """The contents of files. Raises UserError for files that cannot be composed."""


@dataclass
class Draft:
    """Settings of cells from a command line and the files that it names, not yet checked."""

    composed: Mapping[str, Any] = field(default_factory=dict)
    """Axis -> its content in the composed configuration, which is the value of an axis without a
    list."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Group -> name of the file of its content in `composed`."""
    typed: dict[str, Sequence[Any]] = field(default_factory=dict)
    """Axis, or setting in a group -> its values on the command line, which override lists of
    files."""
    overrides: list[tuple[str, Any]] = field(default_factory=list)
    """Settings in groups, with values from the command line for all choices of the group."""
    lists: Sequence[Mapping[str, Any]] = ()
    """Lists by axis, of the grid and of further grids. A further grid has the lists of the first
    for axes without lists."""


# ---- points


def points(draft: Draft, files: Files) -> list[Point]:
    """The distinct points of all grids. Raises SettingsError with all mistakes in values, names and
    files."""
    distinct: dict[Point, Point] = {}
    with Mistakes() as mistakes:
        axes = _Axes(draft, files)
        first, *further = [
            _checked(lists, "more" if number else "grid", mistakes)
            for number, lists in enumerate(draft.lists)
        ]
        grids = [axes.grid_lists(first)]
        for lists in further:
            grids += axes.further_grid_lists(first, lists)
        with mistakes.caught():
            files.load(axes.named_files(grids))
        for lists in grids:
            values = []
            for axis in AXES:
                with mistakes.caught():
                    values.append(axes.values(axis, lists))
            if len(values) == len(AXES):
                for point in itertools.product(*values):
                    distinct.setdefault(_key(point), point)
    return list(distinct.values())


def _key(point: Point) -> Point:
    """A key that is equal for equal points: choices are compared by identity, as each is composed
    once."""
    pairs = zip(AXES, point, strict=True)
    return tuple(value if axis in VALUES else id(value) for axis, value in pairs)


Lists = Mapping[str, Sequence[Any]]
"""Axis, or setting in a group, such as model.top_k -> its values."""


def _checked(lists: Any, field: str, mistakes: list[str]) -> Lists:
    """The valid lists of a grid. A sentence for each invalid entry is added to `mistakes`. `field`:
    grid or more."""
    if not isinstance(lists, Mapping):
        mistakes.append(f"{field}={lists}: expected lists by axis, such as {{ratio: [0.25, 0.5]}}")
        return {}
    checked = {}
    for key, values in ((str(key), values) for key, values in lists.items()):
        is_setting = key.partition(".")[0] in GROUPS and type_at(CellConfig, key.split("."))
        if key not in AXES and not is_setting:
            mistakes.append(str(unknown(field, key, AXES)))
        elif not isinstance(values, list):
            mistakes.append(f"{field}.{key}={values}: expected a list, such as [{values}]")
        elif values:
            checked[key] = values
    return checked


def _pattern(name: Any) -> str:
    """The pattern of a name of a file: that in glob(PATTERN), or else the name itself."""
    return re.sub(r"^glob\((.*)\)$", r"\1", str(name))


class _Axes:
    """The values of the axes of a study's grids. Each choice of a group is composed once."""

    def __init__(self, draft: Draft, files: Files) -> None:
        self.draft = draft
        self.files = files
        self._choices: dict[tuple[str, str | None, str], Any] = {}

    def grid_lists(self, lists: Lists) -> Lists:
        """The lists of one grid; command-line values override a file's lists."""
        overridden = [key for key, _ in self.draft.overrides]
        in_file = {key: values for key, values in lists.items() if key not in overridden}
        return {**in_file, **self.draft.typed}

    def further_grid_lists(self, first: Lists, lists: Lists) -> list[Lists]:
        """The lists of a further grid in a list, without choices that the command line excludes; []
        if it excludes all choices of an axis."""
        retained = {}
        for axis, typed in self.draft.typed.items():
            if axis not in GROUPS or axis not in lists:
                continue
            patterns = [_pattern(name) for name in typed]
            retained[axis] = [
                name
                for name in lists[axis]
                if any(fnmatchcase(str(name), pattern) for pattern in patterns)
            ]
        if not all(retained.values()):
            return []
        return [{**self.grid_lists({**first, **lists}), **retained}]

    def _field(self, axis: str) -> str:
        """The field that sets the values of an axis, for messages."""
        return axis if axis in self.draft.typed else f"grid.{axis}"

    def values(self, axis: str, lists: Lists) -> list[Any]:
        """The valid values of an axis. Raises SettingsError with all mistakes in them."""
        return self._numbers(axis, lists) if axis in VALUES else self._choices_of(axis, lists)

    def _numbers(self, axis: str, lists: Lists) -> list[Any]:
        """The values of one of VALUES, each once."""
        numbers = []
        with Mistakes() as mistakes:
            if axis not in lists:
                value = self.draft.composed.get(axis)
                if value is None:
                    value = CellConfig.__dataclass_fields__[axis].default
                numbers.append(valid(KINDS[axis], value, axis))
            for value in lists.get(axis, ()):
                with mistakes.caught():
                    numbers.append(valid(KINDS[axis], value, self._field(axis)))
        return list(dict.fromkeys(numbers))

    def _names(self, axis: str, lists: Lists) -> list[str | None]:
        """Names of the files that are listed for a group; None stands for the file in the composed
        configuration."""
        known = self.files.names(axis)
        names: list[str | None] = []
        with Mistakes() as mistakes:
            for listed in lists.get(axis, ()):
                pattern = _pattern(listed)
                matches = [name for name in known if fnmatchcase(name, pattern)]
                if not matches:
                    mistakes.append(str(unknown(self._field(axis), pattern, known)))
                for name in matches:
                    names.append(None if name == self.draft.chosen.get(axis) else name)
        return list(dict.fromkeys(names)) or [None]

    def named_files(self, grids: Iterable[Lists]) -> Iterator[Choice]:
        """The files that grids name, without those of axes with a mistake."""
        for axis, lists in itertools.product(GROUPS, grids):
            with Mistakes().caught():
                for name in self._names(axis, lists):
                    if name is not None:
                        yield axis, name

    def _choices_of(self, axis: str, lists: Lists) -> list[Any]:
        """The valid choices of a group, each once."""
        prefix = f"{axis}."
        varied = {
            key.removeprefix(prefix): values
            for key, values in lists.items()
            if key.startswith(prefix)
        }
        distinct: dict[int, Any] = {}
        with Mistakes() as mistakes:
            for name, *settings in itertools.product(self._names(axis, lists), *varied.values()):
                with mistakes.caught():
                    choice = self._choice(axis, name, dict(zip(varied, settings, strict=True)))
                    distinct[id(choice)] = choice
        return list(distinct.values())

    def _choice(self, axis: str, name: str | None, varied: Mapping[str, Any]) -> Any:
        """The choice `name` of a group (None: the choice in the composed configuration) with all
        overrides. `varied`: setting -> value, for settings with lists, whose values are added to
        the name of the choice."""
        key = (axis, name, json.dumps(varied, sort_keys=True, default=str))
        if key not in self._choices:
            choice = self._compose(axis, name, varied)
            if isinstance(choice, CalibrationConfig):
                choice = mixed(choice, self.files)
            self._choices[key] = choice
        return self._choices[key]

    def _compose(self, axis: str, name: str | None, varied: Mapping[str, Any]) -> Any:
        """As `_choice`, without the sources of a mixture."""
        content = deepcopy(self._content(axis, name))
        for setting, value in self.draft.overrides:
            if setting.startswith(f"{axis}."):
                assign(content, setting.removeprefix(f"{axis}."), value)
        for setting, value in varied.items():
            assign(content, setting, value)
        choice = valid(KINDS[axis], content, axis, f"{axis}={name}" if name else "")
        if isinstance(choice, CalibrationConfig):
            choice = self._checked_text(choice, name)
        if not varied or axis in REGISTERED or "top_k" in varied:
            return choice
        endings = [f"_{setting.rpartition('.')[2]}{value}" for setting, value in varied.items()]
        return replace(choice, name=as_name("".join([choice.name, *endings])))

    def _checked_text(self, text: CalibrationConfig, name: str | None) -> CalibrationConfig:
        """A calibration set, marked if it is the default. UserError for the name none."""
        if text.name == "none":  # the name in cells of the unpruned model
            raise UserError(
                "calibration.name=none means no calibration: expected another name, such as none_1"
            )
        if name is None and text.path.startswith(PREFIX):
            composed = self.draft.composed.get("calibration") or {}
            return replace(text, is_default="name" not in composed)
        return text

    def _content(self, axis: str, name: str | None) -> dict[str, Any]:
        """The content of a choice. Settings of the group in a file such as an experiment apply to
        every choice."""
        composed = self.draft.composed.get(axis) or {}
        if not isinstance(composed, dict):
            raise UserError(
                f"{axis}={composed}: expected settings and their values, such as {{name: value}}"
            )
        if name is None and (axis != "calibration" or "name" in composed):
            return composed
        composed_name = self.draft.chosen.get(axis, "")
        defaults = composed
        if name is None:  # no calibration set is named
            name = SHIPPED_TEXT
            defaults = {}
        elif composed_name in self.files.names(axis):
            defaults = self.files.load([(axis, composed_name)])[axis, composed_name]
        content = deepcopy(self.files.load([(axis, name)])[axis, name])
        for setting, value in _changes(defaults, composed):
            assign(content, setting, value)
        return content


def _changes(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each value in `new` that is missing in `old` or differs from it."""
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            for inner_key, inner_value in _changes(old[key], value):
                yield f"{key}.{inner_key}", inner_value
        elif key not in old or old[key] != value:
            yield str(key), value


def assign(content: dict[str, Any], key: str, value: Any) -> None:
    """Set the value under a dotted key. A mapping is merged into a mapping, and REMOVED removes the
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
    """Whether the model is part of moe_lab."""
    return model.path.startswith(PREFIX)


def suite_of(config: Config, model: ModelConfig, files: Files) -> SuiteConfig:
    """The suite on which a model is evaluated."""
    if config.suite.benchmarks is not None or not is_shipped(model):
        return config.suite
    choice = ("suite", SHIPPED_SUITE)
    return replace(config.suite, benchmarks=files.load([choice])[choice]["benchmarks"])


def requests(config: Config, points: Iterable[Point], files: Files) -> list[Request]:
    """The cells of a study with their benchmarks, in a request for each protocol and for shipped
    and other models. Raises SettingsError for texts and benchmarks that are unknown or invalid."""
    searches: dict[tuple[int, int], AllocationConfig] = {}

    @cache
    def text_of(setting: str, name: str, engine: Any = None) -> CalibrationConfig:
        """The text that a setting names, as one object for all cells; overrides such as
        calibration.X=... do not apply to it."""
        text = mixed(_text(setting, name, files), files)
        return replace(text, engine=engine) if engine else text

    def cell_at(point: Point) -> Cell:
        cell = Cell(**dict(zip(AXES, point, strict=True)))
        # a model that does not fit in memory for one text does not fit for another
        texts = {"flops": text_of("flops_text", config.flops_text, cell.calibration.engine)}
        if cell.allocation.search is not None:
            texts["search"] = text_of("allocation.search", cell.allocation.search)
        for role in TEXTS:
            if (name := getattr(cell.recovery, role)) is not None:
                texts[role] = text_of(f"recovery.{role}", name)
        if cell.allocation.search is None or not cell.model.search:
            return replace(cell, texts=texts)
        key = (id(cell.model), id(cell.allocation))
        if key not in searches:  # the parameters of the model are defaults
            parameters = {**cell.model.search, **cell.allocation.parameters}
            searches[key] = replace(cell.allocation, parameters=parameters)
        return replace(cell, allocation=searches[key], texts=texts)

    groups: dict[tuple[int, bool], list[Cell]] = {}
    with Mistakes() as mistakes:
        for point in points:
            with mistakes.caught():
                cell = cell_at(point)
                groups.setdefault((id(cell.protocol), is_shipped(cell.model)), []).append(cell)
        grouped: list[Request] = []
        for cells in groups.values():
            with mistakes.caught():
                suite = suite_of(config, cells[0].model, files)
                settings = replace(config, suite=suite)
                grouped.append((cells, benchmarks(settings, cells[0].protocol, files)))
    return grouped


def _text(
    setting: str, name: str, files: Files, changes: Mapping[str, Any] | None = None
) -> CalibrationConfig:
    """The text of conf/calibration that a setting names. `changes`: other values of its
    settings."""
    check_known(setting, name, files.names("calibration"))
    content = {**files.load([("calibration", name)])["calibration", name], **(changes or {})}
    text: CalibrationConfig = valid(CalibrationConfig, content, "", f"calibration={name}")
    return text


def mixed(text: CalibrationConfig, files: Files) -> CalibrationConfig:
    """A calibration set; a mixture with the settings of its sources from their files, to which
    overrides such as calibration.X=... do not apply. UserError for an unknown source, a source that
    is named twice, and a mixture in a mixture."""
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
"""Key of a protocol for all benchmarks that have `data`."""


def benchmarks(config: Config, protocol: ProtocolConfig, files: Files) -> list[BenchmarkConfig]:
    """The benchmarks of the suite, with the protocol's changes and with settings from other parts
    of the configuration. Raises SettingsError for unknown benchmarks, and for unknown or invalid
    fields in the protocol."""
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
    """The config of a benchmark, from the content of its file. UserError for suite.path with a
    benchmark that has its own data; SettingsError for invalid fields."""
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
    path = config.suite.path  # a file, or a folder with the file `task`
    task = benchmark.task
    return replace(
        benchmark,
        limit=config.suite.limit,
        task=str(Path(path, task)) if path and task else path or task,
        root=config.data_root if benchmark.data else None,
        judge=config.judge if harness.judged else None,
        python=config.interpreters.get(benchmark.harness),  # type: ignore[call-overload]
    )
