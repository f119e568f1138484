from __future__ import annotations

import ctypes
import re
import sys
import threading
from pathlib import Path

import pytest

from kvctl_agent import device
from kvctl_agent.device import driver as binding
from kvctl_agent.device.driver import Context, checked, load, load_short_calls
from kvctl_agent.errors import DeviceError, DeviceUnavailable


def test_success_gives_what_there_is(driver):
    ok = driver.CUresult.CUDA_SUCCESS
    assert checked((ok,), "nothing") is None
    assert checked((ok, 0), "one") == 0
    assert checked((ok, 1, 2), "two") == (1, 2)


def test_an_error_says_what_was_tried_the_drivers_words_and_what_to_change(driver):
    with pytest.raises(DeviceError) as caught:
        checked((driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,), "GPU 1: a kernel failed")
    text = str(caught.value)
    assert text.startswith("GPU 1: a kernel failed: words of the driver (CUDA_ERROR_ILLEGAL_ADDRESS); ")
    assert text.endswith("restart the worker")


def test_out_of_memory_says_how_much_there_is_and_which_keys_take_less(driver):
    with pytest.raises(DeviceError, match=r"8\.00 of 16\.00 GiB are free; reduce staging_buffer_mb"):
        checked((driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None), "cannot allocate")
    driver.failing["cuMemGetInfo"] = (driver.CUresult.CUDA_ERROR_INVALID_CONTEXT, None, None)
    with pytest.raises(DeviceError, match=r"\); reduce staging_buffer_mb"):
        checked((driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None), "cannot allocate")


def test_a_status_that_has_no_remedy_is_told_all_the_same(driver):
    with pytest.raises(DeviceError, match=r"^x: words of the driver \(CUDA_ERROR_ASSERT\)$"):
        checked((driver.CUresult.CUDA_ERROR_ASSERT,), "x")
    driver.failing["cuGetErrorString"] = (driver.CUresult.CUDA_ERROR_INVALID_VALUE, None)
    with pytest.raises(DeviceError, match=r"^x: 4711 \(4711\)$"):
        checked((4711,), "x")


def test_remedies_are_for_codes_that_the_driver_has(driver):
    assert not [name for name in binding._REMEDIES if not hasattr(driver.CUresult, name)]


def test_without_the_package(driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DeviceUnavailable, match=r"pip install '\.\[gpu\]'"):
        load()


def test_without_a_driver(driver, monkeypatch):
    def no_library(flags):
        raise RuntimeError("libcuda.so.1 not found")

    monkeypatch.setattr(driver, "cuInit", no_library, raising=False)
    with pytest.raises(DeviceUnavailable, match=r"no NVIDIA driver here \(libcuda"):
        load()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("CUDA_ERROR_NO_DEVICE", "shows no GPU: see nvidia-smi -L and CUDA_VISIBLE_DEVICES"),
        ("CUDA_ERROR_SYSTEM_NOT_READY", "does not start: .*nvidia-fabricmanager"),
        ("CUDA_ERROR_NOT_INITIALIZED", "forked by a process that has used it"),
    ],
)
def test_without_a_gpu_that_starts(driver, code, words):
    driver.failing["cuInit"] = (getattr(driver.CUresult, code),)
    with pytest.raises(DeviceUnavailable, match=words):
        load()


def test_a_failure_to_load_is_not_remembered(driver):
    driver.failing["cuInit"] = (driver.CUresult.CUDA_ERROR_NO_DEVICE,)
    with pytest.raises(DeviceUnavailable):
        load()
    driver.failing.clear()
    assert load() is driver


def test_a_context_is_current_where_it_was_entered(driver):
    context = Context(1, "GPU 1")
    context.enter()
    assert driver.stack == [1001]
    seen: list[list[int]] = []
    thread = threading.Thread(target=lambda: seen.append(list(driver.stack)))
    thread.start()
    thread.join()
    assert seen == [[]]


def test_a_visit_leaves_the_threads_own_context(driver):
    ours, engines = Context(1, "GPU 1"), Context(0, "GPU 0")
    engines.enter()
    with ours.visit():
        assert driver.stack == [1000, 1001]
    assert driver.stack == [1000]
    with pytest.raises(DeviceError), ours.visit():
        checked((driver.CUresult.CUDA_ERROR_UNKNOWN,), "inside")
    assert driver.stack == [1000]


def test_every_function_that_is_used_exists_in_the_real_package_and_in_the_stand_in(driver):
    import cuda.bindings.driver as real

    assert device.__file__ is not None
    sources = [path.read_text() for path in Path(device.__file__).parent.glob("*.py")]
    used = {name for source in sources for name in re.findall(r"\.(cu[A-Z]\w+)", source)}
    assert len(used) > 30
    assert {name for name in used if not hasattr(type(driver), name)} <= {
        # Those of kernels.
        "cuLaunchKernel",
        "cuModuleGetFunction",
        "cuModuleLoadData",
    }
    enums = {name for source in sources for name in re.findall(r"\bdriver\.(CU\w+)", source)}
    assert not [name for name in used | enums if not hasattr(real, name)]


def test_short_calls_of_the_driver_itself_take_handles_and_return_statuses(driver, monkeypatch):
    queried: list[int] = []

    def query(event: int) -> int:
        queried.append(event)
        return 0 if event == 7 else driver.CUresult.CUDA_ERROR_NOT_READY

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)(query)
    monkeypatch.setattr(driver, "cuGetProcAddress", lambda *_: (0, ctypes.cast(function, ctypes.c_void_p).value, 0))
    calls = load_short_calls()
    assert calls.cuEventQuery(driver.CUevent(7)) == (0,)
    assert calls.cuEventQuery(1 << 47) == (driver.CUresult.CUDA_ERROR_NOT_READY,)
    assert queried == [7, 1 << 47]
    assert driver.calls["cuEventQuery"] == 0


def test_a_driver_that_lacks_a_short_call_is_called_through_the_package(driver):
    assert load_short_calls().cuCtxSetCurrent(1000)[0] == 0
    assert driver.calls["cuCtxSetCurrent"] == 1
