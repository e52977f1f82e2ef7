"""Links of the documentation lead somewhere, and the functions that it names exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(FENCE.sub("", page.read_text("utf-8"))) if "://" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path)
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_functions_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    named = re.findall(r"`([\w/]+\.py): (\w+)`", text)
    assert len(named) > 20
    for file, name in named:
        body = ast.parse((ROOT / file).read_text("utf-8")).body
        found = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert name in found, f"{file}: {name}"


def test_the_packages_that_the_architecture_lists_are_those_that_there_are() -> None:
    table = (ROOT / "docs/architecture.md").read_text("utf-8").split("## Packages")[1].split("\n## ")[0]
    listed = set(re.findall(r"`moe_lab/(\w+)/`", table))
    assert listed == {path.parent.name for path in (ROOT / "moe_lab").glob("*/__init__.py")}


def test_imports_inside_the_analysis_are_no_deeper_than_the_architecture_says() -> None:
    graph = grimp.build_graph("analysis", exclude_type_checking_imports=True)

    @cache
    def depth(module: str) -> int:
        return 1 + max((depth(other) for other in graph.find_modules_directly_imported_by(module)), default=0)

    deepest = max(graph.modules, key=depth)
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    stated = re.search(r"at most (\d+)\s+modules deep", text)
    assert stated and depth(deepest) <= int(stated[1]), deepest
