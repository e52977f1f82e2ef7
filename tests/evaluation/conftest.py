"""What evaluation tests share: processes that run programs, and the shipped model."""

from typing import Any

import pytest

from benchmarks.measure import namespaces_missing
from moe_lab.config import ModelConfig
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.sandbox.client import Runner
from moe_lab.models.load import load_model


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips what needs them on a machine that has none."""
    if namespaces_missing():
        pytest.skip(f"no namespaces: {namespaces_missing()}")


@pytest.fixture(params=["namespaces", "limits"])
def runner(request: pytest.FixtureRequest) -> Any:
    """A runner, with and without namespaces."""
    if request.param == "namespaces":
        request.getfixturevalue("namespaces")
    with Runner(confined=request.param == "namespaces") as sandbox_runner:
        yield sandbox_runner


@pytest.fixture
def confined_runner(namespaces: None) -> Any:
    """A runner behind namespaces."""
    with Runner(confined=True) as sandbox_runner:
        yield sandbox_runner


@pytest.fixture(scope="session")
def subject() -> LoadedModel:
    """The shipped model."""
    return LoadedModel(*load_model(ModelConfig(name="pocket", path="pocket:olmoe", threads=1)))
