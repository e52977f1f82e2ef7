"""What every packing keeps and drops; batches, their report and identity; which of their tokens are
answers; and mixtures of sets: shares of tokens, order, and the sentence for what cannot be
mixed."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import choices
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from moe_lab import grid
from moe_lab.calibration import IdentifiedText
from moe_lab.calibration.batches import (
    TOLERANCE,
    Calibration,
    answer_batches,
    batches,
    check_held_out,
    chunk,
    one_per_row,
    reap,
)
from moe_lab.calibration.sources import check_answers
from moe_lab.config import CalibrationConfig, Config, ModelConfig, SourceConfig
from moe_lab.errors import UserError
from moe_lab.paths import resolve

Settings = Callable[..., CalibrationConfig]


def identity(text: CalibrationConfig) -> dict[str, Any]:
    return IdentifiedText.of(text).identity


BOS, EOS, W = 1, 2, 5  # the ids of <s>, </s> and w0
FILLER = -1


@pytest.fixture
def word_settings(source: Settings) -> Settings:
    """Settings of thirty documents of three words each; keywords change them."""
    records = [{"text": f"w{3 * n} w{3 * n + 1} w{3 * n + 2}"} for n in range(30)]
    return lambda **changes: source(*records, **{"name": "words", **changes})


def test_rows_have_equal_length_and_a_mask_of_valid_tokens(
    word_settings: Settings, tokenizer: Any
) -> None:
    rows = batches(
        word_settings(length=8, tokens=31, batch_tokens=16, gap="eos"), tokenizer
    ).batches
    assert [tuple(ids.shape) for ids, _ in rows] == [(2, 8), (1, 8)]
    ids, valid = rows[0]
    assert ids.dtype == torch.int64
    assert valid.dtype == torch.bool
    assert ids[0].tolist() == [W, W + 1, W + 2, EOS, W + 3, W + 4, W + 5, EOS]
    assert valid[0].tolist() == [True, True, True, False, True, True, True, False]
    for ids, valid in rows:
        assert (ids[valid] >= W).all()
        assert (ids[~valid] == EOS).all()


def test_report_counts_documents_and_tokens(word_settings: Settings, tokenizer: Any) -> None:
    settings = word_settings(length=8, tokens=16)
    report = batches(settings, tokenizer).report
    (source,) = report["sources"]
    assert source["documents_read"] == 30
    assert source["documents_used"] == 6
    assert source["forms"] == {"text": 30}
    assert report["rows"] == 2
    assert report["valid_tokens"] == {"words": 16}
    assert report["tokens_cut"] == 2
    assert report["first_row"] == "w0 w1 w2 w3 w4 w5 w6 w7"


def test_padding_is_not_counted(word_settings: Settings, tokenizer: Any) -> None:
    padded = batches(word_settings(packing="none", length=8, tokens=16), tokenizer)
    assert [valid.sum().item() for _, valid in padded.batches] == [6]
    report = padded.report
    assert report["first_row"] == "w0 w1 w2"
    assert report["valid_tokens"] == {"words": 6}


def all_ids(settings: CalibrationConfig, tokenizer: Any) -> list[int]:
    rows = batches(settings, tokenizer).batches
    return torch.cat([ids.flatten() for ids, _ in rows]).tolist()


def test_the_seed_decides_a_random_order_without_replacement(
    word_settings: Settings, tokenizer: Any
) -> None:
    chosen = word_settings(order="random", seed=7, packing="chunk", length=9, tokens=90)
    first = all_ids(chosen, tokenizer)
    assert first == all_ids(replace(chosen, batch_tokens=9), tokenizer)
    assert first != all_ids(replace(chosen, seed=8), tokenizer)
    assert sorted(first) == list(range(W, W + 90))
    assert all_ids(replace(chosen, order="first"), tokenizer) == list(range(W, W + 90))


def test_rows_are_drawn_from_the_whole_stream(word_settings: Settings, tokenizer: Any) -> None:
    """Rows of one stream, without replacement, as HEAPr draws its samples."""
    chosen = word_settings(order="rows", seed=7, packing="chunk", length=9, tokens=45)
    ids = all_ids(chosen, tokenizer)
    starts = ids[::9]
    assert ids == [start + position for start in starts for position in range(9)]
    assert len(set(starts)) == 5
    assert set(starts) < set(range(W, W + 90, 9))
    assert max(starts) >= W + 45
    assert starts != sorted(starts)
    assert ids != all_ids(replace(chosen, seed=8), tokenizer)
    with pytest.raises(UserError, match=r"calibration\.order=rows"):
        check_held_out(chosen, ModelConfig("m", "pocket:pocket_olmoe"))


def test_the_longest_documents_are_read(source: Settings, tokenizer: Any) -> None:
    """As EASY-EP (arXiv 2504.06792) chooses its demonstrations; ties stay in their order."""
    texts = ["w1", "w2 w3 w4", "w5 w6", "w7 w8 w9", "w10 w11 w12 w13"]
    chosen = source(
        *({"text": text} for text in texts),
        **{"order": "longest", "packing": "none", "length": 4, "tokens": 12, "seed": None},
    )
    words = [10, 11, 12, 13, 2, 3, 4, None, 7, 8, 9, None]  # None: padding
    assert all_ids(chosen, tokenizer) == [0 if n is None else W + n for n in words]
    with pytest.raises(UserError, match=r"calibration\.order=longest"):
        check_held_out(chosen, ModelConfig("m", "pocket:pocket_olmoe"))


PAIR = {"instruction": "w1", "output": "w2 w3"}


def test_special_tokens_setting_applies_to_plain_texts_only(
    word_settings: Settings, source: Settings, tokenizer: Any, chat_tokenizer: Any
) -> None:
    words = all_ids(word_settings(special_tokens=True), tokenizer)
    assert words[:5] == [BOS, W, W + 1, W + 2, BOS]
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    chat = source({"messages": messages}, PAIR, special_tokens=True, length=7, tokens=14)
    result = batches(chat, chat_tokenizer)
    ((ids, _),) = result.batches
    conversation = [BOS, 3, W + 1, 4, W + 2, W + 3, EOS]
    assert ids.tolist() == [conversation] * 2, "a pair is the same conversation"


def test_pair_without_a_chat_template_is_parted_by_a_blank_line(
    source: Settings, tokenizer: Any
) -> None:
    result = batches(source(PAIR, length=3, tokens=3), tokenizer)
    assert result.batches[0][0].tolist() == [[W + 1, W + 2, W + 3]]


def test_text_of_the_user_may_be_shorter_than_tokens(
    word_settings: Settings, tokenizer: Any
) -> None:
    """But not than one row. A shipped set may not."""
    chosen = word_settings(packing="chunk", length=8, tokens=800)
    assert batches(chosen, tokenizer).report["rows"] == 11
    with pytest.raises(UserError, match=r"calibration.length=90$"):
        batches(replace(chosen, length=512, tokens=512), tokenizer)
    shipped = replace(chosen, path="pocket:calibration/stories.jsonl", tokens=10_000_000)
    with pytest.raises(UserError, match=r"at most calibration.tokens=\d+$"):
        batches(shipped, tokenizer)


def test_missing_special_tokens_and_templates_are_refused(
    word_settings: Settings, source: Settings, tokenizer: Any, tokenizer_with: Any
) -> None:
    chosen = source({"messages": [{"role": "tool", "content": "w1"}]})
    refusing = tokenizer_with("{{ raise_exception('no tools') }}")
    for reader, says in ((tokenizer, "has no chat template"), (refusing, "roles tool: no tools")):
        with pytest.raises(UserError, match=says):
            batches(chosen, reader)
    with pytest.raises(UserError, match=r"calibration.length=8 .* at most 4"):
        batches(word_settings(), tokenizer_with(max_length=4))
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"calibration.gap=eos: .* no end-of-text token"):
        batches(word_settings(gap="eos"), tokenizer)
    with pytest.raises(UserError, match=r"calibration.path=genersl.txt does not exist"):
        batches(replace(word_settings(), path="genersl.txt"), tokenizer)


def test_identity_has_the_bytes_and_how_they_are_read(
    word_settings: Settings, tmp_path: Path
) -> None:
    chosen = word_settings(order="first", seed=7)
    original = identity(chosen)
    file = Path(chosen.path)
    for name, is_same in (("copy.jsonl", True), ("copy.txt", False)):
        (tmp_path / name).write_bytes(file.read_bytes())
        copied = replace(chosen, path=str(tmp_path / name), name="other", engine="streamed")
        assert (identity(copied) == original) == is_same
    assert identity(replace(chosen, seed=8)) == original == identity(replace(chosen, tokens=17))
    file.write_text(file.read_text() + '{"text": "w1"}\n')
    assert identity(chosen) != original
    hub = replace(chosen, path="owner/set", subset="raw", split="train")
    of_hub = identity(hub)
    assert of_hub["path"] == {"hub": "owner/set"}
    assert of_hub["subset"] == "raw"
    assert of_hub["split"] == "train"
    with pytest.raises(UserError, match=r"calibration.seed is not set"):
        identity(word_settings(order="random", seed=None))
    assert identity(word_settings(order="first", seed=None))["seed"] is None


lengths = st.integers(2, 12)
gaps = st.sampled_from([None, FILLER])


@st.composite
def numbered(draw: st.DrawFn) -> list[list[int]]:
    """Documents whose tokens are numbered through, so that every token tells where it came from."""
    sizes = draw(st.lists(st.integers(1, 25), max_size=12))
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def tokens_of(rows: list[list[int]]) -> list[int]:
    return [token for row in rows for token in row if token != FILLER]


@given(numbered(), lengths, gaps)
def test_chunk_loses_only_the_tail(
    documents: list[list[int]], length: int, gap: int | None
) -> None:
    rows = list(chunk(documents, length, gap))
    separator = [] if gap is None else [gap]
    stream = [token for document in documents for token in document + separator]
    assert [*chain.from_iterable(rows)] == stream[: len(rows) * length]
    assert len(rows) == len(stream) // length


@given(numbered(), lengths, gaps)
def test_reap_rows_begin_documents_and_drop_overflow(
    documents: list[list[int]], length: int, gap: int | None
) -> None:
    rows = list(reap(documents, length, gap))
    first = {document[0]: document for document in documents}
    for row in rows:
        assert row[0] in first
        begun = [first[token] for token in row if token in first]
        room = length - sum(len(document) + (gap is not None) for document in begun[:-1])
        assert tokens_of([row]) == [*chain.from_iterable(begun[:-1]), *begun[-1][:room]]
    begun_in_rows = [token for token in tokens_of(rows) if token in first]
    expected = list(first)[: len(begun_in_rows)]
    assert begun_in_rows == expected, "no document is skipped"


@given(numbered(), lengths)
def test_one_per_row_keeps_each_beginning(documents: list[list[int]], length: int) -> None:
    rows = list(one_per_row(documents, length, FILLER))
    assert rows == [(document + [FILLER] * length)[:length] for document in documents]


def answered(settings: CalibrationConfig, tokenizer: Any, **options: Any) -> list[list[str]]:
    """The answer tokens of each row, as words."""
    return [
        tokenizer.convert_ids_to_tokens(ids[marks].tolist())
        for batch in answer_batches(settings, tokenizer, **options)
        for ids, marks in zip(batch[0], batch[2], strict=True)
    ]


PAIRS = (
    {"instruction": "w0 w1", "output": "w2 w3"},
    {"question": "w4", "answer": "w5 w6 w7"},
    {"prompt": "w8 w9", "completion": " w10"},
    {"text": "w11 w12 w13"},
)


def test_pairs_of_each_kind_and_a_text_without_an_answer(
    source: Settings, tokenizer: Any, chat_tokenizer: Any
) -> None:
    chosen = source(*PAIRS, packing="none", length=9, tokens=36, special_tokens=True)
    for reader in (tokenizer, chat_tokenizer):
        assert answered(chosen, reader) == [["w2", "w3"], ["w5", "w6", "w7"], ["w10"], []]


@pytest.mark.parametrize("packing", ["none", "chunk", "reap"])
@pytest.mark.parametrize("gap", ["none", "eos", "zero"])
def test_ids_are_those_of_a_calibration_set(
    packing: str, gap: str, source: Settings, tokenizer: Any
) -> None:
    chosen = source(*PAIRS, packing=packing, gap=gap, length=5, tokens=10, order="random", seed=1)
    with_answers = answer_batches(chosen, tokenizer)
    without = batches(chosen, tokenizer).batches
    for (ids, shown, answers), (same_ids, same_shown) in zip(with_answers, without, strict=True):
        assert torch.equal(ids, same_ids)
        assert torch.equal(shown, same_shown)
        assert not bool((answers & ~shown).any())


def test_marks_follow_their_tokens_through_packing(source: Settings, tokenizer: Any) -> None:
    chunked = source(*PAIRS, packing="chunk", gap="eos", length=6, tokens=12)
    assert answered(chunked, tokenizer) == [["w2", "w3"], ["w5", "w6", "w7"]]
    # reap drops what overflows a row: w6 and w7 are gone, and the next row begins with a document
    whole = source(*PAIRS, packing="reap", length=6, tokens=12)
    assert answered(whole, tokenizer) == [["w2", "w3", "w5"], ["w10"]]


def test_only_what_the_assistant_says_is_an_answer(source: Settings, chat_tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "w0 w1"},
        {"role": "assistant", "content": "w2 w0"},
        {"role": "user", "content": "w3"},
        {"role": "assistant", "content": "w0 w4"},
    ]
    chosen = source({"messages": messages}, packing="none", length=16, tokens=16)
    assert answered(chosen, chat_tokenizer) == [["w2", "w0", "w0", "w4"]]
    with_header = [["assistant", "w2", "w0", "assistant", "w0", "w4", "</s>"]]
    assert answered(chosen, chat_tokenizer, header=True) == with_header


def test_lost_and_rewritten_answers_are_refused(
    source: Settings, tokenizer: Any, tokenizer_with: Any
) -> None:
    """Rewritten ones, unless whole turns are taken."""
    unanswered = source({"text": "w1 w2 w3 w4"}, {"instruction": "w1 w2 w3", "output": " "})
    with pytest.raises(UserError, match=r"set\.jsonl holds no answers"):
        check_answers(unanswered)
    with pytest.raises(UserError, match=r"no row of words has"):
        answer_batches(replace(unanswered, length=4, tokens=4), tokenizer)
    record = {"instruction": "w0 w1 w2 w3", "output": "w4"}
    with pytest.raises(UserError, match=r"calibration\.length=4"):
        answer_batches(source(record, packing="none", length=4, tokens=4), tokenizer)
    slow = tokenizer_with(
        "{% for m in messages %}{{ m.role }} {{ m.content | replace(' ', ' w9 ') }} {% endfor %}"
    )
    chosen = source({"instruction": "w0", "output": "w1 w2"}, packing="none", length=6, tokens=6)
    with pytest.raises(UserError, match="header=true"):
        answer_batches(chosen, slow)
    assert answered(chosen, slow, header=True) == [["assistant", "w1", "w9", "w2"]]


Two = tuple[CalibrationConfig, CalibrationConfig]
POCKET = ("pocket_general", "pocket_code", "pocket_math")


def mixture(*parts: tuple[float, CalibrationConfig], **settings: Any) -> CalibrationConfig:
    """A mixture whose sets are at hand, in small rows."""
    sources = [SourceConfig(part.name, share, settings=part) for share, part in parts]
    fields = {"name": "mix", "length": 8, "tokens": 1600, "batch_tokens": 32, "seed": 1, **settings}
    return CalibrationConfig(sources=sources, **fields)


@pytest.fixture
def two(source: Settings) -> Two:
    """600 documents of two words from w0 to w9, and 400 of five words from w10 to w19."""
    low = ({"text": f"w{n % 10} w{(n + 1) % 10}"} for n in range(600))
    high = ({"text": " ".join(f"w{10 + (n + k) % 10}" for k in range(5))} for n in range(400))
    shuffled = partial(source, order="random")
    return shuffled(*low, stem="low", name="low"), shuffled(*high, stem="high", name="high")


def counted(calibration: Calibration) -> tuple[int, int]:
    """Valid tokens below and from w10 on."""
    tokens = torch.cat([ids[valid] for ids, valid in calibration.batches])
    assert bool(((tokens >= W) & (tokens < W + 20)).all())
    return int((tokens < W + 10).sum()), int((tokens >= W + 10).sum())


def test_mixture_report_has_every_set(two: Two, tokenizer: Any) -> None:
    chosen = mixture((0.4, two[0]), (0.6, two[1]), packing="chunk")
    calibration = batches(chosen, tokenizer)
    report = calibration.report
    counts = zip(("low", "high"), counted(calibration), strict=True)
    assert list(report["valid_tokens"].items()) == list(counts)
    assert [source["share"] for source in report["sources"]] == [0.4, 0.6]
    assert json.loads(json.dumps(report)) == report


def test_seed_decides_the_order_of_a_mixture(two: Two, tokenizer: Any) -> None:
    chosen = mixture((0.4, two[0]), (0.6, two[1]), packing="chunk")
    ids = all_ids(chosen, tokenizer)
    assert ids == all_ids(chosen, tokenizer)
    reseeded = all_ids(replace(chosen, seed=2), tokenizer)
    assert len(ids) == len(reseeded)
    assert ids != reseeded


def test_seed_of_a_set_goes_before_that_of_the_cell(two: Two) -> None:
    low, high = (replace(settings, seed=7) for settings in two)
    chosen = mixture((0.4, low), (0.6, high), packing="chunk")
    assert identity(chosen) == identity(replace(chosen, seed=2))


@pytest.fixture(scope="module")
def pocket_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve("pocket:olmoe"))


@cache
def published(name: str) -> Any:
    """A file of conf/calibration as typed settings."""
    return grid.add_sources(
        choices.read_choice(CalibrationConfig, "calibration", name), choices.Files()
    )


@hypothesis_settings(max_examples=8, deadline=None)
@example(weights=[1, 1, 4], seed=0, packing="none", gap="none")
@given(
    weights=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    seed=st.integers(0, 3),
    packing=st.sampled_from(["chunk", "reap", "none"]),
    gap=st.sampled_from(["none", "eos"]),
)
def test_shipped_sets_keep_shares(
    pocket_tokenizer: Any, weights: list[int], seed: int, packing: str, gap: str
) -> None:
    shares = [weight / sum(weights) for weight in weights]
    # a document a row: enough of them that one is below 1 %
    length = 64 if packing == "none" else 256
    sets = zip(shares, map(published, POCKET), strict=False)
    chosen = mixture(*sets, seed=seed, packing=packing, gap=gap, length=length, tokens=32768)
    result = batches(chosen, pocket_tokenizer)
    counts = result.report["valid_tokens"]
    total = sum(int(valid.sum()) for _, valid in result.batches)
    assert sum(counts.values()) == total
    for name, share in zip(POCKET, shares, strict=False):
        assert counts[name] / total == pytest.approx(share, abs=TOLERANCE)


def test_each_set_is_read_by_its_own_settings(source: Settings, tokenizer: Any) -> None:
    templated = source(*9 * [{"q": "w1", "a": "w2"}], stem="a", name="a", template="w0 {q} w0 {a}")
    body = {"text": "w9", "body": "w3 w4 w5"}
    settings = source(*9 * [body], stem="b", name="b", field="body", special_tokens=True)
    chosen = mixture((0.5, templated), (0.5, settings), packing="none", length=4, tokens=24)
    result = batches(chosen, tokenizer)
    rows = {tuple(row) for ids, _ in result.batches for row in ids.tolist()}
    assert rows == {(W, W + 1, W, W + 2), (1, W + 3, W + 4, W + 5)}


def test_set_that_is_too_short_is_named(two: Two, tokenizer: Any) -> None:
    chosen = mixture((0.5, two[0]), (0.5, two[1]), packing="chunk", tokens=8000)
    message = r"low, .* share of 0.5 .* its 1200 tokens .* at most"
    with pytest.raises(UserError, match=message) as error:
        batches(chosen, tokenizer)
    fitting = int(re.findall(r"calibration\.tokens=(\d+)", str(error.value))[1])
    assert batches(replace(chosen, tokens=fitting), tokenizer).report["rows"] == fitting // 8
    with pytest.raises(UserError, match="is too short"):
        batches(replace(chosen, tokens=fitting + 8), tokenizer)


def test_set_whose_share_cannot_be_had_is_named(source: Settings, two: Two, tokenizer: Any) -> None:
    long = source(*9 * [{"text": "w1 " * 8}], stem="long", name="long")
    message = r"long makes 50.0% of the tokens and not 30.0%.*expected more tokens"
    with pytest.raises(UserError, match=message):
        batches(mixture((0.3, long), (0.7, two[1]), tokens=16), tokenizer)


def test_mixture_identity_has_every_set_and_share(two: Two) -> None:
    low, high = two
    with pytest.raises(UserError, match="does not exist"):
        identity(mixture((0.5, low), (0.5, replace(high, path="nowhere.jsonl"))))
    original = identity(mixture((0.4, low), (0.6, high)))
    paths = [identity(replace(settings, seed=1))["path"] for settings in two]
    assert [source["path"] for source in original["sources"]] == paths
    in_rows = replace(low, length=4, packing="none")
    assert identity(mixture((0.4, in_rows), (0.6, high))) == original
    with_special_tokens = replace(low, special_tokens=True)
    assert identity(mixture((0.4, with_special_tokens), (0.6, high))) != original
    Path(high.path).write_text(Path(high.path).read_text() + '{"text": "w1"}\n')
    assert identity(mixture((0.4, low), (0.6, high))) != original


NAMED = {
    "a": "path: owner/a\nfield: body",
    "b": "path: ???",
    "nested": "sources: [{calibration: mix, share: 0.5}, {calibration: a, share: 0.5}]",
    "mix": (
        "sources: [{calibration: a, share: 0.75}, {calibration: b, path: notes.txt, share: 0.25}]"
    ),
    "twice": "sources: [{calibration: a, share: 0.5}, {calibration: a, share: 0.5}]",
    "wrong": "sources: [{calibration: aa, share: 0.5}, {calibration: a, share: 0.5}]",
}


@pytest.fixture
def named_cell(tmp_path: Path) -> Callable[..., grid.Cell]:
    """Makes the cell of a calibration set, and of a text for FLOPs, by the names of their files."""
    (tmp_path / "calibration").mkdir()
    for name, content in NAMED.items():
        (tmp_path / "calibration" / f"{name}.yaml").write_text(f"name: {name}\n{content}\n")

    def cell(calibration: str, flops_text: str = "a") -> grid.Cell:
        files = choices.Files(tmp_path)
        lists = {"calibration": [calibration]}
        return choices.cells(Config(flops_text=flops_text), lists, files=files)[0]

    return cell


def test_names_in_a_mixture_are_files(named_cell: Callable[..., grid.Cell]) -> None:
    """Of what is calibrated on and of the other texts."""
    calibration = named_cell("mix").calibration
    flops_text = named_cell("a", flops_text="mix").texts["flops"]
    for text in (calibration, flops_text):
        assert [source.share for source in text.sources] == [0.75, 0.25]
        chosen = [source.settings for source in text.sources]
        assert [settings.name for settings in chosen] == ["a", "notes"]
        assert [settings.path for settings in chosen] == ["owner/a", "notes.txt"]
        assert [settings.field for settings in chosen] == ["body", None]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", r"source=aa is unknown: did you mean a\?"),
        ("nested", "mix is a mixture itself"),
        ("twice", "names a twice"),
    ],
)
def test_wrong_names_in_a_mixture_are_refused(
    name: str, message: str, named_cell: Callable[..., grid.Cell]
) -> None:
    with pytest.raises(UserError, match=message):
        named_cell(name)
