"""A fleet of real admin servers with fixed answers: two prefill ranks (tp2) and two decode ranks (dp2)."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvctl.cli import run
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.contract.commands import COMMANDS_BY_NAME
from kvctl_agent.errors import RequestRefused
from kvctl_agent.observer.server import SERVED_HERE
from tests.support import answers as typical
from tests.support.admin_server import AdminServer
from tests.support.answers import MS, NOW, S, gated_part, refusal
from tests.support.answers import NONCE as NONCE
from tests.support.answers import role as role_of
from tests.support.terminal import Terminal

ROOM = "18446744073709551615"
_OF_TERMINALS = {"NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR"}
FLEET = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def hello(name: str) -> dict[str, Any]:
    return typical.hello(name, now_ns=time.time_ns())


status = typical.status


def room_row(name: str, room: str = ROOM, **changes: Any) -> dict[str, Any]:
    decode = role_of(name) == "decode"
    own = {
        "request_id": "cmpl-7f3a" if decode and room == ROOM else None,
        "age_ns": 6 * S,
        "opened_at_ns": NOW,
        "coverage": {
            "planned": 64,
            "sent": None if decode else 32,
            "landed": 48 if decode else None,
            "scattered": 32 if decode else None,
        },
        "parked": 0 if decode else 1,
        "forward_done_at_ns": None if decode else NOW + 5 * MS,
        "hidden_ns": None if decode else 1 * MS,
        "exposed_ns": None if decode else 9 * MS + int(name[-1]) * MS,
        "missing": ["prefill-1"] if decode else [],
        "owed": {"prefill-1": 16} if decode else {},
        "unscattered": 16 if decode else None,
    }
    return typical.room_row(name, room, **{**own, **changes})


def event(at_ms: float, agent: str, stage: str, writer: int | None = None, **more: Any) -> dict[str, Any]:
    part = (
        {"writer": writer, "chunk": None, "layers": None}
        if writer is None
        else {"writer": writer, "chunk": 0, "layers": [0, 32]}
    )
    return {
        "at_ns": NOW + round(at_ms * MS),
        "agent": agent,
        "stage": stage,
        "peer": None,
        "detail": "",
        **part,
        **more,
    }


def room_detail(name: str, failed: bool = False) -> dict[str, Any]:
    events = {
        "prefill-0": [
            event(1, "prefill-0", "open", peer="decode-0"),
            event(4, "prefill-0", "ready", 0),
            event(6, "prefill-0", "gate", 0, peer="decode-0"),
            event(6.5, "prefill-0", "queue", 0, peer="decode-0"),
            event(9, "prefill-0", "gather", 0, peer="decode-0"),
            event(9.5, "prefill-0", "post", 0, peer="decode-0"),
            event(14, "prefill-0", "wire", 0, peer="decode-0"),
        ],
        "prefill-1": [
            event(1.2, "prefill-1", "open", peer="decode-0"),
            event(5, "prefill-1", "ready", 1),
            event(5.1, "prefill-1", "gate", 1, peer="decode-0"),
            event(11, "prefill-1", "gather", 1, peer="decode-0"),
            event(11.2, "prefill-1", "post", 1, peer="decode-0"),
        ],
        "decode-0": [
            event(0, "decode-0", "open", detail="64 pages"),
            event(14.5, "decode-0", "arrive", 0, peer="prefill-0"),
            event(17, "decode-0", "scatter", 0, peer="prefill-0"),
        ],
    }
    failure = None
    if failed:
        failure = {"rank": "prefill-1", "code": "transport", "at_ns": NOW + 15 * MS, "text": "NIXL_ERR_BACKEND"}
        if name == "decode-0":
            failure = {"rank": "decode-0", "code": "peer-failed", "at_ns": NOW + 16 * MS, "text": "prefill-1 failed"}
    state = "Failed" if failed else "Transferring"
    return {**room_row(name, state=state, failure=failure), "timeline": events[name], "timeline_dropped": 0}


def staging(name: str) -> dict[str, Any]:
    base = {"agent": name, "role": role_of(name), "enabled": True, "fallbacks_total": 0}
    if role_of(name) == "prefill":
        gated = gated_part(room=ROOM, bytes=8 << 20, age_ns=1500 * MS, asked_age_ns=1600 * MS)
        buffers = {
            "size_bytes": 64 << 20,
            "piece_bytes": 1 << 20,
            "pieces": 64,
            "pieces_used": 8,
            "pieces_high_water": 20,
        }
        return {**base, "ring": None, "buffers": buffers, "gated": [gated] if name == "prefill-1" else []}

    def allocation(serial: int, offset: int, end: int, state: str, age_ns: int) -> dict[str, Any]:
        room_state = "Failed" if state == "quarantined" else "Transferring"
        place = {"offset": offset << 20, "end": end << 20}
        return typical.allocation(serial, room=str(serial), age_ns=age_ns, state=state, room_state=room_state, **place)

    ring = {
        "size_bytes": 64 << 20,
        "head_bytes": 40 << 20,
        "round": 3,
        "used_bytes": 24 << 20,
        "high_water_bytes": 48 << 20,
        "watermark": {"round": 3, "tail": 8 << 20, "age_ns": 4 * S},
        "allocations": [
            allocation(7, 8, 16, "quarantined", 4 * S),
            allocation(8, 16, 28, "scattering", 30 * MS),
            allocation(9, 28, 36, "landed", 20 * MS),
            allocation(10, 36, 40, "granted", 9 * MS),
        ],
        "copies": {"waiting": 1, "copying_age_ns": 12 * MS, "turn_age_ns": 12 * MS},
        "granted_total": 10,
        "refused_total": 0,
        "refused_largest_bytes": None,
        "revoked_total": 1,
    }
    return {**base, "ring": ring, "buffers": None, "gated": []}


def stage(p50_ms: float | None) -> dict[str, Any]:
    p50 = None if p50_ms is None else round(p50_ms * MS)
    return {"p50_ns": p50, "p90_ns": p50 and p50 * 2, "p99_ns": p50 and p50 * 3, "count": 0 if p50 is None else 9}


def layers(name: str) -> list[dict[str, Any]]:
    if role_of(name) == "decode":
        times = {"arrive": 0.4, "scatter": 2.5}
        groups: list[tuple[Any, Any, Any]] = [(None, None, None)] * 2
    else:
        times = {"gate": 0.5, "queue": 0.2, "gather": 2.0, "post": 0.3, "wire": 4.0}
        groups = [(0.0, 0, 7 * MS), (9.0, 5 * MS + 250_000, 1 * MS + 750_000)]
    return [
        {
            "agent": name,
            "layers": list(layers),
            "path": "staged",
            "parts": 9,
            "bytes": 9 << 20,
            "stages": {each: stage(p50) for each, p50 in {"ready": ready, **times}.items()},
            "exposed_ns": exposed,
            "overlapped_ns": hidden,
        }
        for layers, (ready, exposed, hidden) in zip(((0, 16), (16, 32)), groups, strict=True)
    ]


def peers(name: str) -> list[dict[str, Any]]:
    return [_peer(name, other) for other in FLEET if role_of(other) != role_of(name)]


def _peer(name: str, other: str) -> dict[str, Any]:
    odd, writes = other == "decode-1", role_of(name) == "prefill"
    lane = {"lane_gb_per_s": 8.4, "lane_descriptor_ns": 950, "lane_measured_age_ns": 70 * S, "lane_direct": "nvlink"}
    return typical.peer_row(
        name,
        other,
        state="suspect" if odd else "ready",
        clock_offset_ns=-1500,
        clock_error_ns=105_000,
        watermark_seen=[3, 8388608, 12],
        lane="shm",
        **({"lane_kind": "cuda_ipc", "lane_expected": "cuda_ipc", "lane_source": "rate"} if writes else {}),
        **(lane if writes and not odd else {}),
        lane_why_not="decode-1's pool is host memory" if odd else None,
        former=["process 4242 on node-2 (000000000000beef)"] if other == "prefill-1" else [],
        differences=["page_size 64 ≠ 32"] if odd else [],
    )


def events(name: str) -> list[dict[str, Any]]:
    return [
        {
            "sequence": 1,
            "at_ns": NOW + FLEET.index(name) * MS,
            "agent": name,
            "kind": "peer",
            "severity": "info",
            "room": None,
            "peer": "decode-1",
            "text": "ready",
        },
        {
            "sequence": 2,
            "at_ns": NOW + S + FLEET.index(name) * MS,
            "agent": name,
            "kind": "room",
            "severity": "warning",
            "room": ROOM,
            "peer": None,
            "text": "gated:\tnobody\nmoves",
        },
    ]


def nic(name: str, kind: str, **changes: Any) -> dict[str, Any]:
    rdma = kind == "rdma"
    return {
        "name": name,
        "kind": kind,
        "link": "RoCE" if rdma else "Ethernet",
        "model": "MT4129" if rdma else "mlx5_core",
        "state": "active" if rdma else "up",
        "bits_per_s": 400_000_000_000 if rdma else 25_000_000_000,
        "mtu": None if rdma else 1500,
        "pci": "0000:18:00.0" if rdma else "0000:2a:00.0",
        "numa_node": 0,
        "interfaces": [],
        "gids": [],
        "gpus": {},
        "sent_bytes_total": 5 << 40,
        "received_bytes_total": 5 << 30,
        "sent_packets_total": 1_400_000_000,
        "errors": {},
        "retransmits": {},
        "congestion": {},
        **changes,
    }


def nics(name: str) -> dict[str, Any]:
    """Two RDMA ports of one host, the second of which is used by no rank, and its network interface."""
    gid = {"index": 3, "gid": "::ffff:10.0.1.3", "kind": "RoCE v2", "interface": "rail0"}
    first = nic(
        "mlx5_0:1", "rdma", gids=[gid], interfaces=["rail0"], gpus={"0000:19:00.0": "PIX", "0000:9b:00.0": "SYS"}
    )
    down = nic("mlx5_1:1", "rdma", state="down", numa_node=1, errors={"link_downed": 3}, congestion={"np_cnp_sent": 7})
    return {
        "agent": name,
        "host": "node-3",
        "network": "net:[4026531840]",
        "at_ns": 125 * S,
        "nics": [
            first,
            down,
            nic("eth0", "interface"),
            nic("docker0", "interface", state="down", pci=None, model="bridge"),
        ],
        "left_out": 0,
        "segments_sent_total": 5_000_000,
        "segments_retransmitted_total": 12,
        "segments_duplicate_total": 3,
        "cpu_nodes": [0],
        "gpu": None,
        "lane": {"devices": ["mlx5_0"], "source": "open devices", "protocol": ""},
        "gid_index": None,
    }


def metrics(name: str) -> list[dict[str, Any]]:
    return [
        {
            "name": "kvctl_rooms_finished_total",
            "kind": "counter",
            "unit": "",
            "help": "Rooms finished, by result.",
            "samples": [{"labels": {"result": "Success"}, "value": 1204}, {"labels": {"result": "Failed"}, "value": 0}],
        },
        {
            "name": "kvctl_ring_size_bytes",
            "kind": "gauge",
            "unit": "bytes",
            "help": "Size of the staging ring.",
            "samples": [{"labels": {}, "value": (64 << 20) if role_of(name) == "decode" else None}],
        },
        {
            "name": "kvctl_room_seconds",
            "kind": "histogram",
            "unit": "seconds",
            "help": "Decode: open to success.",
            "samples": [
                {"labels": {}, "value": None, "buckets": [[0.01, 3], [0.5, 9], [None, 10]], "sum": 1.5, "count": 10}
            ],
        },
    ]


def bootstrap(name: str) -> list[dict[str, Any]]:
    """A registry in which a third prefill rank is missing."""
    ranks = [
        {
            "name": f"prefill-{tp}",
            "endpoint": f"tcp://127.0.0.1:{5000 + tp}",
            "incarnation": "c0ffee",
            "rank": {"dp": 0, "pp": 0, "cp": 0, "tp": tp},
        }
        for tp in range(2)
    ]
    return [
        {
            "agent": name,
            "registry": "tcp://127.0.0.1:4999",
            "expected": 3,
            "sizes": {"dp": 1, "pp": 1, "cp": 1, "tp": 3},
            "registered": ranks,
            "missing": [{"dp": 0, "pp": 0, "cp": 0, "tp": 2}],
            "text": "2 of 3 prefill ranks registered, missing tp=2",
        }
    ]


def cost(name: str, tokens: int) -> dict[str, Any]:
    """Rooms to decode-0 are slower than those to decode-1, and one connection is suspect."""
    number, decode = int(name[-1]), role_of(name) == "decode"
    rank = status(name)["rank"]
    rows = []
    for peer in () if decode else ("decode-0", "decode-1"):
        fitted, usable = peer == "decode-0", not (name == "prefill-1" and peer == "decode-1")
        alone = (4 * MS + tokens * 20_000) if fitted else tokens * 40_000
        rows.append(
            {
                "agent": name,
                "peer": peer,
                "incarnation": "c0ffee",
                "rank": status(peer)["rank"],
                "state": "ready" if usable else "suspect",
                "rooms": 2 if fitted else 0,
                "queued_bytes": (3 << 20) if fitted else 0,
                "bytes": tokens * 4096,
                "bytes_per_token": 4096.0,
                "path": "staged",
                "fixed_ns": (4 * MS if fitted else 0) if usable else None,
                "bytes_per_s": (204_800_000 if fitted else 102_400_000) if usable else None,
                "alone_ns": alone + number * MS if usable else None,
                "predicted_ns": alone + (3 + number) * MS if usable else None,
                "basis": "rooms" if usable else None,
                "samples": 64 if fitted else 9,
                "age_ns": 2 * S,
                "error_ratio": 0.08,
                "reason": None if usable else f"{peer} is suspect",
            }
        )
    return {
        "agent": name,
        "role": role_of(name),
        "rank": rank,
        "accepting": True,
        "tokens": tokens,
        "rooms": 3,
        "ring": status(name)["ring"],
        "ahead_ns": 0 if decode else 3 * MS,
        "costs": rows,
    }


def config(name: str) -> list[dict[str, Any]]:
    threads = 4 if name == "prefill-1" else 1
    return [
        {
            "key": "copy_threads",
            "value": threads,
            "default": None,
            "origin": "argument" if threads == 4 else "default",
            "unit": "",
            "runtime": False,
            "help": "Threads that gather and scatter.",
        },
        {
            "key": "staging_ring_mb",
            "value": 64,
            "default": 4096,
            "origin": "environment KVCTL_STAGING_RING_MB",
            "unit": "MiB",
            "runtime": False,
            "help": "Decode rank's ring.",
        },
    ]


def operations(name: str) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Handlers of mutating commands, which answer without any effect."""

    def done(subject: str, result: str, text: str) -> list[dict[str, str]]:
        return [{"agent": name, "subject": subject, "result": result, "text": text}]

    def abort(args: dict[str, Any]) -> Any:
        if args["room"] != int(ROOM) or name == "decode-1":
            raise RequestRefused(ErrorCode.UNKNOWN_ROOM, f"{name} knows no room {args['room']}, active or recent")
        return done(f"room {args['room']}", "aborted", "it has failed here, and its other ranks are told")

    def release(args: dict[str, Any]) -> Any:
        if role_of(name) == "prefill":
            raise RequestRefused(ErrorCode.REFUSED, f"{name} is a prefill rank: rings are on decode ranks")
        if "room" in args and name == "decode-1":
            raise RequestRefused(ErrorCode.UNKNOWN_ROOM, f"{name} knows no room {args['room']}, active or recent")
        if not args.get("force"):
            raise RequestRefused(ErrorCode.REFUSED, "prefill-0 (process 12 on this host) may still write to it")
        held = f"room {args['room']}" if "room" in args else f"allocation {args['serial']}"
        return done(held, "released", "it is free by force")

    def change(args: dict[str, Any]) -> Any:
        if args["key"] != "waiting_timeout_s":
            raise RequestRefused(ErrorCode.BAD_ARGUMENT, f"unknown configuration key {args['key']!r}")
        return done(args["key"], "set", f"waiting_timeout_s = {args['value']}, was 300.0; until the agent ends")

    def probe(args: dict[str, Any]) -> Any:
        if role_of(name) == "decode":
            raise RequestRefused(ErrorCode.REFUSED, f"{name} is a decode rank: a lane is measured by its writer")
        who = {"agent": name, "peer": args.get("peer", "decode-0")}
        sizes = [(64, 1, 21_000), (512, 256, 950), (4096, 256, 1_400), (args.get("bytes", 16 << 20), 1, 2_100_000)]
        rows = [
            {
                **who,
                "bytes": size,
                "descriptors": count,
                "write_ns": count * ns,
                "descriptor_ns": ns,
                "gb_per_s": size / ns,
            }
            for size, count, ns in sizes
        ]
        return {**who, "lane": "nixl", "running": False, "moved_bytes": 100 << 20, "rows": rows}

    return {
        "abort": abort,
        "release": release,
        "forget": lambda args: done(f"peer {args['peer']}", "forgotten", f"{args['peer']} is forgotten"),
        "drain": lambda _: done("rooms", "draining", "takes no new rooms; 2 in flight: kvctl wait --for drained"),
        "resume": lambda _: done("rooms", "accepting", "takes new rooms"),
        "set": change,
        "probe": probe,
    }


