"""Simulated prefill: the engine interface, an engine that sleeps, and the handover of computed pages to the agent.

The sleeping engine calculates when each pipeline stage of an instance finishes each chunk. A rank computes one chunk at
a time, layer by layer. A stage starts a chunk when the previous stage has finished that chunk and the stage itself has
finished the chunk before. Each rank calculates all stages up to its own, so that ranks need not communicate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvctl.lab.ranks.content import Content, own_side
from kvctl.lab.ranks.messages import Room
from kvctl_agent.agent import Agent
from kvctl_agent.errors import DeadlineExceeded
from kvctl_agent.layout.chunks import chunk_pages
from kvctl_agent.layout.layer_grouping import ForwardInfo
from kvctl_agent.runtime.handles import Send


class Computed(NamedTuple):
    """Times of one room's forward, on the monotonic clock.

    Attributes:
        started_ns: start of the forward.
        done_ns: completion of its last layer for its last chunk.
        compute_ns: total compute time of all layers and chunks, without pipeline waits.
    """

    started_ns: int
    done_ns: int
    compute_ns: int


class Job(Protocol):
    """The forward of one room's prompt."""

    def compute(self, chunk: int, tokens: int, first: int, end: int) -> Any:
        """Computes layers [first, end) of this rank for one chunk; chunks are computed in the prompt's order.

        Args:
            chunk: position of the chunk in the prompt.
            tokens: number of tokens of the chunk.

        Returns:
            The GPU event recorded after these layers, or None if they are complete on return.

        Raises:
            DeadlineExceeded: the layers would not be complete before the run's deadline.
        """
        ...

    def computed(self) -> Computed:
        """Returns the times of the forward; call it once the room's pages have been sent."""
        ...


class Engine(Protocol):
    """Computes one room at a time."""

    @property
    def ready(self) -> bool:
        """Whether the engine accepts another room now; False while its queue of submitted forwards is full."""
        ...

    def begin(self, asked_ns: int, chunks: int, deadline_ns: int) -> Job:
        """Begins the forward of one room.

        Args:
            asked_ns: time since which the room has waited for its forward.
            chunks: number of chunks of the prompt.
            deadline_ns: end of the run; nothing is computed after it.
        """
        ...


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


class SleepingEngine:
    """Engine that sleeps for the compute time of each layer."""

    ready = True

    def __init__(self, clock: PipelineClock, layers: int) -> None:
        """Simulates a rank with this number of layers."""
        self._clock = clock
        self._layers = layers

    def begin(self, asked_ns: int, chunks: int, deadline_ns: int) -> Job:
        begins = self._clock.forward(asked_ns, chunks)
        _sleep_until(begins[0])
        return _SleepingJob(self._clock.layer_ns, begins, self._layers, deadline_ns)


class _SleepingJob:
    def __init__(self, layer_ns: int, begins: Sequence[int], layers: int, deadline_ns: int) -> None:
        self._layer_ns = layer_ns
        self._begins = begins
        self._layers = layers
        self._deadline_ns = deadline_ns
        # The forward begins on time, even if this thread runs late.
        self._started_ns = begins[0] if layer_ns else time.monotonic_ns()
        self._done_ns = self._started_ns

    def compute(self, chunk: int, tokens: int, first: int, end: int) -> None:
        if self._layer_ns:
            at_ns = self._begins[chunk] + end * self._layer_ns
            _sleep_until(min(at_ns, self._deadline_ns))
            if at_ns > self._deadline_ns:
                raise DeadlineExceeded("its forward was not over at the run's deadline")
        self._done_ns = time.monotonic_ns()

    def computed(self) -> Computed:
        return Computed(self._started_ns, self._done_ns, len(self._begins) * self._layers * self._layer_ns)


class Forward:
    """Computes rooms and sends their pages by chunk and layer group through the agent, like an engine's scheduler."""

    def __init__(self, agent: Agent, content: Content, engine: Engine, deadline_ns: int) -> None:
        """Computes rooms until `deadline_ns`, the end of the run."""
        self._agent = agent
        self._content = content
        self._engine = engine
        self._deadline_ns = deadline_ns
        self._layers = len(agent.layers)
        start = content.start
        self._chunk_tokens = chunk_pages(int(start.config["chunk_tokens"]), start.page_size) * start.page_size
        # Of the KV, then of each KV group.
        self._page_sizes = [start.page_size, *(group["page_size"] for group in start.shape["groups"])]
        self._attention_dp = own_side(start).dp > 1

    @property
    def ready(self) -> bool:
        """Whether the engine accepts another room now."""
        return self._engine.ready

    def run(self, room: Room, send: Send, asked_ns: int, prefetched: bool) -> Job:
        """Computes a room and sends its pages; on a GPU, submits the computation and passes its events to the agent.

        Args:
            asked_ns: time since which the room has waited for its forward.
            prefetched: whether staging has been requested already.

        Raises:
            DeadlineExceeded: the run's deadline has passed.
            KvctlError: the agent refuses the pages.
        """
        tables, chunk_tokens = self._content.computed(room), self._chunk_tokens
        steps = [chunk_tokens // size for size in self._page_sizes]
        chunks = -(-len(tables[0]) // steps[0])
        job = self._engine.begin(asked_ns, chunks, self._deadline_ns)
        for chunk in range(chunks):
            pages, *group_pages = (
                table[chunk * step : (chunk + 1) * step] for table, step in zip(tables, steps, strict=True)
            )
            tokens = min(room.tokens - chunk * chunk_tokens, chunk_tokens)
            forward = ForwardInfo(tokens=(tokens,), attention_dp=self._attention_dp)
            groups = self._agent.layer_groups(forward).groups
            if chunk == 0 and not prefetched:
                send.prefetch(groups)
            last = chunk == chunks - 1
            layers = 0
            for group in groups:
                event = job.compute(chunk, tokens, layers, layers + len(group))
                layers += len(group)
                send.layers(group, pages, last=last, event=event, group_pages=group_pages)
            if not groups:
                event = job.compute(chunk, tokens, 0, self._layers)
                send.pages(pages, last=last, event=event, group_pages=group_pages)
        send.finish(self._content.slots[room.number], self._content.states(room.number))
        return job


def _sleep_until(at_ns: int) -> None:
    """Sleeps until `at_ns` on the monotonic clock."""
    left_ns = at_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
