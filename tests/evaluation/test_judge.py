"""Judges that answer well, badly, late and never."""

from __future__ import annotations

import json
import string
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from endpoint import Endpoint, Reply, endpoint, message
from hypothesis import given
from hypothesis import strategies as some

from moe_lab.config import BenchmarkConfig, JudgeConfig
from moe_lab.config.base import SettingsError, valid
from moe_lab.errors import Unavailable
from moe_lab.evaluation import Policy, suite
from moe_lab.evaluation import judge as judge_module
from moe_lab.evaluation.harnesses import wildbench
from moe_lab.evaluation.judge import Judge, Unparsable, score
from moe_lab.study import error_document

pytestmark = pytest.mark.slow

KEY = "MOE_LAB_TEST_KEY"


SOON = {"Retry-After": "0.01"}
"""An endpoint that says so is asked again without the usual wait."""


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "a-secret\n")
    monkeypatch.setattr(judge_module, "ATTEMPTS", 4)
    monkeypatch.setattr(judge_module, "PARALLEL", 4)


def settings(at: Endpoint | str, **changes: Any) -> JudgeConfig:
    url = at if isinstance(at, str) else at.url
    return replace(JudgeConfig("some/judge", url, KEY), **changes)


def scripted(**steps: list[Reply]) -> Callable[[dict[str, Any]], Reply]:
    """Replies to a prompt in their order, then the last of them again and again."""
    lock = threading.Lock()

    def answer(body: dict[str, Any]) -> Reply:
        with lock:
            left = steps[body["messages"][0]["content"]]
            return left.pop(0) if len(left) > 1 else left[0]

    return answer


def scored(number: Any) -> Reply:
    return message(f'```json\n{{"strengths": "a \\"b\\"", "weaknesses": "c", "score": "{number}"}}\n```')


def test_an_endpoint_that_misbehaves_for_a_while_gives_every_score_and_is_asked_once(tmp_path: Path) -> None:
    answers = scripted(
        busy=[Reply({}, 429, SOON), Reply({}, 408, SOON), scored(8)],
        broken=[Reply("oops", 500, SOON), Reply("<html>", 503, SOON), scored(7)],
        garbage=[message("I like it."), Reply("<html>hello</html>"), scored(6)],
        outside=[scored(11), scored(0), scored(5)],
        aloud=[message('The form is {"score": "1..10"}, first I thought "score": 2, but {"score": 4}')],
        cut=[message('{"score": 1', finish_reason="length"), message(None, finish_reason="length"), scored(10)],
    )
    prompts = ["busy", "broken", "garbage", "outside", "aloud", "cut"]
    with endpoint(answers) as at:
        found = Judge(settings(at), tmp_path).verdicts(prompts, 0)
        assert [verdict.score for verdict in found] == [8, 7, 6, 5, 4, 10]
        assert len(at.asked) == 3 + 3 + 3 + 3 + 1 + 3
        again = Judge(settings(at), tmp_path).verdicts(prompts, 0)
        assert [verdict.score for verdict in again] == [8, 7, 6, 5, 4, 10] and all(one.cached for one in again)
        assert len(at.asked) == 16
    for body, headers in zip(at.asked, at.headers, strict=True):
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("some/judge", 0.0, 2048)
        assert headers["authorization"] == "Bearer a-secret"


def test_a_reply_is_used_again_for_the_same_judge_settings_and_prompt_only(tmp_path: Path) -> None:
    with endpoint(lambda body: scored(3)) as at, endpoint(lambda body: scored(9)) as moved:
        first = settings(at)
        Judge(first, tmp_path).verdicts(["p"], 0)
        same = replace(first, url=moved.url, key_variable="ANOTHER")
        assert Judge(same, tmp_path).verdicts(["p"], 0)[0].score == 3 and not moved.asked
        changes: list[dict[str, Any]] = [
            {"model": "other"},
            {"extra": {"temperature": 0.5}},
            {"max_tokens": 99},
            {"extra": {"reasoning_effort": "low"}},
        ]
        for number, change in enumerate(changes, 1):
            assert Judge(replace(same, **change), tmp_path).verdicts(["p"], 0)[0].score == 9
            assert len(moved.asked) == number
        assert moved.asked[-1]["reasoning_effort"] == "low"
        assert Judge(same, tmp_path).verdicts(["q"], 0)[0].score == 9
    kept = "".join(file.read_text() for file in tmp_path.rglob("*.json"))
    assert "a-secret" not in kept and "127.0.0.1" not in kept


