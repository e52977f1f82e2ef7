"""Documentation names what exists, lowest versions are lower bounds, and private names of
transformers are used in one module."""

import ast
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import grimp
import pytest
import yaml
from packaging.requirements import Requirement

import moe_lab
from benchmarks.cuda import ROWS
from moe_lab import compose as composition
from moe_lab.errors import UserError
from moe_lab.study.preflight import preflight
from tools import elsewhere, unordered

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    links = LINK.findall(FENCE.sub("", page.read_text("utf-8")))
    for link in [link for link in links if "://" not in link]:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


PLACEHOLDERS = {
    "model.path=DIR": "model.path=moe_lab/pocket/data/olmoe",
    "model=DIR": "model=moe_lab/pocket/data/olmoe",
    "calibration=FILE": "calibration=pocket:calibration/general.jsonl",
    "calibration.path=FILE": "calibration.path=pocket:calibration/general.jsonl",
    "path=FILE": "path=README.md",
    "path=FOLDER": "path=examples/function_calls",
    "path:notes.txt": "path:README.md",
    "calibration.path=notes.txt": "calibration.path=pocket:calibration/general.jsonl",
    "path=notes.txt": "path=README.md",
    "allocation.search=NAME": "allocation.search=evol_search",
    # a text of 2,048 tokens does not fit the shipped model
    "model=NAME": (
        "model=pocket_function_calls +protocol.benchmarks.function_calls.max_new_tokens=64"
    ),
}
"""Placeholder in a page -> an existing value."""
UNKNOWN = {
    "plugins=[my_package.my_module]": (
        "a package of the reader's: tests/test_installation.py has one"
    ),
    "$study": "the example of the cluster: tests/slurm runs it",
    "peak": "the criterion that the page adds: tests/criteria/test_criteria.py",
    "colours": "the benchmark that the page adds: tests/evaluation/test_suite.py",
    "schedule.json": "the reader's schedule",
    "...": "part of a command",
    "suite=mmlu": "needs a mirror",
    "suite=bfcl": "a folder of BFCL's files",
    "interval(": "a sweeper makes the values: tests/study/test_end_to_end.py",
}
"""Part of a command that cannot be composed here -> reason."""
COMMAND = re.compile(r"(?:^|&& )(?: {4})?moe-lab run ((?:.*\\\n)*.*)$", re.MULTILINE)


def problems_of(arguments: list[str]) -> list[str]:
    """The errors of a study that a command line describes."""
    try:
        with composition.hydra_context():
            settings, requests = composition.compose(arguments)
        return preflight(settings, requests)
    except UserError as error:
        return [str(error)]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_studies_can_start(page: Path) -> None:
    """The settings of every `moe-lab run` in a page, and their combination, are valid."""
    refused = {}
    for command in COMMAND.findall(page.read_text("utf-8")):
        text = command.replace("\\\n", " ")
        for placeholder, value in PLACEHOLDERS.items():
            text = text.replace(placeholder, value)
        if not any(part in text for part in UNKNOWN):
            arguments = shlex.split(text, comments=True)
            if problems := problems_of([argument for argument in arguments if argument != "-m"]):
                refused[text] = problems
    assert refused == {}


def test_the_documentation_has_every_row_about_cuda() -> None:
    section = (ROOT / "docs" / "performance.md").read_text("utf-8").partition("## CUDA")[2]
    commands = [row.command.replace("{scratch}/olmoe_7b", "FOLDER") for row in ROWS]
    assert [f"`python {command}`" in section for command in commands] == [True] * len(ROWS)


@pytest.fixture(scope="module")
def architecture() -> str:
    return (ROOT / "docs" / "architecture.md").read_text("utf-8")


def test_functions_that_the_architecture_names_exist(architecture: str) -> None:
    references = re.findall(r"`([\w/]+\.py): (\w+)`", architecture)
    assert len(references) > 20
    for file, name in references:
        body = ast.parse((ROOT / file).read_text("utf-8")).body
        names = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert name in names, f"{file}: {name}"


def test_the_architecture_lists_all_packages(architecture: str) -> None:
    section = architecture.split("## Packages")[1].split("\n## ")[0]
    packages = {path.parent.name for path in (ROOT / "moe_lab").glob("*/__init__.py")}
    assert set(re.findall(r"`moe_lab/(\w+)/`", section)) == packages


