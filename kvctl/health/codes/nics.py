"""Health codes about network devices: ports that are down or idle, NUMA nodes, addresses, faults, the wrong network."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvctl.health.answers import NO_ROW, Row, amount, counts, inner, number, numbers, rows, text, texts
from kvctl.health.finding import Finding, Severity, counted, health_code, listed
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import percent, size

_NEAR = ("PIX", "PXB")
_FEW_RAILS = 2  # UCX divides a write among at most two devices, unless it is told otherwise
_MOVED = 64 << 20
_IDLE_SHARE = 0.01
_OTHER_SHARE = 0.5
_MIN_SIBLINGS = 3
_ODD_SHARE = 1 / 3
_LOST_SHARE = 1e-3
_MIN_LOST = 100
_LOST_SHARE_TCP = 0.01
_MIN_SEGMENTS = 1000


# ---- facts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Port:
    """A network device of a host, in the reading of one of its agents.

    Attributes:
        network: network namespace of an interface; "" for an RDMA port, which all of them share.
        before: the same device in the previous reading of the same agent; None if there is none.
        users: agents that must use it, see `_rails`, in the order of their names.
        choosers: agents that must or may use it.
    """

    host: str
    name: str
    network: str
    row: Row
    before: Row | None
    users: list[Agent] = field(default_factory=list)
    choosers: list[Agent] = field(default_factory=list)

    @property
    def subject(self) -> str:
        return f"{self.host} {self.name}"

    @property
    def is_rdma(self) -> bool:
        return text(self.row, "kind") == "rdma"

    @property
    def is_up(self) -> bool:
        return text(self.row, "state") in {"active", "up"}

    @property
    def moved(self) -> float | None:
        """Bytes sent and received since the previous reading; None if unknown."""
        return (
            None if self.before is None else _growth(self.row, self.before, "sent_bytes_total", "received_bytes_total")
        )

    def grown(self, group: str) -> dict[str, int]:
        """Returns by how much the counters of a group grew since the previous reading, of those that did."""
        if self.before is None:
            return {}
        earlier = counts(self.before, group)
        return {
            name: round(more)
            for name, value in counts(self.row, group).items()
            if (more := value - earlier.get(name, 0)) > 0
        }


@dataclass(frozen=True)
class Host:
    """The network devices of a host by network namespace and name, its agents, and the ports of `_rails` by agent."""

    name: str
    ports: Mapping[tuple[str, str], Port]
    agents: Sequence[Agent]
    rails: dict[str, list[Port]] = field(default_factory=dict)

    def rdma(self) -> list[Port]:
        return [port for port in self.ports.values() if port.is_rdma]

    def siblings(self, port: Port) -> list[Port]:
        """Returns the RDMA ports of the same model and link, `port` included."""
        alike = [text(port.row, key) for key in ("link", "model")]
        return [each for each in self.rdma() if [text(each.row, key) for key in ("link", "model")] == alike]


def nics_of(agent: Agent | None) -> Row:
    """Returns an agent's answer to `nics`; an empty one if it gave none."""
    return NO_ROW if agent is None else inner(agent.answer.data, "nics")


def hosts(snapshot: Snapshot) -> Mapping[str, Host]:
    """Returns the hosts whose agents answered `nics`, by name."""
    found: dict[str, tuple[dict[tuple[str, str], Port], list[Agent]]] = {}
    for agent in snapshot.agents.values():
        answer = nics_of(agent)
        if not answer:
            continue
        earlier = {text(row, "name"): row for row in rows(nics_of(snapshot.earlier(agent.name)).get("nics"))}
        ports, agents = found.setdefault(text(answer, "host"), ({}, []))
        agents.append(agent)
        for row in rows(answer.get("nics")):
            name, network = text(row, "name"), "" if text(row, "kind") == "rdma" else text(answer, "network")
            ports.setdefault((network, name), Port(text(answer, "host"), name, network, row, earlier.get(name)))
    complete = {name: Host(name, ports, agents) for name, (ports, agents) in found.items()}
    for host in complete.values():
        for agent in host.agents:
            devices = set(texts(inner(nics_of(agent), "lane"), "devices"))
            choice = [port for port in host.rdma() if {port.name, port.name.partition(":")[0]} & devices]
            host.rails[agent.name] = _rails(choice, text(nics_of(agent), "gpu"))
            for port in choice:
                port.choosers.append(agent)
            for port in host.rails[agent.name]:
                port.users.append(agent)
    return complete


