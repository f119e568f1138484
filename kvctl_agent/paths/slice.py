"""Path slice: one descriptor per run of bytes that is contiguous on both sides, for any two layouts.

A run is the heads of a token (NHD on both sides), a page of some heads (HND on both sides), or one head of one token. A
room of 1,024 tokens and 32 layers takes 65,536 descriptors per writer for the heads of tokens, which path staged
avoids. Descriptors are sent by address. An engine can prepare lists of descriptors that later writes name by index, but
only lists of a whole pool serve every room: for a pool of 4 GiB they took 8 s and 2 GiB of memory for each new peer,
and a write of 32,768 rows was 3 % faster.
"""

from __future__ import annotations

import time

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.paths.base import Flight, WriteFlight
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.protocol.events import Transfer


class SlicePath:
    """Path slice: sends a part in one write."""

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        share = order.share
        if share is None:
            raise MemoryLayoutError(f"{order.key} has no heads to send on path slice")
        began_ns = time.monotonic_ns()
        segment, layers = connection.segments[share.segment].joined, (order.key.lo, order.key.hi)
        arrays = segment.descriptors(share, order.src_pages, order.dst_pages, *layers)
        transport, peer, tag = connection.transport, connection.peer, order.tag
        return WriteFlight(connection, order, began_ns, lambda: transport.write(peer, *arrays, tag))
