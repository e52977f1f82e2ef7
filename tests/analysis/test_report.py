"""The report: what its files say and need, what happens when an output cannot be made, and how a
browser shows it."""

import gzip
import json
import math
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pandas as pd
import pytest
from handmade import report_of
from pages import page_text
from processes import time_limit
from synthetic import CALIBRATIONS, CRITERIA, edited_document, record_path, write_store

from moe_lab.analysis import differences, names, report
from moe_lab.analysis.__main__ import main
from moe_lab.analysis.load.study import Study, load
from moe_lab.analysis.registry import REGISTERED, Item, Results, find
from moe_lab.analysis.render import vega
from moe_lab.analysis.render.table import Table

pytestmark = pytest.mark.slow

NETWORK = re.compile(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(["']?http""")


def test_the_page_says_what_was_run_and_where(small_report: Path) -> None:
    content = page_text(small_report)
    for sentence in (
        "4 criteria chose which experts of pocket_olmoe to remove",
        "Nothing is missing",
        "30 items per benchmark",
        "plan/pocket_olmoe-pocket_code-man-0.25",
        "lm_eval 0.0-synthetic",
        "imagined, 2 cores",
    ):
        assert sentence in content


KINDS: dict[str, dict[str, Any]] = {
    "perplexity": {
        "tasks": ("perplexity",),
        "random_seeds": (1, 2, 3),
        "calibrations": CALIBRATIONS,
        "ratios": (0.25, 0.5),
    },
    "one benchmark": {"tasks": ("gsm8k",)},
    "a thousand cells": {
        "tasks": ("gsm8k",),
        "calibrations": CALIBRATIONS,
        "ratios": [number / 100 for number in range(20, 50)],
    },
}
"""What a study may have little or much of."""


class Page(NamedTuple):
    """The page of a study of some kind: its text, the table behind its rankings, and the sentences
    above them."""

    kind: str
    study: Study
    folder: Path
    text: str
    table: pd.DataFrame
    sentences: list[str]

    @property
    def mean(self) -> str:
        """The column of the table by which methods are ranked."""
        return "Mean perplexity" if self.kind == "perplexity" else "Avg"


@pytest.fixture(scope="module", params=KINDS)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Page:
    kind, root = request.param, tmp_path_factory.mktemp("page")
    many = [name for name in CRITERIA if name not in ("aimer", "magnitude")]
    criteria = many if "cells" in kind else ("frequency", "man", "random")
    store = write_store(root / "store", items=12, criteria=criteria, **KINDS[kind])
    content = page_text(report_of(store, root / "out"))
    # several of a thousand cells remove the same experts
    assert not list((root / "out").glob("failed/*"))
    chapter = content[content.index('<details class="chapter" id="ranking">') :]
    chapter = chapter[1:].partition('<details class="chapter"')[0]
    sentences = re.findall(r"<p>(.*?)</p>", chapter)
    table = pd.read_csv(root / "out" / "tables" / "ranking.csv", keep_default_na=False)
    page = Page(kind, load(store, "made_up"), root / "out", content, table, sentences)
    table[page.mean] = table[page.mean].astype(float)
    return page


def test_page_says_how_many_plans_were_made(page: Page) -> None:
    study = page.study
    assert ("cells" in page.kind) == (len(study.document["cells"]) > 1000)
    pruned = study.cells[study.cells["criterion"] != "none"]
    sentence = f"That gave {names.count(len(pruned), 'pruned model')}, each evaluated"
    assert sentence in page.text
    assert "Nothing is missing" in page.text
    files = [page.folder / "report.html", *page.folder.glob("data/*.js")]
    assert sum(file.stat().st_size for file in files) <= 5e6


def test_page_has_no_chapter_of_what_was_not_run(page: Page) -> None:
    for chapter in ("search", "winners", "recovery", "channels"):
        assert f'class="chapter" id="{chapter}"' not in page.text, f"nothing of {chapter} was run"


def test_page_says_how_plans_compare_with_chance(page: Page) -> None:
    chance = page.table["Status"].str.endswith("chance").any()
    assert chance == (page.kind == "perplexity")
    [sentence] = page.sentences
    assert "one seed" in sentence
    summary = (page.folder / report.SUMMARY).read_text().strip()
    main_finding = summary.splitlines()[0]
    assert main_finding in page.text
    above = (page.table["Status"] == "above chance").any()
    assert main_finding.startswith("A criterion is above chance on 1 of 1 model") == above
    assert main_finding.startswith("First by average: ") != chance


def man_score(page: Page) -> float:
    """The score of a plan by MAN, from its items."""
    study = page.study
    cell = study.cells.query("criterion == 'man'").index[0]
    samples = study.samples[study.samples["cell"] == cell]
    weights = samples["units"].fillna(1)
    mean = float((samples["outcome"] * weights).sum() / weights.sum())
    return math.exp(mean) if page.kind == "perplexity" else mean


def test_score_of_a_plan_is_the_mean_of_its_items(page: Page) -> None:
    assert (page.table[page.mean] - man_score(page)).abs().min() < 1e-4


@pytest.mark.parametrize("page", ["perplexity"], indirect=True)
def test_perplexities_are_in_tables_and_summary(page: Page) -> None:
    score = man_score(page)
    table = pd.read_csv(page.folder / "tables" / "unified.table5.csv")
    perplexities = table["perplexity"]
    assert (perplexities - score).abs().min() < 1e-4
    assert perplexities.between(10, 30).all()
    latex = (page.folder / "tables" / "unified.table5.tex").read_text(encoding="utf-8")
    assert f"{score:.3f}" in latex
    assert "less is better" in latex
    summary = (page.folder / report.SUMMARY).read_text()
    assert "Mean perplexity, less is better (unpruned " in summary


def test_page_loads_no_other_file(small_report: Path) -> None:
    source = page_text(small_report)
    assert not NETWORK.search(source)
    assert "vegaEmbed" in small_report.read_text(encoding="utf-8"), "the library is in the page"
    figures = {path.name for path in (small_report.parent / "figures").iterdir()}
    linked = set(re.findall(r'href="figures/([^"]+)"', source))
    assert "ranking.json" in linked
    assert linked == figures, "what the page does not show is made by name"


def test_the_verdict_counts_models_above_chance(page: Page) -> None:
    [verdict] = re.findall(r'class="verdict">(.*?)<', page.text)
    above = (page.table["Status"] == "above chance").any()
    if page.kind != "perplexity":
        assert verdict.startswith("First by average: ")
    else:
        assert verdict.startswith(
            "A criterion is above chance on 1 of 1" if above else "No criterion"
        )


def test_gaps_are_written_about_and_end_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = write_store(
        tmp_path / "store", criteria=("frequency", "man"), tasks=("gsm8k", "math500", "rte")
    )
    with edited_document(record_path(store)) as study:
        study["cells"][1]["evaluate"]["gsm8k"] = None
        study["cells"][1]["errors"] = {"gsm8k": "the <b>tokenizer</b> broke"}
        study["cells"][2]["evaluate"]["rte"] = None
    assert main(["report", f"store={store}", f"out={tmp_path / 'out'}"]) == 1
    assert "failed: the <b>tokenizer</b> broke" in capsys.readouterr().err
    source = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "2 gaps: some results are missing" in source
    assert "the <b>tokenizer</b>" not in source and "the &lt;b&gt;tokenizer" in source
    assert "– marks a result that is missing" in source
    ranks = (tmp_path / "out" / "tables" / "ranks.csv").read_text()
    assert re.search(r"^pocket_olmoe,50 %,Code,Frequency,,[\d.]+,[\d.]+,,,", ranks, re.MULTILINE)


@pytest.mark.parametrize(
    ("file_format", "start"),
    [
        ("svg", b"<svg"),
        ("pdf", b"%PDF"),
        ("png", b"\x89PNG"),
    ],
)
def test_named_output_is_made_in_the_requested_format(
    small: Path, tmp_path: Path, file_format: str, start: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"store={small}", f"out={tmp_path}", f"format={file_format}"]
    assert main(["unified.fig2", "unified.table2", *arguments]) == 0
    figure, chart = (tmp_path / f"figures/unified.fig2.{end}" for end in (file_format, "json"))
    assert set((tmp_path / "figures").iterdir()) == {figure, chart}
    assert figure.read_bytes().startswith(start)
    assert json.loads(chart.read_text())["data"]["values"]
    suffixes = ("csv", "md", "tex")
    written = [
        f"{name}.{suffix}" for name in ("unified.fig2", "unified.table2") for suffix in suffixes
    ]
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == written
    assert "unified.table2.csv" in capsys.readouterr().out


def _raises(results: Results) -> list[Item]:
    raise KeyError("cell")


FAILURES = {"ranks": "KeyError: 'cell'", "pareto": "ValueError: Unknown format code 'f'"}


@pytest.mark.parametrize("command", ["report", "all"])
def test_failed_outputs_are_gaps_with_a_log_until_they_are_mended(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two outputs and a chapter of the page; others are made."""
    store = write_store(tmp_path / "store", criteria=("frequency", "man"), tasks=("gsm8k", "rte"))
    folder = tmp_path / "out"
    arguments = [command, f"store={store}", f"out={folder}"]
    unwritable = Table("Bad", "", pd.DataFrame({"x": ["a word"]}), {"x": "{:.3f}"})
    with monkeypatch.context() as broken:
        broken.setitem(REGISTERED, "ranks", replace(find("ranks"), make=_raises))
        broken.setitem(REGISTERED, "pareto", replace(find("pareto"), make=lambda *_: [unwritable]))
        broken.setattr(report, "published_tables", _raises)
        assert main(arguments) == 1
    errors = capsys.readouterr().err
    for name, reason in FAILURES.items():
        assert f"analysis: {name}: could not be made ({reason}" in errors
        assert not re.search(rf"\b{name} needs|no data for these.*\b{name}\b", errors)
        log = (folder / "failed" / f"{name}.log").read_text()
        assert "Traceback (most recent call last)" in log
        assert name in (folder / "tables" / "gaps.csv").read_text()
        assert not (folder / "tables" / f"{name}.csv").exists()
    assert (folder / "figures" / "ranking.json").exists()
    assert (folder / "tables" / "winners.csv").exists()
    if command == "report":
        assert "failed/ranks.log" in page_text(folder / "report.html")
        assert (folder / "failed" / "published.log").exists()
    assert main(arguments) == 0
    assert not list((folder / "failed").glob("*"))


def test_the_analysis_never_imports_torch(small: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from moe_lab.analysis.__main__ import main; "
        f"assert main(['unified.fig2', 'ranks', 'tokens_per_expert', 'store={small}', "
        f"'out={tmp_path}']) == 0; "
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules), 'heavy imports'; "
        "light = 'analysis arguments errors interrupt json_files packs paths progress '; "
        "light += 'result_files secrets source_code'; "
        "own = {name.split('.')[1] for name in sys.modules if name.startswith('moe_lab.')}; "
        "own -= set(light.split()); "
        "assert not own, own"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_full_study_is_reported_within_its_budget(tmp_path: Path) -> None:
    """73 cells x 16 benchmarks x 80 items, every figure of it drawn."""
    store = write_store(
        tmp_path / "store",
        calibrations=CALIBRATIONS,
        ratios=(0.25, 0.5),
        items=80,
        overlap=True,
    )
    with time_limit(20):
        report_of(store, tmp_path / "out")


# ---- as a person sees it: opened from its file in a headless Chromium, offline


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("selenium")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    driver_program = shutil.which("chromedriver")
    if not (program and driver_program):
        pytest.skip("needs chromium and chromedriver")
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = program
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with Chrome(options=options, service=Service(driver_program)) as driver:
        driver.execute_cdp_cmd("Network.enable", {})
        driver.execute_cdp_cmd(
            "Network.emulateNetworkConditions",
            {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
        )
        yield driver


def show(browser: Any, page: Path, width: int, scheme: str = "light", address: str = "") -> None:
    browser.get("about:blank")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page.as_uri() + address)


@pytest.fixture
def wide(browser: Any, small_report: Path) -> Any:
    """The browser with the report in a wide window."""
    show(browser, small_report, 1400)
    return browser


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (400, "light"),
        (360, "dark"),
        (768, "dark"),
        (1400, "light"),
    ],
)
def test_nothing_overflows_and_nothing_complains(
    browser: Any, small_report: Path, width: int, scheme: str
) -> None:
    """Nothing is wider than the window, nothing complains, no heading is cut, and the colours are
    those asked for."""
    show(browser, small_report, width, scheme)
    open_all = "for (const d of document.querySelectorAll('details')) d.open = true;"
    script(browser, f"{OPEN}{open_all} await until(() => document.querySelector('#coverage td'));")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []
    colour = browser.execute_script(
        "return getComputedStyle(document.body).getPropertyValue('background-color')"
    )
    assert (sum(map(int, re.findall(r"\d+", colour)[:3])) > 384) == (scheme == "light")
    cut = browser.execute_script(
        "return [...document.querySelectorAll('h1,h2,h3')]"
        ".filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"
    )
    assert cut == []


def script(browser: Any, code: str) -> Any:
    """What the code returns, after the page has drawn what is to be seen."""
    return browser.execute_async_script(
        "const done = arguments[0]; const wait = (ms) => new Promise((r) => setTimeout(r, ms));"
        "const until = async (test) => { while (!test()) await wait(20); };"
        f"(async () => {{ {code} }})().then(done, (error) => done(String(error)))"
    )


OPEN = """
const all = (selector) => [...document.querySelectorAll(selector)];
const texts = (row) => [...row.cells].map((cell) => cell.textContent);
const rows = () => all("#table-ranks tbody tr:not([hidden])").map(texts);
const marks = () => all("#ranking .mark-symbol path[aria-label*=MAN]");
const choose = (menu, value) => {
  const input = document.querySelector(`[name="${menu}"]`);
  input.value = value;
  input.dispatchEvent(new Event("input", { bubbles: true }));
};
document.querySelector("#ranks").open = true;
await until(() => rows().length && marks().length);
"""


def test_menus_rule_charts_and_tables_and_the_address(wide: Any, small_report: Path) -> None:
    code = """
    const before = [rows().length, marks().length];
    choose("Calibration", "Code");
    await until(() => marks().length < before[1]);
    const sets = new Set(rows().map((row) => row[2]));
    return [...before, rows().length, marks().length, sets.size, location.hash];
    """
    all_rows, all_marks, rows, marks, sets, address = script(wide, OPEN + code)
    assert (all_rows, rows, sets) == (30, 10, 1)
    assert (all_marks, marks) == (6, 2), "MAN with three sets at two ratios"
    assert address == "#Calibration=Code"
    show(wide, small_report, 1400, address=address)
    seen = script(wide, OPEN + "return [rows().length, marks().length]")
    assert seen == [10, 2], "a link shows a view"


def test_tables_are_searched(wide: Any) -> None:
    code = """
    const total = rows().length;
    choose("search", "frequency");
    await until(() => rows().length < total);
    return rows().map((row) => row[3]);
    """
    found = script(wide, OPEN + code)
    assert set(found) == {"Frequency"} and len(found) == 6


def test_points_have_tooltips(wide: Any) -> None:
    from selenium.webdriver import ActionChains

    [point] = script(
        wide,
        OPEN + "return [document.querySelector('#ranking .mark-symbol path[aria-label*=MAN]')]",
    )
    ActionChains(wide).move_to_element(point).perform()
    tip = "const tip = () => document.querySelector('#vg-tooltip-element.visible')?.textContent;"
    shown = script(wide, f"{tip} await until(tip); return tip()")
    assert "MAN" in shown and "score" in shown


def test_the_first_screen_has_the_verdict_and_the_chart(wide: Any) -> None:
    bottom = "document.querySelector('#ranking svg').getBoundingClientRect().bottom"
    assert script(wide, f"{OPEN} return {bottom}") <= 900
    assert script(wide, "return document.documentElement.scrollHeight") <= 10_000


def test_text_of_charts_is_text_in_the_colour_of_the_theme(
    browser: Any, small_report: Path
) -> None:
    shades = []
    for scheme in ("light", "dark"):
        show(browser, small_report, 1400, scheme)
        label = (
            "[...document.querySelectorAll('#ranking text')].find((t) => t.textContent == 'MAN')"
        )
        shades.append(script(browser, f"{OPEN} return getComputedStyle({label}).fill"))
    assert shades[0] != shades[1]


# ---- two plans compared, and answers


class Plans(NamedTuple):
    """A report with its store. The items of GSM8K that MAN answered: the first was cut off, the
    second loops, and the third has a long answer with a tag. MAN retains the first experts of layer
    0, and the others the last ones."""

    store: Path
    page: Path

    def outcomes(self, criterion: str) -> pd.Series:
        """Outcomes of the items of GSM8K."""
        [folder] = self.store.glob(f"evaluate/*-{criterion}-*gsm8k-*")
        return pd.read_parquet(folder / "samples.parquet")["outcome"]


PLANS = ["pocket_olmoe man pocket_code 0.5", "pocket_olmoe reap pocket_code 0.5"]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    root = tmp_path_factory.mktemp("plans")
    tasks = ("gsm8k", "perplexity")
    store = write_store(root / "store", criteria=("reap", "man", "random"), tasks=tasks)
    [folder] = store.glob("evaluate/*-man-*gsm8k-*")
    samples = pd.read_parquet(folder / "samples.parquet")
    first, second, third = [1.0] + [0.0] * 19, [0.0, 1.0] + [0.0] * 18, "<b>tag</b>" + "x" * 5000
    samples["output"] = ["short", "short", third] + ["short"] * 17
    samples.assign(limit=first, loop=second).to_parquet(folder / "samples.parquet")
    [plan] = store.glob("plan/*-man-*/plan.json")
    with edited_document(plan) as document:
        layer = document["layers"]["0"]
        layer["retained"] = list(range(len(layer["retained"])))
    return Plans(store, report_of(store, root / "out"))


PLAN_ROWS = """
document.querySelector("#plans").open = true;
await until(() => all("#plans-answers td").length);
const table = (id) => all(`#plans-${id} tbody tr:not([hidden])`).map(texts);
"""


def test_page_compares_two_plans_as_the_command(browser: Any, plans: Plans) -> None:
    show(browser, plans.page, 1400, address="#" + urlencode(dict(zip("AB", PLANS, strict=True))))
    code = "return [table('scores'), table('costs'), table('experts')]"
    scores, costs, experts = script(browser, f"{OPEN}{PLAN_ROWS}{code}")
    expected = differences.compare("man", "reap", plans.store)
    columns = ["items", "score_a", "score_b", "difference", "low", "high"]
    numbers = expected.scores.set_index("benchmark")[columns]
    shown = {name: [float(text.replace("−", "-")) for text in row] for name, *row in scores}
    assert shown["GSM8K"] == pytest.approx(numbers.loc["gsm8k"], abs=6e-4)
    assert shown["perplexity"] == pytest.approx(numbers.loc["perplexity"], abs=6e-4)
    assert [name for name, *_ in costs] == list(expected.costs["cost"])
    shares = expected.experts.query("layer == 0")
    rows = shares[["layer", "expert", "share_a", "share_b"]].astype(int).astype(str)
    assert experts[: len(rows)] == rows.to_numpy().tolist() and len(rows)


def test_answers_are_filtered(browser: Any, plans: Plans) -> None:
    show(browser, plans.page, 1400, address="#" + urlencode(dict(zip("AB", PLANS, strict=True))))
    code = """
    const names = [...document.querySelector("[name=Show]").options].map((option) => option.text);
    const items = {};
    for (const name of names.toReversed()) {
      document.querySelector("#plans-answers tbody tr").id = "old";
      choose("Show", name === names[0] ? "" : name);
      await until(() => !document.querySelector("#old"));
      items[name] = table("answers").map((row) => Number(row[0].split("\\n")[0].split("/")[1]));
    }
    return [items, table("answers")[2]];
    """
    items, third = script(browser, f"{OPEN}{PLAN_ROWS}{code}")
    a, b, before = (plans.outcomes(name) for name in ("man", "reap", "none-none"))
    right_before = (before == 1) & ((a == 0) | (b == 0))
    assert items == {
        "all items": list(range(20)),
        "right before, wrong after": list(right_before[right_before].index),
        "differs between A and B": list(a[a != b].index),
        "cut off": [0],
        "loops": [1],
    }
    assert 0 < len(items["differs between A and B"]) < 20
    assert "<b>tag</b>xxx" in third[3] and "<b>" not in third[4]
    assert all(plan in third[5] for plan in PLANS)


def test_another_process_reads_the_answers_of_a_large_report(
    plans: Plans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "FEW_EVALUATIONS", 0)
    store = shutil.copytree(plans.store, tmp_path / "store")
    study = load(store, "made_up")
    page = report.write_report(report.Publisher(Results(study), tmp_path / "whole"))
    large, small = (
        [file.read_bytes() for file in sorted(path.parent.glob("data/answers*"))]
        for path in (page, plans.page)
    )
    assert large and large == small
    answers = report._start_reading_answers(study)
    for process in active_children():
        process.kill()
    assert answers() == differences.page_answers(study.results, store)
    next(store.glob("evaluate/*-man-*gsm8k-*/samples.parquet")).unlink()
    page = report.write_report(report.Publisher(Results(study), tmp_path / "part"))
    assert "samples.parquet is missing" in page_text(page)


def test_many_answers_are_sampled(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    study = load(plans.store, "made_up")
    monkeypatch.setattr(differences, "MOST_CHARACTERS", 4000)
    monkeypatch.setattr(differences, "MOST_OUTCOMES", 100)
    documents, _ = differences.page_answers(study.results, study.store)
    document = json.loads(gzip.decompress(b64decode(documents["GSM8K"])))
    assert document["note"] == "A sample: one of 3 items. "
    assert [item for item, *_ in document["items"]] == [
        f"gsm8k/{number}" for number in range(0, 20, 3)
    ]
    numbers = differences.page_plans(study)
    assert numbers["note"] and len(numbers["outcomes"]) == 20


# ---- the keyboard, paper, and no script


def test_everything_is_reached_by_tab_with_a_visible_focus(wide: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    script(wide, f"{OPEN}{PLAN_ROWS} document.activeElement.blur()")
    code = "const e = document.activeElement; return [e, getComputedStyle(e).outlineStyle]"
    reached = []
    body = wide.find_element("tag name", "body")
    for _ in range(200):
        body.send_keys(Keys.TAB)
        element, outline = wide.execute_script(code)
        if element.tag_name == "body":  # after the last one
            break
        assert outline != "none", element.get_attribute("outerHTML")[:100]
        reached.append(element)
    selectors = "select, input, .bar button, summary, details[open] .scroll, .first .scroll"
    missing = [
        element.get_attribute("outerHTML")[:100]
        for element in wide.find_elements("css selector", selectors)
        if element.is_displayed() and element not in reached
    ]
    assert not missing


def test_paper_is_light_and_shows_all_chapters(browser: Any, small_report: Path) -> None:
    show(browser, small_report, 1400, "dark")
    paper = {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", paper)
    visible = "(selector) => document.querySelector(selector).checkVisibility()"
    code = f"const visible = {visible}; return [visible('.bar'), visible('#ranks .items')]"
    assert script(browser, code) == [False, True], "before the chapter was opened"
    code = """
    let printed = 0;
    window.print = () => { printed = document.querySelectorAll("figure :is(svg, table)").length; };
    const press = new KeyboardEvent("keydown", { key: "p", ctrlKey: true, cancelable: true });
    dispatchEvent(press);
    await until(() => printed);
    const colour = getComputedStyle(document.body).backgroundColor;
    return [printed, document.querySelectorAll("figure").length, press.defaultPrevented, colour];
    """
    printed, figures, is_prevented, colour = script(browser, code)
    assert printed >= figures > 10 and is_prevented
    assert sum(map(int, re.findall(r"\d+", colour)[:3])) > 700


def test_page_without_javascript_says_so(browser: Any, small_report: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    show(browser, small_report, 400)
    snapshot = browser.execute_cdp_cmd("DOMSnapshot.captureSnapshot", {"computedStyles": []})
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    [document] = snapshot["documents"]
    shown = [snapshot["strings"][index] for index in document["layout"]["text"] if index >= 0]
    assert any("JavaScript, which is switched off here" in text for text in shown)


def test_the_javascript_is_put_together_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = vega.library()
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda *_: "")
    assert vega.library() == library
    assert "vegaEmbed" in library
