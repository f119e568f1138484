"""Simulated prefill, which takes time and no processor, and the handover of computed pages to the agent.

A forward is a generator that yields the time of its next step, so that the rank's thread is free until then.

`PipelineClock` calculates when each pipeline stage of an instance finishes each chunk. A rank computes one chunk at
a time, layer by layer. A stage starts a chunk when the previous stage has finished that chunk and the stage itself has
finished the chunk before. Each rank calculates all stages up to its own, so that ranks need not communicate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvctl.lab.ranks.content import Content, own_side
from kvctl.lab.ranks.messages import Open, Room
from kvctl_agent.agent import Agent
from kvctl_agent.layout.chunks import chunk_pages
from kvctl_agent.layout.layer_grouping import ForwardInfo
from kvctl_agent.runtime.handles import Send


class PipelineClock:
    """Calculates when each pipeline stage of an instance computes each chunk.

    Attributes:
        layer_ns: compute time of one layer for one chunk; 0: computation takes no time.
    """

    def __init__(self, stage_layers: Sequence[int], stage: int, layer_ns: int) -> None:
        """Calculates for a rank of pipeline stage `stage`; `stage_layers` has the number of layers of each stage."""
        self._layers = stage_layers[: stage + 1]
        self._free_ns = [0] * (stage + 1)
        self.layer_ns = layer_ns

    def forward(self, asked_ns: int, chunks: int) -> list[int]:
        """Schedules a prompt requested at `asked_ns`; returns the time at which this stage begins each chunk."""
        begins = []
        for _ in range(chunks):
            at = asked_ns
            for stage, layers in enumerate(self._layers):
                at = begin = max(at, self._free_ns[stage])
                at += layers * self.layer_ns
                self._free_ns[stage] = at
            begins.append(begin)
        return begins


class Job:
    """The forward of one room's prompt: its times on the monotonic clock.

    Attributes:
        done_ns: completion of its last layer for its last chunk, so far.
        compute_ns: total compute time of all layers and chunks, without pipeline waits.
    """

    def __init__(self, layer_ns: int, begins: Sequence[int], layers: int) -> None:
        self._layer_ns = layer_ns
        self._begins = begins
        # The forward begins on time, even if this thread runs late.
        self.started_ns = self.done_ns = begins[0] if layer_ns else time.monotonic_ns()
        self.compute_ns = len(begins) * layers * layer_ns

    def due_ns(self, chunk: int, end: int) -> int:
        """Returns when layers [0, end) of this rank are computed for a chunk."""
        return self._begins[chunk] + end * self._layer_ns


class Forward:
    """Computes rooms and sends their pages by chunk and layer group through the agent, like an engine's scheduler.

    Attributes:
        jobs: the forwards that have begun, by room number.
    """

    def __init__(self, agent: Agent, content: Content, clock: PipelineClock) -> None:
        self._agent = agent
        self._content = content
        self._clock = clock
        self._layers = len(agent.layers)
        self.jobs: dict[int, Job] = {}
        start = content.start
        self._chunk_tokens = chunk_pages(int(start.config["chunk_tokens"]), start.page_size) * start.page_size
        # Of the KV, then of each KV group.
        self._page_sizes = [start.page_size, *(group["page_size"] for group in start.shape["groups"])]
        self._attention_dp = own_side(start).dp > 1

    def run(self, room: Room, send: Send, asked_ns: int, prefetched: bool) -> Iterator[int]:
        """Computes a room and sends its pages.

        Args:
            asked_ns: time since which the room has waited for its forward.

        Yields:
            Before each step, the time on the monotonic clock at which the step is due.

        Raises:
            KvctlError: the agent refuses the pages.
        """
        tables, chunk_tokens = self._content.computed(room), self._chunk_tokens
        steps = [chunk_tokens // size for size in self._page_sizes]
        chunks = -(-len(tables[0]) // steps[0])
        begins = self._clock.forward(asked_ns, chunks)
        job = self.jobs[room.number] = Job(self._clock.layer_ns, begins, self._layers)
        finals = self._content.slots[room.number], self._content.states(room.number)
        groups: Sequence[range] = ()
        yield job.due_ns(0, 0)
        for chunk in range(chunks):
            pages, *group_pages = (
                table[chunk * step : (chunk + 1) * step] for table, step in zip(tables, steps, strict=True)
            )
            tokens = min(room.tokens - chunk * chunk_tokens, chunk_tokens)
            forward = ForwardInfo(tokens=(tokens,), attention_dp=self._attention_dp)
            groups = self._agent.layer_groups(forward).groups
            if chunk == 0 and not prefetched:
                send.prefetch(groups, tokens)
            last = chunk == chunks - 1
            layers = 0
            for group in groups:
                yield job.due_ns(chunk, layers + len(group))
                layers += len(group)
                job.done_ns = time.monotonic_ns()
                send.layers(group, pages, last=last, group_pages=group_pages)
            if not groups:
                yield job.due_ns(chunk, self._layers)
                job.done_ns = time.monotonic_ns()
                if last:
                    send.finish(*finals, pages, group_pages=group_pages)
                else:
                    send.pages(pages, group_pages=group_pages)
        if groups:
            send.finish(*finals)


def scripted(command: Open, agent: Agent, content: Content, send: Send) -> Iterator[int]:
    """Computes a room in the forwards and layer groups that its command names.

    Yields:
        Before each forward, the time on the monotonic clock at which it ends.

    Raises:
        KvctlError: the agent refuses the pages.
    """
    number = command.room.number
    if content.start.verify:  # otherwise nobody looks at the bytes, and the fill takes longer than the transfer
        content.fill_rooms([content.rooms[number]])
    begun_ns = time.monotonic_ns()
    groups = _split(agent.layers, command.groups) if command.groups > 1 else []
    send.prefetch(groups)
    pages = content.pages(number)
    edges = [len(pages) * cut // command.chunks for cut in range(command.chunks + 1)]
    for chunk, (first, end) in enumerate(pairwise(edges)):
        last = chunk == command.chunks - 1
        if last and command.hangs:
            return
        yield begun_ns + round(chunk * command.gap_s * 1e9)
        if not groups:
            send.pages(pages[first:end], last=last)
        for group in groups:
            send.layers(group, pages[first:end], last=last)
    send.finish(content.slots[number], content.states(number))


def _split(layers: range, groups: int) -> list[range]:
    """Splits layers into consecutive groups of nearly equal size."""
    count = min(groups, len(layers))
    edges = [layers.start + len(layers) * cut // count for cut in range(count + 1)]
    return [range(lo, hi) for lo, hi in pairwise(edges)]
