"""Tasks of lm-eval, with data from a mirror, and files in lm-eval's format, with data beside the file.

They are built by lm-eval's public `TaskManager`. `datasets.load_dataset`, from which tasks get their data, is replaced
meanwhile, so that neither the hub nor a cache on disk nor the current folder is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
from lm_eval.tasks import TaskManager

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import mirror
from moe_lab.evaluation.harnesses import lm_eval_folders
from moe_lab.evaluation.suite import data_digest, data_files

_SEED = 1234
"""The default of lm-eval's own command line."""
_built: dict[str, dict[str, Any]] = {}


def tasks(benchmark: BenchmarkConfig) -> dict[str, Any]:
    """Name -> task, several for a group such as mmlu. Built once per process for the same data and settings.

    Examples are drawn as in a new process each time. UserError when the task's split is not the benchmark's, or when
    the task lacks examples to show.
    """
    settings = (benchmark.task, benchmark.parameters, benchmark.subset, benchmark.split, benchmark.shots)
    key = f"{data_digest(benchmark)} {settings} {benchmark.max_new_tokens}"
    if key not in _built:
        by_name = _stock(benchmark) if benchmark.data is not None else _own(benchmark)
        for name, task in by_name.items():
            _set(task, name, benchmark)
        _built[key] = by_name
    for task in _built[key].values():
        task.set_fewshot_seed(seed=_SEED)
    return _built[key]


def _stock(benchmark: BenchmarkConfig) -> dict[str, Any]:
    """A task or group of lm-eval; only its folder is indexed."""
    manager = TaskManager(include_path=str(lm_eval_folders.folder(benchmark)), include_defaults=False)
    subsets = mirror.subsets(benchmark)

    def from_mirror(path: str, name: str | None = None, **_: Any) -> _Splits:
        subset = benchmark.subset or name or "default"
        if subset not in subsets:
            raise UserError(
                f"benchmark {benchmark.name}: {benchmark.task} needs the subset {subset}, and the mirror "
                f"{mirror.folder(benchmark)} has {', '.join(sorted(subsets))}"
            )
        return _Splits(subsets[subset])

    return _load(manager, benchmark.task, from_mirror)


def _own(benchmark: BenchmarkConfig) -> dict[str, Any]:
    """A file in lm-eval's format; every split that it names is the JSON lines file beside it."""
    definition, items = data_files(benchmark)
    manager = TaskManager(include_defaults=False)
    return _load(manager, str(definition), lambda *_, **__: _Splits({}, otherwise=items))


def _load(manager: TaskManager, name: str, load_dataset: Callable[..., Mapping[str, Any]]) -> dict[str, Any]:
    with patch.object(datasets, "load_dataset", load_dataset):
        by_name: dict[str, Any] = manager.load([name])["tasks"]
    return by_name


class _Splits(dict[str, Any]):
    """Splits of a data set, each read at its first use; one that the mirror lacks is empty."""

    def __init__(self, files: Mapping[str, list[Path]], otherwise: Path | None = None) -> None:
        super().__init__()
        self.files, self.otherwise = files, otherwise

    def __missing__(self, split: str) -> Any:
        files = [self.otherwise] if self.otherwise else self.files.get(split, [])
        self[split] = datasets.Dataset.from_list([row for file in files for row in mirror.read_rows(file)])
        return self[split]


def _set(task: Any, name: str, benchmark: BenchmarkConfig) -> None:
    split = task.config.test_split or task.config.validation_split
    if benchmark.split is not None and split != benchmark.split:
        raise UserError(f"benchmark {benchmark.name}: split={benchmark.split}, but {name} asks {split}")
    if benchmark.shots or benchmark.data is not None or task.config.num_fewshot is None:
        task.set_config(key="num_fewshot", value=benchmark.shots)
    if task.config.num_fewshot and not len(task.fewshot_docs()):
        raise UserError(
            f"benchmark {benchmark.name}: shots={benchmark.shots}, but {name} has no examples to show: its data has "
            f"only the split {split}"
        )
    if benchmark.max_new_tokens and task.OUTPUT_TYPE == "generate_until":
        task.set_config(key="generation_kwargs", value={"max_gen_toks": benchmark.max_new_tokens}, update=True)
