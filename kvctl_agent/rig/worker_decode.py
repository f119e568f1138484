"""The decode side: keeps its window of rooms open, closed-loop, and checks what landed."""

from __future__ import annotations

import time

from kvctl_agent.agent import Receive
from kvctl_agent.contract.rig import Prepare, Room, Run, Verify, VerifyReport
from kvctl_agent.contract.states import RoomState
from kvctl_agent.rig.verify import verify
from kvctl_agent.rig.worker import Worker


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
        opened: dict[int, tuple[int, Receive]] = {}
        waiting = list(reversed(self.content.rooms.values()))
        while waiting or opened:
            while waiting and len(opened) < command.windows[self.at.dp]:
                room = waiting.pop()
                opened[room.number] = time.monotonic_ns(), self._open(room)
            change = self.next_change(deadline_ns)
            if change is None:
                break
            if not change.state.finished or change.handle.room not in opened:
                continue
            opened_ns, receive = opened.pop(change.handle.room)
            index = self.content.rooms[change.handle.room].index
            if change.state is RoomState.SUCCESS:
                rows.append([index, opened_ns, change.at_ns])
            else:
                failures[index] = f"{self.start.name}: {receive.error}"
        for number, (_, receive) in opened.items():
            failures[self.content.rooms[number].index] = (
                f"{self.start.name}: still {receive.state.label} after {command.timeout_s:g} s"
            )
            receive.abort("the bench's run timed out")
        for room in waiting:
            failures[room.index] = f"{self.start.name}: not opened within {command.timeout_s:g} s"
        return rows, failures

    def verify(self, command: Verify) -> VerifyReport:
        return verify(self.content, command.mode, self.failed)

    def _open(self, room: Room) -> Receive:
        cached = room.prefix_tokens // self.start.page_size
        pages = self.content.pages[room.number][cached:]
        return self.agent.receive(room.number, pages, prefix_tokens=room.prefix_tokens, aux_index=room.slot)
