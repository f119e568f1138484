"""Estimates the offset between an agent's wall clock and the local one from round trips."""

from __future__ import annotations

from dataclasses import dataclass

_NS_PER_DRIFT = 5_000  # two crystals drift apart by at most 200 ppm: 1 ns in 5,000 ns


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The agent's clock minus the local one: `offset_ns` ± `error_ns`."""

    offset_ns: int
    error_ns: int

    @property
    def correction_ns(self) -> int:
        """Value to subtract from the agent's times; 0 if the offset is within its error.

        Agents on this machine share the local clock; subtracting the noise of their round trips would separate times
        that are equal.
        """
        return self.offset_ns if abs(self.offset_ns) > self.error_ns else 0


def estimate(sent_at_ns: int, received_at_ns: int, agent_now_ns: int) -> ClockOffset:
    """Cristian's algorithm: the agent read its clock between sending and receiving, most likely midway."""
    half = max(0, received_at_ns - sent_at_ns + 1) // 2
    return ClockOffset(agent_now_ns - sent_at_ns - half, half)


def more_precise(latest: ClockOffset, earlier: ClockOffset, age_ns: int) -> ClockOffset:
    """Returns the more precise of two measurements, considering drift.

    A round trip prolonged by a pause has an error of the length of that pause; an earlier measurement is better.

    Args:
        age_ns: time from the earlier measurement to the latest one.
    """
    aged = ClockOffset(earlier.offset_ns, earlier.error_ns + age_ns // _NS_PER_DRIFT)
    clock_was_set = abs(latest.offset_ns - aged.offset_ns) > latest.error_ns + aged.error_ns
    return latest if clock_was_set or latest.error_ns <= aged.error_ns else aged
