"""The report of a study: one page with its tables, figures, missing results and provenance."""

from __future__ import annotations

import errno
import json
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import TypeVar

from moe_lab import progress
from moe_lab.analysis import names
from moe_lab.analysis.differences import page_answers, page_plans
from moe_lab.analysis.load.reader import Gap
from moe_lab.analysis.load.settings import removed_noun
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.names import capitalised, count
from moe_lab.analysis.outputs.captions import pass_setup, run_setup, score_setup
from moe_lab.analysis.published.numbers import TABLES, numbers, summary
from moe_lab.analysis.registry import Item, Results, find, outputs
from moe_lab.analysis.render import charts, page, table, vega
from moe_lab.analysis.render.charts import MENUS, Figure
from moe_lab.analysis.render.page import Chapter, Page
from moe_lab.analysis.render.table import Table
from moe_lab.analysis.stats.ranking import headline, overview, ranking_text
from moe_lab.errors import DISK_FULL, reason_in

T = TypeVar("T")
UNWRITABLE = (*DISK_FULL, errno.EROFS, errno.EACCES)
"""Error numbers that mean that the output folder cannot be written."""
FAILED = "failed"
"""Subfolder of the output folder with a traceback, NAME.log, for each output that failed."""


class Publisher:
    """Writer of a study's outputs into the folder `out`. Figures are written in Vega-Lite and in
    `figure_format`, unless it is None.

    An output that fails does not stop the others; its traceback is in OUT/failed/NAME.log.
    """

    def __init__(self, results: Results, out: Path, figure_format: str | None = None) -> None:
        self.results = results
        self.out = out
        self.figure_format = figure_format
        self.failed: list[str] = []
        """Names of the outputs, tables and figures that failed."""

    def attempt(self, name: str, make: Callable[[], T]) -> T | None:
        """Call `make` and return its result. If `make` raises an error, record a gap and return
        None. Errors in UNWRITABLE are raised again, because all outputs would fail with them.

        name: name of an output, or of one of its tables and figures.
        """
        log = self.out / FAILED / f"{name}.log"
        try:
            result = make()
        except Exception as error:
            if isinstance(error, OSError) and error.errno in UNWRITABLE:
                raise
            self.failed.append(name)
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(traceback.format_exc(), encoding="utf-8")
            self.results.study.reader.record_gap(
                f"could not be made ({reason_in(error)}), traceback in {FAILED}/{name}.log", name
            )
            return None
        if name not in self.failed:
            log.unlink(missing_ok=True)  # of an earlier report
        return result

    def publish(self, requested: Iterable[str]) -> tuple[dict[str, list[Item]], list[Path]]:
        """Make the outputs with the names `requested` and write their files. The output `gaps` is
        made last, because making another output can add gaps.

        Returns (name of an output -> its tables and figures that were written, paths of all files).
        """
        items_by_output: dict[str, list[Item]] = {}
        paths: list[Path] = []
        # each output once, even if it is requested by several of its aliases
        output_names = dict.fromkeys(find(name).name for name in requested)
        for name in sorted(output_names, key=lambda name: name == GAPS):
            items_by_output[name] = []
            for item in self.attempt(name, partial(find(name).items, self.results)) or []:
                files = self.attempt(item.name, partial(self._write, item))
                if files:
                    items_by_output[name].append(item)
                    paths += files
            if len(output_names) > 1:
                progress.update(len(items_by_output), len(output_names), "tables and figures")
        return items_by_output, paths

    def _write(self, item: Item) -> list[Path]:
        """Write a table into OUT/tables, or a figure into OUT/figures; returns the files' paths."""
        if isinstance(item, Table):
            return table.write(item, self.out / "tables")
        chart = self.out / "figures" / f"{item.name}.json"
        charts.write(item, chart)
        if self.figure_format is None:
            return [chart]
        # not with_suffix, since names have dots
        drawn = chart.with_name(f"{item.name}.{self.figure_format}")
        drawn.write_bytes(vega.draw(chart, self.figure_format))
        return [drawn, chart]


PAGE = "report.html"
SUMMARY = "summary.txt"
"""File with the rankings and remarks as text."""
GAPS = "gaps"
"""Name of the output that lists missing results."""
PUBLISHED = "published"
"""Anchor of the chapter that compares the study with the papers."""
ItemsByOutput = Mapping[str, Sequence[Item]]
"""Name of an output of the page -> its written tables and figures."""


FEW_EVALUATIONS = 500
"""Evaluations whose answers are read in less time than another process needs to start."""


