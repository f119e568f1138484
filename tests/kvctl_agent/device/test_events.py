from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import pytest

from kvctl_agent.device.driver import Context
from kvctl_agent.device.events import EventPool, event_of
from kvctl_agent.errors import DeviceError

STREAM = 77


@pytest.fixture
def pool(driver):
    context = Context(0, "GPU 0")
    context.enter()
    return EventPool(context)


def test_a_moment_comes_and_stays(driver, pool):
    driver.patience = 2
    event = pool.record(STREAM)
    assert [event.done() for _ in range(4)] == [False, False, True, True]
    assert driver.calls["cuEventQuery"] == 3


def test_events_are_made_once_and_used_again(driver, pool):
    for _ in range(5):
        pool.record(STREAM).done()
    held = [pool.record(STREAM) for _ in range(3)]
    assert len({event.handle for event in held}) == 3
    assert driver.calls["cuEventCreate"] == 3
    del held
    gc.collect()
    pool.record(STREAM)
    assert driver.calls["cuEventCreate"] == 3


def test_an_event_that_somebody_has_is_not_used_again(driver, pool):
    driver.patience = 1
    first = pool.record(STREAM)
    assert pool.record(STREAM).handle != first.handle
    assert not first.done()
    assert first.done()


def test_a_failed_kernel_is_told_by_the_events_behind_it(driver, pool):
    event = pool.record(STREAM)
    driver.failing["cuEventQuery"] = (driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"a kernel failed: .*restart the worker"):
            event.done()


def test_a_thread_without_a_context_may_ask_and_an_engines_keeps_its_own(driver, pool):
    event, answers = pool.record(STREAM), []

    def ask():
        answers.append(event.done())
        answers.append(list(driver.stack))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert answers == [True, [1000]]
    Context(1, "GPU 1").enter()
    assert pool.record(STREAM).done()
    assert driver.stack == [1001]


@pytest.mark.parametrize("stream", [SimpleNamespace(cuda_stream=5), 5])
def test_an_engines_stream_waits(driver, pool, stream):
    Context(1, "GPU 1").enter()
    event = pool.record(STREAM)
    event.wait(stream)
    assert driver.waits == [(1000, 5, event.handle)]
    assert driver.stack == [1001]


def test_an_engines_event(driver, pool):
    context = Context(0, "GPU 0")
    given = SimpleNamespace(cuda_event=4242)
    assert event_of(context, given).handle == 4242
    assert event_of(context, 4242).handle == 4242
    assert event_of(context, given).done()
    ours = pool.record(STREAM)
    assert event_of(context, ours) is ours


@pytest.mark.parametrize("given", [SimpleNamespace(cuda_event=0), SimpleNamespace(cuda_event=None), None, 0])
def test_an_event_that_was_not_recorded(driver, given):
    with pytest.raises(DeviceError, match=r"call record\(stream\) before"):
        event_of(Context(0, "GPU 0"), given)


def test_what_is_no_event(driver):
    with pytest.raises(DeviceError, match="is not a CUDA event"):
        event_of(Context(0, "GPU 0"), "event")
