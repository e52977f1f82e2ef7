"""Results that other programs have measured, as steps that are imported and never computed."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Self

from moe_lab.evaluation.items import write_rows
from moe_lab.evaluation.run import write_results
from moe_lab.json_files import digest
from moe_lab.result_files import FOREIGN, ITEMS, SHAREABLE
from moe_lab.study.step import Step
from moe_lab.study.steps.files import Files

if TYPE_CHECKING:
    from moe_lab.study.foreign import ForeignTask


class Foreign(Step):
    """The results of a model on a task of another program."""

    kind = FOREIGN
    small = True
    content: str
    """Digest of `task`."""
    task: ForeignTask
    runtime = ("task",)

    @classmethod
    def of(cls, task: ForeignTask) -> Self:
        """The step with the results `task`."""
        return cls(digest(asdict(task)), task)

    def label(self) -> str:
        return f"{self.task.source}-{self.task.name}"

    def work(self, files: Files) -> None:
        task = self.task
        protocol = {"harness": task.source, SHAREABLE: task.shareable}
        write_rows(task.items, files.out / ITEMS)
        write_results(task.results, task.samples, protocol, {}, files.out)
