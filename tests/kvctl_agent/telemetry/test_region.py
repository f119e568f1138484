"""What readers of a region see between stores, of a writer that has ended in the middle, and of hostile content."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.errors import RegionError
from kvctl_agent.telemetry import region as regions
from kvctl_agent.telemetry.region import (
    DOCUMENT_BYTES,
    FIRST_COUNTER,
    HEADER_BYTES,
    LEAST_LOG_BYTES,
    MOST_RECORD_BYTES,
    SEGMENT_BYTES,
    Cell,
    Document,
    Header,
    LogPiece,
    MemoryReader,
    RegionReader,
    RegionWriter,
    fitting_log_bytes,
    log_offset,
)

HEADER = Header.of_this_process("prefill", "prefill-0", "/run/kvctl", incarnation=7, log_bytes=LEAST_LOG_BYTES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prefill-0.region"


@pytest.fixture
def writer(path: Path) -> Iterator[RegionWriter]:
    writer = RegionWriter(HEADER, path)
    yield writer
    writer.close()


@pytest.fixture
def reader(writer: RegionWriter, path: Path) -> Iterator[RegionReader]:
    reader = RegionReader(path)
    yield reader
    reader.close()


PATTERN = bytes(range(251)) * (MOST_RECORD_BYTES // 251 + 3)


def numbered(number: int, size: int = 64) -> bytes:
    """A record that has its number, and content that follows from it."""
    begin = number % 251
    return struct.pack("<I", number) + PATTERN[begin : begin + size - 4]


def number_of(record: bytes) -> int:
    (number,) = struct.unpack_from("<I", record)
    assert record == numbered(number, len(record))
    return int(number)


class TestFile:
    def test_a_reader_finds_the_header(self, reader: RegionReader) -> None:
        assert reader.header == HEADER
        assert (reader.header.pid, reader.header.name) == (os.getpid(), "prefill-0")
        assert reader.header.started > 0
        assert reader.header.pid_namespace > 0

    def test_only_its_user_may_use_it(self, writer: RegionWriter, path: Path) -> None:
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o640)
        with pytest.raises(RegionError, match="only this user"):
            RegionReader(path)

    def test_its_memory_is_reserved(self, writer: RegionWriter, path: Path) -> None:
        assert path.stat().st_blocks * 512 >= writer.header.size == path.stat().st_size

    def test_a_full_file_system(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(RegionError, match=r"no room for the region .* No space left"):
            RegionWriter(HEADER, path)
        assert not path.exists()

    def test_one_writer_has_it(self, writer: RegionWriter, path: Path) -> None:
        with pytest.raises(RegionError, match="File exists"):
            RegionWriter(HEADER, path)
        assert path.exists()

    def test_a_link_is_not_followed(self, writer: RegionWriter, path: Path) -> None:
        link = path.with_name("link")
        link.symlink_to(path)
        with pytest.raises(RegionError, match="cannot open"):
            RegionReader(link)

    def test_a_fifo_is_refused_at_once(self, path: Path) -> None:
        os.mkfifo(path, 0o600)
        with pytest.raises(RegionError):
            RegionReader(path)

    @pytest.mark.parametrize(
        ("at", "value", "text"),
        [
            (0, b"KVREGIOM", "no region"),
            (8, b"\1\0\0\0", "version 1, this kvctl reads version 2"),
            (16, b"\1", "damaged"),  # of the log: no multiple of a segment
            (16, (1 << 40).to_bytes(8, "little"), "damaged"),
            (72, b"\xff\xff", "damaged"),  # of a name
        ],
    )
    def test_a_header_that_is_none(self, writer: RegionWriter, path: Path, at: int, value: bytes, text: str) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(value)
        with pytest.raises(RegionError, match=text):
            RegionReader(path)

    def test_a_file_that_is_cut_short(self, writer: RegionWriter, path: Path) -> None:
        whole = path.read_bytes()
        short = path.with_name("short.region")
        short.touch(0o600)
        for size in (0, 100, HEADER_BYTES, len(whole) - 1):
            short.write_bytes(whole[:size])
            with pytest.raises(RegionError):
                RegionReader(short)

    def test_a_file_that_shrinks_costs_the_reader_an_error(self, writer: RegionWriter, path: Path) -> None:
        copy = path.with_name("copy.region")
        copy.touch(0o600)
        copy.write_bytes(path.read_bytes())
        reader = RegionReader(copy)
        os.truncate(copy, HEADER_BYTES)
        with pytest.raises(RegionError, match="cut short"):
            reader.records()
        reader.close()

    def test_names_too_long_for_the_header(self) -> None:
        with pytest.raises(RegionError, match="too long"):
            RegionWriter(HEADER._replace(directory="d" * HEADER_BYTES))


class TestCells:
    def test_cells_and_counters_are_read(self, writer: RegionWriter, reader: RegionReader) -> None:
        writer.cells[Cell.TURN_NS] = 2**62
        writer.counters[0], writer.counters[2] = 2.5, 1e300
        cells = reader.cells()
        assert (cells[Cell.TURN_NS], len(cells)) == (2**62, FIRST_COUNTER)
        assert cells[Cell.INTERPRETER_WAIT_NS] == -1, "it is unknown until the agent has measured it"
        assert reader.counters(3) == (2.5, 0.0, 1e300)

    def test_a_request_reaches_the_writer(self, writer: RegionWriter, reader: RegionReader) -> None:
        assert [reader.ask(Cell.WANTED), reader.ask(Cell.WANTED), reader.ask(Cell.REBASE)] == [1, 2, 1]
        assert (writer.cells[Cell.WANTED], writer.cells[Cell.REBASE]) == (2, 1)
        writer.cells[Cell.WANTED] = 2**63 - 1
        assert reader.ask(Cell.WANTED) == 0

    def test_calls_of_the_engine(self, writer: RegionWriter) -> None:
        cells = writer.cells
        writer.note_call(3)
        assert (cells[Cell.CALL], cells[Cell.CALL_THREAD]) == (3, threading.get_ident())
        assert 0 < cells[Cell.CALL_NS] == cells[Cell.CALL_ENDED_NS]
        before_ns = cells[Cell.CALL_NS]
        with writer.call(4):
            assert cells[Cell.CALL] == 4
            assert cells[Cell.CALL_ENDED_NS] < before_ns <= cells[Cell.CALL_NS]
        assert cells[Cell.CALL_NS] <= cells[Cell.CALL_ENDED_NS]

    def test_two_writers_of_one_process_do_not_meet(self, tmp_path: Path) -> None:
        first, second = RegionWriter(HEADER, tmp_path / "a.region"), RegionWriter(HEADER, tmp_path / "b.region")
        first.append(b"first")
        second.append(b"second")
        first.cells[Cell.CALL] = 9
        with_readers = [RegionReader(tmp_path / f"{name}.region") for name in "ab"]
        assert [reader.records().records for reader in with_readers] == [[b"first"], [b"second"]]
        assert second.cells[Cell.CALL] == 0
        for each in (first, second, *with_readers):
            each.close()


class TestDocuments:
    def test_the_latest_is_read(self, writer: RegionWriter, reader: RegionReader) -> None:
        assert reader.document(Document.STATE) is None
        for number in range(1, 5):
            assert writer.publish(Document.STATE, b"%d" % number * number, number * 10)
            assert reader.document(Document.STATE) == (b"%d" % number * number, number * 10, number)
        assert reader.document(Document.CONFIG) is None

    def test_documents_are_apart(self, writer: RegionWriter, reader: RegionReader) -> None:
        for document, size in DOCUMENT_BYTES.items():
            for _ in range(2):
                assert writer.publish(document, bytes([document]) * (size - 16), 1)
        writer.append(b"a record")
        for document, size in DOCUMENT_BYTES.items():
            published = reader.document(document)
            assert published is not None
            assert published.value == bytes([document]) * (size - 16)
        assert reader.records() == ([b"a record"], False)

    def test_one_that_is_too_large_leaves_the_former(self, writer: RegionWriter, reader: RegionReader) -> None:
        assert writer.publish(Document.STATE, b"small", 1)
        assert not writer.publish(Document.STATE, bytes(DOCUMENT_BYTES[Document.STATE]), 2)
        published = reader.document(Document.STATE)
        assert published is not None
        assert published.value == b"small"
        assert writer.cells[Cell.TOO_LARGE] == 1

    def test_a_reader_whose_buffer_is_overwritten_reads_again(self, writer: RegionWriter) -> None:
        class Overtaken(MemoryReader):
            reads = 0

            def _read(self, offset: int, size: int) -> bytes:
                self.reads += 1
                if self.reads == 2:  # between the number and the content
                    writer.publish(Document.STATE, b"two", 2)
                    writer.publish(Document.STATE, b"3-3", 3)
                return super()._read(offset, size)

        writer.publish(Document.STATE, b"one", 1)
        assert Overtaken(writer).document(Document.STATE) == (b"3-3", 3, 3)

    def test_the_value_before_the_last_is_not_taken_for_the_new_one(self, writer: RegionWriter) -> None:
        """On ARM the number of a publication may be visible before its content."""
        for number in range(1, 4):
            writer.publish(Document.STATE, b"%d" % number, number)
        writer.cells[Cell.PUBLISHED + Document.STATE] = 5
        assert MemoryReader(writer).document(Document.STATE) is None


class TestLog:
    def test_records_come_once_and_in_order(self, writer: RegionWriter, reader: RegionReader) -> None:
        assert reader.records() == ([], False)
        for number in range(3):
            writer.append(numbered(number))
        assert [number_of(record) for record in reader.records().records] == [0, 1, 2]
        assert reader.records() == ([], False)
        writer.append(numbered(3))
        assert [number_of(record) for record in reader.records().records] == [3]

    @pytest.mark.parametrize("size", [1, 4096, 4097, MOST_RECORD_BYTES])
    def test_sizes(self, writer: RegionWriter, reader: RegionReader, size: int) -> None:
        writer.append(bytes(size))
        writer.append(b"next")
        assert reader.records() == ([bytes(size), b"next"], False)

    @pytest.mark.parametrize("size", [0, MOST_RECORD_BYTES + 1])
    def test_one_that_is_no_record_is_counted(self, writer: RegionWriter, reader: RegionReader, size: int) -> None:
        writer.append(b"first")
        writer.append(bytes(size))
        assert reader.records() == ([b"first"], False)
        assert writer.cells[Cell.TOO_LARGE] == 1

    @pytest.mark.parametrize("left", range(20))
    def test_an_end_of_a_segment(self, writer: RegionWriter, reader: RegionReader, left: int) -> None:
        """`left` bytes of a segment are free when the next record comes."""
        writer.append(bytes(MOST_RECORD_BYTES))
        writer.append(bytes(SEGMENT_BYTES - MOST_RECORD_BYTES - 16 - left))
        writer.append(b"eight bt")
        writer.append(b"next")
        assert [len(record) for record in reader.records().records[2:]] == [8, 4]
        assert not reader.records().lost

    def test_a_ring_that_goes_round(self, writer: RegionWriter, reader: RegionReader) -> None:
        expected = 0
        for number in range(5 * LEAST_LOG_BYTES // 1000):
            writer.append(numbered(number, 1000))
            if number % 50 == 0:
                piece = reader.records()
                assert not piece.lost
                for record in piece.records:
                    assert number_of(record) == expected
                    expected += 1
        assert expected > 4 * LEAST_LOG_BYTES // 1000

    def test_a_reader_that_lags_goes_on_with_the_oldest_segment(
        self, writer: RegionWriter, reader: RegionReader
    ) -> None:
        writer.append(numbered(0))
        reader.records()
        last = 3 * LEAST_LOG_BYTES // 1000
        for number in range(1, last + 1):
            writer.append(numbered(number, 1000))
        piece = reader.records()
        found = [number_of(record) for record in piece.records]
        assert piece.lost
        assert found == list(range(found[0], last + 1))
        assert len(found) * 1000 >= LEAST_LOG_BYTES - 2 * SEGMENT_BYTES
        assert not reader.records().lost

    def test_a_reader_that_comes_late_is_told(self, writer: RegionWriter, path: Path) -> None:
        for number in range(2 * LEAST_LOG_BYTES // 1000):
            writer.append(numbered(number, 1000))
        reader = RegionReader(path)
        assert reader.records().lost
        reader.close()

    def test_damage_costs_its_segment(self, writer: RegionWriter, path: Path) -> None:
        for number in range(150):
            writer.append(numbered(number, 1000))
        reader = RegionReader(path)
        with path.open("r+b") as file:
            file.seek(log_offset() + 10 * 1008 + 500)
            file.write(b"\xff\xff\xff")
        piece = reader.records()
        found = [number_of(record) for record in piece.records]
        assert piece.lost
        assert found == [*range(10), *range(SEGMENT_BYTES // 1008, 150)]
        reader.close()

    def test_a_record_that_is_not_visible_yet_is_read_later(self, writer: RegionWriter) -> None:
        """On ARM the position may be visible before the record."""
        reader = MemoryReader(writer)
        writer.append(numbered(0))
        reader.records()
        writer.append(numbered(1))
        at = log_offset() + 72
        record = writer.content(at, 72)
        writer._map[at : at + 72] = bytes(72)
        assert reader.records() == ([], False)
        writer._map[at : at + 72] = record
        assert reader.records() == ([numbered(1)], False)

    def test_a_damaged_record_at_the_end_is_left_out_at_the_second_look(self, writer: RegionWriter) -> None:
        reader = MemoryReader(writer)
        writer.append(numbered(0))
        writer._map[log_offset() + 20] ^= 1
        assert reader.records() == ([], False)
        assert reader.records() == ([], True)
        writer.append(numbered(1))
        assert reader.records() == ([numbered(1)], False)

    @pytest.mark.parametrize("length", [MOST_RECORD_BYTES + 1, SEGMENT_BYTES - 7, 2**32 - 1])
    def test_a_record_that_no_writer_writes(self, writer: RegionWriter, length: int) -> None:
        content = bytes(min(length, SEGMENT_BYTES))
        writer._map[log_offset() : log_offset() + 8] = struct.pack("<II", length, crc32(content, 1))
        writer.cells[Cell.RESERVED] = writer.cells[Cell.WRITTEN] = 2 * SEGMENT_BYTES
        assert MemoryReader(writer).records() == ([], True)

    def test_the_record_of_the_round_before_is_not_taken_for_the_new_one(self, writer: RegionWriter) -> None:
        reader = MemoryReader(writer)
        lap = LEAST_LOG_BYTES // (SEGMENT_BYTES // 2)
        for number in range(lap):
            writer.append(numbered(number, SEGMENT_BYTES // 2 - 8))
        assert len(reader.records().records) == lap
        writer.cells[Cell.RESERVED] = writer.cells[Cell.WRITTEN] = LEAST_LOG_BYTES + SEGMENT_BYTES // 2
        assert reader.records() == ([], False)

    def test_threads_write_at_once(self, writer: RegionWriter, reader: RegionReader) -> None:
        threads, each = 4, 2000
        began = threading.Barrier(threads)

        def write(thread: int) -> None:
            began.wait()
            for number in range(each):
                writer.append(struct.pack("<II", thread, number))

        running = [threading.Thread(target=write, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        found: dict[int, list[int]] = {number: [] for number in range(threads)}
        ended = False
        while not ended:
            ended = not any(thread.is_alive() for thread in running)
            piece = reader.records()
            assert not piece.lost
            for record in piece.records:
                number, value = struct.unpack("<II", record)
                found[number].append(value)
        assert found == {number: list(range(each)) for number in range(threads)}

    def test_a_signal_handler_writes_in_the_middle_of_a_record(
        self, writer: RegionWriter, reader: RegionReader
    ) -> None:
        handled = 0

        def handler(*_: object) -> None:
            nonlocal handled
            handled += 1
            writer.append(numbered(2**31 + handled))

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            number, found = 0, []
            while handled < 30:
                writer.append(numbered(number))
                number += 1
                found += reader.records().records
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        found += reader.records().records
        numbers = [number_of(record) for record in found]
        assert [each for each in numbers if each < 2**31] == list(range(number))
        assert sorted(each for each in numbers if each > 2**31) == [2**31 + 1 + each for each in range(handled)]


class TestEnd:
    def test_close_removes_the_file_and_later_calls_change_nothing(
        self, writer: RegionWriter, path: Path, reader: RegionReader
    ) -> None:
        writer.cells[Cell.CLOSED_NS] = 5
        writer.counters[0] = 2.0
        writer.append(b"last")
        writer.close()
        assert not path.exists()
        writer.append(b"later")
        writer.note_call(3)
        writer.publish(Document.STATE, b"later", 1)
        writer.cells[Cell.CLOSED_NS] = 6
        writer.close()
        assert (writer.counters[0], reader.cells()[Cell.CLOSED_NS], reader.cells()[Cell.CALL]) == (2.0, 5, 0)
        assert reader.records() == ([b"last"], False)
        assert reader.document(Document.STATE) is None

    def test_a_store_of_a_thread_that_was_interrupted_by_close(self, writer: RegionWriter) -> None:
        cells = writer.cells
        writer.close()
        cells[Cell.TURN_NS] = 1

    def test_a_forked_child_writes_nothing(self, writer: RegionWriter, reader: RegionReader) -> None:
        writer.append(b"parent")
        child = os.fork()
        if not child:
            try:
                writer.append(b"child")
                writer.cells[Cell.CALL] = 9
                writer.publish(Document.STATE, b"child", 1)
                writer.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        writer.append(b"parent again")
        assert reader.records() == ([b"parent", b"parent again"], False)
        assert reader.cells()[Cell.CALL] == 0
        assert writer.path is not None
        assert writer.path.exists()

    def test_a_forked_child_of_a_region_in_memory_writes_nothing(self) -> None:
        writer = RegionWriter(HEADER)
        child = os.fork()
        if not child:
            try:
                writer.append(b"child")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert MemoryReader(writer).records() == ([], False)

    def test_a_writer_that_is_killed_leaves_whole_records(self, path: Path) -> None:
        code = (
            "import struct, sys\n"
            "from pathlib import Path\n"
            "from kvctl_agent.telemetry.region import *\n"
            "header = Header.of_this_process('prefill', 'prefill-0', log_bytes=LEAST_LOG_BYTES)\n"
            "writer, number = RegionWriter(header, Path(sys.argv[1])), 0\n"
            "print('begun', flush=True)\n"
            "while True:\n"
            "    writer.append(struct.pack('<I', number) + bytes((number + at) % 251 for at in range(number % 200)))\n"
            "    number += 1\n"
        )
        with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            reader = RegionReader(path)
            numbers: list[int] = []
            while len(numbers) < 500:
                numbers += [number_of(record) for record in reader.records().records]
            process.kill()
        numbers += [number_of(record) for record in reader.records().records]
        assert numbers == list(range(len(numbers)))
        late = RegionReader(path)
        assert number_of(late.records().records[-1]) == numbers[-1]
        for each in (reader, late):
            each.close()
        path.unlink()

    def test_the_mark_of_a_writer_that_ended_inside_a_record(self, writer: RegionWriter, reader: RegionReader) -> None:
        writer.append(numbered(0))
        writer.cells[Cell.RESERVED] += 1000
        writer._map[log_offset() + 72 : log_offset() + 100] = b"\xff" * 28
        assert reader.records() == ([numbered(0)], False)


class Stores:
    """The stores of a writer, in order, and the memory as a reader sees it that they reach in another order."""

    def __init__(self, sizes: list[int]) -> None:
        writer = RegionWriter(HEADER)
        self.memory = bytearray(writer.content(0, HEADER.size))
        self.waiting: list[tuple[int, bytes]] = []
        stores = self.waiting

        class Map:
            def __setitem__(self, piece: slice, value: bytes) -> None:
                stores.append((piece.start, value))

        class Cells:
            values = [0] * FIRST_COUNTER

            def __getitem__(self, cell: int) -> int:
                return self.values[cell]

            def __setitem__(self, cell: int, value: int) -> None:
                self.values[cell] = value
                stores.append((HEADER_BYTES + 8 * cell, struct.pack("<q", value)))

        writer._map, writer.cells = Map(), Cells()  # type: ignore[assignment]
        for number, size in enumerate(sizes):
            writer.append(numbered(number, size))

    def reach(self, count: int, late: set[int]) -> None:
        """Lets `count` stores reach the memory; those of `late` do not, until a later one has the same address."""
        reached: list[int] = []
        for number, (offset, value) in enumerate(self.waiting[:count]):
            if number not in late:
                former = [each for each in late if each < number and self.waiting[each][0] == offset]
                late = late.difference(former)
                reached += [*former, number]
                self.memory[offset : offset + len(value)] = value
        for number in sorted(reached, reverse=True):
            del self.waiting[number]


class StoresReader(RegionReader):
    """Before each of its reads some more stores reach the memory."""

    def __init__(self, stores: Stores, steps: Iterator[tuple[int, set[int]]]) -> None:
        self.header, self.path = HEADER, Path("stores")
        self.position, self._suspect = 0, None
        self._stores, self._steps = stores, steps

    def _read(self, offset: int, size: int) -> bytes:
        self._stores.reach(*next(self._steps, (len(self._stores.waiting), set())))
        return bytes(self._stores.memory[offset : offset + size])


def _check(pieces: list[LogPiece], last: int) -> None:
    """Records come once, in order and whole; what is missing was told."""
    expected = 0
    for piece in pieces:
        for record in piece.records:
            number = number_of(record)
            assert number == expected or (piece.lost and number > expected)
            expected = number + 1
    assert expected == last + 1


sizes = st.lists(st.sampled_from([4, 5, 60, 3000, 20_000, MOST_RECORD_BYTES - 8, MOST_RECORD_BYTES]), min_size=1)


@given(sizes=sizes.map(lambda each: each * 3), counts=st.lists(st.integers(0, 40)))
@settings(max_examples=100)
def test_a_reader_between_any_two_stores(sizes: list[int], counts: list[int]) -> None:
    split = regions._split

    def undamaged(block: bytes, position: int, suspect: int | None) -> tuple[list[bytes], int, bool]:
        records, end, damaged = split(block, position, suspect)
        assert (end, damaged) == (position + len(block), False)
        return records, end, damaged

    stores = Stores(sizes)
    reader = StoresReader(stores, iter([(count, set()) for count in counts]))
    with patch.object(regions, "_split", undamaged):
        pieces = [reader.records()]
        while stores.waiting or pieces[-1].records:
            pieces.append(reader.records())
    _check([*pieces, reader.records()], len(sizes) - 1)


@given(
    sizes=sizes.map(lambda each: each * 3),
    steps=st.lists(st.tuples(st.integers(0, 12), st.sets(st.integers(0, 11), max_size=6))),
)
@settings(max_examples=100)
def test_a_reader_that_sees_stores_in_another_order(sizes: list[int], steps: list[tuple[int, set[int]]]) -> None:
    stores = Stores(sizes)
    reader = StoresReader(stores, iter(steps))
    pieces = [reader.records()]
    while stores.waiting or pieces[-1].records:
        pieces.append(reader.records())
    pieces += [reader.records(), reader.records()]
    found = [number_of(record) for piece in pieces for record in piece.records]
    assert found == sorted(set(found))
    if not any(piece.lost for piece in pieces):
        assert found == list(range(len(sizes)))


@given(
    edits=st.lists(
        st.tuples(
            st.one_of(
                st.sampled_from(
                    [8 * cell + HEADER_BYTES for cell in (Cell.RESERVED, Cell.WRITTEN, Cell.PUBLISHED + 1)]
                ),
                st.integers(HEADER_BYTES, HEADER_BYTES + 8 * FIRST_COUNTER),
                st.integers(log_offset(), log_offset() + 3000),
            ),
            st.one_of(
                st.binary(min_size=1, max_size=9), st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\0\0\0\0\0\0\0\x7f"])
            ),
        ),
        max_size=8,
    )
)
@settings(max_examples=200)
def test_hostile_content_harms_no_reader(edits: list[tuple[int, bytes]]) -> None:
    writer = RegionWriter(HEADER)
    writer.publish(Document.STATE, b"state", 1)
    for number in range(20):
        writer.append(numbered(number))
    for offset, value in edits:
        writer._map[offset : offset + len(value)] = value
    reader = MemoryReader(writer)
    for _ in range(3):
        for record in reader.records().records:
            assert 0 < len(record) <= MOST_RECORD_BYTES
        for document in Document:
            reader.document(document)
        assert len(reader.counters(10**9)) == regions.MOST_COUNTERS


class TestPlaces:
    def test_a_log_leaves_most_of_a_small_file_system_free(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def free(mib: int) -> None:
            blocks = os.statvfs_result((4096, 4096, mib * 256, mib * 256, mib * 256, 0, 0, 0, 0, 255))
            monkeypatch.setattr(os, "statvfs", lambda _: blocks)

        free(10_000)
        assert fitting_log_bytes(tmp_path, 4 << 20) == 4 << 20
        free(30)
        small = fitting_log_bytes(tmp_path, 4 << 20)
        assert LEAST_LOG_BYTES <= small < 4 << 20
        assert small % SEGMENT_BYTES == 0
        free(10)
        with pytest.raises(RegionError, match="too little room"):
            fitting_log_bytes(tmp_path)
