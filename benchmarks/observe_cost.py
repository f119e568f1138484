"""Costs of mode observe in an engine's threads: hooks, queue, tracker and writing, for a room of one part and one peer.

    PYTHONPATH=. python benchmarks/observe_cost.py

Classes that do nothing stand for those of SGLang and vLLM; the calls of a room are made with and without hooks, with as
many turns or steps of the scheduler as it takes. Prints the difference in µs of thread CPU time a room (least of the
rounds), and a turn or step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from kvctl_agent.admin.publisher import DocumentPublisher
from kvctl_agent.integrations.observe.hooks import add_hooks
from kvctl_agent.integrations.sglang.observe import hooks
from kvctl_agent.integrations.sglang.observe.event_queue import EventQueue
from kvctl_agent.integrations.sglang.observe.manager_state import RankShape
from kvctl_agent.integrations.sglang.observe.tracker import Tracker
from kvctl_agent.integrations.vllm.observe import hooks as vllm_hooks
from kvctl_agent.integrations.vllm.observe import observer as vllm_observer
from kvctl_agent.integrations.vllm.observe.tracker import Shape
from kvctl_agent.integrations.vllm.observe.tracker import Tracker as VllmTracker
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.region import Header, RegionWriter
from tests.support.vllm import nixl_connector

ROUNDS, ROOMS, TURNS = 30, 1000, 20_000
BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = 1, 2, 3, 4  # KVPoll
PAGES = list(range(8))
INFO = SimpleNamespace(endpoint="10.0.0.2", dst_port=5, is_dummy=False, decode_tp_size=1)

Role = Literal["prefill", "decode"]


class Manager:
    def __init__(self) -> None:
        self.request_status: dict[int, int] = {}
        self.transfer_infos: dict[int, Any] = {}
        self.decode_kv_args_table = {"session": INFO}

    def update_status(self, bootstrap_room: int, status: int) -> None: ...
    def add_transfer_request(self, room: int, kv_indices: Any, index_slice: slice, is_last_chunk: bool) -> None: ...
    def send_kvcache(self, session: str, pages: Any) -> int:
        return 0

    def apply_prefill_status(self, *, bootstrap_room: int, status: int, prefill_rank: int) -> None: ...
    def _await_handles(self, handles: Any) -> tuple[bool, bool]:
        return True, False


class Queue:
    chunk: Any

    def get(self) -> Any:
        return self.chunk


class End:
    """A sender and a receiver."""

    kv_mgr: Any
    bootstrap_room = 0
    require_staging = False
    init_time = 1.0
    bootstrap_addr = "10.0.0.1:8998"
    prefill_info = SimpleNamespace(
        pp_size=1, attn_cp_size=1, attn_tp_size=1, dp_size=1, prefill_http_port=1, prefill_addr="10.0.0.1"
    )
    prefill_dp_rank = target_tp_rank = 0
    target_cp_ranks = target_tp_ranks = target_pp_ranks = (0,)
    bootstrap_infos = ({"rank_ip": "10.0.0.1", "rank_port": 77, "is_dummy": False},)

    def init(self, pages: int = 0) -> None: ...
    def send_metadata(self, kv_indices: Any, aux_index: int) -> None: ...
    def clear(self) -> None: ...


class Calls:
    """The calls of a room in a rank's threads; `directory` is that of the region, None: without hooks."""

    def __init__(self, role: Role, directory: Path | None) -> None:
        manager, queue, end = (type(each.__name__, (each,), {}) for each in (Manager, Queue, End))
        self.manager: Any = manager()
        self.turn: Callable[[], None] = lambda: None
        self.note_call: Callable[[int], None] = lambda call: None
        if directory is not None:
            add_hooks(manager, hooks.MANAGER)
            add_hooks(queue, hooks.QUEUE)
            add_hooks(end, hooks.SENDER if role == "prefill" else hooks.RECEIVER)
            events = EventQueue()
            setattr(self.manager, hooks.EVENTS, events)
            region = RegionWriter(Header.of_this_process(role, "me"), directory / f"{role}.region")
            telemetry = Telemetry("me", role, region)
            telemetry.collected = []
            shape = RankShape(role, 4096, (0, 4), 1, heads=4, total_heads=4)
            tracker = Tracker("me", shape, telemetry, events.waits, directory)
            events.open(tracker, DocumentPublisher(region, {}))
            self.turn, self.note_call = events.publish, region.note_call
        self.queue: Any = queue()
        self.end: Any = end()
        self.end.kv_mgr = self.manager

    def prefill(self, room: int) -> None:
        manager, end, part = self.manager, self.end, slice(0, len(PAGES))
        end.bootstrap_room = room
        manager.update_status(room, BOOTSTRAPPING)
        manager.transfer_infos = {room: {"session": INFO}}
        manager.update_status(room, WAITING)
        end.init(len(PAGES))
        manager.add_transfer_request(room, PAGES, part, True)
        self.turn()
        self.queue.chunk = SimpleNamespace(room=room, index_slice=part, prefill_kv_indices=PAGES)
        self.queue.get()
        manager.update_status(room, TRANSFERRING)
        manager.send_kvcache("session", PAGES)
        manager.update_status(room, SUCCESS)
        self.turn()
        end.clear()
        self.turn()

    def decode(self, room: int) -> None:
        manager, end = self.manager, self.end
        end.bootstrap_room = room
        manager.request_status = {room: BOOTSTRAPPING}
        manager.update_status(room, BOOTSTRAPPING)
        end.init()
        end.send_metadata(PAGES, 0)
        manager.update_status(room, WAITING)
        self.turn()
        manager.apply_prefill_status(bootstrap_room=room, status=SUCCESS, prefill_rank=0)
        manager.update_status(room, SUCCESS)
        self.turn()
        end.clear()
        self.turn()

    def idle_turn(self, _: int) -> None:
        self.note_call(0)
        self.turn()