def write_report(publisher: Publisher) -> Path:
    """Write all tables and figures of a study, the page that shows them, and the summary (rankings
    and notes as text); returns the page's path.

    An output that fails is a gap on the page, with its traceback in OUT/failed.
    """
    results = publisher.results
    answers = _start_reading_answers(results.study)
    # the output `gaps` is left for `_chapters`, which publishes it when all gaps are known
    shown = [name for name, output in outputs().items() if output.chapter and name != GAPS]
    items_by_output, _ = publisher.publish(shown)
    path = publisher.out / PAGE
    text = publisher.attempt(SUMMARY, lambda: ranking_text(results.rankings)) or ""
    page.write(_page(publisher, items_by_output, answers), path, vega.library())
    summary = "\n\n".join(filter(None, [text, "\n".join(results.study.notes)]))
    path.with_name(SUMMARY).unlink(missing_ok=True)
    if summary:
        path.with_name(SUMMARY).write_text(f"{summary}\n", encoding="utf-8")
    return path


AnswersAndGaps = tuple[dict[str, str], list[Gap]]
"""See `page_answers`."""


def _start_reading_answers(study: Study) -> Callable[[], AnswersAndGaps]:
    """A function that returns the `page_answers` of a study. Those of many evaluations, which take
    a fifth of the time of a report, are read by another process from now on."""
    read = partial(page_answers, study.results, study.store)
    if len(study.origins) <= FEW_EVALUATIONS:
        return read
    spawning = get_context("spawn")
    receiver, sender = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_send, args=(read, sender), daemon=True)
    resource_tracker.ensure_running()  # otherwise `start` does it, and unblocks the signal
    # in a thread, because `start` returns after the imports of the new process
    Thread(target=_start, args=(process, sender)).start()

    def received() -> AnswersAndGaps:
        try:
            answers: AnswersAndGaps = receiver.recv()
        except EOFError:  # the process was killed, or has failed as this one will
            return read()
        return answers

    return received


def _start(process: BaseProcess, sender: Connection) -> None:
    """Start a process that inherits a block of SIGINT, so that Ctrl-C waits for its imports."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    with suppress(OSError), sender:  # such as a broken pipe, if the process was killed
        process.start()
    # only the process has `sender` now, so `recv` ends with the process


def _send(read: Callable[[], AnswersAndGaps], sender: Connection) -> None:
    """Send the result of `read`. Ctrl-C ends the process without a stack trace."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    sender.send(read())


FIRST = ("ranking", "benchmark_groups", "winners")
"""Outputs whose figures are at the top of the page."""


def _page(
    publisher: Publisher, items_by_output: ItemsByOutput, answers: Callable[[], AnswersAndGaps]
) -> Page:
    """The page. answers: see `_start_reading_answers`."""
    results = publisher.results
    study = results.study

    def answers_of_benchmarks() -> dict[str, str]:
        documents, gaps = answers()
        for gap in gaps:
            study.reader.record_gap(*gap)
        return documents

    moment = datetime.fromtimestamp(float(study.document["created"]), UTC)
    first = [
        item for name in FIRST for item in items_by_output.get(name, ()) if isinstance(item, Figure)
    ]
    return Page(
        # the name of several studies that are read as one is "first+second"
        title=names.capitalised(names.enumeration(study.name.replace("_", " ").split("+"))),
        verdict=publisher.attempt(PAGE, lambda: headline(results.rankings)) or "",
        lead=what_was_run(study),
        first=first,
        plans=publisher.attempt("plans", partial(page_plans, study)) or {},
        answers=publisher.attempt("answers", answers_of_benchmarks) or {},
        chapters=_chapters(publisher, items_by_output, first),
        menus=_menus(results),
        hidden=[setup(study) for setup in (score_setup, pass_setup, run_setup)],
        footer=f"Made by moe_lab {study.document.get('moe_lab', '')} from {study.name} in "
        f"{study.store.resolve()}, run on {moment:%-d %B %Y, %H:%M} UTC.",
    )


def _menus(results: Results) -> dict[str, list[str]]:
    """Menu -> its values, for the axes in which the ranked plans differ."""
    if not results.rankings:
        return {}
    plans = results.scored_plans
    values = {menu: list(plans[menu].loc[lambda text: text != ""].unique()) for menu in MENUS}
    return {menu: options for menu, options in values.items() if len(options) > 1}


