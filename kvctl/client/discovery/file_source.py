"""`file:///path`: a file with one endpoint per line; it is read again when the agents are queried again."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from kvctl.client.discovery import KINDS, listing, malformed
from kvctl.client.discovery.source import AgentSource, Found, SourceError
from kvctl.client.faults import FaultCode
from kvctl.client.keys import KeyNames


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
                content = file.read(listing.MAX_BYTES + 1)
        except OSError as error:
            code = FaultCode.NOT_PERMITTED if isinstance(error, PermissionError) else FaultCode.UNREACHABLE
            raise SourceError(f"cannot be read: {error.strerror}", code) from None
        return listing.parse(content, self.url)