class Steps:
    """The steps of a vLLM decode engine; `directory` is that of the region, None: without hooks."""

    def __init__(self, directory: Path | None) -> None:
        halves = (nixl_connector.NixlPullConnectorScheduler, nixl_connector.NixlPullConnectorWorker)
        scheduler, worker = (type(each.__name__, (each,), {}) for each in halves)
        self.scheduler: Any = scheduler("kv_consumer")
        self.worker: Any = worker("kv_consumer")
        self.worker.nixl_wrapper = type("NixlWrapper", (nixl_connector.NixlWrapper,), {})()
        if directory is not None:
            for half in ({"scheduler": self.scheduler}, {"worker": self.worker}):
                vllm_observer.observe(SimpleNamespace(**{f"connector_{name}": each for name, each in half.items()}))
            watch: vllm_hooks.Watch = getattr(self.worker, vllm_hooks.WATCH)
            region = RegionWriter(Header.of_this_process("decode", "me"), directory / "vllm.region")
            telemetry = Telemetry("me", "decode", region)
            telemetry.collected = []
            tracker = VllmTracker("me", Shape("decode", 4096, 4), telemetry, directory)
            watch.events.open(tracker, DocumentPublisher(region, {}))

            def turn() -> None:
                region.note_call(0)
                watch.events.publish()

            watch.turn = turn

    def step(self, _: int = 0, **fields: Any) -> None:
        metadata = self.scheduler.build_connector_meta(None)
        vars(metadata).update(fields)
        self.worker.start_load_kv(metadata)
        self.worker.get_transfer_results()

    def room(self, room: int) -> None:
        request, params = f"d-{room}", {"do_remote_prefill": True, "remote_request_id": f"p-{room}"}
        asked = SimpleNamespace(request_id=request, kv_transfer_params=params, num_prompt_tokens=512)
        self.scheduler.on_new_request(asked)
        self.step(reqs_to_recv={request: nixl_connector.to_receive(len(PAGES), f"p-{room}")})
        self.worker._read_blocks(
            read_spec=SimpleNamespace(remote_rank=0),
            dst_engine_id="prefill",
            request_id=request,
            remote_request_id=f"p-{room}",
            local_xfer_side_handle=1,
            local_dram_handle=None,
            remote_xfer_side_handle=2,
            expected_consumers=1,
            awaiting_kvs=True,
        )
        self.worker.nixl_wrapper.get_xfer_telemetry(self.worker.handle)
        self.worker.nixl_wrapper.release_xfer_handle(self.worker.handle)
        self.worker.done = ((), (request,), ())
        self.step()
        self.worker._recving_metadata.clear()


def least_us(call: Callable[[int], None], rounds: int, count: int) -> float:
    """Returns the least thread CPU time of a call over the rounds."""
    times = []
    for number in range(rounds):
        began_ns = time.thread_time_ns()
        for each in range(number * count, (number + 1) * count):
            call(each)
        times.append((time.thread_time_ns() - began_ns) / count / 1000)
    return min(times)


def main() -> None:
    roles: tuple[Role, ...] = ("prefill", "decode")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for role in roles:
            plain, hooked = Calls(role, None), Calls(role, Path(folder))
            us = least_us(getattr(hooked, role), ROUNDS, ROOMS) - least_us(getattr(plain, role), ROUNDS, ROOMS)
            print(f"SGLang, {role}: {us:.1f} µs a room, {least_us(hooked.idle_turn, 3, TURNS):.2f} µs an empty turn")
        bare, steps = Steps(None), Steps(Path(folder))
        us = least_us(steps.room, ROUNDS, ROOMS) - least_us(bare.room, ROUNDS, ROOMS)
        step_us = least_us(steps.step, 3, TURNS) - least_us(bare.step, 3, TURNS)
        print(f"vLLM, decode: {us:.1f} µs a room, {step_us:.2f} µs an empty step")


if __name__ == "__main__":
    main()
