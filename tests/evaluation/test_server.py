"""Servers that serve, that serve something else, that die, and that will not die."""

import json
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from endpoint import Endpoint, Reply, completion, endpoint
from example_steps import evaluation_step
from fake_engines import generate
from harness_files import shipped_items
from processes import is_running, python_command, wait_until
from tokenizers.processors import TemplateProcessing

from moe_lab import child_process
from moe_lab.config import BackendConfig, BenchmarkConfig, JudgeConfig, LauncherConfig, ModelConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation import engines
from moe_lab.evaluation.answers import render_prompt
from moe_lab.evaluation.engines import server as servers
from moe_lab.evaluation.engines import vllm
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.engines.server import ServedModel, served_model
from moe_lab.evaluation.judge import verdicts
from moe_lab.models.load import load_model
from moe_lab.paths import DATA, shipped_paths
from moe_lab.pruning.plan import Plan
from moe_lab.study import preflight

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("olmoe" not in shipped_paths(), reason="no shipped model"),
]

ENDPOINT = Path(__file__).with_name("endpoint.py")
FAKE = python_command(ENDPOINT)
POCKET = ModelConfig(name="pocket", path="pocket:olmoe")
CHECKPOINT = DATA / "olmoe"


def backend(command: str, seconds: float = 300) -> BackendConfig:
    return BackendConfig("server", command, seconds)


def clock(monkeypatch: pytest.MonkeyPatch, now: Callable[[], float]) -> None:
    """What the time is while a server is waited for, in seconds."""
    monkeypatch.setattr(servers, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))


def script(tmp_path: Path, text: str) -> str:
    """A command line that runs `text`; argv holds the port and the checkpoint."""
    file = tmp_path / "server.py"
    file.write_text(f"import os, signal, subprocess, sys, time\n{text}\n")
    return f"{python_command(file)} {{port}} {{checkpoint}}"


@pytest.mark.parametrize("named", [True, False])
def test_server_ends_after_an_exception(named: bool) -> None:
    """Some servers go by the checkpoint's path."""
    command = FAKE + (" {port} {name} {checkpoint}" if named else " {port} {checkpoint}")
    with (
        pytest.raises(ZeroDivisionError),
        served_model(CHECKPOINT, backend(command), POCKET, "a step") as served,
    ):
        assert served.name.startswith("a step-") if named else served.name.endswith("/checkpoint")
        assert generate(served, ["abc", "abcdef", ""], 4, batch_size=2) == [" 3", " 6", " 0"]
        assert served.max_length == 512
        raise ZeroDivisionError
    with pytest.raises(Unavailable, match="ended"):
        generate(served, ["abc"], 4)


def refused(
    command: str, match: str, seconds: float = 300, error: type[Exception] = Unavailable
) -> str:
    """The sentence with which a server that is started by `command` fails."""
    with (
        pytest.raises(error, match=match) as caught,
        served_model(CHECKPOINT, backend(command, seconds), POCKET, "n"),
    ):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        (
            (
                "print('ValueError: 1.4 GiB needed\\n at x\\nRuntimeError: See root cause "
                "above\\nwarn()'); sys.exit(1)"
            ),
            "ValueError: 1.4 GiB needed; exit code 1",
        ),
        (
            "print('(EngineCore pid=7) x.Error: stopped\\n  leaked')",
            "x.Error: stopped; exit code 0",
        ),
    ],
)
def test_server_that_dies_while_starting_is_quoted(
    text: str, sentence: str, tmp_path: Path
) -> None:
    refused(script(tmp_path, text), f"ended before it was ready: {sentence}")


def test_server_that_is_not_ready_in_time_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    elsewhere = f"['python', {str(ENDPOINT)!r}, '0', 'm']"
    text = f"print('loading', os.getpid(), flush=True)\nopen({str(started)!r}, 'w')\n"
    text += f"os.execv(sys.executable, {elsewhere})"
    clock(monkeypatch, lambda: 2.0 if started.exists() else 0.0)
    match = r"did not answer at http://127.0.0.1:\d+/v1 within .*=1 \(.*\); .* loading \d+"
    process = int(refused(script(tmp_path, text), match, seconds=1).rsplit(" ", 1)[1])
    wait_until(lambda: not is_running(process))


