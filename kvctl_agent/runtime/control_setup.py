"""How a control loop gets its sockets: the own address, the registries of its instances, the links to peers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from kvctl_agent.contract.keys import KeyPair
from kvctl_agent.protocol.local_info import LocalInfo
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.recording import InputLog
from kvctl_agent.protocol.registry import Lookup, Rank, Register
from kvctl_agent.runtime import control_endpoints
from kvctl_agent.runtime.action_executor import ActionExecutor
from kvctl_agent.runtime.bootstrap import Registries, RegistryServer
from kvctl_agent.runtime.control_channel import ControlChannel
from kvctl_agent.runtime.control_loop import ControlLoop
from kvctl_agent.runtime.mailbox import Mailbox
from kvctl_agent.telemetry.hub import Telemetry


class ControlSetup(NamedTuple):
    """A control loop that is not started yet, and what it owns."""

    control: ControlLoop
    links: ControlChannel
    registries: Registries


def set_up_control(
    local: LocalInfo,
    instances: Sequence[str],
    context: zmq.Context[zmq.Socket[bytes]],
    keys: KeyPair | None,
    open_links: Callable[[], ControlChannel],
    parts: tuple[Machine, ActionExecutor, Mailbox, Telemetry],
    recorded: InputLog | None,
) -> ControlSetup:
    """Bind and connect the control sockets; the first prefill rank of an instance serves its registry.

    Args:
        instances: endpoints of the registries.
        recorded: where the machine's inputs are recorded, if they are.

    Raises:
        ConfigError: an address is taken or must not be bound.
    """
    machine, hands, mailbox, telemetry = parts
    with contextlib.ExitStack() as undo:
        links = open_links()
        undo.callback(links.close)
        request: Register | Lookup = Lookup(local.name)
        server: RegistryServer | None = None
        if local.role == "prefill":
            if local.unique_rank == 0:
                server = RegistryServer(context, instances[0], keys)
                undo.callback(server.close)
            endpoint = links.serve(control_endpoints.control_address(instances[0], local.name))
            side = local.side
            sizes = [side.dp, side.pp, side.cp, side.tp]
            request = Register(Rank(local.name, endpoint, local.incarnation, list(local.coord), sizes))
        registries = Registries(context, request, keys)
        undo.callback(registries.close)
        for instance in instances:
            registries.ask(instance)
        control = ControlLoop(
            f"{local.name}-control",
            machine,
            hands,
            links,
            mailbox,
            registries,
            server,
            telemetry,
            local.host,
            recorded,
        )
        undo.pop_all()
        return ControlSetup(control, links, registries)
