"""Rooms that do not go on: live ones with evidence against somebody, and those that ran into their deadline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from kvctl.health.answers import Row, amount, inner, number, rows, text, texts
from kvctl.health.codes.draining import BOOTSTRAP, decode_rooms, expired_for_drain, unanswered_rooms
from kvctl.health.codes.failures import Failed, all_names, failed_lately
from kvctl.health.codes.formatting import counted, listed, named_in
from kvctl.health.codes.ring import held_up
from kvctl.health.codes.room_ends import Culprit, Ends, unfinished
from kvctl.health.codes.silence import absent
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Snapshot
from kvctl.render.units import duration


def by_culprit(snapshot: Snapshot, code: str, live: Collection[str]) -> dict[str, list[Failed]]:
    """Rooms that failed with this code, by the agent that they waited for, the latest first.

    Args:
        live: rooms that some rank still waits for, and that are told of as such.
    """
    rooms: dict[str, list[Failed]] = {}
    for failed in snapshot.once(failed_lately).get(code, ()):
        if failed.room not in live and not expired_for_drain(snapshot, failed):
            rooms.setdefault(failed.room, []).append(failed)
    found: dict[str, list[Failed]] = {}
    for told in rooms.values():
        names = [name for failed in told for name in _named(snapshot, failed)]
        if any(name in snapshot.once(absent) for name in names):
            continue  # who is absent explains them
        first = _nearest(snapshot, told)
        found.setdefault(next(iter(_named(snapshot, first)), _teller(snapshot, first, told)), []).append(first)
    return found


def _nearest(snapshot: Snapshot, told: Sequence[Failed]) -> Failed:
    """Of what a room's ends say, what is nearest to the cause.

    Their deadlines are over within moments of each other, so that several give the room up before they hear of it. Each
    names whom it waited for: the last of them waited for nobody else who tells. Where no end names another, a prefill
    rank waited for a decode rank to open the room, and the decode rank says what kept it from that.
    """
    ranks = {failed.rank for failed in told}

    def distance(failed: Failed) -> tuple[int, bool]:
        agent = snapshot.agents.get(failed.rank)
        others = ranks.intersection(_named(snapshot, failed)) - {failed.rank}
        return len(others), agent is None or agent.role != "decode"

    first = min(told, key=distance)
    known_to = dict.fromkeys(name for failed in told for name in (failed.rank, *failed.known_to))
    return replace(first, known_to=tuple(known_to))


def _teller(snapshot: Snapshot, first: Failed, told: Sequence[Failed]) -> str:
    """Whose finding it is where a rank waited for nobody in particular.

    A room that no decode rank opened fails at all its prefill ranks alike: the same one of them stands for all.
    """
    ranks = sorted({failed.rank for failed in told})
    roles = {snapshot.agents[rank].role for rank in ranks if rank in snapshot.agents}
    return ranks[0] if roles == {"prefill"} and len(ranks) > 1 else first.rank


def _named(snapshot: Snapshot, failed: Failed) -> list[str]:
    return named_in(failed.text, snapshot.once(all_names))


def ended(snapshot: Snapshot, code: str, culprit: str, failures: Sequence[Failed]) -> Finding:
    """The finding about rooms that waited for one agent."""
    latest = failures[0]
    told_by = listed(dict.fromkeys(one.rank for one in failures))
    return Finding(
        code=code,
        severity=Severity.WARNING,
        subject=f"room {latest.room}" if len(failures) == 1 else culprit,
        agents=tuple(dict.fromkeys((culprit, *_named(snapshot, latest), latest.rank, *latest.known_to))),
        since_ns=latest.ago_ns,
        weight=len(failures),
        evidence={
            "failed_rooms": len(failures),
            "rooms": [one.room for one in failures[:8]],
            "latest_ago_ns": latest.ago_ns,
            "latest": latest.text,
        },
        cause=f"{counted(len(failures), 'room')} ran into the deadline on {told_by}, last {duration(latest.ago_ns)} "
        f"ago: {latest.text}",
        remedy=f"`kvctl rooms show {latest.room}` shows what it waited for at both ends",
    )


def with_ended(finding: Finding, failures: Sequence[Failed]) -> Finding:
    """A finding about rooms that wait now, with those that waited for the same agent in vain."""
    if not failures:
        return finding
    return replace(
        finding,
        evidence={**finding.evidence, "failed_rooms": len(failures)},
        cause=f"{finding.cause}; {counted(len(failures), 'room')} before it ran into the deadline, "
        f"last {duration(failures[0].ago_ns)} ago",
    )


WAITING = "KV_ROOM_STUCK_WAITING"
TRANSFER = "KV_ROOM_STUCK_TRANSFER"
SCATTER = "KV_ROOM_STUCK_SCATTER"

_CODE_OF_STATE = {"Bootstrapping": BOOTSTRAP, "WaitingForInput": WAITING, "Transferring": TRANSFER}


@dataclass(frozen=True, slots=True)
class Stuck:
    """A live room that does not go on.

    Attributes:
        culprits: whom the evidence speaks against; empty where it only is old.
        why: what is known besides.
    """

    code: str
    ends: Ends
    culprits: tuple[Culprit, ...]
    why: str

    @property
    def cause_key(self) -> tuple[str, ...]:
        """Rooms with the same key are one finding."""
        return self.code, self.ends.agent.name, *(culprit.name for culprit in self.culprits)


def stuck_rooms(snapshot: Snapshot) -> list[Stuck]:
    """Live rooms of decode ranks that do not go on; use `snapshot.once(stuck_rooms)`."""
    return [found for ends in snapshot.once(unfinished) if (found := _judge(ends)) is not None]


def _judge(ends: Ends) -> Stuck | None:
    state = text(ends.row, "state")
    deadline = "bootstrap_timeout_s" if state == "Bootstrapping" else "waiting_timeout_s"
    limit_ns = ends.agent.period_ns(deadline)
    overdue = ends.age_ns >= max(ends.patience_ns, limit_ns // 2)
    if ends.excused():
        return None
    if state == "Bootstrapping":
        return _not_accepted(ends, overdue)
    planned, landed, scattered = ends.cells
    old = f"half of {deadline} ({limit_ns / 1e9:g} s) is over"
    if planned and landed >= planned and scattered < planned:
        late_ns = _oldest_landed_ns(ends)
        if late_ns >= ends.patience_ns or overdue:
            why = f"everything has landed, and {planned - scattered} of {planned} cells are not in their pages"
            since = f", the oldest of them for {duration(late_ns)}" if late_ns else f", and {old}"
            return Stuck(SCATTER, ends, (), why + since + _why_not_copied(ends))
        return None
    culprits = tuple(ends.culprits())
    if not culprits and (not overdue or ends.agent.name in ends.snapshot.once(held_up)):
        return None
    return Stuck(_CODE_OF_STATE[state], ends, culprits, "" if culprits else old)


def _not_accepted(ends: Ends, overdue: bool) -> Stuck | None:
    missing = texts(ends.row, "missing")
    waits = text(ends.agent.status, "waiting_for")
    if missing:
        names = tuple(Culprit(name, "has not accepted it, nor refused it") for name in missing)
        return Stuck(BOOTSTRAP, ends, names, waits)
    if waits or overdue:
        return Stuck(BOOTSTRAP, ends, (), waits or "nobody says why")
    return None


def _oldest_landed_ns(ends: Ends) -> int:
    regions: Sequence[Row] = rows(inner(ends.agent.staging, "ring").get("allocations"))
    ages = [
        amount(region, "age_ns")
        for region in regions
        if text(region, "room") == ends.room and text(region, "state") in ("landed", "scattering")
    ]
    return int(max(ages, default=0))


def _why_not_copied(ends: Ends) -> str:
    """What the decode rank's arrival thread does instead; "" where it does not say."""
    copies = inner(inner(ends.agent.staging, "ring"), "copies")
    waiting = counted(amount(copies, "waiting"), "landed part")
    copying_ns, turn_ns = number(copies, "copying_age_ns"), number(copies, "turn_age_ns")
    if copying_ns is not None:
        return f"; one copy has been running for {duration(copying_ns)}, with {waiting} not copied"
    if turn_ns is not None and turn_ns >= ends.patience_ns:
        return f"; its arrival thread has not looked for work for {duration(turn_ns)}, with {waiting} not copied"
    if amount(copies, "waiting"):
        return f"; its arrival thread runs and has begun no copy of {waiting}"
    return ""