def test_stale_server_of_a_dead_one_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with endpoint(lambda body: completion("x", "stale")) as server:
        monkeypatch.setattr(
            servers, "_free_port", lambda: int(server.url.split(":")[2].removesuffix("/v1"))
        )
        refused(script(tmp_path, "sys.exit('address in use')"), "serves stale")


def test_server_that_never_replies_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_ANSWER_SECONDS", 1.0)
    asked = tmp_path / "asked"
    text = (
        f"sys.path.insert(0, {str(ENDPOINT.parent)!r})\nfrom endpoint import endpoint\nimport "
        "threading\n"
    )
    text += (
        f"hang = lambda _: [open({str(asked)!r}, 'w'), threading.Event().wait()]\n"
        "with endpoint(hang, int(sys.argv[1])): signal.pause()"
    )
    clock(monkeypatch, lambda: 2.0 if asked.exists() else 0.0)
    refused(script(tmp_path, text), r"did not answer .*does not answer \(timed out\)", seconds=1)


def test_server_that_dies_while_generating_is_unavailable() -> None:
    with served_model(
        CHECKPOINT, backend(FAKE + " {port} {name} {checkpoint}"), POCKET, "n"
    ) as served:
        watcher = served.exit_reason.args[0].process.pid  # type: ignore[attr-defined]
        (process,) = Path(f"/proc/{watcher}/task/{watcher}/children").read_text().split()
        os.kill(int(process), signal.SIGKILL)
        with pytest.raises(Unavailable, match=r"the server of n-\w+ ended: .*SIGKILL"):
            generate(served, ["abc"], 4)


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
program = "import signal; signal.signal(15, 1); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", program])
print(os.getpid(), child.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("watcher", ["alive", "killed", "orphaned"])
def test_server_that_ignores_signals_is_killed_with_its_children(
    watcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "GRACE", 0.3)
    with servers.start_process(
        shlex.split(script(tmp_path, STUBBORN).format(port=1, checkpoint="x"))
    ) as process:
        wait_until(lambda: len(process.log().split()) == 2)
        processes = [int(number) for number in process.log().split()]
        assert all(map(is_running, processes))
        if watcher == "killed":
            process.process.kill()
            process.process.wait()
            assert all(map(is_running, processes))
        elif watcher == "orphaned":  # its input ends with the process that started it
            assert process.process.stdin
            process.process.stdin.close()
            wait_until(lambda: not any(map(is_running, processes)))
    wait_until(lambda: not any(map(is_running, processes)))


def altered(folder: Path, contents: Mapping[str, str]) -> Path:
    """The shipped model with other contents of some files."""
    folder.mkdir()
    for file in CHECKPOINT.iterdir():
        if file.name not in contents:
            (folder / file.name).symlink_to(file)
    for name, content in contents.items():
        (folder / name).write_text(content)
    return folder


def test_served_checkpoint_has_no_generation_preferences(
    subject: LoadedModel, tmp_path: Path
) -> None:
    """Where a checkpoint prefers to sample with a penalty, and to clean texts. It has the files of
    the model otherwise."""
    generation = {"repetition_penalty": 1.3, "temperature": 0.6, "eos_token_id": [5, 3]}
    tokenizer = read(CHECKPOINT / "tokenizer_config.json")
    contents = {
        "generation_config.json": json.dumps(generation),
        "tokenizer_config.json": json.dumps({**tokenizer, "clean_up_tokenization_spaces": True}),
    }
    preferring = altered(tmp_path / "own", contents)
    view = tmp_path / "view"
    servers.make_view(preferring, view, subject.tokenizer)
    assert {file.name for file in view.iterdir()} == {file.name for file in preferring.iterdir()}
    assert (view / "model.safetensors").resolve() == (CHECKPOINT / "model.safetensors").resolve()
    neutral = {"do_sample": True, "top_k": 0, "eos_token_id": [0, 3, 5], "pad_token_id": 1}
    assert read(view / "generation_config.json") == neutral
    assert read(view / "tokenizer_config.json")["clean_up_tokenization_spaces"] is False
    (preferring / "generation_config.json").unlink()
    servers.make_view(preferring, tmp_path / "plain", subject.tokenizer)
    ends = read(tmp_path / "plain/generation_config.json")["eos_token_id"]
    assert ends == subject.end_token_ids


def test_served_checkpoint_has_the_tokenizer_that_is_used(
    subject: LoadedModel, tmp_path: Path
) -> None:
    checkpoint = altered(tmp_path / "own", {"chat_template.jinja": "of the checkpoint"})
    other = deepcopy(subject.tokenizer)
    other.add_tokens(["w900"])
    other.save_pretrained(tmp_path / "other")
    other.name_or_path = str(tmp_path / "other")
    servers.make_view(checkpoint, tmp_path / "view", other)
    assert "w900" in (tmp_path / "view" / "tokenizer.json").read_text()
    assert not (tmp_path / "view" / "chat_template.jinja").exists()
    assert (checkpoint / "chat_template.jinja").exists()


def read(file: Path) -> Any:
    return json.loads(file.read_text())


CHATTY_TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% "
    "endfor %}assistant:"
)
PENALTIES = {
    "repetition_penalty": 3.0,
    "do_sample": True,
    "temperature": 2.0,
    "no_repeat_ngram_size": 2,
}
SERVE = (
    "transformers serve {checkpoint} --host 127.0.0.1 --port {port} --device cpu --dtype float32"
)
PROMPTS = [
    item["prompt"]
    for name, count in (("gsm8k", 3), ("wildbench", 3), ("humaneval", 4))
    for item in shipped_items(name, count)
]


