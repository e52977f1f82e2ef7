"""How far a search is: on disk after every generation, and read back to go on as if never stopped. No torch."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from numpy.random import PCG64, Generator

from moe_lab.allocation.evolution_settings import Settings
from moe_lab.allocation.evolution_space import Problem, Schedule
from moe_lab.errors import UserError
from moe_lab.json_files import Number, read_json

_ROW = {"schedule": [int], "evaluated": bool, "fitness": Number | None}
_SHAPE = {"search": dict, "generations": int, "random": dict, "history": [_ROW]}


@dataclass
class State:
    """What the next generation depends on."""

    random: Generator
    generations: int = 0
    """Populations evaluated."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """A row for every schedule that was made, as `evolve` describes it."""
    known: dict[Schedule, float] = field(default_factory=dict)
    """Evaluated schedules and their fitness, in the order of evaluation; the history in another form."""

    def elites(self, count: int) -> list[Schedule]:
        """The best schedules so far, best first; of equals the one evaluated first."""
        return sorted(self.known, key=lambda schedule: -self.known[schedule])[:count]


def identity(problem: Problem, settings: Settings, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that decides how a search goes, as JSON has it."""
    document = {"problem": asdict(problem), "settings": asdict(settings), "fingerprint": dict(fingerprint)}
    read: dict[str, Any] = json.loads(json.dumps(document))
    return read


def begin(seed: int) -> State:
    """The state before the first generation."""
    return State(Generator(PCG64(seed)))


def save(path: Path, search: Mapping[str, Any], state: State) -> None:
    """Write the state beside `path` and rename it, so that a killed search leaves the old one or the new one."""
    document = {
        "search": search,
        "generations": state.generations,
        "random": state.random.bit_generator.state,
        "history": state.history,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(json.dumps(document, allow_nan=False))
    beside.replace(path)


def load(path: Path, search: Mapping[str, Any]) -> State | None:
    """The state that `save` wrote; None when there is none, or it is damaged, which is set aside and printed. UserError
    when the file is of a search with other settings, problem or data (naming what differs)."""
    try:
        document = read_json(path, _SHAPE)
        state = State(Generator(PCG64()), document["generations"], document["history"])
        state.random.bit_generator.state = document["random"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):  # of a wrong document, or of a wrong state of the random numbers
        aside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:6]}.damaged")
        path.rename(aside)
        print(f"{path} is damaged: moved to {aside}, and the search begins again", flush=True)
        return None
    for name, old, new in _differences(document["search"], search):
        raise UserError(
            f"{path} is of a search with {name}={_shown(old)}, not {_shown(new)}: go on with the old value, or remove "
            "the file to begin again"
        )
    state.known = {tuple(row["schedule"]): row["fitness"] for row in state.history if row["evaluated"]}
    return state


def _differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, old value, new value) wherever two JSON documents differ; None for what one of them lacks."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        yield name, old, new


def _shown(value: Any) -> str:
    """A value for a sentence; long ones cut."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
