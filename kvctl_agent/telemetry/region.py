"""Region: a file in shared memory in which one agent writes what it knows, for readers that it never waits for.

Layout of version 2, little-endian, in this order:

| part | content |
| --- | --- |
| header, 4 KiB | `MAGIC`, sizes, process id and start, clock offset, incarnation, role, name, socket directory |
| cells, 12 KiB | 64-bit words: `Cell`, then the counters, whose series the document `Document.COUNTERS` names |
| documents | for each `Document` two buffers, each with length, checksum, time and MessagePack |
| log | a ring of records: length, checksum, MessagePack |

A document is written into the buffer that was not published last; then the cell of its number of publications grows. A
reader whose buffer is overwritten meanwhile sees a wrong checksum and reads again.

Positions in the log are numbers of bytes that were ever written. A record never crosses the end of a segment, so a
reader that was overtaken goes on at a segment's begin; a length of 0 ends a segment early. The writer raises
`Cell.RESERVED` before it begins a segment, to its end, and `Cell.WRITTEN` after each record: what lies before
`WRITTEN`, and not more than the ring's size before `RESERVED`, is whole.

That order is kept by x86-64 but not by ARM, where a reader may see `WRITTEN` before the record. Checksums are therefore
CRC-32 that begin with the position + 1, or the number of the publication: what was there before does not fit. The
reader looks a second time at a record at the end of the log whose checksum is wrong, and only then regards it as
damaged.

Readers write only the cells `WANTED` and `REBASE`, to ask for documents and for the state of all active rooms, and
`FOLDED`, `EVENTS_ADDED`, `EVENTS_END` and `END_STATUS`, for the observer that follows them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

from kvctl_agent.errors import RegionError

MAGIC = b"KVREGION"
VERSION = 2
SUFFIX = ".region"
NEW_SUFFIX = ".new"
"""Suffix of the region of an agent that has not been started."""

HEADER_BYTES = 4096
CELLS = 1536
"""Words of the cells: 64 for `Cell`, the others for counters."""
FIRST_COUNTER = 64
MOST_COUNTERS = CELLS - FIRST_COUNTER
SEGMENT_BYTES = 64 << 10
MOST_RECORD_BYTES = 32 << 10
DEFAULT_LOG_BYTES = 4 << 20
LEAST_LOG_BYTES = 4 * SEGMENT_BYTES

_HEADER = struct.Struct("<8sIIQQQQQqQHHH")  # without names
_RECORD = struct.Struct("<II")
_DOCUMENT = struct.Struct("<IIq")  # length, checksum, monotonic time
_SEED = struct.Struct("<qq")
_CELL = struct.Struct("<q")
_ENDS = struct.Struct("<qq")  # `Cell.RESERVED` and `Cell.WRITTEN`
_LOW = 0xFFFF_FFFF
_RECORD_BYTES = _RECORD.size
_pack = _RECORD.pack
_pack_call = struct.Struct("4q").pack_into  # native: it stores whole words
_RESERVED, _WRITTEN = 0, 1
_MOST_BYTES = 1 << 30
_CELLS_AT = HEADER_BYTES
_CALL_AT = _CELLS_AT + 8 * 10  # `Cell.CALL_NS` and the three that follow it
_monotonic_ns, _get_ident = time.monotonic_ns, threading.get_ident
_DOCUMENTS_AT = _CELLS_AT + 8 * CELLS
_READ_AGAIN = 8
_FIRST_READ_BYTES, _MORE_BYTES = 1024, 128  # of a document, at first, and more than it had the last time
_LOCK_TRIES, _LOCK_AGAIN_S = 10, 0.005
_STAT_BYTES = 4096  # more than /proc/PID/stat has
_CRC_PIECE = 4096  # zlib gives the interpreter away for more, and takes it back late beside a busy engine


class Cell:
    """Indexes of the cells with a meaning of their own; times are monotonic ns, 0 stands for never.

    They are plain integers, as members of an enumeration cost an agent a third of a microsecond each.
    """

    RESERVED: Final = _RESERVED
    WRITTEN: Final = _WRITTEN
    WANTED: Final = 2  # number of requests for documents; readers write it
    SERVED: Final = 3  # `WANTED` as of the latest publication
    REBASE: Final = 4  # number of requests for the state of all active rooms; readers write it
    REBASED: Final = 5
    TOO_LARGE: Final = 6  # records, documents and series that were too large, or that MessagePack has no form for
    CLOSED_NS: Final = 7  # the agent was closed, not killed
    TURN_NS: Final = 8  # begin of the latest turn of the control loop
    LOOP_ENDED_NS: Final = 9
    CALL_NS: Final = 10  # begin of the engine's latest call
    CALL: Final = 11  # which: index in `calls` of the document `IDENTITY`
    CALL_ENDED_NS: Final = 12  # of a call that does not wait: its begin
    CALL_THREAD: Final = 13  # `threading.get_ident` of the thread that called
    CALL_TASK: Final = 14  # its number in /proc/PID/task, as the control loop has found it; 0: unknown
    COPYING_SINCE_NS: Final = 15
    ARRIVAL_TURN_NS: Final = 16
    DRAIN_BEGAN_NS: Final = 17
    DRAIN_ENDED_NS: Final = 18
    INTERPRETER_WAIT_NS: Final = 19  # -1: unknown
    FOLDED: Final = 20  # position in the log up to which observers have counted and exported; they write it
    EVENTS_ADDED: Final = 21  # events that observers have added to the agent's
    EVENTS_END: Final = 22  # number of the next event, as observers number them
    END_STATUS: Final = 23  # exit status of the process, as of wait(2), + 1; observers write it
    PUBLISHED: Final = 24  # publications of the first document; those of the others follow


class Document(IntEnum):
    """Documents: MessagePack values, replaced as a whole."""

    IDENTITY = 0  # what does not change, or rarely does
    STATE = 1  # small values that change at any time
    CONFIG = 2
    BOOTSTRAP = 3
    PEERS = 4
    STAGING = 5
    ROOMS = 6  # what the machine knows of its active rooms and their records do not
    COUNTERS = 7  # series of the counters, in the order of their cells
    COSTS = 8
    STACK = 9  # Python stack of the engine's thread, sampled while it makes no calls


DOCUMENT_BYTES: dict[Document, int] = {
    Document.IDENTITY: 16 << 10,
    Document.STATE: 16 << 10,
    Document.CONFIG: 64 << 10,
    Document.BOOTSTRAP: 128 << 10,
    Document.PEERS: 256 << 10,
    Document.STAGING: 128 << 10,
    Document.ROOMS: 128 << 10,
    Document.COUNTERS: 128 << 10,
    Document.COSTS: 128 << 10,
    Document.STACK: 4 << 10,
}
"""Size of one buffer of each document, with its frame; a larger value is not published (`Cell.TOO_LARGE`)."""

_DOCUMENT_AT = {
    document: _DOCUMENTS_AT + 2 * sum(DOCUMENT_BYTES[other] for other in Document if other < document)
    for document in Document
}


class Header(NamedTuple):
    """Who writes a region.

    Attributes:
        log_bytes: size of the ring.
        pid: process id, as the writer sees it; 0: unknown.
        started: start of the process in ticks since boot (field 22 of /proc/PID/stat); 0: unknown.
        pid_namespace: inode of the PID namespace in which the process has this id; 0: unknown.
        incarnation: of the agent.
        clock_offset_ns: wall clock minus monotonic clock.
        created_ns: monotonic time.
        role, name, directory: of the agent, and the directory of its admin socket.
    """

    log_bytes: int
    pid: int
    started: int
    pid_namespace: int
    incarnation: int
    clock_offset_ns: int
    created_ns: int
    role: str
    name: str
    directory: str

    @classmethod
    def of_this_process(
        cls,
        role: str,
        name: str,
        directory: str = "",
        *,
        incarnation: int = 0,
        clock_offset_ns: int = 0,
        log_bytes: int = DEFAULT_LOG_BYTES,
    ) -> Header:
        """Returns the header of a region that this process is going to write."""
        started = int((stat_fields("self")[START_FIELD:] or [b"0"])[0])
        process, now_ns = (os.getpid(), started, namespace("pid")), time.monotonic_ns()
        return cls(log_bytes, *process, incarnation, clock_offset_ns, now_ns, role, name, directory)

    @property
    def size(self) -> int:
        """Size of the region in bytes."""
        return log_offset() + self.log_bytes

    def pack(self) -> bytes:
        role, name, directory = (os.fsencode(text) for text in (self.role, self.name, self.directory))
        packed = _HEADER.pack(
            MAGIC,
            VERSION,
            CELLS,
            self.log_bytes,
            self.pid,
            self.started,
            self.pid_namespace,
            self.incarnation,
            self.clock_offset_ns,
            self.created_ns,
            len(role),
            len(name),
            len(directory),
        )
        whole = packed + role + name + directory
        if len(whole) > HEADER_BYTES:
            raise RegionError(f"the names of {self.name} are too long for a region")
        return whole

    @classmethod
    def unpack(cls, block: bytes) -> Header:
        """Raises RegionError: `block` is no header of a region of this version."""
        if len(block) < _HEADER.size or block[:8] != MAGIC:
            raise RegionError("this is no region of an agent")
        _, version, cells, log_bytes, *numbers, role, name, directory = _HEADER.unpack_from(block)
        if (version, cells) != (VERSION, CELLS):
            raise RegionError(f"the region has version {version}, this kvctl reads version {VERSION}")
        names, at = [], _HEADER.size
        for size in (role, name, directory):
            names.append(os.fsdecode(block[at : at + size]))
            at += size
        if at > len(block) or not LEAST_LOG_BYTES <= log_bytes <= _MOST_BYTES or log_bytes % SEGMENT_BYTES:
            raise RegionError("the header of the region is damaged")
        return cls(log_bytes, *numbers, *names)


START_FIELD = 19
"""Index of the start of a process in `stat_fields`."""


def stat_fields(process: int | str) -> list[bytes]:
    """Returns the fields of /proc/PROCESS/stat from the third one on, the state; none if it cannot be read."""
    try:
        descriptor = os.open(f"/proc/{process}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        return os.read(descriptor, _STAT_BYTES).rpartition(b")")[2].split()
    except OSError:  # it has ended
        return []
    finally:
        os.close(descriptor)


def namespace(kind: str) -> int:
    """Returns the inode of this process's namespace of a kind, "pid" or "net"; 0 if /proc does not show it."""
    try:
        return Path(f"/proc/self/ns/{kind}").stat().st_ino
    except OSError:
        return 0


