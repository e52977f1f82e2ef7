"""Benchmarks, asked of a model and graded. Here: what evaluation may do at all, and how programs are confined.

Standard library only, as processes that run programs import this.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_lab.errors import Unavailable, UserError

NAMESPACES = "namespaces"
UNCONFINED = "none: limited subprocess"


@dataclass(frozen=True)
class Policy:
    """What evaluation may do on this machine."""

    allow_code_execution: bool = False
    """Programs that a model wrote may run."""
    sandbox: str = "namespaces"
    """namespaces or none; see `protection`."""
    allow_judge: bool = False
    """Texts that the model wrote may be sent to a judge."""
    allow_pickled_data: bool = False
    """Data may be read in formats that can run code when they are read."""

    def protection(self) -> str:
        """The sandbox in which programs run here: NAMESPACES or UNCONFINED.

        Raises UserError when programs may not run, or not as this machine can confine them, and Unavailable when a
        sandbox that is possible does not start now: programs then run in no weaker one.
        """
        from moe_lab.evaluation.sandbox.client import NoNamespaces, RunnerError, check_namespaces

        if not self.allow_code_execution:
            raise UserError(
                "allow_code_execution=false, but grading runs programs the model wrote: set allow_code_execution=true"
            )
        if self.sandbox == "none":
            return UNCONFINED
        try:
            check_namespaces()
        except NoNamespaces as error:
            raise UserError(
                "sandbox=namespaces needs Linux namespaces to run programs the model wrote, and there are none "
                f"here ({error}): evaluate on another machine, or set sandbox=none to run them without a sandbox"
            ) from None
        except RunnerError as error:
            raise Unavailable(
                f"sandbox=namespaces: the sandbox for programs the model wrote does not start now ({error}): "
                f"expected memory and processes for it, so start again when the machine is less busy"
            ) from error
        return NAMESPACES
