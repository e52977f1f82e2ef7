"""store=URL: finished steps are shared by machines, and nothing is lost, whoever dies or is out of reach."""

import json
import shutil
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import file_systems
import pytest
from file_systems import DEADLY, DIE, REFUSING, Refusing
from fsspec.registry import known_implementations
from processes import until
from studies import STUDY, Asked, Worker, ask, killed, results, start
from test_store import rot, state

from analysis.__main__ import parse
from moe_lab.errors import UserError
from moe_lab.packs import packs_in
from moe_lab.paths import store_folder
from moe_lab.results import places, read_record
from moe_lab.study import packing, sync
from moe_lab.study.graph import build
from moe_lab.study.preflight import preflight
from moe_lab.study.step import digest
from moe_lab.study.store import Store, damage, entry
from moe_lab.study.sync import Remote

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]

Machine = Callable[[str], None]
WORDS = ("criterion=aimer", "ratio=0.5")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Be another machine: it has a cache of its own. Disks at URLs refuse nothing yet."""
    monkeypatch.setattr(Refusing, "refuses", frozenset())
    file_systems.register()

    def be(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        Worker.did.clear()

    be("first")
    return be


@pytest.fixture
def pushed(tmp_path: Path, machine: Machine, one: Asked) -> str:
    """The URL at which the first machine has pushed a study."""
    url = url_of(tmp_path)
    assert start(url, one) == 0
    return url


def url_of(place: Path, protocol: str = "file") -> str:
    return f"{protocol}://{place}/remote"


def recorded(place: Path) -> set[str]:
    """The steps that the record of the study names."""
    return places(read_record(place, STUDY) or {})


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_another_machine_makes_nothing_again(
    tmp_path: Path, machine: Machine, one: Asked, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a dry run there counts what would be pulled, and leaves nothing."""
    assert start(tmp_path / "alone", one) == 0
    url = url_of(tmp_path, protocol)
    assert start(url, one) == 0
    first = results(store_folder(url))
    machine("second")
    before = sorted(tmp_path.glob("remote/**/*"))
    assert start(url, one, dry_run=True) == 0
    assert f"{len(build(*one).steps)} of them in {url}" in capsys.readouterr().err
    assert not store_folder(url).exists() and sorted(tmp_path.glob("remote/**/*")) == before
    assert start(url, one) == 0 and Worker.did == []
    assert results(tmp_path / "alone") == first == results(store_folder(url)) != {}
    assert recorded(tmp_path / "alone") == recorded(store_folder(url))
    assert not any(damage(folder, hash_all=True) for folders in Store(url).finished().values() for folder in folders)


@pytest.mark.parametrize("lost", ["freed", "damaged"])
def test_what_is_lost_here_is_pulled(tmp_path: Path, machine: Machine, one: Asked, other: Asked, lost: str) -> None:
    url = url_of(tmp_path)
    assert start(url, one) == start(url, other) == 0
    whole = results(store_folder(url))
    if lost == "freed":
        assert ask(url, "gc", "apply=true") == 0
    else:
        next(path for path in store_folder(url).glob("plan/*/result.json")).write_text("{}")
    assert results(store_folder(url)) != whole
    Worker.did.clear()
    assert start(url, one) == start(url, other) == 0 and Worker.did == [] and results(store_folder(url)) == whole


def test_steps_are_found_under_another_label(tmp_path: Path, pushed: str, machine: Machine, one: Asked) -> None:
    marker = next(Path(tmp_path, "remote", "plan").glob("*.json"))
    label = f"renamed{marker.stem[-13:]}"
    marker.with_suffix("").rename(marker.with_name(label))
    marker.rename(marker.with_name(f"{label}.json"))
    machine("second")
    assert start(pushed, one) == 0 and Worker.did == []
    assert f"plan/{label}" in recorded(store_folder(pushed)) and len(list(marker.parent.glob("*.json"))) == 1