def log_offset() -> int:
    """Returns the offset of the log in a region."""
    return _DOCUMENTS_AT + 2 * sum(DOCUMENT_BYTES.values())


def _document_offset(document: Document, buffer: int) -> int:
    return _DOCUMENT_AT[document] + buffer * DOCUMENT_BYTES[document]


def _crc(data: bytes, crc: int) -> int:
    for at in range(0, len(data), _CRC_PIECE):
        crc = crc32(data[at : at + _CRC_PIECE], crc)
    return crc


def _document_seed(number: int, at_ns: int) -> int:
    return crc32(_SEED.pack(number, at_ns))


class RegionWriter:
    """Writes a region; any thread may call any method, and none waits for another thread.

    Attributes:
        header: as it is in the region.
        path: its file; None: memory of this process only, for tests and where there is no shared memory.
        cells: the cells, as signed 64-bit integers; `cells[Cell.X] = value` is one store. To be read anew each time, as
            a fork and `close` replace them.
        counters: the cells of the counters, as floating-point numbers; likewise.
    """

    def __init__(self, header: Header, path: Path | None = None) -> None:
        """Creates the file, 0600, reserves its memory, and locks it until the process ends or the region is closed.

        Raises:
            RegionError: the file exists, or there is no room for it.
        """
        self.header = header
        self.path = path
        packed = header.pack()
        self._use(_created(path, header.size))
        self._map[: len(packed)] = packed
        self.cells[Cell.INTERPRETER_WAIT_NS] = -1
        self._written = self._segment_end = 0
        self._shift = 0  # offset of the present segment in the region, minus its position
        self._waiting: deque[bytes] = deque()
        self._writing = threading.Lock()
        self._closed = False
        _writers.add(self)

    def _use(self, memory: mmap.mmap) -> None:
        block = memoryview(memory)[_CELLS_AT:_DOCUMENTS_AT]
        self._map = memory
        self.cells = block[: 8 * FIRST_COUNTER].cast("q")
        self.counters = block[8 * FIRST_COUNTER :].cast("d")

    def append(self, record: bytes) -> None:
        """Appends a record to the log, of at most `MOST_RECORD_BYTES`; a larger or empty one is counted only.

        A thread that finds another one at it leaves its record to that thread, behind those that it has left before.
        """
        waiting, writing = self._waiting, self._writing
        waiting.append(record)
        while waiting and writing.acquire(False):  # by name the argument takes 0.2 µs
            try:
                while waiting:
                    record = waiting.popleft()
                    length = len(record)
                    begin = self._written
                    end = begin + _RECORD_BYTES + length
                    if not 0 < length <= MOST_RECORD_BYTES:
                        self.cells[Cell.TOO_LARGE] += 1
                        continue
                    if end > self._segment_end:
                        begin = self._begin_segment()
                        end = begin + _RECORD_BYTES + length
                    seed = begin + 1 & _LOW
                    crc = crc32(record, seed) if length <= _CRC_PIECE else _crc(record, seed)
                    shift = self._shift
                    self._map[begin + shift : end + shift] = _pack(length, crc) + record
                    self.cells[_WRITTEN] = self._written = end
            finally:
                writing.release()

    def _begin_segment(self) -> int:
        begin = self._segment_end
        self.cells[_RESERVED] = begin + SEGMENT_BYTES
        if begin - self._written >= _RECORD_BYTES:
            at = self._written + self._shift
            self._map[at : at + _RECORD_BYTES] = _pack(0, self._written + 1 & _LOW)
        self._written, self._segment_end = begin, begin + SEGMENT_BYTES
        self._shift = log_offset() + begin % self.header.log_bytes - begin
        return begin

    def note_call(self, call: int) -> None:
        """Notes a call of the engine that does not wait, by its index in `calls` of the document `IDENTITY`."""
        now_ns = _monotonic_ns()
        _pack_call(self._map, _CALL_AT, now_ns, call, now_ns, _get_ident())

    @contextlib.contextmanager
    def call(self, call: int) -> Iterator[None]:
        """Notes a call of the engine that may wait."""
        _pack_call(self._map, _CALL_AT, _monotonic_ns(), call, 0, _get_ident())
        try:
            yield
        finally:
            self.cells[Cell.CALL_ENDED_NS] = _monotonic_ns()

    def publish(self, document: Document, value: bytes, at_ns: int) -> bool:
        """Replaces a document, whose value is as of monotonic `at_ns`; one thread at a time for each document.

        Returns:
            whether it was small enough.
        """
        if _DOCUMENT.size + len(value) > DOCUMENT_BYTES[document]:
            self.cells[Cell.TOO_LARGE] += 1
            return False
        number = self.cells[Cell.PUBLISHED + document] + 1
        at = _document_offset(document, number % 2)
        whole = _DOCUMENT.pack(len(value), _crc(value, _document_seed(number, at_ns)), at_ns) + value
        self._map[at : at + len(whole)] = whole
        self.cells[Cell.PUBLISHED + document] = number
        return True

    def content(self, offset: int, size: int) -> bytes:
        """Returns a copy of a piece of the region, for a reader in this process."""
        return self._map[offset : offset + size]

    def move(self, path: Path) -> None:
        """Renames the file; raises RegionError."""
        assert self.path is not None
        try:
            self.path.rename(path)
        except OSError as error:
            raise RegionError(f"cannot move the region {self.path} to {path}: {error.strerror}") from None
        self.path = path

    def close(self) -> None:
        """Removes the file; idempotent.

        The writer goes on in memory of its own: an engine may call methods of a handle during and after the close.
        """
        if self._closed:
            return
        self._closed = True
        _writers.discard(self)
        if self.path is not None:
            self._leave()
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _leave(self) -> None:
        """Goes on in memory of this process only, with the same cells and counters.

        The file stays mapped as long as another thread is in the middle of a store.
        """
        memory = mmap.mmap(-1, self.header.size)
        memory[:_DOCUMENTS_AT] = self._map[:_DOCUMENTS_AT]
        self._use(memory)

    def _leave_to_the_parent(self) -> None:
        """In a forked child: no store may reach the parent's region."""
        self.path = None
        self._leave()
        self._waiting.clear()
        self._writing = threading.Lock()


