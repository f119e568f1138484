"""What the control loop orders, done by the agent's parts: the one place where an action meets a worker or a handle."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.runtime.arrival_loop import ArrivalLoop
from kvctl_agent.runtime.handle_registry import HandleRegistry
from kvctl_agent.runtime.operator_requests import OperatorRequests
from kvctl_agent.runtime.peer_connections import PeerConnections
from kvctl_agent.runtime.pipelining import Pipelining
from kvctl_agent.runtime.transfer_worker import TransferWorker


class ActionExecutor:
    """The `Hands` of one agent; used by the control loop's thread.

    Attributes:
        arrivals: decode: the loop that scatters; made after the control loop.
    """

    def __init__(
        self,
        machine: Machine,
        desk: HandleRegistry,
        connections: PeerConnections,
        pipelining: Pipelining,
        workers: Sequence[TransferWorker],
        tickets: OperatorRequests,
    ) -> None:
        """`workers`: prefill: those that exist by the time there is something to move."""
        self.arrivals: ArrivalLoop | None = None
        self._machine = machine
        self._desk = desk
        self._connections = connections
        self._pipelining = pipelining
        self._workers = workers
        self._tickets = tickets

    def connect_peer(self, action: ev.ConnectPeer) -> None:
        self._connections.connect(action.peer, action.who, action.held, self._workers[0] if self._workers else None)

    def drop_peer(self, peer: str) -> None:
        self._connections.drop(peer)

    def state_changed(self, action: ev.StateChanged) -> None:
        self._desk.tell(action.room, action.state, action.failure)

    def released(self, room: int) -> None:
        self._desk.release(room)

    def refused(self, room: int, text: str) -> None:
        self._desk.refuse(room, text)

    def overlapped(self, action: ev.Overlapped) -> None:
        self._pipelining.learn(action)

    def answered(self, action: ev.Answered) -> None:
        self._tickets.answered(action)

    def move(self, order: ev.Transfer | ev.Scatter | ev.Check) -> None:
        if isinstance(order, ev.Scatter | ev.Check):
            assert self.arrivals is not None
            self.arrivals.put(order)
        else:
            # By destination and room, so that neither one peer nor one room always meets the same worker.
            self._workers[hash((order.peer, order.room)) % len(self._workers)].put(order)

    def turned(self) -> None:
        if self.arrivals is not None:
            self.arrivals.expect(self._machine.open_rooms)
