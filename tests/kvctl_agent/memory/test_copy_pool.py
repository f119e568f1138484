from __future__ import annotations

import ctypes
import itertools
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.errors import LocalProtocolError, MemoryLayoutError
from kvctl_agent.layout.shape import Plane
from kvctl_agent.memory import host_copier
from kvctl_agent.memory.allocations import Bytes
from kvctl_agent.memory.copier import LandedPart, PendingCopy
from kvctl_agent.memory.host_copier import CopyPool, HostCopier
from kvctl_agent.memory.part_layout import PartLayout, Piece, Span
from kvctl_agent.memory.region import MemorySpan
from kvctl_agent.memory.segment import RowIndex
from kvctl_agent.native.row_copies import HeadSlice, Pool
from tests.support import numpy_copier
from tests.support.numpy_copier import NumpyCopier
from tests.support.pools import PLANES, filled


@settings(deadline=None)
@given(st.integers(1, 200), st.sampled_from([1, 48, 64, 100, 256, 512, 8192]), st.integers(0, 63), st.randoms())
def test_rows_are_copied_as_by_numpy(count: int, row_bytes: int, offset: int, random: Random) -> None:
    """Rows at any address: only those of whole cache lines are stored past the caches."""
    content = np.random.default_rng(random.randrange(1 << 32)).integers(1, 256, 300 * row_bytes + 64, dtype=np.uint8)
    order = np.array(random.sample(range(300), count), np.int64)
    for gather in (True, False):
        results = []
        for copy in (host_copier.copy_rows, numpy_copier.copy_rows):
            rows, piece = content.copy()[offset:], content[::-1].copy()
            copy(gather, rows, row_bytes, order, piece)
            results.append((rows, piece))
        (rows, piece), (expected_rows, expected_piece) = results
        assert np.array_equal(rows, expected_rows)
        assert np.array_equal(piece, expected_piece)


@pytest.fixture
def wake_fd() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield fd
    os.close(fd)


def finish(copy: PendingCopy) -> int:
    """Returns the number of calls of `done` until the copy has ended."""
    deadline = time.monotonic() + 60
    calls = 1
    while not copy.done():
        assert time.monotonic() < deadline
        time.sleep(0)
        calls += 1
    return calls


def spans_of(pieces: tuple[Piece, ...], region: Bytes) -> list[MemorySpan]:
    return [MemorySpan(0, piece.nbytes, region[piece.offset :]) for piece in pieces]


def whole(array: Bytes) -> MemorySpan:
    return MemorySpan(0, array.nbytes, array)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_it_copies_what_numpy_copies(data: st.DataObject) -> None:
    planes = data.draw(st.sampled_from(list(PLANES.values())))
    total = data.draw(st.integers(1, 6))
    head = data.draw(st.integers(0, total - 1))
    heads = data.draw(st.integers(1, total - head))
    unique = data.draw(st.booleans())
    pages = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=unique))
    layers = range(5, 5 + data.draw(st.integers(1, 3)))
    piece_bytes = data.draw(st.integers(1, 4000))
    threads = data.draw(st.sampled_from([0, 1, 3]))
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    pool = CopyPool(threads, fd).start()
    native, numpy = HostCopier(pool), NumpyCopier()
    try:
        with filled(layers, 12, total, planes) as memory:
            part = memory.part_layout(layers.start, layers.stop, len(pages), heads)
            rows = RowIndex(memory, pages, head, heads)
            regions = [np.zeros(part.region_bytes, np.uint8) for _ in range(2)]
            for copier, region in zip((native, numpy), regions, strict=True):
                pieces = part.pieces(piece_bytes)
                finish(copier.gather(rows, pieces, spans_of(pieces, region)))
            assert np.array_equal(*regions)
            if not unique:
                return
            landed = np.random.default_rng(3).integers(0, 256, part.region_bytes, dtype=np.uint8)
            results = []
            before = [block.array().copy() for layer in memory.blocks for block in layer]
            for copier in (native, numpy):
                for block, old in zip((block for layer in memory.blocks for block in layer), before, strict=True):
                    block.array()[:] = old
                finish(copier.scatter([LandedPart(rows, part, whole(landed))]))
                results.append([block.array().tobytes() for layer in memory.blocks for block in layer])
            assert results[0] == results[1]
    finally:
        pool.close()
        os.close(fd)


