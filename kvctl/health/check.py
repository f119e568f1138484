"""The verdict on each area of a fleet, which `kvctl check` reports to monitoring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvctl.client.faults import SILENT, silence, silent_hosts
from kvctl.client.fleet import Survey
from kvctl.exit_codes import CheckState
from kvctl.health.answers import not_ready
from kvctl.health.codes import CODES_BY_NAME
from kvctl.health.engine import HealthReading
from kvctl.health.finding import AREAS, Finding, Severity, counted, listed
from kvctl.health.snapshot import Snapshot
from kvctl.render.findings import folded, row
from kvctl_agent.contract.states import UNREGISTERED

_STATES = {Severity.INFO: CheckState.OK, Severity.WARNING: CheckState.WARNING, Severity.CRITICAL: CheckState.CRITICAL}


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem, described in one line. `code`: health code; "" if no health code found the problem."""

    state: CheckState
    text: str
    code: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the check of one area."""

    area: str
    problems: Sequence[Problem]
    ignored: Sequence[Finding]

    @property
    def state(self) -> CheckState:
        return worst(problem.state for problem in self.problems)


def worst(states: Iterable[CheckState]) -> CheckState:
    """Returns the worst of the states; OK if there are none."""
    return max(states, key=lambda state: state.gravity, default=CheckState.OK)


def verdicts(areas: Sequence[str], reading: HealthReading, no_agents: str, least: int = 1) -> list[Verdict]:
    """Returns one verdict for each area. `no_agents`: text of the problem that is reported if no agent answered."""
    snapshot, agents = reading.snapshot, len(reading.snapshot.agents)
    # An agent that does not answer is a problem in each area, because its state is unknown.
    silent = list(_silent(snapshot.survey)) if snapshot.answered or snapshot.faults else []
    if not snapshot.answered and not silent:
        silent = [Problem(CheckState.CRITICAL, no_agents)]
    elif agents < least:
        silent.append(Problem(CheckState.CRITICAL, f"{counted(agents, 'agent')} answered, of at least {least}"))
    found = []
    for area in areas:
        problems = [
            *silent,
            *_of_findings([finding for finding in reading.findings if _area(finding) == area], snapshot.survey.hosts),
            *(_not_ready(reading) if area == "ready" else ()),
            *(_stale_sockets(snapshot) if area == next(iter(AREAS)) else ()),
        ]
        bad = [problem for problem in problems if problem.state is not CheckState.OK]
        ignored = [finding for finding in reading.ignored if _area(finding) == area]
        found.append(Verdict(area, sorted(bad, key=lambda problem: -problem.state.gravity), ignored))
    return found


def _area(finding: Finding) -> str:
    code = CODES_BY_NAME.get(finding.code)
    return "rooms" if code is None else code.area


def _silent(survey: Survey) -> Iterator[Problem]:
    whole = silent_hosts(survey.faults, survey.hosts)
    for host, faults in whole.items():
        yield Problem(CheckState.CRITICAL, silence(host, faults))
    for fault in survey.faults:
        if survey.host_of(fault.agent) in whole:
            continue
        state = CheckState.CRITICAL if fault.code in SILENT else CheckState.UNKNOWN
        yield Problem(state, fault.text)


def _not_ready(reading: HealthReading) -> Iterator[Problem]:
    """Yields a problem for all agents that cannot take a new room for the same reason, whatever finding explains it.

    Left out are agents that drain or whose engine sleeps, because somebody wanted that, and those of findings of this
    area.
    """
    told = {
        name
        for finding in (*reading.findings, *reading.ignored)
        if _area(finding) == "ready"
        for name in finding.agents
    }
    by_reason: dict[str, list[str]] = {}
    for name, agent in reading.snapshot.agents.items():
        reason = not_ready(agent.status)
        if reason and reason != UNREGISTERED and not agent.status.get("draining") and name not in told:
            by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        yield Problem(CheckState.WARNING, f"{listed(names)} cannot take a new room: {reason}")


def _stale_sockets(snapshot: Snapshot) -> Iterator[Problem]:
    """Yields a problem for each socket whose agent no longer runs."""
    reported = {fault.agent for fault in snapshot.faults}
    for endpoint in snapshot.survey.discovery.stale:
        if endpoint.name not in reported:
            yield Problem(
                CheckState.WARNING,
                f"{endpoint.name} is gone and left its socket behind: {endpoint.path} (kvctl agents --prune)",
            )


def _of_findings(findings: Iterable[Finding], hosts: Mapping[str, str]) -> Iterator[Problem]:
    for each in folded([row(finding) for finding in findings], hosts):
        state = _STATES[Severity[each["severity"].upper()]]
        text = f"{each['code']} {each['subject']}: {each['cause']}"
        yield Problem(state, text, each["code"], each.get("count", 1))
