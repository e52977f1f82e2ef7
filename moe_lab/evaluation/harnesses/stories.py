"""Stories that continue prompts, graded by the rules of a checklist: the shipped counterpart of
WildBench."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, check_known
from moe_lab.evaluation import Policy, mirror
from moe_lab.evaluation.harness import Graded, Harness, graded_by_mean
from moe_lab.evaluation.items import Answer, Item, Text


class Stories(Harness):
    """Beginnings of stories, which the model continues.

    Each line of the data file is {"id", "prompt", "checklist"}. Some lines also have a "reference":
    a good continuation of the prompt.
    """

    metrics = ("score",)
    data = False
    chat = False

    def items(self, benchmark: BenchmarkConfig) -> Iterator[Item]:
        """Yield an item for each row of the data file."""
        for row in self._rows(benchmark):
            reference = row.get("reference")
            request = Text(row["prompt"], benchmark.max_new_tokens, reference=reference)
            yield Item(str(row["id"]), (request,), reference or "")

    def grade(
        self, answers: Sequence[Answer], benchmark: BenchmarkConfig, policy: Policy
    ) -> Graded:
        """A story's outcome is the share of the rules on its checklist that the story follows."""
        rows = {str(row["id"]): row for row in self._rows(benchmark)}

        scores = []
        for answer in answers:
            results = rules_followed(answer.reply.text or "", rows[answer.item]["checklist"])
            scores.append((sum(results) / len(results), json.dumps(results)))
        return graded_by_mean(answers, benchmark, {"score": scores})

    def _rows(self, benchmark: BenchmarkConfig) -> list[mirror.DataRow]:
        """The first benchmark.limit rows of the data file."""
        (file,) = self.data_files(benchmark)
        rows = mirror.read_rows(file)[: benchmark.limit]
        for row in rows:
            if not {"id", "prompt", "checklist"} <= set(row) or not row["checklist"]:
                raise UserError(
                    f"{file}: every line needs an id, a prompt and a checklist of at least one rule"
                )
        return rows


HARNESS = Stories()


# Rules of a checklist.


def sentences(story: str) -> list[str]:
    """The complete sentences of a story, each with the mark that ends it."""
    return [sentence.strip() for sentence in re.findall(r"[^.!?]+[.!?]", story)]


def _mentions(story: str, text: str) -> bool:
    """Whether `text` occurs in `story` as whole words."""
    return re.search(rf"(?<!\w){re.escape(text)}(?!\w)", story) is not None


RULES: dict[str, Callable[..., bool]] = {
    "mentions": _mentions,
    "opens_with": lambda story, text: _mentions("".join(sentences(story)[:1]), text),
    "ends_with": lambda story, text: story.strip().endswith(text),
    "sentences": lambda story, least: len(sentences(story)) >= least,
    "no_repeats": lambda story: 0 < len(set(sentences(story))) == len(sentences(story)),
}


def rules_followed(story: str, checklist: Sequence[Mapping[str, Any]]) -> list[bool]:
    """For each rule of the checklist, whether the story follows the rule.

    An entry of the checklist is {"rule": name, ...arguments}. The rules are:

    mentions(text)    the text occurs as whole words;
    opens_with(text)  the text occurs as whole words in the first sentence;
    ends_with(text)   the story ends with exactly this text;
    sentences(least)  there are at least `least` complete sentences;
    no_repeats()      there is a sentence, and no sentence occurs twice.

    Raises UserError for a rule that does not exist or whose arguments do not fit.
    """
    results = []
    for entry in checklist:
        arguments = dict(entry)
        name = str(arguments.pop("rule", None))
        check_known("checklist.rule", name, RULES)
        try:
            results.append(RULES[name](story, **arguments))
        except TypeError as error:
            raise UserError(f"checklist.rule={name} does not take {arguments}: {error}") from error
    return results
