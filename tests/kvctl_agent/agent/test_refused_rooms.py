"""`Agent.refuse`: rooms that a decode engine ends before it has pages for them, between real agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvctl_agent import Agent, KVGroup, KVPool, ModelShape, Rank, RoomState, StateShape, local_shards
from kvctl_agent.errors import LocalProtocolError
from tests.support.polling import until

PAGE_SIZE, WHY = 4, "the client went away"
SHAPES = {
    "plain": ModelShape(2, 4, 8, 8, 2),
    "draft and state": ModelShape(
        2, 4, 8, 8, 2, draft=ModelShape(1, 4, 8, 8, 2), states=(StateShape("conv", (0, 1), 2, 4, 8),)
    ),
    "groups": ModelShape(2, 4, 8, 8, 2, groups=(KVGroup("swa", ModelShape(2, 4, 8, 8, 2), (0, 1), PAGE_SIZE),)),
}
Start = Callable[[str], tuple[list[Agent], list[Agent]]]


@pytest.fixture
def start(socket_dir: Path, no_leaks: None) -> Iterator[Start]:
    """Starts two prefill and two decode ranks; a room that is never opened would take minutes to end."""
    with ExitStack() as stack:

        def agents(model: str) -> tuple[list[Agent], list[Agent]]:
            shape = SHAPES[model]
            slots = {each.name: 8 for each in (*shape.states, *shape.groups)}
            made: dict[str, list[Agent]] = {"prefill": [], "decode": []}
            for role, found in made.items():
                for number in range(2):
                    rank = Rank(tp=number, tp_size=2)
                    shards = local_shards(shape, PAGE_SIZE, rank.parallel_config, rank.coord)
                    pool = KVPool.allocate(shards, PAGE_SIZE, 16, slots, aux_slots=4, aux_row_bytes=16)
                    stack.callback(pool.close)
                    config: dict[str, Any] = {"staging_ring_mb": 1, "staging_buffer_mb": 1, "transport": "loopback"}
                    agent = Agent(
                        role=role,  # type: ignore[arg-type]
                        rank=rank,
                        pool=pool,
                        name=f"{role}-{number}",
                        bootstrap=f"ipc://{socket_dir}/boot",
                        model=shape,
                        **config,
                    )
                    stack.callback(agent.close)
                    found.append(agent.start())
            for agent in made["decode"]:
                agent.wait_ready(60)
            return made["prefill"], made["decode"]

        yield agents


@pytest.mark.parametrize("model", SHAPES)
def test_it_ends_on_every_prefill_rank_whenever_that_is_claimed(start: Start, model: str) -> None:
    prefill, decode = start(model)
    sends = [agent.send(7) for agent in prefill]
    for agent in decode:
        agent.refuse(7, WHY)
        agent.refuse(8, WHY)
    for handle in sends:
        assert handle.wait(20) is RoomState.FAILED
    until(lambda: not any(agent.machine.rooms for agent in (*prefill, *decode)))
    sends += [agent.send(8) for agent in prefill]
    for handle in sends:
        assert (handle.wait(20), handle.error["code"], handle.error["text"]) == (RoomState.FAILED, "ABORTED", WHY)  # type: ignore[index]
        assert handle.released


@pytest.mark.parametrize("model", SHAPES)
def test_a_decode_rank_that_has_opened_it_fails_too(start: Start, model: str) -> None:
    prefill, decode = start(model)
    sends = [agent.send(7) for agent in prefill]
    more: dict[str, Any] = {"group_pages": [[1]]} if model == "groups" else {}
    receive = decode[1].receive(7, [3, 4], aux_index=1, tokens=8, **more)
    with pytest.raises(LocalProtocolError, match="room 7 is open on decode-1: abort it"):
        decode[1].refuse(7, WHY)
    decode[0].refuse(7, WHY)
    for handle in (*sends, receive):
        assert handle.wait(20) is RoomState.FAILED
        assert (handle.error["rank"], handle.error["text"]) == ("decode-0", WHY)  # type: ignore[index]
    until(lambda: receive.released)


def test_a_room_that_is_aborted_before_the_agents_are_connected_fails_at_prefill(
    socket_dir: Path, no_leaks: None
) -> None:
    with ExitStack() as stack:

        def start(role: Any, name: str, bootstrap: str | None) -> Agent:
            k, v = (np.zeros((64, 1, 8), np.float16) for _ in range(2))
            pool = KVPool.from_tensors([k], [v], page_size=PAGE_SIZE, total_kv_heads=1)
            config: dict[str, Any] = {"staging_ring_mb": 1, "staging_buffer_mb": 1, "transport": "loopback"}
            agent = Agent(role=role, rank=Rank(), pool=pool, name=name, bootstrap=bootstrap, **config)
            stack.callback(agent.close)
            return agent.start()

        decode = start("decode", "decode-0", None)
        instances = [f"ipc://{socket_dir}/{number}" for number in range(2)]
        aborted = decode.receive(7, [3], prefill=instances[0])
        aborted.abort(WHY)
        assert aborted.wait(20) is RoomState.FAILED
        assert aborted.released
        # Its number is used at another instance meanwhile.
        send = start("prefill", "prefill-1", instances[1]).send(7)
        send.pages([1], last=True)
        send.finish()
        receive = decode.receive(7, [3], prefill=instances[1])
        assert (receive.wait(20), send.wait(20)) == (RoomState.SUCCESS, RoomState.SUCCESS)
        send = start("prefill", "prefill-0", instances[0]).send(7)
        assert send.wait(20) is RoomState.FAILED
        assert send.error is not None
        assert (send.error["rank"], send.error["code"], send.error["text"]) == ("decode-0", "ABORTED", WHY)


def test_an_agent_that_drains_may_still_refuse(start: Start) -> None:
    prefill, decode = start("plain")
    sends = [agent.send(7) for agent in prefill]
    for agent in decode:
        agent.begin_drain()
        agent.refuse(7, WHY)
    assert {handle.wait(20) for handle in sends} == {RoomState.FAILED}


def test_wrong_calls(start: Start) -> None:
    prefill, decode = start("plain")
    with pytest.raises(LocalProtocolError, match=r"agent prefill-0 \(prefill, running\) takes no decode rooms"):
        prefill[0].refuse(7, WHY)
    with pytest.raises(LocalProtocolError, match="room 7: reason is ''"):
        decode[0].refuse(7, "")
    with pytest.raises(LocalProtocolError, match="room"):
        decode[0].refuse(-1, WHY)
    decode[0].disconnect(str(decode[0].bootstrap))
    until(lambda: decode[0].bootstrap is None)
    with pytest.raises(LocalProtocolError, match="room 7: no prefill instance is known to decode-0: pass prefill="):
        decode[0].refuse(7, WHY)
