"""Checks the invariants of a decode rank: its ring, the coverage of its rooms, and when their pages are released.

The expected state is computed from the inputs and actions alone. The machine's own state is read only for the rooms,
peers and grants that exist when the recording begins, and to find leftovers of finished rooms. Rooms that were open
before the recording are not checked.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvctl.lab.replay.formatting import rooms_of
from kvctl.lab.replay.invariants import ExpectedRoom, RoomPlan, Violation
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.layout.plan import keeper, readers_of
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.peer import plan_with_peer
from kvctl_agent.protocol.ring import Position, may_write
from kvctl_agent.protocol.tag import PartKey, PartKind, RoomKey, Tag


class DecodeInvariants:
    """Checks the actions of one decode rank against its expected state.

    Attributes:
        rooms_checked: number of rooms opened since the recording began.
    """

    def __init__(self, machine: DecodeMachine) -> None:
        self.rooms_checked = 0
        self._machine = machine
        self._local = machine.local
        self._rooms: dict[int, _Room] = {}
        self._unknown = set(machine.rooms)  # opened before the recording
        self._peer_infos: dict[str, msg.PeerInfo] = {}
        self._incarnations: dict[str, int] = {}
        self._lost: set[str] = set()
        self._checksums: set[tuple[int, int, PartKind, PartKey]] = set()  # being computed
        for name, peer in machine.peers.items():
            self._incarnations[name] = peer.incarnation
            if peer.info is not None:
                self._peer_infos[name] = peer.info
            if not peer.usable:
                self._lost.add(name)
        self._unknown_serials = machine.ring.last_serial  # serials up to this one were granted before the recording
        self._ring = _Ring(self._local.ring_bytes, self._unknown_serials, complete=not machine.rooms)

    def feasible(self, event: ev.Event) -> bool:
        """Returns whether `event` can occur in this run.

        A report of the engine or a worker cannot occur if the action it is about did not happen.
        """
        if isinstance(event, ev.Scattered | ev.ScatterFailed):
            region = self._ring.live.get(event.serial)
            return event.serial <= self._unknown_serials if region is None else region.scattering
        if isinstance(event, ev.Checked):
            return event.room in self._unknown or (event.room, event.nonce, event.kind, event.key) in self._checksums
        return True

    def check(self, event: ev.Event, now_ns: int, actions: Sequence[ev.Action]) -> None:
        """Checks the actions that resulted from one input.

        Raises:
            Violation: an invariant does not hold.
        """
        lost = {action.peer for action in actions if isinstance(action, ev.DropPeer)}
        for name in lost:
            self._lose(name, event)
        match event:
            case ev.OpenRoom():
                self._open(event, actions)
            case ev.Arrived():
                self._arrived(event.tag)
            case ev.Scattered():
                self._scattered(event.serial, copied=True)
            case ev.ScatterFailed():
                self._scattered(event.serial, copied=False)
            case ev.Checked():
                self._checksums.discard((event.room, event.nonce, event.kind, event.key))
            case ev.Received():
                self._received(event)
            case ev.ReleaseHeld():
                self._operator_released(event, actions)
        for action in actions:
            match action:
                case ev.Send():
                    self._sent(action.peer, action.message)
                case ev.Scatter():
                    self._scatter(action)
                case ev.Check():
                    self._checksums.add((action.room, action.nonce, action.kind, action.key))
                case ev.StateChanged():
                    self._state_changed(action)
                case ev.Released():
                    self._released(action.room)
        self._plan_opened(actions)
        self._remove_finished(list(self._rooms) if lost else rooms_of(event, actions))

    # ---- inputs ---------------------------------------------------------------------------------------------------

    def _open(self, event: ev.OpenRoom, actions: Sequence[ev.Action]) -> None:
        if not any(isinstance(action, ev.StateChanged) and action.room == event.room for action in actions):
            return  # refused
        self._unknown.discard(event.room)
        self._rooms[event.room] = _Room(event.room, event.nonce, opening=event)
        self.rooms_checked += 1

    def _received(self, event: ev.Received) -> None:
        name, message = event.peer, event.message
        if isinstance(message, msg.HelloAck):
            if message.to == self._local.incarnation and event.incarnation >= self._incarnations.get(name, 0):
                self._incarnations[name] = event.incarnation
                self._peer_infos[name] = message.who
                self._lost.discard(name)
            return
        known = name not in self._lost and event.incarnation == self._incarnations.get(name)
        if not known or not isinstance(message, msg.RoomMessage):
            return
        match message:
            case msg.PartReady():
                for data in message.tags:
                    try:
                        self._arrived(Tag.unpack(data))
                    except RemoteProtocolError:
                        continue
            case msg.StagingRevoked():
                region = self._ring.live.get(message.serial)
                if region is not None and not region.scattering and region.room.peer == name:
                    self._ring.free(region)
        room = self._rooms.get(message.room)
        if room is None or room.nonce != message.nonce:
            return
        match message:
            case msg.RoomAccepted():
                room.accepted.add(name)
            case msg.ReadersDone():
                room.awaited.discard(name)
            case msg.Ack(of="room-done" | "room-failed") if room.state is RoomState.SUCCESS:
                room.acked.add(name)
            case msg.RoomRefused():
                self._drained(room, name)
            case msg.RoomDrained() if room.failed:
                self._drained(room, name)

    def _drained(self, room: _Room, name: str) -> None:
        """Records that writer `name` has no part in flight to the room.

        Frees the writer's regions, except regions that are being scattered.
        """
        room.drained.add(name)
        room.acked.add(name)
        for region in self._ring.regions_of(RoomKey(name, room.room, room.nonce)):
            if not region.scattering:
                self._ring.free(region)

    def _lose(self, name: str, event: ev.Event) -> None:
        """Records the loss of peer `name`.

        Its regions are freed if the event proves that its process has ended; otherwise it may still write into them.
        """
        proven = isinstance(event, ev.PeerDead)
        if isinstance(event, ev.Received):  # a Bye, or the hello of the next incarnation
            proven = not isinstance(event.message, msg.Bye) or event.message.drained
        self._lost.add(name)
        for room in self._rooms.values():
            if name in room.writers.values():
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

    def _operator_released(self, event: ev.ReleaseHeld, actions: Sequence[ev.Action]) -> None:
        """Checks and records what the operator's release of quarantined memory freed.

        It requires `force`, with which the operator guarantees that the writer has ended. A region that is being
        scattered must not be freed.
        """
        for answer in actions:
            if not isinstance(answer, ev.Answered) or not (answer.freed or answer.drained):
                continue
            if not event.force:
                raise Violation("released-early", f"{answer.text}, without proof that its writer ended", event.room)
            room = self._rooms.get(event.room) if event.room is not None else None
            if room is not None:
                room.drained.update(answer.drained)
                room.acked.update(answer.drained)
            for serial in answer.freed:
                region = self._ring.live.get(serial)
                if region is not None and region.scattering:
                    raise Violation("released-early", f"{region} is freed while it is scattered", region.room.room)
                if region is not None:
                    self._ring.free(region)

    def _arrived(self, tag: Tag) -> None:
        """Records that a part has landed whose tag came from the transport or in a message."""
        room = self._rooms.get(tag.room)
        if tag.incarnation != self._local.incarnation or room is None or room.nonce != tag.nonce:
            return
        if tag.kind is not PartKind.KV:
            room.cover(tag.kind, tag.key)
            return
        if room.pages(tag.key) is None or tag.key.writer not in room.writers:
            return
        key = RoomKey(room.writers[tag.key.writer], tag.room, tag.nonce)
        region = next((each for each in self._ring.regions_of(key) if each.key == tag.key), None)
        if tag.serial == 0:
            room.cover(PartKind.KV, tag.key)
            if region is not None and not region.scattering:
                self._ring.free(region)  # written on another path although it was granted
        elif region is not None and region.serial == tag.serial:
            region.landed = True
            if room.failed and not region.scattering:
                self._ring.free(region)  # written, and not needed any more

    def _scattered(self, serial: int, *, copied: bool) -> None:
        region = self._ring.live.get(serial)
        if region is None or not region.scattering:
            return
        self._ring.free(region)
        room = self._rooms.get(region.room.room)
        if room is not None and room.nonce == region.room.nonce:
            room.scattering.discard(serial)
            if copied:
                room.cover(PartKind.KV, region.key)

    # ---- actions --------------------------------------------------------------------------------------------------

    def _sent(self, name: str, message: msg.Message) -> None:
        match message:
            case msg.StagingGrants():
                self._granted(name, message)
            case msg.Watermark():
                self._ring.set_watermark((message.round, message.tail, message.sequence))
            case msg.Heartbeat():
                self._ring.set_watermark(message.watermark)
            case msg.RoomDone():
                room = self._rooms.get(message.room)
                if room is not None and room.nonce == message.nonce and room.awaited:
                    text = f"room {message.room} is reported to {name} as done before {min(room.awaited)} has said that"
                    raise Violation("success-with-a-gap", f"{text} its other decode ranks have it", message.room)

    def _granted(self, name: str, message: msg.StagingGrants) -> None:
        room = self._rooms.get(message.room)
        if message.room in self._unknown:
            self._ring.set_watermark(message.watermark)
            return
        if room is None or room.nonce != message.nonce or room.failed:
            text = f"{name} gets grants for room {message.room}, which is not open"
            raise Violation("bad-grant", text, message.room)
        first = None if self._ring.live else message.grants[0].serial
        for grant in message.grants:
            key = PartKey(self._peer_infos[name].unique_rank, grant.chunk, grant.lo, grant.hi)
            self._ring.grant(RoomKey(name, message.room, message.nonce), key, grant)
        self._ring.set_watermark(message.watermark)
        if first is not None:
            self._ring.check_writable(first)

    def _scatter(self, action: ev.Scatter) -> None:
        if action.room in self._unknown:
            return

        def violation(text: str) -> Violation:
            return Violation("scatter", text, action.room)

        region = self._ring.live.get(action.serial)
        if region is None:
            raise violation(f"serial {action.serial} is scattered and is not allocated")
        if region.scattering:
            raise violation(f"{region} is scattered twice")
        if not region.landed:
            raise violation(f"{region} is scattered before its bytes have landed")
        granted = (region.room.room, region.room.nonce, region.key, region.offset)
        if granted != (action.room, action.nonce, action.key, action.offset):
            raise violation(f"{region} is scattered as {action.key} of room {action.room}")
        region.scattering = True
        room = self._rooms.get(action.room)
        if room is None or room.nonce != action.nonce:
            return
        if room.released:
            raise violation(f"{region} is scattered into released pages")
        pages = room.pages(action.key)
        if pages is None or not np.array_equal(pages, action.pages):
            raise violation(f"{region} is scattered into pages of another part")
        room.scattering.add(action.serial)

    def _state_changed(self, action: ev.StateChanged) -> None:
        room = self._rooms.get(action.room)
        if room is None:
            return
        room.change(action.state)
        if room.failed:
            for name in room.writers.values():
                for region in self._ring.regions_of(RoomKey(name, action.room, room.nonce)):
                    region.unread = not region.scattering

    def _released(self, number: int) -> None:
        room = self._rooms.get(number)
        if room is None:
            return
        room.release()
        for name in room.writers.values() if room.failed else ():
            if name not in room.drained:
                text = f"room {number} is released while {name} may still write"
                raise Violation("released-early", text, number)
            for region in self._ring.regions_of(RoomKey(name, number, room.nonce)):
                raise Violation("released-early", f"room {number} is released while {region} is in use", number)

    def _plan_opened(self, actions: Sequence[ev.Action]) -> None:
        """Plans rooms that `actions` open; a room is opened at all its prefill ranks at once."""
        opened: dict[int, list[str]] = {}
        for action in actions:
            if isinstance(action, ev.Send) and isinstance(action.message, msg.RoomOpen | msg.RoomKept):
                opened.setdefault(action.message.room, []).append(action.peer)
        for number, names in opened.items():
            room = self._rooms.get(number)
            if room is None or room.writers:
                continue
            if not self._peer_infos.keys() >= set(names):
                del self._rooms[number]  # a peer whose layout the recording does not have: nothing can be planned
                self._unknown.add(number)
                continue
            room.writers = {self._peer_infos[name].unique_rank: name for name in names}
            inputs = plan_with_peer(self._local, self._peer_infos[names[0]]).inputs
            if inputs is not None:
                room.open(inputs, self._local.unique_rank, self._local.coord.dp)

    def _remove_finished(self, numbers: Iterable[int]) -> None:
        """Removes rooms that every rank has finished, and checks that the machine has removed them, too.

        Raises:
            Violation: the machine still has state of such a room.
        """
        for number in numbers:
            room = self._rooms.get(number)
            if room is None or not room.released or not (room.failed or room.acked.issuperset(room.writers.values())):
                continue
            del self._rooms[number]
            nonce = room.nonce
            left = self._machine.rooms.get(number)
            table = self._machine.state.grant_table
            regions = [table.of_room(RoomKey(name, number, nonce)) for name in room.writers.values()]
            if (left is not None and left.nonce == nonce) or any(regions):
                raise Violation("left-behind", f"room {number} is finished everywhere and is still stored", number)


@dataclass(slots=True, eq=False)
class _Room(ExpectedRoom):
    """A room of the rank, and what the messages of its prefill ranks have proven.

    Attributes:
        writers: the ranks where it was opened, by unique rank.
        awaited: those that have not said that its other decode ranks have it, if this rank keeps it.
        kept: those that write nothing to it, if this rank keeps it.
        scattering: serials.
    """

    opening: ev.OpenRoom = field(kw_only=True)
    writers: dict[int, str] = field(default_factory=dict)
    awaited: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    accepted: set[str] = field(default_factory=set)
    drained: set[str] = field(default_factory=set)
    acked: set[str] = field(default_factory=set)
    scattering: set[int] = field(default_factory=set)

    @property
    def failed(self) -> bool:
        return self.state is RoomState.FAILED

    def open(self, inputs: PlanInputs, reader: int, dp: int) -> None:
        """Plans the parts that the writers send to decode rank `reader`, and for which of them it waits."""
        if keeper(inputs, self.room, dp) == reader:
            readers = {rank: readers_of(inputs, self.room, dp, rank) for rank in self.writers}
            self.awaited = {name for rank, name in self.writers.items() if readers[rank] != {reader}}
            self.kept = {name for rank, name in self.writers.items() if reader not in readers[rank]}
        self.plan = RoomPlan.of_call(inputs, self.opening, reader)

    def pages(self, key: PartKey) -> ev.Pages | None:
        """Returns this rank's pages for a part; None if no such part is planned."""
        planned = self.plan.find(PartKind.KV, key) if self.plan is not None else None
        return planned.pages if planned is not None else None

    def gap(self) -> str:
        """Returns why the room must not succeed yet, such as missing layers; "" if nothing is missing."""
        if gap := ExpectedRoom.gap(self):
            return gap
        if silent := [name for name in self.writers.values() if name not in self.accepted | self.kept]:
            return f"{silent[0]} has not accepted it"
        return f"serial {min(self.scattering)} is still being scattered" if self.scattering else ""


