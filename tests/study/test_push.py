"""An exported model is uploaded to a stand-in for the hub; card and results are read back by the hub's own classes."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import httpx
import huggingface_hub
import pytest
from example_steps import Example, cell_of
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError

from moe_lab import __main__ as command_line
from moe_lab.config import CalibrationConfig, ExportConfig, ModelConfig, ProtocolConfig, RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.grid import Cell
from moe_lab.json_files import write_sealed
from moe_lab.paths import resolve
from moe_lab.results import DIGITS
from moe_lab.study.push import hub_card, reads_export
from moe_lab.study.step import code_state

TOKEN = "hf_PLANTEDtokenPLANTEDtoken"
SMALL = ["suite.benchmarks=[pocket_boolq]", "suite.limit=8", "calibration.tokens=2048", "report=false"]
EXPORT = ["criterion=reap", "ratio=0.25", "export=natural"]
pytestmark = pytest.mark.slow


class Hub:
    """What three methods of HfApi do for the files of repositories."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.commits: list[set[str]] = []
        """The files of each commit: those that were not there, or differed."""
        self.fails: Exception | None = None

    def create_repo(self, repo_id: str, *, exist_ok: bool, **_: Any) -> str:
        assert exist_ok
        self.repositories.setdefault(repo_id, {})
        return f"https://huggingface.co/{repo_id}"

    def model_info(self, repo_id: str, *, files_metadata: bool, **_: Any) -> Any:
        assert files_metadata, "without it, the hub gives names alone"
        siblings = []
        for name, content in self.repositories[repo_id].items():
            lfs = SimpleNamespace(sha256=sha256(content).hexdigest()) if name.endswith(".safetensors") else None
            siblings.append(SimpleNamespace(rfilename=name, lfs=lfs))
        return SimpleNamespace(siblings=siblings, sha=self.head(repo_id))

    def head(self, repo_id: str) -> str:
        return sha256(repr(self.repositories[repo_id]).encode()).hexdigest()[:40]

    def create_commit(
        self, repo_id: str, operations: Any, *, commit_message: str, parent_commit: str, **_: Any
    ) -> None:
        assert commit_message and parent_commit == self.head(repo_id)
        if self.fails:
            raise self.fails
        files = {}
        for operation in operations:
            with operation.as_file() as file:
                files[operation.path_in_repo] = file.read()
        repository = self.repositories[repo_id]
        self.commits.append({name for name, content in files.items() if repository.get(name) != content})
        repository.update(files)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub, api = Hub(), create_autospec(HfApi, instance=True)  # which refuses arguments that the real one would refuse
    for method in (hub.create_repo, hub.model_info, hub.create_commit):
        getattr(api, method.__name__).side_effect = method
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


