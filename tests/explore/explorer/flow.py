"""States of a small world, and the effect of a machine's output on them.

A state is a tuple of numbers: the state of each machine and of the oracle, the paused agents, the remaining faults, and
the contents of each channel. A channel is a queue (messages and tags between two agents, an agent's own events, the
parts of its worker) or a heap (writes in flight, scatters, calls of an engine, proofs of death).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from tests.explore.explorer.machines import Age, Done, Lapse, Machines, role_of
from tests.explore.explorer.witness import Witnesses
from tests.support.protocol.oracle import row_of

State = tuple[int, ...]
Kind = Literal["message", "tag", "event", "begin", "flight", "scatter", "engine", "proof"]
QUEUES = ("message", "tag", "event", "begin")


class Budget(NamedTuple):
    """Faults that one history may still contain; the order of the other steps is not limited.

    Attributes:
        early: Ticks of one agent while other steps are possible.
        overtakings: of messages, tags or parts by a later one of the same queue.
        aborts: (agent, room).
        recalls: (agent, room): an engine takes the pages of a room back, and goes on with other pages; more than once
            if it is listed more than once.
        lapses: rooms that wait to be opened or claimed for longer than they may.
        releases: releases of a decode rank's allocation by an operator, without force.
        failures: scatters that fail, as on a device error.
        pauses: agents that stop processing events for any time; their writes in flight may land meanwhile.
        deaf: (agent, peer): the agent loses so many heartbeats of the peer, which is alive, that it gives the peer up.
        forgets: (agent, peer): a prefill rank is told to forget a peer that it has lost; a decode rank forgets the
            instance of the peer, and finds it again.
        kills: agents whose process ends at any moment; the proof of death arrives later.
        freezes: agents whose process freezes; posts of its workers happen when it resumes, at any later moment, before
        or after
            it is replaced. Eventually its end is observed, which is the proof.
        leaves: agents that close and announce it.
        restarts: agents that start anew once their process has ended or is frozen.
        again: rooms whose number is reused once no engine holds anything of the first use; not a fault.
    """

    losses: int = 0
    copies: int = 0
    overtakings: int = 0
    early: int = 0
    aborts: tuple[tuple[str, int], ...] = ()
    recalls: tuple[tuple[str, int], ...] = ()
    lapses: int = 0
    releases: int = 0
    failures: int = 0
    pauses: tuple[str, ...] = ()
    deaf: tuple[tuple[str, str], ...] = ()
    forgets: tuple[tuple[str, str], ...] = ()
    kills: tuple[str, ...] = ()
    freezes: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()
    again: tuple[int, ...] = ()


class Channel(NamedTuple):
    kind: Kind
    to: int
    by: int


class Step(NamedTuple):
    """One step: an entry of a channel is processed, or something happens to an agent."""

    what: str
    channel: int = -1
    place: int = 0
    agent: int = -1
    other: Any = None


class Start(NamedTuple):
    """The first state of all histories.

    Attributes:
        world: a simulated world at rest, except for the contents of its pool.
        calls: (agent, its calls), each made at once by an engine, at some time.
        revival: (agent, calls) made by engines after a restart of that agent.
        again: calls for a room whose number is used a second time.
        recalled: calls by which an engine goes on after each recall, by (agent, room).
    """

    world: Any
    calls: tuple[tuple[str, tuple[ev.Event, ...]], ...]
    revival: dict[str, tuple[tuple[str, tuple[ev.Event, ...]], ...]]
    again: dict[int, tuple[tuple[str, tuple[ev.Event, ...]], ...]]
    paths: Callable[..., str]
    rosters: tuple[ev.RosterKnown, ...]  # what a decode rank knows from its start
    recalled: dict[tuple[str, int], tuple[tuple[ev.Event, ...], ...]]


class Flow:
    """Numbers for all components of a state, and the channels that each machine's output goes to."""

    def __init__(self, start: Start) -> None:
        world = start.world
        self.names = tuple(world.machines)
        self.start = start
        self.machines = Machines()
        self.witnesses = Witnesses(self.machines)
        self.budgets: list[Budget] = []
        self._budget_numbers: dict[Budget, int] = {}
        self._budget_after: dict[tuple[int, str, Any], int] = {}
        self._at = {name: place for place, name in enumerate(self.names)}
        count = len(self.names)
        self._oracle, self._paused, self._budget, self.first_channel = count, count + 1, count + 2, count + 3
        self.channels = self._make_channels()
        self._channel_at = {channel: place for place, channel in enumerate(self.channels)}
        self.items: list[Any] = []  # entries of channels, by number
        self._item_numbers: dict[Any, int] = {}
        self.contents: list[tuple[int, ...]] = [()]  # of channels, by number
        self._content_numbers: dict[tuple[int, ...], int] = {(): 0}
        self._events: dict[int, tuple[ev.Event, ...]] = {}  # by item
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
        """Returns the budget after one fault."""
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

    def _will_call(self, state: list[int], name: str, calls: tuple[ev.Event, ...]) -> None:
        if calls not in [known for known in self._calls if known is calls]:
            self._calls.append(calls)
        place, at = self._place("engine", self._at[name], self._at[name]), self._at[name]
        number = self._item(("calls", at, id(calls)))
        self._events[number] = calls
        self._put(state, place, number)

    # ---- what machines do -----------------------------------------------------------------------------------------

    def _feed(self, state: list[int], agent: int, key: Any, events: tuple[ev.Event | Age | Lapse, ...]) -> bool:
        done = self.machines.step(state[agent], key, events)
        if done is None:
            return False
        state[agent] = done.state
        if done.seen:
            self._see(state, done.seen)
        if done.cancelled:
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
            key = (*key, event.peer, event.room, event.nonce, event.kind, event.key, event.dropped, event.row)
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
            raised = raised or (order.peer, order.room, order.nonce) in done.cancelled
            content.append(self._item((number, raised)))
        state[place] = self._content(tuple(content))

    def _over(self, state: list[int], number: int, *, dropped: bool) -> None:
        """A worker has finished a part."""
        write = self.machines.writes[number]
        agent = self._at[write.writer]
        if state[agent] >= 0 and self.machines.knows[state[agent]].life == write.incarnation:
            order = write.order
            row = None if dropped else row_of(order)
            done = ev.PartSent(order.peer, order.room, order.nonce, order.kind, order.key, {}, dropped, row=row)
            self._put_event(state, agent, done)

    def calls_of(self, item: int) -> tuple[ev.Event, ...]:
        """Returns the calls that an entry of an engine's channel represents."""
        return self._events[item]  # type: ignore[return-value]