# ---- findings -------------------------------------------------------------------------------------------------


def _find(code: str) -> Callable[[Snapshot], Iterator[Finding]]:
    def find(snapshot: Snapshot) -> Iterator[Finding]:
        groups: dict[tuple[str, ...], list[Stuck]] = {}
        for stuck in snapshot.once(stuck_rooms):
            if stuck.code == code:
                groups.setdefault(stuck.cause_key, []).append(stuck)
        for group in groups.values():
            group.sort(key=lambda stuck: -stuck.ends.age_ns)
        rooms = frozenset(stuck.ends.room for group in groups.values() for stuck in group)
        over = by_culprit(snapshot, code, rooms)
        for group in groups.values():
            live = _live(group)
            yield with_ended(live, over.pop(live.agents[0], ()))
        yield from (ended(snapshot, code, name, failures) for name, failures in over.items())
        if code == BOOTSTRAP:
            yield from never_opened(snapshot)

    return find


def _live(group: list[Stuck]) -> Finding:
    first = group[0]
    ends, culprits = first.ends, first.culprits
    planned, landed, scattered = ends.cells
    state = text(ends.row, "state")
    cause = f"{ends.agent.name} has waited {duration(ends.age_ns)} in {state} for room {ends.room}"
    if culprits:
        cause += f", but {culprits[0].name} {culprits[0].why}"
        if len(culprits) > 1:
            cause += f" ({listed(one.name for one in culprits[1:])} likewise)"
    if first.why:
        cause += f": {first.why}"
    if not culprits and ends.owing():
        cause += f", and it waits for {listed(ends.owing())}"
    if len(group) > 1:
        cause += f"; {counted(len(group) - 1, 'more room')} with it"
    return Finding(
        code=first.code,
        severity=Severity.CRITICAL if culprits or first.code == SCATTER else Severity.WARNING,
        subject=f"room {ends.room}",
        agents=tuple(dict.fromkeys((*(one.name for one in culprits), ends.agent.name))),
        since_ns=ends.age_ns,
        weight=len(group),
        evidence={
            "decode": ends.agent.name,
            "state": state,
            "state_age_ns": ends.age_ns,
            "planned_cells": planned,
            "landed_cells": landed,
            "scattered_cells": scattered,
            "owed_cells": {name: cells for name, cells in ends.owing().items() if cells},
            "waits_for": list(ends.owing()),
            "stuck_rooms": len(group),
            "rooms": [stuck.ends.room for stuck in group[:8]],
        },
        cause=cause,
        remedy=_remedy(first.code, ends),
    )


