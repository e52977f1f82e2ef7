"""Steps that evaluate a pruned model on a benchmark, or generate its answers and grade them."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from moe_lab.calibration.documents import BLANK_LINE
from moe_lab.config import (
    BackendConfig,
    BenchmarkConfig,
    CalibrationConfig,
    Config,
    LauncherConfig,
    ModelConfig,
)
from moe_lab.errors import Unavailable
from moe_lab.evaluation import LIMITED, NAMESPACES, Policy, engines, suite
from moe_lab.evaluation.harness import harness_of
from moe_lab.evaluation.items import Document, Item, Text, read_answers, write_answers
from moe_lab.json_files import Record, write_json
from moe_lab.models.config_json import ROOM, Size
from moe_lab.results import CONTAMINATION
from moe_lab.study.step import BASE, Step, once
from moe_lab.study.steps.files import Files
from moe_lab.study.steps.passes import Facts, loaded_as
from moe_lab.study.steps.recovery import AboutPruned, Export, Pruned, export_of, forget_models

if TYPE_CHECKING:
    from moe_lab.evaluation.engines import Engine

ITEMS = 1000
"""Items of a benchmark that does not say how many it has."""
BYTES_PER_TOKEN = 16
"""Bytes per token of a generated text as stored: with its prompt, as JSON, and once more among the
samples."""
PROMPT = 128
"""Tokens of a prompt, or of a question with one of its answers."""
PHRASE, SHARED = 13, 10
"""Words of a phrase, and most items of a benchmark that may have one: others belong to its
instruction or template."""
_WORD = re.compile(r"[^\W_]+")
Template = tuple[tuple[str, Any], ...]
"""Arguments of a chat template."""


@once
def task_of(benchmark: BenchmarkConfig, config: Config) -> Task:
    """A benchmark as a study asks it of all models: makes the step with the results of a pruned
    model.

    A server only generates texts, so the model is loaded for a benchmark that needs likelihoods.
    Grading may not run in a weaker sandbox than here, also where another machine of the study has
    no namespaces.
    """
    backend = replace(config.backend, python=config.interpreters.get("vllm"))
    questions = suite.Questions(benchmark)
    harness = harness_of(benchmark)
    two_phases = harness.two_phases
    if backend.name == "server" and not two_phases:
        backend = BackendConfig(name="hf")
    policy = Policy(
        config.allow_code_execution, config.sandbox, config.allow_judge, config.allow_pickled_data
    )
    limited = LIMITED if harness.runs_limited(benchmark, policy) else None
    if policy.sandbox == "auto" and not limited:
        policy = replace(policy, sandbox=NAMESPACES)

    def results_of(pruned: Pruned) -> Evaluate | Grade:
        template = tuple(pruned.model.template_arguments.items()) if benchmark.chat else None
        asked = pruned, backend, _checkpoint(pruned, backend.name, config), template
        if not two_phases:
            return Evaluate(benchmark, policy, limited, *asked)
        return Grade(benchmark, policy, limited, Generate(benchmark, *asked, questions))

    return results_of


def _checkpoint(pruned: Pruned, backend: str, config: Config) -> Export | None:
    """The exported model that a server or an engine reads; None where there is none to export, and
    for plans of whole experts on vLLM, which masks the original."""
    if pruned.plan is None or backend == "hf":
        return None
    if backend == "vllm" and not pruned.is_recovered:
        if pruned.drops_whole_experts:
            return None
        # vLLM has one width in each layer
        return export_of(pruned, config.export, config.verify, "padded")
    return export_of(pruned, config.export, config.verify)


class OnBenchmark(Step):
    """A step about a benchmark."""

    small = True
    foreign = True
    benchmark: BenchmarkConfig

    @property
    def items(self) -> int:
        """Items that are asked, about."""
        count = self.benchmark.expected or ITEMS
        return min(self.benchmark.limit or count, count)

    def units(self) -> float:
        return float(self.items)

    def pace(self) -> list[Any]:
        asked = self.benchmark
        return [asked.name, asked.shots, asked.chat, asked.max_new_tokens]


def _check_data(benchmark: BenchmarkConfig, identity: Mapping[str, Any]) -> None:
    """Raise Unavailable when the data of the benchmark has changed since the study was started.
    Results on other data belong to a step with another id."""
    if identity["data"] != harness_of(benchmark).data_digest(benchmark):
        raise Unavailable(
            f"benchmark {benchmark.name}: its data is not what it was when this was started: "
            "start the study again"
        )


class Grades(OnBenchmark):
    """A step that grades what a model has answered."""

    per_job = "cells"
    policy: Policy
    sandbox: str | None
    """The sandbox, where it changes results: without namespaces some programs are not run."""
    runtime = frozenset({"policy"})

    def conditions(self, launcher: LauncherConfig) -> Iterator[tuple[Any, ...]]:
        yield harness_of(self.benchmark).missing, self.benchmark, self.policy


class AsksModel(AboutPruned, OnBenchmark):
    """A step that asks a pruned model the questions of a benchmark."""

    loads = "model"
    pruned: Pruned
    backend: BackendConfig
    checkpoint: Export | None
    template: Template | None
    """Arguments of the model's chat template; None where the benchmark does not use it."""

    def conditions(self, launcher: LauncherConfig) -> Iterator[tuple[Any, ...]]:
        yield from super().conditions(launcher)
        if launcher.python is None:
            yield engines.check_installed, self.backend

    def label(self) -> str:
        return f"{super().label()}-{self.benchmark.name}"

    def units(self) -> float:
        """Tokens that are read and written, about."""
        return super().units() * (
            PROMPT * (1 + self.benchmark.shots) + self.benchmark.max_new_tokens
        )

    def memory(self, size: Size) -> float:
        """Weights, and of a batch the keys and values where texts are generated, else the logits of
        prompts."""
        benchmark = self.benchmark
        written = self.benchmark.max_new_tokens
        row = size.cache(PROMPT + written) if written else PROMPT * size.logits
        weights = ROOM * size.bytes * (2 if self.pruned.is_changed else 1)
        return BASE + weights + benchmark.batch_size * row

    def pace(self) -> list[Any]:
        return [self.pruned.loaded.facts.id, self.backend.name, *super().pace()]

    @contextmanager
    def engine(self, files: Files) -> Iterator[Engine]:
        """The model, pruned and recovered: loaded here, in a process of vLLM that stays for the
        next step, or behind a server that is started for this one."""
        if self.backend.name == "server":
            from moe_lab.evaluation.engines.server import serving

            with serving(self.weights(files), self.backend, self.about, self.folder) as served:
                yield served
        elif self.backend.name == "vllm":
            from moe_lab.evaluation.engines import vllm

            forget_models()
            plan = None if self.checkpoint else files.plan(self.pruned.plan)
            engine = vllm.opened(self.weights(files), self.backend, self.about, plan)
            write_json(files.out / "backend.json", engine.metadata)
            yield engine
        else:
            from moe_lab.evaluation.engines.hf import LoadedModel

            with self.pruned.open(files) as (network, tokenizer):
                yield LoadedModel(network, tokenizer, self.about.template_arguments)

    def record(self, files: Files) -> Record:
        """What the model has computed so far."""
        from moe_lab.evaluation.answers import COMPUTED

        return Record(files.partial / COMPUTED)

    def weights(self, files: Files) -> Path:
        """The files that a server or an engine reads: the export, or the original."""
        from moe_lab.models.files import local_folder

        return (
            files.path(self.checkpoint, "checkpoint")
            if self.checkpoint
            else local_folder(self.about)
        )

    def show(self, prompt: str) -> None:
        """Write one prompt, as the model read it, to the log."""
        print(f"{self.folder} asks, for example: {prompt!r}", file=sys.stderr, flush=True)