@dataclass(slots=True, eq=False)
class _Region:
    """One granted ring region, from its grant until nothing can write or read its bytes any more."""

    room: RoomKey
    key: PartKey
    serial: int
    offset: int
    end: int
    round: int
    landed: bool = False
    scattering: bool = False
    unread: bool = False  # the room failed: it may still be written, and will not be read
    writable: bool = False  # the watermark permits the write

    @property
    def identity(self) -> tuple[object, ...]:
        return self.room, self.key, self.offset, self.end, self.round

    def __str__(self) -> str:
        return f"serial {self.serial} ({self.key} of room {self.room.room}, bytes {self.offset}-{self.end})"


class _Ring:
    """Expected state of the staging ring.

    Args:
        size_bytes: size of the ring.
        last_serial: the highest serial granted before the recording.
        complete: whether all granted regions are known: none was granted before the recording.
    """

    def __init__(self, size_bytes: int, last_serial: int, *, complete: bool) -> None:
        self.live: dict[int, _Region] = {}
        self._size_bytes = size_bytes
        self._last_serial = last_serial
        self._complete = complete
        self._writable: list[tuple[int, int]] = []  # (offset, serial) of regions that are writable or read
        self._watermark = Position(0, 0)
        self._sequence = 0

    def grant(self, room: RoomKey, key: PartKey, grant: msg.Grant) -> None:
        """Checks a grant that was sent or resent, and records its region.

        Raises:
            Violation: the serial was used before, or the region lies outside the ring or overlaps another writable one.
        """
        region = _Region(room, key, grant.serial, grant.offset, grant.end, grant.round)
        known = self.live.get(grant.serial)
        if known is not None:
            if known.identity != region.identity:
                raise Violation("serial-reused", f"{region} is also {known}", room.room)
            return
        if grant.serial <= self._last_serial:
            raise Violation("serial-reused", f"{region} is granted after serial {self._last_serial}", room.room)
        if not 0 <= region.offset < region.end <= self._size_bytes:
            raise Violation("bad-grant", f"{region} exceeds the ring of {self._size_bytes} bytes", room.room)
        self._last_serial = grant.serial
        self.live[grant.serial] = region
        self._open_gates(self._watermark, [region])

    def check_writable(self, serial: int) -> None:
        """Checks that the first grant from an empty ring is writable with the watermark that was sent with it.

        Raises:
            Violation: the grant waits for a watermark.
        """
        region = self.live.get(serial)
        if self._complete and region is not None and not region.writable:
            text = f"{region} waits for a watermark, and no other region is live"
            raise Violation("gated-by-nobody", text, region.room.room)

    def set_watermark(self, watermark: Sequence[int]) -> None:
        """Checks and records a watermark that was sent, (round, tail, sequence); one of another length is ignored.

        Raises:
            Violation: the watermark moves back, or makes two overlapping regions writable.
        """
        if len(watermark) != 3:
            return
        position, sequence = Position(watermark[0], watermark[1]), watermark[2]
        before = self._watermark
        if sequence < self._sequence or position < before:
            raise Violation(
                "watermark-back",
                f"the watermark moves from round {before.round} tail {before.tail} (sequence {self._sequence}) "
                f"to round {position.round} tail {position.tail} (sequence {sequence})",
            )
        if position != before:
            self._open_gates(position, [region for region in self.live.values() if not region.writable])
        self._watermark, self._sequence = position, sequence

    def free(self, region: _Region) -> None:
        """Removes a region that nothing writes or reads any more."""
        if self.live.pop(region.serial, None) is not None and region.writable:
            self._writable.remove((region.offset, region.serial))

    def regions_of(self, room: RoomKey) -> list[_Region]:
        return [region for region in self.live.values() if region.room == room]

    def _open_gates(self, watermark: Position, regions: Iterable[_Region]) -> None:
        for region in regions:
            if not may_write(region.round, region.end, watermark):
                continue
            for offset, serial in self._writable:
                if offset >= region.end:
                    break
                other = self.live[serial]
                # Regions retired for two silent writers may overlap, because neither will be read.
                if region.offset < other.end and not (region.unread and other.unread):
                    text = f"{region} may be written, and so may {other}"
                    raise Violation("two-owners", text, region.room.room)
            region.writable = True
            insort(self._writable, (region.offset, region.serial))
