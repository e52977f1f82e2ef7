"""Claims: one owner at a time, whoever dies, is suspended, or has a clock that is wrong."""

import errno
import json
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from processes import wait_until

from moe_lab.json_files import read_sealed, sealed
from moe_lab.study import claims as claiming
from moe_lab.study.claims import Busy, Claim, Claims

HOUR = 3600
SHORT = 0.6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "claims"


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "BEAT", 0.04)


def fork(work: Callable[[], Any]) -> int:
    """Do `work` in a process of its own; its id."""
    if pid := os.fork():
        return pid
    try:
        work()
    finally:
        os._exit(0)


def killed_owner(folder: Path, name: str) -> None:
    """A claim whose process was killed, and is a zombie."""

    def hold() -> None:
        Claims(folder).take(name)
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitid(os.P_PID, fork(hold), os.WEXITED | os.WNOWAIT)


def unlinks_then(act: Callable[[], None]) -> Any:
    """While open, a removal of a file is followed by an act."""
    remove = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        remove(path, missing_ok)
        act()

    return patch.object(Path, "unlink", unlink)


def foreign(folder: Path, age: float = 0.0, limit: float = SHORT, **changes: Any) -> Path:
    """A claim of another machine whose time is `age` seconds ago."""
    claims = Claims(folder, limit=limit)
    path = claims.take("x").path
    claims.owned.clear()  # it has no heartbeat
    path.write_text(
        sealed(json.dumps({**read_sealed(path), "machine": ["elsewhere", "1"], **changes}))
    )
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_a_claim_is_held_until_it_is_released(folder: Path) -> None:
    claims = Claims(folder)
    with claims.take("x"):
        for other in (claims, Claims(folder)):
            with pytest.raises(Busy):
                other.take("x")
        assert Claims(folder).active() == {"x"}
    assert not list(folder.iterdir())
    assert Claims(folder).active() == set()


def test_a_claim_of_a_killed_process_is_free_at_once(folder: Path) -> None:
    killed_owner(folder, "x")
    assert list(folder.iterdir())
    assert Claims(folder).active() == set()
    with Claims(folder).take("x"):
        assert Claims(folder).active() == {"x"}
    assert not list(folder.iterdir())
    killed_owner(folder, "x")
    Claims(folder).clear()
    assert not list(folder.iterdir())


def test_a_copied_claim_is_ignored(folder: Path, tmp_path: Path) -> None:
    """The store was copied while a process worked in it that still runs."""
    with Claims(folder).take("x"):
        shutil.copytree(folder, tmp_path / "copy")
        with Claims(tmp_path / "copy").take("x"):
            pass
    assert not list(folder.iterdir())
    assert not list((tmp_path / "copy").iterdir())


def test_a_claim_holds_on_a_mount_with_other_inodes(folder: Path) -> None:
    """On sshfs, each mount has its own inodes: the claim of a living process on this machine is no
    copy, and the claim of an ended process is free."""
    claim = Claims(folder).take("x")
    owner = read_sealed(claim.path)
    other_mount = {**owner, "device": owner["device"] + 1, "inode": owner["inode"] + 1}
    claim.path.write_text(sealed(json.dumps(other_mount)))
    assert not Claims(folder).is_stale(claim.path)
    assert Claims(folder).active() == {"x"}
    claim.path.write_text(sealed(json.dumps({**other_mount, "started": "1"})))
    assert Claims(folder).is_stale(claim.path)


