"""Transfers between random pairs of instances with unlike pools, pages and parallel sizes; compares every byte.

Agents of both instances run in one process, over any transport. What a decode rank should hold is computed for each
token on its own, from the rules alone.

Usage: python benchmarks/layout_pairs.py --pairs 10000 --transport loopback
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvctl_agent.agent import Agent
from kvctl_agent.contract.states import RoomState
from kvctl_agent.device.base import Device
from kvctl_agent.layout.parallel import ParallelConfig, local_shards
from kvctl_agent.layout.shape import KVGroup, ModelShape, segments
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.pool_layouts import POOL_LAYOUTS
from kvctl_agent.memory.segment import SegmentMemory
from kvctl_agent.rank import Rank

POISON = 0xDB
PAGE_SIZES = (1, 2, 4, 8, 16)
_WAIT_S = 60.0


@dataclass(frozen=True)
class LayoutPair:
    """A model, a prefill and a decode instance, and the prompts of a few rooms.

    Attributes:
        pages: Tokens per page of the prefill and of the decode side.
        layouts: Names of the pool layouts of the two sides.
        interleave: Consecutive tokens on one decode cp rank.
        rooms: For each room its tokens, and the pages (those with one number on all decode cp ranks) that are cached.
        groups: Layers per layer group; 0 for whole forwards.
        windows: For each KV group of the model the tokens at the end of a prompt that decode needs.
    """

    model: ModelShape
    prefill: ParallelConfig
    decode: ParallelConfig
    pages: tuple[int, int]
    layouts: tuple[str, str]
    interleave: int
    cp_mode: str
    path: str
    chunk_tokens: int
    rooms: tuple[tuple[int, int], ...]
    groups: int = 0
    windows: tuple[int, ...] = ()

    @property
    def decode_run(self) -> int:
        """Tokens of a decode page on all cp ranks together."""
        return self.pages[1] * self.decode.cp


def random_pair(seed: int, most_ranks: int = 4) -> LayoutPair:
    """Returns the pair with this number; equal numbers give equal pairs."""
    dice = random.Random(seed)
    latent = dice.random() < 0.2
    heads = 1 if latent else dice.choice((1, 2, 4, 8))
    model = ModelShape(
        num_layers=dice.randint(1, 4),
        num_kv_heads=heads,
        k_dim=dice.choice((3, 4, 8)),
        v_dim=0 if latent else dice.choice((2, 4, 8)),
        dtype_bytes=dice.choice((1, 2)),
        kind="mla" if latent else "mha",
    )
    sides = []
    for _ in range(2):
        cp = dice.choice([cp for cp in (1, 1, 2, 4) if cp <= most_ranks])
        tp = dice.choice([tp for tp in (1, 2, 4) if tp * cp <= most_ranks])
        pp = dice.choice([pp for pp in (1, 1, 2) if tp * cp * pp <= most_ranks and pp <= model.num_layers])
        sides.append(ParallelConfig(pp=pp, cp=cp, tp=tp))
    prefill, decode = sides
    pages = (dice.choice(PAGE_SIZES), dice.choice(PAGE_SIZES))
    interleave = dice.choice([size for size in PAGE_SIZES if size <= pages[1]])
    most = max(pages)
    run = pages[1] * decode.cp
    rooms = []
    for _ in range(dice.randint(1, 2)):
        tokens = dice.randint(1, 6 * most * decode.cp)
        rooms.append((tokens, dice.choice((0, 0, dice.randint(0, (tokens - 1) // run)))))
    chunk_tokens = most * dice.randint(1, 4)
    windows: list[int] = []
    if decode.cp == 1 and dice.random() < 0.4:
        groups = []
        for name in ("swa", "index")[: dice.randint(1, 2)]:
            layers = sorted(dice.choices(range(model.num_layers), k=dice.randint(1, 3)))
            kv = ModelShape(len(layers), dice.choice((1, heads)), dice.choice((2, 8)), 4, 1)
            if name == "index":
                kv = ModelShape(len(layers), 1, 5, 0, 1, kind="mla")
            size = dice.choice([size for size in PAGE_SIZES if chunk_tokens % size == 0])
            groups.append(KVGroup(name, kv, tuple(layers), size))
            windows.append(dice.choice((1 << 30, dice.randint(1, 3 * most))))
        model = replace(model, groups=tuple(groups))
    return LayoutPair(
        model,
        prefill,
        decode,
        pages,
        (dice.choice(list(POOL_LAYOUTS)), dice.choice(list(POOL_LAYOUTS))),
        interleave,
        dice.choice(("rank0", "all", "all-chunk", "room-hash")),
        dice.choice(("staged", "slice", "bulk", "auto")),
        chunk_tokens,
        tuple(rooms),
        dice.choice((0, 0, 1, 2)),
        tuple(windows),
    )


def run_pair(
    pair: LayoutPair,
    transport: str,
    directory: Path,
    devices: tuple[Device | None, Device | None] = (None, None),
    **config: Any,
) -> None:
    """Transfers the rooms of a pair and compares every byte of every decode pool.

    Args:
        devices: Devices of the prefill and of the decode pools, whose memory the host can read; None for the host.
        config: Settings of all agents.

    Raises:
        AssertionError: a room failed, or a byte differs; the text has the pair.
    """
    instances = _Instances(pair, transport, directory, devices, config)
    try:
        instances.start()
        for number in range(len(pair.rooms)):
            instances.run(number)
        instances.compare()
    finally:
        instances.close()


class _Instances:
    """The agents of a pair.

    Attributes:
        truth: by (segment, layer, plane), the KV of all prefill pages, uint8 `[pages, tokens, heads, bytes]`.
        wanted: by (decode rank, segment, layer, plane), the expected contents of its pool, in the same form for its own
            heads.
    """

    def __init__(
        self,
        pair: LayoutPair,
        transport: str,
        directory: Path,
        devices: tuple[Device | None, Device | None],
        config: dict[str, Any],
    ) -> None:
        self.pair = pair
        self.transport = transport
        self.bootstrap = f"ipc://{directory}/boot"
        self.devices = devices
        self.config = config
        self.random = np.random.default_rng(len(repr(pair)))
        self.agents: dict[str, list[Agent]] = {"prefill": [], "decode": []}
        sizes = [group.page_size for group in pair.model.groups]
        self.page_tokens = {"prefill": [pair.pages[0], *sizes], "decode": [pair.decode_run, *sizes]}
        # A few pages more than the rooms need, so that wrong page numbers hit others.
        self.counts = {
            role: [3 + sum(-(-tokens // size) for tokens, _ in pair.rooms) for size in sizes]
            for role, sizes in self.page_tokens.items()
        }
        self.free = {role: [self.random.permutation(each) for each in counts] for role, counts in self.counts.items()}
        self.truth: dict[tuple[int, int, int], np.ndarray] = {}
        self.wanted: dict[tuple[int, int, int, int], np.ndarray] = {}
        for segment in segments(pair.model, pair.pages[0]):
            for layer in range(segment.layer_lo, segment.layer_hi):
                for plane, each in enumerate(segment.planes):
                    shape = (self.counts["prefill"][segment.index], each.rows, segment.heads, each.head_bytes)
                    self.truth[segment.index, layer, plane] = self.random.integers(0, 256, shape, np.uint8)

    def start(self) -> None:
        for role, agents in self.agents.items():
            for number in range(getattr(self.pair, role).size):
                agents.append(self._agent(role, number))
                agents[-1].start()
        for agents in self.agents.values():
            for agent in agents:
                agent.wait_ready(_WAIT_S)

    def run(self, number: int) -> None:
        pair = self.pair
        tokens, cached = pair.rooms[number]
        skipped = [cached, *(max(0, tokens - window) // group.page_size for window, group in self._windows())]
        source = [self._take("prefill", table, tokens) for table in range(len(skipped))]
        target = [self._take("decode", table, tokens)[skip:] for table, skip in enumerate(skipped)]
        for pages, skip in list(zip(source, skipped, strict=True))[1:]:
            pages[:skip] = -1  # the engine has freed them
        receives = [
            agent.receive(
                number, target[0], prefix_tokens=cached * pair.decode_run, tokens=tokens, group_pages=target[1:]
            )
            for agent in self.agents["decode"]
        ]
        sends = [agent.send(number) for agent in self.agents["prefill"]]
        for agent, send in zip(self.agents["prefill"], sends, strict=True):
            layers = agent.layers
            step = pair.groups or len(layers)
            groups = [range(lo, min(lo + step, layers.stop)) for lo in range(layers.start, layers.stop, step)]
            if pair.groups:
                send.prefetch(groups)
                for group in groups:
                    send.layers(group, source[0], last=True, group_pages=source[1:])
            else:
                halves = [(pages[: len(pages) // 2], pages[len(pages) // 2 :]) for pages in source]
                send.pages(halves[0][0], group_pages=[first for first, _ in halves[1:]])
                send.pages(halves[0][1], last=True, group_pages=[second for _, second in halves[1:]])
            send.finish()
        for handle in (*receives, *sends):
            assert handle.wait(_WAIT_S) is RoomState.SUCCESS, f"{handle.error}: {pair}"
        self._expect(tokens, cached, source[0], target[0])
        for table in range(1, len(source)):
            for page in range(skipped[table], len(source[table])):
                to = target[table][page - skipped[table]]
                for (_, segment, layer, plane), wanted, heads in self._wanted(table):
                    wanted[to] = self.truth[segment, layer, plane][source[table][page]][:, heads]

    def compare(self) -> None:
        for rank, agent in enumerate(self.agents["decode"]):
            for memory, layer, plane in _planes(agent.pool):
                segment = memory.shard.segment
                found, wanted = memory.elements(layer, plane), self.wanted[rank, segment.index, layer, plane]
                wrong = np.argwhere((found != wanted).any(axis=3)).tolist()
                assert not wrong, (
                    f"decode rank {rank} layer {layer} plane {plane} page, row, head {wrong[:4]}: {self.pair}"
                )

    def close(self) -> None:
        for agents in self.agents.values():
            for agent in agents:
                agent.close()
                agent.pool.close()

    def _windows(self) -> list[tuple[int, KVGroup]]:
        return list(zip(self.pair.windows, self.pair.model.groups, strict=True))

    def _take(self, role: str, table: int, tokens: int) -> np.ndarray:
        count = -(-tokens // self.page_tokens[role][table])
        free = self.free[role]
        taken, free[table] = free[table][:count], free[table][count:]
        return taken

    def _wanted(self, table: int) -> Iterator[tuple[tuple[int, int, int, int], np.ndarray, slice]]:
        """Yields the expected contents of all planes of a page table, and the model's heads that they have."""
        for key, wanted in self.wanted.items():
            shard = self.agents["decode"][key[0]].pool.segments[key[1]].shard
            if shard.segment.table == table:
                yield key, wanted, slice(shard.head_lo, shard.head_hi)

    def _agent(self, role: Any, number: int) -> Agent:
        pair, side = self.pair, getattr(self.pair, role)
        which = ("prefill", "decode").index(role)
        shards = local_shards(pair.model, pair.pages[which], side, side.coord(number))
        count, *groups = self.counts[role]
        slots = {group.name: each for group, each in zip(pair.model.groups, groups, strict=True)}
        pool = KVPool.allocate(
            shards, pair.pages[which], count, slots, layout=pair.layouts[which], device=self.devices[which]
        )
        for memory, layer, plane in _planes(pool):
            shard, elements = memory.shard, memory.elements(layer, plane)
            if role == "prefill":
                elements[:] = self.truth[shard.segment.index, layer, plane][:, :, shard.head_lo : shard.head_hi]
            else:
                elements[:] = POISON
                self.wanted[number, shard.segment.index, layer, plane] = elements.copy()
        dp, pp, cp, tp = side.coord(number)
        settings: dict[str, Any] = {
            "transport": self.transport,
            "staging_buffer_mb": 1,
            "staging_ring_mb": 1,
            "cp_mode": pair.cp_mode,
            "cp_interleave": pair.interleave,
            "chunk_tokens": pair.chunk_tokens,
            "path": pair.path,
            "staging": "on" if pair.path == "auto" else "auto",
        }
        return Agent(
            role=role,
            rank=Rank(dp, pp, cp, tp, side.dp, side.pp, side.cp, side.tp),
            pool=pool,
            name=f"{role}-{number}",
            bootstrap=self.bootstrap,
            model=pair.model,
            **{**settings, **self.config},
        )

    def _expect(self, tokens: int, cached: int, source: np.ndarray, target: np.ndarray) -> None:
        """Adds a room to what decode ranks should hold: its tokens, and the rest of their last transfer page."""
        pair = self.pair
        (source_page, target_page), ranks, run = pair.pages, pair.decode.cp, pair.interleave
        unit = min(source_page, target_page, run if ranks > 1 else target_page)
        for position in range(cached * pair.decode_run, -(-tokens // unit) * unit):
            page, row = source[position // source_page], position % source_page
            turn, inside = divmod(position, run * ranks) if ranks > 1 else (0, position)
            cp, own = (inside // run, turn * run + inside % run) if ranks > 1 else (0, position)
            to, at = target[own // target_page - cached], own % target_page
            for (rank, segment, layer, plane), wanted, heads in self._wanted(0):
                if pair.decode.coord(rank).cp == cp:
                    wanted[to, at] = self.truth[segment, layer, plane][page, row, heads]


def _planes(pool: KVPool) -> Iterator[tuple[SegmentMemory, int, int]]:
    """Yields each segment of a pool with each of its layers and planes."""
    for memory in pool.segments:
        for layer in range(memory.shard.layer_lo, memory.shard.layer_hi):
            for plane in range(len(memory.shard.segment.planes)):
                yield memory, layer, plane


def main() -> None:
    """Runs the pairs [first, first + pairs) and prints how many of each kind they were; stops at the first failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, help="number of pairs")
    parser.add_argument("--first", type=int, default=0, help="number of the first pair")
    parser.add_argument("--most-ranks", type=int, default=4, help="most ranks of an instance")
    parser.add_argument("--transport", default="loopback", choices=("loopback", "nixl", "mooncake"))
    arguments = parser.parse_args()
    kinds: collections.Counter[str] = collections.Counter()
    began = time.monotonic()
    for done, seed in enumerate(range(arguments.first, arguments.first + arguments.pairs), 1):
        pair = random_pair(seed, arguments.most_ranks)
        with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as directory:
            os.environ["KVCTL_SOCKET_DIR"] = directory
            run_pair(pair, arguments.transport, Path(directory))
        kinds["pairs"] += 1
        kinds["rooms"] += len(pair.rooms)
        kinds["unequal pages"] += pair.pages[0] != pair.pages[1]
        kinds["unlike layouts"] += pair.layouts[0] != pair.layouts[1]
        kinds["decode cp"] += pair.decode.cp > 1
        kinds["KV groups"] += len(pair.model.groups) > 0
        if done % 100 == 0 or done == arguments.pairs:
            text = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            print(f"{time.monotonic() - began:.0f} s: every byte right: {text}", flush=True)


if __name__ == "__main__":
    main()
