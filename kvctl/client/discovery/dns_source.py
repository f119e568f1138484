"""`dns://name:port`: an agent at this port of every address of a name, such as a headless service of Kubernetes."""

from __future__ import annotations

import re
import socket

from kvctl.client.discovery import KINDS, malformed
from kvctl.client.discovery.source import MAX_AGENTS, AgentSource, Found, SourceError
from kvctl.client.endpoints import Endpoint
from kvctl.client.faults import FaultCode
from kvctl.client.keys import KeyNames
from kvctl_agent.contract.addresses import Address

_MOST_PORTS = 64
_PLACE = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,255}):(?P<port>[0-9]{1,5})(?:\+(?P<count>[0-9]{1,3}))?", re.ASCII)


class DnsSource(AgentSource):
    """The addresses of a name, as the system's resolver finds them: /etc/hosts, the search domains and DNS.

    IPv6 addresses count only if there are no IPv4 addresses: where a name has both, each agent has one of each.
    """

    def __init__(self, url: str, keys: KeyNames) -> None:
        super().__init__(url, keys)
        place = _PLACE.fullmatch(url.removeprefix(KINDS["dns"].prefix))
        if place is None:
            raise malformed(url)
        first, count = int(place["port"]), int(place["count"] or 1)
        if not 0 < first <= first + count - 1 < 1 << 16 or not 0 < count <= _MOST_PORTS:
            raise malformed(url, f"ports are 1 to 65535, at most {_MOST_PORTS} of them")
        self._name = place["name"]
        self._ports = range(first, first + count)

    def find(self, deadline_ns: int) -> Found:
        # The resolver has a time limit of its own; `AgentSources` waits no longer than the deadline.
        try:
            rows = socket.getaddrinfo(self._name, None, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            raise SourceError(_text(self._name, error)) from None
        addresses = {str(address[0]): family for family, *_, address in rows}
        if socket.AF_INET in addresses.values():
            addresses = {address: family for address, family in addresses.items() if family == socket.AF_INET}
        if len(addresses) * len(self._ports) > MAX_AGENTS:
            raise SourceError(f"more than {MAX_AGENTS} endpoints", FaultCode.PROTOCOL)
        found = (Address("tcp", address, port) for address in sorted(addresses) for port in self._ports)
        return Found(tuple(Endpoint(each.place, None, named=True, remote=str(each)) for each in found))


def _text(name: str, error: Exception) -> str:
    if isinstance(error, socket.gaierror) and error.errno in {socket.EAI_NONAME, socket.EAI_NODATA}:
        return f"no address is known for {name}: is the name complete, and does the service have pods or hosts?"
    if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
        return f"{name} cannot be looked up now: does the resolver in /etc/resolv.conf answer?"
    return f"{name} cannot be looked up: {error}"