def _remedy(code: str, ends: Ends) -> str:
    if code == BOOTSTRAP and text(ends.agent.status, "waiting_for"):
        return "`kvctl bootstrap` shows which ranks have registered; start those that are missing"
    if code == SCATTER:
        name = ends.agent.name
        return (
            f"`kvctl staging map -e {name}` lists what has landed and is not copied; `kvctl stacks -e {name}` shows "
            f"what its arrival thread does; `kvctl rooms abort {ends.room}` fails the room"
        )
    return (
        f"`kvctl rooms show {ends.room}` shows both ends on one timeline; `kvctl rooms abort {ends.room}` fails it "
        "everywhere and frees what it holds"
    )


def _alert(code: str) -> str:
    return f'sum by (instance) (increase(kvctl_room_failures_total{{code="{code}"}}[10m])) > 0'


STUCK_BOOTSTRAP = Code(
    name=BOOTSTRAP,
    sees="rooms time out in Bootstrapping",
    means="A decode rank opens a room at every rank of the prefill instance, once all of them are registered and have "
    "said hello; the room leaves this state when all have accepted it. Some rank is not registered, or has not "
    "answered; or, on the prefill side, no decode rank has opened a room that its engine announced.",
    remedy="Start the ranks that are missing, or see why the named one does not answer.",
    severity=Severity.CRITICAL,
    find=_find(BOOTSTRAP),
    alert=_alert(BOOTSTRAP),
)

