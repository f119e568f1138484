"""Checks a decode rank's pool after a run, with no access to any source.

The pool was poisoned before, so every byte has exactly one right value: the pattern in the pages that were owed, poison
everywhere else. Cached prefixes, spare pages and page 0 count as everywhere else.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator

import numpy as np

from kvctl_agent.contract.rig import Mismatch, Room, VerifyReport
from kvctl_agent.rig.content import AUX_ROW_BYTES, Content
from kvctl_agent.rig.pages import Pages, unused_pages
from kvctl_agent.rig.pattern import KV_NAMES, POISON, Bytes, Wrong, aux_row, trace

MAX_MISMATCHES = 8
# A sample looks at this part of the pages of each layer's K and V.
_SAMPLE = 8


def verify(content: Content, mode: str, failed: Collection[int] = ()) -> VerifyReport:
    """Compare the pool with what must be there after every room taken but the `failed` ones has succeeded.

    Args:
        mode: "full" compares every byte, "sample" a stretch of the pages of every layer's K and V of every room.
        failed: numbers of rooms whose pages may hold anything.
    """
    rooms = [room for room in content.rooms.values() if room.number not in failed]
    report = VerifyReport(rooms=len(rooms), bytes=0, mismatches=[], bad_rooms=[])
    for room in rooms:
        wrong = _verify_room(content, room, mode, report) or _verify_aux(content, room)
        if wrong is not None:
            report["bad_rooms"].append(room.index)
            report["mismatches"].append(wrong)
    report["mismatches"].extend(_strays(content))
    del report["mismatches"][MAX_MISMATCHES:]
    return report


def _verify_room(content: Content, room: Room, mode: str, report: VerifyReport) -> Mismatch | None:
    pages, bases = content.pages[room.number], content.bases(room)
    cached = room.prefix_tokens // content.start.page_size
    source = random.Random(room.index)
    for layer in range(*content.start.layers):
        for kv in (0, 1):
            first, end = cached, len(pages)
            if mode == "sample":
                count = -(-(end - first) // _SAMPLE)
                first = source.randint(first, end - count)
                end = first + count
            block = content.block(layer, kv)
            wrong = content.writer.check(block, pages[first:end], bases, layer, kv, first_page=first)
            report["bytes"] += (end - first) * content.rows.page_bytes
            if wrong is not None:
                return Mismatch(
                    room=room.number,
                    layer=layer,
                    kv=KV_NAMES[kv],
                    token=wrong.token,
                    head=wrong.head,
                    dim=wrong.dim,
                    expected=wrong.expected.hex(),
                    found=wrong.found.hex(),
                    hint=_origin(content, wrong),
                )
    return None


def _origin(content: Content, wrong: Wrong) -> str:
    """What is there instead: the difference between lost, misplaced and damaged."""
    if wrong.row == bytes([POISON]) * len(wrong.row):
        return "never written"
    numbers = {room.index: room.number for room in content.rooms.values()}
    tokens = {room.index: content.whole_tokens(room) for room in content.rooms.values()}
    source = trace(wrong.row, content.start.seed, tokens, content.start.total_kv_heads, content.start.layers)
    if source is None:
        return "no row of this rank's rooms: damaged, or of another rank or run"
    return (
        f"the row of room {numbers[source.room]} layer {source.layer} {KV_NAMES[source.kv]} "
        f"token {source.token} head {source.head}"
    )


def _verify_aux(content: Content, room: Room) -> Mismatch | None:
    wanted, found = aux_row(content.start.seed, room.index, AUX_ROW_BYTES), content.aux()[room.slot]
    if np.array_equal(wanted, found):
        return None
    at = int(np.flatnonzero(wanted != found)[0])
    hint = "never written" if (found == POISON).all() else "another room's, or damaged"
    return Mismatch(
        room=room.number,
        layer=0,
        kv="aux",
        token=0,
        head=0,
        dim=at,
        expected=wanted[at : at + 1].tobytes().hex(),
        found=found[at : at + 1].tobytes().hex(),
        hint=hint,
    )


def _strays(content: Content) -> Iterator[Mismatch]:
    """The first bytes written where nothing was owed, per layer's K and V and per aux row."""
    start, rows = content.start, content.rows
    quiet = _quiet_pages(content)
    for layer in range(*start.layers):
        for kv in (0, 1):
            pages = content.block(layer, kv).reshape(-1, rows.page_bytes)
            for page in quiet.tolist():
                if (pages[page] != POISON).any():
                    at = int(np.flatnonzero(pages[page] != POISON)[0])
                    row, dim = divmod(at, rows.row_bytes)
                    token, head = divmod(row, rows.heads)
                    where = f"{KV_NAMES[kv]} page {page} was owed nothing but was written to"
                    yield _stray(pages[page, at:], where, layer, token, rows.head_lo + head, dim // rows.dtype_bytes)
                    break
    used = {room.slot for room in content.rooms.values()}
    for slot in (slot for slot in range(start.aux_slots) if slot not in used):
        found = content.aux()[slot]
        if (found != POISON).any():
            at = int(np.flatnonzero(found != POISON)[0])
            yield _stray(found[at:], f"aux row {slot} was owed nothing but was written to", 0, 0, 0, at)


def _quiet_pages(content: Content) -> Pages:
    page_size = content.start.page_size
    prefixes = [pages[: content.rooms[number].prefix_tokens // page_size] for number, pages in content.pages.items()]
    return np.concatenate([unused_pages(list(content.pages.values()), content.start.pool_pages), *prefixes])


def _stray(found: Bytes, hint: str, layer: int, token: int, head: int, dim: int) -> Mismatch:
    return Mismatch(
        room=0,
        layer=layer,
        kv="stray",
        token=token,
        head=head,
        dim=dim,
        expected=f"{POISON:02x}",
        found=found[:1].tobytes().hex(),
        hint=hint,
    )
