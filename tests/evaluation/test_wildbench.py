"""WildBench, from the hub's columns to a result, on rows written for the test."""

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from endpoint import Endpoint, Reply, endpoint, message
from fake_engines import (
    ScriptedEngine,
    assert_only_answers_are_graded,
    made_up_answers,
    protocol,
    samples,
)
from harness_files import GARBAGE
from hypothesis import example, given, settings

from moe_lab.config import BenchmarkConfig, JudgeConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation import Policy, mirror, run
from moe_lab.evaluation.answers import collect_answers
from moe_lab.evaluation.harness import benchmark_errors
from moe_lab.evaluation.harnesses.wildbench import HARNESS, question, template

KEY = "MOE_LAB_TEST_KEY"
JUDGE = JudgeConfig("m", "http://localhost:1/v1")
BENCHMARK = BenchmarkConfig("stories", "wildbench", "wildbench", chat=True, judge=JUDGE)
CONVERSATION = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "A poem about {$history}!"},
]
ALLOWED = Policy(allow_judge=True)
CREATIVE = [number for number in range(1024) if number % 7 == 0][:146]


def test_judge_template_is_filled_once(tmp_path: Path) -> None:
    (tmp_path / "own.md").write_text("{$history}|{$user_query}|{$model_output}|{$checklist}|{}")
    benchmark = replace(BENCHMARK, parameters={"template": str(tmp_path / "own.md")})
    filled = question(template(benchmark), CONVERSATION, "{$checklist} {$x}", ["Rhymes?", "Short?"])
    history = "USER: Hello\n\nASSISTANT: Hi"
    parts = [history, "A poem about {$history}!", "{$checklist} {$x}", "- Rhymes?\n- Short?", "{}"]
    assert filled.split("|") == parts


