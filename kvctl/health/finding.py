"""Types of health codes and their findings, and functions that format names and counts in findings."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from kvctl.client.names import few

if TYPE_CHECKING:
    from kvctl.health.snapshot import Snapshot

AREAS: dict[str, str] = {
    "ready": "agents run, and all ranks that they wait for are registered",
    "peers": "agents hear each other and have compatible configurations",
    "staging": "no ring or grant blocks transfers, and every part fits",
    "rooms": "rooms make progress, and their data is correct",
    "transport": "connections are as fast as expected, and the transfer engines have the resources they need",
}
"""Areas of `kvctl check`; each health code belongs to one."""

_MAX_LISTED = 4


class Severity(IntEnum):
    """Severity of a finding; the severity of a fleet is that of its worst finding."""

    INFO = 0
    WARNING = 1
    CRITICAL = 2

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem, with the numbers that show it.

    Attributes:
        subject: the object with the problem, the same from one snapshot to the next: an agent ("decode-0"), a pair
            ("prefill-0 → decode-1"), a room ("room 42"), a region ("decode-0 allocation 7").
        agents: agents to examine, the most important one first.
        since_ns: known duration of the problem in nanoseconds; None if unknown.
        weight: size of the problem, comparable between findings of the same code; a mute ends when it grows.
        evidence: numbers and names that show the problem, by name; numbers' names end in their unit (`_ns`, `_bytes`),
            counters' names in `_total`.
        cause: one sentence with the most likely cause and the names of the agents.
        remedy: the next command in backticks, ready to paste, followed by further steps.
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


Find = Callable[["Snapshot"], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Code:
    """One health code; see `health_code`.

    Attributes:
        means: meaning and origin of the condition; the text of the code's page.
        severity: severity of the code's worst findings.
        find: returns the findings of a snapshot. It reports nothing where an agent's data is missing and must not raise
            because of an agent's answer.
        alert: PromQL expression of the same condition; "" if metrics cannot express it. `health_code` adds the labels
            agent, host, namespace and pod to those by which it aggregates instances; without Kubernetes the latter two
            are absent.
        area: area of `kvctl check`, a key of `AREAS`.
    """

    name: str
    sees: str
    means: str
    remedy: str
    severity: Severity
    find: Find
    alert: str = ""
    area: str = "rooms"

    def finding(
        self,
        subject: str,
        *,
        cause: str,
        remedy: str,
        evidence: Mapping[str, Any],
        agents: Iterable[str] = (),
        severity: Severity | None = None,
        since_ns: int | None = None,
        weight: float = 1.0,
    ) -> Finding:
        """Returns a finding of this code; arguments are the attributes of `Finding`.

        Args:
            agents: agents to examine, without duplicates in the result; by default only `subject`.
        """
        return Finding(
            self.name,
            self.severity if severity is None else severity,
            subject,
            tuple(dict.fromkeys(agents)) or (subject,),
            cause,
            remedy,
            evidence,
            since_ns,
            weight,
        )


def health_code(
    name: str, severity: Severity, area: str, *, sees: str, means: str, remedy: str, alert: str = ""
) -> Callable[[Find], Code]:
    """Returns a decorator that turns a function from a snapshot to its findings into a health code (`Code`)."""
    alert = alert.replace("by (instance)", "by (agent, host, instance, namespace, pod)")
    return lambda find: Code(name, sees, means, remedy, severity, find, alert, area)


def listed(names: Iterable[str]) -> str:
    """Formats names: `prefill-0, prefill-1, prefill-2 and 5 more`; "none" for no names."""
    return few(list(names), _MAX_LISTED) or "none"


def counted(count: float, noun: str) -> str:
    """Formats a count: `1 room`, `7 rooms`."""
    return f"{count:.0f} {noun}{'' if count == 1 else 's'}"


def agree(count: float, one: str, many: str) -> str:
    """Returns the form of a word that agrees with a count: `1 part` waits, `7 parts` wait."""
    return one if count == 1 else many


def named_in(text: str, names: Collection[str]) -> list[str]:
    """Returns those of `names` that occur as words in a text, in the order of the text, without duplicates."""
    words = (word.rstrip(".:-") for word in re.findall(r"[\w.@:#\[\]-]+", text))
    return list(dict.fromkeys(word for word in words if word in names))


def pair(sender: str, receiver: str) -> str:
    """Returns the subject of a finding about two agents, such as `prefill-0 → decode-1`."""
    return f"{sender} → {receiver}"
