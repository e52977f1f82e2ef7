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
from moe_lab.paths import private_cache
from moe_lab.study import other_stores, packing, provenance
from moe_lab.study import store as storing
from moe_lab.study.claims import Busy, Claim
from moe_lab.study.runs import create_run
from moe_lab.study.schedule import Schedule, work
from moe_lab.study.step import Step
from moe_lab.study.store import Store


def publish(store: Store, step: Step, text: str = "result", file: str = "result.txt") -> None:
    with store.claim(step) as scratch:
        assert scratch is not None
        (scratch / file).parent.mkdir(exist_ok=True)
        (scratch / file).write_text(text)
        (scratch / "provenance.json").write_text('{"seconds": 1.5}')


def test_a_step_that_raises_publishes_nothing(store: Store) -> None:
    with pytest.raises(RuntimeError), store.claim(Example()) as scratch:
        assert scratch is not None
        (scratch / "half.txt").write_text("half")
        raise RuntimeError
    assert not list((store.root / "plan").iterdir())


def test_the_error_of_a_failed_step_is_kept_until_it_is_published(store: Store) -> None:
    step = Example()
    store.fail(step, {"message": "broken"})
    assert not store.is_finished(step)
    assert (Store(store.root).error(step.id) or {})["message"] == "broken"
    publish(store, step)
    assert store.is_finished(step)
    assert store.error(step.id) is None


def test_a_published_step_is_a_folder_with_identity_provenance_and_checksums(
    store: Store,
) -> None:
    step = Example()
    publish(store, step)
    folder = store.path(step)
    assert {path.name for path in folder.iterdir()} == {"result.txt", "step.json"}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    document = json.loads((folder / "step.json").read_text())
    assert document["id"] == step.id
    assert document["settings"] == {"number": 0}
    assert document["provenance"] == {"seconds": 1.5}
    assert set(document["files"]) == {"result.txt"}


@pytest.mark.parametrize(
    ("name", "is_before"),
    [
        ("seal", True),
        ("seal", False),
        ("check", False),
    ],
)
def test_late_owners_publish_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str, is_before: bool
) -> None:
    """The owner was suspended for so long, before or after it sealed the step or checked its claim,
    that another run has found this claim stale and published the step."""
    other = Store(store.root).create()
    module = storing if name == "seal" else Claim
    monkeypatch.setattr(other.claims, "is_stale", lambda path: True)
    function = getattr(module, name)

    def suspended(*arguments: Any) -> None:
        monkeypatch.setattr(module, name, function)
        if is_before:
            publish(other, Example(), "of the other")
        function(*arguments)
        if not is_before:
            publish(other, Example(), "of the other")

    with pytest.raises(Busy), store.claim(Example()) as scratch:
        assert scratch is not None
        (scratch / "result.txt").write_text("of the first")
        monkeypatch.setattr(module, name, suspended)
    assert_published(store, Example(), "of the other")


def test_a_step_that_another_owner_publishes_first_stays(store: Store, tmp_path: Path) -> None:
    """That owner did not see the scratch folder of this one, as on a network disk."""
    other = Store(tmp_path / "other").create()
    publish(other, Example(), "of the other")
    with store.claim(Example()) as scratch:
        assert scratch is not None
        (scratch / "result.txt").write_text("of the first")
        shutil.copytree(other.path(Example()), store.root / Example().folder)
    assert_published(store, Example(), "of the other")


def assert_published(store: Store, step: Step, text: str) -> None:
    """The step is the only one of its kind, has that text and is not claimed."""
    with store.claim(step) as scratch:
        assert scratch is None
        assert (store.path(step) / "result.txt").read_text() == text
    assert len(list((store.root / step.kind).iterdir())) == 1
    assert not list((store.root / "claims").iterdir())


