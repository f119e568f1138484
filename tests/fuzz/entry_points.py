"""What requests, routers, registries and bootstrap servers can say, as functions that raise only if there is a bug.

Whatever comes, the worst is kvctl's own error, or a request that is not transferred.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import socket
import types
from collections.abc import Iterator
from typing import Any

import msgspec

from kvctl.client.discovery import is_url, open_source
from kvctl.client.discovery.file_source import parse as parse_listing_file
from kvctl.client.discovery.registry_source import RegistrySource, _is_row
from kvctl.client.discovery.source import SourceError
from kvctl.client.endpoints import endpoint_of, is_address
from kvctl.client.keys import KeyNames
from kvctl.errors import CliError
from kvctl_agent.contract.addresses import (
    AddressError,
    host_of,
    is_local,
    parse_endpoint,
    parse_listening,
    parse_place,
    tcp_address,
)
from kvctl_agent.contract.values import integer
from kvctl_agent.errors import ConfigError, KvctlError
from kvctl_agent.integrations.sglang import bootstrap_http
from kvctl_agent.request_id import check_request_id, valid_traceparent
from kvctl_agent.runtime import control_endpoints
from kvctl_agent.runtime.handles import check_room
from tests.support.sglang.receiver import receiver
from tests.support.vllm import stand_ins as vllm
from tests.support.vllm.modules import scheduler, worker
from tests.support.vllm.server import Model

# What libzmq demands of an endpoint that it connects to, which it checks on the thread of the caller.
_LIBZMQ = re.compile(r"tcp://[A-Za-z0-9\[][A-Za-z0-9.:%\[\]_-]*:[1-9][0-9]*", re.ASCII)
_LONGEST_ERROR = 4096
_ROOMS = itertools.count()


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _check(error: Exception) -> None:
    """An error text can be logged, and sent to a peer."""
    assert len(str(error)) < _LONGEST_ERROR


def endpoint(data: bytes) -> None:
    """An endpoint or address, as text, or as a JSON list of a host and a port."""
    text = _text(data)
    for bound in (False, True):
        try:
            address = parse_endpoint(text, bound=bound)
        except AddressError as error:
            _check(error)
            continue
        assert parse_endpoint(str(address), bound=bound) == address
        assert bound or address.scheme == "ipc" or _LIBZMQ.fullmatch(text)
        assert host_of(text) == address.host
        assert is_local(text) == address.is_local
        assert isinstance(address.is_wildcard, bool)
        with contextlib.suppress(ConfigError):
            control_endpoints.check_endpoint(text, insecure=False, bound=bound)
            assert address.is_local
        assert control_endpoints.any_port(text) == (address.scheme == "tcp" and not address.port)
    for parse in (
        parse_place,
        parse_listening,
        lambda text: control_endpoints.control_address("ipc:///x", "rank", text),
    ):
        with contextlib.suppress(ConfigError):
            parse(text)
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(data)
        host, port = document if isinstance(document, list) and len(document) == 2 else (document, 1)
        with contextlib.suppress(AddressError):
            address = tcp_address(host, port)
            assert parse_endpoint(str(address)) == address


def cli_endpoint(data: bytes) -> None:
    """A value of `-e`: an address, a path, a discovery URL, or a list of them."""
    text = _text(data)
    if is_address(text):
        try:
            source = open_source(text, KeyNames()) if is_url(text) else endpoint_of(text)
            assert source is not None
        except CliError as error:
            _check(error)
    with contextlib.suppress(SourceError):
        for found in parse_listing_file(data, "file:///x").endpoints:
            assert endpoint_of(found.address).address == found.address


def registry_row(data: bytes) -> None:
    """A row of a registry's list of agents, as kvctl reads it."""
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(data)
        for url in ("registry://10.0.0.5:7000", "registry:///run/boot"):
            if _is_row(row):
                with contextlib.suppress(CliError):
                    found = RegistrySource(url, KeyNames())._endpoint_of(row)
                    assert endpoint_of(found.address).address == found.address


class _Bug(logging.Filter):
    """Raises what a connector logs because it expected no such error; drops the rest."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            raise AssertionError(record.getMessage()) from record.exc_info[1]
        return False


@contextlib.contextmanager
def _unfenced() -> Iterator[None]:
    loggers, bug = [logging.getLogger(name) for name in ("kvctl", "vllm.kvctl")], _Bug()
    for logger in loggers:
        logger.addFilter(bug)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(bug)


class _StandInAgent:
    """Checks the arguments that requests supply, as `Agent` does, and transfers nothing."""

    def _check_endpoint(self, prefill: object) -> None:
        control_endpoints.check_endpoint(prefill, insecure=True)  # type: ignore[arg-type]

    def connect(self, prefill: str) -> None:
        self._check_endpoint(prefill)

    def send(self, room: int, *, request_id: str, traceparent: str, **_: Any) -> None:
        check_room(room), check_request_id(room, request_id), valid_traceparent(traceparent)

    def receive(self, room: int, pages: Any, *, prefill: str, request_id: str, traceparent: str, **_: Any) -> None:
        self.send(room, request_id=request_id, traceparent=traceparent)
        self._check_endpoint(prefill)

    def refuse(self, room: int, reason: str, *, prefill: str) -> None:
        check_room(room)
        self._check_endpoint(prefill)

    def renew(self, rooms: list[int], *, prefill: str) -> None:
        for room in rooms:
            check_room(room)
        self._check_endpoint(prefill)


def _worker() -> Any:
    """A worker's half whose agent transfers nothing."""
    half: Any = worker.ConnectorWorker.__new__(worker.ConnectorWorker)
    half.agent = _StandInAgent()
    half._config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(decode_context_parallel_size=1))
    half._pool = types.SimpleNamespace(pages=lambda blocks, tokens: (blocks[0], ()), states=lambda blocks: ())
    return half


