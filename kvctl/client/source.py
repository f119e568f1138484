"""Whoever can be asked what agents answer: a live fleet, or a file that remembers one."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey


class Source(Protocol):
    """A context manager; `kvctl.client.fleet.Fleet` is one."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def survey(self, calls: Sequence[Call] = (), clock_rounds: int = 1) -> Survey:
        """What its agents answer to `calls`, each at most once."""
        ...

    def advance(self) -> bool:
        """Goes on to the next moment; False where there is none. A live fleet goes on by itself."""
        ...
