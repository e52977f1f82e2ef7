"""The store: all of a step or nothing of it, whoever dies when."""

import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from example_steps import Example
from studies import run_until_killed, study_command

from moe_lab.errors import UserError
from moe_lab.paths import private
from moe_lab.study import integrity, other_stores, packing
from moe_lab.study import store as storing
from moe_lab.study.claims import Busy, Claim
from moe_lab.study.runs import begin
from moe_lab.study.schedule import Schedule, work
from moe_lab.study.step import Step
from moe_lab.study.store import Store


def publish(store: Store, step: Step, text: str = "result", file: str = "result.txt") -> None:
    with store.claim(step) as scratch:
        assert scratch is not None
        (scratch / file).parent.mkdir(exist_ok=True)
        (scratch / file).write_text(text)
        (scratch / "provenance.json").write_text('{"seconds": 1.5}')


def test_published_whole_with_identity_and_checksums(store: Store) -> None:
    step = Example()
    with pytest.raises(RuntimeError), store.claim(step) as scratch:
        assert scratch is not None
        (scratch / "half.txt").write_text("half")
        raise RuntimeError
    assert not list((store.root / "plan").iterdir()), "an error publishes nothing"
    store.fail(step, {"message": "broken"})
    assert not store.done(step) and (Store(store.root).error(step.id) or {})["message"] == "broken"
    publish(store, step)
    assert store.done(step) and store.error(step.id) is None
    folder = store.path(step)
    document = json.loads((folder / "step.json").read_text())
    assert document["id"] == step.id and document["settings"] == {"number": 0}
    assert document["provenance"] == {"seconds": 1.5} and set(document["files"]) == {"result.txt"}
    assert {path.name for path in folder.iterdir()} == {"result.txt", "step.json"}
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    with store.claim(Example(name="another_name")) as scratch:
        assert scratch is None, "it is found by its id"


def test_resume_files_of_finished_steps_are_removed(
    store: Store,
) -> None:
    finished = Example(number=0)
    unfinished = Example(number=1)
    publish(store, finished)
    for step in (finished, unfinished):
        store.partial(step).mkdir(parents=True)
    store.remove_resume_files({finished.id})
    assert [path.name for path in (store.root / "partial").iterdir()] == [unfinished.id[:12]]


@pytest.mark.parametrize(("name", "is_before"), [("seal", True), ("seal", False), ("check", False)])
def test_late_owners_publish_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str, is_before: bool
) -> None:
    """It was suspended for so long, before or after it sealed the step or checked its claim, that
    another run has found this claim stale and done the step."""
    other = Store(store.root).create()
    owner = storing if name == "seal" else Claim
    monkeypatch.setattr(other.claims, "is_stale", lambda path: True)
    suspended = getattr(owner, name)

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(owner, name, suspended)
        if is_before:
            publish(other, Example(), "of the other")
        suspended(*arguments)
        if not is_before:
            publish(other, Example(), "of the other")

    with pytest.raises(Busy), store.claim(Example()) as scratch:
        assert scratch is not None
        (scratch / "result.txt").write_text("of the first")
        monkeypatch.setattr(owner, name, late)
    with store.claim(Example()) as scratch:
        assert (
            scratch is None and (store.path(Example()) / "result.txt").read_text() == "of the other"
        )
    assert len(list((store.root / "plan").iterdir())) == 1 and not list(
        (store.root / "claims").iterdir()
    )


