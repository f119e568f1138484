"""`srv://_service._tcp.name`: the targets of a DNS service record (RFC 2782), each with a port of its own."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from kvctl.client.discovery import KINDS, malformed
from kvctl.client.discovery.dns_source import endpoint_at
from kvctl.client.discovery.source import MAX_AGENTS, AgentSource, Found, SourceError
from kvctl.client.endpoints import Endpoint
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.keys import KeyNames
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract.extras import install

if TYPE_CHECKING:
    from dns.resolver import Resolver

_NAME = re.compile(r"_[A-Za-z0-9-]{1,62}\._tcp\.[A-Za-z0-9_.-]{1,255}", re.ASCII)


class SrvSource(AgentSource):
    """The targets of a DNS service record; the system's resolver has no call for such records, dnspython has.

    A target is asked for its IPv4 addresses, and for IPv6 addresses if there are none; addresses that the answer
    contains need no further query.
    """

    def __init__(self, url: str, keys: KeyNames) -> None:
        super().__init__(url, keys)
        self._name = url.removeprefix(KINDS["srv"].prefix)
        if not _NAME.fullmatch(self._name):
            raise malformed(url)
        try:
            import dns.resolver  # noqa: F401
        except ImportError:
            raise CliError(f"{url} needs dnspython: {install('dns')}", ExitCode.USAGE) from None

    def find(self, deadline_ns: int) -> Found:
        import dns.exception
        import dns.resolver

        try:
            resolver = dns.resolver.Resolver()  # reads /etc/resolv.conf, which may have changed
            answer = resolver.resolve(self._name, "SRV", search=True, lifetime=_left_s(deadline_ns))
        except dns.resolver.NXDOMAIN:
            raise SourceError("there is no such name: is it complete?") from None
        except dns.resolver.NoAnswer:
            raise SourceError("this name has no SRV records; for its addresses use dns://NAME:PORT") from None
        except dns.exception.Timeout:
            raise SourceError("the resolver in /etc/resolv.conf does not answer", FaultCode.TIMEOUT) from None
        except (dns.exception.DNSException, OSError) as error:
            raise SourceError(f"cannot be looked up: {error}") from None
        targets = sorted({(str(each.target), each.port) for each in answer if str(each.target) != "."})
        known = _addresses(answer.response.additional)
        endpoints: list[Endpoint] = []
        faults: list[Fault] = []
        for number, (target, port) in enumerate(targets):
            if time.monotonic_ns() > deadline_ns:
                late = f"the addresses of {len(targets) - number} of {len(targets)} targets were not found in time"
                faults.append(Fault("", FaultCode.TIMEOUT, f"{self.url}: {late}: raise --timeout"))
                break
            name = f"{target.rstrip('.')}:{port}"
            try:
                addresses = known.get(target.lower()) or _look_up(resolver, target, deadline_ns)
            except dns.exception.DNSException as error:
                faults.append(Fault(name, FaultCode.UNREACHABLE, f"its address cannot be looked up: {error}"))
                continue
            endpoints += [endpoint_at(address, port, name) for address in addresses]
            if len(endpoints) > MAX_AGENTS:
                raise SourceError(f"more than {MAX_AGENTS} endpoints", FaultCode.PROTOCOL)
        return Found(tuple(endpoints), tuple(faults))


def _left_s(deadline_ns: int) -> float:
    return max(0.001, (deadline_ns - time.monotonic_ns()) / 1e9)


def _look_up(resolver: Resolver, target: str, deadline_ns: int) -> list[str]:
    """Returns the IPv4 addresses of a name, or its IPv6 addresses if it has none; raises DNSException."""
    import dns.resolver

    try:
        answer = resolver.resolve(target, "A", lifetime=_left_s(deadline_ns))
    except dns.resolver.NoAnswer:
        answer = resolver.resolve(target, "AAAA", lifetime=_left_s(deadline_ns))
    return sorted(str(each) for each in answer)


def _addresses(records: list[Any]) -> dict[str, list[str]]:
    """Returns the addresses by name in the additional section of an answer: IPv4 if a name has any, else IPv6."""
    found: dict[str, list[str]] = {}
    for kind in ("AAAA", "A"):
        found |= {
            str(each.name).lower(): sorted(str(address) for address in each)
            for each in records
            if each.rdtype.name == kind
        }
    return found
