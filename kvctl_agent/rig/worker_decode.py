"""The decode side: keeps its window of rooms open, closed-loop, and checks what landed."""

from __future__ import annotations

import time

from kvctl_agent.contract.rig import Prepare, Room, Run, Verify, VerifyReport
from kvctl_agent.contract.states import RoomState
from kvctl_agent.rig.verify import verify
from kvctl_agent.rig.worker import Worker
from kvctl_agent.runtime.handles import Receive


class DecodeWorker(Worker):
    """Opens the next room whenever one finishes; all ranks of a dp group open the same rooms in the same order."""

    def owns(self, room: Room) -> bool:
        return room.decode_dp == self.at.dp

    def prepare(self, command: Prepare) -> None:
        super().prepare(command)
        if command.poison:
            self.content.poison()

    def drive(self, command: Run, deadline_ns: int) -> tuple[list[list[int]], dict[int, str]]:
        failures: dict[int, str] = {}
        rows: list[list[int]] = []
        receives: dict[int, Receive] = {}
        opened_ns: dict[int, int] = {}  # rooms in flight
        waiting = list(reversed(self.content.rooms.values()))
        while waiting or opened_ns:
            while waiting and len(opened_ns) < command.windows[self.at.dp]:
                room = waiting.pop()
                opened_ns[room.number] = time.monotonic_ns()
                receives[room.number] = self._open(room)
            change = self.next_change(deadline_ns)
            if change is None:
                break
            number = change.handle.room
            if change.state.finished and number in opened_ns:
                index = self.content.rooms[number].index
                if change.state is RoomState.SUCCESS:
                    rows.append([index, opened_ns[number], change.at_ns])
                else:
                    failures[index] = self.cause(receives[number].error)
                del opened_ns[number]
        for number in opened_ns:
            state = receives[number].state.label
            failures[self.content.rooms[number].index] = f"still {state} on {self.start.name} at the run's deadline"
            receives[number].abort("the bench's run is over")
        for room in waiting:
            failures[room.index] = f"not opened on {self.start.name} before the run's deadline"
        self.settle(receives.values())
        return rows, failures

    def verify(self, command: Verify) -> VerifyReport:
        return verify(self.content, command.mode, self.failed)

    def _open(self, room: Room) -> Receive:
        cached = room.prefix_tokens // self.start.page_size
        pages = self.content.pages[room.number][cached:]
        return self.agent.receive(room.number, pages, prefix_tokens=room.prefix_tokens, aux_index=room.slot)