def test_failures_are_not_kept_and_damaged_replies_are_asked_for_again(tmp_path: Path) -> None:
    with endpoint(scripted(p=[message("no"), message("no"), message("no"), scored(2)])) as at:
        asking = Judge(settings(at), tmp_path)
        verdict = asking.verdicts(["p"], 1)[0]
        assert verdict.score is None and '3 replies in a row without a usable score (no "score")' in verdict.reply
        assert not list(tmp_path.rglob("*.json"))
        assert asking.verdicts(["p"], 0)[0].score == 2
        (file,) = tmp_path.rglob("*.json")
        file.write_text(file.read_text()[:-9])
        assert asking.verdicts(["p"], 0)[0].score == 2 and len(at.asked) == 5
        assert json.loads(file.read_text())["judge"]["model"] == "some/judge"


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (400, {"error": {"message": "too\nlong"}}, "HTTP 400"),
        (401, {"message": "no"}, KEY),
        (404, "nothing here", "judge.url"),
        (422, {}, "HTTP 422"),
    ],
)
def test_what_is_refused_is_one_sentence_at_once_and_asked_again_by_the_next_run(
    status: int, body: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_module, "PARALLEL", 1)
    with endpoint(lambda _: Reply(body, status)) as at:
        with pytest.raises(Unavailable) as caught:
            Judge(settings(at), tmp_path).verdicts([f"p{n}" for n in range(40)], 40)
        assert sentence in str(caught.value) and "\n" not in str(caught.value)
        assert len(at.asked) == 1  # those behind the first are called off
    assert error_document(caught.value)["transient"]  # the step does not know judge.url, which may be mended


@pytest.mark.parametrize(("wait", "each"), [("0.01", 4), ("3600", 1)])
def test_an_endpoint_that_stays_busy_ends_it_after_bounded_attempts(tmp_path: Path, wait: str, each: int) -> None:
    """It is asked again as it says, but not when it says that this would take longer than two minutes."""
    with endpoint(lambda _: Reply({}, 429, {"Retry-After": wait})) as at, pytest.raises(Unavailable) as caught:
        Judge(settings(at), tmp_path).verdicts([f"p{n}" for n in range(100)], 1)
    assert "2 of 100 answers, and at most 1 may go without: HTTP 429" in str(caught.value)
    assert 2 * each <= len(at.asked) <= 4 * 4 * each  # 4 at a time, and no new ones once it is clear
    assert error_document(caught.value)["transient"] and not error_document(caught.value)["trace"]


def test_slow_endpoints_and_wrong_ports_end_with_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "TIMEOUT", 1)
    monkeypatch.setattr(judge_module, "ATTEMPTS", 2)
    never = threading.Event()
    with endpoint(lambda _: never.wait() and scored(5)) as at:
        with pytest.raises(Unavailable, match="no answer within 1 s"):
            Judge(settings(at), tmp_path).verdicts(["p"], 0)
        never.set()
        assert len(at.asked) == 2
    with pytest.raises(Unavailable, match=r"no connection .*refused"):
        Judge(settings(at), tmp_path).verdicts(["p"], 0)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply("<html>welcome</html>"), "no chat completion"),
        (Reply({"choices": []}), "no chat completion"),
        (message(None), 'no "score"'),
        (Reply({"choices": [{"message": {"content": [{"text": '"score": 5'}]}}]}), "a list in place of a text"),
        (message('{"score": 5}', finish_reason="content_filter"), "finish_reason=content_filter"),
        (message("I think", finish_reason="length"), "cut off at judge.max_tokens"),
    ],
)
def test_what_is_no_reply_is_asked_for_three_times(reply: Reply, says: str, tmp_path: Path) -> None:
    with endpoint(lambda _: reply) as at, pytest.raises(Unavailable) as caught:
        Judge(settings(at), tmp_path).verdicts(["p"], 0)
    assert len(at.asked) == 3 and says in str(caught.value)


def naive_score(reply: str) -> float | None:
    """By hand: the text behind the last "score":, up to what ends a number."""
    if '"score":' not in reply:
        return None
    rest = reply.rsplit('"score":', 1)[1].lstrip().removeprefix('"').lstrip()
    digits = next((rest[:n] for n in range(len(rest)) if rest[n] not in string.digits + "."), "")
    try:
        value = float(digits) if digits and digits[0] != "." and digits[-1] != "." else None
    except ValueError:
        return None
    ended = rest[len(digits) : len(digits) + 1] in tuple('"}, \n')
    return value if value is not None and ended and 1 <= value <= 10 else None


