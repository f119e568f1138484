"""Compares a decode rank's pool with the expected content, which is calculated without access to any prefill rank.

The pool was filled with poison before the run, so every byte has exactly one correct value: that of the test pattern in
pages and items that were transferred, poison everywhere else, including cached prefixes, free pages and page 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from kvctl.lab.ranks.content import AUX_ROW_BYTES, Content
from kvctl.lab.ranks.content_store import PlaneView
from kvctl.lab.ranks.messages import Mismatch, Room, VerifyReport
from kvctl.lab.ranks.pattern import POISON, Pages, PlaneId, Wrong, aux_row, trace

MAX_MISMATCHES = 8
# In mode "sample" 1/8 of the pages of each layer's planes are compared.
_SAMPLE = 8


def verify(content: Content, mode: str, failed: Collection[int] = ()) -> VerifyReport:
    """Verifies the pool after a batch in which every room except the `failed` ones succeeded.

    Args:
        mode: "full" compares every byte; "sample" compares 1/8 of the pages of every room in each plane and layer. Both
            check all pages that must contain poison.
        failed: numbers of the failed rooms, whose pages may contain anything.
    """
    rooms = [room for room in content.rooms.values() if room.number not in failed]
    report = VerifyReport(rooms=len(rooms), bytes=0, mismatches=[], bad_rooms=[])
    sound = mode == "full" and _all_sound(content, rooms)
    for room in rooms:
        nbytes, wrong = _verified(content, room) if sound else verify_room(content, room, mode)
        report["bytes"] += nbytes
        if wrong is not None:
            report["bad_rooms"].append(room.index)
            report["mismatches"].append(wrong)

    def quiet(view: PlaneView) -> Pages:
        cached = [
            content.items[number][view.shard.segment.index][: content.cached(room, view.shard.segment)]
            for number, room in content.rooms.items()
        ]
        return np.concatenate([content.unowned(view), *cached])

    report["mismatches"].extend(strays(content, quiet, content.free_slots))
    del report["mismatches"][MAX_MISMATCHES:]
    return report


def _all_sound(content: Content, rooms: Sequence[Room]) -> bool:
    """Returns whether all rooms have the test pattern in all layers; compares them together, which takes less time."""
    return all(
        content.store.check(view, pages, bases, [0] * view.shard.num_layers, len(pages)) is None
        for view, pages, bases in content.pages_with_bases(rooms, cached=False)
    )


def _verified(content: Content, room: Room) -> tuple[int, Mismatch | None]:
    """Returns what `verify_room` does for a room whose pages and state items are sound."""
    nbytes = sum(
        (len(content.items[room.number][view.shard.segment.index]) - content.cached(room, view.shard.segment))
        * view.shard.num_layers
        * view.rows.page_bytes
        for view in content.views
    )
    return nbytes, _verify_aux(content, room)


def verify_room(content: Content, room: Room, mode: str = "full") -> tuple[int, Mismatch | None]:
    """Compares the pages, state items and aux row of one room with the test pattern.

    Returns:
        The number of page bytes compared, and the first mismatch or None.
    """
    source = random.Random(room.index)
    nbytes = 0
    for view, bases in content.with_bases(room):
        items = content.items[room.number][view.shard.segment.index]
        cached = content.cached(room, view.shard.segment)
        layers, count = view.shard.num_layers, len(items) - cached
        firsts = [cached] * layers
        if mode == "sample":
            count = -(-count // _SAMPLE)
            firsts = [source.randint(cached, len(items) - count) for _ in range(layers)]
        nbytes += layers * count * view.rows.page_bytes
        found = content.store.check(view, items, bases, firsts, count)
        if found is not None:
            plane, wrong = found
            at = int(content.row_map(room, view).positions[wrong.at])
            return nbytes, Mismatch(
                room=room.number,
                where=f"layer {plane.layer} {view.name} token {at} head {wrong.head} dim {wrong.dim}",
                expected=wrong.expected.hex(),
                found=wrong.found.hex(),
                hint=_origin(content, view, wrong),
            )
    return nbytes, _verify_aux(content, room)


def strays(
    content: Content, pages_of: Callable[[PlaneView], Pages], slots: Iterable[int], *, repair: bool = False
) -> Iterator[Mismatch]:
    """Finds stray writes: yields the first byte that is not poison in each plane of each layer and in each aux row.

    Args:
        pages_of: function that returns the pages, or state items, of a view that must contain poison.
        repair: whether to fill the pages and rows with poison again, so that each write is reported once.
    """
    for view in content.views:
        pages, unit = pages_of(view), "item" if view.shard.segment.state else "page"
        for plane, page, found in content.store.written(view, pages):
            at = int(np.flatnonzero(found != POISON)[0])
            yield _stray(f"layer {plane.layer} {view.name} {unit} {page} byte {at}", int(found[at]))
            if repair:
                content.store.poison(view, pages)
    aux = content.aux()
    for slot in slots:
        if (aux[slot] != POISON).any():
            at = int(np.flatnonzero(aux[slot] != POISON)[0])
            yield _stray(f"aux row {slot} byte {at}", int(aux[slot][at]))
            if repair:
                aux[slot] = POISON


class LiveVerifier:
    """Verifies the rooms of a live rank one by one, and checks free pages when they are allocated and on request.

    A write that lands after its room was released is found in a free page. A prefill rank fills released pages with
    poison; if a transfer reads the pages too late, the decode rank finds poison in the room.
    """

    def __init__(self, content: Content, enabled: bool) -> None:
        """Checks a rank's content; does nothing unless `enabled`."""
        self._content = content
        self._enabled = enabled
        self._strays: list[Mismatch] = []

    def opened(self, number: int) -> None:
        """Checks that nothing was written to the pages and aux row that a room has just been allocated."""
        if self._enabled:
            items, slot = self._content.items[number], self._content.slots[number]
            self._strays += strays(self._content, lambda view: items[view.shard.segment.index], [slot], repair=True)

    def verify(self, number: int) -> tuple[int, Mismatch | None]:
        """Compares a received room with the test pattern and checks that its cached prefix was not written to.

        Returns:
            The number of page bytes compared, and the first mismatch or None.
        """
        if not self._enabled:
            return 0, None
        content = self._content
        room = content.rooms[number]
        nbytes, wrong = verify_room(content, room)
        if wrong is None:
            items = content.items[number]
            written = strays(
                content,
                lambda view: items[view.shard.segment.index][: content.cached(room, view.shard.segment)],
                (),
                repair=True,
            )
            wrong = next(iter(list(written)), None)
        return nbytes, wrong

    def sweep(self) -> list[Mismatch]:
        """Checks all free pages and aux rows; returns the stray writes found since the previous call."""
        if self._enabled:
            self._strays += strays(self._content, self._content.unowned, self._content.free_slots, repair=True)
        found, self._strays = self._strays, []
        return found


