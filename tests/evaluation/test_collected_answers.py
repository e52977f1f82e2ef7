"""Answers of engines: what is asked in which batch, wherever it was interrupted, and what is kept
of each text."""

import math
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from endpoint import completion, endpoint
from fake_engines import (
    PLAIN,
    ScriptedEngine,
    WordTokenizer,
    collect_replies,
    evaluate_into,
    generate,
    protocol,
    samples,
    vllm_with_replies,
    with_chat_template,
)
from harness_files import GENERATION, custom_task
from hypothesis import given
from hypothesis import strategies as st
from tiny import SimulatedKill
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AddedToken, PreTrainedTokenizerFast

from moe_lab.config import BenchmarkConfig, ModelConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import Policy
from moe_lab.evaluation.answers import ResultCache, collect_answers, render_prompt
from moe_lab.evaluation.engines import (
    Engine,
    GeneratedText,
    GenerationSettings,
    Prompt,
    Row,
    error_summary,
    generated_text,
)
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.engines.server import ServedModel
from moe_lab.evaluation.items import (
    Answer,
    Document,
    Item,
    Likelihood,
    Pair,
    Reply,
    Text,
    answer_after_thought,
    read_rows,
    text_measures,
    write_rows,
)
from moe_lab.models.files import local_folder
from moe_lab.models.load import load_tokenizer
from moe_lab.serving import vllm_engine

BENCHMARK = BenchmarkConfig("b", "lm_eval", "none", batch_size=2)


class Sums(Engine):
    """Writes prompts backwards; likelihoods are sums of tokens and depend on the batch. Ends after
    some batches."""

    def __init__(
        self, max_tokens: int = 1000, length: int | None = None, value: float | None = None
    ) -> None:
        self.tokenizer, self.template_arguments = WordTokenizer(), {}
        self.left = max_tokens
        self.max_length = length
        self.value = value
        self.batches_done: list[tuple[Any, ...]] = []

    def generate(self, prompts: Sequence[Prompt], batch_size: int) -> list[GeneratedText]:
        self._count(tuple(prompts))
        return [GeneratedText(f"{prompt.text[::-1]} {len(prompts)}") for prompt in prompts]

    def score(self, rows: Sequence[Row], batch_size: int) -> list[Likelihood]:
        self._count(tuple(rows))
        value = -len(rows) / 3 if self.value is None else self.value
        likelihoods = []
        for row in rows:
            scored = row.tokens[row.start :]
            is_likeliest = len(row.tokens) > 3
            likelihoods.append(Likelihood(value - sum(scored), len(scored), is_likeliest, 0.5, 1))
        return likelihoods

    def _count(self, batch: tuple[Any, ...]) -> None:
        if not self.left:
            raise SimulatedKill
        self.left -= 1
        self.batches_done.append(batch)


WORDS = st.lists(st.sampled_from(["a", "b", "\u2028", "\u00e4", "\ud800"]), max_size=5).map(
    " ".join
)
TEXTS = st.builds(
    Text,
    WORDS,
    st.integers(1, 2),
    st.just(()) | st.just(("x",)),
    st.none() | WORDS.map(" {}".format),
)
REQUESTS = (
    TEXTS
    | st.builds(Pair, WORDS.map("c {}".format), WORDS.map(" d{}".format))
    | st.just(Document("a b c d e"))
)


@given(
    requests=st.lists(st.lists(REQUESTS, min_size=1, max_size=3), max_size=6),
    kills=st.lists(st.integers(0, 3), max_size=3),
    torn=st.booleans(),
)
def test_killed_evaluations_resume_with_the_same_batches(
    tmp_path_factory: pytest.TempPathFactory,
    requests: list[list[Any]],
    kills: list[int],
    torn: bool,
) -> None:
    items = [Item(str(number), tuple(of_item)) for number, of_item in enumerate(requests)]
    sums = Sums()
    (expected,) = collect_answers(sums, [(BENCHMARK, items)])
    file = tmp_path_factory.mktemp("partial") / "computed.jsonl"
    progress: list[Any] = []
    for max_tokens in [*kills, 1000]:
        engine = Sums(max_tokens)
        with suppress(SimulatedKill):
            (result,) = collect_answers(engine, [(BENCHMARK, items)], ResultCache(file))
        progress += engine.batches_done
        if torn and file.exists():
            with file.open("a") as lines:
                lines.write('["0 cut of')
    assert result == expected
    assert progress == sums.batches_done
    write_rows(result, file)
    assert read_rows(Answer, file.read_bytes()) == expected


