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

from moe_lab.allocation import ALLOCATIONS
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
from moe_lab.config.base import Mistakes, default_of, fields_of, setting_type, validated
from moe_lab.config.pruning import TEXTS
from moe_lab.criteria import CRITERIA
from moe_lab.errors import UserError, check_known, unknown_name_error
from moe_lab.evaluation.harness import harness_of
from moe_lab.json_files import Document
from moe_lab.models.config_json import size_of
from moe_lab.paths import PREFIX, check_name, is_path, valid_name


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    model: ModelConfig
    criterion: CriterionConfig
    calibration: CalibrationConfig
    allocation: AllocationConfig
    recovery: RecoveryConfig
    ratio: float
    """Share of the routed experts, or of their channels."""
    gate: str
    seed: int
    texts: Mapping[str, CalibrationConfig] = field(default_factory=dict)
    """Role -> text. Roles: search (for the allocation); instructions, distill or fit (for the
    recovery); flops."""
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    """Changes to the settings of the benchmarks."""
    ratio_of: str = "routed"
    """What `ratio` was a share of before it became one of routed experts."""

    def __hash__(self) -> int:
        # a generated hash would fail: `texts` is a dict, and some settings of groups are dicts
        names = [getattr(self, group).name for group in GROUPS]
        return hash((*names, self.ratio, self.gate, self.seed))


Request = tuple[Sequence[Cell], Sequence[BenchmarkConfig]]
"""Cells, and the benchmarks on which all of them are evaluated."""
Choice = tuple[str, str]
"""(group, name of a file of the group)."""
Point = tuple[Any, ...]
"""One value per axis, in the order of AXES."""

AXIS_TYPES = fields_of(CellConfig)
AXES = tuple(AXIS_TYPES)
"""Keys for which a grid can list values. The product of the lists is in this order."""
GROUPS = tuple(axis for axis in AXES if fields_of(AXIS_TYPES[axis]))
"""Axes whose values are files. Settings in the files, such as model.top_k, can have lists, too."""
PLAIN_AXES = tuple(axis for axis in AXES if axis not in GROUPS)
"""Axes whose values are numbers or texts."""
SHIPPED_TEXT = "pocket_general"
"""Calibration set of a shipped model if none is named."""
SHIPPED_SUITE = "pocket_no_code"
"""Suite of a shipped model if none is named."""
REGISTRIES: Mapping[str, Mapping[str, Any]] = {"criterion": CRITERIA, "allocation": ALLOCATIONS}
"""Group whose choices have the name of a registered function -> the registered functions. No
settings are added to these names."""
PATH_FILES = {"model": "local", "calibration": "text"}
"""Group whose choices can be paths -> file with the other settings of such a choice: model=DIR
means model=local model.path=DIR."""
REMOVED = object()
"""Marker in place of the value of a setting that an override with ~ removes."""


class Files(Protocol):
    """Access to the files of configuration groups, and to paths as choices (see `is_own_path`)."""

    def names(self, group: str) -> list[str]:
        """Names of the files of a group."""

    def load(self, choices: Iterable[Choice]) -> dict[Choice, Document]:
        """Choice -> content of its file. Raises UserError for files that cannot be composed."""


@dataclass
class Draft:
    """Settings of cells from a command line and from the files that the command line names. The
    settings are not checked yet."""

    composed: Document = field(default_factory=dict)
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
    lists: Sequence[Document] = ()
    """Axis -> list of values, for the first grid and for each further grid. For an axis without a
    list, a further grid has the list of the first grid."""


# ---- points


def points(draft: Draft, files: Files) -> list[Point]:
    """The points of all grids, without repetitions. Raises SettingsError with all mistakes."""
    point_of_key: dict[Point, Point] = {}
    with Mistakes() as mistakes:
        axes = _Axes(draft, files)
        # the lists of the first grid are in the setting `grid`, those of further grids in `more`
        first, *further = [
            _valid_lists(lists, "more" if number else "grid", mistakes)
            for number, lists in enumerate(draft.lists)
        ]
        grids = [axes.grid_lists(first)]
        for lists in further:
            grids += axes.further_grid_lists(first, lists)
        # Load all files in one call, because each call takes time. `files` keeps their contents.
        with mistakes.caught():
            files.load(axes.named_files(grids))
        for lists in grids:
            values = []
            for axis in AXES:
                with mistakes.caught():
                    values.append(axes.values(axis, lists))
            if len(values) == len(AXES):  # no axis has mistakes
                for point in itertools.product(*values):
                    point_of_key.setdefault(_key(point), point)
    return list(point_of_key.values())


