"""`python -m moe_lab` composes the settings of a command line, and runs the study that they
describe."""

from __future__ import annotations

import moe_lab.interrupt  # noqa: F401 - first, for Ctrl-C during the other imports

# isort: split
import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from moe_lab.errors import UserError, mask, run_and_exit
from moe_lab.paths import conf

if TYPE_CHECKING:
    from moe_lab.study.steps.files import Models

START = """moe_lab scores, prunes and evaluates Mixture-of-Experts language models. Three commands
to start with:

  python -m moe_lab +experiment=task_agnostic
      every expert criterion on a small trained model, in minutes
  python -m moe_lab +experiment=task_agnostic dry_run=true
      what that would run
  python -m moe_lab model=local model.path=DIR criterion=man calibration=text \\
                    calibration.path=FILE suite=perplexity suite.path=FILE
      your model, your text

`python -m moe_lab --help` lists every choice."""
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


def main() -> None:
    """Run the study that the command line describes, and exit with the exit code of the study."""
    words = sys.argv[1:]
    if not words:
        print(START)
        return
    is_for_hydra = any(map(HYDRA_WORD.match, words))
    with _errors_as_sentences():
        sys.exit(_run_hydra(words) if is_for_hydra else _run_study(words))


def _run_study(words: Sequence[str]) -> int:
    """Run the study that the arguments `words` describe. Returns the exit code of the study."""
    from moe_lab.compose import CONFIG, compose, hydra_context

    parser = argparse.ArgumentParser(prog="moe_lab", allow_abbrev=False, add_help=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--config-name", "-cn", default=CONFIG)
    flags, settings = parser.parse_known_args(list(words))
    with hydra_context(flags.config_dir):
        # requests: the models to evaluate, pruned or not, with their benchmarks
        config, requests = compose(settings, flags.config_name)
    # imported only after settings were checked, so that a typo is reported at once
    from moe_lab.study.run import check_and_run

    return check_and_run(config, requests).code


def _run_hydra(words: Sequence[str]) -> int:
    """Run hydra.main on the arguments `words`. Returns the highest exit code of the jobs."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from moe_lab.compose import CONFIG, check_sweeper, compose, multirun_context
    from moe_lab.overrides import for_hydra

    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise exceptions instead of printing them
    code = 0
    models: Models | None = None  # loaded models, for all jobs of a multirun

    def job(_: object) -> float:
        """Run the study of one job. Returns the value of the setting `objective`, which a sweeper
        of Hydra optimises."""
        from moe_lab.study.objective import objective_value
        from moe_lab.study.run import check_and_run
        from moe_lab.study.steps import files

        nonlocal code, models
        models = models or files.Models()
        with _errors_as_sentences():
            hydra_config = HydraConfig.get()
            # hydra.job.chdir=true changes the folder, but paths in settings are relative to the
            # folder of the command
            os.chdir(hydra_config.runtime.cwd)
            # hydra.searchpath: the folders with further configuration files
            settings = [
                *(word for word in hydra_config.overrides.hydra if "searchpath" in word),
                *hydra_config.overrides.task,
            ]
            is_multirun = hydra_config.mode == RunMode.MULTIRUN
            config, requests = compose(settings, hydra_config.job.config_name or CONFIG)
            if is_multirun:
                check_sweeper(hydra_config.runtime.choices, config)
            # the jobs of a multirun add their requests to one study
            result = check_and_run(config, requests, add=is_multirun, models=models)
            code = max(code, result.code)
            return objective_value(result, requests)

    with multirun_context(words):
        # hydra.main reads sys.argv
        sys.argv[1:] = map(for_hydra, words)
        hydra.main(version_base="1.3", config_path=str(conf()), config_name="config")(job)()
    return code


if __name__ == "__main__":
    run_and_exit(main)
