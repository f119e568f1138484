"""Makes a process importable for SGLang: what its launcher and model runner set before a scheduler starts."""

import datetime
import importlib
import logging
import os
import pickle
import sys
import types
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

from kvctl_agent.integrations.sglang import versions
from tests.support.sglang import stand_ins
from tests.support.sglang.cases import Case, Place, Role, places

# Another release than that of `requirements.txt`: `make try-sglang`.
FOLDER = Path(os.environ.get("SGLANG", Path(__file__).parents[3] / ".venv" / "sglang")).absolute()
VERSION = next((each.version for each in distributions(name="sglang", path=[str(FOLDER)])), "")
HOST = "127.0.0.1"
# Before 0.5.23 SGLang's own staging needs CUDA, and no stand-in for it would be SGLang's.
STAGES_HOST_MEMORY = (
    "_STAGING_SUPPORTED_DEVICE_TYPES"
    in (FOLDER / "sglang" / "srt" / "disaggregation" / "common" / "staging_buffer.py").read_text()
    if FOLDER.is_dir()
    else True
)
MODULES = (
    "mem_cache.memory_pool",
    "mem_cache.swa_memory_pool",
    "disaggregation.prefill",
    "disaggregation.decode",
    "disaggregation.nixl",
    "disaggregation.mooncake",
    "plugins",
)
# What functions of sglang.srt.runtime_context return. They are replaced before the modules import them by name.
SETTINGS: dict[str, Any] = {}
SETTING_NAMES = (
    "get_parallel",
    "get_serving",
    "get_disagg",
    "get_schedule",
    "get_device",
    "get_spec",
    "get_memory",
    "get_observability",
    "linear_attn_tp_size",
)


class Group:
    """The calls of SGLang's GroupCoordinator that its disaggregation modules make, over gloo."""

    def __init__(self, ranks: list[int], group: Any) -> None:
        self.ranks = ranks
        self.cpu_group = group
        self.world_size = len(ranks)
        self.rank_in_group = ranks.index(torch.distributed.get_rank())

    def broadcast_object(self, value: Any, src: int) -> Any:
        box = [value]
        torch.distributed.broadcast_object_list(box, src=self.ranks[src], group=self.cpu_group)
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value, group=self.cpu_group)
        return values

    def send_object(self, value: Any, dst: int, async_send: bool = False, tag: int = 0) -> list[Any]:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        works = []
        for tensor in (torch.tensor([len(data)]), data):
            work = torch.distributed.isend(tensor, self.ranks[dst], group=self.cpu_group)
            works.append(SimpleNamespace(work=work, payload=tensor))
        if not async_send:
            for sent in works:
                sent.work.wait()
            return []
        return works

    def recv_object(self, src: int, tag: int = 0) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        torch.distributed.recv(size, self.ranks[src], group=self.cpu_group)
        data = torch.zeros(int(size), dtype=torch.uint8)
        torch.distributed.recv(data, self.ranks[src], group=self.cpu_group)
        return pickle.loads(data.numpy().tobytes())


