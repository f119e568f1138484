"""Send and Receive, the engine's handles of rooms, and the registry of open handles.

A call of a handle only enqueues an event for the control loop; the handle's state is read without a lock.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from math import inf
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import MAX_ROOM, RoomState
from kvctl_agent.contract.values import encodable, integer, layer_range, shown
from kvctl_agent.device.base import Device, Event
from kvctl_agent.errors import LayoutError, LocalProtocolError
from kvctl_agent.layout.chunks import page_count, prefix_pages
from kvctl_agent.layout.page_indices import extent
from kvctl_agent.layout.sizes import as_list, check_size
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.machine import RECALLED
from kvctl_agent.protocol.messages import MAX_TEXT
from kvctl_agent.runtime.event_poller import EventPoller, PendingEvent
from kvctl_agent.runtime.page_owners import PageOwners
from kvctl_agent.telemetry.engine_calls import ABORT, FINISH, LAYERS, PAGES, PREFETCH, RECALL, WAIT
from kvctl_agent.telemetry.region import RegionWriter

_MAX_PAGE = int(np.iinfo(np.int32).max)
_LONGEST_WAIT_S = 1e9


class Handle:
    """Base of Send and Receive: the state of one room, as last set by the control loop."""

    def __init__(self, room: int, post: Callable[[ev.Event], None], region: RegionWriter) -> None:
        self.room = room
        self.state = RoomState.BOOTSTRAPPING
        self.error: Failure | None = None
        self.released = False  # nothing of the room is in flight any more: its pages may be reused
        self._post = post
        self._region = region
        self._lock = threading.RLock()  # reentrant, as all locks of rooms: a signal handler may close the agent
        self._changed = threading.Condition(self._lock)
        self._waiting = 0  # threads in a wait; nearly always none, and to notify none takes a microsecond

    def wait(self, timeout: float) -> RoomState:
        """Waits until the room has ended and its pages may be reused, or for `timeout` seconds; returns the state.

        Raises:
            LocalProtocolError: `timeout` is not a number.
        """
        self._wait_for(lambda: self.state.finished and self.released, timeout)
        return self.state

    def abort(self, reason: str) -> None:
        """Aborts the room: it fails on every rank with this reason. Does nothing if the room has ended.

        Args:
            reason: text, cut to 4096 characters.

        Raises:
            LocalProtocolError: `reason` is not a string.
        """
        self._region.note_call(ABORT)
        if not isinstance(reason, str):
            raise LocalProtocolError(f"room {self.room}: reason is {shown(reason)}: it must be text")
        self.post_unless_over(ev.AbortRoom(self.room, encodable(str(reason[:MAX_TEXT]))))

    def post_unless_over(self, event: ev.Event) -> bool:
        """Posts an event; returns False if the room has ended, since another room may use its number by then."""
        with self._lock:
            if self.state.finished:
                return False
            self._post(event)
            return True

    def change_state(self, state: RoomState, failure: Failure | None) -> None:
        """Sets the state of the room; called by the control loop."""
        with self._lock:
            self.error = failure
            self.state = state
            self._notify()

    def release(self) -> None:
        """Marks the room's pages as reusable; called by the control loop."""
        with self._lock:
            self.released = True
            self._notify()

    def _notify(self) -> None:
        if self._waiting:
            self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Waits until a condition is true, or for `timeout` seconds; returns whether it is."""
        seconds = check_timeout(timeout)
        with self._region.call(WAIT), self._lock:
            self._waiting += 1
            try:
                return self._changed.wait_for(condition, seconds)
            finally:
                self._waiting -= 1


class PoolLimits(NamedTuple):
    """Limits of a rank's pool and pipeline stage; each method checks an argument and raises LocalProtocolError."""

    num_pages: int
    aux_slots: int
    layers: range
    state_slots: tuple[int, ...]  # of each state component, in the model's order
    group_slots: tuple[int, ...]  # pages in the pool of each KV group, in the model's order
    group_tokens: tuple[int, ...]  # tokens of a page of each KV group
    page_tokens: int  # tokens of a page; on cp ranks that share a prompt, of the pages with one number on all of them

    def opening(
        self,
        room: int,
        instance: str,
        pages: Any,
        prefix_tokens: int,
        aux_index: int | None,
        state_indices: Sequence[Any],
        prefill_only: bool,
        tokens: int | None,
        group_pages: Sequence[Any],
        digest: int | None = None,
    ) -> ev.OpenRoom:
        """Checks the arguments of `Agent.receive`; returns the event that opens the room, with a new random nonce.

        Raises:
            LocalProtocolError: an argument is invalid.
            LayoutError: the prefix is not page-aligned, or the prompt has another number of pages.
        """
        indices = self.pages(room, pages)
        prefix = prefix_pages(prefix_tokens, self.page_tokens)
        total = check_size("prefix and pages", prefix + len(indices), minimum=0)
        tokens, digest = check_prompt(room, tokens, digest)
        if tokens:
            needed = page_count(tokens, self.page_tokens)
            if needed != total:
                raise LayoutError(
                    f"room {room}: a prompt of {tokens} tokens has {needed} pages of {self.page_tokens} tokens, but "
                    f"prefix and pages are {total}"
                )
        prefill_only = check_flag(f"room {room}: prefill_only", prefill_only)
        if prefill_only and total:
            raise LocalProtocolError(f"room {room}: a prefill-only room has no pages and no prefix here")
        if self.group_slots and not tokens and not prefill_only:
            raise LocalProtocolError(f"room {room}: the model has KV groups: pass tokens=, the length of the prompt")
        groups = self.groups(room, group_pages)
        for number, (listed, size) in enumerate(zip(groups, self.group_tokens, strict=True), 1):
            if len(listed) > (most := page_count(tokens, size)):
                raise LayoutError(f"room {room}: {len(listed)} pages of KV group {number}, the prompt has {most}")
        return ev.OpenRoom(
            room=room,
            nonce=secrets.randbits(63) | 1,
            pages=indices,
            prefix_pages=prefix,
            total_pages=total,
            aux_index=self.aux(room, aux_index),
            instance=instance,
            states=self.states(room, state_indices),
            prefill_only=prefill_only,
            tokens=tokens,
            groups=groups,
            digest=digest,
        )

    def pages(self, room: int, indices: Any) -> ev.Pages:
        """Returns page indices of this rank's pool as an int32 array."""
        pages = page_array(indices, f"room {room}: pages")
        if len(pages) and extent(pages)[1] >= self.num_pages:
            raise LocalProtocolError(f"room {room}: page {pages.max()} is outside the pool of {self.num_pages}")
        return pages

    def aux(self, room: int, index: int | None) -> int:
        """Returns the index of an aux row as an int; -1 for None."""
        if index is None:
            return -1
        number = integer(index)
        if number is None or not 0 <= number < self.aux_slots:
            text = f"room {room}: aux_index is {shown(index)}: it must be None or a row of the pool's {self.aux_slots}"
            raise LocalProtocolError(text)
        return number

    def states(self, room: int, indices: Sequence[Any]) -> tuple[ev.Pages, ...]:
        """Returns the item indices of each state component as int32 arrays, empty for components of other stages."""
        lists = indices if isinstance(indices, list | tuple) else as_list(indices)
        if lists is None:
            text = f"room {room}: state_indices is {shown(indices)}: it must have a list of items for each component"
            raise LocalProtocolError(text)
        if len(lists) > len(self.state_slots):
            raise LocalProtocolError(
                f"room {room}: {len(lists)} lists of state items, the model has {len(self.state_slots)} components"
            )
        arrays = tuple(page_array(items, f"room {room}: state_indices") for items in lists)
        for items, slots in zip(arrays, self.state_slots, strict=False):
            if len(items) and slots and extent(items)[1] >= slots:
                raise LocalProtocolError(f"room {room}: state item {items.max()} is outside the pool's {slots}")
        return tuple(items if slots else items[:0] for items, slots in zip(arrays, self.state_slots, strict=False))

    def groups(self, room: int, lists: Sequence[Any], absent: int = 0) -> tuple[ev.Pages, ...]:
        """Returns the pages of each KV group as int32 arrays, empty for groups that are omitted or of other stages.

        Args:
            absent: smallest number that is allowed; -1 if a page may be absent.
        """
        given = lists if isinstance(lists, list | tuple) else as_list(lists)
        if given is None or len(given) > len(self.group_slots):
            raise LocalProtocolError(
                f"room {room}: group_pages is {shown(lists)}: it must have a list of pages for each of the model's "
                f"{len(self.group_slots)} KV groups"
            )
        arrays = [page_array(pages, f"room {room}: group_pages", absent) for pages in given]
        arrays += [np.empty(0, np.int32)] * (len(self.group_slots) - len(arrays))
        for pages, slots in zip(arrays, self.group_slots, strict=True):
            if len(pages) and slots and extent(pages)[1] >= slots:
                raise LocalProtocolError(f"room {room}: page {pages.max()} is outside the group's pool of {slots}")
        return tuple(pages if slots else pages[:0] for pages, slots in zip(arrays, self.group_slots, strict=True))

    def group(self, room: int, layers: range) -> tuple[int, int]:
        """Returns a group of consecutive layers of this rank as (lo, hi)."""
        own = self.layers
        if not isinstance(layers, range):
            raise LocalProtocolError(f"room {room}: layers is {shown(layers)}: it must be a range of layers")
        if layers.step != 1 or not own.start <= layers.start < layers.stop <= own.stop:
            raise LocalProtocolError(
                f"room {room}: {layers} is no group of this rank's layers {layer_range(own.start, own.stop)}"
            )
        return layers.start, layers.stop


