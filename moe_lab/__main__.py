"""The command `moe-lab VERB ...`, and its verb `run`, which composes the settings of a command line
and runs the study that they describe. `python -m moe_lab` is the same command."""

from __future__ import annotations

import moe_lab.interrupt  # noqa: F401 - first, for Ctrl-C during the other imports

# isort: split
import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from moe_lab.errors import UserError, mask, run_and_exit, unknown_name_error
from moe_lab.paths import conf

START = """moe_lab scores, prunes and evaluates Mixture-of-Experts language models. Three commands
to start with:

  moe-lab run +experiment=task_agnostic
      every expert criterion on a small trained model, in minutes
  moe-lab dry-run +experiment=task_agnostic
      what that would run
  moe-lab run model=FOLDER_OR_HUB_ID calibration=FILE criterion=reap,man,aimer
      your model, your text

`moe-lab --help` lists the other verbs, and `moe-lab run --help` every choice."""
"""Text that is printed without arguments."""
HYDRA_WORD = re.compile(r"-(?!-config-|cd|cn)|[+~]*hydra(?!\.searchpath=)")
"""Beginning of a word that Hydra itself handles: a flag, such as -m, or a setting of Hydra.
`compose` reads the other flags and hydra.searchpath."""


def give_up(sentence: str, code: int = UserError.code) -> NoReturn:
    """Print the error message `sentence`, with secrets masked, and exit with `code`."""
    print(f"moe_lab: {mask(sentence)}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def _errors_as_sentences() -> Iterator[None]:
    """A context that turns errors of the user, and Ctrl-C, into one sentence and an exit code."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from moe_lab.compose import hydra_error_sentence

    try:
        yield
    except UserError as error:
        give_up(str(error), error.code)
    except (HydraException, OmegaConfBaseException) as error:
        give_up(hydra_error_sentence(error))
    except OSError as error:
        # with a setting of Hydra, the cause is probably a folder that this setting names
        if isinstance(error, BrokenPipeError) or not any(
            word.startswith("hydra.") for word in sys.argv
        ):
            raise
        give_up(
            f"{error.filename} cannot be written ({error.strerror}): is hydra.run.dir or "
            "hydra.sweep.dir right?"
        )
    except KeyboardInterrupt:
        print("\nmoe_lab: stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


def main(arguments: Sequence[str]) -> int:
    """Run the verb that the first argument names; settings without a verb are those of `run`.
    Returns the exit code."""
    if not arguments:
        print(START)
        return 0
    verb, *words = arguments
    if verb in VERBS:
        module, *first = VERBS[verb][0].split()
        words = [*first, *words]
        if module == "run":
            return _run(words)
        # only this module is imported, because verbs need different libraries
        code: int = import_module(module).main(words)
        return code
    if verb in ("-h", "--help", "help", "--version", "version"):
        return _print_about(is_version=verb.endswith("version"))
    # a word without these signs is no setting and no option of Hydra
    if verb[0] not in "-+~" and "=" not in verb:
        give_up(str(unknown_name_error("verb", verb, VERBS)))
    return _run(arguments)


def _print_about(is_version: bool) -> int:
    """Print the version, or the verbs. Returns the exit code."""
    from moe_lab import __version__

    if is_version:
        print(f"moe_lab {__version__}")
        return 0
    usage = "moe-lab VERB [NAME ...] [SETTING=VALUE ...]"
    parser = argparse.ArgumentParser(prog="moe-lab", usage=usage)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for name, (_, help) in VERBS.items():
        verbs.add_parser(name, help=help)
    print(f"""{parser.format_help()}
`moe-lab VERB --help` lists the settings of a verb. Examples, and sweeps of published tables:
{Path(__file__).parent}/examples, {Path(__file__).parent}/sweeps""")
    return 0


def _run(words: Sequence[str]) -> int:
    """Run the study that the arguments `words` describe. Returns the exit code of the study."""
    is_for_hydra = any(map(HYDRA_WORD.match, words))
    with _errors_as_sentences():
        _check_hyphens(words)
        return _run_hydra(words) if is_for_hydra else _run_study(words)


def _check_hyphens(words: Sequence[str]) -> None:
    """Raise UserError for a setting that is written as an option, such as --criterion reap."""
    from moe_lab.config import CellConfig, Config
    from moe_lab.config.base import fields_of

    known = fields_of(Config) | fields_of(CellConfig)
    for number, word in enumerate(words):
        key, is_setting, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and key.partition(".")[0] in known:
            example = value if is_setting else next(iter(words[number + 1 :]), "VALUE")
            raise UserError(f"{word}: expected {key}={example}")


def _run_study(words: Sequence[str]) -> int:
    """Run the study that the arguments `words` describe. Returns the exit code of the study."""
    from moe_lab.compose import CONFIG, compose, hydra_context

    parser = argparse.ArgumentParser(prog="moe_lab", allow_abbrev=False, add_help=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default=CONFIG)
    flags, settings = parser.parse_known_args(list(words))
    with hydra_context(flags.config_dir):
        # requests: the models to evaluate, pruned or not, with their benchmarks
        config, requests = compose(settings, flags.config_name)
    # imported only after settings were checked, so that a typo is reported at once
    from moe_lab.study.run import run

    return run(config, requests).code


def _run_hydra(words: Sequence[str]) -> int:
    """Run hydra.main on the arguments `words`. Returns the highest exit code of the jobs."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from moe_lab.compose import EXIT_CODES, multirun_context, run_jobs
    from moe_lab.overrides import for_hydra
    from moe_lab.study import UNREPORTED

    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise exceptions instead of printing them
    EXIT_CODES.clear()

    def job(_: object) -> float:
        """Run the study of one job. Returns the value of the setting `objective`."""
        with _errors_as_sentences():
            settings = HydraConfig.get()
            # hydra.job.chdir=true changes the folder, but paths in settings are relative to the
            # folder of the command
            os.chdir(settings.runtime.cwd)
            # the jobs of a multirun add their requests to one study
            is_multirun = settings.mode == RunMode.MULTIRUN
            jobs = [settings.overrides.task]
            (value,) = run_jobs(settings, jobs, add=is_multirun, report_later=is_multirun)
            return value

    with multirun_context(words):
        # hydra.main reads sys.argv
        sys.argv[1:] = map(for_hydra, words)
        hydra.main(version_base="1.3", config_path=str(conf()), config_name="config")(job)()
    for study in UNREPORTED.values():
        from moe_lab.study.record import update_report

        EXIT_CODES.append(0 if update_report(study) else 1)
    return max(EXIT_CODES, default=0)


VERBS: Mapping[str, tuple[str, str]] = {
    "run": ("run", "compute a study; the verb may be left out"),
    "dry-run": ("run dry_run=true", "what a run would compute"),
    "status": ("moe_lab.study.commands status", "the progress of a study"),
    "why": (
        "moe_lab.study.commands why",
        "why steps are missing, with the end of their logs",
    ),
    "cancel": ("moe_lab.study.commands cancel", "cancel the Slurm jobs of a study"),
    "verify": ("moe_lab.study.commands verify", "hash the files of all results"),
    "unpack": ("moe_lab.study.commands unpack", "copy the files of steps out of packs"),
    "gc": ("moe_lab.study.commands gc", "list or free what no study needs"),
    "report": (
        "moe_lab.analysis.__main__",
        "write the page, tables and figures of a study",
    ),
    "table": (
        "moe_lab.analysis.verbs table",
        "write all results of a study as Parquet or CSV",
    ),
    "compare": (
        "moe_lab.analysis.verbs compare",
        "differences between two criteria, cells, studies or stores",
    ),
    "import": (
        "moe_lab.study.foreign",
        "add results of lm-eval, EvalPlus or EvalScope to a store",
    ),
    "export": ("moe_lab.analysis.verbs export", "write the results of a study as logs of lm-eval"),
    "mirror": ("moe_lab.evaluation.mirror", "copy the data of benchmarks"),
    "cite": ("moe_lab.cite", "BibTeX of the papers of a study"),
    "inspect": ("moe_lab.inspect", "whether a model is supported, and how it reads a text"),
}
"""Name of a verb -> (module with the function `main` that runs it, or "run" for `_run`, followed by
its first arguments; help), in the order of `moe-lab --help`."""


def command() -> NoReturn:
    """The program `moe-lab`."""
    run_and_exit(partial(main, sys.argv[1:]))


if __name__ == "__main__":
    command()
