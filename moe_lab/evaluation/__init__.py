"""Evaluation of models on benchmarks.

Standard library only, as processes that run programs import this.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_lab.errors import Unavailable, UserError


@dataclass(frozen=True)
class Policy:
    """What evaluation may do on this machine."""

    allow_code_execution: bool = False
    """Programs that a model wrote may run."""
    sandbox: str = "auto"
    """auto, landlock, bubblewrap or none; see `program_sandbox`."""
    allow_judge: bool = False
    """Texts that the model wrote may be sent to a judge."""
    allow_pickled_data: bool = False
    """Data may be read in formats that can run code."""

    def program_sandbox(self) -> str:
        """How programs that a model wrote must be isolated: landlock, bubblewrap, or none (they
        have only limits).

        UserError when allow_code_execution=false, and when this machine does not have the isolation
        that the settings require. Unavailable when no isolated process can be started now.
        """
        from moe_lab.evaluation.sandbox.client import RunnerError, check_runner
        from moe_lab.evaluation.sandbox.isolation import ISOLATIONS, missing

        if not self.allow_code_execution:
            raise UserError(
                "allow_code_execution=false, but grading runs programs the model wrote: set "
                "allow_code_execution=true"
            )
        reasons = []
        for isolation in ISOLATIONS if self.sandbox == "auto" else (self.sandbox,):
            if reason := missing(isolation):
                reasons.append(reason)
                continue
            try:
                check_runner(isolation)
            except RunnerError as error:
                raise Unavailable(
                    f"sandbox={self.sandbox}: {isolation} for programs the model wrote does not "
                    f"start now ({error}): expected memory and processes for it, so start again "
                    "when the machine is less busy"
                ) from error
            return isolation
        raise UserError(
            f"sandbox={self.sandbox} needs Landlock or bubblewrap to isolate programs the model "
            f"wrote ({'; '.join(reasons)}): install bubblewrap, evaluate on another machine, or "
            "set sandbox=none to run them without isolation"
        )
