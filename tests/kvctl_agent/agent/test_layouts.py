"""What an engine can ask of an agent beyond plain rooms: any layout, layer groups, state, several prefill instances.

Every pool holds a value that names its place, so a byte that lands anywhere else is seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvctl_agent.agent import Agent
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import ConfigError, LocalProtocolError, MemoryLayoutError
from kvctl_agent.layout.layer_grouping import ForwardInfo
from kvctl_agent.layout.parallel import ParallelConfig, local_shards
from kvctl_agent.layout.shape import ModelShape, StateShape
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.protocol.events import Overlapped
from kvctl_agent.rank import Rank
from kvctl_agent.runtime.handles import Receive, Send
from tests.support.polling import until

POISON = 0xDB
PAGE_SIZE, PAGES, CHUNK = 4, 64, 16
STATES = (StateShape("conv", (0, 2, 5), 2, 4, 8), StateShape("index", (1, 3), 4, 1, 16))
FULL = ModelShape(6, 4, 16, 8, 2, k_scale_bytes=4, v_scale_bytes=4, draft=ModelShape(1, 2, 8, 8, 2), states=STATES)
PLAIN = ModelShape(6, 4, 16, 8, 2)


@dataclass
class Instance:
    """Agents of one instance."""

    role: Any
    side: ParallelConfig
    agents: list[Agent] = field(default_factory=list)
    endpoint: str = ""


class Fleet:
    """Instances that share one model."""

    def __init__(self, directory: Path, shape: ModelShape, transport: str, layouts: tuple[str, str]) -> None:
        self.directory, self.shape, self.transport = directory, shape, transport
        self.layouts = dict(zip(("prefill", "decode"), layouts, strict=True))
        self.stack = ExitStack()
        self.prefill: list[Instance] = []
        self.decode = Instance("decode", ParallelConfig())

    def start(self, prefill: Sequence[ParallelConfig], decode: ParallelConfig, **config: Any) -> Fleet:
        for number, side in enumerate(prefill):
            place = Instance("prefill", side, endpoint=f"ipc://{self.directory}/boot{number}")
            self.prefill.append(place)
            place.agents = [
                self._agent(place, rank, f"p{number}-{rank}", place.endpoint, config) for rank in _all(side)
            ]
        self.decode.side = decode
        endpoints = [place.endpoint for place in self.prefill]
        self.decode.agents = [self._agent(self.decode, rank, f"d{rank}", endpoints, {}) for rank in _all(decode)]
        for agent in self.decode.agents:
            agent.wait_ready(60)
        return self

    def _agent(self, place: Instance, number: int, name: str, bootstrap: Any, config: dict[str, Any]) -> Agent:
        coord, side = place.side.coord(number), place.side
        pool = KVPool.allocate(
            local_shards(self.shape, PAGE_SIZE, side, coord),
            PAGE_SIZE,
            PAGES,
            {state.name: 16 for state in self.shape.states},
            aux_slots=4,
            aux_row_bytes=32,
            layout=self.layouts[place.role],
        )
        self.stack.callback(pool.close)
        sizes = {f"{axis}_size": getattr(side, axis) for axis in coord._fields}
        small: dict[str, Any] = {"staging_ring_mb": 1, "staging_buffer_mb": 4, "chunk_tokens": CHUNK, "path": "staged"}
        agent = Agent(
            role=place.role,
            rank=Rank(**coord._asdict(), **sizes, stages=side.stages),
            pool=pool,
            name=name,
            bootstrap=bootstrap,
            model=self.shape,
            transport=self.transport,
            **{**small, **config},
        )
        self.stack.callback(agent.close)
        _fill(agent, truth=place.role == "prefill")
        return agent.start()

    def receive(self, room: int, pages: Any, **more: Any) -> list[Receive]:
        return [agent.receive(room, pages, **more) for agent in self.decode.agents]

    def check(self, moved: dict[str, list[tuple[int, int]]]) -> None:
        """Every byte of every decode pool: `moved` are (source, destination) pages or items, by segment."""
        for agent in self.decode.agents:
            for memory in agent.pool.segments:
                here, segment = memory.shard, memory.shard.segment
                pairs = moved.get("kv" if segment.name == "draft" else segment.name, [])
                for layer in range(here.layer_lo, here.layer_hi):
                    for place, plane in enumerate(segment.planes):
                        wanted = np.full((memory.num_slots, plane.rows, here.heads, plane.head_bytes), POISON, np.uint8)
                        for source, target in pairs:
                            wanted[target] = _truth(memory, layer, place)[source]
                        found = memory.elements(layer, place)
                        where = f"{agent.name} {segment.name} layer {layer} plane {plane.name}"
                        assert np.array_equal(found, wanted), where

    def close(self) -> None:
        self.stack.close()


def _all(side: ParallelConfig) -> range:
    return range(side.size)


def _truth(memory: Any, layer: int, plane: int) -> np.ndarray:
    """What a prefill rank holds: each row names its segment, layer, plane, page, row and head."""
    here = memory.shard
    rows, head_bytes = here.segment.planes[plane].rows, here.segment.planes[plane].head_bytes
    page, row, head, byte = np.ogrid[: memory.num_slots, :rows, here.head_lo : here.head_hi, :head_bytes]
    value = page * 5 + row * 3 + head * 11 + byte + here.segment.index * 7 + layer * 31 + plane * 13
    return (value % 251).astype(np.uint8)


def _fill(agent: Agent, *, truth: bool) -> None:
    for memory in agent.pool.segments:
        for layer in range(memory.shard.layer_lo, memory.shard.layer_hi):
            for plane in range(len(memory.shard.segment.planes)):
                memory.elements(layer, plane)[:] = _truth(memory, layer, plane) if truth else POISON


def groups_of(agent: Agent, size: int = 2) -> list[range]:
    own = agent.layers
    return [range(lo, min(lo + size, own.stop)) for lo in range(own.start, own.stop, size)]


Make = Callable[..., Fleet]


@pytest.fixture
def make(no_leaks: None, short_directory: Path, socket_dir: Path) -> Iterator[Make]:
    fleets: list[Fleet] = []

    def start(
        prefill: ParallelConfig | Sequence[ParallelConfig],
        decode: ParallelConfig,
        shape: ModelShape = PLAIN,
        transport: str = "loopback",
        layouts: tuple[str, str] = ("nhd", "nhd"),
        **config: Any,
    ) -> Fleet:
        fleets.append(Fleet(short_directory, shape, transport, layouts))
        return fleets[-1].start([prefill] if isinstance(prefill, ParallelConfig) else prefill, decode, **config)

    yield start
    for fleet in fleets:
        fleet.close()


SRC, DST = np.arange(3, 14), np.arange(30, 41)
MOVED = list(zip(SRC.tolist(), DST.tolist(), strict=True))


def feed(sends: list[Send], agents: list[Agent], mode: str, **finish: Any) -> None:
    """The forward of every rank: the prompt in two chunks, the first of which ends inside a cell."""
    for send, agent in zip(sends, agents, strict=True):
        groups = groups_of(agent)
        if mode == "plain":
            send.prefetch()
            send.pages(SRC[:6])
            send.pages(SRC[6:], last=True)
        else:
            send.prefetch(groups if mode == "declared" else ())
            for lo, hi in ((0, 6), (6, 11)):
                for group in groups:
                    send.layers(group, SRC[lo:hi], last=hi == 11)
        send.finish(**finish)


def ended(handles: Sequence[Send | Receive], timeout: float = 60.0) -> set[RoomState]:
    return {handle.wait(timeout) for handle in handles}


class TestStrides:
    """The memory of the two sides differs in the order of its axes."""

    @pytest.mark.parametrize(("path", "tp"), [("bulk", 2), ("slice", 1), ("staged", 1), ("staged", 2)])
    @pytest.mark.parametrize(
        "layouts", [("nhd", "fused"), ("hnd", "nhd"), ("fused", "block-outer-hnd"), ("hnd", "hnd"), ("kv-inner", "nhd")]
    )
    def test_every_segment_lands_between_different_layouts(
        self, make: Make, tp: int, layouts: tuple[str, str], path: str
    ) -> None:
        fleet = make(ParallelConfig(tp=2), ParallelConfig(tp=tp), FULL, layouts=layouts, path=path, checksum=True)
        agents = fleet.prefill[0].agents
        receives = fleet.receive(5, DST, aux_index=1, state_indices=[[3], [4, 5, 6]])
        sends = [agent.send(5) for agent in agents]
        feed(sends, agents, "declared", aux_index=2, state_indices=[[1], [9, 8, 7]])
        assert ended([*receives, *sends]) == {RoomState.SUCCESS}, [each.error for each in [*receives, *sends]]
        fleet.check({"kv": MOVED, "conv": [(1, 3)], "index": [(9, 4), (8, 5), (7, 6)]})


class TestSeveralPrefillInstances:
    @pytest.mark.parametrize(
        ("name", "place"),
        [("p0", "elsewhere"), ("other", "boot0"), ("p0", "boot0")],
        ids=["moved", "renamed", "another layout of the same ranks"],
    )
    def test_an_instance_that_starts_anew_is_met_by_the_next_room(
        self, make: Make, short_directory: Path, name: str, place: str
    ) -> None:
        """However little of its old life is left; the room opens before its registry is complete."""
        fleet = make(ParallelConfig(tp=2), ParallelConfig())
        for agent in fleet.prefill[0].agents:
            agent.close()
        new = Instance("prefill", ParallelConfig(pp=3), endpoint=f"ipc://{short_directory}/{place}")
        new.agents = [fleet._agent(new, 0, f"{name}-0", new.endpoint, {})]
        receives = fleet.receive(5, DST, prefill=new.endpoint)
        new.agents += [fleet._agent(new, rank, f"{name}-{rank}", new.endpoint, {}) for rank in (1, 2)]
        feed([agent.send(5) for agent in new.agents], new.agents, "plain")
        assert ended(receives) == {RoomState.SUCCESS}, [receive.error for receive in receives]
        fleet.check({"kv": MOVED})


class TestRoomsThatMoveLittle:
    def test_a_fake_room_succeeds_at_once_and_nobody_hears_of_it(self, make: Make) -> None:
        fleet = make(ParallelConfig(), ParallelConfig())
        (prefill,), (decode,) = fleet.prefill[0].agents, fleet.decode.agents
        send, receive = prefill.send(9, fake=True), decode.receive(9, [1, 2], fake=True)
        send.prefetch()
        send.pages([1, 2], last=True)
        send.finish(aux_index=0)
        assert (send.state, send.sent) == (RoomState.SUCCESS, True)
        assert receive.wait(0) is RoomState.SUCCESS
        assert not prefill.parts.machine.rooms  # type: ignore[attr-defined]
        assert decode.telemetry.metrics.total("kvctl_rooms_opened_total") == 0
        fleet.check({})

    def test_a_prefill_only_room_brings_its_aux_row_and_its_state(self, make: Make) -> None:
        fleet = make(ParallelConfig(tp=2), ParallelConfig(tp=2), FULL)
        agents = fleet.prefill[0].agents
        for agent in agents:
            agent.pool.aux[0][2] = 77
        receives = fleet.receive(5, [], prefill_only=True, aux_index=1, state_indices=[[3]])
        sends = [agent.send(5) for agent in agents]
        feed(sends, agents, "plain", aux_index=2, state_indices=[[1]])
        assert ended([*receives, *sends]) == {RoomState.SUCCESS}
        fleet.check({"conv": [(1, 3)]})
        assert all((agent.pool.aux[0][1] == 77).all() for agent in fleet.decode.agents)

    def test_a_prefill_only_room_has_no_pages(self, make: Make) -> None:
        with pytest.raises(LocalProtocolError, match="prefill-only room has no pages"):
            make(ParallelConfig(), ParallelConfig()).receive(5, [1], prefill_only=True)


class TestMisuse:
    def test_a_stage_must_say_of_what_model_it_is(self) -> None:
        k, v = [np.zeros((8, 2, 4), np.float16)], [np.zeros((8, 2, 4), np.float16)]
        pool = KVPool.from_tensors(k, v, page_size=4, total_kv_heads=2)
        with pytest.raises(ConfigError, match="pass model= to the agent"):
            Agent(role="prefill", rank=Rank(pp_size=2), pool=pool, name="x", bootstrap="ipc:///x", transport="loopback")
        with pytest.raises(MemoryLayoutError, match="kv: the pool has 1 layers, but the plan requires 3"):
            Agent(
                role="prefill",
                rank=Rank(pp_size=2),
                pool=pool,
                name="x",
                bootstrap="ipc:///x",
                model=ModelShape(6, 2, 4, 4, 2),
                transport="loopback",
            )


class TestLayerGroups:
    def test_a_forward_is_cut_as_configured_and_every_decision_is_counted(self, make: Make) -> None:
        fleet = make(ParallelConfig(pp=2, stages=(1, 5)), ParallelConfig(), pipeline="on", pipeline_min_tokens=16)
        agent = fleet.prefill[0].agents[1]
        assert agent.layer_groups(ForwardInfo((8,))).reason == "few-tokens"
        grouping = agent.layer_groups(ForwardInfo((64,)))
        assert grouping.reason == "formula"
        assert [layer for group in grouping.groups for layer in group] == [1, 2, 3, 4, 5]
        agent.set_pipeline("2")
        assert agent.layer_groups(ForwardInfo((64,))).groups == (range(1, 3), range(3, 5), range(5, 6))
        agent.set_pipeline("off")
        assert agent.layer_groups(ForwardInfo((64,))).reason == "off"
        with pytest.raises(ConfigError, match="pipeline 'sometimes'"):
            agent.set_pipeline("sometimes")
        counted = {
            reason: agent.telemetry.metrics.total("kvctl_pipeline_decisions_total", reason)
            for reason in ("few-tokens", "formula", "override", "off")
        }
        assert counted == {"few-tokens": 1, "formula": 1, "override": 1, "off": 1}

    def test_auto_learns_for_the_prompts_for_which_groups_were_chosen(self, make: Make) -> None:
        """A prompt that is computed in several chunks is as long as when its groups were chosen."""
        fleet = make(ParallelConfig(), ParallelConfig(), pipeline="auto", pipeline_min_tokens=16)
        (agent,) = fleet.prefill[0].agents
        prompt, learnt = ForwardInfo((4096,)), []
        agent.parts.control.executors[Overlapped] = learnt.append
        receives = fleet.receive(5, DST)
        send = agent.send(5)
        grouping = agent.layer_groups(prompt)
        assert (grouping.reason, len(grouping.groups)) == ("one-group", 1)
        send.prefetch(grouping.groups, prompt.average_tokens)
        for first, end in ((0, 6), (6, len(SRC))):
            send.layers(grouping.groups[0], SRC[first:end], last=end == len(SRC))
        send.finish(aux_index=0)
        assert ended(receives) == {RoomState.SUCCESS}
        until(lambda: learnt, "the room is not measured", 60)
        assert (learnt[0].tokens, learnt[0].groups) == (4096.0, 1)
        for _ in range(3):
            ms = 1_000_000
            times = {"compute_ns": 200 * ms, "transfer_ns": 190 * ms, "exposed_ns": 190 * ms}
            agent.parts.pipelining.learn(msgspec.structs.replace(learnt[0], **times))
        assert "measured" in {agent.layer_groups(prompt).reason for _ in range(60)}

    def test_measured_learns_from_rooms_that_were_sent_in_groups(self, make: Make) -> None:
        fleet = make(ParallelConfig(), ParallelConfig(), pipeline="auto", pipeline_min_tokens=16)
        (agent,) = fleet.prefill[0].agents
        seen: list[Any] = []
        agent.parts.control.executors[Overlapped] = seen.append
        receives = fleet.receive(5, DST)
        feed([agent.send(5)], [agent], "declared")
        assert ended(receives) == {RoomState.SUCCESS}
        deadline = time.monotonic() + 60  # the decode side may see the end first
        while not seen and time.monotonic() < deadline:
            time.sleep(0.005)
        (room,) = seen
        assert (room.pages, room.groups) == (5, 3)  # 11 pages in two forwards
        assert room.compute_ns > 0
        assert room.transfer_ns > 0
