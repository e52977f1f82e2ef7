"""What counts as the code of a plugin: all local modules that it imports, and versions of installed
packages."""

import importlib
import sys
from pathlib import Path

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
    "by name with an alias": {
        "plugin.py": "from importlib import import_module as load\nload('helper')",
        "helper.py": "",
    },
    "by name through a variable": {
        "plugin.py": "load = __import__\nload('helper')",
        "helper.py": "",
    },
    "by name through an attribute": {
        "plugin.py": "import builtins\nbuiltins.__import__('helper')",
        "helper.py": "",
    },
    "by name as a keyword": {
        "plugin.py": "import importlib\nimportlib.import_module(name='helper')",
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
    before = source_code.digest_of(name, tmp_path / plugin)
    write(tmp_path, {"other.py": "x = 1", "package/other.py": "x = 1"})
    assert source_code.digest_of(name, tmp_path / plugin) == before
    write(tmp_path, {helper: files[helper] + "\nsign = -1"})
    assert source_code.digest_of(name, tmp_path / plugin) != before


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
    before = source_code.digest_of("namespace.plugin", plugin)
    write(tmp_path, {helper: "sign = -1"})
    assert source_code.digest_of("namespace.plugin", plugin) != before


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
    files, versions = source_code.code_of("plugin", tmp_path / "plugin.py")
    assert set(files) == {"plugin", "namespace.local"}
    assert versions == {"installed": "1.0"}


def test_where_the_code_lies_does_not_count(tmp_path: Path) -> None:
    digests = set()
    for folder in (tmp_path / "one", tmp_path / "two"):
        write(
            folder, {"package/plugin.py": "from . import helper", "package/helper.py": "sign = 1"}
        )
        digests.add(source_code.digest_of("package.plugin", folder / "package/plugin.py"))
    assert len(digests) == 1


@pytest.mark.parametrize("plugin", ["plugin.py", "site-packages/mine/plugin.py"])
def test_an_installed_package_counts_by_its_version(
    plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an editable install, which lies elsewhere, the code counts; and of the package that the
    plugin is in."""
    site = tmp_path / "site-packages"
    digests = []
    monkeypatch.setattr(
        sys, "path", [str(folder) for folder in (tmp_path, tmp_path / "project", site)]
    )
    monkeypatch.setattr(source_code, "_distributions", importlib.metadata.packages_distributions)
    write(tmp_path, {plugin: "import json, numpy, editable, installed", "project/editable.py": ""})
    write(site, {"installed/__init__.py": "", "mine/__init__.py": ""})
    name = ".".join(Path(plugin).with_suffix("").parts).removeprefix("site-packages.")

    def digest(changed: str = "", text: str = "x = 1") -> str:
        write(tmp_path, {changed: text} if changed else {})
        return source_code.digest_of(name, tmp_path / plugin)

    def version(package: str, number: str) -> str:
        names = {"installed": "its_name", "editable": "editable"}
        about = {
            "METADATA": f"Metadata-Version: 2.1\nName: {names[package]}\nVersion: {number}\n",
            "top_level.txt": package,
        }
        write(site / f"{names[package]}-1.dist-info", about)
        return digest()

    for package in ("installed", "editable"):
        version(package, "1.0")
    before = digest()
    assert digest("site-packages/installed/__init__.py") == before
    digests = [before, version("installed", "1.1"), digest("project/editable.py")]
    if "mine" in plugin:
        digests.append(digest("site-packages/mine/__init__.py"))
    assert len(set(digests)) == len(digests)


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


def test_steps_of_a_plugin_are_named_by_its_code_and_refuse_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two plugins share a helper, and a criterion of moe_lab has nothing to do with it."""
    monkeypatch.syspath_prepend(tmp_path)
    second = PLUGIN.replace("signed", "signed_too").replace("as_uniform", "as_uniform_too")
    write(tmp_path, {"plugin_one.py": PLUGIN, "plugin_two.py": second})
    modules = ("plugin_one", "plugin_two")
    assert not any(criterion.source for criterion in criteria.CRITERIA.values())
    assert not any(chosen.source for chosen in allocation.ALLOCATIONS.values())

    def steps(sign: int) -> dict[str, FromScores]:
        write(tmp_path, {"shared_helper.py": f"sign = {sign:+d}"})
        monkeypatch.setattr(criteria, "CRITERIA", dict(known))
        monkeypatch.setattr(plugins, "CRITERIA", criteria.CRITERIA)
        monkeypatch.setattr(allocation, "ALLOCATIONS", dict(allocations))
        monkeypatch.setattr(plugins, "ALLOCATIONS", allocation.ALLOCATIONS)
        for name in ("shared_helper", *modules):
            sys.modules.pop(name, None)
        source_code.module_digest.cache_clear()
        plugins.load(modules)
        chosen = {
            "signed": "uniform",
            "signed_too": "uniform",
            "random": "as_uniform",
            "frequency": "uniform",
        }
        return {
            name: FromScores.of(
                cell_of(
                    MODEL,
                    TEXT,
                    criterion=CriterionConfig(name=name),
                    allocation=AllocationConfig(name=shape),
                )
            )
            for name, shape in chosen.items()
        }

    known = criteria.CRITERIA
    allocations = allocation.ALLOCATIONS
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = steps(1)
    after = steps(-1)
    same = {name for name in before if before[name].id == after[name].id}
    assert same == {"frequency"} and before["random"].scores.id == after["random"].scores.id
    assert all(before[name].scores.id != after[name].scores.id for name in ("signed", "signed_too"))
    plugins.import_modules_at(after["signed"].scores.plugins)
    for _ in range(2):  # and not at its first step alone
        with pytest.raises(UserError, match="plugin_one"):
            plugins.import_modules_at(before["signed"].scores.plugins)
