"""One vLLM engine in a process, driven by messages on a socket: `python engine.py FD`, with a Python that has vLLM.

The first message holds the engine's arguments, each other one is a call of a method of `Served`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

# Between two steps of an engine that only waits for transfers.
IDLE_S = 0.001
# Between two looks of a worker for its next step. vLLM's workers look all the time and yield between; on two cores with
# other work a thread that yields so often may then have no core for many seconds (Linux 6.18), with the GIL.
LOOK_S = 50e-6
os.sched_yield = lambda: time.sleep(LOOK_S)  # in the workers, too: they are spawned, and import this module
DUMMY_WEIGHTS = 0.3


class Served:
    """The engine, and the loop of a vLLM server around it."""

    def __init__(self, connection: Connection, arguments: dict[str, Any]) -> None:
        from vllm import EngineArgs, LLMEngine
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        self._connection = connection
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        if arguments.get("pipeline_parallel_size", 1) > 1:
            # vLLM's workers on CPUs make their buffers between stages in a warm-up, which eager mode leaves out.
            self._engine.collective_rpc("execute_dummy_batch")
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._worker_connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        self._ids: dict[int, str] = {}
        self._held = False
        self._counts = {"steps": 0, "preemptions": 0, "computed_tokens": 0}
        self._schedule = self._scheduler.schedule
        self._scheduler.schedule = self._counted_schedule

    def _counted_schedule(self, *arguments: Any) -> Any:
        output = self._schedule(*arguments)
        self._counts["steps"] += 1
        self._counts["preemptions"] += len(output.preempted_req_ids or ())
        self._counts["computed_tokens"] += output.total_num_scheduled_tokens
        return output

    def run(self) -> None:
        """Serves until the other end of the connection is closed."""
        while True:
            working = not self._held and self._scheduler.has_requests()
            while self._connection.poll(0 if working else None):
                try:
                    method, arguments = self._connection.recv()
                except EOFError:
                    return
                self._connection.send(("result", getattr(self, method)(*arguments)))
                working = not self._held and self._scheduler.has_requests()
            before = self._counts["computed_tokens"]
            self._step()
            if self._counts["computed_tokens"] == before:
                time.sleep(IDLE_S)

    def _step(self) -> None:
        for output in self._engine.step():
            self._connection.send(("output", *fields_of(output)))

    # ---- calls -----------------------------------------------------------------------------------------------------

    def submit(self, number: int, prompt: Sequence[int], tokens: int, params: dict[str, Any] | None) -> None:
        token_ids = {"prompt_token_ids": list(prompt)}
        self._ids[number] = self._engine.add_request(str(number), token_ids, sampling_of(tokens, params))

    def abort(self, number: int) -> None:
        self._engine.abort_request([self._ids[number]], internal=True)

    def hold(self, held: bool) -> None:
        """Stops making steps, or goes on."""
        self._held = held

    def step(self, count: int) -> None:
        """Makes some steps of an engine that is held."""
        for _ in range(count):
            self._step()

    def preempt_all(self) -> None:
        """Preempts all running requests and forgets cached prefixes."""
        assert self._engine.reset_prefix_cache(reset_running_requests=True)

    def reset(self) -> bool:
        """Forgets cached prefixes, and counts from 0; returns whether the engine was idle."""
        self._counts = dict.fromkeys(self._counts, 0)
        return bool(self._engine.reset_prefix_cache())

    def counts(self) -> dict[str, int]:
        """Returns counts since the last reset, the free blocks, and what is left of requests anywhere."""
        return {
            **self._counts,
            "free_blocks": self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "requests": len(self._scheduler.requests),
        }

    def left(self) -> dict[str, list[str]]:
        """Returns the requests that the two halves of kvctl's connector still know, by the names of their tables."""
        connectors = [self._scheduler.connector, self._worker_connector]
        connectors += [child for each in connectors for child in getattr(each, "_connectors", ())]
        halves = [getattr(each, name, None) for each in connectors for name in ("_scheduler", "_worker")]
        names = ("_sends", "_receives", "_expected", "_ended", "_failed")
        tables = {name: getattr(half, name) for half in halves for name in names if hasattr(half, name)}
        return {name: [str(each) for each in table] for name, table in tables.items() if table}


def sampling_of(tokens: int, params: dict[str, Any] | None) -> Any:
    """Returns vLLM's parameters of a request for a number of greedy tokens."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": params} if params else None
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)


def fields_of(output: Any) -> tuple[Any, ...]:
    """Returns what the other end is told of vLLM's output of a request."""
    [completion] = output.outputs
    return (
        int(output.request_id),
        list(completion.token_ids),
        completion.finish_reason,
        output.kv_transfer_params,
        output.num_cached_tokens,
        time.monotonic(),
    )


def enlarge_dummy_weights(bound: float) -> None:
    """Draws dummy weights from [-bound, bound]: vLLM's are so small that a prompt hardly changes the logits."""
    from vllm.model_executor.model_loader import dummy_loader

    initialize = dummy_loader.initialize_single_dummy_weight

    def larger(tensor: Any) -> None:
        if tensor.dim() > 1:
            initialize(tensor, -bound, bound)
        else:
            tensor.data.fill_(1)

    dummy_loader.initialize_single_dummy_weight = larger


def give_an_accelerator() -> None:
    """Lets vLLM's MooncakeConnector ask torch for the current accelerator, which raises on a host that has none."""
    import torch

    torch.accelerator.current_device_index = lambda: 0


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    arguments = connection.recv()
    if arguments.get("load_format") == "dummy":
        enlarge_dummy_weights(DUMMY_WEIGHTS)
    if "Mooncake" in str(arguments.get("kv_transfer_config")):
        give_an_accelerator()
    served = Served(connection, arguments)
    connection.send(("result", served.counts()))
    served.run()


if __name__ == "__main__":
    main()
