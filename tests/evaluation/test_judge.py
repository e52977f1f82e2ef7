"""Judges behind endpoints that answer well, badly, late and never."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
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


CUT = '{"strengths": "a", "score": "10", "weaknesses": "it'
"""A reply that is cut off after its score."""


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
        ([message(text, finish_reason="length") for text in ('{"score": 1', None, CUT)], 10),
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
    # most of which are called off: the next may start before the first has ended the judge
    prompts = ["p"] if requests == 3 else [f"p{n}" for n in range(40)]
    with endpoint(lambda _: reply) as server, pytest.raises(Unavailable) as caught:
        verdicts(settings(server), tmp_path, prompts, len(prompts) - 1)
    assert requests <= len(server.requests) < max(requests + 1, len(prompts) // 4)
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
        with pytest.raises(Unavailable, match="timed out"):
            verdicts(settings(server), tmp_path, ["p"], 0)
        never.set()
        assert len(server.requests) == 2
    with pytest.raises(Unavailable, match=r"Connection error.*refused"):
        verdicts(settings(server), tmp_path, ["p"], 0)


COMPLETE = '"strengths": "", "weaknesses": "", "score"'
QUOTE = '{"score": "10"}'
FORM = '{"strengths": ..., "weaknesses": ..., "score": ...}'


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('{"strengths": "a", "score": "3"}\nNote: it ends with ' + QUOTE, 3),
        (f'It ends with {QUOTE}.\n\n{{"score": 3}}\nNot {QUOTE}!', 3),
        ('{"strengths": "a", "score": 3,}\nNote: it ends with ' + QUOTE, 3),
        (json.dumps({"strengths": f"It ends with {QUOTE}", "score": "3"}), 3),
        (f'{{"strengths": "It ends with {QUOTE}", "score": "3"}}', None),
        ('{"score": 8, "checklist": [{"item": "rhyme", "score": 3}]}', 8),
        ('{"score": 8, "checklist": [\n  {"item": "rhyme",\n "score": 3},\n', None),
        ('The form is {"score": "1..10"}, first I thought "score": 2, but {"score": 4}', 4),
        (f'The form is {FORM}.\n{{"strengths": "", "weaknesses": "", "score": 4}}', 4),
        (f'So {{"strengths": "a "b"", "score": 3, "x": {{{COMPLETE}: 9}}}}', None),
        ('{"score": 2}\nOn reflection:\n{"score": 4}', 4),
        (f'```json\n{{"strengths": "a\nb", "score": 6}}\n```\n{QUOTE}', 6),
        (f'<think>{QUOTE}? no</think>A set {{a, b}}. {{"score": "8"}}', 8),
        ('{"strengths": "the "big" words", "score": "8"}', 8),
        ("{'strengths': 'a', 'Score': 8}", 8),
        ('[{"score": " 7,5 "}]', 7.5),
        ('{"score": 7/10}', 7),
        ('{"score": "7 out of 10"}', 7),
        ('{"score": "7/5"}', None),
        ('{"strengths": "a", "score": "4", "weaknesses": "it is', 4),
        ('{"strengths": "a", "score": "1', None),
        ('{"score": NaN}', None),
        ('{"score": true}', None),
        ('{"score": {"score": 7}}', None),
        (f'{{"score": {"9" * 400}}}', None),
        (f'{{"score": {"9" * 5000}}}', None),
        ('"score": 7', None),
        ('{"score":' * 10_000, None),
    ],
)
def test_the_score_is_that_of_the_object_that_was_asked_for(
    reply: str, expected: float | None
) -> None:
    if expected is None:
        with pytest.raises(Unparsable):
            score(reply)
    else:
        assert score(reply) == expected


@given(
    some.lists(
        some.sampled_from(['"score":', '{"score": "', *"'\" {}[],107.-\nx\\", "/10", '10"', "8,"])
    )
)
def test_every_reply_has_a_score_on_the_scale_or_none(pieces: list[str]) -> None:
    with suppress(Unparsable):
        assert 1 <= score("".join(pieces)) <= 10


REASONING = {"temperature": None, "max_tokens": None, "max_completion_tokens": 4096}


def test_null_removes_a_field_of_the_request(tmp_path: Path) -> None:
    with endpoint(lambda _: scored(3)) as server:
        verdicts(settings(server, extra=REASONING), tmp_path, ["p"], 0)
    (body,) = server.requests
    assert set(body) == {"model", "messages", "max_completion_tokens"}
    for extra in ({"max_tokens": 9}, {"model": None}):
        with pytest.raises(ValueError, match=next(iter(extra))):
            settings("http://localhost:1/v1", extra=extra)
