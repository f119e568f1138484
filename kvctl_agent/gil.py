"""Sharing the GIL with the engine's thread.

A thread that releases the GIL gets it back at once if no other thread runs Python. Beside a thread that does, such as a
scheduler's loop, it waits for milliseconds each time, unless the main thread lends it (`kvctl_agent/native/turns.c`):
on request, when it next takes the GIL back, or since Python 3.13 between any two bytecodes. So the system calls of this
module, which never wait, do not release the GIL.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading

_held = ctypes.PyDLL(None, use_errno=True)  # functions of a PyDLL keep the GIL, those of a CDLL release it
_held.recv.restype = _held.send.restype = _held.pread.restype = ctypes.c_ssize_t
_held.recv.argtypes = _held.send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_held.pread.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long)
_held.eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)

_MSG_DONTWAIT, _MSG_NOSIGNAL = 0x40, 0x4000
_EPOLL_EVENT = struct.Struct("=Ii4x" if platform.machine() == "x86_64" else "=I4xi4x")  # packed on x86-64
_SCHEDSTAT = b"/proc/thread-self/schedstat"
_SCHEDSTAT_BYTES = 128


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
