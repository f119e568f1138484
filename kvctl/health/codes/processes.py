"""Health codes about workers that have ended, are stopped, do not get the interpreter, or whose engine is silent.

All are known from what the worker wrote to shared memory and from /proc, so nobody has to answer in the worker.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.client.names import replaced_by
from kvctl.health.answers import counts, number, text
from kvctl.health.codes.facts import failed_by_peer
from kvctl.health.finding import Code, Finding, Severity, counted, health_code, listed
from kvctl.health.halted_agents import (
    SILENT_NS,
    Halted,
    age_ns,
    calls_at_every_turn,
    engine_silence_ns,
    engine_stack,
    last_call,
)
from kvctl.health.snapshot import Agent, Snapshot

_RECENT_NS = 600_000_000_000
_NOTED_NS = 1_000_000_000
_LONG_SILENT_NS = 30_000_000_000
_FINISHED = frozenset({"Success", "Failed"})


def _open_rooms(agent: Agent) -> int:
    rooms = counts(agent.status, "rooms")
    return int(sum(number for state, number in rooms.items() if state not in _FINISHED))


def _rooms(agent: Agent) -> str:
    """Describes the open rooms of an agent: `, with 3 rooms open (1842, 1840 and 1838)`; "" without any."""
    open_rooms = _open_rooms(agent)
    if not open_rooms:
        return ""
    names = [text(row, "room") for row in agent.rooms if text(row, "state") not in _FINISHED]
    return f", with {counted(open_rooms, 'room')} open{f' ({listed(names)})' if names else ''}"


def _missed_by(snapshot: Snapshot, name: str) -> list[str]:
    return sorted(
        agent.name
        for agent in snapshot.agents.values()
        for row in agent.peers
        if text(row, "peer") == name and text(row, "state") in {"suspect", "lost"}
    )


def _finding(snapshot: Snapshot, code: Code, agent: Agent, severity: Severity, more: str = "") -> Finding:
    """Returns the finding about an agent that does no work."""
    halt = agent.halt
    assert halt is not None
    status, missed_by = agent.status, _missed_by(snapshot, agent.name)
    failed = len({failure.room for failure in snapshot.once(failed_by_peer).get(agent.name, ())})
    cause = f"{agent.name} {halt.text}{_rooms(agent)}{more}"
    if missed_by:
        cause += f"; {listed(missed_by)} {'does' if len(missed_by) == 1 else 'do'} not hear it"
    return code.finding(
        agent.name,
        severity=severity,
        since_ns=halt.since_ns,
        weight=1 + _open_rooms(agent),
        evidence={
            "pid": status.get("pid"),
            "process_state": text(status, "process_state"),
            "ended_why": text(status, "ended_why"),
            "rooms": _open_rooms(agent),
            "failed_rooms": failed,
            "turn_age_ns": age_ns(status, "turn_age_ns"),
            "engine_call": text(status, "engine_call"),
            "engine_call_age_ns": age_ns(status, "engine_call_age_ns"),
            "published_age_ns": age_ns(status, "published_age_ns"),
        },
        cause=cause,
        remedy=halt.remedy,
    )


def _halted(snapshot: Snapshot, kind: Halted) -> Iterator[Agent]:
    return (agent for agent in snapshot.halted.values() if agent.halt is not None and agent.halt.kind is kind)


@health_code(
    "KV_PROCESS_ENDED",
    Severity.CRITICAL,
    "ready",
    sees="a worker is gone, and its rooms with it",
    means="A worker's process ended without closing its agent: it was killed, crashed, or exited. Its observer keeps "
    "what the agent had written to shared memory as a black box, for black_box_s: kvctl status, rooms, rooms show, "
    "events, peers and the other reading commands show it as it was then, and kvctl record saves it. "
    "Critical if rooms were open, otherwise a warning; one degree less if an agent with its name runs again (the black "
    "box is then called NAME.ended-PID), and one less after ten minutes.",
    remedy="Read its last events and rooms with kvctl events -e AGENT and kvctl rooms -e AGENT, its own log, and dmesg "
    "if the kernel may have killed it for want of memory. Start it again.",
)
def process_ended(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in _halted(snapshot, Halted.ENDED):
        now = snapshot.agents.get(replaced_by(agent.name))
        degree = Severity.CRITICAL if _open_rooms(agent) else Severity.WARNING
        lowered = (now is not None) + ((agent.answer.ended_ns or 0) >= _RECENT_NS)
        more = f"; {now.name} runs again" if now is not None else ""
        yield _finding(snapshot, process_ended, agent, Severity(max(Severity.INFO, degree - lowered)), more)


@health_code(
    "KV_PROCESS_STOPPED",
    Severity.CRITICAL,
    "ready",
    sees="a worker does nothing, and its peers lose it after lost_s",
    means="The kernel has stopped a worker's process: SIGSTOP, job control of a shell, a debugger, or a container that "
    "is paused. Its rooms stand still, and its peers do not hear it. What kvctl shows of it is as of the stop.",
    remedy="Let it go on with kill -CONT PID, or unpause its container. If nobody did that on purpose, see whether a "
    "terminal or debugger is attached to it.",
)
def process_stopped(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in _halted(snapshot, Halted.STOPPED):
        yield _finding(snapshot, process_stopped, agent, Severity.CRITICAL)


@health_code(
    "KV_LOOP_STARVED",
    Severity.CRITICAL,
    "ready",
    sees="a worker's rooms stand still and its peers do not hear it, although its process runs",
    means="The agent's control loop, which makes a turn at least every 100 ms, has made none for 1.5 s. It is a Python "
    "thread of the worker, so this happens when another thread keeps the interpreter (GIL) in a C call, such as a "
    "CUDA synchronisation, a collective of NCCL or a compiler; when the process waits in the kernel and cannot be "
    "interrupted; or when it gets no core, as under a CPU limit. Critical after suspect_s, when its peers give it no "
    "more grants, otherwise a warning. What kvctl shows of it is as of then.",
    remedy="py-spy dump --native --pid PID shows the call that does not return. A short pause at the start, while "
    "the engine loads a model or captures CUDA graphs, is no fault.",
)
def loop_starved(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in _halted(snapshot, Halted.STARVED):
        assert agent.halt is not None
        late = (agent.halt.since_ns or 0) >= agent.period_ns("suspect_s")
        called = last_call(agent.status)
        more = f"; its engine {called}" if called else ""
        yield _finding(snapshot, loop_starved, agent, Severity.CRITICAL if late else Severity.WARNING, more)


@health_code(
    "KV_ENGINE_SILENT",
    Severity.CRITICAL,
    "ready",
    sees="rooms of one worker stand still, while its agent answers its peers",
    means="An engine calls its agent again and again while rooms are open: to hand over layers, and to ask whether "
    "rooms have ended. Its thread has not called for longer than a forward takes, or has not returned from a call, "
    "while the agent's own loop runs: the engine waits in a call that gives up the interpreter, such as a collective, "
    "a lock or a socket, or its scheduler has ended. The agent samples the stack of the thread that called last. "
    "Information from a second on, a warning from 5 s, critical from 30 s. Of a prefill engine of vLLM, and of engines "
    "that are not integrated by kvctl, it is information only: they may have no reason to call.",
    remedy="See where the engine's thread is: kvctl stacks -e AGENT, and py-spy dump --native --pid PID for C calls. "
    "Other ranks of its instance that are silent, too, wait in the same collective.",
)
def engine_silent(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.agents.values():
        silent_ns = engine_silence_ns(agent.status)
        if silent_ns is None or silent_ns < _NOTED_NS:
            continue
        rooms = int(sum(counts(agent.status, "rooms").values()))
        degree = (silent_ns >= SILENT_NS) + (silent_ns >= _LONG_SILENT_NS)
        severity = Severity(degree if calls_at_every_turn(agent.status) else Severity.INFO)
        stack = engine_stack(agent.status)
        where = f", and its thread is in {stack[-1]}" if stack else ""
        pid = int(number(agent.status, "pid") or 0)
        yield engine_silent.finding(
            agent.name,
            severity=severity,
            since_ns=silent_ns,
            weight=rooms,
            evidence={
                "engine_call": text(agent.status, "engine_call"),
                "engine_call_age_ns": silent_ns,
                "rooms": rooms,
                "stack": list(stack),
            },
            cause=f"the engine of {agent.name} {last_call(agent.status)}, with "
            f"{counted(rooms, 'room')} not finished{where}",
            remedy=f"`kvctl stacks -e {agent.name}` shows all its threads, `py-spy dump --native --pid {pid}` the "
            "calls of C code in them",
        )
