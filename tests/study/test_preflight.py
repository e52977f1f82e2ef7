"""What is refused before anything heavy is loaded: the composed configuration, and a sentence for
each mistake."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import tiny
import torch
from example_steps import evaluation_step
from transformers import AutoModelForCausalLM

from moe_lab.calibration.batches import check_held_out
from moe_lab.compose import compose, hydra_context
from moe_lab.config import (
    BenchmarkConfig,
    CalibrationConfig,
    Config,
    LauncherConfig,
    ModelConfig,
    SourceConfig,
)
from moe_lab.config.base import SettingsError
from moe_lab.errors import UserError
from moe_lab.grid import Request
from moe_lab.models import config_json
from moe_lab.paths import LONGEST_NAME, resolve
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.plan import Plan
from moe_lab.study import estimates
from moe_lab.study.graph import build
from moe_lab.study.preflight import (
    failure_forecast,
    missing_requirements,
    preflight,
    remark_sentences,
)
from tests.campaign.models import reconfigure


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    """Hydra once for all tests."""
    with hydra_context():
        yield


def request(*settings: str) -> tuple[Config, list[Request]]:
    """The study that a command line of settings describes."""
    return compose(["suite.benchmarks=[pocket_boolq]", *settings])


def problems(*settings: str) -> list[str]:
    """The errors of a command line of settings."""
    try:
        config, requests = request(*settings)
    except SettingsError as error:
        return error.sentences
    errors = preflight(config, requests)
    return errors or missing_requirements(build(config, requests).steps, config.launcher)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "suites", "message"),
    [
        (["model=pocket_olmoe"], [11], None),
        (["model=local"], [0], "calibration is not set"),
        (["model=local", "criterion=aimer"], [0], None),
        (["model=local", "calibration=pocket_general", "suite=pocket_quick"], [5], None),
        (["model=local", "calibration.path=README.md"], [0], None),
        (["model=local", "calibration.tokens=2048,4096"], [0], "calibration is not set"),
        (["model=pocket_olmoe,mixtral_8x7b", "criterion=aimer"], [11, 0], None),
    ],
)
def test_defaults_are_those_of_shipped_models(
    settings: list[str], suites: list[int], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model is neither scored nor evaluated on the texts that were made for the shipped
    models, unless the settings name these texts."""
    monkeypatch.chdir(Path(__file__).parents[2])
    local = ["+model.path=owner/model"] if "local" in settings[0] else []
    config, requests = compose([*settings, *local])
    assert [len(benchmarks) for _, benchmarks in requests] == suites
    errors = preflight(config, requests)
    assert len(errors) == (message is not None)
    if message:
        assert message in errors[0]
    notices = [remark for remark in remark_sentences(config, requests) if "suite" in remark]
    assert len(notices) == (0 in suites)
    if notices:
        last_model = re.split("[=,]", settings[0])[-1]
        assert last_model in notices[0]


def test_resources_of_unknown_models_are_reported() -> None:
    """Models of conf/model that the study does not use are not reported: a cluster's file names
    many."""
    resources = "{mixtral_8x7b: {gpus: 4}, pocket_olmo: {gpus: 1}, pocket_olmoe: {gpus: 2}}"
    config, requests = request("model.top_k=1", f"resources.models={resources}")
    assert [
        remark
        for remark in remark_sentences(config, requests)
        if remark.startswith("resources.models") and remark.endswith(" pocket_olmo")
    ]


