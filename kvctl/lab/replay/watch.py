"""Sees what goes into a machine and what comes out, and complains about the first thing that must not be.

It knows nothing of the machine's own books: what it believes follows from the inputs and actions alone, and of a
machine that begins in the midst of things from the checkpoint. Where it cannot know, it keeps silent: rooms that were
open before the recording begins are not judged.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.lab.replay.watch_decode import DecodeInvariants
from kvctl.lab.replay.watch_prefill import PrefillInvariants
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.prefill import PrefillMachine


class InvariantChecker:
    """The watch over one machine, whichever kind it is."""

    def __init__(self, machine: Machine) -> None:
        self._watch: DecodeInvariants | PrefillInvariants
        if isinstance(machine, DecodeMachine):
            self._watch = DecodeInvariants(machine)
        else:
            assert isinstance(machine, PrefillMachine)
            self._watch = PrefillInvariants(machine)

    def possible(self, event: ev.Event) -> bool:
        """Whether our own engine could say this now: it answers what it was told to do, and nothing else."""
        return self._watch.possible(event)

    def see(self, event: ev.Event, now_ns: int, actions: Sequence[ev.Action]) -> None:
        """One input and what it led to.

        Raises:
            Broken: an invariant does not hold.
        """
        self._watch.see(event, now_ns, actions)

    @property
    def rooms(self) -> int:
        """Lives of rooms seen from their beginning."""
        return self._watch.rooms_seen
