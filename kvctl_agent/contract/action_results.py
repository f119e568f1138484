"""Types of the replies to admin commands that change something.

An action that would be unsafe, or is not applicable, is refused with `ErrorCode.REFUSED` and a message with the reason.
"""

from __future__ import annotations

from typing import Literal, TypedDict

Result = Literal[
    "aborted",  # the room has failed
    "released",  # freed at once, because the operator vouches for it
    "revoking",  # the writer was asked to give the region back
    "aside",  # the watermark passes the region, but nobody else gets its bytes
    "draining",  # accepts no new rooms
    "accepting",  # accepts new rooms
    "set",
    "unchanged",  # the state was already as requested
]


class ActionResult(TypedDict):
    """One row of `abort`, `release`, `drain`, `resume` and `set`."""

    agent: str
    subject: str  # "room 7", "allocation 17", "rooms", or a configuration key
    result: Result
    text: str


class ProbeRow(TypedDict):
    """Cost of writes with descriptors of one size, best of several; the last row is one large contiguous write."""

    agent: str
    peer: str
    bytes: int  # size of one descriptor
    descriptors: int  # descriptors in one write
    write_ns: int  # from post to completion
    descriptor_ns: int  # cost of each descriptor beyond the fixed cost of a write; at 64 bytes, the fixed cost
    gb_per_s: float  # 10⁹ bytes per second over the whole write


class Probe(TypedDict):
    """Answer to `probe`; `rows` is empty while the probe runs, and the same request later returns them."""

    agent: str
    peer: str
    lane: str
    running: bool
    rows: list[ProbeRow]
