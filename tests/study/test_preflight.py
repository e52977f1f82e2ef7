"""What is refused before anything heavy is loaded: the composed configuration, and a sentence for
each mistake."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import tiny
from example_steps import evaluated
from scipy.stats import t

from moe_lab.compose import compose, started
from moe_lab.config import BenchmarkConfig, Config, LauncherConfig, ModelConfig
from moe_lab.config.base import SettingsError
from moe_lab.grid import Request
from moe_lab.models import config_json
from moe_lab.paths import LONGEST_NAME, resolve
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.plan import Plan
from moe_lab.study import estimates
from moe_lab.study.graph import build
from moe_lab.study.preflight import missing_requirements, preflight, remarks, visible_difference


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
        return preflight(config, wanted) or missing_requirements(
            build(config, wanted).steps, config.launcher
        )
    except SettingsError as error:
        return error.sentences


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "suites", "says"),
    [
        (["model=pocket_olmoe"], [11], None),
        (["model=local"], [0], "calibration is not set"),
        (["model=local", "criterion=aimer"], [0], None),
        (["model=local", "criterion=aimer", "overlap=true"], [0], None),
        (["model=local", "criterion=aimer", "suite.limit=3"], [0], None),
        (["model=local", "calibration=pocket_general", "suite=pocket_quick"], [5], None),
        (["model=local", "calibration=pocket_math,pocket_general"], [0], None),
        (["model=local", "calibration.path=README.md"], [0], None),
        (["model=local", "calibration.tokens=2048,4096"], [0], "calibration is not set"),
        (["model=pocket_olmoe,mixtral_8x7b", "criterion=aimer"], [11, 0], None),
    ],
)
def test_defaults_are_those_of_shipped_models(
    words: list[str], suites: list[int], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model is neither scored nor evaluated on what was made for them, unless that is
    named."""
    monkeypatch.chdir(Path(__file__).parents[2])
    local = ["+model.path=owner/model"] if "local" in words[0] else []
    config, wanted = compose([*words, *local])
    assert [len(benchmarks) for _, benchmarks in wanted] == suites
    found = preflight(config, wanted)
    assert [says in sentence for sentence in found] == [True] if says else not found
    said = [remark for remark in remarks(config, wanted) if "suite" in remark]
    assert [re.split("[=,]", words[0])[-1] in one for one in said] == (
        [True] if 0 in suites else []
    )


