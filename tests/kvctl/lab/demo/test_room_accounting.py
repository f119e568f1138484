"""The books of rooms: what is over, what hangs, what is corrupt, and which failures something explains."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.lab.demo.room_accounting import Disturbance, LiveRoom, RoomAccounting, describe
from kvctl.lab.ranks.messages import Ended, Mismatch
from kvctl_agent.contract.snapshots import Failure

S = 1_000_000_000
WRONG = Mismatch(room=1, where="layer 0 k token 3 head 1", expected="aa", found="db", hint="never written")


@pytest.fixture
def books() -> RoomAccounting:
    return RoomAccounting(patience_s=10, grace_s=1, token_bytes=64)


def opened(books: RoomAccounting, number: int = 1, at_s: float = 0.0, without: tuple[str, ...] = ()) -> LiveRoom:
    ranks = ("p-0", "p-1", "d-0")
    room = LiveRoom(
        number=number,
        tokens=100,
        prefix_tokens=36,
        instance=0,
        decode_dp=0,
        prefill=("p-0", "p-1"),
        decode=("d-0",),
        ranks=ranks,
        opened_ns=round(at_s * S),
    )
    books.add(room, [rank for rank in ranks if rank not in without])
    return room


def end(
    books: RoomAccounting, rank: str, state: str = "Success", at_s: float = 1.0, number: int = 1, **more: Any
) -> None:
    cause = None
    if state == "Failed":
        code = more.pop("code", "KV_PEER_LOST")
        cause = Failure(rank=rank, code=code, at_ns=round(at_s * S), text="because")
    ended = Ended(
        room=number,
        state=state,
        cause=cause,
        at_ns=round(at_s * S),
        verified_bytes=more.get("verified_bytes", 0),
        mismatch=more.get("mismatch"),
    )
    books.ended(rank, ended)


def everywhere(books: RoomAccounting, state: str = "Success", at_s: float = 1.0, number: int = 1, **more: Any) -> None:
    for rank in ("p-0", "p-1", "d-0"):
        end(books, rank, state, at_s, number, **more)
        books.released(rank, number, round(at_s * S))


def test_a_room_is_over_when_its_pages_are_free_everywhere(books: RoomAccounting):
    room = opened(books)
    for rank in room.ranks:
        end(books, rank, verified_bytes=4096 if rank == "d-0" else 0)
    assert (books.open, room.succeeded, room.over) == ([room], True, False)
    assert books.in_flight[0] == 0  # nobody waits for it
    for rank in room.ranks:
        books.released(rank, 1, 2 * S)
    assert (books.open, room.over, books.done, books.failed) == ([], True, 1, 0)
    assert (books.verified_bytes, books.delivered_bytes) == (4096, 64 * 64)


def test_what_is_said_twice_or_of_no_room_counts_once_or_never(books: RoomAccounting):
    opened(books)
    everywhere(books)
    everywhere(books)
    everywhere(books, number=99)
    assert (books.opened, books.done, books.open) == (1, 1, [])


def test_an_abort_explains_a_failure(books: RoomAccounting):
    opened(books).aborted = True
    everywhere(books, "Failed", code="ABORTED")
    assert (books.expected, books.unexpected) == (1, [])


@pytest.mark.parametrize(
    ("rank", "from_s", "until_s", "codes", "explained"),
    [
        ("p-1", 0.5, None, (), True),
        ("p-1", -5.0, -0.5, (), True),  # it is over, but not for long
        ("p-1", -5.0, -1.5, (), False),
        ("p-1", 1.5, None, (), False),  # it came after the room had ended
        ("p-9", 0.5, None, (), False),
        (None, 0.5, None, (), True),
        ("p-1", 0.5, None, ("KV_PEER_LOST",), True),
        ("p-1", 0.5, None, ("KV_TRANSPORT",), False),
    ],
)
def test_what_is_done_to_a_rank_of_the_room_within_its_life_explains_it(
    books: RoomAccounting,
    rank: str | None,
    from_s: float,
    until_s: float | None,
    codes: tuple[str, ...],
    explained: bool,
):
    until_ns = None if until_s is None else round(until_s * S)
    books.disturb(Disturbance("fault", rank, round(from_s * S), until_ns, codes))
    opened(books)
    everywhere(books, "Failed")
    assert (books.expected, len(books.unexpected)) == ((1, 0) if explained else (0, 1))


def test_a_rank_s_death_ends_its_part_and_explains_the_room(books: RoomAccounting):
    room = opened(books)
    end(books, "p-0", at_s=0.5)
    books.released("p-0", 1, S)
    books.disturb(Disturbance("kill", "d-0", 2 * S))
    books.died("d-0", 3 * S)
    assert books.in_flight[0] == 0
    end(books, "p-1", "Failed", at_s=1.9)  # its news is older than the death, and was heard later
    books.released("p-1", 1, 4 * S)
    assert room.over
    assert not room.succeeded
    assert (books.failed, books.expected, books.unexpected) == (1, 1, [])


def test_a_room_opened_while_a_rank_is_down_expects_nothing_of_it(books: RoomAccounting):
    books.disturb(Disturbance("kill", "d-0", 0))
    room = opened(books, without=("d-0",))
    assert books.in_flight[0] == 0
    for rank in ("p-0", "p-1"):
        end(books, rank, "Failed")
        books.released(rank, 1, S)
    assert room.over
    assert books.expected == 1


def test_a_room_that_has_not_ended_in_time_hangs_and_is_found_once(books: RoomAccounting):
    room = opened(books)
    for rank in ("p-0", "d-0"):
        end(books, rank)
        books.released(rank, 1, S)
    assert books.find_overdue(9 * S) == []
    assert books.find_overdue(11 * S) == [room]
    assert books.find_overdue(12 * S) == []
    assert (books.hung, room.hung) == ([room], {"p-1"})
    assert describe([room]) == "1 (p-1)"


def test_time_in_which_a_rank_of_it_is_paused_does_not_count(books: RoomAccounting):
    room = opened(books)
    pause = books.disturb(Disturbance("pause", "d-0", 2 * S))
    assert books.find_overdue(60 * S) == []
    pause.until_ns = 60 * S
    assert books.find_overdue(67 * S) == []
    assert books.find_overdue(69 * S) == [room]


def test_a_paused_process_that_was_replaced_explains_nothing_of_the_rooms_that_came_later(books: RoomAccounting):
    before = opened(books, 1, at_s=1.0)
    books.disturb(Disturbance("pause", "p-1", 2 * S, before_ns=4 * S))
    books.died("p-1", 4 * S)
    after = opened(books, 2, at_s=5.0)
    assert books.find_overdue(60 * S) == [after]  # a paused rank may still write to the pages of the other one
    for number in (1, 2):
        everywhere(books, "Failed", at_s=60.0, number=number)
    assert "p-1" not in before.expects
    assert (books.expected, books.unexpected) == (1, [after])


def test_corruption_is_kept_with_its_rank(books: RoomAccounting):
    opened(books)
    end(books, "d-0", mismatch=WRONG)
    books.stray("p-1", WRONG, 5)
    assert [(each.rank, each.mismatch) for each in books.corrupt] == [("d-0", WRONG), ("p-1", WRONG)]


def test_old_rooms_are_forgotten_and_open_ones_are_not(books: RoomAccounting):
    stays = opened(books, 0)
    for number in range(1, 2501):
        opened(books, number)
        everywhere(books, number=number)
    assert books.done == 2500
    assert len(books.rooms) == 2001
    assert books.rooms[0] is stays
    assert 2500 in books.rooms
