"""The grid of a study: its cells are the product of its axes, each with its benchmarks. Each choice
is made once."""

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
    """Other texts by their use: search (by the allocation), instructions, distill or fit (by the
    recovery), flops."""
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    """How its benchmarks are asked."""

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
"""Cells, and the benchmarks that all of them are evaluated on."""
Choice = tuple[str, str]
"""Group, and the name of a file in it."""
Point = tuple[Any, ...]
"""A value for each of AXES."""

KINDS = fields_of(CellConfig)
AXES = tuple(KINDS)
"""Keys that a grid can list values of; the product of the lists is in this order."""
GROUPS = tuple(axis for axis in AXES if fields_of(KINDS[axis]))
"""Axes whose values are files; a setting in them, such as model.top_k, can have a list, too."""
VALUES = tuple(axis for axis in AXES if axis not in GROUPS)
SHIPPED_TEXT = "pocket_general"
"""Calibration set of a shipped model if none is named."""
SHIPPED_SUITE = "pocket_no_code"
"""Suite of a shipped model if none is named."""
REGISTERED = ("criterion", "allocation")
"""Groups whose choices have the names of their functions, whatever their settings."""
REMOVED = object()
"""Value of a setting that an override with ~ removes."""


class Files(Protocol):
    """The configuration groups."""

    def names(self, group: str) -> list[str]:
        """Names of the files of a group."""

    def load(self, choices: Iterable[Choice]) -> dict[Choice, dict[str, Any]]:
        """The contents of files. Raises UserError for those that cannot be composed."""


@dataclass
class Draft:
    """Settings of cells in a command line and the files that it names, before anything is
    checked."""

    composed: Mapping[str, Any] = field(default_factory=dict)
    """Axis -> its content in the composed configuration: the only value of an axis without a
    list."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Group -> the file that its content is from."""
    typed: dict[str, Sequence[Any]] = field(default_factory=dict)
    """Axis, or setting in a group -> its values on the command line, which override a file's
    lists."""
    overrides: list[tuple[str, Any]] = field(default_factory=list)
    """Setting -> its value on the command line, which holds for every choice of its group."""
    lists: Sequence[Mapping[str, Any]] = ()
    """Lists by axis of the grid, and of further grids, which take the lists of the first where they
    have none."""


# ---- points


def points(draft: Draft, files: Files) -> list[Point]:
    """The distinct points of all grids. Raises SettingsError with all mistakes in values, names and
    files."""
    distinct: dict[Point, Point] = {}
    with Mistakes() as mistakes:
        axes = _Axes(draft, files)
        first, *others = [
            _checked(lists, "more" if number else "grid", mistakes)
            for number, lists in enumerate(draft.lists)
        ]
        grids = [axes.lists(first)]
        for lists in others:
            grids += axes.further_lists(first, lists)
        with mistakes.caught():
            files.load(axes.named(grids))
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
    """Numbers are compared by value; choices, each of which is composed once, as objects."""
    pairs = zip(AXES, point, strict=True)
    return tuple(value if axis in VALUES else id(value) for axis, value in pairs)


Lists = Mapping[str, Sequence[Any]]
"""Axis, or setting in a group, such as model.top_k -> its values."""


def _checked(lists: Any, field: str, mistakes: list[str]) -> Lists:
    """The lists of a grid that are lists of an axis; a sentence is added to `mistakes` for anything
    else. `field`: grid or more."""
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
    """A name, or the pattern in glob(...), as overrides and files of Hydra write it."""
    return re.sub(r"^glob\((.*)\)$", r"\1", str(name))


