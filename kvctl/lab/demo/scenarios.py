"""Fault scenarios of `kvctl demo`: what is done to a small fleet, and the health code that should report it.

A scenario consists of parameters of the fleet and a script. The script is a generator that acts on processes and
connections of the fleet and yields the seconds after which it wants to continue. It runs in the event loop of the
traffic until the demo ends.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvctl.client.calls import Call
from kvctl.client.fleet import Fleet
from kvctl.errors import CliError
from kvctl.lab.demo.room_accounting import Disturbance, LiveRoom
from kvctl.lab.demo.traffic import Traffic
from kvctl.lab.faults.specification import FAULTS
from kvctl.lab.ranks.group import FleetError
from kvctl.lab.ranks.request import Sizes

# Queries of agents block the thread that opens rooms; all agents are on this machine, so they answer fast.
_ANSWER_NS = 500_000_000
_BEGIN_S = 2.0
_FOREVER_S = 1e9
_NO_FAILURES = "message-loss=room-failed"
_NO_WATERMARKS = "message-loss=watermark+room-abort"
_TRIES = 20
_ROOMS_BEHIND = 4
_POLL_S = 0.05
_PAUSE_S = 0.5
_ROOM_INTERVAL_S = 2.0
_JOINED_S = 1.0
_SPARE_FILES = 4


class ScenarioContext:
    """Gives a script access to the fleet, its traffic, and an operator's queries and commands.

    Attributes:
        say: function that prints a line about an action of the script.
    """

    def __init__(self, traffic: Traffic, say: Callable[[str], None], taken: set[str]) -> None:
        """Creates the context of a script; `taken` has the ranks that the demo's scenarios act on."""
        self.traffic = traffic
        self.say = say
        self._taken = taken

    def take(self, role: str, place: int = -1) -> str:
        """Returns a rank that no other scenario of the demo acts on: of those that are left, the one at `place`.

        Raises:
            FleetError: none is left.
        """
        free = [name for name in self.traffic.fleet.of_role(role) if name not in self._taken]
        if not free:
            option = "--prefill-tp" if role == "prefill" else "--decode-dp"
            raise FleetError(f"the scenarios act on more {role} ranks than the fleet has: start more with {option}")
        self._taken.add(free[place])
        return free[place]

    def holds(self, rank: str, room: int) -> bool:
        """Whether a room has a granted region in a decode rank's staging ring in which nothing has landed yet."""
        wanted = str(room)
        return any(each["room"] == wanted and each["state"] in ("granted", "revoking") for each in self.regions(rank))

    def regions(self, rank: str) -> list[dict[str, Any]]:
        """Returns the allocations of a decode rank's staging ring, the oldest first, as the command `staging` does."""
        return [
            each for data in self._ask(rank, Call("staging")) if data["ring"] for each in data["ring"]["allocations"]
        ]

    def gated(self, rank: str) -> bool:
        """Whether a prefill rank has a part that is gated by the watermark of a staging ring."""
        parts = [part for data in self._ask(rank, Call("staging")) for part in data["gated"]]
        return any(part["waiting_for"].startswith("watermark") for part in parts)

    def misses(self, rank: str, peer: str) -> bool:
        """Whether a rank reports a peer as suspect or lost."""
        rows = [row for data in self._ask(rank, Call("peers")) for row in data]
        return any(row["peer"] == peer and row["state"] in ("suspect", "lost") for row in rows)

    def force_release(self, rank: str, serial: int) -> None:
        """Frees a region of a decode rank's staging ring, as `kvctl staging release --force` does."""
        self._ask(rank, Call("release", {"serial": serial, "force": True}))

    def drain(self, rank: str) -> bool:
        """Drains a rank, as `kvctl drain` does; returns False if the rank did not answer in time."""
        return bool(self._ask(rank, Call("drain")))

    @staticmethod
    def _ask(rank: str, call: Call) -> list[Any]:
        """Sends an admin command to a rank; returns its answers, an empty list if the rank did not answer in time."""
        try:
            with Fleet([rank], {}, _ANSWER_NS) as fleet:
                return [data for _, data in fleet.survey([call]).answers(call.command)]
        except CliError:
            return []


Script = Callable[[ScenarioContext], Iterator[float]]
"""A generator that performs the actions of a scenario and yields the seconds after which it continues."""


