"""KV pools in torch CUDA tensors: how an engine uses events so that no call waits for a device.

A prefill and a decode agent run in one process, with pools on two GPUs or on one. A simulated forward writes KV on a
stream and records an event behind it; `send.pages` takes the event and returns at once, and the agent transfers the
pages when the event has completed. On the decode side the stream waits for `receive.event`, then reads. Every byte is
compared. `--pipelined` does the same for each layer group, with an event of its own.

    python examples/gpu_pools.py
    python examples/gpu_pools.py --decode cuda:1 --transport nixl --path direct --pipelined
    python examples/gpu_pools.py --prefill cpu --decode cpu --transport loopback
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from kvctl_agent import Agent, ForwardInfo, KVPool, Rank, RoomState

LAYERS, HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 8, 8, 64, 16, 512
HIDDEN = 512
PAGES_OF_A_CHUNK, CHUNKS = 16, 3
TIMEOUT_S = 60.0


class Side:
    """One rank: pool of torch tensors, its agent, and the engine's stream (None on the CPU)."""

    def __init__(self, role: Literal["prefill", "decode"], device: str, bootstrap: str, config: dict[str, Any]) -> None:
        self.device = torch.device(device)
        self.stream: Any = None
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        shape = (PAGES * PAGE_SIZE, HEADS, HEAD_DIM)
        self.k = [torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in range(LAYERS)]
        self.v = [torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in range(LAYERS)]
        if self.stream is not None:
            torch.cuda.synchronize(self.device)  # once, before others write to the pool: zeroing is a kernel, too
        self.aux = np.zeros((16, 8), np.uint8)  # in host memory, even if the pool is on a GPU
        pool = KVPool.from_tensors(self.k, self.v, page_size=PAGE_SIZE, total_kv_heads=HEADS, aux=self.aux)
        self.agent = Agent(role=role, rank=Rank(), pool=pool, name=f"{role}-0", bootstrap=bootstrap, **config)
        self.free = list(range(PAGES))
        random.shuffle(self.free)

    def working(self) -> Any:
        """Returns a context in which kernels are launched on the engine's stream."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def recorded(self) -> Any:
        """Records an event behind everything on the stream; returns None on the CPU, where calls are synchronous."""
        return None if self.stream is None else self.stream.record_event()

    def take(self, count: int) -> list[int]:
        """Allocates pages; returns their indices as a list, since reading them from a CUDA tensor would synchronise."""
        return [self.free.pop() for _ in range(count)]

    def rows(self, tensor: torch.Tensor, pages: Sequence[int]) -> torch.Tensor:
        """Returns a copy of the pages of a pool tensor, `[pages, page size, heads, head dim]`."""
        where = torch.tensor(pages).to(self.device, non_blocking=True)
        return tensor.view(PAGES, PAGE_SIZE, HEADS, HEAD_DIM)[where]


class Toy:
    """Simulated forward: takes time on the device and fills pages with random KV."""

    def __init__(self, side: Side) -> None:
        self._side = side
        with side.working():
            self._weight = torch.randn(HIDDEN, HIDDEN, device=side.device) / HIDDEN**0.5
            self._hidden = torch.randn(HIDDEN, HIDDEN, device=side.device)

    def forward(self, layers: range, pages: Sequence[int]) -> None:
        """Launches the computation of some layers; on a GPU it has not completed when this returns."""
        side = self._side
        with side.working():
            where = torch.tensor(pages).to(side.device, non_blocking=True)
            for layer in layers:
                self._hidden = torch.tanh(self._hidden @ self._weight)
                for tensor in (side.k[layer], side.v[layer]):
                    rows = torch.randn(len(pages), PAGE_SIZE, HEADS, HEAD_DIM, device=side.device)
                    tensor.view(PAGES, PAGE_SIZE, HEADS, HEAD_DIM)[where] = rows.to(tensor.dtype)


def run(prefill: Side, decode: Side, toy: Toy, room: int) -> float:
    """Transfers one request; returns the seconds from its first launch until decode may read."""
    count = PAGES_OF_A_CHUNK * CHUNKS
    ours, theirs = prefill.take(count), decode.take(count)
    slot = room % len(decode.aux)
    receive = decode.agent.receive(room, theirs, aux_index=slot)
    send = prefill.agent.send(room)

    began = time.monotonic()
    for first in range(0, count, PAGES_OF_A_CHUNK):
        pages = ours[first : first + PAGES_OF_A_CHUNK]
        last = first + PAGES_OF_A_CHUNK == count
        grouping = prefill.agent.layer_groups(ForwardInfo(tokens=(len(pages) * PAGE_SIZE,)))
        send.prefetch(grouping.groups)
        for group in grouping.groups:
            toy.forward(group, pages)
            send.layers(group, pages, last=last, event=prefill.recorded())
        if not grouping.groups:
            toy.forward(range(LAYERS), pages)
            send.pages(pages, last=last, event=prefill.recorded())
    prefill.aux[slot] = room % 256  # such as the first token
    send.finish(aux_index=slot)  # is sent after the pages

    if receive.wait(TIMEOUT_S) is not RoomState.SUCCESS:
        raise SystemExit(f"room {room}: {receive.error}")
    took = time.monotonic() - began
    if receive.event is not None:
        receive.event.wait(decode.stream)  # like decode.stream.wait_event: returns at once
    with decode.working():
        found = [decode.rows(tensor, theirs) for tensor in (*decode.k, *decode.v)]  # attention would read them in place
        wanted = [prefill.rows(tensor, ours) for tensor in (*prefill.k, *prefill.v)]
        same = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, wanted, strict=True))
    if not same or decode.aux[slot, 0] != room % 256:
        raise SystemExit(f"room {room}: decode has something else than prefill computed")

    send.wait(TIMEOUT_S)
    prefill.free += ours  # `send.sent` by now: nothing reads these pages any more
    decode.free += theirs
    return took


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--prefill", default="cuda:0", metavar="DEVICE", help="where prefill's pool is")
    parser.add_argument("--decode", default="cuda:0", metavar="DEVICE", help="where decode's pool is")
    parser.add_argument("--transport", default="nixl", choices=["nixl", "mooncake", "loopback"])
    parser.add_argument("--path", default="auto", choices=["auto", "bulk", "slice", "staged", "direct"])
    parser.add_argument("--rooms", type=int, default=8)
    parser.add_argument("--pipelined", action="store_true", help="send each layer group while the next is computed")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    wanted = {torch.device(name).index or 0 for name in (options.prefill, options.decode) if name.startswith("cuda")}
    if wanted and max(wanted) >= torch.cuda.device_count():
        raise SystemExit(f"there are {torch.cuda.device_count()} GPUs here; --prefill cpu --decode cpu needs none")
    config = {"transport": options.transport, "path": options.path, "staging_buffer_mb": 64, "staging_ring_mb": 64}
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp"))
        bootstrap = f"ipc://{Path(directory) / 'bootstrap'}"
        prefill = Side("prefill", options.prefill, bootstrap, config)
        decode = Side("decode", options.decode, bootstrap, config)
        for side in (prefill, decode):
            stack.enter_context(side.agent).start()
        decode.agent.wait_ready(TIMEOUT_S)
        prefill.agent.set_pipeline("2" if options.pipelined else "off")
        toy = Toy(prefill)
        taken = [run(prefill, decode, toy, room) for room in range(options.rooms)]
    print(f"{options.rooms} rooms, each byte as computed; median {sorted(taken)[len(taken) // 2] * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
