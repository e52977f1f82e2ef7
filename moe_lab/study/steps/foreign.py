"""Results that other programs have measured, as steps that are imported and never computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from moe_lab.evaluation.items import Item, write_rows
from moe_lab.evaluation.run import write_results
from moe_lab.json_files import digest
from moe_lab.result_files import FOREIGN, ITEMS, SHAREABLE, Result, Sample
from moe_lab.study.step import Step
from moe_lab.study.steps.files import Files


@dataclass(frozen=True)
class ForeignTask:
    """The results of a model on one task of another program."""

    source: str
    """The program; "imported" for results that moe_lab has exported."""
    name: str
    """The program's name for the task."""
    results: Sequence[Result]
    samples: Sequence[Sample]
    items: Sequence[Item]
    cell: Mapping[str, Any]
    """Axes of the cell if moe_lab has exported the results, {} otherwise."""

    @property
    def shareable(self) -> bool:
        """Whether no shipped benchmark with one of these results forbids to show its items."""
        from moe_lab.evaluation.mirror import shipped_settings  # other steps do without it

        names = {result["benchmark"] for result in self.results}
        return all(
            settings.get("shareable", True)
            for settings in shipped_settings("benchmark").values()
            if names & settings["reports"].keys()
        )


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
        write_results(task.results, task.samples, protocol, files.out)