class _Axes:
    """The values of the axes of a study's grids. Each choice of a group is composed once."""

    def __init__(self, draft: Draft, files: Files) -> None:
        self.draft = draft
        self.files = files
        self._choices: dict[tuple[str, str | None, str], Any] = {}

    def lists(self, lists: Lists) -> Lists:
        """The lists of one grid; command-line values override a file's lists."""
        overridden = [key for key, _ in self.draft.overrides]
        in_file = {key: values for key, values in lists.items() if key not in overridden}
        return {**in_file, **self.draft.typed}

    def further_lists(self, first: Lists, lists: Lists) -> list[Lists]:
        """The lists of a further grid, without the choices that the command line excludes; [] if it
        excludes all of an axis."""
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
        return [{**self.lists({**first, **lists}), **retained}]

    def _field(self, axis: str) -> str:
        return axis if axis in self.draft.typed else f"grid.{axis}"

    def values(self, axis: str, lists: Lists) -> list[Any]:
        """The valid values of an axis. Raises SettingsError for all mistakes in them."""
        return self._numbers(axis, lists) if axis in VALUES else self._chosen(axis, lists)

    def _numbers(self, axis: str, lists: Lists) -> list[Any]:
        numbers = []
        with Mistakes() as mistakes:
            if axis not in lists:
                composed = self.draft.composed.get(axis)
                default = CellConfig.__dataclass_fields__[axis].default
                numbers.append(valid(KINDS[axis], default if composed is None else composed, axis))
            for value in lists.get(axis, ()):
                with mistakes.caught():
                    numbers.append(valid(KINDS[axis], value, self._field(axis)))
        return list(dict.fromkeys(numbers))

    def _names(self, axis: str, lists: Lists) -> list[str | None]:
        """The files that are listed for a group; None stands for the one in the composed
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

    def named(self, grids: Iterable[Lists]) -> Iterator[Choice]:
        """The files that grids name; those of axes with a mistake are left out."""
        for axis, lists in itertools.product(GROUPS, grids):
            with Mistakes().caught():
                for name in self._names(axis, lists):
                    if name is not None:
                        yield axis, name

    def _chosen(self, axis: str, lists: Lists) -> list[Any]:
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
        """The choice `name` of a group (None: that of the composed configuration) with all
        overrides. `varied`: setting -> value, of settings that have lists; the name of a choice
        with such a setting ends in it."""
        key = (axis, name, json.dumps(varied, sort_keys=True, default=str))
        if key not in self._choices:
            choice = self._compose(axis, name, varied)
            if isinstance(choice, CalibrationConfig):
                choice = mixed(choice, self.files)
            self._choices[key] = choice
        return self._choices[key]

    def _compose(self, axis: str, name: str | None, varied: Mapping[str, Any]) -> Any:
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
        if text.name == "none":  # as the unpruned model has it
            raise UserError(
                "calibration.name=none means no calibration: expected another name, such as none_1"
            )
        if name is None and text.path.startswith(PREFIX):
            composed = self.draft.composed.get("calibration") or {}
            return replace(text, is_default="name" not in composed)
        return text

    def _content(self, axis: str, name: str | None) -> dict[str, Any]:
        """The content of a choice. What a file such as an experiment sets in the group holds for
        every choice."""
        composed = self.draft.composed.get(axis) or {}
        if not isinstance(composed, dict):
            raise UserError(
                f"{axis}={composed}: expected settings and their values, such as {{name: value}}"
            )
        if name is None and (axis != "calibration" or "name" in composed):
            return composed
        chosen = (axis, self.draft.chosen.get(axis, ""))
        defaults = composed
        if name is None:  # no text is named
            name = SHIPPED_TEXT
            defaults = {}
        elif chosen[1] in self.files.names(axis):
            defaults = self.files.load([chosen])[chosen]
        content = deepcopy(self.files.load([(axis, name)])[axis, name])
        for setting, value in _differing(defaults, composed):
            assign(content, setting, value)
        return content


def _differing(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each value in `after` that differs from that in `before`."""
    for key, value in after.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            for inner_key, inner_value in _differing(before[key], value):
                yield f"{key}.{inner_key}", inner_value
        elif key not in before or before[key] != value:
            yield str(key), value


def assign(content: dict[str, Any], key: str, value: Any) -> None:
    """Set the value under a dotted key; a value that is a mapping is added to what is there, and
    REMOVED removes it."""
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
    """Whether the model came with moe_lab."""
    return model.path.startswith(PREFIX)