def test_a_step_that_is_published_during_a_takeover_is_found(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Store(store.root).create()
    claim = store.claim(Example())
    scratch = claim.__enter__()
    assert scratch is not None
    (scratch / "result.txt").write_text("of the first")

    def is_stale(path: Path) -> bool:
        if not path.exists():
            return False
        claim.__exit__(None, None, None)
        return True

    monkeypatch.setattr(other.claims, "is_stale", is_stale)
    with pytest.raises(Busy), other.claim(Example()):
        pass
    monkeypatch.undo()
    with other.claim(Example()) as second_scratch:
        assert second_scratch is None


def test_steps_under_another_label_are_found(
    store: Store,
) -> None:
    other = Store(store.root).create()
    publish(store, Example(number=1))
    assert not other.is_finished(Example())
    mtime = (store.root / "plan").stat().st_mtime_ns
    publish(store, Example())
    os.utime(store.root / "plan", ns=(mtime, mtime))
    with other.claim(Example(name="other")) as scratch:
        assert scratch is None


@pytest.fixture
def two_folders(store: Store) -> list[Path]:
    """The folders of a step that is in the store under the labels `example` and `other`."""
    publish(store, Example())
    folders = [store.root / Example(name=name).folder for name in ("example", "other")]
    shutil.copytree(*folders)
    return folders


def test_both_folders_of_a_step_are_kept_while_it_is_needed(
    store: Store, two_folders: list[Path]
) -> None:
    with create_run(store, "study", [Example()]):
        assert study_command(store.root, "gc", "apply=true") == 0
        assert all(folder.exists() for folder in two_folders)
    shutil.rmtree(store.root / "runs")
    assert study_command(store.root, "gc", "apply=true") == 0
    assert not any(folder.exists() for folder in two_folders)


def test_a_step_is_read_from_its_other_folder_if_one_is_damaged(
    store: Store, two_folders: list[Path]
) -> None:
    (two_folders[0] / "result.txt").write_text("damage")
    labels = ("example", "other", "example")
    assert [store.is_finished(Example(name=name)) for name in labels] == [False, True, True]


def test_a_step_without_one_of_its_files_is_reported_and_set_aside(store: Store) -> None:
    publish(store, Example())
    (store.path(Example()) / "result.txt").unlink()
    assert not store.is_finished(Example())
    assert "result.txt is missing" in store.notices[0]
    publish(store, Example())
    assert store.is_finished(Example())


def rot(file: Path) -> None:
    """Change a file as a failing disk does: its size and its time stay."""
    status = file.stat()
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def state(folder: Path) -> dict[Path, Any]:
    """Time, mode and content of everything in a folder."""
    statuses = {path: path.lstat() for path in folder.rglob("*")}
    return {
        path: (status.st_mtime_ns, status.st_mode, path.is_file() and path.read_bytes())
        for path, status in statuses.items()
    }


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are hashed from now on."""
    names: list[str] = []
    sha256 = provenance._sha256

    def note_and_hash(file: Any) -> str:
        names.append(Path(file.name).name)
        return sha256(file)

    monkeypatch.setattr(provenance, "_sha256", note_and_hash)
    return names


def copy_store(store: Store, folder: Path, method: str) -> None:
    """Copy a store with new times, with its times, with whole seconds of them as tar does, or with
    one time for all files."""
    function = shutil.copy if method == "cp -r" else shutil.copy2
    shutil.copytree(store.root, folder, copy_function=function)
    for file in folder.rglob("*"):
        if method == "seconds":
            os.utime(file, (int(file.stat().st_mtime),) * 2)
        elif method == "same tick":
            os.utime(file, (1_800_000_001,) * 2)


@pytest.mark.parametrize(
    ("method", "files"),
    [
        ("cp -r", ["result.txt"]),
        ("cp -a", []),
        ("seconds", []),
        ("same tick", ["result.txt"]),
    ],
)
def test_a_copied_store_is_hashed_once_at_most(
    store: Store, hashed: list[str], tmp_path: Path, method: str, files: list[str]
) -> None:
    publish(store, Example())
    copy_store(store, tmp_path / "copy", method)
    hashed.clear()
    assert Store(tmp_path / "copy").is_finished(Example())
    assert hashed == files
    hashed.clear()
    assert Store(tmp_path / "copy").is_finished(Example())
    assert hashed == []


def test_damage_before_a_store_is_copied_is_found(store: Store, tmp_path: Path) -> None:
    publish(store, Example())
    rot(store.path(Example()) / "result.txt")
    copy_store(store, tmp_path / "copy", "cp -r")
    assert not Store(tmp_path / "copy").is_finished(Example())


def test_damage_within_a_tick_of_a_coarse_clock_is_noticed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock of two seconds stands still from before the step is published until after it is
    damaged."""
    monkeypatch.setattr(storing.time, "time", lambda: 1_800_000_000.9)
    publish(store, Example())
    file = store.path(Example()) / "result.txt"
    file.write_text("resulT")
    os.utime(file, (1_800_000_000,) * 2)
    assert not store.is_finished(Example())


def test_a_start_opens_one_file_of_a_step(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies have thousands of steps, and calls to a shared disk are slow."""
    step = Example()
    publish(store, step)
    reopened = Store(store.root)
    opened = list[str]()
    open_path = Path.open

    def note_and_open(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path.name)
        return open_path(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", note_and_open)
    assert reopened.finished_ids([step]) == {step.id}
    assert opened == ["step.json"]


@pytest.mark.parametrize("file", ["result.txt", "checkpoint/modeling_pruned.py"])
def test_a_damaged_input_is_not_read(store: Store, file: str) -> None:
    """Nor executed, as the code of an export is."""
    plan = Example()
    scores = Example("scores", "after", input_steps={"plan": plan})
    publish(store, plan, file=file)
    rot(store.path(plan) / file)
    reopened = Store(store.root).create()
    assert reopened.is_finished(plan)
    schedule = Schedule([scores], finished={plan.id})
    work(schedule, reopened, lambda step, scratch: pytest.fail("it read a damaged file"))
    assert "plan/example" in str(schedule.failed[scores.id])
    assert reopened.error(scores.id) is None
    assert not reopened.is_finished(plan)
    assert len(list((reopened.root / "damaged").iterdir())) == 1


def test_an_input_that_was_just_published_is_not_hashed_again(
    store: Store, hashed: list[str]
) -> None:
    plan = Example()
    scores = Example("scores", "after", input_steps={"plan": plan})
    publish(store, plan)
    hashed.clear()
    schedule = Schedule([scores], finished={plan.id})
    work(schedule, store, lambda step, scratch: None)
    assert scores.id in schedule.finished
    assert "result.txt" not in hashed


def test_verify_names_damaged_files_whose_steps_are_missing_then(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third step is not finished."""
    steps: list[Step] = [Example(name=f"number{number}", number=number) for number in range(3)]
    for step in steps[:2]:
        publish(store, step)
    with create_run(store, "mine", steps):
        pass
    assert study_command(store.root, "verify", "mine") == 0
    assert "all 2 finished steps" in capsys.readouterr().out
    file = store.path(steps[1]) / "result.txt"
    rot(file)
    assert Store(store.root).is_finished(steps[1])
    assert study_command(store.root, "verify", "mine") == 1
    output = capsys.readouterr().out
    assert f"damaged: {file}" in output
    assert "step.json" not in output
    assert "start the study again" in output
    reopened = [Store(store.root).create().is_finished(step) for step in steps]
    assert reopened == [True, False, False]
    assert study_command(store.root, "verify", "mine") == 0


def test_files_and_claims_of_a_killed_run_are_removed(store: Store) -> None:
    """The run is killed while it computes `Example()` and has claimed a second step."""
    run_until_killed(f"""
        store = Store({str(store.root)!r})
        step = Example()
        other = Example(number=1)
        with create_run(store, "study", [step]), store.claim(other), store.claim(step) as scratch:
            (scratch / "half.txt").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert not store.is_finished(Example())
    publish(store, Example())
    names = {path.name for path in store.path(Example()).iterdir()}
    assert names == {"result.txt", "step.json"}
    assert not list((store.root / "plan").glob(f".{Example().id[:12]}*"))
    claims = store.root / "claims"
    assert len(list(claims.iterdir())) == 2, "of the run and of the second step"
    with create_run(store, "another", []):
        assert len(list(claims.iterdir())) == 1, "its own"
    assert not list(claims.iterdir())


@pytest.mark.parametrize("content", ['{"schema": 99}', "[]"])
def test_a_store_of_another_version_is_refused(tmp_path: Path, content: str) -> None:
    marker = tmp_path / "store.json"
    marker.write_text(content)
    with pytest.raises(UserError, match="store="):
        Store(tmp_path)
    assert marker.read_text() == content


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match="cannot be written"):
        Store(file / "store").create()


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
    """The result or error of a function in a process of that user."""

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
    with create_run(store, "study", steps):
        for step in steps:
            with store.claim(step) as scratch:
                if scratch is not None:
                    (scratch / "result.txt").write_text("result")
                    (scratch / "result.txt").chmod(0o600)
                    count += 1
    packing.Packing(store).pack()
    return count


@pytest.mark.parametrize(
    ("mode", "shared"),
    [
        (0o2775, True),
        (0o2755, False),
        (0o775, False),
    ],
)
def test_mode_of_the_folder_says_whether_a_store_is_shared(
    mode: int, shared: bool, tmp_path: Path
) -> None:
    """Commands such as gc and verify write into a store that they did not create."""
    tmp_path.chmod(mode)
    store = Store(tmp_path)
    assert (store.shared, store.claims.shared) == (shared, shared)


@pytest.mark.root
@pytest.mark.parametrize("min_packed", [1, 500])
def test_people_of_a_group_share_steps(
    of_the_group: Path, min_packed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their umask, with steps in folders or in packs, the group may write all files."""
    monkeypatch.setattr(packing, "MANY", min_packed)
    first = Example(number=1)
    second = Example(number=2)
    assert as_user(OWNER, 0o077, count_done, of_the_group, first) == 1
    assert as_user(COLLEAGUE, 0o022, count_done, of_the_group, first, second) == 1
    assert as_user(OWNER, 0o002, count_done, of_the_group, first, second) == 0
    assert as_user(COLLEAGUE, 0o077, Store(of_the_group).is_readable, first)
    assert all(path.stat().st_mode & 0o020 for path in of_the_group.rglob("*"))
    assert bool(list(of_the_group.glob("packs/*"))) == (min_packed == 1)


@pytest.mark.root
def test_a_store_that_only_its_owner_may_write_can_be_read(of_the_group: Path) -> None:
    """A colleague can read finished steps with the usual umask; the colleague's run is refused
    before it starts."""
    root = of_the_group / "store"
    step = Example(number=1)
    assert as_user(OWNER, 0o022, count_done, root, step) == 1
    assert as_user(COLLEAGUE, 0o022, Store(root).is_finished, step)
    with pytest.raises(UserError, match=rf"store={root} .*also=\[{root}\]"):
        as_user(COLLEAGUE, 0o022, count_done, root, step, Example(number=2))
    assert as_user(OWNER, 0o022, count_done, root, step) == 0


def taken_over(root: Path, other: Path, *steps: Step) -> tuple[list[bool], list[str]]:
    """Whether each step of another store is finished in this one after it is taken over, and the
    notices."""
    store = Store(root).create()
    other_stores.copy_from(store, str(other), steps)
    return [store.is_finished(step) for step in steps], store.notices


@pytest.fixture
def colleagues_store(of_the_group: Path) -> tuple[Path, list[Step]]:
    """The store of OWNER with two steps, of which others may not read the second."""
    steps: list[Step] = [Example(number=number) for number in range(2)]
    root = of_the_group / "store"
    assert as_user(OWNER, 0o022, count_done, root, *steps) == 2
    (Store(root).path(steps[1]) / "result.txt").chmod(0o600)
    (root / "lost+found").mkdir(0o700)
    return root, steps


@pytest.mark.root
@pytest.mark.parametrize("large", [1, other_stores.LARGE])
def test_steps_of_a_colleague_are_taken_over(
    of_the_group: Path,
    colleagues_store: tuple[Path, list[Step]],
    monkeypatch: pytest.MonkeyPatch,
    large: int,
) -> None:
    """Except a step that may not be read. A link to a large step needs the store of the colleague
    later, a copy of a small one does not."""
    monkeypatch.setattr(other_stores, "LARGE", large)
    theirs, steps = colleagues_store
    state_before = state(theirs)
    mine = of_the_group / "own"
    finished, [notice] = as_user(COLLEAGUE, 0o022, taken_over, mine, theirs, *steps)
    assert finished == [True, False]
    assert steps[1].folder in notice
    assert state(theirs) == state_before
    Store(theirs).path(steps[0]).chmod(0o700)
    assert as_user(COLLEAGUE, 0o022, Store(mine).is_finished, steps[0]) == (large > 1)


@pytest.mark.root
def test_only_the_owner_can_write_files_that_jobs_execute(
    of_the_group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The umask does not matter, and permissions that the folders have are reduced. The folder of
    another user is refused, and so is a foreign link in its place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(of_the_group))
    private_folder: Path = as_user(OWNER, 0, private_cache, "jobs")
    folders = (private_folder.parent, private_folder)
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o700, 0o700]
    for path in folders:
        path.chmod(0o777)
    with pytest.raises(UserError, match=str(private_folder.parent)):
        as_user(COLLEAGUE, 0, private_cache, "jobs")
    as_user(OWNER, 0, private_cache, "jobs")
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o755, 0o700]
    for path in folders:
        path.chmod(0o777)
    aside = folders[0].rename(of_the_group / "aside")
    as_user(COLLEAGUE, 0, folders[0].symlink_to, aside)
    with pytest.raises(UserError, match=str(folders[0])):
        as_user(OWNER, 0, private_cache, "jobs")
