"""Steps that evaluate a pruned model on a benchmark, or generate its answers and grade them."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from moe_lab.calibration import IdentifiedText
from moe_lab.calibration.documents import BLANK_LINE
from moe_lab.config import (
    BackendConfig,
    BenchmarkConfig,
    CalibrationConfig,
    Config,
    ModelConfig,
)
from moe_lab.errors import Unavailable
from moe_lab.evaluation import Policy, engines, run
from moe_lab.evaluation.answers import COMPUTED, collect_answers
from moe_lab.evaluation.harness import IdentifiedBenchmark, ItemSource, Questions, harness_of
from moe_lab.evaluation.items import (
    Answer,
    Document,
    Item,
    Text,
    read_rows,
    write_rows,
)
from moe_lab.json_files import ResultCache, write_json
from moe_lab.result_files import CONTAMINATION, ITEMS
from moe_lab.study.resources import (
    PROGRAMS,
    Check,
    Resources,
    answer_bytes,
    answer_count,
    benchmark_pace,
    benchmark_run,
)
from moe_lab.study.step import Step, StepFields
from moe_lab.study.steps.files import Files
from moe_lab.study.steps.passes import Facts, loaded_field
from moe_lab.study.steps.recovery import Export, Pruned, export_of

WORDS_PER_PHRASE = 13
"""Number of words of a phrase."""
ITEMS_PER_PHRASE = 10
"""Phrases in more items of a benchmark are not counted, as they belong to the benchmark's
instruction or template."""
_WORD = re.compile(r"[^\W_]+")
Template = tuple[tuple[str, Any], ...]
"""Arguments of a chat template, and marks of thoughts if the model has its own."""


def evaluation_tasks(benchmarks: Iterable[BenchmarkConfig], config: Config) -> list[Task]:
    """The tasks that evaluate a model on all `benchmarks`: one for each group of the suite that
    shares batches, and for each other benchmark."""
    groups: dict[str, list[BenchmarkConfig]] = {}
    for benchmark in benchmarks:
        # a slash cannot be in the name of a benchmark
        key = f"shared/{benchmark.shared_batches}" if benchmark.shared_batches else benchmark.name
        groups.setdefault(key, []).append(benchmark)
    return [_task(group, config) for group in groups.values()]


def _task(benchmarks: Sequence[BenchmarkConfig], config: Config) -> Task:
    """The task that evaluates a model on `benchmarks`, which are one or share their batches."""
    # the Python in which vLLM is installed
    backend = replace(config.backend, python=config.interpreters.get("vllm"))
    generates = any(benchmark.max_new_tokens for benchmark in benchmarks)
    is_chat = any(benchmark.chat for benchmark in benchmarks)
    if backend.name == "server" and not generates:
        # a server does not give likelihoods, which `Evaluate` needs
        backend = BackendConfig(name="hf")
    policy = Policy(
        config.allow_code_execution, config.sandbox, config.allow_judge, config.allow_pickled_data
    )
    gradings = {
        benchmark.name: Grading(IdentifiedBenchmark.of(benchmark), policy)
        for benchmark in benchmarks
    }
    shared = SharedInputs(
        backend,
        items={f"items of {benchmark.name}": Items.of(benchmark) for benchmark in benchmarks},
        questions={
            f"questions of {benchmark.name}": Questions.of(benchmark)
            for benchmark in benchmarks
            if generates
        },
    )

    def results_of(pruned: Pruned) -> dict[str, Evaluate | Grade]:
        # part of the id only if a benchmark uses the chat template
        template = tuple(pruned.model.template_arguments.items()) if is_chat else None
        for name in ("thinking", "thinking_marks"):
            value = getattr(pruned.model, name)
            if value not in (None, ()):
                template = (*(template or ()), (name, value))
        checkpoint = _export_step(pruned, backend.name, config)
        if generates:
            generate = Generate(shared, pruned, checkpoint, template)
            return {name: Grade(grading, generate) for name, grading in gradings.items()}
        ((name, grading),) = gradings.items()
        reference = None
        if grading.benchmark.compares_logits and pruned.plan:
            reference = results_of(Pruned(pruned.loaded))[name]
        step = Evaluate(shared, pruned, checkpoint, template, grading, reference)
        return {name: step}

    return results_of


def _export_step(pruned: Pruned, backend: str, config: Config) -> Export | None:
    """The step that exports the checkpoint for a server or vLLM; None if no export is needed."""
    if pruned.plan is None or backend == "hf":
        return None
    if backend == "vllm" and not pruned.is_recovered:
        if pruned.drops_whole_experts:
            return None  # vLLM masks the unpruned model
        # vLLM needs experts of equal width in a layer, so narrower experts are padded
        return export_of(pruned, config.export, config.verify, default="padded")
    return export_of(pruned, config.export, config.verify)


class Grading(StepFields):
    """Settings for grading answers to a benchmark."""

    benchmark: IdentifiedBenchmark
    policy: Policy
    runtime = ("policy",)

    @property
    def start_checks(self) -> list[Check]:
        """For `Resources.start_checks`: whether grading is possible and permitted on this
        machine."""
        return [(harness_of(self.benchmark).missing_requirements, self.benchmark, self.policy)]


class Items(Step):
    """The items of a benchmark. Every evaluation on the benchmark reads them."""

    kind = "items"
    small = True
    source: ItemSource

    @classmethod
    def of(cls, benchmark: BenchmarkConfig) -> Self:
        """The step that lists the items of `benchmark`."""
        return cls(ItemSource.of(benchmark))

    def label(self) -> str:
        return self.source.name

    def resources(self) -> Resources:
        return Resources(memory=PROGRAMS, isolated=True, pace=["items"], steps_per_job="short")

    def work(self, files: Files) -> None:
        _check_data(self.source, self.settings["source"])
        write_rows(run.list_items(self.source), files.out / ITEMS)

    def read(self, files: Files) -> list[Item]:
        """The items, from the result of this step."""
        return read_rows(Item, files.read(self, ITEMS))


def _check_data(benchmark: BenchmarkConfig, identity: Mapping[str, Any]) -> None:
    """Raise Unavailable when the benchmark's data has changed since the step's id was computed.
    `identity`: the entry of `Step.settings` for the benchmark."""
    if identity["data"] != harness_of(benchmark).data_digest(benchmark):
        raise Unavailable(
            f"benchmark {benchmark.name}: its data has changed since the study was started: start "
            "it again"
        )


class SharedInputs(StepFields):
    """What the runs of all pruned models on the same benchmarks have in common."""

    backend: BackendConfig
    items: dict[str, Items]
    """Role of an input -> items of a benchmark."""
    questions: dict[str, Questions]
    """Role of a setting -> benchmark for which texts are generated, in the order of `items`."""


class BenchmarkRun(Step):
    """A step that runs a pruned model on the items of benchmarks."""

    small = True
    whole_model = True
    shared: SharedInputs
    pruned: Pruned
    checkpoint: Export | None
    template: Template | None
    """None if no benchmark uses a chat template and the model has no marks of its own."""

    @property
    def benchmarks(self) -> Sequence[BenchmarkConfig]:
        """The benchmarks, each with an identity, in the order of `shared.items`."""
        raise NotImplementedError

    def label(self) -> str:
        first, *others = self.benchmarks
        name = first.shared_batches if others else first.name
        return f"{self.pruned.recovered_label}-{name}"

    def resources(self) -> Resources:
        return benchmark_run(
            self.pruned.model,
            self.benchmarks,
            self.shared.backend,
            # the weights with and without the changes
            copies=2 if self.pruned.is_changed else 1,
            installation_checks=[(engines.check_installed, self.shared.backend)],
        )

    @contextmanager
    def engine(self, files: Files) -> Iterator[engines.Engine]:
        """A context with an engine that runs the pruned and recovered model."""
        if self.shared.backend.name == "server":
            from moe_lab.evaluation.engines.server import served_model

            with served_model(
                self.weights(files), self.shared.backend, self.pruned.model, name=self.folder
            ) as server_engine:
                yield server_engine
        elif self.shared.backend.name == "vllm":
            # an exported checkpoint is already pruned
            plan = None if self.checkpoint else files.plan(self.pruned.plan)
            engine = files.models.engine(
                self.weights(files), self.shared.backend, self.pruned.model, plan
            )
            write_json(files.out / "backend.json", engine.metadata)
            yield engine
        else:
            from moe_lab.evaluation.engines.hf import LoadedModel

            with self.pruned.open(files) as (network, tokenizer):
                yield LoadedModel(
                    network,
                    tokenizer,
                    self.pruned.model.template_arguments,
                    self.comparison(files),
                )

    def comparison(self, files: Files) -> Any:
        """Compares logits with those of the unpruned model; None if no benchmark needs that."""
        return None

    def answers(self, files: Files) -> list[list[Answer]]:
        """For each benchmark, the model's answers to the items. An interrupted step resumes from a
        cache of its outputs."""
        items = [step.read(files) for step in self.shared.items.values()]
        cache = ResultCache(files.partial / COMPUTED)
        with self.engine(files) as engine:
            return collect_answers(engine, list(zip(self.benchmarks, items, strict=True)), cache)

    def weights(self, files: Files) -> Path:
        """Folder of the checkpoint that a server or vLLM reads."""
        from moe_lab.models.files import local_folder

        if self.checkpoint:
            return files.path(self.checkpoint, "checkpoint")
        return local_folder(self.pruned.model)


class Evaluate(BenchmarkRun):
    """The results of a pruned model on a benchmark that generates no texts. This step runs the
    model and grades its outputs."""

    kind = "evaluate"
    grading: Grading
    reference: Step | None
    """The step of the unpruned model with which logits are compared; None for this step itself, and
    if the benchmark compares no logits."""

    @property
    def benchmarks(self) -> Sequence[BenchmarkConfig]:
        return [self.grading.benchmark]

    def resources(self) -> Resources:
        return super().resources()._replace(start_checks=self.grading.start_checks)

    def comparison(self, files: Files) -> Any:
        benchmark = self.grading.benchmark
        if not benchmark.compares_logits:
            return None
        from moe_lab.evaluation.fidelity import TOP, Comparison

        read = partial(files.read, self.reference) if self.reference else None
        return Comparison(benchmark.parameters.get("top", TOP), files.partial, read)

    def work(self, files: Files) -> None:
        benchmark = self.grading.benchmark
        _check_data(benchmark, self.settings["benchmark"])
        (answers,) = self.answers(files)
        run.grade(answers, benchmark, files.out, policy=self.grading.policy)
        # the unpruned model's distributions
        for file in files.partial.glob("*.safetensors"):
            shutil.copy(file, files.out)


class Generate(BenchmarkRun):
    """The texts that a pruned model generates for benchmarks, which `Grade` grades. Benchmarks of a
    group of the suite share batches."""

    kind = "generate"

    @property
    def benchmarks(self) -> Sequence[BenchmarkConfig]:
        return list(self.shared.questions.values())

    def resources(self) -> Resources:
        disk = sum(answer_bytes(benchmark) for benchmark in self.benchmarks)
        resources = super().resources()._replace(disk=disk)
        if self.shared.backend.name == "server":
            # each step starts a server of its own, so steps gain nothing from sharing a job
            return resources._replace(job=None, steps_per_job="one")
        return resources

    def work(self, files: Files) -> None:
        for benchmark, answers in zip(self.benchmarks, self.answers(files), strict=True):
            write_rows(answers, files.out / answers_file(benchmark))


def answers_file(benchmark: BenchmarkConfig) -> str:
    """Name of the file of a `Generate` step that has the answers to a benchmark."""
    return f"answers-{benchmark.name}.jsonl.gz"


class Grade(Step):
    """The results on one benchmark, graded from generated answers without loading a model."""

    kind = "grade"
    small = True
    grading: Grading
    generate: Generate

    def label(self) -> str:
        return f"{self.generate.pruned.recovered_label}-{self.grading.benchmark.name}"

    def resources(self) -> Resources:
        """Resources of a worker process, as grading may run programs that the model wrote."""
        benchmark = self.grading.benchmark
        return Resources(
            memory=PROGRAMS,
            isolated=True,
            units=float(answer_count(benchmark)),
            pace=benchmark_pace(benchmark),
            steps_per_job="cells",
            start_checks=self.grading.start_checks,
        )

    def work(self, files: Files) -> None:
        benchmark = self.grading.benchmark
        _check_data(benchmark, self.settings["benchmark"])
        answers = read_rows(Answer, files.read(self.generate, answers_file(benchmark)))
        run.grade(answers, benchmark, files.out, policy=self.grading.policy)


class Contamination(Step):
    """For each benchmark, the number of items that share a phrase with the tokens of a calibration
    set."""

    kind = "contamination"
    small = True
    facts: Facts
    """Facts of the model whose tokenizer determines where the calibration set ends."""
    text: IdentifiedText
    items: dict[str, Items]
    """Role of an input -> items of a benchmark."""

    @classmethod
    def of(
        cls, model: ModelConfig, text: CalibrationConfig, benchmarks: Iterable[BenchmarkConfig]
    ) -> Self:
        """The step that compares `text` with the items of `benchmarks`."""
        # few-shot examples are items of another split, and are not compared with the text
        items = {
            f"items of {benchmark.name}": Items.of(replace(benchmark, shots=0))
            for benchmark in benchmarks
        }
        identified_text = IdentifiedText.of(replace(text, batch_tokens=1, parts=1))
        return cls(loaded_field(model).facts, identified_text, items)

    def label(self) -> str:
        return f"{self.text.name}-{self.facts.model.name}"

    def resources(self) -> Resources:
        return Resources(
            memory=PROGRAMS, isolated=True, pace=[self.facts.id], steps_per_job="short"
        )

    def work(self, files: Files) -> None:
        """Write the result of `count_contamination` for each benchmark."""
        text_phrases = {phrase for text in self._texts() for phrase in phrases(text)}
        counts = {}
        for step in self.items.values():
            name = step.source.name
            counts[name] = count_contamination(step.read(files), text_phrases)
        write_json(files.out / CONTAMINATION, counts)

    def _texts(self) -> Iterator[str]:
        """Yield the texts of the calibration set: each sequence of adjacent valid tokens of a row,
        decoded."""
        from moe_lab.calibration.batches import batches
        from moe_lab.models.files import local_folder
        from moe_lab.models.load import load_tokenizer

        model = self.facts.model
        tokenizer = load_tokenizer(local_folder(model), model)
        for ids, valid in batches(self.text, tokenizer).batches:
            # a batch has one row, as batch_tokens is 1
            row = zip(ids[0].tolist(), valid[0].tolist(), strict=True)
            for is_valid, pairs in groupby(row, key=lambda pair: pair[1]):
                if is_valid:
                    yield tokenizer.decode([token for token, _ in pairs])


Task = Callable[[Pruned], dict[str, Evaluate | Grade]]
"""Pruned model -> name of a benchmark -> the step with its results on the benchmark."""


def phrases(text: str) -> Iterator[str]:
    """All sequences of WORDS_PER_PHRASE adjacent words in a text, in lower case. Words are runs of
    letters and digits."""
    words = _WORD.findall(text.lower())
    for end in range(WORDS_PER_PHRASE, len(words) + 1):
        yield " ".join(words[end - WORDS_PER_PHRASE : end])


def count_contamination(items: Iterable[Item], text_phrases: Set[str]) -> dict[str, int]:
    """How many items have a phrase ("comparable"), and how many have a phrase that is also in
    `text_phrases` ("found"). Each paragraph of a `Document` counts as an item. Similar to the
    analysis of GPT-3 (arXiv 2005.14165, appendix C)."""
    comparable = 0
    shared_phrases = []  # for each item, its phrases that are also in the text
    for item in items:
        for texts in _item_texts(item):
            item_phrases = {phrase for text in texts for phrase in phrases(text)}
            comparable += bool(item_phrases)
            shared_phrases.append(item_phrases & text_phrases)
    item_counts = Counter(phrase for shared in shared_phrases for phrase in shared)
    found = sum(
        any(item_counts[phrase] <= ITEMS_PER_PHRASE for phrase in shared)
        for shared in shared_phrases
    )
    return {"comparable": comparable, "found": found}


def _item_texts(item: Item) -> Iterator[list[str]]:
    """Yield lists of texts; each list is compared as one item."""
    texts: list[str] = []
    for request in item.requests:
        if isinstance(request, Document):
            yield from (
                [paragraph] for paragraph in request.text.split(BLANK_LINE) if paragraph.strip()
            )
            continue
        if isinstance(request, Text):
            prompt, answer = request.prompt, request.reference or ""
        else:  # a `Pair`
            prompt, answer = request.context, request.continuation
        if isinstance(prompt, str):
            texts.append(prompt + answer)
        else:
            texts += [*(message["content"] for message in prompt), answer]
    if texts:
        yield texts
