"""Parts with checksums: a room succeeds if its pages hold the bytes that were sent, and fails with a code otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.tag import PartKey, PartKind, with_checksum
from tests.kvctl_agent.protocol.test_finals import HYBRID
from tests.support.folded import folded
from tests.support.protocol.oracle import Write
from tests.support.protocol.simulation import Item, World, direct, staged

SENT = 0xC0FFEE01
WRONG = 0xBAD


class WithChecksums(World):  # type: ignore[misc]
    """Writers send a checksum with every part; readers find it, or `WRONG` in the parts in `wrong`."""

    checksums = True

    def __init__(self, *args: Any, **options: Any) -> None:
        self.wrong: set[tuple[PartKind, PartKey]] = set()
        self.checks: list[ev.Check] = []
        self.held_back = False
        self.tags_lost = False
        super().__init__(*args, **options)

    def _act(self, name: str, action: ev.Action) -> None:
        if isinstance(action, ev.Transfer):
            action = replace(action, tag=with_checksum(action.tag, SENT))
        elif isinstance(action, ev.Check):
            self.checks.append(action)
            if not self.held_back:
                self.pool.append(Item("event", name, name, self.answer(action)))
        super()._act(name, action)

    def _complete(self, write: Write) -> None:
        super()._complete(write)
        if self.tags_lost:
            self.pool[:] = [item for item in self.pool if item.kind != "tag"]

    def answer(self, check: ev.Check) -> ev.Checked:
        found = WRONG if (check.kind, check.key) in self.wrong else SENT
        return ev.Checked(check.room, check.nonce, check.kind, check.key, found, self.now_ns)


def world_of(choose: Any, prefill: ParallelConfig | None = None) -> WithChecksums:
    world = WithChecksums(prefill or ParallelConfig(tp=2), ParallelConfig(), choose=choose, shape=HYBRID, ring=64)
    world.connect()
    return world


def move(world: WithChecksums) -> Any:
    world.receive(7, 4, states=(1, 2, 3), aux=3)
    world.flush()
    world.send(7, 4, states=(1, 2, 3))
    if world.held_back:
        world.flush()
    else:
        world.settle()
    return next(iter(world.rooms.values()))


@pytest.mark.parametrize("choose", [direct, staged])
def test_every_part_is_compared_where_it_is_and_then_the_room_succeeds(choose: Any) -> None:
    world = world_of(choose)
    room = move(world)
    assert room.state is RoomState.SUCCESS
    kinds = [check.kind for check in world.checks]
    assert kinds.count(PartKind.AUX) == 1
    assert kinds.count(PartKind.STATE) >= 3
    assert kinds.count(PartKind.KV) >= 2
    assert all((check.share is None) == (check.kind is PartKind.AUX) for check in world.checks)
    assert len({(check.kind, check.key) for check in world.checks}) == len(world.checks)
    world.check_empty()


@pytest.mark.parametrize("choose", [direct, staged])
@pytest.mark.parametrize("kind", list(PartKind))
def test_a_part_that_differs_fails_its_room_everywhere_and_is_named(choose: Any, kind: PartKind) -> None:
    first = world_of(choose)
    move(first)
    key = next(check.key for check in first.checks if check.kind is kind)
    world = world_of(choose)
    world.wrong.add((kind, key))
    room = move(world)
    assert room.state is RoomState.FAILED
    assert {name: record["failure"]["code"] for name, record in failures(world).items()} == dict.fromkeys(
        ["decode-0", "prefill-0", "prefill-1"], "KV_CHECKSUM_MISMATCH"
    )
    text = failures(world)["decode-0"]["failure"]["text"]
    part = "the aux row" if kind is PartKind.AUX else str(key)
    assert text.startswith(f"{part} from prefill-{key.writer} ")
    assert "sent with checksum c0ffee01, in the pages it is 00000bad" in text
    assert ("staged" in text) == (choose is staged and kind is PartKind.KV)
    world.check_empty()


@pytest.mark.parametrize("choose", [direct, staged])
def test_a_checksum_that_cannot_be_computed_fails_its_room(choose: Any) -> None:
    world = world_of(choose)
    world.held_back = True
    room = move(world)
    check = world.checks[0]
    world.feed("decode-0", replace(world.answer(check), found=None, text="the GPU is lost"))
    world.settle()
    assert room.state is RoomState.FAILED
    failure = failures(world)["decode-0"]["failure"]
    assert failure["code"] == "KV_DEVICE"
    assert "could not be computed: the GPU is lost" in failure["text"]
    world.check_empty()


def failures(world: World) -> dict[str, Any]:
    """By agent, what it remembers of the room."""
    return {
        name: folded(machine.telemetry).rooms.history(10)[0]
        for name, machine in world.machines.items()
        if folded(machine.telemetry).rooms.history(10)
    }


@pytest.mark.parametrize("choose", [direct, staged])
def test_a_room_waits_for_the_last_checksum(choose: Any) -> None:
    world = world_of(choose)
    world.held_back = True
    room = move(world)
    assert room.state is RoomState.TRANSFERRING
    for check in world.checks[:-1]:
        world.feed("decode-0", world.answer(check))
    assert room.state is RoomState.TRANSFERRING
    world.feed("decode-0", world.answer(world.checks[-1]))
    world.settle()
    assert room.state is RoomState.SUCCESS
    world.check_empty()


@pytest.mark.parametrize("choose", [direct, staged])
def test_a_part_whose_tag_was_lost_is_compared_too(choose: Any) -> None:
    world = world_of(choose)
    world.tags_lost = True
    room = move(world)
    assert room.state is RoomState.SUCCESS
    assert len(world.checks) == len({(check.kind, check.key) for check in world.checks}) >= 6
    world.check_empty()


def test_a_checksum_that_comes_late_or_twice_changes_nothing() -> None:
    world = world_of(direct)
    world.held_back = True
    room = move(world)
    world.wrong.update((check.kind, check.key) for check in world.checks)
    late = world.checks[0]
    foreign = replace(world.answer(late), nonce=late.nonce + 1)
    world.feed("decode-0", foreign)
    assert room.state is RoomState.TRANSFERRING
    world.feed("decode-0", ev.AbortRoom(7, "the client has gone"))
    world.settle()
    assert room.state is RoomState.FAILED
    for check in world.checks * 2:
        world.feed("decode-0", world.answer(check))
    assert failures(world)["decode-0"]["failure"]["code"] == "ABORTED"
    world.check_empty()
