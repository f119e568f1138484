"""Network devices and GPUs: what lanes there can be on this host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvctl.health.finding import Severity
from kvctl.health.host.fact import Fact
from kvctl.health.host.view import HostView

_INFINIBAND = "/sys/class/infiniband"


def rdma_devices(host: HostView) -> list[str]:
    return host.names(_INFINIBAND)


def gpu_driver(host: HostView) -> str | None:
    """Version of NVIDIA's driver; None where there is none."""
    text = host.text("/proc/driver/nvidia/version")
    if text is None:
        return None
    return next((word for word in text.split() if word[:1].isdigit() and "." in word), "unknown")


def facts(host: HostView, environments: Mapping[str, Mapping[str, str]] | None = None) -> Iterator[Fact]:
    """
    Args:
        environments: what agents have in their environment, by name.
    """
    yield from _rdma(host)
    yield from _gpu(host)
    yield from _visible(host, environments or {})


def _rdma(host: HostView) -> Iterator[Fact]:
    devices = rdma_devices(host)
    if not devices:
        yield Fact(
            "RDMA", "no device", "transfers use shared memory on this host and TCP between hosts; nothing is wrong"
        )
        return
    ports = [(device, port) for device in devices for port in host.names(f"{_INFINIBAND}/{device}/ports")]
    states = {
        f"{device}:{port}": (host.text(f"{_INFINIBAND}/{device}/ports/{port}/state") or "").rpartition(" ")[2]
        for device, port in ports
    }
    active = [name for name, state in states.items() if state == "ACTIVE"]
    if not any(name.startswith("uverbs") for name in host.names("/dev/infiniband")):
        yield Fact(
            "RDMA",
            f"{', '.join(devices)}, and no /dev/infiniband/uverbs*",
            "the kernel has devices that this container may not open, so engines fall back to TCP",
            Severity.WARNING,
            "start the container with --device=/dev/infiniband --cap-add=IPC_LOCK",
        )
    elif not active:
        yield Fact(
            "RDMA",
            ", ".join(f"{name} {state or 'unknown'}" for name, state in states.items()) or ", ".join(devices),
            "no port is active, so engines fall back to TCP",
            Severity.WARNING,
            "`ibstat` tells why: cable, switch or subnet manager",
        )
    else:
        yield Fact("RDMA", f"active: {', '.join(active)}", "lanes over RDMA are possible")


def _gpu(host: HostView) -> Iterator[Fact]:
    driver = gpu_driver(host)
    if driver is None:
        yield Fact("GPU", "no NVIDIA driver", "KV lies in host memory here")
        return
    if not rdma_devices(host):
        yield Fact("GPU", f"NVIDIA driver {driver}", "GPUs of this host copy to each other over NVLink or PCIe")
    elif "nvidia_peermem" in host.names("/sys/module"):
        yield Fact("GPU", f"NVIDIA driver {driver}, nvidia_peermem", "RDMA devices read and write GPU memory directly")
    else:
        yield Fact(
            "GPU",
            f"NVIDIA driver {driver}, nvidia_peermem not loaded",
            "without it or dma-buf, GPU memory cannot be registered with the RDMA device (errno 14), or is copied "
            "through host memory",
            Severity.WARNING,
            "`modprobe nvidia_peermem`; nothing is to be done where kernel and driver have dma-buf",
            "KV_REGISTER_FAILED",
        )


def _visible(host: HostView, environments: Mapping[str, Mapping[str, str]]) -> Iterator[Fact]:
    """Whether agents see each other's GPUs: mapping the memory of one that is not seen works on some drivers only."""
    told = {name: environment.get("CUDA_VISIBLE_DEVICES") for name, environment in environments.items()}
    seen = {frozenset(value.split(",")) for value in told.values() if value}
    if gpu_driver(host) is None or len(seen) < 2:
        return
    listed = ", ".join(f"{name} {value}" for name, value in sorted(told.items()) if value)
    yield Fact(
        "GPU",
        f"CUDA_VISIBLE_DEVICES differs: {listed}",
        "whether a process can write over NVLink to a GPU that it does not see depends on the driver",
        remedy="if KV_LANE_SLOW says that it cannot, show every agent all GPUs of the host, its own first",
    )
