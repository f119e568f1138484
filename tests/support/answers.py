"""Answers of agents to admin commands, with every field; tests change those that they are about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.errors import RequestRefused

MS = 1_000_000
S = 1_000_000_000
NOW = 1_760_000_000 * S
NONCE = "9007199254740993"
_RUNS = {"ended_age_ns": None, "ended_why": None, "process_state": "sleeping", "turn_age_ns": 4 * MS}


def role(name: str) -> str:
    return name.partition("-")[0]


def refusal(code: str = ErrorCode.INTERNAL, text: str = "boom") -> Callable[[Any], Any]:
    """Handler of a command that refuses every request."""

    def refuse(_: Any) -> Any:
        raise RequestRefused(code, text)

    return refuse


def hello(name: str, **changes: Any) -> dict[str, Any]:
    """Answer to `hello`."""
    return {
        "name": name,
        "role": role(name),
        "host": "node-3",
        "pid": 4242,
        "version": "0.1.0",
        "protocol": [1, 1],
        "incarnation": "c0ffee",
        "level": "read",
        "capabilities": ["staged"],
        "uptime_ns": 125 * S,
        "now_ns": NOW,
        **_RUNS,
        "observer": "process",
        **changes,
    }


def status(name: str, **changes: Any) -> dict[str, Any]:
    """Answer to `status` of a rank of a tp2 prefill instance or a dp2 decode instance."""
    number, decode = int(name.rpartition("-")[2]), role(name) == "decode"
    return {
        "name": name,
        "role": role(name),
        "host": "node-3",
        "rank": {"dp": number if decode else 0, "pp": 0, "cp": 0, "tp": 0 if decode else number, "unique": number},
        "sizes": {"dp": 2, "pp": 1, "cp": 1, "tp": 1} if decode else {"dp": 1, "pp": 1, "cp": 1, "tp": 2},
        "pid": 4242,
        "incarnation": "c0ffee",
        "version": "0.1.0",
        "uptime_ns": 125 * S,
        "transport": {"engine": "nixl", "backend": "UCX", "lanes": ["shm"]},
        "device": "cpu",
        "rooms": {"Bootstrapping": 1, "WaitingForInput": 2, "Transferring": 3},
        "rooms_finished_total": {"Success": 1204, "Failed": number},
        "rooms_finished_5m": {"Success": 199, "Failed": number},
        "bytes_total": 5 << 30,
        "rate": {"window_ns": 10 * S, "bytes": 1 << 30, "gb_per_s": 0.745, "rooms_per_s": 5.2},
        "latency": {"p50_ns": 12_300_000 + number, "p90_ns": 30 * MS, "p99_ns": 41 * MS + number * MS, "count": 602},
        "ring": {"size_bytes": 64 << 20, "used_bytes": 24 << 20, "high_water_bytes": 48 << 20, "live": 3}
        if decode
        else None,
        "peers": {"ready": 2},
        "pipeline": None
        if decode
        else {
            "mode": "on",
            "min_tokens": 3072,
            "group_size": None,
            "decisions": {"formula": 600, "few-tokens": 48, "prefill-only": 2},
        },
        "pool": {"pages": 4096, "page_size": 16, "bytes": 1 << 30, "layers": 32, "heads": 8},
        "waiting_for": None,
        "not_ready": None,
        "accepting": True,
        "draining": False,
        "draining_age_ns": None,
        "resumed_age_ns": None,
        "memory_gb_per_s": None if decode else 11.5,
        "process": {"fds": 61, "fds_limit": 1024, "threads": 14, "rss_bytes": 400 << 20, "cpu_ns": 93 * S},
        **_RUNS,
        "engine_call": "poll",
        "engine_call_age_ns": 2 * MS,
        "engine_in_call": False,
        "engine_stack": None,
        "published_age_ns": 40 * MS,
        "observer": "process",
        **changes,
    }


def room_row(name: str, room: str, **changes: Any) -> dict[str, Any]:
    """Row of `rooms`: a half-finished room, of which the decode rank has all cells of one writer."""
    decode = role(name) == "decode"
    return {
        "room": room,
        "nonce": NONCE,
        "request_id": None,
        "agent": name,
        "role": role(name),
        "state": "Transferring",
        "state_age_ns": 2 * S,
        "age_ns": 3 * S,
        "opened_at_ns": NOW - 3 * S,
        "finished_at_ns": None,
        "peers": ["prefill-0", "prefill-1"] if decode else ["decode-0"],
        "coverage": {
            "planned": 64 if decode else 32,
            "sent": None if decode else 0,
            "landed": 32 if decode else None,
            "scattered": 32 if decode else None,
        },
        "tokens": 1024,
        "pages": 64,
        "bytes": 16 << 20,
        "parts": 2,
        "paths": {"staged": 2},
        "parked": 0,
        "latency_ns": None,
        "forward_done_at_ns": None,
        "hidden_ns": None,
        "exposed_ns": None,
        "missing": ["prefill-1"] if decode else ["decode-0"],
        "owed": {"prefill-1": 32} if decode else {},
        "unscattered": 0 if decode else None,
        "failure": None,
        **changes,
    }


def gated_part(**changes: Any) -> dict[str, Any]:
    """Row of a prefill rank's answer to `staging`: a part that may not be written yet."""
    return {
        "room": "1001",
        "peer": "decode-1",
        "chunk": 0,
        "layers": [0, 32],
        "bytes": 2 << 20,
        "waiting_for": "watermark round 3 tail 8388608",
        "age_ns": 300 * MS,
        "requests": 1,
        "asked_age_ns": 500 * MS,
        **changes,
    }


def allocation(serial: int, **changes: Any) -> dict[str, Any]:
    """Row of a decode rank's answer to `staging`: a granted region of its ring, of 2 MiB."""
    offset = (serial % 32) << 21
    return {
        "serial": serial,
        "room": "1001",
        "nonce": NONCE,
        "writer": "prefill-0",
        "chunk": 0,
        "layers": [0, 32],
        "offset": offset,
        "end": offset + (2 << 20),
        "round": 3,
        "age_ns": 100 * MS,
        "state": "granted",
        "aside": False,
        "posted": False,
        "room_state": "Transferring",
        **changes,
    }


def peer_row(name: str, other: str, **changes: Any) -> dict[str, Any]:
    """Row of `peers`: a connection that is ready, and whose lane was not measured."""
    return {
        "agent": name,
        "peer": other,
        "role": role(other),
        "state": "ready",
        "incarnation": "c0ffee",
        "endpoint": "tcp://127.0.0.1:5000",
        "last_heard_ns": 800 * MS,
        "unheard_ns": 900_000_000,
        "address": None,
        "wire_ns": None,
        "oldest_write_ns": None,
        "tcp": None,
        "rtt_ns": 210_000,
        "clock_offset_ns": None,
        "clock_error_ns": None,
        "control_queue": 0,
        "watermark_sent": None,
        "watermark_seen": None,
        "lane": "nixl",
        "rooms": 2,
        "errors_total": 0,
        "last_error": None,
        "differences": [],
        "lane_gb_per_s": None,
        "lane_descriptor_ns": None,
        "lane_measured_age_ns": None,
        "lane_kind": None,
        "lane_expected": None,
        "lane_source": None,
        "lane_direct": None,
        "lane_why_not": None,
        "same_host": True,
        "peer_host": "node-3",
        "process": "process 4711 on node-3",
        "needed": True,
        "former": [],
        **changes,
    }
