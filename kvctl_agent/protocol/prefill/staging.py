"""Requests for ring regions: all staged parts of a room in one message for each decode rank, within its allowance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvctl_agent.contract.choices import STAGED
from kvctl_agent.layout.transfer_slice import TransferSlice
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.context import MachineContext
from kvctl_agent.protocol.send_room import Part, PeerTransfer, SendRoom
from kvctl_agent.protocol.staging_credits import StagingCredits

# Which path a part takes: (peer's introduction, share, layers, the reader's pages) → path. The second one is asked
# for parts that can never have a ring region.
Choose = Callable[[msg.PeerInfo, TransferSlice, int, ev.Pages], str]


@dataclass(eq=False)
class StagingRequests:
    """Chooses paths, and asks for the regions that they need.

    Attributes:
        fallback: chooses a path that needs no ring.
        allowances: by peer.
    """

    context: MachineContext
    rooms: dict[int, SendRoom]
    allowances: dict[str, StagingCredits]
    choose: Choose
    fallback: Choose

    def request(self, room: SendRoom, leg: PeerTransfer) -> None:
        """Choose paths, and ask for staging for all staged parts of the leg that have not been asked for."""
        if room.prefetched:
            leg.cut_all(self.context.rank, room.groups)
        who = self.context.introduction(leg.peer)
        wanted: list[Part] = []
        for part in leg.parts.values():
            if not part.path:
                part.path = self.choose(who, part.share, part.layers, leg.pages_at(part.chunk))
            if part.path == STAGED and not part.requested and part.grant is None:
                wanted.append(part)
        if not wanted or not self.allowances[leg.peer].take(leg, wanted, computed=room.ledger.complete):
            return
        for part in wanted:
            part.requested = True
        leg.resend_ns = self.context.now_ns + self.context.timing.resend_ns
        room.record.event("request", self.context.now_ns, peer=leg.peer)
        self.send(leg, wanted)

    def request_all(self, room: SendRoom) -> None:
        for leg in room.legs.values():
            self.request(room, leg)

    def request_next(self, peer: str) -> None:
        """Something that was asked for is sent, or has come to nothing: others may ask."""
        allowance = self.allowances[peer]
        while (leg := allowance.next()) is not None:
            self.request(self.rooms[leg.room], leg)

    def send(self, leg: PeerTransfer, parts: list[Part]) -> None:
        for part in parts:
            part.asks += 1
            part.asked_ns = part.asked_ns or self.context.now_ns
        specs = [msg.PartSpec(part.key.chunk, part.key.lo, part.key.hi, part.nbytes) for part in parts]
        self.context.send(leg.peer, msg.StagingRequest(leg.room, leg.nonce, specs))
