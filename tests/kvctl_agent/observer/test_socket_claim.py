"""Who may have a name: one living agent, in a directory that is its owner's alone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl_agent.errors import AdminError
from kvctl_agent.observer.socket_claim import Claim, ask_hello, prepare_directory
from tests.support.admin_server import AdminServer

Serve = Callable[..., AdminServer]
Connect = Callable[..., Any]  # a Client of tests.support.admin_client

SERVER = r"""
import sys, time
from pathlib import Path
from kvctl_agent.observer.server import SERVED_HERE
from tests.support.admin_server import AdminServer
from kvctl_agent.contract.commands import COMMANDS
import os
hello = lambda: {"name": "decode-0", "pid": os.getpid()}
handlers = {c.name: lambda args: 1 for c in COMMANDS if c.name not in SERVED_HERE}
server = AdminServer("decode-0", handlers, hello, Path(sys.argv[1])).start()
if "fork" in sys.argv:
    if os.fork() == 0:
        os.write(1, f"{os.getpid()}\n".encode())
        time.sleep(60)
os.write(1, b"ready\n")
time.sleep(60)
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextlib.contextmanager
def agent(directory: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own, killed at the end if it still lives."""
    command = [sys.executable, "-c", SERVER, str(directory), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class TestModes:
    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
    def test_directory_0700_and_socket_0600_whatever_the_umask(self, serve: Serve, directory: Path, umask: int) -> None:
        before = os.umask(umask)
        try:
            server = serve()
        finally:
            os.umask(before)
        assert server.path is not None
        assert mode(directory) == 0o700
        assert mode(server.path) == 0o600
        assert mode(directory / "decode-0.lock") == 0o600

    def test_an_open_directory_of_ours_is_closed(self, serve: Serve, directory: Path) -> None:
        directory.mkdir()
        (directory / "old.sock").touch()
        directory.chmod(0o777)
        serve()
        assert mode(directory) == 0o700

    def test_an_open_directory_with_other_things_in_it_is_left_alone(self, directory: Path) -> None:
        directory.mkdir()
        directory.chmod(0o755)
        (directory / "important.txt").touch()
        with pytest.raises(AdminError, match=r"mode 0755.*important\.txt.*KVCTL_SOCKET_DIR"):
            prepare_directory(directory)
        assert mode(directory) == 0o755

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
    def test_somebody_elses_directory_is_refused(self, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        os.chown(directory, 12345, -1)
        with pytest.raises(AdminError, match="belongs to uid 12345, this agent runs as uid 0"):
            Claim("decode-0", directory)
        assert list(directory.iterdir()) == []

    def test_a_link_in_its_place_is_refused(self, directory: Path, tmp_path: Path) -> None:
        directory.symlink_to(tmp_path)
        with pytest.raises(AdminError, match="not a link"):
            Claim("decode-0", directory)
        assert list(tmp_path.iterdir()) == []

    def test_a_link_in_place_of_the_lock_file_is_refused(self, directory: Path, tmp_path: Path) -> None:
        directory.mkdir(mode=0o700)
        victim = tmp_path / "victim"
        victim.write_text("precious")
        (directory / "decode-0.lock").symlink_to(victim)
        with pytest.raises(AdminError, match="cannot open the lock file"):
            Claim("decode-0", directory)
        assert victim.read_text() == "precious"

    def test_a_file_in_its_place_is_refused(self, directory: Path) -> None:
        directory.touch()
        with pytest.raises(AdminError, match="admin socket directory"):
            Claim("decode-0", directory)


class TestNames:
    def test_the_longest_path_works_and_one_more_byte_is_refused(
        self, serve: Serve, connect: Connect, directory: Path
    ) -> None:
        room = 107 - len(str(directory)) - len("/.sock")
        assert connect(serve("n" * room)).ask("status")["ok"]
        with pytest.raises(AdminError, match="at most 107"):
            serve("n" * (room + 1))

    @pytest.mark.parametrize("name", ["", "..", "a/b"])
    def test_a_name_that_is_no_file_name(self, serve: Serve, name: str) -> None:
        with pytest.raises(AdminError, match="file name"):
            serve(name)


class TestOneHolder:
    def test_a_second_agent_is_refused_and_the_first_keeps_serving(self, serve: Serve, connect: Connect) -> None:
        first = serve()
        client = connect(first)
        expected = rf"an agent named decode-0 runs already, pid {os.getpid()} \(it answers\)"
        with pytest.raises(AdminError, match=expected):
            serve()
        assert client.ask("status")["ok"]
        assert connect(first).ask("status")["ok"]

    def test_a_served_name_whose_lock_file_was_removed_is_still_refused(
        self, serve: Serve, connect: Connect, directory: Path
    ) -> None:
        first = serve()
        (directory / "decode-0.lock").unlink()
        with pytest.raises(AdminError, match=rf"answers at .*decode-0\.sock, pid {os.getpid()}"):
            serve()
        assert connect(first).ask("status")["ok"]

    def test_a_release_leaves_the_files_of_a_later_claim(self, directory: Path) -> None:
        first = Claim("decode-0", directory)
        (directory / "decode-0.lock").unlink()
        second = Claim("decode-0", directory)
        second.path.touch()
        first.release()
        assert second.path.exists()
        with pytest.raises(AdminError, match="runs already"):
            Claim("decode-0", directory)
        second.release()
        assert not second.path.exists()

    def test_a_stopped_agent_keeps_its_name(self, serve: Serve, directory: Path) -> None:
        with agent(directory) as process:
            assert line(process) == "ready"
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # it may answer once more before the signal reaches it
            with pytest.raises(AdminError, match=rf"pid {process.pid} \(it does not answer"):
                serve()

    def test_of_many_that_start_at_once_one_wins(self, directory: Path) -> None:
        won: list[Claim] = []
        lost: list[AdminError] = []
        barrier = threading.Barrier(8)

        def claim() -> None:
            barrier.wait()
            try:
                won.append(Claim("decode-0", directory))
            except AdminError as error:
                lost.append(error)

        threads = [threading.Thread(target=claim) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 7)
        won[0].release()
        assert list(directory.iterdir()) == []


class TestTakeOver:
    def test_after_kill_9(self, serve: Serve, connect: Connect, directory: Path) -> None:
        with agent(directory) as process:
            assert line(process) == "ready"
            process.kill()
            process.wait()
        assert (directory / "decode-0.sock").exists()
        server = serve()
        assert connect(server).ask("hello")["data"]["pid"] == os.getpid()
        assert mode(directory / "decode-0.sock") == 0o600

    def test_an_agent_that_starts_removes_what_others_that_are_gone_have_left(
        self, serve: Serve, directory: Path
    ) -> None:
        with agent(directory) as process:
            assert line(process) == "ready"
            serve("decode-1")
            assert (directory / "decode-0.sock").exists()  # it lives
            process.kill()
            process.wait()
        serve("decode-2")
        assert sorted(path.name for path in directory.glob("*.sock")) == ["decode-1.sock", "decode-2.sock"]
        assert sorted(path.name for path in directory.glob("*.lock")) == ["decode-1.lock", "decode-2.lock"]

    def test_a_child_of_the_dead_does_not_keep_the_name(self, serve: Serve, connect: Connect, directory: Path) -> None:
        with agent(directory, "fork") as process:
            lines = {line(process), line(process)}
            (child,) = (int(text) for text in lines if re.fullmatch(r"\d+", text))
            try:
                process.kill()
                process.wait()
                assert connect(serve()).ask("hello")["data"]["pid"] == os.getpid()
            finally:
                os.kill(child, signal.SIGKILL)

    def test_ping_of_nothing_waits_for_nobody(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "file.sock").touch()
        begin = time.monotonic()
        for name in ("none.sock", "file.sock"):
            assert ask_hello(directory / name, timeout_ms=600_000) is None
        assert time.monotonic() - begin < 300

    def test_closing_after_the_directory_is_gone(self, serve: Serve, directory: Path) -> None:
        server = serve()
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        server.close()

    def test_closing_removes_only_ones_own(self, serve: Serve, directory: Path) -> None:
        serve("decode-1")
        serve("decode-0").close()
        assert sorted(path.name for path in directory.iterdir()) == ["decode-1.lock", "decode-1.sock"]
