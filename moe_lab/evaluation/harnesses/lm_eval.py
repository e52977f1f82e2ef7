"""lm-eval's tasks, its own and those in files of its format, on moe_lab's data, generation and
likelihoods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, user_errors
from moe_lab.evaluation import Policy
from moe_lab.evaluation.adapters.lm_eval_files import definition_files, task_folder
from moe_lab.evaluation.harness import Graded, Harness
from moe_lab.evaluation.items import Answer, Item


class LmEval(Harness):
    """lm-eval, which evaluates likelihoods as well as generated texts."""

    package = "lm-eval"
    question_parameters = ("folder", "definition", "fewshot_seed")
    numeric_parameters: Mapping[str, float] = {"fewshot_seed": 0}
    least_new_tokens = 0
    shows_examples = True
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

    def hashed_files(self, benchmark: BenchmarkConfig) -> tuple[list[Path], dict[str, str]]:
        """(files, versions), as `Harness.hashed_files`. `files`: the definition of the task, all
        files that the definition uses, and last the file of the items."""
        *task_files, items_file = self.data_files(benchmark)
        if not task_files:
            return [items_file], {}
        files, versions = definition_files(*task_files)
        return [*files, items_file], versions

    def check_data(self, benchmark: BenchmarkConfig) -> None:
        """Do as `Harness.check_data`, and check the definition of the task."""
        super().check_data(benchmark)
        self.hashed_files(benchmark)  # raises UserError for a definition that cannot be read
        definition = benchmark.parameters.get("definition", {})
        if not isinstance(definition, dict):
            raise UserError(
                f"benchmark {benchmark.name}: parameters.definition={definition}: expected a task "
                "in lm-eval's format, such as {doc_to_text: question}"
            )

    def setting_errors(self, benchmark: BenchmarkConfig) -> Iterator[str]:
        """Do as `Harness.setting_errors`, and refuse a chat template for a task of lm-eval itself
        that only computes likelihoods."""
        yield from super().setting_errors(benchmark)
        # tasks of lm-eval itself have `data`
        if benchmark.chat and benchmark.data is not None and not benchmark.max_new_tokens:
            yield (
                f"benchmark {benchmark.name}: chat=true with max_new_tokens=0: expected "
                "chat=false, as a chat template would move the answers whose likelihoods are "
                "computed"
            )

    def further_requirements(self, benchmark: BenchmarkConfig, policy: Policy) -> Iterator[str]:
        """Check that the installed lm-eval has the task."""
        if benchmark.data is not None:  # a task of lm-eval itself
            yield from user_errors(task_folder, benchmark)


HARNESS = LmEval()