def test_depth_of_imports_in_the_analysis_is_the_documented_one(architecture: str) -> None:
    graph = grimp.build_graph("moe_lab", exclude_type_checking_imports=True)
    modules = {module for module in graph.modules if module.startswith("moe_lab.analysis")}

    @cache
    def depth(module: str) -> int:
        imports = graph.find_modules_directly_imported_by(module) & modules
        return 1 + max((depth(imported_module) for imported_module in imports), default=0)

    deepest = max(modules, key=depth)
    limit = re.search(r"at most (\d+)\s+modules deep", architecture)
    assert limit and depth(deepest) <= int(limit[1]), deepest


def test_lowest_versions_are_the_lower_bounds_of_the_project() -> None:
    """`make elsewhere RUNS=lowest` would otherwise try newer ones, and pass."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    extras = project["optional-dependencies"].values()
    lists = [project["dependencies"], *extras, document["dependency-groups"]["dev"]]
    requirements = [Requirement(row) for rows in lists for row in rows]
    bounds = {
        requirement.name: bound.version
        for requirement in requirements
        for bound in requirement.specifier
        if bound.operator == ">="
    }
    lowest = dict(line.split("==") for line in elsewhere.lowest(ROOT / "pyproject.toml"))
    assert bounds.keys() == {requirement.name for requirement in requirements}
    assert lowest == bounds


CODE = ROOT / "moe_lab"
PRIVATE_MODULE = Path("models/transformers_private.py")
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


def private_names(tree: ast.AST) -> set[str]:
    """Names that are not public: imported from transformers, or attributes (as text too) of its
    models."""
    names = {
        f"{module}.{name}"
        for module, name in imported(tree)
        if module not in PUBLIC or name.startswith("_") or name not in (PUBLIC[module] or {name})
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and node.value in ATTRIBUTES:
            names.add(node.value)
    return names


def test_private_names_of_transformers_are_used_in_one_module() -> None:
    names = {
        file.relative_to(CODE): private_names(ast.parse(file.read_text()))
        for file in sorted(CODE.rglob("*.py"))
    }
    assert len(names[PRIVATE_MODULE]) > 10
    assert {file for file in names if names[file]} == {PRIVATE_MODULE, *SHIPPED}


def test_operations_that_add_in_any_order_on_cuda_need_a_reason() -> None:
    """But for those of `Rows`, of numpy, and those that add nothing."""
    source = """
x.index_add_(0, i, y)
x.cumsum(0)  # ordered: integers
torch.bincount(i, w)
i.bincount(minlength=3)
x.index_put_((i,), y, True)
x.index_put_((i,), y)
numpy.cumsum(x)
class Rows:
    def sum(self): return x.index_add_(0, i, y)
def sum(): return x.scatter_add(0, i, y)
"""
    assert unordered.unordered(source) == [2, 4, 6, 11]
    assert unordered.main() == 0


def test_transformers_versions_are_bounded_and_allow_the_tested_one() -> None:
    requirements = re.findall(r'"(transformers\b[^"]*)"', (ROOT / "pyproject.toml").read_text())
    allowed = [Requirement(text).specifier for text in requirements]
    assert len(allowed) == 3
    assert len(set(allowed)) == 1
    assert {clause.operator for clause in allowed[0]} == {"<", ">="}
    constraints = (ROOT / "constraints.txt").read_text()
    pinned = re.search(r"^transformers==([\d.]+)", constraints, re.MULTILINE)
    assert pinned is not None
    assert pinned[1] in allowed[0]
    assert version("transformers") in allowed[0]


@pytest.mark.slow
def test_the_page_of_reproduction_is_up_to_date() -> None:
    """And README says no more than the page."""
    page = runpy.run_path(str(ROOT / "docs" / "reproduction_page.py"))
    text = page["page"]()
    assert (ROOT / "docs" / "reproduction.md").read_text("utf-8") == text
    sentence = "None of the papers' numbers has been computed on published weights so far."
    assert (sentence in (ROOT / "README.md").read_text("utf-8")) == (": 0 of " in text)


def test_the_files_of_a_release_agree() -> None:
    """`make release` needs the date of the version in the changelog; hosted CI runs .ci/run."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    heading = f"## {citation['version']} ({citation['date-released']})"
    assert citation["version"] == moe_lab.__version__
    assert heading in (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    assert workflow["jobs"]["ci"]["steps"][-1] == {"run": ".ci/run"}
    for form in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(form.read_text("utf-8"))


@pytest.mark.parametrize("page", ["SECURITY.md", "CITATION.cff"])
def test_what_only_the_owner_can_say_is_one_marked_line(page: str) -> None:
    assert (ROOT / page).read_text("utf-8").count("OWNER: ") == 1
