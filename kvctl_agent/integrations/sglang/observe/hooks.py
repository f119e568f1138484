"""Hooks on SGLang's managers, senders, receivers and staging classes, which add events to an `EventQueue`.

They run on SGLang's threads (`integrations.observe.hooks`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic_ns as now_ns
from typing import Any

from kvctl_agent.integrations.observe.hooks import Hooks, after, before
from kvctl_agent.integrations.sglang.observe.event_queue import EventQueue
from kvctl_agent.integrations.sglang.observe.tracker import SentPart, Tracker, Writer
from kvctl_agent.integrations.sglang.rank_names import prefill_name
from kvctl_agent.integrations.sglang.releases import staging_context

EVENTS = "_kvctl_events"
"""Attribute of a manager that has its `EventQueue`."""

_FAILED, _WAITING, _SUCCESS = 0, 2, 4  # KVPoll
_OVERSIZED = -2  # StagingAllocator.ALLOC_OVERSIZED
_MOST_LOOK_UPS = 256


class _Worker(threading.local):
    """State of a transfer worker's thread: the chunk that it works on, and what it has posted of it.

    Attributes:
        chunk: SGLang's TransferKVChunk; None outside a worker.
        dequeued_ns: time at which the worker took it from its queue.
        gated: whether the chunk had to wait for the ring.
        posted: writes whose end the worker has not seen.
    """

    chunk: Any = None
    dequeued_ns = 0
    gated = False

    def __init__(self) -> None:
        self.posted: list[SentPart] = []


_worker = _Worker()


def events_of(manager: Any) -> EventQueue:
    events: EventQueue = getattr(manager, EVENTS)
    return events


# ---- both roles ------------------------------------------------------------------------------------------------


def _update_status(manager: Any, bootstrap_room: int, status: int) -> None:
    # Before SGLang sets the status: another thread may clear the room as soon as it sees it.
    events = events_of(manager)
    if status == _WAITING and (infos := getattr(manager, "transfer_infos", {}).get(bootstrap_room)):
        endpoints = [f"{info.endpoint}:{info.dst_port}" for info in list(infos.values()) if not info.is_dummy]
        events.add(Tracker.accepted, now_ns(), bootstrap_room, endpoints)
    events.add(Tracker.status_changed, now_ns(), bootstrap_room, int(status))


def _record_failure(manager: Any, bootstrap_room: int, failure_reason: str) -> None:
    events_of(manager).add(Tracker.failed, now_ns(), bootstrap_room, failure_reason)


def _conclude_transfer(
    manager: Any, *, bootstrap_room: int, status: int, failure_reason: str | None = None, **_: Any
) -> None:
    if status == _FAILED and failure_reason:
        events_of(manager).add(Tracker.failed, now_ns(), bootstrap_room, failure_reason)


def _clear(end: Any) -> None:
    events = events_of(end.kv_mgr)
    events.forget_waits(end.bootstrap_room)
    events.add(Tracker.cleared, now_ns(), end.bootstrap_room)


# ---- prefill ---------------------------------------------------------------------------------------------------


def _sender_init(_: int, __: None, sender: Any, num_kv_indices: int, *___: Any, **____: Any) -> None:
    events_of(sender.kv_mgr).add(Tracker.begun, now_ns(), sender.bootstrap_room, num_kv_indices)


def _add_transfer_request(
    manager: Any, bootstrap_room: int, kv_indices: Any, index_slice: slice, is_last_chunk: bool, *_: Any, **__: Any
) -> None:
    events_of(manager).add(Tracker.chunk_ready, now_ns(), bootstrap_room, index_slice.start or 0, is_last_chunk)


def _dequeued(_: int, chunk: Any, __: Any) -> None:
    if chunk is not _worker.chunk:  # a chunk that waits for the ring is queued again and again
        _worker.gated = False
    _worker.chunk, _worker.dequeued_ns = chunk, now_ns()
    _worker.posted.clear()


def _check_ready(
    _: int,
    result: tuple[bool, int, int, int, int],
    strategy: Any,
    req: Any,
    kv_chunk_index_start: int,
    num_chunk_pages: int,
    session_id: str | None = None,
) -> None:
    ready, chunk, offset, ring_round, end = result
    events, endpoint = events_of(strategy.kv_manager), f"{req.endpoint}:{req.dst_port}"
    key = req.room, chunk, endpoint
    if ready:
        _worker.gated = events.wait_over(key)
    elif offset == _OVERSIZED:
        reason = f"chunk {chunk} of {num_chunk_pages} pages exceeds the ring buffer of decode rank {endpoint}"
        events.add(Tracker.failed, now_ns(), req.room, reason)
        events.wait_over(key)
    else:
        events.wait(now_ns(), key, num_chunk_pages, ring_round, end)


def _sent(path: str) -> Callable[..., None]:
    """Returns the hook of a method that sends a chunk to one decode rank on this path."""

    def sent(start_ns: int, result: Any, manager: Any, session: str, *_: Any, **__: Any) -> None:
        chunk = _worker.chunk
        if chunk is None or result is None or result == -1:
            return
        info = manager.decode_kv_args_table[session]
        is_synchronous = isinstance(result, int)
        end_ns = now_ns()
        part = SentPart(
            chunk.room,
            chunk.index_slice.start or 0,
            len(chunk.prefill_kv_indices),
            f"{info.endpoint}:{info.dst_port}",
            getattr(info, "decode_tp_size", 0) or info.dst_attn_tp_size,
            path,
            _worker.dequeued_ns,
            _worker.gated,
            start_ns,
            None if is_synchronous else end_ns,
        )
        if not is_synchronous:
            _worker.posted.append(part)
        elif result == 0:
            events_of(manager).add(Tracker.part_sent, end_ns, part)

    return sent


def _await_handles(_: int, result: tuple[bool, bool], manager: Any, *__: Any, **___: Any) -> None:
    settled, any_failed = result
    if settled and not any_failed:
        end_ns = now_ns()
        for part in _worker.posted:
            events_of(manager).add(Tracker.part_sent, end_ns, part)
    _worker.posted.clear()


# ---- decode ----------------------------------------------------------------------------------------------------


def _receiver_init(_: int, __: None, receiver: Any, *___: Any, **____: Any) -> None:
    if getattr(receiver, "bootstrap_infos", None):
        events, staged = events_of(receiver.kv_mgr), bool(receiver.require_staging)
        writers = writers_of(receiver, events)
        events.add(Tracker.writers_known, now_ns(), receiver.bootstrap_room, writers, staged)


def writers_of(receiver: Any, events: EventQueue) -> tuple[Writer, ...]:
    """Returns the prefill ranks that a receiver has looked up, in its order: by cp, then tp, then pp backwards."""
    info = receiver.prefill_info
    key = receiver.bootstrap_addr, receiver.prefill_dp_rank, receiver.target_tp_rank, id(receiver.bootstrap_infos[0])
    found = events.writers.get(key)
    if found is None:
        coordinates = [
            (cp, tp, pp)
            for cp in receiver.target_cp_ranks
            for tp in receiver.target_tp_ranks
            for pp in reversed(receiver.target_pp_ranks)
        ]
        found = events.writers[key] = tuple(
            Writer(
                tp * info.pp_size * info.attn_cp_size + pp * info.attn_cp_size + cp,
                f"{row['rank_ip']}:{row['rank_port']}",
                prefill_name(info, row["rank_ip"], receiver.prefill_dp_rank, pp, cp, tp),
                receiver.bootstrap_addr,
                not row["is_dummy"],
            )
            for row, (cp, tp, pp) in zip(receiver.bootstrap_infos, coordinates, strict=True)
        )
        while len(events.writers) > _MOST_LOOK_UPS:
            del events.writers[next(iter(events.writers))]
    return found


def _send_metadata(
    _: int,
    __: None,
    receiver: Any,
    kv_indices: Any,
    aux_index: Any = None,
    state_indices: Any = None,
    decode_prefix_len: int | None = None,
    *___: Any,
    **____: Any,
) -> None:
    if receiver.init_time is not None:  # else it could not be sent
        pages, prefix = len(kv_indices), decode_prefix_len or 0
        events_of(receiver.kv_mgr).add(Tracker.pages_announced, now_ns(), receiver.bootstrap_room, pages, prefix)


def _apply_prefill_status(
    manager: Any, *, bootstrap_room: int, status: int, prefill_rank: int, failure_reason: str | None = None
) -> None:
    if bootstrap_room not in manager.request_status:
        return
    if status == _SUCCESS:
        events_of(manager).add(Tracker.writer_done, now_ns(), bootstrap_room, prefill_rank)
    elif status == _FAILED:
        reason = failure_reason or manager.DEFAULT_PREFILL_FAILURE_REASON
        events_of(manager).add(Tracker.failed, now_ns(), bootstrap_room, reason, prefill_rank)


def _check_transfer_done(_: int, done: bool, manager: Any, room: int) -> None:
    """NIXL before 0.5.23: a decode rank counts what has arrived, and no method is called at the end."""
    if done:
        events = events_of(manager)
        for rank in list(manager.transfer_statuses[room].expected_kvs_per_pp):
            events.add(Tracker.writer_done, now_ns(), room, rank)
        events.add(Tracker.status_changed, now_ns(), room, _SUCCESS)


def _handle_chunk_ready(_: int, handled: bool, manager: Any, msg: list[bytes]) -> None:
    if handled and int(msg[1]) in manager.request_status:
        rank = int(msg[6]) if len(msg) > 6 else None
        events_of(manager).add(Tracker.chunk_landed, now_ns(), int(msg[1]), int(msg[2]), int(msg[4]), rank)


def _handle_staging_req(_: int, __: None, manager: Any, msg: list[bytes]) -> None:
    room, chunk, pages = int(msg[1]), int(msg[2]), int(msg[3])
    receiver = staging_context(manager).room_receivers.get(room)
    infos = getattr(receiver, "chunk_staging_infos", ())
    if chunk >= len(infos):
        return
    serial, offset = infos[chunk][:2]
    if serial >= 0:
        events_of(manager).add(Tracker.region_granted, now_ns(), room, chunk, pages, serial)
    elif offset == _OVERSIZED:
        events_of(manager).add(Tracker.region_refused, now_ns(), room, chunk, pages)


def _free_region(_: int, __: None, handler: Any, alloc_id: int, *___: Any) -> None:
    events_of(handler.kv_manager).add(Tracker.region_freed, now_ns(), alloc_id)


def _server_answered(manager: Any, bootstrap_addr: str) -> None:
    events_of(manager).add(Tracker.server_answered, now_ns(), bootstrap_addr)


def _server_lost(manager: Any, failed_bootstrap_addr: str) -> None:
    events_of(manager).add(Tracker.server_lost, now_ns(), failed_bootstrap_addr)


# ---- where they are put ----------------------------------------------------------------------------------------

MANAGER: Hooks = (
    (before, "update_status", _update_status),
    (before, "record_failure", _record_failure),
    (before, "conclude_transfer", _conclude_transfer),
    (before, "add_transfer_request", _add_transfer_request),
    (before, "apply_prefill_status", _apply_prefill_status),
    (before, "_on_heartbeat_success", _server_answered),
    (before, "_handle_node_failure", _server_lost),
    (after, "send_kvcache", _sent("bulk")),
    (after, "send_kvcache_mixed", _sent("bulk")),
    (after, "send_kvcache_dcp", _sent("slice")),
    (after, "send_kvcache_slice", _sent("slice")),
    (after, "send_kvcache_staged", _sent("staged")),
    (after, "_await_handles", _await_handles),
    (after, "check_transfer_done", _check_transfer_done),
    (after, "handle_chunk_ready", _handle_chunk_ready),
    (after, "_handle_staging_req", _handle_staging_req),
)
SENDER: Hooks = ((after, "init", _sender_init), (before, "clear", _clear))
RECEIVER: Hooks = ((after, "init", _receiver_init), (after, "send_metadata", _send_metadata), (before, "clear", _clear))
QUEUE: Hooks = ((after, "get", _dequeued),)
STRATEGY: Hooks = ((after, "check_ready", _check_ready),)
HANDLER: Hooks = ((after, "_free_and_send_watermark", _free_region),)
"""Hooks on FastQueue, PrefillStagingStrategy and DecodeStagingHandler, which SGLang's backends share."""
