"""Prefill and decode agents in this process, with known contents in their pools, for tests of whole transfers."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from kvctl_agent.agent import Agent
from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig, head_range, local_shards
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.rank import Rank
from kvctl_agent.runtime.handles import Receive, Send

POISON = 0xDB
AUX_SLOTS, AUX_ROW_BYTES = 64, 40


@dataclass(frozen=True)
class Model:
    """Geometry of the model and of every pool."""

    layers: int = 2
    heads: int = 8
    k_dim: int = 8
    v_dim: int = 8
    page_size: int = 4
    pages: int = 64
    dtype_bytes: int = 2

    def truth(self, layer: int, kv: int) -> np.ndarray:
        """Returns the contents of the prefill ranks' pages: uint8 [pages, page_size, heads of the model, row bytes].

        Args:
            kv: 0 for K, 1 for V.
        """
        row = (self.v_dim if kv else self.k_dim) * self.dtype_bytes
        shape = (self.pages, self.page_size, self.heads, row)
        return _random(layer, kv, shape)

    @property
    def shape(self) -> ModelShape:
        return ModelShape(self.layers, self.heads, self.k_dim, self.v_dim, self.dtype_bytes)

    def pool(self, side: ParallelConfig, number: int, device: Any = None) -> KVPool:
        """Allocates the pool of one rank of an instance."""
        here = local_shards(self.shape, self.page_size, side, side.coord(number))
        aux: dict[str, int] = {"aux_slots": AUX_SLOTS, "aux_row_bytes": AUX_ROW_BYTES}
        return KVPool.allocate(here, self.page_size, self.pages, **aux, device=device)


@lru_cache(maxsize=64)
def _random(layer: int, kv: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([layer, kv]).integers(0, 256, shape, np.uint8)


@dataclass
class Room:
    """One room on all its ranks.

    Attributes:
        number: number of the room.
        src: pages of the prompt on the prefill ranks.
        prefix: number of pages that decode has cached.
        aux: slot of the aux row; None for no aux data.
        dst: pages of the room on each decode rank by name, without the prefix.
        sends: handles of the prefill ranks.
        receives: handles of the decode ranks by name.
    """

    number: int
    src: np.ndarray
    prefix: int
    aux: int | None
    dst: dict[str, np.ndarray]
    sends: list[Send] = field(default_factory=list)
    receives: dict[str, Receive] = field(default_factory=dict)

    @property
    def handles(self) -> list[Send | Receive]:
        return [*self.receives.values(), *self.sends]

    def wait(self, timeout: float = 60.0) -> set[RoomState]:
        deadline = time.monotonic() + timeout
        return {handle.wait(max(0.0, deadline - time.monotonic())) for handle in self.handles}

    def errors(self) -> list[Any]:
        return [handle.error for handle in self.handles if handle.error]


def mute(agent: Agent) -> None:
    """Makes an agent ignore all messages from now on, so that it answers nobody; its process lives."""
    agent.parts.machine.handle = lambda event, now_ns: []  # type: ignore[method-assign]


class Fleet:
    """Agents of a prefill and a decode instance.

    Attributes:
        image: expected contents of each decode pool, by (agent, layer, K or V); bytes of no room are poison.
    """

    def __init__(
        self,
        directory: Path,
        transport: str,
        model: Model,
        prefill: Any,
        decode: Any,
        kind: Callable[..., Agent] = Agent,
        device: Mapping[str, Any] = MappingProxyType({}),
        **config: Any,
    ) -> None:
        """Creates a fleet without agents; `start` creates and starts them.

        Args:
            directory: directory of the bootstrap socket.
            prefill: size of the prefill instance, (dp, tp).
            decode: size of the decode instance, (dp, tp).
            kind: class of the agents.
            device: devices of the pools by role; pools of other roles are in host memory.
            config: configuration of all agents.
        """
        self.kind = kind
        self.device = device
        self.model = model
        self.transport = transport
        self.bootstrap = f"ipc://{directory}/boot"
        self.prefill_size, self.decode_size = prefill, decode
        self.config = config
        self.random = np.random.default_rng(3)
        self.prefill: list[Agent] = []
        self.decode: list[Agent] = []
        self.image: dict[tuple[str, int, int], np.ndarray] = {}
        self.aux_image: dict[str, np.ndarray] = {}
        self.free: dict[str, list[int]] = {}
        self._pools: list[KVPool] = []

    def start(self) -> Fleet:
        dp, tp = self.prefill_size
        for number in range(dp * tp):
            self.prefill.append(self.prefill_agent(number).start())
        dp, tp = self.decode_size
        for number in range(dp * tp):
            self.decode.append(self.decode_agent(number).start())
        for agent in self.prefill + self.decode:
            agent.wait_ready(60)
        return self

    def prefill_agent(self, number: int, **config: Any) -> Agent:
        """Creates an agent for one rank of the prefill instance, with known contents in its pool; does not start it."""
        dp, tp = self.prefill_size
        pool = self._pool("prefill", ParallelConfig(dp=dp, tp=tp), number)
        heads = head_range(self.model.heads, tp, number % tp)
        for layer in range(self.model.layers):
            for kv in (0, 1):
                ours = self.model.truth(layer, kv)[:, :, heads.lo : heads.hi]
                pool.segments[0].block(layer, kv)[:] = ours.reshape(-1)
        pool.aux[0][:] = np.random.default_rng(99).integers(0, 256, pool.aux[0].shape, np.uint8)
        rank = Rank(dp=number // tp, tp=number % tp, dp_size=dp, tp_size=tp)
        return self._agent("prefill", f"prefill-{number}", rank, pool, config)

    def decode_agent(self, number: int, **config: Any) -> Agent:
        """Creates an agent for one rank of the decode instance, with poison in its pool; does not start it."""
        dp, tp = self.decode_size
        pool, name = self._pool("decode", ParallelConfig(dp=dp, tp=tp), number), f"decode-{number}"
        for layer in range(self.model.layers):
            for kv in (0, 1):
                pool.segments[0].block(layer, kv)[:] = POISON
                self.image[name, layer, kv] = pool.segments[0].block(layer, kv).copy()
        pool.aux[0][:] = POISON
        self.aux_image[name] = pool.aux[0].copy()
        self.free[name] = [int(page) for page in self.random.permutation(self.model.pages)]
        rank = Rank(dp=number // tp, tp=number % tp, dp_size=dp, tp_size=tp)
        return self._agent("decode", name, rank, pool, config)

    def _pool(self, role: str, side: ParallelConfig, number: int) -> KVPool:
        self._pools.append(self.model.pool(side, number, self.device.get(role)))
        return self._pools[-1]

    def _agent(self, role: Any, name: str, rank: Rank, pool: KVPool, config: dict[str, Any]) -> Agent:
        name = config.pop("name", name)
        # A fixed path, since `auto` measures first.
        small: dict[str, Any] = {"staging_buffer_mb": 4, "staging_ring_mb": 1, "resend_s": 0.1, "path": "staged"}
        small["transport"] = self.transport
        return self.kind(
            role=role,
            rank=rank,
            pool=pool,
            name=name,
            bootstrap=self.bootstrap,
            model=self.model.shape,
            **{**small, **self.config, **config},
        )

    # ---- rooms ------------------------------------------------------------------------------------------------

    def room(self, number: int, pages: int, prefix: int = 0, aux: int | None = None, contiguous: bool = False) -> Room:
        """Allocates a room of `pages` pages, of which decode has `prefix` cached; no rank opens it yet."""
        dp, tp = self.decode_size
        group = [f"decode-{number % dp * tp + rank}" for rank in range(tp)]
        src = np.arange(pages) if contiguous else self.random.permutation(self.model.pages)[:pages]
        dst = {}
        for name in group:
            if contiguous:
                self.free[name].sort(reverse=True)
            dst[name] = np.array([self.free[name].pop() for _ in range(pages - prefix)], np.int64)
        return Room(number, src, prefix, aux, dst)

    def receive(self, room: Room, **prompt: int) -> Room:
        agents = {agent.name: agent for agent in self.decode}
        for name, pages in room.dst.items():
            prefix = room.prefix * self.model.page_size
            room.receives[name] = agents[name].receive(
                room.number, pages, prefix_tokens=prefix, aux_index=room.aux, **prompt
            )
        return room

    def claim(self, room: Room, **prompt: int) -> Room:
        """Calls `Agent.send` on the prefill ranks that compute the room."""
        dp, tp = self.prefill_size
        first = room.number % dp * tp
        room.sends = [agent.send(room.number, **prompt) for agent in self.prefill[first : first + tp]]
        return room

    def feed(self, room: Room, cuts: tuple[int, ...] = ()) -> Room:
        """Sends the whole prompt from each prefill rank, in calls of `Send.pages` that end at the pages `cuts`."""
        for send in room.sends:
            send.prefetch()
            at = 0
            for end in cuts:
                send.pages(room.src[at:end])
                at = end
            send.pages(room.src[at:], last=True)
            send.finish(aux_index=None if room.aux is None else room.aux)
        return room

    def run(self, number: int, pages: int, cuts: tuple[int, ...] = (), **more: Any) -> Room:
        """Runs a whole room and asserts that it succeeds."""
        room = self.feed(self.claim(self.receive(self.room(number, pages, **more))), cuts)
        assert room.wait() == {RoomState.SUCCESS}, room.errors()
        self.expect(room)
        return room

    def expect(self, room: Room) -> None:
        """Adds the room's bytes to the expected contents of the decode pools."""
        model, (_, tp) = self.model, self.decode_size
        for name, pages in room.dst.items():
            heads = head_range(model.heads, tp, int(name.removeprefix("decode-")) % tp)
            for layer in range(model.layers):
                for kv in (0, 1):
                    image = self.image[name, layer, kv].reshape(model.pages, model.page_size, heads.hi - heads.lo, -1)
                    image[pages] = model.truth(layer, kv)[room.src[room.prefix :]][:, :, heads.lo : heads.hi]
            if room.aux is not None:
                (aux,) = self.prefill[0].pool.aux
                self.aux_image[name][room.aux] = aux[room.aux]

    def recycle(self, room: Room) -> None:
        """Frees the room's pages on the decode ranks, so that later rooms may use them."""
        for name, pages in room.dst.items():
            self.free[name].extend(int(page) for page in pages)

    def check(self, but: tuple[Room, ...] = ()) -> None:
        """Asserts that every byte of every decode pool is as expected; pages of rooms in `but` may contain anything."""
        for agent in self.decode:
            pool = agent.pool
            skip = np.zeros(self.model.pages, bool)
            for room in but:
                skip[room.dst.get(agent.name, [])] = True
            for layer in range(self.model.layers):
                for kv in (0, 1):
                    found = pool.segments[0].block(layer, kv).reshape(self.model.pages, -1)
                    wanted = self.image[agent.name, layer, kv].reshape(self.model.pages, -1)
                    wrong = np.flatnonzero((found != wanted).any(axis=1) & ~skip)
                    assert not len(wrong), f"{agent.name} layer {layer} kv {kv}: pages {wrong.tolist()} are wrong"
            if not but:
                assert np.array_equal(pool.aux[0], self.aux_image[agent.name])

    # ---- reports of the agents --------------------------------------------------------------------------------

    def set_path(self, path: str) -> None:
        for agent in self.prefill:
            agent.set_path(path)

    def total(self, agents: list[Agent], name: str, *labels: str) -> int:
        return int(sum(agent.telemetry.metrics.total(name, *labels) for agent in agents))

    def events(self, kind: str) -> list[str]:
        rows = [row for agent in self.prefill + self.decode for row in agent.observe.events()["events"]]
        return [row["text"] for row in rows if row["kind"] == kind]

    def errors(self) -> list[str]:
        """Returns the texts of exceptions that control, arrival or transfer threads caught, which are bugs."""
        return self.events("control") + self.events("scatter") + self.events("transport") + self.events("engine")

    def settle(self, timeout: float = 60.0) -> None:
        """Waits until no rank holds anything of any room; raises AssertionError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while held := self.held():
            assert time.monotonic() < deadline, held
            time.sleep(0.005)

    def held(self) -> list[str]:
        """Describes everything that agents still hold of rooms; returns an empty list if they hold nothing."""
        words: list[str] = []
        for agent in self.prefill + self.decode:
            if agent.parts.machine.rooms:
                words.append(f"{agent.name} knows rooms {sorted(agent.parts.machine.rooms)}")
            owners = agent.parts.handles.owners
            if owners is not None and owners.rooms:
                words.append(f"{agent.name} keeps the pages of rooms {sorted(owners.rooms)}")
            if agent.telemetry.rooms.active():
                words.append(f"{agent.name} shows active rooms")
            if agent.parts.buffers is not None and agent.parts.buffers.in_use:
                words.append(f"{agent.name} has {agent.parts.buffers.in_use} staging buffers out")
            ring = agent.observe.staging()["ring"]
            if ring is not None and ring["used_bytes"]:
                words.append(f"{agent.name} has {ring['used_bytes']} ring bytes granted")
        return words

    def close(self, timeout: float = 20.0) -> None:
        with ExitStack() as stack:
            for pool in self._pools:
                stack.callback(pool.close)
            for agent in self.prefill + self.decode:
                stack.callback(agent.close, timeout)


MakeFleet = Callable[..., Fleet]


@pytest.fixture
def model() -> type[Model]:
    return Model


@pytest.fixture
def make_fleet(no_leaks: None, socket_dir: Path) -> Iterator[MakeFleet]:
    """Creates fleets and closes them after the test; sizes are (dp, tp)."""
    fleets: list[Fleet] = []

    def make(
        transport: str = "loopback",
        prefill: tuple[int, int] = (1, 2),
        decode: tuple[int, int] = (1, 1),
        model: Model = Model(),
        **config: Any,
    ) -> Fleet:
        fleets.append(Fleet(socket_dir / str(len(fleets)), transport, model, prefill, decode, **config))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """Creates a private directory whose path is short enough for sockets."""
    directory = Path(tempfile.mkdtemp(prefix="kv-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)
