"""Throughput, latency and memory of timed models: medians and quartiles of requests, on the device that is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from handmade import UNPRUNED, cell, comparison_of, results_of, study_of
from synthetic import record_path, write_json, write_store

from analysis.__main__ import main
from analysis.load.reader import Reader
from analysis.load.study import load
from analysis.outputs import speed_and_memory
from analysis.registry import Results, find, make, outputs
from analysis.render.table import Table
from moe_lab.results import TIMINGS

MIB = 2**20


def times(size: int, length: int, prefill: list[float], decode: list[float]) -> list[tuple[Any, ...]]:
    pairs = enumerate(zip(prefill, decode, strict=True))
    return [(size, length, 10, repeat, first, rest, 2.0 * MIB) for repeat, (first, rest) in pairs]


def timed(cell_number: int, rows: list[tuple[Any, ...]], weights: int) -> pd.DataFrame:
    about = {"device": "A GPU", "dtype": "bfloat16", "threads": 4, "load": 0.25, "weight_bytes": weights * MIB}
    return pd.DataFrame(rows, columns=list(TIMINGS)).assign(cell=cell_number, **about)


AXES = [UNPRUNED, *(cell("channel_activation", word) for word in ("coverage aligned 128", "coverage min 64"))]
MODEL = comparison_of(AXES, {"arc_easy": [[1, 1], [1, 0], [1, 0]]})
ROUNDED = {1: (128, 128), 2: (128, 64)}


def study(tmp_path: Path) -> Any:
    """Three timed models, of which two have blocks of channels."""
    found = study_of(MODEL)
    small = times(2, 50, [0.1, 0.2, 0.4], [0.5, 1.0, 2.0])
    large = times(4, 50, [0.4, 0.4, 0.4], [1.0, 1.0, 1.0])
    found.timings = pd.concat([timed(0, [*small, *large], 8), timed(1, large, 4), timed(2, large, 3)])
    for number, (block, smallest) in ROUNDED.items():
        align = {"align": {"block": block, "min_channels": smallest}}
        folder = tmp_path / f"plan/{number}"
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps({"provenance": {"allocation": {"parameters": align}}}))
    MODEL.cells["plan_folder"] = [None, "plan/1", "plan/2"]
    found.reader = Reader(tmp_path)
    return found


def test_medians_stand_between_their_quartiles(tmp_path: Path) -> None:
    table = speed_and_memory.speed_table(results_of(study(tmp_path), [MODEL]), "t")
    first = table.frame.iloc[0]
    assert first[speed_and_memory.PREFILL] == pytest.approx(2 * 50 / 0.2)
    assert first[speed_and_memory.DECODE] == pytest.approx(2 * 10 / 1.0)
    assert first[speed_and_memory.FIRST] == pytest.approx(200) and first[speed_and_memory.EACH] == pytest.approx(100)
    assert first[speed_and_memory.WEIGHTS] == 8 and first[speed_and_memory.PEAK] == 10
    assert table.low is not None and table.high is not None
    low, high = (ends[speed_and_memory.FIRST][0] for ends in (table.low, table.high))
    assert low == pytest.approx(150) and high == pytest.approx(300)
    assert list(table.frame["Prompts"]) == ["2", "4", "4", "4"]
    for words in ("3 requests each", "bfloat16 on A GPU", "4 threads", "load of the machine up to 0.2"):
        assert words in table.caption


def grid_study(tmp_path: Path, working: float) -> Any:
    """The unpruned model and every pair of two blocks and two smallest experts in four bits, of which (64, 256) failed:
    seconds and working memory grow with the cell."""
    pairs = [(64, 128), (64, 256), (128, 128), (128, 256)]
    labels = [f"coverage a{block} m{least}" for block, least in pairs]
    axes = [UNPRUNED, *(cell("channel_activation", label, 0.25, recovery="nf4") for label in labels)]
    comparison = comparison_of(axes, {"arc_easy": [[1, 1]] * 5})
    study, frames = study_of(comparison), []
    for number in (0, 1, 3, 4):
        rows = times(4, 50, [0.4] * 3, [1.0 + number] * 3)
        beyond = working * (number + 1)
        frames.append(timed(number, rows, 10 - number).assign(working_bytes=beyond))
    study.timings = pd.concat(frames)
    for number, (block, least) in enumerate(pairs, start=1):
        align = {"align": {"block": block, "min_channels": least}}
        write_json(tmp_path / f"plan/{number}/plan.json", {"provenance": {"allocation": {"parameters": align}}})
    comparison.cells["plan_folder"] = [None, *(f"plan/{number}" for number in range(1, 5))]
    study.reader = Reader(tmp_path)
    return study, comparison


def test_blocks_have_a_map_of_speed_and_one_of_memory(tmp_path: Path) -> None:
    study, comparison = grid_study(tmp_path, 2.0 * MIB)
    [figure] = find("coverage.fig10").items(results_of(study, [comparison]))
    speed, memory = figure.drawing.axes
    for axes, expected, full in (
        (speed, [40 / 2, 40 / 4, 40 / 5], 40 / 1),  # 4 prompts x 10 tokens over the seconds
        (memory, [9 + 4, 7 + 8, 6 + 10], 10 + 2),  # weights and working memory
    ):
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["a=64", "a=128"]
        assert [tick.get_text() for tick in axes.get_yticklabels()] == ["m=128", "m=256"]
        written = {text.get_position(): float(text.get_text()) for text in axes.texts}
        places = [(0.5, 0.5), (1.5, 0.5), (1.5, 1.5)]  # (64, 256) was never timed
        assert written == dict(zip(places, expected, strict=True))
        assert axes.get_title(loc="left").startswith("25 % pruned, NF4\n")
        assert axes.get_title(loc="left").endswith(f"unpruned {full:.0f}")


def test_what_reads_no_scores_is_made_of_a_study_without_benchmarks(tmp_path: Path) -> None:
    """As sweeps with suite=none are: coverage_fig6, coverage_fig10 and aimer_fig6."""
    allocations = {"coverage aligned 64": (64, 128), "coverage aligned 128": (128, 128)}
    root = write_store(
        tmp_path / "store", criteria=("channel_activation",), allocations=tuple(allocations), ratios=(0.25,),
        calibrations=("pocket_general",), tasks=(), overlap=False,
    )  # fmt: skip
    record = record_path(root)
    document = json.loads(record.read_text())
    for number, entry in enumerate(document["cells"]):
        entry["timing"] = f"timing/{number}"
        about = {"device": "A GPU", "dtype": "bfloat16", "threads": 4, "load": 0.25, "weight_bytes": 8 * MIB}
        write_json(root / entry["timing"] / "timing.json", about)
        rows = pd.DataFrame(times(4, 50, [0.4] * 3, [1.0] * 3), columns=list(TIMINGS))
        rows.to_parquet(root / entry["timing"] / "timing.parquet", index=False)
        if entry["plan"]:
            block, least = allocations[entry["cell"]["allocation"]]
            plan = json.loads((root / entry["plan"] / "plan.json").read_text())
            align = {"align": {"block": block, "min_channels": least}}
            plan["provenance"] = {"allocation": {"name": "coverage", "parameters": align}}
            write_json(root / entry["plan"] / "plan.json", plan)
    write_json(record, document)
    results = Results(load(root, "made_up"))
    assert results.comparisons == [] and results.study.results.empty
    made = make(["coverage.table2", "coverage.fig6", "coverage.fig10", "aimer.fig6"], results)
    assert all(made.values()), {name: len(items) for name, items in made.items()}
    [table] = made["coverage.table2"]
    assert isinstance(table, Table) and table.frame[speed_and_memory.DECODE].tolist() == [40.0] * 3


def test_a_store_without_timings_says_what_makes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = write_store(
        tmp_path / "store", criteria=("man",), calibrations=("pocket_code",), tasks=("rte",), items=4, overlap=False
    )
    assert main(["coverage.table2", "coverage.fig6", f"store={store}"]) == 1
    assert capsys.readouterr().err.count("needs a run with timing=true") == 2
    found = make(outputs(), Results(load(store, "made_up")))
    assert found["unified.table1"] and found["evoesap.table3"] == found["coverage.fig10"] == []
