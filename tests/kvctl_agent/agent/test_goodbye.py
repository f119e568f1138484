"""What an agent that closes says of its writes, and what it frees: neither may be said, or freed, too early."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvctl_agent import Agent, KVPool, Rank, RoomState
from kvctl_agent.runtime.handles import Receive, Send
from kvctl_agent.transport.base import Write
from tests.support.polling import until


class _Endless:
    """A write that the engine never lets go of."""

    bytes = descriptors = 1

    def __init__(self) -> None:
        self.over = False

    def poll(self) -> bool:
        return self.over

    def release(self) -> bool:
        return self.over


@pytest.fixture
def flying(make_fleet: Any) -> Any:
    """A fleet with a room whose writes never end, and those writes."""
    fleet = make_fleet(prefill=(1, 1), path="slice").start()
    writes: list[_Endless] = []

    def write(*arguments: Any) -> Write:
        writes.append(_Endless())
        return writes[-1]

    fleet.prefill[0].parts.transport.write = write
    room = fleet.claim(fleet.receive(fleet.room(7, 3)))
    room.sends[0].pages(room.src, last=True)
    room.sends[0].finish()
    until(lambda: writes)
    yield fleet, room, writes
    for each in writes:
        each.over = True


def test_with_a_write_in_flight_the_goodbye_is_no_proof_and_the_reader_keeps_its_pages(flying: Any) -> None:
    fleet, room, _ = flying
    (receive,) = room.receives.values()
    fleet.prefill[0].close(1.0)
    until(lambda: receive.state is RoomState.FAILED)
    machine = fleet.decode[0].parts.machine
    peer = machine.peers[fleet.prefill[0].name]
    until(lambda: peer.state == "lost")
    assert not peer.proven_dead, "it said that it had drained"
    assert not receive.released
    assert machine.quarantined_bytes > 0


def test_without_one_the_goodbye_is_proof(make_fleet: Any) -> None:
    fleet = make_fleet(prefill=(1, 1)).start()
    room = fleet.claim(fleet.receive(fleet.room(7, 3)))
    (receive,) = room.receives.values()
    until(lambda: room.sends[0].state > RoomState.BOOTSTRAPPING)
    fleet.prefill[0].close(5.0)
    until(lambda: receive.released)
    peer = fleet.decode[0].parts.machine.peers[fleet.prefill[0].name]
    until(lambda: peer.state == "lost")
    assert peer.proven_dead
    assert fleet.decode[0].parts.machine.quarantined_bytes == 0


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_memory_that_a_thread_may_still_touch_is_kept_and_nobody_is_told_that_it_has_drained(
    make_fleet: Any, side: str
) -> None:
    fleet = make_fleet(prefill=(1, 1), path="staged").start()
    fleet.prefill[0].wait_ready(60)
    agent, other = (fleet.prefill[0], fleet.decode[0]) if side == "prefill" else (fleet.decode[0], fleet.prefill[0])
    entered, leave = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def stuck(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        entered.set()
        leave.wait(60)
        return []

    if side == "prefill":
        agent.parts.transfers.run_between(stuck)
    else:
        agent.parts.transport.arrivals = stuck
    assert entered.wait(60), "the thread never came to what holds it"
    memory = agent.parts.buffers if side == "prefill" else agent.parts.ring
    try:
        agent.close(1.0)
        assert threads[0].is_alive()
        assert not memory._memory._closed, "it was freed under the thread"
        until(lambda: other.parts.machine.peers[agent.name].state == "lost")
        assert not other.parts.machine.peers[agent.name].proven_dead
    finally:
        leave.set()
        threads[0].join(60)
    # What the agent has kept for the thread's sake.
    memory.close()
    agent.parts.copy_pool.close()
    agent.parts.context.destroy(0)


_CLOSING = """
import sys
import numpy as np
from kvctl_agent import Agent, KVPool, Rank
role, bootstrap, rooms = sys.argv[1], sys.argv[2], int(sys.argv[3])
tensors = [np.zeros((1024, 2, 16), np.float16) for _ in range(2)]
for room in range(rooms):
    pool = KVPool.from_tensors(tensors[:1], tensors[1:], page_size=16, total_kv_heads=2)
    agent = Agent(role=role, rank=Rank(), pool=pool, name=f"{role}-{room}", bootstrap=f"{bootstrap}-{room}",
                  transport="nixl", staging_ring_mb=4, staging_buffer_mb=4).start()
    if role == "decode":
        handle = agent.receive(room, [3])
    else:
        handle = agent.send(room)
        handle.pages([3], last=True)
        handle.finish()
    handle.wait(60)
    if room % 2:
        agent.drain(60)
    agent.close()
    print(handle.state.name, flush=True)
"""


@pytest.mark.parametrize("closing", ["prefill", "decode"])
def test_an_agent_that_closes_right_after_success_leaves_a_success_on_the_other_side(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, closing: str
) -> None:
    """Four agents in another process, one after the other; every second one drains first."""
    rooms = 4
    staying = "decode" if closing == "prefill" else "prefill"
    bootstrap = f"ipc://{socket_dir}/boot"
    options = {"transport": "nixl", "staging_ring_mb": 4, "staging_buffer_mb": 4}

    def start(name: str, at: str | None) -> Agent:
        k, v = (np.zeros((1024, 2, 16), np.float16) for _ in range(2))
        pool = KVPool.from_tensors([k], [v], page_size=16, total_kv_heads=2)
        return Agent(role=staying, rank=Rank(), pool=pool, name=name, bootstrap=at, **options).start()  # type: ignore[arg-type]

    agents = [start("staying", None)] * rooms if staying == "decode" else []
    if staying == "prefill":
        agents = [start(f"staying-{room}", f"{bootstrap}-{room}") for room in range(rooms)]
    command = [sys.executable, "-c", _CLOSING, closing, bootstrap, str(rooms)]
    handles: list[Send | Receive] = []
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for room, agent in enumerate(agents):
                if staying == "decode":
                    handles.append(agent.receive(room, [5 + room], prefill=f"{bootstrap}-{room}"))
                else:
                    handles.append(send := agent.send(room))
                    send.pages([5], last=True)
                    send.finish()
            out, _ = process.communicate(timeout=120)
        assert out.split() == ["SUCCESS"] * rooms
        for handle in handles:
            assert handle.wait(60) is RoomState.SUCCESS, handle.error
    finally:
        for agent in set(agents):
            agent.close()
