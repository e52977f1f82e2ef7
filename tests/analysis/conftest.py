from pathlib import Path

import golden_store
import pytest
from handmade import report_of
from synthetic import CALIBRATIONS, write_store

from moe_lab.analysis.load.study import Study, load
from moe_lab.analysis.registry import Results


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of four criteria, three calibration sets and two ratios; not to be changed."""
    return write_store(
        tmp_path_factory.mktemp("small") / "store",
        criteria=("frequency", "reap", "man", "random"),
        calibrations=CALIBRATIONS,
        ratios=(0.25, 0.5),
        items=30,
        overlap=True,
    )


@pytest.fixture(scope="session")
def results(small: Path) -> Results:
    """Results of the small store; not to be changed."""
    return Results(load(small, "made_up"))


@pytest.fixture(scope="session")
def small_report(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the small store."""
    return report_of(small, tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """The committed store of all methods, each study of it; not to be changed."""
    return golden_store.unpack(tmp_path_factory.mktemp("golden") / "store")


@pytest.fixture(scope="session")
def golden_results(golden: Study) -> Results:
    """Results of the committed store; not to be changed."""
    return Results(golden)
