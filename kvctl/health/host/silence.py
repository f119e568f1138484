"""Why an agent of this host does not answer: what has become of the process behind its socket."""

from __future__ import annotations

from dataclasses import dataclass

from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import Survey
from kvctl.health.host.view import HostView, listener_pid

_STOPPED = frozenset({"T", "t"})
_WHO_STOPPED_IT = "see who stopped it (a debugger, job control, a freezer)"
_UNINTERRUPTIBLE = "D"


@dataclass(frozen=True, slots=True)
class Silence:
    """An agent that did not answer, or not all; `code` is the fault's."""

    agent: str
    code: str
    text: str
    remedy: str


def silences(survey: Survey, host: HostView | None) -> list[Silence]:
    """One for each fault.

    Args:
        host: where the agents' processes may be; None where a file remembers them.
    """
    paths = {endpoint.name: endpoint.path for endpoint in survey.discovery.live}
    found = []
    for fault in survey.faults:
        path = paths.get(fault.agent)
        pid = listener_pid(path) if host and path and fault.code == FaultCode.TIMEOUT else None
        found.append(_explained(fault, pid, _state(host, pid) if host and pid else None))
    return found


def _explained(fault: Fault, pid: int | None, state: str | None) -> Silence:
    text, remedy = fault.message, "`kvctl agents` shows who answers"
    if fault.code == FaultCode.NOT_PERMITTED:
        remedy = "run kvctl as the user who runs the agents, or with a key that they know (kvctl key new)"
    if fault.code == FaultCode.STOPPED:
        text, _, remedy = fault.message.partition("; ")
        text, remedy = f"does not answer: {text}", f"{remedy}; {_WHO_STOPPED_IT}"
    elif state in _STOPPED:
        text, remedy = (
            f"does not answer: its process {pid} is stopped",
            f"`kill -CONT {pid}` lets it go on; {_WHO_STOPPED_IT}",
        )
    elif state == _UNINTERRUPTIBLE:
        text = f"does not answer: its process {pid} waits in the kernel and cannot be interrupted (a driver, a disk)"
        remedy = f"`cat /proc/{pid}/stack` tells where, and dmesg what has happened"
    elif state is not None:
        text = f"{fault.message}; its process {pid} runs"
        remedy = f"`kvctl agents --timeout 10s` tells whether it is only slow; py-spy dump --pid {pid} where it hangs"
    return Silence(fault.agent, fault.code, text, remedy)


def _state(host: HostView, pid: int) -> str | None:
    """R, S, D, T …; None where the process cannot be seen."""
    words = (host.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return words[0] if words else None