class Evaluate(AsksModel, Grades):
    """The results of one benchmark, which is graded while the model is asked."""

    kind = "evaluate"

    def work(self, files: Files) -> None:
        from moe_lab.evaluation import run

        _check_data(self.benchmark, self.settings["benchmark"])
        with self.engine(files) as engine:
            run.evaluate(
                engine, self.benchmark, files.out, policy=self.policy, record=self.record(files)
            )
        self.show(json.loads((files.out / "result.json").read_text())["protocol"]["prompt"])


class Generate(AsksModel):
    """The answers to one benchmark."""

    kind = "generate"
    questions: suite.Questions
    """What of the benchmark changes answers."""
    runtime = frozenset({"benchmark"})

    def work(self, files: Files) -> None:
        from moe_lab.evaluation import run

        _check_data(self.benchmark, self.settings["questions"])
        with self.engine(files) as engine:
            answers = run.answer(engine, self.benchmark, self.record(files))
        write_answers(answers, files.out / run.ANSWERS)
        self.show(answers[0].prompt)

    def disk(self, size: Size) -> float:
        """Generated texts, if each has the maximum length."""
        return float(self.items * self.benchmark.max_new_tokens * BYTES_PER_TOKEN)

    def job(self) -> str:
        """Generating by a model that is loaded goes into the Slurm jobs that evaluate its other
        benchmarks."""
        return self.kind if self.backend.name == "server" else "evaluate"


