"""What a health code is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvctl.health.snapshot import Snapshot


class Severity(IntEnum):
    """How bad a finding is; a fleet is as bad as its worst finding."""

    INFO = 0
    WARNING = 1
    CRITICAL = 2

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, with the numbers that say so.

    Attributes:
        code: name of the `Code` that found it.
        subject: what it is about, the same from one snapshot to the next: an agent ("decode-0"), a pair
            ("prefill-0 → decode-1"), a room ("room 42"), a region ("decode-0 allocation 7").
        agents: agents to look at, the first one first.
        since_ns: how long it has been so, as far as can be told; None where it cannot.
        weight: how bad it is among findings of its code, larger is worse: a muted finding is heard again when it grows.
        evidence: the numbers, by name; names end in their unit as everywhere (`_ns`, `_bytes`), those of counters in
            `_total`.
        cause: one sentence: what has most likely happened, with names.
        remedy: begins with the exact next command in backticks, which can be pasted; then what else to do.
    """

    code: str
    severity: Severity
    subject: str
    agents: tuple[str, ...]
    cause: str
    remedy: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    since_ns: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Code:
    """One health code.

    Attributes:
        sees: what an operator sees when it strikes.
        means: what it means and how it comes about; the text of its page.
        remedy: what to do about it, in general.
        severity: of its worst findings.
        find: the findings in a snapshot. It raises nothing for what agents answered: what an agent does not know it
            does not find.
        alert: the PromQL expression that says the same of the agents' metrics; "" where metrics cannot say it.
    """

    name: str
    sees: str
    means: str
    remedy: str
    severity: Severity
    find: Callable[[Snapshot], Iterable[Finding]]
    alert: str = ""
