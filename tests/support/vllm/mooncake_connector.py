"""Stand-ins for the halves of vLLM's MooncakeConnector: the methods that mode observe hooks, with vLLM's parameters.

Nothing of them moves bytes; `compare` checks that vLLM's methods have the same parameters.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Metadata:
    """What the scheduler half tells the workers in each step."""

    def __init__(self, **fields: Any) -> None:
        self.reqs_to_recv: dict[str, dict[str, Any]] = {}
        self.reqs_to_send: dict[str, Any] = {}
        self.reqs_not_processed: set[str] = set()
        vars(self).update(fields)


class Pull:
    """A request that decode asks a prefill engine for."""

    def __init__(self, blocks: int, transfer: str = "t-1") -> None:
        self.transfer_id, self.remote_engine_id = transfer, "prefill"
        self.local_block_ids = [list(range(blocks))] if blocks else []
        self.remote_bootstrap_addr = "http://10.0.0.1:8998"
        self.pull_tasks_count = 0


class MooncakeConnectorScheduler:
    """The scheduler half."""

    def __init__(self, kv_role: str) -> None:
        self.is_kv_consumer = kv_role == "kv_consumer"
        self._reqs_need_send: dict[str, tuple[Any, Any]] = {}

    def on_new_request(self, request: Any) -> None:
        pass

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        if request.status.name != "FINISHED_LENGTH_CAPPED" or not request.kv_transfer_params.get("do_remote_decode"):
            return False, None
        self._reqs_need_send[request.request_id] = request, list(block_ids)
        return True, None

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return Metadata()


class MooncakeConnectorWorker:
    """The worker half."""

    def __init__(self, kv_role: str) -> None:
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_role=kv_role,
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"mooncake_protocol": "tcp"},
            ),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1, data_parallel_index=0),
        )
        self.transfer_topo = SimpleNamespace(handshake_target_ranks=lambda remote_tp_size: list(range(remote_tp_size)))
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["a", "b"])], num_blocks=16)
        self.kv_block_len_per_layer = [512, 512]
        self._physical_blocks_per_logical_kv_block = 1
        self.block_size, self.tp_rank, self.tp_size = 32, 0, 1
        self.hostname, self.rpc_port, self.engine_id = "10.0.0.2", 15000, "engine"
        self._remote_agents: dict[str, Any] = {}
        self._tp_size: dict[str, int] = {}
        self.result = 0  # of a write

    def register_kv_caches(self, kv_caches: Any) -> None:
        pass

    def start_load_kv(self, metadata: Any) -> None:
        pass

    def get_transfer_results(self) -> Any:
        done, self.done = self.done, ((), (), ())
        sent, received, failed = map(set, done)
        return SimpleNamespace(finished_sending=sent, finished_recving=received, failed_recving=failed)

    done: Any = ((), (), ())

    async def handle_new_engine_id(self, remote_engine_id: str, pull_metas: Any) -> None:
        if remote_engine_id not in self._remote_agents:
            self._handle_failed_recv(pull_metas, list(pull_metas), "not found from bootstrap server")
            return
        self.receive_kv(remote_engine_id, pull_metas)

    def receive_kv(self, remote_engine_id: str, pull_metas: Any) -> None:
        for pull in pull_metas.values():
            pull.pull_tasks_count = self._tp_size[remote_engine_id]

    def process_pulling_result(self, response: Any, pull_metas: Any) -> None:
        for request in response.ok_reqs or ():
            pull_metas[request].pull_tasks_count -= 1

    def _handle_failed_recv(self, pull_metas: Any, req_ids: Any, reason: str) -> None:
        pass

    async def send_kv_to_decode(self, identity: bytes, sock: Any, meta: Any) -> None:
        """Writes the requests of `self.ready`, each with its record, in one call of the transfer engine."""
        found = await self._build_transfer_params(self.ready, meta, [], [])
        if found[0]:
            self._send_blocks(f"{meta.remote_hostname}:{meta.remote_port}", *found[:3])

    ready: Any = ()

    async def _build_transfer_params(
        self, ready_reqs: Any, agent_meta: Any, local_regions: Any, remote_regions: Any
    ) -> tuple[list[int], list[int], list[int], list[str], str | None]:
        blocks = [block for name, _ in ready_reqs for group in agent_meta.req_blocks[name][1] for block in group]
        return [*blocks], [*blocks], [1024] * len(blocks), [], None

    def _send_blocks(self, remote_session: str, src_ptrs: list[int], dst_ptrs: list[int], lengths: list[int]) -> int:
        return self.result

    def shutdown(self) -> None:
        pass


HALVES = (MooncakeConnectorScheduler, MooncakeConnectorWorker)
