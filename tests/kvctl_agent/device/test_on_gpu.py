"""Guarantees of a device, on a real GPU, where stand-ins for the driver are not sufficient."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvctl_agent
from kvctl_agent.device import sharing
from kvctl_agent.device.base import Batch, Device, Event, Export, Geometry, PageStrides, PendingChecksum, RowCopies
from kvctl_agent.device.cuda import open_device
from kvctl_agent.errors import DeviceError, DeviceUnavailable
from tests.kvctl_agent.device.geometries import of_rows
from tests.kvctl_agent.device.gpu_peer import content
from tests.support.host_device import HostDevice

MIB = 1 << 20
DEADLINE_S = 60.0
GATHER, SCATTER, DIRECT = (True, False), (False, True), (True, True)
ROOT = Path(kvctl_agent.__file__).parents[1]

FORKED = """
import os, sys
from kvctl_agent.device.cuda import open_device
from kvctl_agent.errors import DeviceError
device = open_device(0)
child = os.fork()
if not child:
    try:
        device.allocate(1 << 20)
    except DeviceError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.fixture
def no_leaks() -> None:
    """The driver opens descriptors as it needs them, and keeps them."""


def opened(index: int) -> Device:
    try:
        return open_device(index)
    except DeviceUnavailable:
        pytest.skip(f"no {'second ' if index else ''}NVIDIA GPU here (run benchmarks/gpu.sh on one)")


@pytest.fixture
def gpu() -> Device:
    return opened(0)


@pytest.fixture
def copies(gpu: Device) -> Iterator[RowCopies]:
    made = gpu.copies()
    yield made
    made.close()


def settle(event: Event | PendingChecksum) -> None:
    until = time.monotonic() + DEADLINE_S
    while not event.done():
        assert time.monotonic() < until, "the event does not come"


def downloaded(device: Device, addr: int, nbytes: int) -> np.ndarray:
    out = np.empty(nbytes, np.uint8)
    device.download(addr, out)
    return out


# ---- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["default", "vmm"])
def test_memory(gpu, pool):
    memory = gpu.allocate(5 * MIB + 3, pool)
    assert memory.addr % 256 == 0
    gpu.fill(memory.addr, memory.nbytes, 0xDB)
    data = np.random.default_rng(1).integers(0, 256, 3 * MIB, np.uint8)
    gpu.upload(memory.addr + 17, data)
    settle(gpu.copy(memory.addr + 4 * MIB, memory.addr + 17, MIB))
    found = downloaded(gpu, memory.addr, memory.nbytes)
    assert np.array_equal(found[17 : 17 + data.nbytes], data)
    assert np.array_equal(found[4 * MIB : 5 * MIB], data[:MIB])
    assert (found[:17] == 0xDB).all()
    assert (found[5 * MIB :] == 0xDB).all()
    memory.close()
    memory.close()


@pytest.mark.parametrize("pool", ["default", "vmm"])
def test_memory_goes_back(gpu, pool):
    def lap() -> int:
        gpu.allocate(512 * MIB, pool).close()
        return int(gpu.describe()["free_bytes"])

    assert abs(lap() - lap()) < 64 * MIB


@pytest.mark.parametrize("pool", ["default", "vmm"])
def test_more_memory_than_there_is(gpu, pool):
    with pytest.raises(DeviceError, match=r"GiB are free; reduce staging_buffer_mb"):
        gpu.allocate(1 << 42, pool)
    gpu.allocate(MIB, pool).close()


def test_describe(gpu):
    told = gpu.describe()
    assert told["uuid"].startswith("GPU-")
    assert told["memory_bytes"] >= told["free_bytes"] > 0
    json.dumps(told)


def test_a_device_that_is_not_there(gpu):
    with pytest.raises(DeviceUnavailable, match="no GPU 99 here"):
        open_device(99)


# ---- copies -------------------------------------------------------------------------------------------------------


