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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvctl_agent.agent import Agent
from kvctl_agent.contract.states import RoomState
from kvctl_agent.device.base import Device
from kvctl_agent.layout.parallel import ParallelConfig, local_shards
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.pool_layouts import POOL_LAYOUTS
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
    return LayoutPair(
        model,
        prefill,
        decode,
        pages,
        (dice.choice(list(POOL_LAYOUTS)), dice.choice(list(POOL_LAYOUTS))),
        interleave,
        dice.choice(("rank0", "all", "all-chunk", "room-hash")),
        dice.choice(("staged", "slice", "bulk", "auto")),
        most * dice.randint(1, 4),
        tuple(rooms),
        dice.choice((0, 0, 1, 2)),
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
        truth: by (layer, plane), the KV of all tokens of all prefill pages, uint8 `[pages, tokens, heads, bytes]`.
        wanted: by (decode rank, layer, plane), the expected contents of its pool, in the same form for its own heads.
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
        # A few pages more than the rooms need, so that wrong page numbers hit others.
        self.counts = {
            "prefill": 3 + sum(-(-tokens // pair.pages[0]) for tokens, _ in pair.rooms),
            "decode": 3 + sum(-(-tokens // pair.decode_run) for tokens, _ in pair.rooms),
        }
        self.free = {role: self.random.permutation(count) for role, count in self.counts.items()}
        self.truth: dict[tuple[int, int], np.ndarray] = {}
        self.wanted: dict[tuple[int, int, int], np.ndarray] = {}
        for plane, each in enumerate(pair.model.planes(pair.pages[0])):
            for layer in range(pair.model.num_layers):
                shape = (self.counts["prefill"], each.rows, pair.model.num_kv_heads, each.head_bytes)
                self.truth[layer, plane] = self.random.integers(0, 256, shape, np.uint8)

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
        source = self._take("prefill", -(-tokens // pair.pages[0]))
        target = self._take("decode", -(-tokens // pair.decode_run) - cached)
        receives = [
            agent.receive(number, target, prefix_tokens=cached * pair.decode_run, tokens=tokens)
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
                    send.layers(group, source, last=True)
            else:
                middle = len(source) // 2
                send.pages(source[:middle])
                send.pages(source[middle:], last=True)
            send.finish()
        for handle in (*receives, *sends):
            assert handle.wait(_WAIT_S) is RoomState.SUCCESS, f"{handle.error}: {pair}"
        self._expect(tokens, cached, source, target)

    def compare(self) -> None:
        for rank, agent in enumerate(self.agents["decode"]):
            memory = agent.pool.segments[0]
            for layer in range(memory.shard.layer_lo, memory.shard.layer_hi):
                for plane in range(len(memory.shard.segment.planes)):
                    found, wanted = memory.elements(layer, plane), self.wanted[rank, layer, plane]
                    wrong = np.argwhere((found != wanted).any(axis=3)).tolist()
                    assert not wrong, (
                        f"decode rank {rank} layer {layer} plane {plane} page, row, head {wrong[:4]}: {self.pair}"
                    )

    def close(self) -> None:
        for agents in self.agents.values():
            for agent in agents:
                agent.close()
                agent.pool.close()

    def _take(self, role: str, count: int) -> np.ndarray:
        taken, self.free[role] = self.free[role][:count], self.free[role][count:]
        return taken

    def _agent(self, role: Any, number: int) -> Agent:
        pair, side = self.pair, getattr(self.pair, role)
        which = ("prefill", "decode").index(role)
        shards = local_shards(pair.model, pair.pages[which], side, side.coord(number))
        pool = KVPool.allocate(
            shards, pair.pages[which], self.counts[role], layout=pair.layouts[which], device=self.devices[which]
        )
        memory = pool.segments[0]
        shard = memory.shard
        for layer in range(shard.layer_lo, shard.layer_hi):
            for plane in range(len(shard.segment.planes)):
                elements = memory.elements(layer, plane)
                if role == "prefill":
                    elements[:] = self.truth[layer, plane][:, :, shard.head_lo : shard.head_hi]
                else:
                    elements[:] = POISON
                    self.wanted[number, layer, plane] = elements.copy()
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
            for (rank, layer, plane), wanted in self.wanted.items():
                shard = self.agents["decode"][rank].pool.segments[0].shard
                if pair.decode.coord(rank).cp == cp:
                    wanted[to, at] = self.truth[layer, plane][page, row, shard.head_lo : shard.head_hi]


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
        if done % 100 == 0 or done == arguments.pairs:
            text = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            print(f"{time.monotonic() - began:.0f} s: every byte right: {text}", flush=True)


if __name__ == "__main__":
    main()
