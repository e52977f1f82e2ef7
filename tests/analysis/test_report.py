"""The report: what its files say and need, what happens when an output cannot be made, and how a
browser shows it."""

import html
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
from processes import within
from synthetic import CRITERIA, edited, record_path, write_store

from analysis import names, report
from analysis.__main__ import main
from analysis.load.study import load
from analysis.published import tables
from analysis.registry import REGISTERED, Item, Results, find
from analysis.render.table import Table

pytestmark = pytest.mark.slow

NETWORK = re.compile(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(["']?http""")
FEW = {"calibrations": ("pocket_code",), "ratios": (0.25,), "items": 10, "overlap": False}


def text(page: Path) -> str:
    return html.unescape(page.read_text(encoding="utf-8")).replace("\u00a0", " ")


def test_the_page_says_what_was_run_and_where(small_report: Path) -> None:
    said = text(small_report)
    for words in (
        "Four criteria chose which experts of pocket_olmoe to remove",
        "Nothing is missing",
        "30 items per benchmark",
        "plan/pocket_olmoe-pocket_code-man-0.25",
        "lm_eval 0.0-synthetic",
        "made-up text",
        "imagined, 2 cores",
    ):
        assert words in said
    found = re.findall(r"<th scope=col class=(\w+) [^>]*><button type=button>(\w+)<", said)
    assert ("text", "Criterion") in found and ("number", "GSM8K") in found, found


KINDS: dict[str, dict[str, Any]] = {
    "perplexity": {"tasks": ("perplexity",), "random_seeds": (1, 2, 3), "ratios": (0.25, 0.5)},
    "one benchmark": {"tasks": ("gsm8k",), "calibrations": ("pocket_code",), "ratios": (0.5,)},
    "a thousand cells": {"tasks": ("gsm8k",), "ratios": [number / 100 for number in range(20, 50)]},
}
"""What a study may have little or much of."""
HEADLINE = re.compile(
    r"(?P<model>\S+), (?P<pruned>\S+ %.*?) removed: (?P<best>.*?) (has|have) the "
    r"(?P<what>lowest mean perplexity|highest average), "
    r"(?P<score>\S+) \((?P<low>\S+) to (?P<high>\S+) over (?P<over>.*?)\), "
    r"(?P<share>\d+) % of the unpruned model's\.(?P<rest>.*)"
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_sentence_of_a_page_follows_from_its_tables(tmp_path: Path, kind: str) -> None:
    many = [name for name in CRITERIA if name not in ("aimer", "magnitude")]
    usual = {
        "items": 12,
        "overlap": False,
        "criteria": many if "cells" in kind else ("frequency", "man", "random"),
    }
    store = write_store(tmp_path / "store", **{**usual, **KINDS[kind]})
    page = report.write(store, "made_up", tmp_path / "out")
    said = text(page)
    study = load(store, "made_up")
    # several of a thousand cells remove the same experts
    assert ("cells" in kind) == (len(study.document["cells"]) > 1000) and not list(
        (tmp_path / "out").glob("failed/*")
    )
    table = pd.read_csv(tmp_path / "out" / "tables" / "ranking.csv", keep_default_na=False)
    mean = "Mean perplexity" if kind == "perplexity" else "Avg"
    table[mean] = table[mean].astype(float)
    sentences = re.findall(
        r"<p>(.*?)</p>", said[said.index('<section id="ranking">') :].partition("</section>")[0]
    )
    found = [match for match in map(HEADLINE.fullmatch, sentences) if match]
    blocks = {pruned: rows for pruned, rows in table.groupby("Pruned", sort=False)}
    assert [match["pruned"] for match in found] == list(blocks)[:8]
    others = [sentence for sentence in sentences if not HEADLINE.fullmatch(sentence)]
    chance = table["Status"].str.endswith("chance").any()
    assert len(others) == 2 + chance + (len(blocks) > 8), (
        "of one seed, how to read a row, chance, more rankings"
    )
    assert chance == (kind == "perplexity") and any("one seed" in sentence for sentence in others)
    above = {
        model
        for model, status in zip(table["Model"], table["Status"], strict=True)
        if status == "above chance"
    }
    assert (
        any(
            sentence.startswith(f"{'Some' if above else 'No'} plan is above ")
            for sentence in others
        )
        == chance
    )
    assert (f"The table has {len(blocks) - 8} more rankings" in said) == (len(blocks) > 8)
    for match in found:
        rows = blocks[match["pruned"]].reset_index(drop=True)
        best = rows.iloc[0]
        assert (
            match["best"].startswith(best["Criterion"]) and match["over"] == best["Interval over"]
        )
        assert not rows["Status"].str.contains("best|separated").any(), "a method has one seed"
        assert best[mean] == (rows[mean].min() if kind == "perplexity" else rows[mean].max())
        numbers = [float(match[key]) for key in ("score", "low", "high")]
        ends = [best[mean], float(best[f"{mean} low"]), float(best[f"{mean} high"])]
        assert numbers == pytest.approx(ends, abs=6e-4) and match["what"].endswith(
            mean.lower().replace("avg", "average")
        )
        assert float(match["share"]) == pytest.approx(100 * float(best["Of unpruned"]), abs=0.51)
        assert not {"Behind", "p"} & set(rows)
        for place in ("above chance", "below chance"):
            count = (rows["Status"] == place).sum()
            assert (f"{count} {place}" in match["rest"]) == (count > 0)
    # a plan's number is that of its items, and of nothing else
    cell = study.cells.query("criterion == 'man'").index[0]
    own = study.samples[study.samples["cell"] == cell]
    weights = own["units"].fillna(1)
    score = float((own["outcome"] * weights).sum() / weights.sum())
    shown = math.exp(score) if kind == "perplexity" else score
    assert (table[mean] - shown).abs().min() < 1e-4
    if kind == "perplexity":
        every = pd.read_csv(tmp_path / "out" / "tables" / "unified.table5.csv")
        assert (every["perplexity"] - shown).abs().min() < 1e-4 and every["perplexity"].between(
            10, 30
        ).all()
        latex = (tmp_path / "out" / "tables" / "unified.table5.tex").read_text(encoding="utf-8")
        assert f"{shown:.3f}" in latex and "less is better" in latex
        assert (
            "Mean perplexity, less is better (unpruned "
            in (tmp_path / "out" / report.SUMMARY).read_text()
        )
    pruned = study.cells[study.cells["criterion"] != "none"]
    assert (
        f"That gave {names.count(len(pruned), 'pruned model')}, each evaluated" in said
        and "Nothing is missing" in said
    )
    for chapter in ("search", "claims", "winners", "recovery", "channels"):
        assert f'<section id="{chapter}">' not in said, f"nothing of {chapter} was run"
    silent = re.search(r"This study has nothing for (.*?) \(", said)
    assert silent and not {*re.split(", | and ", silent[1])} & {
        path.stem for path in tmp_path.glob("out/*/*")
    }


def test_the_page_needs_nothing_of_the_files_that_lie_beside_it(small_report: Path) -> None:
    source = small_report.read_text(encoding="utf-8")
    assert not NETWORK.search(source.replace('xmlns="http://www.w3.org/2000/svg"', ""))
    ids = re.findall(r'\sid="([^"]+)"', source)
    references = set(re.findall(r'(?:href="#|url\(#)([^")]+)', source))
    assert references <= set(ids)
    assert source.count("<svg") >= 5 and "var(--ink)" in source
    figures = small_report.parent / "figures"
    files = small_report.parent / "tables"
    for name in (
        "unified.fig2",
        "unified.fig3",
        "winners",
        "ranking",
        "aimer.fig3",
        "tokens_per_expert",
    ):
        drawn = ElementTree.parse(figures / f"{name}.svg").getroot()
        assert len(list(drawn.iter("{http://www.w3.org/2000/svg}path"))) > 20
    linked = set(re.findall(r'href="figures/([^"]+)"', source))
    assert "ranking.svg" in linked and linked <= {path.name for path in figures.iterdir()}
    for name in (
        "unified.table1",
        "unified.table2",
        "unified.table3",
        "unified.table5",
        "ranks",
        "winners",
    ):
        for suffix in ("csv", "md", "tex", "html"):
            assert (files / f"{name}.{suffix}").stat().st_size > 100


def test_gaps_are_written_about_and_end_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = write_store(
        tmp_path / "store", criteria=("frequency", "man"), tasks=("gsm8k", "math500", "rte"), **FEW
    )
    with edited(record_path(store)) as study:
        study["cells"][1]["evaluate"]["gsm8k"] = None
        study["cells"][1]["errors"] = {"gsm8k": "the <b>tokenizer</b> broke"}
        study["cells"][2]["evaluate"]["rte"] = None
    assert main(["report", f"store={store}", f"out={tmp_path / 'out'}"]) == 1
    assert "failed: the <b>tokenizer</b> broke" in capsys.readouterr().err
    source = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Two gaps: some results are missing" in source
    assert "the <b>tokenizer</b>" not in source and "&lt;b&gt;tokenizer" in source
    assert "– marks a result that is missing" in source
    ranks = (tmp_path / "out" / "tables" / "ranks.csv").read_text()
    assert re.search(r"^pocket_olmoe,25 %,Code,Frequency,,[\d.]+,[\d.]+,,,", ranks, re.MULTILINE)


@pytest.mark.parametrize(
    ("file_format", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")]
)
def test_what_is_named_is_made_alone_its_figures_in_the_format_asked_for(
    small: Path, tmp_path: Path, file_format: str, start: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"store={small}", f"out={tmp_path}", f"format={file_format}"]
    assert main(["unified.fig2", "unified.table2", *words]) == 0
    [figure] = (tmp_path / "figures").iterdir()
    assert figure.name == f"unified.fig2.{file_format}" and figure.read_bytes().startswith(start)
    suffixes = ("csv", "html", "md", "tex")
    written = [
        f"{name}.{suffix}" for name in ("unified.fig2", "unified.table2") for suffix in suffixes
    ]
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == written
    assert "unified.table2.csv" in capsys.readouterr().out


def _raises(results: Results, name: str = "") -> list[Item]:
    raise KeyError("cell")


@pytest.mark.parametrize("word", ["report", "all"])
def test_an_output_that_cannot_be_made_is_a_gap_and_the_others_go_on(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = write_store(
        tmp_path / "store", criteria=("frequency", "man"), tasks=("gsm8k", "rte"), **FEW
    )
    out = tmp_path / "out"
    unwritable = Table("pareto", "Bad", "", pd.DataFrame({"x": ["a word"]}), {"x": "{:.3f}"})
    with monkeypatch.context() as broken:
        broken.setitem(REGISTERED, "ranks", replace(find("ranks"), make=_raises))
        broken.setitem(REGISTERED, "pareto", replace(find("pareto"), make=lambda *_: [unwritable]))
        broken.setattr(report, "published_chapter", _raises)
        assert main([word, f"store={store}", f"out={out}"]) == 1
    said = capsys.readouterr()
    for name, reason in {
        "ranks": "KeyError: 'cell'",
        "pareto": "ValueError: Unknown format code 'f'",
    }.items():
        assert (
            f"analysis: {name}: could not be made ({reason}" in said.err
            and f"{name} needs" not in said.err
        )
        assert "Traceback (most recent call last)" in (out / "failed" / f"{name}.log").read_text()
        assert name in (out / "tables" / "gaps.csv").read_text()
        assert not (out / "tables" / f"{name}.csv").exists()
    assert (out / "figures" / "ranking.svg").exists() and (out / "tables" / "winners.csv").exists()
    if word == "report":
        assert (
            "failed/ranks.log" in text(out / "report.html")
            and (out / "failed" / "published.log").exists()
        )
    assert main([word, f"store={store}", f"out={out}"]) == 0
    assert not list((out / "failed").glob("*")), "what is mended leaves no trace"


def test_a_named_output_or_comparison_that_cannot_be_made_says_why_in_a_sentence(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REGISTERED, "ranks", replace(find("ranks"), make=_raises))
    monkeypatch.setattr(tables, "key_of", _raises)
    assert main(["ranks", "unified.table1", "--compare", f"store={small}", f"out={tmp_path}"]) == 1
    said = capsys.readouterr()
    for name in ("ranks", "unified.table1.published"):
        why = (
            f"analysis: {name}: could not be made (KeyError: 'cell'), traceback in "
            f"failed/{name}.log\n"
        )
        assert why in said.err and (tmp_path / "failed" / f"{name}.log").exists()
    assert (
        said.err.count("could not be made") == 2
        and (tmp_path / "tables" / "unified.table1.csv").exists()
    )


def test_a_smaller_study_has_a_smaller_report(tmp_path: Path) -> None:
    """One data-free criterion, one benchmark of no known column, no calibration pass."""
    none = {**FEW, "calibrations": ()}
    store = write_store(tmp_path / "store", criteria=("random",), tasks=("arc_easy",), **none)
    said = text(report.write(store, "made_up", tmp_path / "out"))
    assert "One criterion chose which experts" in said and "one pruned model" in said
    assert "MC Avg is the mean of 1 of its 8 benchmarks" in said
    assert "Overlap of pruned experts across" not in said


def test_the_analysis_never_imports_torch(small: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from analysis.__main__ import main; "
        f"assert main(['unified.fig2', 'ranks', 'tokens_per_expert', 'store={small}', "
        f"'out={tmp_path}']) == 0; "
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules), 'heavy imports'; "
        "light = 'errors interrupt json_files packs paths progress results secrets'.split(); "
        "own = {name for name in sys.modules if name.startswith('moe_lab.')}; own -= "
        "{f'moe_lab.{n}' for n in light}; "
        "assert not own, own"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_full_study_is_reported_within_its_budget(tmp_path: Path) -> None:
    """73 cells x 16 benchmarks x 80 items, every figure of it drawn."""
    store = write_store(tmp_path / "store")
    with within(20):
        report.write(store, "made_up", tmp_path / "out")


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


def show(browser: Any, page: Path, width: int, scheme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page.as_uri())


@pytest.fixture
def wide(browser: Any, small_report: Path) -> Any:
    """The browser with the report in a wide window."""
    show(browser, small_report, 1400)
    return browser


@pytest.mark.parametrize(
    ("width", "scheme"), [(360, "light"), (360, "dark"), (768, "dark"), (1400, "light")]
)
def test_nothing_overflows_and_nothing_complains(
    browser: Any, small_report: Path, width: int, scheme: str
) -> None:
    """Nothing is wider than the window, nothing complains, no heading is cut, and the colours are
    those asked for."""
    show(browser, small_report, width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []
    colour = browser.execute_script(
        "return getComputedStyle(document.body).getPropertyValue('background-color')"
    )
    assert (sum(map(int, re.findall(r"\d+", colour)[:3])) > 384) == (scheme == "light")
    cut = browser.execute_script(
        "return [...document.querySelectorAll('h1,h2,h3,.tiles dd,.tiles dt')]"
        ".filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"
    )
    assert cut == []


def test_the_text_of_figures_follows_the_theme(browser: Any, small_report: Path) -> None:
    shades = []
    for scheme in ("light", "dark"):
        show(browser, small_report, 1400, scheme)
        script = (
            "return getComputedStyle(document.querySelector('figure.plot svg [style*=\"fill: "
            "var(--ink)\"]')).fill"
        )
        shades.append(browser.execute_script(script))
    assert shades[0] != shades[1]


def test_tables_sort_filter_and_can_be_downloaded(wide: Any) -> None:
    visible = (
        "const rows = [...document.querySelectorAll('#table-ranks tbody tr')].filter(r => "
        "!r.hidden);"
        "return rows.map(r => [r.cells[2].textContent, r.cells[r.cells.length - 1].dataset.key])"
    )
    heads = "[...document.querySelectorAll('#table-ranks th button')]"
    click = f"{heads}.find(b => b.textContent == 'Avg Rank').click()"
    assert len(wide.execute_script(visible)) == 5, "the first block is shown at first"
    wide.execute_script(click)
    down = wide.execute_script(visible)
    wide.execute_script(click)
    up = wide.execute_script(visible)
    assert [float(key) for _, key in down[:4]] == sorted(
        (float(key) for _, key in down[:4]), reverse=True
    )
    assert up[0][0] == "MAN" and up[-1][0] == down[-1][0] == "Unpruned", (
        "what has no value stays last"
    )
    wide.execute_script(
        "for (const select of document.querySelectorAll('#table-ranks select'))"
        " { select.value = ''; select.dispatchEvent(new Event('change')); }"
    )
    assert len(wide.execute_script(visible)) == 30
    download = (
        "return fetch(document.querySelector('#table-ranks a[download$=csv]').href).then(r "
        "=> r.text())"
    )
    assert wide.execute_script(download).startswith("Model,Pruned,Calibration,Criterion,Eval+,")


def test_figures_open_large_and_close(wide: Any) -> None:
    wide.execute_script("document.querySelector('figure.plot .large').click()")
    assert wide.execute_script("return document.querySelector('#viewer').open")
    assert (
        wide.execute_script(
            "return document.querySelector('#viewer svg').getBoundingClientRect().width"
        )
        > 900
    )
    wide.execute_script("document.querySelector('#viewer .close').click()")
    assert not wide.execute_script("return document.querySelector('#viewer').open")
