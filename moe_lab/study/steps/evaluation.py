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

from moe_lab.calibration import IdentifiedText
from moe_lab.calibration.documents import BLANK_LINE
from moe_lab.config import BackendConfig, BenchmarkConfig, CalibrationConfig, Config, ModelConfig
from moe_lab.errors import Unavailable
from moe_lab.evaluation import LIMITED, NAMESPACES, Policy, engines
from moe_lab.evaluation.harness import IdentifiedBenchmark, Questions, harness_of
from moe_lab.evaluation.items import Document, Item, Text, read_answers, write_answers
from moe_lab.json_files import ResultCache, write_json
from moe_lab.results import CONTAMINATION
from moe_lab.study.resources import (
    PROGRAMS,
    Check,
    Resources,
    answer_bytes,
    benchmark_pace,
    benchmark_run,
    items,
)
from moe_lab.study.step import Step, StepFields
from moe_lab.study.steps.files import Files
from moe_lab.study.steps.passes import Facts, loaded_as
from moe_lab.study.steps.recovery import Export, Pruned, export_of

if TYPE_CHECKING:
    from moe_lab.evaluation.engines import Engine

PHRASE, SHARED = 13, 10
"""Words of a phrase, and most items of a benchmark that may have one: others belong to its
instruction or template."""
_WORD = re.compile(r"[^\W_]+")
Template = tuple[tuple[str, Any], ...]
"""Arguments of a chat template."""


def task_of(benchmark: BenchmarkConfig, config: Config) -> Task:
    """A benchmark as a study asks it of all models: makes the step with the results of a pruned
    model.

    A server only generates texts, so the model is loaded for a benchmark that needs likelihoods.
    Grading may not run in a weaker sandbox than here, also where another machine of the study has
    no namespaces.
    """
    backend = replace(config.backend, python=config.interpreters.get("vllm"))
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

    grading = Grading(IdentifiedBenchmark.of(benchmark), policy, limited)
    asking = Asking(benchmark, Questions(benchmark) if two_phases else None, backend)

    def results_of(pruned: Pruned) -> Evaluate | Grade:
        template = tuple(pruned.model.template_arguments.items()) if benchmark.chat else None
        checkpoint = _checkpoint(pruned, backend.name, config)
        if two_phases:
            return Grade(grading, Generate(asking, pruned, checkpoint, template))
        return Evaluate(asking, pruned, checkpoint, template, grading)

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


class Grading(StepFields):
    """How answers to a benchmark are graded."""

    benchmark: IdentifiedBenchmark
    policy: Policy
    sandbox: str | None
    """The sandbox, where it changes results: without namespaces some programs are not run."""
    runtime = frozenset({"policy"})

    @property
    def conditions(self) -> list[Check]:
        """What grading needs where it is started, such as permissions."""
        return [(harness_of(self.benchmark).missing, self.benchmark, self.policy)]


class Asking(StepFields):
    """What a model is asked, and by what."""

    benchmark: BenchmarkConfig
    questions: Questions | None
    """What of the benchmark changes answers; None where these are graded at once, and all of it
    counts."""
    backend: BackendConfig
    runtime = frozenset({"benchmark"})


def _check_data(benchmark: BenchmarkConfig, identity: Mapping[str, Any]) -> None:
    """Raise Unavailable when the data of the benchmark has changed since the study was started.
    Results on other data belong to a step with another id."""
    if identity["data"] != harness_of(benchmark).data_digest(benchmark):
        raise Unavailable(
            f"benchmark {benchmark.name}: its data is not what it was when this was started: "
            "start the study again"
        )


