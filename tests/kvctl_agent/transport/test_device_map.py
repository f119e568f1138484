"""The device of an address list, of local memory and of a peer's."""

from __future__ import annotations

import numpy as np
import pytest

from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import TransportError
from kvctl_agent.transport import Region
from kvctl_agent.transport.device_map import DeviceMap

POOL = [Region(0x1000, 0x1000, HOST), Region(0x8000, 0x4000, 1), Region(0x20000, 0x100, 1), Region(0x30000, 64, HOST)]


def addresses(*addrs: int) -> np.ndarray:
    return np.array(addrs, np.uint64)


@pytest.mark.parametrize("repack", [False, True])
def test_an_address_is_of_the_region_it_lies_in(repack: bool) -> None:
    memory = DeviceMap(reversed(POOL))
    if repack:
        memory, rest = DeviceMap.unpack(memory.pack() + b"the engine's")
        assert rest == b"the engine's"
    assert memory.of(addresses(0x1000), "ours") == HOST
    assert memory.of(addresses(0x8000, 0xBFFF, 0x20000), "ours") == 1
    assert memory.of(addresses(0x30000, 0x1FFF), "ours") == HOST  # with a GPU's memory in between
    with pytest.raises(TransportError, match="2 addresses of ours mixes memory of the host and GPU 1"):
        memory.of(addresses(0x20000, 0x30000), "ours")


def test_memory_of_one_kind_is_one_row_however_much_there_is() -> None:
    many = DeviceMap(Region(at * 0x10000, 0x1000, 3) for at in range(5000))
    assert len(many.pack()) == 4 + 16
    assert many.of(addresses(7), "ours") == 3  # that it is in no region is the engine's to say


def test_nothing_registered_is_of_the_host() -> None:
    assert DeviceMap([]).of(addresses(1, 2), "ours") == HOST


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\1\0\0",
        b"\1\0\0\0" + bytes(15),
        b"\xff\xff\xff\xff" + bytes(64),
        b"\1\0\0\0" + bytes(8) + (-2).to_bytes(8, "little", signed=True),
        b"\1\0\0\0" + bytes(8) + (1 << 20).to_bytes(8, "little"),
    ],
)
def test_what_is_no_map_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match=r"rows in|no such devices"):
        DeviceMap.unpack(packed)


def test_a_wild_mix_is_refused_before_a_peer_has_to_read_it() -> None:
    with pytest.raises(TransportError, match="lies mixed in 16386 places"):
        DeviceMap(Region(at, 1, at % 2) for at in range((1 << 14) + 2)).pack()
