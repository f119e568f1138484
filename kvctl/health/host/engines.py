"""Transfer engines that are installed next to this kvctl, and what their environment says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvctl.health.finding import Severity
from kvctl.health.host.devices import gpu_driver, rdma_devices
from kvctl.health.host.fact import Fact
from kvctl.health.host.view import HostView

_MOONCAKE_CPU = "mooncake-transfer-engine-non-cuda"
_MOONCAKE_CUDA = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
_DEBIAN = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_RDMA_LANES = frozenset({"rc", "rc_x", "rc_v", "rc_mlx5", "rc_verbs", "dc", "dc_x", "dc_mlx5", "ud", "ud_x", "ib"})
_SHARED_LANES = frozenset({"sm", "shm", "cma", "posix", "sysv", "knem", "xpmem"})


def facts(host: HostView, environments: Mapping[str, Mapping[str, str]]) -> Iterator[Fact]:
    """
    Args:
        environments: what agents have in their environment, by name; empty means that none is known.
    """
    yield from _wheels(host)
    yield from _lanes(host, environments or {"this shell": host.environ})
    yield from _mooncake_settings(environments or {"this shell": host.environ})


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


def _mooncake(host: HostView, wheels: Iterable[str]) -> Iterator[Fact]:
    found = list(wheels)
    missing = [library for library in _DEBIAN if not _has_library(host, library)]
    if len(found) > 1:
        yield Fact(
            "Mooncake",
            " and ".join(found),
            "they own the same folder: the last one installed wins, and removing one removes it for all",
            Severity.WARNING,
            f"`pip uninstall -y {' '.join(found)}`, then install the one that fits",
        )
    elif found[0] in _MOONCAKE_CUDA and gpu_driver(host) is None:
        yield Fact(
            "Mooncake",
            f"{found[0]}, and no NVIDIA driver",
            "this wheel loads CUDA while it is imported, and cannot here",
            Severity.WARNING,
            f"`pip uninstall -y {found[0]} && pip install {_MOONCAKE_CPU}`",
        )
    elif found[0] == _MOONCAKE_CPU and gpu_driver(host) is not None:
        yield Fact(
            "Mooncake",
            f"{found[0]}, beside an NVIDIA driver",
            "this wheel moves host memory only: pools on GPUs are refused with it",
            remedy=f"for those, `pip uninstall -y {found[0]} && pip install {_MOONCAKE_CUDA[-1]}`",
        )
    if missing:
        yield Fact(
            "Mooncake",
            f"libraries missing: {', '.join(missing)}",
            "its wheel needs them, and says so only when the engine starts",
            Severity.WARNING,
            f"`apt-get install {' '.join(_DEBIAN[each] for each in missing)}`",
        )


def _has_library(host: HostView, library: str) -> bool:
    """Looks where the loader looks, as far as files tell; asking the loader itself would load it."""
    own = [folder for folder in host.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    told = [
        line.strip()
        for name in host.names("/etc/ld.so.conf.d")
        for line in (host.text(f"/etc/ld.so.conf.d/{name}") or "").splitlines()
        if line.strip().startswith("/")
    ]
    return any(host.path(f"{folder}/{library}").exists() for folder in (*own, *told, *_LIBRARIES))


def _lanes(host: HostView, environments: Mapping[str, Mapping[str, str]]) -> Iterator[Fact]:
    for (tls, devices), whose in _grouped(environments, ("UCX_TLS", "UCX_NET_DEVICES")).items():
        found = [f"{name}={value}" for name, value in (("UCX_TLS", tls), ("UCX_NET_DEVICES", devices)) if value]
        if not found:
            yield Fact("UCX", f"not told ({whose})", "UCX takes the fastest lane that it finds for each pair")
            continue
        text = f"{' '.join(found)} ({whose})"
        unknown = [device for device in _devices(devices) if not _is_device(host, device)]
        if unknown:
            yield Fact(
                "UCX",
                text,
                f"this host has no network device {', '.join(unknown)}, so UCX finds no lane between hosts",
                Severity.WARNING,
                f"set UCX_NET_DEVICES to some of {', '.join(_known_devices(host)) or 'the devices of its host'}, "
                "or unset it",
            )
        elif tls:
            yield _meaning(host, text, {lane.strip() for lane in tls.split(",") if lane.strip()})
        else:
            yield Fact("UCX", text, "UCX uses these devices only")


def _meaning(host: HostView, text: str, lanes: set[str]) -> Fact:
    if next(iter(lanes)).startswith("^") or any(lane.startswith("^") for lane in lanes):
        return Fact("UCX", text, "UCX takes the fastest lane that is not excluded")
    if "all" in lanes:
        return Fact("UCX", text, "UCX takes the fastest lane that it finds for each pair")
    if lanes & _RDMA_LANES and not rdma_devices(host) and not lanes & {"tcp"}:
        return Fact(
            "UCX",
            text,
            "these lanes need an RDMA device, and this host has none: pairs on different hosts find no lane",
            Severity.WARNING,
            "add tcp to UCX_TLS, or unset it",
        )
    if gpu_driver(host) is not None and not any(lane.startswith(("cuda", "gdr")) for lane in lanes):
        return Fact(
            "UCX",
            text,
            "GPU memory cannot be moved without a CUDA lane",
            Severity.WARNING,
            "add cuda_copy and cuda_ipc to UCX_TLS, or unset it",
            "KV_LANE_SLOW",
        )
    if gpu_driver(host) is not None and not lanes & {"cuda", "cuda_ipc"}:
        return Fact(
            "UCX",
            text,
            "GPUs of this host write to each other through host memory, a hundred times slower",
            Severity.WARNING,
            "add cuda_ipc to UCX_TLS, or unset it",
            "KV_LANE_SLOW",
        )
    if not lanes & (_RDMA_LANES | _SHARED_LANES):
        return Fact("UCX", text, "TCP everywhere, also between processes of one host: some 4 GB/s at most")
    return Fact("UCX", text, "UCX takes the fastest of these for each pair")


def _devices(text: str) -> list[str]:
    """Names without ports; "all" and exclusions name nothing that has to be there."""
    if text.startswith("^"):
        return []
    return [name for each in text.split(",") if (name := each.strip().partition(":")[0]) and name != "all"]


def _known_devices(host: HostView) -> list[str]:
    return [*rdma_devices(host), *(name for name in host.names("/sys/class/net") if name != "lo")]


def _is_device(host: HostView, name: str) -> bool:
    return name in rdma_devices(host) or name in host.names("/sys/class/net")


def _mooncake_settings(environments: Mapping[str, Mapping[str, str]]) -> Iterator[Fact]:
    for (folder, framing), whose in _grouped(environments, ("MC_LOG_DIR", "MC_TCP_PROTO")).items():
        if folder:
            yield Fact(
                "Mooncake",
                f"MC_LOG_DIR={folder} ({whose})",
                "ends the process while the engine is imported",
                Severity.WARNING,
                "`unset MC_LOG_DIR`",
            )
        if framing == "1":
            yield Fact(
                "Mooncake",
                f"MC_TCP_PROTO=1 ({whose})",
                "nobody acknowledges bytes with it, so the agent refuses to start",
                Severity.WARNING,
                "`unset MC_TCP_PROTO`",
            )


def _grouped(environments: Mapping[str, Mapping[str, str]], names: tuple[str, str]) -> dict[tuple[str, str], str]:
    """Values -> whose they are, so that agents that agree share a line."""
    owners: dict[tuple[str, str], list[str]] = {}
    for owner, environment in environments.items():
        values = (str(environment.get(names[0]) or ""), str(environment.get(names[1]) or ""))
        owners.setdefault(values, []).append(owner)
    return {
        values: ", ".join(own) if len(own) <= 2 else f"{own[0]} and {len(own) - 1} others"
        for values, own in owners.items()
    }
