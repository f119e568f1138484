"""A prefill rank's answer to an opening: what it owes for the room, or why it cannot take it.

The plan is made here, once per room and decode rank, from the inputs both sides agreed on at Hello; nothing that a
peer sends is believed before it was checked against them and against the pool it told of.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.plan import aux_writer, slices_of_writer, state_slices_to_reader, writer_cells
from kvctl_agent.layout.plan_inputs import PlanInputs, differences
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.peer import Peer
from kvctl_agent.protocol.prefill_rooms import PrefillRooms
from kvctl_agent.protocol.send_room import Final, PeerTransfer, SendRoom
from kvctl_agent.protocol.tag import PartKey, PartKind
from kvctl_agent.protocol.tombstones import RoomKey

# What one peer, broken or hostile, can make us remember.
MAX_LEGS = 1 << 17
MAX_CHUNKS = 1 << 16  # of one room
DRAINING = "KV_DRAINING"


class PrefillOpenings(PrefillRooms):
    """Takes rooms in, or refuses them."""

    def on_room_open(self, peer: Peer, message: msg.RoomOpen) -> None:
        if message.to != self.local.incarnation:
            self.drop("incarnation")
            return
        key = RoomKey(peer.name, message.room, message.nonce)
        room = self.rooms.get(message.room)
        if known := self._legs.get(key):
            active = self.rooms[message.room]
            if active.failure is None:
                self.act(ev.Send(peer.name, msg.RoomAccepted(message.room, message.nonce)))
            else:
                self._say_failed(active, known)
            return
        if room is not None and peer.name in room.legs and not self._graves.holds(key):
            self.drop("early")  # the number's last life is over there and about to be here: it will be asked again
            return
        assert peer.inputs is not None
        failure = self._obstacle(key, room, peer.inputs)
        if failure is not None:
            self._refuse(key, failure)
            return
        try:
            leg = self._leg_of(peer, peer.inputs, message)
        except LayoutError as error:
            failure = self.failure("KV_PLAN_MISMATCH", str(error))
            self._refuse(key, failure)
            self._never_opened(message.room, failure)
            return
        if room is None:
            room = self._new_room(message.room)
        room.expected = peer.inputs.decode.tp * peer.inputs.decode.pp
        room.legs[peer.name] = leg
        self._legs[key] = leg
        record = room.record
        record.nonce = record.nonce or message.nonce  # of several decode ranks, the first one's stands for all
        record.nonces.append(message.nonce)
        record.pages = message.total_pages - message.prefix_pages
        record.planned += leg.planned
        record.peers.append(peer.name)
        record.event("accept", self.now_ns, peer=peer.name)
        self.act(ev.Send(peer.name, msg.RoomAccepted(message.room, message.nonce)))
        if room.opened and room.state is RoomState.BOOTSTRAPPING:
            self._state(room, RoomState.WAITING_FOR_INPUT)
        self._request(room, leg)
        if room.ledger.given or room.ledger.total is not None:
            self._advance(room, leg, room.ledger.steps(), self.now_ns)
            self._queue_finals(room, leg)
            self._progress(room)

    def _leg_of(self, peer: Peer, inputs: PlanInputs, message: msg.RoomOpen) -> PeerTransfer:
        """What we owe for this opening; raises LayoutError where the two sides do not agree on it."""
        if message.inputs != peer.wire:
            raise LayoutError("; ".join(map(str, differences(peer.wire, message.inputs))))
        wanted = message.total_pages - message.prefix_pages
        if wanted > MAX_CHUNKS * inputs.chunk_pages:
            raise LayoutError(f"{wanted} pages are more than {MAX_CHUNKS} chunks of {inputs.chunk_pages} pages")
        if len(self._legs) >= MAX_LEGS:
            raise LayoutError(f"{self.local.name} has {len(self._legs)} open rooms and takes no more")
        pool = peer.who.pool if peer.who is not None else {}
        span = f"pages {message.prefix_pages}..{message.total_pages}"
        pages = _indices(message.pages, wanted, int(pool["num_pages"]), span, peer.name)  # type: ignore[arg-type]
        if message.aux_index >= int(pool["aux_slots"]):  # type: ignore[arg-type]
            raise LayoutError(f"aux row {message.aux_index} is outside {peer.name}'s pool")
        reader = peer.who.unique_rank if peer.who is not None else 0
        owed = [
            share
            for share in slices_of_writer(inputs, message.room, peer.at.dp, self.rank)
            if share.reader == reader and not message.prefill_only
        ]
        cells: Sequence[Chunk] = ()
        if owed:
            cells = writer_cells(inputs, message.room, self.rank, message.total_pages, message.prefix_pages)
        return PeerTransfer(
            message.room,
            peer.name,
            peer.at,
            message.nonce,
            owed,
            cells,
            pages,
            message.prefix_pages,
            message.total_pages,
            self._finals_of(peer.name, reader, inputs, message, pool["slots"]),  # type: ignore[arg-type]
            message.prefill_only,
            peer.lease,
        )

    def _finals_of(
        self, name: str, reader: int, inputs: PlanInputs, message: msg.RoomOpen, slots: list[int]
    ) -> list[Final]:
        """The aux row and the state components that this rank was elected to write."""
        finals: list[Final] = []
        if message.aux_index >= 0 and aux_writer(inputs, message.room, reader) == self.rank:
            row = np.array([message.aux_index], np.int32)
            finals.append(Final(PartKind.AUX, PartKey(self.rank, 0, 0, 0), None, row))
        if not message.states:
            return finals
        components = [segment for segment in inputs.segments if segment.state]
        if len(message.states) > len(components):
            raise LayoutError(f"items of {len(message.states)} state components, the model has {len(components)}")
        for segment, data in zip(components, message.states, strict=False):
            items = _indices(data, len(data) // 4, slots[segment.index], f"items of state {segment.name}", name)
            for share in state_slices_to_reader(inputs, message.room, reader) if len(items) else ():
                if share.writer == self.rank and share.segment == segment.index:
                    key = PartKey(self.rank, segment.index, share.layer_lo, share.layer_hi)
                    finals.append(Final(PartKind.STATE, key, share, items))
        return finals

    def _obstacle(self, key: RoomKey, room: SendRoom | None, inputs: PlanInputs) -> Failure | None:
        """Why this opening cannot be taken, before looking at its pages."""
        if self._graves.holds(key):
            self.drop("tombstone")
            over = self.failure("KV_ROOM_UNKNOWN", f"room {key.room} is over at {self.local.name}")
            return self._graves.find(key) or over
        if room is None:
            ended = self._ended.get(key.room)
            if ended is not None and ended.failure is not None and ended.failure["code"] == DRAINING:
                ended = None  # what was refused then may be asked for again, under another nonce
            if ended is None or key.peer in ended.openers:  # with another nonce it is another life of the number
                return self._shut(key.room) if self.draining else None
            self._ended[key.room] = ended._replace(openers=ended.openers | {key.peer})
            return ended.failure
        if room.failure is not None:
            return room.failure
        at = self.peers[key.peer].at
        for leg in room.legs.values():
            theirs = self.peers[leg.peer].inputs
            if leg.reader == at or leg.reader.dp != at.dp or theirs != inputs:
                text = f"room {key.room} is active for {leg.peer} with nonce {leg.nonce:016x}"
                return self.failure("KV_ROOM_DUPLICATE", text)
        return None

    def _shut(self, number: int) -> Failure:
        """Nobody may wait for a room that our engine will not be given."""
        failure = self.failure(DRAINING, f"{self.local.name} is draining and takes no new rooms")
        self._never_opened(number, failure)
        return failure

    def _never_opened(self, number: int, failure: Failure) -> None:
        """Its opening was lost or refused: our engine, which waits for it or is yet to come, must not wait for ever.

        Not at once, though: the number may be that of another dp group's room, whose opening is on its way.
        """
        if number not in self._ended and len(self._aborted) < MAX_LEGS:
            self._aborted.setdefault(number, (self.now_ns + self.timing.resend_ns, failure))

    def _refuse(self, key: RoomKey, failure: Failure) -> None:
        """Answer with the first cause; the grave gives the same answer to the same opening if it is said again."""
        peer, number, nonce = key
        self._graves.bury(key, failure, self.now_ns)
        self.note("room-refused", failure["text"], "warning", room=number, peer=peer)
        refused = msg.RoomRefused(number, nonce, failure["rank"], failure["code"], failure["at_ns"], failure["text"])
        self.act(ev.Send(peer, refused))


def _indices(data: bytes, count: int, limit: int, what: str, peer: str) -> ev.Pages:
    """A peer's page or item numbers, as many as it must have sent and inside its pool."""
    if len(data) != 4 * count:
        raise LayoutError(f"{len(data)} bytes of numbers for {what}")
    numbers = np.frombuffer(data, dtype="<i4")
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < limit:
        raise LayoutError(f"{what}: {numbers.min()}..{numbers.max()} is outside {peer}'s pool of {limit}")
    return numbers