def _rails(ports: list[Port], gpu: str) -> list[Port]:
    """Returns the ports that must carry the bytes of a rank between hosts, as far as that is certain.

    Those are the ports of its lane if there are at most two; if the engine may choose among more, the ones next to the
    rank's GPU. Otherwise nothing is certain.
    """
    if len(ports) <= _FEW_RAILS:
        return ports
    return [port for port in ports if gpu and inner(port.row, "gpus").get(gpu) in _NEAR]


def between_hosts(snapshot: Snapshot) -> Mapping[str, float]:
    """Returns the bytes that each rank has sent or received over the network since the previous snapshot.

    Left out are ranks of which that is not known, because some of their peers are on their own host. Bytes of path
    direct go over NVLink.
    """
    found = {}
    for agent in snapshot.agents.values():
        peers = [row for row in agent.peers if text(row, "state") in {"ready", "suspect"}]
        if peers and not any(row.get("same_host") is not False or _same_name(row, agent) for row in peers):
            total = snapshot.since_before(agent.name, "kvctl_part_bytes_total") or 0.0
            direct = snapshot.since_before(agent.name, "kvctl_part_bytes_total", path="direct") or 0.0
            found[agent.name] = total - direct
    return found


def _same_name(row: Row, agent: Agent) -> bool:
    return text(row, "peer_host") == text(agent.status, "host") != ""


def _growth(now: Row, before: Row, *keys: str) -> float | None:
    """Returns the growth of counters together; None if one is missing or has gone down."""
    pairs = [(number(now, key), number(before, key)) for key in keys]
    if any(after is None or earlier is None or after < earlier for after, earlier in pairs):
        return None
    return sum((after or 0) - (earlier or 0) for after, earlier in pairs)


def _names(agents: Iterable[Agent]) -> list[str]:
    return sorted(agent.name for agent in agents)


def _shows(host: str, options: str = "") -> str:
    command = f"kvctl nics -l {shlex.quote(f'host={host}')} {options}"
    return f"`{command.rstrip()}`"


# ---- links -----------------------------------------------------------------------------------------------------


@health_code(
    "KV_NIC_DOWN",
    Severity.WARNING,
    "transport",
    sees="one rank is slower than the others, or fails; the host has one RDMA port less than its siblings",
    means="A port that a rank must use is down; or few ports of a model are down, or slower, where the others of the "
    "host are active; or a member of a bond is down. A rank that is bound to a port that is down fails its rooms or "
    "falls back to TCP. Ports that no rank may use are of severity info; ports that are down on most "
    "devices are not reported.",
    remedy="Look at the cable, the transceiver and the switch port, with ibstat and mlxlink for InfiniBand and RoCE, "
    "and ethtool for interfaces. Until it is repaired, exclude the device with UCX_NET_DEVICES or Mooncake's parameter "
    "device.",
)
def nic_down(snapshot: Snapshot) -> Iterator[Finding]:
    for host in snapshot.once(hosts).values():
        for port in host.rdma():
            alike = host.siblings(port)
            active = [each for each in alike if each.is_up]
            if not port.is_up:
                if port.users or _odd(len(alike) - len(active), len(active)):
                    yield _link_finding(host, port, alike, f"is {text(port.row, 'state') or 'in an unknown state'}")
                continue
            fastest = max(amount(each.row, "bits_per_s") for each in active)
            slower = [each for each in active if amount(each.row, "bits_per_s") < fastest]
            if port in slower and amount(port.row, "bits_per_s") and _odd(len(slower), len(active) - len(slower)):
                own, speed = (f"{each / 1e9:g} Gbit/s" for each in (amount(port.row, "bits_per_s"), fastest))
                yield _link_finding(host, port, alike, f"runs at {own}, where its siblings have {speed}")
        for bond in host.ports.values():
            members = texts(bond.row, "interfaces") if text(bond.row, "model") == "bond" else []
            named = [(name, host.ports.get((bond.network, name))) for name in members]
            down = [name for name, member in named if member is not None and not member.is_up]
            if bond.is_up and down:
                yield nic_down.finding(
                    bond.subject,
                    agents=_names(host.agents),
                    weight=len(down),
                    evidence={"down": down, "members": members},
                    cause=f"{listed(down)} of {bond.name} on {host.name} {'is' if len(down) == 1 else 'are'} down: "
                    "the bond carries less than it could",
                    remedy=f"{_shows(host.name)} shows its members; look at cable and switch port of {listed(down)}",
                )


