"""Codes about corrupt, slow or missing data, incompatible agents, limits and metrics."""

from __future__ import annotations

import pytest

from kvctl.health.finding import Severity
from tests.kvctl.health.fleets import MIB, Fleet, S


@pytest.mark.parametrize("code", ["KV_CHECKSUM_MISMATCH", "KV_PAGE_REUSED", "KV_READY_VIOLATION"])
def test_what_must_never_be_comes_first(code):
    fleet = Fleet()
    text = "part (prefill-1, chunk 2, layers 0-3) by staged: checksum 1f ≠ 2e"
    fleet.failed(["decode-0", "prefill-0", "prefill-1"], "7", code, "decode-0", text, ago_s=20)
    fleet.failed(["decode-1", "prefill-0", "prefill-1"], "6", code, "decode-1", text, ago_s=50)
    fleet.peer("decode-1", "prefill-0", state="lost", last_error="peer prefill-0 (incarnation 0f) lost: silent")
    (first, *_) = fleet.examine()
    assert (first.code, first.subject, first.severity) == (code, "prefill-1", Severity.CRITICAL)
    assert first.agents[:2] == ("prefill-1", "decode-0")
    assert (first.evidence["failed_rooms"], first.evidence["found_by"]) == (2, ["decode-0", "decode-1"])
    assert text in first.cause
    assert "kvctl rooms show 7" in first.remedy


def test_corruption_is_not_forgotten_with_the_history():
    fleet = Fleet()
    fleet.metric("decode-0", "kvctl_room_failures_total", 3, code="KV_CHECKSUM_MISMATCH")
    (found,) = fleet.examine()
    assert (found.subject, found.severity, found.weight) == ("decode-0", Severity.WARNING, 3)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("KV_ROOM_UNCLAIMED", "the engine of prefill never began 2 rooms that decode ranks had opened"),
        ("KV_HOLD_EXPIRED", "prefill computed 2 rooms that no decode rank opened in time"),
    ],
)
def test_rooms_that_one_side_never_began(code: str, cause: str):
    fleet = Fleet()
    for number, ago_s in (("7", 20), ("6", 50)):
        fleet.failed(["decode-0", "prefill-0"], number, code, "prefill-0", f"room {number} waited", ago_s=ago_s)
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.severity, found.weight) == (code, "prefill", Severity.WARNING, 2)
    assert found.cause == f"{cause}, last 20 s ago: room 7 waited"
    assert "`kvctl rooms show 7`" in found.remedy


def test_agents_that_do_not_fit():
    fleet = Fleet()
    for name in ("prefill-0", "prefill-1"):
        fleet.peer(name, "decode-1", state="refused", differences=["page_size 64 ≠ 32"])
        fleet.peer("decode-1", name, state="refused", differences=["page_size 64 ≠ 32"])
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.severity) == ("KV_COMPAT_MISMATCH", "decode-1", Severity.CRITICAL)
    assert found.weight == 2
    assert "page_size 64 (prefill-0) ≠ 32 (decode-1)" in found.cause
    assert "`kvctl peers diff prefill-0 decode-1`" in found.remedy


def test_a_decode_rank_alone_tells_whose_value_is_whose():
    fleet = Fleet()
    fleet.peer("decode-1", "prefill-0", state="refused", differences=["page_size 64 ≠ 32"])
    fleet.peer("decode-1", "prefill-1", state="refused", differences=["protocol version 1 ≠ 2"])
    (found,) = fleet.find("KV_COMPAT_MISMATCH")
    assert found.evidence["differences"] == [
        "page_size 64 (prefill-0) ≠ 32 (decode-1)",
        "protocol version 1 (decode-1) ≠ 2 (prefill-1)",
    ]


def test_strangers_and_noise_are_not_refused_agents():
    fleet = Fleet()
    for name, state in (("\x00<\x7fj", "refused"), ("elsewhere-0", "refused"), ("\x01", "lost")):
        row = {**fleet.answers["prefill-0"]["peers"][0], "peer": name, "state": state, "differences": ["dtype a ≠ b"]}
        fleet.answers["prefill-0"]["peers"].append(row)
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.severity) == ("KV_COMPAT_MISMATCH", "elsewhere-0", Severity.WARNING)


def test_two_ends_that_do_not_agree_on_a_room():
    fleet = Fleet()
    text = "room 7: this side computed 12 pages, decode-0 expects 16"
    fleet.failed(["decode-0", "prefill-0"], "7", "KV_PLAN_MISMATCH", "prefill-0", text)
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.severity) == ("KV_PLAN_MISMATCH", "prefill", Severity.CRITICAL)
    assert found.agents == ("prefill-0", "decode-0")
    assert text in found.cause


def slow(times: float) -> tuple[Fleet, Fleet]:
    """Parts of prefill-1 take `times` times as long on the wire as the 20 ms of prefill-0."""
    before, fleet = Fleet(), Fleet()
    for name, mean in (("prefill-0", 0.02), ("prefill-1", 0.02 * times)):
        fleet.spend(name, "wire", 40 * mean, 40)
        fleet.metric(name, "kvctl_part_bytes_total", 440 * 2 * MIB, path="staged")
    return before, fleet


def test_a_slow_writer():
    before, fleet = slow(times=20)
    fleet.room("decode-0", "7", state_age_ns=30 * S)
    fleet.room("prefill-0", "7", forward_done_at_ns=0, coverage={"sent": 32})
    fleet.room("prefill-1", "7", forward_done_at_ns=0, coverage={"sent": 8})
    (first, *others) = fleet.examine(before)
    assert (first.code, first.subject, first.agents) == ("KV_LANE_SLOW", "prefill-1", ("prefill-1",))
    assert not others  # the room waits for it
    assert first.evidence["wire_a_part_ns"] == pytest.approx(0.4e9)
    assert first.weight == pytest.approx(20, rel=0.01)
    assert "20 times longer for each byte than those of prefill-0" in first.cause


def test_a_writer_that_is_somewhat_slow_is_not_reported():
    before, fleet = slow(times=4)
    assert fleet.examine(before) == []


def test_a_writer_that_was_stopped_once_is_not_slow_for_ever():
    before = Fleet()
    before.spend("prefill-1", "wire", 80.0, 8)  # in flight while it was stopped for 10 s
    fleet = before.copy()
    assert [found.subject for found in fleet.examine(before)] == ["prefill-1"]
    fleet.spend("prefill-1", "wire", 0.02, 3)
    fleet.metric("prefill-1", "kvctl_part_bytes_total", 403 * 2 * MIB, path="staged")
    assert fleet.examine(before) == []


def test_larger_parts_may_take_longer():
    before, fleet = slow(times=20)
    fleet.metric("prefill-1", "kvctl_part_bytes_total", (400 + 40 * 20) * 2 * MIB, path="staged")
    assert fleet.examine(before) == []


def test_a_slow_lane_within_a_host():
    fleet = Fleet()
    fleet.peer("prefill-0", "decode-1", lane_gb_per_s=0.3)
    assert fleet.examine() == []  # measured while it came up, when every core was busy
    fleet.peer("prefill-0", "decode-1", lane_measured_age_ns=20 * S)
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.evidence["slow_to"]) == ("KV_LANE_SLOW", "prefill-0", ["decode-1"])
    assert (found.evidence["lane_gb_per_s"], found.evidence["memory_gb_per_s"]) == (0.3, 8.0)
    assert "kvctl peers probe --busy prefill-0" in found.remedy
    fleet.peer("prefill-0", "decode-1", lane_gb_per_s=1.5)
    assert fleet.examine() == []
    fleet.peer("prefill-0", "decode-1", lane_descriptor_ns=10_600)  # as TCP has it
    assert [one.code for one in fleet.examine()] == ["KV_LANE_SLOW"]
    fleet.peer("prefill-0", "decode-1", same_host=False)  # memory is no measure of a network
    assert fleet.examine() == []


def between_gpus(fleet: Fleet, **fields: object) -> None:
    measured = {"lane_gb_per_s": 0.58, "lane_measured_age_ns": 20 * S, "lane_kind": "tcp through the host"}
    fleet.peer("prefill-0", "decode-1", **(measured | {"lane_expected": "cuda_ipc"} | fields))


def test_a_lane_between_gpus_that_goes_through_the_host():
    fleet = Fleet()
    between_gpus(fleet, lane_measured_age_ns=590 * S)  # while it came up
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.evidence["slow_to"]) == ("KV_LANE_SLOW", "prefill-0", ["decode-1"])
    assert (found.evidence["lane_kind"], found.evidence["lane_gb_per_s"]) == ("tcp through the host", 0.58)
    assert "0.58 GB/s: it goes through the host" in found.cause
    assert "cuda_ipc" in found.remedy
    assert "CUDA_VISIBLE_DEVICES" in found.remedy
    between_gpus(fleet, lane_direct="nvlink")
    assert "parts that take the path direct are not affected" in fleet.examine()[0].cause


