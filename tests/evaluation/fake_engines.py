"""Requests to engines in tests: evaluation of benchmarks without files, texts and losses alone, and
engines with given replies."""

import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as parquet
import pytest
import torch
from jinja2 import Environment

from moe_lab.config import BenchmarkConfig, Sampling
from moe_lab.evaluation import Policy, run
from moe_lab.evaluation.answers import ResultCache, collect_answers
from moe_lab.evaluation.engines import Engine, GeneratedText, GenerationSettings, Prompt
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.engines.vllm import VllmModel
from moe_lab.evaluation.harness import Graded, benchmark_errors, harness_of
from moe_lab.evaluation.items import Answer, Item, Reply, Text, answer_after_thought
from moe_lab.result_files import Result

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def evaluate(engine: Engine, benchmark: BenchmarkConfig, policy: Policy | None = None) -> Graded:
    """Grade the engine's answers by the harness of a benchmark, without files and without a
    preflight."""
    (answers,) = collect_answers(engine, [(benchmark, run.list_items(benchmark))])
    graded = harness_of(benchmark).grade(answers, benchmark, policy or Policy())
    graded.protocol.setdefault("prompt", answers[0].prompt)
    return graded


def evaluate_into(
    engine: Engine, benchmark: BenchmarkConfig, out: Path, *, policy: Policy
) -> list[Result]:
    """Write the results of the engine on a benchmark to `out`, and return them."""
    (answers,) = collect_answers(engine, [(benchmark, run.list_items(benchmark))])
    return run.grade(answers, benchmark, out, policy=policy)


def problems(benchmarks: Sequence[BenchmarkConfig], policy: Policy) -> list[str]:
    """Errors in the settings of benchmarks, and missing requirements of this machine."""
    missing = [
        harness_of(benchmark).missing_requirements(benchmark, policy) for benchmark in benchmarks
    ]
    return list(dict.fromkeys([*benchmark_errors(benchmarks), *chain.from_iterable(missing)]))


def collect_replies(
    engine: Engine,
    prompts: Sequence[str],
    max_tokens: int = 24,
    *,
    stop: tuple[str, ...] = (),
    references: Sequence[str | None] = (),
    cache: ResultCache | None = None,
    skip_long: bool = False,
    **settings: Any,
) -> list[Reply]:
    """The engine's replies to prompts; `settings` are those of a benchmark."""
    references = references or [None] * len(prompts)
    items = [
        Item(str(number), (Text(prompt, max_tokens, stop, reference, skip_long=skip_long),))
        for number, (prompt, reference) in enumerate(zip(prompts, references, strict=True))
    ]
    benchmark = BenchmarkConfig("b", "lm_eval", "none", **settings)
    (answers,) = collect_answers(engine, [(benchmark, items)], cache)
    return [answer.reply for answer in answers]


def vllm_with_replies(tokenizer: Any, replies: Sequence[Any]) -> VllmModel:
    """An engine of vLLM without a process, which answers the next request with these replies."""
    engine = VllmModel.__new__(VllmModel)
    fields = {"max_length": 512, "items": lambda *_, **__: iter(replies)}
    vars(engine).update(
        fields, tokenizer=tokenizer, end_token_ids=[tokenizer.eos_token_id], template_arguments={}
    )
    return engine


def generate(
    engine: Engine, prompts: Sequence[str], max_tokens: int = 24, **settings: Any
) -> list[str]:
    """The texts that the engine generates after prompts, including thoughts."""
    return [
        reply.thought + (reply.text or "")
        for reply in collect_replies(engine, prompts, max_tokens, **settings)
    ]


def made_up_answers(benchmark: BenchmarkConfig, texts: Sequence[str]) -> list[Answer]:
    """Answers to a benchmark's items made of `texts`, with thoughts and answers separated."""
    answers = []
    for item, text in zip(harness_of(benchmark).items(benchmark), texts, strict=True):
        answer = answer_after_thought(text)
        thought = text[: len(text) - len(answer or "")]
        answers.append(
            Answer(item.name, str(item.requests[0].prompt), (Reply(answer, thought, "end"),))
        )
    return answers


def samples(out: Path) -> list[dict[str, Any]]:
    """The rows that an evaluation left in `out`."""
    rows: list[dict[str, Any]] = parquet.read_table(out / "samples.parquet").to_pylist()
    return rows