class Runtime:
    """Process groups and settings of one rank; `start()` loads SGLang and its plugins."""

    def __init__(
        self, case: Case, role: Role, place: Place, bootstrap_port: int, folder: Path, deadline_s: float
    ) -> None:
        self.case, self.role, self.place = case, role, place
        self.bootstrap_port = bootstrap_port
        ranks = case.ranks(role)
        gpus = case.prefill_gpus if role == "prefill" else case.decode_gpus
        self.index = places(ranks).index(place)
        self.gpu = gpus[self.index % len(gpus)] if case.device == "cuda" else 0
        self.device = f"cuda:{self.gpu}" if case.device == "cuda" else "cpu"
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.FileStore(str(folder / f"{role}.store"), ranks.size),
            rank=self.index,
            world_size=ranks.size,
            timeout=datetime.timedelta(seconds=deadline_s),
        )
        self.world = Group(list(range(ranks.size)), torch.distributed.group.WORLD)
        if not ranks.dp_attention:  # replicas have a world each
            self.world = self._group("tp", "cp", "pp")
        self.attn_tp = self._group("tp")
        self.attn_cp = self._group("cp")
        self.pp = self._group("pp")

    def _group(self, *axes: str) -> Group:
        """Group of the ranks that differ in these axes only. Every rank makes every group, as gloo wants it."""
        found = None
        rows: dict[tuple[int, ...], list[int]] = {}
        for index, place in enumerate(places(self.case.ranks(self.role))):
            rows.setdefault(tuple(v for k, v in vars(place).items() if k not in axes), []).append(index)
        for row in rows.values():
            group = torch.distributed.new_group(row)
            if self.index in row:
                found = Group(row, group)
        assert found is not None
        return found

    def parallel(self) -> SimpleNamespace:
        ranks, place = self.case.ranks(self.role), self.place
        attention = ranks.dp > 1 and ranks.dp_attention
        attn_dp_rank = place.dp if attention else 0
        return SimpleNamespace(
            tp_size=ranks.tp * ranks.cp * (ranks.dp if attention else 1),
            tp_rank=(attn_dp_rank * ranks.cp + place.cp) * ranks.tp + place.tp,
            attn_tp_size=ranks.tp,
            attn_tp_rank=place.tp,
            attn_tp_group=self.attn_tp,
            attn_cp_size=ranks.cp,
            attn_cp_rank=place.cp,
            attn_dp_size=ranks.dp if attention else 1,
            attn_dp_rank=attn_dp_rank,
            attn_dcp_size=ranks.dcp,
            attn_dcp_rank=place.tp % ranks.dcp,
            dp_size=1 if attention and not _before_0_5_22() else ranks.dp,  # with groups of attention before
            enable_dp_attention=attention,
            dp_rank=None if attention or ranks.dp == 1 else place.dp,
            num_dp_ranks=None if _before_0_5_22() else ranks.dp,
            pp_size=ranks.pp,
            pp_rank=place.pp,
            pp_group=self.pp,
            world_group=self.world,
            nnodes=1,
            dist_init_addr=None,
            load_balance_method=self.case.load_balance_method,
            enable_kv_cache_sharding=False,
            enable_dsa_cache_layer_split=False,
            enable_cp_tp_group_sharing=False,
        )

    def start(self) -> None:
        """Publishes the settings that SGLang's modules read, and loads plugins with SGLang's own loader."""
        case = self.case
        SETTINGS.update(
            {
                "get_parallel": self.parallel(),
                "get_serving": SimpleNamespace(host=HOST, port=30000),
                "get_disagg": SimpleNamespace(
                    disaggregation_mode=self.role,
                    disaggregation_transfer_backend=case.backend,
                    disaggregation_bootstrap_port=self.bootstrap_port,
                    disaggregation_decode_allocation_policy="early",
                    disaggregation_decode_enable_radix_cache=True,
                    disaggregation_decode_enable_offload_kvcache=False,
                    disaggregation_decode_host_receive_threshold=0 if _before_0_5_22() else 1,  # off
                    disaggregation_decode_polling_interval=1,
                    disaggregation_enable_kv_checksum=False,
                    disaggregation_ib_device=None,
                    optimistic_prefill_attempts=0,
                ),
                "get_schedule": SimpleNamespace(
                    chunked_prefill_size=case.chunked_prefill_size,
                    max_prefill_tokens=16384,
                    enable_dynamic_chunking=False,
                ),
                "get_device": SimpleNamespace(device=case.device, gpu_id=self.gpu),
                "get_spec": SimpleNamespace(speculative_algorithm=None, speculative_num_draft_tokens=None),
                "get_memory": SimpleNamespace(enable_unified_memory=False, disable_radix_cache=False),
                "get_observability": SimpleNamespace(enable_trace=False),
                "linear_attn_tp_size": case.ranks(self.role).tp,
            }
        )
        if case.device == "cpu":
            _nixl_takes_host_memory()
        importlib.import_module("sglang.srt.plugins").load_plugins()
        if case.device == "cpu" and case.staging:
            _staging_takes_host_memory()
        if case.backend == "mooncake":
            engine = importlib.import_module("sglang.srt.distributed.device_communicators.mooncake_transfer_engine")
            engine.init_mooncake_transfer_engine(HOST, self.gpu, None)
            if case.device == "cpu":  # there is no pinned memory for indices that come with an event
                module = importlib.import_module("sglang.srt.disaggregation.mooncake.conn")
                module.MooncakeKVSender.supports_host_tensor_indices = False


def on_gpu() -> bool:
    """Whether this process is for ranks with pools on a GPU."""
    return os.environ["SGLANG_STAGING_USE_TORCH"] == "0"