def test_default_judge_template_has_all_parts() -> None:
    filled = question(template(BENCHMARK), CONVERSATION, "A rose", ["Rhymes?"])
    for part in ("ASSISTANT: Hi", "A poem about", "A rose", "- Rhymes?"):
        assert part in filled
    for field in ("strengths", "weaknesses", "score"):
        assert f'"{field}"' in filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{$user_query} {$checklist}", "expected {$history}, {$user_query}"),
        (
            "{$user_query} {$model_output} {$model_ouput} {$checklist}",
            "expected {$history}, {$user_query}",
        ),
    ],
)
def test_templates_that_cannot_be_filled(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "template.md"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        template(replace(BENCHMARK, parameters={"template": str(file)}))


def test_missing_judge_and_key_are_reported(published: BenchmarkConfig, monkeypatch: Any) -> None:
    def missing(judge: JudgeConfig | None) -> str:
        return " ".join(HARNESS.missing_requirements(replace(published, judge=judge), ALLOWED))

    distant = replace(JUDGE, url="https://x.org/v1", key_variable=KEY)
    monkeypatch.setenv(KEY, "a-secret")
    assert missing(JUDGE) == missing(distant) == ""
    assert "judge=gpt_oss_120b" in missing(None)
    monkeypatch.delenv(KEY)
    assert f"judge.key_variable={KEY}" in missing(distant)


def test_wildbench_requires_a_chat_template() -> None:
    (problem,) = (
        sentence
        for sentence in benchmark_errors([replace(BENCHMARK, chat=False)])
        if "chat" in sentence
    )
    assert "chat=false: wildbench needs chat" in problem


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
    """A judge whose score is the number in the reply; its reply to 0 has no score."""
    reply = re.search(r"<reply>\s*(\d+)", body["messages"][0]["content"])
    assert reply is not None
    return message(
        "hm"
        if reply[1] == "0"
        else json.dumps({"strengths": "a", "weaknesses": "b", "score": reply[1]})
    )


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with endpoint(mark) as judge:
        yield judge


@pytest.fixture
def judged(published: BenchmarkConfig, judge: Endpoint) -> BenchmarkConfig:
    return replace(published, judge=JudgeConfig("fake/judge", judge.url))


def test_items_are_the_conversations_with_the_tag(published: BenchmarkConfig) -> None:
    contents = [turn["content"] for turn in [*HARNESS.items(published)][1].requests[0].prompt]
    assert contents == ["A line, please.", "A line.", "Now tale 7, please."]
    assert len([*HARNESS.items(replace(published, parameters={}, expected=1024))]) == 1024
    assert len([*HARNESS.items(replace(published, limit=3))]) == 3
    with pytest.raises(UserError, match=r"parameters\.tag=Creative writing.*did you mean"):
        next(HARNESS.items(replace(published, parameters={"tag": "Creative writing"})))


OUTPUTS = {
    3: "<think>\n9?\n</think>\n\n4",
    5: " \n",
    7: "<think>\n9, or",
    9: "<think>9</think>\n",
    13: "9?</think>4",
    20: "0",
}
"""Number of an answer -> its text, where this is not a score alone. 5, 7 and 9 are empty without
their thoughts, and the judge gives 20 no score."""
SCORES = [1 if number in (5, 7, 9) else number % 10 + 1 for number in range(146)]


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(text=GARBAGE, reply=GARBAGE)
@example(text="\ud800", reply='{"score": 1e999}')
def test_garbage_costs_only_its_own_item(published: BenchmarkConfig, text: str, reply: str) -> None:
    """Garbage of the model, and of the judge for another answer."""

    def judge(body: dict[str, Any]) -> Reply:
        is_disturbed = "the disturbed answer" in body["messages"][0]["content"]
        return message(reply if is_disturbed else '{"score": 4}')

    texts = [text, "the disturbed answer", *["another answer"] * 144]
    with (
        tempfile.TemporaryDirectory() as cache,
        pytest.MonkeyPatch.context() as patch,
        endpoint(judge) as server,
    ):
        patch.setenv("XDG_CACHE_HOME", cache)
        benchmark = replace(published, judge=JudgeConfig("fake/judge", server.url))
        graded = HARNESS.grade(made_up_answers(benchmark, texts), benchmark, ALLOWED)
    outcomes = {sample["item"]: sample["outcome"] for sample in graded.samples}
    first, second, *others = [f"session{number}#0" for number in CREATIVE]
    assert outcomes[first] == (pytest.approx(1 / 3) if text.strip() else 0)
    assert list(graded.protocol["unscored"]) == [second]
    assert {item: outcomes[item] for item in others} == dict.fromkeys(others, pytest.approx(1 / 3))


@pytest.mark.slow
def test_the_result_is_the_mean_share_of_the_scale(
    judged: BenchmarkConfig, judge: Endpoint, tmp_path: Path
) -> None:
    """Of 146 answers, most of which are the score that the judge is to give. Neither empty ones nor
    thoughts are sent to the judge."""
    texts = [OUTPUTS.get(number, f"{number % 10 + 1} and half a \ud83d") for number in range(146)]
    (result,) = run.grade(made_up_answers(judged, texts), judged, tmp_path, policy=ALLOWED)
    shares = [(score - 1) / 9 for number, score in enumerate(SCORES) if number != 20]
    assert (result["n"], result["expected"]) == (145, 146)
    assert result["score"] == pytest.approx(sum(shares) / 145)
    sent = [str(body["messages"]) for body in judge.requests]
    assert len(sent) == 142 + 3, "three requests for the answer without a score"
    assert not any("<reply>\n9" in text or "think" in text for text in sent)

    content = protocol(tmp_path)
    assert list(content["unscored"]) == [f"session{CREATIVE[20]}#0"]
    assert content["unfinished_thoughts"] == [f"session{CREATIVE[7]}#0"]
    assert content["judge"] == {"model": "fake/judge", "max_tokens": 2048, "extra": {}}
    assert judge.url not in json.dumps(content)
    assert "OPENAI_API_KEY" not in json.dumps(content)

    rows = samples(tmp_path)
    assert [row["item"] for row in rows] == [
        f"session{number}#0" for number in CREATIVE if number != CREATIVE[20]
    ]
    assert rows[3]["outcome"] == pytest.approx(3 / 9)
    assert '"score": "4"' in rows[3]["extracted"]
    assert rows[3]["thought"] + rows[3]["output"] == OUTPUTS[3]
    assert rows[5]["outcome"] == 0
    assert "1 without a request" in rows[5]["extracted"]
    assert rows[7]["outcome"] == 0
    assert rows[7]["output"] is None

    # grading again requests missing scores only
    judge.requests.clear()
    run.grade(made_up_answers(judged, texts), judged, tmp_path, policy=ALLOWED)
    assert len(judge.requests) == 3


@pytest.mark.slow
def test_too_long_conversations_count_as_empty_answers(
    judged: BenchmarkConfig, judge: Endpoint, tmp_path: Path
) -> None:
    """Those with a turn before have nine words, the others four."""
    benchmark = replace(judged, max_length=8, max_new_tokens=4)
    engine = ScriptedEngine(lambda _: "7", "{% for m in messages %}{{ m.content }} {% endfor %}")
    (answers,) = collect_answers(engine, [(benchmark, run.list_items(benchmark))])
    long = [f"session{number}#0" for number in CREATIVE if number % 2]
    assert len(long) == 73
    assert [answer.item for answer in answers if answer.reply.ended == "too_long"] == long
    (result,) = run.grade(answers, benchmark, tmp_path, policy=ALLOWED)
    assert result["n"] == result["expected"] == 146
    assert len(judge.requests) == 73
    assert result["score"] == pytest.approx(73 / 146 * 6 / 9)
    assert protocol(tmp_path)["too_long"] == long
    rows = [row for row in samples(tmp_path) if row["ended"] == "too_long"]
    assert [row["item"] for row in rows] == long


@pytest.mark.slow
def test_thoughts_of_several_answers_are_not_judged(
    judged: BenchmarkConfig, judge: Endpoint, tmp_path: Path
) -> None:
    answers = [("10", "1")] * 3
    assert_only_answers_are_graded(replace(judged, limit=3), answers, tmp_path / "out", ALLOWED)
    assert not any("hm" in str(body["messages"]) for body in judge.requests)


@pytest.mark.slow
def test_no_permission_and_too_few_scores_are_unavailable(
    judged: BenchmarkConfig, judge: Endpoint, tmp_path: Path
) -> None:
    """Both may be different in the next run."""
    outputs = made_up_answers(judged, ["0"] * 2 + ["7"] * 144)
    with pytest.raises(Unavailable, match="allow_judge=false"):
        run.grade(outputs, judged, tmp_path / "out", policy=Policy())
    assert not judge.requests
    assert not (tmp_path / "out").exists()
    with pytest.raises(
        Unavailable, match="2 of 146 answers, and at most 1 may go without: 3 replies in a row"
    ):
        run.grade(outputs, judged, tmp_path / "out", policy=ALLOWED)


def test_identity_lacks_address_and_key_of_the_judge(
    published: BenchmarkConfig,
) -> None:
    judged = replace(published, judge=JUDGE)
    identity = HARNESS.identity(judged)
    moved = replace(JUDGE, url="http://h:1/v1", key_variable="K")
    assert HARNESS.identity(replace(judged, judge=moved)) == identity
    for change in ({"model": "other"}, {"max_tokens": 9}, {"extra": {"seed": 1}}):
        assert HARNESS.identity(replace(judged, judge=replace(JUDGE, **change))) != identity


def test_judge_template_changes_grades_not_questions(
    published: BenchmarkConfig, tmp_path: Path
) -> None:
    (tmp_path / "t.md").write_text("{$user_query} {$model_output} {$checklist}")
    parameters = {**published.parameters, "template": str(tmp_path / "t.md")}
    judged = replace(published, judge=JUDGE)
    changed = replace(judged, parameters=parameters)
    assert HARNESS.identity(changed) != HARNESS.identity(judged)
    assert HARNESS.question_identity(changed) == HARNESS.question_identity(judged)