@pytest.mark.parametrize("harm", ["cut", "changed", "removed", "marker", "outside"])
def test_damaged_copies_are_pushed_anew(tmp_path: Path, pushed: str, machine: Machine, one: Asked, harm: str) -> None:
    marker = next(Path(tmp_path, "remote", "plan").glob("*.json"))
    file = next(Path(tmp_path, "remote", "plan").glob("*/*/result.json"))
    if harm in ("cut", "changed"):
        file.write_bytes(file.read_bytes()[:9] if harm == "cut" else file.read_bytes()[::-1])
    elif harm == "removed":
        file.unlink()
    elif harm == "marker":
        marker.write_text(marker.read_text()[:40])
    else:
        (tmp_path / "outside").write_bytes(file.read_bytes())
        document = json.loads(marker.read_text())
        document["files"]["../../../../outside"] = document["files"]["result.json"]
        del document["digest"]
        marker.write_text(json.dumps({**document, "digest": digest(document)}))
        file.parent.rename(file.parent.with_name(digest(document["files"])[:12]))
    machine("second")
    assert start(pushed, one) == 0 and [name.partition("/")[0] for name in Worker.did] == ["plan"]
    machine("third")
    assert start(pushed, one) == 0 and Worker.did == []
    assert not list(tmp_path.glob("*/**/outside"))


def whole_there(place: Path) -> bool:
    """Whether every step that counts as finished at a URL has all of its files."""
    for path in place.glob("*/*.json"):
        files = json.loads(path.read_text()).get("files")
        copies = [{name: entry(copy / name) for name in files} == files for copy in path.with_suffix("").iterdir()]
        if not any(copies):
            return False
    return True


def study_killed(url: str, at: str) -> None:
    """Start the study in a process that is killed in the middle of an operation of its file system."""
    killed(
        f"""
        import file_systems
        from studies import Worker, asked, start
        from moe_lab.study import run, sync

        file_systems.register()
        run.Here = Worker
        sync.AT_ONCE = 1  # another thread might be killed before it has written whose its claim is
        start({url!r}, asked(*{WORDS!r}))
        """,
        **{DIE: at},
    )


@pytest.mark.parametrize("at", ["put_file 8", "pipe_file 3", "mv 3"])
def test_killed_in_the_middle_of_a_push(tmp_path: Path, machine: Machine, one: Asked, at: str) -> None:
    assert start(tmp_path / "alone", one) == 0
    url = url_of(tmp_path, DEADLY)
    study_killed(url, at)
    here = results(store_folder(url))
    assert here and whole_there(tmp_path / "remote"), "half a step is no finished step there"
    machine("second")
    before = Path(tmp_path, "remote")
    there = {str(path.relative_to(before).with_suffix("")) for path in before.glob("*/*.json")}
    assert there < {name.rpartition("/")[0] for name in here}
    machine("first")
    assert start(url, one) == 0 and not {f"{name}/result.json" for name in Worker.did} & here.keys()
    assert results(store_folder(url)) == results(tmp_path / "alone") and whole_there(tmp_path / "remote")
    machine("second")
    assert start(url, one) == 0 and Worker.did == []
    assert results(store_folder(url)) == results(tmp_path / "alone")


def test_killed_in_the_middle_of_a_pull(tmp_path: Path, machine: Machine, one: Asked) -> None:
    assert start(tmp_path / "alone", one) == 0
    url = url_of(tmp_path, DEADLY)
    assert start(url, one) == 0
    machine("second")
    study_killed(url, "get_file 5")
    place = store_folder(url)
    assert list(place.glob("*/.*")), "it was in the middle"
    assert not any(damage(folder, hash_all=True) for folders in Store(place).finished().values() for folder in folders)
    assert start(url, one) == 0 and Worker.did == []
    assert results(place) == results(tmp_path / "alone") and not list(place.glob("*/.*"))


