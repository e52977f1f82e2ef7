"""Disks that fail in the middle of a study, and a store that is copied there; the judge is the campaign's."""

import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import until
from studies import told

from moe_lab.study.step import NO_ROOM

from .kills import Killed, Study

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")]
SENTENCES = {"quota": NO_ROOM, "read_only": "Read-only file system"}


def study(scenario: str, place: Path) -> Study:
    return Study(scenario, place, None, random.Random(0), Killed())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Study:
    reference = study("few", tmp_path_factory.mktemp("disks") / "undisturbed")
    assert [run.wait() for run in reference.start()] == [0]
    return reference


@pytest.fixture
def halted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Study, subprocess.Popen[str]]]:
    """A study that waits in the middle of a plan until `hold-plan` is removed; and its command."""
    begun = study(request.param, tmp_path / "study")
    (hold := begun.place / "instant" / "hold-plan").touch()
    (run,) = begun.start()
    with run:
        until(lambda: run.poll() is not None or any(step.startswith("plan/") for step in begun.begun()))
        yield begun, run
        hold.unlink(missing_ok=True)


@pytest.mark.parametrize("halted", SENTENCES, indirect=True)
def test_a_disk_that_fails_is_one_sentence(halted: tuple[Study, subprocess.Popen[str]], undisturbed: Study) -> None:
    """Nothing is left half written, no step counts as failed, and the same command goes on when the disk is mended."""
    found, run = halted
    (found.place / "fails").touch()
    (found.place / "instant" / "hold-plan").unlink()
    assert run.wait() == 2 and SENTENCES[found.scenario] in found.printed().splitlines()[-1]
    assert not list(found.store.glob("failed/*"))
    (found.place / "fails").unlink()
    found.check_finished(found.begun(), set())
    found.end(undisturbed)
    assert found.published and not found.found.problems


@pytest.mark.parametrize("halted", ["few"], indirect=True)
def test_a_copy_of_a_busy_store_is_a_store(halted: tuple[Study, subprocess.Popen[str]], undisturbed: Study) -> None:
    """It is finished while the original still runs, of which it says nothing."""
    found, run = halted
    copy = study("few", found.place / "copy")
    subprocess.run(["cp", "-a", found.store, copy.store], check=True)
    assert "running" in told(found.store, "status", "study") and "running" not in told(copy.store, "status", "study")
    copy.check_finished(copy.begun(), set())
    copy.end(undisturbed)
    (found.place / "instant" / "hold-plan").unlink()
    assert run.wait() == 0
    found.end(undisturbed)
    assert copy.published and not copy.found.problems + found.found.problems