def _origin(content: Content, view: PlaneView, wrong: Wrong) -> str:
    """Describes where a wrong row comes from: it was never written, belongs to another position, or is damaged."""
    if wrong.row == bytes([POISON]) * len(wrong.row):
        return "never written"
    segment = view.shard.segment
    same_segment = [each for each in content.views if each.shard.segment.index == segment.index]
    alike = {each.index: each for each in same_segment if each.plane.rows == view.plane.rows}
    planes = [
        PlaneId(segment.index, layer, plane) for layer in range(segment.layer_lo, segment.layer_hi) for plane in alike
    ]
    numbers = {room.index: room.number for room in content.rooms.values()}
    rows = {room.index: content.row_map(room, view).end for room in content.rooms.values()}
    source = trace(wrong.row, content.start.seed, rows, segment.heads, planes)
    if source is None:
        return "not a row of this rank's rooms: damaged, or from another rank or run"
    return (
        f"the row of room {numbers[source.room]} layer {source.plane.layer} {alike[source.plane.plane].name} "
        f"token {source.at} head {source.head}"
    )


def _verify_aux(content: Content, room: Room) -> Mismatch | None:
    expected = aux_row(content.start.seed, room.index, AUX_ROW_BYTES)
    found = content.aux()[content.slots[room.number]]
    if np.array_equal(expected, found):
        return None
    at = int(np.flatnonzero(expected != found)[0])
    hint = "never written" if (found == POISON).all() else "another room's row, or damaged"
    return Mismatch(
        room=room.number,
        where=f"aux dim {at}",
        expected=expected[at : at + 1].tobytes().hex(),
        found=found[at : at + 1].tobytes().hex(),
        hint=hint,
    )


def _stray(where: str, found: int) -> Mismatch:
    return Mismatch(room=0, where=where, expected=f"{POISON:02x}", found=f"{found:02x}", hint="no room owned it")
