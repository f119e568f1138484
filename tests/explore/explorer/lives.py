"""Steps of time and of processes: time passes, agents pause, end, are proven dead and start anew."""

from __future__ import annotations

import msgspec

from kvctl_agent.protocol import events as ev
from tests.explore.explorer.flow import Channel, Flow, Kind, Start, Step
from tests.explore.explorer.frozen import AGES, machine_of
from tests.explore.explorer.machines import Age, Lapse, role_of


class Lives(Flow):  # type: ignore[misc]
    """The steps that affect an agent as a whole."""

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self._locals = [start.world.machines[name].local for name in self.names]
        self._born: dict[tuple[int, int], int] = {}  # (agent, life) → the state that it begins in

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
        """Increase the age of silence of every peer that does not send to an agent."""
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

    def _recall(self, state: list[int], step: Step) -> None:
        """An engine takes the pages of a room back, and calls again later.

        The calls that a prefill engine was going to make are replaced by those that compute the room in other pages.
        """
        agent, name, room = step.agent, self.names[step.agent], step.other
        first, left = self.budgets[0].recalls, self.budgets[state[self._budget]].recalls
        calls = self.start.recalled[name, room][first.count((name, room)) - left.count((name, room))]
        state[self._budget] = self._spend(state[self._budget], "recalls", (name, room))
        place = self._place("engine", agent, agent)
        pending = [(item, self._events[item][0]) for item in self.contents[state[place]]]
        others = [item for item, call in pending if getattr(call, "room", None) != room]
        state[place] = self._content(tuple(others))
        recall = ev.Recall(room, 1 + len(first) - len(left))
        self._feed(state, agent, ("recall", recall.serial, room), (recall,))
        self._will_call(state, name, calls)

    def _lapse(self, state: list[int], step: Step) -> None:
        self._feed(state, step.agent, ("lapse", step.other), (Lapse(step.other),))

    def _lapse_early(self, state: list[int], step: Step) -> None:
        state[self._budget] = self._spend(state[self._budget], "lapses")
        self._lapse(state, step)

    def _release(self, state: list[int], step: Step) -> None:
        state[self._budget] = self._spend(state[self._budget], "releases")
        self._feed(state, step.agent, ("release", step.other), (ev.ReleaseHeld(1, step.other),))

    def _forget(self, state: list[int], step: Step) -> None:
        name = self.names[step.agent]
        state[self._budget] = self._spend(state[self._budget], "forgets", (name, step.other))
        events: tuple[ev.Event, ...] = (ev.Forget(1, step.other),)
        if role_of(name) == "decode":
            (roster,) = self.start.rosters
            events = ev.DisconnectInstance(roster.instance), ev.ConnectInstance(roster.instance), roster
        self._feed(state, step.agent, ("forget", step.other), events)

    def _pause(self, state: list[int], step: Step) -> None:
        state[self._budget] = self._spend(state[self._budget], "pauses", self.names[step.agent])
        state[self._paused] |= 1 << step.agent

    def _resume(self, state: list[int], step: Step) -> None:
        state[self._paused] &= ~(1 << step.agent)

    def _resume_late(self, state: list[int], step: Step) -> None:
        """Resume an agent that notices its delay before it reads the messages that arrived meanwhile."""
        self._resume(state, step)
        self._feed(state, step.agent, ("age", (), True), (Age((), True),))

    def _kill(self, state: list[int], step: Step) -> None:
        state[self._budget] = self._spend(state[self._budget], "kills", self.names[step.agent])
        self._end(state, step.agent)

    def _freeze(self, state: list[int], step: Step) -> None:
        """Freeze a process. Each part queued at its workers may have passed every check and will be posted."""
        agent = step.agent
        state[self._budget] = self._spend(state[self._budget], "freezes", self.names[agent])
        if self._has("begin", agent):
            for item in self.contents[state[self._place("begin", agent, agent)]]:
                number, raised = self.items[item]
                if not raised:
                    self._see(state, self.machines.see((("begun", number),)))
                    self._put(state, self._place("flight", agent, agent), self._item(number))
        self._end(state, agent)

    def _leave(self, state: list[int], step: Step) -> None:
        agent = step.agent
        state[self._budget] = self._spend(state[self._budget], "leaves", self.names[agent])
        kinds: tuple[Kind, ...] = ("begin", "flight")
        busy = [self._place(kind, agent, agent) for kind in kinds if self._has(kind, agent)]
        drained = not any(state[place] for place in busy)
        self._feed(state, agent, ("leave", drained), (ev.Shutdown(drained),))
        self._end(state, agent)

    def _has(self, kind: Kind, agent: int) -> bool:
        return Channel(kind, agent, agent) in self._channel_at

    def _end(self, state: list[int], agent: int) -> None:
        """End a process. Its writes in flight may still land; its peers will receive proof of its death."""
        life = self.machines.knows[state[agent]].life
        state[agent] = -life
        state[self._paused] &= ~(1 << agent)
        self._see(state, self.machines.see((("killed", self.names[agent]),)))
        kinds: tuple[Kind, ...] = ("begin", "scatter", "event", "engine", "proof")
        for kind in kinds:
            if self._has(kind, agent):
                state[self._place(kind, agent, agent)] = 0
        for other in range(len(self.names)):
            if other != agent and state[other] >= 0 and role_of(self.names[other]) != role_of(self.names[agent]):
                self._put(state, self._place("proof", other, other), self._item((agent, life)))

    def _prove(self, state: list[int], agent: int, life: int) -> None:
        """Prove a process dead: none of its writes is in flight or will be."""
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
        life = -state[agent] + len(self.names)
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
