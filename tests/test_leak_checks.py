"""The checks of conftest.py can fail: each kind of thing left behind fails the test that left it, and no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

LEAKY = """
import os, signal, socket, subprocess, threading, zmq

kept = []

def test_thread():
    threading.Thread(target=kept_event.wait, name="forgotten", daemon=True).start()

def test_child():
    kept.append(subprocess.Popen(["sleep", "30"]))

def test_child_is_over():
    kept[-1].kill()
    kept[-1].wait()

def test_descriptor():
    os.open("/dev/null", os.O_RDONLY)

def test_socket():
    kept.append(socket.socket())
    kept[-1].bind(("127.0.0.1", 0))

def test_zmq_socket(zmq_context):
    kept.append(zmq_context.socket(zmq.DEALER))

def test_zmq_context():
    kept.append(zmq.Context())
    kept.append(kept[-1].socket(zmq.DEALER))

def test_admin_socket(socket_dir):
    assert os.environ["KVCTL_SOCKET_DIR"] == str(socket_dir)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(socket_dir / ("n" * 60 + ".sock")))

def test_tidy(socket_dir, zmq_context):
    thread = threading.Thread(target=print)
    thread.start()
    with zmq_context.socket(zmq.DEALER), open("/dev/null"):
        subprocess.run(["true"], check=True)

kept_event = threading.Event()
"""


def test_what_a_test_leaves_behind_fails_it(tmp_path: Path) -> None:
    conftest = Path(__file__).with_name("conftest.py").read_text()
    impatient = re.sub(r"^(LEAK_GRACE_S|ZMQ_TERM_S) = .*", r"\1 = 0.5", conftest, flags=re.MULTILINE)
    assert impatient != conftest
    (tmp_path / "conftest.py").write_text(impatient)
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-o", "addopts=", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    errors = {line.split("::")[1].split()[0] for line in run.stdout.splitlines() if line.startswith("ERROR ")}
    assert errors == {
        "test_thread",
        "test_child",
        "test_descriptor",
        "test_socket",
        "test_zmq_socket",
        "test_zmq_context",
        "test_admin_socket",
    }
    for named in (
        "thread forgotten",
        "sleep 30",
        "/dev/null",
        "AF_INET SOCK_STREAM from ('127.0.0.1', ",
        "socket was still open",
        "anon_inode",
        f"{'n' * 60}.sock",
    ):
        assert named in run.stdout