def test_items_are_read_as_they_were_written(tmp_path: Path) -> None:
    message = {"role": "user", "content": "\u00e9 \ud800"}
    items = [
        Item("0", (Text([message], 3, ("\n",), None, ({"name": "f"},), True),), "right"),
        Item("1", (Pair("c", " d"), Pair("f", "e")), "d", "hash"),
        Item("2", (Document("text", 5, 2), Text("p", 1, (), "r"))),
    ]
    contents = []
    for name in ("first", "second"):
        write_rows(items, tmp_path / name)
        contents.append((tmp_path / name).read_bytes())
    assert read_rows(Item, contents[0]) == items
    assert contents[0] == contents[1]


def test_recorded_answers_are_read_for_their_question_only(tmp_path: Path) -> None:
    engine = Sums()
    cache = ResultCache(tmp_path / "computed.jsonl")
    for prompt, max_tokens, settings in (
        ("a", 1, {}),
        ("a", 2, {}),
        ("a", 1, {"stop": ("x",)}),
        ("b", 1, {}),
        ("a", 1, {}),
    ):
        generate(engine, [prompt], max_tokens, cache=cache, **settings)
    assert len(engine.batches_done) == 4
    generate(engine, ["a"], 1, cache=ResultCache(file := tmp_path / "computed.jsonl"))
    assert len(engine.batches_done) == 4
    file.write_text(file.read_text().replace('"end"', '"enD"'))
    generate(engine, ["a"], 1, cache=ResultCache(file))
    assert len(engine.batches_done) == 5, "its record was changed on the disk"


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_likelihood_that_is_no_number_fails_and_is_recomputed(value: float, tmp_path: Path) -> None:
    items = [Item("1", (Pair("a", " b"),))]
    with pytest.raises(FloatingPointError, match=str(value)):
        collect_answers(
            Sums(value=value), [(BENCHMARK, items)], ResultCache(tmp_path / "computed.jsonl")
        )
    ((answer,),) = collect_answers(
        Sums(), [(BENCHMARK, items)], ResultCache(tmp_path / "computed.jsonl")
    )
    assert math.isfinite(answer.reply.windows[0].nats)


def test_rows_of_a_question_are_scored_together_longest_first() -> None:
    pairs = [
        Pair(f"q{number % 3} x", f" {answer}")
        for answer in ("a", "b c d", "e f")
        for number in range(3)
    ]
    engine = Sums()
    collect_answers(engine, [(BENCHMARK, [Item("1", tuple(pairs))])])
    (rows,) = engine.batches_done
    questions = [row.tokens[: row.start] for row in rows]
    assert len(rows) == 9
    assert questions == sorted(questions, key=questions.index)
    several = Sums()
    questions = [Item(str(n), (Pair(f"q{n}", " a"),)) for n in range(70)]
    collect_answers(several, [(BENCHMARK, questions)])
    assert [len(batch) for batch in several.batches_done] == [32, 32, 6]


def test_windows_of_a_document_cover_it_once() -> None:
    engine = Sums(length=16)
    items = [Item("1", (Document("a b c d e f g h", 3, windows=2),))]
    ((answer,),) = collect_answers(engine, [(BENCHMARK, items)])
    assert [window.tokens for window in answer.reply.windows] == [2, 2]
    for length, text in ((1, "a b"), (17, "a b"), (3, "a")):
        with pytest.raises(
            UserError, match=rf"length={re.escape(str(length))}|expected at least two"
        ):
            collect_answers(engine, [(BENCHMARK, [Item("1", (Document(text, length),))])])


