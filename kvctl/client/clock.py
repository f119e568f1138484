"""How far an agent's wall clock is from ours, as far as a round trip can tell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """`offset_ns` is the agent's clock minus ours; the truth lies within ± `error_ns` of it."""

    offset_ns: int
    error_ns: int

    @property
    def correction_ns(self) -> int:
        """What to subtract from the agent's times.

        An offset within its own bound is not evidence of a difference. Agents on this machine share our clock, and
        subtracting the noise of their round trips would tear apart times that agree.
        """
        return self.offset_ns if abs(self.offset_ns) > self.error_ns else 0


def estimate(sent_at_ns: int, received_at_ns: int, agent_now_ns: int) -> ClockOffset:
    """Cristian's estimate: the agent read its clock somewhere between sending and receiving, most likely midway."""
    half = max(0, received_at_ns - sent_at_ns + 1) // 2
    return ClockOffset(agent_now_ns - sent_at_ns - half, half)
