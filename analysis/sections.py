"""The chapters of the page: which sentences, tables and figures stand where, and how the numbers came about."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from analysis import findings
from analysis.catalogue import Material
from analysis.load.settings import versions
from analysis.load.study import Study
from analysis.made import Output
from analysis.outputs import convergence
from analysis.outputs.recovery import recovery_findings
from analysis.outputs.winners import winner_views
from analysis.render.page import Section
from analysis.stats.comparison import Comparison


def sections(material: Material, made: Mapping[str, Sequence[Output]]) -> list[Section]:
    """All chapters but that about gaps, in the order of the page, empty ones included.

    made: all outputs by the catalogue's names. Sentences that cannot be made are gaps, as outputs are.
    """
    study = material.study
    effect = _said(material, "task", findings.calibration_effect)
    recovery = _said(material, "recovery", lambda one: recovery_findings(study, one))
    agreed = material.attempt("text.overlap", lambda: findings.overlap_finding(material.overlaps)) or []
    reached = (
        material.attempt("text.coverage", lambda: [*findings.coverage_finding(study), *convergence.finding(study)])
        or []
    )
    maps = material.attempt("text.winners", lambda: winner_views(material)) or []
    return [
        Section(
            "winners",
            "Winners",
            "Which criterion won where",
            _MAP_TEXT if maps else (),
            [*made["winners"][1:], *made["winners.loss"][1:], *made["pairs"]],
            views=maps,
            filters=dict.fromkeys(("winners", "winners.loss", "pairs"), "*Model|Pruned|Calibration"),
        ),
        Section("kept", "What is kept", "How much is kept, and how sure that is", _KEPT_TEXT, made["averages"]),
        Section(
            "cost",
            "Cost",
            "What accuracy costs: parameters, FLOPs, storage and time",
            outputs=[*made["pareto"], *(output for name in _SERVED for output in made[name])],
            filters={"pareto": "Model|Pruned|Removes", "coverage.table2": "Model|Pruned"},
        ),
        Section(
            "claims",
            "Claims",
            "What the papers claim, asked of this study",
            _CLAIM_TEXT if made["claims"] else (),
            made["claims"],
        ),
        Section(
            "channels",
            "Channels",
            "Which channels, and how many of each expert",
            outputs=[output for name in _CHANNELS for output in made[name]],
            filters={"heapr.table1": "*Model|Pruned", "heapr.table2": "Model|Pruned"},
        ),
        Section(
            "recovery",
            "Recovery",
            "Fewer bits, fine-tuning, and what they change",
            recovery,
            [*made["coverage.fig8"], *made["coverage.table11"]],
        ),
        Section(
            "weights",
            "Weights",
            "What scores from weights alone achieve",
            outputs=[*made["aimer.table2"], *made["aimer.fig2"]],
            filters={"aimer.table2": "Model|Pruned"},
        ),
        Section(
            "ranks",
            "Ranks",
            "Scores and ranks",
            outputs=[*made["ranks"], *made["ranks.loss"], *made["ranks.cd"]],
            filters={
                **dict.fromkeys(("ranks", "ranks.loss"), "*Model|Pruned|Calibration"),
                "ranks.cd": "*Model|Pruned|Calibration|Over",
            },
        ),
        Section(
            "search",
            "Search",
            "Where to prune: searched against uniform",
            outputs=[
                *made["evoesap.table1"],
                *made["evoesap.fig1"],
                *made["evoesap.fig3"],
                *made["evoesap.search"],
                *(output for name in _SEARCHES for output in made[name]),
            ],
            filters={"evoesap.table1": "Model|Pruned|Calibration|Criterion"},
        ),
        Section(
            "task",
            "By task",
            "What calibration on the task changes",
            effect,
            [*made["task_specific"], *made["aimer.fig3"], *(each for name in _TEXTS for each in made[name])],
            filters={"task_specific": "*Model|Pruned", "coverage.table18": "*Model|Pruned"},
        ),
        Section(
            "benchmarks",
            "Benchmarks",
            "Every benchmark",
            outputs=made["unified.table5"],
            filters={"unified.table5": "Model|Pruned|Calibration|Criterion"},
        ),
        Section(
            "overlap",
            "Overlap",
            "Do calibration sets agree on which experts matter?",
            agreed,
            [*made["unified.fig4"][:1], *_several_models(study, made["unified.fig5"]), *made["unified.fig3"][:1]],
        ),
        Section(
            "coverage",
            "Coverage",
            "Did calibration reach every expert?",
            reached,
            [*made["coverage"], *made["convergence"]],
            filters=dict.fromkeys(("convergence", "convergence.channels"), "*Model|Pruned|Calibration"),
        ),
        Section(
            "inside",
            "Inside",
            "What pruning does inside the model",
            outputs=[*made["aimer.fig6"], *made["coverage.fig11"]],
            filters={"aimer.fig6": "*Model|Pruned|Calibration|Criterion"},
        ),
        Section(
            "attribution",
            "Attribution",
            "What experts contribute, by depth and by channel",
            outputs=[output for name in _ATTRIBUTION for output in made[name]],
            filters={"coverage.table14": "Model|Calibration"},
        ),
        Section(
            "criteria",
            "Criteria",
            "What criteria are, what they read and what they take",
            outputs=[output for name in _CRITERIA for output in made[name]],
            filters={"aimer.table4": "Model|Calibration", "coverage.table1": "Model|Calibration"},
        ),
        Section(
            "memory",
            "Memory",
            "Architectures and loading memory",
            outputs=[*made["unified.table4"], *made["unified.table3"]],
        ),
        Section(
            "provenance",
            "Provenance",
            "How this came about, and where it is",
            outputs=made["artefacts"],
            facts=_facts(study),
            details=_details(study),
            filters={"artefacts": "Model|Pruned|Calibration|Criterion"},
        ),
    ]


def _said(material: Material, chapter: str, say: Callable[[Comparison], Sequence[str]]) -> list[str]:
    """Sentences about every model, for a chapter."""
    return (
        material.attempt(f"text.{chapter}", lambda: [line for one in material.comparisons for line in say(one)]) or []
    )


def gaps(study: Study, outputs: Sequence[Output]) -> Section:
    """The chapter about what is missing: made last, when all gaps are known."""
    return Section("gaps", "Gaps", "What is missing", [findings.completeness(study), *study.notes], outputs)


_MAP_TEXT = (
    "Rows are benchmarks or groups of them, columns are calibration sets. A filled cell names the criterion with the "
    "best score. It is hatched when its lead over some other criterion could be chance: every pair of criteria "
    "answered the same questions, so their answers are compared question by question, and the 5 % level is corrected "
    "for looking at many cells. The same map by the loss on right answers, where lower is better, tells more criteria "
    "apart with the same questions: right or wrong says only which side of a line an answer is on.",
)
_CHANNELS = (
    "heapr.fig2",
    "heapr.table1",
    "heapr.table2",
    "coverage.fig",
    "coverage.table6",
    "coverage.table7",
    "coverage.table13",
    "coverage.table16",
)
_ATTRIBUTION = (
    "coverage.fig2",
    "coverage.table14",
    "coverage.fig3",
    "coverage.fig13",
    "coverage.fig4",
    "coverage.fig12",
    "coverage.fig7",
    "coverage.fig14",
)
_SERVED = ("coverage.table2", "coverage.fig6", "coverage.fig10", "coverage.table9")
_SEARCHES = ("evoesap.table3", "evoesap.table4", "evoesap.table5", "evoesap.table6")
_TEXTS = ("heapr.fig3", "aimer.fig1", "coverage.table18")
_CRITERIA = ("unified.table6", "aimer.table1", "aimer.table4", "coverage.table1")
_CLAIM_TEXT = (
    "Each claim is a difference between pairs of plans that answered the same questions. It holds here when the whole "
    "95 % interval is above 0, does not hold when it is below, and is undecided when it contains 0.",
)
_KEPT_TEXT = (
    "A criterion is better than another only as far as the bars allow: where bars of the unpruned model and of a "
    "pruned one overlap widely, pruning cost nothing that these benchmarks can show.",
)


def _several_models(study: Study, outputs: Sequence[Output]) -> Sequence[Output]:
    return outputs if study.family["model"].nunique() > 1 else ()


def _facts(study: Study) -> list[tuple[str, str]]:
    seconds = pd.to_numeric(study.origins["seconds"], errors="coerce").sum()
    facts = [
        ("Study", study.name),
        ("Store", str(study.store.resolve())),
        ("moe_lab", _several(study, "moe_lab") or str(study.document.get("moe_lab", ""))),
        ("Commit", _several(study, "commit")),
        ("Computed on", "; ".join(part for part in (_several(study, "host"), _several(study, "machine")) if part)),
        ("Python", _several(study, "python")),
        ("Libraries", ", ".join(f"{name} {' / '.join(found)}" for name, found in versions(study.origins).items())),
        ("Time of all evaluations", f"{seconds / 60:,.1f} minutes of one process" if seconds else ""),
        *(
            (f"Calibration {key.replace('@', ' of ')}", _calibration(report))
            for key, report in study.calibrations.items()
        ),
    ]
    return [(key, value) for key, value in facts if value]


def _several(study: Study, column: str) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in study.origins[column].dropna()))


def _calibration(report: Mapping[str, Any]) -> str:
    tokens = ", ".join(f"{count:,} tokens of {source}" for source, count in (report.get("valid_tokens") or {}).items())
    rows = f"{report['rows']:,} rows of {report['length']:,}" if "rows" in report and "length" in report else ""
    start = str(report.get("first_row", ""))[:160]
    return "; ".join(part for part in (tokens, rows, f"begins “{start}…”" if start else "") if part)


def _details(study: Study) -> list[tuple[str, str]]:
    config = study.document.get("config")
    return [("Configuration of the study", json.dumps(config, indent=2))] if config else []
