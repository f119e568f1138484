"""Checks the invariants of a prefill rank: which parts it sends and when, and when the pages of a room are released.

The expected state is computed from the inputs and actions alone, as in `decode_invariants`. Rooms that the machine knew
before the recording are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvctl.lab.replay.formatting import rooms_of
from kvctl.lab.replay.invariants import ExpectedTransfer, PartId, RoomPlan, Violation
from kvctl_agent.contract.choices import STAGED
from kvctl_agent.contract.states import RoomState
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.peer import plan_with_peer
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.ring import Position, may_write
from kvctl_agent.protocol.tag import PartKey, RoomKey, Tag

_Process = tuple[str, int]  # name and incarnation of a peer
_MakeViolation = Callable[[str, str], Violation]  # invariant, text


@dataclass(slots=True, eq=False)
class _Transfer(ExpectedTransfer):
    """Expected state of the transfer of one room to one decode rank, from its acceptance on.

    Attributes:
        plan: None for a rank that only keeps the room, or whose layout is unknown.
        in_flight: serials of parts that a worker has.
        grants: by the peer's incarnation and the serial.
        revoked: serials.
        recalled: the decode rank takes its pages back, and the room waits to be opened again.
        done: RoomDone has arrived.
    """

    plan: RoomPlan | None = None
    in_flight: dict[PartId, int] = field(default_factory=dict)
    grants: dict[tuple[int, int], msg.Grant] = field(default_factory=dict)
    revoked: set[int] = field(default_factory=set)
    failed: bool = False
    released: bool = False
    drained: bool = False
    recalled: bool = False
    done: bool = False
    peer_knows_failure: bool = False


class PrefillInvariants:
    """Checks the actions of one prefill rank against its expected state.

    Attributes:
        rooms_checked: number of rooms opened since the recording began; a room counts once for each decode rank.
    """

    def __init__(self, machine: PrefillMachine) -> None:
        self.rooms_checked = 0
        self._machine = machine
        self._timing = machine.timing
        self._transfers: dict[RoomKey, _Transfer] = {}
        self._by_room: dict[int, list[RoomKey]] = {}
        self._unknown = set(machine.rooms)  # known to the machine before the recording
        self._released: set[int] = set()
        self._finished: set[int] = set()
        self._recalled: dict[int, set[str]] = {}  # by room: decode ranks that have recalled it and not opened it again
        self._peer_infos: dict[_Process, msg.PeerInfo] = {}
        self._heard_ns: dict[_Process, int] = {}
        self._watermarks: dict[_Process, tuple[int, Position]] = {}  # sequence and position
        for name, peer in machine.peers.items():
            if peer.info is not None:
                self._peer_infos[name, peer.incarnation] = peer.info
            self._heard_ns[name, peer.incarnation] = peer.heard_ns
            self._watermarks[name, peer.incarnation] = (peer.gate.sequence, peer.gate.position)

    def feasible(self, event: ev.Event) -> bool:
        """Returns whether `event` can occur in this run: a worker reports only on transfers that were ordered."""
        if not isinstance(event, ev.PartSent | ev.PartFailed):
            return True
        transfer = self._transfers.get(RoomKey(event.peer, event.room, event.nonce))
        return event.room in self._unknown if transfer is None else (event.kind, event.key) in transfer.in_flight

    def check(self, event: ev.Event, now_ns: int, actions: Sequence[ev.Action]) -> None:
        """Checks the actions that resulted from one input.

        Raises:
            Violation: an invariant does not hold.
        """
        match event:
            case ev.Received():
                self._received(event, now_ns, actions)
            case ev.SendRoom():
                self._released.discard(event.room)
                self._recalled.pop(event.room, None)
            case ev.Finish():
                self._finished.add(event.room)
            case ev.Recall():
                self._finished.discard(event.room)
            case ev.PartSent():
                self._completed(event)
            case ev.PartFailed():
                if not event.in_flight:
                    self._completed(event)
        for action in actions:
            match action:
                case ev.Transfer():
                    self._transfer(action, now_ns)
                case ev.Send():
                    self._sent(action.peer, action.message)
                case ev.StateChanged():
                    self._state_changed(action)
                case ev.Released():
                    self._release(action.room)
        match event:
            case ev.AbortRoom() | ev.PartFailed():
                self._fail(event.room)
            case ev.Received(message=msg.RoomAbort(recall=False) | msg.RoomFailed() as message):
                if RoomKey(event.peer, message.room, message.nonce) in self._transfers:
                    self._fail(message.room)
        self._remove_finished(rooms_of(event, actions))

    # ---- inputs ---------------------------------------------------------------------------------------------------

    def _received(self, event: ev.Received, now_ns: int, actions: Sequence[ev.Action]) -> None:
        process, message = (event.peer, event.incarnation), event.message
        self._heard_ns[process] = now_ns
        match message:
            case msg.Hello():
                self._peer_infos[process] = message.who
            case msg.RoomOpen() | msg.RoomKept():
                key = RoomKey(event.peer, message.room, message.nonce)
                acceptance: msg.Message = msg.RoomAccepted(message.room, message.nonce)
                if isinstance(message, msg.RoomKept):
                    acceptance = msg.Ack(message.room, message.nonce, "room-kept")
                accepted = any(
                    isinstance(action, ev.Send) and action.peer == event.peer and action.message == acceptance
                    for action in actions
                )
                if accepted and key not in self._transfers and message.room not in self._unknown:
                    self._transfers[key] = _Transfer(plan=self._plan(process, message))
                    self._by_room.setdefault(message.room, []).append(key)
                    self._recalled.get(message.room, set()).discard(event.peer)
                    self.rooms_checked += 1
            case msg.StagingGrants():
                self._set_watermark(process, message.watermark)
                if transfer := self._transfer_of(event.peer, message):
                    transfer.grants.update({(event.incarnation, grant.serial): grant for grant in message.grants})
            case msg.Watermark():
                self._set_watermark(process, [message.round, message.tail, message.sequence])
            case msg.Heartbeat():
                self._set_watermark(process, message.watermark)
            case msg.RoomDone():
                if transfer := self._transfer_of(event.peer, message):
                    transfer.done = True
            case msg.RoomAbort() | msg.RoomFailed():
                if transfer := self._transfer_of(event.peer, message):
                    transfer.peer_knows_failure = True
                    transfer.recalled |= isinstance(message, msg.RoomAbort) and message.recall
            case msg.Ack(of="room-failed"):
                if transfer := self._transfer_of(event.peer, message):
                    transfer.peer_knows_failure = transfer.failed

    def _set_watermark(self, process: _Process, watermark: Sequence[int]) -> None:
        if len(watermark) == 3:
            latest = (watermark[2], Position(watermark[0], watermark[1]))
            self._watermarks[process] = max(latest, self._watermarks.get(process, latest))

    def _completed(self, event: ev.PartSent | ev.PartFailed) -> None:
        """Records that a worker has finished a part, which is no longer in flight."""
        if (transfer := self._transfer_of(event.peer, event)) is None:
            return
        transfer.in_flight.pop((event.kind, event.key), None)
        if isinstance(event, ev.PartSent) and event.dropped:  # may be sent again, if its pages were recalled
            transfer.undo(event.kind, event.key)

    def _plan(self, process: _Process, message: msg.RoomOpen | msg.RoomKept) -> RoomPlan | None:
        if isinstance(message, msg.RoomKept):
            return None
        if (info := self._peer_infos.get(process)) is None:
            return None
        inputs = plan_with_peer(self._machine.local, info).inputs
        return RoomPlan.of_message(inputs, message, info.unique_rank) if inputs is not None else None

    # ---- actions --------------------------------------------------------------------------------------------------

    def _transfer(self, order: ev.Transfer, now_ns: int) -> None:
        if order.room in self._unknown:
            return
        name = f"{order.kind.name} {order.key} of room {order.room} to {order.peer}"

        def violation(invariant: str, text: str) -> Violation:
            return Violation(invariant, f"{name} {text}", order.room)

        transfer = self._transfer_of(order.peer, order)
        if transfer is None:
            raise violation("transfer-unasked", "is sent, and the room was not opened by that rank")
        rank = self._machine.local.unique_rank
        transfer.order(rank, order, transfer.plan, finished=order.room in self._finished)
        for ended, text in (
            (transfer.failed, "has failed"),
            (transfer.released, "was released"),
            (transfer.drained, "was drained"),
        ):
            if ended:
                raise violation("transfer-after-end", f"is sent after the room {text}")
        process = order.peer, Tag.unpack(order.tag).incarnation
        silent_ns = now_ns - self._heard_ns.get(process, -1 << 62)
        if silent_ns > self._timing.lease_ns:
            text = f"is sent {silent_ns / 1e9:.1f} s after the last message from that rank"
            raise violation("transfer-without-lease", text)
        if (order.path == STAGED) != (order.grant is not None):
            with_grant = "with" if order.grant else "without"
            raise violation("transfer-ungranted", f"is sent on path {order.path} {with_grant} a grant")
        if order.grant is not None:
            self._check_grant(order.grant, transfer, process, violation)
        transfer.in_flight[order.kind, order.key] = order.grant.serial if order.grant is not None else 0

    def _check_grant(self, grant: msg.Grant, transfer: _Transfer, process: _Process, violation: _MakeViolation) -> None:
        if transfer.grants.get((process[1], grant.serial)) != grant:
            raise violation("transfer-ungranted", f"is written into serial {grant.serial}, which was not granted")
        if grant.serial in transfer.revoked:
            raise violation("transfer-ungranted", f"is written into serial {grant.serial}, which was revoked")
        _, watermark = self._watermarks.get(process, (0, Position(0, 0)))
        if not may_write(grant.round, grant.end, watermark):
            raise violation(
                "transfer-gated",
                f"is written into serial {grant.serial} (round {grant.round}, bytes {grant.offset}-{grant.end}) "
                f"beyond the watermark (round {watermark.round} tail {watermark.tail})",
            )

    def _sent(self, name: str, message: msg.Message) -> None:
        if not isinstance(message, msg.RoomFailed | msg.RoomDrained | msg.StagingRevoked):
            return
        transfer = self._transfer_of(name, message)
        if transfer is None:
            return
        match message:
            case msg.RoomFailed():
                self._fail(message.room)
            case msg.RoomDrained():
                if transfer.in_flight:
                    text = f"room {message.room} is reported to {name} as drained while {_first(transfer)} is in flight"
                    raise Violation("drained-in-flight", text, message.room)
                transfer.drained = True
                if transfer.recalled and not transfer.failed:
                    key = RoomKey(name, message.room, message.nonce)
                    del self._transfers[key]
                    self._by_room[message.room].remove(key)
                    self._recalled.setdefault(message.room, set()).add(name)
            case msg.StagingRevoked():
                if message.serial in transfer.in_flight.values():
                    text = f"serial {message.serial} is reported to {name} as revoked while it is being written"
                    raise Violation("drained-in-flight", text, message.room)
                transfer.revoked.add(message.serial)

    def _state_changed(self, action: ev.StateChanged) -> None:
        if action.state is RoomState.FAILED:
            self._fail(action.room)
        elif action.state is RoomState.SUCCESS:
            for key, transfer in self._transfers_of(action.room):
                if not transfer.done and not transfer.failed:
                    text = f"room {action.room} succeeds before {key.peer} has reported that it is done"
                    raise Violation("success-with-a-gap", text, action.room)

    def _release(self, number: int) -> None:
        if number in self._unknown:
            return
        if number in self._released:
            raise Violation("released-early", f"room {number} is released twice", number)
        for key, transfer in self._transfers_of(number):
            if transfer.in_flight:
                text = f"room {number} is released while {_first(transfer)} to {key.peer} is in flight"
                raise Violation("released-early", text, number)
            transfer.released = True
        self._released.add(number)

    # ---- expected state -------------------------------------------------------------------------------------------

    def _transfer_of(
        self, peer: str, subject: ev.Transfer | ev.PartSent | ev.PartFailed | msg.RoomMessage
    ) -> _Transfer | None:
        """Returns the transfer to `peer` that a message, report or order concerns; None if it is not checked."""
        return self._transfers.get(RoomKey(peer, subject.room, subject.nonce))

    def _transfers_of(self, number: int) -> list[tuple[RoomKey, _Transfer]]:
        return [(key, self._transfers[key]) for key in self._by_room.get(number, ())]

    def _fail(self, number: int) -> None:
        for _, transfer in self._transfers_of(number):
            transfer.failed = True

    def _remove_finished(self, numbers: Iterable[int]) -> None:
        """Removes rooms that every rank has finished, and checks that the machine has removed them, too.

        Raises:
            Violation: the machine still has state of such a room.
        """
        for number in numbers:
            transfers = self._transfers_of(number)
            if not transfers:
                continue
            failed = all(each.failed and each.peer_knows_failure and not each.in_flight for _, each in transfers)
            done = all(each.done and each.released and not each.failed for _, each in transfers)
            if not failed and not (done and not self._recalled.get(number)):
                continue
            self._recalled.pop(number, None)
            for key, _ in transfers:
                if key in self._machine.state.transfers:
                    raise Violation("left-behind", f"room {number} is finished everywhere and is still stored", number)
                del self._transfers[key]
            del self._by_room[number]
            self._finished.discard(number)


def _first(transfer: _Transfer) -> PartKey:
    return next(iter(transfer.in_flight))[1]
