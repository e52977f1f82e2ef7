"""What a store says of how its numbers were measured: tokens, searches, items, harnesses, judges."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import pandas as pd

from analysis.frames import records
from analysis.load.study import Study
from analysis.published.numbers import ASKED
from analysis.published.verdicts import Evaluation


class Facts:
    """Looks things up in a study, each file once. None stands for what the store does not say."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self._documents: dict[tuple[str, str], Mapping[str, Any]] = {}

    def axes(self, cell: int) -> Mapping[str, Any]:
        """The axes of a cell and the folders of its steps."""
        return self._cells[cell]

    def tokens(self, cell: Mapping[str, Any]) -> int | None:
        """Slots of the calibration pass of a cell, gaps between documents counted."""
        report = self.study.calibrations.get(f"{cell['calibration']}@{cell['model']}", {})
        return int(report["rows"]) * int(report["length"]) if {"rows", "length"} <= set(report) else None

    def search(self, cell: int) -> tuple[str | None, int | None] | None:
        """On what and for how many generations the cell's allocation was searched; None for one that was not."""
        if cell not in self._generations:
            return None
        plan = self._document(str(self.study.cells.loc[cell, "plan_folder"]), "plan.json")
        return (plan.get("provenance") or {}).get("search"), self._generations[cell]

    def evaluation(self, cell: int, benchmark: str) -> Evaluation | None:
        """How a benchmark was measured for a cell; None when it was not."""
        row = self._results.get((cell, benchmark))
        if row is None:
            return None
        protocol = self._document(str(row["folder"]), "result.json").get("protocol") or {}
        known = {**protocol, **(protocol.get("parameters") or {}), "judge": (protocol.get("judge") or {}).get("model")}
        return Evaluation(
            benchmark=benchmark,
            n=int(row["n"]),
            expected=_whole(row["expected"]),
            metric=str(row["metric"]),
            asked={word: _word(known[word]) for word in ASKED if known.get(word) is not None},
        )

    @cached_property
    def _cells(self) -> dict[int, dict[str, Any]]:
        return dict(zip(self.study.cells.index.astype(int), records(self.study.cells), strict=True))

    @cached_property
    def _results(self) -> dict[tuple[int, str], dict[str, Any]]:
        return {(int(row["cell"]), str(row["benchmark"])): row for row in records(self.study.results)}

    @cached_property
    def _generations(self) -> dict[int, int | None]:
        return {int(row["cell"]): _whole(row["generations"]) for row in records(self.study.searches)}

    def _document(self, name: str, file: str) -> Mapping[str, Any]:
        if (name, file) not in self._documents:
            folder = self.study.reader.folder(name)
            self._documents[name, file] = (self.study.reader.json(folder, file) if folder else None) or {}
        return self._documents[name, file]


def _word(value: Any) -> str:
    """As the published files write it: true, 2048, openai/gpt-oss-120b."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _whole(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)
