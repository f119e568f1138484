"""Starts the observation of each worker half of vLLM's own KV connectors, and hooks the scheduler halves."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any

from kvctl_agent import rank_name
from kvctl_agent.contract.snapshots import ConfigRow, PeerRow, Role
from kvctl_agent.integrations.observe.documents import peer_row, setting, unpredicted, with_rows
from kvctl_agent.integrations.observe.hooks import after, before
from kvctl_agent.integrations.observe.observer import ObservedRank, Observer, Watched
from kvctl_agent.integrations.vllm import versions
from kvctl_agent.integrations.vllm.observe import hooks
from kvctl_agent.integrations.vllm.observe.hooks import WATCH, Watch
from kvctl_agent.integrations.vllm.observe.tracker import Shape, Tracker
from kvctl_agent.observer.documents import Builder, Diagnosis
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.region import Document

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
    "inputs": "the transfer protocol, which records no inputs",
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
    """Hooks the halves of a connector, if it is one of vLLM's NIXL connectors."""
    scheduler, worker = (getattr(connector, f"connector_{half}", None) for half in ("scheduler", "worker"))
    kind = type(worker if worker is not None else scheduler).__name__
    if not kind.startswith("Nixl"):
        logger.info("kvctl: %s is not observed: only vLLM's NIXL connectors are", type(connector).__name__)
        return
    push, missing = "Push" in kind, []
    if scheduler is not None:
        missing += hooks.put(type(scheduler), hooks.SCHEDULER)
    if worker is not None:
        setattr(worker, WATCH, Watch(worker, push, partial(_begin_by_request, worker)))
        agent = worker.nixl_wrapper
        setattr(agent, WATCH, getattr(worker, WATCH))
        if "_kvctl_observed" not in vars(type(worker)):
            after(type(worker), "register_kv_caches", _registered)
            before(type(worker), "shutdown", _stop)
        missing += hooks.put(type(worker), (*hooks.WORKER, *(hooks.PUSH if push else hooks.PULL)))
        missing += hooks.put(type(agent), hooks.AGENT)
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
    role: Role | None = "decode" if metadata.reqs_to_recv else "prefill" if metadata.reqs_in_batch else None
    if role is not None:
        watch: Watch = getattr(worker, WATCH)
        watch.begin = None
        watch.beginning = threading.Thread(target=_begin, args=(worker, role), name="kvctl-begin", daemon=True)
        watch.beginning.start()


def _begin(worker: Any, role: Role) -> None:
    watch: Watch = getattr(worker, WATCH)
    watch.begin = None
    try:
        observer = _observer_of(watch, role)
        observer.start()
        worker._kvctl_observer = observer
        watch.turn = observer.turn
        logger.info("kvctl: %s is observed; look at it with: kvctl status", observer.name)
    except Exception as error:
        logger.error("kvctl: this worker is not observed: %s: %s", type(error).__name__, error)


def _stop(worker: Any) -> None:
    if (observer := vars(worker).pop("_kvctl_observer", None)) is not None:
        getattr(worker, WATCH).turn = None
        observer.close()