def import_sglang() -> None:
    """Imports SGLang's queues and backends as a scheduler process has them, but without what they need of an engine."""
    stand_ins.install(kernels=on_gpu())
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    # Without the imports of its top package, a language front end.
    package = types.ModuleType("sglang")
    package.__path__ = [str(FOLDER / "sglang")]
    package.__version__ = VERSION  # type: ignore[attr-defined]
    sys.modules["sglang"] = package
    if not hasattr(logging.Logger, "warning_once"):
        said: set[str] = set()

        def warning_once(self: logging.Logger, message: str, *args: Any, **kwargs: Any) -> None:
            if message not in said:
                said.add(message)
                self.warning(message, *args, **kwargs)

        logging.Logger.warning_once = warning_once  # type: ignore[attr-defined]
    context = importlib.import_module("sglang.srt.runtime_context")
    for name in SETTING_NAMES:
        setattr(context, name, lambda name=name: SETTINGS[name])
    for module in MODULES:
        importlib.import_module(f"sglang.srt.{module}")
    versions.SUPPORTED = (*versions.SUPPORTED, VERSION)  # one that is tried


def _before_0_5_22() -> bool:
    return not hasattr(importlib.import_module("sglang.srt.runtime_context"), "num_dp_ranks_of")


def _nixl_takes_host_memory() -> None:
    """SGLang registers its pools with NIXL as VRAM and refuses others at unequal TP: DRAM goes under that name here."""
    import nixl._api

    class HostAgent(nixl._api.nixl_agent):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]

    nixl._api.nixl_agent = HostAgent


def _staging_takes_host_memory() -> None:
    """SGLang's staging knows devices with streams only: streams and events of the host are done at once."""
    buffer = importlib.import_module("sglang.srt.disaggregation.common.staging_buffer")
    handler = importlib.import_module("sglang.srt.disaggregation.common.staging_handler")

    class Stream:
        device = torch.device("cpu")

        def wait_stream(self, stream: object) -> None:
            pass

        def wait_event(self, event: object) -> None:
            pass

        def synchronize(self) -> None:
            pass

    class Event:
        def record(self, *args: object) -> None:
            pass

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            pass

    def stream_context(stream: object) -> AbstractContextManager[None]:
        return nullcontext()

    def start_handler(self: Any, *, kv_buffer_info: dict[str, Any], **rest: Any) -> None:
        # The original asserts that the pool's device has an index, which "cpu" has not.
        index = [SimpleNamespace(device=torch.device("cpu", 0))]
        original(self, kv_buffer_info={**kv_buffer_info, "k_buffers": index}, **rest)
        self.kv_buffer_info = kv_buffer_info
        self.device = torch.device("cpu")

    original = handler.DecodeStagingHandler.__init__
    handler.DecodeStagingHandler.__init__ = start_handler
    buffer._STAGING_SUPPORTED_DEVICE_TYPES = ("cpu",)
    buffer._check_kv_on_staging_device = lambda *args: None
    buffer.StagingBuffer.producer_stream = lambda self: Stream()
    for module in (buffer, handler):
        module.create_device_stream = lambda device: Stream()
        module.device_stream_context = stream_context
    handler.create_device_event = lambda device: Event()
    handler._get_custom_mem_pool = lambda device: (None, None)


def bare_environment(device: str = "cpu") -> dict[str, str]:
    """This process's environment without settings of SGLang and kvctl, and what SGLang's modules read on import."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "KVCTL_"))}
    return kept | {
        "SGLANG_HOST_IP": HOST,
        "SGLANG_STAGING_USE_TORCH": "1" if device == "cpu" else "0",  # its kernels are Triton's
        "NIXL_LOG_LEVEL": "ERROR",
        "GLOG_minloglevel": "2",
        "MC_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def environment(case: Case, role: Role, socket_dir: Path) -> dict[str, str]:
    """Environment of a rank."""
    own = {"KVCTL_SOCKET_DIR": str(socket_dir)}
    if case.backend == "mooncake":
        own |= {"MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1"}
    if case.staging:
        own |= {"SGLANG_DISAGG_STAGING_BUFFER": "1"}
    if case.aux_sampling_mask:
        own |= {"SGLANG_ENABLE_DISAGG_SAMPLING_MASK": "1"}
    side = case.prefill_environment if role == "prefill" else case.decode_environment
    return bare_environment(case.device) | own | dict(case.environment) | dict(side)
