"""`kvctl logs`: known failures in logs, for people and scripts."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kvctl.logs.test_signatures import LINES


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "decode.log"
    path.write_text("started\n" + LINES["sglang-prefill-lost"] + "\n" + LINES["vllm-lease-expired"] + "\n")
    return path


def test_the_page(log: Path, kvctl: Any) -> None:
    outcome = kvctl("logs", str(log), "-o", "table")
    assert (outcome.code, outcome.err) == (1, "")
    lines = outcome.out.splitlines()
    assert lines[0] == "✗ 1 critical, 1 warning   1 file"
    assert lines[2] == f"1. ✗ critical  sglang-prefill-lost  {log}:2"
    assert "  report    https://github.com/sgl-project/sglang/pull/6263" in lines


def test_nothing_found(tmp_path: Path, kvctl: Any) -> None:
    (tmp_path / "good.log").write_text("all is well\n")
    outcome = kvctl("logs", str(tmp_path / "good.log"), "-o", "table")
    assert (outcome.code, outcome.out, outcome.err) == (0, "✓ no known failure   1 file\n", "")


def test_a_filter_that_hides_all(log: Path, kvctl: Any) -> None:
    outcome = kvctl("logs", str(log), "-o", "table", "--filter", "engine=ucx")
    assert outcome.code == 1
    assert outcome.out.splitlines()[0] == "✗ 1 critical, 1 warning   1 file"
    assert "no rows match --filter" in outcome.out


def test_from_a_pipe(log: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvctl", "logs", "-", "-o", "tsv", "--columns", "code,file,line"],
        input=log.read_bytes(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, b"")
    assert done.stdout.splitlines()[1] == b"sglang-prefill-lost\t-\t2"


def test_files_that_cannot_be_read(log: Path, kvctl: Any, tmp_path: Path) -> None:
    damaged = tmp_path / "old.log.gz"
    damaged.write_bytes(gzip.compress(log.read_bytes())[:-12])
    outcome = kvctl("logs", str(damaged), str(log), "-o", "tsv", "--columns", "code,file")
    assert (outcome.code, outcome.err.count("\n")) == (7, 1)
    assert outcome.err.startswith(f"kvctl: {damaged}: its compressed data is damaged")
    assert f"sglang-prefill-lost\t{log}" in outcome.out
    outcome = kvctl("logs", str(damaged), "-o", "table")
    assert (outcome.code, "✓" in outcome.out) == (7, False)
    assert kvctl("logs", str(tmp_path / "none.log")).code == 2
    assert kvctl("logs").code == 2
    assert kvctl("logs", str(log), "-w").code == 2
