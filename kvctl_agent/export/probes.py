"""Pages `/readyz` and `/livez` of an agent, for Kubernetes and load balancers: one line per check, 200 or 503.

Readiness asks whether the rank can take a new room, as `Lifecycle.not_ready` does; it must not ask more than a router
can use.

Liveness asks whether the control loop turns. A restart costs an engine minutes, and a loop that is late is not lost: a
driver call can take seconds, and a process that a debugger has stopped is late when it continues. Therefore the limit
is a minute, or four times `lost_s` if that is longer, so that all peers have given up the rank long before; and a loop
that exceeds it is given another second to turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from kvctl_agent.contract.http_server import Answer, Page, text_answer
from kvctl_agent.contract.states import DRAINING
from kvctl_agent.runtime.control_loop import ControlLoop
from kvctl_agent.runtime.lifecycle import Lifecycle

_LEAST_LIMIT_S = 60.0
_LOST_TIMES = 4
_GRACE_S = 1.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    Attributes:
        name: name of the check, without blanks.
        problem: why it fails; "" if it passes.
        note: remark on a check that passes.
    """

    name: str
    problem: str = ""
    note: str = ""

    def line(self) -> str:
        """Returns the check in the form of the Kubernetes API server's `/readyz?verbose`."""
        if self.problem:
            return f"[-]{self.name} failed: {self.problem}"
        return f"[+]{self.name} ok{f': {self.note}' if self.note else ''}"


def probe_page(name: str, checks: Callable[[], Sequence[Check]]) -> Page:
    """Returns a page that answers 200 if all checks pass, and 503 otherwise, with one line per check."""

    def answer() -> Answer:
        found = checks()
        failed = any(check.problem for check in found)
        lines = [*(check.line() for check in found), f"{name} check {'failed' if failed else 'passed'}"]
        status = HTTPStatus.SERVICE_UNAVAILABLE if failed else HTTPStatus.OK
        return text_answer(status, "".join(f"{line}\n" for line in lines))

    return lambda _: answer


def readiness(lifecycle: Lifecycle, role: str) -> list[Check]:
    """Returns the checks of `/readyz`: registered or connected, not draining, accepting new rooms."""
    return [
        Check("registered", lifecycle.not_connected() or "") if role == "prefill" else _peers(lifecycle),
        Check("not-draining", DRAINING if lifecycle.draining else ""),
        Check("accepting", "" if lifecycle.accepting else f"the agent is {lifecycle.state}"),
    ]


def _peers(lifecycle: Lifecycle) -> Check:
    serving, known = len(lifecycle.serving()), len(lifecycle.all_instances)
    note = f"{serving} of {known} prefill instances connected"
    problem = lifecycle.not_connected()
    return Check("peers", f"{note}; {problem}") if problem else Check("peers", note=note)


def liveness(lifecycle: Lifecycle, control: ControlLoop, lost_s: float) -> list[Check]:
    """Returns the check of `/livez`: whether the control loop turns; waits up to a second for a turn that is late.

    Args:
        lost_s: time after which peers regard a silent agent as lost.
    """
    name, limit_s = "control-loop", max(_LEAST_LIMIT_S, _LOST_TIMES * lost_s)
    if lifecycle.state == "unregistered":
        return [Check(name, note="stopped, because the engine has unregistered its memory")]
    grace_end_s = time.monotonic() + _GRACE_S
    while True:
        if control.ended:
            return [Check(name, "its thread has ended")]
        age_s = control.turn_age_s
        if age_s is None:
            return [Check(name, note="starting")]
        if age_s <= limit_s:
            return [Check(name, note=f"last turn {age_s:.1f} s ago")]
        if time.monotonic() >= grace_end_s:
            return [
                Check(name, f"no turn for {age_s:.0f} s, the limit is {limit_s:.0f} s: kvctl stacks shows where it is")
            ]
        time.sleep(_POLL_S)