HARMONY = "<|start|>assistant"
TEXTS = [
    ("It is 72.", "", "It is 72."),
    ("It is 72. Question: 5", "", "It is 7"),
    ("", "", ""),
    ("<think>70?</think>It is 72.", "", "It is 72."),
    ("<think>The Question: 48 + 24.</think>\n\nIt is 72.\nQuestion: 5", "", "It is 72.\n"),
    ("The Question: 48 + 24.</think>It is 72.", "", "It is 72."),
    ("<think>It could be 72, but wait, let me", "", None),
    ("It could be 72, but wait, let me", "<think>\n", None),
    ("The Question: 48 + 24.\n</think>\n\nIt is 72.", "<think>\n", "It is 72."),
    ("It is 72.", "<think>\n\n</think>\n\n", "It is 72."),
    ("<think>a</think>It is 24.\n<think>No: 48 and", "", None),
    ("<think>a</think>It is 24.\n<think>No.</think>It is 72.", "", "It is 72."),
    ("[THINK]Is it 24?[/THINK]It is 72.", "", "It is 72."),
    ("[THINK]It is 72", "", None),
    ("<seed:think>Is it 24?</seed:think>It is 72.", "", "It is 72."),
    (
        "<|channel|>analysis<|message|>24?<|end|><|start|>assistant<|channel|>final<|message|>It.",
        HARMONY,
        "It.",
    ),
    ("<|channel|>analysis<|message|>It is 72, or", HARMONY, None),
    ("analysisThe assistant final answer: 24?assistantfinalIt is 72.", HARMONY, "It is 72."),
    ("analysisIt is 72, or", HARMONY, None),
    ("It is 72.", HARMONY, "It is 72."),
    (
        "It writes <think> and </think> around it: 72.",
        "",
        "It writes <think> and </think> around it: 72.",
    ),
    ('text.split("</think>")[-1]', "", 'text.split("</think>")[-1]'),
    ("analysis of the text: 72", "", "analysis of the text: 72"),
    ("Sure. <think>24? No.</think>It is 72.", "", "It is 72."),
    ("Write:\n```\n<think>\n```\nIt is 72.", "", "Write:\n```\n<think>\n```\nIt is 72."),
    ("<THINK>24?</THINK>It is 72.", "", "It is 72."),
    ("<reasoning>24?</reasoning>It is 72.", "", "It is 72."),
    ("Is it 24?</analysis>It is 72.", "<analysis>\n", "It is 72."),
    ("<think>```\n24\n```</think>```\n72\n```", "", "```\n72\n```"),
    ("<|inner_prefix|>24?<|inner_suffix|>It is 72.", "", "It is 72."),
    ("Here's my thought process: 24? Here's my response: It is 72.", "", "It is 72."),
]
"""A text, how its prompt ends, and its answer; None where the thought before it does not end."""


@pytest.mark.parametrize(("text", "end", "answer"), TEXTS)
def test_text_is_split_into_thought_and_answer(text: str, end: str, answer: str | None) -> None:
    """The first stop text ends an answer and none a thought: where a model may think, its engine is
    told of none."""
    stops = ("Question:", "2. Q")
    for template, stop in ((PLAIN, stops), (PLAIN + "{# <think> #}", ())):
        model = ScriptedEngine(lambda _: text, template)
        (reply,) = collect_replies(model, [f"Q{end}"], stop=stops, chat=True)
        written = reply.thought + (answer or "")
        assert reply.text == answer
        assert text.startswith(written)
        assert model.generation.stop == stop
        assert reply.ended == ("end" if written == text else "stop")


