"""Connection to a peer as the paths use it: addresses of both pools, and the mapping of the peer's memory."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.values import layer_range
from kvctl_agent.device.base import Mapping
from kvctl_agent.errors import DeviceError, MemoryLayoutError, PeerDisconnected
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.memory.addresses import PageSteps, PoolAddresses, SegmentAddresses
from kvctl_agent.memory.page_runs import RunDescriptors, run_descriptors
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.paths.contiguous_runs import PlaneRuns, join_planes, segment_runs
from kvctl_agent.protocol.events import Pages
from kvctl_agent.transport.base import Transport

if TYPE_CHECKING:
    from kvctl_agent.paths.direct import Route

Numbers = npt.NDArray[np.int64]

_KEPT_TIMES, _LEAST_TIMES = 32, 8


class MappedMemory:
    """Reference-counted mapping of a peer's memory, used by the kernels of path direct; thread-safe.

    The control loop drops a connection when its peer is lost, was replaced or has sent Bye. Kernels may be
    running on the mapping at that time, so the memory is unmapped only after the last of them has ended.

    Attributes:
        lane: The interconnect to the memory, as in `device.base.Mapping`.
        translate, translate_all: As in `device.base.Mapping`; only while the mapping is open.
    """

    def __init__(self, mapping: Mapping) -> None:
        self.lane = mapping.lane
        self.translate, self.translate_all = mapping.translate, mapping.translate_all
        self._mapping = mapping
        self._lock = threading.Lock()
        self._users = 0
        self._dropped = False

    @property
    def users(self) -> int:
        """Number of running kernels that use the mapping."""
        return self._users

    def acquire(self) -> None:
        """Increments the number of users; call before launching a kernel.

        Raises:
            PeerDisconnected: the connection was dropped; no kernel may be launched on the mapping any more.
        """
        with self._lock:
            if self._dropped:
                raise PeerDisconnected("the peer's memory is no longer mapped: the peer is gone or has restarted")
            self._users += 1

    def release(self) -> None:
        """Decrements the number of users; call once for each `acquire`, after the kernel has ended."""
        with self._lock:
            self._users -= 1
            last = self._dropped and not self._users
        if last:
            self._unmap()

    def close(self) -> None:
        """Unmaps the memory at once, or after the last kernel that uses it; idempotent."""
        with self._lock:
            idle = not self._dropped and not self._users
            self._dropped = True
        if idle:
            self._unmap()

    def _unmap(self) -> None:
        with contextlib.suppress(DeviceError):  # a lost device no longer has mappings
            self._mapping.close()


class RunSteps(NamedTuple):
    """The places of a transfer slice's runs in the pages of planes of the same strides and sizes.

    Attributes:
        planes: The planes, to index `SegmentPair.bases` with.
        nbytes: Bytes of a run.
        rows: Runs that follow one another at the distance of a row in each page; 1 if a run has all rows of the page.
        local, remote: The distances of pages of one run on both sides: a page is divided into `rows` such pages.
        local_heads, remote_heads: Offsets of the first heads of the runs of one row, int64; None if there is one run,
            at the beginning of the row.
    """

    planes: list[int] | slice
    nbytes: int
    rows: int
    local: PageSteps
    remote: PageSteps
    local_heads: Numbers | None = None
    remote_heads: Numbers | None = None


class SegmentPair:
    """One segment in the local pool and in a peer's pool, which may hold different layers and heads of it.

    Attributes:
        local, remote: Addresses in the local pool and in the peer's pool, in the pair's transfer pages.
        joined: The pair with K and V as one plane, where they are adjacent on both sides; else this object.
    """

    def __init__(
        self,
        local: SegmentAddresses,
        remote: SegmentAddresses,
        mapping: MappedMemory | None = None,
        join: bool = True,
    ) -> None:
        """Computes the address arrays.

        Args:
            mapping: The mapping of the peer's memory, or None.
            join: Whether to join K and V if they are adjacent.

        Raises:
            DeviceError: a page of the peer lies outside the mapped memory.
        """
        self.local = local
        self.remote = remote
        planes = local.shard.segment.planes
        by_strides: dict[object, list[int]] = {}
        for number, (_, rows, head_bytes) in enumerate(planes):
            key = rows, head_bytes, local.strides[number], remote.strides[number]
            by_strides.setdefault(key, []).append(number)
        self._alike = list(by_strides.values())
        joined = join_planes(local, remote) if join else None
        self.joined: SegmentPair = self if joined is None else SegmentPair(*joined, join=False)
        self._runs: dict[int, tuple[PlaneRuns, ...]] = {}
        self._run_steps: dict[tuple[int, int, int], list[RunSteps]] = {}
        self._local = np.array(local.bases, np.int64).reshape(-1, len(planes))
        self._remote = np.array(remote.bases, np.int64).reshape(-1, len(planes))
        self._mapped = None if mapping is None else self._translated(mapping)

    def runs(self, heads: int) -> tuple[PlaneRuns, ...]:
        """Returns the runs of parts of `heads` heads for each plane, with K and V joined; cached."""
        if heads not in self._runs:
            runs = segment_runs(self.local, self.remote, heads)
            if self.joined is not self:  # in staging, K and V are apart
                gather_bytes = min(plane.gather_bytes for plane in runs[:2])
                scatter_bytes = min(plane.scatter_bytes for plane in runs[:2])
                both, *others = self.joined.runs(heads)
                runs = (both._replace(gather_bytes=gather_bytes, scatter_bytes=scatter_bytes), *others)
            self._runs[heads] = runs
        return self._runs[heads]

    def descriptors(self, share: TransferSlice, src_pages: Pages, dst_pages: Pages, lo: int, hi: int) -> RunDescriptors:
        """Returns the descriptors of a part: one for each run of bytes that is contiguous on both sides.

        Their number follows from the pages of the part and not from those of the pools.

        Raises:
            MemoryLayoutError: as for `check_layers`.
        """
        local_bases, remote_bases = self.bases(lo, hi)
        key = share.src_head, share.dst_head, share.heads
        if key not in self._run_steps:
            self._run_steps[key] = self._steps_of_runs(*key)
        each = []
        for planes, nbytes, rows, local, remote, local_heads, remote_heads in self._run_steps[key]:
            here, there = local_bases[:, planes], remote_bases[:, planes]
            if local_heads is not None and remote_heads is not None:
                here, there = here[..., None] + local_heads, there[..., None] + remote_heads
            blocks = here.reshape(-1), there.reshape(-1)
            if rows == 1:
                each.append(run_descriptors(src_pages, dst_pages, local, remote, nbytes, *blocks))
            else:
                # In the order of memory: with one row of all pages before the next row, UCX took 12 % more time.
                order = np.argsort(src_pages, kind="stable")
                src, dst = _divided(src_pages[order], rows), _divided(dst_pages[order], rows)
                each.append(run_descriptors(src, dst, local, remote, nbytes, *blocks))
        return each[0] if len(each) == 1 else RunDescriptors(*map(np.concatenate, zip(*each, strict=True)))

    def _steps_of_runs(self, src_head: int, dst_head: int, heads: int) -> list[RunSteps]:
        runs, found = self.runs(heads), []
        for alike in self._alike:
            plane = alike[0]
            run, rows = runs[plane], self.local.shard.segment.planes[plane].rows // runs[plane].rows
            local, remote = self.local.page_steps(plane), self.remote.page_steps(plane)
            ours, theirs = self.local.strides[plane], self.remote.strides[plane]
            if rows > 1:  # then a run has one row
                local = PageSteps(local.page, local.split * rows, ours.row)
                remote = PageSteps(remote.page, remote.split * rows, theirs.row)
            planes = alike if len(self._alike) > 1 else slice(None)
            steps = RunSteps(planes, run.page_bytes // run.per_page, rows, local, remote)
            if heads > run.heads or src_head or dst_head:
                first = np.arange(0, heads, run.heads, dtype=np.int64)
                steps = steps._replace(
                    local_heads=(first + src_head) * ours.head, remote_heads=(first + dst_head) * theirs.head
                )
            found.append(steps)
        return found

    @property
    def common_layers(self) -> tuple[int, int]:
        """The layers [lo, hi) that both sides hold; empty if lo >= hi."""
        local, remote = self.local.shard, self.remote.shard
        return max(local.layer_lo, remote.layer_lo), min(local.layer_hi, remote.layer_hi)

    def bases(self, lo: int, hi: int) -> tuple[Numbers, Numbers]:
        """Returns the local and the peer's addresses of page 0 in layers [lo, hi), each int64 `[hi - lo, planes]`.

        Raises:
            MemoryLayoutError: as for `check_layers`.
        """
        self.check_layers(lo, hi)
        local, remote = self.local.shard.layer_lo, self.remote.shard.layer_lo
        return self._local[lo - local : hi - local], self._remote[lo - remote : hi - remote]

    def mapped_bases(self, lo: int, hi: int) -> Numbers:
        """Returns the peer's addresses of page 0 as mapped here, int64 `[hi - lo, planes]`; requires a mapping."""
        assert self._mapped is not None
        first = self.remote.shard.layer_lo
        return self._mapped[lo - first : hi - first]

    def check_layers(self, lo: int, hi: int) -> None:
        """Raises MemoryLayoutError unless both sides hold layers [lo, hi)."""
        for shard in (self.local.shard, self.remote.shard):
            if not shard.layer_lo <= lo < hi <= shard.layer_hi:
                raise MemoryLayoutError(
                    f"{shard.segment.name}: layers {layer_range(lo, hi)} are not all on a rank that has "
                    f"{layer_range(shard.layer_lo, shard.layer_hi)}"
                )

    def _translated(self, mapping: MappedMemory) -> Numbers:
        if not self._remote.size:
            return self._remote
        planes = range(self._remote.shape[1])
        return mapping.translate_all(self._remote, np.array([self.remote.extent(plane) for plane in planes], np.int64))


