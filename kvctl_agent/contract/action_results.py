"""What the admin commands that act answer: what was done, and to what.

What is not done because it would not be safe, or makes no sense, is an error (`ErrorCode.REFUSED`) that says why.
"""

from __future__ import annotations

from typing import Literal, TypedDict

Result = Literal[
    "aborted",  # the room has failed
    "released",  # free at once, on the operator's word
    "revoking",  # its writer was asked to give it back
    "aside",  # others go past it, and its bytes stay its writer's
    "draining",  # takes no new rooms
    "accepting",  # takes new rooms
    "set",
    "unchanged",  # it was so already
]


class Done(TypedDict):
    """One row of `abort`, `release`, `drain`, `resume` and `set`."""

    agent: str
    subject: str  # "room 7", "allocation 17", "rooms", or a configuration key
    result: Result
    text: str


class ProbeRow(TypedDict):
    """What writes of one size cost, the best of several; the last row is one large contiguous write."""

    agent: str
    peer: str
    bytes: int  # of one descriptor
    descriptors: int  # in one write
    write_ns: int  # from its post to its completion
    descriptor_ns: int  # that each descriptor adds to what every write takes; of 64 bytes, what a write takes
    gb_per_s: float  # 10⁹ bytes a second of the whole write


class Probe(TypedDict):
    """Answer to `probe`; while it is running there are no rows yet, and the same request waits on for them."""

    agent: str
    peer: str
    lane: str
    running: bool
    rows: list[ProbeRow]