class BenchmarkRun(Step):
    """A step that runs a pruned model on the items of a benchmark."""

    small = True
    whole_model = True
    asking: Asking
    pruned: Pruned
    checkpoint: Export | None
    template: Template | None
    """Arguments of the model's chat template; None where the benchmark does not use it."""

    @property
    def benchmark(self) -> BenchmarkConfig:
        """The benchmark."""
        return self.asking.benchmark

    @property
    def backend(self) -> BackendConfig:
        """What asks the model."""
        return self.asking.backend

    def label(self) -> str:
        return f"{self.pruned.recovered_label}-{self.benchmark.name}"

    def resources(self) -> Resources:
        """The model is loaded for all its benchmarks in one Slurm job."""
        return benchmark_run(
            self.pruned.model,
            self.benchmark,
            self.backend,
            self.pruned.loaded.facts.id,
            copies=2 if self.pruned.is_changed else 1,
            programs=[(engines.check_installed, self.backend)],
        )

    @contextmanager
    def engine(self, files: Files) -> Iterator[Engine]:
        """The model, pruned and recovered: loaded here, in a process of vLLM that stays for the
        next step, or behind a server that is started for this one."""
        if self.backend.name == "server":
            from moe_lab.evaluation.engines.server import serving

            with serving(
                self.weights(files), self.backend, self.pruned.model, self.folder
            ) as served:
                yield served
        elif self.backend.name == "vllm":
            plan = None if self.checkpoint else files.plan(self.pruned.plan)
            model = self.pruned.model
            engine = files.models.engine(self.weights(files), self.backend, model, plan)
            write_json(files.out / "backend.json", engine.metadata)
            yield engine
        else:
            from moe_lab.evaluation.engines.hf import LoadedModel

            with self.pruned.open(files) as (network, tokenizer):
                yield LoadedModel(network, tokenizer, self.pruned.model.template_arguments)

    def cache(self, files: Files) -> ResultCache:
        """What the model has computed so far."""
        from moe_lab.evaluation.answers import COMPUTED

        return ResultCache(files.partial / COMPUTED)

    def weights(self, files: Files) -> Path:
        """The files that a server or an engine reads: the export, or the original."""
        from moe_lab.models.files import local_folder

        return (
            files.path(self.checkpoint, "checkpoint")
            if self.checkpoint
            else local_folder(self.pruned.model)
        )

    def show(self, prompt: str) -> None:
        """Write one prompt, as the model read it, to the log."""
        print(f"{self.folder} asks, for example: {prompt!r}", file=sys.stderr, flush=True)


class Evaluate(BenchmarkRun):
    """The results of one benchmark, which is graded while the model is asked."""

    kind = "evaluate"
    grading: Grading

    def resources(self) -> Resources:
        return super().resources()._replace(conditions=self.grading.conditions)

    def work(self, files: Files) -> None:
        from moe_lab.evaluation import run

        _check_data(self.benchmark, self.settings["benchmark"])
        with self.engine(files) as engine:
            run.evaluate(
                engine,
                self.benchmark,
                files.out,
                policy=self.grading.policy,
                cache=self.cache(files),
            )
        self.show(json.loads((files.out / "result.json").read_text())["protocol"]["prompt"])


class Generate(BenchmarkRun):
    """The answers to one benchmark."""

    kind = "generate"

    def resources(self) -> Resources:
        run = super().resources()._replace(disk=answer_bytes(self.benchmark))
        # a server loads the model for this step alone
        return run._replace(job=None, pack="one") if self.backend.name == "server" else run

    def work(self, files: Files) -> None:
        from moe_lab.evaluation import run

        _check_data(self.benchmark, self.settings["questions"])
        with self.engine(files) as engine:
            answers = run.answer(engine, self.benchmark, self.cache(files))
        write_answers(answers, files.out / run.ANSWERS)
        self.show(answers[0].prompt)


class Grade(Step):
    """The results of one benchmark, from generated texts; needs no model."""

    kind = "grade"
    small = True
    grading: Grading
    generate: Generate

    def label(self) -> str:
        return self.generate.label()

    def resources(self) -> Resources:
        benchmark = self.grading.benchmark
        return Resources(
            memory=PROGRAMS,
            isolated=True,
            units=float(items(benchmark)),
            pace=benchmark_pace(benchmark),
            pack="cells",
            conditions=self.grading.conditions,
        )

    def work(self, files: Files) -> None:
        from moe_lab.evaluation import run

        benchmark = self.grading.benchmark
        _check_data(benchmark, self.settings["benchmark"])
        answers = read_answers(files.read(self.generate, run.ANSWERS))
        run.grade(answers, benchmark, files.out, policy=self.grading.policy)


class Contamination(Step):
    """How many items of benchmarks occur in a calibration set, as far as a model reads it."""

    kind = "contamination"
    small = True
    facts: Facts
    """The model, whose tokenizer decides where the text ends."""
    text: IdentifiedText
    asked: tuple[tuple[str, Questions], ...]
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
        questions = tuple((name, Questions(benchmark)) for name, benchmark in items.items())
        return cls(
            loaded_as(model).facts,
            IdentifiedText.of(replace(text, batch_size=1, parts=1)),
            questions,
        )

    def label(self) -> str:
        return f"{self.text.name}-{self.facts.model.name}"

    def resources(self) -> Resources:
        return Resources(memory=PROGRAMS, isolated=True, pace=[self.facts.id], pack="short")

    def work(self, files: Files) -> None:
        for (_, questions), (_, identity) in zip(self.asked, self.settings["asked"], strict=True):
            _check_data(questions.benchmark, identity)
        text = {words for passage in self._passages() for words in phrases(passage)}
        items = {
            name: harness_of(questions.benchmark).items(questions.benchmark)
            for name, questions in self.asked
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
    shared_phrases = [item_phrases & text for item_phrases in of_items]
    shared = Counter(phrase for item_phrases in shared_phrases for phrase in item_phrases)
    hits = sum(
        any(shared[phrase] <= SHARED for phrase in item_phrases) for item_phrases in shared_phrases
    )
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
