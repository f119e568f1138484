"""Health codes about engines without an agent, with metrics recorded from real servers in trouble."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from kvctl.client.fleet import Fleet, Survey
from kvctl.client.health_reads import HEALTH_CALLS
from kvctl.health.codes import CODES
from kvctl.health.engine import examine
from kvctl.health.finding import Finding, Severity
from kvctl.health.snapshot import Snapshot
from tests.support.exporter import Exporter, recorded

S = 1_000_000_000
FAR_S = 40.0


def survey(servers: Iterable[Exporter]) -> Survey:
    with Fleet([server.url for server in servers], {}, timeout_ns=60 * S) as fleet:
        found = fleet.survey(HEALTH_CALLS)
    assert not found.faults
    return found


def findings(*texts: tuple[str, str], apart_s: float = 6.0) -> list[Finding]:
    """Returns the findings about servers, each with its metrics before and now."""
    servers = [Exporter(before) for before, _ in texts]
    for server in servers:
        server.__enter__()
    try:
        before = Snapshot(survey(servers), 1000 * S)
        for server, (_, now) in zip(servers, texts, strict=True):
            server.text = now
        return examine(Snapshot(survey(servers), 1000 * S + round(apart_s * S), before), CODES)
    finally:
        for server in servers:
            server.__exit__()


def codes(found: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(each.code, each.severity.label) for each in found]


def changed(text: str, metric: str, value: float, labels: str = "") -> str:
    """Returns a text in which all samples of a metric, with labels that have a part, have another value."""
    text, changes = re.subn(rf"(?m)^({re.escape(metric)}(?:{{[^}}]*{labels}[^}}]*}})?) \S+$", rf"\g<1> {value}", text)
    assert changes
    return text


HEALTHY = ("sglang-prefill", "sglang-decode", "vllm-prefill", "vllm-decode", "nixl")


def test_healthy_servers_have_no_findings() -> None:
    assert findings(*((recorded(name), recorded(name)) for name in HEALTHY)) == []


def test_a_decode_server_that_stands_still() -> None:
    (found,) = findings((recorded("sglang-prefill-stuck-1"), recorded("sglang-prefill-stuck-2")))
    assert codes([found]) == [("KV_QUEUE_STUCK", "warning")]
    assert found.evidence["metric"] == "sglang:http_requests_active"
    assert "none left it" in found.cause


QUEUE = "sglang:num_prefill_inflight_queue_reqs"


@pytest.mark.parametrize(
    ("before", "now", "apart_s", "severity"),
    [
        (3, 5, 6.0, "warning"),
        (3, 3, 6.0, "info"),  # SGLang may not have published it since
        (3, 3, FAR_S, "warning"),
        (3, 2, FAR_S, None),
        (0, 5, 6.0, None),  # they have just come
    ],
)
def test_a_queue_that_nothing_leaves(before: int, now: int, apart_s: float, severity: str | None) -> None:
    text = recorded("sglang-prefill")
    found = findings((changed(text, QUEUE, before), changed(text, QUEUE, now)), apart_s=apart_s)
    assert codes(found) == ([] if severity is None else [("KV_QUEUE_STUCK", severity)])


def test_a_queue_that_grows_although_requests_leave_it() -> None:
    text = recorded("sglang-prefill")
    done = changed(text, "sglang:num_requests_total", 9)
    done = changed(done, "sglang:generation_tokens_total", 9)
    assert codes(findings((changed(text, QUEUE, 3), changed(done, QUEUE, 20)))) == [("KV_QUEUE_STUCK", "info")]
    assert findings((changed(text, QUEUE, 3), changed(done, QUEUE, 6))) == []


def test_a_forward_that_takes_long_is_no_stuck_queue() -> None:
    text = changed(recorded("sglang-prefill"), "sglang:num_queue_reqs", 3)
    computing = changed(text, "sglang:realtime_tokens_total", 99_999)
    assert findings((text, computing), apart_s=FAR_S) == []


def test_a_prefill_server_that_is_gone() -> None:
    found = findings((recorded("sglang-decode-failed-1"), recorded("sglang-decode-failed-2")))
    assert ("KV_REQUESTS_FAILED", "warning") in codes(found)
    failed = next(each for each in found if each.code == "KV_REQUESTS_FAILED")
    assert "4 requests whose other half did not come" in failed.cause


def test_reads_of_vllm_from_a_server_that_is_gone() -> None:
    (found,) = findings((recorded("vllm-decode-failed-1"), recorded("vllm-decode-failed-2")))
    assert codes([found]) == [("KV_REQUESTS_FAILED", "warning")]
    assert "4 requests that ended with an error" in found.cause
    assert "8 transfers, handshakes or notifications" in found.cause


def test_leases_that_expire() -> None:
    (found,) = findings((recorded("vllm-prefill"), recorded("vllm-prefill-expired")))
    assert codes([found]) == [("KV_HOLD_EXPIRED", "warning")]
    assert "2 prompts that decode did not read in time" in found.cause


def test_what_was_counted_before_is_information() -> None:
    (found,) = findings((recorded("vllm-prefill-expired"), recorded("vllm-prefill-expired")))
    assert codes([found]) == [("KV_HOLD_EXPIRED", "info")]
    assert "since its start, none of them within 6" in found.cause


def test_a_server_that_started_again_counts_anew() -> None:
    before = changed(recorded("vllm-prefill-expired"), "process_start_time_seconds", 5)
    assert codes(findings((before, recorded("vllm-prefill-expired")))) == [("KV_HOLD_EXPIRED", "info")]


def test_requests_without_tokens() -> None:
    text = recorded("vllm-decode")
    now = changed(text, "vllm:request_success_total", 12, 'reason="stop"')
    (found,) = findings((text, now))
    assert codes([found]) == [("KV_NO_TOKENS", "warning")]
    assert "12 finished requests" in found.cause
    assert findings((text, changed(now, "vllm:generation_tokens_total", 99))) == []


def test_aborted_requests_need_no_tokens() -> None:
    text = recorded("vllm-decode")
    assert findings((text, changed(text, "vllm:request_success_total", 12, 'reason="abort"'))) == []


def test_prompts_that_decode_computes_itself() -> None:
    text = recorded("vllm-decode")
    computed = changed(text, "vllm:prompt_tokens_by_source_total", 5000, 'source="local_compute"')
    (found,) = findings((text, computed))
    assert codes([found]) == [("KV_RECOMPUTED", "warning")]
    assert "computed 5000 prompt tokens" in found.cause
    few = changed(text, "vllm:prompt_tokens_by_source_total", 3, 'source="local_compute"')
    assert findings((text, few)) == []


def test_a_server_with_a_cache_of_kv_is_no_decode_server() -> None:
    """LMCache and offloading count their tokens as external, too."""
    text = "".join(line for line in recorded("vllm-decode").splitlines(True) if "vllm:nixl_" not in line)
    computed = changed(text, "vllm:prompt_tokens_by_source_total", 5000, 'source="local_compute"')
    (found,) = findings((text, computed))
    assert codes([found]) == [("KV_RECOMPUTED", "info")]
    with Exporter(text) as server:
        (agent,) = survey([server]).agents
    assert agent.data["status"]["role"] == ""


@pytest.mark.parametrize(("apart_s", "severity"), [(6.0, "info"), (FAR_S, "warning")])
def test_one_long_request_is_no_stuck_queue(apart_s: float, severity: str) -> None:
    text = changed(recorded("vllm-decode"), "vllm:num_requests_waiting_by_reason", 1, 'reason="deferred"')
    assert codes(findings((text, text), apart_s=apart_s)) == [("KV_QUEUE_STUCK", severity)]


def test_preempted_requests() -> None:
    text = recorded("vllm-decode")
    (found,) = findings((text, changed(text, "vllm:num_preemptions_total", 7)))
    assert codes([found]) == [("KV_RECOMPUTED", "warning")]


def moved(text: str, requests: int, nbytes: float, us: float) -> str:
    prefill = 'agent_name="prefill-0"'
    text = changed(text, "agent_tx_bytes_total", nbytes, prefill)
    text = changed(text, "agent_tx_requests_num_total", requests, prefill)
    return changed(text, "agent_xfer_time_total", us, prefill)


def test_transfers_that_become_slow() -> None:
    before = moved(recorded("nixl"), 1000, 64e9, 2e6)  # 32 GB/s
    (found,) = findings((before, moved(before, 1100, 70.4e9, 8.4e6)))  # 1 GB/s
    assert codes([found]) == [("KV_LANE_SLOW", "warning")]
    assert found.evidence["gb_per_s"] == 1.0
    assert "32 times slower than its transfers before" in found.cause
    assert findings((before, moved(before, 1100, 70.4e9, 2.2e6))) == []


def test_transfers_of_other_sizes_are_not_compared() -> None:
    """Small ones have a lower rate, on the same network."""
    before, now = moved(recorded("nixl"), 1000, 64e9, 2e6), moved(recorded("nixl"), 2000, 68e9, 4e6)
    assert findings((before, now)) == []


def test_transfers_that_are_slower_than_those_of_other_servers() -> None:
    fast, slow = moved(recorded("nixl"), 1000, 64e9, 2e6), moved(recorded("nixl"), 1000, 64e9, 2e7)
    (found,) = findings((fast, fast), (fast, fast), (slow, slow))
    assert (found.code, found.severity) == ("KV_LANE_SLOW", Severity.WARNING)
    assert "those of the other servers" in found.cause


def test_large_transfers_that_are_always_slow() -> None:
    slow = moved(recorded("nixl"), 1000, 64e9, 2e8)
    (found,) = findings((slow, slow))
    assert codes([found]) == [("KV_LANE_SLOW", "info")]
    assert "a network of 10 Gbit/s" in found.cause