@_unfenced()
def vllm_request(data: bytes) -> None:
    """`kv_transfer_params` of a request to a prefill and to a decode server, and what prefill returns for decode."""
    params: Any = {"transfer_id": _text(data), "kvctl_prefill": _text(data), "traceparent": _text(data)}
    with contextlib.suppress(ValueError, RecursionError):
        params = json.loads(data)
    name, half = "cmpl-1", _worker()
    for marks in ({}, {"do_remote_decode": True}, {"do_remote_prefill": True}):
        given = {**params, **marks} if isinstance(params, dict) else params
        config = Model().config(1)
        engine = scheduler.ConnectorScheduler("tcp://127.0.0.1:1", config, 1)
        request = vllm.Request(name, 40, given)
        engine.on_new_request(request)
        count, _ = engine.matched_tokens(request, 0)
        meta = [engine.step(_step())]
        engine.allocated(request, vllm.KVCacheBlocks(([1, 2, 3],)), count)
        meta.append(engine.step(_step(name)))
        request.status = vllm.RequestStatus.FINISHED_LENGTH_CAPPED
        _, returned = engine.finished(request)
        meta.append(engine.step(_step()))
        msgspec.msgpack.encode(returned)  # as vLLM sends it to its API server
        for each in meta:
            for send in each.sends:
                half._send(send)
            for receive in each.receives:
                half._receive(receive)
            for transfer, prefill, reason in each.refused:
                half._refuse(transfer, reason, prefill)
            for prefill, transfers in each.expected.items():
                half._renew(transfers, prefill)


def _step(name: str = "") -> Any:
    """A step that computes the whole prompt of a request; without one it computes nothing."""
    new = [vllm.NewRequestData(name, None, [], None, None, ([1, 2, 3],), 0, None)] if name else []
    return vllm.SchedulerOutput(
        new,
        vllm.CachedRequestData([], set(), [], {}, [], [], []),
        {name: 40} if name else {},
        0,
        {},
        {},
        set(),
        [],
        preempted_req_ids=set(),
        kv_connector_block_state=vllm.KVConnectorBlockState({name}, lambda _: ([1, 2, 3],), {}),
    )


class _StandInManager:
    """Manager of a decode rank that knows no prefill server."""

    def __init__(self) -> None:
        self.agent = _StandInAgent()
        self.causes: list[str] = []

    def known_instance(self, address: str, dp_rank: int) -> tuple[None, bool]:
        return None, False

    def use_instance(self, address: str, dp_rank: int, found: str) -> None:
        self.agent.connect(found)

    def fail(self, room: int, cause: str) -> None:
        self.causes.append(cause)


@_unfenced()
def sglang_lookup(data: bytes) -> None:
    """The answer of a bootstrap server, byte for byte or, if the first byte is even, as the body; and its address."""

    if not data:
        return
    servers = []

    def connect(host: str, port: int, deadline_s: float) -> socket.socket:
        ours, theirs = socket.socketpair()
        servers.append(theirs)
        theirs.sendall((b"HTTP/1.1 200 OK\r\n\r\n" * (not data[0] & 1) + data[1:])[: 1 << 16])
        theirs.shutdown(socket.SHUT_WR)
        return ours

    former, bootstrap_http.connect = bootstrap_http.connect, connect
    try:
        for address in ("10.0.0.5:8998", _text(data)):
            one = receiver.KvctlKVReceiver.__new__(receiver.KvctlKVReceiver)
            one.kv_mgr, one.bootstrap_room, one.bootstrap_addr = _StandInManager(), next(_ROOMS), address
            one.prefill_dp_rank, one.conclude_state = 0, None
            one._setup_bootstrap_infos()
            assert bool(one.kv_mgr.causes) == (one.bootstrap_infos is None) == (one.conclude_state == 0)
            for cause in one.kv_mgr.causes:
                assert len(cause) < _LONGEST_ERROR
    finally:
        bootstrap_http.connect = former
        for server in servers:
            server.close()
    for url in ("http://h/route", "http://h/query_dp_ranks"):
        with contextlib.suppress(KvctlError):
            ranks = bootstrap_http.Answer(url, 200, data[1:]).json()
            assert url.endswith("/route") or all(integer(rank) is not None and rank >= 0 for rank in ranks.values())
