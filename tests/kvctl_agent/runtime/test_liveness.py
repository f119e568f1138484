"""Proof of death: a process that is gone or a zombie writes nothing; everything else is alive.

Each line of the list in docs/reliability.md that proves nothing has a test here, or in `test_replaced_writers.py`.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvctl_agent import gil
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


def in_namespaces(options: str, *setup: str, program: str) -> str:
    """Runs a Python program in new namespaces, after shell commands; returns its output. Skips without the right to."""
    script = " && ".join([*setup, 'exec "$0" -c "$1"'])
    code = f"from kvctl_agent.runtime.liveness import host_identity, is_dead\nimport os, subprocess\n{program}"
    try:
        allowed = subprocess.run(["unshare", *options.split(), "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip(f"needs root: unshare {options} is not permitted here")
    command = ["unshare", *options.split(), "sh", "-c", script, sys.executable, code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_an_invisible_process_is_alive() -> None:
    """With hidepid=2 a process of another user has no directory in /proc, as if it had ended."""
    program = (
        "first = subprocess.Popen(['sleep', '60'])\n"
        "if (child := os.fork()) == 0:\n"
        "    os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "    assert not os.path.exists(f'/proc/{first.pid}')\n"
        "    print(is_dead(first.pid), flush=True); os._exit(0)\n"
        "os.waitpid(child, 0); first.kill(); first.wait()\n"
        "print(is_dead(first.pid))"
    )
    assert in_namespaces("-m", "mount -t proc -o hidepid=2 proc /proc", program=program) == "False\nTrue\n"


def test_without_proc_only_the_kernel_tells_that_a_process_is_gone() -> None:
    program = (
        "process = subprocess.Popen(['sleep', '60'])\n"
        "print(is_dead(process.pid))\n"
        "process.kill(); os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)\n"
        "print(is_dead(process.pid))\n"  # a zombie, which cannot be told from a process that runs
        "process.wait(); print(is_dead(process.pid), host_identity())"
    )
    *alive, identity = in_namespaces("-m", "mount -t tmpfs tmpfs /proc", program=program).split()
    assert alive == ["False", "False", "True"]
    other = in_namespaces("-m", "mount -t tmpfs tmpfs /proc", program="print(host_identity())").strip()
    assert len({identity, other, host_identity()}) == 3, "it takes nobody for a process of its host"


def test_the_proc_of_another_pid_namespace_tells_nothing() -> None:
    """A container with the proc of its host: a number there is another process, or none."""
    program = (
        "process = subprocess.Popen(['sleep', '60'])\n"
        "print(is_dead(process.pid))\n"
        "process.kill(); process.wait(); print(is_dead(process.pid), host_identity())"
    )
    *alive, identity = in_namespaces("-m -p -f --propagation unchanged", program=program).split()
    assert alive == ["False", "True"]
    assert identity != host_identity(), "in another PID namespace, which numbers processes anew"


def test_a_zombie_in_the_proc_of_another_pid_namespace_is_not_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"/proc/{os.getpid()}/stat": b"7 (x) Z" + b" 0" * 50, "/proc/self/status": b"Name:\tx\nNSpid:\t4711\t7\n"}
    monkeypatch.setattr(gil, "read_start", files.__getitem__)
    assert not is_dead(os.getpid())
    files["/proc/self/status"] = f"Name:\tx\nNSpid:\t{os.getpid()}\n".encode()
    assert is_dead(os.getpid())


@pytest.mark.parametrize("pid", [0, -1, -(1 << 40), 1 << 31, (1 << 62) - 1])
def test_a_number_that_is_no_pid_proves_nothing(pid: int) -> None:
    assert not is_dead(pid)


def test_a_number_that_is_in_use_again_proves_nothing() -> None:
    """By another process, or by a thread of one, which has a number of the same kind."""
    reading, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (reading.set(), ended.wait(60)))
    thread.start()
    reading.wait(60)
    assert thread.native_id is not None
    assert thread.native_id != os.getpid()
    assert not is_dead(thread.native_id)
    ended.set()
    thread.join()


def test_processes_of_one_host_have_one_identity() -> None:
    program = "from kvctl_agent.runtime.liveness import host_identity; print(host_identity())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == host_identity()


def test_the_control_loop_keeps_the_gil_while_it_asks() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not gave_up_the_gil(lambda: [is_dead(pid) for pid in (os.getpid(), ended.pid) * 500])
    assert gave_up_the_gil(lambda: [Path("/proc/self/stat").read_text() for _ in range(500)]), "other reads give it up"
