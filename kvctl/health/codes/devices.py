"""GPUs that failed: a kernel or the driver, of an agent's own copies or of its engine's forwards."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.health.codes.failures import Failed, failed_lately
from kvctl.health.codes.formatting import counted
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Snapshot
from kvctl.render.units import duration


def _device(snapshot: Snapshot) -> Iterator[Finding]:
    by_rank: dict[str, list[Failed]] = {}
    for failed in snapshot.once(failed_lately).get("KV_DEVICE", ()):
        by_rank.setdefault(failed.rank, []).append(failed)
    for rank, failures in by_rank.items():
        latest = failures[0]
        yield Finding(
            code="KV_DEVICE",
            severity=Severity.CRITICAL,
            subject=rank,
            agents=tuple(dict.fromkeys((rank, *latest.known_to))),
            since_ns=latest.ago_ns,
            weight=len(failures),
            evidence={
                "failed_rooms": len(failures),
                "latest_room": latest.room,
                "latest_ago_ns": latest.ago_ns,
                "latest": latest.text,
            },
            cause=f"the GPU of {rank} or its driver failed {counted(len(failures), 'room')}, last "
            f"{duration(latest.ago_ns)} ago: {latest.text}",
            remedy=f"`kvctl rooms show {latest.room}` shows which copy it was; `dmesg | grep -i xid` on the host of "
            f"{rank} tells a fault of the GPU from one of a kernel; then restart that worker: after most of these "
            "errors its process cannot use the GPU any more",
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