def _odd(few: int, others: int) -> bool:
    return others >= _MIN_SIBLINGS and few <= _ODD_SHARE * others


def _link_finding(host: Host, port: Port, alike: Sequence[Port], problem: str) -> Finding:
    users = _names(port.users)
    return nic_down.finding(
        port.subject,
        severity=Severity.WARNING if port.choosers else Severity.INFO,
        agents=users or _names(port.choosers) or _names(host.agents),
        weight=1 + len(users),
        evidence={
            "state": text(port.row, "state"),
            "bits_per_s": number(port.row, "bits_per_s"),
            "siblings_up": sum(each.is_up for each in alike if each is not port),
            "link_downed": counts(port.row, "errors").get("link_downed"),
            "used_by": users,
        },
        cause=f"port {port.name} of {port.host} {problem}" + (f"; used by {listed(users)}" if users else ""),
        remedy=f"{_shows(port.host)} shows its counters; ibstat and the switch tell why; exclude the device with "
        "UCX_NET_DEVICES until it is repaired",
    )


# ---- bytes -----------------------------------------------------------------------------------------------------


@health_code(
    "KV_RAIL_IDLE",
    Severity.WARNING,
    "transport",
    sees="a host with several network cards is no faster than with one, and nothing is down",
    means="Between two readings a rank moved many bytes to or from other hosts, and a port that must carry them (one "
    "that its settings or its engine name, or the one next to its GPU) carried none, while other ports did. The port's "
    "counters contain the bytes of all processes, so an idle port is idle. Bytes that take a port of another GPU cross "
    "the CPU, and share that port with another rank.",
    remedy="Compare UCX_NET_DEVICES and UCX_MAX_RNDV_RAILS of that rank with those of the other ranks; check that the "
    "port's GID and subnet reach the peers.",
)
def rail_idle(snapshot: Snapshot) -> Iterator[Finding]:
    for host in snapshot.once(hosts).values():
        for port in host.rdma():
            moved = {
                agent.name: snapshot.once(between_hosts).get(agent.name, 0.0) / len(host.rails[agent.name])
                for agent in port.users
            }
            expected, carried = sum(moved.values()), port.moved
            others = sum(each.moved or 0.0 for each in host.rdma() if each is not port)
            if not port.is_up or carried is None or expected < _MOVED or carried > _IDLE_SHARE * expected:
                continue
            if others < _OTHER_SHARE * expected:
                continue  # over Ethernet, which KV_LANE_NOT_RDMA reports
            users = sorted(name for name, nbytes in moved.items() if nbytes)
            yield rail_idle.finding(
                port.subject,
                agents=users,
                weight=len(users),
                evidence={
                    "carried_bytes": round(carried),
                    "expected_bytes": round(expected),
                    "others_carried_bytes": round(others),
                    "lane_source": sorted({text(inner(nics_of(agent), "lane"), "source") for agent in port.users}),
                },
                cause=f"{port.name} of {port.host} carried {size(carried)} of the {size(expected)} that "
                f"{listed(users)} moved and that it should carry; the other ports carried {size(others)}",
                remedy=f"{_shows(port.host)} shows the rates of all ports; compare UCX_NET_DEVICES of {listed(users)} "
                "with the others', and the addresses of the port with those of the peers' ports",
            )


