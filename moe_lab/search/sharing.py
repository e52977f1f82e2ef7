"""Whether the candidates of a search share forward passes, chosen by timing the same candidates both ways."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from moe_lab.json_files import Damaged, Number, read_json, write_json
from moe_lab.models.device import OUT_OF_MEMORY
from moe_lab.search.prefix import Schedule

ROUNDS = 2
"""How often both ways are timed; the fastest round counts."""
GAIN = 0.9
"""Candidates share passes if that takes at most this part of the time: otherwise little is gained, and hidden states
can be kept from one generation to the next, which saves up to a tenth."""

Trial = Callable[[Sequence[Schedule], int], Sequence[float]]
"""(schedules, how many of them share forward passes) -> the fitness of each, as numbers on the CPU."""


@dataclass(frozen=True)
class Choice:
    """The chosen way, and why."""

    together: bool
    """Whether candidates share forward passes."""
    most: int | None
    """Candidates that share passes at most, because memory ran out with more; None if it did not."""
    seconds: dict[str, float]
    """Seconds of the same candidates alone and together; empty if no two of them fit the memory."""
    difference: float
    """Largest difference between their fitness in the two ways."""


_SHAPE = {"together": bool, "most": int | None, "seconds": {str: Number}, "difference": Number}


class Sharing:
    """How many candidates share forward passes: one each, or as many as there is room for.

    The faster way is chosen once for a search. Matrix products of another size may round differently, so a change
    during the search could change the order of nearly equal candidates. For the same reason a resumed search reads the
    choice from the file `record`.
    """

    def __init__(self, record: Path | None) -> None:
        self.record = record
        self.choice = _load(record) if record else None

    def size(self, room: int) -> int:
        """How many candidates share forward passes where there is room for `room`."""
        if self.choice is None or not self.choice.together:
            return 1
        return min(room, self.choice.most or room)

    def choose(self, schedules: Sequence[Schedule], trial: Trial) -> None:
        """Time `trial` with these schedules alone and together, and choose the faster way."""
        group = list(schedules)
        while len(group) > 1 and not _fits(group, lambda group: trial(group, len(group))):
            group = group[: len(group) // 2]
        most = len(group) if len(group) < len(schedules) else None
        if len(group) == 1:
            self._set(Choice(False, most, {}, 0.0))
            return
        alone, together = [], []
        for _ in range(ROUNDS):
            alone.append(timed(trial, group, 1))
            together.append(timed(trial, group, len(group)))
        seconds = {"alone": min(one for one, _ in alone), "together": min(one for one, _ in together)}
        difference = max(abs(one - other) for one, other in zip(alone[0][1], together[0][1], strict=True))
        self._set(Choice(seconds["together"] < GAIN * seconds["alone"], most, seconds, difference))

    def run(self, schedules: Sequence[Schedule], room: int, compute: Callable[[Sequence[Schedule]], object]) -> None:
        """Call `compute` with all schedules, as many at a time as share forward passes; fewer when memory runs out."""
        left = list(schedules)
        while left:
            group = left[: self.size(room)]
            if _fits(group, compute):
                left = left[len(group) :]
            else:
                assert self.choice is not None  # as several share a pass
                self._set(replace(self.choice, most=len(group) // 2))

    def _set(self, choice: Choice) -> None:
        self.choice = choice
        if self.record:
            self.record.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.record, asdict(choice))


def timed(trial: Trial, schedules: Sequence[Schedule], size: int) -> tuple[float, Sequence[float]]:
    """(wall-clock seconds, values) of a trial."""
    start = time.perf_counter()
    values = trial(schedules, size)
    return time.perf_counter() - start, values


def _fits(schedules: Sequence[Schedule], compute: Callable[[Sequence[Schedule]], object]) -> bool:
    """Call `compute`; False when memory runs out for several schedules. For a single one the error is raised."""
    try:
        compute(schedules)
    except OUT_OF_MEMORY:
        if len(schedules) == 1:
            raise
        print(f"out of memory for {len(schedules)} candidates at once: going on with fewer", flush=True)
        return False
    return True


def _load(record: Path) -> Choice | None:
    """The choice in a file; None without the file, and for a damaged one."""
    try:
        return Choice(**read_json(record, _SHAPE))
    except FileNotFoundError:
        return None
    except (Damaged, TypeError):  # TypeError: missing or other fields
        print(f"{record} is damaged: whether candidates share forward passes is measured again", flush=True)
        return None
