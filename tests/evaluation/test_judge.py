"""Judges behind endpoints that answer well, badly, late and never."""

import json
import string
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from endpoint import Endpoint, Reply, endpoint, message
from hypothesis import given
from hypothesis import strategies as some

from moe_lab.config import JudgeConfig
from moe_lab.errors import Unavailable
from moe_lab.evaluation import judge as judges
from moe_lab.evaluation.judge import Unparsable, score, verdicts
from moe_lab.study.provenance import error_document

pytestmark = pytest.mark.slow

KEY = "MOE_LAB_TEST_KEY"


SOON = {"Retry-After": "0.01"}
"""An endpoint that says so is asked again without the usual wait."""


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "a-secret\n")
    monkeypatch.setattr(judges, "ATTEMPTS", 4)
    monkeypatch.setattr(judges, "PARALLEL", 4)


def settings(server: Endpoint | str, **changes: Any) -> JudgeConfig:
    url = server if isinstance(server, str) else server.url
    return replace(JudgeConfig("some/judge", url, KEY), **changes)


def scripted(**steps: list[Reply]) -> Callable[[dict[str, Any]], Reply]:
    """Replies to a prompt in their order, then the last of them again and again."""
    lock = threading.Lock()

    def answer(body: dict[str, Any]) -> Reply:
        with lock:
            replies = steps[body["messages"][0]["content"]]
            return replies.pop(0) if len(replies) > 1 else replies[0]

    return answer


def scored(number: Any) -> Reply:
    return message(
        f'```json\n{{"strengths": "a \\"b\\"", "weaknesses": "c", "score": "{number}"}}\n```'
    )


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([Reply({}, 429, SOON), Reply({}, 408, SOON), scored(8)], 8),
        ([Reply("oops", 500, SOON), Reply("<html>", 503, SOON), scored(7)], 7),
        ([message("I like it."), Reply("<html>hello</html>"), scored(6)], 6),
        ([scored(11), scored(0), scored(5)], 5),
        ([message('<think>{"score": 3}, but'), message('{"score": 8}? No.</think>'), scored(3)], 3),
        ([*(message('{"score": 3}', finish_reason=r) for r in ("abort", "error")), scored(9)], 9),
        ([*(message(t, finish_reason="length") for t in ('{"score": 1', None)), scored(10)], 10),
    ],
    ids=["busy", "broken", "garbage", "out of range", "no answer", "broken off", "cut"],
)
def test_judge_is_asked_until_a_reply_has_a_score(
    replies: list[Reply], expected: int, tmp_path: Path
) -> None:
    with endpoint(scripted(p=replies)) as server:
        (verdict,) = verdicts(settings(server), tmp_path, ["p"], 0)
    assert verdict.score == expected
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('The form is {"score": "1..10"}, first I thought "score": 2, but {"score": 4}', 4),
        ('<think>{"score": "3"}? no</think>{"score": "8"}', 8),
    ],
)
def test_the_last_score_after_a_thought_counts(reply: str, expected: int, tmp_path: Path) -> None:
    with endpoint(lambda _: message(reply)) as server:
        (verdict,) = verdicts(settings(server), tmp_path, ["p"], 0)
    assert verdict.score == expected
    assert len(server.requests) == 1


def test_scores_are_stored_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    with endpoint(scripted(a=[scored(1)], b=[scored(2)], c=[scored(3)])) as server:
        for prompts, scores in (("abc", [1, 2, 3]), ("cab", [3, 1, 2])):
            result = verdicts(settings(server), tmp_path, list(prompts), 0)
            assert [verdict.score for verdict in result] == scores
            assert len(server.requests) == 3


def test_requests_have_the_settings_and_the_key_of_the_judge(tmp_path: Path) -> None:
    with endpoint(lambda _: scored(3)) as server:
        verdicts(settings(server), tmp_path, ["p"], 0)
    (body,), (headers,) = server.requests, server.headers
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("some/judge", 0.0, 2048)
    assert headers["authorization"] == "Bearer a-secret"


def test_reply_is_reused_for_the_same_judge_and_prompt_only(tmp_path: Path) -> None:
    with endpoint(lambda body: scored(3)) as server, endpoint(lambda body: scored(9)) as moved:
        first = settings(server)
        verdicts(first, tmp_path, ["p"], 0)
        same = replace(first, url=moved.url, key_variable="ANOTHER")
        assert verdicts(same, tmp_path, ["p"], 0)[0].score == 3
        assert not moved.requests
        changes: list[dict[str, Any]] = [
            {"model": "other"},
            {"max_tokens": 99},
            {"extra": {"reasoning_effort": "low"}},
        ]
        for number, change in enumerate(changes, 1):
            assert verdicts(replace(same, **change), tmp_path, ["p"], 0)[0].score == 9
            assert len(moved.requests) == number
        assert moved.requests[-1]["reasoning_effort"] == "low"
        assert verdicts(same, tmp_path, ["q"], 0)[0].score == 9
    content = "".join(file.read_text() for file in tmp_path.rglob("*.json"))
    assert "a-secret" not in content
    assert "127.0.0.1" not in content


