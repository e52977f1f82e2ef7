"""What the repository says of itself: what its pages name exists, the lowest versions are its lower
bounds, and what is used of transformers beyond its public interface is in one module."""

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement

from benchmarks.cuda import ROWS
from moe_lab import compose as composition
from moe_lab.errors import UserError
from moe_lab.study.preflight import preflight
from tools import elsewhere

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
    for link in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path)
        assert "://" in link or (target.exists() and (not anchor or anchor in anchors(target))), (
            link
        )


FILES = {
    "model.path=DIR": "model.path=moe_lab/pocket/data/olmoe",
    "calibration.path=FILE": "calibration.path=pocket:calibration/general.jsonl",
    "path=FILE": "path=README.md",
    "path=FOLDER": "path=examples/function_calls",
    "path:notes.txt": "path:README.md",
    "calibration.path=notes.txt": "calibration.path=pocket:calibration/general.jsonl",
    "path=notes.txt": "path=README.md",
    "allocation.search=NAME": "allocation.search=evol_search",
    "model=NAME": "model=pocket_function_calls",
}
"""What a page leaves to its reader -> something that is there."""
UNKNOWN = {
    "plugins=[my_package.my_module]": (
        "a package of the reader's: tests/test_installation.py has one"
    ),
    "peak": "the criterion that the page adds: tests/criteria/test_criteria.py",
    "colours": "the benchmark that the page adds: tests/evaluation/test_suite.py",
    "schedule.json": "the reader's schedule",
    "...": "part of a command",
    "suite=bfcl": "a folder of BFCL's files",
    "interval(": "a sweeper makes the values: tests/study/test_end_to_end.py",
}
"""Words of commands that cannot be composed here, and why."""
COMMAND = re.compile(r"(?:^|&& )(?: {4})?python -m moe_lab ((?:.*\\\n)*.*)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_ask_for_studies_that_there_are(page: Path) -> None:
    """Every `python -m moe_lab` in a page is taken: its settings and their combination."""
    refused = {}
    for written in COMMAND.findall(page.read_text("utf-8")):
        for placeholder, value in FILES.items():
            written = written.replace(placeholder, value)
        if any(word in written for word in UNKNOWN):
            continue
        words = [
            word
            for word in shlex.split(written.replace("\\\n", " "), comments=True)
            if word != "-m"
        ]
        try:
            with composition.started():
                settings, requests = composition.compose(words)
            problems = preflight(settings, requests)
        except UserError as error:
            problems = [str(error)]
        if problems:
            refused[written] = problems
    assert refused == {}


def test_the_documentation_has_every_row_about_cuda() -> None:
    section = (ROOT / "docs" / "performance.md").read_text("utf-8").partition("## CUDA")[2]
    commands = [row.command.replace("{scratch}/olmoe_7b", "FOLDER") for row in ROWS]
    assert [f"`python {command}`" in section for command in commands] == [True] * len(ROWS)


def test_the_functions_and_packages_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    named = re.findall(r"`([\w/]+\.py): (\w+)`", text)
    assert len(named) > 20
    for file, name in named:
        body = ast.parse((ROOT / file).read_text("utf-8")).body
        found = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert name in found, f"{file}: {name}"
    listed = set(re.findall(r"`moe_lab/(\w+)/`", text.split("## Packages")[1].split("\n## ")[0]))
    assert listed == {path.parent.name for path in (ROOT / "moe_lab").glob("*/__init__.py")}


def test_imports_inside_the_analysis_are_no_deeper_than_the_architecture_says() -> None:
    graph = grimp.build_graph("analysis", exclude_type_checking_imports=True)

    @cache
    def depth(module: str) -> int:
        return 1 + max(
            (depth(other) for other in graph.find_modules_directly_imported_by(module)), default=0
        )

    deepest = max(graph.modules, key=depth)
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    stated = re.search(r"at most (\d+)\s+modules deep", text)
    assert stated and depth(deepest) <= int(stated[1]), deepest


def test_the_lowest_versions_are_all_lower_bounds() -> None:
    """`make elsewhere RUNS=lowest` would otherwise try newer ones, and pass."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = [about["project"]["dependencies"], *about["project"]["optional-dependencies"].values()]
    rows = [
        Requirement(row) for rows in [*lists, about["dependency-groups"]["dev"]] for row in rows
    ]
    bounds = {
        row.name: bound.version for row in rows for bound in row.specifier if bound.operator == ">="
    }
    lowest = dict(line.split("==") for line in elsewhere.lowest(ROOT / "pyproject.toml"))
    assert bounds.keys() == {row.name for row in rows} and lowest == bounds


CODE = ROOT / "moe_lab"
ONE_PLACE = Path("models/transformers_private.py")
SHIPPED = {Path("exported_code") / f"{name}.py" for name in ("deepseek_moe", "pruned", "ragged")}
"""Written beside the weights of exports, so they cannot import moe_lab; the exports' tests run
them."""
PUBLIC = {
    "transformers": None,
    "transformers.cache_utils": {"DynamicLayer"},
    "transformers.integrations.moe": {"ALL_EXPERTS_FUNCTIONS", "ExpertsInterface"},
    "transformers.utils": {"logging"},
    "transformers.utils.quantization_config": {
        "CompressedTensorsConfig",
        "FineGrainedFP8Config",
        "Mxfp4Config",
    },
}
"""Module -> documented names; None for all that the package offers at the top."""
ATTRIBUTES = {
    "_adjust_missing_and_unexpected_keys",
    "_apply_gate",
    "_attn_implementation",
    "_can_set_experts_implementation",
    "_dequantize_one",
    "_experts_implementation",
    "_get_dtype_plan",
    "_init_weights",
    "_is_expert_parallel",
    "_load_pretrained_model",
    "_update_model_kwargs_for_generation",
    "_weight_conversions",
}


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that is imported from transformers, in functions too."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").partition(".")[0] == "transformers"
        ):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                (alias.name, "") for alias in node.names if alias.name.startswith("transformers.")
            )


def private(tree: ast.AST) -> set[str]:
    """Names that are not public: imported from transformers, or attributes (as text too) of its
    models."""
    found = {
        f"{module}.{name}"
        for module, name in imported(tree)
        if module not in PUBLIC or name.startswith("_") or name not in (PUBLIC[module] or {name})
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and node.value in ATTRIBUTES:
            found.add(node.value)
    return found


def test_no_other_module_uses_what_is_not_public() -> None:
    used = {
        file.relative_to(CODE): private(ast.parse(file.read_text()))
        for file in sorted(CODE.rglob("*.py"))
    }
    assert len(used[ONE_PLACE]) > 10
    assert {file for file, names in used.items() if names} == {ONE_PLACE, *SHIPPED}


def test_versions_that_were_not_tested_are_refused_when_moe_lab_is_installed() -> None:
    stated = re.findall(r'"(transformers\b[^"]*)"', (ROOT / "pyproject.toml").read_text())
    allowed = [Requirement(text).specifier for text in stated]
    assert len(allowed) == 3 and len(set(allowed)) == 1
    assert {clause.operator for clause in allowed[0]} == {"<", ">="}
    pinned = re.search(
        r"^transformers==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    assert pinned is not None and pinned[1] in allowed[0] and version("transformers") in allowed[0]
