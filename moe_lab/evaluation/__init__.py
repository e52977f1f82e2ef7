"""Evaluation of models on benchmarks.

Standard library only, as processes that run programs import this.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_lab.errors import Unavailable, UserError

NAMESPACES = "namespaces"
LIMITED = "limited subprocess, closed-world programs only"
UNCONFINED = "none: limited subprocess"
"""Results of `Policy.program_sandbox`, in the words of reports."""


@dataclass(frozen=True)
class Policy:
    """What evaluation may do on this machine."""

    allow_code_execution: bool = False
    """Programs that a model wrote may run."""
    sandbox: str = "auto"
    """auto, namespaces or none; see `program_sandbox`."""
    allow_judge: bool = False
    """Texts that the model wrote may be sent to a judge."""
    allow_pickled_data: bool = False
    """Data may be read in formats that can run code."""

    def program_sandbox(self, *, closed_world: bool = False) -> str:
        """How programs that a model wrote must be run. NAMESPACES: in Linux namespaces. LIMITED: in
        a subprocess with limits, but only if `sandbox/closed_world.py` accepts the program.
        UNCONFINED: in a subprocess with limits.

        `closed_world`: whether right answers need no import and no private attribute, as in the
        shipped benchmarks.

        UserError when allow_code_execution=false, and when this machine has none of the sandboxes
        that the settings allow. Unavailable when no process in namespaces can be started now.
        """
        from moe_lab.evaluation.sandbox.client import NoNamespaces, RunnerError, check_namespaces

        if not self.allow_code_execution:
            raise UserError(
                "allow_code_execution=false, but grading runs programs the model wrote: set "
                "allow_code_execution=true"
            )
        if self.sandbox == "none":
            return UNCONFINED
        try:
            check_namespaces()
        except NoNamespaces as error:
            if self.sandbox == "auto" and closed_world:
                return LIMITED
            raise UserError(
                f"sandbox={self.sandbox} needs Linux namespaces to run programs the model wrote, "
                f"and there are none here ({error}): evaluate on another machine, or set "
                "sandbox=none to run them without a sandbox"
            ) from None
        except RunnerError as error:
            raise Unavailable(
                f"sandbox={self.sandbox}: the sandbox for programs the model wrote does not start "
                f"now ({error}): expected memory and processes for it, so start again when the "
                "machine is less busy"
            ) from error
        return NAMESPACES