_writers: weakref.WeakSet[RegionWriter] = weakref.WeakSet()


def _leave_regions_to_the_parent() -> None:
    for writer in list(_writers):
        writer._leave_to_the_parent()


os.register_at_fork(after_in_child=_leave_regions_to_the_parent)


def _created(path: Path | None, size: int) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, size)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise RegionError(f"cannot create the region {path}: {error.strerror}") from None
    try:
        # The map has a copy of the descriptor, and with it the lock, until this process ends: observers look for it.
        _lock(descriptor)
        os.posix_fallocate(descriptor, 0, size)  # a full file system would kill this process at a store
        return mmap.mmap(descriptor, size)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise RegionError(f"no room for the region {path} of {size >> 10} KiB: {error.strerror}") from None
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Locks a new file; an observer that looks whether it is locked holds a shared lock for a moment."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_AGAIN_S)
        else:
            return
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class LogPiece(NamedTuple):
    """Records of a log, oldest first.

    Attributes:
        lost: records are missing before or between these: the reader was overtaken or comes late, or content was
            damaged.
    """

    records: list[bytes]
    lost: bool


class Published(NamedTuple):
    """A document: MessagePack, and the monotonic time as of which it is."""

    value: bytes
    at_ns: int
    number: int


class RegionReader:
    """Reads a region; one thread at a time. It copies with `pread`, so a file that shrinks cannot kill the reader.

    Attributes:
        header: who writes it.
        position: position in the log up to which records were read.
    """

    def __init__(self, path: Path) -> None:
        """Raises RegionError: the file is no region of this version and this user, or cannot be read."""
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise RegionError(f"cannot open the region {path}: {error.strerror}") from None
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise RegionError(f"{path} is no file that only this user may use")
            self.header = Header.unpack(self._read(0, HEADER_BYTES))
            if status.st_size < self.header.size:
                raise RegionError(f"the region {path} is shorter than its header says")
        except BaseException:
            os.close(self._descriptor)
            raise
        self.position = 0
        self._suspect: int | None = None  # position of a record that was damaged at the last look
        self._likely_bytes: dict[Document, int] = {}  # of documents with their frames

    def close(self) -> None:
        """Closes the file; idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def cells(self) -> tuple[int, ...]:
        """Returns the fixed cells, to be indexed by `Cell`, as of one moment."""
        return struct.unpack(f"<{FIRST_COUNTER}q", self._read(_CELLS_AT, 8 * FIRST_COUNTER))

    def cell(self, cell: int) -> int:
        """Returns one of the fixed cells."""
        value: int = _CELL.unpack(self._read(_CELLS_AT + 8 * cell, 8))[0]
        return value

    def counters(self, count: int) -> tuple[float, ...]:
        """Returns the values of the first `count` counters."""
        count = min(count, MOST_COUNTERS)
        return struct.unpack(f"<{count}d", self._read(_CELLS_AT + 8 * FIRST_COUNTER, 8 * count))

    def ask(self, cell: int) -> int:
        """Raises `WANTED` or `REBASE` by one, and returns its new value."""
        value = (self.cell(cell) + 1) & 0x7FFF_FFFF_FFFF_FFFF
        self._write(_CELLS_AT + 8 * cell, _CELL.pack(value))
        return value

    def set(self, cell: int, value: int) -> None:
        """Sets one of the cells that readers write."""
        self._write(_CELLS_AT + 8 * cell, _CELL.pack(value))

    def document(self, document: Document, number: int | None = None) -> Published | None:
        """Returns a document as published last; None if it was not published yet, or if its content is damaged.

        Args:
            number: of its publications, as just read; None: it is read.
        """
        most = DOCUMENT_BYTES[document]
        for _ in range(_READ_AGAIN):
            if number is None:
                number = self.cell(Cell.PUBLISHED + document)
            if number <= 0:
                return None
            at = _document_offset(document, number % 2)
            block = self._read(at, self._likely_bytes.get(document, _FIRST_READ_BYTES))
            length, crc, at_ns = _DOCUMENT.unpack_from(block)
            if (end := _DOCUMENT.size + length) <= most:
                if end > len(block):
                    block += self._read(at + len(block), end - len(block))
                value = block[_DOCUMENT.size : end]
                if _crc(value, _document_seed(number, at_ns)) == crc:
                    self._likely_bytes[document] = min(end + _MORE_BYTES, most)
                    return Published(value, at_ns, number)
            number = None
        return None

    def records(self, until: int | None = None) -> LogPiece:
        """Returns the records that were written since the last call; at first, all that the ring still has.

        Args:
            until: only those before this position, which is one that `position` had; None: all.
        """
        ring = self.header.log_bytes
        oldest, written = self._ends()
        begin = max(self.position, oldest)
        if until is not None:
            written = min(written, until)
        if written == self.position or not begin <= written <= begin + ring:  # no news, or hostile
            return LogPiece([], lost=False)
        block = self._log(begin, written)
        valid = min(max(begin, self._ends()[0]), written)  # without what the writer has overwritten meanwhile
        records, end, damaged = _split(block[valid - begin :], valid, self._suspect)
        lost = damaged or valid > self.position
        self.position = end
        self._suspect = end if end < written else None
        return LogPiece(records, lost)

    def _ends(self) -> tuple[int, int]:
        """Returns the positions of the oldest segment that is not being overwritten, and of the log's end."""
        reserved, written = _ENDS.unpack(self._read(_CELLS_AT, _ENDS.size))
        return _segment_after(reserved - self.header.log_bytes), written

    def _log(self, begin: int, end: int) -> bytes:
        ring, at = self.header.log_bytes, log_offset()
        first, size = begin % ring, end - begin
        if first + size <= ring:
            return self._read(at + first, size)
        return self._read(at + first, ring - first) + self._read(at, first + size - ring)

    def _read(self, offset: int, size: int) -> bytes:
        try:
            block = os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise RegionError(f"cannot read the region {self.path}: {error.strerror}") from None
        if len(block) < size:
            raise RegionError(f"the region {self.path} was cut short")
        return block

    def _write(self, offset: int, block: bytes) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, block, offset)


