"""Both ends of a room that is under way, and which writer holds it up, with the evidence for that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kvctl.health.answers import Row, amount, counts, inner, number, text, texts
from kvctl.health.codes.grants import unanswered
from kvctl.health.codes.silence import absent
from kvctl.health.codes.slowness import slow_writers
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import duration

# A room is not looked at before: whatever is wrong, most things mend themselves in this time.
_SHORTEST_NS = 10_000_000_000
_OF_P99 = 3
_OF_RESEND = 5
# The 99th of a hundred rooms is the slowest of a fleet's first ones, from when its lanes were measured and its pages
# touched: however slow that was, there has to be time left to do something about the room.
_OF_DEADLINE = 4


@dataclass(frozen=True, slots=True)
class Culprit:
    """A rank that holds a room up.

    Attributes:
        why: what it did or did not do, as the rest of a sentence that begins with its name.
        cells: that it owes and that have not landed; None where that is not known.
    """

    name: str
    why: str
    cells: int | None = None


class Ends:
    """One unfinished room of a decode rank, and what its prefill ranks say of it."""

    def __init__(self, snapshot: Snapshot, agent: Agent, row: Row) -> None:
        self.snapshot = snapshot
        self.agent = agent
        self.row = row
        self.room = text(row, "room")
        self.age_ns = int(amount(row, "state_age_ns"))

    @cached_property
    def prefill(self) -> dict[str, tuple[Agent, Row]]:
        """Its prefill ranks with what each says of it. Most rooms are too young for anybody to ask."""
        opened_ns = amount(self.row, "opened_at_ns")
        told = [(one, end) for one, end in self.snapshot.by_room.get(self.room, ()) if one.role == "prefill"]
        # A number is used again: what had ended before this room was opened is another life of it.
        return {
            one.name: (one, end)
            for one, end in reversed(told)
            if (ended := number(end, "finished_at_ns")) is None or ended >= opened_ns
        }

    @property
    def patience_ns(self) -> int:
        """No room is said to be stuck before: long by its agent's settings, and by what rooms take there."""
        p99 = amount(inner(self.agent.status, "latency"), "p99_ns")
        resends = _OF_RESEND * self.agent.period_ns("resend_s")
        usual = min(_OF_P99 * p99, self.agent.period_ns("waiting_timeout_s") / _OF_DEADLINE)
        return int(max(_SHORTEST_NS, resends, usual))

    @property
    def cells(self) -> tuple[int, int, int]:
        """Planned, landed and scattered."""
        coverage = inner(self.row, "coverage")
        planned, landed, scattered = (int(amount(coverage, key)) for key in ("planned", "landed", "scattered"))
        return planned, landed, scattered

    def owing(self) -> dict[str, int | None]:
        """Writers of which something has not come, with the cells where those are known."""
        owed = {name: int(cells) for name, cells in counts(self.row, "owed").items() if cells > 0}
        names = texts(self.row, "missing") if "missing" in self.row else texts(self.row, "peers")
        return {**dict.fromkeys(names), **owed}

    def excused(self) -> bool:
        """Whether it waits for a rank that is known to be silent or slow, or to get no grant: each has its own code."""
        excuses = self.snapshot.once(absent) | self.snapshot.once(slow_writers).keys()
        without_grant = self.snapshot.once(unanswered)
        return any(name in excuses or (name, self.agent.name) in without_grant for name in self.owing())

    def culprits(self) -> Iterator[Culprit]:
        """Writers against which there is evidence."""
        for name, cells in self.owing().items():
            why = self._evidence(name)
            if why:
                yield Culprit(name, why, cells)

    def _evidence(self, name: str) -> str:
        """What speaks against a writer that has not sent all; "" where nothing does."""
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
        if planned and sent >= planned:
            late = done_ns is not None and done_ns >= self.patience_ns
            return f"sent all {planned:.0f} cells, which never landed" if late else ""
        if amount(end, "parked"):
            return ""  # it waits for the ring: that has codes of its own
        if done_ns is not None:
            computed = f"computed it {duration(done_ns)} ago and has sent {sent:.0f} of {planned:.0f} cells"
            return computed if done_ns >= self.patience_ns else ""
        return self._left_behind(name, planned, sent)

    def _left_behind(self, name: str, planned: float, sent: float) -> str:
        """The ranks of an instance compute a room together: one that is long done speaks against one that is not."""
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


def unfinished(snapshot: Snapshot) -> list[Ends]:
    """Rooms of all decode ranks that are under way and older than anything takes; use `snapshot.once(unfinished)`."""
    found = []
    for agent in snapshot.of_role("decode"):
        for row in agent.rooms:
            if text(row, "state") in ("Bootstrapping", "WaitingForInput", "Transferring"):
                ends = Ends(snapshot, agent, row)
                if ends.age_ns >= ends.patience_ns:
                    found.append(ends)
    return found
