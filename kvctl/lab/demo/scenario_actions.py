"""What the scenes do: to real processes, real lanes and real bytes, with nothing pretended.

Each yields the seconds until it wants to go on.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from kvctl.lab.demo.room_accounting import Room
from kvctl.lab.demo.scenario_context import ScenarioContext

_FOR_GOOD_S = 1e9
_SOON_S = 0.05
_LATE = "slow-lane=200ms"
_WRONG = "corrupt-write=5%"
_NO_GRANTS = "message-loss=staging-grants"
_NO_FAILURES = "message-loss=room-failed"
_NO_NEWS_OF_THE_RING = "message-loss=watermark+room-abort"
_NO_SCATTERS = "slow-scatter=10m"
_TRIES = 20
_BEHIND = 4
_BREATH_S = 0.5
_SPARE_FILES = 4
_NOW_AND_THEN_S = 2.0
_JOINED_S = 1.0


def stuck_room(stage: ScenarioContext) -> Iterator[float]:
    """One room after the other, so that one is stuck at any time: each fails at its deadline."""
    writer, tokens = stage.prefill[-1], stage.traffic.fleet.plan.tokens[1]
    lasting_s = stage.traffic.fleet.plan.timings["waiting_timeout_s"]
    while True:
        room = stage.traffic.open(tokens, hangs_at=writer)
        waiting = " and ".join(room.decode)
        stage.say(
            f"room {room.number}: {writer} never computes its second half; {waiting} waits {lasting_s:g} s for it"
        )
        yield lasting_s * 0.7


def pinned_ring(stage: ScenarioContext) -> Iterator[float]:
    """The writer is stopped between the grant and the write of a room's second forward."""
    fleet = stage.traffic.fleet
    writer, reader = stage.prefill[-1], stage.decode[0]
    instance = fleet.ranks[writer].planned["instance"]
    while True:
        room = stage.traffic.open(fleet.plan.chunk_tokens * 2, instance=instance, gap_s=5.0)
        for _ in range(_TRIES):
            yield _SOON_S
            if stage.holds(reader, room.number):
                stage.traffic.pause(writer)
                break
        yield _SOON_S
        if stage.holds(reader, room.number):
            break
        stage.traffic.resume(writer)  # it had written before it was stopped
    pid = fleet.ranks[writer].pid
    stage.say(f"room {room.number}: {writer} (pid {pid}) is stopped and holds the oldest region of {reader}'s ring")
    behind: list[Room] = []
    while True:
        # Others' rooms that need what is left of the ring, and then what is not.
        behind = [room for room in behind if not room.over]
        if len(behind) < _BEHIND:
            behind.append(stage.traffic.open(fleet.plan.tokens[1]))
        yield _BREATH_S


def dead_peer(stage: ScenarioContext) -> Iterator[float]:
    """Killed, and nobody starts it again."""
    victim = stage.decode[-1]
    pid = stage.traffic.fleet.ranks[victim].pid
    stage.traffic.kill(victim)
    stage.say(f"{victim} (pid {pid}) is killed and stays dead")
    yield _FOR_GOOD_S


def slow_layer(stage: ScenarioContext) -> Iterator[float]:
    """All its lanes; the other writers are as fast as ever."""
    writer = stage.prefill[-1]
    stage.traffic.fault(writer, _LATE, _FOR_GOOD_S)
    stage.say(f"every write of {writer} leaves 0.2 s late")
    yield _FOR_GOOD_S


def compat(stage: ScenarioContext) -> Iterator[float]:
    """It was started so; all there is to do is to say it."""
    plan = stage.traffic.fleet.plan
    for name, page_size in plan.odd_pages.items():
        stage.say(f"{name} has pages of {page_size} tokens, all others of {plan.page_size}")
    yield _FOR_GOOD_S


def bootstrap(stage: ScenarioContext) -> Iterator[float]:
    """Its router does not know, and sends the instance a room now and then."""
    fleet = stage.traffic.fleet
    (absent,) = fleet.plan.absent
    stage.say(f"{absent} is not started, and rooms come for its instance all the same")
    while True:
        stage.traffic.open(fleet.plan.chunk_tokens, instance=fleet.ranks[absent].planned["instance"])
        yield fleet.plan.timings["bootstrap_timeout_s"] * 0.7


def fd_low(stage: ScenarioContext) -> Iterator[float]:
    """From outside, as `prlimit` does."""
    victim = stage.decode[-1]
    pid = stage.traffic.fleet.ranks[victim].pid
    count = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count + _SPARE_FILES, hard))
    stage.say(f"{victim} (pid {pid}) has {count} files open and may have {count + _SPARE_FILES}")
    yield _FOR_GOOD_S


