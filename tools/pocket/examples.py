"""The unit of the pocket world, a prompt with its answer; and the rule that keeps benchmarks apart
from the rest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

END_OF_TEXT = "<|endoftext|>"

# Share of each skill's keys that belongs to its benchmark; skills with few keys give more of them.
HELD_OUT_SHARE = {
    **dict.fromkeys(("arc_easy", "arc_challenge", "mmlu", "hellaswag", "openbookqa"), 0.2),
    **dict.fromkeys(
        ("boolq", "rte", "winogrande", "gsm8k", "math500", "wildbench", "function_calls"), 0.1
    ),
    **dict.fromkeys(("portrait", "report", "passages", "claims", "echo", "pairs"), 0.0),
}


@dataclass(frozen=True)
class Example:
    """One document of the world.

    prompt + answer is the text a model learns; practice goes on with `more` prompts and answers.
    `key` is what the example is about, free of wording: two examples of one skill with equal keys
    ask for the same knowledge. `choices` and `label` are set for multiple choice only, `details`
    carries what a benchmark file needs beyond that (a checklist, a program).
    """

    skill: str
    key: tuple[object, ...]
    prompt: str
    answer: str
    choices: tuple[str, ...] = ()
    label: int = 0
    details: dict[str, Any] = field(default_factory=dict, compare=False)
    more: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        return "".join(prompt + answer for prompt, answer in self.turns)

    @property
    def turns(self) -> tuple[tuple[str, str], ...]:
        """Prompts and their answers, in order."""
        return ((self.prompt, self.answer), *self.more)


Sampler = Callable[[Random], Example]


def fraction(*key: object) -> float:
    """A number in [0, 1) that depends on the key alone: equal in every process and on every
    machine."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def held_out(skill: str, key: tuple[object, ...]) -> bool:
    """Whether this belongs to the skill's benchmark. Decided by the key alone, so training text can
    never hold it."""
    return fraction("held out", skill, key) < HELD_OUT_SHARE[skill]


def generator(seed: int, *purpose: object) -> Random:
    """A generator of its own for each purpose, so that changing one stream leaves the others as
    they were."""
    return Random(f"{seed}/" + "/".join(map(str, purpose)))


def draw(sampler: Sampler, random: Random, *, benchmark: bool) -> Example:
    """The next example of the wanted side: held out for a benchmark, or anything else for training
    and calibration."""
    while True:
        example = sampler(random)
        if held_out(example.skill, example.key) == benchmark:
            return example