class Send(Handle):
    """Handle of a room on a prefill rank, for the engine's scheduler thread; no call blocks or waits for a device.

    Attributes:
        prefix_tokens: prompt tokens that the decode side has cached and does not receive, a multiple of the page size;
            the fewest of all decode ranks of the room. None before WAITING_FOR_INPUT, when all of them have opened it;
            then it stays, also if they recall the room and have more cached when they open it again.
    """

    def __init__(
        self,
        room: int,
        post: Callable[[ev.Event], None],
        region: RegionWriter,
        bounds: PoolLimits,
        event_poller: EventPoller | None = None,
        prefix_tokens: int | None = None,
    ) -> None:
        """Creates the handle.

        Args:
            post: puts an event into the control loop's mailbox.
            region: where the engine's calls are noted.
            bounds: limits of what may be passed.
            event_poller: poller of the engine's events; None if the pool is host memory.
            prefix_tokens: the prefix, if all decode ranks of the room have opened it already.
        """
        super().__init__(room, post, region)
        self.prefix_tokens = prefix_tokens
        if prefix_tokens is not None:
            self.state = RoomState.WAITING_FOR_INPUT
        self._bounds = bounds
        self._event_poller = event_poller
        self._last = False
        self._finished = False
        self._recalls = 0  # number of calls of `recall`
        self._recalled = 0  # number of calls after which nothing is read from the pages passed before

    @property
    def sent(self) -> bool:
        """Whether the engine may release the room's pages, since they will not be read again."""
        return self.released

    @property
    def recalled(self) -> bool:
        """Whether the engine may reuse the pages that it passed before the last `recall`: they are not read any more.

        Also true once the room is released. False before the first `recall`.
        """
        return self.released or 0 < self._recalls == self._recalled

    def recall(self) -> None:
        """Takes the room's pages back, as an engine does that preempts a request and computes it again later.

        No part begins to be sent from these pages any more, and reports that wait for a device event are dropped. Once
        `recalled` is true the engine may reuse the pages; `on_state` is called then, with the state unchanged. To go on
        it passes the whole prompt again, from position 0, under the page numbers that hold it then, by `pages` or
        `layers`, and calls `finish` again; it may do so before `recalled` is true. Parts that were sent before are not
        sent again. If all of them were, `sent` becomes true and nothing need be passed.

        The deadlines of the room continue. Does nothing if the room has ended: then the pages may be reused once it is
        released.
        """
        self._region.note_call(RECALL)
        self._last = self._finished = False
        self._recalls += 1
        event = ev.Recall(self.room, self._recalls)
        if self._event_poller is None:
            self.post_unless_over(event)
        else:
            self._event_poller.forget(self, event)

    def end_recall(self, serial: int) -> None:
        """Records the end of a recall; called by the control loop."""
        with self._lock:
            self._recalled = serial
            self._notify()

    def wait_recalled(self, timeout: float) -> bool:
        """Waits until `recalled` is true, or for `timeout` seconds; returns whether it is.

        Raises:
            LocalProtocolError: `timeout` is not a number.
        """
        return self._wait_for(lambda: self.recalled, timeout)

    def prefetch(self, groups: Iterable[range] = (), tokens: float = 0.0) -> None:
        """Announces the forward and requests staging memory, so that grants arrive before the data is computed.

        Args:
            groups: layer groups that `layers` will be called with, from `Agent.layer_groups`; empty if `pages` will be
                called. Chunks are divided into parts once, so later calls cannot change the groups.
            tokens: average tokens of a request in the `ForwardInfo` for which the groups were chosen, by which mode
                auto finds the times of this room again; 0: those of its pages in one forward.

        Raises:
            LocalProtocolError: `groups` is not a list, a group is not consecutive layers of this rank, or `tokens` is
                not a number from 0 on.
        """
        self._region.note_call(PREFETCH)
        most = len(self._bounds.layers)
        try:
            ranges = list(islice(groups, most + 1))
        except Exception:  # raised by the engine's own type
            ranges = []
            most = -1
        if len(ranges) > most:
            raise LocalProtocolError(
                f"room {self.room}: groups is {shown(groups)}: it must be a list of ranges of this rank's layers"
            )
        cut = tuple(self._bounds.group(self.room, group) for group in ranges)
        if not isinstance(tokens, Real) or not 0 <= tokens < inf:
            raise LocalProtocolError(f"room {self.room}: tokens is {shown(tokens)}: it must be a number from 0 on")
        self.post_unless_over(ev.Prefetch(self.room, cut, time.monotonic_ns(), float(tokens)))

    def pages(self, indices: Any, last: bool = False, event: Any = None, group_pages: Sequence[Any] = ()) -> None:
        """Reports that the next pages of the prompt are computed in all layers, or will be when `event` is done.

        Args:
            indices: page indices in this rank's pool (sequence, array or CPU tensor of integers), in prompt order from
                position 0 on; pages that the decode side has cached are skipped. For an engine that has the numbers on
                the device and copies them to the host before `event`: a function without arguments that returns them.
                It is called once on the agent's thread, when `event` is done.
            last: these are the last pages of the prompt.
            event: if the pool is on a device: event recorded after the forward on its stream (`torch.cuda.Event`, an
                object with `cuda_event`, or a handle). Record it again only after the room has ended, or for a later
                forward on the same stream. None: the pages are computed.
            group_pages: for each KV group, in the model's order, the next pages in its pool, as `indices`; -1 for a
                page that is not kept because it has left the group's window.

        Raises:
            LocalProtocolError: pages after the last ones, a page outside the pool, not a list of page indices, or not
                an event of the pool's device.
        """
        self._region.note_call(PAGES)
        if self._last:
            raise LocalProtocolError(f"room {self.room}: pages after the last ones")
        self._last = self._computed(indices, last, None, event, group_pages)

    def layers(
        self, layers: range, indices: Any, last: bool = False, event: Any = None, group_pages: Sequence[Any] = ()
    ) -> None:
        """Reports that the next pages are computed in one layer group; the other groups follow with the same pages.

        Args:
            layers: consecutive layers of this rank, by their global ids.
            indices: as for `pages`.
            last: these are the last pages; true for every group of the last chunk.
            event: as for `pages`, recorded after this group.
            group_pages: as for `pages`, of KV groups with layers that are computed with these layers.

        Raises:
            LocalProtocolError: the layers are not this rank's, the room is finished, or as for `pages`.
        """
        self._region.note_call(LAYERS)
        if self._finished or self._last:
            raise LocalProtocolError(f"room {self.room}: layers after the last ones")
        group = self._bounds.group(self.room, layers)
        self._computed(indices, last, group, event, group_pages)

    def finish(
        self,
        aux_index: int | None = None,
        state_indices: Sequence[Any] = (),
        pages: Any = None,
        event: Any = None,
        group_pages: Sequence[Any] = (),
    ) -> None:
        """Reports that all pages were passed and that aux row and state are ready; also ends a room without pages.

        Args:
            aux_index: row of this rank's aux tensor; None without one.
            state_indices: for each state component, in the model's order, the room's item indices in this rank's pool.
            pages: the last pages of the prompt, as `indices` for `pages`, if aux row and state are ready when they are:
                cheaper than a call of `pages` before, since a small aux row is sent with them. None: they were passed.
            event, group_pages: as for `pages`.

        Raises:
            LocalProtocolError: the method was called before, the aux row or an item is outside the pool, or as for
                `pages`.
        """
        self._region.note_call(FINISH)
        if self._finished:
            raise LocalProtocolError(f"room {self.room} was finished already")
        aux = self._bounds.aux(self.room, aux_index)
        states = self._bounds.states(self.room, state_indices)
        if pages is None:
            self._post_in_order(lambda at_ns: ev.Finish(self.room, aux, at_ns, states))
        elif self._last:
            raise LocalProtocolError(f"room {self.room}: pages after the last ones")
        else:
            self._computed(
                pages, True, None, event, group_pages, lambda last: ev.Finish(self.room, aux, last.at_ns, states, last)
            )
        self._last = self._finished = True

    def _computed(
        self,
        indices: Any,
        last: bool,
        group: tuple[int, int] | None,
        event: Any,
        group_pages: Sequence[Any],
        wrap: Callable[[ev.SendPages], ev.Event] = lambda pages: pages,
    ) -> bool:
        """Posts computed pages of the layers in `group`, or of all layers if it is None; returns `last`.

        Args:
            wrap: returns the event to be posted.
        """
        last = check_flag(f"room {self.room}: last", last)
        later = callable(indices)
        pages = ev.NO_PAGES if later else self._bounds.pages(self.room, indices)
        groups = self._bounds.groups(self.room, group_pages, absent=-1)
        if later and event is None:
            raise LocalProtocolError(f"room {self.room}: page indices that are not known yet need event=")

        def sent(at_ns: int, *, launched: bool = False) -> ev.Event:
            known = self._bounds.pages(self.room, indices()) if later else pages
            return wrap(ev.SendPages(self.room, known, last, at_ns, group, launched, groups))

        if event is None:
            self._post_in_order(sent)
            return last
        if self._event_poller is None:
            raise LocalProtocolError(f"room {self.room}: event= is for pools on a device, this one is host memory")
        pending = self._event_poller.pending(self.room, event)
        self.post_unless_over(ev.Launched(self.room))
        self._post_in_order(partial(sent, launched=True), pending)
        return last

    def _post_in_order(self, make: Callable[[int], ev.Event], pending: PendingEvent | None = None) -> None:
        """Posts an event after all earlier ones of the room, and after `pending` is done."""
        if self._event_poller is None:
            self.post_unless_over(make(time.monotonic_ns()))
        else:
            self._event_poller.post_after(self, pending, make)


