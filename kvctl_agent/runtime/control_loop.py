"""The control loop: one thread that owns the machine, the control sockets and the registry.

A turn: wait for something to happen, feed it to the machine, carry out its actions, flush one frame to each peer. It
never waits for a peer, a worker or an observer; an exception is recorded and the loop goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

import zmq

from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.messages import Hello, PeerInfo
from kvctl_agent.protocol.peer import Peer, PeerState
from kvctl_agent.protocol.recording import RAISED, REFUSED, InputLog
from kvctl_agent.runtime import control_endpoints
from kvctl_agent.runtime.bootstrap import Registries, RegistryServer
from kvctl_agent.runtime.control_channel import ControlChannel
from kvctl_agent.runtime.liveness import is_dead
from kvctl_agent.runtime.mailbox import Mailbox
from kvctl_agent.telemetry.hub import Telemetry

_TICK_NS = 100_000_000
_LIVENESS_NS = 500_000_000
_FEW_ROOMS = 4
_PAUSE_A_ROOM_S = 50e-6
_LONGEST_PAUSE_S = 1e-3


class Executor(Protocol):
    """What the loop needs of the rest of the agent to carry out actions; called on the loop's thread."""

    def connect_peer(self, action: ev.ConnectPeer) -> None:
        """Make the peer writable; raises where it cannot be."""

    def drop_peer(self, peer: str) -> None: ...

    def state_changed(self, action: ev.StateChanged) -> None: ...

    def released(self, room: int) -> None: ...

    def overlapped(self, action: ev.Overlapped) -> None:
        """A pipelined room is sent."""

    def answered(self, action: ev.Answered) -> None:
        """What an operator's request led to."""

    def refused(self, room: int, text: str) -> None:
        """The machine does not take this room of our engine."""

    def move(self, order: ev.Transfer | ev.Scatter | ev.Check) -> None:
        """Hand a part to a worker or to the arrival loop."""

    def turned(self) -> None:
        """A turn is over."""