LARGE = (Plane("k", 16, 256), Plane("v", 16, 256))


class TestPool:
    def test_threads_copy_while_this_one_waits_for_the_descriptor(self, wake_fd: int) -> None:
        with filled(range(4), 200, 8, LARGE) as memory:
            pool = CopyPool(3, wake_fd).start()
            copier = HostCopier(pool)
            pages = np.random.default_rng(0).permutation(200)
            part = memory.part_layout(0, 4, 200, 2)
            pieces = part.pieces(1 << 19)
            region = np.zeros(part.region_bytes, np.uint8)
            copy = copier.gather(RowIndex(memory, pages, 3, 2), pieces, spans_of(pieces, region))
            assert select.select([wake_fd], [], [], 60)[0] == [wake_fd]
            assert copy.done()
            assert os.eventfd_read(wake_fd) == 1, "once a copy, not once a piece"
            wanted = np.zeros_like(region)
            finish(NumpyCopier().gather(RowIndex(memory, pages, 3, 2), pieces, spans_of(pieces, wanted)))
            assert np.array_equal(region, wanted)
            pool.close()

    def test_few_bytes_are_copied_at_once_and_wake_nobody(self, wake_fd: int) -> None:
        with filled(range(2), 8, 2, LARGE) as memory:
            pool = CopyPool(2, wake_fd).start()
            part = memory.part_layout(0, 2, 2, 2)
            pieces = part.pieces(1)
            region = np.zeros(part.region_bytes, np.uint8)
            copy = HostCopier(pool).gather(RowIndex(memory, [5, 1], 0, 2), pieces, spans_of(pieces, region))
            assert copy.done()
            assert select.select([wake_fd], [], [], 0)[0] == []
            pool.close()

    def test_without_threads_a_large_copy_advances_in_the_calls_of_done(self, wake_fd: int, at_best: Any) -> None:
        with filled(range(4), 200, 8, LARGE) as memory:
            pool = CopyPool(0, wake_fd).start()
            part = memory.part_layout(0, 4, 200, 8)
            pieces = part.pieces(1 << 18)
            region = np.zeros(part.region_bytes, np.uint8)
            rows = RowIndex(memory, range(200), 0, 8)

            def calls() -> int:
                copy = HostCopier(pool).gather(rows, pieces, spans_of(pieces, region))
                assert not copy.done(), "it is not all copied in the first call"
                return 1 + finish(copy)

            copy = HostCopier(pool).gather(rows, pieces, spans_of(pieces, region))
            assert not region.any(), "nothing yet"
            finish(copy)
            at_best(calls, len(pieces) / 2)  # one piece a call would take less time than a turn of the loop
            assert select.select([wake_fd], [], [], 0)[0] == []
            pool.close()

    def test_more_pieces_are_begun_at_once_where_their_end_is_noticed_late(self, wake_fd: int) -> None:
        with filled(range(4), 200, 8, LARGE) as memory:
            pool = CopyPool(2, wake_fd).start()
            copier = HostCopier(pool)
            assert copier.pieces_at_once == 2
            part = memory.part_layout(0, 4, 200, 8)
            pieces = part.pieces(1 << 18)
            region = np.zeros(part.region_bytes, np.uint8)
            copy = copier.gather(RowIndex(memory, range(200), 0, 8), pieces, spans_of(pieces, region))
            assert select.select([wake_fd], [], [], 60)[0]
            time.sleep(0.05)  # the loop was busy
            assert copy.done()
            assert copier.pieces_at_once > 8
            pool.close()

    def test_a_copy_that_nobody_waits_for_is_over_when_it_is_dropped(self, wake_fd: int) -> None:
        with filled(range(4), 200, 8, LARGE) as memory:
            pool = CopyPool(2, wake_fd).start()
            part = memory.part_layout(0, 4, 200, 8)
            pieces = part.pieces(1 << 16)
            rows = RowIndex(memory, range(200), 0, 8)
            regions = []
            for _ in range(50):
                regions.append(np.zeros(part.region_bytes, np.uint8))
                copy = HostCopier(pool).gather(rows, pieces, spans_of(pieces, regions[-1]))
                del copy
                regions[-1][:] = 0
            pool.close()
            assert not any(region.any() for region in regions)

    def test_closing_finishes_what_has_begun_and_leaves_no_thread(self, wake_fd: int) -> None:
        tasks = Path("/proc/self/task")
        before = set(tasks.iterdir())
        with filled(range(4), 200, 8, LARGE) as memory:
            pool = CopyPool(4, wake_fd).start()
            made = set(tasks.iterdir()) - before
            assert len(made) == 4
            part = memory.part_layout(0, 4, 200, 8)
            pieces = part.pieces(1 << 17)
            region = np.zeros(part.region_bytes, np.uint8)
            rows = RowIndex(memory, range(200), 0, 8)
            copier = HostCopier(pool)
            copies = [copier.gather(rows, pieces, spans_of(pieces, region)) for _ in range(5)]
            pool.close()
            pool.close()
            assert all(copy.done() for copy in copies)
            with pytest.raises(LocalProtocolError, match="closed"):
                copier.gather(rows, pieces, spans_of(pieces, region))
        deadline = time.monotonic() + 60
        while any(task.exists() for task in made):  # for a moment the kernel lists a thread that has been joined
            assert time.monotonic() < deadline, "a thread was left"

    def test_many_copies_from_many_threads_of_the_pool_and_this_one(self, wake_fd: int) -> None:
        """A test for sanitizers, and for crashes."""
        with filled(range(4), 200, 8, LARGE) as memory:
            pool = CopyPool(4, wake_fd).start()
            copier = HostCopier(pool)
            part = memory.part_layout(0, 4, 200, 2)
            pieces = part.pieces(1 << 17)
            rows = [RowIndex(memory, np.random.default_rng(seed).permutation(200), 0, 2) for seed in range(4)]
            wanted = []
            for each in rows:
                region = np.zeros(part.region_bytes, np.uint8)
                finish(NumpyCopier().gather(each, pieces, spans_of(pieces, region)))
                wanted.append(region)
            stop = time.monotonic() + 1
            while time.monotonic() < stop:
                regions = [np.zeros(part.region_bytes, np.uint8) for _ in rows]
                copies = [
                    copier.gather(each, pieces, spans_of(pieces, region))
                    for each, region in zip(rows, regions, strict=True)
                ]
                for copy in copies:
                    finish(copy)
                assert all(map(np.array_equal, regions, wanted))
            pool.close()

    def test_copies_of_fewer_pieces_than_threads_wake_threads_enough(self, wake_fd: int) -> None:
        """Without a thread that looks, a copy would not end: only threads copy more than 256 KiB."""
        with filled(range(1), 64, 8, LARGE) as memory:
            pool = CopyPool(4, wake_fd).start()
            copier = HostCopier(pool)
            part = memory.part_layout(0, 1, 64, 2)
            rows = RowIndex(memory, np.random.default_rng(0).permutation(64), 0, 2)
            by_count = [part.pieces(-(-part.region_bytes // count)) for count in (1, 2, 3)]
            wanted = np.zeros(part.region_bytes, np.uint8)
            finish(NumpyCopier().gather(rows, by_count[0], spans_of(by_count[0], wanted)))
            for wave in range(300):
                regions = [np.zeros(part.region_bytes, np.uint8) for _ in range(1 + wave % 5)]
                copies = [
                    copier.gather(rows, pieces, spans_of(pieces, region))
                    for region, pieces in zip(regions, itertools.cycle(by_count), strict=False)
                ]
                for copy in copies:
                    finish(copy)
                assert all(np.array_equal(region, wanted) for region in regions)
                if wave % 3 == 0:
                    time.sleep(1e-3)  # all threads sleep
            pool.close()

    def test_a_considerate_pool_leaves_copies_to_the_caller_while_others_compute(
        self, wake_fd: int, at_best: Callable[[Callable[[], float], float], None]
    ) -> None:
        before = set(Path("/proc/self/task").iterdir())
        computing, stopped = threading.Event(), threading.Event()

        def engine() -> None:
            while not stopped.is_set():
                computing.wait()
                sum(range(10_000))

        with filled(range(4), 800, 8, LARGE) as memory:
            pool = CopyPool(2, wake_fd, considerate=True).start()
            made = set(Path("/proc/self/task").iterdir()) - before
            other = threading.Thread(target=engine)
            other.start()
            copier = HostCopier(pool)
            part = memory.part_layout(0, 4, 800, 8)
            pieces = part.pieces(1 << 18)
            rows = RowIndex(memory, range(800), 0, 8)
            region = np.zeros(part.region_bytes, np.uint8)

            def used_ns() -> int:
                return sum(int((task / "schedstat").read_text().split()[0]) for task in made)

            def by_threads() -> float:
                """Returns the share of the CPU time of some copies that the pool's threads used."""
                threads_ns, own_ns, until = used_ns(), time.thread_time_ns(), time.monotonic() + 0.3
                while time.monotonic() < until:
                    copy = copier.gather(rows, pieces, spans_of(pieces, region))
                    while not copy.done():
                        if select.select([wake_fd], [], [], 0.01)[0]:
                            os.eventfd_read(wake_fd)
                threads_ns, own_ns = used_ns() - threads_ns, time.thread_time_ns() - own_ns
                return threads_ns / (threads_ns + own_ns)

            try:
                at_best(lambda: 1 - by_threads(), 0.2)
                computing.set()
                at_best(by_threads, 0.2)
                computing.clear()
                at_best(lambda: 1 - by_threads(), 0.2)
            finally:
                stopped.set()
                computing.set()
                other.join()
                pool.close()

    def test_signals_reach_the_threads_of_python(self, wake_fd: int) -> None:
        pool = CopyPool(2, wake_fd).start()
        ours = {thread.native_id for thread in threading.enumerate()}
        for task in Path("/proc/self/task").iterdir():
            status = (task / "status").read_text()
            blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)
            if int(task.name) not in ours and "python" in status.splitlines()[0] and blocked:
                break
        else:
            pytest.fail("no thread has its signals blocked")
        pool.close()


class TestRefusals:
    def test_pages_that_were_changed_after_the_check(self, wake_fd: int) -> None:
        with filled(range(2), 200, 8, LARGE) as memory:
            for threads in (0, 2):
                pool = CopyPool(threads, wake_fd).start()
                pages = np.arange(200)
                rows = RowIndex(memory, pages, 0, 8)
                pages[150] = 200
                part = memory.part_layout(0, 2, 200, 8)
                pieces = part.pieces()
                copy = HostCopier(pool).gather(rows, pieces, spans_of(pieces, np.zeros(part.region_bytes, np.uint8)))
                with pytest.raises(MemoryLayoutError, match="the page list was modified"):
                    finish(copy)
                pool.close()

    def test_spans_outside_the_part_or_the_rank_and_staging_that_is_too_small(self, wake_fd: int) -> None:
        with filled(range(2), 8, 2, LARGE) as memory:
            pool = CopyPool(0, wake_fd)
            copier = HostCopier(pool)
            rows = RowIndex(memory, [1, 5], 0, 2)
            out = np.zeros(1 << 20, np.uint8)
            for span in (Span(2, 0, 0, 1), Span(0, 2, 0, 1), Span(0, 0, 0, 3), Span(0, 0, 1, 1), Span(-1, 0, 0, 1)):
                with pytest.raises(MemoryLayoutError, match="lies outside the 2 layers of this rank or the 2 pages"):
                    copier.gather(rows, [Piece(0, 1, (span,))], [whole(out)])
            piece = PartLayout(0, 1, 2, (16 * 512, 16 * 512)).pieces()[0]
            with pytest.raises(
                MemoryLayoutError, match="staging memory of 100 bytes is too small for a piece of 32768"
            ):
                copier.gather(rows, [piece], [whole(out[:100])])
            with pytest.raises(MemoryLayoutError, match="on a device"):
                copier.gather(rows, [piece], [MemorySpan(1 << 40, 1 << 20, None)])
            pool.close()


PLANE = (1, 1, 4096, 4096, 4096, 4096, 1)
ROWS = np.zeros(256 * 4096, np.uint8)
LARGEST = 2**63 - 1


def job(pages: Any, spans: Any = None, staged: Any = None, plane: Any = PLANE) -> Any:
    """A job that copies pages of 4 KiB, of which there are 256."""
    pages = np.array(pages, np.int64) if isinstance(pages, list) else pages
    where = HeadSlice([ROWS.ctypes.data], [plane], 256)
    spans = (Span(0, 0, 0, len(pages)),) if spans is None else spans
    return where, pages, spans, np.zeros(1 << 20, np.uint8) if staged is None else staged


class Chain:
    """An owner whose `then` is a Python function of (piece, thread); it must outlive the copy."""

    class Then(ctypes.Structure):
        _fields_ = (
            ("run", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)),
            ("self", ctypes.c_void_p),
        )

    def __init__(self, run: Callable[[int, int], None], on_read: Callable[[], None] = lambda: None) -> None:
        self._then = self.Then(self.Then._fields_[0][1](lambda _, number, thread: run(number, thread)), None)
        self._on_read = on_read

    @property
    def then(self) -> object:
        self._on_read()
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self._then), b"kvctl_agent.then", None)


