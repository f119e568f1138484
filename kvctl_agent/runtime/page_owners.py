"""Which memory of a decode rank's pool belongs to rooms whose writers may still write to it.

Two rooms that receive into one page would overwrite each other, and both would end in SUCCESS. So a page, aux row or
state item belongs to one room from `receive` until the room has succeeded or is released. Pages of a prefill rank are
only read: rooms may share those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.protocol.events import OpenRoom, Pages

_Held = tuple[str, Pages, npt.NDArray[np.intp]]  # kind, its places, the room's numbers


def written(opening: OpenRoom) -> tuple[Pages, ...]:
    """The memory that a room receives into: pages, aux row, and the items of each state component."""
    aux = [opening.aux_index] if opening.aux_index >= 0 else []
    return opening.pages, np.array(aux, np.int32), *opening.states


class Destinations:
    """One decode rank's; not safe to use from two threads at once.

    Args:
        kinds: name of each kind of memory ("page", "aux row", "item of state conv") and how many there are of it.
    """

    def __init__(self, kinds: Sequence[tuple[str, int]]) -> None:
        self._names = [name for name, _ in kinds]
        # 0 where it is free, else 1 and up: its place in the list that the room gave.
        self._places: list[Pages] = [np.zeros(count, np.int32) for _, count in kinds]
        self._rooms: dict[int, list[_Held]] = {}

    def take(self, room: int, wanted: tuple[Pages, ...]) -> None:
        """Give memory to a room.

        Args:
            wanted: numbers of each kind, in the order of `kinds`; the last kinds may be left out.

        Raises:
            LocalProtocolError: a number is given twice, or belongs to another room; nothing has changed.
        """
        # Looks at these numbers alone, not at the pool. An index of 64 bits is not converted by every step.
        found = [
            (name, places, numbers.astype(np.intp))
            for name, places, numbers in zip(self._names, self._places, wanted, strict=False)
            if len(numbers)
        ]
        for name, places, numbers in found:
            taken = places.take(numbers)
            if taken.any():
                number = int(numbers[taken.argmax()])
                raise LocalProtocolError(
                    f"room {room}: {name} {number} belongs to room {self._owner(name, number)}, which may still be "
                    "written to: give it to another room when that one has succeeded or is released"
                )
        for name, places, numbers in found:
            order = np.arange(1, len(numbers) + 1, dtype=np.int32)
            places[numbers] = order
            again = places.take(numbers) != order  # of a number that is there twice the last place was kept
            if again.any():
                self._free(found)
                raise LocalProtocolError(f"room {room}: {name} {numbers[again.argmax()]} is given twice")
        self._rooms[room] = found

    @property
    def rooms(self) -> list[int]:
        """Rooms that memory belongs to."""
        return list(self._rooms)

    def free(self, room: int) -> None:
        """Nothing is written for this room any more; unknown rooms are fine."""
        self._free(self._rooms.pop(room, ()))

    def _free(self, held: Iterable[_Held]) -> None:
        for _, places, numbers in held:
            places[numbers] = 0

    def _owner(self, name: str, number: int) -> int:
        return next(
            room
            for room, held in self._rooms.items()
            for kind, _, numbers in held
            if kind == name and number in numbers
        )