class Grade(Grades):
    """The results of one benchmark, from generated texts; needs no model."""

    kind = "grade"
    process_memory = 4.0 * 2**30
    generate: Generate

    def label(self) -> str:
        return self.generate.label()

    def work(self, files: Files) -> None:
        from moe_lab.evaluation import run

        _check_data(self.benchmark, self.settings["benchmark"])
        answers = read_answers(files.read(self.generate, run.ANSWERS))
        run.grade(answers, self.benchmark, files.out, policy=self.policy)


class Contamination(Step):
    """How many items of benchmarks occur in a calibration set, as far as a model reads it."""

    kind = "contamination"
    small = True
    foreign = True
    per_job = "steps"
    process_memory = 4.0 * 2**30
    facts: Facts
    """The model, whose tokenizer decides where the text ends."""
    text: CalibrationConfig
    asked: tuple[tuple[str, suite.Questions], ...]
    """Name of a benchmark, and what is asked in it."""

    @classmethod
    def of(
        cls, model: ModelConfig, text: CalibrationConfig, benchmarks: Mapping[str, BenchmarkConfig]
    ) -> Self:
        """Without what changes no word of a text or of an item; examples are items of another
        split."""
        items = {
            name: replace(benchmarks[name], shots=0, batch_size=1) for name in sorted(benchmarks)
        }
        asked = tuple((name, suite.Questions(benchmark)) for name, benchmark in items.items())
        return cls(loaded_as(model).facts, replace(text, batch_size=1, parts=1), asked)

    def label(self) -> str:
        return f"{self.text.name}-{self.facts.model.name}"

    def work(self, files: Files) -> None:
        for (_, questions), (_, identity) in zip(self.asked, self.settings["asked"], strict=True):
            _check_data(questions.benchmark, identity)
        text = {words for passage in self._passages() for words in phrases(passage)}
        items = {
            name: harness_of(asked.benchmark).items(asked.benchmark) for name, asked in self.asked
        }
        counts = {name: contaminated(of, text) for name, of in items.items()}
        write_json(files.out / CONTAMINATION, counts)

    def _passages(self) -> Iterator[str]:
        """What stands between the gaps of each row."""
        from moe_lab.calibration.batches import batches
        from moe_lab.models.files import local_folder
        from moe_lab.models.load import load_tokenizer

        model = self.facts.model
        tokenizer = load_tokenizer(local_folder(model), model)
        for ids, valid in batches(self.text, tokenizer).rows:
            row = zip(ids[0].tolist(), valid[0].tolist(), strict=True)
            for is_text, tokens in groupby(row, key=lambda token: token[1]):
                if is_text:
                    yield tokenizer.decode([token for token, _ in tokens])


Task = Callable[[Pruned], Evaluate | Grade]
"""Makes the step with the results of a benchmark on a pruned model."""


def phrases(text: str) -> Iterator[str]:
    """Each PHRASE words in a row of a text."""
    words = _WORD.findall(text.lower())
    return (" ".join(words[start : start + PHRASE]) for start in range(len(words) - PHRASE + 1))


def contaminated(items: Iterable[Item], text: Set[str]) -> dict[str, int]:
    """How many items can be found, as they have PHRASE words in a row (comparable), and how many
    share a phrase with a text, given as its phrases (found). Words are letters and digits in lower
    case, as GPT-3's authors compared texts (arXiv 2005.14165, appendix C). A document whose
    likelihood is measured counts as its paragraphs."""
    of_items = [
        {phrase for text in texts for phrase in phrases(text)}
        for item in items
        for texts in _pieces(item)
    ]
    found = [own & text for own in of_items]
    shared = Counter(phrase for own in found for phrase in own)
    hits = sum(any(shared[phrase] <= SHARED for phrase in own) for own in found)
    return {"comparable": sum(map(bool, of_items)), "found": hits}


def _pieces(item: Item) -> Iterator[list[str]]:
    """The texts of an item: prompts with the answer, where one is known, and of a conversation each
    message."""
    texts: list[str] = []
    for request in item.requests:
        if isinstance(request, Document):
            yield from (
                [paragraph] for paragraph in request.text.split(BLANK_LINE) if paragraph.strip()
            )
            continue
        answer = (request.reference or "") if isinstance(request, Text) else request.continuation
        prompt = request.prompt if isinstance(request, Text) else request.context
        texts += (
            [prompt + answer]
            if isinstance(prompt, str)
            else [*(turn["content"] for turn in prompt), answer]
        )
    if texts:
        yield texts