@health_code(
    "KV_LANE_NOT_RDMA",
    Severity.WARNING,
    "transport",
    sees="transfers between hosts are slow, although both have RDMA devices that are up",
    means="The rank's bytes go over TCP although its host has an active RDMA port and its settings do not exclude "
    "RDMA. Mooncake's engine tells its protocol. NIXL does not: there it is told from the counters of two readings, in "
    "which the RDMA ports carried next to nothing of what the rank moved, and a network interface did. Evidence "
    "lane_source says which of the two. Causes: a container without /dev/infiniband, a small locked-memory limit, "
    "UCX_TLS without rc, MC_FORCE_TCP, no common subnet or GID type.",
    remedy="Give the container /dev/infiniband and IPC_LOCK; compare UCX_TLS, UCX_NET_DEVICES and the GIDs of the two "
    "hosts; UCX_LOG_LEVEL=info in the worker's environment lists the lanes that UCX chooses.",
)
def lane_not_rdma(snapshot: Snapshot) -> Iterator[Finding]:
    for host in snapshot.once(hosts).values():
        if not any(port.is_up for port in host.rdma()):
            continue
        rdma = [port.moved for port in host.rdma()]
        over_rdma = math.fsum(nbytes or 0.0 for nbytes in rdma)
        by_network: dict[str, float] = {}
        for port in host.ports.values():
            if not port.is_rdma and port.name != "lo":
                by_network[port.network] = max(by_network.get(port.network, 0.0), port.moved or 0.0)
        for agent in host.agents:
            lane, transport = inner(nics_of(agent), "lane"), inner(agent.status, "transport")
            wanted, told = text(transport, "backend"), text(lane, "protocol")
            if told and wanted in {"rdma", "efa"} and told == "tcp":
                yield _lane_finding(host, agent, "engine", f"its engine says {told}", {"protocol": told})
                continue
            moved = snapshot.once(between_hosts).get(agent.name, 0.0)
            ethernet = by_network.get(text(nics_of(agent), "network"), 0.0)
            if told or not _wants_rdma(transport) or moved < _MOVED or None in rdma:
                continue
            if over_rdma < _IDLE_SHARE * moved and ethernet >= _OTHER_SHARE * moved:
                yield _lane_finding(
                    host,
                    agent,
                    "counters",
                    f"of the {size(moved)} that it moved, the RDMA ports carried {size(over_rdma)} and one interface "
                    f"{size(ethernet)}",
                    {"moved_bytes": round(moved), "rdma_bytes": round(over_rdma), "interface_bytes": round(ethernet)},
                )


def _wants_rdma(transport: Row) -> bool:
    """Returns whether NIXL's UCX may use RDMA according to its settings, as far as the agent reports them."""
    variables = dict(each.partition("=")[::2] for each in texts(transport, "environment"))
    lanes = {lane.strip().lstrip("\\") for lane in variables.get("UCX_TLS", "all").split(",")}
    excluded = any(lane.startswith("^") for lane in lanes)
    chosen = {"all", "ib", "rc", "rc_x", "rc_v", "rc_mlx5", "rc_verbs", "dc", "dc_x", "dc_mlx5", "ud", "srd"}
    modules = variables.get("UCX_MODULES", "")
    return text(transport, "backend") == "UCX" and modules != "^ib" and not excluded and bool(lanes & chosen)


def _lane_finding(host: Host, agent: Agent, source: str, evidence: str, numbers_: Mapping[str, object]) -> Finding:
    ports = sorted(port.name for port in host.rdma() if port.is_up)
    return lane_not_rdma.finding(
        agent.name,
        evidence={"lane_source": source, "active_ports": ports, **numbers_},
        cause=f"bytes of {agent.name} go over TCP, although {host.name} has {counted(len(ports), 'active RDMA port')}: "
        f"{evidence}",
        remedy=f"`kvctl nics -e {agent.name}` shows the rates; `kvctl status -e {agent.name} -o wide` its lanes and "
        "settings; see that the process may open /dev/infiniband and lock memory (kvctl doctor on its host)",
    )


# ---- distance --------------------------------------------------------------------------------------------------


@health_code(
    "KV_NUMA_FAR",
    Severity.WARNING,
    "transport",
    sees="one rank's transfers are slower than its siblings', by a quarter or a half",
    means="The memory or GPU of a rank and the network port that carries its bytes are on different NUMA nodes, so "
    "that every byte crosses the link between the processors, although a port on the right node is active; or the rank "
    "may only run on cores of a node that has neither its port nor its GPU.",
    remedy="Bind each rank to the port next to its GPU (UCX_NET_DEVICES, Mooncake's device), or to the cores of its "
    "port's node: numactl --cpunodebind --membind, or the topology manager of Kubernetes.",
)
def numa_far(snapshot: Snapshot) -> Iterator[Finding]:
    for host in snapshot.once(hosts).values():
        for agent in host.agents:
            yield from _far(host, agent)


