"""What a play has at hand: the fleet, its traffic, a voice, and what an operator could see."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvctl.client.calls import Call
from kvctl.client.fleet import Fleet
from kvctl.errors import CliError
from kvctl.lab.demo.room_accounting import Disturbance, Room
from kvctl.lab.demo.traffic import Traffic
from kvctl.lab.faults.specification import FAULTS
from kvctl.lab.ranks.request import Sizes

# Agents of one machine, asked on the thread that opens rooms.
_ANSWER_NS = 500_000_000
_BEGIN_S = 2.0


class ScenarioContext:
    """One demo's.

    Attributes:
        traffic: to open rooms of one's own, and to hurt ranks.
        prefill, decode: names of the ranks.
    """

    def __init__(self, traffic: Traffic, say: Callable[[str], None]) -> None:
        """`say` gets a line whenever something was done."""
        self.traffic = traffic
        self.prefill = traffic.fleet.of_role("prefill")
        self.decode = traffic.fleet.of_role("decode")
        self.say = say

    def holds(self, rank: str, room: int) -> bool:
        """Whether a room has a region of a decode rank's ring that nothing has landed in."""
        wanted = str(room)
        return any(each["room"] == wanted and each["state"] in ("granted", "revoking") for each in self.regions(rank))

    def regions(self, rank: str) -> list[dict[str, Any]]:
        """What is granted of a decode rank's ring, the oldest first."""
        return [
            each for data in self._ask(rank, Call("staging")) if data["ring"] for each in data["ring"]["allocations"]
        ]

    def gated(self, rank: str) -> bool:
        """Whether a prefill rank has a part that waits for a watermark."""
        parts = [part for data in self._ask(rank, Call("staging")) for part in data["gated"]]
        return any(part["waiting_for"].startswith("watermark") for part in parts)

    def misses(self, rank: str, peer: str) -> bool:
        """Whether a rank says that it has not heard a peer for long."""
        rows = [row for data in self._ask(rank, Call("peers")) for row in data]
        return any(row["peer"] == peer and row["state"] in ("suspect", "lost") for row in rows)

    def force(self, rank: str, serial: int) -> None:
        """What `kvctl staging release --force` does."""
        self._ask(rank, Call("release", {"serial": serial, "force": True}))

    def drain(self, rank: str) -> bool:
        """What `kvctl drain` does; False where the rank did not answer in time."""
        return bool(self._ask(rank, Call("drain")))

    @staticmethod
    def _ask(rank: str, call: Call) -> list[Any]:
        """The rank's answer; none where it gives none in time."""
        try:
            with Fleet([rank], {}, _ANSWER_NS) as fleet:
                return [data for _, data in fleet.survey([call]).answers(call.command)]
        except CliError:
            return []


Play = Callable[[ScenarioContext], Iterator[float]]
"""What a scene does; it yields the seconds until it wants to go on."""


class Direction:
    """Gives a play its turns while traffic runs."""

    def __init__(self, traffic: Traffic, play: Play, say: Callable[[str], None]) -> None:
        """Time begins now; the play begins when there are rooms to be hurt."""
        self._moments = play(ScenarioContext(traffic, say))
        self._next_at = time.monotonic() + _BEGIN_S
        self._over = False
        # Whatever fails from now on was meant to, or comes of it.
        traffic.ledger.disturb(Disturbance("scene", None, time.monotonic_ns()))

    def turn(self) -> None:
        """Go on with the play when it is time."""
        if self._over or time.monotonic() < self._next_at:
            return
        wait_s = next(self._moments, None)
        self._over = wait_s is None
        self._next_at = time.monotonic() + (wait_s or 0.0)

    def end(self) -> None:
        """Nothing more is done."""
        self._over = True


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


_TWO_INSTANCES = (Sizes(), Sizes())


