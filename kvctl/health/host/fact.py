"""One thing that is so on this host, and what it means for transfers."""

from __future__ import annotations

from dataclasses import dataclass

from kvctl.health.finding import Severity


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact.

    Attributes:
        topic: what it is about, the same on every host.
        found: what is so, in a few words.
        means: what follows from it, one sentence.
        severity: INFO where nothing has to be done.
        remedy: the next command or setting; "" where nothing has to be done.
        code: of the health code whose page says more.
    """

    topic: str
    found: str
    means: str
    severity: Severity = Severity.INFO
    remedy: str = ""
    code: str = ""
