"""The grid of a study: cells, which are the points in the product of axes, and the benchmarks of
the cells. Each choice is composed once."""

from __future__ import annotations

import itertools
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
from moe_lab.paths import PREFIX, check_name, is_path, name_of_path, valid_name


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
    """Access to the files of configuration groups."""

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
    file_names: Mapping[str, str | None] = field(default_factory=dict)
    """Group -> name of the file from which the content in `composed` comes, or None."""
    command_lists: dict[str, Sequence[Any]] = field(default_factory=dict)
    """Axis, or setting in a group -> list of values on the command line, which replaces the list in
    a file."""
    overrides: list[tuple[str, Any]] = field(default_factory=list)
    """(setting in a group, value) from the command line. The value applies to all choices of the
    group."""
    lists: Sequence[Document] = ()
    """Axis -> list of values, for the first grid and for each further grid. For an axis without a
    list, a further grid has the list of the first grid."""


# ---- the product of the axes


def product_cells(draft: Draft, files: Files) -> list[Cell]:
    """The cells of all grids, without repetitions, and without the texts that `requests` adds.
    Raises SettingsError with all mistakes."""
    axes = _Axes(draft, files)
    cells: dict[Cell, None] = {}
    with Mistakes() as mistakes:
        grids = _grids(draft, mistakes)
        for lists, axis in itertools.product(grids, GROUPS):
            lists[axis] = axes.names(axis, lists, mistakes)
        # Load all files in one call, because each call takes time. `files` keeps their contents.
        with mistakes.caught():
            files.load(axes.files_of(grids))
        for lists in grids:
            values: dict[str, list[Any]] = {}
            for axis in AXES:
                with mistakes.caught():
                    values[axis] = axes.values(axis, lists)
            if len(values) == len(AXES):  # no axis has mistakes
                for point in itertools.product(*values.values()):
                    cells[Cell(**dict(zip(AXES, point, strict=True)))] = None
    return list(cells)


Lists = dict[str, Sequence[Any]]
"""Axis, or setting in a group such as model.top_k -> list of values."""


def _grids(draft: Draft, mistakes: list[str]) -> list[Lists]:
    """The lists of each grid, changed by the command line. For each invalid list, a sentence is
    added to `mistakes`.

    The lists of the first grid also apply to further grids. If the command line has a list of a
    group, a further grid keeps only those of its own names that match a name in that list. It is
    left out if no name matches."""
    overridden = dict(draft.overrides)
    grids: list[Lists] = []
    first: Lists = {}
    for number, content in enumerate(draft.lists):
        # the lists of the first grid are in the setting `grid`, those of further grids in `more`
        own = _valid_lists(content, "more" if number else "grid", mistakes)
        first = first if number else own
        file_lists = {**first, **own}
        lists = {key: values for key, values in file_lists.items() if key not in overridden}
        lists |= draft.command_lists
        narrowed = own.keys() & draft.command_lists.keys() & set(GROUPS) if number else set()
        for axis in narrowed:
            patterns = [_pattern(name) for name in draft.command_lists[axis]]
            lists[axis] = [
                name
                for name in own[axis]
                if any(fnmatchcase(str(name), pattern) for pattern in patterns)
            ]
        if all(lists[axis] for axis in narrowed):
            grids.append(lists)
    return grids


def _valid_lists(lists: Any, field: str, mistakes: list[str]) -> Lists:
    """The lists of a grid without invalid and empty lists. For each invalid list, a sentence is
    added to `mistakes`. `field`: `grid` or `more`, the setting that has the lists."""
    if not isinstance(lists, Mapping):
        mistakes.append(f"{field}={lists}: expected lists by axis, such as {{ratio: [0.25, 0.5]}}")
        return {}
    valid_lists: Lists = {}
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


def is_variant(group: str, name: str) -> bool:
    """Whether `name`, which no file of the group has, is registered by a module of
    moe_lab.papers."""
    return group in REGISTRIES and name in REGISTRIES[group]


def _pattern(name: Any) -> str:
    """`name` as a pattern for fnmatch. The name glob(PATTERN) gives PATTERN."""
    return re.sub(r"^glob\((.*)\)$", r"\1", str(name))


