"""Which agents a source has named within the last day: a small file per source in the user's cache directory.

From it, agents that have vanished are shown, and agents are asked while their source does not answer. The file is a
cache: if it cannot be read or written, nothing is remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from kvctl.client.endpoints import Endpoint, Gone, endpoint_of
from kvctl.errors import CliError

KEPT_NS = 24 * 3600 * 1_000_000_000
MAX_GONE = 1024
MAX_FILES = 64
_MAX_BYTES = 8 << 20
_SAVE_EVERY_NS = 60_000_000_000
_MAX_TEXT = 1024


@dataclass(frozen=True, slots=True)
class _Known:
    """One agent; `seen_ns` is the wall time when the source last named it."""

    name: str
    host: str
    seen_ns: int


class Memory:
    """The agents that one source has named; one thread at a time uses it."""

    def __init__(self, url: str) -> None:
        self._path = path_of(url)
        self._agents: dict[str, _Known] | None = None  # by address
        self._named_ns = 0  # when the source last answered
        self._saved: tuple[int, frozenset[tuple[str, str, str]]] = (0, frozenset())

    def update(self, endpoints: Sequence[Endpoint], gone: Sequence[Gone], now_ns: int) -> tuple[Gone, ...]:
        """Stores what the source has answered, and returns the agents of the last day that it names no more.

        Args:
            endpoints: the agents that it names now.
            gone: agents that it says have gone.
            now_ns: wall time.
        """
        agents = self._read()
        for each in gone:
            before = agents.get(each.endpoint.address)
            if before is None or before.seen_ns < each.seen_ns:
                agents[each.endpoint.address] = _Known(each.endpoint.name, each.host, each.seen_ns)
        for endpoint in endpoints:
            before = agents.get(endpoint.address)
            host = before.host if before else ""
            name = before.name if before and endpoint.name == _place(endpoint.address) else endpoint.name
            agents[endpoint.address] = _Known(name, host, now_ns)
        self._named_ns = now_ns
        named = {endpoint.address for endpoint in endpoints}
        left = [address for address in agents if address not in named]
        left.sort(key=lambda address: agents[address].seen_ns, reverse=True)
        for index, address in enumerate(left):
            if index >= MAX_GONE or now_ns - agents[address].seen_ns > KEPT_NS:
                del agents[address]
        return tuple(_gone(address, agents[address]) for address in left if address in agents)

    def last(self, now_ns: int) -> tuple[tuple[Endpoint, ...], tuple[Gone, ...], int]:
        """Returns the agents that the last answer within a day named, those that it did not, and its wall time."""
        agents = {address: each for address, each in self._read().items() if now_ns - each.seen_ns <= KEPT_NS}
        if not self._named_ns or now_ns - self._named_ns > KEPT_NS:
            return (), (), 0
        named = [address for address, each in agents.items() if each.seen_ns == self._named_ns]
        gone = tuple(_gone(address, each) for address, each in agents.items() if each.seen_ns != self._named_ns)
        return tuple(replace(_endpoint(address), name=agents[address].name) for address in named), gone, self._named_ns

    def learn(self, identities: Mapping[str, tuple[str, str]]) -> None:
        """Stores the names and hosts that agents have said themselves, by address, and saves what has changed."""
        agents = self._read()
        current = {identity for address, identity in identities.items() if address in agents}
        for address, each in list(agents.items()):
            if address in identities:
                agents[address] = _Known(*identities[address], each.seen_ns)
            elif (each.name, each.host) in current:
                del agents[address]  # it is at another address now
        known = frozenset((address, each.name, each.host) for address, each in agents.items())
        at_ns, saved = self._saved
        if known != saved or (known and time.monotonic_ns() - at_ns > _SAVE_EVERY_NS):
            self._saved = time.monotonic_ns(), known
            self._write(agents)

    def _read(self) -> dict[str, _Known]:
        if self._agents is None:
            self._agents = {}
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, CliError):
                with self._path.open("rb") as file:
                    content = orjson.loads(file.read(_MAX_BYTES))
                agents = {}
                for address, name, host, seen_ns in content["agents"]:
                    if not _is_text(name) or not _is_text(host) or not isinstance(seen_ns, int):
                        raise ValueError(name)
                    agents[_endpoint(address).address] = _Known(name, host, seen_ns)
                self._agents, self._named_ns = agents, int(content["named_ns"])
        return self._agents

    def _write(self, agents: Mapping[str, _Known]) -> None:
        rows = [(address, each.name, each.host, each.seen_ns) for address, each in agents.items()]
        with contextlib.suppress(OSError):
            folder = self._path.parent
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, written = tempfile.mkstemp(prefix=".", dir=folder)  # mode 0600
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(orjson.dumps({"named_ns": self._named_ns, "agents": rows}))
                Path(written).replace(self._path)
            except BaseException:
                Path(written).unlink(missing_ok=True)
                raise
            _remove_old(folder)


def path_of(url: str) -> Path:
    """Returns the path of the file about a source; its name is a hash, because a URL may hold a secret."""
    home = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # no home directory
        home = home or str(Path("~/.cache").expanduser())
    checksum = hashlib.blake2s(url.encode(errors="surrogateescape"), digest_size=16).hexdigest()
    # Without a home directory there is none; in /tmp, another user could have made it.
    return Path(home or os.devnull) / "kvctl" / "agents" / f"{checksum}.json"


def forget(url: str) -> int:
    """Removes what is known about a source; returns the number of agents that had vanished."""
    memory = Memory(url)
    _, gone, _ = memory.last(time.time_ns())
    with contextlib.suppress(OSError):
        memory._path.unlink()
    return len(gone)


def _remove_old(folder: Path) -> None:
    """Removes the files of sources that were last used more than a day ago, and the oldest if there are too many."""
    ages = sorted(((time.time() - path.stat().st_mtime, path) for path in folder.iterdir()), reverse=True)
    for index, (age_s, path) in enumerate(ages):
        if age_s > KEPT_NS / 1e9 or len(ages) - index > MAX_FILES:
            path.unlink(missing_ok=True)


def _endpoint(address: object) -> Endpoint:
    if not _is_text(address):
        raise ValueError(address)
    return endpoint_of(str(address))


def _gone(address: str, known: _Known) -> Gone:
    return Gone(replace(_endpoint(address), name=known.name), known.seen_ns, known.host)


def _place(address: str) -> str:
    return address.partition("://")[2]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT
