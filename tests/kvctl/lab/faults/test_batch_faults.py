"""Planned rooms under faults, on real workers: what faults explain is told from what they do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvctl.lab.faults.batch_faults import BatchFaults
from kvctl.lab.faults.specification import parse_faults
from kvctl.lab.ranks.messages import RunReport
from kvctl.lab.ranks.request import Load, Sizes, Tokens

TWO_TO_TWO = {
    "prefill": (Sizes(tp=2),),
    "decode": Sizes(dp=2),
    "loads": (Load(8, Tokens(values=(40, 7))),),
    "rooms": 60,
    "transport": "loopback",
}


def kinds(reports: dict[str, RunReport]) -> Counter[str]:
    """How many rooms ended in which way; every rank's word of a room that failed must be explained."""
    told: dict[int, str] = {}
    for report in reports.values():
        explained = dict(report["faults"]["explained"])
        for index, text in report["failures"]:
            assert index in explained, text
            told[index] = explained[index]
    return Counter(told.values())


def run(fleet: Callable[..., Any], spec: str, **changes: Any) -> dict[str, RunReport]:
    """A lap under faults: survivors verify, and nothing is held."""
    faults = tuple(fault.text for fault in parse_faults(spec))
    ranks = fleet(**TWO_TO_TWO, **changes, faults=faults)
    reports = ranks.run("staged", faults=faults)
    for name, report in reports.items():
        assert report["faults"]["left"] == []
        assert report["held"] == []
        assert ranks.workers[name].faults.active() == []
    for verdict in ranks.verify().values():
        assert verdict["mismatches"] == []
    return reports


def test_aborts_hit_their_share_on_either_side(fleet: Callable[..., Any]) -> None:
    reports = run(fleet, "abort=50%", seed=11)
    ended = kinds(reports)
    assert set(ended) == {"aborted"}
    assert 5 < ended["aborted"] < 45  # some come too late
    causes = {text.partition(":")[0] for report in reports.values() for _, text in report["failures"]}
    assert any("prefill" in cause for cause in causes)
    assert any("decode" in cause for cause in causes)


def test_engine_errors_are_explained_by_the_fault_that_made_them(fleet: Callable[..., Any]) -> None:
    reports = run(fleet, "write-error=10%,write-doubt=10%")
    assert set(kinds(reports)) == {"fault"}
    struck = Counter[str]()
    for report in reports.values():
        struck.update(report["faults"]["struck"])
    assert struck["write-error"]
    assert struck["write-doubt"]


def test_without_faults_nothing_is_reported(fleet: Callable[..., Any]) -> None:
    ranks = fleet(rooms=4, transport="loopback")
    assert all("faults" not in report for report in ranks.run("staged").values())


@pytest.mark.parametrize(
    ("spec", "code", "text", "kind"),
    [
        ("write-error=1%", "KV_TRANSPORT", "refused", "fault"),
        ("write-error=1%", "KV_PEER_LOST", "silent", None),
        ("control-loss=1%", "KV_PEER_LOST", "silent", "fault"),
        ("control-loss=1%", "KV_ROOM_STUCK_TRANSFER", "stuck", None),
        ("abort=10%", "ABORTED", "given up by --faults abort", "aborted"),
        ("abort=10%", "ABORTED", "the bench's run is over", None),
        ("pause=decode-0@1s+1s", "KV_ROOM_STUCK_TRANSFER", "stuck", "fault"),
    ],
)
def test_only_what_a_fault_can_do_is_explained_by_it(
    fleet: Callable[..., Any], spec: str, code: str, text: str, kind: str | None
) -> None:
    ranks = fleet(rooms=1, transport="loopback", faults=(spec,))
    worker = next(iter(ranks.workers.values()))
    faults = BatchFaults(worker.agent, worker.start, worker.faults, parse_faults(spec))
    faults.failed(3, {"rank": "decode-0", "code": code, "at_ns": 1, "text": text})
    assert faults.end({3: text})["explained"] == ([[3, kind]] if kind else [])
