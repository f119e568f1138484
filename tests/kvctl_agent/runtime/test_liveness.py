"""Proof of death: a process that is gone or a zombie writes nothing; everything else is alive."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvctl_agent.runtime.liveness import host_identity, is_dead
from tests.support.gil import gave_up_the_gil

_SYS_EXIT = {"x86_64": 60, "aarch64": 93}[platform.machine()]  # of the calling thread alone


def test_running_and_stopped_processes_are_alive_zombies_and_reaped_ones_are_not() -> None:
    assert not is_dead(os.getpid())
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert not is_dead(process.pid)
    process.send_signal(signal.SIGSTOP)
    assert not is_dead(process.pid)
    process.kill()
    deadline = time.monotonic() + 60
    while not is_dead(process.pid):  # not reaped yet: a zombie
        assert time.monotonic() < deadline
    process.wait()
    assert is_dead(process.pid)


def test_a_process_whose_first_thread_alone_has_ended_is_alive() -> None:
    program = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start();"
        "print(flush=True); ctypes.CDLL(None).syscall(EXIT, 0)".replace("EXIT", str(_SYS_EXIT))
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    deadline = time.monotonic() + 60
    while "State:\tZ" not in Path(f"/proc/{process.pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not is_dead(process.pid)
    process.kill()
    while not is_dead(process.pid):
        assert time.monotonic() < deadline
    process.wait()
    process.stdout.close()


def test_a_name_with_brackets_and_spaces_is_read_past() -> None:
    program = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a) Z (b'); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert not is_dead(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()


def test_processes_of_one_host_have_one_identity() -> None:
    program = "from kvctl_agent.runtime.liveness import host_identity; print(host_identity())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == host_identity()


def test_the_control_loop_keeps_the_gil_while_it_asks() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not gave_up_the_gil(lambda: [is_dead(pid) for pid in (os.getpid(), ended.pid) * 500])
    assert gave_up_the_gil(lambda: [Path("/proc/self/stat").read_text() for _ in range(500)]), "other reads give it up"
