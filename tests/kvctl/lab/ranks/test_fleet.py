"""Small fleets of every layout, model and way of sending: every byte must be where the pattern says."""

from __future__ import annotations

import itertools
import queue
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvctl.lab.ranks.request import Group, Load, Sizes, State, Tokens
from kvctl.lab.ranks.worker import StateChange
from kvctl_agent.contract.states import RoomState

MS = 1_000_000
Start = Callable[..., Any]

STATES = (
    State("conv", rows=3, heads=4, head_bytes=8),
    State("ssm", rows=1, heads=1, head_bytes=40, layers=(0, 1, 1, 3)),
    State("swa", rows=2, heads=4, head_bytes=8, kind="window", window=9),
    State("index", rows=1, heads=1, head_bytes=12, kind="pages"),
)
GROUPS = (
    Group("near", layers=3, page_size=4, window=9),
    Group("far", layers=6, page_size=2, window=30, heads=2, head_dim=4),
    Group("keys", layers=1, page_size=8, heads=1, head_dim=5),
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp4 to dp4": {"prefill": (Sizes(tp=4),), "decode": Sizes(dp=4)},
    "stages and cp": {"prefill": (Sizes(pp=2, cp=2),), "cp_mode": "all", "decode": Sizes(pp=2)},
    "uneven stages to tp2": {"prefill": (Sizes(pp=2, layers=(3, 1)),), "decode": Sizes(tp=2)},
    "cp in chunks": {"prefill": (Sizes(cp=2),), "cp_mode": "all-chunk", "decode": Sizes()},
    "cp by room": {"prefill": (Sizes(cp=2),), "cp_mode": "room-hash", "decode": Sizes(dp=2)},
    "latent tp2 to dp2": {
        "kind": "mla",
        "kv_heads": None,
        "head_dim": 24,
        "prefill": (Sizes(tp=2),),
        "decode": Sizes(dp=2),
    },
    "scales, k not v, draft": {
        "prefill": (Sizes(tp=2),),
        "v_head_dim": 4,
        "dtype": "fp8-scaled",
        "draft_layers": 2,
        "draft_dim": 4,
    },
    "state over stages": {"prefill": (Sizes(pp=2, tp=2),), "states": STATES, "prefix_hit": 0.5},
    "cached to the last page": {
        "loads": (Load(4, Tokens(values=(16, 1, 40, 33))),),
        "prefix_hit": 0.9,
        "states": STATES,
        "prefill": (Sizes(cp=2),),
        "cp_mode": "all",
        "decode": Sizes(tp=2),
    },
    "groups over stages": {"prefill": (Sizes(pp=2, tp=2),), "groups": GROUPS[:2], "states": STATES},
    "groups with cached prefixes": {
        "loads": (Load(4, Tokens(values=(16, 1, 40, 36))),),
        "prefix_hit": 0.9,
        "groups": GROUPS,
        "draft_layers": 1,
        "prefill": (Sizes(cp=2),),
        "cp_mode": "all",
    },
    "groups, unlike pages and pools": {
        "groups": GROUPS,
        "prefill_page_size": 8,
        "kv_layouts": ("hnd", "fused"),
        "decode": Sizes(dp=2),
    },
    "latent with groups and scales": {
        "kind": "mla",
        "kv_heads": None,
        "head_dim": 24,
        "dtype": "fp8-scaled",
        "groups": (GROUPS[2], Group("swa", layers=4, page_size=4, window=5)),
        "prefill": (Sizes(tp=2),),
    },
    "instances": {"prefill": (Sizes(tp=4), Sizes(tp=2, pp=2), Sizes(cp=2)), "decode": Sizes(dp=2)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_of_every_layout_lands(fleet: Start, layout: str):
    ranks = fleet(**LAYOUTS[layout])
    for path, pipeline in (("slice", "off"), ("staged", "2")):
        reports = ranks.run(path, pipeline)
        assert [report["failures"] for report in reports.values()] == [[]] * len(reports)
        verdicts = ranks.verify()
        assert [verdict["mismatches"] for verdict in verdicts.values()] == [[]] * len(verdicts)
        assert sum(verdict["bytes"] for verdict in verdicts.values()) > 0


def rows(reports: dict[str, Any], role: str) -> list[list[int]]:
    return [row for name, report in reports.items() if role in name for row in report["rooms"]]


def test_forwards_take_the_time_that_they_are_said_to_and_follow_each_other(fleet: Start, at_best: Any):
    ranks = fleet(prefill=(Sizes(pp=2, layers=(3, 1)),))
    chunks = {index: -(-room["tokens"] // 16) for index, room in enumerate(ranks.plan["loads"][0]["rooms"])}

    def head_start_ns() -> float:
        """By how much the second stage begins a room later than the first, negative."""
        reports = ranks.run("staged", "off", layer_ms=4.0)
        early, late = (sorted(reports[f"p0-prefill-{stage}"]["rooms"], key=lambda row: row[1]) for stage in (0, 1))
        for stage_rows, layers in ((early, 3), (late, 1)):
            for index, started, done, sent, compute in stage_rows:
                assert compute == chunks[index] * layers * 4 * MS
                assert done - started >= compute
                assert sent >= done
            for before, after in itertools.pairwise(stage_rows):
                assert after[1] >= before[1] + before[4]
        begins = {row[0]: row[1] for row in early}
        return statistics.median(begins[row[0]] - row[1] for row in late)

    at_best(head_start_ns, -8 * MS)  # the first stage has computed its first chunk by then


def test_layer_groups_hide_transfer_behind_compute(fleet: Start):
    ranks = fleet(layers=8, loads=(Load(1, Tokens(values=(64,))),), rooms=3, chunk_tokens=64)
    for pipeline, reason, parts in (("off", "off", 3), ("2", "override", 3 * 4)):
        report = ranks.run("staged", pipeline, layer_ms=10.0, show=0)["p0-prefill-0"]
        assert report["counters"]["kvctl_pipeline_decisions_total"] == {reason: 3}
        assert report["counters"]["kvctl_parts_total"] == {"staged": parts}
        assert report["groups"] == (1 if pipeline == "off" else 4)
        _, hidden, exposed = (sum(column) for column in zip(*report["hidden"], strict=True))
        assert len(report["hidden"]) == 3
        assert exposed > 0
        assert (hidden > 0) == (pipeline != "off")


def test_short_prompts_take_the_plain_path_and_the_reason_is_counted(fleet: Start):
    ranks = fleet(layers=8)
    reports = ranks.run("staged", "on")
    assert set(reports["p0-prefill-0"]["counters"]["kvctl_pipeline_decisions_total"]) == {"few-tokens"}


def test_rooms_come_at_their_time_and_time_in_the_queue_is_theirs(fleet: Start):
    ranks = fleet(loads=(Load(1, Tokens(values=(16,))),), rooms=4)
    for index, room in enumerate(ranks.plan["loads"][0]["rooms"]):
        room["arrival_ms"] = 15.0 * index
    reports = ranks.run("slice", layer_ms=10.0)
    decode = sorted(rows(reports, "decode"))
    arrivals = [row[1] for row in decode]
    assert [round((at - arrivals[0]) / MS) for at in arrivals] == [0, 15, 30, 45]
    # One at a time, 40 ms of compute each: every room waits longer than the one before.
    waits = [row[2] - row[1] for row in decode]
    assert waits == sorted(waits)
    assert waits[3] > 100 * MS


def test_tokens_come_in_steps(fleet: Start):
    ranks = fleet(loads=(Load(2, Tokens(values=(16,))),), output_tokens=3, decode=Sizes(tp=2))
    begun = time.monotonic()
    reports = ranks.run("slice", decode_ms=4.0)
    assert time.monotonic() - begun < ranks.timeout_s / 2
    for rank in ("decode-0", "decode-1"):
        assert len(reports[rank]["rooms"]) == 6
        for _, arrival, success, first, last in reports[rank]["rooms"]:
            assert arrival < success < first < last
            assert last - first >= 2 * 4 * MS
    assert [verdict["mismatches"] for verdict in ranks.verify().values()] == [[], []]


def test_what_is_not_over_at_the_deadline_is_named(fleet: Start):
    ranks = fleet(loads=(Load(1, Tokens(values=(16,))),), rooms=2)
    ranks.timeout_s = 0.3
    reports = ranks.run("slice", layer_ms=500.0)
    causes = [text for _, text in reports["decode-0"]["failures"]]
    assert len(causes) == 2
    assert all("run's deadline" in text or "run is over" in text for text in causes)


def test_a_lost_instance_is_reported_at_once_when_a_room_has_ended(fleet: Start, monkeypatch: pytest.MonkeyPatch):
    worker = fleet().workers["decode-0"]
    serving, sent = list(worker.start.bootstraps), []
    monkeypatch.setattr(worker, "send", lambda kind, data: sent.append((kind, data.get("instances"))))
    monkeypatch.setattr(worker.agent, "serving", lambda: tuple(serving))

    def end_room() -> None:
        worker.handle(StateChange(SimpleNamespace(room=1 << 40), RoomState.FAILED, time.monotonic_ns()))
        worker.inbox.put(None)
        worker.next()

    end_room()
    sent.clear()
    serving.clear()
    end_room()
    assert ("serving", []) in sent


class RecordedQueue(queue.SimpleQueue[Any]):
    """Queue of state changes that keeps the states that were put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.states: set[RoomState] = set()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if isinstance(item, StateChange):
            self.states.add(item.state)
        super().put(item)


def test_ranks_are_woken_only_by_changes_that_they_act_on(fleet: Start):
    ranks = fleet(prefill=(Sizes(tp=2),))
    queues = {name: RecordedQueue() for name in ranks.workers}
    for name, worker in ranks.workers.items():
        worker.inbox = queues[name]
    assert all(not report["failures"] for report in ranks.run("staged").values())
    for name, worker in ranks.workers.items():
        waits = {RoomState.WAITING_FOR_INPUT} if worker.start.role == "prefill" else set()
        assert queues[name].states == {*waits, RoomState.SUCCESS}
