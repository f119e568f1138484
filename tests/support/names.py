"""A resolver of host names for tests, in place of the system's."""

from __future__ import annotations

import socket
import threading
from typing import Any


class Names:
    """What names are known; `getaddrinfo` waits for those that are silent until `answer_all`."""

    def __init__(self) -> None:
        self.known: dict[str, list[str]] = {}
        self.silent: set[str] = set()
        self.asked: list[str] = []
        self._answered = threading.Event()

    def getaddrinfo(self, host: str, port: int | None = None, *_: object, **__: object) -> list[Any]:
        if host.replace(".", "").isdecimal():
            return [(socket.AF_INET, 1, 6, "", (host, port or 0))]
        self.asked.append(host)
        host.encode("idna")  # as the original does
        if host in self.silent and not self._answered.wait(60):
            raise TimeoutError(host)
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in self.known[host]]
        return [(family, 1, 6, "", (each, port or 0)) for family, each in zip(families, self.known[host], strict=True)]

    def answer_all(self) -> None:
        """Ends the silence."""
        self._answered.set()