def test_resources_of_models_that_a_study_has_not_are_told() -> None:
    """But for those that moe_lab has, of which a file of a cluster names many."""
    resources = "{mixtral_8x7b: {gpus: 4}, pocket_olmo: {gpus: 1}, pocket_olmoe: {gpus: 2}}"
    config, wanted = asked("model.top_k=1", f"resources.models={resources}")
    assert [
        remark
        for remark in remarks(config, wanted)
        if remark.startswith("resources.models") and remark.endswith(" pocket_olmo")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packing", "fits"),
    [("chunk", 1600 // 16), ("chunk gap=eos", 1800 // 16), ("none", 200), ("reap", 1600 // 16)],
)
def test_more_tokens_than_a_text_has_are_refused_before_the_start(
    packing: str, fits: int, tmp_path: Path
) -> None:
    """Each of the 200 documents has eight tokens. Of packing=reap only what no packing could fill
    is known."""
    (file := tmp_path / "text.jsonl").write_text('{"text": "Where does a dog sleep?"}\n' * 200)
    packed, _, gap = packing.partition(" gap=")
    settings = {"path": file, "packing": packed, "gap": gap or "none", "length": 16}
    words = [
        "calibration=text",
        *(f"calibration.{name}={value}" for name, value in settings.items()),
    ]
    assert not problems(*words, f"calibration.tokens={16 * fits}")
    (sentence,) = problems(*words, f"calibration.tokens={16 * (fits + 1)}")
    assert sentence.startswith(f"calibration.tokens={16 * (fits + 1)}")
    assert f"calibration.tokens={16 * fits}" in sentence


@pytest.mark.parametrize(
    ("words", "says"),
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
def test_a_ratio_that_is_rounded_to_whole_experts_is_said_once(
    words: list[str], says: list[str]
) -> None:
    said = [
        remark for remark in remarks(*asked("calibration=pocket_code", *words)) if "->" in remark
    ]
    assert [one.partition("removed): ")[2].split(", ") for one in said] == ([says] if says else [])


@pytest.mark.parametrize(
    ("changes", "keys"),
    [([], "id, language"), (["calibration.ignored=[id]"], "language"), (["criterion=aimer"], None)],
)
def test_texts_of_one_word_beside_a_pair_are_named(
    changes: list[str], keys: str | None, tmp_path: Path
) -> None:
    record = {
        "question": "Where does a dog sleep?",
        "answer": "In a kennel.",
        "language": "French",
        "id": "a7",
    }
    (file := tmp_path / "text.jsonl").write_text(json.dumps(record))
    config, wanted = asked("calibration=text", f"calibration.path={file}", *changes)
    said = [remark for remark in remarks(config, wanted) if "calibration=text" in remark]
    assert [f" {keys}:" in remark for remark in said] == ([True] if keys else [])


NAMED = ("study", "model.name", "calibration.name", "recovery.name")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["../../../evil", "a/b", ".hidden", "-x", "a b", "x" * 300, "a|b", "a%j", ""]
)
def test_what_becomes_part_of_a_path_is_a_name(name: str) -> None:
    found = problems(*(f"{field}='{name}'" for field in NAMED))
    for field in NAMED:
        assert any(one.startswith(f"{field}=") and "expected" in one for one in found), (
            field,
            found,
        )


SEARCH = ["allocation.name=evolutionary", "allocation.search=pocket_math_search"]
CHATS = "calibration.path=pocket:calibration/function_calls.jsonl"
PARTS = ", ".join(
    f"{{calibration: pocket_{name}, share: 0.5}}" for name in ("math", "function_calls")
)
NONE = "calibration=pocket_general needs a chat template"


@pytest.mark.slow
def test_chats_that_the_chat_template_does_not_read_are_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    found = problems(CHATS, f"model.path={tmp_path}")
    assert any(
        "calibration=pocket_general gives the chat template tools" in one for one in found
    ), found


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["streamed", "resident"])
def test_what_runs_the_whole_model_is_refused_with_one_layer_in_memory(engine: str) -> None:
    """A search, and an allocation that reads the loss with one layer scaled; sums of any layer are
    gathered alone."""
    nll = [
        "allocation.name=coverage",
        "allocation.parameters={layer_prior: nll}",
        "criterion.name=channel_activation",
    ]
    for words, whole in ((SEARCH, True), (nll, True), (["allocation.name=uniform"], False)):
        refusals = [
            one
            for one in problems(*words, f"calibration.engine={engine}")
            if "calibration.engine=" in one
        ]
        assert bool(refusals) == (whole and engine == "streamed"), (words, refusals)
        assert all(one.startswith(words[0].replace(".name", "")) for one in refusals)


def test_a_file_of_yours_is_checked_alike(tmp_path: Path) -> None:
    (tmp_path / "benchmark").mkdir()
    text = (
        "{name: ../../mine, harness: perplexity, task: pocket:calibration/code.jsonl, reports: "
        "{mine: perplexity}}"
    )
    (tmp_path / "benchmark" / "mine.yaml").write_text(text)
    (sentence,) = problems("suite.benchmarks=[mine]", f"hydra.searchpath=[file://{tmp_path}]")
    assert sentence.startswith("benchmark=mine: name=../../mine")


def test_step_folders_of_long_names_can_be_written_in_the_store() -> None:
    name = "n" * LONGEST_NAME
    config, wanted = asked(
        *(f"{field}={name}" for field in ("model.name", "calibration.name", "recovery.name"))
    )
    assert preflight(config, wanted) == []
    for step in build(config, wanted).steps:
        kind, folder = step.folder.split("/")
        assert kind == step.kind and len(folder) < 240 and folder.endswith(step.id[:12])


WRONG = {
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
    ("words", "begins"),
    [(WRONG, WRONG.values()), (COMBINED, ["allocation.parameters.lim", "ratio=", "verify=true"])],
)
def test_no_mistake_hides_another(words: Iterable[str], begins: Iterable[str]) -> None:
    for sentence, begin in zip(sorted(problems(*words)), sorted(begins), strict=True):
        assert sentence.startswith(begin) and re.search("known|expected|largest", sentence)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["criterion.name=heapr", "allocation.name=global"], "criterion=heapr"),
        (["allocation.replacement=hc_smoe"], "allocation.replacement=hc_smoe"),
        (["criterion.name=heapr", "allocation.name=sequential"], "criterion=heapr"),
        ([], None),
    ],
)
def test_unchangeable_channels_are_known_before_loading(
    words: list[str], field: str | None, tmp_path: Path
) -> None:
    tiny.config("gpt_oss").save_pretrained(tmp_path / "model")
    found = problems(f"model.path={tmp_path}/model", "model.name=mine", *words)
    refused = [sentence for sentence in found if "model=mine have biases" in sentence]
    assert [sentence.startswith(str(field)) for sentence in refused] == [True] * (
        field is not None
    ), found