def _chapters(
    publisher: Publisher, items_by_output: ItemsByOutput, first: Sequence[Item]
) -> list[Chapter]:
    """All chapters of the page, in their order. first: figures that are at the top of the page
    instead."""
    results = publisher.results
    study = results.study
    items: dict[str, list[Item]] = {}
    for name, items_of_output in items_by_output.items():
        shown = [item for item in items_of_output if item not in first]
        items.setdefault(outputs()[name].chapter, []).extend(shown)
    published = publisher.attempt(PUBLISHED, partial(published_tables, results)) or []
    items[PUBLISHED] = [table for table in published if table.frame["Deviation"].notna().any()]
    gap_items, _ = publisher.publish([GAPS])
    texts = {
        RANKING: overview(results.rankings),
        PUBLISHED: summary([verdict for table in published for verdict in table.frame["Verdict"]]),
        GAPS: [completeness(study), *study.notes],
        PROVENANCE: [setup(study) for setup in (score_setup, pass_setup)],
    }
    items |= gap_items
    facts = {PROVENANCE: _facts(study)}
    return [
        Chapter(anchor, title, texts.get(anchor, ()), items.get(anchor, ()), facts.get(anchor, {}))
        for anchor, title in CHAPTERS.items()
    ]


RANKING = "ranking"
PROVENANCE = "provenance"
CHAPTERS = {
    RANKING: "Ranking by average",
    "winners": "Leading criterion by task and calibration set",
    "cost": "Accuracy versus parameters, FLOPs, storage and time",
    "channels": "Channel criteria and channel budgets",
    "recovery": "Recovery: quantisation and fine-tuning",
    "weights": "Criteria that read weights alone",
    "ranks": "Scores and ranks",
    "search": "Searched allocations versus uniform",
    "task": "Task-specific calibration",
    "benchmarks": "All benchmarks, and degeneration of texts",
    "overlap": "Overlap of pruned experts across calibration sets",
    "coverage": "Tokens per expert in calibration",
    "inside": "Hidden states of pruned models",
    "attribution": "Attributions by layer and channel",
    "criteria": "Criteria: definitions, inputs and cost",
    "memory": "Architectures and loading memory",
    PUBLISHED: "Comparison with published numbers",
    GAPS: "Missing results",
    PROVENANCE: "Provenance and files",
}
"""Chapter of outputs -> its title, in the order of the page."""


def published_tables(results: Results) -> list[Table]:
    """The tables that compare the study with the papers; [] if the papers print nothing of its
    models, because the number of a model that stands in for another cannot be compared."""
    if {number.key[0] for number in numbers()}.isdisjoint(results.study.cells["model"]):
        return []
    items = [item for name in TABLES for item in find(f"{name}.published").items(results)]
    return [item for item in items if isinstance(item, Table)]


ORIGINS = {
    "moe_lab": "moe_lab",
    "Commit": "commit",
    "Computed on": "host",
    "Machine": "machine",
    "Python": "python",
}
"""Label on the page -> column of `Study.origins`."""


def _facts(study: Study) -> dict[str, str]:
    """Label -> text on the provenance of a study."""
    config = study.document.get("config")
    libraries = study.libraries.items()
    return {
        "Study": study.name,
        "Store": str(study.store.resolve()),
        **{
            label: ", ".join(map(str, study.origins[column].dropna().unique()))
            for label, column in ORIGINS.items()
        },
        "Libraries": ", ".join(f"{name} {'/'.join(texts)}" for name, texts in libraries),
        **{
            f"Calibration {calibration} of {model}": ", ".join(
                f"{tokens:,} tokens of {source}"
                for source, tokens in (report.get("valid_tokens") or {}).items()
            )
            for (model, calibration), report in study.calibrations.items()
        },
        "Configuration": json.dumps(config, indent=2) if config else "",
    }


def what_was_run(study: Study) -> str:
    """Two sentences on what a study pruned and evaluated."""
    pruned = study.pruned_cells
    sizes = study.results["n"]  # numbers of items
    items = "no"
    if len(sizes):
        items = names.limits(sizes, "{:g}")
    # at ratio 0 nothing is removed, the model is only recovered
    is_smaller = pruned["ratio"] > 0
    kind = "pruned model" if is_smaller.all() else "model"
    shares = pruned[is_smaller].sort_values("ratio", kind="stable")["removed_text"].unique()
    removed = names.enumeration(shares) or "none"
    models = names.enumeration(dict.fromkeys(study.cells["model"]))
    criteria = count(pruned["criterion"].nunique(), "criterion", "criteria")
    benchmarks = count(study.results["benchmark"].nunique(), "benchmark")
    return capitalised(
        f"{criteria} chose which {removed_noun(pruned)} of {models} to remove "
        f"({removed}). That gave {count(len(pruned), kind)}, each evaluated like the unpruned one "
        f"on {benchmarks} of {items} items."
    )


def completeness(study: Study) -> str:
    """A sentence that says whether results are missing."""
    if not study.gaps:
        return "Nothing is missing: every requested result is here."
    return capitalised(
        f"{count(len(study.gaps), 'gap')}: some results are missing and are shown as gaps, never "
        "as zero."
    )
