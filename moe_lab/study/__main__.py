"""`python -m moe_lab.study status|cancel|logs|why|verify NAME`: state of a study that was started."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from moe_lab.errors import UserError, end_with, unknown

if TYPE_CHECKING:
    from moe_lab.study.status import StepState, StudyState
    from moe_lab.study.store import Store


def main() -> int:
    """Run a command; exit code 1 for damaged steps, 2 with a message for an unknown name."""
    from moe_lab.study.progress import say_notices
    from moe_lab.study.status import COMMANDS  # imported here so that Ctrl-C during the import prints no trace
    from moe_lab.study.store import Store

    parser = argparse.ArgumentParser(prog="python -m moe_lab.study", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("name", help="a study (by default called as its experiment), or a step: kind/label, or its id")
    parser.add_argument("store", nargs="?", default="store=store", help="store=FOLDER, as for python -m moe_lab")
    words = parser.parse_args()
    try:
        store = Store(words.store.removeprefix("store="))
        if not store.is_there():
            raise UserError(f"store={store.root} is no store: name the folder the study was run with")
        with store.errors_as_sentences():
            study, state, steps = find(store, words.name)
            code = COMMANDS[words.command](store, study, state, steps) or 0
        say_notices(store)
        return code
    except UserError as error:
        print(f"moe_lab: {error}", file=sys.stderr)
        return 2


def find(store: Store, name: str) -> tuple[str, StudyState, list[StepState]]:
    """(study, its state, steps) for a name: all steps of the study called so, or the steps that match the name.

    Raises UserError when neither a study nor a step has the name.
    """
    from moe_lab.study.runs import last_about, studies
    from moe_lab.study.status import study_state

    names = studies(store)
    if name in names:
        state = study_state(store, name)
        return name, state, list(state.steps.values())
    for study in names:
        if last_about(store, study) is None:  # its records are damaged; naming the study itself reports that
            continue
        state = study_state(store, study)
        matching = [step for step in state.steps.values() if name in step.name or step.id.startswith(name)]
        if matching:
            return study, state, matching
    raise unknown("study or step", name, names)


if __name__ == "__main__":
    end_with(main)
