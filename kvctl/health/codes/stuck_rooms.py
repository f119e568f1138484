"""Health codes about rooms that make no progress: active rooms, and rooms that failed at their deadline."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvctl.health.answers import Row, amount, counts, inner, number, rows, text, texts
from kvctl.health.codes.facts import (
    BOOTSTRAP,
    FailedRoom,
    absent,
    all_names,
    decode_rooms,
    every_room_fails,
    expired_for_drain,
    failed_rooms,
    failure_alert,
    failure_finding,
    slow_writers,
    unopened_rooms,
)
from kvctl.health.codes.leases import leases
from kvctl.health.codes.staging import pinned_agents, unanswered_requests
from kvctl.health.finding import Code, Finding, Severity, counted, health_code, listed, named_in
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import duration

WAITING = "KV_ROOM_STUCK_WAITING"
TRANSFER = "KV_ROOM_STUCK_TRANSFER"
SCATTER = "KV_ROOM_STUCK_SCATTER"
_CODE_OF_STATE = {"Bootstrapping": BOOTSTRAP, "WaitingForInput": WAITING, "Transferring": TRANSFER}
# Younger rooms are not examined: most problems end by themselves within this time.
_MIN_AGE_NS = 10_000_000_000
_P99_FACTOR = 3
_RESENDS = 5
# Limit of the part of the waiting timeout that a high p99 can use up, so that time remains to act before the deadline.
# Soon after the start the p99 is that of the first rooms, which are slow because connections are measured and pages are
# touched for the first time.
_MAX_DEADLINE_SHARE = 1 / 4


# ---- live rooms ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Culprit:
    """A rank that delays a room.

    Attributes:
        evidence: predicate of a sentence whose subject is the rank's name, such as "does not know the room".
    """

    name: str
    evidence: str


class LiveRoom:
    """One unfinished room of a decode rank (`agent`, `row`), with the rows of its prefill ranks."""

    def __init__(self, snapshot: Snapshot, agent: Agent, row: Row) -> None:
        self.snapshot = snapshot
        self.agent = agent
        self.row = row
        self.number = text(row, "room")
        self.age_ns = int(amount(row, "state_age_ns"))

    @cached_property
    def prefill(self) -> dict[str, tuple[Agent, Row]]:
        """The room's prefill ranks and their rows, by name; computed on demand, as most rooms do not need it."""
        opened_ns = amount(self.row, "opened_at_ns")
        ends = [(agent, end) for agent, end in self.snapshot.by_room.get(self.number, ()) if agent.role == "prefill"]
        # Room numbers are reused: a room that ended before this one was opened is a different one.
        return {
            agent.name: (agent, end)
            for agent, end in reversed(ends)
            if (ended := number(end, "finished_at_ns")) is None or ended >= opened_ns
        }

    @property
    def patience_ns(self) -> int:
        """Time in one state after which the room can count as stuck.

        At least 10 s and several resend intervals; longer if the agent's p99 latency is long.
        """
        p99 = amount(inner(self.agent.status, "latency"), "p99_ns")
        resends = _RESENDS * self.agent.period_ns("resend_s")
        usual = min(_P99_FACTOR * p99, self.agent.period_ns("waiting_timeout_s") * _MAX_DEADLINE_SHARE)
        return int(max(_MIN_AGE_NS, resends, usual))

    @property
    def cells(self) -> tuple[int, int, int]:
        """Numbers of planned, landed and scattered cells of the room's coverage."""
        coverage = inner(self.row, "coverage")
        planned, landed, scattered = (int(amount(coverage, key)) for key in ("planned", "landed", "scattered"))
        return planned, landed, scattered

    @cached_property
    def owing(self) -> dict[str, int | None]:
        """Number of missing cells of each writer whose parts have not all landed, by name; None if it is unknown."""
        owed = {name: int(cells) for name, cells in counts(self.row, "owed").items() if cells > 0}
        names = texts(self.row, "missing") if "missing" in self.row else texts(self.row, "peers")
        return {**dict.fromkeys(names), **owed}

    def explained_elsewhere(self) -> bool:
        """Returns whether another health code explains the wait: a silent or slow rank, or an unanswered request."""
        others = self.snapshot.once(absent) | self.snapshot.once(slow_writers).keys()
        without_grant = self.snapshot.once(unanswered_requests)
        return any(name in others or (name, self.agent.name) in without_grant for name in self.owing)

    def culprits(self) -> Iterator[Culprit]:
        """Yields the writers that demonstrably delay the room."""
        for name in self.owing:
            evidence = self._evidence(name)
            if evidence:
                yield Culprit(name, evidence)

    def _evidence(self, name: str) -> str:
        """Returns the evidence that a writer with missing cells delays the room (`Culprit.evidence`); "" if none."""
        agent = self.snapshot.agents.get(name)
        if agent is None:
            return ""
        known = self.prefill.get(name)
        if known is None:
            return "does not know the room" if agent.rooms_complete and "history" in agent.answer.data else ""
        _, end = known
        failure = inner(end, "failure")
        if failure:
            after = amount(failure, "at_ns") - amount(self.row, "opened_at_ns")
            return f"failed it at +{duration(max(0, after))}: {text(failure, 'code')}: {text(failure, 'text')}"
        coverage = inner(end, "coverage")
        planned, sent = amount(coverage, "planned"), amount(coverage, "sent")
        done_ns = self._computed_ago(end, agent)
        late = done_ns is not None and done_ns >= self.patience_ns
        if planned and sent >= planned:
            return f"sent all {planned:.0f} cells, which never landed" if late else ""
        if amount(end, "parked"):
            return ""  # it waits for the ring, which has codes of its own
        if done_ns is not None:
            computed = f"computed it {duration(done_ns)} ago and has sent {sent:.0f} of {planned:.0f} cells"
            return computed if late else ""
        return self._behind_others(name, planned, sent)

    def _behind_others(self, name: str, planned: float, sent: float) -> str:
        """Returns evidence that a writer's forward is late: another rank of its instance computed the room long ago.

        "" if no other rank has.
        """
        for other, (agent, end) in self.prefill.items():
            done_ns = self._computed_ago(end, agent)
            if other != name and done_ns is not None and done_ns >= self.patience_ns:
                return (
                    f"has sent {sent:.0f} of {planned:.0f} cells and its forward has not ended, though {other} "
                    f"computed its share {duration(done_ns)} ago"
                )
        return ""

    @staticmethod
    def _computed_ago(end: Row, agent: Agent) -> int | None:
        done = number(end, "forward_done_at_ns")
        return None if done is None else max(0, agent.now_ns - int(done))