RESPONSE = {
    "start_anchor": "assistant",
    "fields": {
        "reasoning_content": {"open": ["[[", "(("], "close_pattern": r"\]\]|\)\)"},
        "content": {},
    },
}
"""A response template of transformers."""


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("((24?)) It is 72.", "It is 72."),
        ("[[24?]]It is 72.", "It is 72."),
        ("[[24?", None),
        ("<plan>24?</plan>It is 72.", "It is 72."),
        ("<plan>24?", None),
        ("<think>24?</think>It is 72.", "It is 72."),
    ],
)
def test_marks_of_the_tokenizer_and_of_settings(text: str, answer: str | None) -> None:
    """Also if a mark is a special token, which decoding would leave out."""
    model = ModelConfig("m", "pocket:olmoe", thinking_marks=(("<plan>", "</plan>"),))
    tokenizer = load_tokenizer(local_folder(model), model)
    tokenizer.chat_template = PLAIN
    tokenizer.response_template = RESPONSE
    names = ("((", "))", "]]", "</plan>")
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names], special_tokens=True)
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    engine = vllm_with_replies(tokenizer, [[0, tokens, -1.0]])
    (reply,) = collect_replies(engine, ["Q"], 60, chat=True)
    assert (reply.text, reply.thought + (answer or "")) == (answer, text)


def test_marks_within_a_completion_are_no_thought() -> None:
    """A base model continues a text; only what begins with a mark is a thought then."""
    (reply,) = collect_replies(
        ScriptedEngine(lambda _: "It drops </think>: 72 END"), ["Q"], stop=("END",)
    )
    assert (reply.thought, reply.text) == ("", "It drops </think>: 72 ")


def test_unfinished_thought_is_no_empty_answer(tmp_path: Path) -> None:
    items = [{"q": question, "label": ""} for question in ("Q0", "Q1")]
    benchmark = custom_task(tmp_path, items, GENERATION, chat=True, max_new_tokens=9)
    evaluate_into(
        ScriptedEngine(["<think>hm", "<think>hm</think>"]),
        benchmark,
        tmp_path / "out",
        policy=Policy(),
    )
    rows = samples(tmp_path / "out")
    assert [sample["outcome"] for sample in rows] == [0.0, 1.0]
    assert [row["unfinished"] for row in rows] == [1, 0]
    assert "distinct_4" not in rows[0], "no text has four words"
    assert protocol(tmp_path / "out")["unfinished_thoughts"] == ["0"]


BLOCK = " ".join(f"w{number}" for number in range(50))


@pytest.mark.parametrize(
    ("text", "ended", "signs"),
    [
        ("It is 1010101010 and {{}}}}", "stop", "natural_end"),
        ("<think>no no no no</think> Four.", "end", "natural_end"),
        ("<think>hm</think> \n", "end", "empty natural_end"),
        ("<think>It is", "end", "unfinished"),
        ("<think>so so so so so", "limit", "limit loop unfinished"),
        ("\n" * 99, "limit", "empty limit loop"),
        (f"{BLOCK} " * 4, "end", "loop natural_end"),
        (f"{BLOCK} " * 4 + "w", "end", "natural_end"),
        (f"{BLOCK} " * 4 + "w", "limit", "limit loop"),
        (f"{BLOCK} w50 " * 9, "limit", "limit"),
        (f"{BLOCK} " * 3, "limit", "limit"),
        ("\u8fd9\u662f" * 16, "limit", "limit loop"),
    ],
)
def test_signs_of_degeneration(text: str, ended: str, signs: str) -> None:
    answer = answer_after_thought(text)
    reply = Reply(answer, text.removesuffix(answer or "\0"), ended)
    measures = text_measures(reply)
    assert measures.pop("characters") == len(text)
    measures.pop("distinct_4")
    assert " ".join(sorted(name for name, value in measures.items() if value)) == signs
    assert text_measures(replace(reply, ended="too_long")) == {}


@pytest.mark.parametrize(
    ("text", "share"), [("a b c d a b c d e", 5 / 6), ("a b c d", 1), ("a b c", None)]
)
def test_distinct_sequences_of_words_are_a_share(text: str, share: float | None) -> None:
    assert text_measures(Reply(text, ended="end"))["distinct_4"] == share


