"""Ways in which a room can end: the calls on both sides, and the expected final states."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.leaks.process import SideProcess

WAIT_S = 60.0
TRIES = 5

Sides = tuple[SideProcess, SideProcess]
Ending = Callable[[SideProcess, SideProcess, int], None]


def success(prefill: SideProcess, decode: SideProcess, room: int) -> None:
    decode.ask("receive", room=room)
    prefill.ask("claim", room=room)
    prefill.ask("feed", room=room)


def abort_by_decode(prefill: SideProcess, decode: SideProcess, room: int) -> None:
    decode.ask("receive", room=room)
    prefill.ask("claim", room=room)
    decode.ask("abort", room=room)


def abort_by_prefill(prefill: SideProcess, decode: SideProcess, room: int) -> None:
    decode.ask("receive", room=room)
    prefill.ask("claim", room=room)
    prefill.ask("abort", room=room, rank=1)


def abort_on_its_way(prefill: SideProcess, decode: SideProcess, room: int) -> None:
    success(prefill, decode, room)
    decode.ask("abort", room=room)


def abort_before_it_is_opened(prefill: SideProcess, decode: SideProcess, room: int) -> None:
    prefill.ask("claim", room=room)
    prefill.ask("abort", room=room)
    prefill.ask("abort", room=room, rank=1)
    decode.ask("receive", room=room)


def abort_before_it_is_claimed(prefill: SideProcess, decode: SideProcess, room: int) -> None:
    decode.ask("receive", room=room)
    decode.ask("abort", room=room)
    prefill.ask("claim", room=room)


def deadline_without_pages(prefill: SideProcess, decode: SideProcess, room: int) -> None:
    decode.ask("receive", room=room)
    prefill.ask("claim", room=room)


def deadline_never_opened(prefill: SideProcess, decode: SideProcess, room: int) -> None:
    prefill.ask("claim", room=room)


def deadline_never_claimed(prefill: SideProcess, decode: SideProcess, room: int) -> None:
    decode.ask("receive", room=room)


def another_length(prefill: SideProcess, decode: SideProcess, room: int) -> None:
    decode.ask("receive", room=room, pages=4)
    prefill.ask("claim", room=room)
    prefill.ask("feed", room=room)


def prefill_only(prefill: SideProcess, decode: SideProcess, room: int) -> None:
    decode.ask("receive", room=room, prefill_only=True)
    prefill.ask("claim", room=room)
    prefill.ask("feed", room=room)


def fake(prefill: SideProcess, decode: SideProcess, room: int) -> None:
    decode.ask("receive", room=room, fake=True)
    prefill.ask("claim", room=room, fake=True)


# Expected final state or failure code on both sides.
ENDINGS: dict[Ending, set[str]] = {
    success: {"SUCCESS"},
    abort_by_decode: {"ABORTED"},
    abort_by_prefill: {"ABORTED"},
    abort_on_its_way: {"SUCCESS", "ABORTED"},
    abort_before_it_is_opened: {"ABORTED"},
    abort_before_it_is_claimed: {"ABORTED"},
    deadline_without_pages: {"KV_ROOM_STUCK_WAITING", "KV_ROOM_STUCK_TRANSFER"},
    deadline_never_opened: {"KV_ROOM_STUCK_BOOTSTRAP"},
    deadline_never_claimed: {"KV_ROOM_STUCK_WAITING", "KV_ROOM_STUCK_TRANSFER"},
    another_length: {"KV_PLAN_MISMATCH"},
    prefill_only: {"SUCCESS"},
    fake: {"SUCCESS"},
}
ABSENT: dict[Ending, str] = {deadline_never_opened: "decode", deadline_never_claimed: "prefill"}


class Late(RuntimeError):
    """Error for a room that reached its short deadline before its expected end, because the machine was busy."""


def finish(sides: Sides, ending: Ending, room: int) -> None:
    """Waits until a started room has ended on both sides.

    Raises:
        Late: the room unexpectedly ended by a deadline.
        RuntimeError: the room ended in another unexpected way, or its pages were not released.
    """
    late = ""
    for side in sides:
        if side.role != ABSENT.get(ending):
            for end in side.ask("wait", room=room, timeout=WAIT_S):
                code = end["error"]["code"] if end["error"] else end["state"]
                if end["released"] and code in ENDINGS[ending]:
                    continue
                text = f"{ending.__name__}: room {room} ended as {end} on the {side.role} side"
                if not end["released"] or not code.startswith("KV_ROOM_STUCK"):
                    raise RuntimeError(text)
                late = text
    if late:
        raise Late(late)


def run(sides: Sides, ending: Ending, room: int) -> None:
    """Runs one room from its beginning to its end; repeats this with a new room number if the room was late."""
    for attempt in range(TRIES):
        number = room + 100_000 * attempt
        ending(*sides, number)
        try:
            finish(sides, ending, number)
        except Late:
            if attempt == TRIES - 1:
                raise
        else:
            break
