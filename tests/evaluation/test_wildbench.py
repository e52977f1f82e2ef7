"""WildBench from the hub's columns to a result, on a miniature: as many rows as the published set, of our own words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from asking import Said, answered
from endpoint import Endpoint, Reply, endpoint, message

from moe_lab.config import BenchmarkConfig, JudgeConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation import Policy, harness, mirror, run, suite
from moe_lab.evaluation.harnesses import wildbench

pytestmark = pytest.mark.slow

ALLOWED = Policy(allow_judge=True)
CREATIVE = [number for number in range(1024) if number % 7 == 0][:146]


def turn(role: str, content: str) -> dict[str, Any]:
    return {"content": content, "language": "English", "redacted": False, "role": role, "toxic": False}


def row(number: int) -> dict[str, Any]:
    before = [turn("user", "A line, please."), turn("assistant", "A line.")] if number % 2 else []
    return {
        "id": str(number),
        "session_id": f"session{number}#0",
        "conversation_input": [*before, turn("user", f"Now tale {number}, please.")],
        "references": {"gpt-4": "Once."},
        "length": 20,
        "checklist": [f"Is it about {number}?", "Is it a tale?"],
        "intent": "a tale",
        "primary_tag": "Creative Writing" if number in CREATIVE else "Math",
        "secondary_tags": ["Editing"],
    }


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> BenchmarkConfig:
    """conf/benchmark/wildbench.yaml with a mirror made of a file in the hub's columns."""
    folder = tmp_path_factory.mktemp("wildbench")
    parquet.write_table(arrow.Table.from_pylist([row(number) for number in range(1024)]), folder / "v2.parquet")
    (benchmark,) = mirror.benchmarks(["wildbench"], str(folder / "data"))
    mirror.make(benchmark, folder / "v2.parquet")
    return benchmark


def mark(body: dict[str, Any]) -> Reply:
    """A judge whose score is the number in the reply; of 0 it says nothing useful."""
    reply = re.search(r"<reply>\s*(\d+)", body["messages"][0]["content"])
    assert reply is not None
    return message("hm" if reply[1] == "0" else json.dumps({"strengths": "a", "weaknesses": "b", "score": reply[1]}))


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with endpoint(mark) as found:
        yield found


def judged(benchmark: BenchmarkConfig, at: Endpoint, **changes: Any) -> BenchmarkConfig:
    return replace(benchmark, judge=JudgeConfig("fake/judge", at.url), **changes)


def test_the_questions_are_the_conversations_of_creative_writing(published: BenchmarkConfig) -> None:
    questions = wildbench.items(published)
    assert [question.name for question in questions] == [f"session{number}#0" for number in CREATIVE]
    assert questions[1].requests[0].prompt == [
        {"role": "user", "content": "A line, please."},
        {"role": "assistant", "content": "A line."},
        {"role": "user", "content": "Now tale 7, please."},
    ]
    assert len(wildbench.items(replace(published, parameters={}, expected=1024))) == 1024
    assert len(wildbench.items(replace(published, limit=3))) == 3
    with pytest.raises(UserError, match=r"parameters\.tag=Creative writing.*did you mean Creative Writing"):
        wildbench.items(replace(published, parameters={"tag": "Creative writing"}))


def test_scores_become_shares_and_what_is_empty_is_not_asked(
    published: BenchmarkConfig, at: Endpoint, tmp_path: Path
) -> None:
    benchmark = judged(published, at)
    scores = [number % 10 + 1 for number in range(146)]
    outputs = [f"{score} and half a character \ud83d" for score in scores]
    outputs[5], outputs[9], outputs[20] = " \n", "", "0"
    (result,) = run.grade(answered(benchmark, outputs), benchmark, tmp_path, policy=ALLOWED)
    counted = [1 if number in (5, 9) else score for number, score in enumerate(scores) if number != 20]
    assert result["n"] == 145 and result["expected"] == 146
    assert result["score"] == pytest.approx(sum((score - 1) / 9 for score in counted) / 145)
    assert len(at.asked) == 143 + 3

    document = json.loads((tmp_path / "result.json").read_text())["protocol"]
    coverage = document["coverage"]
    assert (coverage["items"], coverage["empty"], coverage["scored"], coverage["cached"]) == (146, 2, 145, 0)
    assert list(coverage["unscored"]) == ["session140#0"] and coverage["mean"] == pytest.approx(sum(counted) / 145)
    assert document["judge"] == {"model": "fake/judge", "max_tokens": 2048, "extra": {}}
    assert "Now tale 0, please." in document["judge_prompt"] and "- Is it about 0?" in document["judge_prompt"]
    assert at.url not in json.dumps(document) and "OPENAI_API_KEY" not in json.dumps(document)

    rows = parquet.read_table(tmp_path / "samples.parquet").to_pylist()
    assert [one["item"] for one in rows] == [f"session{n}#0" for i, n in enumerate(CREATIVE) if i != 20]
    assert rows[3]["outcome"] == pytest.approx(3 / 9) and '"score": "4"' in rows[3]["extracted"]
    assert rows[5]["outcome"] == 0 and "without asking" in rows[5]["extracted"]

    at.asked.clear()  # grading again asks only for what has no score
    run.grade(answered(benchmark, outputs), benchmark, tmp_path, policy=ALLOWED)
    assert len(at.asked) == 3


