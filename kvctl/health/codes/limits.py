"""What a host or an engine denies: descriptors, ports, memory registration; and errors that engines raise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvctl.health.answers import inner, number
from kvctl.health.codes.failures import all_names, failure_finding, failures_by_rank
from kvctl.health.codes.formatting import counted, named_in
from kvctl.health.codes.silence import absent
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Snapshot
from kvctl.render.units import percent

_FEW = 0.8
_ALMOST_NONE = 0.95


def _told_by_host(snapshot: Snapshot) -> Iterator[Finding]:
    """Nothing in what agents answer: kvctl doctor looks at the host itself."""
    return iter(())


def _fds(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.agents.values():
        process = inner(agent.status, "process")
        used, limit = number(process, "fds"), number(process, "fds_limit")
        if not used or not limit or used < _FEW * limit:
            continue
        pid = number(agent.status, "pid") or 0
        yield Finding(
            code="KV_FDS_LOW",
            severity=Severity.CRITICAL if used >= _ALMOST_NONE * limit else Severity.WARNING,
            subject=agent.name,
            agents=(agent.name,),
            weight=round(used / limit, 2),
            evidence={"fds": int(used), "fds_limit": int(limit), "fds_ratio": round(used / limit, 3), "pid": int(pid)},
            cause=f"the process of {agent.name} has {used:.0f} of {limit:.0f} file descriptors open "
            f"({percent(used / limit)})",
            remedy=f"`prlimit --pid {pid:.0f} --nofile={4 * limit:.0f}` raises the limit now; LimitNOFILE= or ulimit "
            "-n where it is started does so for good",
        )


FDS_LOW = Code(
    name="KV_FDS_LOW",
    sees="cannot assign requested address, too many open files",
    means="Control sockets, admin clients and the engine's connections all take file descriptors; when a process has "
    "none left, new peers and new connections fail in ways that do not say so. The worker and its engine share the "
    "agent's process and its limit.",
    remedy="Raise the limit with prlimit for the running process, and where it is started.",
    severity=Severity.CRITICAL,
    find=_fds,
)

PORTS_LOW = Code(
    name="KV_PORTS_LOW",
    sees="cannot assign requested address",
    means="Each connection to another host takes an ephemeral port. When most of net.ipv4.ip_local_port_range is in "
    "use, or in TIME_WAIT, new ones fail. kvctl doctor counts them on the host it runs on.",
    remedy="Widen net.ipv4.ip_local_port_range, and see who opens so many connections: ss -s.",
    severity=Severity.WARNING,
    find=_told_by_host,
)

PORT_CLASH = Code(
    name="KV_PORT_CLASH",
    sees="address in use; six of eight ranks come up",
    means="A fixed port that an agent is told to bind is taken. Ports default to any free one; where they are fixed, "
    "two ranks of a host may have been given the same, or an old process still holds it. The agent names the holder "
    "when it gives up, and kvctl doctor looks for it.",
    remedy="Leave the port out of the address, give each rank its own, or end the old process.",
    severity=Severity.CRITICAL,
    find=_told_by_host,
)

REGISTER_FAILED = Code(
    name="KV_REGISTER_FAILED",
    sees="an agent fails at startup with an errno while it registers memory",
    means="The engine could not register the KV pool with the network device. Errno 14 (EFAULT): the memory is a GPU's "
    "and neither nvidia_peermem nor dma-buf is there. Errno 12 (ENOMEM): the locked-memory limit, or the device's "
    "largest region, is too small. Errno 11 (EAGAIN): the limit again, or the device has no entries left. Errno 5 "
    "(EIO): the device or its driver refuses.",
    remedy="14: modprobe nvidia_peermem, or a kernel and driver with dma-buf. 12, 11: ulimit -l unlimited, "
    "LimitMEMLOCK=infinity in the unit, fewer and smaller regions. 5: dmesg, the device's firmware. kvctl doctor looks "
    "at all of these on its host.",
    severity=Severity.CRITICAL,
    find=_told_by_host,
)


# ---- the engine, and ourselves ---------------------------------------------------------------------------------


def _transport(snapshot: Snapshot) -> Iterator[Finding]:
    names, silent = snapshot.once(all_names), snapshot.once(absent)
    for rank, all_failures in failures_by_rank(snapshot, "KV_TRANSPORT").items():
        # A write to an agent that is silent or gone: that agent is named itself.
        failures = [one for one in all_failures if not any(name in silent for name in named_in(one.text, names))]
        if not failures:
            continue
        finding = failure_finding(
            "KV_TRANSPORT",
            Severity.WARNING,
            failures,
            f"the engine of {rank} failed {counted(len(failures), 'room')}",
            f"which part failed and to whom; then see the engine's own log of {rank}",
        )
        agent = snapshot.agents.get(rank)
        errors = agent and agent.total("kvctl_transport_errors_total")
        yield replace(finding, evidence={**finding.evidence, "transport_errors_total": errors})


TRANSPORT = Code(
    name="KV_TRANSPORT",
    sees="single rooms fail with an engine's error",
    means="The transfer engine refused a post, or gave a write up. The room fails, its memory is kept until the engine "
    "lets go of the write.",
    remedy="See whether one writer or one peer is concerned, and probe that lane; the engine's log has its own words.",
    severity=Severity.WARNING,
    find=_transport,
    alert="sum by (instance) (increase(kvctl_transport_errors_total[10m])) > 0",
)


def _internal(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.agents.values():
        count = agent.total("kvctl_internal_errors_total") or 0
        if count <= 0:
            continue
        yield Finding(
            code="KV_INTERNAL_ERROR",
            severity=Severity.WARNING,
            subject=agent.name,
            agents=(agent.name,),
            weight=count,
            evidence={
                "internal_errors_total": int(count),
                "since_before": snapshot.since_before(agent.name, "kvctl_internal_errors_total"),
            },
            cause=f"the control loop of {agent.name} met {counted(count, 'bug')}, its own or of a callback, and went "
            "on without what it was doing",
            remedy=f"`kvctl events -e {agent.name}` has them under the kind control; save `kvctl debug bundle "
            "bundle.tar.zst` and report them",
        )


INTERNAL_ERROR = Code(
    name="KV_INTERNAL_ERROR",
    sees="single rooms behave oddly, nothing else is wrong",
    means="Handling an event, or one of the engine's callbacks, raised an exception. It costs that one event or "
    "action, not the agent; it is always a bug.",
    remedy="Report it with a debug bundle: the flight recorder has the exception.",
    severity=Severity.WARNING,
    find=_internal,
    alert="sum by (instance) (kvctl_internal_errors_total) > 0",
)
