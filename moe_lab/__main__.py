"""`python -m moe_lab`: compose the configuration with Hydra, and run it as a study."""

from __future__ import annotations

import moe_lab.interrupt  # noqa: F401 - first, for Ctrl-C during the other imports

# isort: split
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from moe_lab.errors import end_with
from moe_lab.paths import conf
from moe_lab.secrets import mask

START = """moe_lab scores, prunes and evaluates Mixture-of-Experts language models. Three commands to start with:

  python -m moe_lab +experiment=task_agnostic               every expert criterion on a small trained model, in minutes
  python -m moe_lab +experiment=task_agnostic dry_run=true  what that would run
  python -m moe_lab model=local model.path=DIR criterion=man calibration=text calibration.path=FILE \\
                    suite=perplexity suite.path=FILE        your model, your text

`python -m moe_lab --help` lists every choice."""


def give_up(sentence: str) -> NoReturn:
    """Print what is wrong and exit with code 2."""
    print(f"moe_lab: {mask(sentence)}", file=sys.stderr)
    sys.exit(2)


@contextmanager
def _sentences() -> Iterator[None]:
    """Turn a user's mistake into a sentence and exit code 2, where Hydra or a study would print a stack trace."""
    import hydra
    from omegaconf.errors import OmegaConfBaseException

    from moe_lab.compose import mistake
    from moe_lab.errors import UserError

    try:
        yield
    except UserError as error:
        give_up(str(error))
    except (hydra.errors.HydraException, OmegaConfBaseException, AttributeError, ValueError) as error:
        give_up(mistake(error, sys.argv[1:]))
    except OSError as error:
        if isinstance(error, BrokenPipeError) or not any(word.startswith("hydra.") for word in sys.argv):
            raise
        give_up(f"{error.filename} cannot be written ({error.strerror}): is hydra.run.dir or hydra.sweep.dir right?")
    except KeyboardInterrupt:
        print("\nmoe_lab: stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


def main() -> None:
    """Compose the configuration of the command line, and run it. Exit code 2 for a user's mistake."""
    if len(sys.argv) == 1:
        print(START)
        return
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

    from moe_lab.compose import addable, ask, compose_plain, quoted, register
    from moe_lab.errors import UserError

    sys.argv[1:] = map(quoted, sys.argv[1:])
    try:
        register(sys.argv[1:])
    except UserError as error:
        give_up(str(error))
    sys.argv[1:] = map(addable, sys.argv[1:])
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise exceptions instead of printing them
    exit_code = 0

    def study(config: DictConfig) -> None:
        nonlocal exit_code
        # No exception may reach Hydra, which would print a stack trace.
        with _sentences():
            try:
                exit_code = max(exit_code, ask([config]))
            except (UserError, HydraException, OmegaConfBaseException, BrokenPipeError):
                raise
            except Exception:  # noqa: BLE001 - a bug in moe_lab
                print(mask(traceback.format_exc()), file=sys.stderr)
                sys.exit(1)

    with _sentences():
        with hydra.initialize_config_dir(str(conf()), job_name="moe_lab", version_base="1.3"):
            if (config := compose_plain(sys.argv[1:])) is not None:
                study(config)
        if config is None:
            hydra.main(version_base="1.3", config_path=str(conf()), config_name="config")(study)()
    sys.exit(exit_code)


if __name__ == "__main__":
    end_with(main)