def _key(point: Point) -> Point:
    """A tuple that can be hashed, and is equal for equal points: `_Axes` returns the same object
    for equal choices."""
    pairs = zip(AXES, point, strict=True)
    return tuple(value if axis in PLAIN_AXES else id(value) for axis, value in pairs)


Lists = Mapping[str, Sequence[Any]]
"""Axis, or setting in a group such as model.top_k -> list of values."""


def _valid_lists(lists: Any, field: str, mistakes: list[str]) -> Lists:
    """The lists of a grid without invalid and empty lists. For each invalid list, a sentence is
    added to `mistakes`. `field`: `grid` or `more`, the setting that has the lists."""
    if not isinstance(lists, Mapping):
        mistakes.append(f"{field}={lists}: expected lists by axis, such as {{ratio: [0.25, 0.5]}}")
        return {}
    valid_lists = {}
    # a key in a file may be a number
    for key, values in zip(map(str, lists), lists.values(), strict=True):
        is_setting = key.partition(".")[0] in GROUPS and setting_type(CellConfig, key.split("."))
        if key not in AXES and not is_setting:
            mistakes.append(str(unknown_name_error(field, key, AXES)))
        elif not isinstance(values, list):
            mistakes.append(f"{field}.{key}={values}: expected a list, such as [{values}]")
        elif values:
            valid_lists[key] = values
    return valid_lists


def is_own_path(group: str, name: str) -> bool:
    """Whether `name`, which no file of the group has, is a path of the user."""
    return group in PATH_FILES and is_path(name)


def is_variant(group: str, name: str) -> bool:
    """Whether `name`, which no file of the group has, is registered by a module of
    moe_lab.papers."""
    return group in REGISTRIES and name in REGISTRIES[group]


def _pattern(name: Any) -> str:
    """`name` as a pattern for fnmatch. The name glob(PATTERN) gives PATTERN."""
    return re.sub(r"^glob\((.*)\)$", r"\1", str(name))


