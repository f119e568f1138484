"""Checks network devices, GPUs, installed transfer engines and their environment variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvctl.health.finding import Severity
from kvctl.health.host.view import Fact, HostView
from kvctl_agent.host.nics import HostNics
from kvctl_agent.host.processors import engine_threads

if TYPE_CHECKING:
    from kvctl_agent.contract.snapshots import Nic

Environments = Mapping[str, Mapping[str, str]]
"""Environment variables of agents, by the agent's name."""

_INFINIBAND = "/sys/class/infiniband"
_MOONCAKE_CPU = "mooncake-transfer-engine-non-cuda"
_MOONCAKE_CUDA = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
_DEBIAN = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_RDMA_LANES = frozenset({"rc", "rc_x", "rc_v", "rc_mlx5", "rc_verbs", "dc", "dc_x", "dc_mlx5", "ud", "ud_x", "ib"})
_MOST_THREADS_A_CORE = 2  # two instances on one host, each of which assumes that it has all cores
_SHARED_LANES = frozenset({"sm", "shm", "cma", "posix", "sysv", "knem", "xpmem"})


# ---- devices ---------------------------------------------------------------------------------------------------


def rdma_devices(host: HostView) -> list[str]:
    return host.names(_INFINIBAND)


def gpu_driver(host: HostView) -> str | None:
    """Returns the version of NVIDIA's driver; None if no driver is loaded."""
    text = host.text("/proc/driver/nvidia/version")
    if text is None:
        return None
    return next((word for word in text.split() if word[:1].isdigit() and "." in word), "unknown")


def device_facts(host: HostView, environments: Environments | None = None) -> Iterator[Fact]:
    yield _rdma(host)
    yield _gpu(host)
    yield from _visible_gpus(host, environments or {})


def _rdma(host: HostView) -> Fact:
    devices = rdma_devices(host)
    if not devices:
        return Fact("RDMA", "no device", "transfers use shared memory on this host and TCP between hosts; this is fine")
    ports = [nic for nic in HostNics(host.root).read() if nic["kind"] == "rdma"]
    active = [_port(nic) for nic in ports if nic["state"] == "active"]
    others = [f"{nic['name']} {nic['state'] or 'unknown'}" for nic in ports if nic["state"] != "active"]
    if not any(name.startswith("uverbs") for name in host.names("/dev/infiniband")):
        return Fact(
            "RDMA",
            f"{', '.join(devices)}, and no /dev/infiniband/uverbs*",
            "the kernel has devices that this container may not open, so engines fall back to TCP",
            Severity.WARNING,
            "start the container with --device=/dev/infiniband --cap-add=IPC_LOCK",
        )
    if not active:
        return Fact(
            "RDMA",
            ", ".join(others or devices),
            "no port is active, so engines fall back to TCP",
            Severity.WARNING,
            "`ibstat` shows why: cable, switch or subnet manager",
        )
    found = f"active: {', '.join(active)}" + (f"; not active: {', '.join(others)}" if others else "")
    return Fact(
        "RDMA", found, "lanes over RDMA are possible; kvctl nics shows rates, faults and the ranks that use them"
    )


def _port(nic: Nic) -> str:
    bits = nic["bits_per_s"]
    return nic["name"] if bits is None else f"{nic['name']} ({nic['link']}, {bits / 1e9:g} Gbit/s)"


def _gpu(host: HostView) -> Fact:
    driver = gpu_driver(host)
    if driver is None:
        return Fact("GPU", "no NVIDIA driver", "KV is in host memory here")
    if not rdma_devices(host):
        return Fact("GPU", f"NVIDIA driver {driver}", "GPUs of this host copy to each other over NVLink or PCIe")
    if "nvidia_peermem" in host.names("/sys/module"):
        return Fact("GPU", f"NVIDIA driver {driver}, nvidia_peermem", "RDMA devices read and write GPU memory directly")
    return Fact(
        "GPU",
        f"NVIDIA driver {driver}, nvidia_peermem not loaded",
        "without it or dma-buf, GPU memory cannot be registered with the RDMA device (errno 14), or is copied through "
        "host memory",
        Severity.WARNING,
        "`modprobe nvidia_peermem`; not necessary if kernel and driver have dma-buf",
        "KV_REGISTER_FAILED",
    )


def _visible_gpus(host: HostView, environments: Environments) -> Iterator[Fact]:
    """Yields a fact if CUDA_VISIBLE_DEVICES differs between agents.

    Only some drivers can map the memory of a GPU that is not visible to the process.
    """
    visible = {name: environment.get("CUDA_VISIBLE_DEVICES") for name, environment in environments.items()}
    if gpu_driver(host) is None or len({frozenset(value.split(",")) for value in visible.values() if value}) < 2:
        return
    listed = ", ".join(f"{name} {value}" for name, value in sorted(visible.items()) if value)
    yield Fact(
        "GPU",
        f"CUDA_VISIBLE_DEVICES differs: {listed}",
        "whether a process can write over NVLink to a GPU that it does not see depends on the driver",
        remedy="if KV_LANE_SLOW reports that it cannot, show every agent all GPUs of the host, its own first",
    )