@dataclass
class _Axes:
    """The values of each axis of a study's grids. A value of a group is an object, such as a
    ModelConfig; it is called a choice. Its name is that of a file of the group, or a path. Choices
    with the same name and the same settings are the same object."""

    draft: Draft
    files: Files
    choices: dict[tuple[str, str, str], Any] = field(default_factory=dict)
    """(axis, name, settings as text) -> the choice that `_choice` returned for them."""

    def _composed_name(self, axis: str) -> str:
        """Name of the file of a group in the composed configuration; "" if there is none."""
        return self.draft.file_names.get(axis) or ""

    def _list_setting(self, axis: str) -> str:
        """The setting that lists the values of an axis, for messages."""
        return axis if axis in self.draft.command_lists else f"grid.{axis}"

    def names(self, axis: str, lists: Lists, mistakes: list[str]) -> list[str]:
        """Names of the choices of a group that match its list of names, or else the name in the
        composed configuration. For each name that nothing matches, a sentence is added to
        `mistakes`."""
        if not lists.get(axis):
            return [self._composed_name(axis)]
        available = self.files.names(axis)
        names: list[str] = []
        for entry in lists[axis]:
            pattern = _pattern(entry)
            matches = [name for name in available if fnmatchcase(name, pattern)]
            if matches:
                names += matches
            elif self._file(axis, pattern):
                names.append(pattern)
            else:
                known = {*available, *REGISTRIES.get(axis, ())}
                mistakes.append(str(unknown_name_error(self._list_setting(axis), pattern, known)))
        return names

    def _file(self, axis: str, name: str) -> str:
        """Name of the file with the settings of the choice `name` of a group; "" if there is
        none."""
        if name in self.files.names(axis) or is_variant(axis, name):
            return name
        return PATH_FILES.get(axis, "") if is_path(name) else ""

    def files_of(self, grids: Iterable[Lists]) -> Iterator[Choice]:
        """(group, name) of the files that `grids` and the composed configuration name."""
        for axis, lists in itertools.product(GROUPS, grids):
            for name in (self._composed_name(axis), *lists[axis]):
                if file := self._file(axis, name):
                    yield axis, file

    def _file_content(self, axis: str, name: str) -> Document:
        """A copy of the settings in the file of the choice `name`; {} if there is no file."""
        file = self._file(axis, name)
        if not file:
            return {}
        content = deepcopy(self.files.load([(axis, file)])[axis, file])
        if file != name:
            content |= {"path": name, "name": name_of_path(name)}
        return content

    def values(self, axis: str, lists: Lists) -> list[Any]:
        """The checked values of an axis: of a group, one choice for each name and each combination
        of the listed values of settings. SettingsError with all mistakes."""
        values = []
        with Mistakes() as mistakes:
            if axis in GROUPS:
                settings = {key: lists[key] for key in lists if key.startswith(f"{axis}.")}
                for name, *numbers in itertools.product(lists[axis], *settings.values()):
                    with mistakes.caught():
                        changes = dict(zip(settings, numbers, strict=True))
                        values.append(self._choice(axis, name, changes))
            elif axis in lists:
                for value in lists[axis]:
                    with mistakes.caught():
                        values.append(validated(AXIS_TYPES[axis], value, self._list_setting(axis)))
            else:
                only_value = self.draft.composed.get(axis, default_of(CellConfig, axis))
                values.append(validated(AXIS_TYPES[axis], only_value, axis))
        return values

    def _choice(self, axis: str, name: str, settings: Document) -> Any:
        """The choice `name` of a group. `settings`: setting, such as model.top_k -> its value."""
        key = (axis, name, str(settings))
        if key not in self.choices:
            self.choices[key] = self._compose(axis, name, settings)
        return self.choices[key]

    def _compose(self, axis: str, name: str, settings: Document) -> Any:
        """A new, checked choice from the arguments of `_choice`. Its settings are those in its
        file, with the changes that the composed configuration has made to its own file of the
        group, and with those of the command line and of the grid."""
        composed_name = self._composed_name(axis)
        composed = self.draft.composed.get(axis) or {}
        # no setting names a calibration set
        is_unset = axis == "calibration" and name == composed_name and "name" not in composed
        content = {axis: self._file_content(axis, SHIPPED_TEXT if is_unset else name)}
        base = self._file_content(axis, composed_name)
        # a choice that is composed without a file has no changes that other choices get
        if not base and name != composed_name and "name" in composed:
            base = composed
        changes = itertools.chain(
            _changes({axis: base}, {axis: composed}), self.draft.overrides, settings.items()
        )
        for setting, value in changes:
            assign(content, setting, value)
        origin = f"{axis}={name}" if name != composed_name else ""
        choice = validated(AXIS_TYPES[axis], content[axis], axis, origin)
        if isinstance(choice, CalibrationConfig):
            check_name("calibration.name", choice.name)
            is_default = is_unset and choice.path.startswith(PREFIX)
            choice = add_sources(replace(choice, is_default=is_default), self.files)
        # registered functions keep their names, and ModelConfig appends the value of top_k itself
        if not settings or axis in REGISTRIES or f"{axis}.top_k" in settings:
            return choice
        # such as _rank8 for the setting rank
        endings = [f"_{setting.rpartition('.')[2]}{value}" for setting, value in settings.items()]
        return replace(choice, name=valid_name("".join([choice.name, *endings])))


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


def requests(config: Config, cells: Iterable[Cell], files: Files) -> list[Request]:
    """The `cells` with their texts and benchmarks. A request has the cells of one protocol, either
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

    def completed(cell: Cell) -> Cell:
        """The cell with its texts and the search parameters of its model."""
        cell = _with_routed_ratio(cell)
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
        for unfinished_cell in cells:
            with mistakes.caught():
                cell = completed(unfinished_cell)
                groups.setdefault((id(cell.protocol), is_shipped(cell.model)), []).append(cell)
        study_requests: list[Request] = []
        for group in groups.values():
            first = group[0]
            with mistakes.caught():
                settings = replace(config, suite=suite_of(config, first.model, files))
                group_benchmarks = benchmarks(settings, first.protocol, files)
                study_requests.append((group, [_hold_out(b, first) for b in group_benchmarks]))
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
        task=str(Path(path, benchmark.task)) if path is not None else benchmark.task,
        root=config.data_root if benchmark.data else None,
        judge=config.judge if harness.judged else None,
        python=config.interpreters.get(benchmark.harness),  # type: ignore[call-overload]
    )