def answers(name: str, failed: bool = False) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Handlers of one agent, each with fixed data."""

    def room(args: dict[str, Any]) -> Any:
        if args["room"] != int(ROOM) or name == "decode-1":
            raise RequestRefused(ErrorCode.UNKNOWN_ROOM, f"room {args['room']} is not known here")
        return [room_detail(name, failed)]

    def rooms(args: dict[str, Any]) -> Any:
        rows = [room_row(name), room_row(name, "7", age_ns=9 * S, state="WaitingForInput")]
        return [row for row in rows if args.get("state") in {None, row["state"]}][: args["limit"]]

    def finished(args: dict[str, Any]) -> Any:
        done = {"state": "Success", "finished_at_ns": NOW + S, "latency_ns": 12 * MS, "age_ns": S}
        late = {"state": "Failed", "finished_at_ns": NOW + 2 * S, "latency_ns": None}
        cause = {"rank": "prefill-1", "code": "timeout", "at_ns": NOW, "text": "no grant from decode-0 for 300 s"}
        request = "cmpl-6" if name.startswith("decode") else None
        rows = [room_row(name, "5", **done), room_row(name, "6", **late, failure=cause, request_id=request)]
        return rows[: args["limit"]]

    return {
        **operations(name),
        "status": lambda _: status(name),
        "rooms": rooms,
        "room": room,
        "history": finished,
        "slow": finished,
        "failed": lambda args: {
            "rooms": [row for row in finished({"limit": 2}) if row["failure"] is not None][: args["limit"]],
            "kept": 1,
            "dropped_total": 0,
        },
        "staging": lambda _: staging(name),
        "layers": lambda _: layers(name),
        "peers": lambda _: peers(name),
        "nics": lambda _: nics(name),
        "cost": lambda args: cost(name, args.get("tokens", 1024)),
        "events": lambda args: {
            "events": [row for row in events(name) if row["sequence"] >= args.get("since", 0)],
            "next": 3,
            "dropped": 0,
        },
        "bootstrap": lambda _: bootstrap(name),
        "metrics": lambda _: metrics(name),
        "config": lambda _: config(name),
    }


def refusals() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Handlers that refuse every declared command without a fixed answer."""

    refuse = refusal(ErrorCode.NOT_PERMITTED, "not in this fleet of fixed answers")
    return dict.fromkeys(COMMANDS_BY_NAME.keys() - SERVED_HERE, refuse)


