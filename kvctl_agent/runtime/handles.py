"""Handles of rooms, which the engine holds, and the registry of those that are open.

A handle's calls only enqueue, and its state is read without a lock.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import encodable, integer, layer_range, shown
from kvctl_agent.device.base import Device, Event
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.layout.sizes import as_list, check_size
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.messages import MAX_TEXT
from kvctl_agent.runtime.event_poller import EventPoller, PendingEvent
from kvctl_agent.runtime.page_owners import Destinations

_MAX_PAGE = int(np.iinfo(np.int32).max)
_MAX_ROOM = (1 << 64) - 1
_LONGEST_WAIT_S = 1e9


class Handle:
    """State of one room as the control loop last told it."""

    def __init__(self, room: int, post: Callable[[ev.Event], None]) -> None:
        self.room = room
        self.state = RoomState.BOOTSTRAPPING
        self.error: Failure | None = None
        self.released = False  # its pages may be reused: nothing of the room is in flight
        self._post = post
        self._changed = threading.Condition(threading.Lock())

    def wait(self, timeout: float) -> RoomState:
        """Wait until the room has ended and its pages are free, or for `timeout` seconds; returns the state then.

        Raises:
            LocalProtocolError: `timeout` is no number.
        """
        deadline = time.monotonic() + check_timeout(timeout)
        with self._changed:
            while not (self.state.finished and self.released):
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
        return self.state

    def abort(self, reason: str) -> None:
        """Give the room up; it fails on every rank with this as its first cause. Nothing happens where it has ended.

        Args:
            reason: text; the first 4096 characters count.

        Raises:
            LocalProtocolError: `reason` is no text.
        """
        if not isinstance(reason, str):
            raise LocalProtocolError(f"room {self.room}: reason is {shown(reason)}: it must be text")
        self.post_unless_over(ev.AbortRoom(self.room, encodable(str(reason[:MAX_TEXT]))))

    def post_unless_over(self, event: ev.Event) -> bool:
        """Pass an event on; False where the room has ended, whose number may be another room's by now."""
        with self._changed:
            if self.state.finished:
                return False
            self._post(event)
            return True

    def change_state(self, state: RoomState, failure: Failure | None) -> None:
        """Called by the control loop."""
        with self._changed:
            self.error = failure
            self.state = state
            self._changed.notify_all()

    def release(self) -> None:
        """Called by the control loop."""
        with self._changed:
            self.released = True
            self._changed.notify_all()


class PoolLimits(NamedTuple):
    """What a rank's pool and stage allow in an engine's calls; every method raises LocalProtocolError beyond it."""

    num_pages: int
    aux_slots: int
    layers: range
    state_slots: tuple[int, ...]  # of each state component, in the model's order

    def opening(
        self,
        room: int,
        instance: str,
        pages: Any,
        prefix_pages: int,
        aux_index: int | None,
        state_indices: Sequence[Any],
        prefill_only: bool,
    ) -> ev.OpenRoom:
        """What a decode engine wants of a room, checked; also raises LayoutError for too many pages."""
        indices = self.pages(room, pages)
        prefill_only = check_flag(f"room {room}: prefill_only", prefill_only)
        if prefill_only and (prefix_pages or len(indices)):
            raise LocalProtocolError(f"room {room}: a prefill-only room has no pages and no prefix here")
        return ev.OpenRoom(
            room=room,
            nonce=secrets.randbits(63) | 1,
            pages=indices,
            prefix_pages=prefix_pages,
            total_pages=check_size("prefix and pages", prefix_pages + len(indices), minimum=0),
            aux_index=self.aux(room, aux_index),
            instance=instance,
            states=self.states(room, state_indices),
            prefill_only=prefill_only,
        )

    def pages(self, room: int, indices: Any) -> ev.Pages:
        """Page numbers of this rank's pool."""
        pages = page_array(indices, f"room {room}: pages")
        if len(pages) and int(pages.max()) >= self.num_pages:
            raise LocalProtocolError(f"room {room}: page {pages.max()} is outside the pool of {self.num_pages}")
        return pages

    def aux(self, room: int, index: int | None) -> int:
        """An aux row's number, -1 for none."""
        if index is None:
            return -1
        number = integer(index)
        if number is None or not 0 <= number < self.aux_slots:
            text = f"room {room}: aux_index is {shown(index)}: it must be None or a row of the pool's {self.aux_slots}"
            raise LocalProtocolError(text)
        return number

    def states(self, room: int, indices: Sequence[Any]) -> tuple[ev.Pages, ...]:
        """Item numbers of each state component; none of one that this rank's pipeline stage has no layers of."""
        lists = as_list(indices)
        if lists is None:
            text = f"room {room}: state_indices is {shown(indices)}: it must have a list of items for each component"
            raise LocalProtocolError(text)
        if len(lists) > len(self.state_slots):
            raise LocalProtocolError(
                f"room {room}: {len(lists)} lists of state items, the model has {len(self.state_slots)} components"
            )
        arrays = tuple(page_array(items, f"room {room}: state_indices") for items in lists)
        for items, slots in zip(arrays, self.state_slots, strict=False):
            if len(items) and slots and int(items.max()) >= slots:
                raise LocalProtocolError(f"room {room}: state item {items.max()} is outside the pool's {slots}")
        return tuple(items if slots else items[:0] for items, slots in zip(arrays, self.state_slots, strict=False))

    def group(self, room: int, layers: range) -> tuple[int, int]:
        """A layer group of this rank as [lo, hi)."""
        own = self.layers
        if not isinstance(layers, range):
            raise LocalProtocolError(f"room {room}: layers is {shown(layers)}: it must be a range of layers")
        if layers.step != 1 or not own.start <= layers.start < layers.stop <= own.stop:
            raise LocalProtocolError(
                f"room {room}: {layers} is no group of this rank's layers {layer_range(own.start, own.stop)}"
            )
        return layers.start, layers.stop


