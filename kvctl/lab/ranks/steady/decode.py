"""The decode side of a steady fleet: opens rooms and compares every byte of those that succeed."""

from __future__ import annotations

from kvctl.lab.ranks.steady.worker import Change, Worker
from kvctl.lab.ranks.steady_messages import Mismatch, OpenRoom, SendRoom
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.runtime.handles import Handle


class DecodeWorker(Worker):
    """Opens each room when it is told to."""

    def begin(self, command: OpenRoom | SendRoom) -> Handle:
        if not isinstance(command, OpenRoom):
            raise LocalProtocolError(f"room {command.room}: {self.start.name} is a decode rank and sends nothing")
        slot = self.tenancy.content.rooms[command.room].slot
        return self.agent.receive(
            command.room,
            self.tenancy.pages(command.room)[command.prefix_tokens // self.start.page_size :],
            prefill=self.start.bootstraps[command.instance],
            prefix_tokens=command.prefix_tokens,
            aux_index=slot,
        )

    def goes_on(self, change: Change) -> None:
        pass

    def landed(self, number: int) -> tuple[int, Mismatch | None]:
        return self.tenancy.verify(number)

    def over(self, number: int) -> None:
        pass

    def serving(self) -> list[int]:
        machine = self.agent.machine
        assert isinstance(machine, DecodeMachine)
        missing = set(machine.missing_peers)
        rosters = [machine.roster(bootstrap) for bootstrap in self.start.bootstraps]
        return [number for number, roster in enumerate(rosters) if roster and missing.isdisjoint(roster)]
