"""Hooks on the classes of vLLM's NIXL connectors, scheduler half and worker half, and on NIXL's agent.

They run on vLLM's threads (`integrations.observe.hooks`). The metadata of each step carries the events of the scheduler
half to the workers, as an attribute of plain values.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from time import monotonic_ns as now_ns
from time import perf_counter
from typing import Any

import msgspec

from kvctl_agent.integrations.observe.event_queue import EventQueue
from kvctl_agent.integrations.observe.hooks import Hooks, after, before
from kvctl_agent.integrations.vllm.observe.tracker import READ, WRITE, Posted, Server, Tracker

WATCH = "_kvctl_watch"
"""Attribute of a worker half, and of its NIXL agent, that has its `Watch`."""
_PENDING_EVENTS = "_kvctl_events"
"""Attribute of a scheduler half with its events since its last step, and of the metadata of a step."""
_DROPPED_EVENTS = "_kvctl_dropped"
_MOST_ARRIVALS = 4096
_MOST_EVENTS = 65536  # with the ends of requests: without its end, a room would stay
_MOST_POSTED = 65536
_HEARTBEAT = b"HB:"
_REGISTRATION = b"PUSH_REG:"
_SKEW_NS = 60_000_000_000
_RANDOM_END = re.compile(r"(.+)-[0-9a-fA-F]{8}", re.DOTALL)
_FINISHED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
_FAILURES: Mapping[str, str] = {
    **dict.fromkeys(("handshake_failed", "handshake_setup_failed", "push_reg_handshake_failed"), "KV_HANDSHAKE_FAILED"),
    **dict.fromkeys(("transfer_setup_failed", "transfer_failed", "transfer_exception"), "KV_TRANSPORT"),
}
"""Failure code by vLLM's type of a failure that ends a request."""


class Watch:
    """State of the hooks of one worker half.

    Attributes:
        push: whether the prefill engine writes; otherwise the decode engine reads.
        begin: called with the metadata of each step until the observation has begun.
        posted: transfers in flight by the identity of NIXL's handle.
        planned: Mooncake's writes, with the request's share of the bytes, by the identity of vLLM's list of addresses.
        connecting: begin of the handshakes with Mooncake's prefill engines, by vLLM's id of the engine.
    """

    def __init__(self, worker: Any, push: bool, begin: Callable[[Any], None]) -> None:
        self.worker = worker
        self.push = push
        self.begin: Callable[[Any], None] | None = begin
        self.turn: Callable[[], None] | None = None
        self.stopped = False
        self.events = EventQueue("vLLM")
        self.posted: dict[int, Posted] = {}
        self.planned: dict[int, list[tuple[Posted, float]]] = {}
        self.connecting: dict[str, int] = {}


class _Posting(threading.local):
    """The request that this thread has begun to post transfers for; vLLM posts none without one."""

    request: tuple[str, str, int] | None = None


_posting = _Posting()


def base_id(request: str) -> str:
    """Returns a request id without vLLM's random end, as push mode matches the ids of both engines."""
    found = _RANDOM_END.fullmatch(request)
    return found[1] if found else request


def blocks_of(groups: Iterable[Any] | None) -> int:
    """Returns the number of blocks in all KV cache groups."""
    return sum(len(group) if hasattr(group, "__len__") else 1 for group in groups or ())


# ---- scheduler half --------------------------------------------------------------------------------------------


def record(scheduler: Any, name: str, *arguments: Any) -> None:
    """Keeps an event of a scheduler half for the workers; counts those for which there is no space."""
    attributes = vars(scheduler)
    events: list[Any] = attributes.setdefault(_PENDING_EVENTS, [])
    if len(events) < (_MOST_EVENTS if name in ("held", "ended") else _MOST_ARRIVALS):
        events.append((name, now_ns(), *arguments))
    else:
        attributes[_DROPPED_EVENTS] = attributes.get(_DROPPED_EVENTS, 0) + 1


def record_request(scheduler: Any, request: Any, consumer: bool, **ids: str) -> None:
    """Records a new request; `ids` names, for each role, the parameter with the id of the transfer.

    Args:
        consumer: whether the engine only decodes.
    """
    params = request.kv_transfer_params or {}
    role = "prefill" if params.get("do_remote_decode") else "decode" if params.get("do_remote_prefill") else None
    if role is not None:
        transfer = str(params.get(ids.get(role)) or "")
        record(scheduler, "arrived", role, request.request_id, transfer, request.num_prompt_tokens)
    elif consumer:
        record(scheduler, "computed_here")


def _new_request(_: int, __: None, scheduler: Any, request: Any) -> None:
    consumer = scheduler.vllm_config.kv_transfer_config.kv_role == "kv_consumer"
    record_request(scheduler, request, consumer, decode="remote_request_id")


