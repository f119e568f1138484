"""The watch over a prefill rank's machine: what may go when, and when pages may be given up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvctl.lab.replay.formatting import rooms_of
from kvctl.lab.replay.invariants import Broken
from kvctl_agent.contract.choices import STAGED
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.ring import Position, may_write
from kvctl_agent.protocol.tag import PartKey, PartKind, RoomKey, Tag

_Life = tuple[str, int]  # peer, incarnation
_Order = tuple[PartKind, PartKey]
_Complain = Callable[[str, str], Broken]  # (invariant, text) → what to raise


class TransferInvariants:
    """A room towards one decode rank, from the moment at which it was accepted."""

    __slots__ = (
        "done",
        "drained",
        "failed",
        "finals",
        "flying",
        "grants",
        "heard_of_end",
        "opening",
        "released",
        "revoked",
        "sent",
    )

    def __init__(self, opening: msg.RoomOpen) -> None:
        self.opening = opening
        self.sent: dict[int, int] = {}  # by chunk, a bit for each layer
        self.finals: set[_Order] = set()
        self.flying: dict[_Order, int] = {}  # with a worker → its serial
        self.grants: dict[tuple[int, int], msg.Grant] = {}  # by the peer's incarnation and the serial
        self.revoked: set[int] = set()  # serials
        self.failed = self.released = self.drained = False
        self.done = False  # RoomDone has come
        self.heard_of_end = False  # that the room failed: it knows


class PrefillInvariants:
    """What one prefill rank is told and says."""

    def __init__(self, machine: PrefillMachine) -> None:
        self._machine = machine
        self._timing = machine.timing
        self.rooms_seen = 0
        self._legs: dict[RoomKey, TransferInvariants] = {}
        self._by_room: dict[int, list[RoomKey]] = {}
        self._unknown = set(machine.rooms)  # known to it before we came
        self._released: set[int] = set()
        self._finished: set[int] = set()
        self._heard: dict[_Life, int] = {}
        self._marks: dict[_Life, tuple[int, Position]] = {}
        for name, peer in machine.peers.items():
            self._heard[name, peer.incarnation] = peer.heard_ns
            self._marks[name, peer.incarnation] = (peer.gate.sequence, peer.gate.position)

    def possible(self, event: ev.Event) -> bool:
        if not isinstance(event, ev.PartSent | ev.PartFailed):
            return True
        key = RoomKey(event.peer, event.room, event.nonce)
        leg = self._legs.get(key)
        return event.room in self._unknown if leg is None else (event.kind, event.key) in leg.flying

    def see(self, event: ev.Event, now_ns: int, actions: Sequence[ev.Action]) -> None:
        match event:
            case ev.Received():
                self._received(event, now_ns, actions)
            case ev.SendRoom():
                self._released.discard(event.room)
            case ev.Finish():
                self._finished.add(event.room)
            case ev.PartSent():
                self._over(event)
            case ev.PartFailed():
                if not event.in_flight:
                    self._over(event)
        for action in actions:
            match action:
                case ev.Transfer():
                    self._transfer(action, now_ns)
                case ev.Send():
                    self._said(action.peer, action.message)
                case ev.StateChanged():
                    self._state(action)
                case ev.Released():
                    self._release(action.room)
        match event:
            case ev.AbortRoom() | ev.PartFailed():
                self._fail(event.room)
            case ev.Received(message=msg.RoomAbort() | msg.RoomFailed() as message):
                if RoomKey(event.peer, message.room, message.nonce) in self._legs:
                    self._fail(message.room)
        self._bury(rooms_of(event, actions))

    # ---- what it is told ----------------------------------------------------------------------------------------

    def _received(self, event: ev.Received, now_ns: int, actions: Sequence[ev.Action]) -> None:
        life, message = (event.peer, event.incarnation), event.message
        self._heard[life] = now_ns
        match message:
            case msg.RoomOpen():
                key = RoomKey(event.peer, message.room, message.nonce)
                taken = any(
                    isinstance(action, ev.Send)
                    and action.peer == event.peer
                    and action.message == msg.RoomAccepted(message.room, message.nonce)
                    for action in actions
                )
                if taken and key not in self._legs and message.room not in self._unknown:
                    self._legs[key] = TransferInvariants(message)
                    self._by_room.setdefault(message.room, []).append(key)
                    self.rooms_seen += 1
            case msg.StagingGrants():
                self._mark(life, message.watermark)
                if leg := self._legs.get(RoomKey(event.peer, message.room, message.nonce)):
                    leg.grants.update({(event.incarnation, grant.serial): grant for grant in message.grants})
            case msg.Watermark():
                self._mark(life, [message.round, message.tail, message.sequence])
            case msg.Heartbeat():
                self._mark(life, message.watermark)
            case msg.RoomDone():
                if leg := self._legs.get(RoomKey(event.peer, message.room, message.nonce)):
                    leg.done = True
            case msg.RoomAbort() | msg.RoomFailed():
                if leg := self._legs.get(RoomKey(event.peer, message.room, message.nonce)):
                    leg.heard_of_end = True
            case msg.Ack(of="room-failed"):
                if leg := self._legs.get(RoomKey(event.peer, message.room, message.nonce)):
                    leg.heard_of_end = leg.failed

    def _mark(self, life: _Life, said: Sequence[int]) -> None:
        if len(said) == 3:
            heard = (said[2], Position(said[0], said[1]))
            self._marks[life] = max(heard, self._marks.get(life, heard))

    def _over(self, event: ev.PartSent | ev.PartFailed) -> None:
        """A worker is done with a part."""
        if leg := self._legs.get(RoomKey(event.peer, event.room, event.nonce)):
            leg.flying.pop((event.kind, event.key), None)

    # ---- what it says -------------------------------------------------------------------------------------------

    def _transfer(self, order: ev.Transfer, now_ns: int) -> None:
        if order.room in self._unknown:
            return
        what = f"{order.kind.name} {order.key} of room {order.room} to {order.peer}"

        def broken(invariant: str, text: str) -> Broken:
            return Broken(invariant, f"{what} {text}", order.room)

        leg = self._legs.get(RoomKey(order.peer, order.room, order.nonce))
        if leg is None:
            raise broken("transfer-unasked", "goes, and the room was not opened there")
        try:
            tag = Tag.unpack(order.tag)
        except RemoteProtocolError as error:
            raise broken("transfer-unasked", f"goes with no tag: {error}") from None
        serial = order.grant.serial if order.grant is not None else 0
        if (tag.kind, tag.room, tag.nonce, tag.serial, tag.key) != (*_named(order), serial, order.key):
            raise broken("transfer-unasked", f"goes with the tag of another part: {tag}")
        if len(order.src_pages) != len(order.dst_pages):
            raise broken("transfer-unasked", f"puts {len(order.src_pages)} pages into {len(order.dst_pages)}")
        for ended, why in ((leg.failed, "has failed"), (leg.released, "was released"), (leg.drained, "was drained")):
            if ended:
                raise broken("transfer-after-end", f"goes after the room {why}")
        life = (order.peer, tag.incarnation)
        silent_ns = now_ns - self._heard.get(life, -1 << 62)
        if silent_ns > self._timing.lease_ns:
            raise broken("transfer-without-lease", f"goes {silent_ns / 1e9:.1f} s after that was heard of last")
        if (order.path == STAGED) != (order.grant is not None):
            raise broken("transfer-ungranted", f"goes by {order.path} {'with' if order.grant else 'without'} a grant")
        if order.grant is not None:
            self._check_grant(order.grant, leg, life, broken)
        self._once(order, leg, broken)
        leg.flying[order.kind, order.key] = serial

    def _check_grant(self, grant: msg.Grant, leg: TransferInvariants, life: _Life, broken: _Complain) -> None:
        if leg.grants.get((life[1], grant.serial)) != grant:
            raise broken("transfer-ungranted", f"goes into serial {grant.serial}, which it was not given")
        if grant.serial in leg.revoked:
            raise broken("transfer-ungranted", f"goes into serial {grant.serial}, which was given back")
        _, mark = self._marks.get(life, (0, Position(0, 0)))
        if not may_write(grant.round, grant.end, mark):
            raise broken(
                "transfer-gated",
                f"goes into serial {grant.serial} (round {grant.round}, bytes {grant.offset}-{grant.end}) "
                f"behind the watermark (round {mark.round} tail {mark.tail})",
            )

    def _once(self, order: ev.Transfer, leg: TransferInvariants, broken: _Complain) -> None:
        if order.kind is PartKind.KV:
            bits = (1 << order.key.hi) - (1 << order.key.lo)
            before = leg.sent.get(order.key.chunk, 0)
            if before & bits:
                raise broken("transfer-twice", "goes, and some of its layers went before")
            leg.sent[order.key.chunk] = before | bits
            return
        if (order.kind, order.key) in leg.finals:
            raise broken("transfer-twice", "goes twice")
        if order.room not in self._finished:
            raise broken("transfer-unasked", "goes before the engine has finished the room")
        leg.finals.add((order.kind, order.key))

    def _said(self, name: str, message: msg.Message) -> None:
        match message:
            case msg.RoomFailed():
                if RoomKey(name, message.room, message.nonce) in self._legs:
                    self._fail(message.room)
            case msg.RoomDrained():
                leg = self._legs.get(RoomKey(name, message.room, message.nonce))
                if leg is not None:
                    if leg.flying:
                        text = f"room {message.room} is said to be drained to {name}, and {_first(leg)} is in flight"
                        raise Broken("drained-in-flight", text, message.room)
                    leg.drained = True
            case msg.StagingRevoked():
                leg = self._legs.get(RoomKey(name, message.room, message.nonce))
                if leg is not None:
                    if message.serial in leg.flying.values():
                        text = f"serial {message.serial} is said to be given back to {name}, and is being written"
                        raise Broken("drained-in-flight", text, message.room)
                    leg.revoked.add(message.serial)

    def _state(self, action: ev.StateChanged) -> None:
        legs = self._of(action.room)
        if action.state is RoomState.FAILED:
            self._fail(action.room)
        elif action.state is RoomState.SUCCESS:
            for key, leg in legs:
                if not leg.done and not leg.failed:
                    text = f"room {action.room} succeeds, and {key.peer} has not said that it is done"
                    raise Broken("success-with-a-gap", text, action.room)

    def _release(self, number: int) -> None:
        if number in self._unknown:
            return
        if number in self._released:
            raise Broken("released-early", f"room {number} is released twice", number)
        for key, leg in self._of(number):
            if leg.flying:
                text = f"room {number} is released, and {_first(leg)} to {key.peer} is in flight"
                raise Broken("released-early", text, number)
            leg.released = True
        self._released.add(number)

    # ---- our own books ------------------------------------------------------------------------------------------

    def _of(self, number: int) -> list[tuple[RoomKey, TransferInvariants]]:
        return [(key, self._legs[key]) for key in self._by_room.get(number, ())]

    def _fail(self, number: int) -> None:
        for _, leg in self._of(number):
            leg.failed = True

    def _bury(self, numbers: Iterable[int]) -> None:
        """Of a room that is over everywhere the machine keeps nothing, and neither do we."""
        for number in numbers:
            legs = self._of(number)
            if not legs:
                continue
            failed = all(leg.failed and leg.heard_of_end and not leg.flying for _, leg in legs)
            if not failed and not all(leg.done and leg.released and not leg.failed for _, leg in legs):
                continue
            for key, _ in legs:
                if key in self._machine.state.legs:
                    raise Broken("left-behind", f"room {number} is over everywhere, and is still in the books", number)
                del self._legs[key]
            del self._by_room[number]
            self._finished.discard(number)


def _named(order: ev.Transfer) -> tuple[PartKind, int, int]:
    return order.kind, order.room, order.nonce


def _first(leg: TransferInvariants) -> PartKey:
    return next(iter(leg.flying))[1]