def test_an_owner_that_is_faster_than_who_takes_over_is_found(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Store(store.root).create()
    taken = store.claim(Example())
    scratch = taken.__enter__()
    assert scratch is not None
    (scratch / "result.txt").write_text("of the first")

    def is_stale(path: Path) -> bool:
        if not path.exists():
            return False
        taken.__exit__(None, None, None)
        return True

    monkeypatch.setattr(other.claims, "is_stale", is_stale)
    with pytest.raises(Busy), other.claim(Example()):
        pass
    monkeypatch.undo()
    with other.claim(Example()) as none:
        assert none is None


def test_steps_under_another_label_are_found(
    store: Store,
) -> None:
    other = Store(store.root).create()
    publish(store, Example(number=1))
    assert not other.done(Example())
    before = (store.root / "plan").stat().st_mtime_ns
    publish(store, Example())
    os.utime(store.root / "plan", ns=(before, before))
    with other.claim(Example(name="other")) as scratch:
        assert scratch is None


def test_a_step_under_two_labels_is_one_step(store: Store) -> None:
    """Both folders are kept while it is needed, each is read if the other is damaged, and then both
    are freed."""
    steps = [Example(), Example(name="other")]
    publish(store, steps[0])
    folders = [store.root / step.folder for step in steps]
    shutil.copytree(*folders)
    with begin(store, "study", steps[:1]):
        assert study_command(store.root, "gc", "apply=true") == 0 and all(
            folder.exists() for folder in folders
        )
    (folders[0] / "result.txt").write_text("damage")
    assert [store.done(steps[number]) for number in (0, 1, 0)] == [False, True, True]
    folders[1].rename(folders[0])
    shutil.copytree(*folders)
    shutil.rmtree(store.root / "runs")
    assert study_command(store.root, "gc", "apply=true") == 0 and not any(
        folder.exists() for folder in folders
    )


HARMS: dict[str, tuple[str, Any]] = {
    "flipped": ("result.txt", lambda file: file.write_text("resulT")),
    "truncated": ("result.txt", lambda file: file.write_text("res")),
    "deleted": ("result.txt", Path.unlink),
    "no JSON": ("step.json", lambda file: file.write_text("{")),
    "another word": (
        "step.json",
        lambda file: file.write_text(file.read_text().replace('"plan"', '"plum"')),
    ),
}


@pytest.mark.parametrize("harm", HARMS)
def test_damage_is_noticed_set_aside_and_said(store: Store, harm: str) -> None:
    publish(store, Example())
    name, do = HARMS[harm]
    do(store.path(Example()) / name)
    assert not store.done(Example()) and f"{name} is " in store.notices[0]
    assert len(list((store.root / "damaged").iterdir())) == 1
    publish(store, Example())
    assert store.done(Example())


def rot(file: Path) -> None:
    """Change a file as a failing disk does: neither its size nor its time tells."""
    status = file.stat()
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def state(place: Path) -> dict[Path, Any]:
    """Time, mode and content of everything in a folder."""
    found = {path: path.lstat() for path in place.rglob("*")}
    return {
        path: (at.st_mtime_ns, at.st_mode, path.is_file() and path.read_bytes())
        for path, at in found.items()
    }


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are hashed from now on."""
    names: list[str] = []
    whole = integrity._sha256
    monkeypatch.setattr(
        integrity, "_sha256", lambda file: names.append(Path(file.name).name) or whole(file)
    )
    return names


@pytest.mark.parametrize("way", ["cp -r", "cp -a", "seconds", "same tick"])
def test_a_copied_store_is_hashed_once_and_complete(
    store: Store, hashed: list[str], tmp_path: Path, way: str
) -> None:
    publish(store, Example())
    hashed.clear()
    other = tmp_path / "copy"
    shutil.copytree(
        store.root, other, copy_function=shutil.copy if way == "cp -r" else shutil.copy2
    )
    for file in other.rglob("*"):
        if way == "seconds":  # as tar keeps them
            os.utime(file, (int(file.stat().st_mtime),) * 2)
        elif way == "same tick":
            os.utime(file, (1_800_000_001,) * 2)
    copy = Store(other)
    assert copy.done(Example()) and hashed == (
        [] if way in ("cp -a", "seconds") else ["result.txt"]
    )
    hashed.clear()
    assert Store(other).done(Example()) and hashed == []
    rot(store.path(Example()) / "result.txt")
    shutil.copytree(store.root, tmp_path / "rotten", copy_function=shutil.copy)
    assert not Store(tmp_path / "rotten").done(Example()), "damaged before it was copied"


def test_a_write_within_the_tick_of_a_coarse_clock_is_noticed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock of two seconds stands still from before the step is published until after it is
    damaged."""
    monkeypatch.setattr(storing.time, "time", lambda: 1_800_000_000.9)
    publish(store, Example())
    file = store.path(Example()) / "result.txt"
    file.write_text("resulT")
    os.utime(file, (1_800_000_000,) * 2)
    assert not store.done(Example())


def test_a_start_opens_one_file_of_a_step(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of steps, each further call to a shared disk counts."""
    publish(store, step := Example())
    later = Store(store.root)
    opened = list[str]()
    real = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, *how, **more: opened.append(path.name) or real(path, *how, **more),
    )
    assert later.done_of([step]) == {step.id} and opened == ["step.json"]


@pytest.mark.parametrize("file", ["result.txt", "checkpoint/modeling_pruned.py"])
def test_what_is_read_is_hashed_first(store: Store, hashed: list[str], file: str) -> None:
    """And what is run: code of an export that was changed is not."""
    first = Example()
    second = Example("scores", "after", needed={"plan": first})
    publish(store, first, file=file)
    rot(store.path(first) / file)
    later = Store(store.root).create()
    assert later.done(first)
    schedule = Schedule([second], finished={first.id})
    work(schedule, later, lambda step, scratch: pytest.fail("it read a damaged file"))
    assert "plan/example" in str(schedule.failed[second.id]) and later.error(second.id) is None
    assert not later.done(first) and len(list((later.root / "damaged").iterdir())) == 1
    publish(later, first)
    hashed.clear()
    work(schedule := Schedule([second], finished={first.id}), later, lambda step, scratch: None)
    assert second.id in schedule.finished and "result.txt" not in hashed, (
        "it was just hashed, as it was published"
    )


def test_verify_names_damaged_files_and_a_run_makes_them_anew(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [Example(name=f"number{number}", number=number) for number in range(3)]
    for step in steps[:2]:
        publish(store, step)
    with begin(store, "mine", steps):
        pass
    assert (
        study_command(store.root, "verify", "mine") == 0
        and "all 2 finished steps" in capsys.readouterr().out
    )
    file = store.path(steps[1]) / "result.txt"
    rot(file)
    assert Store(store.root).done(steps[1])
    assert study_command(store.root, "verify", "mine") == 1
    said = capsys.readouterr().out
    assert (
        f"damaged: {file}" in said and "step.json" not in said and "start the study again" in said
    )
    assert [Store(store.root).create().done(step) for step in steps] == [True, False, False]
    assert study_command(store.root, "verify", "mine") == 0


def test_what_a_killed_run_leaves_is_removed_by_later_ones(store: Store) -> None:
    run_until_killed(f"""
        store = Store({str(store.root)!r})
        step = Example()
        other = Example(number=1)
        with begin(store, "study", [step]), store.claim(other), store.claim(step) as scratch:
            (scratch / "half.txt").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert not store.done(Example())
    publish(store, Example())
    assert {p.name for p in store.path(Example()).iterdir()} == {"result.txt", "step.json"}
    assert not list((store.root / "plan").glob(f".{Example().id[:12]}*"))
    assert len(list((store.root / "claims").iterdir())) == 2, "of the run and of another step"
    with begin(store, "another", []):
        assert len(list((store.root / "claims").iterdir())) == 1, "its own"
    assert not list((store.root / "claims").iterdir())


def test_what_is_no_store_of_this_version_or_cannot_be_written_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "store.json"
    for content in ('{"schema": 99}', "[]"):
        marker.write_text(content)
        with pytest.raises(UserError, match="store="):
            Store(tmp_path)
        assert marker.read_text() == content
    with pytest.raises(UserError, match="cannot be written"):
        Store(marker / "store").create()


# Two people and one store

OWNER = 54321
COLLEAGUE = 54322
GROUP = 54320


@pytest.fixture
def of_the_group(tmp_path: Path) -> Iterator[Path]:
    """A folder of the group, in which new folders are of the group too.

    Another user may not read the folder of this repository, so all that a run reads of it is read
    before.
    """
    count_done(tmp_path / "own", Example())
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        os.chown(name, OWNER, GROUP)
        os.chmod(name, 0o2775)
        yield Path(name)


def as_user(user: int, umask: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns or raises in a process of that user."""

    def become() -> None:
        os.setgroups([])
        os.setgid(GROUP)
        os.setuid(user)
        os.umask(umask)

    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), become) as processes:
        return processes.submit(work, *arguments).result()


def count_done(root: Path, *steps: Step) -> int:
    """How many of the steps were not there and are done in a run."""
    store = Store(root).create()
    count = 0
    with begin(store, "study", steps):
        for step in steps:
            with store.claim(step) as scratch:
                if scratch is not None:
                    (scratch / "result.txt").write_text("result")
                    (scratch / "result.txt").chmod(0o600)
                    count += 1
    packing.Packing(store).pack()
    return count


@pytest.mark.parametrize(("mode", "shared"), [(0o2775, True), (0o2755, False), (0o775, False)])
def test_a_store_of_a_group_is_known_before_it_is_written(
    mode: int, shared: bool, tmp_path: Path
) -> None:
    """Commands such as gc and verify write into a store that they did not create."""
    tmp_path.chmod(mode)
    store = Store(tmp_path)
    assert (store.shared, store.claims.shared) == (shared, shared)


@pytest.mark.root
@pytest.mark.parametrize("many", [1, 500])
def test_people_of_a_group_share_steps(
    of_the_group: Path, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their umask, in a folder of the group, also with steps in packs; all of it stays the
    group's."""
    monkeypatch.setattr(packing, "MANY", many)
    first = Example(number=1)
    second = Example(number=2)
    assert as_user(OWNER, 0o077, count_done, of_the_group, first) == 1
    assert as_user(COLLEAGUE, 0o022, count_done, of_the_group, first, second) == 1
    assert as_user(OWNER, 0o002, count_done, of_the_group, first, second) == 0
    assert as_user(COLLEAGUE, 0o077, Store(of_the_group).readable, first)
    assert all(path.stat().st_mode & 0o020 for path in of_the_group.rglob("*"))
    assert bool(list(of_the_group.glob("packs/*"))) == (many == 1)


@pytest.mark.root
def test_a_store_that_only_its_owner_may_write_is_read_and_named(of_the_group: Path) -> None:
    """With the usual umask. Finished steps can be read, and a colleague's run ends in a sentence
    before it starts."""
    step = Example(number=1)
    assert as_user(OWNER, 0o022, count_done, of_the_group / "store", step) == 1
    assert as_user(COLLEAGUE, 0o022, Store(of_the_group / "store").done, step)
    with pytest.raises(UserError, match=r"store=.*/store"):
        as_user(COLLEAGUE, 0o022, count_done, of_the_group / "store", step, Example(number=2))
    assert as_user(OWNER, 0o022, count_done, of_the_group / "store", step) == 0


def taken(root: Path, other: Path, *steps: Step) -> tuple[list[bool], list[str]]:
    """Which steps of another store are done in this one when they are taken over, and what is
    said."""
    store = Store(root).create()
    other_stores.copy_steps(store, other_stores.open_other(str(other)), steps)
    return [store.done(step) for step in steps], store.notices


@pytest.mark.root
@pytest.mark.parametrize("large", [1, other_stores.LARGE])
def test_steps_of_a_colleague_are_taken_over(
    of_the_group: Path, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    """But one that may not be read. Nothing changes there."""
    monkeypatch.setattr(other_stores, "LARGE", large)
    steps = [Example(number=number) for number in range(2)]
    theirs = of_the_group / "store"
    assert as_user(OWNER, 0o022, count_done, theirs, *steps) == 2
    (Store(theirs).path(steps[1]) / "result.txt").chmod(0o600)
    (theirs / "lost+found").mkdir(0o700)
    before = state(theirs)
    done, [said] = as_user(COLLEAGUE, 0o022, taken, of_the_group / "own", theirs, *steps)
    assert done == [True, False] and steps[1].folder in said and state(theirs) == before
    with pytest.raises(UserError, match=rf"also=\[{theirs}\]"):
        as_user(COLLEAGUE, 0o022, count_done, theirs, steps[0])
    Store(theirs).path(steps[0]).chmod(0o700)
    assert as_user(COLLEAGUE, 0o022, Store(of_the_group / "own").done, steps[0]) == (large > 1), (
        "a link, or a copy"
    )


@pytest.mark.root
def test_what_jobs_execute_is_where_nobody_else_can_write(
    of_the_group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask, and what the modes were. A folder or a link of somebody else's is
    refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(of_the_group))
    for modes in ([0o700, 0o700], [0o755, 0o700]):
        folder = as_user(OWNER, 0, private, "jobs")
        assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder)] == modes
        folder.parent.chmod(0o777)
        folder.chmod(0o777)
    with pytest.raises(UserError, match=str(folder.parent)):
        as_user(COLLEAGUE, 0, private, "jobs")
    folder.parent.rename(of_the_group / "aside").chmod(0o777)
    as_user(COLLEAGUE, 0, folder.parent.symlink_to, of_the_group / "aside")
    with pytest.raises(UserError, match=str(folder.parent)):
        as_user(OWNER, 0, private, "jobs")
