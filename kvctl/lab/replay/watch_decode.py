"""The watch over a decode rank's machine: its ring, its rooms' coverage, and when pages may be given up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvctl.lab.replay.formatting import rooms_of
from kvctl.lab.replay.invariants import Broken
from kvctl.lab.replay.watch_ring import RingInvariants
from kvctl.lab.replay.watch_room import RoomInvariants
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.peer import plan_with_peer
from kvctl_agent.protocol.tag import PartKey, PartKind, RoomKey, Tag


class DecodeInvariants:
    """What one decode rank is told and says."""

    def __init__(self, machine: DecodeMachine) -> None:
        self._machine = machine
        self._local = machine.local
        self.rooms_seen = 0
        self._rooms: dict[int, RoomInvariants] = {}
        self._unknown = set(machine.rooms)  # open before we came
        self._who: dict[str, msg.PeerInfo] = {}
        self._lives: dict[str, int] = {}
        self._gone: set[str] = set()
        self._checks: set[tuple[int, int, PartKind, PartKey]] = set()  # checksums that are being taken
        for name, peer in machine.peers.items():
            self._lives[name] = peer.incarnation
            if peer.who is not None:
                self._who[name] = peer.who
            if not peer.usable:
                self._gone.add(name)
        # Of the serials before the next one nothing is known: their rooms are not judged.
        self._before = machine.ring.last_serial
        self._ring = RingInvariants(self._local.ring_bytes, self._before, doubtful=bool(machine.rooms))

    def possible(self, event: ev.Event) -> bool:
        if isinstance(event, ev.Scattered | ev.ScatterFailed):
            region = self._ring.live.get(event.serial)
            return event.serial <= self._before if region is None else region.scattering
        if isinstance(event, ev.Checked):
            return event.room in self._unknown or (event.room, event.nonce, event.kind, event.key) in self._checks
        return True

    def see(self, event: ev.Event, now_ns: int, actions: Sequence[ev.Action]) -> None:
        lost = {action.peer for action in actions if isinstance(action, ev.DropPeer)}
        for name in lost:
            self._lose(name, event)
        match event:
            case ev.OpenRoom():
                self._opened(event, actions)
            case ev.Arrived():
                self._told(event.tag)
            case ev.Scattered():
                self._scattered(event.serial, copied=True)
            case ev.ScatterFailed():
                self._scattered(event.serial, copied=False)
            case ev.Checked():
                self._checks.discard((event.room, event.nonce, event.kind, event.key))
            case ev.Received():
                self._received(event)
            case ev.ReleaseHeld():
                self._forced(event, actions)
        for action in actions:
            match action:
                case ev.Send():
                    self._said(action.peer, action.message)
                case ev.Scatter():
                    self._scatter(action)
                case ev.Check():
                    self._checks.add((action.room, action.nonce, action.kind, action.key))
                case ev.StateChanged():
                    self._state(action)
                case ev.Released():
                    self._released(action.room)
        self._see_opened(actions)
        self._bury(list(self._rooms) if lost else rooms_of(event, actions))

    # ---- what it is told ----------------------------------------------------------------------------------------

    def _opened(self, event: ev.OpenRoom, actions: Sequence[ev.Action]) -> None:
        if not any(isinstance(action, ev.StateChanged) and action.room == event.room for action in actions):
            return  # not taken
        self._unknown.discard(event.room)
        self._rooms[event.room] = RoomInvariants(event)
        self.rooms_seen += 1

    def _received(self, event: ev.Received) -> None:
        name, message = event.peer, event.message
        if isinstance(message, msg.HelloAck):
            if message.to == self._local.incarnation and event.incarnation >= self._lives.get(name, 0):
                self._lives[name] = event.incarnation
                self._who[name] = message.who
                self._gone.discard(name)
            return
        if name in self._gone or event.incarnation != self._lives.get(name):
            return
        match message:
            case msg.PartReady():
                for data in message.tags:
                    try:
                        self._told(Tag.unpack(data))
                    except RemoteProtocolError:
                        continue
            case msg.StagingRevoked():
                region = self._ring.live.get(message.serial)
                if region is not None and region.revoking and region.room.peer == name:
                    self._ring.free(region)
            case msg.TooLate():
                region = self._ring.live.get(message.serial)
                if region is not None and region.room.peer == name:
                    region.revoking = False
            case msg.RoomAccepted() | msg.RoomRefused() | msg.RoomDrained() | msg.Ack():
                room = self._rooms.get(message.room)
                if room is not None and room.opening.nonce == message.nonce:
                    self._answered(room, name, message)

    def _answered(
        self, room: RoomInvariants, name: str, message: msg.RoomAccepted | msg.RoomRefused | msg.RoomDrained | msg.Ack
    ) -> None:
        match message:
            case msg.RoomAccepted():
                room.accepted.add(name)
            case msg.Ack(of="room-done") if room.done:
                room.acked.add(name)
            case msg.RoomRefused():
                self._drain(room, name)
            case msg.RoomDrained() if room.failed:
                self._drain(room, name)

    def _drain(self, room: RoomInvariants, name: str) -> None:
        """Nothing of this rank is in flight to this room."""
        room.drained.add(name)
        room.acked.add(name)
        for region in self._ring.of(RoomKey(name, room.opening.room, room.opening.nonce)):
            if not region.scattering:
                self._ring.free(region)

    def _lose(self, name: str, event: ev.Event) -> None:
        """A peer is lost; by what has happened it is known to have ended, or not."""
        proven = isinstance(event, ev.PeerDead)
        if isinstance(event, ev.Received):
            proven = not isinstance(event.message, msg.Bye) or event.message.drained  # else a new life's hello
        self._gone.add(name)
        for room in self._rooms.values():
            if name in room.writers:
                room.acked.add(name)
                if proven:
                    room.drained.add(name)
        for region in [region for region in self._ring.live.values() if region.room.peer == name]:
            if region.scattering:
                continue
            if proven:
                self._ring.free(region)
            else:
                region.unread = True

    def _forced(self, event: ev.ReleaseHeld, actions: Sequence[ev.Action]) -> None:
        """An operator's word is proof, but only where it was given, and for what nobody reads."""
        for answer in actions:
            if not isinstance(answer, ev.Answered) or not (answer.freed or answer.drained):
                continue
            if not event.force:
                raise Broken("released-early", f"{answer.text}, and nobody said that its writer is gone", event.room)
            room = self._rooms.get(event.room) if event.room is not None else None
            if room is not None:
                room.drained.update(answer.drained)
                room.acked.update(answer.drained)
            for serial in answer.freed:
                region = self._ring.live.get(serial)
                if region is not None and region.scattering:
                    raise Broken("released-early", f"{region} is freed while it is being scattered", region.room.room)
                if region is not None:
                    self._ring.free(region)

    def _told(self, tag: Tag) -> None:
        """A tag has come, on whichever way."""
        room = self._rooms.get(tag.room)
        if tag.incarnation != self._local.incarnation or room is None or room.opening.nonce != tag.nonce:
            return
        if tag.kind is not PartKind.KV:
            room.finals.discard((tag.kind, tag.key))
            return
        if room.pages(tag.key) is None or tag.key.writer >= len(room.writers):
            return
        owner = RoomKey(room.writers[tag.key.writer], tag.room, tag.nonce)
        region = next((held for held in self._ring.of(owner) if held.key == tag.key), None)
        if tag.serial == 0:
            room.put(tag.key)
            if region is not None and not region.scattering:
                self._ring.free(region)  # written on another path after all
        elif region is not None and region.serial == tag.serial:
            region.told = True
            if room.failed and not region.scattering:
                self._ring.free(region)  # written, and nobody wants it

    def _scattered(self, serial: int, *, copied: bool) -> None:
        region = self._ring.live.get(serial)
        if region is None or not region.scattering:
            return
        self._ring.free(region)
        room = self._rooms.get(region.room.room)
        if room is not None and room.opening.nonce == region.room.nonce:
            room.scattering.discard(serial)
            if copied:
                room.put(region.key)

    # ---- what it says -------------------------------------------------------------------------------------------

    def _said(self, name: str, message: msg.Message) -> None:
        match message:
            case msg.StagingGrants():
                self._granted(name, message)
            case msg.Watermark():
                self._ring.mark((message.round, message.tail, message.sequence))
            case msg.Heartbeat():
                self._ring.mark(message.watermark)
            case msg.StagingRevoke():
                if (region := self._ring.live.get(message.serial)) is not None:
                    region.revoking = True

    def _granted(self, name: str, message: msg.StagingGrants) -> None:
        owner = RoomKey(name, message.room, message.nonce)
        room = self._rooms.get(message.room)
        if message.room in self._unknown:
            self._ring.mark(message.watermark)
            return
        if room is None or room.opening.nonce != message.nonce or room.failed:
            raise Broken(
                "bad-grant", f"{name} is given grants for room {message.room}, which is not open", message.room
            )
        first = None if self._ring.live else message.grants[0].serial
        for grant in message.grants:
            self._ring.grant(owner, self._who[name].unique_rank, grant)
        self._ring.mark(message.watermark)
        if first is not None:
            self._ring.must_be_open(first)

    def _scatter(self, action: ev.Scatter) -> None:
        if action.room in self._unknown:
            return
        region = self._ring.live.get(action.serial)
        if region is None:
            raise Broken("scatter", f"serial {action.serial} is scattered, and nobody holds it", action.room)
        if region.scattering:
            raise Broken("scatter", f"{region} is scattered twice", action.room)
        if not region.told:
            raise Broken("scatter", f"{region} is scattered before its bytes have landed", action.room)
        named = (region.room.room, region.room.nonce, region.key, region.offset)
        if named != (action.room, action.nonce, action.key, action.offset):
            raise Broken("scatter", f"{region} is scattered as {action.key} of room {action.room}", action.room)
        region.scattering = True
        room = self._rooms.get(action.room)
        if room is None or room.opening.nonce != action.nonce:
            return
        if room.released:
            raise Broken("scatter", f"{region} is scattered into pages that were released", action.room)
        pages = room.pages(action.key)
        if pages is None or not np.array_equal(pages, action.pages):
            raise Broken("scatter", f"{region} is scattered into other pages than its own", action.room)
        room.scattering.add(action.serial)

    def _state(self, action: ev.StateChanged) -> None:
        room = self._rooms.get(action.room)
        if room is None:
            return
        if room.failed or room.done:
            raise Broken(
                "state-after-end", f"room {action.room} has ended and becomes {action.state.label}", action.room
            )
        if action.state is RoomState.FAILED:
            room.failed = True
            for name in room.writers:
                for region in self._ring.of(RoomKey(name, action.room, room.opening.nonce)):
                    region.unread = not region.scattering
        elif action.state is RoomState.SUCCESS:
            if gap := room.gap():
                raise Broken("success-with-a-gap", f"room {action.room} succeeds, but {gap}", action.room)
            room.done = True

    def _released(self, number: int) -> None:
        room = self._rooms.get(number)
        if room is None:
            return
        if room.released:
            raise Broken("released-early", f"room {number} is released twice", number)
        if not (room.done or room.failed):
            raise Broken("released-early", f"room {number} is released and has not ended", number)
        if room.failed:
            for name in room.writers:
                if name not in room.drained:
                    raise Broken("released-early", f"room {number} is released, and {name} may still write", number)
                for region in self._ring.of(RoomKey(name, number, room.opening.nonce)):
                    raise Broken("released-early", f"room {number} is released, and {region} is still in use", number)
        room.released = True

    def _see_opened(self, actions: Sequence[ev.Action]) -> None:
        """A room was opened at every rank of its instance at once: from now on it is known what is owed to it."""
        opened: dict[int, list[tuple[str, msg.RoomOpen]]] = {}
        for action in actions:
            if isinstance(action, ev.Send) and isinstance(action.message, msg.RoomOpen):
                opened.setdefault(action.message.room, []).append((action.peer, action.message))
        for number, sent in opened.items():
            room = self._rooms.get(number)
            if room is None or room.writers:
                continue
            room.writers = tuple(name for name, _ in sent)
            inputs = plan_with_peer(self._local, self._who[room.writers[0]]).inputs
            if inputs is not None:
                room.plan(inputs, self._local.unique_rank)

    def _bury(self, numbers: Iterable[int]) -> None:
        """Of a room that is over everywhere the machine keeps nothing, and neither do we."""
        for number in numbers:
            room = self._rooms.get(number)
            if room is None or not room.released or (room.done and not room.acked.issuperset(room.writers)):
                continue
            del self._rooms[number]
            nonce = room.opening.nonce
            held = self._machine.rooms.get(number)
            regions = [self._machine.state.book.of_room(RoomKey(name, number, nonce)) for name in room.writers]
            if (held is not None and held.nonce == nonce) or any(regions):
                raise Broken("left-behind", f"room {number} is over everywhere, and is still in the books", number)
