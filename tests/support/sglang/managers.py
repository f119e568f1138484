"""What SGLang's scheduler does with its KV manager: sleep mode, the end of a role, and the polls of a sender."""

import inspect
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import shown
from kvctl_agent.protocol.events import StateChanged
from tests.support.http_answers import serving
from tests.support.sglang.cases import Room

_ENDED_S = 20.0


def sleep_and_wake(scheduler: Any) -> None:
    """Releases the pool's memory from the transfer engine and takes it again, as release/resume_memory_occupation."""
    scheduler.kv_manager.deregister_buffer_to_engine()
    scheduler.kv_manager.register_buffer_to_engine()


def rebuild(scheduler: Any) -> list[str]:
    """Tears the manager down and creates another for the same pool, as a role switch does; returns what it left."""
    old = scheduler.kv_manager
    old.teardown()
    left = [] if old.agent.parts.lifecycle.state == "closed" else ["the agent runs"]
    if old._zmq_ctx.closed is False:
        left.append("sockets of SGLang's base class")
    heartbeat = getattr(old, "_heartbeat", None)
    if heartbeat is not None and heartbeat.is_alive():
        left.append("the heartbeat thread")
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None) or scheduler.disagg_decode_prealloc_queue
    queue.kv_manager = scheduler.kv_manager = queue._init_kv_manager()
    return left


def dtypes(scheduler: Any) -> dict[str, str]:
    """Returns the elements of each segment that the agent tells its peers."""
    known: dict[str, str] = scheduler.kv_manager.agent.observe.status()["dtypes"]
    return known


def request_ids(scheduler: Any) -> list[str | None]:
    """Returns what the agent shows as ids of the requests, once its rooms have ended: a success is told before that."""
    observe, deadline_s = scheduler.kv_manager.agent.observe, time.monotonic() + _ENDED_S
    while observe.rooms():
        assert time.monotonic() < deadline_s, "rooms that have succeeded do not end"
        time.sleep(0.01)
    return [row["request_id"] for row in observe.history()]


def serve(scheduler: Any, rooms: list[Room]) -> list[tuple[str, str]]:
    """Serves rooms, all at once; returns the state and the reason of each in the order in which they ended."""
    return [(ended.state, ended.reason) for ended in scheduler.run(rooms, len(rooms))]


def serve_twice(scheduler: Any, room: Room) -> list[tuple[str, str]]:
    """As `serve`, for two requests with one room."""
    return serve(scheduler, [room, room])


def serve_opened(scheduler: Any, room: Room) -> tuple[int, str]:
    """Sends a room once every decode rank has opened it; returns the first state that is polled, and the last."""
    return _serve_opened(scheduler, room, lambda: None)


def serve_unconfirmed(scheduler: Any, room: Room) -> str:
    """Sends a room that ends on this rank's agent only once `serve_again` is called; returns the state that it gets."""
    executors = scheduler.kv_manager.agent.parts.control.executors
    scheduler.confirm, scheduler.unconfirmed = executors[StateChanged], []

    def hold(change: StateChanged) -> None:
        (scheduler.unconfirmed.append if change.state is RoomState.SUCCESS else scheduler.confirm)(change)

    executors[StateChanged] = hold
    (ended,) = scheduler.run([room], 1)
    return str(ended.state)


def serve_again(scheduler: Any, room: Room) -> tuple[int, str]:
    """As `serve_opened`, but the room that had the number before ends only after the first poll."""

    def confirm() -> None:
        assert [change.room for change in scheduler.unconfirmed] == [room.room]
        scheduler.kv_manager.agent.parts.control.executors[StateChanged] = scheduler.confirm
        for change in scheduler.unconfirmed:
            scheduler.confirm(change)

    return _serve_opened(scheduler, room, confirm)


def _serve_opened(scheduler: Any, room: Room, polled: Callable[[], None]) -> tuple[int, str]:
    """Sends a room that every decode rank has opened, and calls `polled` after the first poll of its sender."""
    deadline = time.monotonic() + 30
    while scheduler.kv_manager.agent.parts.machine.opened_prefix(room.room) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"room {room.room} was not opened")
        time.sleep(0.001)
    first: list[int] = []

    def admit(room: Room) -> None:
        scheduler.admit(room)
        first.append(int(scheduler.requests[-1].disagg_kv_sender.poll()))
        polled()

    (ended,) = scheduler.loop([room], 1, scheduler.step, admit)
    return first[0], ended.state


