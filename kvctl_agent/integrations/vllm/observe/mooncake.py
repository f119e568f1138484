"""Hooks on the halves of vLLM's MooncakeConnector, in which prefill writes what decode has asked it for.

They run on vLLM's threads and on the event loops of its sender and receiver, as `hooks` does for the NIXL connectors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from time import monotonic_ns as now_ns
from typing import Any
from urllib.parse import urlsplit

from kvctl_agent import rank_name
from kvctl_agent.integrations.observe.hooks import Hooks, after, before
from kvctl_agent.integrations.vllm.observe.hooks import WATCH, Watch, begin_step, blocks_of, record, record_request
from kvctl_agent.integrations.vllm.observe.tracker import WRITE, Posted, Server, Tracker

_WRITERS = "_kvctl_writers"
"""Attribute of vLLM's record of a request that decode has asked for, with the number of workers that write it."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MOST_POSTED = 4096


# ---- scheduler half --------------------------------------------------------------------------------------------


def _new_request(_: int, __: None, scheduler: Any, request: Any) -> None:
    record_request(scheduler, request, scheduler.is_kv_consumer, prefill="transfer_id", decode="transfer_id")


def _request_finished(_: int, result: tuple[bool, Any], scheduler: Any, request: Any, block_ids: Any) -> None:
    if result[0]:
        _, kept = scheduler._reqs_need_send[request.request_id]
        record(scheduler, "held", request.request_id, blocks_of(kept), lease_s())
    elif request.kv_transfer_params:  # prefill sends the blocks of a prompt that ended with its only token
        record(scheduler, "ended", request.request_id, request.status.name != "FINISHED_LENGTH_CAPPED")


def lease_s() -> float:
    """Returns the time for which prefill holds blocks."""
    from vllm import envs

    return float(envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)


# ---- worker half, decode ---------------------------------------------------------------------------------------


def port_of(bootstrap_port: int, engine: str) -> int:
    """Returns the port in the names of an engine's workers; engines of one server share a bootstrap server.

    vLLM adds their number to their id, so that both ends know it.
    """
    number = engine.rpartition("_dp")[2] if "_dp" in engine else ""
    return bootstrap_port + (int(number) if number.isdecimal() else 0)


def _server(worker: Any, engine: str, pulls: Mapping[str, Any]) -> Server:
    """Returns the address in the names of a prefill engine's workers: its bootstrap server, as other hosts know it."""
    address = urlsplit(next(iter(pulls.values())).remote_bootstrap_addr)
    host = address.hostname or ""
    return Server(worker.hostname if host in _LOOPBACK else host, port_of(address.port or 0, engine))


def _start_load_kv(worker: Any, metadata: Any) -> None:
    watch, at_ns = begin_step(worker, metadata), now_ns()
    for engine, pulls in metadata.reqs_to_recv.items():
        server = _server(worker, engine, pulls)
        for request, pull in pulls.items():
            blocks = blocks_of(pull.local_block_ids)
            watch.events.add(Tracker.arrived, at_ns, "decode", request, pull.transfer_id)
            watch.events.add(Tracker.allocated, at_ns, request, blocks, 0, engine, server)
            if not blocks:  # vLLM tells the prefill engine, and awaits nothing
                watch.events.add(Tracker.ended, at_ns, request, False)


def _new_engine(worker: Any, engine: str, pulls: Mapping[str, Any]) -> None:
    watch: Watch = getattr(worker, WATCH)
    watch.connecting[engine] = at_ns = now_ns()
    watch.events.add(Tracker.connecting, at_ns, engine, _server(worker, engine, pulls), (0,))


def _asks(_: int, __: None, worker: Any, engine: str, pulls: Mapping[str, Any]) -> None:
    watch, at_ns = getattr(worker, WATCH), now_ns()
    for pull in pulls.values():
        setattr(pull, _WRITERS, pull.pull_tasks_count)
    if (start_ns := watch.connecting.pop(engine, None)) is not None:
        ranks = worker.transfer_topo.handshake_target_ranks(worker._tp_size[engine])
        workers = tuple((0, rank) for rank in ranks)
        watch.events.add(Tracker.connected, at_ns, _server(worker, engine, pulls), workers, at_ns - start_ns)


