"""The digest of a plugin: of all local modules that it imports, and of versions of installed
packages."""

import importlib
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from example_steps import cell_of

from moe_lab import allocation, criteria, plugins, source_code
from moe_lab.config import AllocationConfig, CalibrationConfig, CriterionConfig, ModelConfig
from moe_lab.errors import UserError
from moe_lab.study.steps.plans import FromScores

MODEL = ModelConfig(name="m", path="pocket:olmoe", device="cpu", dtype="float32")
TEXT = CalibrationConfig(name="t", path="pocket:calibration/general.jsonl", seed=1)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    importlib.invalidate_caches()


IMPORTS = {
    "of a module in the same folder": {"plugin.py": "import helper", "helper.py": ""},
    "of a value": {"plugin.py": "from helper import sign", "helper.py": ""},
    "of a neighbour in the package": {
        "package/plugin.py": "from . import helper",
        "package/helper.py": "",
    },
    "of a value of a neighbour": {
        "package/plugin.py": "from .helper import sign",
        "package/helper.py": "",
    },
    "by the full name": {
        "package/plugin.py": "import package.deep.helper",
        "package/deep/helper.py": "",
    },
    "of a folder above": {
        "package/deep/plugin.py": "from .. import helper",
        "package/helper.py": "",
    },
    "inside a function": {"plugin.py": "def f():\n    import helper", "helper.py": ""},
    "by name": {
        "plugin.py": "from importlib import import_module\nimport_module('helper')",
        "helper.py": "",
    },
    "by a relative name": {
        "package/plugin.py": "import importlib\nimportlib.import_module('.helper', __package__)",
        "package/helper.py": "",
    },
    "by name through a variable": {
        "plugin.py": "load = __import__\nload('helper')",
        "helper.py": "",
    },
    "by name in a loop": {
        "plugin.py": "import importlib\nfor name in ['helper']:\n    importlib.import_module(name)",
        "helper.py": "",
    },
    "by a name relative to another package": {
        "package/plugin.py": (
            "from importlib import import_module\nimport_module('.helper', package='package.deep')"
        ),
        "package/deep/helper.py": "",
    },
    "through another module": {
        "plugin.py": "import between",
        "between.py": "import helper",
        "helper.py": "",
    },
    "through a package": {
        "package/plugin.py": "from package.deep import sign",
        "package/deep/__init__.py": "from .helper import sign",
        "package/deep/helper.py": "",
    },
    "of the package around it": {"helper/plugin.py": "", "helper/__init__.py": ""},
    "in a circle": {"plugin.py": "import helper", "helper.py": "import plugin"},
    "that is tried in two ways": {
        "plugin.py": "try:\n    from . import helper\nexcept ImportError:\n    import helper",
        "helper.py": "",
    },
}


@pytest.mark.parametrize("files", IMPORTS.values(), ids=IMPORTS)
def test_a_module_that_a_plugin_imports_counts(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, {**files, "other.py": "", "package/other.py": ""})
    [plugin] = [name for name in files if name.endswith("plugin.py")]
    [helper] = [name for name in files if name.startswith("helper") or name.endswith("helper.py")][
        -1:
    ]
    name = plugin.removesuffix(".py").replace("/", ".")
    before = source_code.code_digest(name, tmp_path / plugin)
    write(tmp_path, {"other.py": "x = 1", "package/other.py": "x = 1"})
    assert source_code.code_digest(name, tmp_path / plugin) == before
    write(tmp_path, {helper: files[helper] + "\nsign = -1"})
    assert source_code.code_digest(name, tmp_path / plugin) != before


@pytest.mark.parametrize(
    "code",
    [
        "import namespace.helper",
        "from .helper import sign",
        "from namespace import helper",
        "from .deep import other_helper",
        "__import__('importlib').import_module('.helper', __package__)",
    ],
)
def test_all_parts_of_a_namespace_package_count(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = (
        "second/namespace/deep/other_helper.py" if "other" in code else "second/namespace/helper.py"
    )
    write(
        tmp_path, {"first/namespace/plugin.py": code, "first/namespace/deep/x.py": "", helper: ""}
    )
    for folder in ("second", "first"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    plugin = tmp_path / "first/namespace/plugin.py"
    before = source_code.code_digest("namespace.plugin", plugin)
    write(tmp_path, {helper: "sign = -1"})
    assert source_code.code_digest("namespace.plugin", plugin) != before


def test_installed_and_local_parts_of_a_namespace_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "site-packages")])
    monkeypatch.setattr(source_code, "_distributions", lambda: {"namespace": ["installed"]})
    write(
        tmp_path,
        {"plugin.py": "import namespace.local, namespace.installed", "namespace/local.py": ""},
    )
    write(tmp_path / "site-packages", {"namespace/installed.py": ""})
    write(
        tmp_path / "site-packages/installed-1.dist-info",
        {"METADATA": "Name: installed\nVersion: 1.0\n"},
    )
    files, versions = source_code.local_files_and_versions("plugin", tmp_path / "plugin.py")
    assert set(files) == {"plugin", "namespace.local"}
    assert versions == {"installed": "1.0"}


def test_the_path_of_the_code_does_not_change_the_digest(tmp_path: Path) -> None:
    digests = set()
    for folder in (tmp_path / "one", tmp_path / "two"):
        write(
            folder, {"package/plugin.py": "from . import helper", "package/helper.py": "sign = 1"}
        )
        digests.add(source_code.code_digest("package.plugin", folder / "package/plugin.py"))
    assert len(digests) == 1


