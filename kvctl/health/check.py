"""Measures of a fleet, their thresholds, and the verdict on each area, which `kvctl check` reports to monitoring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvctl.client.faults import SILENT, silence, silent_hosts
from kvctl.client.fleet import Survey
from kvctl.exit_codes import CheckState
from kvctl.health.answers import amount, counts, inner, not_ready, number, rows, text
from kvctl.health.codes import CODES_BY_NAME
from kvctl.health.finding import AREAS, Finding, Severity, listed
from kvctl.health.mutes import Judged
from kvctl.health.snapshot import Snapshot
from kvctl.render import units
from kvctl.render.findings import folded, row
from kvctl_agent.contract.states import UNREGISTERED
from kvctl_agent.contract.values import near

_STATES = {
    Severity.INFO: CheckState.OK,
    Severity.WARNING: CheckState.WARNING,
    Severity.CRITICAL: CheckState.CRITICAL,
}


# ---- measures --------------------------------------------------------------------------------------------------


class Unit(Enum):
    """Unit of a measure; the value of a member is the unit's symbol in the output of monitoring plugins."""

    COUNT = ""
    SECONDS = "s"
    RATIO = "%"
    BYTES = "B"


@dataclass(frozen=True, slots=True)
class Measure:
    """A number computed from a snapshot of the fleet, for which thresholds can be set.

    Attributes:
        area: key of `AREAS`.
        read: returns the number in seconds or bytes, as a ratio or a count; None if no agent reports it.
        help: description for the help text.
        least: values below the threshold are bad, instead of values at or above it.
    """

    name: str
    area: str
    unit: Unit
    read: Callable[[Snapshot], float | None]
    help: str
    least: bool = False

    def human(self, value: float | None) -> str:
        """Formats a value with its unit for display."""
        if value is None:
            return units.UNKNOWN
        match self.unit:
            case Unit.SECONDS:
                return units.duration(value * 1e9)
            case Unit.RATIO:
                return units.percent(value)
            case Unit.BYTES:
                return units.size(value)
        return units.count(round(value))

    def parse(self, text: str) -> float:
        """Parses a value in the notation of this measure's unit, such as `30s`, `80%`, `64MiB` or `4`.

        Raises:
            ValueError: the text has another form, or the value is out of range.
        """
        match self.unit:
            case Unit.SECONDS:
                value = units.parse_duration(text) / 1e9
            case Unit.BYTES:
                value = float(units.parse_size(text))
            case Unit.COUNT:
                value = float(int(text))
            case Unit.RATIO:
                value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        if value < 0 or (self.unit is Unit.RATIO and value > 1):
            raise ValueError(text)
        return value


