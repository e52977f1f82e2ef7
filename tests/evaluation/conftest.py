"""What evaluation tests share: processes that run programs, and the shipped model."""

from typing import Any

import pytest

from moe_lab.config import ModelConfig
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.sandbox.client import Runner
from moe_lab.evaluation.sandbox.isolation import ISOLATIONS, NONE, missing
from moe_lab.models.load import load_model


@pytest.fixture(params=ISOLATIONS)
def isolation(request: pytest.FixtureRequest) -> str:
    """Each kind of isolation; skipped where the machine does not have it."""
    if reason := missing(request.param):
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def isolated_runner(isolation: str) -> Any:
    """A runner with each kind of isolation."""
    with Runner(isolation) as sandbox_runner:
        yield sandbox_runner


@pytest.fixture(params=[*ISOLATIONS, NONE])
def runner(request: pytest.FixtureRequest) -> Any:
    """A runner with each kind of isolation, and without any."""
    if reason := missing(request.param):
        pytest.skip(reason)
    with Runner(request.param) as sandbox_runner:
        yield sandbox_runner


@pytest.fixture(scope="session")
def subject() -> LoadedModel:
    """The shipped model."""
    return LoadedModel(*load_model(ModelConfig(name="pocket", path="pocket:olmoe", threads=1)))
