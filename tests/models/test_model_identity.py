"""What a model in memory is compared with: plans with the model that they were made for, tokenizers
with its own."""

import copy
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import moe_lab
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.models.files import fingerprint
from moe_lab.models.identity import model_digests
from moe_lab.paths import resolve
from moe_lab.pruning.plan import Plan

TEXTS = [f"w{number % 90 + 3}" for number in range(200)]
"""A token each, by `tiny.tokenizer`."""
TOKENS = {"tokens": 64, "length": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("identity") / "model"
    tiny.save("olmoe", folder)
    return folder


def calibrate(
    model: Any, tokenizer: Any = None, criteria: list[str] | None = None, **named: Any
) -> Any:
    tokenizer = tokenizer or tiny.tokenizer()
    return moe_lab.calibrate(
        model, tokenizer, TEXTS, criteria=criteria or ["reap"], **TOKENS, **named
    )


def planned(model: Any, replacement: str = "none") -> Plan:
    seen = calibrate(model, replacement=replacement)
    return moe_lab.plan(moe_lab.score("reap", seen), 0.25, replacement=replacement)


def changed(model: Any) -> Any:
    """A copy of which one weight of one expert is another."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        list(copied.parameters())[-3].view(-1)[5] += 1
    return copied


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def masked(model: Any, plan: Plan, **named: Any) -> None:
    with moe_lab.mask(model, plan, **named):
        pass


USES = [masked, moe_lab.prune]
ROUNDED = {"dtype": torch.bfloat16}
SAME: dict[str, Callable[[Path, Path], Any]] = {
    "the same folder": lambda folder, other: tiny.load(folder),
    "equal files elsewhere": lambda folder, other: tiny.load(shutil.copytree(folder, other)),
    "a copy": lambda folder, other: copy.deepcopy(tiny.load(folder)),
    "saved again": lambda folder, other: tiny.load(saved(tiny.load(folder), other)),
    "in another precision": lambda folder, other: tiny.load(folder, **ROUNDED),
    "turned into another precision": lambda folder, other: tiny.load(folder).to(**ROUNDED),
    "built alike in memory": lambda folder, other: tiny.build("olmoe"),
}
ANOTHER: dict[str, Callable[[Path, Path], Any]] = {
    "other weights": lambda folder, other: tiny.load(saved(tiny.build("olmoe", seed=1), other)),
    "one weight of a file": lambda folder, other: tiny.load(
        saved(changed(tiny.load(folder)), other)
    ),
    "one weight in memory": lambda folder, other: changed(tiny.load(folder)),
    "built in memory": lambda folder, other: tiny.build("olmoe", seed=1),
    "of the configuration alone": lambda folder, other: AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), experts_implementation="eager"
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_plan_is_accepted_for_its_model(name: str, folder: Path, tmp_path: Path) -> None:
    plan = planned(tiny.load(folder))
    model = SAME[name](folder, tmp_path / "other")
    plan.save(tmp_path / "plan.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for use in USES:
            use(model, Plan.load(tmp_path / "plan.json"))


@pytest.mark.parametrize("name", ANOTHER)
def test_plan_of_another_model_is_refused_without_override(
    name: str, folder: Path, tmp_path: Path
) -> None:
    """Its plan.json, too, and one that was made for a model without files."""
    model = ANOTHER[name](folder, tmp_path / "other")
    plan = planned(tiny.load(folder))
    plan.save(tmp_path / "plan.json")
    for candidate in (plan, Plan.load(tmp_path / "plan.json"), planned(tiny.build("olmoe"))):
        for use in USES:
            with pytest.raises(UserError, match="plan is for another model"):
                use(model, candidate)
            use(model, candidate, any_model=True)


@pytest.mark.parametrize("made", ["in Python", "by a study"])
def test_export_compares_the_files_of_the_model(made: str, folder: Path, tmp_path: Path) -> None:
    plan = planned(tiny.load(folder))
    if made == "by a study":
        plan = replace(plan, provenance={"model_sha256": fingerprint(folder)})
    moe_lab.export(str(folder), plan, tmp_path / "first")
    moe_lab.export(
        str(shutil.copytree(folder, tmp_path / "copy")),
        Plan.load(tmp_path / "first/plan.json"),
        tmp_path / "b",
    )
    changed_folder = saved(changed(tiny.load(folder)), tmp_path / "other")
    with pytest.raises(UserError, match="plan is for another model"):
        moe_lab.export(str(changed_folder), plan, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"first", "copy", "b", "other"}
    moe_lab.export(str(changed_folder), plan, tmp_path / "out", any_model=True)


@pytest.mark.parametrize("name", ["other weights", "built in memory", "of the configuration alone"])
def test_the_plan_of_a_study_is_compared_with_the_checkpoint(
    name: str, folder: Path, tmp_path: Path
) -> None:
    plan = Plan.of_experts(
        planned(tiny.load(folder)).retained,
        dict.fromkeys(range(3), 16),
        {"model_sha256": fingerprint(folder)},
    )
    for use in USES:
        use(tiny.load(folder), plan)
        use(tiny.load(shutil.copytree(folder, tmp_path / use.__name__)), plan)
        with pytest.raises(UserError, match="plan is for another model"):
            use(ANOTHER[name](folder, tmp_path / f"{use.__name__}-other"), plan)


@pytest.mark.parametrize("provenance", [{}, {"model_sha256": None}])
def test_plan_without_a_model_is_accepted_with_a_warning(
    provenance: dict[str, None], folder: Path, tmp_path: Path
) -> None:
    model = tiny.load(folder)
    plan = Plan.of_experts(planned(model).retained, dict.fromkeys(range(3), 16), provenance)
    for use in (*USES, lambda model, plan: moe_lab.export(str(folder), plan, tmp_path / "out")):
        with pytest.warns(UserWarning, match="model_sha256"):
            use(model, plan)
    few = Plan.of_experts(dict.fromkeys(range(3), tuple(range(6))), dict.fromkeys(range(3), 8))
    with pytest.raises(UserError, match="another model"):  # by its counts
        masked(model, few, any_model=True)


def test_plan_of_a_pruned_model_is_not_for_the_original(folder: Path, tmp_path: Path) -> None:
    """A pruned copy, or one that was trained on, still names the folder of the original as its
    own."""
    model = tiny.load(folder)
    for candidate in (moe_lab.prune(model, planned(model)), changed(model)):
        with torch.no_grad():
            candidate.get_input_embeddings().weight.mul_(2)
        plan = planned(candidate)
        masked(candidate, plan)
        saved(candidate, tmp_path / str(id(candidate)))
        with pytest.warns(UserWarning, match="model_sha256"):
            moe_lab.export(
                str(tmp_path / str(id(candidate))), plan, tmp_path / f"{id(candidate)}-out"
            )


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_models_of_all_families_are_told_by_their_files(name: str, tmp_path: Path) -> None:
    tiny.save(name, tmp_path)
    model = tiny.load(tmp_path)
    of_weights, of_files = zip(
        *(model_digests(loaded) for loaded in (model, tiny.load(tmp_path, **ROUNDED))), strict=True
    )
    assert of_weights[0][0] != of_weights[1][0]  # the types of the weights
    assert [name for name, _ in of_files] == ["model_sha256"] * 2
    assert of_files[0][1]() == of_files[1][1]()
    digests = [next(model_digests(of))[1]() for of in (model, copy.deepcopy(model), changed(model))]
    assert digests[0] == digests[1] != digests[2]


def zero(weights: torch.Tensor) -> None:
    weights[3] = 0


def exchange(weights: torch.Tensor) -> None:
    weights[[2, 3]] = weights[[3, 2]]


@pytest.mark.parametrize(
    ("name", "change"), [("olmoe", zero), *((name, exchange) for name in tiny.ARCHITECTURES)]
)
def test_model_with_changed_experts_is_not_its_checkpoint(
    name: str, change: Callable[[torch.Tensor], None], tmp_path: Path
) -> None:
    tiny.save(name, tmp_path)
    model = tiny.load(tmp_path)
    with torch.no_grad():
        for weights in moe_layers(model)[-1].experts.parameters():
            change(weights)
    assert [name for name, _ in model_digests(model)] == ["weights_float32"]


def test_model_without_some_layers_is_not_its_checkpoint(folder: Path) -> None:
    model = tiny.load(folder)
    del model.model.layers[2]
    assert [name for name, _ in model_digests(model)] == ["weights_float32"]


def test_merged_experts_are_aligned_by_their_own_model(folder: Path) -> None:
    model = tiny.load(folder)
    plan = planned(model, replacement="m_smoe")
    second = tiny.build("olmoe", seed=1)
    with pytest.raises(UserError, match="plan is for another model"):
        moe_lab.align(second, plan)
    aligned = moe_lab.align(model, plan)
    masked(model, aligned)
    with pytest.raises(UserError, match="plan is for another model"):
        masked(second, aligned)


@pytest.mark.parametrize("criterion", ["magnitude", "aimer", "channel_weight"])
def test_criteria_of_weights_read_the_model_that_is_given(
    criterion: str, folder: Path, tmp_path: Path
) -> None:
    """Also one whose experts were changed in memory, as those are that are saved then, and one
    without a folder."""
    model = tiny.load(folder)
    with torch.no_grad():
        for layer in moe_layers(model):
            layer.experts.down_proj[3] *= 7
            layer.experts.down_proj[5] = 0

    def scores(model: Any) -> Any:
        return moe_lab.score(criterion, calibrate(model, criteria=[criterion]))["score"]

    of_saved = scores(tiny.load(saved(model, tmp_path / "saved")))
    assert numpy.allclose(scores(model), of_saved, rtol=1e-12)
    assert not numpy.allclose(scores(tiny.load(folder)), of_saved)
    assert numpy.allclose(scores(tiny.build("olmoe")), scores(tiny.load(folder)), rtol=1e-12)


def renumbered(tokenizer: Any) -> Any:
    """The same tokens, two of which have exchanged their ids."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary["w3"], vocabulary["w4"] = vocabulary["w4"], vocabulary["w3"]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token="</s>"
    )


