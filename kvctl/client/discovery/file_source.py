"""`file:///path`: a file with one endpoint per line; it is read again when the agents are queried again."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from kvctl.client.discovery import KINDS, is_url, malformed
from kvctl.client.discovery.source import MAX_AGENTS, AgentSource, Found, SourceError
from kvctl.client.endpoints import endpoint_of, is_address
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.keys import KeyNames
from kvctl.errors import CliError

MAX_BYTES = 1 << 20
_MOST_FAULTS = 8


class FileSource(AgentSource):
    """A file with one endpoint per line."""

    def __init__(self, url: str, keys: KeyNames) -> None:
        super().__init__(url, keys)
        path = unquote(url.removeprefix(KINDS["file"].prefix))
        if not path.startswith("/") or "\0" in path:
            raise malformed(url, "an absolute path is needed")
        self._path = Path(path)

    def find(self, deadline_ns: int) -> Found:
        try:
            if not self._path.is_file():  # a FIFO or a device could block
                raise SourceError("there is no such file")
            with self._path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            code = FaultCode.NOT_PERMITTED if isinstance(error, PermissionError) else FaultCode.UNREACHABLE
            raise SourceError(f"cannot be read: {error.strerror}", code) from None
        return parse(content, self.url)


def parse(content: bytes, origin: str) -> Found:
    """Returns the endpoints of a list, and a fault for each of the first lines that is not an endpoint.

    Args:
        content: one tcp:// or ipc:// endpoint per line; # begins a comment.
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
