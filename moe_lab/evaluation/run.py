"""List the items of a benchmark, grade the answers of a model, and write the results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mode
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation import Policy
from moe_lab.evaluation.harness import check_count, harness_of
from moe_lab.evaluation.items import Answer, Item, replace_surrogates
from moe_lab.json_files import write_text
from moe_lab.result_files import SCHEMA, SHAREABLE, Result, ResultFile, Sample, TextMeasures


def list_items(benchmark: BenchmarkConfig) -> list[Item]:
    """All items of the benchmark.

    UserError if there are none, and if two items have the same name. Without a benchmark.limit,
    also UserError if the number of items is not benchmark.expected.
    """
    harness = harness_of(benchmark)
    items = list(harness.items(benchmark))
    if not items:
        raise UserError(f"benchmark {benchmark.name} has no items: check its data and parameters")
    if benchmark.limit is None and harness.counts_items:
        check_count(benchmark, len(items))
    names = [item.name for item in items]
    if len(set(names)) < len(names):
        raise UserError(f"{benchmark.name}: two items have the name {mode(names)}")
    return items


def grade(
    answers: Sequence[Answer], benchmark: BenchmarkConfig, out: Path, *, policy: Policy
) -> list[Result]:
    """Grade the answers, write out/result.json and out/samples.parquet, and return the results.

    UserError for wrong settings or files. Unavailable for requirements that are missing on this
    machine.
    """
    harness = harness_of(benchmark)
    if errors := list(harness.setting_errors(benchmark)):
        raise UserError("; ".join(errors))
    if missing := list(harness.missing_requirements(benchmark, policy)):
        raise Unavailable("; ".join(missing))
    grades = harness.grade(answers, benchmark, policy)
    for result in grades.results:
        # `n`: graded items. If `expected` is None, `n` takes its place, and no item is missing.
        missing_items = (result["expected"] or result["n"]) - result["n"]
        if benchmark.limit is None and not 0 <= missing_items <= grades.max_unscored:
            raise RuntimeError(
                f"{result['benchmark']}: {result['n']} of {result['expected']} items were graded"
            )
    protocol = {
        "prompt": answers[0].prompt,  # an example
        **harness.identity(benchmark),
        **grades.protocol,
    }
    if answers[0].sampling:
        protocol["sampling"] = answers[0].sampling
    # `fromkeys` drops repetitions, as an item may have several answers
    too_long = [answer.item for answer in answers if answer.reply.ended == "too_long"]
    protocol["too_long"] = list(dict.fromkeys(too_long))
    unfinished = [answer.item for answer in answers if answer.reply.text is None]
    protocol["unfinished_thoughts"] = list(dict.fromkeys(unfinished))
    if not benchmark.shareable:
        protocol[SHAREABLE] = False
    write_results(grades.results, grades.samples, protocol, out)
    return grades.results


def write_results(
    results: Sequence[Result],
    samples: Sequence[Sample],
    protocol: dict[str, Any],
    out: Path,
) -> None:
    """Write the files result.json and samples.parquet of an evaluation to the folder `out`, the
    latter without empty columns."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    out.mkdir(parents=True, exist_ok=True)
    types = dict.fromkeys(Sample.__annotations__, arrow.string())
    numbers = ("outcome", "answer_loss", "units", *TextMeasures.__annotations__)
    types |= dict.fromkeys(numbers, arrow.float64())
    types["replicate"] = arrow.int64()
    rows = [
        {
            name: replace_surrogates(value) if isinstance(value, str) else value
            for name, value in sample.items()
        }
        for sample in samples
    ]
    table = arrow.Table.from_pylist(rows, arrow.schema(types))
    filled = [name for name in types if table[name].null_count < max(len(table), 1)]
    # A report reads thousands of such files. Without empty columns, dictionaries and statistics
    # that takes a third of the time.
    parquet.write_table(
        table.select(filled), out / "samples.parquet", use_dictionary=False, write_statistics=False
    )
    content = ResultFile(schema=SCHEMA, results=list(results), protocol=protocol)
    write_text(out / "result.json", json.dumps(content, indent=1, allow_nan=False))
