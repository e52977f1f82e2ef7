"""Results that leave a store and come back: tables, logs of other programs, and comparisons."""

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pandas as pd
import preloaded
import pytest
import yaml
from evalplus.evaluate import evaluate as evaluate_programs
from lm_eval import evaluator
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import make_table
from studies import run_on_boolq

import moe_lab
from moe_lab.analysis.differences import compare
from moe_lab.analysis.export import export
from moe_lab.analysis.load.study import load
from moe_lab.errors import UserError
from moe_lab.paths import resolve
from moe_lab.study.foreign import import_results

pytestmark = pytest.mark.slow
TASKS = ("arc_easy", "boolq", "gsm8k")
ITEMS = 8
OWN, FOREIGN = "own", "imported"


def task(name: str) -> dict[str, Any]:
    """The settings with which lm-eval itself evaluates a shipped benchmark."""
    definition = Path(resolve(f"pocket:benchmarks/{name}.yaml"))
    data = {"test": str(definition.with_suffix(".jsonl"))}
    settings: dict[str, Any] = yaml.safe_load(definition.read_text())
    return {**settings, "dataset_path": "json", "dataset_kwargs": {"data_files": data}}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What lm-eval writes about a shipped model."""
    model, tokenizer = moe_lab.load("pocket:olmoe")
    output = evaluator.simple_evaluate(
        model=HFLM(model, tokenizer=tokenizer, batch_size=8),
        tasks=[task(name) for name in TASKS],
        limit=ITEMS,
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = output.pop("samples")
    folder = tmp_path_factory.mktemp("logs")
    tracker = EvaluationTracker(output_path=str(folder))
    tracker.general_config_tracker.model_name_sanitized = "tiny"
    tracker.save_results_aggregated(results=output, samples=samples)
    for name, rows in samples.items():
        tracker.save_results_samples(name, rows)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, logs: Path) -> Path:
    """A store with a study of this model, unpruned and pruned, and with the results of lm-eval.
    The items of boolq must not leave the store."""
    root = tmp_path_factory.mktemp("study") / "store"
    result = run_on_boolq(
        root,
        f"study={OWN}",
        "model=pocket_olmoe",
        "criterion=aimer",
        "ratio=0.5",
        f"suite.limit={ITEMS}",
        f"suite.benchmarks=[{','.join(f'pocket_{name}' for name in TASKS)}]",
        "protocol.benchmarks.pocket_boolq.shareable=false",
    )
    assert result.returncode == 0, result.stderr
    import_results(logs, root, FOREIGN, model="pocket_olmoe")
    return root


def outcomes(table: pd.DataFrame) -> dict[tuple[str, str], float]:
    rows = table[["benchmark", "item", "outcome"]].itertuples(index=False)
    return {(benchmark, item): outcome for benchmark, item, outcome in rows}


def test_items_of_lm_eval_are_those_of_the_study(store: Path) -> None:
    table = moe_lab.results(store, f"{FOREIGN},{OWN}")
    unpruned = table[table["criterion"] == "none"]
    own = outcomes(unpruned[unpruned["source"] == "moe_lab"])
    foreign = outcomes(unpruned[unpruned["source"] == "lm-eval"])
    assert len(own) == len(TASKS) * ITEMS
    # lm-eval also reports acc of arc_easy
    assert own.items() < foreign.items()
    assert len(foreign) == len(own) + ITEMS


def test_foreign_cells_are_marked_and_own_ones_are_the_reference(store: Path) -> None:
    study = load(store, f"{FOREIGN},{OWN}")
    (foreign,) = study.cells.index[study.cells["source"] == "lm-eval"]
    assert study.cells.index[0] != foreign
    result = preloaded.run(
        store.parent, "moe_lab", "report", f"study={FOREIGN},{OWN}", "store=store", "out=page"
    )
    assert "Traceback" not in result.stderr
    assert "lm-eval" in (store.parent / "page/report.html").read_text()


def test_foreign_results_are_compared_by_item(store: Path) -> None:
    scores = compare(OWN, FOREIGN, store).scores
    assert set(scores["benchmark"]) == set(TASKS)
    assert list(scores["difference"]) == [0] * len(TASKS)
    assert list(scores["items"]) == [ITEMS] * len(TASKS)


def test_exported_and_imported_results_are_equal(store: Path, tmp_path: Path) -> None:
    folders = export(load(store, OWN), tmp_path / "logs")
    assert len(folders) == 2
    for folder in folders:
        import_results(folder, tmp_path / "store", OWN)
    tables = [
        moe_lab.results(root, OWN).drop(columns="source").sort_values(["criterion", "benchmark"])
        for root in (store, tmp_path / "store")
    ]
    pd.testing.assert_frame_equal(*[table.reset_index(drop=True) for table in tables])
    (file,) = folders[0].glob("results_*.json")
    lines = make_table(json.loads(file.read_text())).splitlines()
    scores = tables[0].query("criterion == 'none'").groupby("benchmark")["score"].first()
    for benchmark, score in scores.items():
        (row,) = [line.split("|") for line in lines if line[1:].startswith(benchmark)]
        # the column "Value"
        assert float(row[7]) == score


def test_logs_of_inspect_have_all_items(store: Path, tmp_path: Path) -> None:
    """inspect_ai 0.3.285 reads these archives. The texts of boolq stay in the store."""
    table = moe_lab.results(store, OWN)
    for folder in export(load(store, OWN), tmp_path):
        logs = [archived(file) for file in folder.glob("*.eval")]
        assert {log["header.json"]["eval"]["task"] for log in logs} == set(TASKS)
        for log in logs:
            header, summaries = log.pop("header.json"), log.pop("summaries.json")
            task = header["eval"]["task"]
            rows = table[table["benchmark"] == task].set_index("item")
            rows = rows[rows["criterion"] == header["eval"]["metadata"]["criterion"]]
            outcomes = {item["id"]: item["scores"]["moe_lab"]["value"] for item in log.values()}
            assert outcomes == dict(rows["outcome"])
            (metric,) = header["results"]["scores"][0]["metrics"].values()
            assert metric["value"] == rows["score"].iloc[0]
            pairs = zip(log.values(), summaries, strict=True)
            assert all(summary.items() <= item.items() for item, summary in pairs)
            texts = [
                text
                for item in log.values()
                for text in (item["input"], item["output"]["choices"][0]["message"]["content"])
            ]
            assert all(texts) if task != "boolq" else not any(texts)


def archived(file: Path) -> dict[str, Any]:
    """Member of a ZIP archive -> its content."""
    with ZipFile(file) as archive:
        return {name: json.loads(archive.read(name)) for name in archive.namelist()}


def test_programs_graded_by_evalplus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first program is right, the second fails one of the further tests, and the third a base
    test alone."""
    problems = []
    inputs = ([[1], [2]], [[3], [-1]])
    for number, (program, base, plus) in enumerate(
        (
            ("return x + 1", *inputs),
            ("return max(x, 0)", *inputs),
            ("return abs(x)", *reversed(inputs)),
        )
    ):
        problems.append(
            {
                "task_id": f"HumanEval/{number}",
                "prompt": "def f(x):\n",
                "canonical_solution": f"    {program}\n",
                "entry_point": "f",
                "contract": "",
                "atol": 0,
                "base_input": base,
                "plus_input": plus,
            }
        )
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    monkeypatch.setattr("evalplus.data.humaneval.HUMANEVAL_OVERRIDE_PATH", str(data))
    monkeypatch.setattr("evalplus.evaluate.CACHE_DIR", str(tmp_path))
    samples = tmp_path / "samples.jsonl"
    solutions = ("def f(x):\n    return x + 1", *2 * ["def f(x):\n    return x"])
    rows = [
        {"task_id": f"HumanEval/{number}", "solution": solution}
        for number, solution in enumerate(solutions)
    ]
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate_programs("humaneval", str(samples), parallel=1)
    sentence = import_results(tmp_path, tmp_path / "store", model="m", criterion="reap", ratio=0.5)
    assert "EvalPlus on humaneval, humaneval_plus" in sentence
    table = moe_lab.results(tmp_path / "store")
    assert outcomes(table) == {
        ("humaneval", "HumanEval/0"): 1.0,
        ("humaneval", "HumanEval/1"): 1.0,
        ("humaneval", "HumanEval/2"): 0.0,
        ("humaneval_plus", "HumanEval/0"): 1.0,
        ("humaneval_plus", "HumanEval/1"): 0.0,
        ("humaneval_plus", "HumanEval/2"): 0.0,
    }
    assert set(table["source"]) == {"EvalPlus"}


