"""Whose memory is mapped, and what is said where it is not."""

from __future__ import annotations

import os
from typing import Any

import pytest
from msgspec.structs import replace

from kvctl_agent.protocol.messages import PeerInfo, SharedMemory
from kvctl_agent.runtime.liveness import host_identity
from kvctl_agent.runtime.peer_connections import map_peer_memory
from tests.support.host_device import HostDevice


class Spy(HostDevice):  # type: ignore[misc]  # found at run time
    """Remembers how it was asked, and maps anything."""

    def open(self, exports: Any, same_process: bool = False) -> Any:
        self.asked = list(exports), same_process
        return super().open([each._replace(handle=f"{os.getpid()}:".encode()) for each in exports], same_process)


@pytest.fixture
def who() -> PeerInfo:
    """A decode rank of this process."""
    shared = SharedMemory(4096, 8192, "ipc", b"handle", "GPU-1")
    return PeerInfo("decode-0", "decode", [], [], 0, {}, {}, "nixl", b"", host_identity(), os.getpid(), shared=[shared])


@pytest.mark.parametrize(
    ("pid", "same_process"), [(os.getpid(), True), (os.getpid() + 1, False)], ids=["same process", "another"]
)
def test_a_peer_of_this_host_is_mapped(who: PeerInfo, pid: int, same_process: bool) -> None:
    device = Spy(lane="nvlink")
    mapping, why_not = map_peer_memory(device, replace(who, pid=pid))
    assert mapping is not None
    assert (mapping.lane, why_not) == ("nvlink", "")
    (export,), same = device.asked
    assert tuple(export) == (4096, 8192, "ipc", b"handle", "GPU-1")
    assert same is same_process


def test_one_of_another_host_only_by_fabric_handles(who: PeerInfo) -> None:
    device = Spy(lane="fabric")
    away = replace(who, host="another")
    mapping, why_not = map_peer_memory(device, away)
    assert mapping is None
    assert why_not.startswith("decode-0 is on another host, and its memory has no fabric handles")
    fabric = [replace(each, kind="fabric") for each in away.shared]
    mapping, _ = map_peer_memory(device, replace(away, shared=fabric))
    assert mapping is not None
    assert device.asked[1] is False, "its pid is that of another host's process"


def test_why_not(who: PeerInfo) -> None:
    refusing = Spy()
    refusing.why_no_open = "GPU 0 and GPU 1 are not peers"
    for device, peer, text in (
        (None, who, "this rank's pool is host memory"),
        (Spy(), replace(who, shared=[]), "decode-0's pool is host memory"),
        (Spy(), replace(who, shared=[], unshared="expandable segments"), "expandable segments"),
        (refusing, who, "GPU 0 and GPU 1 are not peers"),
    ):
        assert map_peer_memory(device, peer) == (None, text)
