"""Sharing the GIL with the engine's thread.

A thread that releases the GIL gets it back at once if no other thread runs Python. Beside a thread that computes, such
as a scheduler's loop, it waits until that thread gives the GIL up: by default `sys.getswitchinterval()`, 5 ms, each
time. A release shorter than the wake-up of the other thread, some 10 µs, costs no such wait, but wakes that thread for
nothing. Except for `MainThread`, the system calls of this module never wait, and do not release the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
import threading
import time
from collections import deque

_held = ctypes.PyDLL(None, use_errno=True)  # functions of a PyDLL keep the GIL, those of a CDLL release it
_held.recv.restype = _held.send.restype = _held.pread.restype = ctypes.c_ssize_t
_held.recv.argtypes = _held.send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_held.pread.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long)
_held.eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
_held.Py_AddPendingCall.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_held.Py_IncRef.argtypes = _held.Py_DecRef.argtypes = (ctypes.py_object,)
_held.Py_IncRef.restype = _held.Py_DecRef.restype = None

_MSG_DONTWAIT, _MSG_NOSIGNAL = 0x40, 0x4000
_EPOLL_EVENT = struct.Struct("=Ii4x" if platform.machine() == "x86_64" else "=I4xi4x")  # packed on x86-64
_SEM_T_BYTES = 64  # enough: glibc and musl use 32
_SEM_POST = ctypes.cast(_held.sem_post, ctypes.c_void_p)
_sem_clockwait = getattr(ctypes.CDLL(None, use_errno=True), "sem_clockwait", None)  # since glibc 2.30
_SCHEDSTAT = b"/proc/thread-self/schedstat"
_SCHEDSTAT_BYTES = 128

_CONTENDED_NS = 200_000  # timers end up to 0.1 ms late by themselves
_WAITS = 3
_LONGEST_NS = 10_000_000  # of one wait for the GIL; what is longer is a stop of the process
# The longer, the less often a room waits for the GIL, 5 ms each time, and the longer the engine's thread waits. On few
# cores rooms wait for a core instead.
_HOLD_NS, _HOLD_FEW_CORES_NS = 750_000, 500_000
# The engine's thread usually wakes up and takes the GIL within this time. Of 2,766 times beside a busy engine on 32
# cores the median was 52 µs; eleven took more than 0.3 ms, the longest 0.9: a core that has slept wakes up late.
_WAKE_NS, _WAKE_FEW_CORES_NS = 300_000, 100_000
_ANSWER_NS = 1_000_000  # no answer for so long is taken to mean that the main thread does not want the GIL


def send(fd: int, data: bytes) -> int:
    """Sends bytes on a socket; returns the number of bytes sent.

    Raises:
        BlockingIOError: the socket's send buffer is full.
        OSError: the peer has closed the connection.
    """
    return _checked(_held.send(fd, data, len(data), _MSG_DONTWAIT | _MSG_NOSIGNAL))


class ReceiveBuffer:
    """Receives from sockets, at most `nbytes` bytes at a time."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = ctypes.create_string_buffer(nbytes)

    def recv(self, fd: int) -> bytes:
        """Returns the bytes that have arrived; none if the peer has closed the connection.

        Raises:
            BlockingIOError: no bytes have arrived.
            OSError: the connection is broken.
        """
        received = _checked(_held.recv(fd, self._buffer, len(self._buffer), _MSG_DONTWAIT))
        return ctypes.string_at(self._buffer, received)


def epoll_poll(fd: int, most: int = 256) -> list[tuple[int, int]]:
    """Returns the descriptors of an epoll set that are ready, at most `most` of them, each with its events."""
    found = ctypes.create_string_buffer(_EPOLL_EVENT.size * most)
    count = _checked(_held.epoll_wait(fd, found, most, 0))
    return [(ready, events) for events, ready in _EPOLL_EVENT.iter_unpack(found.raw[: count * _EPOLL_EVENT.size])]


def read_start(path: str, most: int = 4096) -> bytes:
    """Returns the first bytes of a file of /proc, at most `most`. Raises OSError if it cannot be read."""
    buffer = ctypes.create_string_buffer(most)
    fd = _checked(_held.open(os.fsencode(path), os.O_RDONLY | os.O_CLOEXEC))
    try:
        size = _checked(_held.pread(fd, buffer, most, 0))
        return buffer.raw[:size]
    finally:
        _held.close(fd)


def eventfd_write(fd: int) -> None:
    """Adds 1 to a non-blocking eventfd. Raises OSError if the descriptor is closed."""
    _checked(_held.eventfd_write(fd, 1))


