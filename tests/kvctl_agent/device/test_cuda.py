from __future__ import annotations

import numpy as np
import pytest

from kvctl.lab.ranks.sizing import free_bytes
from kvctl_agent.device.base import Device
from kvctl_agent.device.cuda import open_device
from kvctl_agent.errors import DeviceError, DeviceUnavailable

MIB = 1 << 20


def test_a_device_is_opened_once(driver):
    device: Device = open_device(1)
    assert open_device(1) is device
    assert open_device(0) is not device
    assert (device.index, device.name) == (1, "GPU 1 (NVIDIA Stand-in)")


@pytest.mark.parametrize(("devices", "words"), [(1, "only GPU 0"), (2, "GPUs 0 to 1")])
def test_a_device_that_is_not_there(driver, devices, words):
    driver.devices = devices
    for index in (-1, 2):
        with pytest.raises(DeviceUnavailable, match=f"no GPU {index} here, {words}: see CUDA_VISIBLE_DEVICES"):
            open_device(index)


def test_no_call_changes_the_threads_context_but_enter(driver):
    device = open_device(1)
    memory = device.allocate(MIB)
    device.fill(memory.addr, MIB, 1)
    device.copy(memory.addr, memory.addr + 512, 512)
    device.now()
    device.describe()
    memory.close()
    assert driver.stack == []
    device.enter()
    assert driver.stack == [1001]


def test_memory_has_blocks_of_its_own_and_goes_back_once(driver):
    device = open_device(0)
    memories = [device.allocate(nbytes) for nbytes in (1, 2 * MIB, 2 * MIB + 1)]
    assert [memory.nbytes for memory in memories] == [1, 2 * MIB, 2 * MIB + 1]
    assert sorted(driver.allocated.values()) == [2 * MIB, 2 * MIB, 4 * MIB]
    for memory in memories * 2:
        memory.close()
    assert not driver.allocated


def test_no_room_says_how_much_was_asked_for_and_how_much_is_free(driver):
    device = open_device(0)
    with pytest.raises(DeviceError, match=r"GPU 0 .*cannot allocate 9\.00 GiB: .*8\.00 of 16\.00 GiB are free"):
        device.allocate(9 << 30)


@pytest.mark.parametrize("fabric", [True, False])
def test_made_memory_is_mapped_for_all_gpus_that_reach_it(driver, fabric):
    driver.fabric = fabric
    memory = open_device(0).allocate(3 * MIB, "vmm")
    assert driver.opened == {memory.addr: 4 * MIB}
    assert driver.rights == {memory.addr: [0, 1]}
    assert memory.nbytes == 3 * MIB
    assert len(driver.made) == 1
    for _ in range(2):
        memory.close()
    assert not driver.opened
    assert not driver.made


@pytest.mark.parametrize("function", ["cuMemMap", "cuMemSetAccess"])
def test_made_memory_that_cannot_be_mapped_leaves_nothing(driver, function):
    device = open_device(0)
    driver.failing[function] = (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
    before = driver.calls["cuMemAddressFree"]
    with pytest.raises(DeviceError, match=r"cannot make 3\.00 MiB"):
        device.allocate(3 * MIB, "vmm")
    assert not driver.opened
    assert not driver.made
    assert driver.calls["cuMemAddressFree"] == before + 1


def test_bytes_go_up_and_down(driver):
    device = open_device(0)
    memory = device.allocate(MIB)
    device.fill(memory.addr, MIB, 0xDB)
    given = np.arange(3000, dtype=np.int64).astype(np.uint8)
    device.upload(memory.addr + 100, given[::3])
    out = np.zeros(1200, np.uint8)
    device.download(memory.addr, out)
    assert (out[:100] == 0xDB).all()
    assert np.array_equal(out[100:1100], given[::3])
    assert (out[1100:] == 0xDB).all()
    assert device.copy(memory.addr + 5000, memory.addr + 100, 1000).done()
    device.download(memory.addr + 5000, out[:1000])
    assert np.array_equal(out[:1000], given[::3])
    with pytest.raises(DeviceError, match="not contiguous"):
        device.download(memory.addr, out[::2])
    memory.close()


def test_now_is_a_moment_of_a_stream_that_nothing_is_put_on(driver):
    device = open_device(0)
    driver.patience = 1
    event = device.now()
    assert not event.done()
    assert event.done()
    assert device.event_of(event) is event


@pytest.mark.parametrize("fabric", [True, False])
def test_describe(driver, fabric):
    driver.fabric = fabric
    told = open_device(0).describe()
    assert told["uuid"] == "GPU-00000000-0000-0000-0000-000000000000"
    assert (told["capability"], told["multiprocessors"], told["driver_cuda"]) == ("9.0", 132, "13.0")
    assert (told["memory_bytes"], told["free_bytes"], told["peers"]) == (16 << 30, 8 << 30, {1: "nvlink"})
    assert told["fabric"] is True if fabric else "CUDA_ERROR_NOT_PERMITTED" in told["fabric"]


def test_a_forked_child_is_told_so(driver):
    device = open_device(0)
    driver.failing["cuCtxPushCurrent"] = (driver.CUresult.CUDA_ERROR_NOT_INITIALIZED,)
    with pytest.raises(DeviceError, match="forked by a process that has used it: start workers by spawn"):
        device.allocate(MIB)


def test_asking_for_free_memory_leaves_no_context_behind(driver):
    assert free_bytes(1) == driver.free_bytes
    assert driver.calls["cuDevicePrimaryCtxRetain"] == driver.calls["cuDevicePrimaryCtxRelease"] == 1
    driver.failing["cuMemGetInfo"] = (driver.CUresult.CUDA_ERROR_NOT_INITIALIZED,)
    with pytest.raises(DeviceError, match="GPU 1: its free memory cannot be read"):
        free_bytes(1)
    assert driver.calls["cuDevicePrimaryCtxRetain"] == driver.calls["cuDevicePrimaryCtxRelease"] == 2