class Receive(Handle):
    """Handle of a room on a decode rank; decode may start when the state is SUCCESS."""

    def __init__(
        self, room: int, post: Callable[[ev.Event], None], region: RegionWriter, device: Device | None = None
    ) -> None:
        """Creates the handle.

        Args:
            post: puts an event into the control loop's mailbox.
            region: where the engine's calls are noted.
            device: device of the pool; None for host memory.
        """
        super().__init__(room, post, region)
        self._device = device
        self._event: Event | None = None

    def recall(self) -> None:
        """Takes the room's pages back: the room ends here, and its prefill ranks keep it.

        The state becomes FAILED with the code RECALLED. Once `released` is true no writer writes to the pages any more,
        and `Agent.receive` may open the room again, with other pages: everything is sent again. The prefill ranks wait
        for that as for a room that nobody has opened yet, and other decode ranks of the room are not
        affected. If a prefill rank had sent everything and released its pages by then, the room cannot be opened again:
        it fails with RECALL_LATE on every rank. Does nothing if the room has ended.
        """
        self._region.note_call(RECALL)
        self.post_unless_over(ev.Recall(self.room))

    @property
    def recalled(self) -> bool:
        """Whether `recall` has ended the room, and nothing writes to its pages any more."""
        return self.released and self.error is not None and self.error["code"] == RECALLED

    @property
    def event(self) -> Event | None:
        """Device event to wait for on the engine's stream before reading the pages: `stream.wait_event(receive.event)`.

        A room succeeds only when every kernel and write that filled its pages has ended and is visible to the device's
        next kernel on any stream. The event is therefore already complete; it is provided for engines that order their
        streams by events. None before SUCCESS, and for host memory.

        Raises:
            DeviceError: a kernel has failed on the device.
        """
        if self._event is None and self._device is not None and self.state is RoomState.SUCCESS:
            self._event = self._device.now()
        return self._event