def _max(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _max_seconds(values_ns: Iterable[float | None]) -> float | None:
    worst = _max(values_ns)
    return None if worst is None else worst / 1e9


def _waiting(snapshot: Snapshot) -> float:
    return sum(bool(text(agent.status, "waiting_for")) for agent in snapshot.agents.values())


def _draining(snapshot: Snapshot) -> float:
    return sum(agent.status.get("draining") is True for agent in snapshot.agents.values())


def _peers(state: str) -> Callable[[Snapshot], float]:
    return lambda snapshot: sum(
        text(peer, "state") == state for agent in snapshot.agents.values() for peer in agent.peers
    )


def _silence(snapshot: Snapshot) -> float | None:
    return _max_seconds(number(peer, "last_heard_ns") for agent in snapshot.agents.values() for peer in agent.peers)


def _ring(snapshot: Snapshot) -> float | None:
    rings = [inner(agent.status, "ring") for agent in snapshot.agents.values()]
    return _max(
        amount(ring, "used_bytes") / size for ring in rings if (size := number(ring, "size_bytes")) and size > 0
    )


def _pin_age(snapshot: Snapshot) -> float | None:
    rings = [inner(agent.staging, "ring") for agent in snapshot.agents.values()]
    return _max_seconds(
        max((amount(each, "age_ns") for each in rows(ring.get("allocations"))), default=0) for ring in rings if ring
    )


def _gate_age(snapshot: Snapshot) -> float | None:
    return _max_seconds(
        max((amount(part, "age_ns") for part in rows(agent.staging.get("gated"))), default=0)
        for agent in snapshot.agents.values()
        if agent.staging
    )


def _quarantined(snapshot: Snapshot) -> float | None:
    totals = [agent.total("kvctl_quarantined_bytes") for agent in snapshot.of_role("decode")]
    known = [total for total in totals if total is not None]
    return sum(known) if known else None


def _active(snapshot: Snapshot) -> float:
    agents = snapshot.agents.values()
    if any(agent.omitted_rooms for agent in agents):
        decode = [agent for agent in agents if agent.role == "decode"] or list(agents)
        return sum(sum(counts(agent.status, "rooms").values()) for agent in decode if agent.leads)
    return len({text(room, "room") for agent in agents for room in agent.rooms})


def _room_age(snapshot: Snapshot) -> float | None:
    return _max_seconds(
        max((amount(room, "age_ns") for room in agent.rooms), default=amount(agent.answer.data, "oldest_room_ns"))
        for agent in snapshot.agents.values()
    )


def _failed(snapshot: Snapshot) -> float | None:
    """Returns the share of failed rooms among those that finished in the last five minutes."""
    states: Counter[str] = Counter()
    for agent in snapshot.agents.values():
        states.update({state: int(number) for state, number in counts(agent.status, "rooms_finished_5m").items()})
    return states["Failed"] / states.total() if states.total() else None


def _fds(snapshot: Snapshot) -> float | None:
    uses = [inner(agent.status, "process") for agent in snapshot.agents.values()]
    return _max(amount(use, "fds") / limit for use in uses if (limit := number(use, "fds_limit")) and limit > 0)


def _queue(snapshot: Snapshot) -> float | None:
    return _max(number(peer, "control_queue") for agent in snapshot.agents.values() for peer in agent.peers)


MEASURES: tuple[Measure, ...] = (
    Measure("agents", "ready", Unit.COUNT, lambda snapshot: len(snapshot.agents), "agents that answer", least=True),
    Measure("waiting", "ready", Unit.COUNT, _waiting, "agents that wait for ranks of the other side"),
    Measure("draining", "ready", Unit.COUNT, _draining, "draining agents, which accept no new rooms"),
    Measure("lost", "peers", Unit.COUNT, _peers("lost"), "peers that an agent has lost"),
    Measure("suspect", "peers", Unit.COUNT, _peers("suspect"), "peers that an agent has not heard in time"),
    Measure("silence", "peers", Unit.SECONDS, _silence, "longest time since a peer was heard"),
    Measure("ring", "staging", Unit.RATIO, _ring, "use of the fullest staging ring"),
    Measure("pin-age", "staging", Unit.SECONDS, _pin_age, "age of the oldest ring allocation"),
    Measure("gate-age", "staging", Unit.SECONDS, _gate_age, "longest wait of a part for its ring region"),
    Measure("quarantined", "staging", Unit.BYTES, _quarantined, "bytes quarantined because of silent writers"),
    Measure("active", "rooms", Unit.COUNT, _active, "active rooms"),
    Measure("room-age", "rooms", Unit.SECONDS, _room_age, "age of the oldest active room"),
    Measure("failed", "rooms", Unit.RATIO, _failed, "share of failed rooms in the last 5 minutes"),
    Measure("fds", "transport", Unit.RATIO, _fds, "file descriptors in use, relative to the limit, worst agent"),
    Measure("queue", "transport", Unit.COUNT, _queue, "messages that wait to be sent to a peer"),
)

MEASURES_BY_NAME: dict[str, Measure] = {measure.name: measure for measure in MEASURES}


# ---- thresholds ------------------------------------------------------------------------------------------------


class ThresholdError(ValueError):
    """A threshold is invalid; the message names the threshold and the correct form."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Values at which a measure becomes a warning or critical; None for no limit."""

    warn: float | None = None
    crit: float | None = None

    def state(self, measure: Measure, value: float | None) -> CheckState:
        """Returns the state of a value: a limit is reached at the limit itself, with `least` only below it.

        An unknown value (None) is OK.
        """

        def reached(limit: float | None) -> bool:
            if limit is None or value is None:
                return False
            return value < limit if measure.least else value >= limit

        return (
            CheckState.CRITICAL if reached(self.crit) else CheckState.WARNING if reached(self.warn) else CheckState.OK
        )


def parse_thresholds(warn: Sequence[str], crit: Sequence[str], areas: Sequence[str]) -> dict[str, Threshold]:
    """Parses the values of `--warn` and `--crit`, such as `ring=80%,active=4`.

    Args:
        warn: values of `--warn`.
        crit: values of `--crit`.
        areas: the areas that are checked; a threshold for a measure of another area is an error.

    Returns:
        The thresholds by name of the measure.

    Raises:
        ThresholdError: a threshold is invalid, or a warning threshold is worse than the critical threshold.
    """
    warnings, criticals = _parse_option("--warn", warn, areas), _parse_option("--crit", crit, areas)
    found = {
        name: Threshold(warnings.get(name), criticals.get(name)) for name in dict.fromkeys((*warnings, *criticals))
    }
    for name, threshold in found.items():
        if threshold.warn is None or threshold.crit is None:
            continue
        measure = MEASURES_BY_NAME[name]
        if threshold.crit < threshold.warn if not measure.least else threshold.crit > threshold.warn:
            raise ThresholdError(
                f"{name}: critical {measure.human(threshold.crit)} is {'more' if measure.least else 'less'} than the "
                f"warning at {measure.human(threshold.warn)}, which would never be reported"
            )
    return found


def _parse_option(option: str, values: Sequence[str], areas: Sequence[str]) -> Mapping[str, float]:
    examples = {Unit.COUNT: "4", Unit.SECONDS: "30s", Unit.RATIO: "80% or 0.8", Unit.BYTES: "64MiB"}
    found: dict[str, float] = {}
    for piece in (piece.strip() for each in values for piece in each.split(",")):
        name, separator, value = piece.partition("=")
        measure = MEASURES_BY_NAME.get(name)
        if not separator or not value:
            raise ThresholdError(f"{option} {piece!r}: write NAME=VALUE, as in ring=80%")
        if measure is None:
            known = [each.name for each in MEASURES if each.area in areas]
            hint = near(name, known) or f": use one of {', '.join(known)}"
            raise ThresholdError(f"{option} {name} is not a threshold{hint}")
        if measure.area not in areas:
            raise ThresholdError(f"{option} {name} belongs to kvctl check {measure.area} and kvctl check all")
        try:
            found[name] = measure.parse(value)
        except ValueError:
            raise ThresholdError(f"{option} {name}={value}: write it as {examples[measure.unit]}") from None
    return found


# ---- verdicts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem, described in one line.

    Attributes:
        code: health code; "" if no health code found the problem.
        count: number of findings of this code that the text is about.
    """

    state: CheckState
    text: str
    code: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the check of one area.

    Attributes:
        problems: problems that are not muted, the worst first.
        muted: muted findings.
        values: value of each measure of the area, by name; None if it is unknown.
    """

    area: str
    problems: Sequence[Problem]
    muted: Sequence[Finding]
    values: Mapping[str, float | None]

    @property
    def state(self) -> CheckState:
        return worst(problem.state for problem in self.problems)


def worst(states: Iterable[CheckState]) -> CheckState:
    """Returns the worst of the states; OK if there are none."""
    return max(states, key=lambda state: state.gravity, default=CheckState.OK)


def verdicts(
    areas: Sequence[str],
    snapshot: Snapshot,
    judged: Judged,
    thresholds: Mapping[str, Threshold],
    no_agents: str,
) -> list[Verdict]:
    """Returns one verdict for each area.

    Args:
        areas: keys of `AREAS`.
        snapshot: answers of the fleet.
        judged: findings in the snapshot, raised and muted.
        thresholds: thresholds by name of the measure.
        no_agents: text of the problem that is reported if no agent answered.
    """
    # An agent that does not answer is a problem in each area, because its state is unknown.
    silent = list(_silent(snapshot.survey)) if snapshot.answered or snapshot.faults else []
    if not snapshot.answered and not silent:
        silent = [Problem(CheckState.CRITICAL, no_agents)]
    found = []
    for area in areas:
        problems = [
            *silent,
            *_of_findings([finding for finding in judged.raised if _area(finding) == area], snapshot.survey.hosts),
            *(_not_ready(snapshot, judged) if area == "ready" else ()),
            *(_stale_sockets(snapshot) if area == next(iter(AREAS)) else ()),
            *_reached(area, snapshot, thresholds),
        ]
        bad = [problem for problem in problems if problem.state is not CheckState.OK]
        muted = [finding for finding, _ in judged.muted if _area(finding) == area]
        values = {measure.name: measure.read(snapshot) for measure in MEASURES if measure.area == area}
        found.append(Verdict(area, sorted(bad, key=lambda problem: -problem.state.gravity), muted, values))
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


def _not_ready(snapshot: Snapshot, judged: Judged) -> Iterator[Problem]:
    """Yields a problem for all agents that cannot take a new room for the same reason, whatever finding explains it.

    Left out are agents that drain or whose engine sleeps, because somebody wanted that, and those of findings of this
    area.
    """
    findings = (*judged.raised, *(finding for finding, _ in judged.muted))
    told = {name for finding in findings if _area(finding) == "ready" for name in finding.agents}
    by_reason: dict[str, list[str]] = {}
    for name, agent in snapshot.agents.items():
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


def _reached(area: str, snapshot: Snapshot, thresholds: Mapping[str, Threshold]) -> Iterator[Problem]:
    for measure in MEASURES:
        threshold = thresholds.get(measure.name)
        if measure.area != area or threshold is None:
            continue
        value = measure.read(snapshot)
        state = threshold.state(measure, value)
        if state is not CheckState.OK:
            limit = threshold.crit if state is CheckState.CRITICAL else threshold.warn
            relation = "is less than" if measure.least else "has reached"
            words = f"{measure.name} {measure.human(value)} {relation} {measure.human(limit)} ({measure.help})"
            yield Problem(state, words)
