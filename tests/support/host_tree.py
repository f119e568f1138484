"""Trees of /sys as of hosts with RDMA devices, for tests on machines without: written by hand, in drivers' forms."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ETH_COUNTERS = (
    "rx_bytes",
    "tx_bytes",
    "rx_packets",
    "tx_packets",
    "rx_errors",
    "tx_errors",
    "rx_dropped",
    "tx_dropped",
)
MLX5_COUNTERS = (
    "port_xmit_data",
    "port_rcv_data",
    "port_xmit_packets",
    "port_rcv_packets",
    "port_xmit_wait",
    "port_xmit_discards",
    "port_rcv_errors",
    "symbol_error",
    "link_downed",
    "link_error_recovery",
)
MLX5_HW_COUNTERS = (
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "np_cnp_sent",
    "rp_cnp_handled",
    "np_ecn_marked_roce_packets",
    "req_cqe_error",
    "lifespan",
)
EFA_COUNTERS = ("tx_bytes", "rx_bytes", "tx_pkts", "rx_pkts", "rdma_write_bytes", "retrans_pkts", "rx_drops")
IRDMA_COUNTERS = (
    "ip4OutOctets",
    "ip6OutOctets",
    "ip4InOctets",
    "ip6InOctets",
    "ip4OutPkts",
    "ip6OutPkts",
    "tcpRetransSegs",
    "cnpSent",
)
LINK_LOCAL = "fe80:0000:0000:0000:a288:c2ff:fe00:{:04x}"


class HostTree:
    """A directory with a `sys` of its own; a test points the reader at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sys = root / "sys"

    def write(self, path: str, text: object) -> None:
        file = self.sys / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def link(self, path: str, target: str) -> None:
        link = self.sys / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.sys / target)

    def node(self, number: int, cores: str) -> None:
        self.write(f"devices/system/node/node{number}/cpulist", cores)

    def pci(self, place: str, node: int, driver: str) -> str:
        """Adds a PCI device; `place` is its path below /sys/devices. Returns its address."""
        address = place.rpartition("/")[2]
        self.write(f"devices/{place}/numa_node", node)
        self.write(f"devices/{place}/uevent", f"DRIVER={driver}\nPCI_SLOT_NAME={address}")
        self.link(f"bus/pci/devices/{address}", f"devices/{place}")
        self.link(f"bus/pci/drivers/{driver}/{address}", f"devices/{place}")
        self.write(f"bus/pci/drivers/{driver}/bind", "")
        return address

    def interface(self, name: str, place: str = "", *, mbits: int = 400_000, state: str = "up", kind: int = 1) -> None:
        """Adds a network interface; of the PCI device at `place`, or a virtual one."""
        base = f"class/net/{name}"
        for file, text in (("operstate", state), ("speed", mbits), ("mtu", 9000), ("type", kind)):
            self.write(f"{base}/{file}", text)
        for counter in ETH_COUNTERS:
            self.write(f"{base}/statistics/{counter}", 0)
        if place:
            self.link(f"{base}/device", f"devices/{place}")
            (self.sys / f"devices/{place}/net/{name}").mkdir(parents=True, exist_ok=True)

    def rdma(
        self,
        device: str,
        place: str,
        *,
        link: str = "Ethernet",
        rate: str = "400 Gb/sec (4X NDR)",
        model: str = "MT4129",
        counters: Iterable[str] = MLX5_COUNTERS,
        hw_counters: Iterable[str] = MLX5_HW_COUNTERS,
    ) -> None:
        """Adds a device with one port at a PCI device that exists."""
        base, port = f"class/infiniband/{device}", f"class/infiniband/{device}/ports/1"
        number = len(list((self.sys / "class/infiniband").glob("*"))) if (self.sys / "class/infiniband").exists() else 0
        self.link(f"{base}/device", f"devices/{place}")
        self.write(f"{base}/node_guid", "a088:c203:0000:0001")
        if model:
            self.write(f"{base}/hca_type", model)
        for file, text in (("state", "4: ACTIVE"), ("phys_state", "5: LinkUp"), ("rate", rate), ("link_layer", link)):
            self.write(f"{port}/{file}", text)
        for folder, names in (("counters", counters), ("hw_counters", hw_counters)):
            for name in names:
                self.write(f"{port}/{folder}/{name}", 0)
        for index in range(8):
            self.gid(device, index, "0000:0000:0000:0000:0000:0000:0000:0000")
        self.write(f"class/infiniband_verbs/uverbs{number}/ibdev", device)

    def gid(self, device: str, index: int, gid: str, kind: str = "", interface: str = "") -> None:
        """Sets an entry of the GID table; the kernel cannot read types and interfaces of entries that are not set."""
        port = f"class/infiniband/{device}/ports/1"
        self.write(f"{port}/gids/{index}", gid)
        if kind:
            self.write(f"{port}/gid_attrs/types/{index}", kind)
        if interface:
            self.write(f"{port}/gid_attrs/ndevs/{index}", interface)

    def roce_gids(self, device: str, interface: str, address: str = "", number: int = 1) -> None:
        """Sets the GIDs of a RoCE port as mlx5 does: link-local and, if given in hexadecimal, of an IPv4 address."""
        for offset, gid in enumerate(
            [LINK_LOCAL.format(number), *([f"0000:0000:0000:0000:0000:ffff:{address}"] if address else [])]
        ):
            self.gid(device, 2 * offset, gid, "IB/RoCE v1", interface)
            self.gid(device, 2 * offset + 1, gid, "RoCE v2", interface)

    def set(self, device: str, **files: object) -> None:
        """Changes files of a port or of an interface: state, rate, speed, counters."""
        base = self.sys / f"class/infiniband/{device}/ports/1"
        base = base if base.exists() else self.sys / f"class/net/{device}"
        for name, value in files.items():
            places = [folder / name for folder in (base, base / "counters", base / "hw_counters", base / "statistics")]
            (file,) = (place for place in places if place.exists())
            file.write_text(f"{value}\n")

    def carry(self, device: str, nbytes: int) -> None:
        """Adds bytes sent to the counters of a port or of an interface."""
        rdma = (self.sys / f"class/infiniband/{device}").exists()
        base = self.sys / (f"class/infiniband/{device}/ports/1/counters" if rdma else f"class/net/{device}/statistics")
        for name, added in (
            (("port_xmit_data", nbytes // 4), ("port_xmit_packets", nbytes // 4096))
            if rdma
            else (("tx_bytes", nbytes), ("tx_packets", nbytes // 1448))
        ):
            (base / name).write_text(f"{int((base / name).read_text()) + added}\n")


_SWITCH = "pci0000:{bus}0/0000:{bus}0:01.0/0000:{bus}1:00.0/0000:{bus}2:0{port}.0/0000:{bus}{device}:00.0"


def rail(number: int) -> str:
    """Place of rail `number` of `eight_rails`, below one PCIe switch with GPU `number`."""
    return _SWITCH.format(bus=number + 1, port=0, device=3)


def gpu(number: int) -> str:
    """Place of GPU `number` of `eight_rails`."""
    return _SWITCH.format(bus=number + 1, port=1, device=4)


def eight_rails(root: Path) -> HostTree:
    """Adds a host with 8 RoCE rails, each below a switch with a GPU, two NUMA nodes, and eth0 for the rest."""
    tree = HostTree(root)
    tree.node(0, "0-47")
    tree.node(1, "48-95")
    for number in range(8):
        node = number // 4
        tree.pci(rail(number), node, "mlx5_core")
        tree.pci(gpu(number), node, "nvidia")
        tree.interface(f"rail{number}", rail(number))
        tree.rdma(f"mlx5_{number}", rail(number))
        tree.roce_gids(f"mlx5_{number}", f"rail{number}", f"0a{number:02x}:0103", number + 1)
    tree.pci("pci0000:00/0000:00:1f.0/0000:02:00.0", 0, "bnxt_en")
    tree.interface("eth0", "pci0000:00/0000:00:1f.0/0000:02:00.0", mbits=25_000)
    tree.interface("lo", state="unknown", kind=772)
    return tree


def bonded_roce(root: Path) -> HostTree:
    """Adds a host with one card of two ports that are bonded to one RoCE device, on one NUMA node, without GPUs."""
    tree = HostTree(root)
    tree.node(0, "0-31")
    for port in range(2):
        place = f"pci0000:40/0000:40:01.0/0000:41:00.{port}"
        tree.pci(place, -1, "mlx5_core")
        tree.interface(f"ens1f{port}np{port}", place, mbits=100_000)
    tree.interface("bond0", mbits=200_000)
    tree.write("class/net/bond0/bonding/slaves", "ens1f0np0 ens1f1np1")
    tree.rdma("mlx5_bond_0", "pci0000:40/0000:40:01.0/0000:41:00.0", rate="100 Gb/sec (4X EDR)", model="MT4125")
    tree.roce_gids("mlx5_bond_0", "bond0", "0a00:0207")
    return tree


def infiniband_and_ethernet(root: Path) -> HostTree:
    """Adds a host with one InfiniBand port with IPoIB, and an Ethernet card whose RDMA device (irdma) is not in use."""
    tree = HostTree(root)
    tree.node(0, "0-15")
    tree.pci("pci0000:20/0000:20:01.0/0000:21:00.0", 0, "mlx5_core")
    tree.interface("ib0", "pci0000:20/0000:20:01.0/0000:21:00.0", mbits=200_000, kind=32)
    tree.rdma(
        "mlx5_0", "pci0000:20/0000:20:01.0/0000:21:00.0", link="InfiniBand", rate="200 Gb/sec (4X HDR)", model="MT4123"
    )
    tree.gid("mlx5_0", 0, "fe80:0000:0000:0000:b83f:d203:0021:4c5e", "IB/RoCE v1")
    tree.pci("pci0000:00/0000:00:02.0/0000:03:00.0", 0, "ice")
    tree.interface("eno1", "pci0000:00/0000:00:02.0/0000:03:00.0", mbits=25_000)
    tree.rdma(
        "irdma0",
        "pci0000:00/0000:00:02.0/0000:03:00.0",
        rate="25 Gb/sec (1X EDR)",
        model="",
        counters=(),
        hw_counters=IRDMA_COUNTERS,
    )
    return tree


def efa(root: Path) -> HostTree:
    """Adds a host with two EFA devices, which have neither a link layer nor counters of InfiniBand, and a GPU."""
    tree = HostTree(root)
    tree.node(0, "0-95")
    tree.pci("pci0000:50/0000:50:01.0/0000:51:00.0", 0, "nvidia")
    for number in range(2):
        place = f"pci0000:{50 + 10 * number}/0000:{50 + 10 * number}:02.0/0000:{52 + 10 * number}:00.0"
        tree.pci(place, 0, "efa")
        tree.rdma(
            f"rdmap{52 + 10 * number}s0",
            place,
            link="Unspecified",
            rate="100 Gb/sec (4X EDR)",
            model="",
            counters=(),
            hw_counters=EFA_COUNTERS,
        )
        tree.gid(f"rdmap{52 + 10 * number}s0", 0, f"fe80:0000:0000:0000:0e8a:22ff:fe00:000{number + 1}", "IB/RoCE v1")
    return tree
