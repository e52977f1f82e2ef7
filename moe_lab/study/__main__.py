"""`python -m moe_lab.study status|cancel|logs|why|verify NAME`: state of a study that was started; `gc`: free space;
`sync [NAME]`: exchange a study, or all, with the URL of a store."""

from __future__ import annotations

import moe_lab.interrupt  # noqa: F401 - first, for Ctrl-C during the other imports

# isort: split
import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moe_lab.errors import UserError, end_with, unknown

if TYPE_CHECKING:
    from moe_lab.study.status import StepState, StudyState
    from moe_lab.study.store import Store


def main() -> int:
    """Run a command; exit code 1 for damaged steps, 2 with a message for an unknown name."""
    from moe_lab.study.garbage import gc
    from moe_lab.study.progress import say_notices
    from moe_lab.study.status import COMMANDS  # imported here so that Ctrl-C during the import prints no trace
    from moe_lab.study.store import Store
    from moe_lab.study.sync import sync

    commands: dict[str, Callable[..., int | None]] = {**COMMANDS, gc.__name__: gc, sync.__name__: sync}
    parser = argparse.ArgumentParser(prog="python -m moe_lab.study", description=__doc__)
    parser.add_argument("command", choices=commands)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="NAME|KEY=VALUE",
        help="NAME (not for gc): a study (by default called as its experiment), or a step: kind/label, or its id; "
        "store=FOLDER or URL, as for python -m moe_lab; for gc: apply=true",
    )
    words = parser.parse_args()
    command = commands[words.command]
    try:
        names, folder, options = split(words.words, command.__kwdefaults__ or {})
        if len(names) != (command is not gc) and not (command is sync and not names):
            raise UserError(_about_names(words.command, names))
        store = Store(folder)
        if not store.is_there() and command is not sync:
            raise UserError(_about_place(store))
        with store.errors_as_sentences():
            about = names if command is sync or command is gc else find(store, names[0])
            code = command(store, *about, **options) or 0
        say_notices(store)
        return code
    except UserError as error:
        print(f"moe_lab: {error}", file=sys.stderr)
        return 2


def split(words: Sequence[str], options: Mapping[str, Any]) -> tuple[list[str], str, dict[str, bool]]:
    """(names, folder of the store, value of each option) from the words after a command.

    `options`: the command's own keys, which are all true or false. Raises UserError for an unknown key or value.
    """
    names, folder = [], "store"
    values: dict[str, bool] = {}
    for word in words:
        key, is_setting, value = word.partition("=")
        if not (is_setting and key.isidentifier()):  # the names of some steps have a =
            names.append(word)
        elif key == "store":
            folder = value
        elif key not in options:
            raise unknown("setting", key, ["store", *options])
        elif value not in ("true", "false"):
            raise unknown(key, value, ["true", "false"])
        else:
            values[key] = value == "true"
    return names, folder, values


def _about_place(store: Store) -> str:
    if store.url:
        return (
            f"store={store.url}: there is nothing of it on this machine: start a study with it, or python -m "
            f"moe_lab.study sync NAME store={store.url}"
        )
    return f"store={store.root} is no store: name the folder the study was run with"


def _about_names(command: str, names: Sequence[str]) -> str:
    if command == "gc":
        return f"gc {names[0]}: gc frees what no study of the store refers to, and takes no name"
    if not names:
        return f"{command} takes the name of a study or a step: python -m moe_lab.study {command} NAME"
    return f"{command} {' '.join(names)}: expected one name, and the store as store={names[1]}"


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
