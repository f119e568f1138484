"""The oracle as a function (state, observation) → state, each computed once.

It extends the oracle of the simulated worlds by pauses, kills and new incarnations: a write of a dead process may land
until its death is proven; a write into the memory of an earlier incarnation of a reader does not affect a later one.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from kvctl_agent.contract.states import RoomState
from kvctl_agent.protocol import events as ev
from tests.explore.explorer.canonical import Walk
from tests.explore.explorer.frozen import freeze, thaw
from tests.explore.explorer.machines import Machines, Seen
from tests.support.protocol.oracle import Oracle, Write


class Witness(Oracle):  # type: ignore[misc]
    """Observes every byte; `lives` are the incarnations of the present agents."""

    computed: set[tuple[str, int, int, int]]
    flying: list[Write]

    def __init__(self, world: Any) -> None:
        super().__init__(world.shape, world.decode, world.instances, world.chunk_pages)
        vars(self).update({field: getattr(world, field) for field in vars(self)})
        self.lives: dict[str, int] = {name: machine.local.incarnation for name, machine in world.machines.items()}

    def life(self, name: str) -> int | None:
        return self.lives.get(name)

    def see(self, writes: list[Write], scatters: list[ev.Scatter], seen: Seen) -> bool:
        """Processes one observation; of a write that landed, returns whether its reader was present."""
        kind, *what = seen
        if kind == "called":
            self.called(*what)
        elif kind == "ordered":
            self.ordered(what[0], writes[what[1]].order)
        elif kind == "row stored":
            self.row_stored(what[0], ev.StoreAux(what[1], what[2]))
        elif kind == "changed":
            self.changed(what[0], ev.StateChanged(what[1], what[2]))
        elif kind == "released":
            self.released(*what)
        elif kind == "recalled":
            self.recalled(*what)
        elif kind == "undone":
            self.undone(writes[what[0]])
        elif kind == "begun":
            self.begun(writes[what[0]])
        elif kind == "landed":
            return bool(self.landed(writes[what[0]]))
        elif kind == "scattered":
            self.scattered(what[0], scatters[what[1]])
        elif kind == "dropped":
            self.dropped(what[0], scatters[what[1]])
        elif kind == "killed":
            self.killed(*what)
        elif kind == "proven":
            self.proven(*what)
        else:
            self.lives[what[0]] = what[1]
            self.ring_bytes[what[0]] = {}
        return False

    def called(self, name: str, event: ev.Event) -> None:
        super().called(name, event)
        if isinstance(event, ev.SendRoom):
            life = name, event.room
            self.sent[life] = RoomState.BOOTSTRAPPING
            self.finished.discard(life)
            self.computed = {entry for entry in self.computed if entry[:2] != life}

    def killed(self, name: str) -> None:
        """A process has ended; its writes in flight may still land."""
        flying = self.flying
        self.forget(name)
        self.flying = flying
        del self.lives[name]
        for transfer in [transfer for transfer in self.transfers if transfer[0] == name]:
            del self.transfers[transfer]

    def proven(self, name: str, life: int) -> None:
        """Nothing of this incarnation is in flight any more."""
        self.flying = [write for write in self.flying if (write.writer, write.incarnation) != (name, life)]

    def scattered(self, name: str, action: ev.Scatter) -> None:
        super().scattered(name, action)
        self.dropped(name, action)

    def dropped(self, name: str, action: ev.Scatter) -> None:
        """A landed part was discarded; scattering it later would be an error."""
        held = self.ring_bytes[name]
        self.ring_bytes[name] = {unit: entry for unit, entry in held.items() if entry[0] != action.serial}

    @property
    def busy(self) -> frozenset[int]:
        """Rooms that some engine has not got back."""
        rooms = [room.room for room in self.rooms.values() if not (room.state.finished and room.released)]
        sent = [key[1] for key, state in self.sent.items() if not (state.finished and key in self.sent_released)]
        return frozenset(rooms + sent)

    def open(self, name: str, number: int) -> bool:
        """Returns whether an engine has a room that has not ended: on a prefill rank it has called send()."""
        found = [room.state for room in self.rooms.values() if (room.reader, room.room) == (name, number)]
        found += [state for key, state in self.sent.items() if key == (name, number)]
        return bool(found) and not found[-1].finished

    @property
    def waiting(self) -> tuple[tuple[str, int], ...]:
        """(agent, room) whose engine waits for its peers to join; only a deadline ends this if they never do."""
        found = [(room.reader, room.room) for room in self.rooms.values() if room.state is RoomState.BOOTSTRAPPING]
        found += [key for key, state in self.sent.items() if state is RoomState.BOOTSTRAPPING]
        return tuple(sorted(found))


class Witnesses:
    """All states of the oracle found so far, in any history."""

    def __init__(self, machines: Machines) -> None:
        self.busy: list[frozenset[int]] = []
        self.waiting: list[tuple[tuple[str, int], ...]] = []
        self._machines = machines
        self._frozen: list[bytes] = []
        self._numbers: dict[Hashable, int] = {}
        self._after: dict[tuple[int, int], tuple[int, bool]] = {}
        self._open: dict[tuple[int, str, int], bool] = {}
        self._walk = Walk(_name)

    def open(self, state: int, name: str, number: int) -> bool:
        """As `Witness.open`, of the oracle in a state."""
        key = state, name, number
        if key not in self._open:
            self._open[key] = self.witness(state).open(name, number)
        return self._open[key]

    def number(self, witness: Witness) -> int:
        key = self._walk.of(witness)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._frozen)
            self._frozen.append(freeze(witness))
            self.busy.append(witness.busy)
            self.waiting.append(witness.waiting)
        return number

    def witness(self, state: int) -> Witness:
        """Returns a new oracle in a state; the caller may change it."""
        witness: Witness = thaw(self._frozen[state])
        return witness

    def step(self, state: int, seen: int) -> tuple[int, bool]:
        """Processes one or several observations; returns the result of `Witness.see` for the last one.

        Raises:
            Broken: an observation is forbidden.
        """
        place = state, seen
        after = self._after.get(place)
        if after is None:
            witness, answer = self.witness(state), False
            for entry in self._machines.seen[seen]:
                answer = witness.see(self._machines.writes, self._machines.scatters, entry)
            after = self._after[place] = self.number(witness), answer
        return after


def _name(value: object) -> Hashable | None:
    if isinstance(value, ev.Transfer):
        return value.peer, value.tag, value.path, value.grant, value.src_pages.tobytes(), value.aux_row
    return None