def suite_of(config: Config, model: ModelConfig, files: Files) -> SuiteConfig:
    """What a model is evaluated on."""
    if config.suite.benchmarks is not None or not is_shipped(model):
        return config.suite
    choice = ("suite", SHIPPED_SUITE)
    return replace(config.suite, benchmarks=files.load([choice])[choice]["benchmarks"])


def requests(config: Config, points: Iterable[Point], files: Files) -> list[Request]:
    """The cells of a study with their benchmarks; cells of one protocol are grouped together.
    Raises SettingsError for texts and benchmarks that are unknown or wrong."""
    searches: dict[tuple[int, int], AllocationConfig] = {}

    @cache
    def text(setting: str, name: str, engine: Any = None) -> CalibrationConfig:
        """The text that a setting names, one object for all cells; settings such as
        calibration.X=... do not apply."""
        named = mixed(_text(setting, name, files), files)
        return replace(named, engine=engine) if engine else named

    def cell_at(point: Point) -> Cell:
        cell = Cell(**dict(zip(AXES, point, strict=True)))
        # A model that is too large for memory is so for every text.
        texts = {"flops": text("flops_text", config.flops_text, cell.calibration.engine)}
        if cell.allocation.search is not None:
            texts["search"] = text("allocation.search", cell.allocation.search)
        for role in TEXTS:
            if (name := getattr(cell.recovery, role)) is not None:
                texts[role] = text(f"recovery.{role}", name)
        if cell.allocation.search is None or not cell.model.search:
            return replace(cell, texts=texts)
        key = (id(cell.model), id(cell.allocation))
        if key not in searches:  # parameters published for the model are defaults
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
    """The text of conf/calibration that a setting names, with other values for some of its
    settings."""
    check_known(setting, name, files.names("calibration"))
    content = {**files.load([("calibration", name)])["calibration", name], **(changes or {})}
    found: CalibrationConfig = valid(CalibrationConfig, content, "", f"calibration={name}")
    return found


def mixed(text: CalibrationConfig, files: Files) -> CalibrationConfig:
    """A calibration set; if it is a mixture, with the settings of its sets as they are in files:
    calibration.X=... does not apply to them. UserError for an unknown name, one that is there
    twice, and a mixture in a mixture."""
    if not text.sources:
        return text
    sources: list[SourceConfig] = []
    for source in text.sources:  # one that is read from another path is named after that file
        own = (
            {}
            if source.path is None
            else {"name": as_name(Path(source.path).stem), "path": source.path}
        )
        settings = _text(f"calibration={text.name}: source", source.calibration, files, own)
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
"""Key of a protocol that stands for all benchmarks that have `data`."""


def benchmarks(config: Config, protocol: ProtocolConfig, files: Files) -> list[BenchmarkConfig]:
    """The benchmarks of the suite, with the protocol's changes and with settings from the rest of
    the configuration. Raises SettingsError for unknown benchmarks, and for unknown or wrong fields
    in the protocol."""
    names = config.suite.benchmarks or []
    known = files.names("benchmark")
    with Mistakes() as mistakes:
        for name in (name for name in protocol.benchmarks if name not in (EVERY, *known)):
            mistakes.append(
                str(unknown(f"protocol={protocol.name}: benchmark", name, [EVERY, *known]))
            )
        mistakes += [str(unknown("benchmark", name, known)) for name in names if name not in known]
    contents = files.load(("benchmark", name) for name in names)
    with Mistakes() as mistakes:
        found = []
        for (_, name), content in contents.items():
            with mistakes.caught():
                found.append(_benchmark(name, content, config, protocol))
    return found


def _benchmark(
    name: str, content: Mapping[str, Any], config: Config, protocol: ProtocolConfig
) -> BenchmarkConfig:
    differing = protocol.benchmarks
    changes = {
        **(differing.get(EVERY, {}) if content.get("data") else {}),
        **differing.get(name, {}),
    }
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
