"""What the engine holds: one handle per room, whose calls only enqueue and whose state is read without a lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.protocol import events as ev

_MAX_PAGE = int(np.iinfo(np.int32).max)


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
        """Wait until the room has ended and its pages are free, or for `timeout` seconds; returns the state then."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not (self.state.finished and self.released):
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
        return self.state

    def abort(self, reason: str) -> None:
        """Give the room up; it fails on every rank with this as its first cause."""
        self._post(ev.AbortRoom(self.room, reason))

    def tell(self, state: RoomState, failure: Failure | None) -> None:
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


class Send(Handle):
    """A room on a prefill rank. Calls come from the engine's scheduler thread; none blocks or synchronises."""

    def __init__(self, room: int, post: Callable[[ev.Event], None], num_pages: int, aux_slots: int) -> None:
        super().__init__(room, post)
        self._num_pages = num_pages
        self._aux_slots = aux_slots
        self._last = False
        self._finished = False

    @property
    def sent(self) -> bool:
        """The prefill may release the room's pages."""
        return self.released

    def prefetch(self) -> None:
        """The forward is about to start: ask for staging now, so that grants are there when data is."""
        self._post(ev.Prefetch(self.room))

    def pages(self, indices: Any, last: bool = False) -> None:
        """The next pages of the prompt are computed.

        Args:
            indices: page numbers in this rank's pool (sequence, array or CPU tensor of integers), in prompt order from
                position 0 on; pages that the decode side has cached are skipped here.
            last: nothing follows.

        Raises:
            LocalProtocolError: pages after the last ones, a page outside the pool, or no list of page numbers.
        """
        if self._last:
            raise LocalProtocolError(f"room {self.room}: pages after the last ones")
        pages = page_array(indices)
        if len(pages) and int(pages.max()) >= self._num_pages:
            raise LocalProtocolError(f"room {self.room}: page {pages.max()} is outside the pool of {self._num_pages}")
        self._last = last
        self._post(ev.SendPages(self.room, pages, last, time.monotonic_ns()))

    def finish(self, aux_index: int | None = None) -> None:
        """Nothing follows but the aux row `aux_index`; also ends a room whose last chunk is empty.

        Raises:
            LocalProtocolError: called twice, or the aux row is outside the pool.
        """
        if self._finished:
            raise LocalProtocolError(f"room {self.room} was finished already")
        if aux_index is not None and not 0 <= aux_index < self._aux_slots:
            raise LocalProtocolError(f"room {self.room}: aux row {aux_index} is outside the pool's {self._aux_slots}")
        self._last = self._finished = True
        self._post(ev.Finish(self.room, -1 if aux_index is None else aux_index, time.monotonic_ns()))


class Receive(Handle):
    """A room on a decode rank; `state` SUCCESS means that decode may start."""


def page_array(indices: Any) -> ev.Pages:
    """Page numbers as a private int32 array.

    Raises:
        LocalProtocolError: not a flat list of integers in the range of a page number.
    """
    try:
        pages = np.asarray(indices)
    except (TypeError, ValueError) as error:  # ragged lists, tensors of another device
        raise LocalProtocolError(f"pages: {error}") from None
    if pages.size == 0:
        return np.empty(0, np.int32)
    if pages.ndim != 1 or pages.dtype.kind not in "iu":
        raise LocalProtocolError(f"pages: {pages.dtype} {pages.shape}, expected a flat list of integers")
    if int(pages.min()) < 0 or int(pages.max()) > _MAX_PAGE:
        raise LocalProtocolError(f"pages: {pages.min()}..{pages.max()} are no page numbers")
    return pages.astype(np.int32)  # a copy: the engine may reuse its array at once