def protocol(out: Path) -> dict[str, Any]:
    """The protocol of the evaluation in `out`."""
    fields: dict[str, Any] = json.loads((out / "result.json").read_text())["protocol"]
    return fields


def with_chat_template(subject: LoadedModel, template: str | None, **arguments: Any) -> LoadedModel:
    """The model with another chat template."""
    tokenizer = deepcopy(subject.tokenizer)
    tokenizer.chat_template = template
    return replace(subject, tokenizer=tokenizer, template_arguments=arguments)


def log_likelihood(subject: LoadedModel, prompt: str, answer: str) -> float:
    """Log-likelihood of an answer, with the space before it, after a prompt: one unpadded forward
    pass in fp64."""
    prompt_ids, text_ids = (
        subject.tokenizer(text).input_ids for text in (prompt.rstrip(), prompt + answer)
    )
    with torch.inference_mode():
        scores = subject.model(torch.tensor([text_ids])).logits[0].double().log_softmax(-1)
    return sum(
        float(scores[position - 1, text_ids[position]])
        for position in range(len(prompt_ids), len(text_ids))
    )


def assert_equals_lm_eval(engine: LoadedModel, benchmark: BenchmarkConfig) -> None:
    """Assert that outcomes and likelihoods of every item equal those of lm-eval's own evaluation
    with its own model class.

    With several answers, the loss on the right answer must equal the loss computed from its
    likelihood.
    """
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    from moe_lab.evaluation.adapters import lm_eval_tasks

    tasks = lm_eval_tasks.tasks_and_groups(benchmark)["tasks"]
    indices = lm_eval_tasks.indices_to_evaluate(tasks, benchmark.limit)
    for task in tasks.values():
        task.set_fewshot_seed(benchmark.parameters.get("fewshot_seed", lm_eval_tasks.SEED))
    expected = evaluator.evaluate(
        lm=HFLM(
            engine.model,
            tokenizer=engine.tokenizer,
            max_length=benchmark.max_length or engine.max_length,
        ),
        task_dict={"tasks": {name: tasks[name] for name in indices}, "groups": {}},
        samples=indices,
        bootstrap_iters=0,
        log_samples=True,
    )
    graded = evaluate(engine, benchmark)
    doc_hashes = [item.doc_hash for item in run.list_items(benchmark)]
    for report, metric in benchmark.reports.items():
        name, _, filter_name = metric.partition(",")
        rows = [
            row
            for task in indices
            for row in expected["samples"][task]
            if not filter_name or row["filter"] == filter_name
        ]
        assert doc_hashes == [row["doc_hash"] for row in rows]
        samples = [sample for sample in graded.samples if sample["benchmark"] == report]
        assert len(samples) == len(rows) == sum(map(len, indices.values())) > 0
        for sample, row in zip(samples, rows, strict=True):
            value = row[name]
            outcome = -value[0] / value[1] if isinstance(value, tuple) else value
            assert sample["outcome"] == pytest.approx(outcome, rel=1e-4)
            first = row["resps"][0][0]
            if isinstance(first, str):
                assert (sample["output"], sample["extracted"]) == (
                    first,
                    str(row["filtered_resps"][0]),
                )
            elif isinstance(first, tuple | list):
                likelihoods = [float(reply[0][0]) for reply in row["resps"]]
                assert json.loads(str(sample["output"])) == pytest.approx(likelihoods, abs=1e-3)
                if len(likelihoods) > 1 and isinstance(row["target"], int):
                    answer = row["arguments"][row["target"]][1]
                    loss = -likelihoods[row["target"]] / math.log(2) / len(answer.encode())
                    assert sample["answer_loss"] == pytest.approx(loss, abs=1e-3)


