"""Commands about servers without an agent, by their metrics: `--url` of doctor, and `-e URL`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.exporter import Exporter, closed_port, recorded


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause between readings, and time limits that a busy machine keeps."""
    monkeypatch.setattr("kvctl.commands.health_query.METRICS_PAUSE_S", 0.0)
    monkeypatch.setattr("kvctl.commands.health_query._FIRST_TIMEOUT_NS", 60_000_000_000)
    monkeypatch.setenv("KVCTL_TIMEOUT", "60s")


@pytest.fixture
def servers() -> Iterator[tuple[Exporter, Exporter]]:
    with Exporter(recorded("vllm-prefill-expired")) as prefill, Exporter(recorded("vllm-decode")) as decode:
        yield prefill, decode


def test_doctor(servers: tuple[Exporter, Exporter], kvctl: Any) -> None:
    prefill, decode = servers
    outcome = kvctl("doctor", "--url", prefill.url, "-e", f"metrics://{decode.place}", "-o", "table")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("i 1 info   2 agents\n")
    assert "KV_HOLD_EXPIRED" in outcome.out
    assert "this host" not in outcome.out


def test_doctor_of_a_server_that_fails(kvctl: Any) -> None:
    with Exporter(recorded("vllm-decode-failed-1")) as server:
        server.later = recorded("vllm-decode-failed-2")
        outcome = kvctl("doctor", "-e", server.url, "-o", "json")
    (found,) = outcome.data
    assert (outcome.code, found["code"], found["severity"]) == (1, "KV_REQUESTS_FAILED", "warning")
    assert found["next"] == f"kvctl metrics show -e {server.url}/metrics"


def test_doctor_without_an_answer(kvctl: Any) -> None:
    place = f"127.0.0.1:{closed_port()}"
    outcome = kvctl("doctor", "--url", f"{place}/metrics?token=hunter2", "-o", "table")
    assert outcome.code == 3
    assert f"{place}: cannot connect: Connection refused" in outcome.err
    assert outcome.out.endswith(f"next: curl -m 10 http://{place}/metrics\n")


def test_status(servers: tuple[Exporter, Exporter], kvctl: Any) -> None:
    outcome = kvctl("status", *(f"-emetrics://{server.place}" for server in servers), "-o", "table")
    assert (outcome.code, outcome.err) == (0, "")
    assert "decode   1 rank answered, vllm metrics" in outcome.out
    assert "no role  1 rank answered, vllm metrics" in outcome.out


def test_the_context_has_them(servers: tuple[Exporter, Exporter], kvctl: Any) -> None:
    prefill, decode = servers
    assert kvctl("context", "add", "stock", "-e", f"metrics://{prefill.place}", "-e", decode.url, "--use").code == 0
    outcome = kvctl("status", "-o", "json")
    assert {row["name"] for row in outcome.data} == {prefill.place, decode.place}
    assert kvctl("health", "-o", "json").code == 0
    assert kvctl("check", "all").code == 0


def test_the_others_say_what_is_missing(servers: tuple[Exporter, Exporter], kvctl: Any, tmp_path: Any) -> None:
    at = ("-e", servers[0].url)
    for command in (("rooms",), ("peers",), ("staging",), ("events",), ("nics",), ("layers",), ("drain", "--yes")):
        outcome = kvctl(*command, *at)
        assert outcome.code == 1, command
        assert "exports only metrics" in outcome.err, command
    assert "vllm:nixl_num_kv_expired_reqs_total" in kvctl("metrics", "show", *at, "-o", "table").out
    assert kvctl("agents", *at).code == 0
    assert kvctl("top", "--snapshot", str(tmp_path / "top.txt"), *at).code == 0


def test_a_recording_has_them(servers: tuple[Exporter, Exporter], kvctl: Any, tmp_path: Any) -> None:
    file = str(tmp_path / "fleet.kvrec")
    at = [f"-e{server.url}" for server in servers]
    assert kvctl("record", file, *at).code == 0
    live, recorded_ = (kvctl("status", *more, "-o", "json").data for more in (at, ["--from", file]))
    assert [row["bytes_total"] for row in recorded_] == [row["bytes_total"] for row in live]
