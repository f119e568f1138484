"""What a machine's writes, copies and rooms cost: measured by a probe, or given by hand."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_MIB = 1 << 20
_MEASURED_ROWS = (512, 4096, 32768, 262144)


@dataclass(frozen=True, slots=True)
class Lane:
    """One writer's lane to one reader.

    Attributes:
        gb_per_s: rate of one large write, 10⁹ bytes a second.
        us_per_write: post and completion of a write, whatever it holds.
        us_by_bytes: (bytes, µs) of one descriptor, by ascending size.
        on_cpu: whether moving the bytes is work of this machine's cores (shared memory, TCP), not of a device.
    """

    gb_per_s: float
    us_per_write: float
    us_by_bytes: tuple[tuple[int, float], ...]
    on_cpu: bool = True

    def descriptor_us(self, nbytes: float) -> float:
        """µs of one descriptor: flat below the smallest size measured, at the large rate above the largest."""
        points = self.us_by_bytes
        if nbytes <= points[0][0]:
            return points[0][1]
        for (below, low_us), (above, high_us) in pairwise(points):
            if nbytes <= above:
                return low_us + (high_us - low_us) * (nbytes - below) / (above - below)
        largest, us = points[-1]
        return us + (nbytes - largest) / (self.gb_per_s * 1e3)

    def write_us(self, descriptors: int, nbytes: float) -> float:
        """µs of a write of so many bytes in equal descriptors."""
        return self.us_per_write + descriptors * self.descriptor_us(nbytes / max(1, descriptors))


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
    return Lane(gb_per_s, us, points, on_cpu)


def copies(points: Sequence[Sequence[float]]) -> Copies:
    """From the probe's answer."""
    return Copies(tuple((int(size), float(us)) for size, us in points))