def _far(host: Host, agent: Agent) -> Iterator[Finding]:
    answer = nics_of(agent)
    used, gpu = [port for port in host.rails[agent.name] if port.is_up], text(answer, "gpu")
    if gpu:
        distances = {port.name: inner(port.row, "gpus").get(gpu) for port in host.rdma() if port.is_up}
        nearer = [name for name, distance in distances.items() if distance not in {"SYS", None}]
        if used and nearer and all(distances[port.name] == "SYS" for port in used):
            yield _far_finding(
                agent,
                f"{listed(port.name for port in used)}, which carries the bytes of {agent.name}, is on another NUMA "
                f"node than its GPU {gpu}; {listed(nearer)} is nearer",
                {"devices": [port.name for port in used], "gpu": gpu, "nearer": nearer},
            )
        return
    cores = numbers(answer, "cpu_nodes")
    places = [node for port in used if (node := number(port.row, "numa_node")) is not None]
    if len(places) == len(used) > 0 and cores and not set(places) & set(cores):
        yield _far_finding(
            agent,
            f"{agent.name} may run on NUMA node {_nodes(cores)} only, and {listed(port.name for port in used)}, which "
            f"carries its bytes, is on node {_nodes(places)}",
            {"devices": [port.name for port in used], "cpu_nodes": cores, "device_nodes": places},
        )


def _far_finding(agent: Agent, cause: str, evidence: Mapping[str, object]) -> Finding:
    source = text(inner(nics_of(agent), "lane"), "source")
    return numa_far.finding(
        agent.name,
        evidence={**evidence, "lane_source": source},
        cause=f"{cause} (known from: {source})",
        remedy=f"`kvctl nics -e {agent.name} -o wide` shows the node of each port and the GPUs next to it; set "
        "UCX_NET_DEVICES to a near one, or bind the process to the port's node",
    )


def _nodes(values: Iterable[float]) -> str:
    return " and ".join(f"{value:.0f}" for value in sorted(set(values)))


# ---- addresses -------------------------------------------------------------------------------------------------


@health_code(
    "KV_GID_UNROUTABLE",
    Severity.WARNING,
    "transport",
    sees="RDMA works between some hosts, and times out (retry exceeded) between others",
    means="RoCE packets are routed between subnets only from a GID of type RoCE v2 with an address of global scope. "
    "The port of a rank has only link-local or RoCE v1 GIDs, or its settings name such a GID, while the RoCE ports of "
    "the peers' hosts, or most others of its host, have routable ones. Within one subnet it may "
    "work nevertheless.",
    remedy="Give the interface of the port an IP address, and choose the index of its RoCE v2 GID (show_gids; "
    "UCX_IB_GID_INDEX, MC_GID_INDEX), or unset the index, so that the engine chooses.",
)
def gid_unroutable(snapshot: Snapshot) -> Iterator[Finding]:
    everywhere = [port for host in snapshot.once(hosts).values() for port in host.rdma()]
    everywhere = [port for port in everywhere if text(port.row, "link") == "RoCE" and port.is_up]
    for port in everywhere:
        others = [each for each in everywhere if each is not port]
        if not port.users or not any(_routable(each, None) for each in others):
            continue
        wrong = [agent for agent in port.users if not _routable(port, number(nics_of(agent), "gid_index"))]
        if not wrong:
            continue
        index = number(nics_of(wrong[0]), "gid_index")
        gids = [f"{text(gid, 'gid')} {text(gid, 'kind')}" for gid in rows(port.row.get("gids"))]
        chosen = (
            "has only link-local or RoCE v1 addresses" if index is None else f"has no routable GID at index {index:.0f}"
        )
        yield gid_unroutable.finding(
            port.subject,
            agents=_names(wrong),
            weight=len(wrong),
            evidence={
                "gids": gids,
                "gid_index": index,
                "routable_elsewhere": sum(_routable(each, None) for each in others),
                "interfaces": texts(port.row, "interfaces"),
            },
            cause=f"{port.name} of {port.host}, used by {listed(_names(wrong))}, {chosen}, from which packets are not "
            "routed to other subnets",
            remedy=f"{_shows(port.host, '-o wide')} lists its GIDs; give "
            f"{listed(texts(port.row, 'interfaces')) if texts(port.row, 'interfaces') else 'its interface'} an IP "
            "address, or choose another UCX_IB_GID_INDEX or MC_GID_INDEX",
        )


