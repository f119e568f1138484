"""One room's prompt on a prefill rank: has it computed, and hands it over as an engine's scheduler would."""

from __future__ import annotations

from kvctl.lab.ranks.bench_messages import Room
from kvctl.lab.ranks.compute import Engine, Job
from kvctl.lab.ranks.content import Content, own_side
from kvctl_agent.agent import Agent
from kvctl_agent.layout.chunks import chunk_pages
from kvctl_agent.layout.layer_grouping import ForwardInfo
from kvctl_agent.runtime.handles import Send


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
