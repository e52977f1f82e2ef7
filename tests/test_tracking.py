"""Runs of the tracker, read from the files that it writes offline."""

import json
import os
import re
import subprocess
import sys
from collections import ChainMap, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from studies import Worker, start, study_request

from moe_lab.config import Config, TrackerConfig
from moe_lab.errors import UserError
from moe_lab.result_files import ID_DIGITS, STEPS
from moe_lab.study import tracker
from moe_lab.study.preflight import preflight
from moe_lab.study.store import Store

SETTINGS = TrackerConfig(name="wandb")
KEY = "0123456789abcdef0123456789abcdef01234567"
UNPRUNED = {
    "model": "tiny",
    "criterion": "none",
    "ratio": 0.0,
    "seed": 0,
}
PRUNED = {
    "model": "tiny",
    "criterion": "man",
    "ratio": 0.25,
    "seed": 42,
}
COST, PLAN, FINETUNE, *EVALUATE = (
    f"{kind}/tiny-{kind * 12:.12}" for kind in ("cost", "plan", "finetune", "a", "b")
)
LOSSES = [2.5, 2.0, 1.75]


def cell(axes: dict[str, Any], evaluate: str | None, **steps: str) -> dict[str, Any]:
    """A cell in a record, with one benchmark."""
    folders = {**dict.fromkeys(STEPS), "cost": COST, **steps}
    return {"cell": axes, "protocol": "unified", "evaluate": {"arc": evaluate}, **folders}


