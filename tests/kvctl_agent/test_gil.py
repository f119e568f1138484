"""System calls that never wait and do not release the GIL."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from pathlib import Path

import pytest

from kvctl_agent import gil
from kvctl_agent.gil import ReceiveBuffer


def schedstat_files() -> int:
    """Returns the number of open files with the kernel's counts of a thread."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the directory itself
            found += each.readlink().name == "schedstat"
    return found


class TestCalls:
    def test_bytes_go_through_a_socket(self) -> None:
        here, there = socket.socketpair()
        with here, there:
            buffer = ReceiveBuffer(4)
            assert gil.send(here.fileno(), b"a\0cdef") == 6
            assert [buffer.recv(there.fileno()), buffer.recv(there.fileno())] == [b"a\0cd", b"ef"]
            with pytest.raises(BlockingIOError):
                buffer.recv(there.fileno())
            here.close()
            assert buffer.recv(there.fileno()) == b""
            with pytest.raises(BrokenPipeError):
                gil.send(there.fileno(), b"x")

    def test_a_full_socket_takes_a_part_and_then_nothing(self) -> None:
        here, there = socket.socketpair()
        with here, there:
            data = bytes(16 << 20)
            assert 0 < gil.send(here.fileno(), data) < len(data)
            with pytest.raises(BlockingIOError):
                gil.send(here.fileno(), data)

    def test_an_epoll_set(self) -> None:
        here, there = socket.socketpair()
        with here, there, select.epoll() as epoll:
            epoll.register(here, select.EPOLLIN)
            assert gil.epoll_poll(epoll.fileno()) == []
            there.send(b"x")
            assert gil.epoll_poll(epoll.fileno()) == [(here.fileno(), select.EPOLLIN)]
            epoll.register(there, select.EPOLLOUT)
            assert sorted(gil.epoll_poll(epoll.fileno())) == sorted(epoll.poll(0))
            assert len(gil.epoll_poll(epoll.fileno(), most=1)) == 1

    def test_an_eventfd(self) -> None:
        fd = os.eventfd(0, os.EFD_NONBLOCK)
        gil.eventfd_write(fd)
        gil.eventfd_write(fd)
        gil.eventfd_read(fd)
        with pytest.raises(BlockingIOError):
            gil.eventfd_read(fd)
        os.close(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            gil.eventfd_write(fd)

    def test_the_start_of_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_bytes(b"a\0cdef")
        before = len(list(Path("/proc/self/fd").iterdir()))
        assert gil.read_start(str(file)) == b"a\0cdef"
        assert gil.read_start(str(file), most=4) == b"a\0cd"
        with pytest.raises(FileNotFoundError):
            gil.read_start(str(tmp_path / "none"))
        with pytest.raises(IsADirectoryError):
            gil.read_start(str(tmp_path))
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    def test_the_time_without_a_core_only_grows_and_a_thread_that_has_ended_leaves_no_file_open(self) -> None:
        counts: list[int] = []
        opened: list[int] = []

        def read() -> None:
            counts.extend(gil.no_core_ns() for _ in range(2))
            opened.append(schedstat_files())

        before = schedstat_files()
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        assert 0 <= counts[0] <= counts[1]
        assert opened == [before + 1]
        assert schedstat_files() == before