OnState = Callable[[Send | Receive, RoomState], None]


class HandleRegistry:
    """Registry of one agent's open handles; any thread may call `add`, only the control loop calls the other methods.

    Args:
        name: name of the agent, for errors.
        on_state: called as `Agent` says; it must only enqueue.
        owners: on a decode rank, the owners of the pool's pages; also an attribute.
    """

    def __init__(self, name: str, on_state: OnState | None, owners: PageOwners | None = None) -> None:
        self._name = name
        self._on_state = on_state
        self.owners = owners
        self._handles: dict[int, Send | Receive] = {}
        self._lock = threading.RLock()
        self._closed = False

    def add(self, handle: Send | Receive, written: tuple[ev.Pages, ...] = ()) -> None:
        """Adds the handle of a new room.

        Args:
            written: the memory that the room receives into, as for `PageOwners.claim`.

        Raises:
            LocalProtocolError: the room's number is in use, its memory belongs to another room, or the registry is
                closed.
        """
        with self._lock:
            if self.is_open(handle.room):
                raise LocalProtocolError(f"room {handle.room} is in use on {self._name}")
            if self.owners is not None and written:
                self.owners.claim(handle.room, written)
            self._handles[handle.room] = handle
            if self._closed:  # last, because a signal handler may close it in between
                self._handles.pop(handle.room, None)
                raise LocalProtocolError(f"room {handle.room}: agent {self._name} has been closed or unregistered")

    @property
    def count(self) -> int:
        """Number of the rooms that have not ended, or whose pages may not be reused yet."""
        return len(self._handles)

    @property
    def rooms(self) -> list[int]:
        """Numbers of these rooms."""
        return list(self._handles)

    @property
    def sent(self) -> set[int]:
        """Rooms of a prefill rank that are sent, and wait for their decode ranks to say how they have ended."""
        return {room for room, handle in self._handles.copy().items() if handle.released and not handle.state.finished}

    def is_open(self, room: int) -> bool:
        """Whether a room has not ended, or its pages may not be reused yet, as its handle says."""
        handle = self._handles.get(room)
        return handle is not None and not (handle.state.finished and handle.released)

    def change_state(self, action: ev.StateChanged) -> None:
        """Executes `StateChanged`: sets the state of the room's handle, and calls `on_state`."""
        room, state = action.room, action.state
        handle = self._handles.get(room)
        if handle is None:
            return
        if state is RoomState.SUCCESS:  # before the engine can learn of it and pass the pages to another room
            self._free(room)
        if isinstance(handle, Send):
            handle.prefix_tokens = action.prefix_tokens  # before the state that tells the engine to read it
        handle.change_state(state, action.failure)
        self._forget(handle)
        if self._on_state is not None:
            self._on_state(handle, state)

    def release(self, action: ev.Released) -> None:
        """Executes `Released`: marks the pages of the room as reusable; calls `on_state` if all of them are sent."""
        handle = self._handles.get(action.room)
        if handle is not None:
            self._free(action.room)
            handle.release()
            self._forget(handle)
            if self._on_state is not None and not handle.state.finished:
                self._on_state(handle, handle.state)

    def end_recall(self, action: ev.Recalled) -> None:
        """Executes `Recalled`: marks the pages that the engine took back as reusable, and calls `on_state`."""
        handle = self._handles.get(action.room)
        if isinstance(handle, Send):
            handle.end_recall(action.serial)
            if self._on_state is not None:
                self._on_state(handle, handle.state)

    def refuse(self, room: int, text: str) -> None:
        """Fails a room that the machine has refused to open, with this text as the cause."""
        handle = self._handles.get(room)
        if handle is not None:
            self._free(room)
            handle.release()
            self.change_state(ev.StateChanged(room, RoomState.FAILED, self._failure("KV_ROOM_DUPLICATE", text)))

    def finish(self, handle: Send | Receive) -> None:
        """Ends a fake room, which transfers nothing (for warm-up and health checks), as successful at once."""
        handle.release()
        handle.change_state(RoomState.SUCCESS, None)
        if self._on_state is not None:
            self._on_state(handle, RoomState.SUCCESS)

    def close(self) -> None:
        """Fails all open rooms and refuses new ones; any thread may call it.

        The rooms' pages are not released: writers have not confirmed that nothing is in flight.
        """
        with self._lock:
            self._closed = True
            left = list(self._handles.values())
            self._handles.clear()
        for handle in left:
            text = f"agent {self._name} was closed with the room in flight"
            handle.change_state(RoomState.FAILED, self._failure("AGENT_CLOSED", text))

    def _free(self, room: int) -> None:
        if self.owners is not None:
            with self._lock:
                self.owners.release(room)

    def _failure(self, code: str, text: str) -> Failure:
        return {"rank": self._name, "code": code, "at_ns": time.time_ns(), "text": text}

    def _forget(self, handle: Send | Receive) -> None:
        if handle.state.finished and handle.released:
            with self._lock:
                if self._handles.get(handle.room) is handle:  # else the next room of this number has begun already
                    del self._handles[handle.room]