STUCK_WAITING = Code(
    name=WAITING,
    sees="rooms time out in WaitingForInput",
    means="Both ends have joined and nothing has arrived. Waiting for the forward is what this state is for, so it is "
    "reported only with evidence: a prefill rank has failed the room or does not know it, or half of waiting_timeout_s "
    "is over.",
    remedy="Look at the room's two ends: the first failure on any rank is the cause. Abort it to free its pages.",
    severity=Severity.CRITICAL,
    find=_find(WAITING),
    alert=_alert(WAITING),
)

STUCK_TRANSFER = Code(
    name=TRANSFER,
    sees="some parts of a room arrived, the rest never come",
    means="The room's coverage, planned cells minus landed ones, names the writers that owe something. There is "
    "evidence against one of them: it failed the room or does not know it, it computed its share long ago and did not "
    "send it, or it has not computed it although its fellow ranks have. Parts that wait for the ring, and writers that "
    "are silent or slow, have codes of their own.",
    remedy="Look at the named writer: its stacks, its engine's log. Abort the room to free what it holds.",
    severity=Severity.CRITICAL,
    find=_find(TRANSFER),
    alert=_alert(TRANSFER),
)

STUCK_SCATTER = Code(
    name=SCATTER,
    sees="everything of a room has arrived, and it does not become Success",
    means="All parts have landed in the ring and some were not copied into their pages: the decode rank's arrival "
    "thread is held up, or the copy was never started.",
    remedy="Look at the decode rank's stacks; a bundle helps to tell which part and which copy it is.",
    severity=Severity.CRITICAL,
    find=_find(SCATTER),
    alert=_alert(SCATTER),
)


def never_opened(snapshot: Snapshot) -> Iterator[Finding]:
    """Rooms that a prefill engine has announced and no decode rank has opened, at half of their time."""
    decode = list(snapshot.of_role("decode"))
    if not decode or snapshot.once(absent) or not all(agent.rooms_complete for agent in decode):
        return
    opened = decode_rooms(snapshot)
    late: dict[str, float] = {}
    agents: dict[str, None] = {}
    for agent, row in unanswered_rooms(snapshot, refused=False):
        age_ns = amount(row, "state_age_ns")
        if age_ns >= agent.period_ns("bootstrap_timeout_s") // 2 and text(row, "room") not in opened:
            late[text(row, "room")] = age_ns
            agents[agent.name] = None
    if not late:
        return
    room = max(late, key=lambda each: late[each])
    age = int(late[room])
    names = list(agents)
    engines = f"engine{'s' * (len(agents) > 1)} of {listed(names)}"
    yield Finding(
        code=BOOTSTRAP,
        severity=Severity.WARNING,
        subject=names[0],
        agents=tuple(names),
        since_ns=age,
        weight=len(late),
        evidence={"waiting_rooms": len(late), "oldest_room": room, "state_age_ns": age, "prefill": names},
        cause=f"the {engines} began {counted(len(late), 'room')} that no decode rank has opened, the oldest, room "
        f"{room}, {duration(age)} ago",
        remedy=f"`kvctl rooms show {room}` shows who knows it; see whether the router sent it to a decode instance "
        f"that knows this prefill instance; `kvctl rooms abort {room}` ends it",
    )
