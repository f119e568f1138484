"""Prints the duration of gathers, scatters, checksums and direct copies on a GPU as ratios of driver copies.

The driver copies are made in the same run.

Usage: python benchmarks/gpu_copies.py [--save FILE] [--repeats N]

A duration is measured as by a transfer worker: from page numbers in host memory until the worker sees that the copy has
completed. "Host" is the duration of the call that starts the copy. The floor is the time for the same bytes at the rate
of one large copy within the GPU (each byte is read and written) or to the other GPU. Copies of contiguous pools are
verified before they are timed. A checksum reads each byte once and writes none; it is computed once on each side.
"Of plain" is the rate as a share of that of the copy of the same part in contiguous pages, measured in turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from kvctl.lab.ranks.request import DTYPE_BYTES
from kvctl_agent.device.base import Batch, Device, Event, Geometry, PageStrides
from kvctl_agent.device.cuda import open_device
from kvctl_agent.errors import DeviceError
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord, local_shards
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.allocations import RingMemory
from kvctl_agent.memory.checksum import DeviceChecksums
from kvctl_agent.memory.copier import LandedPart
from kvctl_agent.memory.device_copier import DeviceCopier
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.pool_layouts import POOL_LAYOUTS
from kvctl_agent.memory.segment import RowIndex

PAGE_SIZE = 16
POOL_BYTES = 3 << 30  # exceeds the caches, even where a case uses only part of it
LISTS = 4  # page lists that take turns
FLOOR_BYTES = 1 << 30


class Case(NamedTuple):
    """Case of the benchmark, one line of the table.

    Attributes:
        name: name used by the claims.
        kind: "gather", "checksum" (of the same part), or "scatter" of as many parts as make up the pool's heads.
        layers: layers of a part.
        tokens: tokens of a part.
        heads: heads of a part.
        pool_heads: heads of the pool.
        most: largest allowed ratio to the floor; None if the ratio is only printed.
        dtype: element type of the pool.
        latent: whether the pool holds MLA latents, one row per token.
        layout: layout of the pool.
        split: transfer pages in a page of the pool, if the other side has smaller pages.
    """

    name: str
    kind: str
    layers: int
    tokens: int
    heads: int
    pool_heads: int
    most: float | None = None
    dtype: str = "bf16"
    latent: bool = False
    layout: str = "nhd"
    split: int = 1

    @property
    def plain(self) -> Case:
        """The copy of the same part in a pool of contiguous pages, of which a strided copy reaches at least 0.9."""
        kind = "gather" if self.kind == "checksum" else self.kind
        return self._replace(name="", kind=kind, most=None, layout="nhd", split=1)


CASES = (
    Case("gather, 80 layers, 2 of 2 heads, 1,024 tokens", "gather", 80, 1024, 2, 2, 1.5),
    Case("gather, 80 layers, 2 of 8 heads, 1,024 tokens", "gather", 80, 1024, 2, 8, 1.5),
    Case("gather, 80 layers, 2 of 2 heads, 4,096 tokens", "gather", 80, 4096, 2, 2),
    Case("gather, 32 layers, 2 of 2 heads, 1,024 tokens", "gather", 32, 1024, 2, 2, 2.0),
    Case("gather, 32 layers, 2 of 8 heads, 1,024 tokens", "gather", 32, 1024, 2, 8, 2.0),
    Case("gather, 80 layers, 2 of 8 heads, fp8", "gather", 80, 1024, 2, 8, dtype="fp8"),
    Case("gather, 61 layers of latents, 4,096 tokens", "gather", 61, 4096, 1, 1, latent=True),
    Case("scatter, 80 layers, 4 x 2 of 8 heads, 1,024 tokens", "scatter", 80, 1024, 2, 8, 1.25),
    Case("scatter, 32 layers, 4 x 2 of 8 heads, 1,024 tokens", "scatter", 32, 1024, 2, 8),
    Case("scatter, 80 layers, 1 of 4 writers, 1,024 tokens", "scatter", 80, 1024, 8, 8),
    Case("gather, 80 layers, 8 of 8 heads, 1,024 tokens", "gather", 80, 1024, 8, 8),
    Case("gather, 80 layers, 8 of 8 heads, 4,096 tokens", "gather", 80, 4096, 8, 8),
    *(
        Case(
            f"{kind}, {'4 x ' if kind == 'scatter' else ''}2 of 8 heads, {layout}", kind, 80, 1024, 2, 8, layout=layout
        )
        for layout in POOL_LAYOUTS
        if layout != "nhd"
        for kind in ("gather", "scatter")
    ),
    Case("gather, 8 of 8 heads, hnd", "gather", 80, 1024, 8, 8, layout="hnd"),
    Case("gather, 2 of 8 heads, hnd, a quarter of a page", "gather", 80, 1024, 2, 8, layout="hnd", split=4),
    Case("scatter, 4 x 2 of 8 heads, hnd, a quarter of a page", "scatter", 80, 1024, 2, 8, layout="hnd", split=4),
    Case("gather, 2 of 8 heads, fused, a quarter of a page", "gather", 80, 1024, 2, 8, layout="fused", split=4),
    Case("checksum, 80 layers, 2 of 8 heads, 1,024 tokens", "checksum", 80, 1024, 2, 8),
    Case("checksum, 80 layers, 8 of 8 heads, 4,096 tokens", "checksum", 80, 4096, 8, 8),
    Case("checksum, 32 layers, 2 of 8 heads, 1,024 tokens", "checksum", 32, 1024, 2, 8),
    Case("checksum, 80 layers, 2 of 8 heads, K and V fused", "checksum", 80, 1024, 2, 8, layout="fused"),
)


class Timed(NamedTuple):
    """Durations of a copy in µs.

    Attributes:
        host_us: median duration of the call that starts the copy.
        wall_us: median duration until the copy has completed.
        p99_us: 99th percentile of the duration until the copy has completed.
    """

    host_us: float
    wall_us: float
    p99_us: float


Begin = Callable[[int], Callable[[], bool]]
"""Starts a copy with the page list of the given number; returns a function that polls its completion."""


def timed(begin: Begin, repeats: int) -> Timed:
    """Measures the durations of `repeats` copies."""
    return in_turns([begin], repeats)[0]


def in_turns(begins: Sequence[Begin], repeats: int, warm: int = 5) -> list[Timed]:
    """Measures several copies in turns, because the host's share of a duration varies by the second.

    Args:
        begins: the copies; each is made `repeats` times.
        warm: number of turns before them that are not measured.
    """
    hosts: list[list[float]] = [[] for _ in begins]
    walls: list[list[float]] = [[] for _ in begins]
    for turn in range(-warm, repeats):
        for number, begin in enumerate(begins):
            since = time.perf_counter_ns()
            done = begin(turn % LISTS)
            begun = time.perf_counter_ns()
            while not done():
                pass
            if turn >= 0:
                walls[number].append((time.perf_counter_ns() - since) / 1e3)
                hosts[number].append((begun - since) / 1e3)
    return [
        Timed(median(host), median(wall), quantiles(wall, n=100)[98]) for host, wall in zip(hosts, walls, strict=True)
    ]


def copy_gb_per_s(device: Device, target: int, source: int, repeats: int) -> float:
    """Returns the rate of one large driver copy in 1e9 bytes of payload per second."""
    took = timed(lambda _: device.copy(target, source, FLOOR_BYTES).done, max(5, repeats // 20))
    return FLOOR_BYTES / took.wall_us / 1e3


class Bench:
    """Pool, staging ring and copier of one case on one device."""

    def __init__(self, device: Device, case: Case) -> None:
        self.device, self.case = device, case
        nbytes = DTYPE_BYTES[case.dtype]
        kind = "mla" if case.latent else "mha"
        dims = (576, 0) if case.latent else (128, 128)
        shape = ModelShape(case.layers, case.pool_heads, *dims, nbytes, kind=kind)
        here = local_shards(shape, case.split * PAGE_SIZE, ParallelConfig(), RankCoord(0, 0, 0, 0))
        page_bytes = sum(plane.rows * plane.head_bytes for plane in here[0].segment.planes) * case.pool_heads
        self.pages = case.tokens // PAGE_SIZE
        count = POOL_BYTES // (page_bytes * case.layers)
        self.pool = KVPool.allocate(here, case.split * PAGE_SIZE, count, device=device, layout=case.layout)
        (self.memory,) = self.pool.segments_at(case.split)
        self.layout = self.memory.part_layout(0, case.layers, self.pages, case.heads)
        self.parts = case.pool_heads // case.heads if case.kind == "scatter" else 1
        self.ring = RingMemory(self.parts * self.layout.region_bytes, device)
        self.copier = DeviceCopier(device.copies())
        self.copier.prepare(self.memory, 0, case.heads, checksum=True)
        self.checksums = DeviceChecksums(self.pool, self.copier.copies)
        self.slice = TransferSlice(0, 0, 0, 0, 0, case.heads, 0, case.layers, 0, 0, 0)
        random = np.random.default_rng(0)
        lists = [random.permutation(self.memory.num_slots)[: self.pages].astype(np.int32) for _ in range(LISTS)]
        self.lists = lists
        self.regions = [
            self.ring.view(part * self.layout.region_bytes, self.layout.nbytes) for part in range(self.parts)
        ]
        (self.piece,) = self.layout.pieces(self.layout.nbytes)

    def begin(self, turn: int) -> Callable[[], bool]:
        pages, heads = self.lists[turn], self.case.heads
        if self.case.kind == "checksum":
            return self.checksums.begin(self.slice, pages, 0, 0, self.case.layers, self.case.split).done
        if self.case.kind == "gather":
            rows = RowIndex(self.memory, pages, 0, heads)
            return self.copier.gather(rows, [self.piece], self.regions).done
        landed = [
            LandedPart(RowIndex(self.memory, pages, part * heads, heads), self.layout, region)
            for part, region in enumerate(self.regions)
        ]
        return self.copier.scatter(landed).done

    @property
    def nbytes(self) -> int:
        return self.parts * self.layout.nbytes

    def verify(self) -> None:
        """Moves random bytes once, and raises AssertionError if they differ from the expected bytes in three layers."""
        # The length is no multiple of a row, page or layer, so that no two rows are alike.
        noise = np.random.default_rng(1).integers(0, 256, 49_999_991, np.uint8)
        source = self.pool.regions()[0] if self.case.kind == "gather" else self.ring.region()
        for at in range(0, source.nbytes, len(noise)):
            self.device.upload(source.addr + at, noise[: source.nbytes - at])
        done = self.begin(0)
        while not done():
            pass
        planes = self.memory.shard.segment.planes
        for layer in (0, self.case.layers // 2, self.case.layers - 1):
            for plane in range(len(planes)):
                for part in range(self.parts):
                    packed = np.empty(self.layout.block(layer, plane)[1], np.uint8)
                    self.device.download(self.regions[part].addr + self.layout.block(layer, plane)[0], packed)
                    paged = np.empty(self.memory.addresses.page_bytes(plane) * self.memory.num_slots, np.uint8)
                    self.device.download(self.memory.addresses.bases[layer][plane], paged)
                    rows = paged.reshape(self.memory.num_slots, planes[plane].rows, self.case.pool_heads, -1)
                    first = part * self.case.heads
                    wanted = rows[self.lists[0], :, first : first + self.case.heads].reshape(-1)
                    assert np.array_equal(packed, wanted), f"{self.case.name}: layer {layer} plane {plane} differs"

    def close(self) -> None:
        self.copier.close()
        self.ring.close()
        self.pool.close()


def copies(device: Device, repeats: int) -> Iterator[dict[str, Any]]:
    """Measures every gather, scatter and checksum, and yields one row per case."""
    for case in CASES:
        with ExitStack() as stack:
            bench = stack.enter_context(closing(Bench(device, case)))
            if case.kind != "checksum" and case.layout == "nhd":
                bench.verify()
            memory = bench.pool.regions()[0].addr
            rate = copy_gb_per_s(device, memory, memory + FLOOR_BYTES, repeats)
            begins = [bench.begin]
            if case.plain != case._replace(name="", most=None):
                begins.append(stack.enter_context(closing(Bench(device, case.plain))).begin)
            took, *plain = in_turns(begins, repeats)
            yield row(case.name, bench.nbytes, took, bench.nbytes / rate / 1e3, case.most, *plain)


class Pages(NamedTuple):
    """Pages of one side of a direct copy, of bf16 heads of 128 elements.

    Attributes:
        heads: heads of the pool.
        layout: "nhd", "hnd" or "fused".
        split: transfer pages in a page.
    """

    heads: int
    layout: str = "nhd"
    split: int = 1

    @property
    def strides(self) -> PageStrides:
        head, tokens = HEAD_BYTES, self.split * PAGE_SIZE
        if self.layout == "nhd":
            row = self.heads * head
            return PageStrides(tokens * row, row, head, self.split, PAGE_SIZE * row)
        row = head * (2 if self.layout == "fused" else 1)
        return PageStrides(self.heads * tokens * row, row, tokens * row, self.split, PAGE_SIZE * row)

    def blocks(self, slots: int, layers: int) -> npt.NDArray[np.int64]:
        """Returns the offsets of K and V of each layer of a pool of `slots` transfer pages."""
        plane_bytes = slots * PAGE_SIZE * self.heads * HEAD_BYTES
        plane = HEAD_BYTES if self.layout == "fused" else plane_bytes
        starts: npt.NDArray[np.int64] = np.arange(layers)[:, None] * (2 * plane_bytes) + np.array([0, plane])
        return starts.reshape(-1)


DIRECT_HEADS, HEAD_BYTES = 2, 256
PLAIN = Pages(2), Pages(8)
UNLIKE = (
    ("hnd to nhd", Pages(2, "hnd"), Pages(8)),
    ("nhd to hnd", Pages(2), Pages(8, "hnd")),
    ("hnd to hnd", Pages(2, "hnd"), Pages(8, "hnd")),
    ("fused to nhd", Pages(2, "fused"), Pages(8)),
    ("nhd to fused", Pages(2), Pages(8, "fused")),
    ("nhd to hnd of 64 tokens", Pages(2), Pages(8, "hnd", 4)),
    ("hnd of 64 tokens to nhd", Pages(2, "hnd", 4), Pages(8)),
)


def directs(here: Device, there: Device, repeats: int, name: str) -> Iterator[dict[str, Any]]:
    """Measures copies by one kernel from pages of one device to pages of another.

    Plain pages are copied with fewer and fewer thread blocks, unlike ones with all and with the agent's number.

    Yields one row per case; `name` describes the pair of devices.
    """
    layers = 80
    with ExitStack() as stack:
        source = stack.enter_context(closing(here.allocate(POOL_BYTES)))
        target = stack.enter_context(closing(there.allocate(POOL_BYTES)))
        copier = stack.enter_context(closing(here.copies()))
        mapping = stack.enter_context(closing(here.open(there.export([(target.addr, POOL_BYTES)]), same_process=True)))
        base = mapping.translate(target.addr)
        rate = copy_gb_per_s(here, base, source.addr, repeats)
        slots = POOL_BYTES // (2 * layers * PAGE_SIZE * 8 * HEAD_BYTES) // 4 * 4
        random = np.random.default_rng(2)

        def begin_of(tokens: int, programs: int | None, src: Pages, dst: Pages) -> Begin:
            pages = tokens // PAGE_SIZE
            geometry = Geometry(PAGE_SIZE, DIRECT_HEADS, HEAD_BYTES, src.strides, dst.strides)
            copier.prepare([geometry])
            blocks = np.zeros((2 * layers, 5), np.int64)
            blocks[:, 0] = source.addr + src.blocks(slots, layers)
            blocks[:, 1] = base + dst.blocks(slots, layers)
            blocks[:, 3:] = pages
            lists = [
                np.concatenate([random.permutation(slots)[:pages] for _ in range(2)]).astype(np.int32)
                for _ in range(LISTS)
            ]

            def begin(turn: int) -> Callable[[], bool]:
                event: Event = copier.begin([Batch(geometry, blocks)], lists[turn], programs=programs)
                return event.done

            return begin

        for tokens, programs in ((1024, None), (4096, None), (4096, 64), (4096, 32), (4096, 16), (4096, 8)):
            took = timed(begin_of(tokens, programs, *PLAIN), max(10, repeats // 4))
            nbytes = 2 * layers * tokens * DIRECT_HEADS * HEAD_BYTES
            blocks_text = "all" if programs is None else str(programs)
            most = 1 / 0.88 if programs is None and tokens == 4096 and here.index != there.index else None
            text = f"direct, {name}, {tokens:,} tokens, {blocks_text} blocks"
            yield row(text, nbytes, took, nbytes / rate / 1e3, most)
        for pair, *sides in UNLIKE:
            for programs in (None, 64):
                begins = [begin_of(4096, programs, *each) for each in (sides, PLAIN)]
                took, plain = in_turns(begins, max(10, repeats // 4))
                text = f"direct, {name}, {pair}, {'all' if programs is None else programs} blocks"
                yield row(text, nbytes, took, nbytes / rate / 1e3, None, plain)


def row(
    name: str, nbytes: int, took: Timed, floor_us: float, most: float | None, plain: Timed | None = None
) -> dict[str, Any]:
    """Returns a row of the table; `plain` is that of a copy of as many bytes in contiguous pages."""
    return {
        "name": name,
        "bytes": nbytes,
        "host_us": round(took.host_us, 1),
        "wall_us": round(took.wall_us, 1),
        "p99_us": round(took.p99_us, 1),
        "floor_us": round(floor_us, 1),
        "floor_ratio": round(took.wall_us / floor_us, 3),
        "plain_ratio": None if plain is None else round(plain.wall_us / took.wall_us, 3),
        "most": None if most is None else round(most, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="write the rows as JSON")
    parser.add_argument("--repeats", type=int, default=200, help="of each case")
    arguments = parser.parse_args()
    try:
        first = open_device(0)
    except DeviceError as error:
        print(f"gpu_copies: {error}", file=sys.stderr)
        return 3
    print(f"{'':54}{'MB':>7}{'host µs':>9}{'µs':>8}{'p99':>8}{'floor':>8}{'x floor':>9}{'of plain':>10}")
    rows = []

    def show(found: Iterator[dict[str, Any]]) -> None:
        for each in found:
            rows.append(each)
            verdict = "" if each["most"] is None else ("  ok" if each["floor_ratio"] <= each["most"] else "  OVER")
            ratio = "" if each["plain_ratio"] is None else f"{each['plain_ratio']:.2f}"
            print(
                f"{each['name']:54}{each['bytes'] / 1e6:7.0f}{each['host_us']:9.1f}{each['wall_us']:8.1f}"
                f"{each['p99_us']:8.1f}{each['floor_us']:8.1f}{each['floor_ratio']:9.2f}{ratio:>10}{verdict}",
                flush=True,
            )

    show(copies(first, arguments.repeats))
    show(directs(first, first, arguments.repeats, "same GPU"))
    try:
        show(directs(first, open_device(1), arguments.repeats, "GPU 0 to GPU 1"))
    except DeviceError as error:
        print(f"GPU 0 to GPU 1: not run: {error}")
    if arguments.save:
        arguments.save.write_bytes(
            orjson.dumps(
                {"device": first.describe(), "rows": rows}, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