class Send(Handle):
    """A room on a prefill rank. Calls come from the engine's scheduler thread; none blocks or synchronises."""

    def __init__(
        self, room: int, post: Callable[[ev.Event], None], bounds: PoolLimits, forwards: EventPoller | None = None
    ) -> None:
        """`forwards` waits for the engine's events; None where the pool is host memory, which knows none."""
        super().__init__(room, post)
        self._bounds = bounds
        self._forwards = forwards
        self._last = False
        self._finished = False

    @property
    def sent(self) -> bool:
        """The prefill may release the room's pages."""
        return self.released

    def prefetch(self, groups: Iterable[range] = ()) -> None:
        """The forward is about to start: ask for staging now, so that grants are there when data is.

        Args:
            groups: the layer groups that `layers` will be called with, as `Agent.layer_groups` gave them; none where
                `pages` will be called. A cell of the grid is cut into parts once, so what is said first holds.

        Raises:
            LocalProtocolError: `groups` is no list, or a group is not consecutive layers of this rank.
        """
        most = len(self._bounds.layers)
        try:
            given = list(islice(groups, most + 1))
        except Exception:  # the engine's own type
            given = []
            most = -1
        if len(given) > most:
            raise LocalProtocolError(
                f"room {self.room}: groups is {shown(groups)}: it must be a list of ranges of this rank's layers"
            )
        cut = tuple(self._bounds.group(self.room, group) for group in given)
        self.post_unless_over(ev.Prefetch(self.room, cut, time.monotonic_ns()))

    def pages(self, indices: Any, last: bool = False, event: Any = None) -> None:
        """The next pages of the prompt are computed, in all layers of this rank; or will be, once `event` is done.

        Args:
            indices: page numbers in this rank's pool (sequence, array or CPU tensor of integers), in prompt order from
                position 0 on; pages that the decode side has cached are skipped here.
            last: nothing follows.
            event: of a pool on a device: recorded behind the forward on the stream that it runs on
                (`torch.cuda.Event`, anything with `cuda_event`, or a handle). Record it anew only once the room has
                ended, or for a later forward of the same stream. None: they are computed.

        Raises:
            LocalProtocolError: pages after the last ones, a page outside the pool, no list of page numbers, or no
                event of the pool's device.
        """
        if self._last:
            raise LocalProtocolError(f"room {self.room}: pages after the last ones")
        self._last = self._computed(indices, last, None, event)

    def layers(self, layers: range, indices: Any, last: bool = False, event: Any = None) -> None:
        """The next pages of the prompt are computed in one layer group; the others follow with the same pages.

        Args:
            layers: consecutive layers of this rank, by their global ids.
            indices: as for `pages`.
            last: no more pages follow; say so with every group of the last chunk.
            event: as for `pages`, recorded behind this group.

        Raises:
            LocalProtocolError: layers that are not this rank's, the room is finished, or as `pages`.
        """
        if self._finished or self._last:
            raise LocalProtocolError(f"room {self.room}: layers after the last ones")
        group = self._bounds.group(self.room, layers)
        self._computed(indices, last, group, event)

    def finish(self, aux_index: int | None = None, state_indices: Sequence[Any] = ()) -> None:
        """Nothing follows but the aux row `aux_index` and the state; also ends a room whose last chunk is empty.

        Args:
            aux_index: row of this rank's aux tensor.
            state_indices: for each state component, in the model's order, the items of this room in this rank's pool.

        Raises:
            LocalProtocolError: called twice, or the aux row or an item is outside the pool.
        """
        if self._finished:
            raise LocalProtocolError(f"room {self.room} was finished already")
        aux = self._bounds.aux(self.room, aux_index)
        states = self._bounds.states(self.room, state_indices)
        self._last = self._finished = True
        self._tell(lambda at_ns: ev.Finish(self.room, aux, at_ns, states))

    def _computed(self, indices: Any, last: bool, group: tuple[int, int] | None, event: Any) -> bool:
        """Returns `last`."""
        last = check_flag(f"room {self.room}: last", last)
        pages = self._bounds.pages(self.room, indices)
        if event is None:
            self._tell(lambda at_ns: ev.SendPages(self.room, pages, last, at_ns, group))
            return last
        if self._forwards is None:
            raise LocalProtocolError(f"room {self.room}: event= is for pools on a device, this one is host memory")
        moment = self._forwards.moment(self.room, event)
        self.post_unless_over(ev.Launched(self.room))
        self._tell(lambda at_ns: ev.SendPages(self.room, pages, last, at_ns, group, launched=True), moment)
        return last

    def _tell(self, make: Callable[[int], ev.Event], moment: PendingEvent | None = None) -> None:
        """Behind everything that was said of the room before, and no sooner than the moment."""
        if self._forwards is None:
            self.post_unless_over(make(time.monotonic_ns()))
        else:
            self._forwards.tell(self, moment, make)


