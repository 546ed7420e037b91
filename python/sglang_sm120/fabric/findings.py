"""A finding of the doctor: what is wrong, what it costs, what fixes it."""

from __future__ import annotations

from enum import Enum

import msgspec


class Severity(str, Enum):
    """How bad: ERROR corrupts, hangs or disables; WARNING costs speed; NOTICE is worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    NOTICE = "notice"

    @property
    def exit_code(self) -> int:
        """What the command returns when this is the worst finding."""
        return {"error": 2, "warning": 1, "notice": 0}[self.value]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing wrong.

    Attributes:
        id: stable short name, for tests and searches.
        what: the fact, with the figures; cost: what it costs, from a named measurement where there is one.
        fix: lines to type or switches to turn, most exact first.
        where: GPUs or addresses.
    """

    id: str
    severity: Severity
    what: str
    cost: str = ""
    fix: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
