"""Estimates the offset between an agent's wall clock and the local wall clock from round trips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_NS_PER_DRIFT = 5_000  # two crystals drift apart by at most 200 ppm: 1 ns in 5,000 ns


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Offset of an agent's wall clock: the agent's clock minus the local clock is `offset_ns` ± `error_ns`."""

    offset_ns: int
    error_ns: int

    @property
    def correction_ns(self) -> int:
        """Value to subtract from the agent's times; 0 if the offset is within its error.

        Agents on this machine share the local clock; for them the offset is noise, and subtracting it would make equal
        times differ.
        """
        return self.offset_ns if abs(self.offset_ns) > self.error_ns else 0

    def corrected(self, events: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Converts the times of the agent's events to the local clock."""
        shift_ns = self.correction_ns
        return [{**event, "at_ns": event["at_ns"] - shift_ns} for event in events] if shift_ns else events


def estimate(sent_at_ns: int, received_at_ns: int, agent_now_ns: int) -> ClockOffset:
    """Estimates the clock offset from one round trip by Cristian's algorithm.

    The agent read its clock between sending and receiving, most likely midway; half of the round trip is the error.

    Args:
        sent_at_ns: local wall clock when the request was sent.
        received_at_ns: local wall clock when the answer arrived.
    """
    half = max(0, received_at_ns - sent_at_ns + 1) // 2
    return ClockOffset(agent_now_ns - sent_at_ns - half, half)


def more_precise(latest: ClockOffset, earlier: ClockOffset, age_ns: int) -> ClockOffset:
    """Returns the more precise of two measurements, allowing for clock drift between them.

    A pause during a round trip increases its error by the length of the pause, so an earlier measurement may be better.
    If the two measurements contradict each other, the clock was set, and the latest one is returned.

    Args:
        age_ns: time from the earlier measurement to the latest one.
    """
    aged = ClockOffset(earlier.offset_ns, earlier.error_ns + age_ns // _NS_PER_DRIFT)
    clock_was_set = not _agree(latest, aged)
    return latest if clock_was_set or latest.error_ns <= aged.error_ns else aged


def shared(clocks: Sequence[tuple[str, ClockOffset]]) -> list[ClockOffset]:
    """Returns the clock of each agent: of the measurements of its host that agree with its own, the most precise one.

    Agents read the clock of their host, but one that started before the clock was set keeps the difference.

    Args:
        clocks: (host, measurement) of each agent; agents of an unknown host "" keep their own.
    """
    best: dict[str, ClockOffset] = {}
    for host, clock in clocks:
        if host and (host not in best or clock.error_ns < best[host].error_ns):
            best[host] = clock
    return [best[host] if host and _agree(clock, best[host]) else clock for host, clock in clocks]


def _agree(one: ClockOffset, other: ClockOffset) -> bool:
    return abs(one.offset_ns - other.offset_ns) <= one.error_ns + other.error_ns