class Project(NamedTuple):
    """A folder with a plugin that imports `installed`, an installed package, and `editable`, an
    editable install."""

    folder: Path
    plugin: str

    @property
    def site_packages(self) -> Path:
        return self.folder / "site-packages"

    def digest(self) -> str:
        name = ".".join(Path(self.plugin).with_suffix("").parts).removeprefix("site-packages.")
        return source_code.code_digest(name, self.folder / self.plugin)

    def install(self, name: str, package: str, version: str) -> None:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        files = {"METADATA": metadata, "top_level.txt": package}
        write(self.site_packages / f"{name}-1.dist-info", files)


@pytest.fixture(params=["plugin.py", "site-packages/mine/plugin.py"])
def project(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Project:
    project = Project(tmp_path, request.param)
    folders = (tmp_path, tmp_path / "project", project.site_packages)
    monkeypatch.setattr(sys, "path", [str(folder) for folder in folders])
    monkeypatch.setattr(source_code, "_distributions", importlib.metadata.packages_distributions)
    plugin = "import json, numpy, editable, installed"
    write(tmp_path, {request.param: plugin, "project/editable.py": ""})
    write(project.site_packages, {"installed/__init__.py": "", "mine/__init__.py": ""})
    project.install("its_name", "installed", "1.0")
    project.install("editable", "editable", "1.0")
    return project


def test_versions_of_packages_and_local_code_change_the_digest(project: Project) -> None:
    """Of an installed package its version counts, and not its code; of an editable install, and of
    the package of the plugin, the code."""
    digests = [project.digest()]
    write(project.site_packages, {"installed/__init__.py": "x = 1"})
    assert project.digest() == digests[0]
    project.install("its_name", "installed", "1.1")
    digests.append(project.digest())
    write(project.folder, {"project/editable.py": "x = 1"})
    digests.append(project.digest())
    assert len(set(digests)) == 3
    write(project.site_packages, {"mine/__init__.py": "x = 1"})
    assert (project.digest() != digests[2]) == ("mine" in project.plugin)


PLUGIN = """
import numpy
from moe_lab.allocation import Allocation, register
from moe_lab.allocation.shapes import uniform_experts
from moe_lab.criteria import criterion
import shared_helper


@criterion("signed", needs=(), reference="mine")
def signed(layer):
    return shared_helper.sign * numpy.arange(layer.n_experts)


def as_uniform(problem):
    return uniform_experts(problem)


register(Allocation("as_uniform", {"expert": as_uniform}))
"""


PLUGINS = {
    "plugin_one": PLUGIN,
    "plugin_two": PLUGIN.replace("signed", "signed_too").replace("as_uniform", "as_uniform_too"),
}
"""Module -> content of two plugins that share a helper."""
ALLOCATION_OF = {
    "signed": "uniform",
    "signed_too": "uniform",
    "random": "as_uniform",
    "frequency": "uniform",
}
"""Criterion -> allocation of some plans; the last plan needs no plugin."""


def step_by_criterion() -> dict[str, FromScores]:
    steps = {}
    for name, shape in ALLOCATION_OF.items():
        cell = cell_of(
            MODEL,
            TEXT,
            criterion=CriterionConfig(name=name),
            allocation=AllocationConfig(name=shape),
        )
        steps[name] = FromScores.of(cell)
    return steps


def test_criteria_and_allocations_of_moe_lab_have_no_source() -> None:
    assert not any(criterion.source for criterion in criteria.CRITERIA.values())
    assert not any(shape.source for shape in allocation.ALLOCATIONS.values())


def test_steps_have_the_code_of_their_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two plugins share a helper, which is changed. A worker imports the plugins of its step, also
    from a folder that is not on Python's path, and refuses another version of them each time."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write(tmp_path, {f"{name}.py": content for name, content in PLUGINS.items()})
    known_criteria = criteria.CRITERIA
    known_allocations = allocation.ALLOCATIONS

    def forget_plugins() -> None:
        monkeypatch.setattr(criteria, "CRITERIA", dict(known_criteria))
        monkeypatch.setattr(plugins, "CRITERIA", criteria.CRITERIA)
        monkeypatch.setattr(allocation, "ALLOCATIONS", dict(known_allocations))
        monkeypatch.setattr(plugins, "ALLOCATIONS", allocation.ALLOCATIONS)
        for name in ("shared_helper", *PLUGINS):
            sys.modules.pop(name, None)
        source_code.module_digest.cache_clear()

    def steps(sign: int) -> dict[str, FromScores]:
        write(tmp_path, {"shared_helper.py": f"sign = {sign:+d}"})
        forget_plugins()
        plugins.load(list(PLUGINS))
        return step_by_criterion()

    before, after = steps(1), steps(-1)
    assert {name for name in before if before[name].id == after[name].id} == {"frequency"}
    unchanged = {name for name in before if before[name].scores.id == after[name].scores.id}
    assert unchanged == {"random", "frequency"}

    forget_plugins()
    sys.path.remove(str(tmp_path))
    plugins.import_modules_at(after["signed"].scores.plugins)
    assert sys.modules["plugin_one"].__file__ == str(tmp_path / "plugin_one.py")
    for _ in range(2):
        with pytest.raises(UserError, match="plugin_one"):
            plugins.import_modules_at(before["signed"].scores.plugins)
