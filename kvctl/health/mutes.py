"""Which findings an operator has heard enough of, for how long, and when they are heard again all the same.

A mute remembers how bad it was when it was made. What gets worse than that is heard: another severity, a larger weight,
or more findings than there were. A mute of something that is not there yet holds whatever comes, until it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvctl.health.finding import Finding, Severity

_NOISE = 1.2
"""Weights are measured, too: what grew by less than a fifth has not got worse."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """How bad it was when it was muted."""

    severity: Severity
    weight: float
    count: int

    @classmethod
    def of(cls, findings: Sequence[Finding]) -> Baseline | None:
        """None where nothing was found."""
        if not findings:
            return None
        return cls(max(each.severity for each in findings), max(each.weight for each in findings), len(findings))

    def exceeded_by(self, findings: Sequence[Finding]) -> bool:
        return len(findings) > self.count or any(
            each.severity > self.severity or each.weight > self.weight * _NOISE for each in findings
        )


@dataclass(frozen=True, slots=True)
class Mute:
    """One mute.

    Attributes:
        subject: what a finding is about, or an agent that it names; "" covers all findings of the code.
        made_at_ns: wall clock, as `until_ns`.
        baseline: None where nothing was found when it was made.
    """

    code: str
    subject: str
    made_at_ns: int
    until_ns: int
    reason: str
    baseline: Baseline | None

    @property
    def target(self) -> str:
        """As it is typed."""
        return f"{self.code}:{self.subject}" if self.subject else self.code

    def covers(self, finding: Finding) -> bool:
        if finding.code != self.code:
            return False
        return not self.subject or self.subject == finding.subject or self.subject in finding.agents

    def holds(self, findings: Sequence[Finding], now_ns: int) -> bool:
        """Whether it still keeps these, which it covers, quiet."""
        return now_ns < self.until_ns and (self.baseline is None or not self.baseline.exceeded_by(findings))


@dataclass(frozen=True, slots=True)
class Judged:
    """Findings that are heard, and those that are not with the mute that lasts longest; in the order they came in."""

    raised: Sequence[Finding]
    muted: Sequence[tuple[Finding, Mute]]


def judge(findings: Iterable[Finding], mutes: Iterable[Mute], now_ns: int) -> Judged:
    """Sorts findings by whether a mute keeps them quiet.

    Args:
        now_ns: wall clock.
    """
    found = list(findings)
    holding = [mute for mute in mutes if mute.holds([each for each in found if mute.covers(each)], now_ns)]
    holding.sort(key=lambda mute: -mute.until_ns)
    pairs = [(each, next((mute for mute in holding if mute.covers(each)), None)) for each in found]
    return Judged(
        [each for each, mute in pairs if mute is None],
        [(each, mute) for each, mute in pairs if mute is not None],
    )