class _Axes:
    """The values of each axis of a study's grids. A value of a group is an object, such as a
    ModelConfig, that is made from a file of the group; it is called a choice. Equal choices are the
    same object."""

    def __init__(self, draft: Draft, files: Files) -> None:
        self.draft = draft
        self.files = files
        self._choices: dict[tuple[str, str | None, str], Any] = {}
        """(axis, name, JSON of settings) -> the choice that `_choice` returned for them."""

    def grid_lists(self, lists: Lists) -> Lists:
        """The lists of a grid: `lists`, which come from a file, changed by the command line."""
        override_keys = [key for key, _ in self.draft.overrides]
        file_lists = {key: values for key, values in lists.items() if key not in override_keys}
        return {**file_lists, **self.draft.command_lists}

    def further_grid_lists(self, first: Lists, lists: Lists) -> list[Lists]:
        """The lists of a further grid, changed by the command line, as the only item of the result.
        If the command line has a list of a group, the further grid keeps only its own names that
        match a name in that list.

        `first`: the lists of the first grid in the same file, which also apply unless `lists`
        replaces them."""
        kept = {}
        for axis, command_names in self.draft.command_lists.items():
            if axis not in GROUPS or axis not in lists:
                continue
            patterns = [_pattern(name) for name in command_names]
            kept[axis] = [
                name
                for name in lists[axis]
                if any(fnmatchcase(str(name), pattern) for pattern in patterns)
            ]
        if not all(kept.values()):
            return []
        return [{**self.grid_lists({**first, **lists}), **kept}]

    def _list_setting(self, axis: str) -> str:
        """The setting that lists the values of an axis, for messages."""
        return axis if axis in self.draft.command_lists else f"grid.{axis}"

    def values(self, axis: str, lists: Lists) -> list[Any]:
        """The checked values of an axis. SettingsError with all mistakes."""
        method = self._plain_values if axis in PLAIN_AXES else self._choices_of
        return method(axis, lists)

    def _plain_values(self, axis: str, lists: Lists) -> list[Any]:
        """The checked values of an axis in PLAIN_AXES, without repetitions."""
        values = []
        with Mistakes() as mistakes:
            if axis not in lists:
                only_value = self.draft.composed.get(axis)
                if only_value is None:
                    only_value = default_of(CellConfig, axis)
                values.append(validated(AXIS_TYPES[axis], only_value, axis))
            for value in lists.get(axis, ()):
                with mistakes.caught():
                    values.append(validated(AXIS_TYPES[axis], value, self._list_setting(axis)))
        return list(dict.fromkeys(values))

    def _names(self, axis: str, lists: Lists) -> list[str | None]:
        """Names of the files of a group that match its list of names. None stands for the content
        of the composed configuration."""
        available = self.files.names(axis)
        names: list[str | None] = []
        with Mistakes() as mistakes:
            for entry in lists.get(axis, ()):
                pattern = _pattern(entry)
                matches = [name for name in available if fnmatchcase(name, pattern)]
                if not matches and (is_own_path(axis, pattern) or is_variant(axis, pattern)):
                    matches = [pattern]
                if not matches:
                    known = {*available, *REGISTRIES.get(axis, ())}
                    mistakes.append(
                        str(unknown_name_error(self._list_setting(axis), pattern, known))
                    )
                for name in matches:
                    names.append(None if name == self.draft.file_names.get(axis) else name)
        return list(dict.fromkeys(names)) or [None]

    def named_files(self, grids: Iterable[Lists]) -> Iterator[Choice]:
        """(group, name) of the files that the lists of `grids` name, without those in the composed
        configuration."""
        for axis, lists in itertools.product(GROUPS, grids):
            # skips a list with mistakes, which `values` reports
            with Mistakes().caught():
                for name in self._names(axis, lists):
                    if name is not None:
                        yield axis, name

    def _choices_of(self, axis: str, lists: Lists) -> list[Any]:
        """The checked choices of a group: one for each listed file and each combination of the
        listed values of settings."""
        prefix = f"{axis}."
        setting_lists = {
            key.removeprefix(prefix): values
            for key, values in lists.items()
            if key.startswith(prefix)
        }
        choices: dict[int, Any] = {}  # id of a choice -> the choice
        with Mistakes() as mistakes:
            names = self._names(axis, lists)
            for name, *values in itertools.product(names, *setting_lists.values()):
                with mistakes.caught():
                    choice = self._choice(axis, name, dict(zip(setting_lists, values, strict=True)))
                    choices[id(choice)] = choice
        return list(choices.values())

    def _choice(self, axis: str, name: str | None, settings: Document) -> Any:
        """The choice of a group that is made from the file `name`, or from the composed
        configuration if `name` is None. `settings`: setting in the group -> its value."""
        key = (axis, name, json.dumps(settings, sort_keys=True, default=str))
        if key not in self._choices:
            self._choices[key] = self._compose(axis, name, settings)
        return self._choices[key]

    def _compose(self, axis: str, name: str | None, settings: Document) -> Any:
        """A new, checked choice from the arguments of `_choice`."""
        content = deepcopy(self._content(axis, name))
        for setting, value in self.draft.overrides:
            if setting.startswith(f"{axis}."):
                assign(content, setting.removeprefix(f"{axis}."), value)
        for setting, value in settings.items():
            assign(content, setting, value)
        choice = validated(AXIS_TYPES[axis], content, axis, f"{axis}={name}" if name else "")
        if isinstance(choice, CalibrationConfig):
            check_name("calibration.name", choice.name)
            composed = self.draft.composed.get(axis) or {}
            # whether this is the shipped set, as no setting names a set
            is_default = name is None and "name" not in composed and choice.path.startswith(PREFIX)
            choice = add_sources(replace(choice, is_default=is_default), self.files)
        # registered functions keep their names, and ModelConfig appends the value of top_k itself
        if not settings or axis in REGISTRIES or "top_k" in settings:
            return choice
        # such as _rank8 for the setting rank
        endings = [f"_{setting.rpartition('.')[2]}{value}" for setting, value in settings.items()]
        return replace(choice, name=valid_name("".join([choice.name, *endings])))

    def _content(self, axis: str, name: str | None) -> Document:
        """The settings of a choice, not yet checked. If `name` is not None, they are the content of
        the file `name`, with the changes that the composed configuration has made to its own file
        of the group."""
        composed = self.draft.composed.get(axis) or {}
        if not isinstance(composed, dict):
            raise UserError(
                f"{axis}={composed}: expected settings and their values, such as {{name: value}}"
            )
        if name is None and (axis != "calibration" or "name" in composed):
            return composed
        composed_name = self.draft.file_names.get(axis, "")
        # `composed` before the changes
        base = composed
        if name is None:  # no setting names a calibration set
            name = SHIPPED_TEXT
            base = {}
        elif composed_name in self.files.names(axis):
            base = self.files.load([(axis, composed_name)])[axis, composed_name]
        content = deepcopy(self.files.load([(axis, name)])[axis, name])
        for setting, value in _changes(base, composed):
            assign(content, setting, value)
        return content


