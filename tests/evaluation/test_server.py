"""Servers that serve, that serve something else, that die, and that will not die."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asking import write
from endpoint import Endpoint, Reply, completion, endpoint
from example_steps import evaluated
from processes import is_running, quoted, until

from moe_lab.config import BackendConfig, BenchmarkConfig, LauncherConfig, ModelConfig
from moe_lab.config.base import SettingsError, valid
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation import engines
from moe_lab.evaluation.answers import render
from moe_lab.evaluation.engines import server as servers
from moe_lab.evaluation.engines import vllm
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.engines.server import ServedModel, serving
from moe_lab.paths import resolve
from moe_lab.pruning.plan import Plan
from moe_lab.study import preflight

pytestmark = pytest.mark.slow

ENDPOINT = Path(__file__).with_name("endpoint.py")
FAKE = quoted(ENDPOINT)
POCKET = ModelConfig(name="pocket", path="pocket:olmoe")


@pytest.fixture
def checkpoint(subject: LoadedModel) -> Path:
    return Path(resolve("pocket:olmoe"))


def backend(command: str, seconds: float = 300) -> BackendConfig:
    return BackendConfig("server", command, seconds)


def clock(monkeypatch: pytest.MonkeyPatch, now: Callable[[], float]) -> None:
    """What the time is while a server is waited for, in seconds."""
    monkeypatch.setattr(servers, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))


def script(tmp_path: Path, text: str) -> str:
    """A command line that runs `text`; argv holds the port and the checkpoint."""
    file = tmp_path / "server.py"
    file.write_text(f"import os, signal, subprocess, sys, time\n{text}\n")
    return f"{quoted(file)} {{port}} {{checkpoint}}"


# The process.


@pytest.mark.parametrize("named", [True, False])
def test_a_server_serves_the_checkpoint_and_is_gone_after_an_exception(checkpoint: Path, named: bool) -> None:
    """Some servers go by the checkpoint's path."""
    command = FAKE + (" {port} {name} {checkpoint}" if named else " {port} {checkpoint}")
    with pytest.raises(ZeroDivisionError), serving(checkpoint, backend(command), POCKET, "a step") as served:
        assert served.name.startswith("a step-") if named else served.name.endswith("/checkpoint")
        assert write(served, ["abc", "abcdef", ""], 4, batch_size=2) == [" 3", " 6", " 0"]
        assert served.max_length == 512
        raise ZeroDivisionError
    assert servers._listed(served) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sys.exit('no GPU here')", "ended before it was ready: no GPU here; exit code 1"),
        ("os.kill(os.getpid(), 9)", "ended before it was ready: ended by SIGKILL"),
        (
            "print('ValueError: 1.4 GiB needed\\n at x\\nRuntimeError: See root cause above\\nwarn()'); sys.exit(1)",
            "ended before it was ready: ValueError: 1.4 GiB needed; exit code 1",
        ),
        (
            "print('(EngineCore pid=7) x.Error: stopped\\n  leaked')",
            "ended before it was ready: x.Error: stopped; exit code 0",
        ),
    ],
)
def test_a_server_that_dies_while_starting_is_quoted(
    text: str, sentence: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(Unavailable) as caught, serving(checkpoint, backend(script(tmp_path, text)), POCKET, "n"):
        pass
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_server_that_cannot_be_started_is_named(checkpoint: Path) -> None:
    with (
        pytest.raises(UserError, match="no-such-server cannot be started: there is no such program"),
        serving(checkpoint, backend("no-such-server {port} {checkpoint}"), POCKET, "n"),
    ):
        pass


def test_a_server_that_is_never_ready_or_listens_elsewhere_is_stopped(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    elsewhere = f"['python', {str(ENDPOINT)!r}, '0', 'm']"
    text = f"print('loading', os.getpid(), flush=True)\nopen({str(started)!r}, 'w')\n"
    text += f"os.execv(sys.executable, {elsewhere})"
    command = script(tmp_path, text)
    clock(monkeypatch, lambda: 2.0 if started.exists() else 0.0)
    with (
        pytest.raises(
            Unavailable, match=r"did not answer at http://127.0.0.1:\d+/v1 within .*=1; .* loading \d+"
        ) as caught,
        serving(checkpoint, backend(command, seconds=1), POCKET, "n"),
    ):
        pass
    until(lambda: not is_running(int(str(caught.value).rsplit(" ", 1)[1])))


def test_a_stale_server_in_the_place_of_one_that_died_is_noticed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with endpoint(lambda body: completion("x", "stale"), ("stale",)) as at:
        monkeypatch.setattr(servers, "_free_port", lambda: int(at.url.split(":")[2].removesuffix("/v1")))
        with (
            pytest.raises(Unavailable, match="serves stale"),
            serving(checkpoint, backend(script(tmp_path, "sys.exit('address in use')")), POCKET, "n"),
        ):
            pass


def test_a_server_that_lists_the_model_and_never_writes_is_stopped(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_ANSWER", 1.0)
    clock(monkeypatch, lambda: 0.0)  # it is ready in time, however long it takes
    text = f"sys.path.insert(0, {str(ENDPOINT.parent)!r})\nfrom endpoint import _server\n"
    text += "_server(lambda _: signal.pause(), [sys.argv[3]], int(sys.argv[1]))[0].serve_forever()"
    with (
        pytest.raises(Unavailable, match=r"does not serve the checkpoint \(the server of n-\w+ does not answer"),
        serving(checkpoint, backend(script(tmp_path, text) + " {name}", seconds=1), POCKET, "n"),
    ):
        pass


def test_what_dies_while_generating_is_tried_again_by_the_next_run(checkpoint: Path, tmp_path: Path) -> None:
    command = FAKE + " {port} {name} {checkpoint}"
    with serving(checkpoint, backend(command), POCKET, "n") as served:
        watcher = served.last_words.args[0].process.pid  # type: ignore[attr-defined]
        (process,) = Path(f"/proc/{watcher}/task/{watcher}/children").read_text().split()
        os.kill(int(process), signal.SIGKILL)
        with pytest.raises(Unavailable, match=r"the server of n-\w+ ended: .*SIGKILL"):
            write(served, ["abc"], 4)


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, 1); signal.pause()"])
print(os.getpid(), child.pid, flush=True)
signal.pause()
"""


def stubborn(tmp_path: Path) -> list[str]:
    return shlex.split(script(tmp_path, STUBBORN).format(port=1, checkpoint="x"))


@pytest.mark.parametrize("watcher", ["alive", "killed"])
def test_a_server_that_will_not_stop_is_killed_with_its_children(
    watcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "GRACE", 0.3)
    with servers.running(stubborn(tmp_path)) as process:
        until(lambda: len(process.log().split()) == 2)
        processes = [int(word) for word in process.log().split()]
        if watcher == "killed":
            process.process.kill()
            process.process.wait()
        assert all(map(is_running, processes))
    until(lambda: not any(map(is_running, processes)))


def test_a_server_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "import signal, time; from moe_lab.evaluation.engines import server; server.GRACE = 0.3\n"
        f"with server.running({stubborn(tmp_path)!r}) as process:\n"
        "    while len(process.log().split()) < 2: time.sleep(0.02)\n"
        "    print(process.log().split(), flush=True); signal.pause()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    processes = list(map(int, re.findall(r"\d+", parent.stdout.readline())))
    assert len(processes) == 2 and all(map(is_running, processes))
    parent.kill()
    parent.wait()
    until(lambda: not any(map(is_running, processes)))


# What is served, and how it is asked.


def test_what_is_served_prefers_nothing(checkpoint: Path, subject: LoadedModel, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for file in checkpoint.iterdir():
        (own / file.name).symlink_to(file)
    for name, content in {
        "generation_config.json": {"repetition_penalty": 1.3, "temperature": 0.6, "eos_token_id": [5, 3]},
        "tokenizer_config.json": {
            **json.loads((checkpoint / "tokenizer_config.json").read_text()),
            "clean_up_tokenization_spaces": True,
        },
    }.items():
        (own / name).unlink()
        (own / name).write_text(json.dumps(content))
    servers.make_view(own, tmp_path / "view", subject.tokenizer)
    assert {file.name for file in (tmp_path / "view").iterdir()} == {file.name for file in own.iterdir()}
    assert (tmp_path / "view/model.safetensors").resolve() == (checkpoint / "model.safetensors").resolve()
    greedy = json.loads((tmp_path / "view/generation_config.json").read_text())
    assert greedy == {"do_sample": False, "eos_token_id": [0, 3, 5], "pad_token_id": 1}
    assert json.loads((tmp_path / "view/tokenizer_config.json").read_text())["clean_up_tokenization_spaces"] is False
    (own / "generation_config.json").unlink()
    servers.make_view(own, tmp_path / "second", subject.tokenizer)
    assert json.loads((tmp_path / "second/generation_config.json").read_text())["eos_token_id"] == subject.end_tokens


@pytest.fixture
def fake(subject: LoadedModel) -> Iterator[Any]:
    """Makes a served subject whose texts are told, and the endpoint that notes what it is asked."""
    with ExitStack() as opened:

        def make(answer: Callable[[dict[str, Any]], Reply], **changes: Any) -> tuple[ServedModel, Endpoint]:
            at = opened.enter_context(endpoint(answer))
            return replace(ServedModel(at.url, "m", subject.tokenizer, 512, {}), **changes), at

        yield make


def test_requests_are_greedy_on_the_wire(fake: Any) -> None:
    """At most four stop texts are sent; a text is cut at the others here."""
    served, at = fake(lambda body: completion(" yes. No. Maybe", "m@main"))
    assert write(served, ["Is it"], 17, stop=("1", "2", "3", "4", "No", "Maybe")) == [" yes. "]
    (body,) = at.asked
    assert body == {
        "model": "m",
        "prompt": "Is it",
        "max_tokens": 17,
        "stop": ["1", "2", "3", "4"],
        "temperature": 0,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
    }


def test_a_stop_text_that_begins_in_the_prompt_ends_nothing(fake: Any) -> None:
    """As `transformers serve` does: it looks for stop texts at the end of prompt and text together."""

    def answer(body: dict[str, Any]) -> Reply:
        whole, prompt = "\ntwo words END more", body["prompt"]
        for length in range(1, len(whole) + 1):
            if any((prompt + whole[:length]).endswith(stop) for stop in body["stop"] or ()):
                return completion(whole[:length], "m")
        return completion(whole, "m", "length")

    served, at = fake(answer)
    stops = ("\n\n", "END")
    assert write(served, ["a\n", "a"], 9, stop=stops) == ["\ntwo words ", "\ntwo words "]
    assert {body["prompt"]: body["stop"] for body in at.asked} == {"a": ["\n\n", "END"], "a\n": ["END"]}


@pytest.mark.parametrize(
    "choice",
    [{"text": None}, {"text": ["a"]}, *({"finish_reason": reason} for reason in ("abort", "content_filter", None))],
)
def test_a_completion_that_is_no_whole_text_is_an_error(choice: dict[str, Any], fake: Any) -> None:
    reply = completion(" ken", "m")
    reply.body["choices"][0].update(choice)
    served, _ = fake(lambda body: reply)
    with pytest.raises(Unavailable, match=f"finish_reason={re.escape(str(choice.get('finish_reason', 'stop')))}"):
        write(served, ["a"], 4)


def test_a_text_that_is_empty_or_reaches_the_limit_is_whole(fake: Any) -> None:
    served, at = fake(lambda body: completion("", "m", "stop" if body["prompt"] == "a" else "length"))
    assert write(served, ["a", "b"], 4) == ["", ""] and len(at.asked) == 2


def test_texts_are_asked_for_at_the_same_time_the_longest_prompt_first(fake: Any) -> None:
    second = threading.Event()

    def answer(body: dict[str, Any]) -> Reply:
        """The text of the longest prompt is done when another one has been asked for."""
        second.wait(60) if "slow" in body["prompt"] else second.set()
        return completion(body["prompt"], "m")

    served, at = fake(answer)
    prompts = ["b", "slow slow slow", "a a"]
    assert write(served, prompts, 4, batch_size=2) == prompts
    assert {body["prompt"] for body in at.asked[:2]} == {"slow slow slow", "a a"}
    assert write(served, [], 4) == []


def test_a_failure_is_said_while_other_texts_are_still_written(fake: Any) -> None:
    told = threading.Event()
    replies: Any = lambda body: Reply("oops", 500) if body["prompt"] == "b" else told.wait(60) and completion("", "m")  # noqa: E731
    served, _ = fake(replies)
    try:
        with pytest.raises(Unavailable, match="HTTP 500: oops"):
            write(served, ["b", "a a"], 4)
    finally:
        told.set()


def test_a_server_that_hangs_is_given_up_and_a_slow_one_is_not(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "TOKEN_SECONDS", 0.1)
    waits: list[float] = []
    monkeypatch.setattr(servers, "wait", lambda *given: waits.append(given[1]) or wait(*given))
    slow, _ = fake(lambda body: completion("x", "m"), patience=200)
    assert write(slow, list("abcdef"), 4, batch_size=1) == ["x"] * 6
    assert len(waits) > 1 and set(waits) == {200.4}, "so long may pass between two, whatever all take"
    told = threading.Event()
    silent, _ = fake(lambda body: told.wait() and completion("x", "m"), patience=0.2)
    try:
        with pytest.raises(Unavailable, match=r"0\.6 s, .*ready_seconds=0\.2"):
            write(silent, list("abcdef"), 4, batch_size=2)
    finally:
        told.set()


def test_special_tokens_are_added_once(fake: Any) -> None:
    """A tokenizer that begins every prompt with a token, and a chat template that writes it out."""

    class Marked:
        bos_token, bos_token_id, chat_template = "<s>", 1, None

        def __call__(self, texts: Any, add_special_tokens: bool = True, **_: Any) -> Any:
            each = [texts] if isinstance(texts, str) else texts
            ids = [[1] * add_special_tokens + self.words(text) for text in each]
            return SimpleNamespace(input_ids=ids[0] if isinstance(texts, str) else ids)

        def words(self, text: str) -> list[int]:
            return [1 if word == "<s>" else sum(map(ord, word)) for word in text.replace("<s>", " <s> ").split()]

        def decode(self, token: int) -> str:
            return "<s>"

    served, at = fake(lambda body: completion("x", "m"), tokenizer=Marked())
    write(served, ["<s> user"], 4, chat=True)
    write(served, ["user", "<s>user"], 4)
    assert [body["prompt"].strip() for body in at.asked] == ["user", "user", "user"]
    with pytest.raises(UserError, match="wants none: expected backend=hf"):
        write(served, ["user"], 4, chat=True)


def test_what_a_server_refuses_and_what_does_not_fit_is_one_sentence(fake: Any) -> None:
    served, _ = fake(lambda body: Reply({"message": "too long"}, 400))
    with pytest.raises(UserError, match=r"the server of m answered HTTP 400: too long$"):
        write(served, ["a"], 4)
    reason = f"at most 4 stop texts, {'and more words ' * 20}as vLLM puts it"
    wordy, _ = fake(lambda body: Reply({"error": {"message": reason, "code": 400}}, 400))
    with pytest.raises(UserError, match=f"HTTP 400: {re.escape(reason)}$"):
        write(wordy, ["a"], 4)
    with pytest.raises(UserError, match="do not fit the model's 512 tokens"):
        write(served, ["a"], 600)
    with pytest.raises(UserError, match="has no chat template"):
        render(served, [{"role": "user", "content": "Hi"}])
    broken, _ = fake(lambda body: Reply("oops", 500))
    with pytest.raises(Unavailable, match="HTTP 500: oops"):
        write(broken, ["a"], 4)
    web, _ = fake(lambda body: Reply("<html>"))
    with pytest.raises(UserError, match="gives no text completions"):
        write(web, ["a"], 4)
    nowhere = replace(served, url="http://127.0.0.1:9/v1")
    with pytest.raises(Unavailable, match=r"does not answer .*refused"):
        write(nowhere, ["a"], 4)


# Wrong settings.


@pytest.mark.parametrize(
    "command", [None, "serve {checkpoint}", "serve {port}", "serve {checkpoints} {port}", "serve '{checkpoint} {port}"]
)
def test_a_wrong_command_is_said_before_anything_is_loaded(command: str | None) -> None:
    (sentence,) = engines.wrong(BackendConfig("server", command), [], [])
    assert f"backend.command={command}" in sentence


def test_arguments_that_are_not_of_the_user_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"backend\.arguments=.*backend=vllm"):
        valid(BackendConfig, {"name": "hf", "arguments": {"max_num_seqs": 8}}, "backend")
    with pytest.raises(SettingsError, match=r"backend\.arguments\.dtype"):
        valid(BackendConfig, {"name": "vllm", "arguments": {"dtype": "float16"}}, "backend")


def test_an_engine_that_says_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late reply would be taken for that to the next request."""
    monkeypatch.setattr(vllm, "GRACE", 0.1)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nread request\necho '{\"done\": {}}'\nexec sleep 1000\n")
    python.chmod(0o755)
    backend = BackendConfig("vllm", ready_seconds=1.0, python=str(python))
    engine = vllm.Process(Path(resolve(POCKET.path)), backend, POCKET)
    with pytest.raises(Unavailable, match="ready_seconds=1 "):
        engine.set_plan(Plan({0: (0,)}, {0: 2}))
    assert engine.process.poll() is not None


def test_a_ported_family_is_refused_by_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek"}')
    ported = ModelConfig(name="ported", path=str(tmp_path))
    (sentence,) = engines.wrong(BackendConfig("vllm"), [], [POCKET, ported])
    assert "model_type=deepseek" in sentence and "backend=hf" in sentence
    assert not list(engines.wrong(BackendConfig("hf"), [], [ported]))


def test_a_program_that_is_not_installed_is_said_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    engines.check_installed(BackendConfig("hf"))
    engines.check_installed(backend("python {checkpoint} {port}"))  # beside the interpreter
    with pytest.raises(UserError, match=r"interpreters\.vllm=/nowhere"):
        engines.check_installed(BackendConfig("vllm", python="/nowhere"))
    with pytest.raises(UserError, match=rf"interpreters\.vllm={re.escape(sys.executable)} has no vllm"):
        engines.check_installed(BackendConfig("vllm", python=sys.executable))
    step = evaluated(
        POCKET,
        BenchmarkConfig(name="b", harness="perplexity", task="pocket:calibration/general.jsonl"),
        backend=backend("no-such-server {checkpoint} {port}"),
    )
    (sentence,) = preflight.lacking([step], LauncherConfig())
    assert "backend.command starts no-such-server" in sentence
    elsewhere = LauncherConfig(python="apptainer exec image.sif python")
    assert preflight.lacking([step], elsewhere) == []


def test_what_is_put_into_a_command_stays_one_word() -> None:
    found = engines.command_line(backend("serve '{checkpoint}' --port={port} {name}"), Path("/a b/$(c)"), 7, "x y;z")
    assert found == ["serve", "/a b/$(c)", "--port=7", "x y;z"]