class MemoryReader(RegionReader):
    """Reads a region from the memory of the process that writes it."""

    def __init__(self, writer: RegionWriter) -> None:
        self.path = Path(writer.header.name)
        self.header = writer.header
        self.position, self._suspect, self._likely_bytes = 0, None, {}
        self._writer = writer

    def close(self) -> None:
        """Does nothing: the writer has the memory."""

    def _read(self, offset: int, size: int) -> bytes:
        return self._writer.content(offset, size)

    def _write(self, offset: int, block: bytes) -> None:
        self._writer.cells[(offset - _CELLS_AT) // 8] = int.from_bytes(block, "little")


def _segment_after(position: int) -> int:
    """Returns the begin of the first segment at or after a position, at least 0."""
    return max(0, -(-position // SEGMENT_BYTES) * SEGMENT_BYTES)


def _split(block: bytes, position: int, suspect: int | None) -> tuple[list[bytes], int, bool]:
    """Splits a piece of the log that begins at `position` into records.

    Args:
        suspect: position of a record that was damaged before, too.

    Returns:
        the records; the position up to which the log was read, before a record at the end of the piece that may not be
        visible yet; and whether some of it was damaged.
    """
    records: list[bytes] = []
    damaged = False
    whole_end = position + len(block)
    for begin, end in _segments(position, whole_end):
        at = begin
        while end - at >= _RECORD_BYTES:
            length, crc = _RECORD.unpack_from(block, at - position)
            first = at - position + _RECORD_BYTES
            record = block[first : first + length]
            if length > min(MOST_RECORD_BYTES, end - at - _RECORD_BYTES) or _crc(record, at + 1 & _LOW) != crc:
                if whole_end - at <= SEGMENT_BYTES and at != suspect:
                    return records, at, damaged
                damaged = True  # where the next record begins is unknown: go on with the next segment
                break
            if not length:
                break
            records.append(record)
            at += _RECORD_BYTES + length
    return records, whole_end, damaged


def _segments(begin: int, end: int) -> Iterator[tuple[int, int]]:
    while begin < end:
        until = min(end, (begin // SEGMENT_BYTES + 1) * SEGMENT_BYTES)
        yield begin, until
        begin = until


def fitting_log_bytes(directory: Path, wanted: int = DEFAULT_LOG_BYTES) -> int:
    """Returns the size of a log, at most `wanted`, that leaves most of the directory's file system free.

    Raises:
        RegionError: there is no room even for the smallest one.
    """
    try:
        free = os.statvfs(directory)
    except OSError as error:
        raise RegionError(f"cannot use {directory}: {error.strerror}") from None
    room = free.f_bavail * free.f_frsize // 8 - log_offset()
    if room < LEAST_LOG_BYTES:
        raise RegionError(f"{directory} has too little room for a region: {os.strerror(errno.ENOSPC)}")
    return max(LEAST_LOG_BYTES, min(wanted, room) // SEGMENT_BYTES * SEGMENT_BYTES)
