"""Lists of endpoints as text, from a file or a command: one tcp:// or ipc:// endpoint per line, # begins a comment."""

from __future__ import annotations

from kvctl.client.discovery import is_url
from kvctl.client.discovery.source import MAX_AGENTS, Found, SourceError
from kvctl.client.endpoints import endpoint_of, is_address
from kvctl.client.faults import Fault, FaultCode
from kvctl.errors import CliError

MAX_BYTES = 1 << 20
_MOST_FAULTS = 8


def parse(content: bytes, origin: str) -> Found:
    """Returns the endpoints of a list, and a fault for each of the first lines that is not an endpoint.

    Args:
        content: the list; at most MAX_BYTES.
        origin: URL of the source, for error texts.

    Raises:
        SourceError: the list is not text, or is too long.
    """
    if len(content) > MAX_BYTES:
        raise SourceError(f"more than {MAX_BYTES >> 20} MiB: this is not a list of endpoints", FaultCode.PROTOCOL)
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise SourceError("not UTF-8 text: this is not a list of endpoints", FaultCode.PROTOCOL) from None
    endpoints = {}
    faults: list[Fault] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            if is_url(text) or not is_address(text):
                raise CliError(f"{text:.80}: write tcp://host:port or ipc:///path")
            endpoint = endpoint_of(text)
        except CliError as error:
            if len(faults) < _MOST_FAULTS:
                faults.append(Fault("", FaultCode.PROTOCOL, f"{origin}: line {number}: {error}"))
            continue
        endpoints[endpoint.address] = endpoint
        if len(endpoints) > MAX_AGENTS:
            raise SourceError(f"more than {MAX_AGENTS} endpoints", FaultCode.PROTOCOL)
    return Found(tuple(endpoints.values()), tuple(faults))
