"""Rooms from end to end, byte for byte: layouts, paths, transports, and the shapes that rooms come in."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from kvctl_agent.contract.states import RoomState

LAYOUTS: dict[str, Any] = {
    "tp4 to dp2": {"prefill": (1, 4), "decode": (2, 1)},
    "tp1 to tp4": {"prefill": (1, 1), "decode": (1, 4)},
    "same heads, tp2 to tp2": {"prefill": (1, 2), "decode": (1, 2)},
    "dp2 tp2 to dp2 tp1": {"prefill": (2, 2), "decode": (2, 1)},
    "odd intersections, tp6 to tp4": {"prefill": (1, 6), "decode": (1, 4), "model": {"heads": 12, "k_dim": 4}},
    "replicated heads, tp4 to tp1": {"prefill": (1, 4), "decode": (1, 1), "model": {"heads": 2, "v_dim": 12}},
    "replicated on both sides": {"prefill": (1, 4), "decode": (1, 4), "model": {"heads": 2}},
    "one token a page": {"prefill": (1, 2), "decode": (1, 1), "model": {"page_size": 1, "pages": 128}},
}


# Over NIXL too, where the layout changes what descriptors look like.
NIXL = ("tp4 to dp2", "same heads, tp2 to tp2", "odd intersections, tp6 to tp4", "replicated heads, tp4 to tp1")


@pytest.mark.parametrize(
    ("transport", "layout"), [*(("loopback", layout) for layout in LAYOUTS), *(("nixl", layout) for layout in NIXL)]
)
def test_every_layout_by_every_path(make_fleet: Any, model: Any, layout: str, transport: str) -> None:
    sizes = {**LAYOUTS[layout], "model": model(**LAYOUTS[layout].get("model", {}))}
    fleet = make_fleet(transport, **sizes, chunk_tokens=4 * sizes["model"].page_size).start()
    number = 0
    for path in ("slice", "staged", "bulk", "auto"):
        fleet.set_path(path)
        for pages, contiguous in ((11, False), (4, True), (1, False)):
            for _ in range(2):  # both decode groups, where there are two
                number += 1
                room = fleet.run(number, pages, contiguous=contiguous, aux=number % 8)
                fleet.check()
                fleet.recycle(room)
    fleet.settle()
    assert fleet.errors() == []
    assert fleet.total(fleet.prefill, "kvctl_parts_total", "slice") > 0
    assert fleet.total(fleet.prefill, "kvctl_parts_total", "staged") > 0
    bulk = fleet.total(fleet.prefill, "kvctl_parts_total", "bulk") > 0
    assert bulk == (layout in ("same heads, tp2 to tp2", "replicated on both sides"))
    assert fleet.total(fleet.prefill + fleet.decode, "kvctl_room_failures_total") == 0
    moved = fleet.total(fleet.prefill, "kvctl_part_bytes_total")
    assert moved == fleet.total(fleet.decode, "kvctl_part_bytes_total") > 0


@pytest.fixture
def fleet(make_fleet: Any) -> Any:
    return make_fleet("loopback", prefill=(1, 2), decode=(1, 1), chunk_tokens=16).start()


PATHS = pytest.mark.parametrize("path", ["slice", "staged"])


class TestChunkedPrefill:
    """The grid cells are 4 pages; sends end where the scheduler likes."""

    @PATHS
    @pytest.mark.parametrize("cuts", [(4, 8), (1, 2, 3), (3, 5, 7, 9), (0, 0, 10), (10,), (11,), tuple(range(11))])
    def test_sends_that_end_anywhere(self, fleet: Any, path: str, cuts: tuple[int, ...]) -> None:
        fleet.set_path(path)
        fleet.run(1, 11, cuts, aux=1)
        fleet.check()

    @PATHS
    def test_the_tail_is_held_back_until_its_cell_is_full_or_the_last(self, fleet: Any, path: str) -> None:
        fleet.set_path(path)
        room = fleet.claim(fleet.receive(fleet.room(1, 11)))
        for send in room.sends:
            send.pages(room.src[:6])
        (receive,) = room.receives.values()
        wait(lambda: receive.state is RoomState.TRANSFERRING)

        def parts() -> int:
            count: int = fleet.decode[0].observe.rooms()[0]["parts"]
            return count

        wait(lambda: parts() == 2)  # one cell from each writer
        for send in room.sends:
            send.pages(room.src[6:7])
        assert not eventually(lambda: parts() != 2, 0.1)
        for send in room.sends:
            send.pages(room.src[7:], last=True)
            send.finish()
        assert room.wait() == {RoomState.SUCCESS}
        fleet.expect(room)
        fleet.check()

    def test_an_empty_last_chunk_still_finishes(self, fleet: Any) -> None:
        room = fleet.claim(fleet.receive(fleet.room(1, 8, aux=2)))
        for send in room.sends:
            send.pages(room.src)
            send.finish(aux_index=2)
        assert room.wait() == {RoomState.SUCCESS}
        fleet.expect(room)
        fleet.check()


class TestPrefix:
    @PATHS
    @pytest.mark.parametrize("prefix", [1, 3, 4, 5, 8, 10])
    def test_cached_pages_are_not_sent(self, fleet: Any, path: str, prefix: int) -> None:
        fleet.set_path(path)
        fleet.run(1, 11, (6, 9), prefix=prefix, aux=1)
        fleet.check()
        sent = fleet.total(fleet.prefill, "kvctl_part_bytes_total")
        assert sent == (11 - prefix) * page_bytes(fleet)

    @PATHS
    def test_a_prompt_that_is_all_cached_moves_only_its_aux_row(self, fleet: Any, path: str) -> None:
        fleet.set_path(path)
        fleet.run(1, 6, prefix=6, aux=3)
        fleet.check()
        assert fleet.total(fleet.prefill, "kvctl_parts_total") == 0

    def test_prefill_reads_the_prefix_when_decode_has_opened_the_room(self, fleet: Any) -> None:
        room = fleet.claim(fleet.room(1, 6, prefix=5))
        assert [send.prefix_tokens for send in room.sends] == [None, None]
        fleet.receive(room)
        wait(lambda: all(send.state is RoomState.WAITING_FOR_INPUT for send in room.sends))
        assert [send.prefix_tokens for send in room.sends] == [5 * fleet.model.page_size] * 2
        fleet.feed(room)
        assert room.wait() == {RoomState.SUCCESS}
        assert [send.prefix_tokens for send in room.sends] == [5 * fleet.model.page_size] * 2

    def test_and_without_an_aux_row_it_moves_nothing(self, fleet: Any) -> None:
        fleet.run(1, 6, prefix=6)
        fleet.check()

    def test_a_prompt_of_no_pages(self, fleet: Any) -> None:
        fleet.run(1, 0, aux=3)
        fleet.run(2, 0)
        fleet.check()


class TestAux:
    def test_a_row_that_the_prefill_does_not_give_fails_the_room_with_what_to_do(self, fleet: Any) -> None:
        room = fleet.claim(fleet.receive(fleet.room(1, 4, aux=1)))
        for send in room.sends:
            send.pages(room.src, last=True)
            send.finish()
        assert room.wait() == {RoomState.FAILED}
        texts = {error["text"] for error in room.errors()}
        assert texts == {"room 1: decode-0 expects an aux row, finish() gave none"}

    def test_a_row_that_nobody_asked_for_is_not_sent(self, fleet: Any) -> None:
        room = fleet.claim(fleet.receive(fleet.room(1, 4)))
        for send in room.sends:
            send.pages(room.src, last=True)
            send.finish(aux_index=5)
        assert room.wait() == {RoomState.SUCCESS}
        fleet.expect(room)
        fleet.check()


class TestOrder:
    @PATHS
    def test_the_prefill_may_be_done_before_decode_opens(self, fleet: Any, path: str) -> None:
        fleet.set_path(path)
        room = fleet.feed(fleet.claim(fleet.room(1, 9, aux=1)), (5,))
        assert {send.wait(0.05) for send in room.sends} == {RoomState.BOOTSTRAPPING}
        fleet.receive(room)
        assert room.wait() == {RoomState.SUCCESS}
        fleet.expect(room)
        fleet.check()

    @PATHS
    def test_decode_may_open_long_before(self, fleet: Any, path: str) -> None:
        fleet.set_path(path)
        room = fleet.receive(fleet.room(1, 9, aux=1))
        (receive,) = room.receives.values()
        wait(lambda: receive.state is RoomState.WAITING_FOR_INPUT)
        fleet.feed(fleet.claim(room), (5,))
        assert room.wait() == {RoomState.SUCCESS}
        fleet.expect(room)
        fleet.check()

    def test_states_reach_the_callback_in_order_and_never_go_back(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1))
        told: list[tuple[str, RoomState]] = []
        sent: list[bool] = []

        def on_state(handle: Any, state: RoomState) -> None:
            sent.append(handle.sent)
            told.append(("prefill-0", state))

        prefill = fleet.prefill_agent(0, on_state=on_state).start()
        decode = fleet.decode_agent(0, on_state=lambda handle, state: told.append(("decode-0", state))).start()
        fleet.prefill, fleet.decode = [prefill], [decode]
        decode.wait_ready(60)
        fleet.run(1, 9)
        wait(lambda: len([1 for name, _ in told if name == "prefill-0"]) >= 5)
        life = [RoomState.BOOTSTRAPPING, RoomState.WAITING_FOR_INPUT, RoomState.TRANSFERRING, RoomState.SUCCESS]
        assert [state for name, state in told if name == "prefill-0"] == [*life[:3], RoomState.TRANSFERRING, life[3]]
        assert sent == [False, False, False, True, True]
        seen = [state for name, state in told if name == "decode-0"]
        assert seen == sorted(seen)
        assert (seen[0], seen[-1]) == (life[0], life[-1])

    def test_a_room_number_can_be_used_again(self, fleet: Any) -> None:
        for _ in range(5):
            fleet.recycle(fleet.run(7, 5))
            fleet.settle()
            fleet.check()

    def test_also_before_the_prefill_ranks_know_that_decode_has_the_room(self, fleet: Any) -> None:
        """The end of the first room leaves before the opening of the second, which the prefill ranks would ignore."""
        for _ in range(10):
            first = fleet.feed(fleet.claim(fleet.receive(fleet.room(7, 5))))
            assert first.receives["decode-0"].wait(60) is RoomState.SUCCESS
            second = fleet.receive(fleet.room(7, 5))
            assert first.wait() == {RoomState.SUCCESS}, first.errors()
            assert fleet.feed(fleet.claim(second)).wait() == {RoomState.SUCCESS}, second.errors()
            for room in (first, second):
                fleet.expect(room)
                fleet.recycle(room)
            fleet.check()
        assert fleet.total(fleet.prefill, "kvctl_control_dropped_total", "early") == 0


class TestManyRooms:
    @pytest.mark.parametrize("transport", ["nixl", "loopback"])
    def test_two_hundred_at_once_through_a_ring_that_holds_a_few(
        self, make_fleet: Any, model: Any, transport: str
    ) -> None:
        """Each room needs 128 KiB of staging from each writer, the ring has 1 MiB: most are gated at any time."""
        wide = model(heads=4, k_dim=128, v_dim=128, page_size=8, pages=1700, layers=2)
        fleet = make_fleet(
            transport, prefill=(1, 2), decode=(1, 1), model=wide, path="staged", chunk_tokens=32, resend_s=1.0
        ).start()
        rooms = [fleet.receive(fleet.room(number, 8)) for number in range(200)]
        order = np.random.default_rng(5).permutation(200)
        for number in order:
            fleet.feed(fleet.claim(rooms[number]), (3,))
        for room in rooms:
            assert room.wait(60) == {RoomState.SUCCESS}, room.errors()
            fleet.expect(room)
        fleet.check()
        fleet.settle()
        assert fleet.errors() == []
        staging = fleet.decode[0].observe.staging()["ring"]
        assert staging["high_water_bytes"] == staging["size_bytes"], "the ring never was the bottleneck"
        assert staging["granted_total"] == 200 * 2 * 2
        assert staging["round"] > 20
        assert fleet.total(fleet.prefill, "kvctl_fallbacks_total") == 0


class TestRingTooSmall:
    def test_a_part_that_can_never_fit_takes_another_path_and_that_is_told(self, make_fleet: Any, model: Any) -> None:
        wide = model(heads=4, k_dim=128, v_dim=128, page_size=16, pages=48, layers=8)
        fleet = make_fleet(prefill=(1, 2), decode=(1, 1), model=wide, path="staged").start()
        fleet.run(1, 40)
        fleet.check()
        assert fleet.total(fleet.prefill, "kvctl_fallbacks_total", "ring-too-small") == 2
        assert fleet.prefill[0].observe.staging()["fallbacks_total"] == 1
        assert fleet.total(fleet.prefill, "kvctl_parts_total", "slice") == 2
        assert all("the ring of decode-0 has 1048576: sent by slice" in text for text in fleet.events("fallback"))
        assert any("raise staging_ring_mb" in text for text in fleet.events("staging-refused"))

    def test_staging_off_needs_no_ring_and_no_grant(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 2), decode=(1, 1), staging="off", path="auto").start()
        assert fleet.decode[0].parts.ring is None
        assert fleet.decode[0].observe.status()["ring"] is None
        fleet.run(1, 9, aux=1)
        fleet.check()
        assert fleet.total(fleet.prefill, "kvctl_parts_total", "slice") == 2
        assert fleet.total(fleet.prefill + fleet.decode, "kvctl_control_messages_total", "out", "StagingRequest") == 0


def page_bytes(fleet: Any) -> int:
    m = fleet.model
    total: int = m.layers * m.page_size * m.heads * (m.k_dim + m.v_dim) * m.dtype_bytes
    return total


def eventually(condition: Any, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.002)
    return True


def wait(condition: Any, timeout_s: float = 60.0) -> None:
    assert eventually(condition, timeout_s)


@pytest.mark.parametrize("prefix", [0, 2])
def test_send_says_at_once_that_every_decode_rank_has_opened_the_room(make_fleet: Any, prefix: int) -> None:
    fleet = make_fleet("loopback", prefill=(1, 2), decode=(1, 2)).start()
    room = fleet.receive(fleet.room(1, 8, prefix=prefix))
    wait(lambda: all(agent.parts.machine.opened_prefix(1) is not None for agent in fleet.prefill))
    for agent in fleet.prefill:
        send = agent.send(1)
        assert (send.state, send.prefix_tokens) == (RoomState.WAITING_FOR_INPUT, prefix * fleet.model.page_size)
        room.sends.append(send)
    fleet.feed(room)
    assert room.wait() == {RoomState.SUCCESS}, room.errors()
    fleet.expect(room)


def test_send_says_nothing_of_a_room_that_only_some_decode_ranks_have_opened(make_fleet: Any) -> None:
    fleet = make_fleet("loopback", prefill=(1, 1), decode=(1, 2)).start()
    (prefill,), (decode, _) = fleet.prefill, fleet.decode
    receive = decode.receive(1, [0])
    wait(prefill.observe.rooms)
    send = prefill.send(1)
    assert (send.state, send.prefix_tokens) == (RoomState.BOOTSTRAPPING, None)
    send.abort("enough")
    assert {handle.wait(60) for handle in (send, receive)} == {RoomState.FAILED}
