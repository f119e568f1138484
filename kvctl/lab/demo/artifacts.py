"""Keeps what is known of a finding while it still is: the room as every rank sees it, and the inputs of all machines.

A hung room is worth more with the recordings of that minute than with any log afterwards; `kvctl replay` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson

from kvctl.client.calls import Call
from kvctl.client.fleet import Fleet
from kvctl.client.recordings import Series, save_recording
from kvctl.client.room_timeline import join
from kvctl.errors import CliError
from kvctl.lab.demo.room_accounting import Room, RoomAccounting

# A rank that is paused does not answer, and everybody else waits meanwhile.
_TIMEOUT_NS = 1_000_000_000
_MOST_FINDINGS = 3


class Artifacts:
    """Files of one run.

    Attributes:
        saved: what was written, and why something could not be.
    """

    def __init__(self, directory: Path | None, ranks: Sequence[str]) -> None:
        """`directory` is made now, so that a finding is not lost for want of it; None: nothing is kept.

        Raises:
            OSError: it cannot be made.
        """
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._ranks = list(ranks)
        self._seen = 0
        self.saved: list[str] = []

    def look(self, books: RoomAccounting) -> None:
        """Save what is new among the findings, the first few of them."""
        count = len(books.hung) + len(books.corrupt) + len(books.unexpected)
        if count == self._seen:
            return
        first, self._seen = self._seen == 0, count
        if self._directory is None or not (first or count <= _MOST_FINDINGS):
            return
        rooms = [*books.hung, *books.unexpected]
        numbers = [room.number for room in rooms[-1:]] + [each.mismatch["room"] for each in books.corrupt[-1:]]
        try:
            with Fleet(self._ranks, {}, _TIMEOUT_NS) as fleet:
                for number in numbers:
                    self._save_room(fleet, number, books.rooms.get(number))
                path = self._directory / f"finding-{count}.kvrec"
                save_recording(fleet, path, Series(0, 0, lambda moments, nbytes, left_ns: None))
                self.saved.append(str(path))
        except (OSError, CliError) as error:  # a full disk must not end the run that found something
            self.saved.append(f"not saved: {error}")

    def _save_room(self, fleet: Fleet, number: int, room: Room | None) -> None:
        """What `kvctl rooms show` would say, and what the fleet's books say."""
        assert self._directory is not None
        survey = fleet.survey([Call("room", {"room": str(number)})])
        details = [detail for _, data in survey.answers("room") for detail in data]
        joined = join(details, {agent.name: agent.clock for agent in survey.agents})
        path = self._directory / f"room-{number}.json"
        document = {"books": room, "joined": joined, "faults": survey.faults}
        path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2, default=list) + b"\n")
        self.saved.append(str(path))
