"""One room's prompt on a prefill rank: pretends to compute it, and hands it over as an engine's scheduler would."""

from __future__ import annotations

import time
from typing import NamedTuple

from kvctl_agent.agent import Agent
from kvctl_agent.contract.rig import Room
from kvctl_agent.errors import DeadlineExceeded
from kvctl_agent.layout.chunks import chunk_pages
from kvctl_agent.layout.grouping import ForwardInfo
from kvctl_agent.rig.compute import Compute, sleep_until
from kvctl_agent.rig.content import Content, own_side
from kvctl_agent.runtime.handles import Send


class Computed(NamedTuple):
    """When a forward began and when its last page was computed, and what its layers took, waiting left out."""

    started_ns: int
    done_ns: int
    compute_ns: int


class Forward:
    """Chunk by chunk, layer group by layer group."""

    def __init__(self, agent: Agent, content: Content, compute: Compute, deadline_ns: int) -> None:
        """`deadline_ns`: nothing is computed beyond it."""
        self._agent = agent
        self._content = content
        self._compute = compute
        self._deadline_ns = deadline_ns
        self._layers = len(agent.pipelining.layers)
        start = content.start
        self._page_size = start.page_size
        self._chunk_pages = chunk_pages(int(start.config["chunk_tokens"]), start.page_size)
        self._attention_dp = own_side(start).dp > 1

    def run(self, room: Room, send: Send, asked_ns: int, prefetched: bool) -> Computed:
        """Compute a room that has waited since `asked_ns`.

        Args:
            prefetched: staging has been asked for.

        Raises:
            DeadlineExceeded: the run's deadline is over.
            KvctlError: the agent refuses what it is given.
        """
        pages, step = self._content.pages(room.number), self._chunk_pages
        begins = self._compute.forward(asked_ns, -(-len(pages) // step))
        sleep_until(begins[0])
        # A processor that is told of it late has begun in time all the same.
        started_ns = begins[0] if self._compute.layer_ns else time.monotonic_ns()
        done_ns = started_ns
        for chunk, begin_ns in enumerate(begins):
            here = pages[chunk * step : (chunk + 1) * step]
            tokens = min(room.tokens - chunk * step * self._page_size, step * self._page_size)
            forward = ForwardInfo(tokens=(tokens,), attention_dp=self._attention_dp)
            groups = self._agent.layer_groups(forward).groups
            if chunk == 0 and not prefetched:
                send.prefetch(groups)
            last = chunk == len(begins) - 1
            layers = 0
            for group in groups:
                layers += len(group)
                done_ns = self._until_computed(begin_ns, layers)
                send.layers(group, here, last=last)
            if not groups:
                done_ns = self._until_computed(begin_ns, self._layers)
                send.pages(here, last=last)
        send.finish(room.slot, self._content.states(room.number))
        return Computed(started_ns, done_ns, len(begins) * self._layers * self._compute.layer_ns)

    def _until_computed(self, begin_ns: int, layers: int) -> int:
        """Wait until so many layers of a chunk are computed; when that was."""
        if self._compute.layer_ns:
            at_ns = self._compute.after(begin_ns, layers)
            sleep_until(min(at_ns, self._deadline_ns))
            if at_ns > self._deadline_ns:
                raise DeadlineExceeded("its forward was not over at the run's deadline")
        return time.monotonic_ns()