CHATS_STUDY = [
    "model=pocket_function_calls",
    "calibration=pocket_function_calls",
    "suite.benchmarks=[pocket_function_calls]",
]
"""A study of a model and a benchmark that generate in chats."""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.thinking=true"], "thinking_tokens=0 (usual: 8192) beside max_new_tokens=128"),
        (["model.thinking=true", "protocol.thinking_tokens=8192"], "at most 512 tokens"),
        (["model.thinking=true", "suite.benchmarks=[pocket_gsm8k]"], None),
        (["protocol.thinking_tokens=8192"], None),
    ],
)
def test_few_tokens_for_thoughts_are_reported(settings: list[str], words: str | None) -> None:
    study = request(*CHATS_STUDY, *settings)
    remarks = [remark for remark in remark_sentences(*study) if "thoughts" in remark]
    assert len(remarks) == (words is not None)
    assert not remarks or str(words) in remarks[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.thinking=true", "protocol.thinking_tokens=384"], "512 tokens leave none of 512"),
        (["protocol.thinking_tokens=384"], None),
        (["+protocol.benchmarks.pocket_function_calls.max_new_tokens=512"], "none of 512"),
        (["protocol.sampling.samples=3"], "sampling.samples=3"),
        (["protocol.sampling={samples: 3, temperature: null}"], "sampling.samples=3"),
        (["protocol.sampling={samples: 3, temperature: 0.5}"], None),
        (["protocol.sampling.samples=3", "suite.benchmarks=[pocket_boolq]"], None),
    ],
)
def test_texts_that_cannot_be_generated_are_refused(settings: list[str], words: str | None) -> None:
    errors = problems(*CHATS_STUDY, *settings)
    assert len(errors) == (words is not None)
    assert not errors or str(words) in errors[0]


def questions(folder: Path, packing: str) -> dict[str, Any]:
    """Calibration settings of 200 documents of eight tokens each, in rows of 16. `packing` may end
    with a gap."""
    (file := folder / "text.jsonl").write_text('{"text": "Where does a dog sleep?"}\n' * 200)
    packing, _, gap = packing.partition(" gap=")
    return {"path": file, "packing": packing, "gap": gap or "none", "length": 16}


def settings_of(text: dict[str, Any]) -> list[str]:
    """The command line for a text."""
    return ["calibration=text", *(f"calibration.{name}={value}" for name, value in text.items())]


@pytest.mark.parametrize(
    ("packing", "fits"), [("chunk", 800 // 16), ("chunk gap=eos", 900 // 16), ("none", 100)]
)
def test_text_that_calibration_reads_is_not_held_out(
    packing: str, fits: int, tmp_path: Path
) -> None:
    """The second half of the documents is held out."""
    text = questions(tmp_path, packing)
    settings = [*settings_of(text), "suite.benchmarks=[fidelity]"]
    assert not problems(*settings, f"calibration.tokens={16 * fits}")
    more = f"calibration.tokens={16 * (fits + 1)}"
    (sentence,) = problems(*settings, more)
    assert sentence.startswith(more)
    assert f"calibration.tokens={16 * fits} or less, or suite.path=" in sentence
    assert not problems(*settings, more, f"suite.path={text['path']}")
    assert not problems(*settings, more, "criterion=aimer"), "which reads no text"
    [(_, [benchmark])] = request(*settings)[1]
    part = SourceConfig("text", 0.5, settings=benchmark.held_out)
    mixture = {**text, "path": "", "sources": [part, part]}
    model = request()[1][0][0][0].model
    check_held_out(CalibrationConfig("mixture", tokens=32 * fits, **mixture), model)
    with pytest.raises(UserError, match=rf"calibration.tokens={32 * fits} or less"):
        check_held_out(CalibrationConfig("mixture", tokens=32 * (fits + 1), **mixture), model)
    (document := tmp_path / "text.txt").write_text("Where does a dog sleep? " * 200)  # nine tokens
    rows = {"packing": "chunk", "length": 16, "tokens": 16 * 75}
    whole = CalibrationConfig("text", str(document), order="first", **rows)
    check_held_out(replace(whole, tokens=896), model)
    with pytest.raises(UserError, match=r"calibration.tokens=896 or less"):
        check_held_out(whole, model)


def test_conversations_are_not_held_out(tmp_path: Path) -> None:
    message = {"role": "user", "content": "Hello there"}
    (file := tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [message]}))
    settings = (f"calibration.path={file}", "suite.benchmarks=[fidelity]", "criterion=aimer")
    (sentence,) = problems("calibration=text", *settings)
    assert sentence.startswith("suite.path is null and calibration=text holds conversations")


