"""State machine of a prefill rank: builds its components, and maps each event and message to a handler."""

from __future__ import annotations

from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.machine import Machine, MachineContext, PeerSessions
from kvctl_agent.protocol.peer import LocalInfo, Timing
from kvctl_agent.protocol.prefill.admission import Readers, SendAdmission
from kvctl_agent.protocol.prefill.dispatch import Dispatch, Forwards
from kvctl_agent.protocol.prefill.rooms import ChoosePath, PrefillState, SendRooms, StagingRequests
from kvctl_agent.protocol.prefill.send_room import Part, PeerTransfer, Wait
from kvctl_agent.telemetry.hub import Telemetry


class PrefillMachine(Machine):
    """State machine of all rooms of one prefill rank.

    Args:
        choose: chooses the path of a part.
        fallback: chooses the path of a part that can never have a ring region.
        early_send, checksums: see `PrefillState`.
        state: state to continue from, which also determines these.
    """

    state: PrefillState

    def __init__(
        self,
        local: LocalInfo,
        timing: Timing,
        telemetry: Telemetry,
        choose: ChoosePath,
        fallback: ChoosePath,
        early_send: bool = True,
        checksums: bool = False,
        state: PrefillState | None = None,
    ) -> None:
        state = state or PrefillState(local, timing, early_send=early_send, checksums=checksums)
        context = MachineContext(local, timing, telemetry, state.peers)
        staging = StagingRequests(context, state, choose, fallback)
        rooms = self._rooms = SendRooms(context, state, staging)
        dispatch = Dispatch(context, state, rooms, staging)
        admission = SendAdmission(context, state, rooms, staging, dispatch)
        forwards = Forwards(context, state, rooms, staging, dispatch)
        sessions = PeerSessions(context, rooms.on_peer_lost)
        readers = self._readers = Readers(context, state, dispatch, sessions)
        super().__init__(context, state, sessions, rooms.find, rooms.fail, dispatch.on_lease_renewed)
        self.open = state.transfers
        self._events = {
            # the engine
            ev.SendRoom: forwards.on_send_room,
            ev.Prefetch: forwards.on_prefetch,
            ev.Launched: forwards.on_launched,
            ev.ForwardFailed: forwards.on_forward_failed,
            ev.SendPages: forwards.on_send_pages,
            ev.Finish: forwards.on_finish,
            ev.Recall: forwards.on_recall,
            ev.AbortRoom: self.on_abort_room,
            ev.DeclineRoom: rooms.on_decline_room,
            # the control channel
            ev.Received: self.on_received,
            ev.Unsendable: self.on_unsendable,
            ev.PeerDead: sessions.on_peer_dead,
            # transport and transfers
            ev.PeerConnected: readers.on_peer_connected,
            ev.PeerUnusable: readers.on_peer_unusable,
            ev.PartSent: dispatch.on_part_sent,
            ev.PartFailed: dispatch.on_part_failed,
            # the operator, and time
            ev.SetTimeouts: self.on_set_timeouts,
            ev.Forget: readers.on_forget,
            ev.Drain: self.on_drain,
            ev.Shutdown: sessions.on_shutdown,
            ev.Tick: self.on_tick,
        }
        self._handshake = {
            msg.Hello: readers.on_hello,
        }
        self._messages = {
            msg.Heartbeat: dispatch.on_heartbeat,
            msg.Bye: sessions.on_bye,
            msg.RoomOpen: admission.on_room_open,
            msg.RoomKept: admission.on_room_kept,
            msg.RoomDone: rooms.on_room_done,
            msg.RoomFailed: rooms.on_room_failed,
            msg.RoomAbort: rooms.on_room_abort,
            msg.RoomRenew: rooms.on_room_renew,
            msg.Ack: rooms.on_ack,
            msg.PartAck: rooms.on_part_ack,
            msg.StagingGrants: dispatch.on_staging_grants,
            msg.StagingRefused: dispatch.on_staging_refused,
            msg.StagingRevoke: dispatch.on_staging_revoke,
            msg.Watermark: dispatch.on_watermark,
        }
        self._former_messages = {}
        self._lost_messages = {msg.RoomAbort: rooms.on_room_abort}
        self._unknown_messages = {msg.Heartbeat: readers.on_unknown_heartbeat}

    def on_set_timeouts(self, event: ev.SetTimeouts) -> None:
        super().on_set_timeouts(event)
        self.state.deadlines_due_ns = 0

    def on_drain(self, event: ev.Drain) -> None:
        self.state.draining = event.on

    def on_tick(self, event: ev.Tick) -> None:
        self._sessions.check(event.stalled_ns)
        self._readers.forget_over()
        self._rooms.expire()
        self._rooms.check(event.stalled_ns)

    # ---- views: safe from any thread --------------------------------------------------------------------------

    def parked(self) -> list[tuple[PeerTransfer, Part]]:
        """Returns the gated parts: they are ready, but may not be sent yet."""
        return [entry for parked in list(self.state.parked.values()) for entry in list(parked.values())]

    @property
    def refuses_rooms(self) -> bool:
        return self.state.draining

    def sends(self, room: int) -> bool:
        known = self.state.rooms.get(room)
        return known is not None and known.claimed

    def opened_prefix(self, room: int) -> int | None:
        known = self.state.rooms.get(room)
        if known is None or known.claimed or known.failure is not None:
            return None
        return None if any(transfer.recalled for transfer in list(known.transfers.values())) else known.prefix_tokens

    def waits_for(self, transfer: PeerTransfer, part: Part) -> Wait:
        """Returns the reason why a part is not sent yet."""
        return self._rooms.waits_for(transfer, part)