class Receive(Handle):
    """A room on a decode rank; `state` SUCCESS means that decode may start."""

    def __init__(self, room: int, post: Callable[[ev.Event], None], device: Device | None = None) -> None:
        """`device` is where the pool is; None: host memory."""
        super().__init__(room, post)
        self._device = device
        self._event: Event | None = None

    @property
    def event(self) -> Event | None:
        """What an engine's stream waits for before it reads the pages: `stream.wait_event(receive.event)`.

        SUCCESS is said only when every kernel and write that filled them has ended and is visible to the device's next
        kernel, whoever launches it. So there is nothing left to wait for, and this is a moment that has come; an
        engine that orders its streams by events has one all the same. None before SUCCESS, and for host memory.

        Raises:
            DeviceError: a kernel has failed on the device.
        """
        if self._event is None and self._device is not None and self.state is RoomState.SUCCESS:
            self._event = self._device.now()
        return self._event


OnState = Callable[[Send | Receive, RoomState], None]


class HandleRegistry:
    """Registry of one agent's open handles; `add` may be called from any thread, the rest by the control loop.

    Args:
        on_state: called at each change of a room's state; it must only enqueue.
        destinations: of a decode rank: which room its memory belongs to; also an attribute.
    """

    def __init__(self, name: str, on_state: OnState | None, destinations: Destinations | None = None) -> None:
        self._name = name
        self._on_state = on_state
        self.destinations = destinations
        self._handles: dict[int, Send | Receive] = {}
        self._lock = threading.Lock()

    def add(self, handle: Send | Receive, written: tuple[ev.Pages, ...] = ()) -> None:
        """Add a new room; `written` is the memory that it receives into, as `Destinations.take` wants it.

        Raises:
            LocalProtocolError: its number is in use here, or its memory belongs to another room.
        """
        with self._lock:
            if handle.room in self._handles:
                raise LocalProtocolError(f"room {handle.room} is in use on {self._name}")
            if self.destinations is not None and written:
                self.destinations.take(handle.room, written)
            self._handles[handle.room] = handle

    @property
    def rooms(self) -> list[int]:
        """Rooms whose handles have not ended."""
        return list(self._handles)

    def change_state(self, action: ev.StateChanged) -> None:
        """A room has reached a state."""
        room, state = action.room, action.state
        handle = self._handles.get(room)
        if handle is None:
            return
        if state is RoomState.SUCCESS:  # before the engine can know and give the pages to another room
            self._free(room)
        handle.change_state(state, action.failure)
        self._forget(handle)
        if self._on_state is not None:
            self._on_state(handle, state)

    def release(self, action: ev.Released) -> None:
        """A room's pages are free."""
        handle = self._handles.get(action.room)
        if handle is not None:
            self._free(action.room)
            handle.release()
            self._forget(handle)

    def refuse(self, room: int, text: str) -> None:
        """The machine does not take this room."""
        handle = self._handles.get(room)
        if handle is not None:
            self._free(room)
            handle.release()
            self.change_state(ev.StateChanged(room, RoomState.FAILED, self._failure("KV_ROOM_DUPLICATE", text)))

    def finish(self, handle: Send | Receive) -> None:
        """End a room of which nothing moves: it has succeeded at once."""
        handle.release()
        handle.change_state(RoomState.SUCCESS, None)
        if self._on_state is not None:
            self._on_state(handle, RoomState.SUCCESS)

    def close(self) -> None:
        """Fail what is left. Not released: whoever writes to these pages has not said that nothing is in flight."""
        for handle in list(self._handles.values()):
            text = f"agent {self._name} was closed with the room in flight"
            handle.change_state(RoomState.FAILED, self._failure("AGENT_CLOSED", text))
        self._handles.clear()

    def _free(self, room: int) -> None:
        if self.destinations is not None:
            with self._lock:
                self.destinations.free(room)

    def _failure(self, code: str, text: str) -> Failure:
        return {"rank": self._name, "code": code, "at_ns": time.time_ns(), "text": text}

    def _forget(self, handle: Send | Receive) -> None:
        if handle.state.finished and handle.released:
            with self._lock:
                self._handles.pop(handle.room, None)