@pytest.mark.parametrize(
    ("settings", "ratios"),
    [
        (
            ["ratio=0.3,0.25", "model=pocket_olmoe,mixtral_8x7b"],
            ["pocket_olmoe 0.3 -> 0.281", "mixtral_8x7b 0.3 -> 0.25"],
        ),
        (
            ["ratio=0.25", "allocation=global,m_smoe", "allocation.multiple_of=5"],
            ["pocket_olmoe 0.25 -> 0.219"],
        ),
        (["ratio=0.25"], []),
        (["ratio=0.3", "criterion=heapr", "allocation=global"], []),
    ],
)
def test_a_rounded_ratio_is_reported_once(settings: list[str], ratios: list[str]) -> None:
    notices = [
        remark
        for remark in remark_sentences(*request("calibration=pocket_code", *settings))
        if "->" in remark
    ]
    assert [notice.partition("removed): ")[2].split(", ") for notice in notices] == (
        [ratios] if ratios else []
    )


NAMED = ("study", "model.name", "calibration.name", "recovery.name")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "../../../evil",
        "a/b",
        ".hidden",
        "-x",
        "a b",
        "x" * 300,
        "a|b",
        "a%j",
        "",
    ],
)
def test_names_in_paths_are_checked(name: str) -> None:
    errors = problems(*(f"{field}='{name}'" for field in NAMED))
    for field in NAMED:
        assert any(error.startswith(f"{field}=") and "expected" in error for error in errors), (
            field,
            errors,
        )


SEARCH = ["allocation.name=evolutionary", "allocation.search=pocket_math_search"]
NOVICES = ["criterion=mone", "allocation=novices", "ratio=0.5"]
CHATS = "calibration.path=pocket:calibration/function_calls.jsonl"
PARTS = ", ".join(
    f"{{calibration: pocket_{name}, share: 0.5}}" for name in ("math", "function_calls")
)
NO_TEMPLATE = "function_calls.jsonl line 1 holds messages"