# ---- engines ---------------------------------------------------------------------------------------------------


def engine_facts(host: HostView, environments: Environments) -> Iterator[Fact]:
    """Checks the transfer engines installed in this Python, and their variables in the agents' environments.

    Without agents, the environment of this process is checked.
    """
    environments = environments or {"this shell": host.environ}
    yield from _wheels(host)
    for (tls, devices), owners in _grouped(environments, ("UCX_TLS", "UCX_NET_DEVICES")).items():
        yield _ucx(host, tls, devices, owners)
    yield from _mooncake_settings(environments)


class NixlWriter(NamedTuple):
    """A prefill agent with NIXL and a KV pool in host memory. `native`: whether native code posts its writes."""

    name: str
    threads: int
    ranks: int
    native: bool


def thread_facts(cores: int, writers: Iterable[NixlWriter]) -> Iterator[Fact]:
    """Checks the number of NIXL's threads of the prefill agents of this host, if there are any, against its cores."""
    writers = list(writers)
    if not writers:
        return
    total = sum(writer.threads for writer in writers)
    found = f"{total} in {len(writers)} agent{'s' * (len(writers) != 1)}, {cores} core{'s' * (cores != 1)}"
    without = [
        (each, automatic)
        for each in writers
        if not each.threads and each.native and (automatic := engine_threads(cores, each.ranks))
    ]
    if total > _MOST_THREADS_A_CORE * cores:
        yield Fact(
            "NIXL threads",
            found,
            "large writes take turns, and one peer that does not answer keeps all cores busy",
            Severity.WARNING,
            "remove num_threads from transport_params, so that each agent chooses it, or lower it",
        )
    elif without:
        first, automatic = without[0]
        names = first.name if len(without) == 1 else f"{first.name} and {len(without) - 1} others"
        yield Fact(
            "NIXL threads",
            f"{found}; none in {names}",
            "one core copies all bytes of such an agent, at a fraction of the rate of several",
            Severity.WARNING,
            f"remove num_threads=0 from transport_params; automatic: {automatic}",
        )
    else:
        yield Fact("NIXL threads", found, "large writes are divided among them" if total else "too few cores for any")


def _wheels(host: HostView) -> Iterator[Fact]:
    packages = host.packages()
    nixl = [f"{name} {version}" for name, version in sorted(packages.items()) if name.split("-")[0] == "nixl"]
    mooncake = [name for name in (_MOONCAKE_CPU, *_MOONCAKE_CUDA) if name in packages]
    installed = [*nixl, *(f"{name} {packages[name]}" for name in mooncake)]
    if not installed:
        yield Fact(
            "engines",
            "neither NIXL nor Mooncake in this Python",
            "workers that share this Python can only use the loopback transport, between processes of one host",
        )
        return
    yield Fact("engines", ", ".join(installed), "in this Python; a worker with another Python has its own")
    if mooncake:
        yield from _mooncake(host, mooncake)


def _mooncake(host: HostView, wheels: Sequence[str]) -> Iterator[Fact]:
    if len(wheels) > 1:
        yield Fact(
            "Mooncake",
            " and ".join(wheels),
            "they use the same folder: the last one installed wins, and removing one removes it for all",
            Severity.WARNING,
            f"`pip uninstall -y {' '.join(wheels)}`, then install the right one",
        )
    elif wheels[0] in _MOONCAKE_CUDA and gpu_driver(host) is None:
        yield Fact(
            "Mooncake",
            f"{wheels[0]}, and no NVIDIA driver",
            "this wheel loads CUDA when it is imported, which fails here",
            Severity.WARNING,
            f"`pip uninstall -y {wheels[0]} && pip install {_MOONCAKE_CPU}`",
        )
    elif wheels[0] == _MOONCAKE_CPU and gpu_driver(host) is not None:
        yield Fact(
            "Mooncake",
            f"{wheels[0]}, with an NVIDIA driver",
            "this wheel transfers host memory only and refuses pools on GPUs",
            remedy=f"for those, `pip uninstall -y {wheels[0]} && pip install {_MOONCAKE_CUDA[-1]}`",
        )
    missing = [library for library in _DEBIAN if not _has_library(host, library)]
    if missing:
        yield Fact(
            "Mooncake",
            f"libraries missing: {', '.join(missing)}",
            "its wheel needs them, and reports it only when the engine starts",
            Severity.WARNING,
            f"`apt-get install {' '.join(_DEBIAN[each] for each in missing)}`",
        )


