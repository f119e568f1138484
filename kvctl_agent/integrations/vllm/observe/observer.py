"""Starts the observation of each worker half of vLLM's own KV connectors, and hooks the scheduler halves."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

from kvctl_agent import rank_name
from kvctl_agent.contract.snapshots import ConfigRow, PeerRow, Role
from kvctl_agent.integrations.observe.documents import builders, peer_row, setting, variable_origin
from kvctl_agent.integrations.observe.hooks import Hooks, add_hooks, after, before
from kvctl_agent.integrations.observe.observer import ObservedRank, Observer, Watched
from kvctl_agent.integrations.vllm import versions
from kvctl_agent.integrations.vllm.observe import hooks, mooncake
from kvctl_agent.integrations.vllm.observe.hooks import WATCH, Watch
from kvctl_agent.integrations.vllm.observe.tracker import Shape, Tracker
from kvctl_agent.observer.documents import Diagnosis
from kvctl_agent.telemetry.hub import Telemetry

logger = logging.getLogger("vllm.kvctl")

_ROLES: Mapping[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode"}
_LEASE_S = 30  # vLLM's default of kv_lease_duration
_REFUSED = {
    "abort": "its requests: abort the request at the proxy",
    "release": "its memory",
    "forget": "its peers: it drops those that have been idle for long",
    "drain": "admission: take the server out of the proxy",
    "resume": "admission: put the server back into the proxy",
    "probe": "the connections of its transfer engine",
    "set": "its configuration: set it in --kv-transfer-config and restart it",
}
"""Why an action is refused: what vLLM owns."""


def install() -> None:
    """Hooks the KV connectors that vLLM creates from now on; called by the plugin."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "_kvctl_observed" in vars(KVConnectorFactory):
        return
    KVConnectorFactory._kvctl_observed = True
    create = KVConnectorFactory.create_connector

    def created(*args: Any, **kwargs: Any) -> Any:
        connector = create(*args, **kwargs)
        for each in (connector, *getattr(connector, "_connectors", ())):  # those of MultiConnector
            try:
                observe(each)
            except Exception as error:
                logger.error("kvctl: %s is not observed: %s: %s", type(each).__name__, type(error).__name__, error)
        return connector

    KVConnectorFactory.create_connector = staticmethod(created)


def observe(connector: Any) -> None:
    """Hooks the halves of a connector, if it is one of vLLM's NIXL connectors or its MooncakeConnector."""
    scheduler, worker = (getattr(connector, f"connector_{half}", None) for half in ("scheduler", "worker"))
    kind = type(worker if worker is not None else scheduler).__name__
    nixl, push, missing = kind.startswith("Nixl"), "Push" in kind, []
    if not nixl and not kind.startswith("MooncakeConnector"):
        name = type(connector).__name__
        logger.info("kvctl: %s is not observed: vLLM's NIXL connectors and MooncakeConnector are", name)
        return
    connector_hooks = hooks if nixl else mooncake
    if scheduler is not None:
        missing += add_hooks(type(scheduler), (*SCHEDULER, *connector_hooks.SCHEDULER))
    if worker is not None:
        watch = Watch(worker, push, partial(_begin_by_request, worker))
        setattr(worker, WATCH, watch)
        missing += add_hooks(type(worker), (*WORKER, *connector_hooks.WORKER))
        if nixl:
            setattr(worker.nixl_wrapper, WATCH, watch)
            missing += add_hooks(type(worker), hooks.PUSH if push else hooks.PULL)
            missing += add_hooks(type(worker.nixl_wrapper), hooks.AGENT)
    if missing:
        logger.warning("kvctl: vLLM %s has no %s: what they do is not shown", versions.installed(), ", ".join(missing))


# ---- one worker ------------------------------------------------------------------------------------------------


def _registered(_: int, __: Any, worker: Any, *___: Any, **____: Any) -> None:
    """Begins the observation of a worker whose memory is registered, if its role is known."""
    role = _ROLES.get(worker.vllm_config.kv_transfer_config.kv_role)
    if role is not None:
        _begin(worker, role)