def test_reports_of_evalscope(tmp_path: Path) -> None:
    """The files that EvalScope 1.14 writes, reduced to what is read."""
    messages = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "3"}]
    score = {"value": {"acc": 0.0}, "prediction": "3", "extracted_prediction": "3"}
    row = {"index": 0, "target": ["2"], "messages": messages, "sample_score": {"score": score}}
    for folder, file, text in (
        ("reports", "math_500.json", "{}"),
        ("reviews", "math_500_Level 1.jsonl", json.dumps(row)),
    ):
        (tmp_path / folder / "tiny").mkdir(parents=True)
        (tmp_path / folder / "tiny" / file).write_text(text)
    import_results(tmp_path, tmp_path / "store", model="m")
    table = moe_lab.results(tmp_path / "store")
    ((benchmark, item),) = outcomes(table)
    # with the digest of the prompt, as in studies
    assert (benchmark, item.split()[:2]) == ("math500", ["Level", "1/0"])


@pytest.mark.parametrize(
    ("axes", "content", "sentence"),
    [
        ({}, "{}", "cannot be read"),
        ({"modle": "m"}, "{}", "did you mean model"),
        ({"model": "m"}, None, "has no results"),
    ],
)
def test_mistakes_of_imports(
    tmp_path: Path, axes: dict[str, str], content: str | None, sentence: str
) -> None:
    if content:
        (tmp_path / "results_2026.json").write_text(content)
    with pytest.raises(UserError, match=sentence):
        import_results(tmp_path, tmp_path / "store", **axes)
    assert not (tmp_path / "store").exists()
