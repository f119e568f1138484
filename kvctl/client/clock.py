"""How far an agent's wall clock is from ours, as far as a round trip can tell."""

from __future__ import annotations

from dataclasses import dataclass

_NS_PER_DRIFT = 5_000  # two crystals drift apart by 200 ppm at most: a nanosecond in so many


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


def sharper(latest: ClockOffset, earlier: ClockOffset, age_ns: int) -> ClockOffset:
    """The one of two measurements that tells more now.

    A round trip that a pause has stretched bounds the offset to that pause: what was measured before it is better.

    Args:
        age_ns: from the earlier measurement to the latest one.
    """
    aged = ClockOffset(earlier.offset_ns, earlier.error_ns + age_ns // _NS_PER_DRIFT)
    was_set = abs(latest.offset_ns - aged.offset_ns) > latest.error_ns + aged.error_ns
    return latest if was_set or latest.error_ns <= aged.error_ns else aged
