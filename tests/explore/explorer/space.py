"""The states of a small world and the steps between them.

A state is a tuple of numbers: each machine's state, what the oracle has seen, who is paused, what may still go wrong,
and what is in each channel. A channel is a queue (messages and tags between two agents, an agent's own events, the
parts with its worker) or a heap (writes in flight, scatters, calls of an engine, proofs of death).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from explorer.machines import AGES, NOW_NS, Age, Done, Machines, arrived, machine_of, role_of
from explorer.witness import Witness, Witnesses
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev

State = tuple[int, ...]
Kind = Literal["message", "tag", "event", "begin", "flight", "scatter", "engine", "proof"]
QUEUES = ("message", "tag", "event", "begin")


class Budget(NamedTuple):
    """How much may still go wrong in one history, beyond the order of things, which is free.

    Attributes:
        early: Ticks that come to one agent before all else is done.
        overtakings: of messages, tags or parts by a later one of the same queue.
        aborts: (agent, room).
        pauses: agents that stop taking events for any time; their writes in flight may land meanwhile.
        deaf: (agent, peer): so many heartbeats are lost that this agent gives that peer up, which is well.
        kills: agents whose process ends at any moment; the proof comes, sooner or later.
        leaves: agents that close, and say so.
        restarts: agents that start anew once their process has ended.
        again: rooms whose number is used once more, when no engine has anything of its first life left; no fault.
    """

    losses: int = 0
    copies: int = 0
    overtakings: int = 0
    early: int = 0
    aborts: tuple[tuple[str, int], ...] = ()
    pauses: tuple[str, ...] = ()
    deaf: tuple[tuple[str, str], ...] = ()
    kills: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()
    again: tuple[int, ...] = ()


class Channel(NamedTuple):
    kind: Kind
    to: int
    by: int


class Step(NamedTuple):
    """What happens: to an entry of a channel, or to an agent."""

    what: str
    channel: int = -1
    place: int = 0
    agent: int = -1
    other: Any = None


class Start(NamedTuple):
    """Where the histories begin.

    Attributes:
        world: a simulated world at rest, but for what is in its pool.
        calls: (agent, its calls), each of which an engine makes at once, some time.
        revival: (agent, calls) that engines will make after a restart of that agent.
        again: likewise for a room whose number is used once more.
    """

    world: Any
    calls: tuple[tuple[str, tuple[ev.Event, ...]], ...]
    revival: dict[str, tuple[tuple[str, tuple[ev.Event, ...]], ...]]
    again: dict[int, tuple[tuple[str, tuple[ev.Event, ...]], ...]]
    paths: Callable[..., str]
    rosters: tuple[ev.RosterKnown, ...]  # what a decode rank knows from its start


class Space:
    """All that can happen from one start."""

    def __init__(self, start: Start) -> None:
        world = start.world
        self.names = tuple(world.machines)
        self.start = start
        self.machines = Machines()
        self.witnesses = Witnesses(self.machines)
        self.budgets: list[Budget] = []
        self._budget_numbers: dict[Budget, int] = {}
        self.tried = Step("time")  # the last one that `after` has looked at
        self._budget_after: dict[tuple[int, str, Any], int] = {}
        self._at = {name: place for place, name in enumerate(self.names)}
        self._locals = [world.machines[name].local for name in self.names]
        count = len(self.names)
        self._oracle, self._paused, self._budget, self.first_channel = count, count + 1, count + 2, count + 3
        self.channels = self._make_channels()
        self._channel_at = {channel: place for place, channel in enumerate(self.channels)}
        self.items: list[Any] = []  # entries of channels, by number
        self._item_numbers: dict[Any, int] = {}
        self.contents: list[tuple[int, ...]] = [()]  # of channels, by number
        self._content_numbers: dict[tuple[int, ...], int] = {(): 0}
        self._events: dict[int, tuple[ev.Event, ...]] = {}  # by item
        self._born: dict[tuple[int, int], int] = {}  # (agent, life) → the state that it begins in
        self._calls: list[tuple[ev.Event, ...]] = []  # kept, so that an id stands for them

    def _make_channels(self) -> list[Channel]:
        readers = [place for place, name in enumerate(self.names) if role_of(name) == "decode"]
        writers = [place for place, name in enumerate(self.names) if role_of(name) == "prefill"]
        found: list[Channel] = []
        for one in writers:
            for other in readers:
                found += [Channel("message", one, other), Channel("message", other, one), Channel("tag", other, one)]
            found += [Channel("begin", one, one), Channel("flight", one, one)]
        found += [Channel("scatter", place, place) for place in readers]
        for place in range(len(self.names)):
            found += [Channel("event", place, place), Channel("engine", place, place), Channel("proof", place, place)]
        return found

    # ---- numbers ------------------------------------------------------------------------------------------------

    def _item(self, value: Any) -> int:
        number = self._item_numbers.get(value)
        if number is None:
            number = self._item_numbers[value] = len(self.items)
            self.items.append(value)
        return number

    def _content(self, items: tuple[int, ...]) -> int:
        number = self._content_numbers.get(items)
        if number is None:
            number = self._content_numbers[items] = len(self.contents)
            self.contents.append(items)
        return number

    def _budget_number(self, budget: Budget) -> int:
        number = self._budget_numbers.get(budget)
        if number is None:
            number = self._budget_numbers[budget] = len(self.budgets)
            self.budgets.append(budget)
        return number

    def _spend(self, number: int, what: str, entry: Any = None) -> int:
        """The budget after one fault."""
        place = number, what, entry
        after = self._budget_after.get(place)
        if after is None:
            budget = self.budgets[number]
            left = getattr(budget, what)
            if isinstance(left, tuple):
                at = left.index(entry)
                left = left[:at] + left[at + 1 :]
            else:
                left -= 1
            after = self._budget_after[place] = self._budget_number(budget._replace(**{what: left}))
        return after

    def _place(self, kind: Kind, to: int, by: int) -> int:
        return self.first_channel + self._channel_at[Channel(kind, to, by)]

    # ---- the start ----------------------------------------------------------------------------------------------

    def first(self, budget: Budget) -> State:
        """The state in which all begins."""
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
                self._put(state, self._place("begin", by, by), self._item((number, write.order.fence.raised)))
            else:
                raise AssertionError(f"a world that starts with a {item.kind} on its way")
        for name, calls in self.start.calls:
            self._will_call(state, name, calls)
        return tuple(state)

    def _will_call(self, state: list[int], name: str, calls: tuple[ev.Event, ...]) -> None:
        if calls not in [known for known in self._calls if known is calls]:
            self._calls.append(calls)
        place, at = self._place("engine", self._at[name], self._at[name]), self._at[name]
        number = self._item(("calls", at, id(calls)))
        self._events[number] = calls
        self._put(state, place, number)

    # ---- channels -----------------------------------------------------------------------------------------------

    def _put(self, state: list[int], place: int, item: int) -> None:
        content = self.contents[state[place]]
        kind = self.channels[place - self.first_channel].kind
        if kind == "message" and item in content:
            return
        after = (*content, item)
        state[place] = self._content(after if kind in QUEUES else tuple(sorted(after)))

    def _take(self, state: list[int], place: int, entry: int) -> int:
        content = self.contents[state[place]]
        state[place] = self._content(content[:entry] + content[entry + 1 :])
        return content[entry]

    # ---- what machines do -----------------------------------------------------------------------------------------

    def _feed(self, state: list[int], agent: int, key: Any, events: tuple[ev.Event | Age, ...]) -> bool:
        done = self.machines.step(state[agent], key, events)
        if done is None:
            return False
        state[agent] = done.state
        if done.seen:
            self._see(state, done.seen)
        if done.raised:
            self._raise_fences(state, agent, done)
        for number, raised in done.writes:
            self._put(state, self._place("begin", agent, agent), self._item((number, raised)))
        for event in done.events:
            self._put_event(state, agent, event)
        for number in done.scatters:
            self._put(state, self._place("scatter", agent, agent), self._item(number))
        for peer, frame, beats in done.sends:
            to = self._at[peer]
            item = self._item(frame)
            if beats and (state[to] < 0 or self._tells_nothing(state[to], agent, item)):
                continue
            self._put(state, self._place("message", to, agent), item)
        return True

    def _tells_nothing(self, receiver: int, by: int, item: int) -> bool:
        done = self.machines.step(receiver, ("message", by, item), self._received(by, item))
        return done is not None and done == Done(receiver)

    def _received(self, by: int, item: int) -> tuple[ev.Event, ...]:
        events = self._events.get(item)
        if events is None:
            incarnation, messages, _ = codec.decode(self.items[item])
            events = tuple(ev.Received(self.names[by], incarnation, message) for message in messages)
            self._events[item] = events
        return events

    def _put_event(self, state: list[int], agent: int, event: ev.Event) -> None:
        key: Any = type(event).__name__, agent
        if isinstance(event, ev.PeerConnected):
            key = (*key, event.peer)
        elif isinstance(event, ev.PartSent):
            key = (*key, event.peer, event.room, event.nonce, event.kind, event.key, event.dropped)
        elif isinstance(event, ev.Scattered):
            key = (*key, event.serial)
        number = self._item(key)
        self._events.setdefault(number, (event,))
        self._put(state, self._place("event", agent, agent), number)

    def _see(self, state: list[int], seen: int) -> bool:
        state[self._oracle], answer = self.witnesses.step(state[self._oracle], seen)
        return answer

    def _raise_fences(self, state: list[int], agent: int, done: Done) -> None:
        place = self._place("begin", agent, agent)
        content: list[int] = []
        for item in self.contents[state[place]]:
            number, raised = self.items[item]
            order = self.machines.writes[number].order
            raised = raised or (order.peer, order.room, order.nonce) in done.raised
            content.append(self._item((number, raised)))
        state[place] = self._content(tuple(content))

    def _over(self, state: list[int], number: int, *, dropped: bool) -> None:
        """A worker is done with a part."""
        write = self.machines.writes[number]
        agent = self._at[write.writer]
        if state[agent] >= 0 and self.machines.knows[state[agent]].life == write.incarnation:
            order = write.order
            done = ev.PartSent(order.peer, order.room, order.nonce, order.kind, order.key, {}, dropped)
            self._put_event(state, agent, done)

    def calls_of(self, item: int) -> tuple[ev.Event, ...]:
        """What an entry of an engine's channel stands for."""
        return self._events[item]  # type: ignore[return-value]

    # ---- steps ----------------------------------------------------------------------------------------------------

    def is_over(self, state: State) -> bool:
        """All rooms have ended everywhere, and nothing is held for any."""
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
        """Everything that can happen next: the step, whether it is a fault, and where it leads.

        Raises:
            Broken, or whatever a machine raises: the step, the last one of `steps`, must not be possible.
        """
        for step, fault in self.steps(state):
            self.tried = step
            there = self.perform(state, step)
            if there is not None and there != state:
                yield step, fault, there

    def steps(self, state: State) -> Iterator[tuple[Step, bool]]:
        """What may happen next; an engine may find that its call is not possible yet."""
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
                quiet &= not alive or bool(paused >> to & 1)
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
        for room in budget.again:
            if self._ended(state, room):
                yield Step("again", other=room), False
        for agent in range(len(names)):
            if paused >> agent & 1:
                yield Step("resume", agent=agent), False
                yield Step("resume late", agent=agent), False
        if quiet:
            yield Step("time"), False
            if budget[-5:] != self.budgets[0][-5:]:  # somebody may never come: gone, or refused for an earlier life
                for name, room in self.witnesses.waiting[state[self._oracle]]:
                    yield Step("deadline", agent=self._at[name], other=room), False
        yield from self._faults(state, budget, quiet)

    def _ended(self, state: State, room: int) -> bool:
        """Whether every engine has made its calls for a room, and knows how it has ended."""
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
        """The calls that an engine may make now: those for the same room in their order."""
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
        for name, peer in budget.deaf:
            if awake[self._at[name]] and self.machines.knows[state[self._at[name]]].peers[peer][1]:
                yield Step("deaf", agent=self._at[name], other=peer), True
        for name in budget.pauses:
            if awake[self._at[name]]:
                yield Step("pause", agent=self._at[name]), True
        for name in budget.leaves:
            if awake[self._at[name]]:
                yield Step("leave", agent=self._at[name]), True
        for name in budget.kills:
            if state[self._at[name]] >= 0:
                yield Step("kill", agent=self._at[name]), True
        for name in budget.restarts:
            if state[self._at[name]] < 0:
                yield Step("restart", agent=self._at[name]), True

    def perform(self, before: State, step: Step) -> State | None:
        """Where a step leads; None where an engine may not make its call."""
        state = list(before)
        what = step.what
        if what in ("do", "overtake", "lose", "copy"):
            if what != "do":
                spent = {"overtake": "overtakings", "lose": "losses", "copy": "copies"}[what]
                state[self._budget] = self._spend(state[self._budget], spent)
            place = self.first_channel + step.channel
            stays = what == "copy"
            item = self.contents[state[place]][step.place] if stays else self._take(state, place, step.place)
            if what != "lose" and not self._happen(state, self.channels[step.channel], item):
                return None
        elif what == "time":
            self._pass_time(state)
        else:
            getattr(self, "_" + what.replace(" ", "_"))(state, step)
        return tuple(state)

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
                self._over(state, number, dropped=True)
            else:
                self._see(state, self.machines.see((("begun", number),)))
                self._put(state, self._place("flight", to, to), self._item(number))
        elif kind == "flight":
            number = self.items[item]
            seen = self._see(state, self.machines.see((("landed", number),)))
            self._over(state, number, dropped=False)
            if seen:
                order = self.machines.writes[number].order
                self._put(state, self._place("tag", self._at[order.peer], to), self._item(order.tag))
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

    # ---- time -----------------------------------------------------------------------------------------------------

    def _pass_time(self, state: list[int]) -> None:
        paused = state[self._paused]
        aged = [self._aged(state, agent) for agent in range(len(self.names))]
        for agent, ages in enumerate(aged):
            if state[agent] < 0:
                continue
            tick = not paused >> agent & 1
            if tick or ages:
                self._feed(state, agent, ("age", ages, tick), (Age(ages, tick),))

    def _aged(self, state: list[int], agent: int) -> tuple[tuple[str, int], ...]:
        """Which peers of an agent are silent for longer than before: those that do not speak to it."""
        if state[agent] < 0:
            return ()
        me = self.machines.knows[state[agent]]
        ages: list[tuple[str, int]] = []
        for peer, (incarnation, usable, age) in me.peers.items():
            other = self._at[peer]
            if not usable or age == len(AGES) - 1:
                continue
            if state[other] >= 0 and not state[self._paused] >> other & 1:
                theirs = self.machines.knows[state[other]]
                life, speaks, _ = theirs.peers.get(self.names[agent], (0, False, 0))
                if speaks and life == me.life and theirs.life == incarnation:
                    continue
            ages.append((peer, age + 1))
        return tuple(ages)

    def _early(self, state: list[int], step: Step) -> None:
        state[self._budget] = self._spend(state[self._budget], "early")
        self._feed(state, step.agent, ("age", (), True), (Age((), True),))

    def _deaf(self, state: list[int], step: Step) -> None:
        name, peer = self.names[step.agent], step.other
        state[self._budget] = self._spend(state[self._budget], "deaf", (name, peer))
        ages = ((peer, len(AGES) - 1),)
        self._feed(state, step.agent, ("age", ages, True), (Age(ages, True),))

    def _deadline(self, state: list[int], step: Step) -> None:
        self._feed(state, step.agent, ("abort", step.other), (ev.AbortRoom(step.other, "its deadline"),))

    # ---- lives ----------------------------------------------------------------------------------------------------

    def _abort(self, state: list[int], step: Step) -> None:
        state[self._budget] = self._spend(state[self._budget], "aborts", (self.names[step.agent], step.other))
        self._feed(state, step.agent, ("abort", step.other), (ev.AbortRoom(step.other, "enough"),))

    def _pause(self, state: list[int], step: Step) -> None:
        state[self._budget] = self._spend(state[self._budget], "pauses", self.names[step.agent])
        state[self._paused] |= 1 << step.agent

    def _resume(self, state: list[int], step: Step) -> None:
        state[self._paused] &= ~(1 << step.agent)

    def _resume_late(self, state: list[int], step: Step) -> None:
        """It goes on, and sees how late it is before it reads what has come meanwhile."""
        self._resume(state, step)
        self._feed(state, step.agent, ("age", (), True), (Age((), True),))

    def _kill(self, state: list[int], step: Step) -> None:
        state[self._budget] = self._spend(state[self._budget], "kills", self.names[step.agent])
        self._end(state, step.agent)

    def _leave(self, state: list[int], step: Step) -> None:
        agent = step.agent
        state[self._budget] = self._spend(state[self._budget], "leaves", self.names[agent])
        busy = [self._place(kind, agent, agent) for kind in ("begin", "flight") if self._has(kind, agent)]
        drained = not any(state[place] for place in busy)
        self._feed(state, agent, ("leave", drained), (ev.Leave(drained),))
        self._end(state, agent)

    def _has(self, kind: Any, agent: int) -> bool:
        return Channel(kind, agent, agent) in self._channel_at

    def _end(self, state: list[int], agent: int) -> None:
        """A process ends. Its writes in flight may yet land; the others will get proof of its death."""
        life = self.machines.knows[state[agent]].life
        state[agent] = -life
        state[self._paused] &= ~(1 << agent)
        self._see(state, self.machines.see((("killed", self.names[agent]),)))
        for kind in ("begin", "scatter", "event", "engine", "proof"):
            if self._has(kind, agent):
                state[self._place(kind, agent, agent)] = 0
        for other in range(len(self.names)):
            if other != agent and state[other] >= 0 and role_of(self.names[other]) != role_of(self.names[agent]):
                self._put(state, self._place("proof", other, other), self._item((agent, life)))

    def _prove(self, state: list[int], agent: int, life: int) -> None:
        """Nothing of that life is in flight, nor will be."""
        if not self._has("flight", agent):
            return
        place = self._place("flight", agent, agent)
        writes = self.machines.writes
        left = [item for item in self.contents[state[place]] if writes[self.items[item]].incarnation != life]
        state[place] = self._content(tuple(left))
        self._see(state, self.machines.see((("proven", self.names[agent], life),)))

    def _restart(self, state: list[int], step: Step) -> None:
        agent, name = step.agent, self.names[step.agent]
        state[self._budget] = self._spend(state[self._budget], "restarts", name)
        last = -state[agent]
        self._prove(state, agent, last)
        life = last + len(self.names)
        born = self._born.get((agent, life))
        if born is None:
            local = msgspec.structs.replace(self._locals[agent], incarnation=life)
            born = self._born[agent, life] = self.machines.number(machine_of(local, self.start.paths))
        state[agent] = born
        self._see(state, self.machines.see((("born", name, life),)))
        for roster in self.start.rosters if role_of(name) == "decode" else ():
            self._feed(state, agent, ("roster", roster.instance), (roster,))
        for caller, calls in self.start.revival.get(name, ()):
            if state[self._at[caller]] >= 0:
                self._will_call(state, caller, calls)