def _changes(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value in `new`) for each key that is missing in `old`, or has another value
    there."""
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            for inner_key, inner_value in _changes(old[key], value):
                yield f"{key}.{inner_key}", inner_value
        elif key not in old or old[key] != value:
            yield str(key), value


def assign(content: Document, key: str, value: Any) -> None:
    """Set the value under a dotted key in `content`, in place. A mapping is merged into an old
    mapping."""
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
    """The suite on which a model is evaluated. A shipped model has the benchmarks of SHIPPED_SUITE
    if no suite is named."""
    if config.suite.benchmarks is not None or not is_shipped(model):
        return config.suite
    choice = ("suite", SHIPPED_SUITE)
    return replace(config.suite, benchmarks=files.load([choice])[choice]["benchmarks"])


def requests(config: Config, points: Iterable[Point], files: Files) -> list[Request]:
    """The cells at `points`, with their benchmarks. A request has the cells of one protocol, either
    of shipped models or of other models. SettingsError with all mistakes in benchmarks and in texts
    (see `Cell.texts`)."""
    # (id of a model, id of an allocation that searches) -> the allocation with the model's
    # search parameters
    allocations: dict[tuple[int, int], AllocationConfig] = {}

    @cache
    def text_of(setting: str, name: str, engine: Any = None) -> CalibrationConfig:
        """The text `name`. `setting`: the setting that names the text, for messages. `engine`
        replaces the engine of the text."""
        text = add_sources(_text(setting, name, files, changes={}), files)
        return replace(text, engine=engine) if engine else text

    def cell_at(point: Point) -> Cell:
        """The cell at `point`, with its texts and the search parameters of its model."""
        cell = _with_routed_ratio(Cell(**dict(zip(AXES, point, strict=True))))
        texts = {"flops": text_of("flops_text", config.flops_text, cell.calibration.engine)}
        if cell.allocation.search is not None:
            texts["search"] = text_of("allocation.search", cell.allocation.search)
        for role in TEXTS:
            if (name := getattr(cell.recovery, role)) is not None:
                texts[role] = text_of(f"recovery.{role}", name)
        if cell.allocation.search is None or not cell.model.search:
            return replace(cell, texts=texts)
        key = (id(cell.model), id(cell.allocation))
        if key not in allocations:
            parameters = {**cell.model.search, **cell.allocation.parameters}
            allocations[key] = replace(cell.allocation, parameters=parameters)
        return replace(cell, allocation=allocations[key], texts=texts)

    # (id of a protocol, whether the model is shipped) -> cells
    groups: dict[tuple[int, bool], list[Cell]] = {}
    with Mistakes() as mistakes:
        for point in points:
            with mistakes.caught():
                cell = cell_at(point)
                groups.setdefault((id(cell.protocol), is_shipped(cell.model)), []).append(cell)
        study_requests: list[Request] = []
        for cells in groups.values():
            with mistakes.caught():
                settings = replace(config, suite=suite_of(config, cells[0].model, files))
                cell_benchmarks = benchmarks(settings, cells[0].protocol, files)
                study_requests.append((cells, [_hold_out(b, cells[0]) for b in cell_benchmarks]))
    return study_requests


def _with_routed_ratio(cell: Cell) -> Cell:
    """The cell with a ratio of routed experts that removes as many parameters as `ratio_of` says.
    UserError if routed experts have fewer, and if the model's size is not known."""
    if cell.ratio_of == "routed":
        return cell
    model, ratio = cell.model, cell.ratio
    size = size_of(model)
    if size is None:
        raise UserError(
            f"ratio_of=model: the size of model={model.name} is unknown: expected ratio_of=routed, "
            "or model.expected"
        )
    routed = size.moe_layers * size.experts * size.expert / size.parameters
    if ratio >= routed:
        raise UserError(
            f"ratio={ratio:g} with ratio_of=model: routed experts have {routed:.3f} of the "
            f"parameters of model={model.name}: expected less"
        )
    return replace(cell, ratio=round(ratio / routed, 9))


