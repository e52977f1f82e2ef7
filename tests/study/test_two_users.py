"""Two people and one store: with a group's umask they share it; otherwise the second is told, and breaks nothing."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from example_steps import Example

from moe_lab.errors import UserError
from moe_lab.study import Step
from moe_lab.study.runs import begin
from moe_lab.study.store import Store

pytestmark = pytest.mark.root
OWNER, COLLEAGUE, GROUP = 54321, 54322, 54320


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of the group, in which new folders are of the group too.

    Another user may not read the folder of this repository, so all that a run reads of it is read before.
    """
    run(tmp_path / "own", Example())
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        os.chown(name, OWNER, GROUP)
        os.chmod(name, 0o2775)
        yield Path(name)


def as_user(user: int, umask: int, work: Callable[[], Any]) -> Any:
    """What `work` returns or raises in a process of that user."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(GROUP)
            os.setuid(user)
            os.umask(umask)
            outcome: Any = work()
        except BaseException as error:  # noqa: BLE001 - raised where the test waits
            outcome = error
        os.write(writer, pickle.dumps(outcome))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        outcome = pickle.loads(stream.read())
    os.waitpid(child, 0)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def run(root: Path, *steps: Step) -> int:
    """How many of the steps were not there and are done in a run."""
    store = Store(root).create()
    count = 0
    with begin(store, "study", steps):
        for step in steps:
            with store.claim(step) as scratch:
                if scratch is not None:
                    (scratch / "result.txt").write_text("result")
                    count += 1
    return count


def test_people_of_a_group_go_on_with_each_others_steps(folder: Path) -> None:
    first, second = Example(number=1), Example(number=2)
    assert as_user(OWNER, 0o002, lambda: run(folder / "store", first)) == 1
    assert as_user(COLLEAGUE, 0o002, lambda: run(folder / "store", first, second)) == 1
    assert as_user(OWNER, 0o002, lambda: run(folder / "store", first, second)) == 0
    assert as_user(COLLEAGUE, 0o002, lambda: Store(folder / "store").readable(first))


def test_a_store_that_only_its_owner_may_write_is_read_and_named(folder: Path) -> None:
    """With the usual umask. Finished steps can be read, and a colleague's run ends in a sentence before it starts."""
    step = Example(number=1)
    assert as_user(OWNER, 0o022, lambda: run(folder / "store", step)) == 1
    assert as_user(COLLEAGUE, 0o022, lambda: Store(folder / "store").done(step))
    with pytest.raises(UserError, match=r"store=.*/store"):
        as_user(COLLEAGUE, 0o022, lambda: run(folder / "store", step, Example(number=2)))
    assert as_user(OWNER, 0o022, lambda: run(folder / "store", step)) == 0