def _answered(worker: Any, response: Any, pulls: Mapping[str, Any]) -> None:
    events, at_ns = getattr(worker, WATCH).events, now_ns()
    for request in response.ok_reqs or ():
        events.add(Tracker.written, at_ns, request, "", getattr(pulls[request], _WRITERS, 1))


def _failed(worker: Any, pulls: Mapping[str, Any], requests: Collection[str], reason: str) -> None:
    events, at_ns = getattr(worker, WATCH).events, now_ns()
    for request in requests:
        if (pull := pulls.get(request)) is not None:
            engine = pull.remote_engine_id
            code = "KV_TRANSPORT" if engine in worker._remote_agents else "KV_HANDSHAKE_FAILED"
            events.add(Tracker.reason, at_ns, request, code, reason, engine)


# ---- worker half, prefill --------------------------------------------------------------------------------------


def _decode(meta: Any) -> str:
    return rank_name("decode", {}, meta.remote_tp_rank, f"{meta.remote_hostname}:{meta.remote_port}")


def _asked(worker: Any, identity: bytes, sock: Any, meta: Any) -> None:
    events, at_ns = getattr(worker, WATCH).events, now_ns()
    server = Server(meta.remote_hostname, meta.remote_port)
    for transfer, _ in meta.req_blocks.values():
        events.add(Tracker.registered, at_ns, transfer, f"{server.host}:{server.port}", server, meta.remote_tp_rank)


def _planned(start_ns: int, result: Any, worker: Any, requests: Any, meta: Any, *_: Any) -> None:
    """Remembers the requests of a write by the identity of vLLM's list of addresses."""
    watch: Watch = getattr(worker, WATCH)
    addresses, failed, written = result[0], set(result[3]), []
    for theirs, send in requests:
        blocks = blocks_of(meta.req_blocks[theirs][1])
        if blocks and addresses and theirs not in failed:
            written.append((send.p_req_id, blocks))
        elif theirs not in failed:  # decode has all of it, or has it from another worker
            watch.events.add(Tracker.read, now_ns(), send.p_req_id, _decode(meta), send.need_send)
    if written and len(watch.planned) < _MOST_POSTED:
        decode, rank, total = _decode(meta), meta.remote_tp_rank, sum(blocks for _, blocks in written)
        watch.planned[id(addresses)] = [
            (Posted(request, decode, rank, WRITE, len(addresses) * blocks // total, start_ns, 0), blocks / total)
            for request, blocks in written
        ]


def _posts(worker: Any, session: str, addresses: list[int], *_: Any) -> None:
    watch, at_ns = getattr(worker, WATCH), now_ns()
    planned = watch.planned.get(id(addresses), ())
    for index, (posted, share) in enumerate(planned):
        planned[index] = posted._replace(posted_ns=at_ns), share
        watch.events.add(Tracker.posted, at_ns, planned[index][0])


def _written(
    start_ns: int, result: int, worker: Any, session: str, addresses: list[int], _: Any, lengths: list[int]
) -> None:
    watch, at_ns = getattr(worker, WATCH), now_ns()
    nbytes = sum(lengths)
    for posted, share in watch.planned.pop(id(addresses), ()):
        if result == 0:
            watch.events.add(Tracker.moved, at_ns, posted, round(nbytes * share), at_ns - posted.begun_ns)
        else:
            text = f"Mooncake's transfer engine returned {result} for {len(lengths)} descriptors"
            watch.events.add(Tracker.reason, at_ns, posted.request, "KV_TRANSPORT", text)


# ---- where they are put, beside those that all connectors have -------------------------------------------------

SCHEDULER: Hooks = ((after, "on_new_request", _new_request), (after, "request_finished", _request_finished))
WORKER: Hooks = (
    (before, "start_load_kv", _start_load_kv),
    (before, "handle_new_engine_id", _new_engine),
    (after, "receive_kv", _asks),
    (before, "process_pulling_result", _answered),
    (before, "_handle_failed_recv", _failed),
    (before, "send_kv_to_decode", _asked),
    (after, "_build_transfer_params", _planned),
    (before, "_send_blocks", _posts),
    (after, "_send_blocks", _written),
)