Start = Callable[..., AdminServer]


@pytest.fixture(autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the machine's agents, configuration and colour settings; fix the time zone."""
    for name in list(os.environ):
        if (name.startswith("KVCTL_") and name != "KVCTL_OBSERVER") or name in _OF_TERMINALS:
            monkeypatch.delenv(name)
    base = tmp_path_factory.mktemp("k")
    monkeypatch.setenv("KVCTL_SOCKET_DIR", str(base / "s"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(base / "c"))
    monkeypatch.setenv("XDG_STATE_HOME", str(base / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


@pytest.fixture
def patience(surroundings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows a busy machine to answer late."""
    monkeypatch.setenv("KVCTL_TIMEOUT", "30s")


@pytest.fixture
def socket_directory(surroundings: None) -> Path:
    path = Path(os.environ["KVCTL_SOCKET_DIR"])
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@pytest.fixture
def leave_stale(socket_directory: Path) -> Callable[[str], Path]:
    """`leave_stale("dead")`: leave the socket of an agent that was killed."""

    def leave(name: str) -> Path:
        path = socket_directory / f"{name}.sock"
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(os.fspath(path))
        return path

    return leave


@pytest.fixture
def hang(socket_directory: Path) -> Iterator[Callable[[str], Path]]:
    """`hang("hung")`: start an agent that takes connections and never answers."""
    with ExitStack() as listeners:

        def listen(name: str) -> Path:
            path = socket_directory / f"{name}.sock"
            listener = listeners.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(os.fspath(path))
            listener.listen()
            return path

        yield listen


@pytest.fixture
def start(socket_directory: Path) -> Iterator[Start]:
    """Start real admin servers: `start(name, handlers, ahead_ns, **hello)`; all are closed at the end."""
    servers: list[AdminServer] = []

    def make(name: str, /, handlers: dict[str, Any] | None = None, ahead_ns: int = 0, **changes: Any) -> AdminServer:
        greeting = {**hello(name), **changes}
        server = AdminServer(
            name,
            {**refusals(), **answers(name), **(handlers or {})},
            lambda: {**greeting, "now_ns": time.time_ns() + ahead_ns},  # type: ignore[arg-type, return-value, typeddict-item]
            socket_directory,
        )
        servers.append(server.start())
        return server

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def fleet(start: Start) -> tuple[str, ...]:
    """The four agents, running."""
    for name in FLEET:
        start(name)
    return FLEET


@pytest.fixture
def start_hosts(start: Start) -> Callable[..., list[str]]:
    """Starts hosts n1, n2, … with two agents each, prefill and decode in turn: `start_hosts(5, changes)`.

    `changes` are changes to the status of agents, by name; a name is `prefill-0@n1`.
    """

    def make(hosts: int, changes: dict[str, dict[str, Any]] | None = None) -> list[str]:
        names = []
        for host in range(1, hosts + 1):
            for tp in range(2):
                own = f"{('prefill', 'decode')[host % 2 == 0]}-{tp}"
                name = f"{own}@n{host}"
                answer = {
                    **status(own),
                    "name": name,
                    "host": f"n{host}",
                    "rank": {"dp": 0, "pp": 0, "cp": 0, "tp": tp, "unique": tp},
                    "sizes": {"dp": 1, "pp": 1, "cp": 1, "tp": 2},
                    "registry": f"tcp://10.0.0.{host}:4999" if own.startswith("prefill") else None,
                    "device": f"cuda:{tp}",
                    "rooms_finished_total": {"Success": 1204, "Failed": 0},
                    "rooms_finished_5m": {"Success": 199},
                    **(changes or {}).get(name, {}),
                }
                quiet: dict[str, Any] = {command: lambda _: [] for command in ("rooms", "history", "peers", "config")}
                quiet |= {"metrics": lambda _: [], "failed": lambda _: {"rooms": [], "kept": 0, "dropped_total": 0}}
                quiet["staging"] = lambda _, own=own, name=name: {
                    **staging(own),
                    "agent": name,
                    "ring": None,
                    "gated": [],
                }
                quiet["status"] = lambda _, answer=answer: answer
                quiet["health"] = lambda _, quiet=dict(quiet): {command: ask({}) for command, ask in quiet.items()}
                start(name, {**answers(own), **quiet}, role=role_of(own), host=f"n{host}")
                names.append(name)
        return names

    return make


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit code and output of one call of `kvctl`."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """`data` of the JSON document that was printed."""
        return json.loads(self.out)["data"]


Kvctl = Callable[..., Outcome]


@pytest.fixture
def kvctl(capsys: pytest.CaptureFixture[str]) -> Kvctl:
    """Runs `kvctl` in this process: `kvctl("rooms", "-o", "json")`."""

    def call(*args: str) -> Outcome:
        capsys.readouterr()
        code = run(list(args))
        captured = capsys.readouterr()
        return Outcome(int(code), captured.out, captured.err)

    return call


@pytest.fixture
def on_terminal() -> Iterator[Callable[..., Terminal]]:
    """`on_terminal("rooms", "-w", size=(80, 24))`: start `kvctl` on a pseudo-terminal."""
    with ExitStack() as opened:
        yield lambda *args, **more: opened.enter_context(Terminal(sys.executable, "-m", "kvctl", *args, **more))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`terminal(80)`: send data to a terminal of that width, without colour, from now on."""

    def set_width(columns: int) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("kvctl.commands.output.to_terminal", lambda: True)
        monkeypatch.setenv("NO_COLOR", "1")

    return set_width


@pytest.fixture
def canned() -> ModuleType:
    """This module with its fixed answers, for tests that need no socket."""
    return sys.modules[__name__]
