"""What a play has at hand: the fleet, its traffic, a voice, and what an operator could see."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from kvctl.client.calls import Call
from kvctl.client.fleet import Fleet
from kvctl.errors import CliError
from kvctl.lab.demo.room_accounting import Disturbance
from kvctl.lab.demo.traffic import Traffic

# Agents of one machine, asked on the thread that opens rooms.
_ANSWER_NS = 500_000_000
_BEGIN_S = 2.0


class ScenarioContext:
    """One demo's.

    Attributes:
        traffic: to open rooms of one's own, and to hurt ranks.
        prefill, decode: names of the ranks.
    """

    def __init__(self, traffic: Traffic, say: Callable[[str], None]) -> None:
        """`say` gets a line whenever something was done."""
        self.traffic = traffic
        self.prefill = traffic.fleet.of_role("prefill")
        self.decode = traffic.fleet.of_role("decode")
        self.say = say

    def holds(self, rank: str, room: int) -> bool:
        """Whether a room has a region of a decode rank's ring that nothing has landed in."""
        wanted = str(room)
        return any(each["room"] == wanted and each["state"] in ("granted", "revoking") for each in self.regions(rank))

    def regions(self, rank: str) -> list[dict[str, Any]]:
        """What is granted of a decode rank's ring, the oldest first."""
        return [
            each for data in self._ask(rank, Call("staging")) if data["ring"] for each in data["ring"]["allocations"]
        ]

    def gated(self, rank: str) -> bool:
        """Whether a prefill rank has a part that waits for a watermark."""
        parts = [part for data in self._ask(rank, Call("staging")) for part in data["gated"]]
        return any(part["waiting_for"].startswith("watermark") for part in parts)

    def misses(self, rank: str, peer: str) -> bool:
        """Whether a rank says that it has not heard a peer for long."""
        rows = [row for data in self._ask(rank, Call("peers")) for row in data]
        return any(row["peer"] == peer and row["state"] in ("suspect", "lost") for row in rows)

    def force(self, rank: str, serial: int) -> None:
        """What `kvctl staging release --force` does."""
        self._ask(rank, Call("release", {"serial": serial, "force": True}))

    def drain(self, rank: str) -> bool:
        """What `kvctl drain` does; False where the rank did not answer in time."""
        return bool(self._ask(rank, Call("drain")))

    @staticmethod
    def _ask(rank: str, call: Call) -> list[Any]:
        """The rank's answer; none where it gives none in time."""
        try:
            with Fleet([rank], {}, _ANSWER_NS) as fleet:
                return [data for _, data in fleet.survey([call]).answers(call.command)]
        except CliError:
            return []


Play = Callable[[ScenarioContext], Iterator[float]]
"""What a scene does; it yields the seconds until it wants to go on."""


class Direction:
    """Gives a play its turns while traffic runs."""

    def __init__(self, traffic: Traffic, play: Play, say: Callable[[str], None]) -> None:
        """Time begins now; the play begins when there are rooms to be hurt."""
        self._moments = play(ScenarioContext(traffic, say))
        self._next_at = time.monotonic() + _BEGIN_S
        self._over = False
        # Whatever fails from now on was meant to, or comes of it.
        traffic.ledger.disturb(Disturbance("scene", None, time.monotonic_ns()))

    def turn(self) -> None:
        """Go on with the play when it is time."""
        if self._over or time.monotonic() < self._next_at:
            return
        wait_s = next(self._moments, None)
        self._over = wait_s is None
        self._next_at = time.monotonic() + (wait_s or 0.0)

    def end(self) -> None:
        """Nothing more is done."""
        self._over = True
