"""Permissions of the user: running programs that a model wrote, in which sandbox; asking a judge; reading pickles."""

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
    sandbox: str = NAMESPACES
    """namespaces or none."""
    allow_judge: bool = False
    """Texts that the model wrote may be sent to a judge."""
    allow_pickled_data: bool = False
    """Data may be read in formats that can run code when they are read."""

    def protection(self) -> str:
        """The sandbox in which programs run here: NAMESPACES or UNCONFINED.

        Raises UserError when programs may not run, and Unavailable when the sandbox does not start.
        """
        from moe_lab.evaluation.sandbox.client import namespaces_missing

        if not self.allow_code_execution:
            raise UserError(
                "allow_code_execution=false, but grading runs programs the model wrote: set allow_code_execution=true"
            )
        if self.sandbox == "none":
            return UNCONFINED
        if missing := namespaces_missing():
            raise Unavailable(
                f"sandbox={self.sandbox}: the sandbox for programs the model wrote does not start here ({missing}): "
                f"expected Linux namespaces, and memory and processes for it, or sandbox=none to run them without one"
            )
        return NAMESPACES