class ScriptRunner:
    """Runs the script of a scenario in the event loop of the traffic."""

    def __init__(self, traffic: Traffic, script: Script, say: Callable[[str], None], taken: set[str]) -> None:
        """Schedules the start of the script after `_BEGIN_S`, when rooms are being transferred."""
        self._steps = script(ScenarioContext(traffic, say, taken))
        self._traffic = traffic
        traffic.later(_BEGIN_S, self._step)
        # Every failure of a room from now on is expected.
        traffic.accounting.disturb(Disturbance("scenario", None, time.monotonic_ns()))

    def _step(self) -> None:
        if (wait_s := next(self._steps, None)) is not None:
            self._traffic.later(wait_s, self._step)


# ---- scripts --------------------------------------------------------------------------------------------------------


def stuck_room(context: ScenarioContext) -> Iterator[float]:
    """Opens rooms whose transfer never completes, so that at any time one is stuck; each room fails at its deadline."""
    writer, tokens = context.take("prefill"), context.traffic.fleet.plan.tokens[1]
    timeout_s = context.traffic.fleet.plan.timings["waiting_timeout_s"]
    while True:
        room = context.traffic.open(tokens, hangs_at=writer)
        waiting = " and ".join(room.decode)
        context.say(
            f"room {room.number}: {writer} never computes its second half; {waiting} waits {timeout_s:g} s for it"
        )
        yield timeout_s * 0.7


def pinned_ring(context: ScenarioContext) -> Iterator[float]:
    """Pauses a prefill rank that was granted a ring region for a room's second forward, before it writes the region."""
    fleet = context.traffic.fleet
    writer, reader = context.take("prefill"), context.take("decode", 0)
    instance = fleet.ranks[writer].planned["instance"]
    while True:
        room = context.traffic.open(fleet.plan.chunk_tokens * 2, instance=instance, gap_s=5.0)
        for _ in range(_TRIES):
            yield _POLL_S
            if context.holds(reader, room.number):
                context.traffic.pause(writer)
                break
        yield _POLL_S
        if context.holds(reader, room.number):
            break
        context.traffic.resume(writer)  # the writer was paused too late: it had written the region
    pid = fleet.ranks[writer].pid
    context.say(f"room {room.number}: {writer} (pid {pid}) is stopped and holds the oldest region of {reader}'s ring")
    behind: list[LiveRoom] = []
    while True:
        # Rooms of other writers, which use the rest of the ring and then wait.
        behind = [room for room in behind if not room.over]
        if len(behind) < _ROOMS_BEHIND:
            behind.append(context.traffic.open(fleet.plan.tokens[1]))
        yield _PAUSE_S


def dead_peer(context: ScenarioContext) -> Iterator[float]:
    """Kills a decode rank and does not restart it."""
    victim = context.take("decode")
    pid = context.traffic.fleet.ranks[victim].pid
    context.traffic.kill(victim)
    context.say(f"{victim} (pid {pid}) is killed and stays dead")
    yield _FOREVER_S


def faulty(role: str, spec: str, effect: str, place: int = -1) -> Script:
    """Returns a script that sets a fault of one rank's agent for good.

    Args:
        effect: line that the script prints; `{rank}` stands for the name of the rank.
        place: as in `ScenarioContext.take`.
    """

    def script(context: ScenarioContext) -> Iterator[float]:
        rank = context.take(role, place)
        context.traffic.fault(rank, spec, _FOREVER_S)
        context.say(effect.format(rank=rank))
        yield _FOREVER_S

    return script


def compat(context: ScenarioContext) -> Iterator[float]:
    """Does nothing but print which rank the fleet's plan has started with another page size."""
    plan = context.traffic.fleet.plan
    for name, page_size in plan.odd_pages.items():
        context.say(f"{name} has pages of {page_size} tokens, all others of {plan.page_size}")
    yield _FOREVER_S


def bootstrap(context: ScenarioContext) -> Iterator[float]:
    """Sends rooms to a prefill instance with a missing rank, as a router would that does not know of it."""
    fleet = context.traffic.fleet
    (absent,) = fleet.plan.absent
    context.say(f"{absent} is not started, but its instance still gets rooms")
    while True:
        context.traffic.open(fleet.plan.chunk_tokens, instance=fleet.ranks[absent].planned["instance"])
        yield fleet.plan.timings["bootstrap_timeout_s"] * 0.7


