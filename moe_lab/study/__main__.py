"""`moe-lab status|cancel|why|verify|unpack NAME`: commands about a study that was started; `gc`:
free space."""

from __future__ import annotations

import moe_lab.interrupt  # noqa: F401 - first, for Ctrl-C during the other imports

# isort: split
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from moe_lab.errors import UserError, check_known, run_and_exit, unknown_name_error
from moe_lab.result_files import ID_DIGITS

if TYPE_CHECKING:
    from moe_lab.study.status import StepState, StudyState
    from moe_lab.study.store import Store

NAME_HELP = (
    "a study, by default the name of its experiment; or steps: a part of kind/label, or an id"
)


def main(arguments: Sequence[str]) -> int:
    """Run the command that the first of `arguments` names, and return the exit code: 1 if the
    command `verify` finds damage, 2 if a UserError was printed, otherwise 0."""
    # imported here and not above, so that Ctrl-C during these imports prints no trace
    from moe_lab.arguments import Parser
    from moe_lab.study.claims import in_queue
    from moe_lab.study.garbage import gc
    from moe_lab.study.schedule import print_notices
    from moe_lab.study.status import COMMANDS
    from moe_lab.study.store import Store

    command = next(iter(arguments), "")
    try:
        check_known("command", command, [*COMMANDS, "gc"])
        function = gc if command == "gc" else COMMANDS[command]
        parser = Parser(prog=f"moe-lab {command}", description=function.__doc__)
        parser.add_argument("--store", default="store", help="the folder a run wrote to")
        if function is gc:
            parser.add_argument("--apply", default="false", help="true: remove what is listed")
        else:
            parser.add_argument("name", help=NAME_HELP)
        request = parser.read(arguments[1:])
        store = Store(request.store, in_queue=in_queue)
        if not store.exists():
            raise UserError(f"store={store.root} is no store: name the folder of one")
        with store.errors_as_sentences():
            if function is gc:
                check_known("apply", request.apply, ["true", "false"])
                code = gc(store, apply=request.apply == "true")
            else:
                # only `verify` returns an exit code
                code = COMMANDS[command](*find(store, request.name)) or 0
        print_notices(store)
        return code
    except UserError as error:
        print(f"moe_lab: {error}", file=sys.stderr)
        return 2


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
    run_and_exit(partial(main, sys.argv[1:]))
