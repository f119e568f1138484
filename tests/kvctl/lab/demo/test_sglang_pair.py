"""`kvctl demo --engine sglang` where its servers do not start."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from kvctl.lab.demo import sglang_pair
from kvctl.lab.demo.sglang_servers import ServerError

# As argparse: the usage of hundreds of options, and then the error.
SERVER = """#!/bin/sh
echo "kvctl plugin not loaded, SGLang is unchanged: the reason"
for n in 1 2 3 4 5 6 7 8 9 10; do for m in 1 2 3 4 5; do echo "                    [--option OPTION]"; done; done
echo "server: error: invalid choice: 'kvctl'"
exit 2
"""


def test_the_reason_is_told_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = "SGLang 0.5.23 cannot be imported: ModuleNotFoundError: No module named 'torchvision'"
    monkeypatch.setattr(sglang_pair, "sglang_problem", lambda python, environ: cause)
    said: list[str] = []
    with pytest.raises(ServerError, match="No module named 'torchvision'; docs/sglang"):
        sglang_pair.run_pair(said.append)
    assert said == []


def test_the_log_of_a_server_that_ends_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(SERVER)
    python.chmod(0o755)
    monkeypatch.setattr(sglang_pair, "sglang_problem", lambda python, environ: "")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ServerError) as raised:
        sglang_pair.run_pair(lambda line: None)
    text = str(raised.value)
    assert "the reason" in text, "not cut off by the usage of all options"
    assert "invalid choice: 'kvctl'" in text
    (folder,) = tmp_path.glob("kvctl-sglang-*")
    assert f"logs are kept in {folder}" in text
    assert any("[--option OPTION]" in log.read_text() for log in folder.glob("*.log"))


def test_nothing_is_left_of_a_demo_that_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(line: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sglang_pair, "sglang_problem", lambda python, environ: "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        sglang_pair.run_pair(interrupted)
    assert list(tmp_path.iterdir()) == []


# Answers /health and holds each other request, as a prefill server does whose decode server has died.
HOLDING = """#!{python}
import os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
arguments = sys.argv
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        if "decode" in arguments:
            os._exit(9)
        time.sleep(600)
    def log_message(self, *_): ...
ThreadingHTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_that_ends_later_ends_the_demo_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the request at the other server has ended, after minutes."""
    python = tmp_path / "python"
    python.write_text(HOLDING.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(sglang_pair, "sglang_problem", lambda python, environ: "")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    with pytest.raises(ServerError, match="decode ended with 9"):
        sglang_pair.run_pair(said.append)
    assert len(said) == 2, said