def check_room(room: object) -> int:
    """A room's number as an int; raises LocalProtocolError for anything but an unsigned integer of 64 bits."""
    return check_size("room", room, 0, _MAX_ROOM, LocalProtocolError)


def check_flag(name: str, value: object) -> bool:
    """Raises LocalProtocolError for anything but a bool, Python's or numpy's."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise LocalProtocolError(f"{name} is {shown(value)}: it must be True or False")


def check_timeout(seconds: object) -> float:
    """Seconds that a call may wait; raises LocalProtocolError for what is no number."""
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or seconds != seconds:
        raise LocalProtocolError(f"timeout is {shown(seconds)}: it must be a number of seconds")
    return _LONGEST_WAIT_S if not seconds <= _LONGEST_WAIT_S else max(float(seconds), 0.0)


def page_array(indices: Any, name: str = "pages") -> ev.Pages:
    """Page numbers as a private int32 array; `name` is the argument's.

    Raises:
        LocalProtocolError: not a flat list of integers in the range of a page number.
    """
    try:
        pages = np.asarray(indices)
    except Exception as error:  # ragged lists, tensors of another device, the engine's own types
        if hasattr(indices, "__cuda_array_interface__"):
            raise LocalProtocolError(
                f"{name}: an array on a GPU; give page numbers from host memory: reading them would synchronise"
            ) from None
        raise LocalProtocolError(f"{name}: {shown(indices)} is no list of integers: {error}") from None
    if pages.size == 0:
        return np.empty(0, np.int32)
    if pages.ndim != 1 or pages.dtype.kind not in "iu":
        raise LocalProtocolError(f"{name}: {shown(indices)} ({pages.dtype} {pages.shape}) is no flat list of integers")
    if int(pages.min()) < 0 or int(pages.max()) > _MAX_PAGE:
        raise LocalProtocolError(f"{name}: {pages.min()}..{pages.max()} are not in 0..{_MAX_PAGE}")
    return pages.astype(np.int32)  # a copy: the engine may reuse its array at once