@pytest.mark.parametrize("lost", ["damaged", "freed"])
def test_an_interrupted_push_goes_on_and_what_is_lost_meanwhile_is_left_out(
    tmp_path: Path, machine: Machine, one: Asked, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    url, pushed = url_of(tmp_path), []
    assert start(url, one) == 0
    store, remote = Store(url), Remote(url)
    put = remote.files.put_file
    place = next(name for name in recorded(store.root) if name.startswith("plan/"))
    marker = Path(tmp_path, "remote", f"{place}.json")
    marker.unlink()
    next(marker.with_suffix("").glob("*/result.json")).write_text("{")
    monkeypatch.setattr(remote.files, "put_file", lambda *paths: pushed.append(Path(paths[0]).name) or put(*paths))
    sync.push(store, remote)
    assert pushed == ["result.json"] and whole_there(tmp_path / "remote")
    marker.unlink()
    shutil.rmtree(marker.with_suffix(""))

    def lose(source: str, path: str) -> None:
        if lost == "freed":
            shutil.rmtree(store.root / place)
        put(source, path)

    monkeypatch.setattr(remote.files, "put_file", lose)
    if lost == "damaged":
        (store.root / place / "result.json").write_text("{}")
    sync.push(store, remote)
    assert not marker.exists()


def test_a_running_study_is_pushed_again_and_again(
    tmp_path: Path, machine: Machine, one: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "EVERY", 0.05)
    seen: list[str] = []

    def harm(step: object, scratch: Path) -> None:
        for name in seen:
            until(lambda: list(tmp_path.glob(f"remote/{name}.json")))  # noqa: B023 - called at once
        seen[:] = [Worker.did[-1]]

    Worker.harm = harm
    assert start(url_of(tmp_path), one) == 0 and seen


def test_without_a_network_nothing_starts_and_nothing_is_lost(
    tmp_path: Path, machine: Machine, one: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    url = url_of(tmp_path, REFUSING)
    Refusing.refuses = frozenset({"reading"})
    with pytest.raises(UserError, match="no network today"):
        start(url, one)
    assert Worker.did == []
    Refusing.refuses = frozenset({"writing"})
    assert start(url, one) == 1 and len(Worker.did) == len(build(*one).steps)
    assert "no network today" in (said := capsys.readouterr().err) and "Traceback" not in said
    assert recorded(store_folder(url)) and not list(Path(tmp_path, "remote").rglob("*.json"))
    Refusing.refuses = frozenset()
    Worker.did.clear()
    assert start(url, one) == 0 and Worker.did == []
    machine("second")
    assert start(url, one) == 0 and Worker.did == []


@pytest.mark.parametrize("network", [True, False])
def test_runs_on_two_machines_count(tmp_path: Path, machine: Machine, one: Asked, other: Asked, network: bool) -> None:
    """The second begins and ends while the first is at work, which may have no network at its end."""
    url = url_of(tmp_path, REFUSING)

    def harm(*_: object) -> None:
        Worker.harm = None
        machine("second")
        assert start(url, other) == 0
        machine("first")
        Refusing.refuses = frozenset() if network else frozenset({"writing"})

    Worker.harm = harm
    assert start(url, one) == (0 if network else 1)
    wanted: set[str] = set()
    for of in (one, other):
        assert start(tmp_path / "alone", of) == 0
        wanted |= recorded(tmp_path / "alone")
    Refusing.refuses = frozenset()
    for name in ("first", "second"):
        machine(name)
        sync.exchange(Store(url).create(), Remote(url), STUDY)
        assert recorded(store_folder(url)) == wanted
        assert all((store_folder(url) / place).is_dir() for place in wanted)
    assert start(url, one) == 0 and recorded(store_folder(url)) < wanted, "the last run's cells"


def test_a_study_is_analysed_where_it_was_exchanged(tmp_path: Path, pushed: str, machine: Machine, one: Asked) -> None:
    machine("second")
    with pytest.raises(UserError, match="run the study"):
        parse([f"store={pushed}"])
    assert ask(pushed, "status", STUDY) == 2 and not store_folder(pushed).exists()
    sync.exchange(Store(pushed).create(), Remote(pushed), STUDY)
    place = parse([f"store={pushed}"]).store
    assert recorded(place) and all((place / name / "step.json").exists() for name in recorded(place))
    assert ask(pushed, "gc", "apply=true") == 0
    assert all((place / name).is_dir() for name in recorded(place))


def test_urls_that_cannot_work_are_refused_and_slashes_at_their_end_make_no_other_store(
    one: Asked, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one sentence, by every command, before anything is made."""
    lacking = {"class": "nopackage.It", "err": "Install nopackage"}
    monkeypatch.setitem(known_implementations, "lacking", lacking)
    urls = {"s4://bucket/x": "s3://", "lacking://x/y": "nopackage"}
    urls |= {"file:///": "path", "s3://": "path", "://x": "protocol"}
    for store, says in urls.items():
        (sentence,) = preflight(replace(one[0], store=store), one[1])
        assert says in sentence and "\n" not in sentence
    for place in (*urls, tmp_path, __file__, "missing"):  # no store is in the folder
        (sentence,) = preflight(replace(one[0], also=[str(place)]), one[1])
        assert f"also={place}" in sentence
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda _: pytest.fail("it was opened"))
    for store in ("ftp://user:hidden@host/x", "file:///", "://x"):
        assert ask(store, "status", STUDY) == 2
        with pytest.raises(UserError) as refused:
            parse([f"store={store}"])
        assert "hidden" not in str(refused.value) + capsys.readouterr().err and not list(tmp_path.iterdir())
    assert Store("s3://bucket/x//").url == Store("s3://bucket/x").url == "s3://bucket/x"
    assert store_folder("s3://bucket/x//") == store_folder("s3://bucket/x") != store_folder("s3://bucket")


# also=[...]: stores of others, which stay as they are


@pytest.fixture(params=["folders", "links", "packs", "URL"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """In which form steps are finished in another store, or here when they are taken over."""
    monkeypatch.setattr(packing, "MANY", 1 if request.param == "packs" else 500)
    monkeypatch.setattr(sync, "LARGE", 1 if request.param == "links" else sync.LARGE)
    return str(request.param)


@pytest.fixture
def lent(tmp_path: Path, machine: Machine, one: Asked, form: str) -> str:
    """A store, in tmp_path/remote, in which somebody else has finished the study."""
    place = url_of(tmp_path) if form == "URL" else f"{tmp_path}/remote"
    assert start(place, one) == 0
    machine("second")
    return place


def test_what_others_have_finished_is_not_made_again(
    tmp_path: Path, lent: str, one: Asked, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run counts it. Without the other store, its large files are missing, and made anew."""
    before, own, count = state(tmp_path), tmp_path / "own", len(build(*one).steps)
    assert start(own, one, also=[lent], dry_run=True) == 0 and state(tmp_path) == before
    assert f"{count} of them in {own}" in capsys.readouterr().err
    assert start(own, one, also=[lent]) == start(own, one) == 0 and Worker.did == []
    assert ask(own, "verify", STUDY) == ask(own, "gc", "apply=true") == 0 and len(recorded(own)) > 5
    assert before.items() <= state(tmp_path).items() and bool(list(own.glob("packs/*"))) == (form == "packs")
    shutil.rmtree(tmp_path / "remote")
    assert start(own, one) == 0 and len(Worker.did) == (count if form == "links" else 0)


@pytest.mark.parametrize("form", ["folders", "links", "URL"], indirect=True)
def test_what_is_damaged_there_is_made_here(
    tmp_path: Path, lent: str, one: Asked, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what is damaged later, if it is not copied. Nothing is mended or removed there."""
    own, files = tmp_path / "own", [next(tmp_path.glob(f"remote/{kind}/**/result.json")) for kind in ("plan", "scores")]
    rot(files[0])
    files[1].unlink()
    before = state(tmp_path / "remote")
    assert start(own, one, also=[lent]) == 0 and state(tmp_path / "remote") == before
    assert sorted(name.partition("/")[0] for name in Worker.did) == ["plan", "scores"]
    said = capsys.readouterr().err
    assert all(f"{name}: result.json" in said for name in Worker.did)
    rot(next(tmp_path.glob("remote/cost/**/result.json")))
    before = state(tmp_path / "remote")
    assert ask(own, "verify", STUDY) == (form == "links") and start(own, one) == ask(own, "verify", STUDY) == 0
    assert state(tmp_path / "remote") == before


@pytest.mark.parametrize("form", ["packs"], indirect=True)
def test_steps_in_packs_are_taken_together(
    tmp_path: Path, lent: str, one: Asked, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but a damaged one, which is made here."""
    own, received = tmp_path / "own", []
    (pack,) = tmp_path.glob("remote/packs/*")
    with closing(sqlite3.connect(pack)) as database:
        one_of = "rowid = (select min(rowid) from file where name = 'result.json')"
        database.execute(f"update file set content = ? where {one_of}", (zlib.compress(b"{}"),))
        database.commit()
    packs_in.cache_clear()  # as in another process
    receive = Store.receive
    monkeypatch.setattr(Store, "receive", lambda *given: received.append(given[1]) or receive(*given))
    assert start(own, one, also=[lent]) == 0 and ask(own, "verify", STUDY) == 0
    (damaged,) = Worker.did
    assert damaged in capsys.readouterr().err
    assert {name.partition("/")[0] for name in received} == {damaged.partition("/")[0], "weights"}, "which has a folder"


@pytest.mark.parametrize("form", ["packs"], indirect=True)
def test_a_damaged_pack_is_named(tmp_path: Path, lent: str, one: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    for pack in tmp_path.glob("remote/packs/*"):
        pack.write_bytes(b"damaged")
    packs_in.cache_clear()  # another process finds it
    before = state(tmp_path / "remote")
    assert start(tmp_path / "own", one, also=[lent]) == 0 and state(tmp_path / "remote") == before
    assert Worker.did and str(pack) in capsys.readouterr().err
