"""`Agent.refuse`: rooms that a decode engine ends before it has pages for them, between real agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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


def test_it_ends_on_every_prefill_rank_whenever_that_is_claimed(start: Start) -> None:
    prefill, decode = start("draft and state")
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


def test_a_decode_rank_that_has_opened_it_fails_too(start: Start) -> None:
    prefill, decode = start("groups")
    sends = [agent.send(7) for agent in prefill]
    receive = decode[1].receive(7, [3, 4], aux_index=1, tokens=8, group_pages=[[1]])
    with pytest.raises(LocalProtocolError, match="room 7 is open on decode-1: abort it"):
        decode[1].refuse(7, WHY)
    decode[0].refuse(7, WHY)
    for handle in (*sends, receive):
        assert handle.wait(20) is RoomState.FAILED
        assert (handle.error["rank"], handle.error["text"]) == ("decode-0", WHY)  # type: ignore[index]
    until(lambda: receive.released)


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