@dataclass(frozen=True)
class Scenario:
    """One fault, from its cause to what is found.

    Attributes:
        does: what is done to whom, for a list.
        code: the health code that should come first.
        look: commands that show it, the best one first.
        options: of `kvctl demo`, where the user gave none.
        plan: fields of `SteadyPlan` that it needs.
        config: of every agent.
    """

    name: str
    does: str
    code: str
    look: tuple[str, ...]
    play: Play
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "stuck-room",
        "A prefill rank never computes its half of a room.",
        "KV_ROOM_STUCK_TRANSFER",
        ("kvctl doctor", "kvctl rooms --sort-by -age", "kvctl top"),
        stuck_room,
    ),
    Scenario(
        "pinned-ring",
        "A prefill rank is stopped while it holds the oldest grant.",
        "KV_RING_PINNED",
        ("kvctl doctor", "kvctl staging map", "kvctl rooms"),
        pinned_ring,
        options={"prefill_instances": _TWO_INSTANCES, "ring_mb": 2},
        plan={"chunk_tokens": 128},
        # An agent leads the others round a silent writer's region, as it should: here it notices late, and gives no
        # room up before.
        config={"path": "staged", "suspect_s": 500.0, "lost_s": 600.0, "waiting_timeout_s": 600.0},
    ),
    Scenario(
        "dead-peer",
        "A decode rank is killed and stays dead; traffic goes on.",
        "KV_PEER_LOST",
        ("kvctl doctor", "kvctl agents", "kvctl peers"),
        dead_peer,
    ),
    Scenario(
        "slow-layer",
        "Every write of one prefill rank leaves 0.2 s late.",
        "KV_LANE_SLOW",
        ("kvctl layers", "kvctl doctor", "kvctl top"),
        slow_layer,
    ),
    Scenario(
        "corrupt",
        "One write in twenty of a prefill rank has a wrong byte.",
        "KV_CHECKSUM_MISMATCH",
        ("kvctl doctor", "kvctl rooms history", "kvctl events"),
        corrupt,
        config={"checksum": True},
    ),
    Scenario(
        "compat",
        "A decode rank was set up with another page size.",
        "KV_COMPAT_MISMATCH",
        ("kvctl doctor", "kvctl peers diff", "kvctl peers matrix"),
        compat,
        plan={"odd_pages": {"decode-1": 32}},
    ),
    Scenario(
        "bootstrap",
        "One rank of a prefill instance never starts.",
        "KV_ROOM_STUCK_BOOTSTRAP",
        ("kvctl doctor", "kvctl bootstrap", "kvctl rooms"),
        bootstrap,
        options={"prefill_instances": (Sizes(tp=2), Sizes())},
        plan={"absent": frozenset({"p0-prefill-1"})},
    ),
    Scenario(
        "grant-loss",
        "A prefill rank gets no staging grants; all else arrives.",
        "KV_GRANT_UNANSWERED",
        ("kvctl doctor", "kvctl staging", "kvctl rooms"),
        grant_loss,
        config={"path": "staged"},
    ),
    Scenario(
        "oversized-chunk",
        "A decode rank's ring is too small for long prompts.",
        "KV_CHUNK_OVERSIZED",
        ("kvctl doctor", "kvctl staging", "kvctl rooms slow"),
        oversized_chunk,
        plan={"chunk_tokens": 1024, "odd_rings": {"decode-1": 1}},
        config={"path": "staged"},
    ),
    Scenario(
        "plan-mismatch",
        "The two sides disagree on the length of some prompts.",
        "KV_PLAN_MISMATCH",
        ("kvctl doctor", "kvctl rooms history", "kvctl events"),
        plan_mismatch,
    ),
    Scenario(
        "stuck-waiting",
        "A prefill rank fails rooms, and nobody hears of it.",
        "KV_ROOM_STUCK_WAITING",
        ("kvctl doctor", "kvctl rooms", "kvctl top"),
        stuck_waiting,
        options={"prefill_tp": 1},
    ),
    Scenario(
        "stuck-scatter",
        "A decode rank copies nothing from its ring to its pages.",
        "KV_ROOM_STUCK_SCATTER",
        ("kvctl doctor", "kvctl staging", "kvctl rooms"),
        stuck_scatter,
        config={"path": "staged"},
    ),
    Scenario(
        "gated-empty",
        "A region that a deaf writer waits for is freed by force.",
        "KV_RING_GATED_EMPTY",
        ("kvctl doctor", "kvctl staging", "kvctl rooms"),
        gated_empty,
        options={"prefill_tp": 1, "decode_dp": 1},
        config={"path": "staged", "waiting_timeout_s": 600.0},
    ),
    Scenario(
        "fd-low",
        "A decode rank may hardly open another file.",
        "KV_FDS_LOW",
        ("kvctl doctor", "kvctl health"),
        fd_low,
    ),
    Scenario(
        "draining",
        "A prefill rank was told to take no new rooms; its router does not know.",
        "KV_DRAINING",
        ("kvctl status", "kvctl doctor", "kvctl agents"),
        draining,
    ),
)

SCENARIOS_BY_NAME: dict[str, Scenario] = {scene.name: scene for scene in SCENARIOS}


def listed() -> list[dict[str, str | None]]:
    """All that `kvctl demo --fault` takes: the scenes, then the faults of which one says how much or when."""
    scenes: list[dict[str, str | None]] = [
        {"fault": one.name, "kind": "scene", "does": one.does, "code": one.code} for one in SCENARIOS
    ]
    scenes += [{"fault": one.example, "kind": one.level, "does": one.help, "code": None} for one in FAULTS]
    return scenes
