"""View of the network devices of the agents' hosts, with their rates between two readings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvctl.render import palette
from kvctl.render.view import Column, Kind, Row, View, Width

_NEAR = ("PIX", "PXB", "PHB")

NICS = View(
    "nics",
    (
        Column("host", help="Name of the host."),
        Column("device", "name", help="Port of an RDMA device (mlx5_0:1), or network interface."),
        Column("link", width=Width.NORMAL, help="InfiniBand, RoCE, RDMA (such as EFA), Ethernet or loopback."),
        Column("kind", width=Width.WIDE, help="rdma or interface."),
        Column("state", styles=palette.LINK_STATES, help="active or up, down, or another state of the kernel."),
        Column(
            "gbit_per_s",
            lambda row: _scaled(row["bits_per_s"], 1e9),
            Kind.NUMBER,
            header="GBIT/S",
            help="Speed of the link.",
        ),
        Column("sent_gb_per_s", kind=Kind.RATE, header="OUT GB/S", help="GB/s sent since the reading before."),
        Column("received_gb_per_s", kind=Kind.RATE, header="IN GB/S", help="GB/s received since the reading before."),
        Column(
            "sent", "sent_bytes_total", Kind.BYTES, Width.NORMAL, help="Sent by the host since the device was started."
        ),
        Column(
            "received", "received_bytes_total", Kind.BYTES, Width.NORMAL, help="Received since the device was started."
        ),
        Column(
            "errors",
            lambda row: sum(row["errors"].values()),
            Kind.COUNT,
            help="Faults of cable, port or device so far.",
        ),
        Column(
            "retransmits",
            lambda row: sum(row["retransmits"].values()),
            Kind.COUNT,
            header="RESENT",
            help="RDMA: counters of packets that were lost and sent again. Interfaces have none.",
        ),
        Column("numa_node", kind=Kind.COUNT, header="NUMA", help="NUMA node of its PCI device."),
        Column(
            "gpus", lambda row: near(row["gpus"]), Kind.LIST, Width.NORMAL, help="GPUs below the same PCIe host bridge."
        ),
        Column(
            "ranks",
            kind=Kind.LIST,
            help="Agents that use it, or may: those with source `open devices` choose among several.",
        ),
        Column(
            "source",
            kind=Kind.LIST,
            width=Width.WIDE,
            help="Origin of `ranks`: engine, open devices of the process, settings, or route of the packets.",
        ),
        Column("pci", width=Width.WIDE, help="PCI address."),
        Column("model", width=Width.WIDE, help="Model of an RDMA device, driver of an interface."),
        Column("mtu", kind=Kind.COUNT, width=Width.WIDE, help="Largest packet of an interface, in bytes."),
        Column("interfaces", kind=Kind.LIST, width=Width.WIDE, help="Interfaces of an RDMA port, members of a bond."),
        Column(
            "gids",
            lambda row: [_gid(each) for each in row["gids"]],
            Kind.LIST,
            Width.WIDE,
            help="Addresses of an RDMA port.",
        ),
        Column(
            "distances",
            lambda row: row["gpus"],
            Kind.MAP,
            Width.WIDE,
            help="What is between it and each GPU, as in nvidia-smi topo -m.",
        ),
        Column(
            "faults",
            lambda row: {**row["errors"], **row["retransmits"]},
            Kind.MAP,
            Width.WIDE,
            help="Counters in ERRORS and RESENT.",
        ),
        Column(
            "congestion", kind=Kind.MAP, width=Width.WIDE, help="Counters that grow in a busy network without a fault."
        ),
    ),
    sort=("host", "device"),
    empty="no network devices",
)


def nic_rows(answers: Iterable[Any], before: Iterable[Any] = ()) -> list[dict[str, Any]]:
    """Returns one row per device of each host, with the agents that use it.

    Interfaces of different network namespaces of a host are different devices. Virtual interfaces that are down are
    left out.

    Args:
        answers: answers to `nics` of one reading.
        before: those of the reading before, for the rates.
    """
    earlier = {each["agent"]: each for each in before}
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for answer in answers:
        then = earlier.get(answer["agent"])
        old = {nic["name"]: nic for nic in then["nics"]} if then is not None else {}
        elapsed_ns = answer["at_ns"] - then["at_ns"] if then is not None else 0
        for nic in answer["nics"]:
            rdma = nic["kind"] == "rdma"
            if not rdma and nic["state"] == "down" and nic["pci"] is None and nic["model"] != "bond":
                continue
            row = found.setdefault(
                (answer["host"], "" if rdma else answer["network"], nic["name"]),
                {
                    **nic,
                    "host": answer["host"],
                    "sent_gb_per_s": None,
                    "received_gb_per_s": None,
                    "ranks": [],
                    "source": [],
                },
            )
            for field in ("sent", "received"):
                if row[f"{field}_gb_per_s"] is None:
                    row[f"{field}_gb_per_s"] = _rate(nic, old.get(nic["name"]), f"{field}_bytes_total", elapsed_ns)
            if set(answer["lane"]["devices"]) & {nic["name"], nic["name"].partition(":")[0]}:
                row["ranks"].append(answer["agent"])
                row["source"] = sorted({*row["source"], answer["lane"]["source"]})
    return list(found.values())


def near(gpus: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that the device reaches without leaving its PCIe host bridge, by PCI address."""
    return sorted(gpu for gpu, way in gpus.items() if way in _NEAR)


def _rate(now: Row, before: Row | None, field: str, elapsed_ns: int) -> float | None:
    after, earlier = now[field], None if before is None else before[field]
    if after is None or earlier is None or after < earlier or elapsed_ns <= 0:
        return None
    return float((after - earlier) / elapsed_ns)


def _scaled(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor


def _gid(gid: Row) -> str:
    return f"{gid['index']}={gid['gid']} {gid['kind']}"
