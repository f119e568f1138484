"""SGLang's own KV manager as the read-only admin commands see it: `ObservedRank` over the manager and its tracker.

Only the fields that SGLang knows have values. It has no coverage cells, incarnations, round-trip times or per-layer
times: those are None.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from kvctl_agent.admin.observed_rank import RankDescription
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.contract.recording import InputPage
from kvctl_agent.contract.snapshots import (
    Bootstrap,
    ConfigRow,
    GatedPart,
    Integration,
    OwedParts,
    PeerRow,
    PipelineUse,
    RegisteredRank,
    RingAllocation,
    RingUse,
    RingView,
    Role,
    RoomRow,
    StagingBuffers,
    TimelineEvent,
    TransferCost,
)
from kvctl_agent.errors import RequestRefused
from kvctl_agent.integrations.sglang.observe.events import EventBuffer, GateWait, Writer
from kvctl_agent.integrations.sglang.observe.tracker import Region, Tracker
from kvctl_agent.integrations.sglang.rank_names import LocalRanks
from kvctl_agent.telemetry.hub import Telemetry

_FAILED = 0  # KVPoll

OWNED_BY_SGLANG = "observe mode: SGLang owns"

_SETTINGS: tuple[tuple[str, str, str, str], ...] = (
    ("bootstrap_timeout_s", "bootstrap_timeout", "s", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"),
    ("waiting_timeout_s", "waiting_timeout", "s", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"),
    ("heartbeat_s", "heartbeat_interval", "s", "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL"),
)
"""Key of the agent's configuration with the same meaning, attribute of the manager, unit, variable of SGLang."""


