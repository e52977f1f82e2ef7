"""Small steps of a store in packs: found, read, checked, freed and shared as those in folders
are."""

import json
import os
import sqlite3
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from example_steps import Example
from processes import LOCAL_LOCKS, NO_LOCKS, lock_environment
from studies import (
    SCRIPT_START,
    STUDY,
    Worker,
    run_until_killed,
    start,
    study_command,
    study_request,
)

from moe_lab import packs
from moe_lab.analysis.load.reader import Reader
from moe_lab.errors import UserError
from moe_lab.json_files import Damaged
from moe_lab.packs import packs_in
from moe_lab.result_files import ID_DIGITS
from moe_lab.study import packing, record
from moe_lab.study.garbage import gc
from moe_lab.study.packing import Packing
from moe_lab.study.runs import create_run
from moe_lab.study.schedule import Schedule, work
from moe_lab.study.step import Step
from moe_lab.study.steps.files import Files
from moe_lab.study.store import Store

CELLS = study_request("criterion=magnitude,random", "seed=1,2,3", "ratio=.25,.5")


@pytest.fixture(autouse=True)
def _few(fake_worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MANY", 1)


def publish(store: Store, numbers: range, text: str = "result") -> list[Step]:
    """Steps, each of which needs the one before."""
    steps: list[Step] = []
    for number in numbers:
        step = Example(number=number, input_steps={"before": steps[-1]} if steps else {})
        with store.claim(step) as scratch:
            assert scratch is not None
            (scratch / "result.json").write_text(json.dumps({"text": f"{text} {number}"}))
            (scratch / "provenance.json").write_text('{"seconds": 1.5}')
        steps.append(step)
    return steps


def packed(store: Store, numbers: range) -> list[Step]:
    steps = publish(store, numbers)
    Packing(store).pack()
    assert not [path for path in (store.root / "plan").iterdir()]
    return steps


def pack_of(store: Store) -> Path:
    (path,) = (store.root / "packs").glob("[!.]*")
    return path


def test_packs_replace_the_folders_of_steps_and_are_read_like_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second start of a packed study does nothing, `unpack` restores folders, and the end of a
    run packs few steps."""
    root = tmp_path / "packed"
    assert start(root, CELLS) == 0
    monkeypatch.setattr(packing, "MANY", 1000)
    assert start(tmp_path / "folders", CELLS) == 0
    folders = Store(tmp_path / "folders")
    packs_store = Store(root)
    steps = {path.parent.name: path.parent for path in folders.root.glob("*/*/step.json")}
    assert len(steps) > 30
    assert not [*root.glob("plan/*"), *root.glob("evaluate/*")]
    assert sum(1 for _ in root.rglob("*")) < len(steps)
    cells, cells_of_folders = (
        record.study_record(store, STUDY)["cells"] for store in (packs_store, folders)
    )
    assert cells == cells_of_folders != []
    reader = Reader(root)
    for name, folder in steps.items():
        step = f"{folder.parent.name}/{name}"
        path = reader.find_folder(step)
        assert path is not None
        content = (folder / "result.json").read_bytes()
        assert reader.json(path, "result.json") == json.loads(content)
        assert packs_store.content(step, "result.json") == content
    assert not reader.gaps

    Worker.executed_folders.clear()
    assert start(root, CELLS) == 0
    assert Worker.executed_folders == []
    assert len([*root.glob("runs/*/*")]) == 1, "a run that changes nothing leaves nothing"
    assert study_command(root, "status", STUDY) == study_command(root, "verify", STUDY) == 0

    monkeypatch.chdir(tmp_path)
    assert study_command(root, "unpack", "plan/") == 0
    plans = {name: folder for name, folder in steps.items() if folder.parent.name == "plan"}
    unpacked = {path.name: path for path in (tmp_path / "unpacked" / "plan").iterdir()}
    assert unpacked.keys() == plans.keys()
    assert all({*os.listdir(unpacked[name])} == {*os.listdir(plans[name])} for name in plans)

    assert start(root, study_request("criterion=random", "seed=4", "ratio=.25")) == 0
    assert not [*root.glob("plan/*"), *root.glob("evaluate/*")]


def test_a_step_reads_inputs_from_packs(store: Store, tmp_path: Path) -> None:
    """`Files.read` finds inputs that another run packs before the step begins, or while it runs."""

    class Reads(Example):
        kind = "scores"  # type: ignore[assignment]

        def work(self, files):  # type: ignore[no-untyped-def]
            assert files.read(self.inputs["before"], "result.json") == b'{"text": "result 0"}'
            Packing(Store(store.root).create()).pack()
            assert not store.path(self.inputs["before"]).exists()
            assert files.read(self.inputs["before"], "result.json") == b'{"text": "result 0"}'

    (input_step,) = publish(store, range(1))
    schedule = Schedule(
        [Reads(number=number, input_steps={"before": input_step}) for number in (1, 2)],
        {input_step.id},
    )
    work(schedule, store, lambda step, scratch: step.work(Files.of(step, store, scratch)))
    assert len(schedule.finished) == 3


def test_large_steps_and_folders_in_steps_stay(store: Store) -> None:
    small, large, deep = (Example(number=number) for number in range(3))
    for step, name, size in (
        (small, "a", 10),
        (large, "a", packing.SMALL + 1),
        (deep, "checkpoint/a", 10),
    ):
        with store.claim(step) as scratch:
            assert scratch is not None
            (scratch / name).parent.mkdir(exist_ok=True)
            (scratch / name).write_bytes(b"x" * size)
    Packing(store).pack()
    assert [store.path(step).exists() for step in (small, large, deep)] == [False, True, True]
    assert store.finished_ids([small, large, deep]) == {small.id, large.id, deep.id}
    Packing(store).pack()
    assert pack_of(store), "no empty pack beside it"


def test_a_pack_that_cannot_be_written_fails_no_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [
        sqlite3.OperationalError("database or disk is full"),
        OSError(28, "No space left on device"),
    ]
    for number, error in enumerate(errors):
        monkeypatch.setattr(packs.Packs, "add", Mock(side_effect=error))
        steps = publish(store, range(3 * number, 3 * number + 3))
        work(Schedule([], {step.id for step in steps}), store, lambda step, scratch: None)
        assert store.finished_ids(steps) == {step.id for step in steps}
        assert str(error) in store.notices.pop()


def test_the_group_may_write_packs_of_its_store(store: Store) -> None:
    store.root.chmod(0o2775)
    packed(Store(store.root), range(2))
    assert pack_of(store).stat().st_mode & 0o777 == 0o664


def test_a_step_that_is_damaged_in_a_pack_is_found_when_it_is_read_and_packed_anew(
    store: Store,
) -> None:
    """Reading hashes the rows, as rows have no sizes and times to compare. The other steps stay."""
    steps = packed(store, range(30))
    os.chmod(pack_of(store), 0o644)
    damage = (
        "update file set content = zeroblob(length(content)) where name = 'result.json' and "
        "start = ?"
    )
    with sqlite3.connect(pack_of(store)) as pack:
        pack.execute(damage, (steps[7].id[:12],))
    packs_in.cache_clear()
    store = Store(store.root).create()
    assert store.finished_ids(steps) == {step.id for step in steps}
    assert [step.id for step in steps if not store.is_readable(step)] == [steps[7].id]
    assert store.finished_ids(steps) == {step.id for step in steps} - {steps[7].id}
    with store.claim(steps[7]) as scratch:
        assert scratch is not None
        (scratch / "result.json").write_text("anew")
    Packing(store).pack()
    packs_in.cache_clear()
    reopened = Store(store.root)
    reopened.packs.refresh()
    names = [
        name for name in reopened.packs.sizes() if steps[7].id[:12] in reopened.packs._steps[name]
    ]
    assert len(names) == 1, "the damaged row is gone"
    assert len(reopened.packs.sizes()) == 2, "the pack without it, and the new one"
    assert reopened.content(steps[7].folder, "result.json") == b"anew"
    assert all(reopened.is_readable(step) for step in steps)


@pytest.mark.parametrize("file", ["result.json", "step.json"])
@pytest.mark.parametrize("change", ["content = :new", "name = 'other'"])
def test_a_changed_row_of_a_pack_is_refused(store: Store, file: str, change: str) -> None:
    """The row is compressed correctly. `verify` removes its step from the pack."""
    steps = packed(store, range(3))
    new = zlib.compress(b'{"text": "result 7", "files": {}}')
    os.chmod(pack_of(store), 0o644)
    with sqlite3.connect(pack_of(store)) as pack:
        update = f"update file set {change} where name = :file and start = :start"
        pack.execute(update, {"new": new, "file": file, "start": steps[1].id[:12]})
    packs_in.cache_clear()
    with pytest.raises((Damaged, FileNotFoundError), match=file):
        Store(store.root).content(steps[1].folder, "result.json")
    with create_run(store, STUDY, steps):
        pass
    assert study_command(store.root, "verify", STUDY) == 1
    assert study_command(store.root, "verify", STUDY) == 0
    assert Store(store.root).finished_ids(steps) == {steps[0].id, steps[2].id}


@pytest.mark.parametrize("damage", ["torn", "empty", "words"])
def test_a_pack_that_cannot_be_read_is_set_aside(
    store: Store, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = packed(store, range(40))
    content = pack_of(store).read_bytes()
    damaged = {"torn": content[:1000], "empty": b"", "words": b"no database" * 1000}
    pack_of(store).write_bytes(damaged[damage])
    packs_in.cache_clear()
    with pytest.raises(UserError):
        gc(Store(store.root), apply=True)
    monkeypatch.chdir(store.root.parent)
    reopened = Store(store.root.name).create()
    assert reopened.finished_ids(steps) == set()
    assert len([*(store.root / "damaged").iterdir()]) == 1
    assert len(reopened.notices) == 1
    publish(reopened, range(40), "anew")
    Packing(reopened).pack()
    assert reopened.content(steps[3].folder, "result.json") == b'{"text": "anew 3"}'


def test_gc_frees_steps_in_packs(store: Store) -> None:
    """A step that is needed keeps its inputs."""
    steps = packed(store, range(10))
    with create_run(store, STUDY, steps[4:5]):
        assert gc(store) == 0
        assert store.finished_ids(steps) == {step.id for step in steps}
        for _ in range(2):  # the second time in the pack that replaced the first
            assert gc(store, apply=True) == 0
    assert Store(store.root).finished_ids(steps) == {step.id for step in steps[:5]}
    assert store.content(steps[0].folder, "result.json") == b'{"text": "result 0"}'


def test_many_packs_are_merged(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced packs stay for a while, for processes that have listed them, and are not read."""
    monkeypatch.setattr(packing, "MOST_PACKS", 3)
    reader = Reader(store.root)
    steps = [
        step for number in range(5) for step in packed(store, range(10 * number, 10 * number + 10))
    ]
    assert store.finished_ids(steps) == {step.id for step in steps}
    assert len(store.packs.sizes()) <= 4 < len([*(store.root / "packs").iterdir()])
    assert all(reader.json(reader.find_folder(step.folder), "result.json") for step in steps)
    monkeypatch.setattr(packs, "GRACE", -1.0)
    store.packs.clear()
    assert len([*(store.root / "packs").iterdir()]) == len(store.packs.sizes())
    assert all(reader.json(reader.find_folder(step.folder), "result.json") for step in steps)
    assert not reader.gaps


KILLED = """
    from moe_lab import packs
    from moe_lab.study import packing
    store = Store({root!r}).create()
    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)
    {patch}
    packing.MANY = 1
    packing.Packing(store).pack()
"""
POINTS = {
    "while it writes": "packs.zlib.compress = die",
    "before the pack is there": "packs.Packs.publish = die",
    "before folders are removed": "packing.rename_as_scratch = die",
    "while folders are removed": "packing.shutil.rmtree = die",
}


@pytest.mark.parametrize("point", POINTS)
def test_packing_that_is_killed_loses_nothing(store: Store, point: str) -> None:
    steps = publish(store, range(20))
    contents = {step.id: store.content(step.folder, "result.json") for step in steps}
    run_until_killed(KILLED.format(root=str(store.root), patch=POINTS[point]))
    for _ in range(2):
        packs_in.cache_clear()
        reopened = Store(store.root).create()
        assert reopened.finished_ids(steps) == contents.keys()
        assert {step.id: reopened.content(step.folder, "result.json") for step in steps} == contents
        Packing(reopened).pack()
    reopened.packs.clear()
    gc(reopened)
    assert len([*(store.root / "packs").iterdir()]) == 1
    assert not [*(store.root / "plan").glob("[!.]*")]


@pytest.mark.parametrize(
    "list_steps", [Store.finished_ids, lambda store, steps: store.finished_names().keys()]
)
def test_a_step_that_is_packed_while_it_is_listed_is_listed(
    list_steps: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process packs it, which opens the store by another path."""
    steps = publish(store, range(3))
    refresh = store.packs.refresh
    (path := store.root.with_name("link")).symlink_to(store.root)
    monkeypatch.setattr(
        store.packs, "refresh", lambda: (refresh(), Packing(Store(path).create()).pack())
    )
    assert {name[:ID_DIGITS] for name in list_steps(store, steps)} == {
        step.id[:ID_DIGITS] for step in steps
    }


PUBLISH_AND_PACK = f"""{SCRIPT_START}
from moe_lab.study import packing
from moe_lab.study.schedule import Schedule, work
packing.MANY, packing.PACK_INTERVAL, packing.MOST_PACKS = 5, 0.0, 3
store = Store(sys.argv[1]).create()
def execute(step, scratch):
    (scratch / "result.json").write_text(f"result {{step.number}}")
    (scratch / "provenance.json").write_text("{{}}")
steps = [Example(number=number) for number in range(300)]
work(Schedule(steps), store, execute)
assert len(store.finished_ids(steps)) == 300
"""


@pytest.mark.slow
@pytest.mark.parametrize("body", ["", LOCAL_LOCKS, NO_LOCKS])
def test_processes_that_publish_pack_and_read_lose_nothing(store: Store, body: str) -> None:
    """Two processes compute the same steps and pack them all the time, while this one reads every
    step: also where locks of files do nothing, or are missing."""
    environment = {**os.environ, **lock_environment(body, store.root.parent)}
    command = [sys.executable, "-c", PUBLISH_AND_PACK, str(store.root)]
    processes = [subprocess.Popen(command, env=environment) for _ in range(2)]
    steps = [Example(number=number) for number in range(300)]
    seen: set[int] = set()
    while any(process.poll() is None for process in processes):
        for step in steps:
            try:
                assert store.content(step.folder, "result.json") == f"result {step.number}".encode()
                seen.add(step.number)
            except FileNotFoundError:
                assert step.number not in seen, "a step has vanished"
    assert [process.returncode for process in processes] == [0, 0]
    assert store.finished_ids(steps) == {step.id for step in steps}
    assert all(store.is_readable(step) for step in steps)
    assert seen
    store.packs.refresh()
    assert 0 < len(store.packs.sizes()) < 10
