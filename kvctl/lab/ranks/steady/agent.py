"""A steady rank's agent: the shipped one, with a bad line, a bad engine or a bad clock whenever somebody says so."""

from __future__ import annotations

from kvctl.lab.faults.agent import faulty_agent
from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.faults.specification import parse_faults
from kvctl.lab.ranks.messages import FaultsNow, SetFault, Start
from kvctl_agent.agent import Agent
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.rank import Rank
from kvctl_agent.runtime.handles import OnState

CLEAR = "clear"
"""In place of a fault's spec: end all."""


def make_agent(
    start: Start,
    faults: FaultInjector,
    pool: KVPool,
    side: ParallelConfig,
    at: RankCoord,
    shape: ModelShape,
    on_state: OnState,
) -> Agent:
    """The agent of the rank that `start` describes, not started; `faults` are in force from its first moment."""
    instances = start.bootstraps if start.role == "decode" else (start.bootstraps[start.instance],)
    return faulty_agent(
        faults,
        role=start.role,
        rank=Rank(
            **at._asdict(),
            dp_size=side.dp,
            pp_size=side.pp,
            cp_size=side.cp,
            tp_size=side.tp,
            stages=side.stages,
        ),
        pool=pool,
        name=start.name,
        bootstrap=instances,
        model=shape,
        on_state=on_state,
        **start.config,
    )


def set_fault(faults: FaultInjector, command: SetFault) -> FaultsNow:
    """Put a fault in force, or end all; what is in force then."""
    error = None
    try:
        if command.spec == CLEAR:
            faults.clear()
        else:
            for fault in parse_faults(command.spec):
                faults.set(fault, command.seconds)
    except ValueError as refused:
        error = str(refused)
    return FaultsNow(active=faults.active(), counts=faults.counts(), error=error)