class Both:
    """The same memory on the GPU and on the stand-in, which copies with numpy; compared after each copy."""

    def __init__(self, gpu: Device, nbytes: int) -> None:
        self.gpu, self.host = gpu, HostDevice(slow=1)
        self.nbytes = nbytes
        self.there, self.here = gpu.allocate(nbytes), self.host.allocate(nbytes)
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        gpu.upload(self.there.addr, data)
        self.host.upload(self.here.addr, data)

    def copy(self, copies: RowCopies, geometry: Geometry, blocks: Any, pages: np.ndarray, **how: Any) -> Event:
        """`blocks` have offsets instead of addresses."""
        on_host = self.host.copies()
        on_host.begin([Batch(geometry, _moved(blocks, self.here.addr))], pages)
        on_host.close()
        return copies.begin([Batch(geometry, _moved(blocks, self.there.addr))], pages, **how)

    def check(self) -> None:
        found, wanted = downloaded(self.gpu, self.there.addr, self.nbytes), np.empty(self.nbytes, np.uint8)
        self.host.download(self.here.addr, wanted)
        wrong = np.flatnonzero(found != wanted)
        assert not len(wrong), f"{len(wrong)} of {self.nbytes} bytes are wrong, from {wrong[0]} on"
        self.there.close()


def _moved(blocks: list[list[int]], base: int) -> np.ndarray:
    return np.array(blocks, np.int64) + np.array([base, base, 0, 0, 0])


def layout(
    way: tuple[bool, bool], shape: tuple[int, int, int, int, int], counts: list[int]
) -> tuple[int, Geometry, list[list[int]], np.ndarray]:
    """Six blocks on each side, and parts with these page counts.

    Returns:
        Bytes of memory; geometry; blocks with offsets; pages.
    """
    page_size, row, width, start, shift = shape
    slots, blocks = sum(counts) + 7, 6
    random = np.random.default_rng(slots)
    order = [random.permutation(slots)[: sum(counts)] for _ in (0, 1)]
    src_row, dst_row = (row if paged else width for paged in way)
    geometry = of_rows(page_size, width, src_row, dst_row, *way)
    block_bytes = slots * page_size * row + 512
    begins = np.cumsum([0, *counts]).tolist()
    table = []
    for lo, hi in pairwise(begins):
        for block in range(blocks):
            at = [(side * blocks + block) * block_bytes + shift * (1 - side) for side in (0, 1)]
            inside = [start if paged else lo * page_size * width for paged in way]
            table.append([at[0] + inside[0], at[1] + inside[1], lo, sum(counts) + lo, hi - lo])
    return 2 * blocks * block_bytes, geometry, table, np.concatenate(order).astype(np.int32)


# (page size, bytes of a row, of what is copied of it, where in it, bytes that the source lies off).
SHAPES = [
    (16, 2048, 512, 512, 0),  # 2 of 8 heads x 128, bf16
    (64, 2048, 2048, 0, 0),  # all heads: pages are contiguous
    (16, 1024, 128, 640, 0),  # 1 of 8 heads x 128, fp8
    (1, 4096, 1024, 2048, 0),  # 2 of 8 heads x 128, fp32, page size 1
    (64, 1152, 1152, 0, 0),  # a shared latent, bf16
    (16, 960, 384, 192, 0),  # 2 of 5 heads x 96, bf16
    (4, 100, 20, 40, 0),  # words of 4 bytes
    (16, 2048, 512, 512, 2),  # memory that lies badly
    (3, 63, 21, 21, 1),  # nothing fits anything
]


