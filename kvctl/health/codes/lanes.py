"""Lanes that are slower than they should be, and where the time of parts goes instead of onto the wire."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.health.answers import Row, amount, inner, number, text, texts
from kvctl.health.codes.formatting import counted, listed
from kvctl.health.codes.ring_size import gated_writers
from kvctl.health.codes.silence import absent
from kvctl.health.codes.slowness import slow_writers
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Agent, Snapshot, Spent
from kvctl.render.units import duration, percent, size, three_digits

# One write within a host moves at the speed of a copy or two. TCP through the loopback device has a fifth of that, and
# takes 10 µs for a small descriptor where shared memory takes 1. What was measured while the ranks came up, each of
# them busy, says nothing: it is believed of a later probe.
_OF_MEMORY = 1 / 20
_OF_MEMORY_BY_TCP = 1 / 4
_TCP_DESCRIPTOR_NS = 8_000
_COMING_UP_NS = 30_000_000_000
_PARTS = 20
_TINY_BYTES = 2048
_MANY_DESCRIPTORS = 1000
_LONG_POST_S = 0.02
_LONG_GAP_S = 2.0
_GAP_TIMES = 50.0
_LONG_LOOK_NS = 10_000_000_000
_GAP_STAGES = ("gate", "queue", "gather")
_WIRE = 'rate(kvctl_stage_seconds_sum{stage="wire"}[5m]) / rate(kvctl_stage_seconds_count{stage="wire"}[5m])'


def _slow(snapshot: Snapshot) -> Iterator[Finding]:
    for name, slow in snapshot.once(slow_writers).items():
        if name in snapshot.once(absent):
            continue
        wire, others = slow.wire, slow.others
        times = wire.ns_a_byte / others.ns_a_byte
        agent = snapshot.agents[name]
        yield Finding(
            code="KV_LANE_SLOW",
            severity=Severity.WARNING,
            subject=name,
            agents=(name, *slow.other_names),
            weight=times,
            evidence={
                "wire_a_part_ns": round(wire.seconds_a_part * 1e9),
                "others_wire_a_part_ns": round(others.seconds_a_part * 1e9),
                "wire_gb_per_s": round(wire.gb_per_s, 4),
                "others_wire_gb_per_s": round(others.gb_per_s, 4),
                "parts": wire.parts,
                "lanes": texts(inner(agent.status, "transport"), "lanes"),
            },
            cause=f"a part of {name} takes {duration(wire.seconds_a_part * 1e9)} on the wire, {times:.0f} times longer "
            f"for each byte than those of {listed(slow.other_names)} ({duration(others.seconds_a_part * 1e9)}); rooms "
            "wait for it",
            remedy="`kvctl layers -l role=prefill` shows the time on the wire for each writer; `kvctl peers probe "
            f"--busy {name}` measures its lanes, and rooms wait for that; compare its transport with the others' "
            "(`kvctl status -o wide`), UCX_TLS, UCX_NET_DEVICES and the load of its host",
        )
    for agent in snapshot.of_role("prefill"):
        yield from _below_memory(snapshot, agent)
        yield from _below_hardware(snapshot, agent)


def _below_memory(snapshot: Snapshot, agent: Agent) -> Iterator[Finding]:
    """Lanes of this writer within its host that do not go through shared memory: one finding for all of them."""
    memory = number(agent.status, "memory_gb_per_s")
    slow: list[tuple[float, Row]] = []
    for row in agent.peers:
        lane, descriptor = number(row, "lane_gb_per_s"), amount(row, "lane_descriptor_ns")
        if not memory or lane is None or row.get("same_host") is not True or not _probed(snapshot, agent, row):
            continue
        if row.get("lane_kind"):  # between GPUs: the speed of the host's memory is no measure
            continue
        if lane < memory * (_OF_MEMORY_BY_TCP if descriptor >= _TCP_DESCRIPTOR_NS else _OF_MEMORY):
            slow.append((lane, row))
    if not memory or not slow:
        return
    lane, worst = min(slow, key=lambda one: one[0])
    peers = [text(row, "peer") for _, row in slow]
    more = f", and {counted(len(slow) - 1, 'more lane')} like it" if len(slow) > 1 else ""
    yield Finding(
        code="KV_LANE_SLOW",
        severity=Severity.WARNING,
        subject=agent.name,
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
        f"{three_digits(lane)} GB/s{more}, where one thread copies memory at {three_digits(memory)} GB/s: it does not "
        "go through shared memory",
        remedy=f"`kvctl peers probe --busy {agent.name}` measures it again; if it stays slow, see that both run in one "
        "IPC and PID namespace and that UCX_TLS allows sm (cma, posix, cuda_ipc)",
    )


def _below_hardware(snapshot: Snapshot, agent: Agent) -> Iterator[Finding]:
    """Lanes of this writer's GPU that go another way than the hardware has: one finding for all of a kind.

    What was measured while the ranks came up counts here: GPUs copy by themselves, and the ways are 20 times apart.
    """
    slow: dict[str, list[Row]] = {}
    for row in agent.peers:
        expected = row.get("lane_expected")
        if expected and row.get("lane_kind") != expected:
            slow.setdefault(str(expected), []).append(row)
    for expected, rows in slow.items():
        worst = min(rows, key=lambda row: amount(row, "lane_gb_per_s"))
        peers = [text(row, "peer") for row in rows]
        more = f", and {counted(len(rows) - 1, 'more lane')} like it" if len(rows) > 1 else ""
        spared = "; parts that go direct are spared" if worst.get("lane_direct") else ""
        yield Finding(
            code="KV_LANE_SLOW",
            severity=Severity.WARNING,
            subject=agent.name,
            agents=(agent.name, *peers),
            since_ns=int(amount(worst, "lane_measured_age_ns")),
            weight=len(rows),
            evidence={
                "lane": text(worst, "lane"),
                "lane_kind": text(worst, "lane_kind"),
                "lane_expected": expected,
                "lane_gb_per_s": round(amount(worst, "lane_gb_per_s"), 3),
                "lane_direct": worst.get("lane_direct"),
                "slow_to": peers,
            },
            cause=f"one large write from the GPU of {agent.name} to that of {text(worst, 'peer')} ran at "
            f"{three_digits(amount(worst, 'lane_gb_per_s'))} GB/s{more}: it goes {_WAY[text(worst, 'lane_kind')]}, "
            f"where {_COULD[expected]}{spared}",
            remedy=_BY_TCP.format(agent=agent.name)
            if text(worst, "lane") == "mooncake"
            else _MAKE_IT[expected].format(agent=agent.name),
        )


_WAY = {"cuda_ipc": "by CUDA IPC", "rdma": "by RDMA", "tcp through the host": "through the host, and by TCP"}
_COULD = {"cuda_ipc": "GPUs of one host reach each other (cuda_ipc)", "rdma": "this host has RDMA devices"}
_PROBE = "`kvctl peers probe --busy {agent}` measures it again, after a change, too; "
_MAKE_IT = {
    "cuda_ipc": _PROBE + "let UCX_TLS have cuda_ipc, show both processes both GPUs (CUDA_VISIBLE_DEVICES), run their "
    "containers with --ipc=host --pid=host, and allocate pools without expandable_segments",
    "rdma": _PROBE + "load nvidia-peermem (or the driver's open kernel modules, for dma-buf), and let UCX_TLS have rc "
    "and cuda_copy, UCX_NET_DEVICES the card next to the GPU",
}
_BY_TCP = (
    _PROBE + "Mooncake over TCP copies through the host: set transport to nixl, or in transport_params protocol to "
    "nvlink_intra or rdma where its wheel and this host have it"
)


def _probed(snapshot: Snapshot, agent: Agent, row: Row) -> bool:
    """Whether this lane was measured long after both its ends came up."""
    age = number(row, "lane_measured_age_ns")
    ends = [agent, snapshot.agents.get(text(row, "peer"))]
    uptimes = [amount(end.status, "uptime_ns") for end in ends if end is not None]
    return age is not None and len(uptimes) == len(ends) and age + _COMING_UP_NS <= min(uptimes)


LANE_SLOW = Code(
    name="KV_LANE_SLOW",
    sees="0.5 GB/s where 50 are expected, and everything else is green",
    means="The engine chooses the lane: RDMA, CUDA IPC, shared memory, TCP. When what it needs is missing it takes a "
    "slower one without a word: different PID or IPC namespaces disable cuda_ipc and shared memory, UCX_TLS or "
    "UCX_NET_DEVICES exclude the fast device. A lane is called slow when one writer's parts are five times longer on "
    "the wire than its fellows', by part and by byte, or when kvctl peers probe measured a lane within one host far "
    "below the speed of memory. No engine says what carries bytes between GPUs, so it is inferred from the measured "
    "rate: CUDA IPC over NVLink runs at hundreds of GB/s, a copy through the host at one or two. Such a lane is called "
    "slow when the hardware has a better way: CUDA IPC within a host, RDMA from a host with such devices.",
    remedy="Measure the lane with kvctl peers probe; compare UCX_TLS, UCX_NET_DEVICES, namespaces and devices of the "
    "two hosts with a pair that is fast (kvctl doctor). Between GPUs: UCX_TLS with cuda_ipc, both GPUs visible to both "
    "processes (CUDA_VISIBLE_DEVICES), containers with --ipc=host --pid=host; nvidia-peermem for RDMA.",
    severity=Severity.WARNING,
    find=_slow,
    alert=f"max({_WIRE}) > 5 * min({_WIRE}) and max({_WIRE}) > 0.1",
)


# ---- descriptors -----------------------------------------------------------------------------------------------


def _flood(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.of_role("prefill"):
        descriptors = snapshot.since_before(agent.name, "kvctl_descriptors_total", path="slice") or 0
        writes = snapshot.since_before(agent.name, "kvctl_writes_total", path="slice") or 0
        nbytes = snapshot.since_before(agent.name, "kvctl_part_bytes_total", path="slice") or 0
        post, wire = (snapshot.spent_since_before(agent.name, "kvctl_stage_seconds", stage=s) for s in ("post", "wire"))
        if post is None or wire is None or writes < _PARTS or not descriptors or not nbytes:
            continue
        each, of_part = nbytes / descriptors, descriptors / writes
        post_s = _mean(post)
        if each > _TINY_BYTES or of_part < _MANY_DESCRIPTORS or post_s < max(_LONG_POST_S, 2 * _mean(wire)):
            continue
        ratio = post.seconds / (post.seconds + wire.seconds)
        yield Finding(
            code="KV_DESCRIPTOR_FLOOD",
            severity=Severity.WARNING,
            subject=agent.name,
            agents=(agent.name,),
            weight=of_part,
            evidence={
                "descriptors_a_part": round(of_part),
                "bytes_a_descriptor": round(each),
                "post_a_part_ns": round(post_s * 1e9),
                "wire_a_part_ns": round(_mean(wire) * 1e9),
                "post_ratio": round(ratio, 3),
            },
            cause=f"{agent.name} hands the engine {of_part:.0f} descriptors of {size(each)} for each part: posting "
            f"takes {duration(post_s * 1e9)}, {percent(ratio)} of the time in the engine",
            remedy=f"`kvctl config -e {agent.name}` shows path and staging: with staging on a part is one write; "
            "larger pages help too",
        )


def _mean(spent: Spent) -> float:
    return spent.seconds / spent.times if spent.times else 0.0


DESCRIPTOR_FLOOD = Code(
    name="KV_DESCRIPTOR_FLOOD",
    sees="bandwidth falls as concurrency grows, a core per writer is busy in the engine",
    means="Where the two sides split heads differently the slice path sends one descriptor for each token and layer, a "
    "few hundred bytes each. Posting them costs more than the bytes.",
    remedy="Let parts be staged (staging=on or auto): gathered, sent as one write, scattered.",
    severity=Severity.WARNING,
    find=_flood,
    alert='sum by (instance) (rate(kvctl_descriptors_total{path="slice"}[5m])) > 1000 * sum by (instance) '
    '(rate(kvctl_writes_total{path="slice"}[5m])) and sum by (instance) '
    '(rate(kvctl_stage_seconds_sum{stage="post"}[5m])) > 2 * sum by (instance) '
    '(rate(kvctl_stage_seconds_sum{stage="wire"}[5m]))',
)


# ---- gaps ------------------------------------------------------------------------------------------------------


def _gap(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.of_role("prefill"):
        spent = {
            stage: snapshot.spent_since_before(agent.name, "kvctl_stage_seconds", stage=stage)
            for stage in (*_GAP_STAGES, "wire")
        }
        wire = spent.pop("wire")
        if wire is None or wire.times < _PARTS or agent.name in snapshot.once(gated_writers):
            continue  # that they wait for a ring is said of the ring
        seconds = {stage: one.seconds for stage, one in spent.items() if one is not None}
        gap_s = sum(seconds.values()) / wire.times
        if gap_s < max(_LONG_GAP_S, _GAP_TIMES * _mean(wire)) or not _lasting(snapshot, agent):
            continue
        worst = max(seconds, key=lambda stage: seconds[stage])
        shares = {stage: round(one / sum(seconds.values()), 3) for stage, one in seconds.items()}
        yield Finding(
            code="KV_READY_GAP",
            severity=Severity.WARNING,
            subject=agent.name,
            agents=(agent.name,),
            weight=shares[worst],
            evidence={
                "gap_a_part_ns": round(gap_s * 1e9),
                "wire_a_part_ns": round(_mean(wire) * 1e9),
                **{f"{stage}_ratio": share for stage, share in shares.items()},
                "parts": int(wire.times),
            },
            cause=f"{counted(wire.times, 'part')} of {agent.name} waited {duration(gap_s * 1e9)} each from ready to "
            f"post, and were {duration(_mean(wire) * 1e9)} on the wire: {percent(shares[worst])} of the wait is "
            f"{_SAY[worst]}",
            remedy=_DO[worst].format(agent=agent.name),
        )


def _lasting(snapshot: Snapshot, agent: Agent) -> bool:
    """Whether it was looked at for long, or it was so for the agent's whole life: no moment without a core."""
    life = [agent.spent("kvctl_stage_seconds", stage=stage).seconds for stage in _GAP_STAGES]
    parts = agent.spent("kvctl_stage_seconds", stage="wire").times
    # The first rooms of all wait while lanes are measured.
    lived = amount(agent.status, "uptime_ns") >= _COMING_UP_NS
    return snapshot.since_ns >= _LONG_LOOK_NS or (lived and parts > 0 and sum(life) / parts >= _LONG_GAP_S / 2)


_SAY = {
    "gate": "for the ring or the peer's sign of life",
    "queue": "for a transfer worker",
    "gather": "the copy into the staging buffer",
}
_DO = {
    "gate": "`kvctl staging` shows whose ring they wait for: raise staging_ring_mb there",
    "queue": "`kvctl config -e {agent}` shows workers: give it more, or more cores",
    "gather": "`kvctl config -e {agent}` shows copy_threads: give it more, or more cores",
}

READY_GAP = Code(
    name="KV_READY_GAP",
    sees="parts are posted long after they were computed",
    means="Between a part's ready event and its post lie the gate (grant, watermark, lease), the queue for a transfer "
    "worker, and the gather. Here they take seconds, and many times the time on the wire; the shares say which of "
    "them is the bottleneck.",
    remedy="Gate: a larger ring. Queue: more workers. Gather: more copy threads, or a path that gathers nothing.",
    severity=Severity.WARNING,
    find=_gap,
    alert='sum by (instance) (rate(kvctl_stage_seconds_sum{stage=~"gate|queue|gather"}[5m])) > 2 * sum by (instance) '
    '(rate(kvctl_stage_seconds_count{stage="wire"}[5m]))',
)