@pytest.mark.slow
def test_chats_that_the_chat_template_ignores_are_refused(
    tmp_path: Path,
) -> None:
    copytree(resolve("pocket:function_calls"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    errors = problems(CHATS, f"model.path={tmp_path}")
    assert any("function_calls.jsonl line 1" in error and "tools=" in error for error in errors)


LAYER_PRIOR = [
    "allocation.name=coverage",
    "allocation.parameters={layer_prior: nll}",
    "criterion.name=channel_activation",
]
"""An allocation that reads the loss with one layer scaled."""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["streamed", "resident"])
@pytest.mark.parametrize(
    ("settings", "runs_whole_model"),
    [
        (SEARCH, True),
        (LAYER_PRIOR, True),
        (["allocation.name=uniform"], False),
    ],
)
def test_steps_that_run_the_whole_model_cannot_be_streamed(
    engine: str, settings: list[str], runs_whole_model: bool
) -> None:
    errors = problems(*settings, f"calibration.engine={engine}")
    errors_of_engine = [error for error in errors if "calibration.engine=" in error]
    assert bool(errors_of_engine) == (runs_whole_model and engine == "streamed")
    field = settings[0].replace(".name", "")
    assert all(error.startswith(field) for error in errors_of_engine)


def test_a_benchmark_of_the_user_is_checked(tmp_path: Path) -> None:
    (tmp_path / "benchmark").mkdir()
    text = (
        "{name: ../../mine, harness: perplexity, task: pocket:calibration/code.jsonl, reports: "
        "{mine: perplexity}}"
    )
    (tmp_path / "benchmark" / "mine.yaml").write_text(text)
    (sentence,) = problems("suite.benchmarks=[mine]", f"hydra.searchpath=[file://{tmp_path}]")
    assert sentence.startswith("benchmark=mine: name=../../mine")


def test_step_folders_of_long_names_are_short_enough() -> None:
    name = "n" * LONGEST_NAME
    config, requests = request(
        *(f"{field}={name}" for field in ("model.name", "calibration.name", "recovery.name"))
    )
    assert preflight(config, requests) == []
    for step in build(config, requests).steps:
        kind, folder = step.folder.split("/")
        assert kind == step.kind
        assert len(folder) < 240
        assert folder.endswith(step.id[:12])


INVALID = {
    "calibration.length=1": "calibration.length=1",
    "recovery.bits=5": "recovery.bits=5",
    "criterion=reep": "criterion=reep",
    "modle=b": "setting=modle",
    "export=naturel": "export=naturel",
    "model.device=cuda:x": "model.device=cuda:x",
    "_target_=os.system": "setting=_target_",
    "judge._target_=os.system": "judge._target_ is not a setting",
    "timed.repeat=3": "timed.repeat is not a setting",
    "store=''": "store=",
    "interpreters.vlm=/usr/bin/python3": "interpreters.vlm",
}
"""A word -> how its sentence begins."""


COMBINED = [
    "allocation.name=reconstruction",
    "allocation.parameters={lim: 3}",
    "recovery=nf4",
    "verify=true",
]


@pytest.mark.parametrize(
    ("settings", "beginnings"),
    [
        (INVALID, INVALID.values()),
        (COMBINED, ["allocation.parameters.lim", "ratio=", "verify=true"]),
    ],
)
def test_all_mistakes_are_reported_at_once(
    settings: Iterable[str], beginnings: Iterable[str]
) -> None:
    for sentence, begin in zip(sorted(problems(*settings)), sorted(beginnings), strict=True):
        assert sentence.startswith(begin)
        assert re.search("known|expected|largest", sentence)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (["criterion.name=heapr", "allocation.name=global"], "criterion=heapr"),
        (["allocation.replacement=hc_smoe"], "allocation.replacement=hc_smoe"),
        (["criterion.name=heapr", "allocation.name=sequential"], "criterion=heapr"),
        ([], None),
    ],
)
def test_unchangeable_channels_are_known_before_loading(
    settings: list[str], field: str | None, tmp_path: Path
) -> None:
    tiny.config("gpt_oss").save_pretrained(tmp_path / "model")
    errors = problems(f"model.path={tmp_path}/model", "model.name=mine", *settings)
    channel_errors = [sentence for sentence in errors if "model=mine have biases" in sentence]
    assert [sentence.startswith(str(field)) for sentence in channel_errors] == [True] * (
        field is not None
    ), errors


@pytest.mark.parametrize(
    ("retained", "provenance", "settings", "message"),
    [
        ((0, 1), {}, ["export.shape=padded"], "export=padded cannot hold"),
        ((0,), {}, ["export.shape=padded"], None),
        ((0, 1), {"allocation": {"replacement": "m_smoe"}}, [], "plan: aligned=false"),
        (
            (0, 1),
            {"allocation": {"replacement": "m_smoe"}},
            ["allocation.replacement=m_smoe"],
            None,
        ),
        ((0, 1), {"allocation": {"replacement": "m_smoe_unaligned"}}, [], None),
        ((0, 1), {"model_sha256": "0" * 64}, [], "plan is for another model: it was made for"),
    ],
)
def test_a_listed_plan_is_read_before_anything_runs(
    retained: tuple[int, ...],
    provenance: dict[str, Any],
    settings: list[str],
    message: str | None,
    tmp_path: Path,
) -> None:
    """The plan merges its two experts into one, and tokens of both reach it; or it retains only the
    first."""
    layer = LayerPlan(2, retained, numpy.array([[True], [False]]), merged={0: {0: 0.5, 1: 0.5}})
    aligned = provenance.get("allocation") != {"replacement": "m_smoe"}
    Plan({0: layer}, provenance, aligned=aligned).save(tmp_path / "plan.json")
    errors = problems("allocation.name=list", f"allocation.path={tmp_path}/plan.json", *settings)
    if message:
        assert any(message in error for error in errors), errors
    else:
        assert not any("no place" in error or "matches" in error for error in errors), errors