class TestNumbersAndLifetimes:
    @pytest.mark.parametrize("pages", [[LARGEST], [-LARGEST - 1], [256], [255, 256], [254, 255, LARGEST], [0, LARGEST]])
    @pytest.mark.parametrize("gather", [True, False])
    def test_pages_at_the_limits(self, pages: list[int], gather: bool, wake_fd: int) -> None:
        copy = CopyPool(0, wake_fd).begin(gather, [job(pages)])
        with pytest.raises(MemoryLayoutError, match="a page lies outside the pool"):
            finish(copy)

    @pytest.mark.parametrize(
        "plane",
        [
            (1 << 32, 1, 1 << 32, 0, 1 << 32, 1, 1),
            (1, 1 << 32, 1 << 32, 0, 1, 0, 1),
            (1, 1, 1 << 62, 1 << 62, 1 << 62, 1 << 62, 1),
            (1, 1, 1, 1 << 56, 1, 1, 1),
            (1 << 32, 1, 1, 1, 1 << 32, 1, 1),
            (1, 2, 1, 1, 1, LARGEST, 1),
            (2, 1, 1, 1, 1, 1, LARGEST),
            (1, 1, LARGEST, 0, 0, 0, 1),
            (1, 1, 1, -1, 1, 1, 1),
        ],
    )
    def test_a_plane_that_ends_outside_the_address_space(self, plane: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"outside the address space|not negative"):
            job([0], plane=plane)

    def test_a_piece_whose_bytes_cannot_be_counted(self, wake_fd: int) -> None:
        spans = (Span(0, 0, 0, 256),) * (1 << 15)
        with pytest.raises(MemoryLayoutError, match="more bytes than can be counted"):
            CopyPool(0, wake_fd).begin(True, [job([0] * 256, spans, plane=(1, 1, 1 << 40, 0, 0, 0, 1))])

    def test_arrays_that_are_not_aligned(self, wake_fd: int) -> None:
        with pytest.raises(TypeError, match="aligned and in one dimension"):
            CopyPool(0, wake_fd).begin(True, [job(np.frombuffer(bytes(17), np.int64, offset=1))])

    def test_staging_memory_is_not_resized_before_the_copy_is_dropped(self, wake_fd: int) -> None:
        staged = bytearray(4096)
        copy = CopyPool(0, wake_fd).begin(True, [job([0], staged=staged)])
        with pytest.raises(BufferError):
            staged.extend(bytes(1 << 20))
        finish(copy)
        del copy
        staged.extend(bytes(1 << 20))

    def test_a_list_of_jobs_that_is_modified_while_it_is_read(self, wake_fd: int) -> None:
        jobs, posted = [job([0, 1]), job([1])], list[int]()
        chain = Chain(lambda number, _: posted.append(number), jobs.clear)
        finish(CopyPool(0, wake_fd).begin(True, jobs, chain))
        assert (posted, jobs) == ([0, 1], [])

    def test_a_pool_that_is_closed_while_a_copy_begins(self, wake_fd: int) -> None:
        pool = CopyPool(2, wake_fd).start()
        with pytest.raises(LocalProtocolError, match="closed"):
            pool.begin(True, [job([0] * 256)] * 3, Chain(lambda *_: None, pool.close))
        with pytest.raises(LocalProtocolError, match="closed"):
            pool.run(1, Chain(lambda *_: None))

    def test_done_of_several_threads_copies_each_piece_once(self, wake_fd: int) -> None:
        pool, posted = CopyPool(0, wake_fd), list[int]()
        chain = Chain(lambda number, _: posted.append(number))
        copy = pool.begin(True, [job(list(range(256)))] * 50, chain)
        threads = [threading.Thread(target=finish, args=(copy,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert posted == list(range(50))

    def test_pools_that_several_threads_close_while_copies_run(self, wake_fd: int) -> None:
        for _ in range(30):
            pool, big = CopyPool(3, wake_fd).start(), job(list(range(256)))
            copies = [pool.begin(True, [big] * 3) for _ in range(5)]
            threads = [threading.Thread(target=pool.close, daemon=True) for _ in range(3)]
            for thread in threads:
                thread.start()
            del copies[::2]
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), "close does not end"
            assert all(copy.done() for copy in copies)

    def test_objects_that_are_not_initialised_or_initialised_twice(self, wake_fd: int) -> None:
        kept = os.fstat(0)
        new: Any = Pool.__new__(Pool)
        new.close()
        assert (new.has_threads, new.pieces_at_once) == (False, 1)
        calls: Any = (("start", ()), ("begin", (True, [job([0])])), ("run", (1, Chain(lambda *_: None))))
        for name, args in calls:
            with pytest.raises(RuntimeError, match="closed"):
                getattr(new, name)(*args)
        del new
        assert os.path.samestat(os.fstat(0), kept), "descriptor 0 was closed"
        where, *rest = job([0])
        empty: Any = HeadSlice.__new__(type(where))
        pool = CopyPool(0, wake_fd)
        with pytest.raises(MemoryLayoutError, match="outside the 0 layers"):
            pool.begin(True, [(empty, *rest)])
        with pytest.raises(ValueError, match="address space"):
            empty.__init__([0], [PLANE], 256)
        empty.__init__([4096], [PLANE], 256)
        initialised: Any = pool._pool
        with pytest.raises(ValueError, match="initialised before"):
            empty.__init__([4096], [PLANE], 256)
        with pytest.raises(ValueError, match="of a new pool"):
            initialised.__init__(1, wake_fd, ValueError, False)
        with pytest.raises(TypeError):
            object.__new__(type(pool.begin(True, [job([0])])))

    def test_a_forked_child_waits_for_no_thread_of_its_parent(self) -> None:
        done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=250)
        assert (done.returncode, done.stdout, done.stderr) == (0, "{}\n", "")


FORK = """
import gc, os, signal, sys, warnings
import numpy as np
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.memory.host_copier import CopyPool
from kvctl_agent.native.row_copies import HeadSlice
from kvctl_agent.memory.part_layout import Span

warnings.simplefilter("ignore")  # of later Pythons, about threads
pool = CopyPool(2, os.eventfd(0)).start()
pages = 4096
rows, staged = np.zeros(pages * 4096, np.uint8), np.zeros(pages * 4096, np.uint8)
where = HeadSlice([rows.ctypes.data], [(1, 1, 4096, 4096, 4096, 4096, 1)], pages)
jobs = [(where, np.arange(pages)[::-1].copy(), (Span(0, 0, 0, pages),), staged)] * 500

def refused(call, error):
    try:
        call()
    except error:
        return
    raise AssertionError("not refused")

def done(copy):
    refused(copy.done, RuntimeError)

def begin(pool):
    assert not pool.has_threads
    refused(lambda: pool.begin(True, jobs), LocalProtocolError)

failed = {}
for what in ("del copy", "del pool", "pool.close()", "del copy, pool", "done(copy)", "begin(pool)", "pass"):
    copy = pool.begin(True, jobs)
    child = os.fork()
    if not child:
        signal.alarm(20)
        exec(what)
        gc.collect()
        sys.exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        failed[what] = code
print(failed)
del copy
pool.close()
"""
