from __future__ import annotations

import numpy as np
import pytest

from kvctl_agent.device.base import Export
from kvctl_agent.device.cuda import open_device
from kvctl_agent.errors import DeviceError

MIB = 1 << 20
BLOCK = 2 * MIB
OTHER = "GPU-01010101-0101-0101-0101-010101010101"


@pytest.fixture
def here(driver):
    return open_device(0)


@pytest.fixture
def there(driver):
    return open_device(1)


def test_each_allocation_is_exported_once_and_whole(there):
    one, two = sorted((there.allocate(MIB), there.allocate(MIB)), key=lambda memory: memory.addr)
    exports = there.export([(two.addr + 4096, 512), (one.addr, 256), (one.addr + 512, 256), (two.addr, MIB)])
    assert [(export.addr, export.nbytes, export.kind, export.device) for export in exports] == [
        (one.addr, BLOCK, "ipc", OTHER),
        (two.addr, BLOCK, "ipc", OTHER),
    ]
    assert [len(export.handle) for export in exports] == [64, 64]
    assert exports[0].handle != exports[1].handle
    assert there.export([]) == []


def test_what_is_no_memory_of_a_gpu_is_not_exported(there):
    with pytest.raises(DeviceError, match=f"512 bytes at 0x1000 are no memory of {OTHER}"):
        there.export([(0x1000, 512)])


def test_made_memory_without_a_fabric_handle_is_not_exported(there):
    memory = there.allocate(MIB, "vmm")
    with pytest.raises(DeviceError, match=r"set mem_pool=default, .*expandable_segments:False"):
        there.export([(memory.addr, MIB)])


def test_made_memory_with_a_fabric_handle(driver, here, there):
    driver.fabric = True
    memory = there.allocate(3 * MIB, "vmm")
    exports = there.export([(memory.addr, MIB)])
    assert [(export.addr, export.nbytes, export.kind) for export in exports] == [(memory.addr, 4 * MIB, "fabric")]
    mapping = here.open(exports)
    assert mapping.lane == "nvlink"
    at = mapping.translate(memory.addr)
    assert driver.rights[at] == [0]
    mapping.close()
    elsewhere = [export._replace(device="GPU-of-another-host") for export in exports]
    assert here.open(elsewhere).lane == "fabric"
    assert set(driver.opened) >= {memory.addr}
    # The owner's, and nothing of export and import.
    assert len(driver.made) == 1


def test_addresses_are_translated_one_by_one_and_all_at_once(here, there):
    memories = [there.allocate(MIB) for _ in range(3)]
    mapping = here.open(there.export([(memory.addr, MIB) for memory in memories]))
    theirs = np.array([[memory.addr, memory.addr + 77, memory.addr + BLOCK - 1] for memory in memories])
    ours = mapping.translate_all(theirs)
    assert ours.shape == (3, 3)
    assert ours.dtype == np.int64
    assert [mapping.translate(addr) for addr in theirs.reshape(-1).tolist()] == ours.reshape(-1).tolist()
    assert (ours - ours[:, :1]).tolist() == [[0, 77, BLOCK - 1]] * 3
    assert mapping.translate_all(np.empty((0, 2), np.int64)).shape == (0, 2)


def test_an_address_outside_is_an_error(here, there):
    memories = sorted((there.allocate(MIB) for _ in range(2)), key=lambda memory: memory.addr)
    mapping = here.open(there.export([(memory.addr, MIB) for memory in memories]))
    low, high = memories[0].addr - 1, memories[-1].addr + BLOCK
    for outside in (low, high, 0, memories[0].addr + BLOCK):
        with pytest.raises(DeviceError, match=f"{outside:#x} lies in none of the 2 allocations"):
            mapping.translate(outside)
        with pytest.raises(DeviceError, match=f"{outside:#x} lies in none"):
            mapping.translate_all(np.array([memories[0].addr, outside, memories[1].addr], np.int64))


def test_bytes_of_two_allocations_are_not_one_stretch(driver, here, there):
    """Even if their addresses are adjacent at the peer: the memory between their mappings belongs to no allocation."""
    memories = [there.allocate(MIB) for _ in range(2)]
    one, two = there.export([(memory.addr, MIB) for memory in memories])
    first, second = (here.open([export]).translate(export.addr) for export in (one, two))
    # As a peer may say that wants us to write between them.
    mapping = here.open(
        [one, two._replace(addr=one.addr + second - first)]
        if first < second
        else [two, one._replace(addr=two.addr + first - second)]
    )
    low = one.addr if first < second else two.addr
    assert mapping.translate(low, BLOCK)
    for nbytes in (BLOCK + 1, abs(second - first) + 1):
        with pytest.raises(DeviceError, match="lies in none"):
            mapping.translate(low, nbytes)
        with pytest.raises(DeviceError, match="lies in none"):
            mapping.translate_all(np.array([[low, low]], np.int64), np.array([BLOCK, nbytes], np.int64))