def _hold_out(benchmark: BenchmarkConfig, cell: Cell) -> BenchmarkConfig:
    """The benchmark. If it is a text and names none, it reads a part of the cell's calibration set,
    unless no set is named for a model that does not ship with moe_lab."""
    text = cell.calibration
    is_missing = text.is_default and not is_shipped(cell.model)
    if benchmark.data or benchmark.task or is_missing:
        return benchmark
    seed = cell.seed if text.seed is None else text.seed
    return replace(benchmark, held_out=replace(text, seed=seed))


def _text(setting: str, name: str, files: Files, changes: Document) -> CalibrationConfig:
    """The checked calibration set in the file `name`. `setting`: the setting that names the set,
    for messages. `changes`: setting of the set -> value that replaces the value in the file."""
    check_known(setting, name, files.names("calibration"))
    content = {**files.load([("calibration", name)])["calibration", name], **changes}
    text: CalibrationConfig = validated(
        CalibrationConfig, content, group="", origin=f"calibration={name}"
    )
    return text


def add_sources(text: CalibrationConfig, files: Files) -> CalibrationConfig:
    """The calibration set `text`. If the set is a mixture, its sources get their `settings`.
    UserError for an unknown source, for two sources with the same name, and for a source that is a
    mixture."""
    if not text.sources:
        return text
    sources: list[SourceConfig] = []
    for source in text.sources:
        changes = {}
        if source.path is not None:
            # the name is that of the user's file, so that one set can be used with several paths
            changes = {"name": valid_name(Path(source.path).stem), "path": source.path}
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
"""Key in `protocol.benchmarks`, in place of a benchmark: its fields apply to all benchmarks with
`data`."""


def benchmarks(config: Config, protocol: ProtocolConfig, files: Files) -> list[BenchmarkConfig]:
    """The benchmarks of `config.suite`, with the changes of the protocol and with the settings of
    `config` that apply to benchmarks. SettingsError with all unknown benchmarks in the suite and in
    the protocol, or else with all invalid fields in the protocol."""
    names = config.suite.benchmarks or []
    known = files.names("benchmark")
    with Mistakes() as mistakes:
        for name in protocol.benchmarks:
            with mistakes.caught():
                check_known(f"protocol={protocol.name}: benchmark", name, [EVERY, *known])
        for name in names:
            with mistakes.caught():
                check_known("benchmark", name, known)
        for group, shared in config.suite.shared_batches.items():
            for name in shared.benchmarks:
                with mistakes.caught():
                    check_known(f"suite.shared_batches.{group}: benchmark", name, known)
    contents = files.load(("benchmark", name) for name in names)
    with Mistakes() as mistakes:
        configs = []
        for (_, name), content in contents.items():
            with mistakes.caught():
                configs.append(_benchmark_config(name, content, config, protocol))
    return configs


def _benchmark_config(
    name: str, content: Document, config: Config, protocol: ProtocolConfig
) -> BenchmarkConfig:
    """The config of the benchmark `name`, from the `content` of its file, the changes of the
    protocol, and `config`."""
    changes: Document = {}
    if content.get("data"):
        changes |= protocol.benchmarks.get(EVERY, {})
    changes |= protocol.benchmarks.get(name, {})
    if "parameters" in changes:
        changes["parameters"] = {**content.get("parameters", {}), **changes["parameters"]}
    defaults = {"sampling": protocol.sampling, "thinking_tokens": protocol.thinking_tokens}
    origin = f"protocol={protocol.name}: benchmark {name}" if changes else f"benchmark={name}"
    benchmark: BenchmarkConfig = validated(
        BenchmarkConfig, {**defaults, **content, **changes}, "", origin
    )
    harness = harness_of(benchmark)
    path = config.suite.path
    if path is not None and not harness.reads_path:
        raise UserError(
            f"suite.path={path} is the text of suite=perplexity or the folder of "
            f"suite=bfcl, expected null with benchmark {name}, which has its own data"
        )
    for group, shared in config.suite.shared_batches.items():
        if name not in shared.benchmarks:
            continue
        if not benchmark.max_new_tokens:
            raise UserError(
                f"suite.shared_batches.{group}: benchmark {name} generates no texts: expected "
                "benchmarks with max_new_tokens above 0"
            )
        benchmark = replace(benchmark, shared_batches=group, batch_size=shared.batch_size)
    return replace(
        benchmark,
        limit=config.suite.limit,
        task=str(Path(path, benchmark.task)) if path else benchmark.task,
        root=config.data_root if benchmark.data else None,
        judge=config.judge if harness.judged else None,
        python=config.interpreters.get(benchmark.harness),  # type: ignore[call-overload]
    )