def _request_finished(_: int, result: tuple[bool, Any], scheduler: Any, request: Any, block_ids: Any) -> None:
    held, params = result
    if held:
        lease_s = scheduler._reqs_need_send.get(request.request_id, 0) - perf_counter()
        blocks = blocks_of((params or {}).get("remote_block_ids") or block_ids)
        record(scheduler, "held", request.request_id, blocks, round(max(0.0, lease_s), 1))
    elif request.kv_transfer_params:
        record(scheduler, "ended", request.request_id, request.status.name not in _FINISHED)


def build_connector_meta(_: int, metadata: Any, scheduler: Any, *__: Any) -> None:
    """Adds the events of the scheduler half to the metadata of a step."""
    attributes = vars(scheduler)
    if events := attributes.get(_PENDING_EVENTS):
        if dropped := attributes.pop(_DROPPED_EVENTS, 0):
            events.append(("dropped", now_ns(), dropped))
        setattr(metadata, _PENDING_EVENTS, tuple(events))
        events.clear()


# ---- worker half -----------------------------------------------------------------------------------------------


def begin_step(worker: Any, metadata: Any) -> Watch:
    """Notes a step and adds the events of the scheduler half; returns the worker's `Watch`."""
    watch: Watch = getattr(worker, WATCH)
    if watch.turn is not None:
        watch.turn()
    elif watch.begin is not None:
        watch.begin(metadata)
    if events := vars(metadata).get(_PENDING_EVENTS):
        _add_scheduler_events(watch, events)
    return watch


def _start_load_kv(worker: Any, metadata: Any) -> None:
    watch = begin_step(worker, metadata)
    if metadata.reqs_to_recv:
        for request, meta in metadata.reqs_to_recv.items():
            _allocated(watch, request, meta)
    for request in metadata.reqs_not_processed:
        watch.events.add(Tracker.ended, now_ns(), request, True)


def _add_scheduler_events(watch: Watch, events: Iterable[tuple[Any, ...]]) -> None:
    """Adds events of the scheduler half; another host has another clock."""
    now = now_ns()
    for name, at_ns, *arguments in events:
        if name == "arrived":
            role, request, remote, tokens = arguments
            arguments = [role, request, base_id(request) if watch.push else remote or request, tokens]
        at_ns = at_ns if abs(now - at_ns) < _SKEW_NS else now
        watch.events.add(_SCHEDULER_EVENTS[name], at_ns, *arguments)


_SCHEDULER_EVENTS: Mapping[str, Callable[..., None]] = {
    event.__name__: event
    for event in (Tracker.arrived, Tracker.computed_here, Tracker.held, Tracker.ended, Tracker.dropped)
}


def _allocated(watch: Watch, request: str, meta: Any) -> None:
    remote, at_ns = meta.remote, now_ns()
    blocks = blocks_of(meta.local_block_ids)
    transfer = base_id(request) if watch.push else remote.request_id
    watch.events.add(Tracker.arrived, at_ns, "decode", request, transfer)
    server = Server(str(remote.host), int(remote.port), getattr(meta, "pp_size", 1))
    cached = max(getattr(meta, "local_num_computed_blocks", ()), default=0)
    watch.events.add(Tracker.allocated, at_ns, request, blocks, cached, remote.engine_id, server)
    if not blocks:  # vLLM tells the prefill engine, and awaits nothing
        watch.events.add(Tracker.ended, at_ns, request, False)


def transfer_results(_: int, results: Any, worker: Any) -> None:
    """Ends the requests that vLLM has ended."""
    sent, received = results.finished_sending, results.finished_recving
    if not sent and not received:
        return
    events, at_ns = getattr(worker, WATCH).events, now_ns()
    for request in sent:
        events.add(Tracker.released, at_ns, request)
    for request in received:
        events.add(Tracker.received, at_ns, request, request in results.failed_recving)


def _handshake_begins(
    worker: Any, host: str, port: int, remote_tp_size: int, engine: str, *rest: Any, **named: Any
) -> None:
    try:
        ranks = worker.transfer_topo.handshake_target_ranks(remote_tp_size)
    except Exception:  # the engine refuses this peer, and says so itself
        ranks = ()
    server = Server(host, int(port), _pp_size(rest, named))
    getattr(worker, WATCH).events.add(Tracker.connecting, now_ns(), engine, server, tuple(ranks))


def _handshake_ended(
    start_ns: int, result: Any, worker: Any, host: str, port: int, _: int, __: str, *rest: Any, **named: Any
) -> None:
    agents = result[0] if isinstance(result, tuple) else result
    ranks = tuple(each if isinstance(each, tuple) else (0, each) for each in agents)
    server, at_ns = Server(host, int(port), _pp_size(rest, named)), now_ns()
    getattr(worker, WATCH).events.add(Tracker.connected, at_ns, server, ranks, at_ns - start_ns)


