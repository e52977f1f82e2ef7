"""`python -m moe_lab`: compose the settings of a command line, and run them as a study."""

from __future__ import annotations

import moe_lab.interrupt  # noqa: F401 - first, for Ctrl-C during the other imports

# isort: split
import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from moe_lab.errors import UserError, end_with, mask
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


def give_up(sentence: str, code: int = UserError.code) -> NoReturn:
    """Print what is wrong and exit."""
    print(f"moe_lab: {mask(sentence)}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def _sentences() -> Iterator[None]:
    """Turn a user's mistake, and what is not available, into a sentence and an exit code, where
    Hydra or a study would print a stack trace."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from moe_lab.compose import explain

    try:
        yield
    except UserError as error:
        give_up(str(error), error.code)
    except (HydraException, OmegaConfBaseException) as error:
        give_up(explain(error))
    except OSError as error:
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
    """Run the study of the command line. Exit code 2 for a user's mistake, 3 for models and texts
    that are missing."""
    words = sys.argv[1:]
    if not words:
        print(START)
        return
    # -m, --cfg, --help, completion, or a setting of Hydra itself: Hydra does what they ask for.
    flags = [
        argument
        for argument in words
        if argument.startswith("-") and not argument.startswith(("--config-", "-cd", "-cn"))
    ]
    hydras = [
        argument.lstrip("+~") for argument in words if argument.lstrip("+~").startswith("hydra")
    ]
    asks_hydra = flags or any(not argument.startswith("hydra.searchpath=") for argument in hydras)
    with _sentences():
        sys.exit(_by_hydra(words) if asks_hydra else _study(words))


def _study(words: Sequence[str]) -> int:
    """Compose the words, and run the study they ask for. Returns its exit code."""
    from moe_lab.compose import CONFIG, compose, hydra_context

    parser = argparse.ArgumentParser(prog="moe_lab", allow_abbrev=False, add_help=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--config-name", "-cn", default=CONFIG)
    flags, settings = parser.parse_known_args(list(words))
    with hydra_context(flags.config_dir):
        config, requests = compose(settings, flags.config_name)
    # not before settings are valid, so that a typo is reported at once
    from moe_lab.study.run import check_and_run

    return check_and_run(config, requests).code


def _by_hydra(words: Sequence[str]) -> int:
    """Let hydra.main do what the words ask for; each job of a multirun is composed from its words
    as if alone."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from moe_lab.compose import CONFIG, check_sweeper, compose, multirun
    from moe_lab.overrides import for_hydra

    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise exceptions instead of printing them
    code = 0
    models: Models | None = None  # imported after the first job's settings are valid

    def job(_: object) -> float:
        from moe_lab.study.objective import objective_value
        from moe_lab.study.run import check_and_run
        from moe_lab.study.steps import files

        nonlocal code, models
        models = models or files.Models()
        with _sentences():
            hydra_config = HydraConfig.get()
            # hydra.job.chdir=true leaves it, and paths of settings are of here
            os.chdir(hydra_config.runtime.cwd)
            settings = [
                *(word for word in hydra_config.overrides.hydra if "searchpath" in word),
                *hydra_config.overrides.task,
            ]
            # with a launcher of Hydra's, each job is a study of its own
            alone = hydra_config.mode == RunMode.MULTIRUN
            config, requests = compose(settings, hydra_config.job.config_name or CONFIG)
            if alone:
                check_sweeper(hydra_config.runtime.choices, config)
            ended = check_and_run(config, requests, add=alone, models=models)
            code = max(code, ended.code)
            return objective_value(ended, requests)

    with multirun(words):
        sys.argv[1:] = map(for_hydra, words)
        hydra.main(version_base="1.3", config_path=str(conf()), config_name="config")(job)()
    return code


if __name__ == "__main__":
    end_with(main)
