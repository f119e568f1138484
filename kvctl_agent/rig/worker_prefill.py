"""The prefill side: pretends to compute, and hands pages over as an engine's scheduler would."""

from __future__ import annotations

import time

from kvctl_agent.contract.rig import Prepare, Room, Run, Verify, VerifyReport
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import KvctlError
from kvctl_agent.layout.chunks import chunk_pages
from kvctl_agent.rig.worker import Worker
from kvctl_agent.runtime.handles import Send


class PrefillWorker(Worker):
    """Creates every room of the lot up front and forwards each as soon as the decode side waits for it."""

    def owns(self, room: Room) -> bool:
        return room.number % self.start.prefill.dp == self.at.dp

    def prepare(self, command: Prepare) -> None:
        super().prepare(command)
        self.content.fill(command.lot)

    def drive(self, command: Run, deadline_ns: int) -> tuple[list[list[int]], dict[int, str]]:
        failures: dict[int, str] = {}
        forwards: dict[int, tuple[int, int]] = {}
        rows: list[list[int]] = []
        sends = {number: self.agent.send(number) for number in self.content.rooms}
        for send in sends.values():
            send.prefetch()  # a forward takes no time here, so it is about to start whenever the room opens
        pending = set(sends)
        while pending:
            change = self.next_change(deadline_ns)
            if change is None:
                break
            number = change.handle.room
            if number not in pending:
                continue
            room, send = self.content.rooms[number], sends[number]
            if change.state is RoomState.WAITING_FOR_INPUT:
                try:
                    forwards[number] = self._forward(room, send)
                except KvctlError as error:
                    send.abort(str(error))
            elif change.state.finished:
                pending.remove(number)
                if change.state is RoomState.SUCCESS:
                    rows.append([room.index, *forwards[number], change.at_ns])
                else:
                    failures[room.index] = self.cause(send.error)
        for number in pending:
            state = sends[number].state.label
            failures[self.content.rooms[number].index] = f"still {state} on {self.start.name} at the run's deadline"
            sends[number].abort("the bench's run is over")
        self.settle(sends.values())
        return rows, failures

    def verify(self, command: Verify) -> VerifyReport:
        return VerifyReport(rooms=0, bytes=0, mismatches=[], bad_rooms=[])

    def _forward(self, room: Room, send: Send) -> tuple[int, int]:
        """Hand over one room, chunk by chunk; (forward start, forward done: the last page is computed)."""
        started_ns = done_ns = time.monotonic_ns()
        pages = self.content.pages[room.number]
        step = chunk_pages(int(self.start.config["chunk_tokens"]), self.start.page_size)
        for first in range(0, len(pages), step):
            done_ns = time.monotonic_ns()
            send.pages(pages[first : first + step], last=first + step >= len(pages))
        send.finish(room.slot)
        return started_ns, done_ns