def start(store: Path, *words: str) -> int:
    """Run a study in this process; its exit code."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["moe_lab", *SMALL, "launcher=inline", f"store={store}", *words])
        command_line.main()
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with an exported model."""
    store = tmp_path_factory.mktemp("push") / "store"
    assert start(store, *EXPORT) == 0
    return store


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(store: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a study in this process; gives its exit code and what it printed."""

    def run(*words: str) -> tuple[int, str]:
        code = start(store, *words)
        return code, " ".join("".join(capsys.readouterr()).split())

    return run


def only(store: Path, pattern: str) -> Path:
    (path,) = store.glob(pattern)
    return path


def test_one_commit_has_the_export_and_a_card_that_reads_back(store: Path, run: Run, hub: Hub) -> None:
    assert run(*EXPORT, "push=me/small", "dry_run=true")[0] == 0 and not hub.repositories
    code, printed = run(*EXPORT, "push=me/small")
    assert code == 0 and "https://huggingface.co/me/small" in printed
    files, checkpoint = hub.repositories["me/small"], only(store, "export/*reap*/checkpoint")
    assert hub.commits == [set(files)]
    for file in checkpoint.iterdir():
        assert file.name == "README.md" or files[file.name] == file.read_bytes()

    card = ModelCard(files["README.md"].decode())
    fields = card.data.to_dict()
    assert (fields["license"], fields["library_name"]) == ("apache-2.0", "transformers") and "pruning" in fields["tags"]
    assert "base_model" not in fields and "base_model_relation" not in fields, "a shipped model is not on the hub"
    (result,) = json.loads(only(store, "evaluate/*reap-0.25-pocket_boolq*/result.json").read_text())["results"]
    (whole,) = json.loads(only(store, "evaluate/pocket_olmoe-pocket_boolq*/result.json").read_text())["results"]
    row = (
        f"| {result['score']:.4f} ± {result['stderr']:.4f} | {whole['score']:.4f} ± {whole['stderr']:.4f} | 8 of 112 |"
    )
    own, _, original = card.text.partition("# Card of the original model")
    assert row in own and 'from_pretrained("me/small")' in own and "# Pocket OLMoE" in original


OF_ONE_FILE = RuntimeError("Error while uploading 'model.safetensors' to the Hub.")
REQUEST = httpx.Request("POST", "https://huggingface.co/api/repos/create", headers={"authorization": TOKEN})
OF_ONE_FILE.__cause__ = HfHubHTTPError("403 Client Error", response=httpx.Response(403, request=REQUEST))
FAILURES = {
    "403 Client Error": OF_ONE_FILE,
    "no answer from https://a.example/x at all": OSError("no answer from https://a.example/x?signature=PLANTED at all"),
    "Invalid metadata: ***": ValueError(f"Invalid metadata: {TOKEN}"),
    "no route to host": httpx.ConnectError("no route to host"),
}
"""What is said -> what was raised."""


def test_an_upload_that_fails_is_a_sentence_and_the_same_command_does_it(store: Path, run: Run, hub: Hub) -> None:
    for reason, hub.fails in FAILURES.items():
        code, printed = run(*EXPORT, "push=me/small")
        assert code == 1 and f"push=me/small: the upload failed: {reason};" in printed and "Traceback" not in printed
        assert "PLANTED" not in printed and not hub.repositories["me/small"]
    hub.fails = None
    assert run(*EXPORT, "push=me/small")[0] == 0 and "config.json" in hub.repositories["me/small"]
    assert not [file for file in store.rglob("*") if file.is_file() and TOKEN.encode() in file.read_bytes()]


def test_without_network_or_token_nothing_is_sent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code, printed = run(*EXPORT, "push=me/unreachable")
    assert code == 1 and "HF_HUB_OFFLINE" in printed
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    code, printed = run(*EXPORT, "push=me/unreachable")
    assert code == 1 and "HF_TOKEN" in printed


def test_nothing_is_uploaded_when_a_benchmark_has_failed(store: Path, run: Run, hub: Hub, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "copy"))
    evaluation = only(copy, "evaluate/*reap-0.25-pocket_boolq*")
    step = json.loads((evaluation / "step.json").read_text())["id"]
    shutil.rmtree(evaluation)
    (copy / "failed").mkdir(exist_ok=True)
    error = {"message": "no answers", "code": code_state(), "user": True}
    write_sealed(copy / f"failed/{step[:DIGITS]}.json", error)
    code, printed = run(*EXPORT, "push=me/failed", f"store={copy}")
    assert code == 2 and "push=me/failed" in printed and "is not finished" in printed and not hub.repositories


def test_another_model_in_the_repository_is_left_alone(run: Run, hub: Hub) -> None:
    theirs = {"config.json": b"{}", "model.safetensors": b"others", "README.md": b"theirs"}
    hub.repositories["me/taken"] = dict(theirs)
    code, printed = run(*EXPORT, "push=me/taken")
    assert code == 1 and "another model" in printed and hub.repositories["me/taken"] == theirs
    hub.repositories["me/empty"] = {".gitattributes": b"", "README.md": b"soon"}
    assert run(*EXPORT, "push=me/empty")[0] == 0


def test_what_cannot_be_uploaded_is_refused_before_anything_runs(run: Run, hub: Hub, store: Path) -> None:
    runs = set(store.glob("runs/*/*"))
    wrong = {"push=small": "push=small", "push=me/a..b": "push=me/a..b", "export=none": "export=natural"}
    for words, field in {**wrong, "ratio=0.25,0.5": "reap-0.5"}.items():
        code, printed = run(*EXPORT, "push=me/small", words)
        assert code == 2 and field in printed, printed
    assert set(store.glob("runs/*/*")) == runs and not hub.repositories


# The card of a model that is on the hub, evaluated on benchmarks that are there.

ORIGINAL = """---
license: other
license_name: their-licence
license_link: LICENSE
language: en
tags: conversational
extra_gated_prompt: Agree.
---

# Theirs, pruned

# Card of the original model

Ours is best.
"""


PLAIN, ROUNDED = ExportConfig("natural"), ExportConfig("natural", "fp8")


def cell(path: str) -> Cell:
    text = CalibrationConfig("c4", "allenai/c4")
    return cell_of(ModelConfig(name="m", path=path), text, protocol=ProtocolConfig(name="unified"))


ROW = "| gsm8k | acc | 0 | 0.8125 ± 0.0100 | not evaluated | 1,319 | evalscope 1.3.0 |"


def test_the_card_keeps_the_licence_and_adds_the_base_model_and_results() -> None:
    card = ModelCard(hub_card(ORIGINAL, "me/small", cell("them/chat"), PLAIN, [ROW]))
    fields = card.data.to_dict()
    kept = ("license", "license_name", "license_link", "extra_gated_prompt", "language")
    assert [fields[name] for name in kept] == ["other", "their-licence", "LICENSE", "Agree.", "en"]
    assert fields["base_model"] == "them/chat" and "base_model_relation" not in fields
    assert fields["tags"][0] == "conversational"
    assert ROW in card.text
    assert card.text.index("## Results") < card.text.index("Ours is best.")


@pytest.mark.parametrize(
    ("recovery", "export", "relation"),
    [
        (RecoveryConfig(), PLAIN, None),
        (RecoveryConfig(), ROUNDED, "quantized"),
        (RecoveryConfig(name="nf4", bits=4), PLAIN, "quantized"),
        (RecoveryConfig(name="dora_nf4", bits=4, instructions="text"), PLAIN, "finetune"),
        (RecoveryConfig(name="merge_fit", fit="text"), PLAIN, None),
    ],
)
def test_relations_are_words_of_the_hub(recovery: RecoveryConfig, export: ExportConfig, relation: str | None) -> None:
    recovered = replace(cell("them/chat"), recovery=recovery)
    card = ModelCard(hub_card(ORIGINAL, "me/small", recovered, export, []))
    assert card.data.to_dict().get("base_model_relation") == relation
    assert (f"recovery `{recovery.name}`" in card.text) == (recovery.name != "none")


def test_a_benchmark_that_a_server_of_the_export_answered_is_of_the_export() -> None:
    export, other = Example("export"), Example("export", number=1)
    generated = Example("generate", needed={"checkpoint": Example("export")})
    assert reads_export(Example("grade", needed={"generate": generated}), export)
    assert reads_export(Example("evaluate", needed={"checkpoint": export}), export)
    assert not reads_export(Example("evaluate", needed={"checkpoint": other}), export)
    assert not reads_export(Example("evaluate"), export)


def test_the_base_model_is_named_where_it_is_on_the_hub(tmp_path: Path) -> None:
    for path in (str(tmp_path), "pocket:olmoe", resolve("pocket:olmoe")):
        card = hub_card(ORIGINAL, "me/small", cell(path), PLAIN, [ROW])
        assert ModelCard(card).data.base_model is None and (path == "pocket:olmoe" or path not in card)
    without_front_matter = hub_card("# Theirs\n", "me/small", cell("a/b"), PLAIN, [])
    assert ModelCard(without_front_matter).data.base_model == "a/b"
    for front in ("a: [", "- a"):
        with pytest.raises(UserError, match="front matter"):
            hub_card(f"---\n{front}\n---\n# Theirs\n", "me/small", cell("a/b"), PLAIN, [])
