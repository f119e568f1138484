"""State machine of a decode rank: builds its components, and maps each event and message to a handler."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode.admission import Handshake, RecvAdmission
from kvctl_agent.protocol.decode.landing import Grants, Landing
from kvctl_agent.protocol.decode.prefill_instances import PrefillInstances
from kvctl_agent.protocol.decode.reclaim import Reclaim
from kvctl_agent.protocol.decode.rooms import DecodeState, RecvRoom, RecvRooms
from kvctl_agent.protocol.machine import Machine, MachineContext, PeerSessions
from kvctl_agent.protocol.peer import LocalInfo, Peer, Timing
from kvctl_agent.protocol.ring import Allocation, Ring
from kvctl_agent.telemetry.hub import Telemetry


class DecodeMachine(Machine):
    """State machine of all rooms of one decode rank."""

    state: DecodeState

    def __init__(
        self, local: LocalInfo, timing: Timing, telemetry: Telemetry, state: DecodeState | None = None
    ) -> None:
        state = state or DecodeState(local, timing)
        context = MachineContext(local, timing, telemetry, state.peers)
        rooms = self._rooms = RecvRooms(context, state)
        grants = self._grants = Grants(context, state, rooms)
        landing = Landing(context, state, rooms, grants)
        reclaim = self._reclaim = Reclaim(context, state, rooms, grants)
        sessions = PeerSessions(context, self._on_peer_lost, reclaim.on_former_ended, grants.watermark)
        instances = self._instances = PrefillInstances(context, state, rooms, sessions, reclaim)
        admission = self._admission = RecvAdmission(context, state, rooms, instances)
        handshake = self._greeting = Handshake(context, state, rooms, instances, admission, sessions)
        super().__init__(context, state, sessions, rooms.find, rooms.fail)
        self._events = {
            # the engine
            ev.OpenRoom: admission.on_open_room,
            ev.Recall: rooms.on_recall,
            ev.RenewRooms: handshake.on_renew_rooms,
            ev.ConnectInstance: instances.on_connect_instance,
            ev.DisconnectInstance: instances.on_disconnect_instance,
            ev.AbortRoom: self.on_abort_room,
            # the control channel and the registry
            ev.Received: self.on_received,
            ev.Unsendable: self.on_unsendable,
            ev.RosterKnown: handshake.on_roster_known,
            ev.RosterMissing: instances.on_roster_missing,
            ev.PeerUnusable: handshake.on_peer_unusable,
            ev.InstanceUnreachable: instances.on_instance_unreachable,
            ev.PeerDead: sessions.on_peer_dead,
            # transport and copies
            ev.Arrived: landing.on_arrived,
            ev.Scattered: landing.on_scattered,
            ev.ScatterFailed: landing.on_scatter_failed,
            ev.Checked: landing.on_checked,
            # the operator, and time
            ev.ReleaseHeld: reclaim.on_release_held,
            ev.Forget: instances.on_forget,
            ev.SetTimeouts: self.on_set_timeouts,
            ev.Drain: lambda event: None,  # the agent itself takes no new rooms then
            ev.Shutdown: sessions.on_shutdown,
            ev.Tick: self.on_tick,
        }
        self._handshake = {
            msg.HelloAck: handshake.on_hello_ack,
        }
        self._messages = {
            msg.Heartbeat: self.on_heartbeat,
            msg.HelloWanted: handshake.on_hello_wanted,
            msg.Bye: sessions.on_bye,
            msg.RoomAccepted: rooms.on_room_accepted,
            msg.RoomRefused: reclaim.on_room_refused,
            msg.RoomFailed: rooms.on_room_failed,
            msg.ReadersDone: rooms.on_readers_done,
            msg.RoomDrained: reclaim.on_room_drained,
            msg.Ack: rooms.on_ack,
            msg.StagingRequest: grants.on_staging_request,
            msg.StagingRevoked: grants.on_staging_revoked,
            msg.TooLate: grants.on_too_late,
            msg.PartReady: landing.on_part_ready,
        }
        self._former_messages = {
            msg.Bye: sessions.on_former_bye,
            msg.RoomDrained: reclaim.on_former_drained,
        }
        self._lost_messages = {}
        self._unknown_messages = {}

    def on_tick(self, event: ev.Tick) -> None:
        self._sessions.check(event.stalled_ns)
        self.state.tombstones.expire(self._context.now_ns)
        self._reclaim.forget_former()
        self._instances.forget_unneeded()
        self._greeting.send_hello()
        self._admission.open_failed()
        self._rooms.check(event.stalled_ns)
        self._grants.unblock()

    def _on_peer_lost(self, peer: Peer, text: str) -> None:
        self._reclaim.on_peer_lost(peer, text)
        self._instances.retry_clashes()

    # ---- views: safe from any thread --------------------------------------------------------------------------

    def roster(self, instance: str) -> tuple[str, ...]:
        return self.state.roster(instance)

    @property
    def instances(self) -> tuple[str, ...]:
        return tuple(self.state.instances)

    def ranks_of(self, room: RecvRoom) -> Sequence[str]:
        """Returns the names of the prefill ranks that compute a room; of the whole instance while none is ready."""
        return self._rooms.ranks_of(room)

    def kv_dtype(self, instance: str) -> str | None:
        """Returns the dtype of the KV of a prefill instance; "" if it says none, None if its ranks are unknown."""
        peers = [self._context.peers.get(name) for name in self.roster(instance)]
        known = [peer.info for peer in peers if peer is not None and peer.info is not None]
        return known[0].dtypes.get("kv", "").split(", ")[0] if known else None

    def is_ready(self, name: str) -> bool:
        """Returns whether messages about rooms may be sent to this peer."""
        return self._context.is_ready(name)

    @property
    def missing_peers(self) -> list[str]:
        """Names of the ranks that are on a roster but not ready."""
        known = list(self.state.instances.values())
        return [name for instance in known for name in instance.roster if not self.is_ready(name)]

    @property
    def quarantined_bytes(self) -> int:
        """Ring and page bytes of failed rooms that a lost or silent writer may still write."""
        return self._reclaim.quarantined_bytes

    @property
    def ring(self) -> Ring:
        """Allocator of the staging ring; callers must not change it."""
        return self.state.grant_table.ring

    def allocations(self) -> list[Allocation]:
        """Returns the live allocations of the ring, oldest first."""
        return self.state.grant_table.allocations()

    @property
    def refused_largest_bytes(self) -> int:
        """Size of the largest part that was refused because it does not fit into the ring; 0 if none was refused."""
        return self.state.grant_table.refused_largest_bytes
