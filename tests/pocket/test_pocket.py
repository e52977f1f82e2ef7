"""The shipped files are what the code writes, no training text holds a benchmark's items, and the
shipped models are stock, small, and have instruments that work."""

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import mean
from typing import Any

import choices
import pytest
from transformers import AutoTokenizer

from benchmarks.instrument import ABLATION, SKILLS, items_of, pruned_loss, random_scores, rankings
from moe_lab.calibration.documents import Record, tokenize
from moe_lab.config import BenchmarkConfig, CalibrationConfig, ModelConfig
from moe_lab.errors import UserError
from moe_lab.evaluation import Policy, run
from moe_lab.evaluation.adapters.function_call_rules import answer_mistake
from moe_lab.evaluation.answers import collect_answers
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.harness import benchmark_errors
from moe_lab.evaluation.harnesses import function_calls
from moe_lab.evaluation.harnesses.stories import rules_followed
from moe_lab.models.load import load_model
from moe_lab.paths import DATA
from tools.pocket import train as trainer
from tools.pocket.benchmarks import COUNTS, PROGRAMS, held_out_examples, program_examples
from tools.pocket.build import SEARCH_COUNT, calibration_examples, search_examples
from tools.pocket.calls import KINDS
from tools.pocket.corpus import documents
from tools.pocket.examples import END_OF_TEXT, Example
from tools.pocket.network import load_network
from tools.pocket.recipes import BIAS_STEP, RECIPES, Batches
from tools.pocket.world import World, build_world

Items = dict[str, list[Example]]


@pytest.fixture(scope="session")
def world() -> World:
    return build_world()


@pytest.fixture(scope="session")
def items(world: World) -> Items:
    """Every benchmark's items, regenerated."""
    return {
        skill: program_examples(skill) if skill in PROGRAMS else held_out_examples(world, skill)
        for skill in COUNTS
    }


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_shipped_files_are_regenerated_byte_for_byte(tmp_path: Path) -> None:
    """Written by another process with other string hashes."""
    environment = os.environ | {"PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-m", "tools.pocket.build", "--output", tmp_path],
        check=True,
        env=environment,
    )
    for kind in ("benchmarks", "calibration", "search"):
        shipped = {path.name: path.read_bytes() for path in (DATA / kind).iterdir()}
        again = {path.name: path.read_bytes() for path in (tmp_path / kind).iterdir()}
        assert sorted(again) == sorted(shipped)
        assert [name for name in shipped if shipped[name] != again[name]] == []


@pytest.mark.parametrize("skill", COUNTS)
def test_a_prompt_has_the_same_tokens_alone_and_with_its_answer(skill: str, items: Items) -> None:
    """Prompts end where the training text has token boundaries; otherwise a model meets tokens it
    never saw there."""
    tokenizer = AutoTokenizer.from_pretrained(DATA / "olmoe")
    for example in items[skill]:
        prompts = [example.prompt]
        answers = [example.answer, *map(" {}".format, example.choices)]
        if skill == "winogrande":
            prompts = example.choices
            answers = [example.answer]
        for prompt, answer in product(prompts, answers):
            tokens = tokenizer.encode(prompt) + tokenizer.encode(answer)
            assert tokenizer.encode(prompt + answer) == tokens


@pytest.mark.parametrize("name", ["code", "math"])
def test_no_task_is_in_a_benchmark_or_in_the_calibration_set(
    name: str, world: World, items: Items
) -> None:
    tasks = search_examples(world, name)
    keys = {(task.skill, task.key) for task in tasks}
    assert len(keys) == len(tasks) == SEARCH_COUNT
    assert not keys & {
        (example.skill, example.key) for skill in items.values() for example in skill
    }
    assert not keys & {
        (example.skill, example.key) for example in calibration_examples(world, name)
    }


# What the files of benchmarks mean to lm-eval; test_runner.py asks EvalPlus of its own.


STORY = (
    "One day Mira walked to the mill. There she found a lamp. Mira felt happy. They all went home."
)
HOME = {"rule": "ends_with", "text": "They all went home."}