def test_failed_and_damaged_replies_are_requested_again(tmp_path: Path) -> None:
    with endpoint(scripted(p=[message("no"), message("no"), message("no"), scored(2)])) as server:
        asking = partial(verdicts, settings(server), tmp_path)
        verdict = asking(["p"], 1)[0]
        assert verdict.score is None
        assert '3 replies in a row without a usable score (no "score")' in verdict.reply
        assert not list(tmp_path.rglob("*.json"))
        assert asking(["p"], 0)[0].score == 2
        (file,) = tmp_path.rglob("*.json")
        file.write_text(file.read_text()[:-9])
        assert asking(["p"], 0)[0].score == 2
        assert len(server.requests) == 5
        assert json.loads(file.read_text())["judge"]["model"] == "some/judge"


@pytest.mark.parametrize(
    ("reply", "requests", "says"),
    [
        (Reply({"error": {"message": "too\nlong"}}, 400), 1, "HTTP 400"),
        (Reply({"message": "no"}, 401), 1, KEY),
        (Reply("nothing here", 404), 1, "judge.url"),
        (Reply({}, 422), 1, "HTTP 422"),
        (Reply("<html>welcome</html>"), 3, "no chat completion"),
        (Reply({"choices": []}), 3, "no chat completion"),
        (message(None), 3, 'no "score"'),
        (
            Reply({"choices": [{"message": {"content": [{"text": '"score": 5'}]}}]}),
            3,
            "a list in place of a text",
        ),
        (
            message('{"score": 5}', finish_reason="content_filter"),
            3,
            "finish_reason=content_filter",
        ),
        (message("I think", finish_reason="length"), 3, "cut off at judge.max_tokens"),
    ],
)
def test_refused_requests_end_the_judge(
    reply: Reply, requests: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step does not know judge.url, which may be mended before the next run."""
    monkeypatch.setattr(judges, "PARALLEL", 1)
    # of which those behind the first are called off
    prompts = ["p"] if requests == 3 else [f"p{n}" for n in range(40)]
    with endpoint(lambda _: reply) as server, pytest.raises(Unavailable) as caught:
        verdicts(settings(server), tmp_path, prompts, len(prompts) - 1)
    assert len(server.requests) == requests
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert error_document(caught.value)["transient"]


@pytest.mark.parametrize(("wait", "requests_each"), [("0.01", 4), ("3600", 1)])
def test_busy_endpoint_ends_the_judge_after_bounded_attempts(
    tmp_path: Path, wait: str, requests_each: int
) -> None:
    """It is asked again as it says, but not when it says that this would take longer than two
    minutes."""
    with (
        endpoint(lambda _: Reply({}, 429, {"Retry-After": wait})) as server,
        pytest.raises(Unavailable) as caught,
    ):
        verdicts(settings(server), tmp_path, [f"p{n}" for n in range(100)], 1)
    assert "2 of 100 answers, and at most 1 may go without: HTTP 429" in str(caught.value)
    # 4 at a time, and no new ones once it is clear
    assert 2 * requests_each <= len(server.requests) <= 4 * 4 * requests_each
    assert error_document(caught.value)["transient"]
    assert not error_document(caught.value)["trace"]


def test_slow_endpoints_and_wrong_ports_end_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judges, "TIMEOUT", 1)
    monkeypatch.setattr(judges, "ATTEMPTS", 2)
    never = threading.Event()
    with endpoint(lambda _: never.wait() and scored(5)) as server:
        with pytest.raises(Unavailable, match="no answer within 1 s"):
            verdicts(settings(server), tmp_path, ["p"], 0)
        never.set()
        assert len(server.requests) == 2
    with pytest.raises(Unavailable, match=r"no connection .*refused"):
        verdicts(settings(server), tmp_path, ["p"], 0)


def naive_score(reply: str) -> float | None:
    """By hand: the text behind the last "score":, up to what ends a number."""
    if '"score":' not in reply:
        return None
    number = reply.rsplit('"score":', 1)[1].lstrip().removeprefix('"').lstrip()
    digits = next(
        (number[:n] for n in range(len(number)) if number[n] not in string.digits + "."), ""
    )
    try:
        value = float(digits) if digits and digits[0] != "." and digits[-1] != "." else None
    except ValueError:
        return None
    ended = number[len(digits) : len(digits) + 1] in tuple('"}, \n')
    return value if value is not None and ended and 1 <= value <= 10 else None


@given(
    some.lists(
        some.sampled_from(['"score":', '"score": "', *' "},107.-\nx', "/10", '10"', "0.5}", "8,"])
    )
)
def test_last_score_on_the_scale_counts(pieces: list[str]) -> None:
    reply = "".join(pieces)
    try:
        number: float | None = score(reply)
    except Unparsable:
        number = None
    assert number == naive_score(reply)