def ask_hostile_servers(scheduler: Any, answers: dict[str, bytes]) -> dict[str, str]:
    """Lets requests name bootstrap servers that give these answers; returns for each why its request failed.

    A server gives the same answer to each question: for its layout, the dp ranks of rooms, and the address of a rank.
    """
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    manager = scheduler.kv_manager
    (info, *_) = manager.prefill_info_table.values()
    receiver_class = get_kv_class(TransferBackend("kvctl"), KVClassType.RECEIVER)
    causes = {}
    for room, (name, answer) in enumerate(answers.items(), 1000):
        with serving(answer) as address:
            assert not manager.try_ensure_parallel_info(address), name
            assert CommonKVReceiver.query_prefill_dp_ranks(address, [room]) == {}, name
            manager.prefill_info_table[address] = info
            try:
                receiver = receiver_class(manager, address, room)
                receiver.init(0)
                assert int(receiver.poll()) == 0, name  # failed
                try:
                    receiver.failure_exception()
                except Exception as error:
                    causes[name] = str(error)
            finally:
                del manager.prefill_info_table[address]
    return causes


ODD_ROOMS = (-1, 2**64, 2**70, True, 1.5, "7", None)


def begin_odd_rooms(scheduler: Any) -> list[str]:
    """Begins requests whose rooms are no unsigned 64-bit numbers; returns why they failed."""
    from sglang.srt.disaggregation.common.conn import CommonKVSender
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    manager, causes = scheduler.kv_manager, []
    decode = hasattr(scheduler, "disagg_decode_prealloc_queue")
    kind = KVClassType.RECEIVER if decode else KVClassType.SENDER
    end_class = get_kv_class(TransferBackend("kvctl"), kind)
    address = next(iter(manager.prefill_info_table)) if decode else "127.0.0.1:1"
    before_0_5_22 = "pp_rank" in inspect.signature(CommonKVSender).parameters
    more = {"dest_tp_ranks": [0], "pp_rank": 0} if before_0_5_22 and not decode else {}
    for room in ODD_ROOMS:
        end = end_class(manager, address, room, **more)
        end.init(0) if decode else end.init(1, 0)
        if decode:
            end.send_metadata(np.array([1], np.int32), 0)
        else:
            end.send(np.array([1], np.int32))
        assert int(end.poll()) == 0, shown(room)  # failed
        try:
            end.failure_exception()
        except Exception as error:
            causes.append(str(error))
    return causes


def begin_beside_endings(scheduler: Any) -> list[int]:
    """Begins a room while one that had its number ends, and one that fails before it is in the table."""
    manager, found = scheduler.kv_manager, []
    failure = {"rank": "decode", "code": "ABORTED", "at_ns": 0, "text": "aborted"}
    for state, error in ((RoomState.BOOTSTRAPPING, None), (RoomState.FAILED, failure)):
        former = SimpleNamespace(room=7, state=RoomState.SUCCESS, error=None)
        begun = SimpleNamespace(room=7, state=state, error=error)

        def open_room(former: Any = former, begun: Any = begun) -> Any:
            for handle in (former, begun):  # as the control thread may
                manager.on_state(handle, handle.state)
            return begun

        manager.request_status[7] = RoomState.BOOTSTRAPPING
        manager.begin(7, open_room)
        found.append(int(manager.request_status[7]))
        manager.withdraw(7)
    return found


def end_unfinished(scheduler: Any) -> list[str]:
    """Clears rooms that SGLang ended while its agent knew no end of them; returns the causes that peers are told."""
    manager, causes = scheduler.kv_manager, []
    for state, known in ((0, None), (0, "pages are missing"), (None, None)):  # 0: failed
        if known is not None:
            manager.fail(7, known)
        handle = SimpleNamespace(room=7, state=RoomState.TRANSFERRING, abort=causes.append)
        manager.end(7, handle, state)
        manager.withdraw(7)
    return causes


def decline_many(scheduler: Any) -> int:
    """Declines 40 rooms while no bootstrap server answers; returns the number of threads that this takes."""
    manager, answered = scheduler.kv_manager, threading.Event()
    manager._decline = lambda *_: answered.wait(20)
    for room in range(1000, 1040):
        manager.fail(room, "wrong dp rank")
        manager.decline_misrouted("127.0.0.1:1", room)
        manager.withdraw(room)
    found = sum(thread.name == "kvctl-decline" for thread in threading.enumerate())
    answered.set()
    return found


def forget_dead_server(scheduler: Any) -> int:
    """Looks a prefill server up that SGLang then gives up; returns the number of look-ups that are remembered."""
    manager = scheduler.kv_manager
    manager._instances["dead", 0] = "tcp://127.0.0.1:1"
    manager.known_instance("dead", 0)
    manager._handle_node_failure("dead")
    return len(manager._looked_up)