def test_a_judge_sees_the_answer_and_not_the_thought_before_it(
    published: BenchmarkConfig, at: Endpoint, tmp_path: Path
) -> None:
    """An unfinished thought is no answer, whatever it drafts, and is counted apart from what is empty."""
    benchmark = judged(published, at, limit=5)
    outputs = ["<think>\n9?\n</think>\n\n4", "9?</think>4", "<think>\n9, or", "<think>9</think>\n", "4"]
    (result,) = run.grade(answered(benchmark, outputs), benchmark, tmp_path, policy=ALLOWED)
    assert result["score"] == pytest.approx(3 * 3 / 9 / 5) and len(at.asked) == 3
    assert not any("9" in str(body["messages"]).partition("<reply>")[2].partition("</reply>")[0] for body in at.asked)
    items = [f"session{number}#0" for number in CREATIVE]
    protocol = json.loads((tmp_path / "result.json").read_text())["protocol"]
    assert protocol["unfinished_thoughts"] == [items[2]] and protocol["coverage"]["empty"] == 2
    rows = parquet.read_table(tmp_path / "samples.parquet").to_pylist()
    assert rows[2]["outcome"] == 0 and "thought" in rows[2]["extracted"]
    assert rows[0]["thought"] + rows[0]["output"] == outputs[0]


SEVEN = Said(lambda prompt: "7", "{% for m in messages %}{{ m.content }} {% endfor %}")
"""Answers every conversation with 7."""


def test_conversations_that_are_too_long_count_as_nothing_written(
    published: BenchmarkConfig, at: Endpoint, tmp_path: Path
) -> None:
    """Those with a turn before have nine words, the others four."""
    benchmark = judged(published, at, max_length=8, max_new_tokens=4)
    asked = run.answer(SEVEN, benchmark)
    long = [f"session{number}#0" for number in CREATIVE if number % 2]
    assert [answer.item for answer in asked if answer.reply.ended == "too_long"] == long and len(long) == 73
    harness.write_answers(asked, tmp_path / run.ANSWERS)
    assert harness.read_answers(tmp_path / run.ANSWERS) == asked

    (result,) = run.grade(asked, benchmark, tmp_path, policy=ALLOWED)
    assert result["n"] == result["expected"] == 146 and len(at.asked) == 73
    assert result["score"] == pytest.approx(73 / 146 * 6 / 9)
    assert json.loads((tmp_path / "result.json").read_text())["protocol"]["too_long"] == long
    rows = parquet.read_table(tmp_path / "samples.parquet").to_pylist()
    assert {row["item"] for row in rows if "do not fit" in row["extracted"]} == set(long)


def test_more_than_one_in_a_hundred_without_a_score_fails(
    published: BenchmarkConfig, at: Endpoint, tmp_path: Path
) -> None:
    benchmark = judged(published, at)
    outputs = ["0"] * 2 + ["7"] * 144
    with pytest.raises(Unavailable, match="2 of 146 answers, and at most 1 may go without: 3 replies in a row"):
        run.grade(answered(benchmark, outputs), benchmark, tmp_path / "out", policy=ALLOWED)
    assert not (tmp_path / "out").exists()


def test_the_judge_is_part_of_what_a_result_is_and_neither_place_nor_key_are(
    published: BenchmarkConfig, at: Endpoint, tmp_path: Path
) -> None:
    benchmark = judged(published, at)
    own = suite.identity(benchmark)
    assert benchmark.judge is not None
    moved = replace(benchmark.judge, url="http://h:1/v1", key_variable="K")
    assert suite.identity(replace(benchmark, judge=moved)) == own
    for change in ({"model": "m"}, {"max_tokens": 9}, {"extra": {"seed": 1}}):
        assert suite.identity(replace(benchmark, judge=replace(benchmark.judge, **change))) != own
    (tmp_path / "t.md").write_text("{$user_query} {$model_output} {$checklist}")
    other = replace(benchmark, parameters={"tag": "Creative Writing", "template": str(tmp_path / "t.md")})
    assert suite.identity(other) != own and suite.question_identity(other) == suite.question_identity(benchmark)


def test_leave_to_ask_a_judge_may_come_with_the_next_run(
    published: BenchmarkConfig, at: Endpoint, tmp_path: Path
) -> None:
    benchmark = judged(published, at)
    with pytest.raises(Unavailable, match="allow_judge=false"):
        run.grade(answered(benchmark, ["7"] * 146), benchmark, tmp_path / "out", policy=Policy())
