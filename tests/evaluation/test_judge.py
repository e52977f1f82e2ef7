"""Judges that answer well, badly, late and never; and WildBench, from the hub's columns to a
result, on a miniature."""

import json
import re
import string
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from asking import Said, answered, protocol, samples
from endpoint import Endpoint, Reply, endpoint, message
from hypothesis import given
from hypothesis import strategies as some

from moe_lab.config import BenchmarkConfig, JudgeConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation import Policy, mirror, run, suite
from moe_lab.evaluation import judge as judges
from moe_lab.evaluation.harnesses.wildbench import HARNESS, question, template
from moe_lab.evaluation.judge import Unparsable, score, verdicts
from moe_lab.study.failures import error_document

pytestmark = pytest.mark.slow

KEY = "MOE_LAB_TEST_KEY"


SOON = {"Retry-After": "0.01"}
"""An endpoint that says so is asked again without the usual wait."""


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "a-secret\n")
    monkeypatch.setattr(judges, "ATTEMPTS", 4)
    monkeypatch.setattr(judges, "PARALLEL", 4)


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
    return message(
        f'```json\n{{"strengths": "a \\"b\\"", "weaknesses": "c", "score": "{number}"}}\n```'
    )


def test_an_endpoint_that_misbehaves_for_a_while_gives_every_score_and_is_asked_once(
    tmp_path: Path,
) -> None:
    answers = scripted(
        busy=[Reply({}, 429, SOON), Reply({}, 408, SOON), scored(8)],
        broken=[Reply("oops", 500, SOON), Reply("<html>", 503, SOON), scored(7)],
        garbage=[message("I like it."), Reply("<html>hello</html>"), scored(6)],
        outside=[scored(11), scored(0), scored(5)],
        aloud=[
            message('The form is {"score": "1..10"}, first I thought "score": 2, but {"score": 4}')
        ],
        thinking=[message('<think>{"score": "3"}? no</think>{"score": "8"}')],
        undecided=[
            message('<think>{"score": 3}, but'),
            message('{"score": 8}? No.</think>Good.'),
            scored(3),
        ],
        broken_off=[
            *(message('{"score": 3}', finish_reason=reason) for reason in ("abort", "error")),
            scored(9),
        ],
        cut=[
            message('{"score": 1', finish_reason="length"),
            message(None, finish_reason="length"),
            scored(10),
        ],
    )
    prompts = [
        "busy",
        "broken",
        "garbage",
        "outside",
        "aloud",
        "thinking",
        "undecided",
        "broken_off",
        "cut",
    ]
    scores = [8, 7, 6, 5, 4, 8, 3, 9, 10]
    with endpoint(answers) as at:
        found = verdicts(settings(at), tmp_path, prompts, 0)
        assert [verdict.score for verdict in found] == scores
        assert len(at.asked) == 7 * 3 + 2 * 1
        again = verdicts(settings(at), tmp_path, prompts, 0)
        assert [verdict.score for verdict in again] == scores
        assert len(at.asked) == 23
    for body, headers in zip(at.asked, at.headers, strict=True):
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("some/judge", 0.0, 2048)
        assert headers["authorization"] == "Bearer a-secret"


def test_a_reply_is_used_again_for_the_same_judge_settings_and_prompt_only(tmp_path: Path) -> None:
    with endpoint(lambda body: scored(3)) as at, endpoint(lambda body: scored(9)) as moved:
        first = settings(at)
        verdicts(first, tmp_path, ["p"], 0)
        same = replace(first, url=moved.url, key_variable="ANOTHER")
        assert verdicts(same, tmp_path, ["p"], 0)[0].score == 3 and not moved.asked
        changes: list[dict[str, Any]] = [
            {"model": "other"},
            {"max_tokens": 99},
            {"extra": {"reasoning_effort": "low"}},
        ]
        for number, change in enumerate(changes, 1):
            assert verdicts(replace(same, **change), tmp_path, ["p"], 0)[0].score == 9
            assert len(moved.asked) == number
        assert moved.asked[-1]["reasoning_effort"] == "low"
        assert verdicts(same, tmp_path, ["q"], 0)[0].score == 9
    kept = "".join(file.read_text() for file in tmp_path.rglob("*.json"))
    assert "a-secret" not in kept and "127.0.0.1" not in kept


