"""Hooks on SGLang's managers, senders, receivers and staging classes, which record events in an `EventBuffer`.

A hook runs on SGLang's thread before or after the hooked method and changes neither its arguments nor its result. It
takes no lock and waits for nothing. One that fails is removed, with one line in the log; SGLang does not notice.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from kvctl_agent.integrations.sglang.observe.events import (
    Accepted,
    Begun,
    ChunkLanded,
    ChunkReady,
    Cleared,
    EventBuffer,
    Failed,
    GateWait,
    PagesAnnounced,
    PartSent,
    RegionFreed,
    RegionGranted,
    RegionRefused,
    ServerAnswered,
    ServerLost,
    StatusChanged,
    WorkerState,
    Writer,
    WriterDone,
    WritersKnown,
    now_ns,
)
from kvctl_agent.integrations.sglang.rank_names import prefill_name

logger = logging.getLogger("kvctl")

BUFFER = "_kvctl_events"
"""Attribute of a manager that has its `EventBuffer`."""

_FAILED, _WAITING, _SUCCESS = 0, 2, 4  # KVPoll
_OVERSIZED = -2  # StagingAllocator.ALLOC_OVERSIZED

_worker = WorkerState()


def before(target: type, method: str, hook: Callable[..., None]) -> None:
    """Makes `target.method` call `hook` with the same arguments before it runs. A class without the method stays."""
    original = getattr(target, method, None)
    if original is None:
        return
    run: Callable[..., None] | None = hook

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        nonlocal run
        if run is not None:
            try:
                run(*args, **kwargs)
            except Exception as error:
                run = None
                _log_removed(target, method, error)
        return original(*args, **kwargs)

    setattr(target, method, hooked)


def after(target: type, method: str, hook: Callable[..., None]) -> None:
    """Makes `target.method` call `hook(start in ns, result, *arguments)` after it has returned; as `before`."""
    original = getattr(target, method, None)
    if original is None:
        return
    run: Callable[..., None] | None = hook

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        nonlocal run
        start_ns = now_ns()
        result = original(*args, **kwargs)
        if run is not None:
            try:
                run(start_ns, result, *args, **kwargs)
            except Exception as error:
                run = None
                _log_removed(target, method, error)
        return result

    setattr(target, method, hooked)


# `before` and `after` each have the guard written out: a call less for every hook.
def _log_removed(target: type, method: str, error: Exception) -> None:
    logger.error("kvctl: hook on %s.%s removed: %s: %s", target.__name__, method, type(error).__name__, error)


def buffer_of(manager: Any) -> EventBuffer:
    buffer: EventBuffer = getattr(manager, BUFFER)
    return buffer


# ---- both roles ------------------------------------------------------------------------------------------------


def _update_status(manager: Any, bootstrap_room: int, status: int) -> None:
    # Before SGLang sets the status: another thread may clear the room as soon as it sees it.
    buffer = buffer_of(manager)
    if status == _WAITING and (infos := getattr(manager, "transfer_infos", {}).get(bootstrap_room)):
        endpoints = tuple(f"{info.endpoint}:{info.dst_port}" for info in list(infos.values()) if not info.is_dummy)
        buffer.add(Accepted(now_ns(), bootstrap_room, endpoints))
    buffer.add(StatusChanged(now_ns(), bootstrap_room, int(status)))


def _record_failure(manager: Any, bootstrap_room: int, failure_reason: str) -> None:
    buffer_of(manager).add(Failed(now_ns(), bootstrap_room, failure_reason, None))


def _conclude_transfer(
    manager: Any, *, bootstrap_room: int, status: int, failure_reason: str | None = None, **_: Any
) -> None:
    if status == _FAILED and failure_reason:
        buffer_of(manager).add(Failed(now_ns(), bootstrap_room, failure_reason, None))


def _clear(end: Any) -> None:
    buffer_of(end.kv_mgr).add(Cleared(now_ns(), end.bootstrap_room))


# ---- prefill ---------------------------------------------------------------------------------------------------


def _sender_init(_: int, __: None, sender: Any, num_kv_indices: int, *___: Any, **____: Any) -> None:
    buffer_of(sender.kv_mgr).add(Begun(now_ns(), sender.bootstrap_room, num_kv_indices))


def _add_transfer_request(
    manager: Any, bootstrap_room: int, kv_indices: Any, index_slice: slice, is_last_chunk: bool, *_: Any, **__: Any
) -> None:
    chunk = ChunkReady(now_ns(), bootstrap_room, index_slice.start or 0, len(kv_indices), is_last_chunk)
    buffer_of(manager).add(chunk)


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
    buffer = buffer_of(strategy.kv_manager)
    key: tuple[int, int, str] = req.room, chunk, session_id or req.mooncake_session_id
    endpoint = f"{req.endpoint}:{req.dst_port}"
    if ready:
        _worker.gated = buffer.waits.pop(key, None) is not None
    elif offset == _OVERSIZED:
        reason = f"chunk {chunk} of {num_chunk_pages} pages exceeds the ring buffer of decode rank {endpoint}"
        buffer.add(Failed(now_ns(), req.room, reason, None))
        buffer.waits.pop(key, None)
    else:
        known = buffer.waits.get(key)
        if known is None or known.end != end:
            since_ns = now_ns() if known is None else known.since_ns
            buffer.waits[key] = GateWait(since_ns, endpoint, kv_chunk_index_start, num_chunk_pages, ring_round, end)


def _sent(path: str) -> Callable[..., None]:
    """Returns the hook of a method that sends a chunk to one decode rank on this path."""

    def sent(start_ns: int, result: Any, manager: Any, session: str, *_: Any, **__: Any) -> None:
        chunk = _worker.chunk
        if chunk is None or result is None or result == -1:
            return
        info = manager.decode_kv_args_table[session]
        is_synchronous = isinstance(result, int)
        end_ns = now_ns()
        part = PartSent(
            end_ns,
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
            buffer_of(manager).add(part)

    return sent


def _await_handles(_: int, result: tuple[bool, bool], manager: Any, *__: Any, **___: Any) -> None:
    settled, any_failed = result
    if settled and not any_failed:
        end_ns = now_ns()
        for part in _worker.posted:
            buffer_of(manager).add(replace(part, at_ns=end_ns))
    _worker.posted.clear()


# ---- decode ----------------------------------------------------------------------------------------------------


def _receiver_init(_: int, __: None, receiver: Any, *___: Any, **____: Any) -> None:
    if getattr(receiver, "bootstrap_infos", None):
        buffer = buffer_of(receiver.kv_mgr)
        buffer.add(
            WritersKnown(now_ns(), receiver.bootstrap_room, writers_of(receiver, buffer), receiver.require_staging)
        )


def writers_of(receiver: Any, buffer: EventBuffer) -> tuple[Writer, ...]:
    """Returns the prefill ranks that a receiver has looked up, in its order: by cp, then tp, then pp backwards."""
    info = receiver.prefill_info
    key = receiver.bootstrap_addr, receiver.prefill_dp_rank, receiver.target_tp_rank, id(receiver.bootstrap_infos[0])
    found = buffer.writers.get(key)
    if found is None:
        coordinates = [
            (cp, tp, pp)
            for cp in receiver.target_cp_ranks
            for tp in receiver.target_tp_ranks
            for pp in reversed(receiver.target_pp_ranks)
        ]
        found = buffer.writers[key] = tuple(
            Writer(
                tp * info.pp_size * info.attn_cp_size + pp * info.attn_cp_size + cp,
                f"{row['rank_ip']}:{row['rank_port']}",
                prefill_name(info, row["rank_ip"], receiver.prefill_dp_rank, pp, cp, tp),
                receiver.bootstrap_addr,
                not row["is_dummy"],
            )
            for row, (cp, tp, pp) in zip(receiver.bootstrap_infos, coordinates, strict=True)
        )
        while len(buffer.writers) > 256:
            del buffer.writers[next(iter(buffer.writers))]
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
        event = PagesAnnounced(now_ns(), receiver.bootstrap_room, len(kv_indices), decode_prefix_len or 0)
        buffer_of(receiver.kv_mgr).add(event)


def _apply_prefill_status(
    manager: Any, *, bootstrap_room: int, status: int, prefill_rank: int, failure_reason: str | None = None
) -> None:
    if bootstrap_room not in manager.request_status:
        return
    if status == _SUCCESS:
        buffer_of(manager).add(WriterDone(now_ns(), bootstrap_room, prefill_rank))
    elif status == _FAILED:
        reason = failure_reason or manager.DEFAULT_PREFILL_FAILURE_REASON
        buffer_of(manager).add(Failed(now_ns(), bootstrap_room, reason, prefill_rank))


def _handle_chunk_ready(_: int, handled: bool, manager: Any, msg: list[bytes]) -> None:
    if handled and int(msg[1]) in manager.request_status:
        rank = int(msg[6]) if len(msg) > 6 else None
        buffer_of(manager).add(ChunkLanded(now_ns(), int(msg[1]), int(msg[2]), int(msg[4]), rank))


def _handle_staging_req(_: int, __: None, manager: Any, msg: list[bytes]) -> None:
    room, chunk, pages = int(msg[1]), int(msg[2]), int(msg[3])
    receiver = manager._staging_ctx.room_receivers.get(room)
    infos = getattr(receiver, "chunk_staging_infos", ())
    if chunk >= len(infos):
        return
    serial, offset = infos[chunk][:2]
    if serial >= 0:
        buffer_of(manager).add(RegionGranted(now_ns(), room, chunk, pages, serial))
    elif offset == _OVERSIZED:
        buffer_of(manager).add(RegionRefused(now_ns(), room, chunk, pages))


def _free_region(_: int, __: None, handler: Any, alloc_id: int, *___: Any) -> None:
    buffer_of(handler.kv_manager).add(RegionFreed(now_ns(), alloc_id))


def _server_answered(manager: Any, bootstrap_addr: str) -> None:
    buffer_of(manager).add(ServerAnswered(now_ns(), bootstrap_addr))


def _server_lost(manager: Any, failed_bootstrap_addr: str) -> None:
    buffer_of(manager).add(ServerLost(now_ns(), failed_bootstrap_addr))


# ---- where they are put ----------------------------------------------------------------------------------------

_BEFORE_MANAGER: Mapping[str, Callable[..., None]] = {
    "update_status": _update_status,
    "record_failure": _record_failure,
    "conclude_transfer": _conclude_transfer,
    "add_transfer_request": _add_transfer_request,
    "apply_prefill_status": _apply_prefill_status,
    "_on_heartbeat_success": _server_answered,
    "_handle_node_failure": _server_lost,
}
_AFTER_MANAGER: Mapping[str, Callable[..., None]] = {
    "send_kvcache": _sent("bulk"),
    "send_kvcache_mixed": _sent("bulk"),
    "send_kvcache_dcp": _sent("slice"),
    "send_kvcache_slice": _sent("slice"),
    "send_kvcache_staged": _sent("staged"),
    "_await_handles": _await_handles,
    "handle_chunk_ready": _handle_chunk_ready,
    "_handle_staging_req": _handle_staging_req,
}


def hook_manager(manager_class: type) -> None:
    for name, hook in _BEFORE_MANAGER.items():
        before(manager_class, name, hook)
    for name, hook in _AFTER_MANAGER.items():
        after(manager_class, name, hook)


def hook_sender(sender_class: type) -> None:
    after(sender_class, "init", _sender_init)
    before(sender_class, "clear", _clear)


def hook_receiver(receiver_class: type) -> None:
    after(receiver_class, "init", _receiver_init)
    after(receiver_class, "send_metadata", _send_metadata)
    before(receiver_class, "clear", _clear)


def hook_workers(queue_class: type, strategy_class: type, handler_class: type) -> None:
    """Hooks what SGLang's backends share: FastQueue, PrefillStagingStrategy and DecodeStagingHandler."""
    after(queue_class, "get", _dequeued)
    after(strategy_class, "check_ready", _check_ready)
    after(handler_class, "_free_and_send_watermark", _free_region)
