"""What an agent exports if its configuration says so: where it may listen, and what is there."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

from kvctl_agent.errors import ConfigError
from kvctl_agent.observer.exports import Exports, check_exports
from kvctl_agent.observer.fold import Fold
from kvctl_agent.observer.probes import Check
from kvctl_agent.telemetry.clock import Clock
from tests.support.folded import LIMITS


def settings(**given: Any) -> dict[str, Any]:
    return {
        "metrics_endpoint": "",
        "metrics_public": False,
        "otel_endpoint": "",
        "insecure": False,
        "host": "",
        **given,
    }


def start(name: str = "decode-0", **given: Any) -> tuple[Exports, Fold]:
    fold = Fold("decode-0", "decode", Clock(), **LIMITS)
    fold.metrics.add("kvctl_rooms_opened_total", 1)
    ready, alive = [Check("peers", "none")], [Check("control-loop")]
    return Exports(settings(**given), name, "decode", fold.metrics.snapshot, fold, lambda: ready, lambda: alive), fold


def get(exports: Exports, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(exports.metrics_url.removesuffix("/metrics") + path, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_others_may_not_reach_it_unless_that_is_wanted() -> None:
    with pytest.raises(ConfigError, match=r"can be reached from other machines.*set metrics_public"):
        start(metrics_endpoint="0.0.0.0:9400")
    for allowed in ("metrics_public", "insecure"):
        assert check_exports(settings(metrics_endpoint="0.0.0.0:9400", **{allowed: True}))


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="metrics_endpoint = 'localhost:9400' is not an address: write address:port"):
        start(metrics_endpoint="localhost:9400")


def test_nothing_is_opened_unless_it_is_asked_for() -> None:
    exports, fold = start()
    assert exports.metrics_url == ""
    assert fold.on_finish is None
    exports.close()


def test_opened_and_closed() -> None:
    exports, _ = start(metrics_endpoint="[::1]:0", host="node-7")
    try:
        assert exports.metrics_url.startswith("http://[::1]:")
        status, text = get(exports, "/metrics")
        assert status == 200
        assert 'kvctl_rooms_opened_total{agent="decode-0",host="node-7",role="decode"} 1' in text
        port = exports.metrics_url.rpartition(":")[2].removesuffix("/metrics")
        with pytest.raises(ConfigError, match=f"cannot bind metrics_endpoint .*:{port}: Address already in use"):
            start("decode-1", metrics_endpoint=f"[::1]:{port}")
    finally:
        exports.close()
        exports.close()


def test_probes_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    exports, _ = start(metrics_endpoint="127.0.0.1:0")
    try:
        assert get(exports, "/livez") == (200, "[+]control-loop ok\nlivez check passed\n")
        assert get(exports, "/readyz") == (503, "[-]peers failed: none\nreadyz check failed\n")
        assert get(exports, "/metrics")[0] == 501
    finally:
        exports.close()