def test_the_loaded_model_says_why_a_text_ended(subject: LoadedModel) -> None:
    prompt = "The story"
    (cut,) = collect_replies(subject, [prompt], 3)
    (reply,) = collect_replies(subject, [prompt], 400)
    (stopped,) = collect_replies(subject, [prompt], 400, stop=(str(reply.text)[5:8],))
    assert (cut.ended, reply.ended, stopped.ended) == ("limit", "end", "stop")


def test_prompts_leave_room_for_their_texts() -> None:
    engine = Sums(length=9)
    for settings, sentence in (
        ({"max_length": 8}, "the benchmark's 8 tokens: expected max_new_tokens=6 or less"),
        ({}, "the model's 9 tokens: "),
    ):
        with pytest.raises(UserError, match=sentence):
            collect_replies(engine, ["a", "a b"], 40 if settings else 8, **settings)
    with pytest.raises(UserError, match="expected a model, or a max_length, of more"):
        collect_replies(engine, ["word " * 9], 4)
    assert not engine.batches_done
    short, long = collect_replies(engine, ["a", "a b c"], 7, skip_long=True)
    assert (short.text, long.text, long.ended) == ("a 1", "", "too_long")
    with pytest.raises(UserError, match="do not fit"):
        collect_replies(engine, ["a b c"], 7, skip_long=True)


@pytest.mark.slow
def test_servers_refuse_thoughts_between_special_tokens(subject: LoadedModel) -> None:
    tokenizer = with_chat_template(subject, PLAIN + "{# [THINK] #}").tokenizer
    tokenizer.add_tokens(
        [AddedToken(mark, special=True) for mark in ("[THINK]", "[/THINK]")], special_tokens=True
    )
    with endpoint(lambda body: completion("Is it 24? It is 72.", "m")) as server:
        served = ServedModel(server.url, "m", tokenizer, 512, {})
        with pytest.raises(UserError, match=r"\[THINK\].*expected backend=hf"):
            collect_replies(served, ["Q"], 40, chat=True)
        assert generate(served, ["Q"], 40), "a completion has no thoughts"


@pytest.mark.parametrize("template", [None, PLAIN, PLAIN + "{# <think> #}"])
@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("It is 72.<|im_end|> Or 24?", "", "It is 72."),
        ("It is 72.<|im_end|>", "", "It is 72."),
        ("It is 72.\n<|eot|>Question: 24?", "", "It is 72.\n"),
        ("It <|eot|>is 72.", "", "It is 72."),
        (
            "<think>24?<|im_end|>72!</think>It is 72.<|im_end|> Or 24?",
            "<think>24?72!</think>",
            "It is 72.",
        ),
    ],
)
def test_answer_ends_at_a_stop_text_with_a_special_token(
    subject: LoadedModel, template: str | None, text: str, thought: str, answer: str
) -> None:
    """The engine has gone on after it."""
    tokenizer = with_chat_template(subject, template).tokenizer
    names = ("<|im_end|>", "<|eot|>")
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names], special_tokens=True)
    stop = ("<|im_end|>", "<|eot|>Question:")
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    (reply,) = collect_replies(
        vllm_with_replies(tokenizer, [[0, tokens, -1.0]]),
        ["Q"],
        60,
        stop=stop,
        chat=template is not None,
    )
    ended = "end" if text.endswith(answer[-4:]) else "stop"
    assert (reply.thought, reply.text, reply.ended) == (thought, answer, ended)
    with pytest.raises(
        UserError, match=r"backend=server.*<\|im_end\|>.*<\|eot\|>.*expected backend=hf"
    ):
        collect_replies(
            ServedModel("http://127.0.0.1:9/v1", "m", tokenizer, 512, {}), ["Q"], 60, stop=stop
        )


