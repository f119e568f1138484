"""What computes prompts on a prefill rank, and one that pretends to.

It knows when one pipeline stage of an instance would be done with which layers of which chunk. A rank computes one
chunk at a time, layer by layer. A later stage takes a chunk up when the stage before it is done with it and it is done
itself with the chunk before. Each rank reckons all stages up to its own from what it sees, so that no two ranks have to
talk about it.
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
    """When a forward began and when its last page was computed, and what its layers took, waiting left out."""

    started_ns: int
    done_ns: int
    compute_ns: int


class Job(Protocol):
    """The forward of one room's prompt."""

    def compute(self, chunk: int, tokens: int, first: int, end: int) -> Any:
        """Layers [first, end) of this rank for a chunk of so many tokens, in the order of the prompt.

        Returns:
            The event behind them; None where they are computed on return.

        Raises:
            DeadlineExceeded: they would not be, before the run's deadline.
        """
        ...

    def computed(self) -> Computed:
        """How it went; of a job whose pages have been sent."""
        ...


class Engine(Protocol):
    """Computes one room after the other."""

    @property
    def ready(self) -> bool:
        """Whether it takes another room now: it is not far ahead of what it computes."""
        ...

    def begin(self, asked_ns: int, chunks: int, deadline_ns: int) -> Job:
        """The forward of a room that has waited since `asked_ns`, of so many chunks; returns when it begins."""
        ...


class Compute:
    """The simulated engine of one prefill rank.

    Attributes:
        layer_ns: time that one layer takes for one chunk; 0: no time at all.
    """

    def __init__(self, stage_layers: Sequence[int], stage: int, layer_ns: int) -> None:
        """`stage_layers` of every stage of the instance; this rank is of number `stage`."""
        self._layers = stage_layers[: stage + 1]
        self._free_ns = [0] * (stage + 1)
        self.layer_ns = layer_ns

    def forward(self, asked_ns: int, chunks: int) -> list[int]:
        """When this stage begins with each chunk of a prompt that was asked for at `asked_ns`; takes them up."""
        begins = []
        for _ in range(chunks):
            at = asked_ns
            for stage, layers in enumerate(self._layers):
                at = begin = max(at, self._free_ns[stage])
                at += layers * self.layer_ns
                self._free_ns[stage] = at
            begins.append(begin)
        return begins

    def after(self, begin_ns: int, layers: int) -> int:
        """When so many layers of a chunk that was begun at `begin_ns` are computed."""
        return begin_ns + layers * self.layer_ns


def sleep_until(at_ns: int) -> None:
    """Wait for a moment of the monotonic clock, as a processor that hands its work to a GPU does."""
    left_ns = at_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)


class SleepingEngine:
    """An engine whose layers take the time they take, and nothing else."""

    ready = True

    def __init__(self, compute: Compute, layers: int) -> None:
        """`layers` of this rank."""
        self._compute = compute
        self._layers = layers

    def begin(self, asked_ns: int, chunks: int, deadline_ns: int) -> Job:
        begins = self._compute.forward(asked_ns, chunks)
        sleep_until(begins[0])
        return _SleepingJob(self._compute, begins, self._layers, deadline_ns)


class _SleepingJob:
    def __init__(self, compute: Compute, begins: Sequence[int], layers: int, deadline_ns: int) -> None:
        self._compute = compute
        self._begins = begins
        self._layers = layers
        self._deadline_ns = deadline_ns
        # A processor that is told of it late has begun in time all the same.
        self._started_ns = begins[0] if compute.layer_ns else time.monotonic_ns()
        self._done_ns = self._started_ns

    def compute(self, chunk: int, tokens: int, first: int, end: int) -> None:
        if self._compute.layer_ns:
            at_ns = self._compute.after(self._begins[chunk], end)
            sleep_until(min(at_ns, self._deadline_ns))
            if at_ns > self._deadline_ns:
                raise DeadlineExceeded("its forward was not over at the run's deadline")
        self._done_ns = time.monotonic_ns()

    def computed(self) -> Computed:
        return Computed(self._started_ns, self._done_ns, len(self._begins) * self._layers * self._compute.layer_ns)


class Forward:
    """Chunk by chunk, layer group by layer group."""

    def __init__(self, agent: Agent, content: Content, engine: Engine, deadline_ns: int) -> None:
        """`deadline_ns`: nothing is computed beyond it."""
        self._agent = agent
        self._content = content
        self._engine = engine
        self._deadline_ns = deadline_ns
        self._layers = len(agent.layers)
        start = content.start
        self._page_size = start.page_size
        self._chunk_pages = chunk_pages(int(start.config["chunk_tokens"]), start.page_size)
        self._attention_dp = own_side(start).dp > 1

    @property
    def ready(self) -> bool:
        """Whether a room may be computed now."""
        return self._engine.ready

    def run(self, room: Room, send: Send, asked_ns: int, prefetched: bool) -> Job:
        """Compute a room that has waited since `asked_ns`, or have it computed.

        Args:
            prefetched: staging has been asked for.

        Raises:
            DeadlineExceeded: the run's deadline is over.
            KvctlError: the agent refuses what it is given.
        """
        pages, step = self._content.pages(room.number), self._chunk_pages
        chunks = -(-len(pages) // step)
        job = self._engine.begin(asked_ns, chunks, self._deadline_ns)
        for chunk in range(chunks):
            here = pages[chunk * step : (chunk + 1) * step]
            tokens = min(room.tokens - chunk * step * self._page_size, step * self._page_size)
            forward = ForwardInfo(tokens=(tokens,), attention_dp=self._attention_dp)
            groups = self._agent.layer_groups(forward).groups
            if chunk == 0 and not prefetched:
                send.prefetch(groups)
            last = chunk == chunks - 1
            layers = 0
            for group in groups:
                event = job.compute(chunk, tokens, layers, layers + len(group))
                layers += len(group)
                send.layers(group, here, last=last, event=event)
            if not groups:
                send.pages(here, last=last, event=job.compute(chunk, tokens, 0, self._layers))
        send.finish(room.slot, self._content.states(room.number))
        return job