@pytest.mark.parametrize("way", [GATHER, SCATTER, DIRECT], ids=["gather", "scatter", "direct"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies_are_numpys(gpu, copies, shape, way):
    nbytes, geometry, blocks, pages = layout(way, shape, [1, 40, 7])
    both = Both(gpu, nbytes)
    settle(both.copy(copies, geometry, blocks, pages))
    both.check()


@pytest.mark.parametrize("programs", [1, 16])
def test_few_programs_copy_the_same(gpu, copies, programs):
    nbytes, geometry, blocks, pages = layout(DIRECT, SHAPES[0], [1, 40, 7])
    both = Both(gpu, nbytes)
    settle(both.copy(copies, geometry, blocks, pages, programs=programs))
    both.check()


def test_tables_that_do_not_fit_one_upload(gpu, copies):
    nbytes, geometry, blocks, pages = layout(DIRECT, (1, 256, 64, 64, 0), [30_000, 11])
    both = Both(gpu, nbytes)
    settle(both.copy(copies, geometry, blocks, pages))
    both.check()


def test_many_requests_at_once(gpu, copies):
    nbytes, geometry, blocks, pages = layout(GATHER, SHAPES[0], [1] * 100)
    both = Both(gpu, nbytes)
    events = [both.copy(copies, geometry, blocks[at : at + 6], pages) for at in range(0, len(blocks), 6)]
    settle(events[-1])
    assert all(event.done() for event in events)
    both.check()


# Strides of pages of 16 tokens of 8 heads of 256 bytes; two heads are copied.
ROW = 8 * 256
STRIDED = {
    "HND to NHD": (PageStrides(16 * ROW, 256, 16 * 256), PageStrides(16 * ROW, ROW, 256)),
    "K and V in one row to HND": (PageStrides(32 * ROW, 512, 16 * 512), PageStrides(16 * ROW, 256, 16 * 256)),
    "split pages of HND to NHD": (PageStrides(64 * ROW, 256, 64 * 256, 4, 16 * 256), PageStrides(16 * ROW, ROW, 256)),
    "gather of HND": (PageStrides(16 * ROW, 256, 16 * 256), None),
    "scatter to K and V in one row": (None, PageStrides(32 * ROW, 512, 16 * 512)),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_pages_are_copied_as_by_numpy(gpu, copies, name):
    geometry = Geometry(16, 2, 256, *STRIDED[name])
    blocks, half = 4, 64 * 32 * ROW
    table = [[number * 8192, half + number * 8192, 0, 40, 40] for number in range(blocks)]
    if geometry.src is None or geometry.dst is None:
        side = 0 if geometry.src is None else 1
        for number in range(blocks):
            table[number][side] = side * half + number * 40 * geometry.page_bytes
    pages = np.concatenate([np.random.default_rng(3 + side).permutation(56)[:40] for side in (0, 1)]).astype(np.int32)
    both = Both(gpu, 2 * half)
    # The pages of the blocks overlap, so the blocks are copied one after the other.
    for row in table:
        settle(both.copy(copies, geometry, [row], pages))
    both.check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_checksums_are_numpys(gpu, copies, shape):
    """Of many requests at once."""
    nbytes, geometry, blocks, pages = layout(GATHER, shape, [1, 40, 7])
    both, host = Both(gpu, nbytes), HostDevice(slow=1)
    found, wanted = [], []
    for lo in (*range(len(blocks)), None):
        some = np.array(blocks if lo is None else blocks[lo : lo + 1], np.int64)
        some[:, 1] = np.arange(len(some)) << 20  # positions in a part
        for device, addr, sums in ((copies, both.there.addr, found), (host.copies(), both.here.addr, wanted)):
            moved = some + np.array([addr, 0, 0, 0, 0])
            sums.append(device.checksum([Batch(geometry, moved)], pages))
    for each in (*found, *wanted):
        settle(each)
    assert [each.value for each in found] == [each.value for each in wanted]
    assert len({each.value for each in found}) == len(found)
    both.check()


# ---- events -------------------------------------------------------------------------------------------------------


def test_a_copy_begins_after_what_it_waits_for(gpu, copies):
    size = 1024 * MIB
    memory, small = gpu.allocate(2 * size), gpu.allocate(MIB)
    gpu.fill(memory.addr, 2 * size, 1)
    gpu.fill(memory.addr, size, 2)
    late = gpu.copy(memory.addr + size, memory.addr, size)
    assert not late.done()
    # The last MiB of what the copy writes, on another stream.
    block = np.array([[memory.addr + 2 * size - MIB, small.addr, 0, 0, 1]], np.int64)
    geometry = of_rows(1, MIB, MIB, MIB, True, False)
    done = copies.begin([Batch(geometry, block)], np.zeros(1, np.int32), after=late)
    settle(done)
    assert late.done()
    assert (downloaded(gpu, small.addr, MIB) == 2).all()
    memory.close()
    small.close()


def test_now_has_come_soon(gpu):
    settle(gpu.now())


def test_any_thread_may_ask(gpu):
    answers: list[Any] = []

    def ask() -> None:
        try:
            settle(event)
            event.wait(0)
            answers.append(None)
        except BaseException as error:
            answers.append(error)

    memory = gpu.allocate(64 * MIB)
    event = gpu.copy(memory.addr, memory.addr + 32 * MIB, 32 * MIB)
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert answers == [None]
    memory.close()


def test_events_of_torch(gpu, copies):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    engine, attention = torch.cuda.Stream(), torch.cuda.Stream()
    rows, width = 4096, 4096
    source = torch.zeros(rows, width, dtype=torch.uint8, device="cuda:0")
    target, seen = torch.zeros_like(source), torch.zeros_like(source)
    weights = torch.randn(8192, 8192, device="cuda:0", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    ready = torch.cuda.Event()
    with pytest.raises(DeviceError, match=r"call record\(stream\) before"):
        gpu.event_of(ready)
    with torch.cuda.stream(engine):
        for _ in range(20):
            weights @ weights
        source.fill_(7)
        ready.record()
    block = np.array([[source.data_ptr(), target.data_ptr(), 0, 0, rows]], np.int64)
    order = np.random.default_rng(1).permutation(rows).astype(np.int32)
    done = copies.begin([Batch(of_rows(1, width, width, width, True, False), block)], order, after=gpu.event_of(ready))
    attention.wait_event(done)
    with torch.cuda.stream(attention):
        seen.copy_(target)
    attention.synchronize()
    assert bool((seen == 7).all())
    assert done.done()
    done.wait(torch.cuda.current_stream())
    assert torch.cuda.current_device() == 0


# ---- other processes ----------------------------------------------------------------------------------------------


def child(arguments: list[str], given: str = "") -> str:
    """The output of a child process, which must write nothing to stderr."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    ended = subprocess.run(
        [sys.executable, *arguments], input=given, capture_output=True, text=True, timeout=120, env=environment
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def peer(device: int, exports: list[Export], target: int, width: int, pages: list[int]) -> dict[str, Any]:
    rows = [(addr, nbytes, kind, handle.hex(), name) for addr, nbytes, kind, handle, name in exports]
    order = {"device": device, "exports": rows, "target": target, "width": width, "pages": pages}
    said: dict[str, Any] = json.loads(child([str(Path(__file__).with_name("gpu_peer.py"))], json.dumps(order)))
    return said


@pytest.mark.parametrize("writer", [0, 1])
def test_a_peer_writes_into_our_pages(gpu, writer):
    opened(writer)
    slots, width = 4096, 512
    pool, ring = gpu.allocate(slots * width), gpu.allocate(3 * MIB)
    gpu.fill(pool.addr, pool.nbytes, 0xDB)
    pages = np.random.default_rng(2).permutation(slots)[:1000]
    exports = gpu.export([(pool.addr, 100), (ring.addr, MIB), (pool.addr + 200, 100)])
    assert [export.kind for export in exports] == ["ipc", "ipc"]
    said = peer(writer, exports, pool.addr, width, pages.tolist())
    assert said.get("lane") in (["nvlink", "pcie"] if writer else ["same device"]), said
    wanted = np.full((slots, width), 0xDB, np.uint8)
    wanted[pages] = content(len(pages), width)
    assert np.array_equal(downloaded(gpu, pool.addr, pool.nbytes).reshape(slots, width), wanted)
    pool.close()
    ring.close()


def test_memory_of_torch_is_exported(gpu):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    slots, width = 512, 256
    held = [torch.zeros(slots, width, dtype=torch.uint8, device="cuda:0") for _ in range(3)]
    torch.cuda.synchronize()
    exports = gpu.export([(tensor.data_ptr(), tensor.nbytes) for tensor in held])
    assert len({export.handle for export in exports}) == len(exports)
    said = peer(0, exports, held[1].data_ptr(), width, [*range(slots)])
    assert said == {"lane": "same device"}
    assert np.array_equal(held[1].cpu().numpy(), content(slots, width))
    assert not int(held[0].max())
    assert not int(held[2].max())


def test_a_peer_is_not_believed_about_sizes(gpu):
    memory = gpu.allocate(MIB)
    (export,) = gpu.export([(memory.addr, MIB)])
    said = peer(0, [export._replace(nbytes=1 << 40)], memory.addr, 512, [0])
    assert "bytes long" in said.get("error", ""), said
    memory.close()


def test_a_handle_of_nobody_is_an_error_and_no_more(gpu):
    memory = gpu.allocate(MIB)
    (export,) = gpu.export([(memory.addr, MIB)])
    with pytest.raises(DeviceError, match="cannot map"):
        gpu.open([export._replace(handle=bytes(64))])
    gpu.fill(memory.addr, MIB, 1)
    memory.close()


def test_made_memory_is_shared_where_there_is_a_fabric_else_refused(gpu):
    slots, width = 512, 256
    memory = gpu.allocate(slots * width, "vmm")
    if gpu.describe()["fabric"] is not True:
        with pytest.raises(DeviceError, match="set mem_pool=default"):
            gpu.export([(memory.addr, MIB)])
    else:
        exports = gpu.export([(memory.addr, memory.nbytes)])
        assert [export.kind for export in exports] == ["fabric"]
        assert peer(0, exports, memory.addr, width, [*range(slots)]) == {"lane": "same device"}
        found = downloaded(gpu, memory.addr, memory.nbytes)
        assert np.array_equal(found.reshape(slots, width), content(slots, width))
    memory.close()


@pytest.mark.parametrize("pool", ["default", "vmm"])
def test_another_gpu_of_the_same_process(gpu, pool, monkeypatch):
    other = opened(1)
    source, target = gpu.allocate(MIB), other.allocate(MIB, pool)
    data = np.random.default_rng(3).integers(0, 256, MIB, np.uint8)
    gpu.upload(source.addr, data)
    exports = [Export(target.addr, MIB, "ipc", bytes(64), other.describe()["uuid"])]
    monkeypatch.setattr(sharing, "_exported", set(exports))  # made memory has no handle everywhere
    mapping = gpu.open(exports, same_process=True)
    made = gpu.copies()
    block = np.array([[source.addr, mapping.translate(target.addr), 0, 0, 1]], np.int64)
    settle(made.begin([Batch(of_rows(1, MIB, MIB, MIB, True, True), block)], np.zeros(1, np.int32)))
    made.close()
    assert np.array_equal(downloaded(other, target.addr, MIB), data)
    other.fill(target.addr, MIB, 0)
    settle(gpu.copy(mapping.translate(target.addr), source.addr, MIB))
    assert np.array_equal(downloaded(other, target.addr, MIB), data)
    mapping.close()
    source.close()
    target.close()


def test_a_forked_child_is_told_so(gpu):
    assert "start workers by spawn" in child(["-W", "ignore", "-c", FORKED])