def test_failures_are_not_kept_and_damaged_replies_are_asked_for_again(tmp_path: Path) -> None:
    with endpoint(scripted(p=[message("no"), message("no"), message("no"), scored(2)])) as at:
        asking = partial(verdicts, settings(at), tmp_path)
        verdict = asking(["p"], 1)[0]
        assert (
            verdict.score is None
            and '3 replies in a row without a usable score (no "score")' in verdict.reply
        )
        assert not list(tmp_path.rglob("*.json"))
        assert asking(["p"], 0)[0].score == 2
        (file,) = tmp_path.rglob("*.json")
        file.write_text(file.read_text()[:-9])
        assert asking(["p"], 0)[0].score == 2 and len(at.asked) == 5
        assert json.loads(file.read_text())["judge"]["model"] == "some/judge"


@pytest.mark.parametrize(
    ("reply", "asked", "says"),
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
def test_what_is_refused_ends_it_at_once_and_what_is_no_reply_is_asked_for_three_times(
    reply: Reply, asked: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step does not know judge.url, which may be mended before the next run."""
    monkeypatch.setattr(judges, "PARALLEL", 1)
    # of which those behind the first are called off
    prompts = ["p"] if asked == 3 else [f"p{n}" for n in range(40)]
    with endpoint(lambda _: reply) as at, pytest.raises(Unavailable) as caught:
        verdicts(settings(at), tmp_path, prompts, len(prompts) - 1)
    assert len(at.asked) == asked and says in str(caught.value) and "\n" not in str(caught.value)
    assert error_document(caught.value)["transient"]


@pytest.mark.parametrize(("wait", "each"), [("0.01", 4), ("3600", 1)])
def test_an_endpoint_that_stays_busy_ends_it_after_bounded_attempts(
    tmp_path: Path, wait: str, each: int
) -> None:
    """It is asked again as it says, but not when it says that this would take longer than two
    minutes."""
    with (
        endpoint(lambda _: Reply({}, 429, {"Retry-After": wait})) as at,
        pytest.raises(Unavailable) as caught,
    ):
        verdicts(settings(at), tmp_path, [f"p{n}" for n in range(100)], 1)
    assert "2 of 100 answers, and at most 1 may go without: HTTP 429" in str(caught.value)
    # 4 at a time, and no new ones once it is clear
    assert 2 * each <= len(at.asked) <= 4 * 4 * each
    assert error_document(caught.value)["transient"] and not error_document(caught.value)["trace"]


def test_slow_endpoints_and_wrong_ports_end_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judges, "TIMEOUT", 1)
    monkeypatch.setattr(judges, "ATTEMPTS", 2)
    never = threading.Event()
    with endpoint(lambda _: never.wait() and scored(5)) as at:
        with pytest.raises(Unavailable, match="no answer within 1 s"):
            verdicts(settings(at), tmp_path, ["p"], 0)
        never.set()
        assert len(at.asked) == 2
    with pytest.raises(Unavailable, match=r"no connection .*refused"):
        verdicts(settings(at), tmp_path, ["p"], 0)


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


@given(
    some.lists(
        some.sampled_from(['"score":', '"score": "', *' "},107.-\nx', "/10", '10"', "0.5}", "8,"])
    )
)
def test_the_last_score_counts_when_it_is_whole_and_on_the_scale(pieces: list[str]) -> None:
    reply = "".join(pieces)
    try:
        found: float | None = score(reply)
    except Unparsable:
        found = None
    assert found == naive_score(reply)


BENCHMARK = BenchmarkConfig("stories", "wildbench", "wildbench", chat=True)


def test_a_template_is_filled_once(tmp_path: Path) -> None:
    conversation = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "A poem about {$history}!"},
    ]
    (tmp_path / "own.md").write_text("{$history}|{$user_query}|{$model_output}|{$checklist}|{}")
    one = replace(BENCHMARK, parameters={"template": str(tmp_path / "own.md")})
    filled = question(template(one), conversation, "{$checklist} {$x}", ["Rhymes?", "Short?"])
    assert filled == (
        "USER: Hello\n\nASSISTANT: Hi|A poem about {$history}!|{$checklist} {$x}|- Rhymes?\n- "
        "Short?|{}"
    )
    shipped = question(template(BENCHMARK), conversation, "A rose", ["Rhymes?"])
    for part in (
        "ASSISTANT: Hi",
        "A poem about",
        "A rose",
        "- Rhymes?",
        '"strengths"',
        '"weaknesses"',
        '"score"',
    ):
        assert part in shipped


def test_everything_wrong_with_a_judge_is_said_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = JudgeConfig("m", "http://localhost:1/v1")

    def problems(**changes: Any) -> str:
        benchmark = replace(BENCHMARK, **{"judge": judge, **changes})
        return " & ".join(HARNESS.missing(benchmark, Policy(allow_judge=True)))

    assert problems() == ""
    assert "judge=gpt_oss_120b" in problems(judge=None)
    assert "chat=false: expected chat=true" in " ".join(
        suite.wrong([replace(BENCHMARK, chat=False)])
    )
    distant = replace(judge, url="https://x.org/v1", key_variable=KEY)
    assert problems(judge=distant) == ""
    monkeypatch.delenv(KEY)
    assert f"judge.key_variable={KEY}" in problems(judge=distant)
    assert "cannot be read" in problems(parameters={"template": str(tmp_path / "none.md")})
    for places in (
        "{$user_query} {$checklist}",
        "{$user_query} {$model_output} {$model_ouput} {$checklist}",
    ):
        (tmp_path / "a.md").write_text(places)
        assert "expected {$history}, {$user_query}" in problems(
            parameters={"template": str(tmp_path / "a.md")}
        )


ALLOWED = Policy(allow_judge=True)
CREATIVE = [number for number in range(1024) if number % 7 == 0][:146]


def row(number: int) -> dict[str, Any]:
    """What is read of one of the hub's rows; odd ones have a turn before."""
    turns = [("user", "A line, please."), ("assistant", "A line.")] if number % 2 else []
    turns.append(("user", f"Now tale {number}, please."))
    return {
        "session_id": f"session{number}#0",
        "conversation_input": [
            {"role": role, "content": content, "toxic": False} for role, content in turns
        ],
        "checklist": [f"Is it about {number}?", "Is it a tale?"],
        "primary_tag": "Creative Writing" if number in CREATIVE else "Math",
    }


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> BenchmarkConfig:
    """conf/benchmark/wildbench.yaml with a mirror made of a file in the hub's columns."""
    folder = tmp_path_factory.mktemp("wildbench")
    parquet.write_table(
        arrow.Table.from_pylist([row(number) for number in range(1024)]), folder / "v2.parquet"
    )
    (benchmark,) = mirror.benchmarks(["wildbench"], str(folder / "data"))
    mirror.make(benchmark, folder / "v2.parquet")
    return benchmark


def mark(body: dict[str, Any]) -> Reply:
    """A judge whose score is the number in the reply; of 0 it says nothing useful."""
    reply = re.search(r"<reply>\s*(\d+)", body["messages"][0]["content"])
    assert reply is not None
    return message(
        "hm"
        if reply[1] == "0"
        else json.dumps({"strengths": "a", "weaknesses": "b", "score": reply[1]})
    )


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with endpoint(mark) as found:
        yield found


@pytest.fixture
def judged(published: BenchmarkConfig, at: Endpoint) -> BenchmarkConfig:
    return replace(published, judge=JudgeConfig("fake/judge", at.url))


def test_the_questions_are_the_conversations_of_creative_writing(
    published: BenchmarkConfig,
) -> None:
    contents = [turn["content"] for turn in HARNESS.items(published)[1].requests[0].prompt]
    assert contents == ["A line, please.", "A line.", "Now tale 7, please."]
    assert len(HARNESS.items(replace(published, parameters={}, expected=1024))) == 1024
    assert len(HARNESS.items(replace(published, limit=3))) == 3
    with pytest.raises(
        UserError, match=r"parameters\.tag=Creative writing.*did you mean Creative Writing"
    ):
        HARNESS.items(replace(published, parameters={"tag": "Creative writing"}))


def test_scores_without_thoughts_become_shares(
    judged: BenchmarkConfig, at: Endpoint, tmp_path: Path
) -> None:
    """What is empty, and a thought that does not end, whatever it drafts, is no answer and not
    asked about."""
    names, scores = (
        [f"session{number}#0" for number in CREATIVE],
        [number % 10 + 1 for number in range(146)],
    )
    outputs = [f"{score} and half a character \ud83d" for score in scores]
    thoughts = {
        3: "<think>\n9?\n</think>\n\n4",
        13: "9?</think>4",
        7: "<think>\n9, or",
        9: "<think>9</think>\n",
    }
    for number, text in {**thoughts, 5: " \n", 20: "0"}.items():
        outputs[number] = text
    (result,) = run.grade(answered(judged, outputs), judged, tmp_path, policy=ALLOWED)
    counted = [
        1 if number in (5, 7, 9) else score for number, score in enumerate(scores) if number != 20
    ]
    assert result["n"] == 145 and result["expected"] == 146
    assert result["score"] == pytest.approx(sum((score - 1) / 9 for score in counted) / 145)
    assert len(at.asked) == 142 + 3
    assert not any(
        "<reply>\n9" in str(body["messages"]) or "think" in str(body["messages"])
        for body in at.asked
    )

    about = protocol(tmp_path)
    assert about["unasked"] == 3 and list(about["unscored"]) == [names[20]]
    assert about["unfinished_thoughts"] == [names[7]]
    assert about["judge"] == {"model": "fake/judge", "max_tokens": 2048, "extra": {}}
    assert (
        "Now tale 0, please." in about["judge_prompt"]
        and "- Is it about 0?" in about["judge_prompt"]
    )
    assert at.url not in json.dumps(about) and "OPENAI_API_KEY" not in json.dumps(about)

    rows = samples(tmp_path)
    assert [one["item"] for one in rows] == [*names[:20], *names[21:]]
    assert rows[3]["outcome"] == pytest.approx(3 / 9) and '"score": "4"' in rows[3]["extracted"]
    assert rows[3]["thought"] + rows[3]["output"] == outputs[3]
    assert rows[5]["outcome"] == 0 and "without asking" in rows[5]["extracted"]
    assert rows[7]["outcome"] == 0 and "thought" in rows[7]["extracted"]

    at.asked.clear()  # grading again asks only for what has no score
    run.grade(answered(judged, outputs), judged, tmp_path, policy=ALLOWED)
    assert len(at.asked) == 3


def test_too_long_conversations_count_as_nothing_written(
    judged: BenchmarkConfig, at: Endpoint, tmp_path: Path
) -> None:
    """Those with a turn before have nine words, the others four."""
    benchmark = replace(judged, max_length=8, max_new_tokens=4)
    answers = run.answer(
        Said(lambda _: "7", "{% for m in messages %}{{ m.content }} {% endfor %}"), benchmark
    )
    long = [f"session{number}#0" for number in CREATIVE if number % 2]
    assert [answer.item for answer in answers if answer.reply.ended == "too_long"] == long and len(
        long
    ) == 73
    (result,) = run.grade(answers, benchmark, tmp_path, policy=ALLOWED)
    assert result["n"] == result["expected"] == 146 and len(at.asked) == 73
    assert result["score"] == pytest.approx(73 / 146 * 6 / 9)
    assert protocol(tmp_path)["too_long"] == long
    assert {row["item"] for row in samples(tmp_path) if "do not fit" in row["extracted"]} == set(
        long
    )


def test_too_few_scores_or_no_leave_to_ask_fail_for_now(
    judged: BenchmarkConfig, at: Endpoint, tmp_path: Path
) -> None:
    """Both may be otherwise in the next run."""
    outputs = answered(judged, ["0"] * 2 + ["7"] * 144)
    with pytest.raises(Unavailable, match="allow_judge=false"):
        run.grade(outputs, judged, tmp_path / "out", policy=Policy())
    assert not at.asked and not (tmp_path / "out").exists()
    with pytest.raises(
        Unavailable, match="2 of 146 answers, and at most 1 may go without: 3 replies in a row"
    ):
        run.grade(outputs, judged, tmp_path / "out", policy=ALLOWED)


def test_the_judge_identifies_a_result_and_neither_place_nor_key_do(
    judged: BenchmarkConfig, tmp_path: Path
) -> None:
    identity = HARNESS.identity(judged)
    judge = judged.judge
    assert judge is not None
    assert (
        HARNESS.identity(
            replace(judged, judge=replace(judge, url="http://h:1/v1", key_variable="K"))
        )
        == identity
    )
    for change in ({"model": "m"}, {"max_tokens": 9}, {"extra": {"seed": 1}}):
        assert HARNESS.identity(replace(judged, judge=replace(judge, **change))) != identity
    (tmp_path / "t.md").write_text("{$user_query} {$model_output} {$checklist}")
    other = replace(
        judged, parameters={"tag": "Creative Writing", "template": str(tmp_path / "t.md")}
    )
    assert HARNESS.identity(other) != identity and HARNESS.question_identity(
        other
    ) == HARNESS.question_identity(judged)
