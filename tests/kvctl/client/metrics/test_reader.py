"""Endpoints of metrics as rows of agents: what engines export, and nothing that they do not."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.client.endpoints import endpoint_of
from kvctl.client.faults import FaultCode
from kvctl.client.fleet import Fleet, Survey
from kvctl.client.health_reads import HEALTH_CALLS
from kvctl.client.metrics.reader import MetricsReader
from kvctl.client.metrics.scrape import parse
from kvctl.errors import CliError
from kvctl_agent.contract.snapshots import Status
from tests.support.exporter import Exporter, recorded
from tests.support.http_answers import serving

S = 1_000_000_000


def survey(*endpoints: str, calls: Any = HEALTH_CALLS, **labels: str) -> Survey:
    with Fleet(endpoints, labels, timeout_ns=60 * S) as fleet:
        return fleet.survey(calls)


@pytest.mark.parametrize(
    ("text", "remote"),
    [
        ("metrics://node-0:30000", "http://node-0:30000/metrics"),
        ("http://node-0:30000", "http://node-0:30000/metrics"),
        ("http://node-0:30000/", "http://node-0:30000/metrics"),
        ("https://node-0/engine/metrics?name[]=a", "https://node-0/engine/metrics?name[]=a"),
        ("metrics://[fd00::5]:8000", "http://[fd00::5]:8000/metrics"),
    ],
)
def test_addresses(text: str, remote: str) -> None:
    endpoint = endpoint_of(text)
    assert (endpoint.remote, endpoint.metrics, endpoint.path) == (remote, True, None)


@pytest.mark.parametrize(
    "text",
    [
        "metrics://node-0",
        "metrics://",
        "http://",
        "http://node-0:99999",
        "http://a:b@node-0:80",
        "http://node-0:80/#part",
        "http://node-0:80/a b",
        "http://node-0:80/\r\nX: y",
        "http://[fd00::5",
        "http://ü:80",
    ],
)
def test_malformed_addresses(text: str) -> None:
    with pytest.raises(CliError, match="write metrics://host:port"):
        endpoint_of(text)


def status_of(name: str) -> Any:
    with Exporter(recorded(name)) as server:
        found = survey(server.url)
    assert not found.faults
    (agent,) = found.agents
    assert agent.name == server.place
    status = agent.data["status"]
    assert status.keys() == Status.__annotations__.keys()
    return status


def test_a_prefill_server_of_sglang() -> None:
    status = status_of("sglang-prefill")
    assert status["role"] == "prefill"
    assert status["integration"]["engine"] == "sglang"
    assert status["rooms_finished_total"] == {"Success": 6}  # it exports no failures before the first
    assert status["bytes_total"] == round(2.03125 * (1 << 20))
    assert status["rate"]["gb_per_s"] == pytest.approx(2.03125 * (1 << 20) / 986_328_017, rel=1e-6)
    assert status["latency"]["count"] == 5
    assert 0 < status["latency"]["p50_ns"] < status["latency"]["p99_ns"] <= S
    assert status["uptime_ns"] is None
    assert status["ring"] is None


def test_failed_requests_are_not_done() -> None:
    """SGLang counts them among all that ended."""
    assert status_of("sglang-decode-failed-2")["rooms_finished_total"] == {"Success": 42, "Failed": 4}


def test_servers_of_vllm() -> None:
    status = status_of("vllm-decode")
    assert status["role"] == "decode"
    assert status["rooms_finished_total"] == {"Success": 3, "Failed": 0}
    assert (status["bytes_total"], status["latency"]["count"]) == (3_932_160, 3)
    assert status["uptime_ns"] > 0
    assert status_of("vllm-prefill")["role"] == ""  # nothing tells before its first transfer


def test_the_exporter_of_nixl() -> None:
    status = status_of("nixl")
    assert (status["bytes_total"], status["rooms"], status["rooms_finished_total"]) == (12_582_912, {}, {"Failed": 0})
    assert status["rate"]["gb_per_s"] == pytest.approx(12_582_912 / 279_674_000)


def test_a_worker_of_dynamo_with_its_engine() -> None:
    text = (
        '# TYPE dynamo_component_errors_total counter\ndynamo_component_errors_total{worker_type="decode"} 2\n'
        + recorded("vllm-prefill")
    )
    with Exporter(text) as server:
        (agent,) = survey(server.url).agents
    assert agent.data["status"]["role"] == "decode"
    assert agent.data["status"]["rooms_finished_total"]["Failed"] == 2


def test_the_rate_is_that_since_the_previous_reading() -> None:
    before = recorded("vllm-decode")
    after = before.replace('sum{engine="0",model_name="tiny"} 0.128529', 'sum{engine="0",model_name="tiny"} 1.128529')
    after = after.replace(
        'sum{engine="0",model_name="tiny"} 3.93216e+06', 'sum{engine="0",model_name="tiny"} 4.93216e+06'
    )
    with Exporter(before) as server, Fleet([server.url], {}, timeout_ns=60 * S) as fleet:
        fleet.survey(HEALTH_CALLS)
        server.text = after
        (agent,) = fleet.survey(HEALTH_CALLS).agents
    assert agent.data["status"]["rate"]["gb_per_s"] == pytest.approx(0.001)


@given(
    st.lists(
        st.sampled_from(
            [
                "sglang:num_queue_reqs",
                "sglang:num_requests_total",
                "process_start_time_seconds",
                "sglang:kv_transfer_total_mb_sum",
                "sglang:kv_transfer_latency_ms_sum",
                'sglang:kv_transfer_latency_ms_bucket{le="1e305"}',
                'sglang:kv_transfer_latency_ms_bucket{le="1e15"}',
                'sglang:kv_transfer_latency_ms_bucket{le="-1e14"}',
                'sglang:kv_transfer_latency_ms_bucket{le="+Inf"}',
                'sglang:kv_transfer_latency_ms_bucket{le="nan"}',
            ]
        ),
        unique=True,
    ),
    st.sampled_from(["1", "0", "-1e15", "1e15", "1e305", "nan", "-Inf", "7.5"]),
)
def test_any_numbers_are_answers_in_json(names: list[str], value: str) -> None:
    lines = ["# TYPE sglang:kv_transfer_latency_ms histogram", "# TYPE sglang:kv_transfer_total_mb histogram"]
    rows = parse("\n".join([*lines, *(f"{name} {value}" for name in names), "sglang:other 1", ""]).encode())
    answers = MetricsReader()._answers(endpoint_of("metrics://server:1"), rows)
    orjson.dumps(answers)  # whose integers have 64 bits
    uptime_ns = answers["status"]["uptime_ns"]
    assert uptime_ns is None or 0 <= uptime_ns <= time.time_ns()


@pytest.mark.parametrize("location", ["http://[", "/\x80"])
def test_one_odd_server_is_a_fault_of_its_own(location: str) -> None:
    reply = f"HTTP/1.1 302 Found\r\nLocation: {location}\r\n\r\n".encode("latin-1")
    with Exporter(recorded("nixl")) as server, serving(reply) as odd:
        found = survey(server.url, f"metrics://{odd}")
    assert [agent.name for agent in found.agents] == [server.place]
    assert [(fault.agent, fault.code) for fault in found.faults] == [(odd, FaultCode.PROTOCOL)]


def test_an_error_of_ours_is_a_fault_of_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl.client.metrics.reader.scrape", lambda *_: [{}])
    (fault,) = survey("metrics://127.0.0.1:9").faults
    assert (fault.code, fault.message) == (FaultCode.PROTOCOL, "its answer cannot be read: KeyError: \"'name'\"")


def test_secrets_of_a_url_are_not_shown() -> None:
    with Exporter(recorded("nixl")) as server:
        (agent,) = survey(f"{server.url}/metrics?token=hunter2").agents
    assert agent.data["status"]["metrics_url"] == f"{server.url}/metrics"
    with pytest.raises(CliError, match="write metrics://host:port") as caught:
        endpoint_of("http://user:hunter2@h:1/?token=hunter2")
    assert "hunter2" not in str(caught.value)


def test_many_at_once() -> None:
    with Exporter(recorded("sglang-decode")) as server:
        found = survey(*(f"{server.url}/metrics?{number}" for number in range(40)))
    assert not found.faults
    assert len(found.agents) == 1  # one process, however many addresses
