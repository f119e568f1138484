"""Makes a steady rank's agent."""

from __future__ import annotations

from kvctl_agent.agent import Agent
from kvctl_agent.contract.rig import Start
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.layout.side import Coord, Side
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.rank import Rank
from kvctl_agent.runtime.desk import OnState


def make_agent(start: Start, pool: KVPool, side: Side, at: Coord, shape: ModelShape, on_state: OnState) -> Agent:
    """The agent of the rank that `start` describes, not started."""
    instances = start.bootstraps if start.role == "decode" else (start.bootstraps[start.instance],)
    return Agent(
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
