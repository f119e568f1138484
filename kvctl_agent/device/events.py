"""Events of CUDA streams: taken from a pool, and back in it when nobody has them any more."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvctl_agent.device.driver import Context, checked, load
from kvctl_agent.errors import DeviceError


class CudaEvent:
    """A recorded event; `handle` is the driver's."""

    __slots__ = ("_context", "_keeps", "_passed", "handle")

    def __init__(self, context: Context, handle: Any, keeps: Any) -> None:
        """
        Args:
            keeps: what must live as long as this: the engine's own event, say.
        """
        self.handle = handle
        self._context = context
        self._keeps = keeps
        self._passed = False

    def done(self) -> bool:
        if not self._passed:
            status = load().cuEventQuery(self.handle)[0]
            self._passed = not status or self._passes(status)
        return self._passed

    def _passes(self, status: Any) -> bool:
        """What another answer than yes means."""
        driver = load()
        if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            # A thread that has no context yet; one of the engine's keeps the one it has, which any query may use.
            self._context.enter()
            status = driver.cuEventQuery(self.handle)[0]
        if status == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        checked((status,), "a kernel failed")
        return True

    def wait(self, stream: Any) -> None:
        # Within our context: the default stream's handle is 0 on every device.
        with self._context.visit():
            handle = getattr(stream, "cuda_stream", stream)
            checked(load().cuStreamWaitEvent(handle, self.handle, 0), "cannot make a stream wait")


class _Taken(CudaEvent):
    """An event of a pool; what it keeps is the pool's free ones, among which it is again when this is garbage."""

    __slots__ = ()

    def __del__(self) -> None:
        # Also one that the stream has not reached: who waits for it waits for what it was when they began to.
        self._keeps.append(self.handle)


class EventPool:
    """Events of one context, for any thread."""

    def __init__(self, context: Context) -> None:
        self._driver = load()
        self._context = context
        self._free: deque[Any] = deque()
        self._flags = self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING

    def record(self, stream: Any) -> CudaEvent:
        """The moment that comes now on a stream of this context; makes an event only where no used one is free.

        Raises:
            DeviceError: the driver failed.
        """
        try:
            handle = self._free.pop()
        except IndexError:
            with self._context.visit():
                handle = checked(self._driver.cuEventCreate(self._flags), "no event")
        event = _Taken(self._context, handle, self._free)
        checked(self._driver.cuEventRecord(handle, stream), "cannot record an event")
        return event


def event_of(context: Context, given: Any) -> CudaEvent:
    """An engine's event as ours: a `torch.cuda.Event`, anything with `cuda_event`, a handle, or one of ours.

    Raises:
        DeviceError: it is none, or was not recorded yet.
    """
    if isinstance(given, CudaEvent):
        return given
    handle = getattr(given, "cuda_event", given)
    # Torch makes the event when it is first recorded.
    if handle is None or handle == 0:
        raise DeviceError(f"{given!r} was not recorded yet: call record(stream) before you hand it over")
    if not hasattr(handle, "__int__"):
        raise DeviceError(f"{given!r} is no CUDA event: it has no cuda_event")
    return CudaEvent(context, handle, given)
