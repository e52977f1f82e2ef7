"""The report as a person sees it: opened from its file in a headless Chromium, offline."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

selenium = pytest.importorskip("selenium", reason="selenium is not installed")

BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromedriver")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = str(BROWSER)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with Chrome(options=options, service=Service(str(DRIVER))) as driver:
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


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (768, "dark"), (1400, "light")])
def test_nothing_overflows_and_nothing_complains(browser: Any, small_report: Path, width: int, scheme: str) -> None:
    """Nothing is wider than the window, nothing complains, no heading is cut, and the colours are those asked for."""
    show(browser, small_report, width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []
    colour = browser.execute_script("return getComputedStyle(document.body).getPropertyValue('background-color')")
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
        script = "return getComputedStyle(document.querySelector('figure.plot svg [style*=\"fill: var(--ink)\"]')).fill"
        shades.append(browser.execute_script(script))
    assert shades[0] != shades[1]


def test_tables_sort_and_filter(wide: Any) -> None:
    visible = (
        "const rows = [...document.querySelectorAll('#table-ranks tbody tr')].filter(r => !r.hidden);"
        "return rows.map(r => [r.cells[2].textContent, r.cells[r.cells.length - 2].dataset.key])"
    )
    heads = "[...document.querySelectorAll('#table-ranks th button')]"
    click = f"{heads}.find(b => b.textContent == 'Avg Rank').click()"
    assert len(wide.execute_script(visible)) == 5, "the first block is shown at first"
    wide.execute_script(click)
    down = wide.execute_script(visible)
    wide.execute_script(click)
    up = wide.execute_script(visible)
    assert [float(key) for _, key in down[:4]] == sorted((float(key) for _, key in down[:4]), reverse=True)
    assert up[0][0] == "MAN" and up[-1][0] == down[-1][0] == "Unpruned", "what has no value stays last"
    wide.execute_script(
        "for (const select of document.querySelectorAll('#table-ranks select'))"
        " { select.value = ''; select.dispatchEvent(new Event('change')); }"
    )
    assert len(wide.execute_script(visible)) == 30


def test_figures_open_large_and_close(wide: Any) -> None:
    wide.execute_script("document.querySelector('figure.plot .large').click()")
    assert wide.execute_script("return document.querySelector('#viewer').open")
    assert wide.execute_script("return document.querySelector('#viewer svg').getBoundingClientRect().width") > 900
    wide.execute_script("document.querySelector('#viewer .close').click()")
    assert not wide.execute_script("return document.querySelector('#viewer').open")


def test_tables_can_be_downloaded(wide: Any) -> None:
    script = "return fetch(document.querySelector('#table-ranks a[download$=csv]').href).then(r => r.text())"
    assert wide.execute_script(script).startswith("Model,Pruned,Calibration,Criterion,Eval+,")
