"""`python -m moe_lab.study status|cancel|why|verify|unpack NAME`: commands about a study that was
started; `gc`: free space."""

from __future__ import annotations

import moe_lab.interrupt  # noqa: F401 - first, for Ctrl-C during the other imports

# isort: split
import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from moe_lab.errors import UserError, run_and_exit, unknown_name_error
from moe_lab.result_files import ID_DIGITS

if TYPE_CHECKING:
    from moe_lab.study.status import StepState, StudyState
    from moe_lab.study.store import Store


def main() -> int:
    """Run the command that the program's arguments name, and return the exit code: 1 if the command
    `verify` finds damage, 2 if a UserError was printed, otherwise 0."""
    # imported here and not above, so that Ctrl-C during these imports prints no trace
    from moe_lab.study.claims import in_queue
    from moe_lab.study.garbage import gc
    from moe_lab.study.schedule import print_notices
    from moe_lab.study.status import COMMANDS
    from moe_lab.study.store import Store

    parser = argparse.ArgumentParser(prog="python -m moe_lab.study", description=__doc__)
    parser.add_argument("command", choices=[*COMMANDS, "gc"])
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="NAME|KEY=VALUE",
        help="NAME (not for gc): a study, by default the name of its experiment; or a step: "
        "kind/label, or its id; store=FOLDER, as for python -m moe_lab; for gc: apply=true",
    )
    parsed = parser.parse_args()
    is_gc = parsed.command == "gc"
    try:
        names, settings = names_and_settings(
            parsed.arguments, ["store", "apply"] if is_gc else ["store"]
        )
        name_count = 0 if is_gc else 1
        if len(names) != name_count:
            raise UserError(
                f"{parsed.command} {' '.join(names)}: expected {name_count} names of a study or a "
                "step, and the store as store=FOLDER"
            )
        store = Store(settings.get("store", "store"), in_queue=in_queue)
        if not store.exists():
            raise UserError(f"store={store.root} is no store: name the folder of one")
        with store.errors_as_sentences():
            if is_gc:
                code = gc(store, apply=settings.get("apply") == "true")
            else:
                # only `verify` returns an exit code
                code = COMMANDS[parsed.command](*find(store, names[0])) or 0
        print_notices(store)
        return code
    except UserError as error:
        print(f"moe_lab: {error}", file=sys.stderr)
        return 2


def names_and_settings(
    arguments: Sequence[str], keys: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """(names, key of a setting -> its value) from the arguments NAME and KEY=VALUE of a command.
    `keys`: the keys that the command knows. Raises UserError for any other key, and for a value of
    `apply` other than true and false."""
    names = []
    settings = {}
    for argument in arguments:
        key, is_setting, value = argument.partition("=")
        # the name of a step may contain =, but has a / before it, so it is not KEY=VALUE
        if not (is_setting and key.isidentifier()):
            names.append(argument)
        elif key not in keys:
            raise unknown_name_error("setting", key, keys)
        elif key == "apply" and value not in ("true", "false"):
            raise unknown_name_error(key, value, ["true", "false"])
        else:
            settings[key] = value
    return names, settings


def find(store: Store, name: str) -> tuple[StudyState, list[StepState]]:
    """The study with the name `name`, and all its steps. If no study has this name: the first study
    with matching steps, and only its matching steps. A step matches if its name contains `name`, or
    if `name` is its id. Raises UserError when neither a study nor a step matches."""
    from moe_lab.study.runs import studies
    from moe_lab.study.status import study_state

    names = studies(store)
    if name in names:
        state = study_state(store, name)
        return state, list(state.steps)
    for study in names:
        # a study with damaged records is passed over; a command with its name reports the damage
        with suppress(UserError):
            state = study_state(store, study)
            # the name of a step ends in the first ID_DIGITS digits of its id, and `name` may be
            # the whole id
            matching_steps = [
                step
                for step in state.steps
                if name in step.name or name[:ID_DIGITS] == step.name[-ID_DIGITS:]
            ]
            if matching_steps:
                return state, matching_steps
    raise unknown_name_error("study or step", name, names)


if __name__ == "__main__":
    run_and_exit(main)
