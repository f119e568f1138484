"""State of an agent (new, running, draining, closed), and the reasons why it cannot serve yet."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Literal

from kvctl_agent.contract.states import DRAINING, UNREGISTERED
from kvctl_agent.errors import ConfigError, DeadlineExceeded, LocalProtocolError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.bootstrap_registry import Roster
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.peer import LocalInfo, PeerState
from kvctl_agent.runtime.bootstrap import Registries
from kvctl_agent.runtime.control_loop import Mailbox
from kvctl_agent.runtime.handles import HandleRegistry, Receive, Send, in_flight
from kvctl_agent.telemetry.hub import Telemetry

State = Literal["new", "running", "draining", "unregistered", "closed"]

_POLL_S = 0.01
_ROOMS_POLL_S = 0.002
_OUTCOME_S = 1.0  # time for decode ranks to say that they have the rooms that are sent


class Lifecycle:
    """State of one agent from its construction to its end; any thread may use it.

    | call | from | to |
    | --- | --- | --- |
    | `started` | new | running |
    | `begin_drain`, `leave` | running, draining | draining |
    | `resume` | running, draining | running |
    | `unregister` | draining, no room open | unregistered |
    | `register` | unregistered | running, or draining if it was before |
    | `close` | any | closed |

    One lock makes each change of the state one step with what depends on it: the events that the machine gets, and the
    handles of new rooms. It is held for microseconds, and reentrant for signal handlers that close the agent.

    `Agent.start`, `unregister`, `register` and the shutdown of a closed agent take longer. One of them at a time is in
    progress, between `begin` and `end`; who closes the agent meanwhile leaves its shutdown to that thread.

    Attributes:
        state: "new" until the agent is started, "closed" from the start of its close.
        instances: endpoints of the registries that the agent registers with, or that it was told to connect to.
        drains_again: whether the agent drains after `register`: not only because of its `unregister`.
        closed_from: state before `close`.
        deadline_s: monotonic time at which the shutdown should have ended.
    """

    def __init__(
        self,
        local: LocalInfo,
        instances: Sequence[str],
        registries: Registries,
        machine: Machine,
        telemetry: Telemetry,
        mailbox: Mailbox,
        handles: HandleRegistry,
    ) -> None:
        self.state: State = "new"
        self.instances = tuple(instances)
        self.drains_again = False
        self.closed_from: State = "new"
        self.deadline_s = math.inf
        self._name = local.name
        self._role = local.role
        self._telemetry = telemetry
        self._registries = registries
        self._machine = machine
        self._mailbox = mailbox
        self._handles = handles
        self._leaving = False  # the engine has called `Agent.drain`
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)  # no call is in progress
        self._in_progress = ""  # name of the call between `begin` and `end`
        self._thread = 0  # identifier of its thread
        self._shut_down = False

    @property
    def accepting(self) -> bool:
        """Whether the engine may begin new rooms."""
        return self.state == "running"

    @property
    def draining(self) -> bool:
        """Whether the agent is draining: it accepts no new rooms until `resume`."""
        return self.state == "draining"

    # ---- long changes, one at a time ------------------------------------------------------------------------------

    def begin(self, call: str) -> None:
        """Begins `call`, which ends with `end`; raises LocalProtocolError if another is in progress, or closed."""
        with self._lock:
            self._check_state()
            if self._in_progress:
                raise LocalProtocolError(f"agent {self._name}: {self._in_progress} is in progress in another thread")
            self._in_progress, self._thread = call, threading.get_ident()

    def end(self) -> bool:
        """Ends the call; returns whether the agent was closed meanwhile, so that this thread must shut it down."""
        with self._lock:
            closed = self.state == "closed"
            self._in_progress = "close" if closed else ""
            self._idle.notify_all()
            return closed

    def close(self, deadline_s: float) -> bool:
        """Marks the agent as closed; returns whether this thread must shut it down, and then call `closed`.

        Otherwise another thread, or a frame of this thread that a signal has interrupted, does so: `wait_closed`.
        """
        with self._lock:
            if self.state != "closed":
                self.closed_from, self.state, self.deadline_s = self.state, "closed", deadline_s
            if self._in_progress or self._shut_down:
                return False
            self.deadline_s = deadline_s
            self._in_progress, self._thread = "close", threading.get_ident()
            return True

    def closed(self, *, complete: bool) -> None:
        """Ends the shutdown. If it is not `complete`, since something still runs, the next close continues it."""
        with self._lock:
            self._in_progress, self._shut_down = "", complete
            self._idle.notify_all()

    def wait_closed(self, timeout: float) -> bool:
        """Waits for the shutdown in another thread; returns whether it has ended, or has to wait for this thread."""
        with self._lock:
            own = self._thread == threading.get_ident()
            return own or self._idle.wait_for(lambda: not self._in_progress, timeout)

    def check_new(self) -> None:
        """Raises LocalProtocolError if the agent was started before."""
        if self.state != "new":
            raise LocalProtocolError(f"agent {self._name} was started before; create a new one")

    def started(self) -> None:
        """Marks the agent, which is new, as running; raises LocalProtocolError if another thread has closed it."""
        with self._lock:
            self._check_state("new")
            self.state = "running"

    def unregister(self) -> bool:
        """Marks the agent as having given its pool back; returns False if rooms are still open.

        Raises:
            LocalProtocolError: the agent is not draining: an operator has resumed it, or another thread closes it.
        """
        with self._lock:
            self._check_state("draining")
            if self._handles.rooms or self._machine.rooms:
                return False
            self._telemetry.drain(False)
            self.state = "unregistered"
            return True

    def register(
        self,
        opened: Sequence[str],
        registries: Registries,
        machine: Machine,
        mailbox: Mailbox,
        handles: HandleRegistry,
    ) -> None:
        """Marks the agent as running or draining with new components, whose loop has looked up the instances `opened`.

        Raises:
            LocalProtocolError: another thread closes the agent.
        """
        with self._lock:
            self._check_state("unregistered")
            self._registries, self._machine, self._mailbox, self._handles = registries, machine, mailbox, handles
            added = [ev.ConnectInstance(each) for each in self.instances if each not in opened]
            mailbox.put(*added, *(ev.DisconnectInstance(each) for each in opened if each not in self.instances))
            self._leaving = False
            self.state = "draining" if self.drains_again else "running"
            self._telemetry.drain(self.drains_again)

    def _check_state(self, *permitted: State) -> None:
        """Raises LocalProtocolError unless the state is one of these; with none, if it is closed."""
        if self.state not in permitted if permitted else self.state == "closed":
            raise LocalProtocolError(f"agent {self._name} is {self.state}")

    # ---- drain ----------------------------------------------------------------------------------------------------

    def begin_drain(self, *, to_unregister: bool = False) -> None:
        """Stops accepting new rooms; raises LocalProtocolError unless the agent is running or draining.

        Args:
            to_unregister: the agent accepts rooms again after `register`, unless it drains for another reason, too.
        """
        with self._lock:
            self._check_state("running", "draining")
            self.drains_again = not to_unregister or self.draining
            # In this order: a room that a peer opens in between is refused, and so fails if the engine begins it, too.
            self._telemetry.drain(True)
            self._mailbox.put(ev.Drain(True))
            self.state = "draining"

    def leave(self) -> None:
        """Starts to drain if the agent is running, and makes `resume` fail from now on."""
        with self._lock:
            self._leaving = True
            if self.accepting or self.draining:
                self.begin_drain()

    def resume(self) -> None:
        """Accepts new rooms again after `begin_drain`.

        Raises:
            LocalProtocolError: the agent is not running or draining, or its engine has called `leave`.
        """
        with self._lock:
            if self._leaving and self.state != "closed":
                raise LocalProtocolError(f"agent {self._name} is being closed by its engine")
            self._check_state("running", "draining")
            self.state = "running"
            self._telemetry.drain(False)
            self._mailbox.put(ev.Drain(False))

    def end_unregister_drain(self) -> None:
        """Accepts rooms again after an `unregister` that has failed, unless the agent drains for another reason."""
        with self._lock:
            if self.draining and not self.drains_again:
                self.resume()

    # ---- rooms in flight ------------------------------------------------------------------------------------------

    def drain(self, timeout: float) -> None:
        """Stops accepting new rooms, and waits until those in flight have ended and peers know it.

        Raises:
            DeadlineExceeded: rooms are still in flight after `timeout` seconds; the text names them.
        """
        deadline_s = time.monotonic() + timeout
        self.leave()
        while rooms := {*self._handles.rooms, *(self._machine.unanswered() if self.draining else ())}:
            self._check_deadline(deadline_s, in_flight(rooms, timeout))

    def unregister_when_idle(self, deadline_s: float, timeout: float) -> None:
        """Stops accepting new rooms, waits until those in flight have ended, and marks the agent as unregistered.

        Args:
            deadline_s: monotonic time until which to wait, which was `timeout` seconds away.

        Raises:
            DeadlineExceeded: rooms are still in flight; the agent accepts rooms again unless it was draining before.
            LocalProtocolError: as `unregister`.
        """
        self.begin_drain(to_unregister=True)
        aborted: set[int] = set()
        while not (self._machine.refuses_rooms and self.unregister()):
            rooms = {*self._handles.rooms, *self._machine.rooms}
            # Rooms of a prefill rank that only decode ranks have opened: the engine will not begin them any more.
            if self._role == "prefill":
                self._abort(rooms.difference(self._handles.rooms), aborted, f": {UNREGISTERED}")
            try:
                self._check_deadline(deadline_s, f"its memory cannot be given back, {in_flight(rooms, timeout)}")
            except DeadlineExceeded:
                self.end_unregister_drain()
                raise

    def abort_rooms(self, until_s: float) -> None:
        """Aborts the rooms in flight, those that are sent after a second, until all have ended or it is `until_s`."""
        since_s = time.monotonic()
        aborted: set[int] = set()
        while (rooms := {*self._handles.rooms}) and (now_s := time.monotonic()) < until_s:
            if now_s < since_s + _OUTCOME_S:  # rooms that are sent have usually succeeded: decode ranks will say it
                rooms -= self._handles.sent
            self._abort(rooms, aborted, " is closing")
            time.sleep(_ROOMS_POLL_S)

    def _abort(self, rooms: set[int], aborted: set[int], why: str) -> None:
        """Aborts rooms that are not in `aborted`, and adds them."""
        for room in rooms - aborted:
            self._mailbox.put(ev.AbortRoom(room, f"agent {self._name}{why}"))
        aborted |= rooms

    def _check_deadline(self, deadline_s: float, text: str) -> None:
        """Sleeps for a moment; raises DeadlineExceeded with `text` if it is past `deadline_s`."""
        if time.monotonic() >= deadline_s:
            raise DeadlineExceeded(f"{self._name}: {text}")
        time.sleep(_ROOMS_POLL_S)

    # ---- the engine's events --------------------------------------------------------------------------------------

    def check_takes(self, role: str, *, begun: bool) -> None:
        """Raises LocalProtocolError unless the agent has this role and accepts rooms (when draining: only `begun`)."""
        if self._role != role or not (self.accepting or (self.draining and begun)):
            raise LocalProtocolError(f"agent {self._name} ({self._role}, {self.state}) takes no {role} rooms")

    def open_room(
        self,
        handles: HandleRegistry,
        handle: Send | Receive,
        event: ev.Event,
        written: tuple[ev.Pages, ...],
        begun: bool,
    ) -> None:
        """Adds the handle of a new room to the registry for which it was made, and posts the event that opens it.

        From then on the room ends at the latest with the registry: no `unregister` or `close` overlooks it.

        Raises:
            LocalProtocolError: as `check_takes` and `HandleRegistry.add`.
        """
        with self._lock:
            self.check_takes(self._role, begun=begun)
            handles.add(handle, written)
            self._mailbox.put(event)

    def post(self, event: ev.Event) -> None:
        """Posts an event that adds no handle; raises LocalProtocolError unless the agent is running or draining."""
        with self._lock:
            self.check_takes(self._role, begun=True)
            self._mailbox.put(event)

    def add_instance(self, endpoint: str, *, keep: bool = True) -> None:
        """Decode: adds a prefill instance, and looks it up at its registry if the agent has been started.

        Args:
            keep: until `remove_instance`; otherwise the state machine forgets it when it is not needed any more.

        Raises:
            LocalProtocolError: the agent is closed.
        """
        with self._lock:
            self._check_state()
            if endpoint not in self.instances:
                self.instances = (*self.instances, endpoint) if keep else self.instances
                self._mailbox.put(ev.ConnectInstance(endpoint, keep))

    def remove_instance(self, endpoint: str) -> None:
        """Decode: forgets a prefill instance; does nothing if the agent does not know it.

        Raises:
            LocalProtocolError: the agent is closed.
        """
        with self._lock:
            self._check_state()
            self.instances = tuple(instance for instance in self.instances if instance != endpoint)
            self._mailbox.put(ev.DisconnectInstance(endpoint))

    @property
    def all_instances(self) -> tuple[str, ...]:
        """`instances`, and on a decode rank those that rooms have named and that are not forgotten yet."""
        return tuple(dict.fromkeys((*self.instances, *self._machine.instances)))

    def rosters(self) -> list[tuple[str, Roster]]:
        """Returns the endpoint and the last answer of each registry; none before the agent is started."""
        rosters = [(instance, self._registries.roster(instance)) for instance in self.all_instances]
        return [(instance, roster) for instance, roster in rosters if roster is not None]

    def waiting_for(self) -> str | None:
        """Returns what the agent waits for, as text; None if it waits for nothing.

        A prefill rank waits until it is registered, a decode rank until every rank of its instances is connected; one
        whose engine names the instances with its requests waits for none.
        """
        if self.state == "new":
            return "it has not been started"
        if self.state in ("unregistered", "closed"):
            return UNREGISTERED if self.state == "unregistered" else "it is closed"
        instances = self.all_instances
        name, machine = self._name, self._machine
        waits: list[str] = []
        for instance in instances:
            silent = f"no answer from the registry at {instance}"
            if (roster := self._registries.roster(instance)) is None:
                waits.append(silent)
                continue
            if self._role == "prefill" and roster.refused:
                return roster.refused
            if self._role == "prefill":
                return None if any(rank.name == name for rank in roster.ranks) else silent
            if not roster.complete:
                at = f" at {instance}" if len(instances) > 1 and instance not in roster.missing else ""
                waits.append(f"{roster.missing}{at}" if roster.missing else roster.refused or silent)
            elif not machine.roster(instance):
                waits.append(f"the ranks of {instance} are not connected yet")
        missing = machine.missing_peers if isinstance(machine, DecodeMachine) else []
        unfit = [name for name in missing if (peer := machine.peers.get(name)) is not None and peer.differences]
        if silent_ranks := [name for name in missing if name not in unfit]:
            waits.append(f"no hello from {', '.join(silent_ranks)}")
        waits += [f"{name} refuses this rank: {'; '.join(machine.peers[name].differences)}" for name in unfit]
        return "; ".join(waits) or None

    def not_connected(self) -> str | None:
        """Returns why the agent has no prefill instance for a new room, as text; None if it has one.

        A decode rank needs one of its instances, since otherwise the loss of one would take all decode ranks out of
        service. If its engine names the instances with its requests, it needs none, since requests would never come
        otherwise.
        """
        if self._role == "decode" and (self.accepting or self.draining) and (not self.instances or self.serving()):
            return None
        return self.waiting_for()

    def not_ready(self) -> str | None:
        """Returns why the agent cannot take a new room, as text; None if it can.

        This decides `/readyz`, `kvctl wait --for ready` and KV_NOT_READY of `kvctl check ready`.
        """
        return DRAINING if self.draining else self.not_connected()

    def serving(self) -> list[str]:
        """Returns the endpoints of the prefill instances whose ranks are all connected; only on a decode rank."""
        machine = self._machine
        missing = set(machine.missing_peers) if isinstance(machine, DecodeMachine) else set()
        rosters = [(instance, machine.roster(instance)) for instance in self.all_instances]
        return [instance for instance, roster in rosters if roster and missing.isdisjoint(roster)]

    def kv_dtype(self, instance: str) -> str | None:
        """Returns the dtype of the KV of a prefill instance, None if its ranks are unknown; only on a decode rank."""
        return self._machine.kv_dtype(instance) if isinstance(self._machine, DecodeMachine) else None

    def wait_ready(self, timeout: float) -> None:
        """Waits until the agent can serve, for at most `timeout` seconds.

        Raises:
            DeadlineExceeded: the agent cannot serve yet; the text gives the reason.
            LocalProtocolError: the agent is closed, by another thread.
            ConfigError: a registry refuses this agent, or a peer does not fit it.
        """
        deadline = time.monotonic() + timeout
        while (waiting := self.waiting_for()) is not None:
            self._check_state()
            self._check_fit()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{self._name} was not ready after {timeout:g} s: {waiting}")
            time.sleep(_POLL_S)

    def _check_fit(self) -> None:
        """Raises ConfigError if waiting is useless: a registry refuses this agent, or a peer does not fit it."""
        for peer in list(self._machine.peers.values()) if self._role == "decode" else ():
            if peer.state is PeerState.REFUSED:  # in other states the difference may be temporary
                raise ConfigError(f"{peer.name} and {self._name} do not fit: {'; '.join(peer.differences)}")
        for _, roster in self.rosters():
            if roster.refused:
                raise ConfigError(roster.refused)