class Pair(NamedTuple):
    """A model as loaded in this process and as served by transformers' own server."""

    loaded: LoadedModel
    served: Any


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Its files prefer sampling with penalties, which neither follows."""
    pytest.importorskip(
        "fastapi", reason="transformers serve needs it: pip install transformers[serving]"
    )
    generation = json.dumps({**read(CHECKPOINT / "generation_config.json"), **PENALTIES})
    contents = {"chat_template.jinja": CHATTY_TEMPLATE, "generation_config.json": generation}
    folder = altered(tmp_path_factory.mktemp("served") / "chatty", contents)
    model = ModelConfig(name="chatty", path=str(folder), threads=1)
    loaded = LoadedModel(*load_model(model))
    with served_model(folder, backend(SERVE, 60), model, "n") as served:
        yield Pair(loaded, served)


def test_server_writes_texts_of_the_loaded_model(pair: Pair) -> None:
    stop = ("\ndef ", ")", "\n\n", *(f"{end} " for end in {prompt[-1] for prompt in PROMPTS}))
    texts = generate(pair.loaded, PROMPTS, batch_size=4)
    assert generate(pair.served, PROMPTS, batch_size=4) == texts
    stopped = generate(pair.loaded, PROMPTS, 40, stop=stop)
    assert generate(pair.served, PROMPTS, 40, stop=stop) == stopped


def test_server_writes_chats_of_the_loaded_model(pair: Pair) -> None:
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:4]]
    rendered = [render_prompt(pair.served, chat) for chat in chats]
    assert rendered == [render_prompt(pair.loaded, chat) for chat in chats]
    texts = generate(pair.served, rendered, 16, chat=True)
    assert texts == generate(pair.loaded, rendered, 16, chat=True)
    assert any(texts)


def test_server_can_have_a_judge_behind_it(pair: Pair, tmp_path: Path) -> None:
    """Though this one has nothing to say."""
    judge = JudgeConfig(pair.served.name, pair.served.url, max_tokens=8)
    (verdict,) = verdicts(judge, tmp_path / "cache", ["Give a score."], max_unscored=1)
    assert verdict.score is None and "without a usable score" in verdict.reply, (
        "it was asked, and it answered"
    )


@pytest.fixture
def fake(subject: LoadedModel) -> Iterator[Any]:
    """Makes a served subject whose texts are told, and the endpoint that notes what it is asked."""
    with ExitStack() as opened:

        def make(
            answer: Callable[[dict[str, Any]], Reply], **changes: Any
        ) -> tuple[ServedModel, Endpoint]:
            server = opened.enter_context(endpoint(answer))
            return replace(
                ServedModel(server.url, "m", subject.tokenizer, 512, {}), **changes
            ), server

        yield make


def test_requests_are_greedy_on_the_wire(fake: Any) -> None:
    """At most four stop texts are sent; a text is cut at the others here."""
    served, server = fake(lambda body: completion(" yes. No. Maybe", "m@main"))
    assert generate(served, ["Is it"], 17, stop=("1", "2", "3", "4", "No", "Maybe")) == [" yes. "]
    greedy = {"temperature": 0, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0}
    request = {
        "model": "m",
        "prompt": "Is it",
        "max_tokens": 17,
        "stop": ["1", "2", "3", "4"],
        **greedy,
    }
    assert server.requests == [request]


def test_stop_text_that_begins_in_the_prompt_is_ignored(fake: Any) -> None:
    """As `transformers serve` does: it looks for stop texts at the end of prompt and text
    together."""

    def answer(body: dict[str, Any]) -> Reply:
        text = "\ntwo words END more"
        prompt = body["prompt"]
        for length in range(1, len(text) + 1):
            if any((prompt + text[:length]).endswith(stop) for stop in body["stop"] or ()):
                return completion(text[:length], "m")
        return completion(text, "m", "length")

    served, server = fake(answer)
    stops = ("\n\n", "END")
    assert generate(served, ["a\n", "a"], 9, stop=stops) == ["\ntwo words ", "\ntwo words "]
    assert {body["prompt"]: body["stop"] for body in server.requests} == {
        "a": ["\n\n", "END"],
        "a\n": ["END"],
    }


@pytest.mark.parametrize(
    "choice",
    [
        {"text": None},
        {"text": ["a"]},
        *({"finish_reason": reason} for reason in ("abort", "content_filter", None)),
    ],
)
def test_incomplete_completion_is_an_error(choice: dict[str, Any], fake: Any) -> None:
    """One that is empty, or reaches the limit, is whole."""
    reply = completion("", "m")
    reply.body["choices"][0].update(choice)
    served, _ = fake(lambda body: completion("", "m", "length") if body["prompt"] == "b" else reply)
    assert generate(served, ["b"], 4) == [""]
    with pytest.raises(
        Unavailable, match=f"finish_reason={re.escape(str(choice.get('finish_reason', 'stop')))}"
    ):
        generate(served, ["a"], 4)


def test_requests_are_concurrent_longest_prompt_first(fake: Any) -> None:
    both = threading.Barrier(2, timeout=60)

    def answer(body: dict[str, Any]) -> Reply:
        """The texts of the two longest prompts are done when both have been asked for."""
        if body["prompt"] != "b":
            both.wait()
        return completion(body["prompt"], "m")

    served, server = fake(answer)
    prompts = ["b", "slow slow slow", "a a"]
    assert generate(served, prompts, 4, batch_size=2) == prompts
    assert {body["prompt"] for body in server.requests[:2]} == {"slow slow slow", "a a"}
    assert generate(served, [], 4) == []


def test_slow_server_may_take_its_time_between_two_texts(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "TOKEN_SECONDS", 0.1)
    waits: list[float] = []
    monkeypatch.setattr(
        servers, "wait", lambda *arguments: waits.append(arguments[1]) or wait(*arguments)
    )
    slow, _ = fake(lambda body: completion("x", "m"), ready_seconds=200)
    assert generate(slow, list("abcdef"), 4, batch_size=1) == ["x"] * 6
    assert len(waits) > 1 and set(waits) == {200.4}, (
        "so long may pass between two, whatever all take"
    )


@pytest.fixture
def stopped() -> Iterator[threading.Event]:
    """Fake servers that wait for this are let go after the test."""
    event = threading.Event()
    yield event
    event.set()


def test_hanging_server_is_given_up(
    fake: Any, stopped: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "TOKEN_SECONDS", 0.1)
    silent, _ = fake(lambda body: stopped.wait() and completion("x", "m"), ready_seconds=0.2)
    with pytest.raises(Unavailable, match=r"0\.6 s, .*ready_seconds=0\.2"):
        generate(silent, list("abcdef"), 4, batch_size=2)


def test_failed_request_ends_the_others(fake: Any, stopped: threading.Event) -> None:
    failing, _ = fake(
        lambda body: (
            Reply("oops", 500) if body["prompt"] == "b" else stopped.wait() and completion("", "m")
        )
    )
    # while other texts are still written
    with pytest.raises(Unavailable, match="HTTP 500: oops"):
        generate(failing, ["b", "a a"], 4)


def test_special_tokens_are_added_once(fake: Any, subject: LoadedModel) -> None:
    """A tokenizer that begins every prompt with a token, and a chat template that writes it out."""
    tokenizer = deepcopy(subject.tokenizer)
    start = tokenizer.bos_token = tokenizer.eos_token
    special = [(start, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        f"{start} $A", special_tokens=special
    )
    served, server = fake(lambda body: completion("x", "m"), tokenizer=tokenizer)
    generate(served, [f"{start}user"], 4, chat=True)
    generate(served, ["user", f"{start}user"], 4)
    assert [body["prompt"] for body in server.requests] == ["user", "user", "user"]
    with pytest.raises(UserError, match="allows no more tokens: expected backend=hf"):
        generate(served, ["user"], 4, chat=True)


def test_refused_and_too_long_requests_are_reported(fake: Any) -> None:
    served, _ = fake(lambda body: Reply({"message": "too long"}, 400))
    with pytest.raises(UserError, match=r"the server of m answered HTTP 400: too long$"):
        generate(served, ["a"], 4)
    reason = f"at most 4 stop texts, {'and more words ' * 20}as vLLM puts it"
    wordy, _ = fake(lambda body: Reply({"error": {"message": reason, "code": 400}}, 400))
    with pytest.raises(UserError, match=f"HTTP 400: {re.escape(reason)}$"):
        generate(wordy, ["a"], 4)
    web, _ = fake(lambda body: Reply("<html>"))
    with pytest.raises(UserError, match="gives no text completions"):
        generate(web, ["a"], 4)
    nowhere = replace(served, url="http://127.0.0.1:9/v1")
    with pytest.raises(Unavailable, match=r"does not answer .*refused"):
        generate(nowhere, ["a"], 4)


@pytest.mark.parametrize(
    "command",
    [
        None,
        "serve {checkpoint}",
        "serve {port}",
        "serve {checkpoints} {port}",
        "serve '{checkpoint} {port}",
    ],
)
def test_wrong_server_command_is_reported_before_loading(command: str | None) -> None:
    (sentence,) = engines.setting_errors(BackendConfig("server", command), [], [])
    assert f"backend.command={command}" in sentence


def test_silent_engine_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late reply would be taken for that to the next request."""
    monkeypatch.setattr(child_process, "GRACE", 0.1)
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nread request\necho \'{"done": {"max_length": 9}}\'\nexec sleep 1000\n'
    )
    python.chmod(0o755)
    backend = BackendConfig("vllm", ready_seconds=1.0, python=str(python))
    engine = vllm.VllmModel(CHECKPOINT, backend, POCKET)
    with pytest.raises(Unavailable, match="ready_seconds=1 "):
        engine.set_plan(Plan.of_experts({0: (0,)}, {0: 2}))
    assert engine.process.poll() is not None


@pytest.mark.parametrize(
    ("cards", "heads", "asked", "given"),
    [
        ("0", 28, {}, None),
        ("0,1,GPU-8f,MIG-7a", 28, {}, 4),
        ("0,1,2,3,4,5,6,7", 28, {}, 4),
        ("0,1,2,3,4,5", 48, {}, 4),
        ("0,1,2,3", 28, {"tensor_parallel_size": 2}, 2),
        ("0,1,2,3", 28, {"data_parallel_size": 4}, None),
    ],
)
def test_vllm_is_given_all_gpus_of_its_process(
    cards: str,
    heads: int,
    asked: dict[str, int],
    given: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(CHECKPOINT, model := tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_attention_heads": heads}))
    (model / "generation_config.json").unlink()  # not all checkpoints have one
    monkeypatch.setattr(vllm, "visible_gpus", lambda: cards.split(","))
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nread request; echo $request > told; echo \'{"done": {"max_length": 9}}\'; '
        "read more\n"
    )
    monkeypatch.chdir(tmp_path)
    python.chmod(0o755)
    backend = BackendConfig("vllm", arguments=asked, python=str(python))
    vllm.VllmModel(model, backend, replace(POCKET, device="auto")).close()
    arguments = json.loads((tmp_path / "told").read_text())[1]["arguments"]
    assert arguments.get("tensor_parallel_size") == given
    assert "pipeline_parallel_size" not in arguments


def test_ported_family_is_refused_for_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek"}')
    ported = ModelConfig(name="ported", path=str(tmp_path))
    (sentence,) = engines.setting_errors(BackendConfig("vllm"), [], [POCKET, ported])
    assert "model_type=deepseek" in sentence
    assert "backend=hf" in sentence
    assert not list(engines.setting_errors(BackendConfig("hf"), [], [ported]))


def test_missing_server_program_is_reported_before_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines.check_installed(BackendConfig("hf"))
    engines.check_installed(backend("python {checkpoint} {port}"))  # beside the interpreter
    with pytest.raises(UserError, match=r"interpreters\.vllm=/nowhere"):
        engines.check_installed(BackendConfig("vllm", python="/nowhere"))
    with pytest.raises(
        UserError, match=rf"interpreters\.vllm={re.escape(sys.executable)} has no vllm"
    ):
        engines.check_installed(BackendConfig("vllm", python=sys.executable))
    step = evaluation_step(
        POCKET,
        BenchmarkConfig(name="b", harness="perplexity", task="pocket:calibration/general.jsonl"),
        backend=backend("no-such-server {checkpoint} {port}"),
    )
    (sentence,) = preflight.missing_requirements([step], LauncherConfig())
    assert "backend.command starts no-such-server" in sentence
    message = "no-such-server cannot be started: there is no such program"
    refused("no-such-server {port} {checkpoint}", message, error=UserError)
    elsewhere = LauncherConfig(python="apptainer exec image.sif python")
    assert preflight.missing_requirements([step], elsewhere) == []


def test_logits_are_not_compared_by_a_server() -> None:
    benchmark = BenchmarkConfig("b", "perplexity", "text.txt", reports={"kl": "kl"})
    for settings in (BackendConfig("vllm"), backend("serve {checkpoint} {port}")):
        (sentence,) = engines.setting_errors(settings, [benchmark], [])
        assert f"backend={settings.name} returns no logits, which benchmark b" in sentence


def test_values_in_a_command_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a {b} $c")
    serve = backend("serve '{checkpoint}' --port={port} {name} --token=$HF_TOKEN")
    command = engines.command_line(serve, Path("/a b/$(c)"), 7, "x y;z")
    assert command == ["serve", "/a b/$(c)", "--port=7", "x y;z", "--token=a {b} $c"]
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="HF_TOKEN"):
        engines.command_line(serve, Path("x"), 7, "n")
