"""Measures this machine with a fleet of two ranks: what a write, row copies, and a room of hardly any bytes cost."""

from __future__ import annotations

from kvctl.lab.bench.fleet import Fleet
from kvctl.lab.bench.machine import cores
from kvctl.lab.bench.program import SideBySide
from kvctl.lab.bench.progress import Steps
from kvctl.lab.bench.session import Session
from kvctl.lab.ranks.planner import plan as make_plan
from kvctl.lab.ranks.request import Load, PlanRequest, Sizes, Tokens
from kvctl.lab.tune.costs import Costs, Lane, copies
from kvctl_agent.contract.connection_cost import ConnectionCost

_ROOMS = 64
_MEMORY_BYTES = 256 << 20


def probe(transport: str, steps: Steps) -> Costs:
    """Start two ranks over this transport, measure, and stop them.

    Raises:
        CliError, FleetError: they cannot be started, or one died.
    """
    request = PlanRequest(
        prefill=(Sizes(),),
        decode=Sizes(),
        loads=(Load(1, Tokens((16,))),),
        memory_bytes=_MEMORY_BYTES,
        seed=1,
        layers=1,
        kv_heads=1,
        head_dim=64,
        rooms=_ROOMS,
        paths=("bulk",),
        transport=transport,
        ring_mb=64,
    )
    plan = make_plan(request)
    with Fleet(plan, request, "probe") as fleet:
        session = Session(fleet, plan, SideBySide(0.0, 1), "off", 0.0, "probe", steps)
        session.start()
        for _ in session.laps():
            pass
        steps.step("probe: measuring writes and copies")
        found = fleet.probe()
        (row,) = session.results.rows()
        fleet.stop()
    points = tuple((int(size), float(us)) for size, us in found["us_by_bytes"])
    return Costs(
        lane=Lane(ConnectionCost(found["write_gb_per_s"], found["us_per_write"], points)),
        gather=copies(found["gather"]),
        scatter=copies(found["scatter"]),
        memcpy_gb_per_s=found["memcpy_gb_per_s"],
        room_us=row["latency_ms"]["p50"] * 1e3,
        rank_us=row["cpu_seconds"] * 1e6 / _ROOMS / 2,
        cores=cores(),
        origin=f"two ranks over {transport} on this machine",
    )