def fd_low(context: ScenarioContext) -> Iterator[float]:
    """Lowers the limit of open files of a decode rank's process to just above the current number, like `prlimit`."""
    victim = context.take("decode")
    pid = context.traffic.fleet.ranks[victim].pid
    count = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count + _SPARE_FILES, hard))
    context.say(f"{victim} (pid {pid}) has {count} files open and may have {count + _SPARE_FILES}")
    yield _FOREVER_S


def oversized_chunk(context: ScenarioContext) -> Iterator[float]:
    """Opens long prompts at intervals at the decode rank that the fleet's plan has started with a small ring."""
    fleet = context.traffic.fleet
    ((odd, mib),) = fleet.plan.odd_rings.items()
    dp = fleet.ranks[odd].planned["dp"]
    context.say(f"{odd} has a ring of {mib} MiB, all others of {fleet.plan.ring}")
    while True:
        context.traffic.open(fleet.plan.tokens[1], decode_dp=dp)
        yield _ROOM_INTERVAL_S


def plan_mismatch(context: ScenarioContext) -> Iterator[float]:
    """Makes prefill and decode disagree on a prompt's length, as engines with different tokenizers or templates do."""
    plan = context.traffic.fleet.plan
    tokens, more = plan.page_size * 8, plan.page_size
    context.say(f"for some prompts the decode side expects {tokens} tokens, and the prefill side makes {tokens + more}")
    while True:
        context.traffic.open(tokens, computes=tokens + more)
        yield _ROOM_INTERVAL_S


def stuck_waiting(context: ScenarioContext) -> Iterator[float]:
    """Drops a prefill rank's failure reports and aborts rooms there, so that one room waits at decode at any time."""
    fleet, writer = context.traffic.fleet, context.take("prefill")
    timeout_s = fleet.plan.timings["waiting_timeout_s"]
    context.traffic.fault(writer, _NO_FAILURES, _FOREVER_S)
    while True:
        room = context.traffic.open(fleet.plan.chunk_tokens, hangs_at=writer, chunks=1)
        yield _JOINED_S  # both sides have opened the room by then
        context.traffic.abort(room, writer, "the engine is out of memory")
        waiting = " and ".join(room.decode)
        context.say(
            f"room {room.number}: {writer} has failed it, but {waiting} does not hear of it and waits {timeout_s:g} s"
        )
        yield timeout_s * 0.7


def draining(context: ScenarioContext) -> Iterator[float]:
    """Drains a prefill rank without telling the router, which still sends rooms to it."""
    writer = context.take("prefill")
    while not context.drain(writer):
        yield _PAUSE_S
    context.say(f"{writer} was drained, but its instance still gets rooms")
    yield _FOREVER_S


def gated_empty(context: ScenarioContext) -> Iterator[float]:
    """Force-releases the ring regions of a paused prefill rank while watermarks and room aborts do not reach it.

    When the rank is resumed, its parts wait for a watermark although the ring is empty. Agents alone do not get into
    this state: a region is freed when its writer has written it, returned it or exited, and a force-release sends the
    writer a message that its room has failed.
    """
    traffic, writer, reader = context.traffic, context.take("prefill", 0), context.take("decode", 0)
    traffic.closed = True  # grants to other rooms would advance the ring
    while sum(traffic.accounting.in_flight.values()):
        yield _POLL_S
    traffic.fault(writer, _NO_WATERMARKS, _FOREVER_S)
    while not context.gated(writer):  # the known watermark still permits a room or two
        if not context.regions(reader):
            traffic.open(traffic.fleet.plan.chunk_tokens)
        yield _PAUSE_S
    traffic.pause(writer)
    while not context.misses(reader, writer):
        yield _PAUSE_S
    for region in context.regions(reader):
        context.force_release(reader, region["serial"])
    traffic.resume(writer)
    context.say(
        f"the regions of {reader}'s ring that {writer} waits for were force-released, but it does not hear of it"
    )
    yield _FOREVER_S


# ---- scenarios ------------------------------------------------------------------------------------------------------

_TWO_INSTANCES = (Sizes(), Sizes())


