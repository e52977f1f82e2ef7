"""What a user allows: whether programs a model wrote may run, and behind which walls."""

from __future__ import annotations

from dataclasses import dataclass

from moe_lab.errors import UserError, unknown
from moe_lab.evaluation.programs import namespaces_missing

SANDBOXES = ("auto", "namespaces", "none")
NAMESPACES = "namespaces"
LIMITED = "limited subprocess"
UNCONFINED = "none: subprocess with limits, as asked for by sandbox=none"


@dataclass(frozen=True)
class Policy:
    """What evaluation may do on this machine."""

    allow_code_execution: bool = False
    """Programs a model wrote may run at all."""
    sandbox: str = "auto"
    """auto, namespaces or none; see `protection`."""
    trusted_snippets: bool = False
    """The model is one shipped with moe_lab, whose programs are of a closed world without imports or attributes."""

    def protection(self) -> str:
        """Behind which walls programs run here: NAMESPACES, LIMITED (closed-world programs only) or UNCONFINED.

        Raises UserError when nothing that is allowed is possible on this machine.
        """
        if self.sandbox not in SANDBOXES:
            raise unknown("sandbox", self.sandbox, SANDBOXES)
        if not self.allow_code_execution:
            raise UserError("allow_code_execution=false, but grading runs programs the model wrote: set it to true")
        if self.sandbox == "none":
            return UNCONFINED
        missing = namespaces_missing()
        if missing is None:
            return NAMESPACES
        if self.sandbox == "auto" and self.trusted_snippets:
            return LIMITED
        raise UserError(
            f"sandbox={self.sandbox} needs Linux namespaces to run programs the model wrote, and this machine has none "
            f"({missing}); run there where they exist, or say sandbox=none to run them without walls"
        )