def test_a_lane_between_gpus_as_fast_as_its_hardware():
    fleet = Fleet()
    between_gpus(fleet, lane_gb_per_s=0.2, lane_kind="tcp through the host", lane_expected="tcp through the host")
    assert fleet.examine() == []  # nor is the speed of the host's memory a measure
    between_gpus(fleet, lane_gb_per_s=373.0, lane_kind="cuda_ipc")
    assert fleet.examine() == []


def test_each_way_that_gpus_could_go_has_its_remedy():
    fleet = Fleet()
    between_gpus(fleet, lane_expected="rdma", same_host=False)
    assert "nvidia-peermem" in fleet.examine()[0].remedy
    between_gpus(fleet, lane="mooncake", lane_gb_per_s=2.2)
    assert "set transport to nixl" in fleet.examine()[0].remedy


def test_too_many_descriptors():
    before, fleet = Fleet(), Fleet()
    for metric, value in (("descriptors", 400_000), ("writes", 40), ("part_bytes", 400_000 * 512)):
        fleet.metric("prefill-0", f"kvctl_{metric}_total", value, path="slice")
        before.metric("prefill-0", f"kvctl_{metric}_total", 0, path="slice")
    fleet.spend("prefill-0", "post", 4.0, 40)
    fleet.spend("prefill-0", "wire", 0.4, 40)
    (found,) = fleet.find("KV_DESCRIPTOR_FLOOD", before)
    assert found.subject == "prefill-0"
    assert (found.evidence["descriptors_a_part"], found.evidence["bytes_a_descriptor"]) == (10_000, 512)
    assert "with staging on" in found.remedy


@pytest.mark.parametrize(("stage", "says"), [("gather", "the copy"), ("queue", "for the control loop")])
def test_parts_that_are_ready_for_long(stage, says):
    before, fleet = Fleet(), Fleet()
    for name, seconds in {"gate": 1.0, stage: 200.0, "wire": 0.4}.items():
        fleet.spend("prefill-0", name, seconds, 40)
    assert fleet.find("KV_READY_GAP", before) == []  # for a short while only
    (found,) = fleet.find("KV_READY_GAP", before, apart_s=12)
    assert found.subject == "prefill-0"
    assert found.evidence[f"{stage}_ratio"] > 0.9
    assert says in found.cause


def test_an_engine_that_fails_rooms():
    fleet = Fleet()
    fleet.failed(["prefill-0", "decode-0"], "7", "KV_TRANSPORT", "prefill-0", "NIXL_ERR_BACKEND")
    fleet.metric("prefill-0", "kvctl_transport_errors_total", 2)
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.severity) == ("KV_TRANSPORT", "prefill-0", Severity.WARNING)
    assert found.evidence["transport_errors_total"] == 2


def test_writes_to_an_agent_that_died_are_no_finding_of_their_own():
    fleet = Fleet()
    text = "part of room 7 to decode-1 by staged: loopback: peer 'decode-1' (process 4244) is gone"
    fleet.failed(["prefill-0"], "7", "KV_TRANSPORT", "prefill-0", text)
    for name in ("prefill-0", "prefill-1"):
        fleet.peer(
            name, "decode-1", state="lost", last_error="peer decode-1 (incarnation 0f) lost: process 4244 has ended"
        )
    fleet.gone("decode-1")
    assert [found.code for found in fleet.examine()] == ["KV_PEER_LOST"]


def test_a_gpu_that_fails_rooms():
    fleet = Fleet()
    for room, ago_s in (("7", 9), ("8", 4)):
        fleet.failed(["prefill-0", "decode-0"], room, "KV_DEVICE", "prefill-0", "an illegal address", ago_s=ago_s)
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.severity) == ("KV_DEVICE", "prefill-0", Severity.CRITICAL)
    assert (found.weight, found.evidence["latest_room"]) == (2, "8")
    assert "failed 2 rooms, last 4 s ago: an illegal address" in found.cause
    assert "`dmesg | grep -i xid` on the host of prefill-0" in found.remedy


def test_a_bug_of_an_agent():
    fleet = Fleet()
    fleet.metric("decode-1", "kvctl_internal_errors_total", 2)
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.weight) == ("KV_INTERNAL_ERROR", "decode-1", 2)


@pytest.mark.parametrize(("used", "severity"), [(800, None), (900, Severity.WARNING), (1000, Severity.CRITICAL)])
def test_file_descriptors(used, severity):
    fleet = Fleet()
    fleet.status("decode-1", process={"fds": used, "fds_limit": 1024})
    found = fleet.examine()
    assert [one.severity for one in found] == ([] if severity is None else [severity])
    if found:
        assert (found[0].code, found[0].subject) == ("KV_FDS_LOW", "decode-1")
        assert found[0].remedy.startswith("`prlimit --pid 4243 --nofile=4096`")