@pytest.mark.parametrize(
    ("rule", "story", "followed"),
    [
        ({"rule": "mentions", "text": "lamp"}, STORY, True),
        ({"rule": "mentions", "text": "amp"}, STORY, False),
        ({"rule": "mentions", "text": "lamp"}, "Two lamps.", False),
        ({"rule": "opens_with", "text": "Mira"}, STORY, True),
        ({"rule": "opens_with", "text": "lamp"}, STORY, False),
        ({"rule": "opens_with", "text": "Mira"}, "", False),
        (HOME, STORY + "\n", True),
        (HOME, STORY + " Then", False),
        ({"rule": "sentences", "least": 4}, STORY, True),
        ({"rule": "sentences", "least": 5}, STORY, False),
        ({"rule": "sentences", "least": 5}, STORY + " And then", False),
        ({"rule": "no_repeats"}, STORY, True),
        ({"rule": "no_repeats"}, STORY + " There she found a lamp.", False),
        ({"rule": "no_repeats"}, "lamp lamp lamp", False),
    ],
)
def test_rules_of_stories(rule: dict[str, Any], story: str, followed: bool) -> None:
    assert rules_followed(story, [rule]) == [followed]


def test_unknown_rules_and_arguments_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean mentions"):
        rules_followed(STORY, [{"rule": "mention", "text": "Tom"}])

    with pytest.raises(UserError, match="sentences does not take"):
        rules_followed(STORY, [{"rule": "sentences", "most": 3}])


def test_stories_of_the_world_follow_all_rules(items: Items) -> None:
    for example in items["wildbench"]:
        assert all(rules_followed(example.answer, example.details["checklist"]))
        assert not any(rules_followed("", example.details["checklist"]))


# ---- function calls: their text, the right answers, and the model that calls


@pytest.fixture(scope="module")
def calling() -> Any:
    """The benchmark as it is configured."""
    return choices.read_choice(BenchmarkConfig, "benchmark", "pocket_function_calls")


def test_function_calls_have_items_of_every_kind(calling: BenchmarkConfig) -> None:
    assert benchmark_errors([calling]) == []
    kinds = Counter(item.name.rpartition("_")[0] for item in function_calls.HARNESS.items(calling))
    assert set(kinds) == set(KINDS)
    assert min(kinds.values()) >= 16


def calls_of(examples: list[Example]) -> set[tuple[Any, ...]]:
    """The keys of all calls in some examples."""
    return {call.key for example in examples for call in example.details.get("calls", ())}


def test_no_call_of_an_item_is_in_a_calibration_conversation(world: World, items: Items) -> None:
    item_calls = calls_of(items["function_calls"])
    calibration_calls = calls_of(calibration_examples(world, "function_calls"))
    assert len(item_calls) >= 100
    assert len(calibration_calls) >= 400
    assert not item_calls & calibration_calls


Graded = list[tuple[Any, Example]]


@pytest.fixture(scope="module")
def graded(calling: BenchmarkConfig, items: Items) -> Graded:
    """The questions of the benchmark with their examples."""
    questions = function_calls.HARNESS.questions(calling)
    return list(zip(questions, items["function_calls"], strict=True))


def error_of(question: Any, answer: str) -> str | None:
    """Why an answer to a question is wrong; None: it is right."""
    return answer_mistake(answer, functions=question.functions, right_calls=question.right_calls)


def test_right_answers_are_right_and_calls_where_no_function_fits_are_not(graded: Graded) -> None:
    _, first_example = graded[0]
    for question, example in graded:
        assert error_of(question, example.answer) is None, question.name
        if not question.right_calls:
            assert error_of(question, first_example.answer)


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DATA / "function_calls")


def test_the_chat_template_writes_the_training_text(items: Items, chat_tokenizer: Any) -> None:
    write = partial(chat_tokenizer.apply_chat_template, tokenize=False)
    for example in items["function_calls"]:
        messages, tools = example.details["messages"], example.details["tools"]
        assert write(messages[:1], tools=tools, add_generation_prompt=True) == example.prompt
        assert write(messages, tools=tools) == example.text + END_OF_TEXT


def test_no_token_of_a_conversation_is_in_prompt_and_answer(
    items: Items, chat_tokenizer: Any
) -> None:
    """Conversations are tokenized as calibration reads them."""
    for example in items["function_calls"]:
        conversation = {key: example.details[key] for key in ("messages", "tools")}
        chat = Record(conversation, "item", CalibrationConfig("items", "items")).document()
        tokens = tokenize(chat, chat_tokenizer, special_tokens=True)
        prompt, answer = (chat_tokenizer.encode(text) for text in (example.prompt, example.answer))
        assert tokens == prompt + answer + [chat_tokenizer.eos_token_id]
        assert len(tokens) <= 128


