"""Stand-ins for the halves of vLLM's NIXL connectors: the methods that mode observe hooks, with vLLM's parameters.

Nothing of them moves bytes; `compare` checks that vLLM's methods have the same parameters.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any


class NixlWrapper:
    """NIXL's agent: transfers end when the test says so."""

    def __init__(self) -> None:
        self.name = "agent-of-this-worker"
        self.notifications: dict[str, list[bytes]] = {}

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Any,
        local_indices: Any,
        remote_xfer_side: Any,
        remote_indices: Any,
        notif_msg: bytes = b"",
        backends: Any = (),
        skip_desc_merge: bool = False,
    ) -> Any:
        return SimpleNamespace()

    def transfer(self, handle: Any, notif_msg: bytes = b"") -> str:
        return "PROC"

    def get_xfer_telemetry(self, handle: Any) -> Any:
        return SimpleNamespace(totalBytes=4096, xferDuration=1500, postDuration=20, descCount=8)

    def release_xfer_handle(self, handle: Any) -> None:
        pass

    def get_new_notifs(self, backends: Any = ()) -> dict[str, list[bytes]]:
        found, self.notifications = self.notifications, {}
        return found


class NixlPullConnectorScheduler:
    """The scheduler half."""

    def __init__(self, kv_role: str) -> None:
        self.vllm_config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_role=kv_role))
        self._reqs_need_send: dict[str, float] = {}
        self.lease_s = 30.0

    def on_new_request(self, request: Any) -> None:
        pass

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        if request.status.name != "FINISHED_LENGTH_CAPPED" or not request.kv_transfer_params.get("do_remote_decode"):
            return False, None
        self._reqs_need_send[request.request_id] = time.perf_counter() + self.lease_s
        return True, {"remote_block_ids": block_ids}

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return Metadata(reqs_to_send=self._reqs_need_send)


class NixlPushConnectorScheduler(NixlPullConnectorScheduler):
    """The scheduler half of push mode."""


class Metadata:
    """What the scheduler half tells the workers in each step."""

    def __init__(self, **fields: Any) -> None:
        self.reqs_to_recv: dict[str, Any] = {}
        self.reqs_to_send: dict[str, float] = {}
        self.reqs_in_batch: set[str] = set()
        self.reqs_not_processed: set[str] = set()
        vars(self).update(fields)


def to_receive(blocks: int, request: str = "p-1", pp_size: int = 1) -> Any:
    """Returns the metadata of a request that decode receives into this many blocks."""
    remote = SimpleNamespace(engine_id="prefill", host="10.0.0.1", port=5600, request_id=request)
    ids = [list(range(blocks))] if blocks else []
    return SimpleNamespace(local_block_ids=ids, local_num_computed_blocks=(2,), remote=remote, pp_size=pp_size)


class NixlPullConnectorWorker:
    """The worker half."""

    def __init__(self, kv_role: str) -> None:
        self.nixl_wrapper = NixlWrapper()
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_role=kv_role, kv_load_failure_policy="recompute", get_from_extra_config=lambda _, default: default
            ),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1, data_parallel_index=0),
        )
        self.transfer_topo = SimpleNamespace(handshake_target_ranks=lambda remote_tp_size: [0])
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["a", "b"])])
        self.block_len_per_layer = [512, 512]
        self.block_size, self.num_blocks, self.tp_rank, self.world_size = 32, 16, 0, 1
        self.device_type, self.nixl_backends = "cpu", ["UCX"]
        self._reqs_to_send: dict[str, float] = {}
        self._reqs_to_process: set[str] = set()
        self._recving_metadata: dict[str, Any] = {}
        self.answers: Any = {(0, 0): "agent-of-prefill"}

    def register_kv_caches(self, kv_caches: Any) -> None:
        pass

    def start_load_kv(self, metadata: Any) -> None:
        self._reqs_to_process |= metadata.reqs_in_batch
        self._reqs_to_send.update(metadata.reqs_to_send)
        self._recving_metadata.update(metadata.reqs_to_recv)

    def _nixl_handshake(
        self,
        host: str,
        port: int,
        remote_tp_size: int,
        expected_engine_id: str,
        remote_dcp_size: int = 1,
        remote_pp_size: int = 1,
        notif_agents_only: bool = False,
    ) -> Any:
        if isinstance(self.answers, Exception):
            self._log_failure("handshake_failed", req_id="d-1", error=self.answers, meta=to_receive(1))
            raise self.answers
        return self.answers, 0.0

    def _log_failure(
        self,
        failure_type: str,
        req_id: str | None,
        msg: str = "",
        error: Any = None,
        meta: Any = None,
        **extra_context: Any,
    ) -> None:
        pass

    def _read_blocks(
        self,
        read_spec: Any,
        dst_engine_id: str,
        request_id: str,
        remote_request_id: str,
        local_xfer_side_handle: int,
        local_dram_handle: int | None,
        remote_xfer_side_handle: int,
        expected_consumers: int,
        awaiting_kvs: bool,
    ) -> bool:
        self.handle = self._post("READ")
        return True

    def _xfer_blocks(
        self,
        read_spec: Any,
        dst_engine_id: str,
        request_id: str,
        remote_request_id: str,
        local_xfer_side_handle: int,
        remote_xfer_side_handle: int,
    ) -> Any:
        self.handle = self._post("WRITE")
        return self.handle

    def _post(self, operation: str) -> Any:
        handle = self.nixl_wrapper.make_prepped_xfer(operation, 1, [0] * 8, 2, [0] * 8, notif_msg=b"p-1:1")
        self.nixl_wrapper.transfer(handle)
        return handle

    def get_transfer_results(self) -> Any:
        self.nixl_wrapper.get_new_notifs()
        done, self.done = self.done, ((), (), ())
        sent, received, failed = map(set, done)
        return SimpleNamespace(finished_sending=sent, finished_recving=received, failed_recving=failed)

    done: Any = ((), (), ())

    def shutdown(self) -> None:
        pass


class NixlPushConnectorWorker(NixlPullConnectorWorker):
    """The worker half of push mode."""


HALVES = (
    NixlPullConnectorScheduler,
    NixlPushConnectorScheduler,
    NixlPullConnectorWorker,
    NixlPushConnectorWorker,
)
