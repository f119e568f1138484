"""Where an operator's request waits for what the control loop's machine says of it."""

from __future__ import annotations

import itertools
import threading

from kvctl_agent.protocol.events import Answered


class OperatorRequests:
    """Numbers for requests, and their answers; `answered` is the control loop's, the rest any thread's."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._answers: dict[int, Answered | None] = {}
        self._changed = threading.Condition()

    def issue(self) -> int:
        """A number that no other request has."""
        ticket = next(self._numbers)
        with self._changed:
            self._answers[ticket] = None
        return ticket

    def answered(self, action: Answered) -> None:
        """The machine has spoken; nobody may be waiting any more."""
        with self._changed:
            if action.ticket in self._answers:
                self._answers[action.ticket] = action
                self._changed.notify_all()

    def wait(self, ticket: int, timeout: float) -> Answered | None:
        """The answer, once; None when there is none after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._answers[ticket] is not None, timeout)
            return self._answers.pop(ticket)
