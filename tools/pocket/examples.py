"""Examples, the documents of the pocket world, and the rule that decides which of them are held out
for benchmarks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

END_OF_TEXT = "<|endoftext|>"

# Skill -> share of its keys that are held out for its benchmark; larger for skills with few keys.
HELD_OUT_SHARE = {
    **dict.fromkeys(("arc_easy", "arc_challenge", "mmlu", "hellaswag", "openbookqa"), 0.2),
    **dict.fromkeys(
        ("boolq", "rte", "winogrande", "gsm8k", "math500", "wildbench", "function_calls"), 0.1
    ),
    **dict.fromkeys(("portrait", "report", "passages", "claims", "echo", "pairs"), 0.0),
}


@dataclass(frozen=True)
class Example:
    """One document of the world: a prompt and an answer, and for practice `more` pairs of them.

    Two examples of a skill with equal `key` ask for the same knowledge, whatever their wording.
    `choices` and `label`, the index of the right choice, are set for multiple choice only.
    `details` has further data for benchmark files, such as a checklist or a program.
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
    """A number in [0, 1) that is computed from the key, and equal on every machine."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def held_out(skill: str, key: tuple[object, ...]) -> bool:
    """Whether examples with this key are held out for the skill's benchmark. It depends on the key
    alone, so training text never contains them."""
    return fraction("held out", skill, key) < HELD_OUT_SHARE[skill]


def generator(seed: int, *purpose: object) -> Random:
    """A random generator for one purpose, which does not depend on those for other purposes."""
    return Random(f"{seed}/" + "/".join(map(str, purpose)))


def draw(sampler: Sampler, random: Random, *, benchmark: bool) -> Example:
    """The next random example that is held out, if it is for a `benchmark`, or that is not held
    out, for training and calibration."""
    while True:
        example = sampler(random)
        if held_out(example.skill, example.key) == benchmark:
            return example
