"""Arguments and settings of unequal pages, shared prompts and KV groups that do not fit: refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvctl_agent.agent import Agent
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import ConfigError, LayoutError, LocalProtocolError
from kvctl_agent.layout.parallel import local_shards
from kvctl_agent.layout.shape import KVGroup, ModelShape
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.rank import Rank

PLAIN = ModelShape(2, 2, 4, 4, 2)
SOLE = Rank()
GROUPED = ModelShape(2, 2, 4, 4, 2, groups=(KVGroup("swa", ModelShape(1, 2, 4, 4, 2), (0,), 8),))


@pytest.fixture
def make(no_leaks: None, socket_dir: Path) -> Any:
    made: list[Agent] = []

    def agent(role: Any, rank: Rank = SOLE, model: ModelShape = PLAIN, page_size: int = 4, **config: Any) -> Agent:
        shards = local_shards(model, page_size, rank.parallel_config, rank.coord)
        pool = KVPool.allocate(shards, page_size, 16, {group.name: 8 for group in model.groups})
        name = f"{role}-{rank.cp}"
        common: dict[str, Any] = {"transport": "loopback", "staging_ring_mb": 1, "staging_buffer_mb": 1}
        bootstrap = f"ipc://{socket_dir}/boot"
        made.append(
            Agent(
                **{"role": role, "rank": rank, "pool": pool, "name": name, "model": model},
                **{"bootstrap": bootstrap, **common, **config},
            )
        )
        return made[-1]

    yield agent
    for each in made:
        each.close()
        each.pool.close()


def test_the_length_of_a_prompt_may_be_of_any_integer_type(make: Any) -> None:
    prefill, decode = make("prefill").start(), make("decode", page_size=8).start()
    decode.wait_ready(60)
    receive, send = decode.receive(7, [1], tokens=np.int64(5)), prefill.send(7)
    send.pages([2, 3], last=True)
    send.finish()
    assert (receive.wait(60), send.wait(60)) == (RoomState.SUCCESS, RoomState.SUCCESS)


def test_a_length_that_was_not_passed_is_asked_for(make: Any) -> None:
    prefill, decode = make("prefill").start(), make("decode", page_size=8).start()
    decode.wait_ready(60)
    receive, send = decode.receive(7, [1, 2]), prefill.send(7)
    send.pages([2, 3, 4], last=True)
    send.finish()
    assert receive.wait(60) is RoomState.FAILED
    assert "whose last page may be filled in part: pass tokens= to receive" in receive.error["text"]


def test_cp_ranks_of_one_room_that_interleave_differently_are_named(make: Any) -> None:
    make("prefill").start()
    ranks = [
        make("decode", Rank(cp=cp, cp_size=2), cp_interleave=size, bootstrap_timeout_s=30.0).start()
        for cp, size in enumerate((1, 4))
    ]
    for rank in ranks:
        rank.wait_ready(60)
    receives = [rank.receive(7, [1], tokens=8) for rank in ranks]
    assert [receive.wait(60) for receive in receives] == [RoomState.FAILED] * 2
    for receive in receives:
        assert receive.error["code"] == "KV_PLAN_MISMATCH"
        assert re.search("decode-[01] and decode-[01] differ: page_size [14] ≠ [14]", receive.error["text"])


def test_settings_that_do_not_fit_the_pages_are_refused_at_once(make: Any) -> None:
    with pytest.raises(ConfigError, match="cp_interleave = 3: it must divide the page of 4 tokens, since 2 cp ranks"):
        make("decode", Rank(cp_size=2), cp_interleave=3)
    with pytest.raises(ConfigError, match="not a multiple of the page of 8 tokens of KV group swa; set"):
        make("prefill", model=GROUPED, chunk_tokens=4)


def test_pages_of_a_group_that_the_prompt_has_not_are_refused(make: Any) -> None:
    decode = make("decode", model=GROUPED).start()
    with pytest.raises(LocalProtocolError, match="the model has KV groups: pass tokens="):
        decode.receive(7, [1, 2])
    with pytest.raises(LayoutError, match="room 7: 2 pages of KV group 1, the prompt has 1"):
        decode.receive(7, [1, 2], tokens=8, group_pages=[[1, 2]])
    with pytest.raises(LocalProtocolError, match="room 7: group_pages is"):
        decode.receive(7, [1, 2], tokens=8, group_pages=[[1], [2]])
    with pytest.raises(LocalProtocolError, match="room 7: page 9 is outside the group's pool of 8"):
        decode.receive(7, [1, 2], tokens=8, group_pages=[[9]])


def test_rooms_to_renew_need_an_instance_and_a_list(make: Any) -> None:
    alone = make("decode", bootstrap=None).start()
    with pytest.raises(LocalProtocolError, match="pass prefill=, or call connect"):
        alone.renew([1])
    with pytest.raises(LocalProtocolError, match="rooms is 5: it must be a list of room numbers"):
        alone.renew(5, prefill="ipc:///tmp/kvctl-nobody")