def with_tokens(tokenizer: Any, *tokens: str) -> Any:
    tokenizer.add_tokens(list(tokens))
    return tokenizer


OTHER_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "the same tokens with other ids": lambda: renumbered(tiny.tokenizer()),
    "one token more": lambda: with_tokens(tiny.tokenizer(), "w900"),
    "a token of the vocabulary that was added": lambda: with_tokens(tiny.tokenizer(), "w7"),
    "of another family": lambda: AutoTokenizer.from_pretrained(resolve("pocket:olmoe")),
}


@pytest.mark.parametrize("name", OTHER_TOKENIZERS)
def test_tokenizer_of_another_model_is_refused_without_override(name: str, folder: Path) -> None:
    model = tiny.load(folder)
    tokenizer = OTHER_TOKENIZERS[name]()
    plan = planned(model, replacement="ream")
    with pytest.raises(UserError, match=r"^tokenizer=.*another model"):
        calibrate(model, tokenizer)
    with pytest.raises(UserError, match=r"^tokenizer=.*another model"):
        moe_lab.align(model, plan, tokenizer, TEXTS, **TOKENS)
    calibrate(model, tokenizer, any_tokenizer=True)
    moe_lab.align(model, plan, tokenizer, TEXTS, any_tokenizer=True, **TOKENS)