@dataclass(frozen=True)
class Scenario:
    """One fault scenario.

    Attributes:
        name: value of `kvctl demo --fault` that selects the scenario.
        code: health code that `kvctl doctor` should report first.
        look: commands that show the fault, the most useful one first.
        alone: why no other scenario can run at the same time; "" if others can.
        options: values for options of `kvctl demo` that the user did not give.
        plan: values for fields of `FleetPlan`.
    """

    name: str
    does: str
    code: str
    look: tuple[str, ...]
    script: Script
    alone: str = ""
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
        # An agent routes the others around a silent writer's region; here it notices late and fails no room before.
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
        faulty("prefill", "slow-lane=200ms", "every write of {rank} leaves 0.2 s late"),
    ),
    Scenario(
        "corrupt",
        "One write in twenty of a prefill rank has a wrong byte.",
        "KV_CHECKSUM_MISMATCH",
        ("kvctl doctor", "kvctl rooms history", "kvctl events"),
        faulty("prefill", "corrupt-write=5%", "one write in twenty of {rank} has a wrong byte"),
        config={"checksum": True},
    ),
    Scenario(
        "compat",
        "A decode rank is configured with another page size.",
        "KV_COMPAT_MISMATCH",
        ("kvctl doctor", "kvctl peers diff", "kvctl peers matrix"),
        compat,
        plan={"odd_pages": {"decode-1": 24}},
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
        faulty(
            "prefill",
            "message-loss=staging-grants",
            "{rank} gets no staging grants any more; all other messages arrive",
        ),
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
        "A prefill rank's reports of failed rooms are lost.",
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
        faulty("decode", "slow-scatter=10m", "{rank} copies nothing from its ring to its pages any more", place=0),
        config={"path": "staged", "waiting_timeout_s": 600.0},
    ),
    Scenario(
        "gated-empty",
        "A region that a writer waits for is force-released unnoticed.",
        "KV_RING_GATED_EMPTY",
        ("kvctl doctor", "kvctl staging", "kvctl rooms"),
        gated_empty,
        alone="it stops all other traffic",
        options={"prefill_tp": 1, "decode_dp": 1},
        config={"path": "staged", "waiting_timeout_s": 600.0},
    ),
    Scenario(
        "fd-low",
        "A decode rank has almost no file descriptors left.",
        "KV_FDS_LOW",
        ("kvctl doctor", "kvctl health"),
        fd_low,
    ),
    Scenario(
        "draining",
        "A prefill rank was drained; its router does not know.",
        "KV_DRAINING",
        ("kvctl status", "kvctl doctor", "kvctl agents"),
        draining,
    ),
)

SCENARIOS_BY_NAME: dict[str, Scenario] = {scenario.name: scenario for scenario in SCENARIOS}


def combined(scenarios: Sequence[Scenario]) -> Scenario:
    """Returns a scenario with the options, plan and configuration of all of these; its other attributes have no use.

    Raises:
        ValueError: two of them cannot run at the same time.
    """
    owners: dict[str, tuple[Scenario, Any]] = {}
    for each in scenarios:
        odd = {name: name for value in each.plan.values() if isinstance(value, Mapping | frozenset) for name in value}
        for name, value in {**each.options, **each.plan, **each.config, **odd}.items():
            other, before = owners.setdefault(name, (each, value))
            if other is not each and (name in odd or before != value):
                why = f"both change {name}" if name in odd else f"they need different values of {name}"
                raise ValueError(f"{other.name} and {each.name} cannot run at the same time: {why}")
        if each.alone and len(scenarios) > 1:
            raise ValueError(f"{each.name} can run alone only: {each.alone}")
    return replace(
        scenarios[0],
        options={name: value for each in scenarios for name, value in each.options.items()},
        plan={name: value for each in scenarios for name, value in each.plan.items()},
        config={name: value for each in scenarios for name, value in each.config.items()},
    )


def listed() -> list[dict[str, str | None]]:
    """Returns the rows of `kvctl demo --list-faults`: the scenarios, then the kinds of faults that take a value."""
    scenarios: list[dict[str, str | None]] = [
        {"fault": each.name, "kind": "scenario", "does": each.does, "code": each.code} for each in SCENARIOS
    ]
    return scenarios + [{"fault": each.example, "kind": each.level, "does": each.help, "code": None} for each in FAULTS]