class ObservedManager:
    """`ObservedRank` of a manager.

    Args:
        name: name of the rank.
        manager: SGLang's CommonKVManager.
        host: name of the host.
        integration: SGLang's version and the mode.
        incarnation: id of this process's observer.
    """

    def __init__(
        self,
        name: str,
        manager: Any,
        buffer: EventBuffer,
        tracker: Tracker,
        host: str,
        integration: Integration,
        incarnation: int,
    ) -> None:
        self.name = name
        self.role: Role = tracker.shape.role
        self.host = host
        self.gpu_pci = None
        self.incarnation = incarnation
        self.telemetry: Telemetry = tracker.telemetry
        self.accepting, self.draining = True, False
        self.quarantined_bytes = self.memory_gb_per_s = None
        self._manager, self._buffer, self._tracker = manager, buffer, tracker
        self._integration = integration
        self._local = LocalRanks()

    @property
    def staging_enabled(self) -> bool:
        return bool(getattr(self._manager, "enable_staging", False))

    # ---- status ------------------------------------------------------------------------------------------------

    def describe(self) -> RankDescription:
        manager, args = self._manager, self._manager.kv_args
        dp = manager.attn_dp_rank if manager.system_dp_size == 1 else manager.system_dp_rank
        rank = {"dp": dp, "pp": manager.pp_rank, "cp": manager.attn_cp_rank, "tp": manager.attn_tp_rank}
        sizes = {
            "dp": max(manager.attn_dp_size, manager.system_dp_size),
            "pp": manager.pp_size,
            "cp": manager.attn_cp_size,
            "tp": manager.attn_tp_size,
        }
        lo, hi = self._tracker.shape.layers
        pool = {"page_size": args.page_size, "bytes": sum(args.kv_data_lens), "layers": hi - lo}
        if args.kv_item_lens:
            pool["pages"] = args.kv_data_lens[0] // args.kv_item_lens[0]
        if heads := self._tracker.shape.heads:
            pool["heads"] = heads
        unique = (dp * manager.pp_size + manager.pp_rank) * manager.attn_cp_size + manager.attn_cp_rank
        rank["unique"] = unique * manager.attn_tp_size + manager.attn_tp_rank
        device = _device_of(manager)
        return {
            "rank": rank,
            "sizes": sizes,
            "registry": None,
            "transport": {"engine": self._engine, "backend": self._backend, "lanes": []},
            "device": device,
            "pool": pool,
            "dtypes": {},
            "integration": self._integration,
            "metrics_url": None,
        }

    @property
    def _engine(self) -> str:
        return type(self._manager).__name__.removesuffix("KVManager").lower()

    @property
    def _backend(self) -> str:
        return os.environ.get("SGLANG_DISAGGREGATION_NIXL_BACKEND", "UCX") if self._engine == "nixl" else ""

    def waiting_for(self) -> str | None:
        return None

    not_ready = waiting_for

    def pipeline(self) -> PipelineUse | None:
        return None

    def config(self) -> list[ConfigRow]:
        rows = [
            _setting(key, value, unit, variable)
            for key, attribute, unit, variable in _SETTINGS
            if (value := getattr(self._manager, attribute, None)) is not None
        ]
        misses = getattr(self._manager, "max_failures", None)
        if misses is not None:
            lost_s = misses * float(self._manager.heartbeat_interval)
            rows.append(_setting("lost_s", lost_s, "s", "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE"))
        if (ring := self._ring) is not None:
            rows.append(_setting("staging_ring_mb", ring.total_size >> 20, "MiB", "SGLANG_DISAGG_STAGING_POOL_SIZE_MB"))
        return rows

    def inputs(self, since: int | None, until: int | None) -> InputPage:
        raise RequestRefused(ErrorCode.REFUSED, f"{OWNED_BY_SGLANG} the transfer protocol, which records no inputs")

    def bootstrap(self) -> list[Bootstrap]:
        """Returns one row per prefill server that this decode rank knows, with the ranks that it has looked up."""
        servers = dict(getattr(self._manager, "prefill_info_table", {}))
        return [self._server(address, info) for address, info in servers.items()]

    def _server(self, address: str, info: Any) -> Bootstrap:
        sizes = {"dp": info.dp_size, "pp": info.pp_size, "cp": info.attn_cp_size, "tp": info.attn_tp_size}
        registered: list[RegisteredRank] = [
            {"name": peer.name, "endpoint": endpoint, "incarnation": "", "rank": {}}
            for endpoint, peer in self._tracker.peers.copy().items()
            if peer.server == address and not peer.lost_ns
        ]
        return {
            "agent": self.name,
            "registry": address,
            "expected": None,
            "sizes": sizes,
            "registered": registered,
            "missing": [],
            "text": "",
        }

    # ---- rooms -------------------------------------------------------------------------------------------------

    def complete(self, row: RoomRow) -> None:
        row["coverage"], row["unscattered"] = None, None
        row["peers"] = [self._local.name(peer) for peer in row["peers"]]
        timeline: list[TimelineEvent] = row.get("timeline", [])  # type: ignore[assignment]  # of a RoomDetail
        for event in timeline:
            if event["peer"] is not None:
                event["peer"] = self._local.name(event["peer"])
        number = int(row["room"])
        room = self._tracker.rooms.get(number)
        if room is None or row["finished_at_ns"] is not None:
            return
        row["parked"] = sum(wait[0] == number for wait in self._waits())
        if self.role == "decode" and not room.record.state_now.finished:
            row["missing"] = [writer.name for writer in self._missing(number)]

    def _missing(self, number: int) -> list[Writer]:
        room = self._tracker.rooms.get(number)
        return [] if room is None else [each for each in room.senders if each.rank not in room.done]

    def owed_parts(self, row: RoomRow) -> list[OwedParts]:
        return []

    # ---- staging -----------------------------------------------------------------------------------------------

    @property
    def _ring(self) -> Any:
        """SGLang's StagingAllocator; None on a prefill rank and without staging."""
        return getattr(self._manager._staging_ctx, "allocator", None)

    def ring_use(self) -> RingUse | None:
        ring = self._ring
        if ring is None:
            return None
        allocations = ring.allocations.copy()
        used = sum(size for _, size, _ in allocations.values())
        return {
            "size_bytes": ring.total_size,
            "used_bytes": min(used, ring.total_size),
            "high_water_bytes": min(self._tracker.ring_high_water_bytes, ring.total_size),
            "live": len(allocations),
        }

    def ring_view(self) -> RingView | None:
        ring, use = self._ring, self.ring_use()
        if ring is None or use is None:
            return None
        now_ns, metrics = time.monotonic_ns(), self.telemetry.metrics
        allocations = [
            self._allocation(serial, region, self._tracker.regions.get(serial), now_ns)
            for serial, region in sorted(ring.allocations.copy().items())
        ]
        return {
            "size_bytes": ring.total_size,
            "head_bytes": ring.head,
            "round": ring.round,
            "used_bytes": sum(each["end"] - each["offset"] for each in allocations),
            "high_water_bytes": use["high_water_bytes"],
            "watermark": {
                "round": ring.watermark_round,
                "tail": ring.watermark_tail,
                "age_ns": allocations[0]["age_ns"] if allocations else 0,
            },
            "allocations": allocations,
            "copies": {
                "waiting": sum(each["state"] == "landed" for each in allocations),
                "copying_age_ns": None,
                "turn_age_ns": None,
            },
            "granted_total": int(metrics.total("kvctl_ring_grants_total")),
            "refused_total": int(metrics.total("kvctl_ring_refusals_total")),
            "refused_largest_bytes": self._tracker.refused_largest_bytes or None,
            "revoked_total": 0,
        }

    def _allocation(
        self, serial: int, region: tuple[int, int, int], known: Region | None, now_ns: int
    ) -> RingAllocation:
        offset, size, ring_round = region
        room = None if known is None else self._tracker.rooms.get(known.room)
        missing = [] if room is None or known is None else [writer.name for writer in room.owing(known.chunk)]
        return {
            "serial": serial,
            "room": "" if known is None else str(known.room),
            "nonce": "0",
            "writer": ", ".join(missing),
            "chunk": 0 if known is None else known.chunk,
            "layers": list(self._tracker.shape.layers),
            "offset": offset,
            "end": offset + size,
            "round": ring_round,
            "age_ns": 0 if known is None else now_ns - known.granted_ns,
            "state": "granted" if missing or self._is_repeated(serial) else "landed",
            "posted": False,
            "room_state": "gone" if room is None else room.record.state_now.label,
            "aside": False,
        }

    def _is_repeated(self, serial: int) -> bool:
        """Returns whether SGLang has granted this region for a chunk that was in its pages already.

        It then is in the receiver's list, from which SGLang takes a region when it has begun to copy it.
        """
        known = self._tracker.regions.get(serial)
        receiver = None if known is None else self._manager._staging_ctx.room_receivers.get(known.room)
        infos = getattr(receiver, "chunk_staging_infos", ())
        return any(info[0] == serial for info in list(infos))

    def gated_parts(self) -> list[GatedPart]:
        now_ns, shape = time.monotonic_ns(), self._tracker.shape
        sizes = self._decode_tp_sizes()
        return [
            {
                "room": str(room),
                "peer": self._local.name(wait.endpoint),
                "chunk": chunk,
                "layers": list(shape.layers),
                "bytes": shape.bytes_to(wait.pages, sizes.get(wait.endpoint, shape.tp_size)),
                "waiting_for": f"watermark round {wait.round - 1} tail {wait.end}" if wait.end >= 0 else "grant",
                "age_ns": now_ns - wait.since_ns,
                "requests": 1,
                "asked_age_ns": now_ns - wait.since_ns,
            }
            for room, chunk, wait in self._waits()
        ]

    def _waits(self) -> list[tuple[int, int, GateWait]]:
        """Returns the chunks that wait for a ring, after removing those of rooms that have ended."""
        found = []
        for key, wait in self._buffer.waits.copy().items():
            room = self._tracker.rooms.get(key[0])
            if room is None or room.record.state_now.finished:
                self._buffer.waits.pop(key, None)
            else:
                found.append((key[0], key[1], wait))
        return found

    def _decode_tp_sizes(self) -> dict[str, int]:
        return {
            f"{info.endpoint}:{info.dst_port}": getattr(info, "decode_tp_size", 0) or info.dst_attn_tp_size
            for info in self._decode_ranks()
        }

    def _decode_ranks(self) -> list[Any]:
        return list(getattr(self._manager, "decode_kv_args_table", {}).copy().values())

    def buffers(self) -> StagingBuffers | None:
        buffers = getattr(self._manager._staging_ctx, "buffers", None)
        if not buffers:
            return None
        sizes = [buffer.get_size() for buffer in buffers]
        return {
            "size_bytes": sum(sizes),
            "piece_bytes": max(sizes),
            "pieces": len(sizes),
            "pieces_used": None,
            "pieces_high_water": None,
        }

    # ---- peers -------------------------------------------------------------------------------------------------

    def costs(self, tokens: int) -> tuple[int, list[TransferCost]]:
        """Returns rows without predictions: SGLang does not tell when a forward ended."""
        rows = self.peers() if self.role == "prefill" else []
        return 0, [_no_cost(row) for row in rows]

    def peers(self) -> list[PeerRow]:
        now_ns, rooms = time.monotonic_ns(), self.telemetry.rooms.active()

        def open_rooms(*names: str) -> int:
            return sum(not record.state_now.finished and any(n in record.peers for n in names) for record in rooms)

        if self.role == "decode":
            failures = dict(self._manager.heartbeat_failures)
            return [
                self._peer(
                    peer.name,
                    endpoint,
                    "lost" if peer.lost_ns else "suspect" if failures.get(peer.server) else "ready",
                    now_ns - peer.answered_ns,
                    open_rooms(peer.name),
                    f"its server's bootstrap address {peer.server} does not answer" if peer.lost_ns else None,
                )
                for endpoint, peer in self._tracker.peers.copy().items()
            ]
        waters = dict(getattr(self._manager._staging_ctx, "remote_watermarks", {}))
        failed = set(getattr(self._manager, "failed_sessions", ()))
        rows = []
        for session, info in getattr(self._manager, "decode_kv_args_table", {}).copy().items():
            endpoint = f"{info.endpoint}:{info.dst_port}"
            error = "a transfer to it failed, and SGLang sends it nothing any more" if session in failed else None
            row = self._peer(
                self._local.name(endpoint), endpoint, "lost" if error else "ready", None, open_rooms(endpoint), error
            )
            row["watermark_seen"] = list(waters[session]) if session in waters else None
            rows.append(row)
        return rows

    def _peer(
        self, name: str, endpoint: str, state: str, heard_ns: int | None, rooms: int, error: str | None
    ) -> PeerRow:
        return {
            "agent": self.name,
            "peer": name,
            "role": "decode" if self.role == "prefill" else "prefill",
            "state": state,
            "incarnation": None,
            "endpoint": f"tcp://{endpoint}",
            "last_heard_ns": heard_ns,
            "unheard_ns": None,
            "rtt_ns": None,
            "clock_offset_ns": None,
            "clock_error_ns": None,
            "control_queue": None,
            "watermark_sent": None,
            "watermark_seen": None,
            "lane": self._engine,
            "lane_gb_per_s": None,
            "lane_descriptor_ns": None,
            "lane_measured_age_ns": None,
            "lane_kind": None,
            "lane_expected": None,
            "lane_source": None,
            "lane_direct": None,
            "lane_why_not": None,
            "same_host": None,
            "peer_host": None,
            "address": None,
            "wire_ns": None,
            "oldest_write_ns": None,
            "tcp": None,
            "process": None,
            "needed": True,
            "former": [],
            "rooms": rooms,
            "errors_total": None,
            "last_error": error,
            "differences": [],
        }

    def peer_states(self) -> Sequence[str]:
        return [row["state"] for row in self.peers()]


def _no_cost(row: PeerRow) -> TransferCost:
    """Returns a row of `cost` about a peer, whose row in `peers` is given, without a prediction."""
    return {
        "agent": row["agent"],
        "peer": row["peer"],
        "incarnation": row["incarnation"],
        "rank": None,
        "state": row["state"],
        "rooms": row["rooms"],
        "queued_bytes": None,
        "bytes": None,
        "bytes_per_token": None,
        "path": None,
        "fixed_ns": None,
        "bytes_per_s": None,
        "alone_ns": None,
        "predicted_ns": None,
        "basis": None,
        "samples": 0,
        "age_ns": None,
        "error_ratio": None,
        "reason": f"{OWNED_BY_SGLANG} the transfers",
    }


def _setting(key: str, value: float, unit: str, variable: str) -> ConfigRow:
    return {
        "key": key,
        "value": value,
        "default": None,
        "origin": f"environment {variable}" if variable in os.environ else "default",
        "unit": unit,
        "runtime": False,
        "help": f"SGLang's {variable}",
    }


def _device_of(manager: Any) -> str:
    from sglang.srt.runtime_context import get_device

    device = str(get_device().device)
    return device if device == "cpu" or ":" in device else f"{device}:{manager.kv_args.gpu_id}"
