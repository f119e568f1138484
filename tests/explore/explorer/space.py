"""States of a small world and the steps between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvctl_agent.protocol import events as ev
from tests.explore.explorer.flow import QUEUES, Budget, Channel, Start, State, Step
from tests.explore.explorer.frozen import NOW_NS
from tests.explore.explorer.lives import Lives
from tests.explore.explorer.machines import arrived
from tests.explore.explorer.witness import Witness
from tests.support.protocol.invariants import Broken
from tests.support.protocol.oracle import tag_of


class Space(Lives):  # type: ignore[misc]
    """All histories from one start."""

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self.tried = Step("time")  # the last one that `after` has looked at

    # ---- the start ----------------------------------------------------------------------------------------------

    def first(self, budget: Budget) -> State:
        """The first state."""
        world = self.start.world
        state = [0] * (self.first_channel + len(self.channels))
        for place, name in enumerate(self.names):
            state[place] = self.machines.number(world.machines[name])
        state[self._oracle] = self.witnesses.number(Witness(world))
        state[self._budget] = self._budget_number(budget)
        for item in world.pool:
            to, by = self._at[item.to], self._at[item.by]
            if item.kind == "message":
                self._put(state, self._place("message", to, by), self._item(item.what))
            elif item.kind == "begin":
                write = item.what
                number = self.machines.order(write.writer, write.incarnation, write.order)
                self._put(state, self._place("begin", by, by), self._item((number, write.order.cancel.dropped)))
            else:
                raise AssertionError(f"a world that starts with a {item.kind} on its way")
        for name, calls in self.start.calls:
            self._will_call(state, name, calls)
        return tuple(state)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def is_over(self, state: State) -> bool:
        """Whether all rooms have ended on all agents and nothing is held for any."""
        knows = self.machines.knows
        agents = state[: len(self.names)]
        if any(state[self._place("engine", agent, agent)] for agent in range(len(agents))):
            return False  # some room is yet to come
        if self.budgets[state[self._budget]].again:
            return False
        return not self.witnesses.busy[state[self._oracle]] and all(
            knows[number].idle for number in agents if number >= 0
        )

    def after(self, state: State) -> Iterator[tuple[Step, bool, State]]:
        """Yields every possible step, whether it is a fault, and the state after it.

        Raises:
            Broken, or any exception of a machine: the last step of `steps` must not be possible.
        """
        for step, fault in self.steps(state):
            self.tried = step
            there = self.perform(state, step)
            if there is not None and there != state:
                yield step, fault, there

    def steps(self, state: State) -> Iterator[tuple[Step, bool]]:
        """Yields the steps that may be possible; an engine may find that its call is not possible yet."""
        names, paused = self.names, state[self._paused]
        budget = self.budgets[state[self._budget]]
        quiet = True
        for number, channel in enumerate(self.channels):
            content = self.contents[state[self.first_channel + number]]
            if not content:
                continue
            kind, to = channel.kind, channel.to
            alive = state[to] >= 0
            if kind == "flight":
                quiet &= bool(paused >> to & 1) or not self._own(state[to], content)
                for place in range(len(content)):
                    yield Step("do", number, place), False
                continue
            if paused >> to & 1:
                continue
            if kind == "engine":
                for place in self._callable(state, to, content):
                    quiet = False
                    yield Step("do", number, place), False
                continue
            if kind == "begin":
                places = [place for place, item in enumerate(content) if self._may_begin(state[to], item)]
                quiet &= not places
                for place in places[: None if budget.overtakings else 1]:
                    yield Step("do" if place == places[0] else "overtake", number, place), place != places[0]
                continue
            if kind != "proof":  # which may be long in coming
                quiet &= not alive and kind in ("message", "tag")
            if kind in QUEUES:
                yield Step("do", number, 0), False
                if kind != "event":
                    for place in range(1, len(content) if budget.overtakings else 0):
                        yield Step("overtake", number, place), True
                if kind in ("message", "tag") and alive:
                    if budget.losses:
                        yield Step("lose", number, 0), True
                    if budget.copies:
                        yield Step("copy", number, 0), True
            else:
                for place in range(len(content)):
                    yield Step("do", number, place), False
                    if kind == "scatter" and budget.failures:
                        yield Step("fail", number, place), True
        for room in budget.again:
            if self._ended(state, room):
                yield Step("again", other=room), False
        for agent in range(len(names)):
            if paused >> agent & 1:
                yield Step("resume", agent=agent), False
                yield Step("resume late", agent=agent), False
        if quiet:
            yield Step("time"), False
            first = self.budgets[0]
            gone = budget.kills, budget.freezes, budget.leaves, budget.recalls, budget.lapses
            before = first.kills, first.freezes, first.leaves, first.recalls, first.lapses
            if (*gone, budget.again) != (*before, first.again):
                for agent, there in enumerate(state[: len(names)]):
                    for room in self.machines.knows[there].held if there >= 0 and not paused >> agent & 1 else ():
                        yield Step("lapse", agent=agent, other=room), False
                # Somebody may never come: gone, or refused for the sake of an earlier life of the number.
                for name, room in self.witnesses.waiting[state[self._oracle]]:
                    yield Step("deadline", agent=self._at[name], other=room), False
        yield from self._faults(state, budget, quiet)

    def _may_begin(self, agent: int, item: int) -> bool:
        """Whether a worker may take a queued part: it is to be dropped, or the lease of its reader is valid.

        The lease of a former incarnation of the reader, which the machine does not renew, may be either.
        """
        number, raised = self.items[item]
        return raised or self.machines.readers[number] not in self.machines.knows[agent].unleased

    def _own(self, agent: int, flights: tuple[int, ...]) -> bool:
        """Whether an agent's current incarnation waits for one of these writes; writes of earlier ones are ignored."""
        writes = self.machines.writes
        return agent >= 0 and any(
            writes[self.items[item]].incarnation == self.machines.knows[agent].life for item in flights
        )

    def _ended(self, state: State, room: int) -> bool:
        """Whether every engine has made its calls for a room and knows its final state."""
        if room in self.witnesses.busy[state[self._oracle]]:
            return False
        engines = [self._place("engine", agent, agent) for agent in range(len(self.names))]
        waiting: list[Any] = [self._events[item][0] for place in engines for item in self.contents[state[place]]]
        return all(call.room != room for call in waiting)

    def _again(self, state: list[int], step: Step) -> None:
        state[self._budget] = self._spend(state[self._budget], "again", step.other)
        for caller, calls in self.start.again[step.other]:
            if state[self._at[caller]] >= 0:
                self._will_call(state, caller, calls)

    def _callable(self, state: State, agent: int, content: tuple[int, ...]) -> Iterator[int]:
        """The calls that an engine may make now; calls for one room are made in order."""
        met: set[int] = set()
        for place, item in enumerate(content):
            call: Any = self._events[item][0]
            if call.room not in met:
                met.add(call.room)
                if self.machines.step(state[agent], ("engine", item), self._events[item]) is not None:
                    yield place

    def _faults(self, state: State, budget: Budget, quiet: bool) -> Iterator[tuple[Step, bool]]:
        paused = state[self._paused]
        awake = [state[agent] >= 0 and not paused >> agent & 1 for agent in range(len(self.names))]
        if budget.early and not quiet:
            for agent, there in enumerate(awake):
                if there:
                    yield Step("early", agent=agent), True
        for name, room in budget.aborts:
            if awake[self._at[name]]:
                yield Step("abort", agent=self._at[name], other=room), True
        for name, room in dict.fromkeys(budget.recalls):
            if awake[self._at[name]] and self.witnesses.open(state[self._oracle], name, room):
                yield Step("recall", agent=self._at[name], other=room), True
        for agent, there in enumerate(awake if budget.lapses else ()):
            for room in self.machines.knows[state[agent]].held if there else ():
                yield Step("lapse early", agent=agent, other=room), True
        for agent, there in enumerate(awake if budget.releases else ()):
            for serial in self.machines.knows[state[agent]].serials if there else ():
                yield Step("release", agent=agent, other=serial), True
        for name, peer in budget.deaf:
            if awake[self._at[name]] and self.machines.knows[state[self._at[name]]].peers.get(peer, (0, False, 0))[1]:
                yield Step("deaf", agent=self._at[name], other=peer), True
        for name, peer in budget.forgets:
            if awake[self._at[name]]:
                yield Step("forget", agent=self._at[name], other=peer), True
        for name in budget.pauses:
            if awake[self._at[name]]:
                yield Step("pause", agent=self._at[name]), True
        for name in budget.leaves:
            if awake[self._at[name]]:
                yield Step("leave", agent=self._at[name]), True
        for name in budget.kills:
            if state[self._at[name]] >= 0:
                yield Step("kill", agent=self._at[name]), True
        for name in budget.freezes:
            if awake[self._at[name]]:
                yield Step("freeze", agent=self._at[name]), True
        for name in budget.restarts:
            if state[self._at[name]] < 0:
                yield Step("restart", agent=self._at[name]), True

    def perform(self, before: State, step: Step) -> State | None:
        """Returns the state after a step; None if an engine may not make its call."""
        state = list(before)
        what = step.what
        if what in ("do", "overtake", "lose", "copy", "fail"):
            if what != "do":
                spent = {"overtake": "overtakings", "lose": "losses", "copy": "copies", "fail": "failures"}[what]
                state[self._budget] = self._spend(state[self._budget], spent)
            place = self.first_channel + step.channel
            # Whoever looks whether a process is there sees each time that it is not.
            stays = what == "copy" or self.channels[step.channel].kind == "proof"
            item = self.contents[state[place]][step.place] if stays else self._take(state, place, step.place)
            if what == "fail":
                self._fail_scatter(state, self.channels[step.channel].to, self.items[item])
            elif what != "lose" and not self._happen(state, self.channels[step.channel], item):
                return None
        elif what == "time":
            self._pass_time(state)
        else:
            getattr(self, "_" + what.replace(" ", "_"))(state, step)
        return tuple(state)

    def _fail_scatter(self, state: list[int], agent: int, number: int) -> None:
        self._see(state, self.machines.see((("dropped", self.names[agent], number),)))
        serial = self.machines.scatters[number].serial
        self._feed(state, agent, ("scatter failed", serial), (ev.ScatterFailed(serial, "the device failed"),))

    def _happen(self, state: list[int], channel: Channel, item: int) -> bool:
        kind, to, by = channel
        if kind == "message":
            return state[to] < 0 or self._feed(state, to, ("message", by, item), self._received(by, item))
        if kind == "tag":
            return state[to] < 0 or self._feed(state, to, ("tag", item), (arrived(self.items[item]),))
        if kind in ("event", "engine"):
            return self._feed(state, to, (kind, item), self._events[item])
        if kind == "begin":
            number, raised = self.items[item]
            if raised:
                self._see(state, self.machines.see((("undone", number),)))
                self._over(state, number, dropped=True)
            else:
                if self.machines.readers[number] in self.machines.knows[state[to]].unheard:
                    write = self.machines.writes[number]
                    raise Broken(f"{write.writer} posts to {write.order.peer}, which it has not heard of lately")
                self._see(state, self.machines.see((("begun", number),)))
                self._put(state, self._place("flight", to, to), self._item(number))
        elif kind == "flight":
            number = self.items[item]
            seen = self._see(state, self.machines.see((("landed", number),)))
            self._over(state, number, dropped=False)
            if seen:
                order = self.machines.writes[number].order
                self._put(state, self._place("tag", self._at[order.peer], to), self._item(tag_of(order)))
        elif kind == "scatter":
            number = self.items[item]
            self._see(state, self.machines.see((("scattered", self.names[to], number),)))
            serial = self.machines.scatters[number].serial
            return self._feed(state, to, ("scattered", serial), (ev.Scattered(serial, NOW_NS),))
        else:
            peer, life = self.items[item]
            self._prove(state, peer, life)
            dead = ev.PeerDead(self.names[peer], life, "process has ended")
            return self._feed(state, to, ("proof", peer, life), (dead,))
        return True