def _observer_of(watch: Watch, role: Role) -> Observer:
    """Returns the observer of one worker.

    Raises:
        KvctlError: the environment has an invalid setting of kvctl.
    """
    from vllm import envs

    worker = watch.worker
    config, parallel = worker.vllm_config, worker.vllm_config.parallel_config
    transfer = config.kv_transfer_config
    pp = _pp_rank() if parallel.pipeline_parallel_size > 1 else 0
    axes = {"pp": (pp, parallel.pipeline_parallel_size)}
    port = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel.data_parallel_index
    name = rank_name(role, axes, worker.tp_rank, f"{envs.VLLM_NIXL_SIDE_CHANNEL_HOST}:{port}")
    lengths = [int(each) for each in worker.block_len_per_layer]
    layers = len(worker.kv_cache_config.kv_cache_groups[0].layer_names) or len(lengths)
    shape = Shape(role, sum(lengths), layers, transfer.kv_load_failure_policy == "recompute")
    rank = ObservedRank(
        name=name,
        role=role,
        endpoint=str(getattr(worker.nixl_wrapper, "name", "")),
        engine="vLLM",
        identity={
            "rank": {"dp": parallel.data_parallel_index, "pp": pp, "tp": worker.tp_rank, "unique": worker.tp_rank},
            "sizes": {
                "dp": parallel.data_parallel_size,
                "pp": parallel.pipeline_parallel_size,
                "tp": worker.world_size,
            },
            "transport": {"engine": "nixl", "backend": ", ".join(worker.nixl_backends), "lanes": []},
            "device": worker.device_type,
            "pool": {
                "page_size": worker.block_size,
                "pages": worker.num_blocks,
                "bytes": worker.num_blocks * sum(lengths),
                "layers": layers,
            },
            "integration": {
                "engine": "vllm",
                "engine_version": versions.installed() or "",
                "mode": "observe",
                "settings": {
                    "connector": "NixlPushConnector" if watch.push else "NixlConnector",
                    "kv_load_failure_policy": str(transfer.kv_load_failure_policy),
                },
            },
            "calls": ["start_load_kv"],
        },
        config=_settings(transfer, role),
        refused=_REFUSED,
    )

    def watched(telemetry: Telemetry, directory: Path) -> Watched:
        tracker = Tracker(name, shape, telemetry, directory)
        waiting.append(tracker)
        return tracker, _builders(tracker)

    waiting: list[Tracker] = []
    return Observer(rank, watch.events, watched, lambda: len(waiting[0].rooms))


def _pp_rank() -> int:
    from vllm.distributed.parallel_state import get_pp_group

    return int(get_pp_group().rank_in_group)


def _settings(transfer: Any, role: Role) -> list[ConfigRow]:
    """Returns the settings of vLLM that correspond to an agent's."""
    lease_s = float(transfer.get_from_extra_config("kv_lease_duration", _LEASE_S))
    values = {"heartbeat_s": lease_s // 6} if role == "decode" else {"hold_s": lease_s}
    text = "vLLM's kv_lease_duration in kv_connector_extra_config"
    return [setting(key, value, "s", "--kv-transfer-config", text) for key, value in values.items()]


# ---- documents -------------------------------------------------------------------------------------------------


def _builders(tracker: Tracker) -> dict[Document, Builder]:
    rows: dict[Document, Any] = {
        Document.ROOMS: partial(_rooms, tracker),
        Document.PEERS: partial(_peers, tracker),
        Document.COSTS: lambda: unpredicted("vLLM", _peers(tracker)),
    }
    return {
        Document.STATE: partial(_state, tracker),
        **{document: partial(with_rows, build) for document, build in rows.items()},
    }


def _state(tracker: Tracker) -> Iterator[Mapping[str, Any]]:
    peers = Counter(peer.state for peer in tracker.peers.copy().values())
    yield {"state": "running", "accepting": True, "ring": None, "buffers": None, "peers": dict(peers), "gated": 0}


def _rooms(tracker: Tracker) -> Iterator[Diagnosis]:
    """Yields which prefill workers an active room of a decode worker waits for."""
    if tracker.shape.role == "decode":
        for room in tracker.rooms.copy().values():
            number = str(room.record.room)
            yield {"room": number, "nonce": "0", "missing": list(room.owing), "owed": {}, "owed_parts": []}


def _peers(tracker: Tracker) -> Iterator[PeerRow]:
    now_ns = monotonic_ns()
    for name, peer in tracker.peers.copy().items():
        heard_ns = None if peer.heard_ns is None else max(0, now_ns - peer.heard_ns)
        role = tracker.shape.role
        yield peer_row(tracker.name, role, "nixl", name, peer.endpoint, peer.state, heard_ns, peer.error)