def corrupt(stage: ScenarioContext) -> Iterator[float]:
    """Flipped after the checksum was taken, as a bad cable or a bad page of memory would."""
    writer = stage.prefill[-1]
    stage.traffic.fault(writer, _WRONG, _FOR_GOOD_S)
    stage.say(f"one write in twenty of {writer} has a wrong byte")
    yield _FOR_GOOD_S


def grant_loss(stage: ScenarioContext) -> Iterator[float]:
    """Heard and not answered, as far as it can tell: everything else gets through."""
    writer = stage.prefill[-1]
    stage.traffic.fault(writer, _NO_GRANTS, _FOR_GOOD_S)
    stage.say(f"{writer} gets no staging grant any more; whatever else it is sent arrives")
    yield _FOR_GOOD_S


def oversized_chunk(stage: ScenarioContext) -> Iterator[float]:
    """It was started so; long prompts show it, which come now and then."""
    fleet = stage.traffic.fleet
    ((odd, mib),) = fleet.plan.odd_rings.items()
    dp = fleet.ranks[odd].planned["dp"]
    stage.say(f"{odd} has a ring of {mib} MiB, all others of {fleet.plan.ring}")
    while True:
        stage.traffic.open(fleet.plan.tokens[1], decode_dp=dp)
        yield _NOW_AND_THEN_S


def plan_mismatch(stage: ScenarioContext) -> Iterator[float]:
    """As engines do whose tokenizers or templates are of two versions: one makes a page more of the same prompt."""
    plan = stage.traffic.fleet.plan
    tokens, more = plan.page_size * 8, plan.page_size
    stage.say(f"of some prompts the decode side expects {tokens} tokens, and the prefill side makes {tokens + more}")
    while True:
        stage.traffic.open(tokens, computes=tokens + more)
        yield _NOW_AND_THEN_S


def stuck_waiting(stage: ScenarioContext) -> Iterator[float]:
    """Its failure is said again and again, and never heard. One room after the other, as for `stuck_room`."""
    fleet, writer = stage.traffic.fleet, stage.prefill[-1]
    lasting_s = fleet.plan.timings["waiting_timeout_s"]
    stage.traffic.fault(writer, _NO_FAILURES, _FOR_GOOD_S)
    while True:
        room = stage.traffic.open(fleet.plan.chunk_tokens, hangs_at=writer, chunks=1)
        yield _JOINED_S  # both ends have joined by then
        stage.traffic.abort(room, writer, "the engine is out of memory")
        waiting = " and ".join(room.decode)
        stage.say(f"room {room.number}: {writer} has failed it, which {waiting} is not told: it waits {lasting_s:g} s")
        yield lasting_s * 0.7


def stuck_scatter(stage: ScenarioContext) -> Iterator[float]:
    """Everything lands, and stays in the ring."""
    reader = stage.decode[0]
    stage.traffic.fault(reader, _NO_SCATTERS, _FOR_GOOD_S)
    stage.say(f"{reader} copies nothing from its ring to its pages any more")
    yield _FOR_GOOD_S


def draining(stage: ScenarioContext) -> Iterator[float]:
    """An operator drained it and forgot the router, which still sends requests there."""
    writer = stage.prefill[-1]
    while not stage.drain(writer):
        yield _BREATH_S
    stage.say(f"{writer} was told to take no new rooms, and rooms come for its instance all the same")
    yield _FOR_GOOD_S


def gated_empty(stage: ScenarioContext) -> Iterator[float]:
    """Somebody frees by force what a writer that only slept still has, and the line keeps it from the writer.

    Agents alone do not get here: a region is freed when its writer has written it, given it back or ended, and a
    writer whose region is freed by force is told that its room has failed.
    """
    traffic, writer, reader = stage.traffic, stage.prefill[0], stage.decode[0]
    traffic.shut = True  # what others are granted would make the ring move
    while sum(traffic.ledger.in_flight.values()):
        yield _SOON_S
    traffic.fault(writer, _NO_NEWS_OF_THE_RING, _FOR_GOOD_S)
    while not stage.gated(writer):  # a room or two are written yet: the watermark that is known lets them
        if not stage.regions(reader):
            traffic.open(traffic.fleet.plan.chunk_tokens)
        yield _BREATH_S
    traffic.pause(writer)
    while not stage.misses(reader, writer):
        yield _BREATH_S
    for region in stage.regions(reader):
        stage.force(reader, region["serial"])
    traffic.resume(writer)
    stage.say(f"what {writer} waits to write into {reader}'s ring was freed by force, and no word of it gets through")
    yield _FOR_GOOD_S
