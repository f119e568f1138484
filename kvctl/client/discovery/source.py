"""Sources of agents: the interface of one source, and the concurrent queries to all sources of a fleet."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvctl.client.discovery import open_source
from kvctl.client.endpoints import Endpoint
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.keys import KeyNames

MAX_AGENTS = 1 << 14
_GRACE_NS = 50_000_000
_REFRESH_WAIT_NS = 100_000_000
_SAVE_EVERY_NS = 60_000_000_000


@dataclass(frozen=True, slots=True)
class Found:
    """What a source knows.

    Attributes:
        faults: what is wrong with the source (`Fault.agent` is "", the message begins with the URL) or with agents that
            it names.
    """

    endpoints: tuple[Endpoint, ...] = ()
    faults: tuple[Fault, ...] = ()


class SourceError(Exception):
    """A source cannot be asked, or its answer cannot be used.

    Args:
        message: the problem and the next step; the caller prepends the URL.
        code: a `FaultCode`, or an `ErrorCode` of an agent.
    """

    def __init__(self, message: str, code: str = FaultCode.UNREACHABLE) -> None:
        super().__init__(message)
        self.code = code


class AgentSource(ABC):
    """One source of agents. Its methods are called by one thread at a time.

    Attributes:
        refresh_ns: shortest time between two calls of `find`; longer for a source that is expensive to ask.
        lasting: whether the endpoints may be used later, when the source does not answer.
    """

    refresh_ns: ClassVar[int] = 1_000_000_000
    lasting = True

    def __init__(self, url: str, keys: KeyNames) -> None:
        """Raises CliError if the URL is malformed, or a package that it needs is not installed."""
        self.url = url
        self._keys = keys

    @abstractmethod
    def find(self, deadline_ns: int) -> Found:
        """Asks the source.

        Args:
            deadline_ns: monotonic time by which to return.

        Raises:
            SourceError: the source cannot be asked, or does not answer in time.
            CliError: a key or a setting is missing.
        """

    def close(self) -> None:  # noqa: B027  most sources keep nothing
        """Releases connections and processes that were kept between calls; called once."""


class AgentSources:
    """The sources of one fleet, opened when they are first asked; a later `find` returns within 100 ms.

    Args:
        timeout_ns: longest time to wait for the first answer of a source.
    """

    def __init__(self, keys: KeyNames, timeout_ns: int) -> None:
        self._keys = keys
        self._timeout_ns = timeout_ns
        self._queries: dict[str, _Query] = {}

    def find(self, urls: Sequence[str]) -> dict[str, Found]:
        """Asks the sources at the same time, unless they were asked lately; returns their latest answers by URL.

        A source that has answered before is asked in the background while its latest answer is used.

        Raises:
            CliError: a URL is malformed, or a key or a setting is missing.
        """
        for url in urls:
            if url not in self._queries:
                self._queries[url] = _Query(open_source(url, self._keys))
        queries = [self._queries[url] for url in urls]
        now = time.monotonic_ns()
        begun = [query.begin(now, now + self._timeout_ns) for query in queries]
        for query, new in zip(queries, begun, strict=True):
            limit = now + (self._timeout_ns + _GRACE_NS if new and query.found is None else _REFRESH_WAIT_NS)
            query.wait(max(0, limit - time.monotonic_ns()))
        late = f"no answer within {self._timeout_ns / 1e9:g} s: raise --timeout"
        return {query.source.url: query.found or query.failed(late, FaultCode.TIMEOUT) for query in queries}

    def close(self) -> None:
        """Closes all sources; one that is still being asked is closed when its answer arrives."""
        for query in self._queries.values():
            query.close()
        self._queries.clear()


class _Query:
    """The thread that asks one source, and its latest answer; threads never overlap."""

    def __init__(self, source: AgentSource) -> None:
        self.source = source
        self.found: Found | None = None
        self._error: Exception | None = None
        self._due_ns = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._busy = False
        self._closed = False
        self._named: tuple[tuple[Endpoint, ...], int] | None = None  # by its last answer, at this wall time
        self._saved: tuple[tuple[Endpoint, ...], int] | None = None  # likewise, what the file has

    def begin(self, now_ns: int, deadline_ns: int) -> bool:
        """Asks the source on a new thread if it is due and not being asked; returns whether it does."""
        if self._busy or now_ns < self._due_ns:
            return False
        self._busy, self._due_ns = True, now_ns + self.source.refresh_ns
        self._thread = threading.Thread(target=self._ask, args=(deadline_ns,), name="kvctl-discovery", daemon=True)
        self._thread.start()
        return True

    def wait(self, limit_ns: int) -> None:
        """Waits for the thread; raises the error that it has met, unless that is a SourceError."""
        if self._busy and self._thread is not None:
            self._thread.join(limit_ns / 1e9)
        if (error := self._error) is not None:
            self._error = None
            raise error

    def failed(self, text: str, code: str) -> Found:
        """Returns the agents that the source named before, and the fault for an error of the source itself."""
        from kvctl.client.discovery.memory import recall

        now = time.time_ns()
        endpoints, named_ns = self._named or recall(self.source.url, now)
        if endpoints:
            known = f"{len(endpoints)} agent{'s' * (len(endpoints) != 1)}"
            text += f"; asking the {known} that it named {ago(now - named_ns)} ago"
        return Found(endpoints, (Fault("", code, f"{self.source.url}: {text}"),))

    def close(self) -> None:
        """Closes the source, now or when the thread ends."""
        with self._lock:
            self._closed = True
            busy = self._busy
        if not busy:
            self.source.close()

    def _ask(self, deadline_ns: int) -> None:
        try:
            self.found = self.source.find(deadline_ns)
            if self.source.lasting:
                self._remember(self.found.endpoints)
        except SourceError as error:
            self.found = self.failed(str(error), error.code)
        except Exception as error:
            self._error = error
        with self._lock:
            self._busy = False
            closed = self._closed
        if closed:
            self.source.close()

    def _remember(self, endpoints: tuple[Endpoint, ...]) -> None:
        from kvctl.client.discovery.memory import recall, remember  # local agents do not need it

        now = time.time_ns()
        if self._saved is None:
            self._saved = recall(self.source.url, now)
        if self._saved[0] != endpoints or now - self._saved[1] > _SAVE_EVERY_NS:
            self._saved = endpoints, now
            remember(self.source.url, endpoints, now)
        self._named = endpoints, now


def ago(duration_ns: int) -> str:
    """Formats a time span for a sentence: `45 s`, `12 min`, `3 h`."""
    seconds = max(0, round(duration_ns / 1e9))
    if seconds < 100:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 6000 else f"{seconds // 3600} h"