@given(some.lists(some.sampled_from(['"score":', '"score": "', *' "},107.-\nx', "/10", '10"', "0.5}", "8,"])))
def test_the_last_score_counts_when_it_is_whole_and_on_the_scale(pieces: list[str]) -> None:
    reply = "".join(pieces)
    try:
        found: float | None = score(reply)
    except Unparsable:
        found = None
    assert found == naive_score(reply)


BENCHMARK = BenchmarkConfig(
    "stories", "wildbench", "wildbench", chat=True, judge=JudgeConfig("m", "http://localhost:1/v1")
)


def test_a_template_is_filled_once(tmp_path: Path) -> None:
    conversation = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "A poem about {$history}!"},
    ]
    (tmp_path / "own.md").write_text("{$history}|{$user_query}|{$model_output}|{$checklist}|{}")
    one = replace(BENCHMARK, parameters={"template": str(tmp_path / "own.md")})
    filled = wildbench.question(wildbench.template(one), conversation, "{$checklist} {$x}", ["Rhymes?", "Short?"])
    assert filled == ("USER: Hello\n\nASSISTANT: Hi|A poem about {$history}!|{$checklist} {$x}|- Rhymes?\n- Short?|{}")
    own = wildbench.question(wildbench.template(BENCHMARK), conversation, "A rose", ["Rhymes?"])
    for part in ("ASSISTANT: Hi", "A poem about", "A rose", "- Rhymes?", '"strengths"', '"weaknesses"', '"score"'):
        assert part in own
    before = wildbench.identity(one)
    (tmp_path / "own.md").write_text("{$user_query} {$model_output} {$checklist}")
    assert (
        wildbench.identity(one)["template"] != before["template"]
        and wildbench.identity(one)["judge"] == before["judge"]
    )


def test_everything_wrong_with_a_judge_is_said_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problems(policy: Policy = Policy(allow_judge=True), **changes: Any) -> str:  # noqa: B008
        return " & ".join(wildbench.problems(replace(BENCHMARK, **changes), policy))

    assert problems() == ""
    assert "allow_judge=false" in problems(Policy()) and "allow_judge=true" in problems(Policy())
    assert "judge=gpt_oss_120b" in problems(judge=None)
    assert "chat=false, but conversations" in " ".join(suite.wrong([replace(BENCHMARK, chat=False)]))
    judge = BENCHMARK.judge
    assert judge is not None
    monkeypatch.delenv(KEY)
    assert f"judge.key_variable={KEY}" in problems(judge=replace(judge, url="https://x.org/v1", key_variable=KEY))
    wrong = {"url": "localhost:8000", "max_tokens": 0, "key_variable": "sk-0123", "model": " "}
    with pytest.raises(SettingsError) as error:
        valid(JudgeConfig, wrong, "judge")
    begins = sorted(sentence.partition("=")[0] for sentence in error.value.sentences)
    assert begins == ["judge.key_variable", "judge.max_tokens", "judge.model", "judge.url"]
    with pytest.raises(SettingsError, match=r"judge\.extra\.stream"):
        valid(JudgeConfig, {**asdict(judge), "extra": {"stream": 1}}, "judge")
    monkeypatch.setenv(KEY, "x")
    assert problems(judge=replace(judge, url="https://x.org/v1", key_variable=KEY)) == ""
    assert "cannot be read" in problems(parameters={"template": str(tmp_path / "none.md")})
    for places in ("{$user_query} {$checklist}", "{$user_query} {$model_output} {$model_ouput} {$checklist}"):
        (tmp_path / "a.md").write_text(places)
        assert "expected {$history}, {$user_query}" in problems(parameters={"template": str(tmp_path / "a.md")})


def test_judging_is_parallel_and_needs_no_torch(tmp_path: Path) -> None:
    together = threading.Barrier(4, timeout=30)

    def answer(_: dict[str, Any]) -> Reply:
        together.wait()  # until four have asked
        return scored(5)

    with endpoint(answer) as at:
        Judge(settings(at), tmp_path).verdicts([str(number) for number in range(16)], 0)
    code = "import sys, moe_lab.evaluation.harnesses.wildbench; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