@pytest.mark.parametrize(
    ("kept", "made", "words", "says"),
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
    kept: tuple[int, ...], made: dict[str, Any], words: list[str], says: str | None, tmp_path: Path
) -> None:
    """Its two experts are merged into one, which tokens to both reach; or only the first is still
    there."""
    layer = LayerPlan(2, kept, numpy.array([[True], [False]]), merged={0: {0: 0.5, 1: 0.5}})
    plan = Plan({0: layer}, made, aligned=made.get("allocation") != {"replacement": "m_smoe"})
    plan.save(tmp_path / "plan.json")
    found = problems("allocation.name=list", f"allocation.path={tmp_path}/plan.json", *words)
    if says:
        assert any(says in sentence for sentence in found), found
    else:
        assert not any("no place" in sentence or "matches" in sentence for sentence in found), found


@pytest.mark.parametrize(
    ("made", "count"), [({}, 1), ({"model_sha256": None}, 1), ({"model_sha256": "0" * 64}, 0)]
)
def test_a_listed_plan_that_states_no_model_is_named(
    made: dict[str, Any], count: int, tmp_path: Path
) -> None:
    Plan.of_experts({0: (0,)}, {0: 2}, made).save(tmp_path / "plan.json")
    notices = remarks(*asked("allocation.name=list", f"allocation.path={tmp_path}/plan.json"))
    assert [str(tmp_path) in notice for notice in notices if "model_sha256" in notice] == [
        True
    ] * count


