"""What a steady rank holds of its process and of its agent."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvctl.lab.ranks import measure
from kvctl.lab.ranks.steady.worker import Worker
from kvctl.lab.ranks.steady_messages import Mismatch, Usage
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.prefill import PrefillMachine

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def usage(worker: Worker, token: int, strays: list[Mismatch]) -> Usage:
    """Everything that could leak, in one answer."""
    agent, machine = worker.agent, worker.agent.machine
    assert isinstance(machine, DecodeMachine | PrefillMachine)
    targets = _descriptors()
    staging = agent.observe.staging()
    ring, buffers = staging["ring"], staging["buffers"]
    counters = measure.counters(agent.observe.metrics())
    return Usage(
        token=token,
        at_ns=time.monotonic_ns(),
        rss_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES,
        fds=len(targets),
        threads=sum(1 for _ in Path("/proc/self/task").iterdir()),
        sockets=sum(target.startswith("socket:") for target in targets),
        rooms=len(worker.rooms),
        records=len(machine.rooms),
        ring_bytes=ring["size_bytes"] if ring else 0,
        ring_used_bytes=ring["used_bytes"] if ring else 0,
        quarantined_bytes=machine.quarantined_bytes if isinstance(machine, DecodeMachine) else 0,
        buffers_in_use=buffers["pieces_used"] if buffers else 0,
        peers={name: peer.state.value for name, peer in list(machine.peers.items())},
        strays=strays,
        counters={name: sum(by_label.values()) for name, by_label in counters.items()},
    )


def _descriptors() -> list[str]:
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(entry.readlink()))
        except FileNotFoundError:  # the directory's own
            continue
    return targets
