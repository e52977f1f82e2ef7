"""What the tracker is told, read back from what it wrote offline."""

import json
import os
import subprocess
import sys
from collections import ChainMap, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pandas
import pytest
from studies import Worker, start, study_request

from moe_lab.config import Config, TrackerConfig
from moe_lab.errors import UserError
from moe_lab.results import DIGITS, STEPS
from moe_lab.study import tracker
from moe_lab.study.preflight import preflight
from moe_lab.study.store import Store

SETTINGS = TrackerConfig(name="wandb", plans=True)
KEY = "0123456789abcdef0123456789abcdef01234567"
UNPRUNED = {"model": "tiny", "criterion": "none", "ratio": 0.0, "seed": 0}
PRUNED = {"model": "tiny", "criterion": "man", "ratio": 0.25, "seed": 42}
COST, PLAN, FINETUNE, *EVALUATE = (
    f"{kind}/tiny-{kind * 12:.12}" for kind in ("cost", "plan", "finetune", "a", "b")
)
LOSSES = [2.5, 2.0, 1.75]


def cell(axes: dict[str, Any], evaluate: str | None, **steps: str) -> dict[str, Any]:
    """A cell in a record, with one benchmark."""
    places = {**dict.fromkeys(STEPS), "cost": COST, **steps}
    return {"cell": axes, "protocol": "unified", "evaluate": {"arc": evaluate}, **places}


WHOLE = cell(UNPRUNED, EVALUATE[0])
TUNED = cell(PRUNED, EVALUATE[1], plan=PLAN, finetune=FINETUNE)
STUDY: dict[str, Any] = {
    "study": "demo",
    "cells": [WHOLE, TUNED, cell({**PRUNED, "seed": 1}, None)],
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with the results of the study."""
    made = Store(tmp_path / "store").create()
    documents = {COST: {"parameters": 100, "by_part": {}}, PLAN: {}, FINETUNE: {"loss": LOSSES}}
    for place, score in zip(EVALUATE, (0.75, 0.5), strict=True):
        documents[place] = {"results": [{"benchmark": "arc", "metric": "acc", "score": score}]}
    samples = pandas.DataFrame({"benchmark": "arc", "answer_loss": [1.0, 2.0, None]})
    for place, document in documents.items():
        name = "result" if place in EVALUATE else place.partition("/")[0]
        with made.receive(place, {"id": place[-DIGITS:]}) as scratch:
            assert scratch
            (scratch / f"{name}.json").write_text(json.dumps(document))
            samples.to_parquet(scratch / "samples.parquet")
    return made


def records(run: Path) -> dict[str, list[Any]]:
    """What wandb's own reader finds in an offline run, by type."""
    read = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)]
    found: dict[str, list[Any]] = defaultdict(list)
    for line in subprocess.run(
        read, capture_output=True, text=True, check=True
    ).stdout.splitlines():
        record = json.loads(line)
        found[record["type"]].append(record.get(record["type"]))
    return found


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home without a key, and a folder for what the tracker writes."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in (
        "WANDB_DIR",
        "WANDB_CACHE_DIR",
        "WANDB_CONFIG_DIR",
        "WANDB_DATA_DIR",
        "WANDB_ARTIFACT_DIR",
    ):
        monkeypatch.setenv(name, str(tmp_path / "told"))
    (tmp_path / "told").mkdir()
    monkeypatch.chdir(tmp_path)
    forget_environment()
    yield tmp_path
    forget_environment()


def forget_environment() -> None:
    """wandb reads the environment once in a process, and another test may have made it do so."""
    if "wandb" in sys.modules:
        import wandb

        wandb.teardown()