class WordTokenizer:
    """A tokenizer whose tokens are words, with a chat template."""

    bos_token_id = eos_token_id = bos_token = None

    def __init__(self, template: str = PLAIN) -> None:
        self.chat_template = template
        self.conversations: dict[str, Any] = {}
        """Prompt -> the conversation from which it was rendered, in the order of rendering."""
        self._words: dict[str, int] = {}

    def __call__(self, texts: Sequence[str], **_: Any) -> Any:
        return SimpleNamespace(
            input_ids=[
                [self._words.setdefault(word, len(self._words)) for word in text.split()]
                for text in texts
            ]
        )

    def decode(self, tokens: Sequence[int]) -> str:
        words = list(self._words)
        return " ".join(words[token] for token in tokens)

    def get_chat_template(self, **_: Any) -> str:
        return self.chat_template

    def apply_chat_template(self, messages: Any, *, tools: Any = (), **_: Any) -> str:
        prompt = (
            Environment().from_string(self.chat_template).render(messages=messages, tools=tools)
        )
        self.conversations.setdefault(prompt, messages)
        return prompt


class ScriptedEngine(Engine):
    """Generates given texts: a function of the prompt, or one text for each conversation, in the
    order of the items."""

    scores = False
    max_length = None

    def __init__(self, texts: Sequence[str] | Callable[[str], str], template: str = PLAIN) -> None:
        self.texts, self.tokenizer, self.template_arguments = texts, WordTokenizer(template), {}
        self.generation = GenerationSettings(0)
        """Settings of the last prompt."""

    def generate(self, prompts: Sequence[Prompt], batch_size: int) -> list[GeneratedText]:
        self.generation = prompts[-1].generation
        return [GeneratedText(self._text_for(prompt.text)) for prompt in prompts]

    def _text_for(self, prompt: str) -> str:
        if callable(self.texts):
            return self.texts(prompt)
        return self.texts[list(self.tokenizer.conversations).index(prompt)]


def assert_only_answers_are_graded(
    benchmark: BenchmarkConfig,
    answers: Sequence[tuple[str, str]],
    out: Path,
    policy: Policy | None = None,
    template: str = PLAIN,
) -> None:
    """Assert the results of a model that thinks and answers each of three items three times.
    `answers`: the right and a wrong answer to each item.

    A thought has a stop text and the answer that would be graded otherwise. Two thoughts about the
    last item are cut.
    """
    harness = harness_of(benchmark)
    (metric,) = benchmark.reports.values()
    prefix = "" if harness.metrics else f"{metric}_"
    metrics = (f"{metric}_pass@1", f"{metric}_avg@3", f"{prefix}pass@2", f"{prefix}maj@3")
    scores = dict(zip((metric, *metrics), [4 / 9, 4 / 9, 4 / 9, 7 / 9, 2 / 3], strict=True))
    if not harness.votes or harness.runs_programs(benchmark):
        scores.popitem()
    benchmark = replace(
        benchmark,
        sampling=Sampling(temperature=1.0, samples=3),
        max_length=None,
        max_new_tokens=99,
        reports={name: name for name in scores},
    )
    texts = {}
    for item, (right, wrong), kinds in zip(
        run.list_items(benchmark), answers, ("rrw", "wwr", "ccr"), strict=True
    ):
        (request,) = item.requests
        assert isinstance(request, Text)
        prompt = request.prompt
        thought = f"<think>hm{''.join(request.stop)}"
        forms = {
            "r": f"{thought}{wrong}</think>\n{right}",
            "w": f"{thought}{right}</think>{wrong}",
            "c": f"{thought}{right}",
        }
        part = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        texts[part] = iter([forms[kind] for kind in kinds])

    def text_after(prompt: str) -> str:
        (of_item,) = (each for part, each in texts.items() if part in prompt)
        return next(of_item)

    engine = ScriptedEngine(text_after, template + "{# <think> #}")
    results = evaluate_into(engine, benchmark, out, policy=policy or Policy())
    assert engine.generation.stop == ()
    assert {result["benchmark"]: result["score"] for result in results} == pytest.approx(scores)
    assert (results[0]["n"], results[0]["stderr"]) == (3, pytest.approx(1 / 9))
    rows = [row for row in samples(out) if row["benchmark"] == metric]
    right_answers = {right for right, _ in answers}
    assert all(row["outcome"] == (row["output"] in right_answers) for row in rows)
    assert sorted(row["replicate"] for row in rows) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert sum(row["unfinished"] for row in rows) == 2
    assert all(row["thought"].startswith("<think>hm") for row in rows)
    assert {row["output"] for row in rows} <= {None, *chain.from_iterable(answers)}
