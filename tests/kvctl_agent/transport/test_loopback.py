"""Properties of the loopback transport alone: its socket, memory checks and queues."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvctl_agent.errors import ConfigError, PeerDisconnected, TransportError
from kvctl_agent.transport import Region, loopback, open_transport


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def test_memory_of_a_gpu_is_refused(crew: Any) -> None:
    with pytest.raises(TransportError, match=r"the host's memory, not that of GPU 3; --transport nixl"):
        crew.agent("loopback").transport.register([Region(1 << 40, 4096, 3)])


def test_its_socket_is_for_this_user_alone_and_gone_after_close() -> None:
    transport = open_transport("loopback", "a")
    path = Path(transport.describe()["socket"])
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    transport.close()
    assert not path.exists()


def test_sockets_of_killed_agents_are_swept_and_living_ones_are_not(crew: Any) -> None:
    living, victim = crew.agent("loopback"), crew.peer("loopback")
    mine = Path(living.transport.describe()["socket"])
    left = mine.with_name(json.loads(victim.metadata)["loopback"])
    assert left.is_socket()
    victim.kill()
    assert left.is_socket()
    open_transport("loopback", "next").close()
    assert not left.exists()
    assert mine.is_socket()


def test_a_directory_of_the_caller_is_used_and_kept(tmp_path: Path) -> None:
    own = tmp_path / "run"
    transport = open_transport("loopback", "a", {"directory": str(own)})
    assert Path(transport.describe()["socket"]).parent == own
    transport.close()
    assert list(own.iterdir()) == []


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        open_transport("loopback", "a", {"directory": str(tmp_path)})


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        open_transport("loopback", "a", {"directory": str(tmp_path / ("d" * 100))})


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter 'dir'; allowed: directory"):
        open_transport("loopback", "a", {"dir": "/tmp"})


def test_tags_wait_in_order_while_the_peer_does_not_collect(crew: Any) -> None:
    one, two = crew.agent("loopback"), crew.agent("loopback")
    one.transport.connect("two", two.transport.metadata())
    for number in range(2000):
        one.transport.tell("two", number.to_bytes(2, "big"))
    seen: list[bytes] = []
    until = time.monotonic() + 60
    while len(seen) < 2000 and time.monotonic() < until:
        one.transport.arrivals()
        seen += [arrival.tag for arrival in two.transport.arrivals()]
    assert seen == [number.to_bytes(2, "big") for number in range(2000)]


def test_a_peer_that_never_collects_is_an_error_in_the_end(crew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "_OUTBOX_MAX", 100)
    one, two = crew.agent("loopback"), crew.agent("loopback")
    one.transport.connect("two", two.transport.metadata())

    def tell_many() -> None:
        for _ in range(100_000):
            one.transport.tell("two", b"t")

    with pytest.raises(TransportError, match="leaves 100 tags uncollected"):
        tell_many()


def test_a_peer_that_closed_is_never_written_to(crew: Any) -> None:
    one, two = crew.agent("loopback"), crew.agent("loopback")
    one.transport.connect("two", two.transport.metadata())
    two.transport.close()
    one.pool[:] = 1
    with pytest.raises(PeerDisconnected, match="'two'"):
        one.transport.write("two", one.at(0), two.at(0), u64(4096), b"t")
    assert two.pool[0] == 0


def test_datagrams_that_are_no_tags_are_dropped(crew: Any) -> None:
    import socket

    agent = crew.agent("loopback")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.connect(agent.transport.describe()["socket"])
        for junk in (b"", b"x", b"x" * 18, b"\xff" * 17, b"0" * 16 + b"\xff\xff" + b"short"):
            stranger.send(junk)
        stranger.send(b"0" * 16 + b"\x02\x00\xff\xfetag of a name that is no text")
    assert [arrival.tag for arrival in agent.collect(1)] == [b"tag of a name that is no text"]


def test_a_copy_goes_on_where_the_kernel_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel copies at most 2 GiB per call; a stand-in stops at arbitrary places."""
    source = np.random.default_rng(5).integers(0, 256, 3000, np.uint8)
    target = np.zeros(3000, np.uint8)
    real = loopback._LIBC.process_vm_writev

    class Stingy:
        def process_vm_writev(self, pid: int, here: int, n: int, there: int, m: int, flags: int) -> int:
            import ctypes

            first = (ctypes.c_uint64 * 2).from_address(here)
            again = (ctypes.c_uint64 * 2).from_address(there)
            one_here = (ctypes.c_uint64 * 2)(first[0], min(first[1], 700))
            one_there = (ctypes.c_uint64 * 2)(again[0], min(again[1], 700))
            written: int = real(pid, ctypes.addressof(one_here), 1, ctypes.addressof(one_there), 1, 0)
            return written

    loopback.allow_siblings()
    monkeypatch.setattr(loopback, "_LIBC", Stingy())
    offsets = u64(0, 1000, 1500)
    loopback.copy_into(
        os.getpid(), "us", offsets + source.ctypes.data, offsets + target.ctypes.data, u64(1000, 500, 1500)
    )
    assert (source == target).all()


def test_memory_that_is_not_mapped_is_an_error_of_ours() -> None:
    loopback.allow_siblings()
    source = np.zeros(8, np.uint8)
    with pytest.raises(TransportError, match="cannot write into process"):
        loopback.copy_into(os.getpid(), "us", u64(source.ctypes.data), u64(4096), u64(8))
