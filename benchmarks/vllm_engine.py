"""A vLLM engine in a process of its own, for `vllm_handover.py`: vLLM's engine core and its busy loop, unmodified.

It takes requests from a pipe, where vLLM has a ZMQ socket, and stamps each token when the loop hands it over.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import dummy_loader
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.executor.abstract import Executor

VOCABULARY = 512
_WEIGHT_STD = 0.1
_PR_SET_PDEATHSIG = 1


class Submission(NamedTuple):
    """A request to an engine; `params` are its `kv_transfer_params`."""

    name: str
    prompt: list[int]
    tokens: int
    params: dict[str, Any] | None = None


class Output(NamedTuple):
    """New tokens of a request; `at_ns` is the monotonic time when the engine's loop had them."""

    name: str
    at_ns: int
    tokens: list[int]
    finished: bool
    params: dict[str, Any] | None


def write_model(folder: Path, layers: int, kv_heads: int, head_dim: int, longest: int) -> None:
    """Writes the configuration of a small Llama, whose KV is large for its weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": longest,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))


def run(
    connection: Connection, arguments: Mapping[str, Any], environment: Mapping[str, str], checkout: Path, log: Path
) -> None:
    """Runs an engine until it gets None from the pipe; the body of its process, which ends with its parent.

    Args:
        checkout: folder of kvctl.
    """
    sys.path.insert(0, str(checkout))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(environment)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    dummy_loader.initialize_single_dummy_weight = _set_weight
    core = _Core(EngineArgs(**arguments).create_engine_config(), connection)
    connection.send(None)
    threading.Thread(target=_take, args=(connection, core), daemon=True).start()
    threading.Thread(target=core.output_queue.send, daemon=True).start()
    with contextlib.suppress(SystemExit):
        core.run_busy_loop()
    core.shutdown()
    sys.stdout.flush()
    os._exit(0)  # threads of vLLM's connectors may not end


class _Outputs:
    """The queue of the loop's outputs, which stamps them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def put_nowait(self, item: Any) -> None:
        self._queue.put((time.monotonic_ns(), item))

    def send(self) -> None:
        while True:
            at_ns, (_, outputs) = self._queue.get()
            found = [
                Output(
                    each.request_id, at_ns, each.new_token_ids, each.finish_reason is not None, each.kv_transfer_params
                )
                for each in outputs.outputs
            ]
            if found:
                self._connection.send(found)


class _Core(EngineCoreProc):  # type: ignore[misc]
    """vLLM's engine process without its sockets."""

    def __init__(self, config: Any, connection: Connection) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue = _Outputs(connection)
        self.engine_index = 0
        self.engines_running = False
        self.shutdown_state = EngineShutdownState.RUNNING
        self.has_coordinator = self.publish_dp_lb_stats = self.enable_fault_tolerance = False
        self.process_input_queue_block = True
        EngineCore.__init__(self, config, Executor.get_class(config), log_stats=False)


@torch.no_grad()
def _set_weight(weight: torch.Tensor) -> None:
    """Replaces vLLM's dummy weights, which are so small that the KV hardly changes a token."""
    if weight.dim() > 1 and weight.is_floating_point():
        weight.normal_(std=_WEIGHT_STD, generator=torch.Generator().manual_seed(weight.numel()))
    else:
        weight.fill_(1.0)


def _take(connection: Connection, core: _Core) -> None:
    """Passes requests to the loop: submissions, and names of requests to abort."""
    while (item := connection.recv()) is not None:
        if isinstance(item, str):
            core.input_queue.put((EngineCoreRequestType.ABORT, [item]))
        else:
            core.input_queue.put((EngineCoreRequestType.ADD, core.preprocess_add_request(_request(item))))
    core.shutdown_state = EngineShutdownState.REQUESTED
    core.input_queue.put((EngineCoreRequestType.WAKEUP, None))


def _request(item: Submission) -> EngineCoreRequest:
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=item.tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": item.params} if item.params else None,
    )
    return EngineCoreRequest(
        request_id=item.name,
        prompt_token_ids=item.prompt,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