def test_the_model_calls_functions(calling: BenchmarkConfig, tmp_path: Path) -> None:
    """A loose bound on its score, which nonsense cannot reach: that is right only where no function
    fits."""
    model = LoadedModel(
        *load_model(
            ModelConfig(name="calls", path="pocket:function_calls", threads=1, device="cpu")
        )
    )
    (answers,) = collect_answers(model, [(calling, run.list_items(calling))])
    (result,) = run.grade(answers, calling, tmp_path, policy=Policy())
    assert result["n"] == 160
    assert result["score"] >= 0.9


# ---- what the models were trained on

FIRST = 1_000
"""Documents that are made again of each stream. All of a stream were looked through when the models
were trained."""
RECORDED = {
    "deepseek_v2": "3e983bb7f393ff6fd6ba3a61aa38443ca0f714b5b93dd4a657cdba6ed6426d67",
    "function_calls": "e546c1ce5a3316d16e3d8a24029f17f58eb449a8099f55d12dec0a7e885b574a",
    "olmoe": "baa49b7331b78c27d891f7e8877038275f6efd281d2c1d1edfa434b1ec6c5cd0",
    "qwen3_moe": "6922394672d4ff5fc29c81550f4a4675cf88d9df4b8ea73bac5e10c432ec0536",
}
"""Model that streams were made for -> sha256 of their first documents. One that has changed is of
other streams: look through all of them, by FIRST = 200_000, before its new hash is written here."""


@pytest.fixture(scope="module")
def training(world: World) -> list[Example]:
    """The first documents of every stream that a shipped model was trained on, stream after
    stream."""
    streams: dict[tuple[Any, ...], str] = {}
    for file in sorted(DATA.glob("*/training.json")):
        record = json.loads(file.read_text())
        name = file.parent.name
        stages = zip(RECIPES[name].stages, record["stages"], strict=True)
        for number, (stage, recorded_stage) in enumerate(stages):
            assert recorded_stage["steps"] == stage.steps
            key = (record["seed"] + number, tuple(stage.mixture.items()))
            streams.setdefault(key, f"{name} {number}")
    examples: list[Example] = []
    digests = defaultdict(hashlib.sha256)
    for (seed, mixture), name in streams.items():
        first = list(islice(documents(world, seed, dict(mixture)), FIRST))
        for example in first:
            content = repr((name, example.skill, example.key, example.text))
            digests[name.split()[0]].update(content.encode())
        examples += first
    assert {name: digest.hexdigest() for name, digest in digests.items()} == RECORDED
    return examples


@pytest.mark.slow
def test_the_training_text_holds_no_item(training: list[Example], items: Items) -> None:
    texts = {example.text for examples in items.values() for example in examples}
    keys = {(example.skill, example.key) for examples in items.values() for example in examples}
    assert not [document.text for document in training if document.text in texts]
    assert not [document.text for document in training if (document.skill, document.key) in keys]