def test_each_cell_is_one_run_however_often_it_is_logged_and_no_key_is(
    alone: Path, store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for _ in range(2):
        assert str(alone / "told/wandb") in tracker.log(SETTINGS, store, STUDY)
    assert "".join(capfd.readouterr()) == ""
    first, second = map(records, alone.glob("told/wandb/offline-run-*"))
    unpruned, tuned = (second, first) if first["history"] else (first, second)
    for run, axes, score in ((unpruned, UNPRUNED, 0.75), (tuned, PRUNED, 0.5)):
        (about,), summary = run["run"], ChainMap(*(changes["update"] for changes in run["summary"]))
        assert (about["run_group"], about["display_name"], about["resume"]) == (
            "demo",
            "tiny",
            True,
        )
        assert axes.items() <= about["config"]["update"].items()
        assert {
            "scores/arc/acc": score,
            "answer_loss/arc": 1.5,
            "cost/parameters": 100,
        }.items() <= summary.items()
    assert [item["item"]["recovery/loss"] for item in tuned["history"]] == LOSSES
    assert len(tuned["artifact"]) == 1 and not unpruned["artifact"]
    written = [file for file in alone.rglob("*") if file.is_file()]
    assert not [file for file in written if KEY.encode() in file.read_bytes()]
    assert not any(
        sys.executable.encode() in file.read_bytes() for file in alone.rglob("*.wandb")
    ), "a command line"


def test_runs_in_the_shell_of_an_agent_are_those_of_the_cells(
    alone: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What wandb is told to do with all runs, such as their project, counts."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "of_the_shell")
    for name in ("RUN_ID", "NAME", "RUN_GROUP", "SWEEP_ID"):
        monkeypatch.setenv(f"WANDB_{name}", "abcd1234")
    monkeypatch.setenv("WANDB_RESUME", "must")
    tracker.log(SETTINGS, store, STUDY)
    runs = [records(run)["run"][0] for run in alone.glob("told/wandb/offline-run-*")]
    assert len({run["run_id"] for run in runs}) == 2 and os.environ["WANDB_RUN_ID"] == "abcd1234"
    assert {(run["project"], run["run_group"], run["display_name"]) for run in runs} == {
        ("of_the_shell", "demo", "tiny")
    }
    assert not any(run.get("sweep_id") for run in runs)


def test_a_continued_run_gets_the_steps_that_it_lacks_and_is_of_one_study(
    alone: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr("wandb.init", init := MagicMock())
    init.return_value.__enter__.return_value = run = MagicMock(step=2)
    tracker.log(SETTINGS, store, {**STUDY, "cells": [TUNED]})
    run.log.assert_called_once_with({"recovery/loss": LOSSES[2]}, step=2)
    tracker.log(SETTINGS, store, {"study": "other", "cells": [TUNED]})
    assert len({call.kwargs["id"] for call in init.call_args_list}) == 2


def test_a_mode_is_checked_and_obeyed(
    alone: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(tracker=SETTINGS)
    monkeypatch.setenv("WANDB_MODE", "ofline")
    (sentence,) = preflight(config, [])
    assert sentence.startswith("WANDB_MODE=ofline ") and "mean offline?" in sentence
    assert preflight(Config(), []) == []
    monkeypatch.delenv("WANDB_MODE")
    assert preflight(config, []) == []
    (alone / "told/settings").write_text("[default]\nmode = disabled\n")  # as `wandb disabled` does
    tracker.log(SETTINGS, store, STUDY)
    assert not list(alone.glob("told/wandb/*run-*"))


def test_a_finished_study_is_logged_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_lab.study.run.InProcessExecutor", Worker)
    log = MagicMock(return_value="")
    monkeypatch.setattr(tracker, "log", log)
    for _ in range(2):
        assert (
            start(
                tmp_path / "store", study_request("criterion=aimer", "ratio=0.5", "tracker=wandb")
            )
            == 0
        )
    assert [len(call.args[2]["cells"]) for call in log.call_args_list] == [2, 2]


@pytest.mark.parametrize("place", ["environment", "netrc", "nowhere"])
def test_a_key_is_found_without_a_question_or_a_word(
    place: str,
    alone: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if place == "environment":
        monkeypatch.setenv("WANDB_API_KEY", KEY)
    if place == "netrc":
        (alone / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    monkeypatch.setattr("wandb.init", init := MagicMock())
    tracker.log(SETTINGS, store, {**STUDY, "cells": [WHOLE]})
    assert init.call_args.kwargs["mode"] == ("offline" if place == "nowhere" else "online")
    assert "".join(capfd.readouterr()) == ""
    assert not [
        file for file in (alone / "told").rglob("*") if file.is_file() and KEY in file.read_text()
    ]


def test_a_refusal_of_the_tracker_is_one_sentence(
    alone: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setattr(
        wandb, "init", MagicMock(side_effect=wandb.Error("the server said no\nand more"))
    )
    with pytest.raises(
        UserError, match=r"^tracker=wandb was not told \(the server said no\): .*needs no server$"
    ):
        tracker.log(SETTINGS, store, STUDY)
