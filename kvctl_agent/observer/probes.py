"""Pages `/readyz` and `/livez` of an agent, for Kubernetes and load balancers: one line per check, 200 or 503.

Readiness asks whether the rank can take a new room, as `Lifecycle.not_ready` does, and whether its process runs; it
must not ask more than a router can use.

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

from kvctl_agent.contract.states import DRAINING
from kvctl_agent.host.http_server import Answer, Page, text_answer
from kvctl_agent.observer.documents import State
from kvctl_agent.observer.observed_rank import ObservedRank
from kvctl_agent.telemetry.region import Cell

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


def probe_page(name: str, checks: Callable[[], Sequence[Check]], *, patient: bool = False) -> Page:
    """Returns a page that answers 200 if all checks pass, and 503 otherwise, with one line per check.

    Args:
        patient: repeats checks that fail for up to a second.
    """

    def answer() -> Answer:
        until_s = time.monotonic() + (_GRACE_S if patient else 0.0)
        found = checks()
        while any(check.problem for check in found) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
            found = checks()
        failed = any(check.problem for check in found)
        lines = [*(check.line() for check in found), f"{name} check {'failed' if failed else 'passed'}"]
        status = HTTPStatus.SERVICE_UNAVAILABLE if failed else HTTPStatus.OK
        return text_answer(status, "".join(f"{line}\n" for line in lines))

    return answer


def readiness(rank: ObservedRank) -> list[Check]:
    """Returns the checks of `/readyz`: registered or connected, not draining, accepting new rooms."""
    state = rank.state()
    ready = Check("registered", state.not_connected or "") if rank.role == "prefill" else _peers(state)
    return [
        ready,
        Check("not-draining", DRAINING if state.draining else ""),
        Check("accepting", "" if state.accepting else f"the agent is {state.state or 'unknown'}"),
        *_runs(rank),
    ]


def _peers(state: State) -> Check:
    note = f"{state.serving} of {state.instances} prefill instances connected"
    problem = state.not_connected
    return Check("peers", f"{note}; {problem}") if problem else Check("peers", note=note)


def _runs(rank: ObservedRank) -> list[Check]:
    """Returns a check that fails if the process does not run, whatever it has published."""
    if rank.ended_ns is not None:
        return [Check("process", f"it has ended: {rank.ended_why or 'why is unknown'}")]
    return [Check("process", "it is stopped")] if rank.facts().state == "stopped" else []


def liveness(rank: ObservedRank) -> list[Check]:
    """Returns the checks of `/livez`: whether the process is there and its control loop turns."""
    name, state, cells = "control-loop", rank.state(), rank.cells()
    if rank.ended_ns is not None:
        return _runs(rank)
    if state.state == "unregistered":
        return [Check(name, note="stopped, because the engine has unregistered its memory")]
    if cells[Cell.LOOP_ENDED_NS] > cells[Cell.TURN_NS]:
        return [Check(name, "its thread has ended")]
    age_ns = rank.turn_age_ns(state)
    if age_ns is None:
        return [Check(name, note="starting")]
    age_s, limit_s = age_ns / 1e9, max(_LEAST_LIMIT_S, _LOST_TIMES * rank.identity().lost_s)
    if age_s <= limit_s:
        return [Check(name, note=f"last turn {age_s:.1f} s ago")]
    return [Check(name, f"no turn for {age_s:.0f} s, the limit is {limit_s:.0f} s: kvctl stacks shows where it is")]
