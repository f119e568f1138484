"""Rooms that failed of late by first cause, each counted once however many ranks report it; and failed GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvctl.health.answers import inner, number, text
from kvctl.health.codes.formatting import counted
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Snapshot
from kvctl.render.units import duration

LATELY_NS = 600_000_000_000


@dataclass(frozen=True, slots=True)
class Failed:
    """One room that failed.

    Attributes:
        rank: the agent that found the cause.
        known_to: agents that know of it, the one that answered first in name order first.
        ago_ns: since it failed, by the clock of the agent that tells.
    """

    room: str
    code: str
    rank: str
    text: str
    known_to: tuple[str, ...]
    ago_ns: int


def failed_lately(snapshot: Snapshot) -> Mapping[str, Sequence[Failed]]:
    """By code, the latest first; use `snapshot.once(failed_lately)`."""
    rooms: dict[tuple[str, str, str, str], Failed] = {}
    for agent in snapshot.agents.values():
        for row in agent.known_rooms:
            failure = inner(row, "failure")
            code, rank, words = (text(failure, key) for key in ("code", "rank", "text"))
            at_ns = number(failure, "at_ns") if number(row, "finished_at_ns") is None else number(row, "finished_at_ns")
            if not code or at_ns is None:
                continue
            ago_ns = max(0, agent.now_ns - int(at_ns))
            if ago_ns > LATELY_NS:
                continue
            key = (text(row, "room"), code, rank, words)
            known = rooms.get(key)
            known_to = (agent.name,) if known is None else (*known.known_to, agent.name)
            ago_ns = ago_ns if known is None else max(ago_ns, known.ago_ns)
            rooms[key] = Failed(key[0], code, rank, words, tuple(dict.fromkeys(known_to)), ago_ns)
    found: dict[str, list[Failed]] = {}
    for failed in sorted(rooms.values(), key=lambda failed: failed.ago_ns):
        found.setdefault(failed.code, []).append(failed)
    return found


def all_names(snapshot: Snapshot) -> frozenset[str]:
    """Every agent that anybody here speaks of; use `snapshot.once(all_names)`."""
    peers = {text(row, "peer") for agent in snapshot.agents.values() for row in agent.peers}
    return frozenset(snapshot.agents) | peers


def failures_by_rank(snapshot: Snapshot, code: str) -> Mapping[str, Sequence[Failed]]:
    """Rooms that failed with this code, the latest first, by the agent that found the cause."""
    found: dict[str, list[Failed]] = {}
    for failed in snapshot.once(failed_lately).get(code, ()):
        found.setdefault(failed.rank, []).append(failed)
    return found


def failure_finding(
    code: str, severity: Severity, failures: Sequence[Failed], cause: str, remedy: str, named: Iterable[str] = ()
) -> Finding:
    """The finding about rooms of one rank, the latest first.

    Args:
        cause: how many rooms failed, and of what; the latest of them is added.
        remedy: what to do besides a look at the latest room, with which it begins.
        named: agents besides those that know the latest one.
    """
    latest = failures[0]
    return Finding(
        code=code,
        severity=severity,
        subject=latest.rank,
        agents=tuple(dict.fromkeys((latest.rank, *latest.known_to, *named))),
        since_ns=latest.ago_ns,
        weight=len(failures),
        evidence={
            "failed_rooms": len(failures),
            "latest_room": latest.room,
            "latest_ago_ns": latest.ago_ns,
            "latest": latest.text,
        },
        cause=f"{cause}, last {duration(latest.ago_ns)} ago: {latest.text}",
        remedy=f"`kvctl rooms show {latest.room}` shows {remedy}",
    )


def _device(snapshot: Snapshot) -> Iterator[Finding]:
    for rank, failures in failures_by_rank(snapshot, "KV_DEVICE").items():
        yield failure_finding(
            "KV_DEVICE",
            Severity.CRITICAL,
            failures,
            f"the GPU of {rank} or its driver failed {counted(len(failures), 'room')}",
            f"which copy it was; `dmesg | grep -i xid` on the host of {rank} tells a fault of the GPU from one of a "
            "kernel; then restart that worker: after most of these errors its process cannot use the GPU any more",
        )


DEVICE = Code(
    name="KV_DEVICE",
    sees="rooms fail with a CUDA error; after the first one, all of a rank",
    means="A kernel that copies KV failed, a copy could not be launched, or the forward whose event the engine gave "
    "ended in an error. A CUDA context that has met an illegal address, an ECC error or a lost link serves nothing "
    "more, so every later room of that process fails as well, and so do the engine's own kernels. An error of a "
    "forward is reported where it is seen first, which may be in a copy.",
    remedy="Look for Xid errors in dmesg and for ECC and NVLink errors in nvidia-smi -q. Restart the worker. Where it "
    "comes again without a fault of the GPU, run the engine under compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1: "
    "some kernel writes where it must not.",
    severity=Severity.CRITICAL,
    find=_device,
    alert='sum by (instance) (increase(kvctl_room_failures_total{code="KV_DEVICE"}[10m])) > 0',
)
