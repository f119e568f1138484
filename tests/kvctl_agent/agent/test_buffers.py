"""Pools that an engine describes by addresses only: KV, a draft model, and state of which each row has several blocks.

The convolution state of a linear-attention layer has blocks of channels q, k and v in each row, and each block is
divided over tensor-parallel ranks by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from kvctl_agent import Agent, Buffer, DraftKV, KVPool, Rank, RoomState, StateTensors

PAGES, PAGE_SIZE, HEADS, DIM, SLOTS, LAYERS = 8, 4, 4, 3, 5, 2
CHANNELS = {"conv_q": 4, "conv_k": 4, "conv_v": 8}  # of the whole model
TAPS, CHANNEL_BYTES = 3, 2
SSM_BYTES = 20  # of each of HEADS heads


def shard(array: np.ndarray, axis: int, rank: int, tp: int) -> np.ndarray:
    return np.split(array, tp, axis)[rank]


class Engine:
    """Memory of one rank, as arrays whose elements are those of the whole model."""

    def __init__(self, rank: int, tp: int, truth: bool, rows_first: bool) -> None:
        random = np.random.default_rng(7)
        self.tp, self.rows_first = tp, rows_first

        def block(axis: int, *shape: int) -> np.ndarray:
            whole = random.integers(0, 256, shape, np.uint8) if truth else np.full(shape, 0xDB, np.uint8)
            return shard(whole, axis, rank, tp)

        tokens = PAGES * PAGE_SIZE
        self.kv = [[block(1, tokens, HEADS, DIM).copy() for _ in range(LAYERS)] for _ in "kv"]
        self.draft = [[block(1, tokens, 2 * HEADS, 2).copy()] for _ in "kv"]
        self.ssm = [block(1, SLOTS, HEADS, SSM_BYTES).copy() for _ in range(LAYERS)]
        rows = TAPS if rows_first else 1
        size = CHANNEL_BYTES if rows_first else TAPS * CHANNEL_BYTES
        self.conv = [
            np.concatenate([block(2, SLOTS, rows, count, size) for count in CHANNELS.values()], axis=2)
            for _ in range(LAYERS)
        ]

    def arrays(self) -> list[np.ndarray]:
        return [each for plane in (*self.kv, *self.draft, self.ssm, self.conv) for each in plane]

    def pool(self) -> KVPool:
        def buffers(arrays: list[np.ndarray], items: int, *shape: int, **more: Any) -> list[Buffer]:
            return [Buffer(each.ctypes.data, each.nbytes, each.nbytes // items, shape, **more) for each in arrays]

        state = [
            StateTensors("ssm", buffers(self.ssm, SLOTS, HEADS // self.tp, SSM_BYTES), heads=HEADS, axis=1),
        ]
        rows, channels, size = self.conv[0].shape[1:]
        before = 0
        for name, count in CHANNELS.items():
            local = count // self.tp
            conv = buffers(
                self.conv, SLOTS, rows, local, size, strides=(channels * size, size, 1), offset=before * size
            )
            state.append(StateTensors(name, conv, heads=count, axis=2))
            before += local
        heads = HEADS // self.tp
        draft_k, draft_v = (buffers(plane, PAGES, PAGE_SIZE, 2 * heads, 2) for plane in self.draft)
        k, v = (buffers(plane, PAGES, PAGE_SIZE, heads, DIM) for plane in self.kv)
        return KVPool.from_tensors(
            k,
            v,
            page_size=PAGE_SIZE,
            total_kv_heads=HEADS,
            axes="pages tokens heads dim",
            draft=DraftKV(draft_k, draft_v, 2 * HEADS, axes="pages tokens heads dim"),
            state=state,
        )


@pytest.fixture
def stack(socket_dir: Path, no_leaks: None) -> Iterator[ExitStack]:
    with ExitStack() as each:
        yield each


@pytest.mark.parametrize("rows_first", [False, True], ids=["channels, taps", "taps, channels"])
@pytest.mark.parametrize(
    ("transport", "prefill", "decode"), [("loopback", 1, 2), ("loopback", 2, 2), ("loopback", 4, 1), ("nixl", 2, 1)]
)
def test_blocks_of_channels_land_in_their_places(
    stack: ExitStack, socket_dir: Path, transport: str, prefill: int, decode: int, rows_first: bool
) -> None:
    engines: dict[Agent, Engine] = {}

    def start(role: Literal["prefill", "decode"], number: int, tp: int) -> Agent:
        engine = Engine(number, tp, role == "prefill", rows_first)
        pool = engine.pool()
        stack.callback(pool.close)
        agent = Agent(
            role=role,
            rank=Rank(tp=number, tp_size=tp),
            pool=pool,
            name=f"{role}-{number}",
            bootstrap=f"ipc://{socket_dir}/boot",
            transport=transport,
            staging_ring_mb=1,
            staging_buffer_mb=1,
            chunk_tokens=8,
        )
        stack.callback(agent.close)
        engines[agent] = engine
        return agent.start()

    senders = [start("prefill", number, prefill) for number in range(prefill)]
    readers = [start("decode", number, decode) for number in range(decode)]
    for agent in readers:
        agent.wait_ready(60)
    pages, targets, items, slots = [1, 2, 5], [7, 0, 3], [2, 4], [0, 3]
    receives = [agent.receive(9, targets, state_indices=[slots] * 4) for agent in readers]
    sends = [agent.send(9) for agent in senders]
    for send in sends:
        send.pages(pages, last=True)
        send.finish(state_indices=[items] * 4)
    for handle in (*receives, *sends):
        assert handle.wait(60) is RoomState.SUCCESS, handle.error
    for number, agent in enumerate(readers):
        wanted, truth = Engine(number, decode, False, rows_first), Engine(number, decode, True, rows_first)
        rows = [page * PAGE_SIZE + row for page in pages for row in range(PAGE_SIZE)]
        places = [page * PAGE_SIZE + row for page in targets for row in range(PAGE_SIZE)]
        for expected, source, found in zip(wanted.arrays(), truth.arrays(), engines[agent].arrays(), strict=True):
            if len(expected) == SLOTS:
                expected[slots] = source[items]
            else:
                expected[places] = source[rows]
            assert np.array_equal(found, expected)