def _pp_size(rest: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    return int(named.get("remote_pp_size", rest[1] if len(rest) > 1 else 1))


def _log_failure(
    worker: Any, failure_type: str, req_id: str | None, msg: str = "", error: Any = None, meta: Any = None, **more: Any
) -> None:
    code = _FAILURES.get(failure_type)
    if code is None:
        return
    remote = getattr(meta, "remote", None)
    at = f" with {remote.host}:{remote.port}" if remote is not None else ""
    if type(error).__name__ == "Again":
        text = "no answer within 5 s"
    else:
        text = f"{type(error).__name__}: {error}" if error is not None else f"state {more.get('xfer_state')}"
    text = f"{failure_type.replace('_', ' ')}{at}: {text}"
    engine = more.get("remote_engine_id")
    getattr(worker, WATCH).events.add(Tracker.reason, now_ns(), req_id, code, text, engine)


def _begin_posting(_: Any, *positional: Any, **named: Any) -> None:
    spec = positional[0] if positional else named["read_spec"]
    _posting.request = named["request_id"], named["dst_engine_id"], int(spec.remote_rank)


# ---- NIXL's agent ----------------------------------------------------------------------------------------------


def _prepared(start_ns: int, handle: Any, agent: Any, operation: str, _: Any, local: Any, *__: Any, **___: Any) -> None:
    watch, request = getattr(agent, WATCH, None), _posting.request
    if watch is None or request is None or len(watch.posted) >= _MOST_POSTED:
        return
    path = READ if operation == "READ" else WRITE
    watch.posted[id(handle)] = Posted(*request, path, len(local), start_ns, 0)


def _transfer(_: int, __: Any, agent: Any, handle: Any, *___: Any, **____: Any) -> None:
    watch = getattr(agent, WATCH, None)
    if watch is not None and (posted := watch.posted.get(id(handle))) is not None:
        at_ns = now_ns()
        watch.posted[id(handle)] = posted = posted._replace(posted_ns=at_ns)
        watch.events.add(Tracker.posted, at_ns, posted)


def _telemetry(_: int, result: Any, agent: Any, handle: Any) -> None:
    watch = getattr(agent, WATCH, None)
    if watch is not None and (posted := watch.posted.pop(id(handle), None)) is not None:
        nbytes, took_us = getattr(result, "totalBytes", 0), getattr(result, "xferDuration", 0)
        watch.events.add(Tracker.moved, now_ns(), posted, int(nbytes), int(took_us) * 1000)


def _release(agent: Any, handle: Any) -> None:
    watch = getattr(agent, WATCH, None)
    if watch is not None:
        watch.posted.pop(id(handle), None)  # the identity will be another handle's


def _notifications(_: int, result: Any, agent: Any, *__: Any, **___: Any) -> None:
    watch = getattr(agent, WATCH, None)
    if not result or watch is None:
        return
    for sender, messages in result.items():
        for message in messages:
            try:
                _notification(watch, str(sender), message)
            except Exception:  # a peer wrote it: any value may have any type
                watch.events.add(Tracker.unreadable, now_ns(), str(sender))


def _notification(watch: Watch, sender: str, message: bytes) -> None:
    worker, events, at_ns = watch.worker, watch.events, now_ns()
    if message.startswith(_HEARTBEAT):
        for request in message[len(_HEARTBEAT) :].decode().split(","):
            events.add(Tracker.claimed, at_ns, request, sender)
    elif message.startswith(_REGISTRATION):
        data = msgspec.msgpack.decode(message[len(_REGISTRATION) :])
        server = Server(str(data["decode_host"]), int(data["decode_port"]))
        events.add(Tracker.registered, at_ns, base_id(data["request_id"]), sender, server)
    else:
        request, _, number = message.decode().rpartition(":")
        if request in worker._reqs_to_send or request in worker._reqs_to_process:
            if not watch.push:
                events.add(Tracker.read, at_ns, request, sender, int(number))
        elif (meta := worker._recving_metadata.get(request)) is not None:
            writers = getattr(meta, "pp_size", 1) * max(1, int(number) // worker.world_size)
            events.add(Tracker.written, at_ns, request, sender, writers)
        else:
            events.add(Tracker.late, at_ns, request, sender)


# ---- where they are put, beside those that all connectors have -------------------------------------------------

SCHEDULER: Hooks = ((after, "on_new_request", _new_request), (after, "request_finished", _request_finished))
WORKER: Hooks = (
    (before, "start_load_kv", _start_load_kv),
    (before, "_nixl_handshake", _handshake_begins),
    (after, "_nixl_handshake", _handshake_ended),
    (before, "_log_failure", _log_failure),
)
PULL: Hooks = ((before, "_read_blocks", _begin_posting),)
PUSH: Hooks = ((before, "_xfer_blocks", _begin_posting),)
AGENT: Hooks = (
    (after, "make_prepped_xfer", _prepared),
    (after, "transfer", _transfer),
    (after, "get_xfer_telemetry", _telemetry),
    (before, "release_xfer_handle", _release),
    (after, "get_new_notifs", _notifications),
)
