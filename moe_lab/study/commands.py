"""The verbs status, why, cancel, verify and unpack of `moe-lab`, about a study that was started;
and gc, which frees space."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from moe_lab.arguments import Parser
from moe_lab.errors import UserError, check_known, unknown_name_error
from moe_lab.result_files import ID_DIGITS, start_of
from moe_lab.study.garbage import gc
from moe_lab.study.runs import studies
from moe_lab.study.schedule import print_notices
from moe_lab.study.status import COMMANDS, StepState, StudyState, study_state
from moe_lab.study.store import Store

NAME_HELP = (
    "a study, by default the name of its experiment; or steps: a part of kind/label, or an id"
)


def main(arguments: Sequence[str]) -> int:
    """Run the verb that the first of `arguments` names, and return the exit code: 1 if the
    command `verify` finds damage, otherwise 0."""
    command, *words = arguments
    commands: Mapping[str, Callable[..., int | None]] = {**COMMANDS, "gc": gc}
    function = commands[command]
    parser = Parser(prog=f"moe-lab {command}", description=function.__doc__)
    parser.add_argument("--store", default="store", help="the folder a run wrote to")
    if function is gc:
        parser.add_argument("--apply", default="false", help="true: remove what is listed")
    else:
        parser.add_argument("name", help=NAME_HELP)
    request = parser.read(words)
    store = Store(request.store)
    if not store.exists():
        raise UserError(f"store={store.root} is no store: name the folder of one")
    with store.errors_as_sentences():
        if function is gc:
            check_known("apply", request.apply, ["true", "false"])
            code = gc(store, apply=request.apply == "true")
        else:
            # only `verify` returns an exit code
            code = function(*find(store, request.name)) or 0
    print_notices(store)
    return code


def find(store: Store, name: str) -> tuple[StudyState, list[StepState]]:
    """The study with the name `name`, and all its steps. If no study has this name: the first study
    with matching steps, and only its matching steps. A step matches if its name contains `name`, or
    if `name` is its id. Raises UserError when neither a study nor a step matches."""
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
                if name in step.name or name[:ID_DIGITS] == start_of(step.name)
            ]
            if matching_steps:
                return state, matching_steps
    raise unknown_name_error("study or step", name, names)