UNPRUNED_CELL = cell(UNPRUNED, EVALUATE[0])
TUNED_CELL = cell(PRUNED, EVALUATE[1], plan=PLAN, finetune=FINETUNE)
STUDY: dict[str, Any] = {
    "study": "demo",
    "cells": [UNPRUNED_CELL, TUNED_CELL, cell({**PRUNED, "seed": 1}, None)],
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with the results of the study."""
    store = Store(tmp_path / "store").create()
    documents = {COST: {"parameters": 100, "by_part": {}}, PLAN: {}, FINETUNE: {"loss": LOSSES}}
    for step, score in zip(EVALUATE, (0.75, 0.5), strict=True):
        documents[step] = {"results": [{"benchmark": "arc", "metric": "acc", "score": score}]}
    for step, document in documents.items():
        name = "result" if step in EVALUATE else step.partition("/")[0]
        with store.claim_named(step, {"id": step[-ID_DIGITS:]}) as scratch:
            assert scratch
            (scratch / f"{name}.json").write_text(json.dumps(document))
    return store


def records(run: Path) -> dict[str, list[Any]]:
    """Type -> records of an offline run, as wandb's own reader prints them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    by_type: dict[str, list[Any]] = defaultdict(list)
    for line in result.stdout.splitlines():
        record = json.loads(line)
        by_type[record["type"]].append(record.get(record["type"]))
    return by_type


@pytest.fixture
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
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
        monkeypatch.setenv(name, str(tmp_path / "logs"))
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    forget_environment()
    yield tmp_path
    forget_environment()


def forget_environment() -> None:
    """wandb reads the environment once in a process, and another test may have made it do so."""
    if "wandb" in sys.modules:
        import wandb

        wandb.teardown()


def test_a_run_has_axes_results_and_losses_of_its_cell(
    isolated: Path, store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The study is logged twice offline, and nothing is printed. The unpruned model and the tuned
    one have one run each. Neither keys nor command lines are logged."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for _ in range(2):
        assert str(isolated / "logs/wandb") in tracker.log(SETTINGS, store, STUDY)
    assert "".join(capfd.readouterr()) == ""
    first, second = map(records, isolated.glob("logs/wandb/offline-run-*"))
    unpruned, tuned = (second, first) if first["history"] else (first, second)
    for run, axes, score in ((unpruned, UNPRUNED, 0.75), (tuned, PRUNED, 0.5)):
        (settings,) = run["run"]
        names = ("run_group", "display_name", "resume")
        assert tuple(settings[name] for name in names) == ("demo", "tiny", True)
        assert axes.items() <= settings["config"]["update"].items()
        results = {"scores/arc/acc": score, "cost/parameters": 100}
        summary = ChainMap(*(changes["update"] for changes in run["summary"]))
        assert results.items() <= summary.items()
    assert [item["item"]["recovery/loss"] for item in tuned["history"]] == LOSSES
    files = [file for file in isolated.rglob("*") if file.is_file()]
    assert not [file for file in files if KEY.encode() in file.read_bytes()]
    logs = list(isolated.rglob("*.wandb"))
    assert not any(sys.executable.encode() in file.read_bytes() for file in logs)


def test_variables_of_a_wandb_agent_do_not_name_runs(
    isolated: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that hold for all runs, such as the project, are used."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "of_the_shell")
    for name in ("RUN_ID", "NAME", "RUN_GROUP", "SWEEP_ID"):
        monkeypatch.setenv(f"WANDB_{name}", "abcd1234")
    monkeypatch.setenv("WANDB_RESUME", "must")
    tracker.log(SETTINGS, store, STUDY)
    runs = [records(run)["run"][0] for run in isolated.glob("logs/wandb/offline-run-*")]
    assert len({run["run_id"] for run in runs}) == 2
    assert os.environ["WANDB_RUN_ID"] == "abcd1234"
    assert {(run["project"], run["run_group"], run["display_name"]) for run in runs} == {
        ("of_the_shell", "demo", "tiny")
    }
    assert not any(run.get("sweep_id") for run in runs)


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """wandb.init, which continues a run that has two steps."""
    mock = MagicMock()
    mock.return_value.__enter__.return_value = MagicMock(step=2)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr("wandb.init", mock)
    return mock


def test_a_resumed_run_gets_its_missing_steps(
    isolated: Path, store: Store, init: MagicMock
) -> None:
    tracker.log(SETTINGS, store, {**STUDY, "cells": [TUNED_CELL]})
    run = init.return_value.__enter__.return_value
    run.log.assert_called_once_with({"recovery/loss": LOSSES[2]}, step=2)


def test_a_run_has_the_ranking_and_a_link_to_the_page(
    isolated: Path, store: Store, init: MagicMock
) -> None:
    report = store.root / "reports/demo"
    (report / "figures").mkdir(parents=True)
    chart = {"data": {"values": [{}]}, "mark": {"type": "text", "text": "ranking"}}
    (report / "figures/ranking.json").write_text(json.dumps(chart))
    (report / "report.html").write_text("page")
    tracker.log(SETTINGS, store, {**STUDY, "cells": [UNPRUNED_CELL]})
    run = init.return_value.__enter__.return_value
    run.summary.__setitem__.assert_called_once_with("report", (report / "report.html").as_uri())
    (((values,), _),) = run.log.call_args_list
    assert re.search("<svg.*>ranking<", values["ranking"].html, re.DOTALL)


def test_a_cell_has_a_run_for_each_study(isolated: Path, store: Store, init: MagicMock) -> None:
    for study in ("demo", "other"):
        tracker.log(SETTINGS, store, {"study": study, "cells": [TUNED_CELL]})
    assert len({call.kwargs["id"] for call in init.call_args_list}) == 2


def test_wandb_mode_is_checked_and_obeyed(
    isolated: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(tracker=SETTINGS)
    monkeypatch.setenv("WANDB_MODE", "ofline")
    (sentence,) = preflight(config, [])
    assert sentence.startswith("WANDB_MODE=ofline ")
    assert "mean offline?" in sentence
    assert preflight(Config(), []) == []
    monkeypatch.delenv("WANDB_MODE")
    assert preflight(config, []) == []
    (isolated / "logs/settings").write_text(
        "[default]\nmode = disabled\n"
    )  # as `wandb disabled` does
    tracker.log(SETTINGS, store, STUDY)
    assert not list(isolated.glob("logs/wandb/*run-*"))


def test_a_finished_study_is_logged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("source", ["environment", "netrc", "nowhere"])
def test_a_key_is_found_without_output(
    source: str,
    isolated: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if source == "environment":
        monkeypatch.setenv("WANDB_API_KEY", KEY)
    if source == "netrc":
        (isolated / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    monkeypatch.setattr("wandb.init", init := MagicMock())
    tracker.log(SETTINGS, store, {**STUDY, "cells": [UNPRUNED_CELL]})
    assert init.call_args.kwargs["mode"] == ("offline" if source == "nowhere" else "online")
    assert "".join(capfd.readouterr()) == ""
    assert not [
        file
        for file in (isolated / "logs").rglob("*")
        if file.is_file() and KEY in file.read_text()
    ]


def test_an_error_of_the_tracker_is_one_sentence(
    isolated: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setattr(
        wandb, "init", MagicMock(side_effect=wandb.Error("the server said no\nand more"))
    )
    with pytest.raises(
        UserError, match=r"^tracker=wandb failed \(.*the server said no.*\): .*needs no server$"
    ):
        tracker.log(SETTINGS, store, STUDY)
