"""Which room has which pages of a rank's pool, and proof that nobody touches those that are free.

A page that no room has is poison through and through. It is looked at when it is handed out again, and all free pages
when somebody asks: a write that lands after its room was released shows there. Poison that a prefill rank puts into
pages it has got back shows at the decode rank, where something was read too late.
"""

from __future__ import annotations

import numpy as np

from kvctl.lab.ranks.content import Content
from kvctl.lab.ranks.messages import Mismatch, Room, VerifyReport
from kvctl.lab.ranks.messages import Start as RankStart
from kvctl.lab.ranks.pattern import POISON, Pages
from kvctl.lab.ranks.verify import stray, verify_room
from kvctl_agent.layout.chunks import page_count
from kvctl_agent.memory.pool import KVPool

_HINT = "written although no room had it"


class PageAllocator:
    """The pool of one rank, let to rooms page by page; a model without per-request state."""

    def __init__(self, pool: KVPool, start: RankStart, watch: bool) -> None:
        """Poison everything; `watch`: look after free pages, else just let them."""
        self.content = Content(pool, start)
        self._pool = pool
        self._page_size = start.page_size
        self._watch = watch
        self._draw = np.random.default_rng([start.seed, start.unique, start.instance + 1])
        # Page 0 is left alone, as engines reserve it.
        self._free: Pages = np.arange(1, start.pool_pages, dtype=np.int64)
        self._slots = list(range(start.aux_slots))
        self.strays: list[Mismatch] = []
        self.content.poison()

    def take(self, number: int, index: int, tokens: int, prefix_tokens: int) -> Room:
        """Give a room random free pages and an aux row.

        Raises:
            MemoryError: there are not enough; the router lets no more rooms in than pools were sized for.
        """
        count = page_count(tokens, self._page_size)
        if count > len(self._free) or not self._slots:
            raise MemoryError(f"room {number} needs {count} pages, {len(self._free)} are free")
        # The first of a shuffled list: which pages follow which has nothing to do with who had them before.
        self._draw.shuffle(self._free)
        pages, self._free = self._free[:count].copy(), self._free[count:]
        room = Room(index, number, tokens, prefix_tokens, decode_dp=0, slot=self._slots.pop(0))
        self.content.rooms[number] = room
        self.content.items[number] = (pages,) * len(self._pool.segments)
        if self._watch:
            self._look(pages, [room.slot])
        return room

    def pages(self, number: int) -> Pages:
        """A room's pages, in the prompt's order."""
        return self.content.pages(number)

    def fill(self, number: int) -> None:
        """Write the room's content."""
        self.content.fill_room(self.content.rooms[number])

    def verify(self, number: int) -> tuple[int, Mismatch | None]:
        """Compare a room with what was sent: bytes compared, and the first that is wrong.

        Pages that the decode side has cached are not sent, so they must be as they were.
        """
        room = self.content.rooms[number]
        report = VerifyReport(rooms=1, bytes=0, mismatches=[], bad_rooms=[])
        wrong = verify_room(self.content, room, "full", report)
        if wrong is not None:
            return report["bytes"], wrong
        before = len(self.strays)
        self._look(self.pages(number)[: room.prefix_tokens // self._page_size], [])
        return report["bytes"], self.strays.pop() if len(self.strays) > before else None

    def give_back(self, number: int) -> None:
        """Poison a room's pages and let others have them."""
        room = self.content.rooms.pop(number)
        pages = self.content.items.pop(number)[0]
        self._poison(pages, [room.slot])
        self._free = np.concatenate([self._free, pages])
        self._slots.append(room.slot)

    def sweep(self) -> list[Mismatch]:
        """Look at all free pages; everything found since the last time."""
        if self._watch:
            self._look(self._free, self._slots)
        found, self.strays = self.strays, []
        return found

    def _look(self, pages: Pages, slots: list[int]) -> None:
        """Note what is not poison in these, and make it poison."""
        for deck in self.content.decks:
            for sheet, page, found in self.content.store.written(deck, pages):
                at = int(np.flatnonzero(found != POISON)[0])
                where = f"layer {sheet.layer} {deck.name} page {page} byte {at}"
                self.strays.append(stray(where, int(found[at]), _HINT))
                self._poison(pages, [])
        aux = self.content.aux()
        for slot in slots:
            if (aux[slot] != POISON).any():
                self.strays.append(stray(f"aux row {slot}", int(aux[slot][aux[slot] != POISON][0]), _HINT))
                aux[slot] = POISON

    def _poison(self, pages: Pages, slots: list[int]) -> None:
        for deck in self.content.decks:
            self.content.store.poison(deck, pages)
        for slot in slots:
            self.content.aux()[slot] = POISON