def store_in_eight_bits(folder: Path) -> None:
    """Store the weights of a checkpoint of one file, other than vectors, in eight bits."""
    tiny.rewrite(
        folder,
        lambda tensors: tensors.update(
            {
                name: tensor.to(torch.float8_e4m3fn)
                for name, tensor in tensors.items()
                if tensor.dim() > 1
            }
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", ["folder", "o/on-hub"])
def test_quantised_weights_are_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stated = json.loads(Path(resolve("pocket:olmoe"), "config.json").read_text())
    quantised = {**stated, "quantization_config": {"quant_method": "gptq"}}
    tiny.save("olmoe", tmp_path / "folder")
    store_in_eight_bits(tmp_path / "folder")
    Path("folder", "config.json").write_text(json.dumps(quantised))
    monkeypatch.setattr(
        config_json, "hub_json", lambda name, *_: quantised if name == "o/on-hub" else {}
    )
    exports = [["export=natural", "verify=true"], ["export=natural", "export.format=gguf"]]
    for settings in (
        ["criterion=aimer"],
        ["criterion=heapr", "allocation=global"],
        ["recovery=nf4"],
        ["calibration.engine=streamed"],
        *exports,
    ):
        errors = problems(f"model.path={path}", "model.name=mine", *settings)
        assert any("is stored as gptq" in sentence for sentence in errors), (settings, errors)


NUMBERED = {"quant_method": "fp8", "modules_to_not_convert": ["re:.*experts.(0|1).*"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields", "settings", "message"),
    [
        ("olmoe", {"pruned": {}}, [], "layers differ already"),
        ("olmoe", {"quantization_config": NUMBERED}, [], "experts by number"),
        ("olmoe", {"num_experts": 8}, [], "of two models"),
        ("deepseek_v3", {}, ["allocation=global"], None),
        ("olmoe", {}, ["criterion=heapr", "allocation=global"], None),
        ("olmoe", {}, ["allocation.replacement=mean_output"], None),
        ("olmoe", {"model_type": "ernie4_5_vl_moe"}, ["allocation=global"], "model_type=ernie4_5"),
    ],
)
def test_exports_are_tried_before_the_start(
    name: str, fields: dict[str, Any], settings: list[str], message: str | None, tmp_path: Path
) -> None:
    tiny.save(name, tmp_path)
    reconfigure(tmp_path, **fields)
    if "quantization_config" in fields:
        store_in_eight_bits(tmp_path)
    errors = problems(
        f"model.path={tmp_path}",
        "model.name=mine",
        "calibration=pocket_general",
        "ratio=0.25",
        "export=natural",
        *settings,
    )
    assert any(message in sentence for sentence in errors) if message else not errors, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "has_tokenizer", "settings", "message"),
    [
        ("olmoe", False, ["criterion=reap"], "has no tokenizer"),
        ("olmoe", False, ["criterion=aimer"], None),
        ("glm_moe_dsa", True, ["calibration.engine=streamed"], "run one by one"),
        ("glm_moe_dsa", True, ["calibration.engine=resident"], None),
        ("glm_moe_dsa", True, SEARCH, "run one by one"),
        ("glm_moe_dsa", True, [*SEARCH, "allocation.parameters={fitness: spec_dec}"], None),
        ("glm_moe_dsa", True, LAYER_PRIOR, "run one by one"),
    ],
)
def test_models_that_steps_cannot_run_are_refused_before_the_start(
    kind: str, has_tokenizer: bool, settings: list[str], message: str | None, tmp_path: Path
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny.registry_config(kind))
    model.to_empty(device="cpu").save_pretrained(tmp_path)
    if has_tokenizer:
        tiny.tokenizer().save_pretrained(tmp_path)
    config, requests = compose(
        [f"model.path={tmp_path}", "model.name=m", "calibration=pocket_general", *settings]
    )
    errors = failure_forecast(tmp_path, build(config, requests).steps, config.launcher)
    assert [message in error for error in errors] == [True] if message else not errors, errors


CONSTANTS = "allocation.replacement=mean_output"
IMPOSSIBLE = [
    ([CHATS], NO_TEMPLATE),
    (["calibration.path=''", f"calibration.sources=[{PARTS}]"], NO_TEMPLATE),
    (
        [*SEARCH[:1], "allocation.search=pocket_function_calls"],
        NO_TEMPLATE,
    ),
    ([CHATS, "model.path=pocket:function_calls"], None),
    ([CHATS, "criterion.name=random"], None),
    (["study=all"], "study=all"),
    (["model.path=pocket:nope"], "path=pocket:nope"),
    (["allocation.name=global", "allocation.by=nope"], "criterion=nope"),
    (["criterion.name=none"], "criterion=none is unknown"),
    (["calibration.name=none"], "calibration.name=none"),
    (["recovery.bits=4"], "recovery.name=none"),
    ([f"seed={10**30}"], "seed="),
    (["criterion.parameters={power: inf}"], "criterion.parameters.power=inf"),
    (["allocation.replacement=mean"], "allocation.replacement=mean is unknown"),
    ([CONSTANTS, "criterion.name=heapr"], CONSTANTS),
    ([CONSTANTS, "allocation.name=sequential"], None),
    ([CONSTANTS, "allocation.name=reconstruction"], CONSTANTS),
    ([CONSTANTS, "export.shape=padded"], "export=padded"),
    ([CONSTANTS, "export.shape=natural", "export.format=gguf"], "export.format=gguf has no place"),
    ([CONSTANTS, "backend.name=vllm"], "backend=vllm cannot compute"),
    (["allocation.replacement=m_smoe", "export.shape=padded"], "export=padded cannot hold"),
    (["allocation.replacement=m_smoe", "backend.name=vllm"], "backend=vllm cannot compute"),
    (["allocation.replacement=ream", "export.shape=padded"], None),
    (
        ["allocation.replacement=ream", "ratio=0.5", "allocation.parameters.group_size=1"],
        "group_size=1:",
    ),
    (["allocation.replacement=ream", "ratio=0.5", "allocation.parameters.group_size=2"], None),
    (["backend.name=vllm", "interpreters.vllm=3"], "interpreters.vllm=3"),
    (["backend.name=vllm", "interpreters.vllm=/etc/passwd"], "interpreters.vllm=/etc/passwd"),
    (["calibration.path=/dev/null"], "calibration.path=/dev/null holds no document (no words,"),
    (["calibration.field=txt"], "txt"),
    (["calibration.template='{txt}'"], "txt"),
    ([*SEARCH, "allocation.parameters.generation=3"], "generations?"),
    (["launcher=slurm", "objective=Avg"], "objective=Avg"),
    (["launcher=slurm", "objective=Avg", "wait=true"], None),
    (["launcher=slurm", "resources.every.gpus=-1"], "resources.every.gpus=-1"),
    (
        ["criterion=heapr", "allocation=pocket_evolutionary"],
        "allocates experts, but the criterion scores channels",
    ),
    (["allocation=pocket_evolutionary", "allocation.search=pocket_math"], "holds no answers"),
    (
        ["criterion=heapr", "allocation=coverage", "allocation.parameters.align.block=99"],
        "64 channels",
    ),
    (
        ["criterion=heapr", "allocation=coverage_aligned", "allocation.parameters.align.order=one"],
        "allocation.parameters.align.order=one is unknown",
    ),
    (
        ["recovery=pocket_router_kd", "recovery.distill=pocket_stores"],
        "did you mean pocket_stories",
    ),
    (["recovery=pocket_merge_fit"], "fits merged experts, and allocation.replacement=none"),
    (["export=masked", "recovery=nf4"], "recovery=nf4 changes: expected export=natural"),
    (["export=natural", "export.format=gguff"], "did you mean gguf"),
    (
        ["export=natural", "export.format=gguf", "allocation=global"],
        "gguf: a GGUF file has one number of experts",
    ),
    (
        ["export=natural", "export.format=gguf", "export.converter=x.py"],
        "export.converter=x.py: llama.cpp's converter",
    ),
    (["export=natural", "export.format=gguf", "backend=server"], "backend=server"),
    (["export=masked"], "has no bias per expert that could keep tokens from dropped experts"),
    ([*NOVICES, "export=masked"], None),
    ([*NOVICES, "export=masked", "verify=true"], "vLLM alone reads the constants"),
    (["allocation=pocket_evolutionary", "ratio=0.95"], "is the largest feasible ratio"),
    (["allocation=global", "allocation.by=heapr"], "by=heapr scores channels"),
    (["allocation=pocket_evolutionary", "allocation.multiple_of=8"], "max_transfer=4"),
    (["flops_text=pocket_exerpt"], "did you mean pocket_excerpt"),
    (["resources.jobs={evalute: {gpus: 1}}"], "did you mean evaluate"),
    (["suite.shared_batches={g: {batch_size: 2, benchmarks: [gsm8l]}}"], "did you mean gsm8k"),
    (
        ["suite.shared_batches={g: {batch_size: 2, benchmarks: [pocket_boolq]}}"],
        "suite.shared_batches.g: benchmark pocket_boolq generates no texts",
    ),
    (
        ["suite.shared_batches={g: {batch_size: 2, benchmarks: [mbpp, mbpp]}}"],
        "shared_batches has mbpp twice",
    ),
    (["model.device=cuda:1"], "model.device=cuda:1: a process of launcher=local"),
    (["resources.models={big: {gpus: many}}"], "resources.models.big.gpus=many"),
]
"""Words -> what a sentence about them says; None: they are valid."""


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "message"), IMPOSSIBLE)
def test_impossible_settings_are_refused(settings: list[str], message: str | None) -> None:
    errors = problems(*settings)
    assert any(message in sentence for sentence in errors) if message else not errors, errors


