"""What keeps an agent from serving, in words that name who is missing, or who will not have it."""

from __future__ import annotations

from collections.abc import Iterable

from kvctl_agent.errors import ConfigError
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.peer import PeerState
from kvctl_agent.runtime.bootstrap import Registries


def waiting_for(name: str, role: str, instances: Iterable[str], registries: Registries, machine: Machine) -> str | None:
    """None when nothing does: a prefill rank is registered, a decode rank has met every rank of its instances."""
    asked = list(instances)
    waits: list[str] = []
    for instance in asked:
        silent = f"no answer from the registry at {instance}"
        roster = registries.roster(instance)
        if role == "prefill" and roster.refused:
            return f"the registry refuses {roster.refused}"
        if role == "prefill":
            return None if any(rank.name == name for rank in roster.ranks) else silent
        if not registries.complete(instance):
            at = f" at {instance}" if len(asked) > 1 else ""
            waits.append(f"{roster.missing}{at}" if roster.missing else silent)
        elif not machine.roster(instance):
            waits.append(f"the ranks of {instance} are not taken up")
    missing = machine.missing_peers if isinstance(machine, DecodeMachine) else []
    unfit = [name for name in missing if (peer := machine.peers.get(name)) is not None and peer.differences]
    if silent_ranks := [name for name in missing if name not in unfit]:
        waits.append(f"no hello from {', '.join(silent_ranks)}")
    waits += [f"{name} does not take us: {'; '.join(machine.peers[name].differences)}" for name in unfit]
    return "; ".join(waits) or None


def check_fit(name: str, role: str, instances: Iterable[str], registries: Registries, machine: Machine) -> None:
    """
    Raises:
        ConfigError: waiting is in vain: a registry refuses this agent, or a decode rank has a peer it does not fit.
    """
    for peer in list(machine.peers.values()) if role == "decode" else ():
        if peer.state is PeerState.REFUSED:  # else what stands in the way may pass
            raise ConfigError(f"{peer.name} and {name} do not fit: {'; '.join(peer.differences)}")
    for instance in instances:
        if refused := registries.roster(instance).refused:
            raise ConfigError(f"the registry refuses {refused}")
