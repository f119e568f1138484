"""Initial worlds: some rooms, some writers, and a ring that is too small for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.shape import StateShape
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.peer import LocalInfo
from tests.explore.explorer.flow import Start
from tests.explore.explorer.frozen import SILENT, TIMING, Machine, machine_of
from tests.support.protocol.oracle import place_of
from tests.support.protocol.simulation import SHAPE, World, registry, staged

REVIVED = 99  # the room that is sent after a restart

Calls = tuple[str, tuple[ev.Event, ...]]  # agent, what its engine calls at once


class _World(World):  # type: ignore[misc]
    """The simulated world, restricted to the steps that lead to the first state."""

    def __init__(self, **options: Any) -> None:
        super().__init__(timing=TIMING, make_telemetry=lambda name, role: SILENT, **options)

    def _machine(self, local: LocalInfo) -> Machine:
        return machine_of(local, self.choose)

    def _act(self, name: str, action: ev.Action) -> None:
        if isinstance(action, ev.Send) and isinstance(action.message, msg.Heartbeat):
            return
        super()._act(name, action)


@dataclass(frozen=True)
class Scene:
    """Rooms 7, 8, … that are open at all writers and whose forwards have not run.

    Attributes:
        readers: decode ranks, between which the heads are divided as between the writers.
        ring: units; a part of one page is one unit with two writers or readers and two with one of each.
        asked: the engines have announced the rooms and requested staging; otherwise both are still to come.
        granted: the grants have arrived too.
        computed: (agent, room) whose forward is done, in this order: their parts are queued at the workers, or parked.
        groups: layers in a group; a part of one page and one layer is one unit with one writer.
        states: items of each state component.
        cp: context parallel ranks, which share each chunk.
        recalled: (agent, room) whose engine takes the pages of the room back, and has other pages for it each time.
        again: rooms whose number is opened again, under another nonce, after the first use is over.
        revived: agents after whose restart another room is sent.
        paths: the path of each part.
        finished: the prefill engines call finish() after the last pages.
        together: they pass the last pages in that call, so that an aux row goes in the tag of the last part.
    """

    rooms: int = 1
    writers: int = 1
    readers: int = 1
    ring: int = 2
    pages: int = 1
    aux: int = -1
    opened: bool = True
    asked: bool = True
    granted: bool = False
    computed: tuple[tuple[str, int], ...] = ()
    groups: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    cp: int = 1
    recalled: tuple[tuple[str, int], ...] = ()
    again: tuple[int, ...] = ()
    revived: tuple[str, ...] = ()
    paths: Callable[..., str] = staged
    finished: bool = True
    together: bool = False

    def start(self) -> Start:
        """Returns the world at rest with the remaining calls of its engines."""
        shape = replace(SHAPE, states=tuple(StateShape(f"s{n}", (0, 1), 1, 1, 64) for n in range(len(self.states))))
        world = _World(
            prefill=ParallelConfig(tp=self.writers, cp=self.cp),
            decode=ParallelConfig(tp=self.readers),
            shape=shape,
            cp_mode="all-chunk",
            ring=self.ring,
            chunk_pages=self.cp,
            choose=self.paths,
        )
        world.connect()
        numbers = range(7, 7 + self.rooms)
        calls: list[Calls] = []
        for room in numbers:
            first, nonce = 100 * room, 1000 + room
            if self.opened:
                for name, (opening,) in self._openings(room, nonce, first):
                    options = {"nonce": opening.nonce, "first_page": first, "aux": self.aux, "states": self.states}
                    world.receive(room, self.pages, reader=place_of(name).rank, **options)
            else:
                calls += self._openings(room, nonce, first)
        world.flush()
        forwards = [found for room in numbers for found in self._forwards(world, room)]
        if self.asked:
            for name, events in forwards:
                for event in events[:2]:
                    world.feed(name, event)
            forwards = [(name, events[2:]) for name, events in forwards]
        if self.granted:
            world.flush()
        for name, room in self.computed:
            found = next(entry for entry in forwards if entry[0] == name and _room(entry) == room)
            forwards.remove(found)
            for event in found[1]:
                world.feed(name, event)
        calls += forwards
        again = {
            room: (*self._openings(room, 2000 + room, 100 * room + 50), *self._forwards(world, room))
            for room in self.again
        }
        recalled: dict[tuple[str, int], tuple[tuple[ev.Event, ...], ...]] = {}
        for entry in self.recalled:
            recalled[entry] = (*recalled.get(entry, ()), self._after_recall(world, *entry))
        late = (*self._openings(REVIVED, 9000, 9000), *self._forwards(world, REVIVED))
        told = set(numbers) if self.asked else set()
        world.sent = {key: state for key, state in world.sent.items() if key[1] in told}
        rosters = (ev.RosterKnown(registry(0), world.prefill_names),)
        return Start(world, tuple(calls), dict.fromkeys(self.revived, late), again, self.paths, rosters, recalled)

    def _after_recall(self, world: _World, name: str, room: int) -> tuple[ev.Event, ...]:
        """Returns the calls by which an engine goes on with a room whose pages it has recalled."""
        if name.startswith("decode"):
            return self._openings(room, 3000 + room, 100 * room + 30)[place_of(name).rank][1]
        return next(calls[1:] for caller, calls in self._forwards(world, room) if caller == name)

    def _openings(self, room: int, nonce: int, first: int) -> list[Calls]:
        """Returns the calls by which the decode engines open a room, each under a nonce of its own."""
        pages = np.arange(first, first + self.pages, dtype=np.int32)
        items = tuple(np.arange(first + 7, first + 7 + count, dtype=np.int32) for count in self.states)
        rest = pages, 0, self.pages, self.aux, registry(0), items
        return [(f"decode-{rank}", (ev.OpenRoom(room, nonce + 500 * rank, *rest),)) for rank in range(self.readers)]

    def _forwards(self, world: _World, room: int) -> list[Calls]:
        """Returns the calls of each prefill engine for a room."""
        world.send(room, self.pages, groups=self.groups, states=self.states, together=self.together)
        found = [item for item in world.pool if item.kind == "engine"]
        world.pool = [item for item in world.pool if item.kind != "engine"]
        calls = slice(None) if self.finished else slice(-1)
        return [(item.to, tuple(item.what)[calls]) for item in found]


def _room(calls: Calls) -> int:
    first: Any = calls[1][0]
    return int(first.room)
