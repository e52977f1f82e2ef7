"""What is refused before anything heavy is loaded: the composed configuration, and a sentence for each mistake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab.compose import compose, started
from moe_lab.config import Config
from moe_lab.config.base import SettingsError
from moe_lab.grid import Request
from moe_lab.paths import LONGEST_NAME
from moe_lab.pruning.plan import Plan
from moe_lab.study.graph import build
from moe_lab.study.preflight import lacking, preflight


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    """Hydra once for all tests."""
    with started():
        yield


def asked(*words: str) -> tuple[Config, list[Request]]:
    """What a command line of settings asks for."""
    return compose(["suite.benchmarks=[pocket_boolq]", *words])


def problems(*words: str) -> list[str]:
    """What is wrong with a command line."""
    try:
        config, wanted = asked(*words)
        return preflight(config, wanted) or lacking(build(config, wanted).steps(), config.launcher)
    except SettingsError as error:
        return error.sentences


NAMED = ("study", "model.name", "calibration.name", "recovery.name")


@pytest.mark.parametrize("name", ["../../../evil", "a/b", ".hidden", "-x", "a b", "x" * 300, ""])
def test_what_becomes_part_of_a_path_is_a_name(name: str) -> None:
    found = problems(*(f"{field}='{name}'" for field in NAMED))
    for field in NAMED:
        assert any(one.startswith(f"{field}=") and "expected" in one for one in found), (field, found)


CHATS = "calibration.path=pocket:calibration/function_calls.jsonl"
PARTS = ", ".join(f"{{calibration: pocket_{name}, share: 0.5}}" for name in ("math", "function_calls"))
NONE = "calibration=pocket_general needs a chat template"


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ([CHATS], NONE),
        (["calibration.path=''", f"calibration.sources=[{PARTS}]"], NONE),
        (
            ["allocation.name=evolutionary", "allocation.search=pocket_function_calls"],
            NONE.replace("general", "function_calls"),
        ),
        ([CHATS, "model.path=TEMPLATE"], "calibration=pocket_general gives the chat template tools"),
        ([CHATS, "model.path=pocket:function_calls"], None),
        ([CHATS, "criterion.name=random"], None),
        (["calibration.path=pocket:calibration/general.jsonl"], None),
    ],
)
def test_chats_are_refused_where_the_model_has_no_template_that_reads_them(
    words: list[str], refusal: str | None, tmp_path: Path
) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    found = problems(*(word.replace("TEMPLATE", str(tmp_path)) for word in words))
    refusals = [one for one in found if "chat template" in one]
    assert [one.startswith(str(refusal)) for one in refusals] == [True] * (refusal is not None), found


@pytest.mark.parametrize("engine", ["streamed", "resident"])
def test_what_runs_the_whole_model_is_refused_with_one_layer_in_memory(engine: str) -> None:
    """A search, and an allocation that reads the loss with one layer scaled; sums of any layer are gathered alone."""
    search = ["allocation.name=evolutionary", "allocation.search=pocket_math_search"]
    nll = ["allocation.name=coverage", "allocation.parameters={layer_prior: nll}", "criterion.name=channel_activation"]
    for words, whole in ((search, True), (nll, True), (["allocation.name=uniform"], False)):
        refusals = [one for one in problems(*words, f"calibration.engine={engine}") if "calibration.engine=" in one]
        assert bool(refusals) == (whole and engine == "streamed"), (words, refusals)
        assert all(one.startswith(words[0].replace(".name", "")) for one in refusals)


@pytest.mark.parametrize(
    "word", ["study=all", "criterion.name=none", "calibration.name=none", "allocation.name=none", "recovery.bits=4"]
)
def test_names_that_mean_something_else_are_refused(word: str) -> None:
    field = "recovery.name=none" if word.startswith("recovery") else word
    assert any(sentence.startswith(field) for sentence in problems(word))


def test_a_benchmark_of_a_file_of_yours_is_called_by_a_name(tmp_path: Path) -> None:
    (tmp_path / "benchmark").mkdir()
    (tmp_path / "benchmark" / "mine.yaml").write_text(
        "name: ../../mine\nharness: perplexity\ntask: pocket:calibration/general.jsonl\nreports: {mine: perplexity}\n"
    )
    (sentence,) = problems("suite.benchmarks=[mine]", f"hydra.searchpath=[file://{tmp_path}]")
    assert sentence.startswith("benchmark=mine: name=../../mine")


def test_folders_of_steps_are_in_the_store_and_can_be_written_beside_however_long_names_are() -> None:
    name = "n" * LONGEST_NAME
    config, wanted = asked(*(f"{field}={name}" for field in ("model.name", "calibration.name", "recovery.name")))
    assert preflight(config, wanted) == []
    for step in build(config, wanted).steps():
        kind, folder = step.folder.split("/")
        assert kind == step.kind and len(folder) < 240 and folder.endswith(step.id[:12])


WRONG = {
    "calibration.length=1": "calibration.length=1",
    "recovery.bits=5": "recovery.bits=5",
    "launcher.name=slum": "launcher.name=slum",
    "criterion=reep": "criterion=reep",
    "ratio=2": "ratio=2",
    "seed=x": "seed=x",
    "modle=b": "setting=modle",
    "judge.max_tokens=0": "judge.max_tokens=0",
    "export=naturel": "export=naturel",
    "protocol.benchmarks={pocket_bolq: {shots: 1}}": "protocol=unified",
}
"""A word -> how its sentence begins."""


@given(st.sets(st.sampled_from(sorted(WRONG)), min_size=1))
@settings(max_examples=10, deadline=None)
def test_no_mistake_hides_another(words: set[str]) -> None:
    sentences = sorted(problems(*sorted(words)))
    expected = sorted(WRONG[word] for word in words - {"protocol.benchmarks={pocket_bolq: {shots: 1}}"}) or ["protocol"]
    assert [sentence.startswith(begin) for sentence, begin in zip(sentences, expected, strict=True)] == [True] * len(
        expected
    ), sentences


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["allocation.name=global", "allocation.by=nope"], ["criterion=nope"]),
        (["model.path=pocket:nope"], ["path=pocket:nope"]),
        (["allocation.name=reconstruction", "allocation.parameters={lim: 3}"], ["allocation.parameters.lim", "ratio="]),
    ],
)
def test_no_combination_hides_another(words: list[str], fields: list[str]) -> None:
    expected = sorted([*fields, "verify=true"])
    sentences = sorted(problems(*words, "recovery=nf4", "verify=true"))
    assert [sentence.startswith(field) for sentence, field in zip(sentences, expected, strict=True)] == [True] * len(
        expected
    ), sentences


def test_a_secret_of_a_protocol_on_the_axis_is_refused(tmp_path: Path) -> None:
    (tmp_path / "protocol").mkdir()
    (tmp_path / "protocol" / "mine.yaml").write_text(
        "name: mine\nbenchmarks: {pocket_boolq: {parameters: {api_key: abcdefghijkl}}}\n"
    )
    (sentence,) = problems("protocol=mine", f"hydra.searchpath=[file://{tmp_path}]")
    assert sentence.startswith("protocol.benchmarks.pocket_boolq.parameters.api_key ")


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["allocation.replacement=mean"], "allocation.replacement=mean is unknown"),
        (["criterion.name=heapr"], "allocation.replacement=mean_output"),
        (["allocation.name=sequential"], "allocation.replacement=mean_output"),
        (["export.shape=padded"], "export=padded"),
        (["export.shape=natural", "export.format=gguf"], "export.format=gguf has no place"),
        (["backend.name=vllm"], "backend=vllm cannot compute"),
    ],
)
def test_constants_that_nothing_could_compute_are_refused(words: list[str], field: str) -> None:
    found = problems("allocation.replacement=mean_output", *words)
    assert any(sentence.startswith(field) for sentence in found), found


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["criterion.name=heapr", "allocation.name=global"], "criterion=heapr"),
        (["allocation.replacement=hc_smoe"], "allocation.replacement=hc_smoe"),
        (["criterion.name=heapr", "allocation.name=sequential"], "criterion=heapr"),
        ([], None),
    ],
)
def test_experts_whose_channels_cannot_be_changed_are_known_before_the_model_is_loaded(
    words: list[str], field: str | None, tmp_path: Path
) -> None:
    tiny.config("gpt_oss").save_pretrained(tmp_path / "model")
    found = problems(f"model.path={tmp_path}/model", "model.name=mine", *words)
    refused = [sentence for sentence in found if "model=mine have biases" in sentence]
    assert [sentence.startswith(str(field)) for sentence in refused] == [True] * (field is not None), found


def test_groups_that_cannot_hold_all_experts_are_refused() -> None:
    """32 experts, of which 16 are kept."""
    words = ("allocation.replacement=ream", "ratio=0.5")
    assert not problems(*words, "allocation.parameters.group_size=2")
    assert any("group_size=1:" in sentence for sentence in problems(*words, "allocation.parameters.group_size=1"))


@pytest.mark.parametrize("words", [["export.shape=padded"], ["backend.name=vllm"]])
def test_merged_experts_without_router_rows_have_a_place_everywhere(words: list[str]) -> None:
    refused, stock = (problems(f"allocation.replacement={name}", *words) for name in ("m_smoe", "ream"))
    assert len(refused) == len(stock) + 1


@pytest.mark.parametrize("kept", [(0, 1), (0,)])
def test_a_listed_plan_that_replaces_experts_is_refused_where_it_has_no_place(
    kept: tuple[int, ...], tmp_path: Path
) -> None:
    plan = Plan({0: kept}, {0: 2}, {}, {0: numpy.array([[True], [False]])}, merged={0: {0: {0: 0.5, 1: 0.5}}})
    plan.save(tmp_path / "plan.json")
    found = problems("allocation.name=list", f"allocation.path={tmp_path}/plan.json", "export.shape=padded")
    assert any(sentence.startswith("export=padded has no place") for sentence in found) == (kept == (0, 1)), found


@pytest.mark.parametrize("replacement", ["m_smoe", "m_smoe_unaligned"])
def test_a_listed_plan_that_still_has_to_be_aligned_is_refused(replacement: str, tmp_path: Path) -> None:
    groups, provenance = {0: {0: {0: 0.5, 1: 0.5}}}, {"allocation": {"replacement": replacement}}
    Plan({0: (0, 1)}, {0: 2}, provenance, {0: numpy.array([[True], [False]])}, merged=groups).save(
        tmp_path / "plan.json"
    )
    words = ["allocation.name=list", f"allocation.path={tmp_path}/plan.json"]
    refused = f"replacement={replacement} matches"
    assert any(refused in sentence for sentence in problems(*words)) == (replacement == "m_smoe")
    assert not any(refused in sentence for sentence in problems(*words, f"allocation.replacement={replacement}"))


VALUES = {
    "model.threads=0": "model.threads=0",
    "model.threads=-1": "model.threads=-1",
    "model.dtype=float8": "model.dtype=float8",
    "model.device=tpu": "model.device=tpu",
    "model.device=cuda:x": "model.device=cuda:x",
    "a.b.c=1": "setting=a",
    "_target_=os.system": "setting=_target_",
    "judge._target_=os.system": "setting=judge._target_",
    "timed.repeat=3": "setting=timed.repeat",
    "seed=-1": "seed=-1",
    f"seed={10**30}": "seed=",
    "criterion.parameters={power: inf}": "criterion.parameters.power=inf",
    "resources.gpu_memory=nan": "resources.gpu_memory=nan",
    "store=''": "store=",
    "sandbox=bubble": "sandbox=bubble",
    "interpreters.vlm=/usr/bin/python3": "interpreters.vlm",
}


@pytest.mark.parametrize("word", VALUES)
def test_a_value_that_cannot_work_is_refused_first(word: str) -> None:
    assert [
        (sentence.startswith(VALUES[word]) and "known" in sentence) or "expected" in sentence
        for sentence in problems(word)
    ] == [True]


@pytest.mark.parametrize("python", ["3", __file__])
def test_what_is_no_interpreter_is_refused_first(python: str) -> None:
    (sentence,) = problems("backend.name=vllm", f"interpreters.vllm={python}")
    assert sentence.startswith(f"interpreters.vllm={python}")


@pytest.mark.parametrize("word", ["calibration.field=txt", "calibration.template='{txt}'"])
def test_a_field_that_no_record_has_is_named_first(word: str) -> None:
    (sentence,) = problems(word)
    assert "line 1" in sentence and "txt" in sentence and "found: " in sentence


@pytest.mark.parametrize(
    ("parameter", "field"),
    [("generation=3", "did you mean allocation.parameters.generations"), ("elites=40", "parameters.elites=40")],
)
def test_a_search_checks_its_own_parameters(parameter: str, field: str) -> None:
    words = (
        "allocation.name=evolutionary",
        "allocation.search=pocket_math_search",
        f"allocation.parameters.{parameter}",
    )
    sentences = problems(*words)
    assert [field in sentence for sentence in sentences] == [True], sentences
