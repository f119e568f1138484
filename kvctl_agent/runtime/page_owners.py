"""Ownership of a decode rank's memory: assigns pages, aux rows and state items to the rooms that receive into them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.layout.page_indices import FEW, single
from kvctl_agent.protocol import events as ev

_Numbers = list[int] | npt.NDArray[np.intp]
"""Indices; a list if they are few, whose places are looked at one by one."""

_Claim = tuple[str, ev.Pages, _Numbers]
"""Name of a kind of memory, its array of `PageOwners._places`, and the indices in it that the room owns."""


class PageOwners:
    """Assigns pages, aux rows and state items of a decode rank's pool to rooms whose writers may still write to them.

    Two rooms that receive into one page would overwrite each other, and both would end in SUCCESS. So a page belongs to
    one room from `Agent.receive` until the room has succeeded or is released. Pages of a prefill rank are only read, so
    rooms may share them. Not thread-safe.

    Args:
        kinds: name of each kind of memory ("page", "aux row", "item of state conv"), and the size of the pool in it.
    """

    def __init__(self, kinds: Sequence[tuple[str, int]]) -> None:
        self._names = [name for name, _ in kinds]
        # 0 if free, else another number: of many indices 1 + index in the list that the room passed.
        self._places: list[ev.Pages] = [np.zeros(count, np.int32) for _, count in kinds]
        self._rooms: dict[int, list[_Claim]] = {}

    def claim(self, room: int, wanted: tuple[ev.Pages, ...]) -> None:
        """Assigns memory to a room.

        Args:
            wanted: indices in each kind of memory, in the order of `kinds`; the last kinds may be omitted.

        Raises:
            LocalProtocolError: an index appears twice, or belongs to another room; nothing has changed.
        """
        # The cost depends on these numbers only, not on the size of the pool. numpy would convert indices of another
        # type than intp in every step.
        found: list[_Claim] = [
            (name, places, numbers.tolist() if len(numbers) <= FEW else numbers.astype(np.intp))
            for name, places, numbers in zip(self._names, self._places, wanted, strict=False)
            if len(numbers)
        ]
        for name, places, numbers in found:
            if (number := _first_taken(places, numbers)) is not None:
                raise LocalProtocolError(
                    f"room {room}: {name} {number} belongs to room {self._owner(name, number)}, which may still be "
                    "written to: give it to another room when that one has succeeded or is released"
                )
        for name, places, numbers in found:
            if (number := _take(places, numbers)) is not None:
                self._free(found)
                raise LocalProtocolError(f"room {room}: {name} {number} is given twice")
        self._rooms[room] = found

    @property
    def rooms(self) -> list[int]:
        """Numbers of the rooms that own pages, aux rows or state items."""
        return list(self._rooms)

    def release(self, room: int) -> None:
        """Frees a room's memory; to be called once no write for the room can be in flight. Ignores unknown rooms."""
        self._free(self._rooms.pop(room, ()))

    def _free(self, claims: Iterable[_Claim]) -> None:
        for _, places, numbers in claims:
            if isinstance(numbers, list):
                each = places.data
                for number in numbers:
                    each[number] = 0
            else:
                places[numbers] = 0

    def _owner(self, name: str, number: int) -> int:
        return next(
            room
            for room, claims in self._rooms.items()
            for kind, _, numbers in claims
            if kind == name and number in numbers
        )


def _first_taken(places: ev.Pages, numbers: _Numbers) -> int | None:
    """Returns the first of the numbers whose place is not free; None if all are."""
    if isinstance(numbers, list):
        each = places.data
        return next((number for number in numbers if each[number]), None)
    taken = places.take(numbers)
    return int(numbers[taken.argmax()]) if taken.any() else None


def _take(places: ev.Pages, numbers: _Numbers) -> int | None:
    """Takes free places; returns a number that is given twice, with which it may end before all are taken."""
    if isinstance(numbers, list):
        each = places.data
        for number in numbers:
            if each[number]:
                return number
            each[number] = 1
        return None
    order = np.arange(1, len(numbers) + 1, dtype=np.int32)
    places[numbers] = order
    again = places.take(numbers) != order  # of a repeated number the last index was stored
    return int(numbers[again.argmax()]) if again.any() else None


def written(opening: ev.OpenRoom) -> tuple[ev.Pages, ...]:
    """Returns the memory that a room receives into: its pages, its aux row, the pages of each KV group, and the items
    of each state component.

    Each kind is an int32 array of indices in this rank's pool; the arrays are in the order of `PageOwners`.
    """
    aux = single(opening.aux_index) if opening.aux_index >= 0 else np.empty(0, np.int32)
    return opening.pages, aux, *opening.groups, *opening.states
