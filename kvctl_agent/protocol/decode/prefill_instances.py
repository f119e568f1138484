"""Prefill instances of a decode rank: which it knows, and when it forgets them and their ranks.

Instances that the agent was created with, or that its engine has connected to, stay. Those that the engine names with
its requests are forgotten when no room needs them and their ranks are gone, as servers that are replaced under new
names are; a room that names one again has it looked up anew. A rank is kept beyond that while a room waits for its
writes to end.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.decode.reclaim import Reclaim
from kvctl_agent.protocol.decode.rooms import DecodeState, PrefillInstance, RecvRooms
from kvctl_agent.protocol.machine import MachineContext, PeerSessions


@dataclass(eq=False)
class PrefillInstances:
    """Table of the prefill instances."""

    context: MachineContext
    state: DecodeState
    rooms: RecvRooms
    sessions: PeerSessions
    reclaim: Reclaim

    def find(self, address: str, *, keep: bool = False) -> PrefillInstance:
        """Returns an instance that the engine names; looks it up at its registry unless it is known."""
        instance = self.state.instances.get(address)
        if instance is None:
            now_ns = self.context.now_ns
            instance = self.state.instances[address] = PrefillInstance(keep=keep, named_ns=now_ns, needed_ns=now_ns)
            self.context.actions.append(ev.FindInstance(address))
            if len(self.state.instances) > (most := self.context.local.max_instances):
                self._forget_least_needed(f"requests name more than {most}")
        instance.named_ns = self.context.now_ns
        instance.keep |= keep
        return instance

    def answered(self, address: str) -> PrefillInstance:
        """Returns the instance whose registry has answered; one that the engine has not named is one to keep."""
        return self.state.instances.setdefault(address, PrefillInstance(keep=True))

    def of_rank(self, name: str) -> str:
        """Returns the registry address of the instance that a rank belongs to; "" if the rank is on no roster."""
        return next((address for address, known in self.state.instances.items() if name in known.roster), "")

    def on_connect_instance(self, event: ev.ConnectInstance) -> None:
        self.find(event.instance, keep=event.keep)

    def on_disconnect_instance(self, event: ev.DisconnectInstance) -> None:
        self._forget(event.instance, "was disconnected by the engine")

    def on_roster_missing(self, event: ev.RosterMissing) -> None:
        self.answered(event.instance).absent = event.text

    def on_instance_unreachable(self, event: ev.InstanceUnreachable) -> None:
        """Gives up the least needed instance, so that its descriptors are free when this one is looked up again."""
        if (instance := self.state.instances.get(event.instance)) is not None:
            instance.absent, instance.retry = event.text, True
            self._forget_least_needed(event.text)

    def retry_clashes(self) -> None:
        """Looks up again the instances that share a rank name with another one, which may not use the name any more."""
        for address, instance in self.state.instances.items():
            if instance.clash:
                self.context.actions.append(ev.FindInstance(address))

    def forget_unneeded(self) -> None:
        """Forgets instances that were named by requests and are not needed any more, and ranks on no roster."""
        context, unused = self.context, []
        for address, instance in self.state.instances.items():
            if instance.retry:
                instance.retry = False
                context.actions.append(ev.FindInstance(address))
            if any(map(context.is_ready, instance.roster)):
                instance.needed_ns = context.now_ns
            elif not instance.keep:
                unused.append((address, instance))
        in_use = self._in_use() if unused else set()
        if unused:  # its ranks may come, and should learn then that these rooms have failed
            in_use |= {room.instance for room in self.state.unopened.values()}
        for address, instance in unused:
            if address in in_use:
                instance.needed_ns = context.now_ns
            elif why := self._unneeded(instance):
                self._forget(address, why)
        self.forget_departed()

    def forget_departed(self) -> None:
        """Forgets peers that are on no roster any more, once no room waits for them or for their writes."""
        departed = self.context.peers.keys() - {
            name for instance in self.state.instances.values() for name in instance.roster
        }
        if not departed:
            return
        for name in sorted(departed.difference(*map(self.rooms.unanswered, self.state.rooms.values()))):
            self.sessions.forget(self.context.peers[name], "no instance has it any more")

    def on_forget(self, event: ev.Forget) -> None:
        """Forgets a lost rank with its instance; frees by force, if the operator says so, what it may still write."""
        context, ticket = self.context, event.ticket
        if (peer := self.sessions.gone(event)) is None:
            return
        address = self.of_rank(peer.name)
        if address:
            instance = self.state.instances[address]
            others = [name for name in instance.roster if context.is_ready(name)]
            why = f"the instance also has {others[0]}, which is connected" if others else ""
            why = "the agent was told to keep it" if instance.keep else why
            if why:
                text = f"{peer.name} is a rank of the instance at {address}, and {why}: start {peer.name} again"
                context.answer(ticket, "refused", text)
                return
        held = self.reclaim.held_for(peer.name)
        if held and not event.force:
            context.answer(ticket, "refused", self.reclaim.unproven(held))
            return
        freed = tuple(serial for room, transfer in held for serial in self.reclaim.free_by_force(room, [transfer]))
        if address:
            self._forget(address, "was given up by an operator")
        self.forget_departed()
        rooms = f"; the memory of {len(held)} room{'s' * (len(held) != 1)} is freed by force" if held else ""
        later = "will be forgotten when its rooms have ended" if peer.name in context.peers else "is forgotten"
        context.answer(ticket, "forgotten", f"{peer.name} {later}{rooms}", freed, (peer.name,) if held else ())

    def _in_use(self) -> set[str]:
        """Returns the addresses of the instances with open rooms."""
        return {room.instance for room in self.state.rooms.values() if not room.state.finished}

    def _unneeded(self, instance: PrefillInstance) -> str:
        """Returns why an instance without open rooms and usable ranks is not needed any more; "" if it may be."""
        timing = self.context.timing
        peers = [self.context.peers[name] for name in instance.roster]
        if peers and all(peer.departed for peer in peers):
            return "has ended"
        silent_ns = self.context.now_ns - max(instance.needed_ns, instance.named_ns)
        # Ranks whose end is not proven may be cut off or frozen, and come back.
        ended = all(peer.proven_dead for peer in peers)
        keep_ns = min(timing.lost_ns, timing.bootstrap_ns) if ended else timing.bootstrap_ns
        return f"has not been used or heard for {silent_ns / 1e9:.1f} s" if silent_ns >= keep_ns else ""

    def _forget_least_needed(self, why: str) -> None:
        """Forgets one instance: without open rooms if there is one, or else one of which no rank is usable.

        Of several, one without usable ranks, and the one that was named least recently.
        """
        in_use = self._in_use()
        found: list[tuple[bool, bool, int, str]] = []
        for address, instance in self.state.instances.items():
            needed, usable = address in in_use, any(map(self.context.is_ready, instance.roster))
            if not instance.keep and not (needed and usable):
                found.append((needed, usable, instance.named_ns, address))
        if found:
            *_, address = min(found)
            self._forget(address, f"was given up: {why}")

    def _forget(self, address: str, why: str) -> None:
        """Forgets an instance: fails its rooms, and forgets its ranks once no room waits for their writes.

        Args:
            why: predicate of a sentence about the instance.
        """
        if address not in self.state.instances:
            return
        for room in list(self.state.rooms.values()):
            if room.instance == address:
                text = f"room {room.room}: its prefill instance at {address} {why}"
                self.rooms.fail(room, self.context.failure("KV_PEER_LOST", text))
        for room in [room for room in self.state.unopened.values() if room.instance == address]:
            del self.state.unopened[room.room]
        del self.state.instances[address]
        self.context.note("instance-forgotten", f"the prefill instance at {address} {why}")
        self.context.actions.append(ev.ForgetInstance(address))
        self.forget_departed()
        self.retry_clashes()  # the instance may have used the rank names of its successor