def _divided(pages: Pages, rows: int) -> Numbers:
    """Returns the numbers of all rows of pages, if each of `rows` rows of a page is a page."""
    return (pages.astype(np.int64)[:, None] * rows + np.arange(rows)).reshape(-1)


class PeerConnection:
    """A connection to one peer, with the addresses and caches that paths need to write to it.

    Attributes:
        peer: Name under which the transport knows the peer.
        transport: The transport.
        pool: The local pool, which is the source.
        local, remote: Addresses of the local pool, and of the peer's pool, which is the destination, in the pair's
            transfer pages.
        ring_base: Address of the peer's staging ring; 0 if it has none.
        segments: The addresses of each segment on both sides, in the model's order.
        mapping: Mapping of the peer's memory for path direct; None if there is none.
        why_not: Why there is no mapping, as text; "" if there is one.
        wire_times_ns: Time from the post to the end of the latest parts.
        routes: Routes of path direct by (segment, first source head, first destination head, heads), created on first
            use.
    """

    def __init__(
        self,
        peer: str,
        transport: Transport,
        pool: KVPool,
        remote: PoolAddresses,
        ring_base: int,
        mapping: MappedMemory | None = None,
        why_not: str = "",
        split: int = 1,
    ) -> None:
        """Pairs the segments of the local pool with those of the peer's pool.

        Args:
            remote: In transfer pages.
            split: Transfer pages in a page of the local pool.

        Raises:
            DeviceError: `mapping` does not cover the peer's pages.
        """
        self.peer = peer
        self.transport = transport
        self.pool = pool
        self.local = pool.addresses(split)
        self.remote = remote
        self.ring_base = ring_base
        pairs = zip(self.local.segments, remote.segments, strict=True)
        self.segments = tuple(SegmentPair(here, there, mapping) for here, there in pairs)
        self.mapping = mapping
        self.why_not = why_not
        self.wire_times_ns: deque[int] = deque(maxlen=_KEPT_TIMES)
        self.routes: dict[tuple[int, int, int, int], tuple[Route, ...]] = {}

    @property
    def usual_wire_ns(self) -> int | None:
        """Median of `wire_times_ns`; None of too few. For any thread."""
        times = sorted(self.wire_times_ns.copy())
        return times[len(times) // 2] if len(times) >= _LEAST_TIMES else None

    def close(self) -> None:
        """Rejects new parts on path direct, and unmaps the peer's memory after the last kernel that uses it."""
        if self.mapping is not None:
            self.mapping.close()
