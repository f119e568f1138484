"""`kvctl bench --engine sglang` with real servers, one side after another."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

from tests.sglang_servers.conftest import ENVIRONMENT
from tests.support.observers import end_observer

# Four starts of servers, one of which fails, beside other work.
DEADLINE_S = 1100
SIDES = ("nixl", "kvctl-pipelined/KVCTL_PIPELINE_MIN_TOKENS=64", "kvctl/KVCTL_TRANSPORT=none")


def test_sides_are_measured_and_compared_and_one_that_fails_is_named(python: Path, folder: Path) -> None:
    at = folder / "bench"
    (at / "sockets").mkdir(parents=True)
    command = [str(python), "-m", "kvctl", "bench", "--engine", "sglang", "--device", "cpu", "--sides", ",".join(SIDES)]
    command += ["--tokens", "200", "--concurrency", "2", "--rooms", "4", "--repeat", "1", "--output-tokens", "4"]
    done = subprocess.run(
        [*command, "-o", "json", "--save", str(at / "saved.json")],
        env={**os.environ, **ENVIRONMENT, "KVCTL_SOCKET_DIR": str(at / "sockets"), "TMPDIR": str(at)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    end_observer(at / "sockets")
    assert done.returncode == 1, done.stderr
    rows = json.loads(done.stdout)["data"]
    assert [row["side"] for row in rows] == ["undivided", *SIDES[:-1]]
    for row in rows:
        assert row["verified"] is True, done.stderr
        assert 0 < row["ttft_ms"]["mean"] < DEADLINE_S * 1e3
        assert row["tpot_ms"]["mean"] > 0
        assert row["output_tokens_per_s"] > 0
    assert all(row["overhead_ratio"] is not None for row in rows[1:])
    saved = json.loads((at / "saved.json").read_text())
    assert saved["runs"] == rows
    assert [line.partition(": ")[0] for line in saved["problems"]] == [SIDES[-1]] * len(saved["problems"]) != []
    assert "kvctl: kvctl/KVCTL_TRANSPORT=none: " in done.stderr
    log, *_ = [Path(name) for name in re.findall(r"--- the end of (\S+\.log)", done.stderr)]
    assert "KVCTL_TRANSPORT" in log.read_text()
    assert [path.name for path in at.iterdir() if path.name.startswith("kvctl-bench-")] == [log.parents[1].name]