class ControlLoop:
    """Runs one machine; everything else talks to it through `mailbox`."""

    def __init__(
        self,
        name: str,
        machine: Machine,
        hands: Executor,
        links: ControlChannel,
        mailbox: Mailbox,
        registries: Registries,
        server: RegistryServer | None,
        telemetry: Telemetry,
        host: str,
        inputs: InputLog | None = None,
    ) -> None:
        """`inputs` is told everything that the machine is, before it is."""
        self._machine = machine
        self._inputs = inputs
        self._hands = hands
        self._links = links
        self._mailbox = mailbox
        self._registries = registries
        self._server = server
        self._telemetry = telemetry
        self._host = host
        self._stopping = False
        self._tick_ns = 0
        self._liveness_ns = 0
        self._poller = zmq.Poller()
        self._polled = (-1, -1)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._table: dict[type, Callable[[Any], None]] = {
            ev.Send: self._send,
            ev.Transfer: hands.move,
            ev.Scatter: hands.move,
            ev.Check: hands.move,
            ev.StateChanged: hands.state_changed,
            ev.Released: lambda action: hands.released(action.room),
            ev.Overlapped: hands.overlapped,
            ev.Answered: hands.answered,
            ev.ConnectPeer: self._connect_peer,
            ev.DropPeer: self._drop_peer,
            ev.ForgetPeer: self._forget_peer,
            ev.FindInstance: self._find_instance,
        }

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """Stop after the current turn and close the sockets; True when the thread has ended, or never began."""
        self._stopping = True
        self._mailbox.wake()
        if self._thread.ident is None:
            self._release()
        elif self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._try_turn(self._poll())
                self._pause()
            self._try_turn(frozenset())  # what was put before we were told to stop
        finally:
            self._links.flush(everything=True)
            self._release()

    def _release(self) -> None:
        self._links.close()
        self._registries.close()
        if self._server is not None:
            self._server.close()

    def _poll(self) -> Set[Any]:
        """Wait for something to happen; returns the sockets that have something to read."""
        changes = self._links.changes, self._registries.changes
        if changes != self._polled:
            self._polled = changes
            for socket, _ in self._poller.sockets[:]:
                self._poller.unregister(socket)
            own = [
                *self._registries.sockets(),
                *([control_endpoints.poll_key(self._server.socket)] if self._server else []),
            ]
            for socket in (self._mailbox, *own, *self._links.sockets()):
                self._poller.register(socket, zmq.POLLIN)
        due = min(self._tick_ns, self._links.due_ns or self._tick_ns)
        return dict(self._poller.poll(max(0, (due - time.monotonic_ns()) // 1_000_000 + 1))).keys()

    def _try_turn(self, ready: Set[Any]) -> None:
        try:
            self._turn(ready)
        except Exception as error:
            self._record_bug(error)

    def _turn(self, ready: Set[Any]) -> None:
        for event in self._mailbox.take():
            self._feed(event)
        for received in self._links.receive(ready):
            if isinstance(received.message, Hello):
                self._check_replaced(received)
            self._feed(received)
        now = time.monotonic_ns()
        if self._server is not None and control_endpoints.poll_key(self._server.socket) in ready:
            self._server.turn()
        for instance in self._registries.turn(ready, now):
            self._roster_changed(instance)
        if now >= self._tick_ns:
            self._tick_ns = now + _TICK_NS
            self._check_liveness(now)
            self._feed(ev.Tick())
        self._links.flush()
        for unsendable in self._links.take_unsendable():
            self._feed(unsendable)
        self._hands.turned()

    def _pause(self) -> None:
        """Under load, let messages gather before the next turn.

        A turn costs about 60 µs whatever it carries, and with many rooms in flight none waits for this one: they wait
        for cores, which fewer turns leave free.
        """
        crowd = self._machine.open_rooms - _FEW_ROOMS
        if crowd > 0:
            time.sleep(min(crowd * _PAUSE_A_ROOM_S, _LONGEST_PAUSE_S))

    def _feed(self, event: ev.Event) -> None:
        inputs, now_ns = self._inputs, time.monotonic_ns()
        if inputs is not None:
            inputs.take(event, now_ns)
        led_to: Sequence[ev.Action] | str = RAISED
        try:
            actions = led_to = self._machine.handle(event, now_ns)
        except LocalProtocolError as error:
            led_to = REFUSED
            self._telemetry.recorder.record("engine", str(error), "error")
            if isinstance(event, ev.SendRoom | ev.OpenRoom):
                self._hands.refused(event.room, str(error))
            return
        except Exception as error:
            self._record_bug(error)
            return
        finally:
            if inputs is not None:
                inputs.told(led_to)
        for action in actions:
            try:
                self._table[type(action)](action)
            except Exception as error:
                self._record_bug(error)

    def _record_bug(self, error: Exception) -> None:
        """A bug, ours or one of the engine's callback, must cost one event or action, not all rooms of this rank."""
        self._telemetry.metrics.add("kvctl_internal_errors_total", 1)
        self._telemetry.recorder.record("control", f"{type(error).__name__}: {error}", "error")

    def _find_instance(self, action: ev.FindInstance) -> None:
        self._registries.ask(action.instance)
        if self._registries.complete(action.instance):
            self._roster_changed(action.instance)

    def _roster_changed(self, instance: str) -> None:
        roster = self._registries.roster(instance)
        if roster.refused:
            self._telemetry.recorder.record("bootstrap", f"the registry refuses us: {roster.refused}", "error")
        if self._machine.local.role != "decode":
            return
        if not self._registries.complete(instance):
            self._feed(ev.RosterMissing(instance, roster.refused or roster.missing))
        else:
            names = tuple(rank.name for rank in roster.ranks)
            self._feed(ev.RosterKnown(instance, names, tuple(rank.incarnation for rank in roster.ranks)))
            for rank in roster.ranks:
                if rank.name in self._machine.roster(instance):
                    self._links.connect(rank.name, rank.endpoint)

    def _check_liveness(self, now_ns: int) -> None:
        """A silent peer on this host may be provably gone; then nobody needs to wait for its silence to grow."""
        if now_ns < self._liveness_ns:
            return
        self._liveness_ns = now_ns + _LIVENESS_NS
        for peer in list(self._machine.peers.values()):
            if not peer.proven_dead and peer.state is not PeerState.REFUSED:
                self._check_ended(peer, peer.incarnation, peer.who)
            for incarnation, former in list(peer.former.items()):
                self._check_ended(peer, incarnation, former.who)
            self._links.keep(peer.name, {peer.route, *(former.route for former in peer.former.values())})

    def _check_replaced(self, hello: ev.Received) -> None:
        """Somebody says Hello under the name of a peer, which need not wait if that one's process has just ended."""
        peer = self._machine.peers.get(hello.peer)
        if peer is not None and not peer.proven_dead and peer.incarnation != hello.incarnation:
            self._check_ended(peer, peer.incarnation, peer.who)

    def _check_ended(self, peer: Peer, incarnation: int, who: PeerInfo | None) -> None:
        if who is not None and who.host == self._host and is_dead(who.pid):
            self._feed(ev.PeerDead(peer.name, incarnation, f"process {who.pid} has ended"))

    def _send(self, action: ev.Send) -> None:
        peer = self._machine.peers.get(action.peer)
        route = action.route
        if (
            not route and peer is not None and not isinstance(action.message, Hello)
        ):  # which goes where the registry says
            route = peer.route
        self._links.queue(action.peer, action.message, route)

    def _connect_peer(self, action: ev.ConnectPeer) -> None:
        try:
            self._hands.connect_peer(action)
        except Exception as error:
            self._feed(ev.PeerUnusable(action.peer, str(error)))
        else:
            self._feed(ev.PeerConnected(action.peer))

    def _drop_peer(self, action: ev.DropPeer) -> None:
        self._hands.drop_peer(action.peer)
        self._links.renew(action.peer)
        self._registries.hurry()

    def _forget_peer(self, action: ev.ForgetPeer) -> None:
        self._hands.drop_peer(action.peer)
        self._links.disconnect(action.peer)
