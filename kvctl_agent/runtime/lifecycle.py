"""State of an agent (new, running, draining, closed), and the reasons why it cannot serve yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Literal

from kvctl_agent.contract.states import NO_INSTANCE, UNREGISTERED
from kvctl_agent.errors import ConfigError, DeadlineExceeded, LocalProtocolError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.bootstrap_registry import Roster
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.peer import LocalInfo, PeerState
from kvctl_agent.runtime.bootstrap import Registries
from kvctl_agent.runtime.control_loop import Mailbox
from kvctl_agent.telemetry.hub import Telemetry

State = Literal["new", "running", "draining", "unregistered", "closed"]

_POLL_S = 0.01


class Lifecycle:
    """State of one agent; any thread may use it.

    Attributes:
        state: "new" until the agent is started, "closed" from the start of its close.
        instances: endpoints of the registries that the agent registers with or looks up.
        instances_by_request: whether it was created without instances, which its engine names with its requests.
    """

    def __init__(
        self,
        local: LocalInfo,
        instances: Sequence[str],
        registries: Registries,
        machine: Machine,
        telemetry: Telemetry,
        mailbox: Mailbox,
        former: Lifecycle | None = None,
    ) -> None:
        self.state: State = "new"
        self.instances = tuple(instances)
        self.instances_by_request: bool = former.instances_by_request if former is not None else not instances
        self._name = local.name
        self._role = local.role
        self._registries = registries
        self._machine = machine
        self._telemetry = telemetry
        self._mailbox = mailbox
        self._leaving = False  # the engine has called `Agent.drain`
        self._changing = threading.Lock()  # an operator may resume while the engine closes

    @property
    def accepting(self) -> bool:
        """Whether the engine may begin new rooms."""
        return self.state == "running"

    @property
    def draining(self) -> bool:
        """Whether the agent is draining: it accepts no new rooms until `resume`."""
        return self.state == "draining"

    def start(self) -> None:
        """Marks the agent as running; raises LocalProtocolError if it was started before."""
        if self.state != "new":
            raise LocalProtocolError(f"agent {self._name} was started before; create a new one")
        self.state = "running"

    def close(self) -> State:
        """Marks the agent as closed; returns its previous state."""
        with self._changing:
            before, self.state = self.state, "closed"
            return before

    def begin_drain(self) -> None:
        """Stops accepting new rooms; raises LocalProtocolError unless the agent is running or draining."""
        with self._changing:
            if self.state not in ("running", "draining"):
                raise LocalProtocolError(f"agent {self._name} is {self.state}")
            # In this order: a room that a peer opens in between is refused, and so fails if the engine begins it, too.
            self._telemetry.drain(True)
            self._mailbox.put(ev.Drain(True))
            self.state = "draining"

    def unregister(self) -> None:
        """Marks the agent, which has drained, as having given its pool back.

        Raises:
            LocalProtocolError: the agent is not draining: an operator has resumed it, or another thread closes it.
        """
        with self._changing:
            if self.state != "draining":
                raise LocalProtocolError(f"agent {self._name} is {self.state}")
            self._telemetry.drain(False)
            self.state = "unregistered"

    def leave(self) -> None:
        """Starts to drain if the agent is running, and makes `resume` fail from now on."""
        self._leaving = True
        if self.accepting:
            self.begin_drain()

    def resume(self) -> None:
        """Accepts new rooms again after `begin_drain`.

        Raises:
            LocalProtocolError: the agent is not running or draining, or its engine has called `leave`.
        """
        with self._changing:
            if self._leaving or self.state not in ("running", "draining"):
                state = "being closed by its engine" if self._leaving else self.state
                raise LocalProtocolError(f"agent {self._name} is {state}")
            self.state = "running"
            self._telemetry.drain(False)
            self._mailbox.put(ev.Drain(False))

    def add_instance(self, endpoint: str) -> None:
        """Decode: adds a prefill instance, and looks it up at its registry if the agent has been started.

        Raises:
            LocalProtocolError: the agent is closed.
        """
        if endpoint in self.instances:
            return
        with self._changing:
            if self.state == "closed":
                raise LocalProtocolError(f"agent {self._name} is closed")
            if endpoint not in self.instances:
                self.instances = (*self.instances, endpoint)
                self._mailbox.put(ev.ConnectInstance(endpoint))

    def remove_instance(self, endpoint: str) -> None:
        """Decode: forgets a prefill instance; does nothing if the agent does not know it.

        Raises:
            LocalProtocolError: the agent is closed.
        """
        with self._changing:
            if self.state == "closed":
                raise LocalProtocolError(f"agent {self._name} is closed")
            if endpoint in self.instances:
                self.instances = tuple(instance for instance in self.instances if instance != endpoint)
                self._mailbox.put(ev.DisconnectInstance(endpoint))

    def rosters(self) -> list[tuple[str, Roster]]:
        """Returns the endpoint and the last answer of each registry; none before the agent is started."""
        rosters = [(instance, self._registries.roster(instance)) for instance in self.instances]
        return [(instance, roster) for instance, roster in rosters if roster is not None]

    def waiting_for(self) -> str | None:
        """Returns the reason why the agent cannot serve yet, as text; None if it can serve.

        A prefill rank serves when it is registered, a decode rank when every rank of its instances is connected.
        """
        if self.state == "new":
            return "it has not been started"
        if self.state == "unregistered":
            return UNREGISTERED
        if not self.instances:
            return f"{NO_INSTANCE}: its engine names one in connect or receive"
        name, machine = self._name, self._machine
        waits: list[str] = []
        for instance in self.instances:
            silent = f"no answer from the registry at {instance}"
            if (roster := self._registries.roster(instance)) is None:
                waits.append(silent)
                continue
            if self._role == "prefill" and roster.refused:
                return roster.refused
            if self._role == "prefill":
                return None if any(rank.name == name for rank in roster.ranks) else silent
            if not roster.complete:
                at = f" at {instance}" if len(self.instances) > 1 and instance not in roster.missing else ""
                waits.append(f"{roster.missing}{at}" if roster.missing else roster.refused or silent)
            elif not machine.roster(instance):
                waits.append(f"the ranks of {instance} are not connected yet")
        missing = machine.missing_peers if isinstance(machine, DecodeMachine) else []
        unfit = [name for name in missing if (peer := machine.peers.get(name)) is not None and peer.differences]
        if silent_ranks := [name for name in missing if name not in unfit]:
            waits.append(f"no hello from {', '.join(silent_ranks)}")
        waits += [f"{name} refuses this rank: {'; '.join(machine.peers[name].differences)}" for name in unfit]
        return "; ".join(waits) or None

    def serving(self) -> list[str]:
        """Returns the endpoints of the prefill instances whose ranks are all connected; only on a decode rank."""
        machine = self._machine
        missing = set(machine.missing_peers) if isinstance(machine, DecodeMachine) else set()
        rosters = [(instance, machine.roster(instance)) for instance in self.instances]
        return [instance for instance, roster in rosters if roster and missing.isdisjoint(roster)]

    def kv_dtype(self, instance: str) -> str | None:
        """Returns the dtype of the KV of a prefill instance, None if its ranks are unknown; only on a decode rank."""
        return self._machine.kv_dtype(instance) if isinstance(self._machine, DecodeMachine) else None

    def wait_ready(self, timeout: float) -> None:
        """Waits until the agent can serve, for at most `timeout` seconds.

        Raises:
            DeadlineExceeded: the agent cannot serve yet; the text gives the reason.
            ConfigError: a registry refuses this agent, or a peer does not fit it.
        """
        deadline = time.monotonic() + timeout
        while (waiting := self.waiting_for()) is not None:
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