def check_room(room: object) -> int:
    """Returns a room number as an int; raises LocalProtocolError unless it is an unsigned 64-bit integer."""
    return check_size("room", room, 0, MAX_ROOM, LocalProtocolError)


def check_reason(room: int, reason: object) -> str:
    """Returns the reason why a room is refused, cut to the length that fits into a message."""
    if not isinstance(reason, str) or not reason:
        raise LocalProtocolError(f"room {room}: reason is {shown(reason)}: it must be text")
    return encodable(str(reason[:MAX_TEXT]))


def check_prompt(room: int, tokens: object, digest: object) -> tuple[int, int]:
    """Returns the length and digest of a room's prompt; 0 for None.

    Raises:
        LocalProtocolError: `tokens` is not a positive number, or `digest` not one of 64 bits.
    """
    length = 0 if tokens is None else check_size(f"room {room}: tokens", tokens, error=LocalProtocolError)
    known = 0 if digest is None else check_size(f"room {room}: digest", digest, 1, MAX_ROOM, LocalProtocolError)
    return length, known


def check_flag(name: str, value: object) -> bool:
    """Returns a flag as a bool; raises LocalProtocolError unless it is a bool of Python or numpy."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise LocalProtocolError(f"{name} is {shown(value)}: it must be True or False")


def check_timeout(seconds: object) -> float:
    """Returns a timeout in seconds, limited to 0..1e9; raises LocalProtocolError unless `seconds` is a number."""
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or seconds != seconds:
        raise LocalProtocolError(f"timeout is {shown(seconds)}: it must be a number of seconds")
    return _LONGEST_WAIT_S if not seconds <= _LONGEST_WAIT_S else max(float(seconds), 0.0)


def in_flight(rooms: set[int], timeout: float) -> str:
    """Returns a text that names rooms that have not ended within `timeout` seconds."""
    return f"rooms still in flight after {timeout:g} s: {', '.join(map(str, sorted(rooms)[:8]))}"


def page_array(indices: Any, name: str = "pages", minimum: int = 0) -> ev.Pages:
    """Copies page or item indices of at least `minimum` to an int32 array; `name` names the argument in errors.

    Raises:
        LocalProtocolError: not a flat list of integers, or an index that is below `minimum` or exceeds int32.
    """
    try:
        pages = np.asarray(indices)
    except Exception as error:  # ragged lists, tensors on a device, the engine's own types
        if hasattr(indices, "__cuda_array_interface__"):
            raise LocalProtocolError(
                f"{name}: an array on a GPU; give page numbers from host memory: reading them would synchronise"
            ) from None
        raise LocalProtocolError(f"{name}: {shown(indices)} is not a list of integers: {error}") from None
    if pages.size == 0:
        return np.empty(0, np.int32)
    if pages.ndim != 1 or pages.dtype.kind not in "iu":
        raise LocalProtocolError(
            f"{name}: {shown(indices)} ({pages.dtype} {pages.shape}) is not a flat list of integers"
        )
    least, most = extent(pages)
    if least < minimum or most > _MAX_PAGE:
        raise LocalProtocolError(f"{name}: {least}..{most} are not in {minimum}..{_MAX_PAGE}")
    return pages.astype(np.int32)  # a copy: the engine may reuse its array at once