def sentencepiece_tokenizer() -> Any:
    """A tokenizer that drops the first space of a text, and writes rare characters as bytes."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdef"]
    tokenizer = Tokenizer(
        BPE({name: number for number, name in enumerate(names)}, [], byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.mark.parametrize("text", [" def", "語a", " 二", "é", "d 😀😀 漢字<m>語 <m> 字"])
def test_text_is_decoded_with_its_first_space_and_whole_characters(
    subject: LoadedModel, text: str
) -> None:
    for tokenizer in (sentencepiece_tokenizer(), deepcopy(subject.tokenizer)):
        tokenizer.add_special_tokens({"additional_special_tokens": ["<m>"]})
        mark, end = tokenizer.convert_tokens_to_ids(["<m>", tokenizer.eos_token])
        prompt = "字:"
        tokens: list[int] = []
        for part in text.split("<m>"):
            tokens += tokenizer(prompt + part).input_ids[len(tokenizer(prompt).input_ids) :]
            tokens.append(mark)
        settings = GenerationSettings(99, marks=((mark, "<m>"),))
        assert generated_text(tokenizer, [*tokens[:-1], end], settings, [end]).text == text


def test_broken_character_damages_no_other() -> None:
    """Three bytes of which the first is missing, as a model may write them after any prompt."""
    tokenizer = sentencepiece_tokenizer()
    mark, end = tokenizer.convert_tokens_to_ids(["a", "</s>"])
    tokens = tokenizer("語").input_ids[2:]
    written = [*tokens, mark, *tokenizer("語").input_ids[1:], mark, *tokens]
    settings = GenerationSettings(99, marks=((mark, "a"),))
    assert generated_text(tokenizer, written, settings, [end]).text == "��a語a��"


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_text_that_vllm_cut_off_is_an_error(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SimpleNamespace(token_ids=(5, 7), finish_reason=reason, cumulative_logprob=-1.0)
    outputs = [SimpleNamespace(request_id="0", finished=True, outputs=[text])]
    played = SimpleNamespace(
        add_request=lambda *_: None,
        has_unfinished_requests=lambda: bool(outputs),
        step=lambda: [outputs.pop()],
    )
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **_: None))
    process = vllm_engine.Engine()
    process.llm = SimpleNamespace(llm_engine=played)
    broken = (
        nullcontext()
        if reason in ("stop", "length")
        else pytest.raises(ValueError, match=re.escape(reason))
    )
    with broken:
        assert list(process.generate([{"tokens": [1], "stop": []}], [0])) == [(0, [5, 7], -1.0)]


CAUSE = "ValueError: no memory"
CONSEQUENCE = "RuntimeError: the engine failed, see root cause above"


@pytest.mark.parametrize(
    ("lines", "quoted"),
    [
        ([CAUSE, "KeyError: 1", "end"], "KeyError: 1; end"),
        ([f"(Engine) ERROR 1 [a.py:1] {CAUSE}", CONSEQUENCE, "end"], f"{CAUSE}; end"),
        ([CONSEQUENCE], CONSEQUENCE),
        (["begin", "middle", "end"], "middle; end"),
        ([], "its log is empty"),
    ],
)
def test_a_log_is_quoted_by_its_last_cause_and_line(lines: list[str], quoted: str) -> None:
    assert error_summary("\n".join(lines)) == quoted


def test_chat_template_writes_the_special_tokens(subject: LoadedModel) -> None:
    model = with_chat_template(subject, "{{ eos_token }}" + PLAIN + "{{ extra }}", extra="!")
    tokenizer = model.tokenizer
    start = model.tokenizer.eos_token
    special = [(start, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        f"{start} $A", special_tokens=special
    )
    prompt = render_prompt(model, [{"role": "user", "content": "The story"}])
    assert prompt == f"{start}The story!"
    length = len(tokenizer(prompt, add_special_tokens=False).input_ids)
    assert generate(model, [prompt], 4, max_length=length + 4, chat=True)
    assert generate(model, [prompt], 4, max_length=length + 4), (
        "nor is the first token added to a text that has it"
    )
    with pytest.raises(UserError, match=rf"a prompt of {re.escape(str(length + 1))} tokens"):
        generate(model, [prompt.removeprefix(start) + " a"], 4, max_length=length + 4)


def with_template(subject: LoadedModel, single: str) -> LoadedModel:
    """The model with a tokenizer that adds special tokens to each text as a template says."""
    model = with_chat_template(subject, None)
    model.tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    ids = [
        (name, model.tokenizer.convert_tokens_to_ids(name))
        for name in ("<|im_end|>", "<|endoftext|>")
    ]
    template = TemplateProcessing(single, special_tokens=ids)
    model.tokenizer.backend_tokenizer.post_processor = template
    return model


@pytest.mark.parametrize("prefix", ["", "<|endoftext|> "])
@pytest.mark.parametrize("suffix", [" <|endoftext|>", " <|im_end|> <|endoftext|>"])
def test_tokens_that_a_tokenizer_appends_are_dropped(
    subject: LoadedModel, prefix: str, suffix: str
) -> None:
    """Texts, losses on answers and likelihoods are those of a tokenizer that appends nothing.
    Servers refuse such a tokenizer."""
    question = "A bird sleeps in a"
    requests = [
        Text(question, 8, reference=" nest"),
        Pair(question, " nest"),
        Pair("", "A nest"),
        Document("A bird."),
    ]
    items = [Item(str(number), (request,)) for number, request in enumerate(requests)]
    expected = collect_answers(with_template(subject, f"{prefix}$A"), [(BENCHMARK, items)])
    appending = with_template(subject, f"{prefix}$A{suffix}")
    with pytest.warns(UserWarning, match=re.escape(suffix.split()[0])):
        assert collect_answers(appending, [(BENCHMARK, items)]) == expected
    with pytest.raises(UserError, match=r"backend=server.*<\|endoftext\|>"):
        ServedModel("http://127.0.0.1:9/v1", "m", appending.tokenizer, 512, {})


def test_conversation_may_end_within_the_answer(subject: LoadedModel) -> None:
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    model = with_chat_template(subject, turns + "{% if add_generation_prompt %}<a>{% endif %}")
    begun = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "It is"}]
    assert render_prompt(model, begun[:1]) == "<user>How many?</><a>"
    assert render_prompt(model, begun) == "<user>How many?</><assistant>It is"


@pytest.mark.parametrize("roles", [["user"], ["system", "user"]])
def test_system_prompt_is_that_of_the_setting(subject: LoadedModel, roles: list[str]) -> None:
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    items = [Item("1", (Text([{"role": role, "content": f"a {role}"} for role in roles], 3),))]
    benchmark = replace(BENCHMARK, chat=True, system_prompt="Be brief.")
    ((answer,),) = collect_answers(with_chat_template(subject, turns), [(benchmark, items)])
    assert answer.prompt == "<system>Be brief.<user>a user"


def test_prompts_have_the_date_of_the_model(subject: LoadedModel) -> None:
    model = with_chat_template(subject, "{{ strftime_now('%d.%m.%Y') }} " + PLAIN)
    assert render_prompt(model, [{"role": "user", "content": "Today"}]) == "01.01.2026 Today"
    model.tokenizer.date = "2024-12-31"
    assert render_prompt(model, [{"role": "user", "content": "Today"}]) == "31.12.2024 Today"


def test_unread_chat_template_argument_is_refused(subject: LoadedModel) -> None:
    question = [{"role": "user", "content": "Today"}]
    reads = "{% if thinking is false %}no thoughts {% endif %}" + PLAIN
    assert (
        render_prompt(with_chat_template(subject, reads, thinking=False), question)
        == "no thoughts Today"
    )
    with pytest.raises(UserError, match=r"\bthoughtful\b.*False"):
        render_prompt(with_chat_template(subject, reads, thoughtful=False), question)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ({"rag": PLAIN, "tool_use": PLAIN}, "rag, tool_use: expected one that is named default"),
    ],
)
def test_missing_or_failing_chat_template_is_reported(
    template: Any, says: str, subject: LoadedModel
) -> None:
    with pytest.raises(UserError, match=says):
        render_prompt(with_chat_template(subject, template), [{"role": "user", "content": "hi"}])