@dataclass(frozen=True, slots=True)
class StuckRoom:
    """An active room that makes no progress.

    Attributes:
        culprits: ranks that demonstrably delay the room; empty if the room is only old.
        reason: further explanation for the cause; "" if there is none.
    """

    code: str
    room: LiveRoom
    culprits: tuple[Culprit, ...]
    reason: str

    @property
    def group(self) -> tuple[str, ...]:
        """Key of the rooms that are reported in one finding: names of the reporter and of the culprits."""
        name = _reporter(self.room.snapshot, self.code, self.room.agent.name)
        return name, *(culprit.name for culprit in self.culprits)


def stuck_rooms(snapshot: Snapshot) -> list[StuckRoom]:
    """Returns the active rooms of decode ranks that make no progress."""
    return [
        stuck
        for agent in snapshot.of_role("decode")
        for row in agent.rooms
        if text(row, "state") in _CODE_OF_STATE and (stuck := _examine(LiveRoom(snapshot, agent, row))) is not None
    ]


def _examine(room: LiveRoom) -> StuckRoom | None:
    if room.age_ns < room.patience_ns:
        return None
    state = text(room.row, "state")
    deadline = "bootstrap_timeout_s" if state == "Bootstrapping" else "waiting_timeout_s"
    limit_ns = room.agent.period_ns(deadline)
    overdue = room.age_ns >= max(room.patience_ns, limit_ns // 2)
    if room.explained_elsewhere():
        return None
    if state == "Bootstrapping":
        return _not_accepted(room, overdue)
    planned, landed, scattered = room.cells
    half_over = f"half of {deadline} ({limit_ns / 1e9:g} s) is over"
    if planned and landed >= planned and scattered < planned:
        late_ns = _oldest_landed_ns(room)
        if late_ns >= room.patience_ns or overdue:
            reason = f"everything has landed, and {planned - scattered} of {planned} cells are not in their pages"
            reason += f", the oldest of them for {duration(late_ns)}" if late_ns else f", and {half_over}"
            return StuckRoom(SCATTER, room, (), reason + _arrival_thread_state(room))
        return None
    culprits = tuple(room.culprits())
    if not culprits and (not overdue or room.agent.name in room.snapshot.once(pinned_agents)):
        return None
    return StuckRoom(_CODE_OF_STATE[state], room, culprits, "" if culprits else half_over)


def _not_accepted(room: LiveRoom, overdue: bool) -> StuckRoom | None:
    missing = texts(room.row, "missing")
    waits_for = text(room.agent.status, "waiting_for")
    if missing:
        culprits = tuple(Culprit(name, "has neither accepted nor refused it") for name in missing)
        return StuckRoom(BOOTSTRAP, room, culprits, waits_for)
    if waits_for or overdue:
        return StuckRoom(BOOTSTRAP, room, (), waits_for or "no agent reports a reason")
    return None


def _oldest_landed_ns(room: LiveRoom) -> int:
    ages = [
        amount(region, "age_ns")
        for region in rows(inner(room.agent.staging, "ring").get("allocations"))
        if text(region, "room") == room.number and text(region, "state") in ("landed", "scattering")
    ]
    return int(max(ages, default=0))


def _arrival_thread_state(room: LiveRoom) -> str:
    """Returns a clause on the state of the decode rank's control loop, which copies landed parts; "" if unknown."""
    copies = inner(inner(room.agent.staging, "ring"), "copies")
    waiting = counted(amount(copies, "waiting"), "landed part")
    copying_ns, turn_ns = number(copies, "copying_age_ns"), number(copies, "turn_age_ns")
    if copying_ns is not None:
        return f"; one copy has been running for {duration(copying_ns)}, with {waiting} not copied"
    if turn_ns is not None and turn_ns >= room.patience_ns:
        return f"; its control loop has not looked for work for {duration(turn_ns)}, with {waiting} not copied"
    if amount(copies, "waiting"):
        return f"; its control loop runs and has begun no copy of {waiting}"
    return ""


# ---- rooms that reached their deadline -------------------------------------------------------------------------


def _expired_by_culprit(snapshot: Snapshot, code: str, live: Collection[str]) -> dict[str, list[FailedRoom]]:
    """Returns the rooms that failed with this code, the most recent first, by the agent that they waited for.

    If a failure names no agent, that is the reporter of the failure.

    Rooms that waited for an absent agent or were refused in a drain are left out, because other codes report them.

    Args:
        live: numbers of rooms that are left out, because they are reported as active: some rank still waits for them.
    """
    rooms: dict[str, list[FailedRoom]] = {}
    for failed in snapshot.once(failed_rooms).get(code, ()):
        if failed.room not in live and not expired_for_drain(snapshot, failed):
            rooms.setdefault(failed.room, []).append(failed)
    found: dict[str, list[FailedRoom]] = {}
    for reports in rooms.values():
        names = [name for failed in reports for name in _named(snapshot, failed)]
        if any(name in snapshot.once(absent) for name in names):
            continue  # the absent agent has a finding that explains them
        first = _nearest_cause(snapshot, reports)
        culprit = next(iter(_named(snapshot, first)), _reporter(snapshot, code, _first_rank(snapshot, first, reports)))
        found.setdefault(culprit, []).append(first)
    return found


def _nearest_cause(snapshot: Snapshot, reports: Sequence[FailedRoom]) -> FailedRoom:
    """Returns the report nearest to the cause among the reports of a room's ranks.

    The deadlines of the ranks expire at almost the same time, so several ranks report a failure of their own. Each
    report names the rank that its rank waited for; the report nearest to the cause names no other reporting rank. If
    several reports qualify, a decode rank's report is chosen: the prefill ranks waited for it to open the room.
    """
    ranks = {failed.rank for failed in reports}

    def distance(failed: FailedRoom) -> tuple[int, bool]:
        agent = snapshot.agents.get(failed.rank)
        others = ranks.intersection(_named(snapshot, failed)) - {failed.rank}
        return len(others), agent is None or agent.role != "decode"

    first = min(reports, key=distance)
    known_to = dict.fromkeys(name for failed in reports for name in (failed.rank, *failed.known_to))
    return replace(first, known_to=tuple(known_to))


def _reporter(snapshot: Snapshot, code: str, rank: str) -> str:
    """Returns the name under which what a rank reports is grouped: its instance, if all its ranks wait for the same."""
    return snapshot.instances.get(rank, rank) if code == BOOTSTRAP else rank


def _first_rank(snapshot: Snapshot, first: FailedRoom, reports: Sequence[FailedRoom]) -> str:
    """Returns the rank that a failure is attributed to if its report names no other rank.

    A room that no decode rank opened fails on all its prefill ranks; it is attributed to the first by name.
    """
    ranks = sorted({failed.rank for failed in reports})
    roles = {snapshot.agents[rank].role for rank in ranks if rank in snapshot.agents}
    return ranks[0] if roles == {"prefill"} and len(ranks) > 1 else first.rank


def _named(snapshot: Snapshot, failed: FailedRoom) -> list[str]:
    return named_in(failed.text, snapshot.once(all_names))


# ---- findings --------------------------------------------------------------------------------------------------


def _stuck(snapshot: Snapshot, code: Code) -> Iterator[Finding]:
    """Yields the findings of one code: about active stuck rooms, and about rooms that failed at their deadline."""
    groups: dict[tuple[str, ...], list[StuckRoom]] = {}
    for stuck in snapshot.once(stuck_rooms):
        if stuck.code == code.name:
            groups.setdefault(stuck.group, []).append(stuck)
    live = frozenset(stuck.room.number for group in groups.values() for stuck in group)
    expired = _expired_by_culprit(snapshot, code.name, live)
    for (reporter, *culprits), group in groups.items():
        group.sort(key=lambda stuck: -stuck.room.age_ns)
        finding = _live(code, group)
        failures = expired.pop(culprits[0] if culprits else reporter, ())
        if failures:
            finding = replace(
                finding,
                severity=Severity.CRITICAL if every_room_fails(snapshot, failures) else finding.severity,
                evidence={**finding.evidence, "failed_rooms": len(failures)},
                cause=f"{finding.cause}; {counted(len(failures), 'room')} before it reached the deadline, "
                f"last {duration(failures[0].ago_ns)} ago",
            )
        yield finding
    for name, failures in expired.items():
        yield _expired(snapshot, code, name, failures)


def _live(code: Code, group: list[StuckRoom]) -> Finding:
    first = group[0]
    room, culprits = first.room, first.culprits
    planned, landed, scattered = room.cells
    state = text(room.row, "state")
    cause = f"{room.agent.name} has waited {duration(room.age_ns)} in {state} for room {room.number}"
    if culprits:
        cause += f", but {culprits[0].name} {culprits[0].evidence}"
        if len(culprits) > 1:
            cause += f" ({listed(culprit.name for culprit in culprits[1:])} likewise)"
    if first.reason:
        cause += f": {first.reason}"
    if not culprits and room.owing:
        cause += f", and it waits for {listed(room.owing)}"
    if len(group) > 1:
        cause += f"; {counted(len(group) - 1, 'more room')} with it"
    return code.finding(
        f"room {room.number}",
        severity=Severity.CRITICAL if culprits or first.code == SCATTER else Severity.WARNING,
        agents=(*(culprit.name for culprit in culprits), *(stuck.room.agent.name for stuck in group)),
        since_ns=room.age_ns,
        weight=len(group),
        evidence={
            "decode": room.agent.name,
            "state": state,
            "state_age_ns": room.age_ns,
            "planned_cells": planned,
            "landed_cells": landed,
            "scattered_cells": scattered,
            "owed_cells": {name: cells for name, cells in room.owing.items() if cells},
            "waits_for": list(room.owing),
            "stuck_rooms": len(group),
            "rooms": [stuck.room.number for stuck in group[:8]],
        },
        cause=cause,
        remedy=_remedy(code.name, room),
    )


def _remedy(code: str, room: LiveRoom) -> str:
    if code == BOOTSTRAP and text(room.agent.status, "waiting_for"):
        return "`kvctl bootstrap` shows which ranks have registered; start the missing ones"
    if code == SCATTER:
        name = room.agent.name
        return (
            f"`kvctl staging map -e {name}` lists the landed parts that are not copied; `kvctl stacks -e {name}` shows "
            f"what its threads do; `kvctl rooms abort {room.number}` fails the room"
        )
    return (
        f"`kvctl rooms show {room.number}` shows both ends on one timeline; `kvctl rooms abort {room.number}` fails it "
        "on every rank and frees its memory"
    )


def _expired(snapshot: Snapshot, code: Code, culprit: str, failures: Sequence[FailedRoom]) -> Finding:
    latest = failures[0]
    ranks = listed(dict.fromkeys(failed.rank for failed in failures))
    return failure_finding(
        snapshot,
        code,
        failures,
        f"{counted(len(failures), 'room')} reached the deadline on {ranks}",
        "what it waited for at both ends",
        subject=f"room {latest.room}" if len(failures) == 1 else culprit,
        severity=Severity.WARNING,
        agents=_named(snapshot, latest),
        evidence={"rooms": [failed.room for failed in failures[:8]]},
    )


@health_code(
    BOOTSTRAP,
    Severity.CRITICAL,
    "ready",
    sees="rooms time out in Bootstrapping",
    means="Once all ranks of the prefill dp group that computes a room are registered and have said hello, each decode "
    "rank opens the room at the ranks that write to it, and one of them, its keeper, at those that write to none; the "
    "room leaves this state when these have accepted it. Some rank is not registered or has not answered; or, on the "
    "prefill side, not all of these decode ranks have opened a room that the engine announced.",
    remedy="Start the missing ranks, or find out why the named one does not answer.",
    alert=failure_alert(BOOTSTRAP),
)
def stuck_bootstrap(snapshot: Snapshot) -> Iterator[Finding]:
    yield from _stuck(snapshot, stuck_bootstrap)
    yield from _never_opened(snapshot)


def _never_opened(snapshot: Snapshot) -> Iterator[Finding]:
    """Yields a finding about rooms that prefill engines began and no decode rank opened within half of the timeout.

    If a decode rank has failed the room since then, it reached the deadline there a moment earlier; that failure is
    reported instead.
    """
    decode = list(snapshot.of_role("decode"))
    if not decode or snapshot.once(absent) or not all(agent.rooms_complete for agent in decode):
        return
    opened = decode_rooms(snapshot)
    names = {agent.name for agent in decode}
    given_up_ns = {
        failed.room: failed.ago_ns
        for failures in snapshot.once(failed_rooms).values()
        for failed in failures
        if not names.isdisjoint((failed.rank, *failed.known_to))
    }
    late: dict[str, float] = {}
    agents: dict[str, None] = {}
    for agent, row in unopened_rooms(snapshot, refused=False):
        if leases(agent):
            continue  # decode asks for what is computed: KV_BLOCKS_UNREAD
        age_ns = amount(row, "state_age_ns")
        room = text(row, "room")
        known = room in opened or given_up_ns.get(room, age_ns) < age_ns
        if age_ns >= agent.period_ns("bootstrap_timeout_s") // 2 and not known:
            late[room] = age_ns
            agents[agent.name] = None
    if not late:
        return
    oldest = max(late, key=lambda each: late[each])
    age = int(late[oldest])
    prefill = list(agents)
    yield stuck_bootstrap.finding(
        prefill[0],
        severity=Severity.WARNING,
        agents=prefill,
        since_ns=age,
        weight=len(late),
        evidence={"waiting_rooms": len(late), "oldest_room": oldest, "state_age_ns": age, "prefill": prefill},
        cause=f"the engine{'s' * (len(prefill) > 1)} of {listed(prefill)} began {counted(len(late), 'room')} that no "
        f"decode rank has opened, the oldest, room {oldest}, {duration(age)} ago",
        remedy=f"`kvctl rooms show {oldest}` shows which ranks know it; check whether the router sent it to a decode "
        f"instance that knows this prefill instance; `kvctl rooms abort {oldest}` ends it",
    )


@health_code(
    WAITING,
    Severity.CRITICAL,
    "rooms",
    sees="rooms time out in WaitingForInput",
    means="Both ends have opened the room and nothing has arrived. Rooms normally wait for the forward in this state, "
    "so it is reported only with evidence: a prefill rank has failed the room or does not know it, or half of "
    "waiting_timeout_s is over.",
    remedy="Look at the room's ranks: the first failure on any of them is the cause. Abort the room to free its pages.",
    alert=failure_alert(WAITING),
)
def stuck_waiting(snapshot: Snapshot) -> Iterator[Finding]:
    return _stuck(snapshot, stuck_waiting)


@health_code(
    TRANSFER,
    Severity.CRITICAL,
    "rooms",
    sees="some parts of a room arrived, the rest never do",
    means="The room's coverage, planned minus landed cells, names the writers whose parts are missing. There is "
    "evidence against one of them: it failed the room or does not know it, it computed its share long ago and did not "
    "send it, or it has not computed it although the other ranks of its instance have. Parts that wait for the ring, "
    "and silent or slow writers, have codes of their own.",
    remedy="Look at the named writer: its stacks, its engine's log. Abort the room to free its memory.",
    alert=failure_alert(TRANSFER),
)
def stuck_transfer(snapshot: Snapshot) -> Iterator[Finding]:
    return _stuck(snapshot, stuck_transfer)


@health_code(
    SCATTER,
    Severity.CRITICAL,
    "rooms",
    sees="all data of a room has arrived, and it does not become Success",
    means="All parts have landed in the ring and some were not copied into their pages: the decode rank's arrival "
    "thread is blocked, or the copy was never started.",
    remedy="Look at the decode rank's stacks; a recording shows which part and which copy it is.",
    alert=failure_alert(SCATTER),
)
def stuck_scatter(snapshot: Snapshot) -> Iterator[Finding]:
    return _stuck(snapshot, stuck_scatter)