def missing_on(device: str, launcher: Any = "inline") -> list[str]:
    """The errors of two steps whose model is on that device."""
    model = ModelConfig(name="m", path="a/b", device=device)
    benchmark = BenchmarkConfig(
        name="b", harness="perplexity", task="pocket:calibration/general.jsonl"
    )
    steps = [evaluation_step(model, benchmark), evaluation_step(model, benchmark)]
    return missing_requirements(steps, LauncherConfig(name=launcher))


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that another process looks up and does not find, on a machine with one GPU."""
    devices: list[str] = []

    def fail(command: list[str], **_: Any) -> SimpleNamespace:
        device = command[-1]
        devices.append(device)
        error = f"UserError: model.device={device}: none"
        if device == "cuda:9":
            error = "AssertionError: no CUDA"
        return SimpleNamespace(returncode=1, stdout="", stderr=f"Traceback\n{error}\n")

    monkeypatch.setattr(estimates.subprocess, "run", fail)
    monkeypatch.setattr(estimates, "visible_gpus", lambda: ["0"])
    return devices


@pytest.mark.parametrize(
    ("device", "launcher"),
    [
        *((device, "inline") for device in ("auto", "cpu", "balanced", "cuda", "cuda:0")),
        ("cuda:1", "slurm"),  # its nodes may have two GPUs
    ],
)
def test_devices_that_are_known_are_not_looked_up(
    looked_up: list[str], device: str, launcher: str
) -> None:
    assert missing_on(device, launcher) == []
    assert not looked_up


@pytest.mark.parametrize(
    ("device", "n_gpus", "message"),
    [
        ("cuda:1", 1, "none"),
        ("cuda:9", 1, "no CUDA"),
        ("cuda", 0, "none"),
        ("balanced", 0, "none"),
    ],
)
def test_missing_gpus_are_reported_before_any_step(
    looked_up: list[str], device: str, n_gpus: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for two steps."""
    monkeypatch.setattr(estimates, "visible_gpus", lambda: ["0"] * n_gpus)
    assert missing_on(device) == [f"model.device={device}: {message}"]
    assert looked_up == [device]