def _begin_by_request(worker: Any, metadata: Any) -> None:
    """Begins the observation of a worker with the role kv_both, which its first request shows."""
    prefill = metadata.reqs_to_send or getattr(metadata, "reqs_in_batch", ())
    role: Role | None = "decode" if metadata.reqs_to_recv else "prefill" if prefill else None
    if role is not None:
        watch: Watch = getattr(worker, WATCH)
        watch.begin = None
        threading.Thread(target=_begin, args=(worker, role), name="kvctl-begin", daemon=True).start()


def _begin(worker: Any, role: Role) -> None:
    watch: Watch = getattr(worker, WATCH)
    watch.begin = None
    try:
        observer = _observer_of(watch, role)
        observer.start()
        watch.turn = observer.turn
        worker._kvctl_observer = observer
        if watch.stopped:  # while the observer started
            _stop(worker)
            return
        logger.info("kvctl: %s is observed; look at it with: kvctl status", observer.name)
    except Exception as error:
        logger.error("kvctl: this worker is not observed: %s: %s", type(error).__name__, error)


def _stop(worker: Any) -> None:
    watch: Watch = getattr(worker, WATCH)
    watch.stopped, watch.begin = True, None
    if (observer := vars(worker).pop("_kvctl_observer", None)) is not None:
        watch.turn = None
        observer.close()


SCHEDULER: Hooks = ((after, "build_connector_meta", hooks.build_connector_meta),)
WORKER: Hooks = (
    (after, "register_kv_caches", _registered),
    (after, "get_transfer_results", hooks.transfer_results),
    (before, "shutdown", _stop),
)
"""Hooks on the halves of every connector."""


def _observer_of(watch: Watch, role: Role) -> Observer:
    """Returns the observer of one worker.

    Raises:
        KvctlError: the environment has an invalid setting of kvctl.
    """
    worker = watch.worker
    config, parallel = worker.vllm_config, worker.vllm_config.parallel_config
    transfer = config.kv_transfer_config
    pp = _pp_rank() if parallel.pipeline_parallel_size > 1 else 0
    axes = {"pp": (pp, parallel.pipeline_parallel_size)}
    engine = _nixl(watch, role) if hasattr(worker, "nixl_wrapper") else _mooncake(watch, role)
    name = rank_name(role, axes, worker.tp_rank, engine.address)
    lengths, pages = engine.block_lengths, engine.blocks
    layers = len(worker.kv_cache_config.kv_cache_groups[0].layer_names) or len(lengths)
    shape = Shape(role, sum(lengths), layers, transfer.kv_load_failure_policy == "recompute")
    rank = ObservedRank(
        name=name,
        role=role,
        endpoint=engine.endpoint,
        engine="vLLM",
        identity={
            "rank": {"dp": parallel.data_parallel_index, "pp": pp, "tp": worker.tp_rank, "unique": worker.tp_rank},
            "sizes": {"dp": parallel.data_parallel_size, "pp": parallel.pipeline_parallel_size, "tp": engine.tp_size},
            "transport": {"engine": engine.name, "backend": engine.backend, "lanes": []},
            "device": engine.device,
            "pool": {"page_size": worker.block_size, "pages": pages, "bytes": pages * sum(lengths), "layers": layers},
            "integration": {
                "engine": "vllm",
                "engine_version": versions.installed() or "",
                "mode": "observe",
                "settings": {
                    "connector": engine.connector,
                    "kv_load_failure_policy": str(transfer.kv_load_failure_policy),
                },
            },
            "calls": ["start_load_kv"],
        },
        config=engine.settings,
        refused=_REFUSED,
    )

    def watched(telemetry: Telemetry, directory: Path) -> Watched:
        tracker = Tracker(name, shape, telemetry, directory)
        peers = partial(_peers, tracker, engine.name)
        return tracker, builders("vLLM", partial(_state, tracker), partial(_rooms, tracker), peers)

    return Observer(rank, watch.events, watched)


