"""Faults by name: a small fleet that something real is done to, what a health code should say of it, and what to try.

A scene is data and a play. The play runs beside the traffic, on its thread: a generator that does what it does, then
says how many seconds it wants to be left alone. It lasts until the demo ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvctl.lab.demo import scenario_actions
from kvctl.lab.demo.scenario_context import Play
from kvctl.lab.faults.specification import FAULTS
from kvctl.lab.ranks.bench_messages import Sizes

_TWO_INSTANCES = (Sizes(), Sizes())


@dataclass(frozen=True)
class Scenario:
    """One fault, from its cause to what is found.

    Attributes:
        does: what is done to whom, for a list.
        code: the health code that should come first.
        look: commands that show it, the best one first.
        options: of `kvctl demo`, where the user gave none.
        plan: fields of `SteadyPlan` that it needs.
        config: of every agent.
    """

    name: str
    does: str
    code: str
    look: tuple[str, ...]
    play: Play
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "stuck-room",
        "A prefill rank never computes its half of a room.",
        "KV_ROOM_STUCK_TRANSFER",
        ("kvctl doctor", "kvctl rooms --sort-by -age", "kvctl top"),
        scenario_actions.stuck_room,
    ),
    Scenario(
        "pinned-ring",
        "A prefill rank is stopped while it holds the oldest grant.",
        "KV_RING_PINNED",
        ("kvctl doctor", "kvctl staging map", "kvctl rooms"),
        scenario_actions.pinned_ring,
        options={"prefill_instances": _TWO_INSTANCES, "ring_mb": 2},
        plan={"chunk_tokens": 128},
        # An agent leads the others round a silent writer's region, as it should: here it notices late, and gives no
        # room up before.
        config={"path": "staged", "suspect_s": 500.0, "lost_s": 600.0, "waiting_timeout_s": 600.0},
    ),
    Scenario(
        "dead-peer",
        "A decode rank is killed and stays dead; traffic goes on.",
        "KV_PEER_LOST",
        ("kvctl doctor", "kvctl agents", "kvctl peers"),
        scenario_actions.dead_peer,
    ),
    Scenario(
        "slow-layer",
        "Every write of one prefill rank leaves 0.2 s late.",
        "KV_LANE_SLOW",
        ("kvctl layers", "kvctl doctor", "kvctl top"),
        scenario_actions.slow_layer,
    ),
    Scenario(
        "corrupt",
        "One write in twenty of a prefill rank has a wrong byte.",
        "KV_CHECKSUM_MISMATCH",
        ("kvctl doctor", "kvctl rooms history", "kvctl events"),
        scenario_actions.corrupt,
        config={"checksum": True},
    ),
    Scenario(
        "compat",
        "A decode rank was set up with another page size.",
        "KV_COMPAT_MISMATCH",
        ("kvctl doctor", "kvctl peers diff", "kvctl peers matrix"),
        scenario_actions.compat,
        plan={"odd_pages": {"decode-1": 32}},
    ),
    Scenario(
        "bootstrap",
        "One rank of a prefill instance never starts.",
        "KV_ROOM_STUCK_BOOTSTRAP",
        ("kvctl doctor", "kvctl bootstrap", "kvctl rooms"),
        scenario_actions.bootstrap,
        options={"prefill_instances": (Sizes(tp=2), Sizes())},
        plan={"absent": frozenset({"p0-prefill-1"})},
    ),
    Scenario(
        "grant-loss",
        "A prefill rank gets no staging grants; all else arrives.",
        "KV_GRANT_UNANSWERED",
        ("kvctl doctor", "kvctl staging", "kvctl rooms"),
        scenario_actions.grant_loss,
        config={"path": "staged"},
    ),
    Scenario(
        "oversized-chunk",
        "A decode rank's ring is too small for long prompts.",
        "KV_CHUNK_OVERSIZED",
        ("kvctl doctor", "kvctl staging", "kvctl rooms slow"),
        scenario_actions.oversized_chunk,
        plan={"chunk_tokens": 1024, "odd_rings": {"decode-1": 1}},
        config={"path": "staged"},
    ),
    Scenario(
        "plan-mismatch",
        "The two sides disagree on the length of some prompts.",
        "KV_PLAN_MISMATCH",
        ("kvctl doctor", "kvctl rooms history", "kvctl events"),
        scenario_actions.plan_mismatch,
    ),
    Scenario(
        "stuck-waiting",
        "A prefill rank fails rooms, and nobody hears of it.",
        "KV_ROOM_STUCK_WAITING",
        ("kvctl doctor", "kvctl rooms", "kvctl top"),
        scenario_actions.stuck_waiting,
        options={"prefill_tp": 1},
    ),
    Scenario(
        "stuck-scatter",
        "A decode rank copies nothing from its ring to its pages.",
        "KV_ROOM_STUCK_SCATTER",
        ("kvctl doctor", "kvctl staging", "kvctl rooms"),
        scenario_actions.stuck_scatter,
        config={"path": "staged"},
    ),
    Scenario(
        "gated-empty",
        "A region that a deaf writer waits for is freed by force.",
        "KV_RING_GATED_EMPTY",
        ("kvctl doctor", "kvctl staging", "kvctl rooms"),
        scenario_actions.gated_empty,
        options={"prefill_tp": 1, "decode_dp": 1},
        config={"path": "staged", "waiting_timeout_s": 600.0},
    ),
    Scenario(
        "fd-low",
        "A decode rank may hardly open another file.",
        "KV_FDS_LOW",
        ("kvctl doctor", "kvctl health"),
        scenario_actions.fd_low,
    ),
    Scenario(
        "draining",
        "A prefill rank was told to take no new rooms; its router does not know.",
        "KV_DRAINING",
        ("kvctl status", "kvctl doctor", "kvctl agents"),
        scenario_actions.draining,
    ),
)

SCENARIOS_BY_NAME: dict[str, Scenario] = {scene.name: scene for scene in SCENARIOS}


def listed() -> list[dict[str, str | None]]:
    """All that `kvctl demo --fault` takes: the scenes, then the faults of which one says how much or when."""
    scenes: list[dict[str, str | None]] = [
        {"fault": one.name, "kind": "scene", "does": one.does, "code": one.code} for one in SCENARIOS
    ]
    scenes += [{"fault": one.example, "kind": one.level, "does": one.help, "code": None} for one in FAULTS]
    return scenes