def _has_library(host: HostView, library: str) -> bool:
    """Returns whether a shared library is in one of the loader's directories; does not load it."""
    own = [folder for folder in host.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    configured = [
        line.strip()
        for name in host.names("/etc/ld.so.conf.d")
        for line in (host.text(f"/etc/ld.so.conf.d/{name}") or "").splitlines()
        if line.strip().startswith("/")
    ]
    return any(host.path(f"{folder}/{library}").exists() for folder in (*own, *configured, *_LIBRARIES))


def _ucx(host: HostView, tls: str, devices: str, owners: str) -> Fact:
    settings = [f"{name}={value}" for name, value in (("UCX_TLS", tls), ("UCX_NET_DEVICES", devices)) if value]
    if not settings:
        return Fact("UCX", f"not configured ({owners})", "UCX uses the fastest lane that it finds for each pair")
    found = f"{' '.join(settings)} ({owners})"
    interfaces = [name for name in host.names("/sys/class/net") if name != "lo"]
    unknown = [
        device
        for device in _device_names(devices)
        if device not in rdma_devices(host) and device not in host.names("/sys/class/net")
    ]
    if unknown:
        choices = ", ".join([*rdma_devices(host), *interfaces])
        return Fact(
            "UCX",
            found,
            f"this host has no network device {', '.join(unknown)}, so UCX finds no lane between hosts",
            Severity.WARNING,
            f"set UCX_NET_DEVICES to some of {choices or 'the devices of its host'}, or unset it",
        )
    if not tls:
        return Fact("UCX", found, "UCX uses these devices only")
    means, remedy, code = _ucx_lanes(host, {lane.strip() for lane in tls.split(",") if lane.strip()})
    return Fact("UCX", found, means, Severity.WARNING if remedy else Severity.INFO, remedy, code)


def _ucx_lanes(host: HostView, lanes: set[str]) -> tuple[str, str, str]:
    """Returns consequence, remedy and health code of a value of UCX_TLS."""
    gpu = gpu_driver(host) is not None
    if any(lane.startswith("^") for lane in lanes):
        return "UCX uses the fastest lane that is not excluded", "", ""
    if "all" in lanes:
        return "UCX uses the fastest lane that it finds for each pair", "", ""
    if lanes & _RDMA_LANES and not rdma_devices(host) and "tcp" not in lanes:
        return (
            "these lanes need an RDMA device, and this host has none: pairs on different hosts find no lane",
            "add tcp to UCX_TLS, or unset it",
            "",
        )
    if gpu and not any(lane.startswith(("cuda", "gdr")) for lane in lanes):
        return (
            "GPU memory cannot be transferred without a CUDA lane",
            "add cuda_copy and cuda_ipc to UCX_TLS, or unset it",
            "KV_LANE_SLOW",
        )
    if gpu and not lanes & {"cuda", "cuda_ipc"}:
        return (
            "GPUs of this host write to each other through host memory, a hundred times slower",
            "add cuda_ipc to UCX_TLS, or unset it",
            "KV_LANE_SLOW",
        )
    if not lanes & (_RDMA_LANES | _SHARED_LANES):
        return "TCP everywhere, also between processes of one host: at most about 4 GB/s", "", ""
    return "UCX uses the fastest of these for each pair", "", ""


def _device_names(text: str) -> list[str]:
    """Returns the devices that a value of UCX_NET_DEVICES requires, without ports; none for "all" and exclusions."""
    if text.startswith("^"):
        return []
    return [name for each in text.split(",") if (name := each.strip().partition(":")[0]) and name != "all"]


def _mooncake_settings(environments: Environments) -> Iterator[Fact]:
    for (folder, framing), owners in _grouped(environments, ("MC_LOG_DIR", "MC_TCP_PROTO")).items():
        if folder:
            yield Fact(
                "Mooncake",
                f"MC_LOG_DIR={folder} ({owners})",
                "ends the process when the engine is imported",
                Severity.WARNING,
                "`unset MC_LOG_DIR`",
            )
        if framing == "1":
            yield Fact(
                "Mooncake",
                f"MC_TCP_PROTO=1 ({owners})",
                "received bytes are not acknowledged with it, so the agent refuses to start",
                Severity.WARNING,
                "`unset MC_TCP_PROTO`",
            )


def _grouped(environments: Environments, names: tuple[str, str]) -> dict[tuple[str, str], str]:
    """Groups environments by the values of two variables, so that agents with equal values share a line.

    Returns:
        For each pair of values ("" if unset), the names of its agents as text.
    """
    owners: dict[tuple[str, str], list[str]] = {}
    for owner, environment in environments.items():
        values = (str(environment.get(names[0]) or ""), str(environment.get(names[1]) or ""))
        owners.setdefault(values, []).append(owner)
    return {
        values: ", ".join(group) if len(group) <= 2 else f"{group[0]} and {len(group) - 1} others"
        for values, group in owners.items()
    }
