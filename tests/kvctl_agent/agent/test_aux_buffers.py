"""Aux rows of several host buffers: in tags and written, on real transfer engines, and pools whose rows differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from kvctl_agent import Agent, KVPool, Rank, RoomState
from kvctl_agent.errors import ConfigError

SLOTS, PAGES, PAGE_SIZE, HEADS = 6, 8, 4, 2
SMALL = ((4, np.int64), (1, np.int32), (3, np.float32))
LARGE = ((4, np.int64), (1, np.int32), (700, np.float32), (5, np.uint8))
Sizes = tuple[tuple[int, type], ...]


def buffers(sizes: Sizes, seed: int | None) -> list[np.ndarray]:
    """Returns one array for each size, `[SLOTS, ...]`, random or zero."""
    found = [np.zeros((SLOTS, count), dtype) for count, dtype in sizes]
    for number, each in enumerate(found):
        if seed is not None:
            each[:] = np.random.default_rng([seed, number]).integers(1, 100, each.shape)
    return found


def raw(aux: list[np.ndarray]) -> list[tuple[int, int, int]]:
    return [(each.ctypes.data, each.nbytes, each.nbytes // SLOTS) for each in aux]


Make = Callable[..., Agent]


@pytest.fixture
def make(socket_dir: Path, no_leaks: None) -> Iterator[Make]:
    with ExitStack() as stack:

        def new(role: Literal["prefill", "decode"], aux: Any, **config: Any) -> Agent:
            tensors = [[np.zeros((PAGES * PAGE_SIZE, HEADS, 8), np.float16) for _ in range(2)] for _ in "kv"]
            pool = KVPool.from_tensors(*tensors, page_size=PAGE_SIZE, total_kv_heads=HEADS, aux=aux)
            stack.callback(pool.close)
            settings: dict[str, Any] = {
                "staging_buffer_mb": 4,
                "staging_ring_mb": 1,
                "suspect_s": 0.3,
                "heartbeat_s": 0.1,
            }
            settings |= {"lost_s": 300.0, **config}
            where = f"ipc://{socket_dir}/boot"
            agent = Agent(role=role, rank=Rank(), pool=pool, name=f"{role}-0", bootstrap=where, **settings)
            stack.callback(agent.close)
            return agent.start()

        yield new


@pytest.mark.parametrize("transport", ["loopback", "nixl"])
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["in tags", "written"])
@pytest.mark.parametrize("checksum", [False, True])
def test_rows_of_several_buffers(make: Make, transport: str, sizes: Sizes, checksum: bool) -> None:
    source, target = buffers(sizes, 1), buffers(sizes, None)
    prefill = make("prefill", source, transport=transport, checksum=checksum)
    decode = make("decode", raw(target), transport=transport, checksum=checksum)
    decode.wait_ready(60)
    wanted = [each.copy() for each in target]
    for room, (row, slot) in enumerate(((0, 3), (5, 0), (2, 5))):
        receive, send = decode.receive(room, [room], aux_index=slot), prefill.send(room)
        send.pages([room + 1], last=True)
        send.finish(aux_index=row)
        assert receive.wait(60) is RoomState.SUCCESS, receive.error
        for expected, each in zip(wanted, source, strict=True):
            expected[slot] = each[row]
    for expected, each in zip(wanted, target, strict=True):
        assert np.array_equal(each, expected)


def test_pools_whose_rows_differ_refuse_each_other_by_name(make: Make) -> None:
    make("prefill", buffers(SMALL, 1), transport="loopback")
    decode = make("decode", buffers(SMALL[::-1], None), transport="loopback")
    with pytest.raises(ConfigError, match=r"aux_row_bytes 32\+4\+12 ≠ 12\+4\+32"):
        decode.wait_ready(60)


def test_one_side_may_have_none(make: Make) -> None:
    prefill, decode = (
        make("prefill", None, transport="loopback"),
        make("decode", buffers(SMALL, 0), transport="loopback"),
    )
    decode.wait_ready(60)
    receive, send = decode.receive(1, [0]), prefill.send(1)
    send.pages([0], last=True)
    send.finish()
    assert receive.wait(60) is RoomState.SUCCESS, receive.error