@pytest.mark.parametrize("released", [False, True])
def test_a_lost_race_may_raise_any_error(folder: Path, released: bool) -> None:
    """sshfs says EPERM where other file systems say EEXIST. `released`: the winner gives its claim
    up at once."""
    folder.mkdir()
    create = os.open
    winners = list[Claim]()

    def lose(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_EXCL and not winners:
            winners.append(Mock())  # so that the winner's own creation succeeds
            winners[0] = Claims(folder).take("x")
            if released:
                winners[0].release()
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        return create(path, flags, mode)

    with patch.object(os, "open", lose):
        if released:
            Claims(folder).take("x").release()
        else:
            with pytest.raises(Busy):
                Claims(folder).take("x")


def test_a_claim_may_be_removed_on_another_machine_while_it_is_read(folder: Path) -> None:
    """Network disks then say that the file's handle is stale."""
    with Claims(folder).take("a"), patch.object(Path, "open") as opened:
        opened.return_value.__enter__.return_value.read.side_effect = OSError(errno.ESTALE, "")
        with pytest.raises(Busy):
            Claims(folder).take("a")


def test_a_folder_that_refuses_claims_is_reported(folder: Path) -> None:
    folder.mkdir()
    refusal = PermissionError(errno.EPERM, "Operation not permitted")
    with patch.object(os, "open", Mock(side_effect=refusal)), pytest.raises(PermissionError):
        Claims(folder).take("x")


def test_a_claim_survives_a_half_released_claim(folder: Path) -> None:
    """The first of two claims was removed; who finds the second has all that it does, and the next
    one is the first."""
    killed_owner(folder, "x")

    def release() -> None:
        claim = Claims(folder).take("x")
        with unlinks_then(lambda: os.kill(os.getpid(), signal.SIGKILL)):
            claim.release()

    os.waitpid(fork(release), 0)
    assert [path.name for path in folder.iterdir()] == ["x.2"]
    with Claims(folder).take("x") as claim:
        claim.check()
        with pytest.raises(Busy):
            Claims(folder).take("x")
        claim.check()
    assert not list(folder.iterdir())


def test_a_gap_between_claims_is_not_taken(folder: Path) -> None:
    """While a taker is between three claims, of which two are stale, these are released, and the
    first is taken."""
    for _ in "12":
        killed_owner(folder, "x")
    third = Claims(folder).take("x")
    taker = Claims(folder)
    new = list[Claim]()
    make = Claim.__init__

    def late(claim: Claim, claims: Claims, name: str, generation: int) -> None:
        if claims is taker and generation == 2:
            for number in (1, 2):
                claims.path("x", number).unlink()
            new.append(Claims(folder).take("x"))
        make(claim, claims, name, generation)

    with patch.object(Claim, "__init__", late), pytest.raises(Busy):
        taker.take("x")
    third.path.unlink()
    new[0].check()


def test_clearing_stale_claims_keeps_a_new_claim(folder: Path) -> None:
    for _ in "12":
        killed_owner(folder, "x")
    claims = Claims(folder)
    new = list[Claim]()
    with unlinks_then(
        lambda: (
            list(folder.iterdir()) == [claims.path("x", 3)] and new.append(Claims(folder).take("x"))
        )
    ):
        claims.clear()
    new[0].check()


class Race:
    """Processes that claim "x" again and again, and die at random while they hold or release it.

    The holder of the claim makes the file `mark`; two holders at a time would both want to make it.
    """

    def __init__(self, claims: Path, folder: Path) -> None:
        self.claims = claims
        self.mark = folder / "mark"
        self.collision = folder / "collision"
        self.taken = folder / "taken"

    def run(self, seed: int) -> None:
        draw = random.Random(seed)
        claims = Claims(self.claims)
        for _ in range(20):
            try:
                claim = claims.take("x")
            except Busy:
                time.sleep(draw.random() / 500)
                continue
            self.hold(draw)
            with unlinks_then(lambda: self.may_die(draw)):
                self.may_die(draw)
                claim.release()

    def hold(self, draw: random.Random) -> None:
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            self.collision.touch()
        with self.taken.open("a") as file:
            file.write("1")
        time.sleep(draw.random() / 500)
        self.mark.unlink(missing_ok=True)

    def may_die(self, draw: random.Random) -> None:
        if draw.random() < 0.2:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_one_of_several_processes_takes_over_a_stale_claim(folder: Path, tmp_path: Path) -> None:
    race = Race(folder, tmp_path)
    for number in range(10):
        killed_owner(folder, "x")
        for pid in [fork(partial(race.run, seed)) for seed in range(4 * number, 4 * number + 4)]:
            os.waitpid(pid, 0)
    assert not race.collision.exists()
    assert len(race.taken.read_text()) > 10
    Claims(folder).clear()
    assert not list(folder.iterdir())


def test_a_heartbeat_renews_a_claim(folder: Path, fast: None) -> None:
    with Claims(folder).take("x") as claim:
        os.utime(claim.path, (1, 1))
        wait_until(lambda: time.time() - claim.path.stat().st_mtime < HOUR)


def test_a_claim_of_the_day_before_is_stale_unless_its_job_is_in_the_queue(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, as commands such as gc do not wait for heartbeats; otherwise steps that a lost node
    claimed would be kept for ever."""
    path = foreign(folder, 12 * HOUR, job="7")
    assert not Claims(folder).is_stale(path)
    os.utime(path, (time.time() - 25 * HOUR,) * 2)
    assert Claims(folder).is_stale(path)
    monkeypatch.setattr(claiming, "in_queue", lambda *job: job == ("7", os.getuid()))
    assert not Claims(folder).is_stale(path)


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
class TestAnotherMachine:
    """Processes of another machine cannot be looked up: heartbeats decide."""

    def test_an_old_claim_is_free_after_some_missed_heartbeats(self, folder: Path) -> None:
        """The limit of the claim's owner counts."""
        for limit in (10 * HOUR, 60):
            path = foreign(folder, HOUR, limit)
            claims = Claims(folder)
            assert not claims.is_stale(path)
            time.sleep(4 * claiming.BEAT)
            assert claims.is_stale(path) == (limit == 60)
            path.unlink()

    @pytest.mark.parametrize("age", [HOUR, 0, -HOUR])
    def test_heartbeats_keep_a_claim_whatever_its_clock(self, folder: Path, age: float) -> None:
        path = foreign(folder, age)
        claims = Claims(folder)
        begun = time.monotonic()
        while time.monotonic() < begun + 2 * SHORT:
            moment = path.stat().st_mtime + 0.01
            os.utime(path, (moment, moment))
            assert not claims.is_stale(path)
            time.sleep(claiming.BEAT / 4)
        last = time.monotonic()
        wait_until(lambda: claims.is_stale(path))
        assert age > 0 or time.monotonic() - last > SHORT / 2, "its time says nothing"

    def test_a_job_in_the_queue_keeps_its_claim(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = foreign(folder, HOUR, job="7")
        queue = {("7", os.getuid())}
        monkeypatch.setattr(claiming, "in_queue", lambda *job: job in queue)
        claims = Claims(folder)
        assert not claims.is_stale(path)
        time.sleep(4 * claiming.BEAT)
        assert not claims.is_stale(path)
        queue.clear()
        assert claims.is_stale(path)

    def test_the_holder_and_its_last_heartbeat_are_reported(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = foreign(folder, HOUR, 1.5, host="node7", job="12")
        assert Claims(folder).holder("y") == "another process"
        monkeypatch.setattr(claiming, "ATTEMPTS_BEFORE_NOTICE", 2)
        os.utime(path, (time.time() + HOUR,) * 2)
        with Claims(folder).wait_for("x"):
            pass
        assert f"process {os.getpid()} on node7, job 12" in capsys.readouterr().err
        path = foreign(folder, HOUR)
        assert Claims(folder).holder("x").endswith("(no heartbeat for 60 min)")

    def test_a_requeued_job_takes_over_its_claim(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = foreign(folder, job="7", restarts=1)
        queue = {("7", os.getuid())}
        monkeypatch.setattr(claiming, "in_queue", lambda *job: job in queue)
        claims = Claims(folder)
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert not claims.is_stale(path), "a process of the same job"
        monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
        assert claims.is_stale(path)
        monkeypatch.setenv("SLURM_JOB_ID", "8")
        assert not claims.is_stale(path)

    @pytest.mark.parametrize("text", ["", "{", "[]", "another process"])
    def test_an_unreadable_claim_is_free_without_heartbeats(self, folder: Path, text: str) -> None:
        """A claim with a changed byte may name a process that never was on this machine."""
        path = foreign(folder, machine=claiming.machine())
        pid = f'"pid": {os.getpid()}'
        path.write_text(
            path.read_text().replace(pid, f"{pid[:-1]}{9 - int(pid[-1])}") if " " in text else text
        )
        claims = Claims(folder)
        assert not claims.is_stale(path)
        time.sleep(4 * claiming.BEAT)
        os.utime(path)
        assert not claims.is_stale(path)
        time.sleep(4 * claiming.BEAT)
        assert claims.is_stale(path)
        claims.take("x").release()
        assert not list(folder.iterdir())


def test_an_owner_that_lost_its_claim_spares_the_new_claim(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspended = Claims(folder).take("x")
    taker = Claims(folder)
    monkeypatch.setattr(taker, "is_stale", lambda path: path == suspended.path)
    with taker.take("x") as claim:
        with pytest.raises(Busy):
            suspended.check()
        suspended.release()
        claim.check()
        with pytest.raises(Busy):
            Claims(folder).take("x")
    assert not list(folder.iterdir())


def test_a_full_disk_leaves_no_claim(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space"):
        Claims(folder).take("x")
    assert not list(folder.iterdir())


def test_pickled_claims_own_nothing(folder: Path) -> None:
    claims = Claims(folder, limit=SHORT)
    with claims.take("x"):
        copied = pickle.loads(pickle.dumps(claims))
        assert copied.folder == folder
        assert copied.limit == SHORT
        assert not copied.owned