def _routable(port: Port, index: float | None) -> bool:
    """Returns whether the port's GID of this index, or any of its GIDs if it is None, is routed between subnets."""
    gids = [gid for gid in rows(port.row.get("gids")) if index is None or number(gid, "index") == index]
    return any(text(gid, "kind") == "RoCE v2" and not _link_local(text(gid, "gid")) for gid in gids)


def _link_local(gid: str) -> bool:
    return gid.startswith(("fe80:", "::ffff:169.254."))


# ---- faults ----------------------------------------------------------------------------------------------------


@health_code(
    "KV_NIC_ERRORS",
    Severity.WARNING,
    "transport",
    sees="rates fall and latencies jump for a while, on one host or to one host",
    means="Between two readings a device counted faults of its link (symbol errors, discarded or damaged packets), or "
    "more than one packet in a thousand was lost and sent again; over TCP one segment in a hundred, without those that "
    "were only late, as on a host whose cores are busy. One lost packet "
    "makes a RoCE sender repeat all that follow it. Causes: a bad cable, a switch port without PFC or "
    "ECN, a smaller MTU on the way.",
    remedy="Read the counters again; exchange the cable or the transceiver; check PFC and ECN on the switch for RoCE, "
    "and the MTU along the way.",
)
def nic_errors(snapshot: Snapshot) -> Iterator[Finding]:
    for host in snapshot.once(hosts).values():
        for port in host.ports.values():
            errors, lost = port.grown("errors"), port.grown("retransmits")
            packets = _growth(port.row, port.before, "sent_packets_total") if port.before is not None else None
            many = sum(lost.values()) >= max(_MIN_LOST, _LOST_SHARE * (packets or math.inf))
            grown = {**errors, **(lost if many else {})}
            if not grown:
                continue
            worst = max(grown, key=lambda name: grown[name])
            yield nic_errors.finding(
                port.subject,
                agents=_names(port.users) or _names(host.agents),
                weight=sum(grown.values()),
                evidence={**grown, "sent_packets": packets},
                cause=f"{port.name} of {host.name} counts faults: {worst} grew by {grown[worst]}"
                + (f" during {packets:.0f} packets" if packets else ""),
                remedy=f"{_shows(host.name)} shows its counters; look at cable, transceiver and switch port, and at "
                "PFC, ECN and MTU along the way",
            )
    yield from _tcp_losses(snapshot)


def _tcp_losses(snapshot: Snapshot) -> Iterator[Finding]:
    """Yields a finding for each network namespace that loses TCP segments and has agents with peers on other hosts."""
    namespaces: dict[tuple[str, str], list[Agent]] = {}
    for agent in snapshot.agents.values():
        answer = nics_of(agent)
        if answer and any(row.get("same_host") is False for row in agent.peers):
            namespaces.setdefault((text(answer, "host"), text(answer, "network")), []).append(agent)
    for (host, _), agents in namespaces.items():
        now, before = nics_of(agents[0]), nics_of(snapshot.earlier(agents[0].name))
        sent = _growth(now, before, "segments_sent_total")
        again = _growth(now, before, "segments_retransmitted_total")
        if not sent or not again or sent < _MIN_SEGMENTS:
            continue
        lost = again - (_growth(now, before, "segments_duplicate_total") or 0)
        if lost < _LOST_SHARE_TCP * sent:
            continue
        yield nic_errors.finding(
            f"{host} tcp",
            agents=_names(agents),
            weight=lost / sent,
            evidence={
                "segments": round(sent),
                "retransmitted": round(again),
                "lost": round(lost),
                "lost_ratio": round(lost / sent, 4),
            },
            cause=f"{percent(lost / sent)} of the TCP segments of {host} were lost and sent again "
            f"({lost:.0f} of {sent:.0f})",
            remedy=f"{_shows(host)} shows its interfaces and their errors; look for congestion, a bad link or a small "
            "MTU on the way to its peers",
        )
