"""CUDA events, and a pool that reuses an event's handle after the event object is garbage collected."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvctl_agent.device.driver import Context, checked, load, load_short_calls
from kvctl_agent.errors import DeviceError


class CudaEvent:
    """A CUDA event that has been recorded; `handle` is the driver's handle."""

    __slots__ = ("_context", "_done", "_owner", "handle")

    def __init__(self, context: Context, handle: Any, owner: Any) -> None:
        """Wraps a recorded event; keeps a reference to `owner`, for example the engine's event that owns the handle."""
        self.handle = handle
        self._context = context
        self._owner = owner
        self._done = False

    def done(self) -> bool:
        if not self._done:
            status = load_short_calls().cuEventQuery(self.handle)[0]
            self._done = not status or self._is_done(status)
        return self._done

    def _is_done(self, status: Any) -> bool:
        """Returns whether the event is done, given a status of `cuEventQuery` other than success.

        Raises:
            DeviceError: a kernel failed.
        """
        driver = load()
        if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            # The thread has no context yet. An engine's thread keeps its context, with which any query works.
            self._context.enter()
            status = driver.cuEventQuery(self.handle)[0]
        if status == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        checked((status,), "a kernel failed")
        return True

    def wait(self, stream: Any) -> None:
        # Within the event's context, because the default stream's handle is 0 on every device.
        with self._context.visit():
            handle = getattr(stream, "cuda_stream", stream)
            checked(load_short_calls().cuStreamWaitEvent(handle, self.handle, 0), "cannot make a stream wait")


class _PooledEvent(CudaEvent):
    """An event whose handle is returned to the pool's free list (`owner`) when the object is garbage collected."""

    __slots__ = ()

    def __del__(self) -> None:
        # The stream may not have reached the event yet: a wait that has been enqueued is not affected by reuse.
        self._owner.append(self.handle)


class EventPool:
    """Pool of the events of one context, usable from any thread."""

    def __init__(self, context: Context) -> None:
        self._driver = load()
        self._calls = load_short_calls()
        self._context = context
        self._free: deque[Any] = deque()
        self._flags = self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING

    def record(self, stream: Any) -> CudaEvent:
        """Records an event on a stream of this context, with a handle from the pool or a new one.

        Raises:
            DeviceError: the driver failed.
        """
        try:
            handle = self._free.pop()
        except IndexError:
            with self._context.visit():
                handle = checked(self._driver.cuEventCreate(self._flags), "no event")
        event = _PooledEvent(self._context, handle, self._free)
        checked(self._calls.cuEventRecord(handle, stream), "cannot record an event")
        return event


def event_of(context: Context, event: Any) -> CudaEvent:
    """Wraps an engine's event: a `torch.cuda.Event`, an object with `cuda_event`, a handle, or a `CudaEvent`.

    Raises:
        DeviceError: the object is not an event, or the event has not been recorded.
    """
    if isinstance(event, CudaEvent):
        return event
    handle = getattr(event, "cuda_event", event)
    # Torch creates the driver's event when it is first recorded.
    if handle is None or handle == 0:
        raise DeviceError(f"{event!r} has not been recorded: call record(stream) before passing it")
    if not hasattr(handle, "__int__"):
        raise DeviceError(f"{event!r} is not a CUDA event: it has no cuda_event")
    return CudaEvent(context, handle, event)
