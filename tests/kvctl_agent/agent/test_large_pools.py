"""Rooms of one token between pools of up to 64 GiB, whose memory is never touched: a room costs what its rows cost."""

from __future__ import annotations

import mmap
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvctl_agent import Agent, KVPool, Rank
from kvctl_agent.contract.states import RoomState
from tests.support.polling import until

LAYERS, HEADS, DIM = 2, 2, 64
PATHS = ("slice", "bulk", "staged", "auto")
WAIT_S = 60.0
HUGE_PAGE_KIB, OTHER_KIB = 2 << 10, 8 << 10
MAP_NORESERVE = 0x4000  # Python 3.11 has no name for it
SMALL: dict[str, Any] = {"transport": "nixl", "staging_buffer_mb": 4, "staging_ring_mb": 4}


def sparse_pool(gib: float, heads: int, page_size: int) -> tuple[KVPool, list[np.ndarray]]:
    """Returns a pool of `gib` GiB without memory behind it, and its planes: K of each layer, then V of each layer."""
    tokens = int(gib * (1 << 30)) // (2 * LAYERS * heads * DIM * 2) // page_size * page_size
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    planes = [
        np.frombuffer(mmap.mmap(-1, tokens * heads * DIM * 2, flags), np.float16).reshape(tokens, heads, DIM)
        for _ in range(2 * LAYERS)
    ]
    pool = KVPool.from_tensors(planes[:LAYERS], planes[LAYERS:], page_size=page_size, total_kv_heads=HEADS)
    return pool, planes


def growth_kib(pools: int) -> int:
    """Limit of the memory of all rooms together: a token that is touched may cost a huge page in each plane."""
    return pools * 2 * LAYERS * HUGE_PAGE_KIB + OTHER_KIB


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(("VmRSS:", "VmPTE:")))


def decode(connection: Connection, bootstrap: str, gib: float, tp: int, page_size: int) -> None:
    """Ranks of a decode instance in one process; answers with the bytes of each room's last page, and with memory."""
    made = [sparse_pool(gib, HEADS // tp, page_size) for _ in range(tp)]
    agents = [
        Agent(role="decode", rank=Rank(tp=n, tp_size=tp), pool=pool, name=f"decode-{n}", bootstrap=bootstrap, **SMALL)
        for n, (pool, _) in enumerate(made)
    ]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.wait_ready(WAIT_S)
    connection.send("ready")
    before = resident_kib()
    while (room := connection.recv()) is not None:
        page = made[0][0].num_pages - room
        handles = [agent.receive(room, [page]) for agent in agents]
        connection.send("opened")
        states = [handle.wait(WAIT_S).name for handle in handles]
        token = page * page_size
        found = np.stack([np.concatenate([planes[n][token] for _, planes in made]) for n in range(2 * LAYERS)])
        connection.send((states, found, resident_kib() - before))
    for agent in agents:
        agent.close()


@pytest.mark.parametrize(("gib", "tp", "page_size"), [(1, 2, 1), (64, 1, 16)])
def test_a_room_of_one_token_costs_its_rows_whatever_the_size_of_the_pools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: float, tp: int, page_size: int
) -> None:
    monkeypatch.setenv("KVCTL_SOCKET_DIR", str(tmp_path))
    bootstrap = f"ipc://{tmp_path}/boot"
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=decode, args=(theirs, bootstrap, gib, tp, page_size), daemon=True
    )
    process.start()
    pool, planes = sparse_pool(gib, HEADS, page_size)
    prefill = Agent(role="prefill", rank=Rank(), pool=pool, name="prefill-0", bootstrap=bootstrap, **SMALL).start()

    def answer() -> Any:
        assert ours.poll(2 * WAIT_S), "the decode process does not answer"
        return ours.recv()

    written: list[int] = []
    write = prefill.parts.transport.write

    def count(peer: str, local: Any, remote: Any, sizes: Any, tag: Any) -> Any:
        if tag is not None:  # else it is a measurement of the connection
            written.append(len(sizes))
        return write(peer, local, remote, sizes, tag)

    monkeypatch.setattr(prefill.parts.transport, "write", count)
    try:
        assert answer() == "ready"
        prefill.wait_ready(WAIT_S)
        # This reads rows from all over the pool: up to 50 MiB of page tables.
        until(lambda: prefill.parts.chooser.model is not None, "the connection is not measured", WAIT_S)
        before, random = resident_kib(), np.random.default_rng(1)
        for room, path in enumerate(PATHS, 1):
            prefill.parts.chooser.path = path
            page = pool.num_pages - 2 * room
            wanted = random.standard_normal((2 * LAYERS, HEADS, DIM)).astype(np.float16)
            for plane, row in zip(planes, wanted, strict=True):
                plane[page * page_size] = row
            written.clear()
            ours.send(room)
            assert answer() == "opened"
            send = prefill.send(room)
            send.pages([page], last=True)
            send.finish()
            assert send.wait(WAIT_S) is RoomState.SUCCESS, send.error
            states, found, more_kib = answer()
            assert states == ["SUCCESS"] * tp
            assert np.array_equal(found, wanted)
            assert more_kib < growth_kib(tp)
            rows = 1 if tp == 1 else page_size  # heads of a page are one run if both sides have the same
            if path in ("slice", "bulk"):
                assert written == [2 * LAYERS * rows] * tp
            assert sum(written) <= 2 * LAYERS * rows * tp
        assert resident_kib() - before < growth_kib(1)
    finally:
        ours.send(None)
        process.join(WAIT_S)
        prefill.close()
        if process.is_alive():
            process.kill()
    assert process.exitcode == 0