def eventfd_read(fd: int) -> None:
    """Resets a non-blocking eventfd. Raises BlockingIOError if it is 0, OSError if the descriptor is closed."""
    _checked(_held.eventfd_read(fd, ctypes.byref(ctypes.c_uint64())))


class _Schedstat:
    """The kernel's counts of the thread that creates this object."""

    def __init__(self) -> None:
        self._fd: int = _held.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        self._buffer = ctypes.create_string_buffer(_SCHEDSTAT_BYTES)

    def read(self) -> list[bytes]:
        """Returns the counts; none if the kernel does not count."""
        size = _held.pread(self._fd, self._buffer, _SCHEDSTAT_BYTES, 0)
        return self._buffer.raw[: max(0, size)].split()

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


_thread = threading.local()


def no_core_ns() -> int:
    """Returns how long the calling thread has been ready to run without a core; 0 if the kernel does not count it.

    The thread keeps the file open until it ends: on a host without a spare core most waits end late and read it, and
    to open it takes 10 µs, to read it one.
    """
    try:
        schedstat: _Schedstat = _thread.schedstat
    except AttributeError:
        schedstat = _thread.schedstat = _Schedstat()
    try:
        return int(schedstat.read()[1])
    except (IndexError, ValueError):
        return 0


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("ns", ctypes.c_long))


class MainThread:
    """Tells one other thread when the main thread runs Python.

    `Py_AddPendingCall` has the main thread call a function as soon as it runs Python: here `sem_post`, for which the
    other thread waits without the GIL.
    """

    def __init__(self) -> None:
        self._semaphore = ctypes.create_string_buffer(_SEM_T_BYTES)
        _held.sem_init(self._semaphore, 0, 0)
        self._asked = False

    def runs_within(self, limit_ns: int) -> bool:
        """Releases the GIL until the main thread has run Python, at most for `limit_ns`; returns whether it has.

        To get the GIL back may take longer. Without `sem_clockwait`, or while the queue of calls is full, this
        only waits.
        """
        if _sem_clockwait is None or not self._ask():
            time.sleep(limit_ns * 1e-9)
            return False
        until = _Timespec(*divmod(time.monotonic_ns() + limit_ns, 1_000_000_000))
        while _sem_clockwait(self._semaphore, time.CLOCK_MONOTONIC, ctypes.byref(until)):
            if ctypes.get_errno() != errno.EINTR:
                return False
        self._answered()
        return True

    def _ask(self) -> bool:
        if self._asked and not _held.sem_trywait(self._semaphore):
            self._answered()  # after the latest wait
        if not self._asked and not _held.Py_AddPendingCall(_SEM_POST, self._semaphore):
            self._asked = True
            # The semaphore exists at least until the answer, whatever the interpreter frees when it ends.
            _held.Py_IncRef(self._semaphore)
        return self._asked

    def _answered(self) -> None:
        self._asked = False
        _held.Py_DecRef(self._semaphore)


