"""lm-eval's tasks, its own and those in files of its format, on moe_lab's data, generation and
likelihoods."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, check_known, reason_in, unknown_name_error, user_errors
from moe_lab.evaluation import Policy
from moe_lab.evaluation.harness import Graded, Harness
from moe_lab.evaluation.items import Answer, Item

_TASK = re.compile(r"^[\"']?(?:task|group)[\"']?: *[\"']?([\w-]+)[\"']? *$", re.MULTILINE)
"""The name of a task or group in lm-eval's own definition files."""
_OTHER_FILES = ("class", "group", "include", "use_prompt")
"""Fields of a definition that name code, other tasks or a file."""


class LmEval(Harness):
    """lm-eval, which evaluates likelihoods as well as generated texts."""

    package = "lm-eval"
    question_parameters = ("folder", "definition", "fewshot_seed")
    numeric_parameters: Mapping[str, float] = {"fewshot_seed": 0}
    max_new_tokens = None
    shots = None
    votes = True

    def items(self, benchmark: BenchmarkConfig) -> Iterator[Item]:
        """Yield the items of lm-eval's task or group of tasks."""
        from moe_lab.evaluation.adapters import lm_eval

        return lm_eval.items(benchmark)

    def grade(
        self, answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy
    ) -> Graded:
        """Grade the answers as lm-eval does."""
        from moe_lab.evaluation.adapters import lm_eval

        return lm_eval.grade(answers, benchmark)

    def paths(self, benchmark: BenchmarkConfig) -> list[Path]:
        """The files of the task's definition and items; with parameters.definition, only the file
        of the items."""
        (task_path,) = super().paths(benchmark)
        if "definition" in benchmark.parameters:
            return [task_path]  # benchmark.task is then the file of the items
        return [task_path, task_path.with_suffix(".jsonl")]

    def check_data(self, benchmark: BenchmarkConfig) -> None:
        """Do as `Harness.check_data`, and check the definition of the task."""
        super().check_data(benchmark)
        self.definition(benchmark)

    def definition(self, benchmark: BenchmarkConfig) -> dict[str, Any]:
        """The definition of a task that is not lm-eval's own: parameters.definition, or the file
        benchmark.task. UserError for a definition that names code or another file, because only the
        definition and the file of the items identify the items."""
        source = f"benchmark {benchmark.name}: parameters.definition"
        definition = benchmark.parameters.get("definition")
        if "definition" not in benchmark.parameters:
            file = self.data_files(benchmark)[0]
            source = str(file)
            try:
                # in C: every step with such a task reads its definition
                definition = yaml.load(file.read_bytes(), yaml.CSafeLoader)
            except yaml.YAMLError as error:
                raise UserError(
                    f"{source} cannot be read ({reason_in(error)}): expected YAML "
                    "without code, such as !function"
                ) from None
        if not isinstance(definition, dict):
            raise UserError(
                f"{source}={definition}: expected a task in lm-eval's format, such as "
                "{doc_to_text: question}"
            )
        for name in _OTHER_FILES:
            if name in definition:
                raise UserError(
                    f"{source} has {name}={definition[name]}: expected one task without code and "
                    "without other files, which would not identify its items"
                )
        # `task` in the definition may be a list of tasks
        return {"test_split": "test", **definition, "task": benchmark.name}

    def setting_errors(self, benchmark: BenchmarkConfig) -> Iterator[str]:
        """Do as `Harness.setting_errors`, and refuse a chat template for a task that only computes
        likelihoods."""
        yield from super().setting_errors(benchmark)
        if benchmark.chat and not benchmark.max_new_tokens:
            yield (
                f"benchmark {benchmark.name}: chat=true with max_new_tokens=0: expected "
                "chat=false where likelihoods are computed, as a chat template would move the "
                "answers, or max_new_tokens for texts"
            )

    def further_requirements(self, benchmark: BenchmarkConfig, policy: Policy) -> Iterator[str]:
        """Check that the installed lm-eval has the task."""
        if benchmark.data is not None:  # a task of lm-eval itself
            yield from user_errors(self.task_folder, benchmark)

    def task_folder(self, benchmark: BenchmarkConfig) -> Path:
        """The folder of lm-eval with the definition of benchmark.task: parameters.folder or, by
        default, the folder that is named like the task. UserError when the folder or the task does
        not exist."""
        package = find_spec("lm_eval")
        # if lm-eval is not installed, `Harness.missing_requirements` has reported this before
        assert package is not None and package.origin is not None
        root = Path(package.origin).parent / "tasks"
        name = str(benchmark.parameters.get("folder", benchmark.task))
        folder = root / name
        # lm-eval would need ten seconds to index the 14,000 files in `root`
        if not folder.is_dir() or folder == root:
            parent = folder.parent if folder.parent.is_dir() and folder != root else root
            folder_names = [
                str(path.relative_to(root)) for path in parent.iterdir() if path.is_dir()
            ]
            raise unknown_name_error(
                f"benchmark {benchmark.name}: parameters.folder", name, folder_names
            )
        task_names: set[str] = set()
        for file in folder.rglob("*.yaml"):
            task_names.update(_TASK.findall(file.read_text(encoding="utf-8")))
        check_known(f"benchmark {benchmark.name}: task", benchmark.task, task_names)
        return folder


HARNESS = LmEval()
