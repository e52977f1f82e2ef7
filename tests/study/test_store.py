"""The store: all of a step or nothing of it, whoever dies when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from moe_lab.errors import UserError
from moe_lab.study.identity import Part, Step
from moe_lab.study.store import Busy, Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def a_step(number: int = 0, label: str = "example") -> Step:
    return Step("plan", label, {"settings": Part({"number": number})})


def publish(store: Store, step: Step, text: str = "result") -> None:
    with store.claim(step) as scratch:
        assert scratch is not None
        (scratch / "result.txt").write_text(text)


def test_published_whole_with_identity_and_checksums(store: Store) -> None:
    step = a_step()
    assert not store.done(step)
    publish(store, step)
    assert store.done(step)
    folder = store.path(step)
    assert json.loads((folder / "step.json").read_text())["id"] == step.id
    assert set(json.loads((folder / "manifest.json").read_text())["files"]) == {"result.txt", "step.json"}
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_an_error_publishes_nothing(store: Store) -> None:
    with pytest.raises(RuntimeError), store.claim(a_step()) as scratch:
        assert scratch is not None
        (scratch / "half.txt").write_text("half")
        raise RuntimeError
    assert not store.done(a_step())
    assert not list((store.root / "plan").iterdir())


def test_claimed_once_finished_it_is_not_given_again(store: Store) -> None:
    publish(store, a_step())
    with store.claim(a_step()) as scratch:
        assert scratch is None


def test_two_runs_do_not_work_on_one_step(store: Store) -> None:
    with store.claim(a_step()), pytest.raises(Busy), Store(store.root).claim(a_step()):
        pass


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "manifest"])
def test_damage_is_noticed_set_aside_and_said(store: Store, harm: str) -> None:
    step = a_step()
    publish(store, step)
    file = store.path(step) / ("manifest.json" if harm == "manifest" else "result.txt")
    if harm == "delete":
        file.unlink()
    else:
        file.write_text({"flip": "resulT", "truncate": "res", "manifest": "{"}[harm])
    assert not store.done(step)
    assert "computed again" in store.notices[0]
    assert len(list((store.root / "damaged").iterdir())) == 1
    publish(store, step)
    assert store.done(step)


def test_another_label_is_the_same_step(store: Store) -> None:
    publish(store, a_step(label="old_name"))
    assert Store(store.root).done(a_step(label="new_name"))


def test_a_killed_run_leaves_nothing_and_no_lock(store: Store) -> None:
    script = f"""
        import os, signal
        from moe_lab.study.identity import Part, Step
        from moe_lab.study.store import Store
        step = Step("plan", "example", {{"settings": Part({{"number": 0}})}})
        with Store({str(store.root)!r}).claim(step) as scratch:
            (scratch / "half.txt").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)])
    assert done.returncode == -signal.SIGKILL
    assert not store.done(a_step())
    publish(store, a_step())
    assert {p.name for p in store.path(a_step()).iterdir()} == {"result.txt", "step.json", "manifest.json"}
    assert not [p for p in (store.root / "plan").iterdir() if p.name.startswith(".")]


def test_errors_are_left_for_a_later_run(store: Store) -> None:
    store.fail(a_step(), {"message": "broken"})
    found = Store(store.root).error(a_step())
    assert found is not None and found["message"] == "broken"
    publish(store, a_step())
    assert store.error(a_step()) is None


def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text('{"schema": 99}')
    with pytest.raises(UserError, match=r"schema 99.*newer"):
        Store(tmp_path)


def test_a_foreign_marker_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text("[]")
    with pytest.raises(UserError, match="not a moe_lab store"):
        Store(tmp_path)


def test_an_unwritable_store_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        Store(tmp_path / "file" / "store")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_store_is_one_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written"):
        Store(tmp_path)
