"""`registry://host:port`: the bootstrap registry of a prefill instance, which hears from prefill and decode ranks."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvctl.client.calls import Call
from kvctl.client.discovery import KINDS, malformed
from kvctl.client.discovery.source import MAX_AGENTS, AgentSource, Found, SourceError
from kvctl.client.endpoints import Endpoint, endpoint_of, probe
from kvctl.client.fanout import Fanout
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.keys import KeyNames
from kvctl.errors import CliError
from kvctl_agent.contract.addresses import AddressError, host_of, ip_address, parse_endpoint, tcp_address
from kvctl_agent.contract.admin import SOCKET_SUFFIX
from kvctl_agent.host.sockets import UntrustedPathError

_AGENTS, _HELLO = Call("agents"), Call("hello")
# Ranks ask at least once a second; a decode rank that has been silent for longer than this has ended or left. Prefill
# ranks belong to the instance until others replace them.
_SILENT_NS = 30_000_000_000
_HELLO_NS = 300_000_000
_PAUSE_NS = 16_000_000_000  # after which a silent rank that has not answered either is asked again
_MOST_ASKED = 256
_TEXTS: dict[str, str] = {
    FaultCode.UNREACHABLE: "nobody listens there: is rank 0 of the prefill instance running, with this address?",
    FaultCode.TIMEOUT: "no answer to `agents`: its process is busy or hangs, it is not a registry, or its agent is too "
    "old to list agents (update it)",
    FaultCode.PROTOCOL: "it is not a bootstrap registry, or has no keys: omit --server-key for a registry without keys",
}


class RegistrySource(AgentSource):
    """Bootstrap registry of a prefill instance, on TCP or, as `registry:///path`, on a Unix socket.

    With a server key the connection uses the client's keys, as those to agents do; otherwise it uses none.
    """

    def __init__(self, url: str, keys: KeyNames) -> None:
        super().__init__(url, keys)
        place = url.removeprefix(KINDS["registry"].prefix)
        try:
            self._endpoint = endpoint_of(place if place.startswith("/") else f"tcp://{place}")
        except CliError:
            raise malformed(url) from None
        self._host = host_of(self._endpoint.remote)
        self._registry_keys = keys if keys.server is not None else None
        self._due_ns: dict[str, int] = {}  # when to ask silent ranks again, by address

    def find(self, deadline_ns: int) -> Found:
        if self._endpoint.path is not None:
            try:
                probe(self._endpoint.path)
            except UntrustedPathError as error:
                raise SourceError(str(error), FaultCode.NOT_PERMITTED) from None
        with Fanout(self._registry_keys) as fanout:
            (reply,) = fanout.ask([(self._endpoint, _AGENTS)], max(1, deadline_ns - time.monotonic_ns()))
        if reply.fault is not None:
            raise SourceError(self._text(reply.fault), reply.fault.code)
        if not isinstance(reply.data, list) or not all(map(_is_row, reply.data)):
            raise SourceError("its answer to `agents` is not valid: update kvctl", FaultCode.PROTOCOL)
        endpoints: dict[str, Endpoint] = {}
        silent: list[tuple[int, Endpoint]] = []
        faults: list[Fault] = []
        for row in reply.data[:MAX_AGENTS]:
            try:
                endpoint = self._endpoint_of(row)
            except CliError as error:
                if row["role"] == "prefill" or row["heard_ns"] < _SILENT_NS:
                    faults.append(Fault(row["name"], FaultCode.UNREACHABLE, str(error)))
                continue
            if row["role"] == "decode" and row["heard_ns"] >= _SILENT_NS:
                silent.append((row["heard_ns"], endpoint))
            else:
                endpoints[endpoint.address] = endpoint
        asleep = {each.address: each for each in self._asleep(silent, endpoints.keys(), deadline_ns)}
        return Found((*endpoints.values(), *asleep.values()), tuple(faults))

    def _asleep(
        self, silent: Sequence[tuple[int, Endpoint]], named: Collection[str], deadline_ns: int
    ) -> list[Endpoint]:
        """Returns the silent ranks whose admin sockets answer: their engine has unregistered its memory.

        Args:
            silent: ranks, with the time since the registry last heard from each.
            named: addresses of other ranks, which are not asked.
        """
        now = time.monotonic_ns()
        latest = {each.address: each for _, each in sorted(silent, key=lambda each: -each[0])}
        self._due_ns = {address: due for address, due in self._due_ns.items() if address in latest and due > now}
        asked = [each for address, each in latest.items() if address not in named and address not in self._due_ns]
        asked = asked[-_MOST_ASKED:]
        found = []
        # Without keys for TCP nobody there can be asked.
        with contextlib.suppress(CliError), Fanout(self._keys) as fanout:
            timeout_ns = max(1, min(_HELLO_NS, deadline_ns - now))
            for reply in fanout.ask([(each, _HELLO) for each in asked], timeout_ns):
                # Another agent may have the port by now.
                if isinstance(reply.data, dict) and reply.data.get("name") == reply.endpoint.name:
                    found.append(reply.endpoint)
        self._due_ns |= {each.address: now + _PAUSE_NS for each in asked if each not in found}
        return found

    def _text(self, fault: Fault) -> str:
        """Returns the text of an error of the connection, in which a registry takes the place of an agent."""
        if not fault.message.startswith("closed the connection"):
            return _TEXTS.get(fault.code, fault.message)
        if self._registry_keys is None:
            return "closed the connection: it requires a key (give --server-key), or it has just ended"
        return f"{fault.message}; omit --server-key for a registry without keys"

    def _endpoint_of(self, row: Mapping[str, Any]) -> Endpoint:
        """Returns the endpoint of a row: the Unix socket of an agent of this host, else its TCP endpoint.

        Raises:
            CliError: the agent has no endpoint that can be reached from here; the text says why.
        """
        name, path = row["name"], row["socket"]
        if path and row["host"] == socket.gethostname() and _is_socket(path):
            return Endpoint(name, endpoint_of(path).path, named=True, host_name=row["host"])
        if not row["admin"]:
            if not path:
                raise CliError("does not say where its admin socket is: its agent is too old (update it)")
            raise CliError(
                f"has only a Unix socket, on host {row['host']}: set admin_endpoint = tcp://0.0.0.0:7311+ there, or "
                "run kvctl on that host, as the user who runs the agent"
            )
        try:
            address = parse_endpoint(row["admin"])
            if address.scheme != "tcp":
                raise CliError(f"{row['admin']}: it is not a tcp:// endpoint")
            if address.is_wildcard:
                # The registry saw where the agent came from; one on the registry's own host may have come by loopback.
                source = ip_address(row["address"])
                is_its_own = source is None or (source.is_loopback and self._host)
                address = tcp_address(self._host if is_its_own else row["address"], address.port)
        except AddressError as error:
            raise CliError(str(error)) from None
        return Endpoint(name, None, True, str(address), row["host"])


def _is_socket(path: str) -> bool:
    """Returns whether a path, which anybody may tell a registry without keys, is that of an agent's socket."""
    try:
        return path.endswith(SOCKET_SUFFIX) and Path(path).is_socket()
    except OSError:  # it is in a directory of another user, or too long
        return False


def _is_row(row: object) -> bool:
    """Returns whether a row of the answer has what is read from it."""
    texts = ("name", "role", "host", "admin", "socket", "address")
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(key), str) for key in texts)
        and isinstance(row.get("heard_ns"), int)
    )
