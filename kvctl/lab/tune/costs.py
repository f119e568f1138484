"""What a machine's writes, copies and rooms cost: measured by a probe, or given by hand."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kvctl_agent.contract.connection_cost import ConnectionCost

_MIB = 1 << 20
_MEASURED_ROWS = (512, 4096, 32768, 262144)


@dataclass(frozen=True, slots=True)
class Lane:
    """One writer's connection to one reader.

    Attributes:
        on_cpu: whether moving the bytes is work of this machine's cores (shared memory, TCP), not of a device.
    """

    cost: ConnectionCost
    on_cpu: bool = True


@dataclass(frozen=True, slots=True)
class Copies:
    """Row copies: (bytes of a row, µs per MiB), ascending; the figure of the nearest smaller row applies."""

    points: tuple[tuple[int, float], ...]

    def us(self, nbytes: float, row_bytes: float) -> float:
        place = bisect_right([size for size, _ in self.points], row_bytes) - 1
        return nbytes / _MIB * self.points[max(0, place)][1]


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything the model needs to know of a machine.

    Attributes:
        room_us: from forward done to decode may start, of a room of hardly any bytes between two idle ranks.
        rank_us: processor time that such a room takes on each rank.
        origin: where the figures come from, in words.
    """

    lane: Lane
    gather: Copies
    scatter: Copies
    memcpy_gb_per_s: float
    room_us: float
    rank_us: float
    cores: int
    origin: str


def given_lane(text: str) -> Lane:
    """Reads `gbps=40,us=1.2` or `gbps=40,us=1.2,device`: GB/s, µs per descriptor, and that a device moves the bytes.

    Raises:
        ValueError: it is not written like that.
    """
    example = (
        f"{text!r}: write gbps=40,us=1.2 (10⁹ bytes/s, µs per descriptor), and ,device where a NIC moves the bytes"
    )
    words = [word.strip() for word in text.split(",")]
    on_cpu = "device" not in words
    values: dict[str, float] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if word == "device":
            continue
        try:
            values[name] = float(value)
        except ValueError:
            raise ValueError(example) from None
        if not separator or not 0 < values[name] < 1e6:
            raise ValueError(example)
    if values.keys() != {"gbps", "us"}:
        raise ValueError(example)
    gb_per_s, us = values["gbps"], values["us"]
    points = tuple((size, max(us, size / (gb_per_s * 1e3))) for size in _MEASURED_ROWS)
    return Lane(ConnectionCost(gb_per_s, us, points), on_cpu)


def copies(points: Sequence[Sequence[float]]) -> Copies:
    """From the probe's answer."""
    return Copies(tuple((int(size), float(us)) for size, us in points))