def test_equal_tokenizer_from_another_folder_is_accepted(folder: Path, tmp_path: Path) -> None:
    model = tiny.load(folder)
    tiny.tokenizer().save_pretrained(tmp_path)
    chatting = AutoTokenizer.from_pretrained(tmp_path)
    chatting.pad_token = chatting.eos_token
    chatting.chat_template = "{{ messages }}"
    for tokenizer in (chatting, AutoTokenizer.from_pretrained(folder, padding_side="left")):
        calibrate(model, tokenizer)
    (folder_without := tmp_path / "without").mkdir()
    model.save_pretrained(folder_without)
    calibrate(tiny.load(folder_without), renumbered(tiny.tokenizer()))
    calibrate(tiny.build("olmoe"), renumbered(tiny.tokenizer()))


@pytest.mark.parametrize("criterion", ["reap", "heapr", "exact_damage"])
@pytest.mark.parametrize("source", ["a folder", "memory"])
def test_token_without_an_embedding_is_named(criterion: str, source: str, tmp_path: Path) -> None:
    """The added tokens of a tokenizer that is the model's own, and of any for a model without a
    folder."""
    tokenizer = with_tokens(tiny.tokenizer(), "<|im_start|>")
    model = tiny.save("olmoe", tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = tiny.load(tmp_path) if source == "a folder" else model
    calibrate(model, tokenizer, [criterion])  # no text has it
    with pytest.raises(UserError, match=r"token 96\b.* 96 rows"):
        moe_lab.calibrate(
            model, tokenizer, [*TEXTS[:20], "<|im_start|>"] * 9, criteria=[criterion], **TOKENS
        )