def test_success_without_bytes():
    before, fleet = Fleet(), Fleet()
    fleet.metric("decode-0", "kvctl_rooms_finished_total", 1300, result="Success")
    (found,) = fleet.find("KV_IDLE", before)
    assert found.subject == "decode-0"
    again = fleet.copy()
    again.status("decode-0", incarnation="another")  # counters are not compared with those of an earlier process
    assert again.find("KV_IDLE", before) == []
    fleet.metric("decode-0", "kvctl_part_bytes_total", 500 * 2 * MIB, path="staged")
    assert fleet.find("KV_IDLE", before) == []


def test_requests_that_reach_the_prefill_side_alone():
    fleet = Fleet()
    for name in fleet.names:
        fleet.answers[name]["rooms"] = []
    for number in range(9):
        fleet.room("prefill-0", str(number), state="Bootstrapping", state_age_ns=30 * S, peers=[])
    assert fleet.find("KV_IDLE") == []
    for name in ("decode-0", "decode-1"):
        fleet.metric(name, "kvctl_rooms_opened_total", 0)
    (found,) = fleet.find("KV_IDLE")
    assert (found.subject, found.evidence["waiting_rooms"]) == ("decode-0", 9)


def test_numbers_that_cannot_be():
    fleet = Fleet()
    fleet.status("prefill-0", rate={"gb_per_s": 1e6})
    fleet.metric("prefill-1", "kvctl_ring_used_bytes", -4)
    fleet.room("decode-0", "7", coverage={"landed": 65})
    found = {one.subject: one.evidence for one in fleet.find("KV_METRIC_IMPLAUSIBLE")}
    assert found == {
        "prefill-0": {"rate.gb_per_s": 1e6},
        "prefill-1": {"kvctl_ring_used_bytes": -4},
        "decode-0": {"coverage.landed": 65},
    }


def test_a_counter_that_went_down():
    before, fleet = Fleet(), Fleet()
    fleet.metric("decode-0", "kvctl_rooms_opened_total", 5)
    (found,) = fleet.find("KV_METRIC_IMPLAUSIBLE", before)
    assert "less than the 1300 in the reading before" in found.cause
    fleet.status("decode-0", incarnation="another")  # it was started again
    fleet.hellos["decode-0"]["incarnation"] = "another"
    assert fleet.find("KV_METRIC_IMPLAUSIBLE", before) == []


def test_one_disagreement_of_two_ranks_of_an_instance_is_one_finding_since_its_first_room():
    """Each rank of a prefill instance meets the disagreement; which one is the first differs from room to room."""
    fleet = Fleet()
    for number, rank, ago_s in (("7", "prefill-0", 40), ("8", "prefill-1", 20), ("9", "prefill-0", 5)):
        text = f"room {number}: this side computed 9 pages, decode-0 expects 8"
        for name in ("prefill-0", "prefill-1"):
            later = 0 if name == rank else 1
            fleet.failed([name, "decode-0"], number, "KV_PLAN_MISMATCH", name, text, ago_s=ago_s - later)
    (found,) = fleet.examine()
    assert (found.subject, found.evidence["failed_rooms"], found.weight) == ("prefill", 3, 3)
    assert (found.since_ns, found.evidence["latest_ago_ns"]) == (40 * S, 5 * S)
    assert set(found.agents) == {"prefill-0", "prefill-1", "decode-0"}
    assert found.cause.startswith("3 rooms failed because prefill and decode disagree on the transfer plan, last 5 s")


def test_agents_that_refuse_each_other_are_not_reported_as_waiting_as_well():
    fleet = Fleet()
    for name in ("prefill-0", "prefill-1"):
        fleet.peer(name, "decode-1", state="refused", differences=["page_size 64 ≠ 32"])
    refusals = "; ".join(f"{name} refuses this rank: page_size 64 ≠ 32" for name in ("prefill-0", "prefill-1"))
    fleet.status("decode-1", waiting_for=refusals)
    (found,) = fleet.examine()
    assert found.code == "KV_COMPAT_MISMATCH"
    assert found.evidence["differences"] == ["page_size 64 (prefill-0) ≠ 32 (decode-1)"]
    fleet.status("decode-1", waiting_for="no hello from prefill-0")
    fleet.peer("decode-1", "prefill-0", state="connecting", differences=[])
    fleet.peer("prefill-0", "decode-1", state="connecting", differences=[])
    assert [each.code for each in fleet.examine()] == ["KV_COMPAT_MISMATCH", "KV_NOT_READY"]
