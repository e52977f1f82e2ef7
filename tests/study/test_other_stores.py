"""also=[...]: what is finished in stores of others is taken over, and these stay as they are."""

import shutil
import sqlite3
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from studies import STUDY, StudyRequest, Worker, start, study_command
from test_store import rot, state

from moe_lab.analysis.__main__ import parse
from moe_lab.errors import UserError, user_errors
from moe_lab.json_files import write_sealed
from moe_lab.packs import packs_in
from moe_lab.paths import store_folder
from moe_lab.result_files import finished_steps, read_record
from moe_lab.study import other_stores, packing
from moe_lab.study.graph import build
from moe_lab.study.preflight import preflight
from moe_lab.study.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fake_worker")]


@pytest.fixture(params=["folders", "links", "packs"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How finished steps are stored in the other store, or in this one after they are taken
    over."""
    monkeypatch.setattr(packing, "MANY", 1 if request.param == "packs" else 500)
    monkeypatch.setattr(
        other_stores, "LARGE", 1 if request.param == "links" else other_stores.LARGE
    )
    return str(request.param)


@pytest.fixture
def other_store(tmp_path: Path, aimer_study: StudyRequest, form: str) -> str:
    """A store in which somebody else has finished the study."""
    path = tmp_path / "other"
    assert start(path, aimer_study) == 0
    Worker.executed_folders.clear()
    return str(path)


def recorded(store: Path) -> set[str]:
    """The steps that the record of the study names."""
    return finished_steps(read_record(store, STUDY) or {})


def test_finished_steps_are_not_computed_again(
    tmp_path: Path, other_store: str, aimer_study: StudyRequest, form: str
) -> None:
    state_before = state(tmp_path)
    store = tmp_path / "store"
    assert start(store, aimer_study, also=[other_store]) == start(store, aimer_study) == 0
    assert Worker.executed_folders == []
    assert study_command(store, "verify", STUDY) == study_command(store, "gc", "apply=true") == 0
    assert len(recorded(store)) > 5
    assert state_before.items() <= state(tmp_path).items()
    assert bool(list(store.glob("packs/*"))) == (form == "packs")


def test_a_dry_run_counts_steps_of_the_other_store(
    tmp_path: Path, other_store: str, aimer_study: StudyRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    state_before = state(tmp_path)
    store = tmp_path / "store"
    assert start(store, aimer_study, also=[other_store], dry_run=True) == 0
    assert state(tmp_path) == state_before
    assert f"{len(build(*aimer_study).steps)} of them in {store}" in capsys.readouterr().err


def test_only_links_need_the_other_store_later(
    tmp_path: Path, other_store: str, aimer_study: StudyRequest, form: str
) -> None:
    store = tmp_path / "store"
    assert start(store, aimer_study, also=[other_store]) == 0
    shutil.rmtree(other_store)
    assert start(store, aimer_study) == 0
    assert len(Worker.executed_folders) == (
        len(build(*aimer_study).steps) if form == "links" else 0
    )


@pytest.mark.parametrize("form", ["folders", "links"], indirect=True)
def test_damaged_steps_are_computed_here(
    tmp_path: Path, other_store: str, aimer_study: StudyRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is mended or removed in the other store."""
    rot(next(tmp_path.glob("other/plan/**/result.json")))
    next(tmp_path.glob("other/scores/**/result.json")).unlink()
    state_before = state(tmp_path / "other")
    assert start(tmp_path / "store", aimer_study, also=[other_store]) == 0
    assert state(tmp_path / "other") == state_before
    assert sorted(name.partition("/")[0] for name in Worker.executed_folders) == ["plan", "scores"]
    errors = capsys.readouterr().err
    assert all(f"{name}: result.json" in errors for name in Worker.executed_folders)


@pytest.mark.parametrize("form", ["folders", "links"], indirect=True)
def test_damage_in_the_other_store_affects_links_only(
    tmp_path: Path, other_store: str, aimer_study: StudyRequest, form: str
) -> None:
    store = tmp_path / "store"
    assert start(store, aimer_study, also=[other_store]) == 0
    rot(next(tmp_path.glob("other/cost/**/result.json")))
    state_before = state(tmp_path / "other")
    assert study_command(store, "verify", STUDY) == (form == "links")
    assert start(store, aimer_study) == study_command(store, "verify", STUDY) == 0
    assert state(tmp_path / "other") == state_before


@pytest.mark.parametrize("form", ["folders"], indirect=True)
def test_no_file_is_written_outside_the_step(
    tmp_path: Path, other_store: str, aimer_study: StudyRequest
) -> None:
    marker = next(Path(other_store).glob("plan/*/step.json"))
    document = Store(other_store).document(f"plan/{marker.parent.name}")
    shutil.copy(marker.with_name("result.json"), Path(other_store, "outside"))
    document["files"]["../../outside"] = document["files"]["result.json"]
    write_sealed(marker, document)
    assert start(tmp_path / "store", aimer_study, also=[other_store]) == 0
    assert len(Worker.executed_folders) == 1
    assert not list(Path(tmp_path, "store").rglob("outside"))


@pytest.mark.parametrize("form", ["packs"], indirect=True)
def test_a_step_that_is_damaged_in_a_pack_is_computed_here(
    tmp_path: Path, other_store: str, aimer_study: StudyRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    (pack,) = Path(other_store).glob("packs/*")
    with closing(sqlite3.connect(pack)) as database:
        first = "rowid = (select min(rowid) from file where name = 'result.json')"
        database.execute(f"update file set content = ? where {first}", (zlib.compress(b"{}"),))
        database.commit()
    packs_in.cache_clear()  # as in another process
    assert start(store, aimer_study, also=[other_store]) == 0
    assert study_command(store, "verify", STUDY) == 0
    (damaged,) = Worker.executed_folders
    assert damaged in capsys.readouterr().err


@pytest.mark.parametrize("form", ["packs"], indirect=True)
def test_a_damaged_pack_of_the_other_store_is_reported(
    tmp_path: Path, other_store: str, aimer_study: StudyRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    for pack in Path(other_store).glob("packs/*"):
        pack.write_bytes(b"damaged")
    packs_in.cache_clear()  # another process finds it
    state_before = state(tmp_path / "other")
    assert start(tmp_path / "store", aimer_study, also=[other_store]) == 0
    assert state(tmp_path / "other") == state_before
    assert Worker.executed_folders
    assert str(pack) in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", ["", __file__, "missing", "s3://bucket/x"], ids=["folder", "file", "missing", "url"]
)
def test_also_without_a_store_is_refused(
    path: str, aimer_study: StudyRequest, tmp_path: Path
) -> None:
    (sentence,) = preflight(replace(aimer_study[0], also=[path or str(tmp_path)]), aimer_study[1])
    assert f"also={path or tmp_path}" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("url", ["s3://bucket/x", "file:///x", "ftp://user:hidden@host/x"])
def test_every_command_refuses_a_url(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (sentence,) = user_errors(store_folder, url)
    assert sentence.startswith("store")
    assert study_command(url, "status", STUDY) == 2
    with pytest.raises(UserError) as refused:
        parse([f"store={url}"])
    assert "hidden" not in str(refused.value) + capsys.readouterr().err
    assert not list(tmp_path.iterdir())