def values_of(calls: set[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """(function, position, value) of all arguments of some calls."""
    return {(call[0], position, value) for call in calls for position, value in enumerate(call)}


@pytest.mark.slow
def test_training_has_arguments_of_items_but_not_their_calls(
    training: list[Example], items: Items
) -> None:
    """The second of two calls is compared too."""
    training_calls = calls_of(training)
    item_calls = calls_of(items["function_calls"])
    assert not training_calls & item_calls
    assert item_calls
    assert values_of(item_calls) <= values_of(training_calls)


# ---- the shipped models

SHIPPED = {
    "olmoe": "e5fb75f12bae38030b9616457c62966d785da4ae3139d73ca83c37948fa26a99",
    "qwen3_moe": "ec6ef29644ec583471b7f8a6354ec0d746f6a14891607ad945a896c554008379",
    "ernie4_5_moe": "a707a5059ef8c6eab379d9858c58f35bebe172ae9fbe75a78c7d59cfd2151ab2",
    "deepseek_v2": "9c0fe58c4c56c534900dab253c475057490b8bdbaeb1e7a5ca991001c34a9c0e",
    "function_calls": "48c13b070f19fa6b11081d4cfc4063f6a0bf92f8742fe455ee541b2c0990bf44",
}
"""Model -> sha256 of its weights."""


shipped_model = pytest.mark.parametrize("name", SHIPPED)


@pytest.mark.slow
def test_all_shipped_models_are_recorded() -> None:
    names = sorted(file.parent.name for file in DATA.glob("*/model.safetensors"))
    assert names == sorted(SHIPPED)


@pytest.mark.slow
@shipped_model
def test_a_shipped_model_has_the_recorded_weights_and_no_further_files(name: str) -> None:
    weights = DATA / name / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == SHIPPED[name]
    template = set() if RECIPES[name].chat_template is None else {".jinja"}
    suffixes = {path.suffix for path in (DATA / name).iterdir()}
    assert suffixes == {".json", ".safetensors", ".md", *template}


@pytest.mark.slow
@shipped_model
def test_a_shipped_model_is_a_stock_model_of_its_recipe(name: str) -> None:
    model, _ = load_model(ModelConfig(name=name, path=f"pocket:{name}", device="cpu"))
    assert type(model).__module__.startswith("transformers.models.")
    assert model.config.max_position_embeddings == 512
    fields = RECIPES[name].fields
    assert {field: getattr(model.config, field) for field in fields} == fields


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHIPPED.keys() - {"function_calls"}))
def test_shipped_models_share_a_tokenizer(name: str) -> None:
    """The model of function calls has a tokenizer of its own."""
    tokenizer, expected = (
        (DATA / model / "tokenizer.json").read_bytes() for model in (name, "olmoe")
    )
    assert tokenizer == expected


TRAINED = ["olmoe", "ernie4_5_moe"]


@pytest.fixture(scope="module", params=TRAINED)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder named after a model, which was trained for one step of two stages: `at once`, and
    `in two` runs of which the second resumes the first."""
    name = request.param
    folder = tmp_path_factory.mktemp("trained") / name
    stages = tuple(replace(stage, steps=1, warmup=1) for stage in RECIPES[name].stages[:2])
    recipe = replace(RECIPES[name], batches=Batches(short=(2, 128), long=(1, 512)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "TOKENIZER_DOCUMENTS", 1000)
        for run_name, count, first in (("at once", 2, 0), ("in two", 1, 0), ("in two", 2, 1)):
            patch.setitem(RECIPES, name, replace(recipe, stages=stages[:count]))
            trainer.train(name, folder / run_name, first_stage=first)
    return folder


@pytest.mark.slow
def test_training_is_repeatable_and_can_be_resumed(trained: Path) -> None:
    at_once, in_two = (
        (trained / run / "model.safetensors").read_bytes() for run in ("at once", "in two")
    )
    assert at_once == in_two
    record = json.loads((trained / "at once" / "training.json").read_text())
    assert [(stage["steps"], stage["tokens"]) for stage in record["stages"]] == [(1, 2 * 128)] * 2


@pytest.mark.slow
def test_training_moves_correction_biases(trained: Path) -> None:
    """Only routers of ernie4_5_moe have them."""
    biases = [
        tensor
        for path, tensor in load_network(trained / "in two").named_parameters()
        if "correction" in path
    ]
    assert all(bias.abs().max() > BIAS_STEP for bias in biases)
    assert bool(biases) == (trained.name == "ernie4_5_moe")


@pytest.mark.slow
@pytest.mark.parametrize("skill", SKILLS)
def test_criteria_calibrated_on_a_skill_keep_it_better_than_chance(skill: str) -> None:
    """`python -m benchmarks.instrument` measures it for all models, skills, items and tokens."""
    subject = LoadedModel(
        *load_model(ModelConfig(name="small", path="pocket:qwen3_moe", threads=1))
    )
    items = [item for benchmark in SKILLS[skill] for item in items_of(benchmark)[:10]]
    ratio = 0.25
    chance = mean(
        pruned_loss(subject, random_scores(subject.model, seed), items, ratio) for seed in range(4)
    )
    losses = {
        name: pruned_loss(subject, scores, items, ratio)
        for name, scores in rankings(subject, skill, 4096, 1024)
    }
    assert {ABLATION, "man", "reap", "frequency", "exact_damage"} <= set(losses)
    assert {name: loss for name, loss in losses.items() if loss >= chance} == {}
