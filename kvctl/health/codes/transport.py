"""Health codes about connections and transfer engines: slow lanes, waiting parts, GPUs, limits, implausible metrics."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.health.answers import Row, amount, inner, number, text, texts
from kvctl.health.codes.engine_metrics import slow_transfers
from kvctl.health.codes.facts import (
    absent,
    all_names,
    common_agents,
    failed_by_rank,
    failure_alert,
    failure_finding,
    slow_writers,
)
from kvctl.health.codes.network import slow_pairs
from kvctl.health.codes.staging import gated_writers
from kvctl.health.finding import Finding, Severity, counted, health_code, listed, named_in, pair
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import duration, percent, size, three_digits

# One write within a host runs at the speed of one or two copies. TCP over the loopback device reaches a fifth of that,
# and takes 10 µs for a small descriptor where shared memory takes 1. Measurements from the start of the ranks, when all
# ranks are busy, are ignored; measurements of a later probe are used.
_MIN_MEMORY_SHARE = 1 / 20
_MIN_MEMORY_SHARE_TCP = 1 / 4
_TCP_DESCRIPTOR_NS = 8_000
_STARTUP_NS = 30_000_000_000
_MIN_PARTS = 20
_TINY_BYTES = 2048
_MANY_DESCRIPTORS = 1000
_LONG_POST_S = 0.02
_LONG_GAP_S = 2.0
_GAP_FACTOR = 50.0
_LONG_OBSERVATION_NS = 10_000_000_000
_GAP_STAGES = ("gate", "queue", "gather")
# Beside a busy thread the wait is Python's switch interval, 5 ms; beside an idle one 0.15 ms, most of it the timer's.
_LONG_GIL_WAIT_S = 0.001
_FDS_LOW = 0.8
_FDS_CRITICAL = 0.95
# Far above the rate of any NVLink connection or network card.
_MAX_GB_PER_S = 10_000.0
_WIRE = 'rate(kvctl_stage_seconds_sum{stage="wire"}[5m]) / rate(kvctl_stage_seconds_count{stage="wire"}[5m])'


# ---- slow lanes ------------------------------------------------------------------------------------------------


@health_code(
    "KV_LANE_SLOW",
    Severity.WARNING,
    "transport",
    sees="0.5 GB/s where 50 are expected, and everything else is green",
    means="The engine chooses the lane: RDMA, CUDA IPC, shared memory, TCP. If a requirement is missing, it uses a "
    "slower one without an error: different PID or IPC namespaces disable cuda_ipc and shared memory, UCX_TLS or "
    "UCX_NET_DEVICES exclude the fast device. A lane is slow if one writer's parts take five times as long on the wire "
    "as those of the other writers, by part and by byte, or if kvctl peers probe measured a lane within one host far "
    "below the speed of memory. Which lane carries bytes between GPUs is told by Mooncake's engine; NIXL does not "
    "tell, so it is inferred from the measured rate (evidence lane_source says which): CUDA IPC over NVLink runs at "
    "hundreds of GB/s, a copy through the host at one or two. Such a lane is slow if the hardware has a faster one: "
    "CUDA IPC within a host, RDMA from a host with such devices. Of engines without an agent, transfers are "
    "compared with earlier ones and with those of other servers.",
    remedy="Measure the lane with kvctl peers probe; compare UCX_TLS, UCX_NET_DEVICES, namespaces and devices of the "
    "two hosts with a pair that is fast (kvctl doctor). Between GPUs: UCX_TLS with cuda_ipc, both GPUs visible to both "
    "processes (CUDA_VISIBLE_DEVICES), containers with --ipc=host --pid=host; nvidia-peermem for RDMA.",
    alert=f"max by (namespace) ({_WIRE}) > 5 * min by (namespace) ({_WIRE}) and max by (namespace) ({_WIRE}) > 0.1",
)
def lane_slow(snapshot: Snapshot) -> Iterator[Finding]:
    for name, slow in snapshot.once(slow_writers).items():
        if name in snapshot.once(absent):
            continue
        wire, others = slow.wire, slow.others
        factor = wire.ns_a_byte / others.ns_a_byte
        yield lane_slow.finding(
            name,
            weight=factor,
            evidence={
                "wire_a_part_ns": round(wire.seconds_a_part * 1e9),
                "others_wire_a_part_ns": round(others.seconds_a_part * 1e9),
                "wire_gb_per_s": round(wire.gb_per_s, 4),
                "others_wire_gb_per_s": round(others.gb_per_s, 4),
                "parts": wire.parts,
                "lanes": texts(inner(snapshot.agents[name].status, "transport"), "lanes"),
            },
            cause=f"a part of {name} takes {duration(wire.seconds_a_part * 1e9)} on the wire, {factor:.0f} times "
            f"longer for each byte than those of {listed(slow.other_names)} ({duration(others.seconds_a_part * 1e9)}); "
            "rooms wait for it",
            remedy="`kvctl layers -l role=prefill` shows the time on the wire for each writer; `kvctl peers probe "
            f"--busy {name}` measures its lanes, and rooms wait for that; compare its transport with the others' "
            "(`kvctl status -o wide`), UCX_TLS, UCX_NET_DEVICES and the load of its host",
        )
    yield from _slow_between_hosts(snapshot)
    for agent in snapshot.of_role("prefill"):
        yield from _slower_than_memory(snapshot, agent)
        yield from _slower_than_hardware(agent)
    yield from slow_transfers(snapshot, lane_slow)


def _slow_between_hosts(snapshot: Snapshot) -> Iterator[Finding]:
    """Yields one finding for the pairs of hosts that are slower than their neighbours and have one host in common."""
    writers = snapshot.once(slow_writers).keys() | snapshot.once(absent)
    slow = {(each.source, each.target): each for each in slow_pairs(snapshot) if writers.isdisjoint(each.agents)}
    for common, pairs in common_agents(list(slow)):
        members = [slow[each] for each in pairs]
        worst = max(members, key=lambda each: each.wire_ns / each.others_ns)
        sources, targets = (sorted({end[side] for end in pairs}) for side in (0, 1))
        factor = worst.wire_ns / worst.others_ns
        yield lane_slow.finding(
            pair(listed(sources), listed(targets)),
            agents=[name for each in members for name in each.agents],
            weight=factor,
            evidence={
                "wire_a_part_ns": round(worst.wire_ns),
                "others_wire_a_part_ns": round(worst.others_ns),
                "pairs": [list(each) for each in pairs],
            },
            cause=f"{pair(worst.source, worst.target)}: a part takes {duration(worst.wire_ns)} on the wire, "
            f"{factor:.0f} times as long as between the other hosts that write to {worst.target} or that "
            f"{worst.source} writes to ({duration(worst.others_ns)}); the network of {common} limits it",
            remedy="`kvctl nics` shows speed, faults and retransmissions of the hosts' interfaces; compare them with "
            f"those of a host that is not slow, and look for a limit of the rate on the way to {common}",
        )


def _slower_than_memory(snapshot: Snapshot, agent: Agent) -> Iterator[Finding]:
    """Yields one finding about all lanes of this writer within its host that do not use shared memory."""
    memory = number(agent.status, "memory_gb_per_s")
    slow: list[tuple[float, Row]] = []
    for row in agent.peers:
        lane, descriptor = number(row, "lane_gb_per_s"), amount(row, "lane_descriptor_ns")
        if not memory or lane is None or row.get("same_host") is not True or not _probed(snapshot, agent, row):
            continue
        if row.get("lane_kind"):  # between GPUs, where the speed of the host's memory does not matter
            continue
        if lane < memory * (_MIN_MEMORY_SHARE_TCP if descriptor >= _TCP_DESCRIPTOR_NS else _MIN_MEMORY_SHARE):
            slow.append((lane, row))
    if not memory or not slow:
        return
    lane, worst = min(slow, key=lambda each: each[0])
    peers = [text(row, "peer") for _, row in slow]
    yield lane_slow.finding(
        agent.name,
        agents=(agent.name, *peers),
        since_ns=int(amount(worst, "lane_measured_age_ns")),
        weight=len(slow),
        evidence={
            "lane": text(worst, "lane"),
            "lane_gb_per_s": round(lane, 3),
            "memory_gb_per_s": round(memory, 3),
            "lane_descriptor_ns": number(worst, "lane_descriptor_ns"),
            "slow_to": peers,
        },
        cause=f"one large write from {agent.name} to {text(worst, 'peer')} on the same host ran at "
        f"{three_digits(lane)} GB/s{_more_lanes(slow)}, where one thread copies memory at {three_digits(memory)} GB/s: "
        "it does not go through shared memory",
        remedy=f"`kvctl peers probe --busy {agent.name}` measures it again; if it stays slow, check that both run in "
        "one IPC and PID namespace and that UCX_TLS allows sm (cma, posix, cuda_ipc)",
    )


def _slower_than_hardware(agent: Agent) -> Iterator[Finding]:
    """Yields a finding about the lanes of this writer's GPU that do not use the fastest hardware, per expected kind.

    Unlike for lanes of host memory, measurements from the ranks' start are valid: GPUs copy without the CPU, and kinds
    of lanes differ by a factor of 20.
    """
    slow: dict[str, list[Row]] = {}
    for row in agent.peers:
        expected = row.get("lane_expected")
        if expected and row.get("lane_kind") != expected:
            slow.setdefault(str(expected), []).append(row)
    for expected, lanes in slow.items():
        worst = min(lanes, key=lambda row: amount(row, "lane_gb_per_s"))
        rate, peers = amount(worst, "lane_gb_per_s"), [text(row, "peer") for row in lanes]
        direct = "; parts that take the path direct are not affected" if worst.get("lane_direct") else ""
        advice = _USE_OTHER_PROTOCOL if text(worst, "lane") == "mooncake" else _ENABLE[expected]
        yield lane_slow.finding(
            agent.name,
            agents=(agent.name, *peers),
            since_ns=int(amount(worst, "lane_measured_age_ns")),
            weight=len(lanes),
            evidence={
                "lane": text(worst, "lane"),
                "lane_kind": text(worst, "lane_kind"),
                "lane_source": text(worst, "lane_source"),
                "lane_expected": expected,
                "lane_gb_per_s": round(rate, 3),
                "lane_direct": worst.get("lane_direct"),
                "slow_to": peers,
            },
            cause=f"one large write from the GPU of {agent.name} to that of {text(worst, 'peer')} ran at "
            f"{three_digits(rate)} GB/s{_more_lanes(lanes)}: it goes {_USED[text(worst, 'lane_kind')]}, where "
            f"{_AVAILABLE[expected]}{direct}",
            remedy=f"`kvctl peers probe --busy {agent.name}` measures it again, also after a change; {advice}",
        )


_USED = {"cuda_ipc": "by CUDA IPC", "rdma": "by RDMA", "tcp through the host": "through the host, and by TCP"}
_AVAILABLE = {"cuda_ipc": "GPUs of one host reach each other (cuda_ipc)", "rdma": "this host has RDMA devices"}
_ENABLE = {
    "cuda_ipc": "include cuda_ipc in UCX_TLS, show both processes both GPUs (CUDA_VISIBLE_DEVICES), run their "
    "containers with --ipc=host --pid=host, and allocate pools without expandable_segments",
    "rdma": "load nvidia-peermem (or the driver's open kernel modules, for dma-buf), include rc and cuda_copy in "
    "UCX_TLS, and set UCX_NET_DEVICES to the card next to the GPU",
}
_USE_OTHER_PROTOCOL = (
    "Mooncake over TCP copies through the host: set transport to nixl, or in transport_params protocol to nvlink_intra "
    "or rdma where its wheel and this host support it"
)


def _more_lanes(slow: list[Row] | list[tuple[float, Row]]) -> str:
    return f", and {counted(len(slow) - 1, 'more lane')} like it" if len(slow) > 1 else ""


def _probed(snapshot: Snapshot, agent: Agent, row: Row) -> bool:
    """Returns whether the lane in `row` was measured long after the start of both agents."""
    age = number(row, "lane_measured_age_ns")
    ends = [agent, snapshot.agents.get(text(row, "peer"))]
    uptimes = [amount(end.status, "uptime_ns") for end in ends if end is not None]
    return age is not None and len(uptimes) == len(ends) and age + _STARTUP_NS <= min(uptimes)


# ---- time before the wire --------------------------------------------------------------------------------------


@health_code(
    "KV_DESCRIPTOR_FLOOD",
    Severity.WARNING,
    "transport",
    sees="bandwidth falls as concurrency grows, one core per writer is busy in the engine",
    means="If the two sides split heads differently, the slice path sends one descriptor of a few hundred bytes for "
    "each token and layer. Posting them takes longer than transferring the bytes.",
    remedy="Let parts be staged (staging=on or auto): gathered, sent as one write, scattered.",
    alert='sum by (instance) (rate(kvctl_descriptors_total{path="slice"}[5m])) > 1000 * sum by (instance) '
    '(rate(kvctl_writes_total{path="slice"}[5m])) and sum by (instance) '
    '(rate(kvctl_stage_seconds_sum{stage="post"}[5m])) > 2 * sum by (instance) '
    '(rate(kvctl_stage_seconds_sum{stage="wire"}[5m]))',
)
def descriptor_flood(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.of_role("prefill"):
        descriptors = snapshot.since_before(agent.name, "kvctl_descriptors_total", path="slice") or 0
        writes = snapshot.since_before(agent.name, "kvctl_writes_total", path="slice") or 0
        nbytes = snapshot.since_before(agent.name, "kvctl_part_bytes_total", path="slice") or 0
        post, wire = (
            snapshot.histogram_since_before(agent.name, "kvctl_stage_seconds", stage=stage)
            for stage in ("post", "wire")
        )
        if post is None or wire is None or writes < _MIN_PARTS or not descriptors or not nbytes:
            continue
        descriptor_bytes, per_part = nbytes / descriptors, descriptors / writes
        if descriptor_bytes > _TINY_BYTES or per_part < _MANY_DESCRIPTORS:
            continue
        if post.mean_s < max(_LONG_POST_S, 2 * wire.mean_s):
            continue
        ratio = post.seconds / (post.seconds + wire.seconds)
        yield descriptor_flood.finding(
            agent.name,
            weight=per_part,
            evidence={
                "descriptors_a_part": round(per_part),
                "bytes_a_descriptor": round(descriptor_bytes),
                "post_a_part_ns": round(post.mean_s * 1e9),
                "wire_a_part_ns": round(wire.mean_s * 1e9),
                "post_ratio": round(ratio, 3),
            },
            cause=f"{agent.name} posts {per_part:.0f} descriptors of {size(descriptor_bytes)} for each part, which "
            f"takes {duration(post.mean_s * 1e9)}, {percent(ratio)} of the time in the engine",
            remedy=f"`kvctl config -e {agent.name}` shows path and staging: with staging on, a part is one write; "
            "larger pages help too",
        )


@health_code(
    "KV_READY_GAP",
    Severity.WARNING,
    "transport",
    sees="parts are posted long after they were computed",
    means="Between a part's ready event and its post it passes the gate (grant, watermark, lease), the queue for the "
    "control loop, and the gather. Here they take seconds, many times the time on the wire; the shares show which of "
    "them is the bottleneck.",
    remedy="Gate: a larger ring. Queue: more cores, or fewer busy Python threads in the process. Gather: more copy "
    "threads, or a path without a gather.",
    alert='sum by (instance) (rate(kvctl_stage_seconds_sum{stage=~"gate|queue|gather"}[5m])) > 2 * sum by (instance) '
    '(rate(kvctl_stage_seconds_count{stage="wire"}[5m]))',
)
def ready_gap(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.of_role("prefill"):
        wire = snapshot.histogram_since_before(agent.name, "kvctl_stage_seconds", stage="wire")
        if wire is None or wire.observations < _MIN_PARTS or agent.name in snapshot.once(gated_writers):
            continue  # KV_RING_SMALL reports writers that wait for a ring
        seconds = {
            stage: spent.seconds
            for stage in _GAP_STAGES
            if (spent := snapshot.histogram_since_before(agent.name, "kvctl_stage_seconds", stage=stage)) is not None
        }
        gap_s = sum(seconds.values()) / wire.observations
        if gap_s < max(_LONG_GAP_S, _GAP_FACTOR * wire.mean_s) or not _gap_lasts(snapshot, agent):
            continue
        shares = {stage: round(value / sum(seconds.values()), 3) for stage, value in seconds.items()}
        worst = max(seconds, key=lambda stage: seconds[stage])
        reason, remedy = _GAPS[worst]
        yield ready_gap.finding(
            agent.name,
            weight=shares[worst],
            evidence={
                "gap_a_part_ns": round(gap_s * 1e9),
                "wire_a_part_ns": round(wire.mean_s * 1e9),
                **{f"{stage}_ratio": share for stage, share in shares.items()},
                "parts": int(wire.observations),
            },
            cause=f"{counted(wire.observations, 'part')} of {agent.name} waited {duration(gap_s * 1e9)} each from "
            f"ready to post, and were {duration(wire.mean_s * 1e9)} on the wire: {percent(shares[worst])} of the wait "
            f"is {reason}",
            remedy=remedy.format(agent=agent.name),
        )


def _gap_lasts(snapshot: Snapshot, agent: Agent) -> bool:
    """Returns whether the gap was observed for long or is also long on average since the agent's start.

    Otherwise the gap may only be a short time in which the process got no core.
    """
    waited_s = sum(agent.histogram("kvctl_stage_seconds", stage=stage).seconds for stage in _GAP_STAGES)
    parts = agent.histogram("kvctl_stage_seconds", stage="wire").observations
    # The first rooms wait while lanes are measured.
    started = amount(agent.status, "uptime_ns") >= _STARTUP_NS
    lifelong = started and parts > 0 and waited_s / parts >= _LONG_GAP_S / 2
    return snapshot.since_ns >= _LONG_OBSERVATION_NS or lifelong


_GAPS = {
    "gate": (
        "for the ring or the peer's sign of life",
        "`kvctl staging` shows whose ring they wait for: raise staging_ring_mb there",
    ),
    "queue": ("for the control loop", "`kvctl stacks -e {agent}` shows what its threads do: add cores"),
    "gather": (
        "the copy into the staging buffer",
        "`kvctl config -e {agent}` shows copy_threads: raise it, or add cores",
    ),
}


# ---- engines, GPUs, limits -------------------------------------------------------------------------------------


@health_code(
    "KV_TRANSPORT",
    Severity.WARNING,
    "transport",
    sees="single rooms fail with an engine's error",
    means="The transfer engine refused a post, or gave up a write. The room fails; its memory is kept until the engine "
    "has finished with the write.",
    remedy="Check whether one writer or one peer is concerned, and probe that lane; the engine's log has details.",
    alert="sum by (instance) (increase(kvctl_transport_errors_total[10m])) > 0",
)
def transport_error(snapshot: Snapshot) -> Iterator[Finding]:
    names, silent = snapshot.once(all_names), snapshot.once(absent)
    for rank, all_failures in failed_by_rank(snapshot, "KV_TRANSPORT").items():
        # Failed writes to an absent agent are left out, because another finding reports that agent.
        failures = [each for each in all_failures if not any(name in silent for name in named_in(each.text, names))]
        if failures:
            agent = snapshot.agents.get(rank)
            yield failure_finding(
                snapshot,
                transport_error,
                failures,
                f"the engine of {rank} failed {counted(len(failures), 'room')}",
                f"which part failed and to which peer; then see the engine's own log of {rank}",
                evidence={"transport_errors_total": agent and agent.total("kvctl_transport_errors_total")},
            )


@health_code(
    "KV_GIL_WAIT",
    Severity.WARNING,
    "transport",
    sees="rooms are slow and few while cores and connections are idle; the engine's process uses one core for Python",
    means="The agent's loop and the engine's threads share one Python interpreter. The main thread of the process, in "
    "which schedulers run, lends it to the loop when it comes back from a call that releases it, as torch's operators "
    "do. Any other thread that runs Python, and a main thread that only computes, gives it up when it blocks, or after "
    "sys.getswitchinterval(), 5 ms by default. Until then the loop waits, each time that it returns from the kernel or "
    "from the transfer engine, three to five times a room. The time in which the kernel had no core for the thread "
    "does not count.",
    remedy="Find the thread with kvctl stacks. Run the engine's loop in the main thread of its process, or let it "
    "block (a queue or a socket with a timeout, a CUDA event) instead of polling; move tokenizing, logging and metrics "
    "into other processes. If latency counts more than that thread, set switch_interval_ms = 1. kvctl bench "
    "--busy-engine off,prefill,prefill:spin --rate 50 measures busy main threads on this host.",
    alert=f"kvctl_interpreter_wait_seconds > {_LONG_GIL_WAIT_S}",
)
def gil_wait(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.agents.values():
        wait_s = agent.total("kvctl_interpreter_wait_seconds") or 0.0
        if wait_s <= _LONG_GIL_WAIT_S or not agent.total("kvctl_parts_total"):
            continue
        yield gil_wait.finding(
            agent.name,
            weight=wait_s,
            evidence={"gil_wait_ns": round(wait_s * 1e9)},
            cause=f"another thread of the process of {agent.name} runs Python almost without a pause, so the agent's "
            f"loop waits {duration(wait_s * 1e9)} for the interpreter (GIL) each time, several times for each room",
            remedy=f"`kvctl stacks -e {agent.name}` shows the thread: run an engine's loop in the main thread, let "
            "others block instead of polling; as a last resort set switch_interval_ms = 1",
        )


@health_code(
    "KV_DEVICE",
    Severity.CRITICAL,
    "transport",
    sees="rooms fail with a CUDA error; after the first one, all rooms of a rank",
    means="A kernel that copies KV failed, a copy could not be launched, or the forward whose event the engine passed "
    "ended with an error. After an illegal address, an ECC error or a lost link, a CUDA context cannot be used any "
    "more, so every later room of that process fails as well, and so do the engine's own kernels. An error of a "
    "forward is reported where it appears first, which may be a copy.",
    remedy="Look for Xid errors in dmesg and for ECC and NVLink errors in nvidia-smi -q. Restart the worker. If it "
    "happens again without a fault of the GPU, run the engine under compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1: "
    "some kernel writes to wrong addresses.",
    alert=failure_alert("KV_DEVICE"),
)
def device_error(snapshot: Snapshot) -> Iterator[Finding]:
    for rank, failures in failed_by_rank(snapshot, "KV_DEVICE").items():
        yield failure_finding(
            snapshot,
            device_error,
            failures,
            f"the GPU of {rank} or its driver failed {counted(len(failures), 'room')}",
            f"which copy it was; `dmesg | grep -i xid` on the host of {rank} distinguishes a fault of the GPU from one "
            "of a kernel; then restart that worker: after most of these errors its process cannot use the GPU any more",
        )


@health_code(
    "KV_FDS_LOW",
    Severity.CRITICAL,
    "transport",
    sees="cannot assign requested address, too many open files",
    means="Control sockets, admin clients and the engine's connections all use file descriptors; when a process has "
    "none left, new peers and connections fail with errors that do not mention it. The worker and its engine share the "
    "agent's process and its limit.",
    remedy="Raise the limit with prlimit for the running process, and where it is started.",
)
def fds_low(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.agents.values():
        process = inner(agent.status, "process")
        used, limit = number(process, "fds"), number(process, "fds_limit")
        if not used or not limit or used < _FDS_LOW * limit:
            continue
        pid = number(agent.status, "pid") or 0
        yield fds_low.finding(
            agent.name,
            severity=Severity.CRITICAL if used >= _FDS_CRITICAL * limit else Severity.WARNING,
            weight=round(used / limit, 2),
            evidence={"fds": int(used), "fds_limit": int(limit), "fds_ratio": round(used / limit, 3), "pid": int(pid)},
            cause=f"the process of {agent.name} has {used:.0f} of {limit:.0f} file descriptors open "
            f"({percent(used / limit)})",
            remedy=f"`prlimit --pid {pid:.0f} --nofile={4 * limit:.0f}` raises the limit now; LimitNOFILE= or ulimit "
            "-n where it is started raises it permanently",
        )


@health_code(
    "KV_PORTS_LOW",
    Severity.WARNING,
    "transport",
    sees="cannot assign requested address",
    means="Each connection to another host uses an ephemeral port. When most of net.ipv4.ip_local_port_range is in "
    "use, or in TIME_WAIT, new connections fail. Detected only by kvctl doctor, on its host.",
    remedy="Widen net.ipv4.ip_local_port_range, and find out what opens so many connections: ss -s.",
)
def ports_low(snapshot: Snapshot) -> Iterator[Finding]:
    return iter(())


@health_code(
    "KV_REGISTER_FAILED",
    Severity.CRITICAL,
    "transport",
    sees="an agent fails at startup with an errno while it registers memory",
    means="The engine could not register the KV pool with the network device. Errno 14 (EFAULT): the memory is a "
    "GPU's, with neither nvidia_peermem nor dma-buf. Errno 12 (ENOMEM): the locked-memory limit, or the device's "
    "largest region, is too small. Errno 11 (EAGAIN): the limit again, or the device has no entries left. Errno 5 "
    "(EIO): the device or its driver refuses. Detected only by kvctl doctor, on its host.",
    remedy="14: modprobe nvidia_peermem, or a kernel and driver with dma-buf. 12, 11: ulimit -l unlimited, "
    "LimitMEMLOCK=infinity in the unit, fewer and smaller regions. 5: dmesg, the device's firmware. kvctl doctor "
    "checks all of these on its host.",
)
def register_failed(snapshot: Snapshot) -> Iterator[Finding]:
    return iter(())


# ---- implausible metrics ---------------------------------------------------------------------------------------

_Wrong = dict[str, tuple[float, str]]


@health_code(
    "KV_METRIC_IMPLAUSIBLE",
    Severity.WARNING,
    "transport",
    sees="dashboards show impossible values",
    means="Some number is below zero, a counter went down without a restart of the agent, a rate is above that of any "
    "lane, or a room has more cells than planned. Throughput is bytes divided by the wall-clock union of the "
    "transfers' spans, so it cannot exceed the lane's rate.",
    remedy="Report it with a recording, and do not trust values derived from the number.",
    alert="min by (instance) (kvctl_ring_used_bytes) < 0",
)
def metric_implausible(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.agents.values():
        if agent.answer.endpoint.metrics:  # SGLang's utilization is -1 where it is unknown
            continue
        wrong = {**_negative(agent), **_too_large(agent), **_decreased(snapshot, agent)}
        if not wrong:
            continue
        metric, (value, reason) = next(iter(wrong.items()))
        yield metric_implausible.finding(
            agent.name,
            weight=len(wrong),
            evidence={name: number for name, (number, _) in wrong.items()},
            cause=f"{agent.name} reports {metric} = {value:g}, {reason}",
            remedy="`kvctl record incident.kvrec --for 2s` saves the data for a report; do not trust values derived "
            f"from {metric} meanwhile",
        )


def _negative(agent: Agent) -> _Wrong:
    found: _Wrong = {}
    for name in agent.families:
        for sample in agent.samples(name) or ():
            for value in (number(sample, "value"), number(sample, "sum"), number(sample, "count")):
                if value is not None and value < 0:
                    found[name] = value, "which is below zero"
    rate = number(inner(agent.status, "rate"), "gb_per_s")
    if rate is not None and rate < 0:
        found["rate.gb_per_s"] = rate, "which is below zero"
    return found


def _too_large(agent: Agent) -> _Wrong:
    found: _Wrong = {}
    rate = number(inner(agent.status, "rate"), "gb_per_s")
    if rate is not None and rate > _MAX_GB_PER_S:
        found["rate.gb_per_s"] = rate, f"above the {_MAX_GB_PER_S:g} GB/s of any lane"
    ring = inner(agent.staging, "ring")
    if amount(ring, "high_water_bytes") > amount(ring, "size_bytes"):
        found["ring.high_water_bytes"] = amount(ring, "high_water_bytes"), "more than the size of the ring"
    for row in agent.rooms:
        coverage = inner(row, "coverage")
        planned = number(coverage, "planned")
        for key in ("sent", "landed", "scattered"):
            cells = number(coverage, key)
            if planned and cells is not None and cells > planned:
                reason = f"more cells than the {planned:g} planned of room {text(row, 'room')}"
                found[f"coverage.{key}"] = cells, reason
    return found


def _decreased(snapshot: Snapshot, agent: Agent) -> _Wrong:
    """Returns the counters that decreased since the previous snapshot without a restart of the agent."""
    before = snapshot.earlier(agent.name)
    if before is None:
        return {}
    found: _Wrong = {}
    for name, family in agent.families.items():
        if text(family, "kind") != "counter":
            continue
        after, earlier = agent.total(name), before.total(name)
        if after is not None and earlier is not None and after < earlier:
            found[name] = after, f"less than the {earlier:g} in the reading before"
    return found
