"""A steady rank's agent: the shipped one, with a bad line, a bad engine or a bad clock whenever somebody says so."""

from __future__ import annotations

from kvctl.lab.faults.agent import FaultyAgent
from kvctl.lab.faults.specification import parse_faults
from kvctl.lab.ranks.bench_messages import Start
from kvctl.lab.ranks.steady_messages import FaultsNow, SetFault
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.rank import Rank
from kvctl_agent.runtime.handle_registry import OnState

CLEAR = "clear"
"""In place of a fault's spec: end all."""


def make_agent(
    start: Start, faults: str, pool: KVPool, side: ParallelConfig, at: RankCoord, shape: ModelShape, on_state: OnState
) -> FaultyAgent:
    """The agent of the rank that `start` describes, not started; `faults` are in force from its first moment.

    Raises:
        ValueError: one of them is none, or none of an agent.
    """
    instances = start.bootstraps if start.role == "decode" else (start.bootstraps[start.instance],)
    return FaultyAgent(
        faults=parse_faults(faults) if faults else (),
        fault_seed=start.seed,
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


def set_fault(agent: FaultyAgent, command: SetFault) -> FaultsNow:
    """Put a fault in force, or end all; what is in force then."""
    error = None
    try:
        if command.spec == CLEAR:
            agent.faults.clear()
        else:
            for fault in parse_faults(command.spec):
                agent.faults.set(fault, command.seconds)
    except ValueError as refused:
        error = str(refused)
    return FaultsNow(active=agent.faults.active(), counts=agent.faults.counts(), error=error)