@pytest.mark.slow
@pytest.mark.parametrize("path", ["folder", "o/on-hub"])
def test_quantised_weights_are_not_taken_for_plain(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stated = json.loads(Path(resolve("pocket:olmoe"), "config.json").read_text())
    quantised = {**stated, "quantization_config": {"quant_method": "gptq"}}
    tiny.save("olmoe", tmp_path / "folder")
    Path("folder", "config.json").write_text(json.dumps(quantised))
    monkeypatch.setattr(
        config_json, "hub_config", lambda name, _: quantised if name == "o/on-hub" else {}
    )
    exports = [["export=natural", "verify=true"], ["export=natural", "export.format=gguf"]]
    for words in (
        ["criterion=aimer"],
        ["criterion=heapr", "allocation=global"],
        ["recovery=nf4"],
        *exports,
    ):
        found = problems(f"model.path={path}", "model.name=mine", *words)
        assert any("is stored as gptq" in sentence for sentence in found), (words, found)


CONSTANTS = "allocation.replacement=mean_output"
REFUSED = [
    ([CHATS], NONE),
    (["calibration.path=''", f"calibration.sources=[{PARTS}]"], NONE),
    (
        [*SEARCH[:1], "allocation.search=pocket_function_calls"],
        NONE.replace("general", "function_calls"),
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
    ([CONSTANTS, "allocation.name=sequential"], CONSTANTS),
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
        ["recovery=pocket_router_kd", "recovery.distill=pocket_stores"],
        "did you mean pocket_stories",
    ),
    (["recovery=pocket_merge_fit"], "fits merged experts, and allocation.replacement=none"),
    (["export=masked", "recovery=nf4"], "recovery=nf4 changes: expected export=natural"),
    (["export=natural", "export.format=gguff"], "did you mean gguf"),
    (["export=natural", "export.format=gguf", "recovery=nf4"], "expected a recovery with bits=16"),
    (
        ["export=natural", "export.format=gguf", "allocation=global"],
        "gguf: a GGUF file has one number of experts",
    ),
    (
        ["export=natural", "export.format=gguf", "export.converter=x.py"],
        "export.converter=x.py: llama.cpp's converter",
    ),
    (["export=natural", "export.format=gguf", "backend=server"], "backend=server"),
    (["export=masked"], "have no bias per expert that could keep tokens from dropped ones"),
    (["allocation=pocket_evolutionary", "ratio=0.95"], "is the largest feasible ratio"),
    (["allocation=global", "allocation.by=heapr"], "by=heapr scores channels"),
    (["allocation=pocket_evolutionary", "allocation.multiple_of=8"], "max_transfer=4"),
    (["flops_text=pocket_exerpt"], "did you mean pocket_excerpt"),
    (["resources.jobs={evalute: {gpus: 1}}"], "did you mean evaluate"),
    (["model.device=cuda:1"], "model.device=cuda:1: a process of launcher=local"),
    (["resources.models={big: {gpus: many}}"], "resources.models.big.gpus=many"),
]
"""Words -> what a sentence about them says; None: they are valid."""


@pytest.mark.slow
@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_impossible_settings_are_refused(words: list[str], says: str | None) -> None:
    found = problems(*words)
    assert any(says in sentence for sentence in found) if says else not found, found


def lacking_on(named: str, launcher: Any = "inline") -> list[str]:
    model = ModelConfig(name="m", path="a/b", device=named)
    benchmark = BenchmarkConfig(
        name="b", harness="perplexity", task="pocket:calibration/general.jsonl"
    )
    return missing_requirements(
        [evaluated(model, benchmark), evaluated(model, benchmark)], LauncherConfig(name=launcher)
    )


def test_devices_are_looked_for_before_anything_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(words: list[str], **_: Any) -> SimpleNamespace:
        asked.append(words[-1])
        error = (
            "AssertionError: no CUDA"
            if words[-1] == "cuda:9"
            else f"UserError: model.device={words[-1]}: none"
        )
        return SimpleNamespace(returncode=1, stdout="", stderr=f"Traceback\n{error}\n")

    monkeypatch.setattr(estimates.subprocess, "run", answer)
    monkeypatch.setattr(estimates, "visible_gpus", lambda: ["0"])
    assert [lacking_on(named) for named in ("auto", "cpu", "balanced", "cuda", "cuda:0")] == [
        []
    ] * 5 and not asked
    assert lacking_on("cuda:1", "slurm") == [] and not asked, "its nodes may have two"
    for named, says in {"cuda:1": "none", "cuda:9": "no CUDA"}.items():
        assert lacking_on(named) == [f"model.device={named}: {says}"]
    monkeypatch.setattr(estimates, "visible_gpus", list)
    assert [lacking_on(named) for named in ("cuda", "balanced")] == [
        [f"model.device={named}: none"] for named in ("cuda", "balanced")
    ]
    assert asked == ["cuda:1", "cuda:9", "cuda", "balanced"]


def test_a_dry_run_promises_no_difference_between_methods_of_one_seed() -> None:
    """Random plans, which may have several, are no method."""
    [(methods, benchmarks)], [(random, _)] = (
        asked(*words)[1] for words in (("criterion=man,reap",), ("criterion=random", "seed=1,2,3"))
    )
    [said] = visible_difference([([*methods, *random], benchmarks)])
    assert "one seed" in said and not re.search(r"0\.\d+", said)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_four_of_five_studies_find_the_difference_that_a_dry_run_says(seeds: int) -> None:
    """Simulated studies: an estimate of the difference, and one of its variance, which t tests."""
    _, wanted = asked("criterion=man,reap", f"seed={','.join(map(str, range(seeds)))}")
    [said] = visible_difference(wanted)
    difference = float(re.findall(r"0\.\d+", said)[0])
    items = wanted[0][1][0].expected
    assert items
    degrees = 2 * (seeds - 1)
    error = (2 * 0.05**2 / seeds + 0.25 / items) ** 0.5
    draw = numpy.random.default_rng(0)
    found = draw.normal(difference, error, 20_000)
    estimated = error * (draw.chisquare(degrees, 20_000) / degrees) ** 0.5
    assert numpy.mean(abs(found) > t.ppf(0.975, degrees) * estimated) == pytest.approx(
        0.8, abs=0.06
    )