def test_lanes_share_one_mapping_and_the_last_one_ends_it(driver, here, there):
    memories = [there.allocate(MIB) for _ in range(2)]
    exports = there.export([(memory.addr, MIB) for memory in memories])
    one, two = here.open(exports), here.open(exports[:1])
    assert one.translate(exports[0].addr) == two.translate(exports[0].addr)
    assert driver.calls["cuIpcOpenMemHandle"] == 2
    for _ in range(2):
        one.close()
    assert len(driver.opened) == 1
    two.close()
    assert not driver.opened
    here.open(exports).close()
    assert driver.calls["cuIpcOpenMemHandle"] == 4
    assert not driver.opened


def test_a_mapping_that_fails_half_way_leaves_nothing(driver, here, there):
    memories = [there.allocate(MIB) for _ in range(2)]
    good, bad = there.export([(memory.addr, MIB) for memory in memories])
    with pytest.raises(DeviceError, match=r"cannot map 4194304 bytes of .*only 2097152 bytes long"):
        here.open([good, bad._replace(nbytes=2 * BLOCK)])
    assert not driver.opened
    here.open([good]).close()


@pytest.mark.parametrize("wrong", [{"kind": "fd"}, {"handle": b"short"}, {"nbytes": 0}, {"nbytes": -1}])
def test_a_peers_malformed_export(driver, here, wrong):
    export = Export(1 << 40, BLOCK, "ipc", bytes(64), OTHER)._replace(**wrong)
    with pytest.raises(DeviceError, match="both sides must run the same version"):
        here.open([export])
    assert not driver.calls["cuIpcOpenMemHandle"]


def test_a_handle_is_opened_with_the_own_device_current(driver, here, there, monkeypatch):
    exports = there.export([(there.allocate(MIB).addr, MIB)])
    opened, stacks = driver.cuIpcOpenMemHandle, []
    monkeypatch.setattr(
        driver, "cuIpcOpenMemHandle", lambda *args: (stacks.append(list(driver.stack)), opened(*args))[1], raising=False
    )
    there.enter()
    here.open(exports)
    assert stacks == [[1001, 1000]]


def test_lanes(driver, here, there):
    assert here.open(here.export([(here.allocate(MIB).addr, MIB)])).lane == "same device"
    exports = there.export([(there.allocate(MIB).addr, MIB)])
    assert here.open(exports).lane == "nvlink"
    driver.failing["cuDeviceGetP2PAttribute"] = (driver.CUresult.CUDA_SUCCESS, 0)
    assert here.open(exports).lane == "pcie"
    both = here.export([(here.allocate(MIB).addr, MIB)]) + exports
    assert here.open(both).lane == "pcie"


def test_a_device_that_is_not_reached(driver, here, there):
    exports = there.export([(there.allocate(MIB).addr, MIB)])
    driver.unreachable.add((0, 1))
    with pytest.raises(DeviceError, match=r"GPU 0 cannot reach the memory of GPU 1 .*no peer access"):
        here.open(exports)
    with pytest.raises(DeviceError, match="which is not visible to this process: add it to CUDA_VISIBLE_DEVICES"):
        here.open([exports[0]._replace(device="GPU-of-another-host")])
    with pytest.raises(DeviceError, match=r"cannot map memory of another host: .*CUDA_ERROR_NOT_PERMITTED"):
        here.open([exports[0]._replace(device="GPU-of-another-host", kind="fabric")])


def test_an_agent_of_the_same_process(driver, here, there):
    own, memory = here.allocate(MIB), there.allocate(MIB)
    mapping = here.open(here.export([(own.addr, MIB)]), same_process=True)
    assert mapping.lane == "same device"
    assert not driver.calls["cuCtxEnablePeerAccess"]
    exports = there.export([(memory.addr, MIB)])
    driver.failing["cuCtxEnablePeerAccess"] = (driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,)
    mapping = here.open(exports, same_process=True)
    assert (mapping.lane, mapping.translate(memory.addr)) == ("nvlink", memory.addr)
    addrs = np.array([memory.addr], np.int64)
    assert mapping.translate_all(addrs).tolist() == addrs.tolist()
    mapping.close()
    assert not driver.opened
    driver.failing["cuCtxEnablePeerAccess"] = (driver.CUresult.CUDA_ERROR_TOO_MANY_PEERS,)
    with pytest.raises(DeviceError, match=r"GPU 0 cannot reach GPU 1: .*use path staged"):
        here.open(exports, same_process=True)


def test_who_only_says_that_it_is_of_this_process_has_nothing_mapped(here, there):
    memory, ours = there.allocate(MIB), here.allocate(MIB)
    (export,) = there.export([(memory.addr, MIB)])
    for claimed in (
        export._replace(addr=ours.addr, device=here.uuid),
        export._replace(nbytes=1 << 50),
        export._replace(handle=bytes(64)),
    ):
        with pytest.raises(DeviceError, match="are not an export of this process"):
            here.open([claimed], same_process=True)
    mapping = here.open([export], same_process=True)
    with pytest.raises(DeviceError, match="lies in none of the 1 allocations"):
        mapping.translate_all(np.array([memory.addr, ours.addr], np.int64))
