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
        Column("device", help="Port of an RDMA device (mlx5_0:1), or network interface.", path="name"),
        Column(
            "link",
            width=Width.NORMAL,
            help="InfiniBand, RoCE, EFA, RDMA (another without a link layer), Ethernet or loopback.",
        ),
        Column("kind", width=Width.WIDE, help="rdma or interface."),
        Column("state", help="active or up, down, or another state of the kernel.", styles=palette.LINK_STATES),
        Column(
            "gbit_per_s",
            Kind.NUMBER,
            help="Speed of the link.",
            path=lambda row: None if row["bits_per_s"] is None else row["bits_per_s"] / 1e9,
            header="GBIT/S",
        ),
        Column("sent_gb_per_s", Kind.RATE, help="GB/s sent since the reading before.", header="OUT GB/S"),
        Column("received_gb_per_s", Kind.RATE, help="GB/s received since the reading before.", header="IN GB/S"),
        Column(
            "sent", Kind.BYTES, Width.NORMAL, "Sent by the host since the device was started.", path="sent_bytes_total"
        ),
        Column(
            "received", Kind.BYTES, Width.NORMAL, "Received since the device was started.", path="received_bytes_total"
        ),
        Column(
            "errors",
            Kind.COUNT,
            help="Faults of cable, port or device so far.",
            path=lambda row: sum(row["errors"].values()),
        ),
        Column(
            "retransmits",
            Kind.COUNT,
            help="RDMA: counters of packets that were lost and sent again. Interfaces have none.",
            path=lambda row: sum(row["retransmits"].values()),
            header="RESENT",
        ),
        Column("numa_node", Kind.COUNT, help="NUMA node of its PCI device.", header="NUMA"),
        Column(
            "gpus", Kind.LIST, Width.NORMAL, "GPUs below the same PCIe host bridge.", path=lambda row: near(row["gpus"])
        ),
        Column(
            "ranks",
            Kind.LIST,
            help="Agents that use it, or may: those with source `open devices` choose among several.",
        ),
        Column(
            "source",
            Kind.LIST,
            Width.WIDE,
            "Origin of `ranks`: engine, open devices of the process, settings, or route of the packets.",
        ),
        Column("pci", width=Width.WIDE, help="PCI address."),
        Column("model", width=Width.WIDE, help="Model of an RDMA device, driver of an interface."),
        Column("mtu", Kind.COUNT, Width.WIDE, "Largest packet of an interface, in bytes."),
        Column("interfaces", Kind.LIST, Width.WIDE, "Interfaces of an RDMA port, members of a bond."),
        Column(
            "gids",
            Kind.LIST,
            Width.WIDE,
            "Addresses of an RDMA port.",
            path=lambda row: [f"{gid['index']}={gid['gid']} {gid['kind']}" for gid in row["gids"]],
        ),
        Column(
            "distances",
            Kind.MAP,
            Width.WIDE,
            "What is between it and each GPU, as in nvidia-smi topo -m.",
            path=lambda row: row["gpus"],
        ),
        Column(
            "faults",
            Kind.MAP,
            Width.WIDE,
            "Counters in ERRORS and RESENT.",
            path=lambda row: {**row["errors"], **row["retransmits"]},
        ),
        Column("congestion", Kind.MAP, Width.WIDE, "Counters that grow in a busy network without a fault."),
    ),
    sort=("host", "device"),
    empty="no network devices",
)


def nic_rows(answers: Iterable[Any], before: Iterable[Any] = ()) -> list[dict[str, Any]]:
    """Returns one row per device of each host, with the agents that use it.

    Interfaces of different network namespaces of a host are different devices. Virtual interfaces that are down are
    left out.
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