class Engine(NamedTuple):
    """The transfer engine of a worker, and what its connector calls by a name of its own.

    Attributes:
        name, backend: the transfer engine, and its transport.
        address: HOST:PORT in the name of the worker; `endpoint` is the name by which workers of other engines know it.
        block_lengths: bytes of one block in each of its regions.
        settings: settings of vLLM that correspond to an agent's.
    """

    name: str
    backend: str
    connector: str
    address: str
    endpoint: str
    tp_size: int
    device: str
    blocks: int
    block_lengths: list[int]
    settings: list[ConfigRow]


def _nixl(watch: Watch, role: Role) -> Engine:
    from vllm import envs

    worker = watch.worker
    port = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + worker.vllm_config.parallel_config.data_parallel_index
    transfer = worker.vllm_config.kv_transfer_config
    lease_s = float(transfer.get_from_extra_config("kv_lease_duration", _LEASE_S))
    key, value_s = ("heartbeat_s", lease_s // 6) if role == "decode" else ("hold_s", lease_s)
    text = "vLLM's kv_lease_duration in kv_connector_extra_config"
    return Engine(
        name="nixl",
        backend=", ".join(worker.nixl_backends),
        connector="NixlPushConnector" if watch.push else "NixlConnector",
        address=f"{envs.VLLM_NIXL_SIDE_CHANNEL_HOST}:{port}",
        endpoint=str(getattr(worker.nixl_wrapper, "name", "")),
        tp_size=worker.world_size,
        device=worker.device_type,
        blocks=worker.num_blocks,
        block_lengths=[int(each) for each in worker.block_len_per_layer],
        settings=[setting(key, value_s, "s", "--kv-transfer-config", text)],
    )


def _mooncake(watch: Watch, role: Role) -> Engine:
    """A prefill worker is named after the bootstrap server of its engine, a decode worker after its transfer engine."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import get_mooncake_bootstrap_addr
    from vllm.platforms import current_platform

    worker = watch.worker
    port = worker.rpc_port
    if role == "prefill":
        port = mooncake.port_of(get_mooncake_bootstrap_addr(worker.vllm_config)[1], worker.engine_id)
    extra = worker.vllm_config.kv_transfer_config.kv_connector_extra_config
    hold = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"
    settings = [setting("hold_s", mooncake.lease_s(), "s", variable_origin(hold), f"vLLM's {hold}")]
    return Engine(
        name="mooncake",
        backend=str(extra.get("mooncake_protocol", "rdma")),
        connector="MooncakeConnector",
        address=f"{worker.hostname}:{port}",
        endpoint=f"{worker.hostname}:{worker.rpc_port}",
        tp_size=worker.tp_size,
        device=current_platform.device_type,
        blocks=worker.kv_cache_config.num_blocks * worker._physical_blocks_per_logical_kv_block,
        block_lengths=[int(each) for each in worker.kv_block_len_per_layer],
        settings=settings if role == "prefill" else [],
    )


def _pp_rank() -> int:
    from vllm.distributed.parallel_state import get_pp_group

    return int(get_pp_group().rank_in_group)


# ---- documents -------------------------------------------------------------------------------------------------


def _state(tracker: Tracker) -> Iterator[Mapping[str, Any]]:
    peers = Counter(peer.state for peer in tracker.peers.copy().values())
    yield {"state": "running", "accepting": True, "ring": None, "buffers": None, "peers": dict(peers), "gated": 0}


def _rooms(tracker: Tracker) -> Iterator[Diagnosis]:
    """Yields which prefill workers an active room of a decode worker waits for."""
    if tracker.shape.role == "decode":
        for room in tracker.rooms.copy().values():
            number = str(room.record.room)
            yield {"room": number, "nonce": "0", "missing": list(room.owing), "owed": {}, "owed_parts": []}


def _peers(tracker: Tracker, engine: str) -> Iterator[PeerRow]:
    now_ns = monotonic_ns()
    for name, peer in tracker.peers.copy().items():
        heard_ns = None if peer.heard_ns is None else max(0, now_ns - peer.heard_ns)
        role = tracker.shape.role
        yield peer_row(tracker.name, role, engine, name, peer.endpoint, peer.state, heard_ns, peer.error)