class GilSharing:
    """Decides whether the control loop keeps the GIL during a wait, from how long it took to get it back before.

    While another thread runs Python, a short wait is made with the GIL, because the wait for the GIL after it would
    take far longer. The loop holds the GIL no longer than `_HOLD_NS` that way, so that the engine's thread is not
    stopped for longer. A longer wait is prolonged to what getting the GIL back takes: a loop that wakes up more often
    interrupts the engine without being quicker.

    A thread that computes makes every wake-up late. The least late of the last few counts, because single ones have
    other causes: the thread that has the GIL may be without a core. The time in which the kernel had no core for the
    loop's thread is subtracted.

    One wait that ends in time shows less: the engine's thread may have been about to give the GIL up, or too slow to
    take it. Until all of the last few have, a loop that has had the GIL for `_HOLD_NS` still lets the engine's thread
    run, because beside the engine it would otherwise keep the GIL for milliseconds. On few cores it does not: there the
    engine's thread mostly waits for a core, not for the GIL.

    Usually an engine's scheduler runs in the main thread, whose answer (`MainThread`) ends such a pause. If none comes
    and the GIL comes back late, another thread computes: the next pauses are as long as a wake-up takes, as on few
    cores, where the main thread may want the GIL but have no core. If the GIL comes back in time, nobody wants it.

    The thread's CPU time is asked for only while another thread may run Python: it is a system call, which takes 10 µs
    where caches are cold.

    Args:
        few_cores: whether ranks that share this host have no core to spare.
    """

    def __init__(self, few_cores: bool = False) -> None:
        self._few_cores = few_cores
        self._main_thread = MainThread()
        self._answers = not few_cores and _sem_clockwait is not None  # whether a missing answer shows something
        self._wake_ns = _WAKE_FEW_CORES_NS if few_cores else _WAKE_NS
        self._hold_ns = _HOLD_FEW_CORES_NS if few_cores else _HOLD_NS
        self._cost_ns = 0
        self._suspected = False  # whether another thread may run Python
        self._late_ns: deque[int] = deque([0] * _WAITS, _WAITS)
        self._since_ns = self._cpu_ns = self._waited_ns = 0  # of the latest acquisition; waits with the GIL
        self._no_core_ns: int | None = None

    @property
    def contended(self) -> bool:
        """Whether another thread runs Python almost without a pause."""
        return self._cost_ns >= _CONTENDED_NS

    def plan(self, wait_s: float, now_ns: int) -> tuple[float, bool]:
        """Returns how many seconds to wait, and whether to keep the GIL meanwhile.

        Args:
            wait_s: seconds after which the next turn is due; 0 if there is work already.
            now_ns: time on the monotonic clock.
        """
        contended = self.contended
        if self._suspected:
            held_ns = now_ns - self._since_ns - self._waited_ns
            if held_ns >= _CONTENDED_NS and held_ns - (time.thread_time_ns() - self._cpu_ns) >= _CONTENDED_NS:
                self._acquired(now_ns)  # the thread has waited in a call, while the engine's thread had the GIL
        wait_ns = int(wait_s * 1e9)
        if (contended or not wait_ns) and now_ns + wait_ns <= self._since_ns + self._hold_ns:
            self._waited_ns += wait_ns
            return wait_s, True
        return max(wait_s, self._cost_ns * 1e-9) if contended and wait_ns else wait_s, False

    def released(self, asked_ns: int, took_ns: int, now_ns: int) -> None:
        """Notes a wait without the GIL.

        Args:
            asked_ns: time limit of the wait.
            took_ns: duration of the wait; a wait that ended before its limit shows nothing about the GIL.
            now_ns: end of the wait on the monotonic clock.
        """
        late_ns = took_ns - asked_ns
        if asked_ns and late_ns >= 0:
            self._note_late(late_ns)
        self._acquired(now_ns)

    def _note_late(self, late_ns: int) -> None:
        if late_ns >= _CONTENDED_NS:
            before_ns, self._no_core_ns = self._no_core_ns, no_core_ns()
            if before_ns is None:
                return
            late_ns = min(max(0, late_ns - (self._no_core_ns - before_ns)), _LONGEST_NS)
        self._late_ns.append(late_ns)
        self._cost_ns = min(self._late_ns)
        self._suspected = (self._cost_ns if self._few_cores else max(self._late_ns)) >= _CONTENDED_NS

    def yield_if_due(self) -> None:
        """Lets the engine's thread run if it may compute and this thread has had the GIL for long."""
        if not self._suspected:
            return
        since_ns = time.monotonic_ns()
        if self.plan(0.0, since_ns)[1]:
            return
        limit_ns = _ANSWER_NS if self._answers else self._wake_ns
        ran = self._main_thread.runs_within(limit_ns)
        now_ns = time.monotonic_ns()
        late = now_ns - since_ns - (self._wake_ns if ran else limit_ns) >= _CONTENDED_NS
        if ran:
            self._answers = not self._few_cores
            limit_ns = self._wake_ns if late else 0  # a main thread that ran for a moment shows nothing
        elif late:
            self._answers = False
        elif self._answers:
            self._late_ns.extend([0] * _WAITS)
        self.released(limit_ns, now_ns - since_ns, now_ns)

    def _acquired(self, now_ns: int) -> None:
        self._since_ns, self._waited_ns = now_ns, 0
        if self._suspected:
            self._cpu_ns = time.thread_time_ns()


class SwitchInterval:
    """Changes the interpreter's switch interval of this process, and restores it."""

    def __init__(self) -> None:
        self._before_s: float | None = None

    def set(self, interval_ms: float | None) -> None:
        """Sets the interval in ms; None leaves it."""
        before_s = sys.getswitchinterval()
        if interval_ms is not None:
            sys.setswitchinterval(interval_ms * 1e-3)
        if sys.getswitchinterval() != before_s:  # another agent of the process may have set it already
            self._before_s = before_s

    def restore(self) -> None:
        """Sets the interval to what it was before `set`, if that has changed it."""
        if self._before_s is not None:
            sys.setswitchinterval(self._before_s)
