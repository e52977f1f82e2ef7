"""Results that leave a store: tables, comparisons, and what must not leave it."""

import json
import re
from pathlib import Path

import duckdb
import pandas as pd
import polars
import preloaded
import pytest
from pages import page_text
from studies import run_on_boolq

import moe_lab
from moe_lab.analysis.differences import compare
from moe_lab.errors import UserError
from moe_lab.paths import resolve

pytestmark = pytest.mark.slow
BENCHMARKS = ("arc_easy", "boolq", "gsm8k")
ITEMS = 8
OWN = "own"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a study of a shipped model, unpruned and pruned by two criteria. The items of
    boolq must not leave the store."""
    root = tmp_path_factory.mktemp("study") / "store"
    result = run_on_boolq(
        root,
        f"study={OWN}",
        "model=pocket_olmoe",
        "criterion=aimer,random",
        "ratio=0.5",
        "seed=42,43",
        f"suite.limit={ITEMS}",
        f"suite.benchmarks=[{','.join(f'pocket_{name}' for name in BENCHMARKS)}]",
        "protocol.benchmarks.pocket_boolq.shareable=false",
    )
    assert result.returncode == 0, result.stderr
    return root


def test_differences_are_paired_over_items_and_seeds(store: Path) -> None:
    """The unpruned model, which has no seed, is paired with each seed of the random plans."""
    means = moe_lab.results(store, OWN).groupby(["criterion", "benchmark"])["outcome"].mean()
    scores = compare("none", f"random,study={OWN}", store).scores.set_index("benchmark")
    assert list(scores["difference"]) == pytest.approx(list(means["none"] - means["random"]))
    assert (scores["items"] == ITEMS).all()
    assert (scores["low"] <= scores["difference"]).all()
    assert (scores["difference"] <= scores["high"]).all()
    assert (compare("random", "random", store).scores["difference"] == 0).all()


def test_flips_have_the_prompt_and_both_answers(store: Path) -> None:
    differences = compare("none", "aimer", store)
    flips = differences.flips
    lost = flips["outcome_a"].sum() - flips["outcome_b"].sum()
    assert lost == pytest.approx(differences.scores["difference"].sum() * ITEMS)
    shown = flips[flips["benchmark"] == "gsm8k"]
    assert shown["prompt"].str.startswith("Question: ").all()
    assert shown["right_answer"].str.contains("####").all()
    assert (shown["output_a"] != shown["output_b"]).all()


def test_experts_and_costs_of_two_plans(store: Path) -> None:
    """Both plans retain equally many experts."""
    differences = compare("aimer,seed=42", "random,seed=42", store)
    experts = differences.experts
    assert len(experts)
    assert (experts["share_a"] + experts["share_b"] == 1).all()
    assert experts["share_a"].sum() == experts["share_b"].sum()
    costs = differences.costs.set_index("cost")
    assert costs.loc["parameters", "value_a"] == costs.loc["parameters", "value_b"]


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        ("aimr", "none", "criterion=aimr.* did you mean aimer"),
        ("criterio=aimer", "none", "did you mean criterion"),
        ("aimer,ratio=0.25", "none", r"ratio=0.25 is unknown.*known: 0, 0.5"),
    ],
)
def test_selections_of_no_cell(store: Path, a: str, b: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        compare(a, b, store)


def test_the_command_prints_the_differences(store: Path) -> None:
    result = preloaded.run(store.parent, "moe_lab", "compare", "none", "aimer", "store=store")
    assert result.returncode == 0, result.stderr
    for line in ("scores (3 rows), A = pocket_olmoe unpruned", "parameters_kept", "Question: "):
        assert line in result.stdout
    result = preloaded.run(store.parent, "moe_lab", "compare", "none")
    assert result.returncode == 2
    assert "required: b" in result.stderr


def test_tables_are_read_by_pandas_polars_and_duckdb(store: Path) -> None:
    for ending in ("parquet", "csv"):
        file = store.with_name(f"table.{ending}")
        arguments = (f"out={file}", f"store={store}")
        assert preloaded.run(store, "moe_lab", "table", OWN, *arguments).returncode == 0
        counts = [
            len(getattr(pd, f"read_{ending}")(file)),
            getattr(polars, f"read_{ending}")(file).height,
            duckdb.sql(f"select count(*) from '{file}'").fetchall()[0][0],
        ]
        assert counts == [5 * len(BENCHMARKS) * ITEMS] * 3
    query = f"select avg(outcome) from '{store.with_name('table.parquet')}' where criterion='none'"
    table = moe_lab.results(store, OWN)
    ((mean,),) = duckdb.sql(query).fetchall()
    assert mean == pytest.approx(table.loc[table["criterion"] == "none", "outcome"].mean())
    cells = moe_lab.results(store, OWN, rows="cell").groupby("criterion").first()
    assert cells.loc["aimer", "parameters"] < cells.loc["none", "parameters"]
    with pytest.raises(UserError, match="did you mean cell"):
        moe_lab.results(store, OWN, rows="cells")


def test_documented_queries(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs/results.md"
    for rows, name in (("item", "results"), ("cell", "cells")):
        moe_lab.results(store, OWN, rows).to_parquet(tmp_path / f"{name}.parquet")
    monkeypatch.chdir(tmp_path)
    queries = re.findall(r"^    -- .*?;$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert len(queries) == 5
    for query in queries:
        assert duckdb.sql(query).columns


def test_texts_that_are_not_shareable_stay_in_the_store(store: Path, tmp_path: Path) -> None:
    """boolq is not shareable, gsm8k is."""
    planted, shown = (
        [
            json.loads(line)["prompt"].partition("\n")[0]
            for line in Path(resolve(f"pocket:benchmarks/{name}.jsonl")).read_text().splitlines()
        ]
        for name in ("boolq", "gsm8k")
    )
    words = (store.parent, "moe_lab")
    preloaded.run(*words, "report", "all", f"study={OWN}", f"out={tmp_path}/page", "store=store")
    preloaded.run(*words, "report", f"study={OWN}", f"out={tmp_path}/page", "store=store")
    preloaded.run(*words, "table", OWN, f"out={tmp_path}/table.csv", "store=store")
    preloaded.run(*words, "export", OWN, f"out={tmp_path}/logs", "store=store")
    differences = compare("none", "random", store)
    differences.flips.to_csv(tmp_path / "flips.csv")
    assert {"boolq", "gsm8k"} <= set(differences.flips["benchmark"])
    files = [file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file()]
    page = page_text(tmp_path / "page" / "report.html")
    assert [text for text in shown if text in page], "answers are on the page"
    logs = "".join(file.read_text() for file in tmp_path.glob("logs/**/*.jsonl"))
    assert [text for text in shown if text in logs], "and in the logs of lm-eval"
    files.append(page)
    assert len(files) > 20
    assert not [text for text in planted if any(text in file for file in files)]
    assert [text for text in shown if any(text in file for file in files)]
