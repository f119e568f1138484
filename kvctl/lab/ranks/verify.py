"""Checks a decode rank's pool after a run, with no access to any source.

The pool was poisoned before, so every byte has exactly one right value: the pattern in the pages and items that were
owed, poison everywhere else. Cached prefixes, spare pages and page 0 count as everywhere else.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator

import numpy as np

from kvctl.lab.ranks.content import AUX_ROW_BYTES, Content, unused_pages
from kvctl.lab.ranks.content_store import PlaneView
from kvctl.lab.ranks.messages import Mismatch, Room, VerifyReport
from kvctl.lab.ranks.pattern import POISON, Pages, PlaneId, Wrong, aux_row, trace

MAX_MISMATCHES = 8
# A sample looks at this part of the pages of each layer's planes.
_SAMPLE = 8


def verify(content: Content, mode: str, failed: Collection[int] = ()) -> VerifyReport:
    """Compare the pool with what must be there after every room taken but the `failed` ones has succeeded.

    Args:
        mode: "full" compares every byte, "sample" a stretch of the pages of every layer's planes of every room.
        failed: numbers of rooms whose pages may hold anything.
    """
    rooms = [room for room in content.rooms.values() if room.number not in failed]
    report = VerifyReport(rooms=len(rooms), bytes=0, mismatches=[], bad_rooms=[])
    for room in rooms:
        wrong = verify_room(content, room, mode, report)
        if wrong is not None:
            report["bad_rooms"].append(room.index)
            report["mismatches"].append(wrong)
    report["mismatches"].extend(_strays(content))
    del report["mismatches"][MAX_MISMATCHES:]
    return report


def verify_room(content: Content, room: Room, mode: str, report: VerifyReport) -> Mismatch | None:
    """The first thing of a room that is not as it must be; what was compared is added to `report["bytes"]`."""
    source = random.Random(room.index)
    for deck, bases in content.with_bases(room):
        items = content.items[room.number][deck.held.segment.index]
        cached = _cached(content, room, deck)
        layers, count = deck.held.num_layers, len(items) - cached
        firsts = [cached] * layers
        if mode == "sample":
            count = -(-count // _SAMPLE)
            firsts = [source.randint(cached, len(items) - count) for _ in range(layers)]
        report["bytes"] += layers * count * deck.rows.page_bytes
        found = content.store.check(deck, items, bases, firsts, count)
        if found is not None:
            sheet, wrong = found
            return Mismatch(
                room=room.number,
                where=f"layer {sheet.layer} {deck.name} token {wrong.at} head {wrong.head} dim {wrong.dim}",
                expected=wrong.expected.hex(),
                found=wrong.found.hex(),
                hint=_origin(content, deck, wrong),
            )
    return _verify_aux(content, room)


def _cached(content: Content, room: Room, deck: PlaneView) -> int:
    """Pages of a room that are not moved: the decode side has them. A state always moves whole."""
    return 0 if deck.held.segment.state else room.prefix_tokens // content.start.page_size


def _origin(content: Content, deck: PlaneView, wrong: Wrong) -> str:
    """What is there instead: the difference between lost, misplaced and damaged."""
    if wrong.row == bytes([POISON]) * len(wrong.row):
        return "never written"
    segment = deck.held.segment
    here = [each for each in content.decks if each.held.segment.index == segment.index]
    alike = {each.index: each for each in here if each.plane.rows == deck.plane.rows}
    sheets = [
        PlaneId(segment.index, layer, plane) for layer in range(segment.layer_lo, segment.layer_hi) for plane in alike
    ]
    numbers = {room.index: room.number for room in content.rooms.values()}
    rows = {room.index: content.whole_rows(room, deck) for room in content.rooms.values()}
    source = trace(wrong.row, content.start.seed, rows, segment.heads, sheets)
    if source is None:
        return "no row of this rank's rooms: damaged, or of another rank or run"
    return (
        f"the row of room {numbers[source.room]} layer {source.sheet.layer} {alike[source.sheet.plane].name} "
        f"token {source.at} head {source.head}"
    )


def _verify_aux(content: Content, room: Room) -> Mismatch | None:
    wanted, found = aux_row(content.start.seed, room.index, AUX_ROW_BYTES), content.aux()[room.slot]
    if np.array_equal(wanted, found):
        return None
    at = int(np.flatnonzero(wanted != found)[0])
    hint = "never written" if (found == POISON).all() else "another room's, or damaged"
    return Mismatch(
        room=room.number,
        where=f"aux dim {at}",
        expected=wanted[at : at + 1].tobytes().hex(),
        found=found[at : at + 1].tobytes().hex(),
        hint=hint,
    )


def _strays(content: Content) -> Iterator[Mismatch]:
    """The first bytes written where nothing was owed, per layer's planes and per aux row."""
    for deck in content.decks:
        rows, quiet = deck.rows, _quiet_pages(content, deck)
        what = "item" if deck.held.segment.state else "page"
        for sheet, page, found in content.store.written(deck, quiet):
            at = int(np.flatnonzero(found != POISON)[0])
            dim = at % rows.row_bytes // rows.element_bytes
            hint = f"{deck.name} {what} {page} was owed nothing but was written to"
            yield stray(f"layer {sheet.layer} dim {dim}", int(found[at]), hint)
    used = {room.slot for room in content.rooms.values()}
    for slot in (slot for slot in range(content.start.aux_slots) if slot not in used):
        found = content.aux()[slot]
        if (found != POISON).any():
            at = int(np.flatnonzero(found != POISON)[0])
            hint = f"aux row {slot} was owed nothing but was written to"
            yield stray(f"layer 0 dim {at}", int(found[at]), hint)


def _quiet_pages(content: Content, deck: PlaneView) -> Pages:
    index = deck.held.segment.index
    assigned = [items[index] for items in content.items.values()]
    cached = [items[index][: _cached(content, content.rooms[number], deck)] for number, items in content.items.items()]
    return np.concatenate([unused_pages(assigned, deck.num_slots), *cached])


def stray(where: str, found: int, hint: str) -> Mismatch:
    """A byte that was written although nothing was owed there."""
    return Mismatch(room=0, where=where, expected=f"{POISON:02x}", found=f"{found:02x}", hint=hint)
