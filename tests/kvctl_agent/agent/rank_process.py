"""One rank in its own process, controlled by the tests: JSON lines in on stdin, out on the descriptor in argv.

Both roles compute the same bytes for a page from its number, so that a decode rank can verify the received bytes by
itself. stdout is not used, so that a test sees everything an engine prints there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from kvctl_agent.admin.documents import quarantined_bytes
from kvctl_agent.transport.environment import prepare_environment

prepare_environment()

import numpy as np  # noqa: E402

from kvctl_agent import Agent, KVPool, Rank, RoomState  # noqa: E402
from kvctl_agent.device import memory as device_memory  # noqa: E402
from kvctl_agent.device.cuda import open_device  # noqa: E402
from kvctl_agent.device.driver import checked, load  # noqa: E402
from kvctl_agent.layout.parallel import local_shards  # noqa: E402
from kvctl_agent.layout.shape import ModelShape  # noqa: E402

LAYERS, HEADS, ROW_BYTES, PAGE_SIZE, PAGES, ROOM_PAGES = 2, 4, 64, 4, 1024, 6
SHAPE = ModelShape(LAYERS, HEADS, ROW_BYTES, ROW_BYTES, 1)


def truth(layer: int, kv: int) -> np.ndarray:
    """Every page of the prefill ranks: uint8 [pages, page_size, heads of the model, row bytes]."""
    shape = (PAGES, PAGE_SIZE, HEADS, ROW_BYTES)
    return np.random.default_rng([layer, kv]).integers(0, 256, shape, np.uint8)


def source(room: int) -> np.ndarray:
    """Pages of a room on every prefill rank."""
    return np.random.default_rng(room).permutation(PAGES)[:ROOM_PAGES]


class Worker:
    """The rank. `config` is the agent's, and may have the GPU and the memory pool for the KV pool (`gpu`, `pool`)."""

    def __init__(self, role: Any, number: int, size: int, bootstrap: str, config: dict[str, Any]) -> None:
        gpu, self.mem_pool = config.pop("gpu", None), config.pop("pool", "default")
        self.device: Any = None if gpu is None else open_device(gpu)
        self.role = role
        tp = size if role == "prefill" else 1
        self.heads = HEADS // tp
        self.lo = number * self.heads if role == "prefill" else 0
        rank = Rank(tp=number, tp_size=size) if role == "prefill" else Rank(dp=number, dp_size=size)
        self.shards = local_shards(SHAPE, PAGE_SIZE, rank.parallel_config, rank.coord)
        self.pool = self.new_pool()
        small = {"staging_buffer_mb": 4, "staging_ring_mb": 1, "path": "staged", "resend_s": 0.2}
        self.agent = Agent(
            role=role,
            rank=rank,
            pool=self.pool,
            name=f"{role}-{number}",
            bootstrap=bootstrap,
            model=SHAPE,
            **{**small, **config},
        )
        self.rooms: dict[int, Any] = {}
        self.pages: dict[int, np.ndarray] = {}

    def new_pool(self) -> KVPool:
        pool = KVPool.allocate(self.shards, PAGE_SIZE, PAGES, device=self.device, mem_pool=self.mem_pool)
        self.fill(pool)
        return pool

    def fill(self, pool: KVPool) -> None:
        """Writes what a prefill rank has in its pages, or zeros."""
        for layer in range(LAYERS):
            for kv in (0, 1):
                ours = truth(layer, kv)[:, :, self.lo : self.lo + self.heads] * (self.role == "prefill")
                if self.device is None:
                    pool.segments[0].block(layer, kv)[:] = ours.reshape(-1)
                else:
                    self.device.upload(self.address(pool, layer, kv), ours.reshape(-1))

    def read(self, layer: int, kv: int) -> np.ndarray:
        """Returns the bytes of all pages, uint8 [pages, page bytes]."""
        if self.device is None:
            return self.pool.segments[0].block(layer, kv).reshape(PAGES, -1)
        found = np.empty((PAGES, PAGE_SIZE * self.heads * ROW_BYTES), np.uint8)
        self.device.download(self.address(self.pool, layer, kv), found.reshape(-1))
        return found

    @staticmethod
    def address(pool: KVPool, layer: int, kv: int) -> int:
        return pool.addresses().segments[0].bases[layer][kv]

    def start(self) -> None:
        self.agent.start()

    def ready(self, timeout: float) -> None:
        self.agent.wait_ready(timeout)

    def receive(self, rooms: list[int], prefill: str | None = None) -> None:
        """Opens rooms; each room number has its own pages in the pool."""
        for room in rooms:
            slot = room % (PAGES // ROOM_PAGES) * ROOM_PAGES
            self.pages[room] = np.arange(slot, slot + ROOM_PAGES)[::-1]
            self.rooms[room] = self.agent.receive(room, self.pages[room], prefill=prefill)

    def disconnect(self, prefill: str) -> None:
        self.agent.disconnect(prefill)

    def serving(self) -> list[str]:
        return self.agent.serving()

    def claim(self, rooms: list[int]) -> None:
        for room in rooms:
            self.rooms[room] = self.agent.send(room)

    def known(self, rooms: list[int]) -> None:
        """Waits until decode has opened all of these rooms."""
        deadline = time.monotonic() + 60
        while any(self.rooms[room].state < RoomState.WAITING_FOR_INPUT for room in rooms):
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def feed(self, rooms: list[int]) -> None:
        for room in rooms:
            self.rooms[room].pages(source(room), last=True)
            self.rooms[room].finish()

    def wait(self, rooms: list[int], timeout: float) -> dict[str, Any]:
        """Returns state, first cause, and whether pages are free, by room, and the duration of the slowest."""
        since = time.monotonic()
        states = {}
        for room in rooms:
            handle = self.rooms[room]
            state = handle.wait(max(0.0, timeout - (time.monotonic() - since)))
            states[str(room)] = {"state": state.name, "error": handle.error, "released": handle.released}
        return {"rooms": states, "seconds": time.monotonic() - since}

    def verify(self, rooms: list[int]) -> list[int]:
        """Returns the rooms whose bytes are wrong."""
        wrong = set()
        for layer in range(LAYERS):
            for kv in (0, 1):
                found = self.read(layer, kv)
                wanted = truth(layer, kv).reshape(PAGES, -1)
                wrong |= {room for room in rooms if not np.array_equal(found[self.pages[room]], wanted[source(room)])}
        return sorted(wrong)

    def cpu(self, seconds: float) -> float:
        """CPU time of all threads of this process, as a share of one core."""
        since, cpu = time.monotonic(), time.process_time()
        time.sleep(seconds)
        return (time.process_time() - cpu) / (time.monotonic() - since)

    def events(self) -> list[str]:
        return [event["text"] for event in self.agent.observe.events()["events"]]

    def peers(self) -> dict[str, str]:
        return {row["peer"]: row["state"] for row in self.agent.observe.peers()}

    def waiting(self) -> str | None:
        return self.agent.waiting_for()

    def own_incarnation(self) -> int:
        return self.agent.incarnation

    def incarnation(self, peer: str) -> int:
        """Incarnation of a peer, as known to this rank."""
        return self.agent.parts.machine.peers[peer].incarnation

    def quarantined(self) -> int:
        return quarantined_bytes(self.agent.parts)

    def sleep(self, unmap: bool) -> None:
        """Gives the pool's memory back: frees it, or only unmaps it (pool vmm), as engines in sleep mode do."""
        self.agent.unregister(60)
        if not unmap:
            self.pool.close()
            return
        memory: Any = self.pool._allocations[0]
        self.unmapped = memory._memory
        with self.device.context.visit():
            checked(load().cuMemUnmap(self.unmapped.addr, self.unmapped._size), "unmap")
            checked(load().cuMemRelease(self.unmapped._handle), "release")

    def wake(self, unmapped: bool) -> None:
        """Takes other memory, at the addresses that were unmapped or wherever it is, and registers it."""
        if not unmapped:
            self.pool = self.new_pool()
            self.agent.register(self.pool)
            return
        memory, driver = self.unmapped, load()
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties = device_memory._properties(self.device.index, kind)
        with self.device.context.visit():
            memory._handle = checked(driver.cuMemCreate(memory._size, properties, 0), "create")
            checked(driver.cuMemMap(memory.addr, memory._size, 0, memory._handle, 0), "map")
            right = device_memory._right(self.device.index)
            checked(driver.cuMemSetAccess(memory.addr, memory._size, [right], 1), "access")
        self.fill(self.pool)
        self.agent.register()

    def corrupt(self) -> None:
        """Decode: changes a byte of each part between its arrival and its checksum."""
        checksums: Any = self.agent.parts.arrivals._checksums
        begin = checksums.begin

        def corrupted(share: Any, pages: np.ndarray, head: int, lo: int, *others: Any) -> Any:
            page_bytes = PAGE_SIZE * self.heads * ROW_BYTES
            at, byte = self.address(self.pool, lo, 0) + int(pages[0]) * page_bytes, np.empty(1, np.uint8)
            self.device.download(at + head * ROW_BYTES, byte)
            self.device.upload(at + head * ROW_BYTES, byte ^ 1)
            return begin(share, pages, head, lo, *others)

        checksums.begin = corrupted

    def close(self) -> None:
        self.agent.close()

    def exit_thread(self, code: int) -> None:
        """Lets a thread of the engine call exit, as one ends a process."""
        thread = threading.Thread(target=sys.exit, args=(code,))
        thread.start()
        thread.join()

    def fork(self, code: int) -> int:
        """Forks a child that exits in the ordinary way, with all atexit handlers; returns its exit status."""
        child = os.fork()
        if not child:
            sys.exit(code)
        deadline = time.monotonic() + 60
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise TimeoutError("the forked child did not end within 10 s")
            time.sleep(0.005)
        return os.waitstatus_to_exitcode(ended[1])


def main() -> None:
    role, number, size, bootstrap, config, answers = sys.argv[1:7]
    worker = Worker(role, int(number), int(size), bootstrap, json.loads(config))
    with os.fdopen(int(answers), "w") as out:
        print(json.dumps({"pid": os.getpid()}), file=out, flush=True)
        for line in sys.stdin:
            ask = json.loads(line)
            do = ask.pop("do")
            if do == "raise":
                raise RuntimeError("the engine's own")
            if do == "exit":
                sys.exit(ask["code"])
            print(json.dumps({"answer": getattr(worker, do)(**ask)}), file=out, flush=True)
    # No close here: whoever forgets it must still end cleanly.


if __name__ == "__main__":
    main()
